"""Candidates for the suspect: ranks, hosts, cohorts and all ranks, in one stage or as a whole, each with its gain.

The course of a fault is its onset, the steps of a window that it fills, and its pattern. The onset is the change point
in the named unit's own time over its peers, in that stage, by the size of each step's excess. `evidence` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from sftriage.model.verdicts import Pattern, Scope, Settings, Suspect
from sftriage.verdict.accounting import BoolArray, FloatArray, RankArray, medians
from sftriage.verdict.sequential import HISTORY_STEPS, MAX_PERIOD_STEPS, own_work
from sftriage.verdict.units import Unit, UnitName
from sftriage.verdict.whatif import Typical

if TYPE_CHECKING:
    from sftriage.verdict.evidence import WindowEvidence

SETTLED_STEPS = 128
"""Steps of a fault after which more of them no longer change its onset."""

SIZE_EDGES = (-0.5, -0.1, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 3.0)
"""Edges between sizes of a step's excess, as multiples of the fault. From half of it on, the fault is there."""

PRIOR_BEFORE = (0.3,) * 5 + (0.05,) * 5
PRIOR_AFTER = (0.1,) * 5 + (0.3,) * 5
"""Pseudo-counts of each size before and after an onset."""

RAMP_STEPS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Lengths of ramps to try."""

MIN_RAMP_STEPS = 16
"""Minimum steps of a fault to distinguish it from a ramp."""

UNSURE_RAMP_LOG_LIKELIHOOD, MIN_RAMP_LOG_LIKELIHOOD = 2.0, 8.0
"""By how much a ramp must be likelier than a sudden onset: to be possible, and to be assumed."""

STEADY_FRACTION, GROWING_FRACTION = 0.5, 0.25
"""Steps are correlated, and faults grow in many ways: this much of the log likelihood counts for an onset's range."""


MAX_TRACKED = 32
"""Tracked units: all of a small job, and those examined last in a large one."""


@dataclass(frozen=True, slots=True, eq=False)
class Track:
    """Each unit's time over its peers, by step and stage (T × S), in the last steps that count, up to ``last_step``."""

    units: Mapping[UnitName, tuple[RankArray, FloatArray]] = field(default_factory=dict)
    last_step: int | None = None

    def after(self, step_N: RankArray, over: Mapping[UnitName, FloatArray]) -> Track:
        """The track with a window's steps that count, and for each unit its time over its peers (N × S).

        Only the last of the known steps is replaced: the time after its last sync was not complete.
        """
        if not len(step_N) or not over:
            return self
        last_step = int(step_N[0]) if self.last_step is None else self.last_step
        new_N = step_N >= last_step
        first_new = next(iter(step_N[new_N].tolist()), last_step + 1)
        units = {}
        for name in tuple(dict.fromkeys((*over, *self.units)))[: max(len(over), MAX_TRACKED)]:
            step_T, over_TS = self.units.get(name, (step_N[:0], next(iter(over.values()))[:0]))
            kept_T = (step_T < first_new) & (step_T > step_N[-1] - HISTORY_STEPS)
            step_T, over_TS = step_T[kept_T], over_TS[kept_T]
            if name in over:
                step_T = np.concatenate([step_T, step_N[new_N]])
                over_TS = np.concatenate([over_TS, over[name][new_N]])
            units[name] = step_T, over_TS
        return Track(units, max(last_step, int(step_N[-1])))

    def of(self, unit: UnitName, stage: int | None) -> tuple[RankArray, FloatArray]:
        """The steps in which a unit's time over its peers is known, and that time in one stage or in all."""
        step_T, over_TS = self.units[unit]
        over_T = over_TS.sum(axis=1) if stage is None else over_TS[:, stage]
        known_T = np.isfinite(over_T)
        return step_T[known_T], over_T[known_T]


