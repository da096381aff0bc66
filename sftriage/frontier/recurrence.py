"""What comes back every so many steps, found in the noise by folding: over a period and all its phases.

One late step in ten is lost among those in which the machine had a hiccup; but laid over each other by the right
period, the late ones fall into one place and the hiccups do not. It is asked of ranks of a series only which of its
steps were its latest, so that one huge delay counts no more than another, and the odds of their falling together by
chance are those of drawing balls from an urn (the hypergeometric distribution; Fisher's exact test).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sftriage.frontier.arrays import BoolArray, FloatArray

HISTORY_STEPS = 512
"""Steps that are remembered. What comes back every 128 steps has been there four times in them."""

MAX_SERIES = 64
"""Ranks and hosts whose steps are remembered, those that were looked at last."""

MIN_TIMES = 4
"""A fault comes back when it has been there four times: three gaps that agree are no chance."""

MAX_ODDS = 1e-2
"""Odds at which chance alone makes the best of all periods and phases, in all series of a window, look as good."""

FILLED_FRACTION = 0.7
"""Of the times at which it is expected, so many must be there: noise hides some."""

MAX_FOLDED = 32
"""Series that are folded, those with most lateness in them."""

LEVELS = (0.5, 1.0, 2.0)
"""How many of a series' latest steps are looked at, as multiples of the times at one phase: as many as there would be
without noise; twice as many, where hiccups come between; and half, where it began half-way."""

_LOG_FACTORIALS = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, HISTORY_STEPS + 1)))])

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """How late ranks, and the ranks of hosts, were in the job's last steps, in seconds; NaN where nobody looked.

    Attributes:
        first_step: the first step.
        late_s: for each (a rank alone, or a host's) its steps by stage, and in the last column all stages together: a
            stage by itself is quiet where others jitter.
    """

    first_step: int = 0
    late_s: Mapping[Ranks, FloatArray] = field(default_factory=dict)

    def with_window(self, first_step: int, n_steps: int, late_s: Mapping[Ranks, FloatArray]) -> History:
        """The history with one more window, whose steps are taken as it has them."""
        end = first_step + n_steps
        begin = max(min(self.first_step, first_step) if self.late_s else first_step, end - HISTORY_STEPS)
        kept = [ranks for ranks in self.late_s if ranks not in late_s][-(MAX_SERIES - len(late_s)) :]
        series: dict[Ranks, FloatArray] = {}
        for ranks in (*kept, *late_s):
            series[ranks] = np.full((end - begin, self._width(late_s)), np.nan)
            for start, values in ((self.first_step, self.late_s.get(ranks)), (first_step, late_s.get(ranks))):
                if values is not None:
                    skipped = max(0, begin - start)
                    part = values[skipped : skipped + max(0, end - max(start, begin))]
                    series[ranks][max(0, start - begin) : max(0, start - begin) + len(part)] = part
        return History(begin, series)

    def _width(self, late_s: Mapping[Ranks, FloatArray]) -> int:
        return next((values.shape[1] for values in (*late_s.values(), *self.late_s.values())), 0)


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
    """What comes back and is still there in the last ``window_steps`` steps, by whose it is.

    It is looked for in the window, in twice and four times as many steps, and in all: a fault may have begun a while
    ago.

    Args:
        history: the steps, the window's among them.
        wanted: whose series are looked at.
        window_steps: steps of the window, which are the last.
        min_s: lateness that is worth a look; no single step below it is.
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
    """The series in which something might come back (C × steps), most lateness first, and whose and which they are.

    It has to be there in the window, and often enough in all.
    """
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
    return range(2, n_steps // MIN_TIMES + 1)


def _fold(late_CN: FloatArray) -> list[tuple[int, int, float]]:
    """For each series: the period and phase that its latest steps would share least likely by chance, and log odds."""
    valid_CN = np.isfinite(late_CN)
    n_series, n_steps = late_CN.shape
    n_valid_C = valid_CN.sum(axis=1)
    # place 0 is the latest step; what is not valid comes last
    order_CN = np.argsort(-np.where(valid_CN, late_CN, -np.inf), axis=1, kind="stable")
    place_CN = np.empty_like(order_CN)
    np.put_along_axis(place_CN, order_CN, np.broadcast_to(np.arange(n_steps), order_CN.shape), axis=1)
    rows = np.arange(n_series)
    best_C = np.zeros((n_series, 3))
    for period in _periods(n_steps):
        width = -(-n_steps // period) * period
        n_Cp = _by_phase(valid_CN, period, width)
        for level in LEVELS:
            drawn_C = np.minimum(np.ceil(level * n_valid_C / period).astype(np.intp), n_valid_C)
            c_Cp = _by_phase(valid_CN & (place_CN < drawn_C[:, None]), period, width)
            phase_C = (c_Cp / np.maximum(n_Cp, 1)).argmax(axis=1)
            c_C, n_C = c_Cp[rows, phase_C], n_Cp[rows, phase_C]
            log_odds_C = _log_odds(c_C, n_C, drawn_C, n_valid_C)
            better_C = (
                (n_C >= MIN_TIMES)
                & (drawn_C > 0)
                & (log_odds_C < best_C[:, 2])
                & (c_C > drawn_C * n_C / np.maximum(n_valid_C, 1))
            )
            best_C[better_C] = np.stack([np.full(n_series, period), phase_C, log_odds_C], axis=1)[better_C]
    return [(int(period), int(phase), float(odds)) for period, phase, odds in best_C]


def _by_phase(flags_CN: BoolArray, period: int, width: int) -> NDArray[np.intp]:
    padded = np.zeros((len(flags_CN), width), dtype=np.bool_)
    padded[:, : flags_CN.shape[1]] = flags_CN
    return np.asarray(padded.reshape(len(flags_CN), -1, period).sum(axis=1))


def _log_odds(
    c_C: NDArray[np.intp], n_C: NDArray[np.intp], drawn_C: NDArray[np.intp], of_C: NDArray[np.intp]
) -> FloatArray:
    """Log of the chance that of ``drawn`` steps, taken from ``of``, just ``c`` are among certain ``n``.

    (That of as many or more is hardly larger, where it is small.)
    """

    def log_choose(a: NDArray[np.intp], b: NDArray[np.intp]) -> FloatArray:
        return np.asarray(_LOG_FACTORIALS[a] - _LOG_FACTORIALS[b] - _LOG_FACTORIALS[a - b])

    missed_C = np.minimum(drawn_C - c_C, of_C - n_C)
    return log_choose(n_C, c_C) + log_choose(of_C - n_C, missed_C) - log_choose(of_C, drawn_C)


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
