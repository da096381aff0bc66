"""The job against itself: a sequential test of its steps against the job's own best.

Peers cannot show what they all share, and a baseline that follows the job follows it down. So each step's time, each
stage's level and the sync stages' own work are compared with the job's best, by a CUSUM (Page 1954) over the signs:
neither the size of a hiccup nor the distribution of the times matters. The *best* is the level that one block of steps
in four, and at least two blocks, have reached, without those of a job that has become slower. A job that climbs from
its start has no level: its best is where the climb began. Each kind of step and size of work has its own best, and each
kind of step its own evidence.

A pause is one step or a few that take all ranks many times as long as others, and that no rank alone explains.
`judging` and `evidence` call this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from sftriage.model.events import JobPaused, PauseReason
from sftriage.model.verdicts import UNDECIDED, Regression, Settings, Verdict
from sftriage.model.windows import Window
from sftriage.verdict.accounting import BoolArray, FloatArray, medians
from sftriage.verdict.whatif import MAD_TO_SIGMA, MAX_SAMPLES, Profile, Regime, Samples, met, regimes_of

FIRST_BLOCK_STEPS, LAST_BLOCK_STEPS, LEAST_BLOCKS = 4, 64, 6
"""A climb is searched for in the medians of blocks of this many steps, in at least this many blocks. A job that has not
climbed in the two thousand steps of the largest blocks has a level."""

ERRORS, WANDERINGS = 8.0, 3.0
"""The minimum height of a climb: this many standard errors of a median, and this many times the height that blocks
reach by chance: ranks that share cores differ for dozens of steps."""

BLOCK_STEP, BLOCK_TIMES, BLOCK_WORK, BLOCK_SPREAD = 0, 1, -2, -1
"""The columns of a block (K): its last step; the medians of its steps' measures, from the step's length to the work;
and the spread of the lengths."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockHistory:
    """One regime's steps since the job's start, in blocks of equal length.

    Attributes:
        steps: steps per block: doubled whenever there are too many blocks, and 0 in the end.
        blocks: the full blocks, at most `MAX_SAMPLES` (K).
        rest: the measures of the steps since then.
    """

    steps: int = FIRST_BLOCK_STEPS
    blocks: tuple[FloatArray, ...] = ()
    rest: tuple[FloatArray, ...] = ()

    @property
    def n_to_come(self) -> int | None:
        """How many steps there are until the next block is full; None if there is no next block."""
        return self.steps - len(self.rest) if self.steps else None

    def after(self, step: int, rows: Sequence[FloatArray], slower: bool) -> BlockHistory:
        """The history with the steps up to this one, at most ``n_to_come``; without them if the job is ``slower``."""
        rest = (*self.rest, *rows)
        if len(rest) < self.steps or not self.steps:
            return BlockHistory(self.steps, self.blocks, rest if self.steps else ())
        if slower:
            return BlockHistory(self.steps, self.blocks)
        rest_KN = np.array(rest).T.copy()
        typical = medians(rest_KN)
        spread = medians(np.abs(rest_KN[0] - typical[0])) * MAD_TO_SIGMA
        blocks = (*self.blocks, np.concatenate(([step], typical, [spread])))
        if len(blocks) < MAX_SAMPLES:
            return BlockHistory(self.steps, blocks)
        return BlockHistory(2 * self.steps, _joined(blocks)) if self.steps < LAST_BLOCK_STEPS else BlockHistory(0)

    def climb(self, settings: Settings) -> tuple[FloatArray, ...]:
        """The blocks from the best one to the last, if the job has climbed from it for most of its time."""
        blocks, steps = self.blocks, self.steps
        while not self.rest and len(blocks) >= LEAST_BLOCKS:
            best = int(np.argmin([block[BLOCK_TIMES] for block in blocks]))
            since = blocks[best:]
            if 4 * best < len(blocks) and len(since) >= LEAST_BLOCKS and _climbs(np.array(since), steps, settings):
                return since
            blocks, steps = _joined(blocks), 2 * steps
        return ()


