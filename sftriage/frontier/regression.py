"""The job against itself: a sequential test of its steps against the best that it has shown.

Peers in the same step cannot show what they all share, and a baseline that follows the job follows it down. So each
step's time, each stage's level and the sync stages' own work are compared with the job's best. Slower steps add to the
evidence and others take from it: a CUSUM (Page 1954) over the signs, so that neither the size of a hiccup nor the
distribution of the times matters. The *best* is the level that one block of steps in four has kept to, and two blocks
at least; blocks of a job that has become slower do not count.

Each kind of step and size of work has a best of its own, and each kind of step its evidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from sftriage.decisions import Regression
from sftriage.frontier.arrays import BoolArray, FloatArray, medians
from sftriage.frontier.baseline import MAX_REGIMES, MAX_SAMPLES, Regime, Samples
from sftriage.frontier.settings import Settings
from sftriage.frontier.whatif import MAD_TO_SIGMA

StepArray = NDArray[np.int64]

STEP, COMMON, STAGES = 0, 1, 2
"""The quantities that are tested (Q): the step, all that the ranks share, each stage's level, and its sync work."""

MAX_KINDS = 16
"""Kinds of steps whose evidence is kept: those met last."""

RECENT_STEPS = 50
"""The last steps, whose median says how much slower the job is, and in which stages: as many as a window has."""

ALL_FRACTION = 0.5
"""The part of the slowdown that the ranks must share for a regression of scope ``all``."""

MOST = 1e6
"""The largest slowdown of a step, as a multiple of the best: keeps all numbers finite."""