@dataclass(frozen=True, slots=True)
class Onset:
    """The most likely first step of a fault, and the earliest and latest that are nearly as likely.

    Attributes:
        pause_steps: the longest gap between two of its steps since then.
        there_s: the excess from which the fault is there: half of its size over the usual time before.
        size_s: its size, in seconds.
        has_gaps: whether it comes and goes, so that it fills only the steps in which it is there.
        grows: whether it has grown since its onset.
        known_through: the last step in the estimate.
    """

    step: int
    earliest: int
    latest: int
    pause_steps: int = 1
    there_s: float = 0.0
    size_s: float = 0.0
    has_gaps: bool = False
    grows: bool = False
    known_through: int = 0

    def is_settled(self, top_s: float, first_known: int) -> bool:
        """Whether more steps with this excess, known from ``first_known`` on, leave the onset as it is."""
        base_s = self.there_s - self.size_s / 2
        same = self.size_s / 2 <= top_s - base_s <= 2 * self.size_s
        forgotten = self.earliest < first_known + MAX_PERIOD_STEPS
        return self.known_through - self.step >= SETTLED_STEPS and (same or (self.grows and forgotten))


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """The pattern of a suspect's fault, the steps of the window that it fills (N), and its onset.

    ``lasts_N``: for a fault that comes and goes, all steps from the onset to the end. ``own_steps``: for a fault that
    its rank marked by a note, the last marked steps in the run.
    """

    pattern: Pattern
    filled_N: BoolArray
    lasts_N: BoolArray
    onset: Onset
    period: int | None = None
    own_steps: frozenset[int] | None = None


