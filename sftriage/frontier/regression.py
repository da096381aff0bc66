"""The job against itself: a sequential test of its steps against the best that it has shown.

Peers in the same step cannot tell what all of them share, and a baseline that follows the job follows it down. So each
step's time, each stage's level and the sync stages' own work are held against the best that the job has kept to, and a
slower one is evidence that adds up from step to step until faster ones speak against it (a CUSUM, Page 1954, over the
signs: how far a hiccup is out, and how the job's times are distributed, do not matter). The *best* is learned from
blocks of steps, and never from those of a job that is slower than it: the level that one block in four has kept to, two
at least, so that neither one lucky block nor the luckiest of a month is what the job is held to.

Like is compared with like: each kind of step and size of work has a best of its own, each kind of step its evidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from sftriage.frontier.arrays import BoolArray, FloatArray, medians
from sftriage.frontier.baseline import MAX_REGIMES, MAX_SAMPLES, Regime, Samples
from sftriage.frontier.settings import Settings
from sftriage.frontier.whatif import MAD_TO_SIGMA
from sftriage.records import Regression

StepArray = NDArray[np.int64]

STEP, COMMON, STAGES = 0, 1, 2
"""What is tested (Q): the step, all that is common to the ranks, then each stage's level and each one's sync work."""

MAX_KINDS = 16
"""Kinds of steps whose evidence is kept; of more, those met last."""

RECENT_STEPS = 50
"""Steps that say how much slower the job is, and in which stages: their median stands on as many as a window."""

ALL_FRACTION = 0.5
"""Of what the step is slower by, what the ranks must have in common for the regression to be on all of them."""

MOST = 1e6
"""No step is taken to be slower by more, as a multiple of the best: every number stays one."""

ONSET_EVIDENCE = 2.0
"""The onset is where the evidence began to rise, give or take this much (natural logarithm of the odds: about 95 %)."""


@dataclass(frozen=True, slots=True, eq=False)
class StepMeasures:
    """Consecutive steps as they are tested, in seconds. N steps, S stages.

    Attributes:
        first_step: the number of the first of them.
        stages: the names of the stages.
        step_N: what a step took the job.
        level_NS: local time by stage that the ranks have in common, so that no single rank can raise it.
        sync_NS: the sync stages' own work, past the last arrival.
        counts_N: the steps that count: complete, and without a profiler or what another kind of step left behind.
        regimes: of each step its kind, and the size of its work.
        work_N: how much work each step was; none, or 0, where nobody said.
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
        """All that is tested, side by side."""
        common_N = self.level_NS.sum(axis=1) + self.sync_NS.sum(axis=1)
        return np.column_stack([self.step_N, common_N, self.level_NS, self.sync_NS])


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The best of one regime.

    Attributes:
        best_Q: what a typical step takes there, in seconds.
        line_Q: from how much over it on a step is slower, as a fraction of the best step: more in a job that wanders
            from block to block anyway.
        alike_Q: how much further that is than steps would wander which have nothing to do with each other: a step that
            is like the one before it says so much less. 1 at least.
        work: how much work such a step is.
    """

    best_Q: FloatArray
    line_Q: FloatArray
    alike_Q: FloatArray
    work: float

    def over_NQ(self, times_NQ: FloatArray, work_N: FloatArray) -> FloatArray:
        """By how much steps are over the best, as a fraction of the best step.

        Work is told apart by about a fifth only. A step that is more work than the best one was may take as much more,
        squared: nothing that is trained takes longer than that by its length.
        """
        ratio_N = np.maximum(1.0, work_N / self.work) if self.work > 0.0 else np.ones(len(work_N))
        with np.errstate(over="ignore"):
            over_NQ = (times_NQ - self.best_Q * (ratio_N**2)[:, None]) / self.best_Q[STEP]
        return np.asarray(np.clip(over_NQ, -MOST, MOST))


@dataclass(frozen=True, slots=True, eq=False)
class Best:
    """What is known of one regime's best: medians of blocks of steps, with the work of a step behind the times (K).

    Attributes:
        block: the steps of the block that is not full yet.
        samples: the medians of some of those before it.
        last: the medians of the last one.
        changes: from one block to the next, the latest; beside each how far the steps of a block lie apart.
        level: what enough of the samples have kept to; None before there are any.
    """

    block: tuple[FloatArray, ...] = ()
    samples: Samples[FloatArray] = Samples()  # noqa: RUF009  # frozen
    last: FloatArray | None = None
    changes: tuple[FloatArray, ...] = ()
    level: Level | None = None

    def after(self, rows: Sequence[FloatArray], slower: bool, settings: Settings) -> Best:
        """The best after more steps, no more than the block has room for.

        Of a job that is ``slower`` it stays what it is; by how much blocks differ is learned all the same.
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
        # Of two blocks that differ by chance, each has its half in the difference.
        wander_Q = change_Q / math.sqrt(2.0)
        # The standard error of a median is 1.25 σ/√n; twice that is no chance.
        alone_Q = np.maximum(1.25 * spread_Q / math.sqrt(settings.best_steps), np.finfo(np.float64).tiny)
        alike_Q = np.where(wander_Q > 2.0 * alone_Q, wander_Q / alone_Q, 1.0)
        line_Q = np.maximum(settings.slower_fraction, settings.clear_sigmas * wander_Q / best[STEP])
        return replace(known, changes=changes, level=Level(best[:-1], line_Q, alike_Q, float(best[-1])))


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """The evidence that one kind of step has become slower, for each of Q (natural logarithm of the odds).

    Attributes:
        evidence_Q: from 0, as good as the best, up to what is enough.
        since_Q, first_Q, last_Q: the step from which on it has been above 0, and between which that may have begun.
        until_Q: the step from which on it has been less than enough, where it was enough.
        stands_Q: it was enough, and has not been 0 since.
        over_KQ, steps_K: by how much the last steps were over the best, and their numbers.
        best_Q: the best that the last of them was held against.
        onset: of what stands, the step it began at, and between which.
        full: what stood when its evidence was last enough: it may take long until that is 0.
        ended: the last one that stood and does so no longer, which was known by step ``ended_by``.
        n_steps: steps that were tested.
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
    """What the job's steps so far have shown: the best of each regime, and the evidence of each kind of step.

    The next step that is wanted is ``next_step``: windows overlap, and each step is taken once.
    """

    stages: tuple[str, ...] = ()
    next_step: int = 0
    bests: Mapping[Regime, Best] = field(default_factory=dict)
    tests: Mapping[str, Evidence] = field(default_factory=dict)

    def told(self, first_step: int, new_from: int) -> Regression | None:
        """The regression that is to be told of a window from ``first_step`` on; steps from ``new_from`` on are new.

        That is the one that stands, of the kind of step met most often; or one that has ended, once. None while the
        job is as good as its best.
        """
        here = self._met(first_step)
        for kind, test in here:
            if test.onset is not None:
                return _regression(test, kind, self.stages)
        ended = [test for _, test in here if test.ended is not None and test.ended_by >= new_from]
        return max(ended, key=lambda test: test.ended_by).ended if ended else None

    def numbers(self, first_step: int, settings: Settings) -> dict[str, float]:
        """What decides beside its thresholds, for the kind of step met most often of those met from a step on."""
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
        """The evidence of each kind of step that was met from a step on, of the one met most often first."""
        here = [(kind, test) for kind, test in self.tests.items() if test.steps_K[-1] >= first_step]
        return sorted(here, key=lambda one: -one[1].n_steps)


def advanced(before: OwnBest | None, measures: StepMeasures, settings: Settings) -> OwnBest:
    """What is known after more steps, of which those taken before are left out.

    However the same steps are split into windows, overlapping or not, the same is known in the end.
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
    """The evidence after more steps of one kind, which were over their best by so much.

    In a job that is as good as its best, at most half of the steps take noticeably longer than that; in one that has
    become slower most do. Each step's odds of the one against the other are the evidence.
    """
    test = test or _nothing(over_NQ.shape[1], int(steps_N[0]))
    rises = math.log(settings.slower_steps_fraction / 0.5)
    falls = math.log((1.0 - settings.slower_steps_fraction) / 0.5)
    changes_NQ = np.where(over_NQ > level.line_Q, rises, falls) / level.alike_Q
    over_KQ, steps_K = np.concatenate([test.over_KQ, over_NQ]), np.concatenate([test.steps_K, steps_N])
    # Arrays of its own, which nobody else knows yet: they are counted on in place.
    names = ("evidence_Q", "since_Q", "first_Q", "last_Q", "until_Q", "stands_Q")
    test = replace(test, best_Q=level.best_Q, **{name: getattr(test, name).copy() for name in names})
    for n, step in enumerate(steps_N.tolist()):
        _count(test, step, changes_NQ[n], settings)
        if not (test.stands_Q.any() or (test.evidence_Q == settings.naming_log_odds).any()):
            continue
        before = len(steps_K) - len(steps_N) + n
        test = replace(test, over_KQ=over_KQ[:before], steps_K=steps_K[:before])
        if (test.stands_Q & (test.until_Q == step) & (test.evidence_Q < settings.naming_log_odds)).any():
            test = replace(test, full=_regression(test, kind, stages))
        test = _ended(test, step)
        test = _begun(replace(test, over_KQ=over_KQ[: before + 1], steps_K=steps_K[: before + 1]), settings)
    n_steps = test.n_steps + len(steps_N)
    return replace(test, over_KQ=over_KQ[-RECENT_STEPS:], steps_K=steps_K[-RECENT_STEPS:], n_steps=n_steps)