@dataclass(frozen=True, slots=True, eq=False)
class StepMeasures:
    """The measures of consecutive steps, in seconds. N steps, S stages.

    Attributes:
        first_step: the number of the first one.
        stages: the names of the stages.
        step_N: the length of each step.
        level_NS: local time by stage that the ranks share, so that no single rank can raise it.
        sync_NS: the sync stages' own work, past the last arrival.
        counts_N: the steps that count: complete, without a profiler, and not after a step of another kind.
        regimes: the kind and the size of work of each step.
        work_N: the work of each step; None, or 0, if it was not given.
    """

    first_step: int
    stages: tuple[str, ...]
    step_N: FloatArray
    level_NS: FloatArray
    sync_NS: FloatArray
    counts_N: BoolArray
    regimes: Sequence[Regime]
    work_N: FloatArray | None = None

    @property
    def times_NQ(self) -> FloatArray:
        """All quantities, side by side."""
        common_N = self.level_NS.sum(axis=1) + self.sync_NS.sum(axis=1)
        return np.column_stack([self.step_N, common_N, self.level_NS, self.sync_NS])


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The best of one regime.

    Attributes:
        best_Q: a typical step, in seconds.
        line_Q: by how much over it a step counts as slower, as a fraction of the best step: more in a job whose blocks
            differ by chance.
        alike_Q: by how much more blocks differ than independent steps would make them, 1 at least: the evidence of
            correlated steps is divided by this.
        work: the work of such a step.
    """

    best_Q: FloatArray
    line_Q: FloatArray
    alike_Q: FloatArray
    work: float

    def over_NQ(self, times_NQ: FloatArray, work_N: FloatArray) -> FloatArray:
        """By how much steps are over the best, as a fraction of the best step.

        The work of one regime's steps differs by up to a fifth. A step with more work than the best one may take longer
        by the square of the ratio: no training step grows faster with its length.
        """
        ratio_N = np.maximum(1.0, work_N / self.work) if self.work > 0.0 else np.ones(len(work_N))
        with np.errstate(over="ignore"):
            over_NQ = (times_NQ - self.best_Q * (ratio_N**2)[:, None]) / self.best_Q[STEP]
        return np.asarray(np.clip(over_NQ, -MOST, MOST))


@dataclass(frozen=True, slots=True, eq=False)
class Best:
    """The samples of one regime: medians of blocks of steps; a row is the quantities and, last, the work (K).

    Attributes:
        block: the steps of the block that is not full yet.
        samples: the medians of some of the blocks before.
        last: the medians of the last block.
        changes: the latest changes from one block to the next, each with the spread of the steps in its block.
        level: the best; None before there are enough samples.
    """

    block: tuple[FloatArray, ...] = ()
    samples: Samples[FloatArray] = Samples()  # noqa: RUF009  # frozen
    last: FloatArray | None = None
    changes: tuple[FloatArray, ...] = ()
    level: Level | None = None

    def after(self, rows: Sequence[FloatArray], slower: bool, settings: Settings) -> Best:
        """The samples after more steps, at most as many as the block has room for.

        While the job is ``slower``, no samples are taken, but changes are.
        """
        block = (*self.block, *rows)
        if len(block) < settings.best_steps:
            return replace(self, block=block)
        steps_KN = np.array(block).T.copy()
        typical = medians(steps_KN)
        samples = self.samples if slower else self.samples.after(typical)
        known = Best((), samples, typical)
        if self.last is None or samples.seen < 2:
            return known
        change_2K = np.stack([np.abs(typical - self.last), medians(np.abs(steps_KN - typical[:, None]))])
        changes = (*self.changes, change_2K[:, :-1])[-MAX_SAMPLES:]
        n_as_good = max(2, math.ceil(settings.best_fraction * len(samples.kept)))
        best = np.sort(np.array(samples.kept), axis=0)[n_as_good - 1]
        if best[STEP] <= 0.0:
            return known
        change_Q, spread_Q = np.sort(np.array(changes), axis=0)[(len(changes) - 1) // 2] * MAD_TO_SIGMA
        # The variance of a difference is that of both blocks.
        wander_Q = change_Q / math.sqrt(2.0)
        # The standard error of a median is 1.25 σ/√n; up to twice that, steps count as independent.
        alone_Q = np.maximum(1.25 * spread_Q / math.sqrt(settings.best_steps), np.finfo(np.float64).tiny)
        alike_Q = np.where(wander_Q > 2.0 * alone_Q, wander_Q / alone_Q, 1.0)
        line_Q = np.maximum(settings.slower_fraction, settings.clear_sigmas * wander_Q / best[STEP])
        return replace(known, changes=changes, level=Level(best[:-1], line_Q, alike_Q, float(best[-1])))


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """The evidence that one kind of step has become slower, for each quantity (log odds).

    Attributes:
        evidence_Q: from 0 up to the threshold.
        since_Q, first_Q, last_Q: the step since which it has been above 0, and the range of that step.
        until_Q: the last step at which it was at the threshold.
        stands_Q: whether it has been at the threshold, and not at 0 since.
        over_KQ, steps_K: by how much the last steps were over the best, and their numbers.
        best_Q: the best that the last of them was compared with.
        onset: of the regression that stands: its first step, and the range of that step.
        full: that regression when its evidence was last at the threshold, which may be long before it is 0.
        ended: the last regression that has ended, which was known at step ``ended_by``.
        n_steps: how many steps were tested.
    """

    evidence_Q: FloatArray
    since_Q: StepArray
    first_Q: StepArray
    last_Q: StepArray
    until_Q: StepArray
    stands_Q: BoolArray
    over_KQ: FloatArray
    steps_K: StepArray
    best_Q: FloatArray
    onset: tuple[int, int, int] | None = None
    full: Regression | None = None
    ended: Regression | None = None
    ended_by: int = -1
    n_steps: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class OwnBest:
    """The best of each regime, and the evidence of each kind of step.

    ``next_step`` is the first step that has not been tested: windows overlap, and each step is tested once.
    """

    stages: tuple[str, ...] = ()
    next_step: int = 0
    bests: Mapping[Regime, Best] = field(default_factory=dict)
    tests: Mapping[str, Evidence] = field(default_factory=dict)

    def reported(self, first_step: int, new_from: int) -> Regression | None:
        """The regression to report with a window from ``first_step`` on, whose steps from ``new_from`` on are new.

        The one that stands, of the most frequent kind of step; or one that has just ended. None while the job is as
        good as its best.
        """
        here = self._met(first_step)
        for kind, test in here:
            if test.onset is not None:
                return _regression(test, kind, self.stages)
        ended = [test for _, test in here if test.ended is not None and test.ended_by >= new_from]
        return max(ended, key=lambda test: test.ended_by).ended if ended else None

    def numbers(self, first_step: int, settings: Settings) -> dict[str, float]:
        """The numbers and thresholds of the most frequent kind of step, of the steps from ``first_step`` on."""
        here = self._met(first_step)
        if not here:
            return {}
        _, test = here[0]
        return {
            "over_best_fraction": float(_recent_Q(test, 0)[STEP]),
            "min_over_best_fraction": settings.min_over_best_fraction,
            "slower_evidence": float(test.evidence_Q.max()),
            "min_slower_evidence": settings.naming_log_odds,
        }

    def _met(self, first_step: int) -> list[tuple[str, Evidence]]:
        """The evidence of each kind of step that was met from a step on, the most frequent one first."""
        here = [(kind, test) for kind, test in self.tests.items() if test.steps_K[-1] >= first_step]
        return sorted(here, key=lambda one: -one[1].n_steps)


def advanced(before: OwnBest | None, measures: StepMeasures, settings: Settings) -> OwnBest:
    """The state after more steps, without those that were tested before.

    It does not depend on how the steps are split into windows, overlapping or not.
    """
    if before is None or before.stages != measures.stages:
        before = OwnBest(measures.stages)
    bests, tests = dict(before.bests), dict(before.tests)
    times_NQ, work_N = measures.times_NQ, measures.work_N
    work_N = np.zeros(len(times_NQ)) if work_N is None else np.nan_to_num(work_N, posinf=0.0)
    counts_N = measures.counts_N & np.isfinite(times_NQ).all(axis=1) & (measures.step_N > 0.0)
    counts_N = counts_N & (measures.first_step + np.arange(len(counts_N)) >= before.next_step)
    for regime, group in groupby(np.flatnonzero(counts_N).tolist(), key=lambda n: measures.regimes[n]):
        rows_N = list(group)
        while rows_N:
            best = bests.get(regime, Best())
            room = settings.best_steps - len(best.block)
            rows, rows_N = rows_N[:room], rows_N[room:]
            test = tests.get(regime[0])
            if best.level is not None:
                over_NQ = best.level.over_NQ(times_NQ[rows], work_N[rows])
                steps_N = measures.first_step + np.asarray(rows, dtype=np.int64)
                test = _tested(test, regime[0], over_NQ, steps_N, best.level, before.stages, settings)
                tests[regime[0]] = test
                if len(tests) > MAX_KINDS:
                    del tests[min(tests, key=lambda kind: int(tests[kind].steps_K[-1]))]
            slower = test is not None and test.onset is not None
            learned = [np.append(times_NQ[row], work_N[row]) for row in rows]
            bests[regime] = best.after(learned, slower, settings)
            if len(bests) > MAX_REGIMES:
                del bests[min((one for one in bests if one != regime), key=lambda one: bests[one].samples.seen)]
    next_step = max(before.next_step, measures.first_step + len(times_NQ))
    return OwnBest(before.stages, next_step, bests, tests)


def _tested(
    test: Evidence | None,
    kind: str,
    over_NQ: FloatArray,
    steps_N: StepArray,
    level: Level,
    stages: tuple[str, ...],
    settings: Settings,
) -> Evidence:
    """The evidence after more steps of one kind, which were over their best by ``over_NQ``.

    In a job as good as its best, at most half of the steps are slower than the line; in one that has become slower,
    ``slower_steps_fraction`` are. The evidence is the log likelihood ratio.
    """
    test = test or _no_evidence(over_NQ.shape[1], int(steps_N[0]))
    rises = math.log(settings.slower_steps_fraction / 0.5)
    falls = math.log((1.0 - settings.slower_steps_fraction) / 0.5)
    changes_NQ = np.where(over_NQ > level.line_Q, rises, falls) / level.alike_Q
    over_KQ, steps_K = np.concatenate([test.over_KQ, over_NQ]), np.concatenate([test.steps_K, steps_N])
    # Copies, which are updated in place.
    names = ("evidence_Q", "since_Q", "first_Q", "last_Q", "until_Q", "stands_Q")
    test = replace(test, best_Q=level.best_Q, **{name: getattr(test, name).copy() for name in names})
    for n, step in enumerate(steps_N.tolist()):
        _add_step(test, step, changes_NQ[n], settings)
        if not (test.stands_Q.any() or (test.evidence_Q == settings.naming_log_odds).any()):
            continue
        before = len(steps_K) - len(steps_N) + n
        test = replace(test, over_KQ=over_KQ[:before], steps_K=steps_K[:before])
        if (test.stands_Q & (test.until_Q == step) & (test.evidence_Q < settings.naming_log_odds)).any():
            test = replace(test, full=_regression(test, kind, stages))
        test = _with_ended(test, step)
        test = _with_begun(replace(test, over_KQ=over_KQ[: before + 1], steps_K=steps_K[: before + 1]), settings)
    n_steps = test.n_steps + len(steps_N)
    return replace(test, over_KQ=over_KQ[-RECENT_STEPS:], steps_K=steps_K[-RECENT_STEPS:], n_steps=n_steps)


def _no_evidence(n_quantities: int, step: int) -> Evidence:
    step_Q, none_Q = np.full(n_quantities, step, dtype=np.int64), np.zeros(n_quantities)
    return Evidence(
        evidence_Q=none_Q,
        since_Q=step_Q,
        first_Q=step_Q,
        last_Q=step_Q,
        until_Q=step_Q,
        stands_Q=np.zeros(n_quantities, dtype=np.bool_),
        over_KQ=np.zeros((0, n_quantities)),
        steps_K=np.zeros(0, dtype=np.int64),
        best_Q=none_Q,
    )


def _add_step(test: Evidence, step: int, changes_Q: FloatArray, settings: Settings) -> None:
    """Add one step's evidence, in place."""
    evidence_Q = test.evidence_Q
    none_Q = evidence_Q == 0.0
    np.copyto(test.first_Q, test.since_Q, where=none_Q)
    test.since_Q[none_Q] = step
    test.last_Q[evidence_Q <= settings.onset_log_likelihood] = step
    test.until_Q[evidence_Q == settings.naming_log_odds] = step
    evidence_Q += changes_Q
    # (a fifth of what np.clip takes)
    np.maximum(evidence_Q, 0.0, out=evidence_Q)
    np.minimum(evidence_Q, settings.naming_log_odds, out=evidence_Q)