def more_work(work_N: FloatArray, work: float) -> FloatArray:
    """The factor by which steps with more work may take longer: no training step grows faster than by its square."""
    return np.maximum(1.0, work_N / work) ** 2 if work > 0.0 else np.ones(len(work_N))


def _joined(blocks: tuple[FloatArray, ...]) -> tuple[FloatArray, ...]:
    pairs = zip(blocks[::2], blocks[1::2], strict=False)
    return tuple(np.concatenate((second[:1], (first[1:] + second[1:]) / 2)) for first, second in pairs)


def _climbs(since_NK: FloatArray, steps: int, settings: Settings) -> bool:
    """Whether blocks of this many steps rise steadily from the first to the last, by what is worth reporting.

    If one jump is most of the rise, or many blocks fall, it is no climb.
    """
    best_s = since_NK[0, BLOCK_TIMES]
    over_N = since_NK[:, BLOCK_TIMES] / more_work(since_NK[:, BLOCK_WORK], since_NK[0, BLOCK_WORK]) / best_s - 1.0
    rises_N, height = np.diff(over_N), float(over_N[-1])
    # The standard error of a median is 1.25 σ/√n.
    error = 1.25 * float(medians(since_NK[:, BLOCK_SPREAD])) / best_s / math.sqrt(steps)
    wandering = float(rises_N.std(ddof=1)) * math.sqrt(len(rises_N))
    least = max(settings.min_over_best_fraction, ERRORS * error, WANDERINGS * wandering)
    jump, fallen = float(rises_N.max()), float(-rises_N.clip(max=0.0).sum())
    return bool(height >= max(least, jump / settings.most_fraction, fallen / settings.most_fraction**2))


StepArray = NDArray[np.int64]

STEP, COMMON, STAGES, QUEUED = 0, 1, 2, -1
"""The tested quantities (Q), in seconds: the length of the step, and what no single rank can raise: all that the ranks
share, each stage's common level, and the own work of a sync stage past the last arrival. Last, a quantity that is not
tested but explains the others: the longest wait of a rank for a CPU."""

MOST = 1e6
"""The largest slowdown of a step, as a multiple of the best: keeps all numbers finite."""


@dataclass(frozen=True, slots=True, eq=False)
class StepMeasures:
    """The measures of consecutive steps, in seconds. N steps, S stages.

    Attributes:
        counts_N: the steps that count: complete, without a profiler, and not after a step of another kind.
        work_N: the work of each step; None, or 0, if the job does not note it.
    """

    first_step: int
    stages: tuple[str, ...]
    times_NQ: FloatArray
    counts_N: BoolArray
    regimes: Sequence[Regime]
    work_N: FloatArray | None = None


def measured(window: Window, step_N: FloatArray, whole: Profile, valid_N: BoolArray) -> StepMeasures:
    """The measures of a window's steps, from their exposed times, their profile, and which of them are complete.

    The slowest cohort counts. A step after one of another kind does not count: it begins with that one's remains.
    """
    level_NS = whole.common_NCS.max(axis=1)
    queued_NR = window.counted("queued_s")
    queued_N = np.zeros(len(step_N)) if queued_NR is None else np.nan_to_num(np.fmax.reduce(queued_NR, axis=1))
    common_N = level_NS.sum(axis=1) + whole.sync_NS.sum(axis=1)
    counts_N, kinds_N = valid_N.copy(), np.asarray(window.kinds or ("",) * len(valid_N))
    counts_N[1:] &= kinds_N[1:] == kinds_N[:-1]
    return StepMeasures(
        first_step=window.first_step,
        stages=window.schema.stages,
        times_NQ=np.column_stack([step_N, common_N, level_NS, whole.sync_NS, queued_N]),
        counts_N=counts_N,
        regimes=regimes_of(window),
        work_N=None if window.work_NR is None else window.work_NR.mean(axis=1),
    )