def _nothing(n_quantities: int, step: int) -> Evidence:
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


def _count(test: Evidence, step: int, changes_Q: FloatArray, settings: Settings) -> None:
    """Add one step's evidence, in place."""
    evidence_Q = test.evidence_Q
    none_Q = evidence_Q == 0.0
    np.copyto(test.first_Q, test.since_Q, where=none_Q)
    test.since_Q[none_Q] = step
    test.last_Q[evidence_Q <= ONSET_EVIDENCE] = step
    test.until_Q[evidence_Q == settings.naming_log_odds] = step
    evidence_Q += changes_Q
    # (a fifth of what np.clip takes)
    np.maximum(evidence_Q, 0.0, out=evidence_Q)
    np.minimum(evidence_Q, settings.naming_log_odds, out=evidence_Q)


def _ended(test: Evidence, step: int) -> Evidence:
    """The evidence without what has come to nothing: once that is all of it, the regression has ended."""
    over_Q = test.stands_Q & (test.evidence_Q == 0.0)
    test.stands_Q[over_Q] = False
    if test.onset is None or test.full is None or test.stands_Q.any():
        return test
    ended = replace(test.full, until_step=int(test.until_Q[over_Q].max()))
    return replace(test, onset=None, full=None, ended=ended, ended_by=step)