def _with_ended(test: Evidence, step: int) -> Evidence:
    """The evidence without quantities that are at 0 again; once all are, the regression has ended."""
    over_Q = test.stands_Q & (test.evidence_Q == 0.0)
    test.stands_Q[over_Q] = False
    if test.onset is None or test.full is None or test.stands_Q.any():
        return test
    ended = replace(test.full, until_step=int(test.until_Q[over_Q].max()))
    return replace(test, onset=None, full=None, ended=ended, ended_by=step)


def _with_begun(test: Evidence, settings: Settings) -> Evidence:
    """The evidence with quantities that have reached the threshold, if they are worth reporting."""
    for q in np.flatnonzero((test.evidence_Q == settings.naming_log_odds) & ~test.stands_Q).tolist():
        recent_Q = _recent_Q(test, int(test.since_Q[q]))
        # The quantity must be most of the slowdown: time may also move from one stage to another.
        mostly = recent_Q[q] >= settings.most_fraction * recent_Q[STEP]
        if mostly and recent_Q[STEP] >= settings.min_over_best_fraction:
            test.stands_Q[q] = True
            onset = (int(test.since_Q[q]), int(test.first_Q[q]), int(test.last_Q[q]))
            test = test if test.onset is not None else replace(test, onset=onset)
    return test