@dataclass(frozen=True, slots=True, eq=False)
class BestLevel:
    """The best of one regime.

    Attributes:
        best_Q: a typical step, in seconds.
        line_Q: the excess from which a step counts as slower, as a fraction of the best step: more in a job whose
            blocks differ by chance.
        alike_Q: how much more blocks differ than blocks of independent steps; divides the evidence of correlated steps.
        work: the work of such a step.
    """

    best_Q: FloatArray
    line_Q: FloatArray
    alike_Q: FloatArray
    work: float

    def over_NQ(self, times_NQ: FloatArray, work_N: FloatArray) -> FloatArray:
        """By how much steps are over the best, as a fraction of the best step.

        The work of one regime's steps differs by up to a fifth.
        """
        with np.errstate(over="ignore"):
            over_NQ = (times_NQ - self.best_Q * more_work(work_N, self.work)[:, None]) / self.best_Q[STEP]
        return np.asarray(np.clip(over_NQ, -MOST, MOST))


@dataclass(frozen=True, slots=True, eq=False)
class Best:
    """The samples of one regime: medians of blocks of steps; a row is the quantities and, last, the work (K).

    Attributes:
        block: the steps of the block that is not full yet.
        samples, last: the medians of some of the blocks before, and of the last one.
        changes: the latest changes from one block to the next, each with the spread of the steps in its block.
        level: the best; None before there are enough samples.
        history: the blocks of the steps, without those in which the job was slower.
        lowest_s: the step's length where the climb began: the best, unless a level is better.
    """

    block: tuple[FloatArray, ...] = ()
    samples: Samples[FloatArray] = Samples()  # noqa: RUF009  # frozen
    last: FloatArray | None = None
    changes: tuple[FloatArray, ...] = ()
    level: BestLevel | None = None
    history: BlockHistory = BlockHistory()  # frozen
    lowest_s: float = math.inf

    def after(self, last_step: int, rows: Sequence[FloatArray], slower: bool, settings: Settings) -> Best:
        """The samples with more steps, at most as many as complete the block and that of its history.

        While the job is ``slower``, no samples are taken, but changes are.
        """
        block, history = (*self.block, *rows), self.history.after(last_step, rows, slower)
        if len(block) < settings.best_steps:
            return replace(self, block=block, history=history)
        steps_KN = np.array(block).T.copy()
        typical = medians(steps_KN)
        samples = self.samples if slower else self.samples.after(typical)
        known = replace(self, block=(), samples=samples, last=typical, history=history)
        if self.last is None or samples.n_offered < 2:
            return known
        change_2K = np.stack([np.abs(typical - self.last), medians(np.abs(steps_KN - typical[:, None]))])
        changes = (*self.changes, change_2K[:, :-1])[-MAX_SAMPLES:]
        n_as_good = max(2, math.ceil(settings.best_fraction * len(samples.kept)))
        best = np.sort(np.array(samples.kept), axis=0)[n_as_good - 1]
        if best[STEP] <= 0.0 or self.lowest_s <= best[STEP]:
            return known
        change_Q, spread_Q = np.sort(np.array(changes), axis=0)[(len(changes) - 1) // 2] * MAD_TO_SIGMA
        # The variance of a difference is the sum of both blocks'.
        wander_Q = change_Q / math.sqrt(2.0)
        # The standard error of a median is 1.25 σ/√n; up to twice that, steps count as independent.
        alone_Q = np.maximum(1.25 * spread_Q / math.sqrt(settings.best_steps), np.finfo(np.float64).tiny)
        alike_Q = np.where(wander_Q > 2.0 * alone_Q, wander_Q / alone_Q, 1.0)
        line_Q = np.maximum(settings.slower_fraction, settings.clear_sigmas * wander_Q / best[STEP])
        line_Q[QUEUED] = np.inf  # (no step counts as slower for that)
        return replace(known, changes=changes, level=BestLevel(best[:-1], line_Q, alike_Q, float(best[-1])))


@dataclass(frozen=True, slots=True, eq=False)
class SpeedTest:
    """The evidence that one kind of step has become slower, for each quantity (log odds).

    Attributes:
        evidence_Q: from 0 up to the threshold.
        since_Q, first_Q, last_Q: the step since which it has been above 0, and the range of that step.
        until_Q: the last step at which it was at the threshold.
        stands_Q: whether it has been at the threshold, and not at 0 since.
        recent: the last steps (`Settings.best_steps`), each with its excess over the best (Q).
        best_Q: the best with which the last of them was compared.
        onset: the current regression's first step, and the range of that step.
        full: that regression when its evidence was last at the threshold, which may be long before it is 0.
        ended: the last regression that has ended; this became known at step ``ended_by``.
    """

    kind: str
    stages: tuple[str, ...]
    evidence_Q: FloatArray
    since_Q: StepArray
    first_Q: StepArray
    last_Q: StepArray
    until_Q: StepArray
    stands_Q: BoolArray
    recent: tuple[tuple[int, FloatArray], ...] = ()
    best_Q: FloatArray | None = None
    onset: tuple[int, int, int] | None = None
    full: Regression | None = None
    ended: Regression | None = None
    ended_by: int = -1
    n_steps: int = 0

    @property
    def last_step(self) -> int:
        return self.recent[-1][0]

    def recent_Q(self, since: int = 0) -> FloatArray:
        """The median excess of the last steps, from ``since``, over the best."""
        over_KQ = np.array([over_Q for step, over_Q in self.recent if step >= since])
        return medians(over_KQ.T.copy()) if len(over_KQ) else np.zeros(len(self.evidence_Q))

    @property
    def regression(self) -> Regression:
        assert self.onset is not None
        assert self.best_Q is not None
        recent_Q, n_stages = self.recent_Q(self.onset[0]), len(self.stages)
        over_S, best_S = (
            of_Q[STAGES : STAGES + n_stages] + of_Q[STAGES + n_stages : QUEUED] for of_Q in (recent_Q, self.best_Q)
        )
        everywhere, waits = 2 * recent_Q[COMMON] >= recent_Q[STEP], min(recent_Q[QUEUED], recent_Q[STEP]) > 0.0
        return Regression(
            *self.onset,
            fraction=float(recent_Q[STEP]),
            scope="all" if everywhere else "some",
            stages=_slower_stages(over_S, best_S / self.best_Q[STEP], self.stages) if everywhere else (),
            best_step_s=float(self.best_Q[STEP]),
            kind=self.kind,
            descheduled_fraction=min(1.0, float(recent_Q[QUEUED] / recent_Q[STEP])) if waits else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class OwnBest:
    """The best of each regime, and the evidence of each kind of step; untested from ``next_step``."""

    stages: tuple[str, ...] = ()
    next_step: int = 0
    bests: Mapping[Regime, Best] = field(default_factory=dict)
    tests: Mapping[str, SpeedTest] = field(default_factory=dict)

    def reported(self, first_step: int, new_from: int) -> Regression | None:
        """The regression to report with a window from ``first_step`` on, whose steps from ``new_from`` on are new.

        The current one, of the most frequent kind of step, or one that has just ended. None while the job is at its
        best.
        """
        tests = self._met(first_step)
        for test in tests:
            if test.onset is not None:
                return test.regression
        ended = [test for test in tests if test.ended is not None and test.ended_by >= new_from]
        return max(ended, key=lambda test: test.ended_by).ended if ended else None

    def numbers(self, first_step: int, settings: Settings) -> dict[str, float]:
        """The numbers and thresholds of the most frequent kind of step, of the steps from ``first_step`` on."""
        tests = self._met(first_step)
        if not tests:
            return {}
        test = tests[0]
        return {
            "over_best_fraction": float(test.recent_Q()[STEP]),
            "min_over_best_fraction": settings.min_over_best_fraction,
            "slower_evidence": float(test.evidence_Q.max()),
            "min_slower_evidence": settings.naming_log_odds,
        }

    @property
    def queued_s(self) -> float | None:
        """The longest wait of a rank for a CPU in a step at the job's best; None if unknown."""
        best_Q = next((test.best_Q for test in self._met(0)), None)
        return None if best_Q is None else float(best_Q[QUEUED])

    def _met(self, first_step: int) -> list[SpeedTest]:
        """The evidence of each kind of step since a step, the most frequent one first."""
        tests = (test for test in self.tests.values() if test.last_step >= first_step)
        return sorted(tests, key=lambda test: -test.n_steps)


def advanced(before: OwnBest | None, measures: StepMeasures, settings: Settings) -> OwnBest:
    """The state after more steps, each tested once, in the same way however they are split into windows."""
    if before is None or before.stages != measures.stages:
        before = OwnBest(measures.stages)
    bests, tests = before.bests, before.tests
    times_NQ, work_N = measures.times_NQ, measures.work_N
    work_N = np.zeros(len(times_NQ)) if work_N is None else np.nan_to_num(work_N, posinf=0.0)
    counts_N = measures.counts_N & np.isfinite(times_NQ).all(axis=1) & (times_NQ[:, STEP] > 0.0)
    counts_N &= measures.first_step + np.arange(len(counts_N)) >= before.next_step
    for regime, group in groupby(np.flatnonzero(counts_N).tolist(), key=lambda n: measures.regimes[n]):
        rows_N = list(group)
        while rows_N:
            best, test = bests.get(regime, Best()), tests.get(regime[0])
            n_next = min(settings.best_steps - len(best.block), best.history.n_to_come or settings.best_steps)
            rows, rows_N = rows_N[:n_next], rows_N[n_next:]
            steps_N = measures.first_step + np.asarray(rows, dtype=np.int64)
            learned = [np.append(times_NQ[row], work_N[row]) for row in rows]
            if best.level is not None:
                over_NQ = best.level.over_NQ(times_NQ[rows], work_N[rows])
                test = test or _no_evidence(regime[0], before.stages, int(steps_N[0]))
                test = _tested(test, over_NQ, steps_N, best.level, settings)
            slower = test is not None and test.onset is not None
            best = best.after(int(steps_N[-1]), learned, slower, settings)
            if not slower and (blocks := best.history.climb(settings)):
                # The best of a job that has climbed is where the climb began.
                first_Q = blocks[0][BLOCK_TIMES:BLOCK_WORK]
                line_Q = np.append(np.full(len(first_Q) - 1, settings.slower_fraction), np.inf)
                level = BestLevel(first_Q, line_Q, np.ones(len(first_Q)), float(blocks[0][BLOCK_WORK]))
                best = replace(best, level=level, lowest_s=float(level.best_Q[STEP]), history=BlockHistory(0))
                test = test or _no_evidence(regime[0], before.stages, int(steps_N[0]))
                test = _climbed(test, np.array(blocks), level, settings)
            bests, tests = met(bests, regime, best), tests if test is None else met(tests, regime[0], test)
    next_step = max(before.next_step, measures.first_step + len(times_NQ))
    return OwnBest(before.stages, next_step, bests, tests)


def _no_evidence(kind: str, stages: tuple[str, ...], step: int) -> SpeedTest:
    none_Q = np.zeros(STAGES + 2 * len(stages) + 1)
    step_Q = np.full(len(none_Q), step, dtype=np.int64)
    return SpeedTest(kind, stages, none_Q, step_Q, step_Q, step_Q, step_Q, none_Q > 0.0)


def _climbed(test: SpeedTest, since_NK: FloatArray, level: BestLevel, settings: Settings) -> SpeedTest:
    """The evidence after a climb over these blocks: a regression since the last block that was not slower."""
    over_NQ = level.over_NQ(since_NK[:, BLOCK_TIMES:BLOCK_WORK], since_NK[:, BLOCK_WORK])
    steps_N = since_NK[:, BLOCK_STEP].astype(np.int64)
    last = int(np.flatnonzero(over_NQ[:, STEP] <= settings.slower_fraction)[-1])
    first, after = max(last - 1, 0), min(last + 1, len(steps_N) - 1)
    onset = int(steps_N[last]) + 1, int(steps_N[first]) + 1, int(steps_N[after]) + 1
    is_step_Q = np.arange(len(test.evidence_Q)) == STEP
    return replace(
        test,
        evidence_Q=np.where(is_step_Q, settings.naming_log_odds, test.evidence_Q),
        stands_Q=test.stands_Q | is_step_Q,
        recent=((int(steps_N[-1]), over_NQ[-1]),),
        best_Q=level.best_Q,
        onset=onset,
    )


def _tested(
    test: SpeedTest, over_NQ: FloatArray, steps_N: StepArray, level: BestLevel, settings: Settings
) -> SpeedTest:
    """The evidence with more steps of its kind, whose excess over the best is ``over_NQ``: the log likelihood ratio.

    In a job at its best, at most half of the steps are slower than the line; in one that has become slower, the first
    of ``guilty_fractions`` are.
    """
    test = replace(test, best_Q=level.best_Q, n_steps=test.n_steps + len(steps_N))
    guilty = settings.guilty_fractions[0]
    rises, falls = math.log(guilty / 0.5), math.log((1.0 - guilty) / 0.5)
    changes_NQ = np.where(over_NQ > level.line_Q, rises, falls) / level.alike_Q
    for step, over_Q, change_Q in zip(steps_N.tolist(), over_NQ, changes_NQ, strict=True):
        test = _after_step(test, step, over_Q, change_Q, settings)
    return test


def _after_step(test: SpeedTest, step: int, over_Q: FloatArray, change_Q: FloatArray, settings: Settings) -> SpeedTest:
    """The evidence with one more step. A regression has ended once all its quantities are at 0."""
    before_Q, enough = test.evidence_Q, settings.naming_log_odds
    evidence_Q = np.minimum(np.maximum(before_Q + change_Q, 0.0), enough)
    stands_Q = test.stands_Q & (evidence_Q > 0.0)
    onset, full, ended, ended_by = test.onset, test.full, test.ended, test.ended_by
    until_Q = np.where(before_Q == enough, step, test.until_Q)
    if onset is not None:
        if (test.stands_Q & (before_Q == enough) & (evidence_Q < enough)).any():
            full = test.regression
        if full is not None and not stands_Q.any():
            ended = replace(full, until_step=int(until_Q[test.stands_Q].max()))
            onset, full, ended_by = None, None, step
    test = replace(
        test,
        evidence_Q=evidence_Q,
        since_Q=np.where(before_Q == 0.0, step, test.since_Q),
        first_Q=np.where(before_Q == 0.0, test.since_Q, test.first_Q),
        last_Q=np.where(before_Q <= settings.onset_log_likelihood, step, test.last_Q),
        until_Q=until_Q,
        stands_Q=stands_Q,
        recent=(*test.recent, (step, over_Q))[-settings.best_steps :],
        onset=onset,
        full=full,
        ended=ended,
        ended_by=ended_by,
    )
    begun = [q for q in np.flatnonzero((evidence_Q == enough) & ~stands_Q).tolist() if _counts(test, q, settings)]
    if not begun:
        return test
    stands_Q[begun] = True
    since = int(test.since_Q[begun[0]]), int(test.first_Q[begun[0]]), int(test.last_Q[begun[0]])
    return test if onset is not None else replace(test, onset=since)


def _counts(test: SpeedTest, q: int, settings: Settings) -> bool:
    """Whether a quantity's slowdown is worth reporting, and is most of the job's: time may also move between stages."""
    recent_Q = test.recent_Q(int(test.since_Q[q]))
    mostly = recent_Q[q] >= settings.most_fraction * recent_Q[STEP]
    return bool(mostly and recent_Q[STEP] >= settings.min_over_best_fraction)


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
            return tuple(stage for index, stage in enumerate(stages) if index not in rest)
    return ()


PAUSE_STEPS, LEAST_PAUSE_S = 10.0, 1.0
"""A pause is a step that takes at least this many times the typical one's length, and is this much longer."""


def paused_steps(measures: StepMeasures, settings: Settings) -> BoolArray:
    """The steps of a window in which the job paused: all ranks have most of the additional time in common.

    Steps with a kind do not count: their kind may take that long.
    """
    counts_N: BoolArray = measures.counts_N & np.asarray([kind == "" for kind, _ in measures.regimes])
    if not counts_N.any():
        return counts_N
    times_NQ = measures.times_NQ
    usual_Q = medians(times_NQ[counts_N], axis=0)
    over_NQ = times_NQ - usual_Q
    least_s = max(LEAST_PAUSE_S, (PAUSE_STEPS - 1.0) * float(usual_Q[STEP]))
    paused_N = counts_N & (over_NQ[:, STEP] >= least_s)
    return np.asarray(paused_N & (over_NQ[:, COMMON] >= settings.most_fraction * over_NQ[:, STEP]))


def pauses(measures: StepMeasures, settings: Settings, new_from: int, attempt: int) -> tuple[JobPaused, ...]:
    """The pauses in a window's steps from ``new_from``, without a time. Consecutive steps are one pause."""
    paused_N, paused, stages = paused_steps(measures, settings), [], measures.stages
    usual_Q = medians(measures.times_NQ[measures.counts_N], axis=0) if paused_N.any() else np.zeros(0)
    ends = np.flatnonzero(np.diff(np.concatenate(([False], paused_N, [False])).astype(np.int8))).reshape(-1, 2)
    for begin, end in np.maximum(ends, new_from - measures.first_step).tolist():
        if begin == end:
            continue
        over_Q = (measures.times_NQ[begin:end] - usual_Q).sum(axis=0)
        local_S, sync_S = over_Q[STAGES : STAGES + len(stages)], over_Q[STAGES + len(stages) : QUEUED]
        s = int(np.argmax(local_S + sync_S))
        reason: PauseReason = "in_sync" if sync_S[s] >= local_S[s] else "in_own_work"
        first, last = measures.first_step + begin, measures.first_step + end - 1
        paused.append(JobPaused(0.0, attempt, first, last, float(over_Q[STEP]), stages[s], reason))
    return tuple(paused)


def of_suspect(slower: Regression | None, verdict: Verdict, settings: Settings) -> Regression | None:
    """The regression, with scope ``some`` if a rank or a host that the system holds back costs most of it.

    Inside the sync stages all ranks wait for it alike.
    """
    first = verdict.suspects[0] if verdict.suspects else None
    if slower is None or first is None or not first.is_single or first.by_system is None:
        return slower
    most_s = settings.most_fraction * slower.fraction * slower.best_step_s
    return replace(slower, scope="some", stages=()) if first.gain_s >= most_s else slower


def with_regression(
    verdict: Verdict, slower: Regression | None, numbers: Mapping[str, float], window: Window
) -> Verdict:
    """The verdict with the regression of the job against its own best: while that lasts, the job is not healthy.

    A suspect stays the suspect. If the host's clock replaces a device's, the stages are left out.
    """
    verdict = replace(verdict, numbers={**verdict.numbers, **numbers})
    if slower is None:
        return verdict
    stages = () if window.on_device and verdict.clock == "host" else slower.stages
    verdict = replace(verdict, regression=replace(slower, stages=stages))
    if slower.until_step is not None or verdict.label == "suspect" or UNDECIDED & set(verdict.reasons):
        return verdict
    return replace(verdict, label="needs_evidence", reasons=(*verdict.reasons, "regressed"))
