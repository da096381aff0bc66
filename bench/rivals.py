"""The rules that ours is measured against: pure functions of the same windows, each in its best reading.

All of them get the same columns: the time between two steps first, the stages in the order of the step, and, where the
moment of the last ready gradient is known, the sync stage's local part as a column of its own. Without that split a
sync stage is no candidate for them: a rule that reads its time as a rank's own takes every victim for a culprit. A rank
that recorded nothing is left out. None of the rules has a way to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sftriage.model.windows import OTHER, StageSchema, Window
from sftriage.verdict.accounting import anchored

FloatArray = NDArray[np.float64]
MAD_TO_SIGMA, MAD_SIGMAS = 1.4826, 3.5

ALARM_FRACTION = 0.05
"""Rules that come without an alarm of their own raise one from this fraction of the step on, as ours does."""


@dataclass(frozen=True, slots=True)
class Named:
    """One candidate of a rule, and what the rule ranks it by (the unit is the rule's own)."""

    rank: int
    stage: str
    score: float


@dataclass(frozen=True, slots=True)
class Said:
    """What a rule says of a window: its candidates, the first one first, and whether it raises an alarm."""

    ranked: tuple[Named, ...] = ()
    alarm: bool = False


NOTHING = Said()


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """A window as the rules see it: N complete steps × R ranks that are there × K columns, seconds."""

    names: tuple[str, ...]  # the stage of each column; more than one may have the same
    local_K: tuple[bool, ...]  # whether a rank goes through the column without waiting for another
    values_NRK: FloatArray  # durations
    rank_R: tuple[int, ...]  # the number of each rank
    sync: tuple[str, ...] = ()  # the stages that synchronise

    @property
    def step_s(self) -> float:
        return float(self.values_NRK.sum(axis=2).max(axis=1).mean())

    @property
    def empty(self) -> bool:
        return 0 in self.values_NRK.shape


Rule = Callable[[Columns, Sequence[Columns]], Said]
"""A rule gets the window and those before it."""


def columns_of(window: Window) -> Columns:
    values_NRS = window.durations_NRS
    there_R = np.isfinite(values_NRS).all(axis=2).any(axis=0)
    columns: list[tuple[str, bool, FloatArray]] = []
    if window.between_NR is not None:
        columns.append((OTHER, True, window.between_NR))
    for index, stage in enumerate(window.schema.stages):
        values_NR = values_NRS[:, :, index]
        if stage not in window.schema.sync:
            columns.append((stage, True, values_NR))
            continue
        ready_NR = window.ready_NR if stage == window.schema.sync_in_order[0] else None
        if ready_NR is not None and np.isfinite(ready_NR[:, there_R]).any():
            # Where nobody saw the moment, no part of the stage is known to be the rank's own.
            own_NR = np.where(np.isfinite(ready_NR), np.minimum(ready_NR, values_NR), 0.0)
            columns.append((stage, True, own_NR))
            values_NR = values_NR - own_NR
        columns.append((stage, False, values_NR))
    values_NRK = np.stack([values_NR for _, _, values_NR in columns], axis=2)[:, there_R]
    return Columns(
        names=tuple(name for name, _, _ in columns),
        local_K=tuple(local for _, local, _ in columns),
        values_NRK=values_NRK[np.isfinite(values_NRK).all(axis=(1, 2))],
        rank_R=tuple(int(rank) for rank in np.flatnonzero(there_R)),
        sync=window.schema.sync,
    )


def plain_frontier(seen: Columns, earlier: Sequence[Columns] = ()) -> Said:
    """The frontier of StageFrontier (arXiv 2606.06751), each rank measured from its own step start.

    The paper ranks stages by their share of the exposed time, beside a baseline run. Here is none, and a stage that is
    long on every rank would always come first: stages are ranked by how far the advance exceeds the median rank's time.
    The rank is the one that leads the frontier at the stage's boundary.
    """
    # Where no stage is told to be a sync stage, nothing is cut.
    columns = StageSchema(tuple(f"column-{k}" for k in range(len(seen.names))))
    accounting = anchored(Window(columns, 0, seen.values_NRK))
    own_K = np.median(seen.values_NRK, axis=1).mean(axis=0)
    past_K = accounting.advances_S / accounting.n_steps - own_K
    named = [
        Named(seen.rank_R[leader], name, float(past_s))
        for name, leader, past_s in zip(seen.names, accounting.leaders_S, past_K, strict=True)
        if leader is not None
    ]
    return _in_seconds(named, seen)


def stage_maximum(seen: Columns, earlier: Sequence[Columns] = ()) -> Said:
    """Per-stage maxima: the rank with the greatest mean in each stage, by how far it is past the median rank."""
    return _by_stage(seen, np.median)


def stage_average(seen: Columns, earlier: Sequence[Columns] = ()) -> Said:
    """Per-stage averages: the rank with the greatest z-score of its mean in each stage, by how far it is past the mean.

    The stages are not ranked by the z-score itself: over R ranks none exceeds √(R-1), and where all ranks take
    microseconds one of them comes as near to that as a straggler does.
    """
    return _by_stage(seen, np.mean)


def minimum_backward(seen: Columns, earlier: Sequence[Columns] = ()) -> Said:
    """TraceML's rule (traceml-ai 0.3.5, `diagnostics/step_time`; traceopt-ai/traceml pull requests 228 and 253).

    The culprit is the rank with the least mean backward, for it waits least; the victim is the upper median rank by
    backward. Victim less culprit, over the victim's step, is the impact: from 10 % on it is reported. TraceML names
    the cause among input, host-to-device copies and forward where one explains 80 % of it, and else none. In the best
    reading here every local stage may be the cause, and the one in which the culprit is furthest past the median is
    named always.
    """
    if len(seen.rank_R) < 2 or not seen.sync:
        return NOTHING
    is_backward_K = [name in seen.sync for name in seen.names]
    backward_R = seen.values_NRK[:, :, is_backward_K].sum(axis=2).mean(axis=0)
    culprit = int(backward_R.argmin())
    victim = int(np.argsort(backward_R, kind="stable")[len(backward_R) // 2])
    means_RK = seen.values_NRK.mean(axis=0)
    impact = (backward_R[victim] - backward_R[culprit]) / means_RK[victim].sum()
    past_K = means_RK[culprit] - np.median(means_RK, axis=0)
    named = [
        Named(seen.rank_R[culprit], name, float(past_K[k])) for k, name in enumerate(seen.names) if seen.local_K[k]
    ]
    return Said(_ranked(named), bool(impact >= 0.10))


def own_speed(seen: Columns, earlier: Sequence[Columns] = ()) -> Said:
    """nvidia-resiliency-ext's straggler detection (`straggler/reporting.py`, `Report.identify_stragglers`).

    A section's score on a rank is a reference over the rank's median: the least median of any rank (relative), or the
    least that this rank ever had (individual; here in the windows before). Under 0.75 either is a straggler. In the
    best reading every local stage is a section, and one that is past its reference by less than 1 % of the step, as two
    calls that take microseconds easily are, is none.
    """
    medians_RK = np.median(seen.values_NRK, axis=0)
    best_RK = np.broadcast_to(medians_RK.min(axis=0), medians_RK.shape)
    for before in earlier:
        if not before.empty and (before.names, before.rank_R) == (seen.names, seen.rank_R):
            best_RK = np.minimum(best_RK, np.median(before.values_NRK, axis=0))
    past_RK, least_s = medians_RK - best_RK, 0.01 * seen.step_s
    named = [
        Named(rank, name, 1.0 - float(best_RK[r, k] / medians_RK[r, k]))
        for r, rank in enumerate(seen.rank_R)
        for k, name in enumerate(seen.names)
        if seen.local_K[k] and past_RK[r, k] >= least_s
    ]
    ranked = _ranked(named)
    return Said(ranked, bool(ranked) and ranked[0].score > 0.25)


def median_absolute_deviation(seen: Columns, earlier: Sequence[Columns] = ()) -> Said:
    """The ranks' mean times in each local stage against their median, by their median absolute deviation.

    Ingero Fleet's rule, on the stages instead of a health score. An outlier is past 3.5 deviations (Iglewicz and
    Hoaglin 1993); one that is past the median by less than 5 % of the step raises no alarm.
    """
    means_RK = seen.values_NRK.mean(axis=0)
    past_RK = means_RK - np.median(means_RK, axis=0)
    sigma_K = MAD_TO_SIGMA * np.median(np.abs(past_RK), axis=0)
    named = [
        Named(seen.rank_R[rank], name, float(past_RK[rank, k]))
        for k, name in enumerate(seen.names)
        for rank in [int(past_RK[:, k].argmax())]
        if seen.local_K[k] and past_RK[rank, k] > MAD_SIGMAS * sigma_K[k]
    ]
    return _in_seconds(named, seen)


RULES: dict[str, Rule] = {
    "plain frontier": plain_frontier,
    "per-stage maximum": stage_maximum,
    "per-stage average": stage_average,
    "minimum backward": minimum_backward,
    "own speed 0.75": own_speed,
    "median deviation": median_absolute_deviation,
}


def says(rule: Rule, windows: Sequence[Window]) -> Said:
    """What a rule says of the last of these windows."""
    *earlier, seen = (columns_of(window) for window in windows)
    return NOTHING if seen.empty else rule(seen, earlier)


def _by_stage(seen: Columns, middle: Callable[..., FloatArray]) -> Said:
    means_RK = seen.values_NRK.mean(axis=0)
    past_RK = means_RK - middle(means_RK, axis=0)
    named = []
    for k, name in enumerate(seen.names):
        if seen.local_K[k]:
            first = int(past_RK[:, k].argmax())
            named.append(Named(seen.rank_R[first], name, float(past_RK[first, k])))
    return _in_seconds(named, seen)


def _in_seconds(named: list[Named], seen: Columns) -> Said:
    ranked = _ranked(named)
    return Said(ranked, bool(ranked) and ranked[0].score >= ALARM_FRACTION * seen.step_s)


def _ranked(named: list[Named]) -> tuple[Named, ...]:
    return tuple(sorted(named, key=lambda one: -one.score))