def _recent_Q(test: Evidence, since: int) -> FloatArray:
    """The median of how much the last steps, from ``since`` on, were over the best (Q)."""
    kept_KQ = test.over_KQ[-RECENT_STEPS:][test.steps_K[-RECENT_STEPS:] >= since]
    return medians(kept_KQ.T.copy()) if len(kept_KQ) else np.zeros(test.over_KQ.shape[1])


def _regression(test: Evidence, kind: str, stages: tuple[str, ...]) -> Regression:
    """The regression that stands."""
    assert test.onset is not None
    since, first, last = test.onset
    recent_Q = _recent_Q(test, since)
    n_stages = len(stages)
    over_S = recent_Q[STAGES : STAGES + n_stages] + recent_Q[STAGES + n_stages :]
    best_S = (test.best_Q[STAGES : STAGES + n_stages] + test.best_Q[STAGES + n_stages :]) / test.best_Q[STEP]
    everywhere = recent_Q[COMMON] >= ALL_FRACTION * recent_Q[STEP]
    return Regression(
        since_step=since,
        since_first_step=first,
        since_last_step=last,
        fraction=float(recent_Q[STEP]),
        scope="all" if everywhere else "some",
        stages=_slower_stages(over_S, best_S, stages) if everywhere else (),
        best_step_s=float(test.best_Q[STEP]),
        kind=kind,
    )


def _slower_stages(over_S: FloatArray, best_S: FloatArray, stages: tuple[str, ...]) -> tuple[str, ...]:
    """The fewest stages without which the slowdown would be at most half; none if it is in all of them."""
    slower = over_S.sum() / best_S.sum() if best_S.sum() > 0.0 else 0.0
    rest = list(range(len(stages)))
    for s in np.argsort(-over_S).tolist():
        rest.remove(s)
        rest_s = float(best_S[rest].sum())
        if rest_s <= 0.0:
            return ()
        if float(over_S[rest].sum()) / rest_s < 0.5 * slower:
            return tuple(stage for at, stage in enumerate(stages) if at not in rest)
    return ()