def onset_of(
    step_T: RankArray,
    over_T: FloatArray,
    events: Sequence[int],
    known: Onset | None,
    settings: Settings,
    between_T: FloatArray | None = None,
) -> Onset | None:
    """The onset of a named unit's fault in its time over its peers, by step; None if the fault is absent.

    The change point between two distributions of sizes, by the marginal likelihood of both (Dirichlet-multinomial).
    Before it, only the steps since the fault was last absent count.

    Args:
        step_T: the steps.
        over_T: the unit's time over its peers in each, in seconds.
        events: the clear events that named it.
        known: the earlier estimate.
        settings: the thresholds.
        between_T: for a recurring fault, the unit's time over its peers in its other steps.
    """
    event_T = np.isin(step_T, events)
    top_s = _usual_size(over_T[event_T][-MAX_PERIOD_STEPS:]) if event_T.any() else 0.0
    if top_s <= 0.0 or (known is not None and known.is_settled(top_s, int(step_T[0]))):
        return known
    base_s, first = 0.0, int(event_T.argmax())
    for _ in range(3):
        size_s = top_s - base_s
        there_T = over_T >= base_s + size_s / 2
        begin, end = _domain(there_T, first)
        away_T = () if between_T is None else (between_T - base_s) / size_s
        log_odds_K = _log_odds_of_onsets((over_T[begin:end] - base_s) / size_s, away_T)
        # At least half of the events of its size that named the unit come after the onset.
        named = np.flatnonzero((event_T & there_T)[begin:end])
        log_odds_K[named[len(named) // 2] + 1 if len(named) else end - begin :] = -np.inf
        first = begin + int(log_odds_K.argmax())
        before_T, after_T = over_T[begin:first], over_T[first:end][there_T[first:end]]
        if len(before_T) >= settings.min_away_steps:
            # (below the fault, however few of its steps are left)
            base_s = min(float(np.median(before_T)), top_s - size_s / 4)
        if len(after_T):
            top_s = max(float(np.median(after_T)), base_s + size_s / 4)
    size_s, grows = top_s - base_s, False
    onset = _onset(step_T[begin:end], log_odds_K, STEADY_FRACTION if between_T is None else 1.0)
    ramp = None if between_T is not None else _ramp(step_T[begin:end], over_T[begin:end] - base_s, first - begin)
    if ramp is not None:
        grown, log_odds = ramp
        grows = log_odds >= MIN_RAMP_LOG_LIKELIHOOD
        onset = grown if grows else replace(onset, earliest=min(onset.earliest, grown.earliest))
    return _with_size(onset, step_T, over_T, base_s, size_s, grows=grows)


def _with_size(
    onset: Onset, step_T: RankArray, over_T: FloatArray, base_s: float, size_s: float, *, grows: bool
) -> Onset | None:
    """The onset, with the size and gaps of its fault since then; None if the fault is absent."""
    since_T = step_T >= onset.step
    there = step_T[since_T & (over_T >= base_s + size_s / 2)]
    if not len(there):
        return None
    scaled_T = (over_T[since_T & (step_T <= there[-1])] - base_s) / size_s
    none, part = int((scaled_T <= 0.25).sum()), int(((scaled_T > 0.25) & (scaled_T < 0.75)).sum())
    return replace(
        onset,
        pause_steps=int(np.diff(there).max(initial=1)),
        there_s=base_s + size_s / 2,
        size_s=size_s,
        # It comes and goes: more steps have none of it than have a part of it.
        has_gaps=not grows and none > 2 * part and none >= max(2, 0.05 * len(scaled_T)),
        grows=grows,
        known_through=int(step_T[-1]),
    )


def _usual_size(over_E: FloatArray) -> float:
    """The excess from which events make up half of the lost time, and at least four events: not that of hiccups."""
    sorted_E = np.sort(np.maximum(over_E, 0.0))[::-1]
    half = int(np.searchsorted(np.cumsum(sorted_E), sorted_E.sum() / 2))
    return float(sorted_E[min(len(sorted_E) - 1, max(half, 3))])


def _domain(there_T: BoolArray, first: int) -> tuple[int, int]:
    """The steps in which an onset is searched for: from the end of an earlier fault, if any, to the end of this one.

    A fault that is absent for `MAX_PERIOD_STEPS` has ended; hiccups of its size are then at most a quarter as frequent
    as since the ``first`` of its events.
    """
    end = len(there_T) - int(there_T[::-1].argmax()) if there_T.any() else len(there_T)
    often = float(there_T[first:end].mean()) if first < end else 1.0
    counts_T = np.concatenate([[0], np.cumsum(there_T)])
    width = MAX_PERIOD_STEPS
    if first < width:
        return 0, end
    quiet_T = counts_T[width:] - counts_T[:-width] <= often * width / 4
    quiet = np.flatnonzero(quiet_T[: max(0, end - width + 1)])
    quiet = quiet[quiet + width <= max(first, width) + width // 4]
    if not len(quiet):
        return 0, end
    # The start of the quiet stretch that ends last.
    breaks = np.flatnonzero(np.diff(quiet) > 1)
    begin = int(quiet[breaks[-1] + 1]) if len(breaks) else int(quiet[0])
    return begin, end


@lru_cache(maxsize=16)
def _log_gammas(prior: float) -> FloatArray:
    return np.asarray([math.lgamma(n + prior) for n in range(2 * HISTORY_STEPS + 2)])


def _log_odds_of_onsets(scaled_T: FloatArray, away_T: FloatArray | Sequence[float]) -> FloatArray:
    """The log likelihood of each step as the first of the fault, by the sizes before it and from it on.

    ``away_T`` are sizes of other steps without the fault, which count as those before it.
    """
    n_sizes = len(SIZE_EDGES) + 1
    size_T, away_B = (np.searchsorted(SIZE_EDGES, sizes_T, side="right") for sizes_T in (scaled_T, away_T))
    is_TB = size_T[:, None] == np.arange(n_sizes)
    before_TB = np.cumsum(is_TB, axis=0) - is_TB
    after_TB = is_TB.sum(axis=0) - before_TB
    before_TB = before_TB + np.bincount(away_B, minlength=n_sizes)
    total_T = np.zeros(len(scaled_T))
    for counts_TB, prior_B in ((before_TB, PRIOR_BEFORE), (after_TB, PRIOR_AFTER)):
        for b, prior in enumerate(prior_B):
            total_T += _log_gammas(prior)[counts_TB[:, b]]
        total_T -= _log_gammas(sum(prior_B))[counts_TB.sum(axis=1)]
    return total_T


def _ramp(step_T: RankArray, over_T: FloatArray, first: int) -> tuple[Onset, float] | None:
    """The onset of a fault that grows, and the log odds against a sudden one; None if that is as likely.

    ``first`` is the most likely first step of a sudden one. Likelihoods are those of squared deviations.
    """
    if len(over_T) - first < MIN_RAMP_STEPS:
        return None
    # The lower half of the ramp shows as well where it begins, and depends less on what comes later.
    most_s, least_s = (float(np.quantile(over_T[first:], q)) for q in (0.9, 0.1))
    spread_s = float(np.median(np.abs(over_T[:first]))) if first else 0.0
    over_T = np.clip(over_T, -3.0 * spread_s, most_s / 2)
    log_likelihoods = [_log_likelihood_of_ramp(over_T - over_T.mean(), n) for n in (1, *RAMP_STEPS)]
    ramps_K = np.max(log_likelihoods[1:], axis=0)
    log_odds = float(ramps_K.max() - log_likelihoods[0].max())
    if log_odds < UNSURE_RAMP_LOG_LIKELIHOOD or least_s < 0.0:
        return None
    onset = _onset(step_T, ramps_K, GROWING_FRACTION)
    # A fault that grows in another way than a ramp began earlier or later.
    unsure = 3 + abs(int(step_T[first]) - onset.step) // 4
    return replace(onset, earliest=max(0, onset.earliest - unsure), latest=onset.latest + unsure), log_odds


def _log_likelihood_of_ramp(centred_T: FloatArray, ramp_steps: int) -> FloatArray:
    """The log likelihood of each step as the first of a ramp of this length; level and height are fitted."""
    n_steps, total = len(centred_T), float(centred_T @ centred_T)
    shape_T = np.minimum(1.0, np.arange(1, n_steps + 1) / ramp_steps)
    matched_K = np.correlate(centred_T, shape_T, mode="full")[n_steps - 1 :]
    power_K = np.cumsum(shape_T**2)[::-1] - np.cumsum(shape_T)[::-1] ** 2 / n_steps
    explained_K = np.where(power_K > 1e-9, np.maximum(matched_K, 0.0) ** 2 / np.maximum(power_K, 1e-9), 0.0)
    return np.asarray(-n_steps / 2 * np.log(np.maximum(total - explained_K, 1e-9 * total + 1e-30)))


def _onset(step_T: RankArray, log_odds_T: FloatArray, counts: float) -> Onset:
    """The onset and its range, from the log likelihood of each step: the likeliest steps with 99 % of the odds."""
    best = int(log_odds_T.argmax())
    odds_T = np.exp(counts * (log_odds_T - log_odds_T[best]))
    order = np.argsort(-odds_T, kind="stable")
    likely = order[: int(np.searchsorted(np.cumsum(odds_T[order]), 0.99 * odds_T.sum())) + 1]
    earliest, latest = int(likely.min()), int(likely.max())
    return Onset(int(step_T[best]), int(step_T[earliest]), int(step_T[latest]))


def course_of(
    present_N: BoolArray, there_N: BoolArray, first_step: int, onset: Onset, settings: Settings
) -> Course | None:
    """The course of a suspect over the steps of a window that count; None if it is present in none of them.

    ``present_N``: whether it had a gain. The fault is over once it has been absent for `min_away_steps`, and twice as
    long as its longest gap before. A fault that comes and goes fills the steps in which it is ``there_N``.
    """
    step_N = np.arange(len(present_N))
    since_N = step_N >= onset.step - first_step
    there = np.flatnonzero((present_N | there_N) & since_N)
    if not len(there):
        return None
    pause = max(onset.pause_steps, int(np.diff(there).max(initial=1)))
    over = len(step_N) - 1 - there[-1] >= max(settings.min_away_steps, 2 * pause)
    lasts_N = since_N & (step_N <= there[-1]) if over else since_N
    filled_N = there_N & since_N if onset.has_gaps and (there_N & since_N).any() else lasts_N
    return Course("one-off" if over else "chronic", filled_N, lasts_N, onset)


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A possible suspect.

    Attributes:
        gain_N: what fixing it would have saved in each step, in seconds; ``total_s`` is the sum.
        lateness_N: its lateness in the steps in which it arrived last, 0 in the others, in seconds.
        course: when it was present; None if the evidence of the run has not named it.
        lasting_share: what it adds to the steps from its onset to its end, as a fraction of their exposed time.
        exposed_s: the mean exposed time of the steps that it fills.
        unit: the rank or host; None for a cohort or all ranks.
        dominant_stage: for a whole unit with a recurring fault, the stage with most of that fault, if any.
    """

    suspect: Suspect
    gain_N: FloatArray
    lateness_N: FloatArray
    total_s: float
    course: Course | None
    lasting_share: float
    exposed_s: float
    dominant_stage: str | None = None
    unit: UnitName | None = None


OnsetKey: TypeAlias = "tuple[UnitName, str | None, int | None]"
"""A unit, a stage of it or none, and the period of its fault or none."""


def candidates_of(unit: Unit, evidence: WindowEvidence) -> list[Candidate]:
    """A unit's candidates: each stage with a gain, and the unit as a whole if no stage dominates.

    The local time over all filled steps decides whether a stage dominates, not the gains: these end at the next rank's
    arrival, so that two slow stages look alike.
    """
    candidates = []
    course = _course(unit, None, evidence)
    steady = None if course is None or course.pattern == "recurring" else course
    over_NS = unit.over_NS[evidence.used_N if steady is None else steady.filled_N]
    dominates = one_stage_dominates(over_NS.mean(axis=0), evidence.settings)
    if steady is not None:
        # A few large hiccups in other stages change the mean, but not a typical step.
        typical_S, typical_s = medians(over_NS, axis=0), float(medians(over_NS.sum(axis=1)))
        enough_s = evidence.settings.most_fraction * max(evidence.present_s, typical_s)
        dominates |= one_stage_dominates(typical_S, evidence.settings) and float(typical_S.max()) >= enough_s
    for s, stage in enumerate((*evidence.window.schema.stages, None)):
        gain_N = unit.gain_NS[:, s] * evidence.used_N
        led_N = (gain_N >= evidence.present_s) & (gain_N > 0.0)
        if led_N.any() and (stage is not None or unit.starved or not dominates):
            own = course if stage is None else _course(unit, stage, evidence) or course
            candidates.append(_candidate(unit, stage, gain_N, led_N, own, evidence))
    return candidates


def _dominant_stage(unit: Unit, course: Course, evidence: WindowEvidence) -> str | None:
    """The stage that dominates what a recurring fault adds to the unit's other steps; None if none does."""
    between_N = evidence.used_N & ~course.filled_N
    if not between_N.any():
        return None
    added_S = unit.over_NS[course.filled_N].mean(axis=0) - medians(unit.over_NS[between_N], axis=0)
    return (
        evidence.window.schema.stages[int(added_S.argmax())]
        if one_stage_dominates(added_S, evidence.settings)
        else None
    )


def _course(unit: Unit, stage: str | None, evidence: WindowEvidence) -> Course | None:
    """The course of a unit in one stage or in all; None if the run's evidence has not named it, or it is absent.

    The onset is the change point in the unit's own time over its peers. If recurring, only its own steps count.
    """
    marked = _marked_course(unit, evidence)
    if marked is not None:
        return marked
    recurrence, events = evidence.after.recurrences.get(unit.name), evidence.named_events.get(unit.name)
    s = None if stage is None else evidence.window.schema.stages.index(stage)
    step_T, over_T = evidence.after.track.of(unit.name, s)
    over_N = unit.over_NS.sum(axis=1) if s is None else unit.over_NS[:, s]
    used_N, settings = evidence.used_N, evidence.settings
    if recurrence is not None:
        own_T = step_T % recurrence.period == recurrence.phase
        known = evidence.after.onsets.get((unit.name, stage, recurrence.period))
        times = step_T[own_T & (step_T >= recurrence.onset)].tolist()
        onset = onset_of(step_T[own_T], over_T[own_T], times, known, settings, over_T[~own_T])
        if onset is not None:
            step_N = evidence.step_N
            filled_N = used_N & (step_N % recurrence.period == recurrence.phase) & (step_N >= onset.step)
            if onset.has_gaps:
                filled_N &= over_N >= onset.there_s
            between_N = used_N & ~filled_N
            if 2 * (between_N & (unit.gain_NS[:, -1] >= evidence.present_s)).sum() <= between_N.sum():
                back = Course("recurring", filled_N, filled_N, onset, recurrence.period)
                return back if filled_N.any() else None
    if events is None:
        return None
    onset = onset_of(step_T, over_T, events, evidence.after.onsets.get((unit.name, stage, None)), settings)
    if onset is None:
        return None
    gain_N = unit.gain_NS[:, -1 if s is None else s]
    present_N = used_N & (gain_N >= evidence.present_s) & (gain_N > 0.0)
    course = course_of(present_N, used_N & (over_N >= onset.there_s), evidence.window.first_step, onset, settings)
    if course is None or not (course.filled_N & used_N).any():
        return None
    return replace(course, filled_N=course.filled_N & used_N, lasts_N=course.lasts_N & used_N)


def _marked_course(unit: Unit, evidence: WindowEvidence) -> Course | None:
    """The course of a rank that is named by its own notes: the steps that it marked; None for any other."""
    if not isinstance(unit.name, int) or unit.name not in evidence.alone or evidence.window.noted_NR is None:
        return None
    kind, alone, _ = evidence.alone[unit.name]
    filled_N = evidence.used_N & (evidence.window.noted_NR[:, unit.name] == kind)
    onset = Onset(*(alone.first_step,) * 3)
    own_steps = frozenset(step for step, _ in alone.recent)
    return Course("recurring", filled_N, filled_N, onset, alone.period_steps, own_steps) if filled_N.any() else None


def _candidate(
    unit: Unit, stage: str | None, gain_N: FloatArray, led_N: BoolArray, course: Course | None, evidence: WindowEvidence
) -> Candidate:
    filled_N = evidence.used_N if course is None else course.filled_N
    gain_s, exposed_s = float(gain_N[filled_N].mean()), float(evidence.exposed_N[filled_N].mean())
    added_s = _added_s(unit, stage, gain_s, exposed_s, course, evidence)
    suspect = Suspect(
        scope=unit.scope,
        ranks=unit.ranks,
        rank=unit.ranks[0] if unit.scope == "rank" else None,
        host=unit.name if isinstance(unit.name, str) else None,
        stage=stage,
        gain_s=gain_s,
        share=min(1.0, added_s / exposed_s) if exposed_s > 0.0 else 0.0,
        persistence=float(led_N[evidence.used_N].mean()),
        pattern="one-off",
    )
    lasting_share, dominant = suspect.share, None
    if course is not None:
        onset, rank = course.onset, suspect.rank
        suspect = replace(
            suspect,
            pattern=course.pattern,
            period_steps=course.period,
            onset_step=onset.step,
            onset_range=(onset.earliest, onset.latest),
            alone=None
            if rank is None
            else own_work(evidence.after.alone, rank, course.filled_N, evidence.window.noted_NR),
        )
        if course.pattern != "recurring" and onset.has_gaps:
            lasting_share = float(gain_N[course.lasts_N].sum() / evidence.exposed_N[course.lasts_N].sum())
        elif course.pattern == "recurring" and stage is None:
            dominant = _dominant_stage(unit, course, evidence)
    total_s = float(gain_N.sum())
    return Candidate(suspect, gain_N, unit.lateness_N, total_s, course, lasting_share, exposed_s, dominant, unit.name)


def _added_s(
    unit: Unit, stage: str | None, gain_s: float, exposed_s: float, course: Course | None, evidence: WindowEvidence
) -> float:
    """What a suspect adds to a step that it fills, in seconds: its gain.

    The jitter of others hides part of that. For a unit that is steadily over its peers, its time over them counts, up
    to the least that is worth a capture.
    """
    worth_s = evidence.settings.min_gain_fraction * exposed_s
    hidden = evidence.settings.smaller_part_fraction * worth_s <= gain_s < worth_s
    if course is None or course.pattern != "chronic" or not hidden:
        return gain_s
    over_NS = unit.over_NS[course.filled_N]
    over_N = over_NS.sum(axis=1) if stage is None else over_NS[:, evidence.window.schema.stages.index(stage)]
    return max(gain_s, min(float(medians(over_N)), worth_s))


def one_stage_dominates(over_S: FloatArray, settings: Settings) -> bool:
    """Whether one stage has nearly all of a unit's time over its peers."""
    over_S = np.clip(over_S, 0.0, None)
    return bool(over_S.max() >= settings.larger_part_fraction * over_S.sum())


def group_candidates(normal: Typical, evidence: WindowEvidence) -> list[Candidate]:
    """Candidates of scope cohort and all: local stages that are slower than the baseline on (nearly) all their ranks.

    Levels are medians over the window's steps; ``persistence`` is the fraction of steps nearer to the window's level
    than to the baseline's. ``normal`` is a typical healthy step of the job in the same regime.
    """
    profile, roles, exposed_s = evidence.like, evidence.roles, evidence.exposed_s
    level_CS = profile.typical.level_CS
    # A median of few steps may exceed their mean, but fixing the stage cannot save more than was spent.
    mean_rise_CS = np.clip(profile.common_NCS - normal.common_CS, 0.0, None).mean(axis=0)
    rise_CS = np.minimum(np.clip(profile.typical.common_CS - normal.common_CS, 0.0, None), mean_rise_CS)
    slow_C = rise_CS.sum(axis=1) >= evidence.settings.min_group_fraction * exposed_s / 2
    candidates: list[Candidate] = []

    def add(scope: Scope, c: int, ranks: RankArray, rise_S: FloatArray) -> None:
        common_NS, usual_S = profile.common_NCS[:, c], normal.common_CS[c]
        parts: list[tuple[str | None, float, FloatArray, float]] = [
            (evidence.window.schema.stages[s], float(rise_S[s]), common_NS[:, s], float(usual_S[s]))
            for s in np.flatnonzero(rise_S)
        ]
        if parts and not one_stage_dominates(rise_S, evidence.settings):
            parts.append((None, float(rise_S.sum()), common_NS.sum(axis=1), float(usual_S.sum())))
        for stage, gain_s, common_N, usual_s in parts:
            slow_N = common_N > (medians(common_N) + usual_s) / 2
            suspect = Suspect(
                scope,
                tuple(ranks.tolist()),
                stage,
                gain_s,
                gain_s / exposed_s,
                float(slow_N.mean()),
                cohort=roles.names[c] or None if scope == "cohort" else None,
                onset_step=evidence.window.first_step + int(slow_N.argmax()),
            )
            course = Course("chronic", slow_N, slow_N, Onset(*(evidence.window.first_step,) * 3))
            gain_N, late_N = np.full(len(evidence.used_N), gain_s), np.zeros(len(evidence.used_N))
            total_s = gain_s * len(slow_N)
            candidates.append(Candidate(suspect, gain_N, late_N, total_s, course, suspect.share, exposed_s))

    if slow_C.all():
        add("all", 0, np.arange(len(roles.role_R)), rise_CS.min(axis=0))
        return candidates
    for c in np.flatnonzero(slow_C).tolist():
        # All wait for the slowest cohort: only its lead over the others can be saved.
        ahead_s = float(level_CS[c].sum()) - float(np.delete(level_CS.sum(axis=1), c).max())
        add("cohort", c, roles.members[c], np.minimum(rise_CS[c], max(0.0, ahead_s)))
    return candidates