def _begun(test: Evidence, settings: Settings) -> Evidence:
    """The evidence with what is enough by now, and worth telling."""
    for q in np.flatnonzero((test.evidence_Q == settings.naming_log_odds) & ~test.stands_Q).tolist():
        recent_Q = _recent_Q(test, int(test.since_Q[q]))
        # What became slower must be most of it: time may also have moved from one stage to another.
        mostly = recent_Q[q] >= settings.most_fraction * recent_Q[STEP]
        if mostly and recent_Q[STEP] >= settings.min_over_best_fraction:
            test.stands_Q[q] = True
            onset = (int(test.since_Q[q]), int(test.first_Q[q]), int(test.last_Q[q]))
            test = test if test.onset is not None else replace(test, onset=onset)
    return test


def _recent_Q(test: Evidence, since: int) -> FloatArray:
    """By how much the last steps since one were over the best, in the median (Q)."""
    kept_KQ = test.over_KQ[-RECENT_STEPS:][test.steps_K[-RECENT_STEPS:] >= since]
    return medians(kept_KQ.T.copy()) if len(kept_KQ) else np.zeros(test.over_KQ.shape[1])


def _regression(test: Evidence, kind: str, stages: tuple[str, ...]) -> Regression:
    """What stands since its onset, in the job's own words."""
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
    """The fewest stages without which the job would be half as much slower at most; none where it is all of them."""
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
