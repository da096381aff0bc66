"""What comes back every so many steps, found in the noise by folding: over a period and all its phases.

One late step in ten is lost among those in which the machine had a hiccup; but laid over each other by the right
period, the late ones fall into one place and the hiccups do not. It is asked of ranks of a series only which of its
steps were its latest, so that one huge delay counts no more than another, and the odds of their falling together by
chance are those of drawing balls from an urn (the hypergeometric distribution; Fisher's exact test).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sftriage.frontier.arrays import BoolArray, FloatArray
from sftriage.frontier.settings import Settings
from sftriage.records import Pattern

HISTORY_STEPS = 512
"""Steps that are remembered."""

MAX_PERIOD = 64
"""The longest period that is looked for, in steps: there eight times in what is remembered."""

MAX_SERIES = 64
"""Ranks and hosts whose steps are remembered, those that were looked at last."""

MIN_TIMES = 4
"""A fault comes back when it has been there four times: three gaps that agree are no chance."""

MAX_ODDS = 1e-2
"""Odds at which chance alone makes the best of all periods and phases, in all series of a window, look as good."""

FILLED_FRACTION = 0.7
"""Of the times at which it is expected, or of the steps of a run, so many must be there: noise hides some."""

MAX_FOLDED = 24
"""Series that are folded, those with most lateness in them."""

LEVELS = (0.5, 1.0, 2.0)
"""How many of a series' latest steps are looked at, as multiples of the times at one phase: as many as there would be
without noise; twice as many, where hiccups come between; and half, where it began half-way."""

_LOG_FACTORIALS = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, HISTORY_STEPS + 1)))])

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """How late ranks, and the ranks of hosts, were in the job's last steps, in seconds; NaN where nobody looked.

    ``late_s`` has for each (a rank alone, or a host's) its steps by stage, and in the last column all stages together:
    a stage by itself is quiet where others jitter.
    """

    first_step: int = 0
    late_s: Mapping[Ranks, FloatArray] = field(default_factory=dict)

    def with_window(self, first_step: int, n_steps: int, late_s: Mapping[Ranks, FloatArray]) -> History:
        """The history with one more window, whose steps are taken as it has them."""
        end = first_step + n_steps
        begin = max(min(self.first_step, first_step) if self.late_s else first_step, end - HISTORY_STEPS)
        width = next((values.shape[1] for values in (*late_s.values(), *self.late_s.values())), 0)
        kept = [ranks for ranks in self.late_s if ranks not in late_s][-(MAX_SERIES - len(late_s)) :]
        series: dict[Ranks, FloatArray] = {}
        for ranks in (*kept, *late_s):
            series[ranks] = np.full((end - begin, width), np.nan)
            for start, values in ((self.first_step, self.late_s.get(ranks)), (first_step, late_s.get(ranks))):
                if values is not None:
                    skipped = max(0, begin - start)
                    part = values[skipped : skipped + max(0, end - max(start, begin))]
                    series[ranks][max(0, start - begin) : max(0, start - begin) + len(part)] = part
        return History(begin, series)


@dataclass(frozen=True, slots=True, eq=False)
class Recurrence:
    """Something that comes back: at every step whose number is ``phase`` over a multiple of ``period``.

    ``column`` is that of the series in which it is clearest, ``onset`` the step at which it was there first, and
    ``odds`` those at which chance would look as good.
    """

    column: int
    period: int
    phase: int
    onset: int
    odds: float


def recurrences(history: History, wanted: Sequence[Ranks], window_steps: int, min_s: float) -> dict[Ranks, Recurrence]:
    """What comes back and is still there in the last ``window_steps`` steps, by whose it is, of those ``wanted``.

    It is looked for in the window, in twice and four times as many steps, and in all: a fault may have begun a while
    ago. A step that is late by less than ``min_s`` is not.
    """
    whose, late_CN = _series(history, wanted, window_steps, min_s)
    if not whose:
        return {}
    n_steps = late_CN.shape[1]
    spans = sorted({min(span, n_steps) for span in (window_steps, 2 * window_steps, 4 * window_steps, n_steps)})
    # Every series, span, level, period and phase is one more chance for chance.
    n_tries = len(whose) * len(LEVELS) * sum(k for span in spans for k in _periods(span))
    best: dict[Ranks, Recurrence] = {}
    for span in spans:
        part_CN, first_step = late_CN[:, n_steps - span :], history.first_step + n_steps - span
        for c, (period, phase, log_odds) in enumerate(_fold(part_CN)):
            (ranks, column), odds = whose[c], float(n_tries * np.exp(log_odds))
            if not period or odds > MAX_ODDS or (ranks in best and best[ranks].odds <= odds):
                continue
            onset = _onset(part_CN[c], period, phase, min(window_steps, span))
            if onset is not None:
                best[ranks] = Recurrence(column, period, (first_step + phase) % period, first_step + onset, odds)
    return best


def _series(
    history: History, wanted: Sequence[Ranks], window_steps: int, min_s: float
) -> tuple[list[tuple[Ranks, int]], FloatArray]:
    """The series in which something might come back (C × steps), most lateness first, and whose and which they are."""
    found: list[tuple[float, Ranks, int]] = []
    for ranks in wanted:
        late_NS = history.late_s[ranks]
        over_NS = np.where(late_NS >= min_s, late_NS, 0.0)
        times_S, now_S = (over_NS > 0.0).sum(axis=0), (over_NS[-window_steps:] > 0.0).any(axis=0)
        found += [(float(over_NS[:, s].sum()), ranks, int(s)) for s in np.flatnonzero((times_S >= MIN_TIMES) & now_S)]
    whose = [(ranks, s) for _, ranks, s in sorted(found, reverse=True)[:MAX_FOLDED]]
    series = [history.late_s[ranks][:, s] for ranks, s in whose]
    return whose, np.stack(series) if series else np.zeros((0, 0))


def _periods(n_steps: int) -> range:
    return range(2, min(n_steps // MIN_TIMES, MAX_PERIOD) + 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What folding so many steps looks at, whatever is in them. P periods, E entries, B bins.

    ``first_P`` is the bin of each period's phase 0, the others follow; ``bin_PN`` is that of each step. ``entries`` has
    for each level which period (E), and which of a series' latest steps, the latest first (E).
    """

    period_P: NDArray[np.intp]
    first_P: NDArray[np.intp]
    bin_PN: NDArray[np.intp]
    entries: tuple[tuple[NDArray[np.intp], NDArray[np.intp]], ...]
    n_bins: int


@lru_cache(maxsize=8)
def _plan(n_steps: int) -> _Plan:
    period_P = np.asarray(_periods(n_steps), dtype=np.intp)
    first_P = np.concatenate([[0], np.cumsum(period_P)])
    bin_PN = first_P[:-1, None] + np.arange(n_steps) % period_P[:, None]
    entries = []
    for level in LEVELS:
        drawn_P = _drawn(level, np.asarray(n_steps), period_P)
        which_E = np.repeat(np.arange(len(period_P)), drawn_P)
        place_E = np.arange(len(which_E)) - np.repeat(np.cumsum(drawn_P) - drawn_P, drawn_P)
        entries.append((which_E, place_E))
    return _Plan(period_P, first_P[:-1], bin_PN, tuple(entries), int(first_P[-1]))


def _drawn(level: float, n_valid: NDArray[np.intp], period_P: NDArray[np.intp]) -> NDArray[np.intp]:
    """How many of the latest steps are looked at."""
    return np.asarray(np.minimum(np.ceil(level * n_valid / period_P), n_valid), dtype=np.intp)


def _fold(late_CN: FloatArray) -> list[tuple[int, int, float]]:
    """For each series the period (0: none), the phase that its latest steps share least likely by chance, log odds."""
    n_series, n_steps = late_CN.shape
    plan = _plan(n_steps)
    if not len(plan.period_P):
        return [(0, 0, 0.0)] * n_series
    valid_CN = np.isfinite(late_CN)
    n_valid_C = valid_CN.sum(axis=1)
    # what is not valid comes last
    order_CN = np.argsort(-np.where(valid_CN, late_CN, -np.inf), axis=1, kind="stable")
    times_CP = -(-n_valid_C[:, None] // plan.period_P)
    best_C: list[tuple[int, int, float]] = [(0, 0, 0.0)] * n_series
    for level, (which_E, place_E) in zip(LEVELS, plan.entries, strict=True):
        drawn_CP = _drawn(level, n_valid_C[:, None], plan.period_P)
        bin_CE = plan.bin_PN[which_E, order_CN[:, place_E]]
        if not valid_CN.all():
            bin_CE[place_E >= drawn_CP[:, which_E]] = plan.n_bins
        bin_CE += np.arange(n_series)[:, None] * (plan.n_bins + 1)
        counts_CB = np.bincount(bin_CE.ravel(), minlength=n_series * (plan.n_bins + 1)).reshape(n_series, -1)
        most_CP = np.maximum.reduceat(counts_CB[:, :-1], plan.first_P, axis=1)
        odds_CP = _log_odds(most_CP, np.maximum(times_CP, most_CP), drawn_CP, n_valid_C[:, None])
        for c, p in enumerate(odds_CP.argmin(axis=1)):
            if odds_CP[c, p] >= best_C[c][2]:
                continue
            period, first = int(plan.period_P[p]), plan.first_P[p]
            phase = int(counts_CB[c, first : first + period].argmax())
            n_times, n_late = int(valid_CN[c, phase::period].sum()), int(most_CP[c, p])
            n_drawn, of = int(drawn_CP[c, p]), int(n_valid_C[c])
            if n_times < MIN_TIMES or n_late * of <= n_drawn * n_times:
                continue
            found = float(_log_odds(*map(np.asarray, (n_late, n_times, n_drawn, of))))
            best_C[c] = min(best_C[c], (period, phase, found), key=lambda one: one[2])
    return best_C


def _log_odds(c: NDArray[np.intp], n: NDArray[np.intp], drawn: NDArray[np.intp], of: NDArray[np.intp]) -> FloatArray:
    """Log of the chance that of ``drawn`` steps, taken from ``of``, just ``c`` are among certain ``n``.

    (That of as many or more is hardly larger, where it is small. Where chance alone would bring more, it is 0.)
    """

    def log_choose(a: NDArray[np.intp], b: NDArray[np.intp]) -> FloatArray:
        return np.asarray(_LOG_FACTORIALS[a] - _LOG_FACTORIALS[b] - _LOG_FACTORIALS[a - b])

    n = np.minimum(n, of)
    missed = np.minimum(drawn - c, of - n)
    log_odds = log_choose(n, c) + log_choose(of - n, missed) - log_choose(of, drawn)
    return np.asarray(np.where(c * of > drawn * n, log_odds, 0.0))


def _onset(late_N: FloatArray, period: int, phase: int, window_steps: int) -> int | None:
    """Where it began; None where it is not in the last ``window_steps`` as often as it should.

    It is there in a step that is nearer to the typical one at its phase than to the typical one of the others.
    """
    at = np.arange(phase, len(late_N), period)
    at = at[np.isfinite(late_N[at])]
    others_N = late_N.copy()
    others_N[at] = np.nan
    if np.isnan(others_N).all():
        return None
    there = late_N[at] >= (np.median(late_N[at]) + np.nanmedian(others_N)) / 2
    now = there[at >= len(late_N) - window_steps]
    if not len(now) or now.mean() < FILLED_FRACTION:
        return None
    # From the first time on from which it is there as often as it should, whichever way one counts on.
    for first, step in enumerate(at):
        if there[first] and all(there[first : last + 1].mean() >= FILLED_FRACTION for last in range(first, len(at))):
            return int(step)
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """How a suspect went over a window: the steps it fills (N), and what sort of fault that makes it.

    ``onset`` is a step of the job: where it began, or the window's first where it was there already.
    """

    pattern: Pattern
    filled_N: BoolArray
    onset: int
    period: int | None = None


def course_of(present_N: BoolArray, first_step: int, settings: Settings, min_persistence: float) -> Course | None:
    """The course of one suspect over a window, or None where it fills neither most of it nor a run of its steps.

    In ``present_N`` its gain was there; in ``min_persistence`` of the window's steps, it was throughout.
    """
    n_steps = len(present_N)
    # Of a short window a quarter shows where it began; it takes a long run to be named for that run alone.
    run = _run(present_N, min(settings.min_run_steps, max(2, n_steps // 4)))
    named = run is not None and run[1] - run[0] >= settings.min_run_steps
    burst = run is not None and named and present_N[run[0] : run[1]].sum() >= FILLED_FRACTION * present_N.sum()
    since = n_steps if run is None else n_steps - run[1]
    to_the_end = since <= max(2, settings.min_run_steps // 4)
    # So many steps without it end a run as so many with it make one, however much of the window it filled.
    over = burst and since >= settings.min_run_steps
    if present_N.mean() >= min_persistence and not over:
        began = run[0] if run is not None and to_the_end and 2 * present_N[: run[0]].sum() <= run[0] else 0
        return Course("chronic", np.arange(n_steps) >= began, first_step + began)
    if run is not None and burst:
        filled_N = (np.arange(n_steps) >= run[0]) & (np.arange(n_steps) < (n_steps if to_the_end else run[1]))
        return Course("chronic" if to_the_end else "one-off", filled_N, first_step + run[0])
    return None


def _run(present_N: BoolArray, min_steps: int) -> tuple[int, int] | None:
    """The steps [a, b) that the suspect fills, and hardly any around them; None where there is no such run.

    It is the maximum-sum segment, where a step with the suspect counts for it and a step without against it.
    """
    n_steps = len(present_N)
    sums = np.concatenate([[0.0], np.cumsum(np.where(present_N, 0.5, -0.5))])
    lowest = np.minimum.accumulate(sums)
    end = int((sums - lowest)[1:].argmax()) + 1 if n_steps else 0
    start = int(sums[: end + 1].argmin())
    if end - start < min_steps or present_N[start:end].mean() < FILLED_FRACTION:
        return None
    return start, end


def recurring(recurrence: Recurrence, first_step: int, used_N: BoolArray) -> Course:
    """The course of what comes back, over those steps of a window that count."""
    at_phase_N = (first_step + np.arange(len(used_N))) % recurrence.period == recurrence.phase
    return Course("recurring", used_N & at_phase_N, recurrence.onset, recurrence.period)
