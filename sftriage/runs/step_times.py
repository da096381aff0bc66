"""The times of a run's recorded steps for its time table: how long they took, and which were long, and why.

`TimesReader` reads the logs of a sample of the ranks as they grow, in blocks of steps, and keeps of each block a few
numbers and its long steps. Axes: N steps, K of them that are complete, R ranks (of the sample), S stages, W steps
around a step, E long steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from sftriage.model.windows import OTHER, Window
from sftriage.runs.decisions import WindowRow
from sftriage.trainer.layout import RingInfo
from sftriage.verdict.accounting import anchored, medians
from sftriage.windows.logs import LogReader, StepLogs, windows

BLOCK_STEPS, MARGIN_STEPS = 512, 24
"""Steps of a block, and the steps on either side of a step whose median is its usual time."""
MAX_READ_RANKS = 4
MIN_LONG_FRACTION, MIN_LONG_SPREADS = 0.5, 4.0
"""A long step exceeds the usual step by at least this fraction, and by this multiple of the upper quartile's excess."""
MOST = 0.5
"""The part of a long step's extra time that a stage of all ranks, or one rank, must explain."""
ALL_RANKS, NO_RANK = -1, -2

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]
LONG = np.dtype([("step", "i8"), ("over_s", "f8"), ("rank", "i4"), ("stage", "U32"), ("kind", "U16")])
"""A step, its time over the usual step's, the rank that the others wait for (`ALL_RANKS`, `NO_RANK`), the stage in
which it does, and the kind that it notes."""


@dataclass(frozen=True, slots=True, eq=False)
class AttemptTimes:
    """The recorded steps of one attempt.

    Attributes:
        begin_s, end_s: when the first recorded step began and the last one ended, since the epoch.
        n_steps: the recorded steps, which took ``steps_s``; older ones may be removed, ``removed_steps`` before them.
        long_E: the long steps (`LONG`).
    """

    attempt: int
    ranks: int
    begin_s: float
    end_s: float
    first_step: int
    last_step: int
    n_steps: int
    steps_s: float
    long_E: NDArray[np.void]
    removed_steps: int = 0


@dataclass(frozen=True, slots=True)
class StepBlock:
    """What is kept of consecutive steps: their number, the time they took, the last of them, and the long ones."""

    n_steps: int
    steps_s: float
    last_step: int
    long_E: NDArray[np.void]

    @classmethod
    def of(cls, window: Window, ranks: Sequence[int], first_step: int, end_step: int) -> StepBlock:
        """The block from ``first_step`` to before ``end_step``; the window may have steps around it."""
        # (a rank's time after the last sync stage is in the step to which it belongs, and not where others wait for it)
        exact = anchored(window)
        known = np.flatnonzero(exact.complete_N)
        times_K, step_K = exact.advances_NS[known].sum(axis=1), window.first_step + known
        within_K = (step_K >= first_step) & (step_K < end_step)
        if not within_K.any():
            return cls(0, 0.0, -1, np.zeros(0, LONG))
        usual_K = _usual(times_K)
        over_K = times_K - usual_K
        low_s, high_s = np.quantile(over_K, (0.5, 0.75))
        least_K = np.maximum(MIN_LONG_FRACTION * usual_K, MIN_LONG_SPREADS * (high_s - low_s))
        long = np.flatnonzero(within_K & (over_K >= least_K))
        found_E = np.zeros(len(long), LONG)
        found_E["step"], found_E["over_s"] = step_K[long], over_K[long]
        if len(long):
            spent_KRS = window.durations_NRS[known]
            if window.between_NR is not None:
                spent_KRS[:, :, window.schema.stages.index(OTHER)] += window.between_NR[known]
            common_KS, own_KR = spent_KRS.min(axis=1), _own(window, spent_KRS, known)
            more_ES, own_ER = common_KS[long] - np.median(common_KS, axis=0), own_KR[long] - np.median(own_KR, axis=0)
            for e, k in enumerate(long.tolist()):
                rank, found_E[e]["stage"] = _whose(window, ranks, more_ES[e], own_ER[e], float(over_K[k]))
                found_E[e]["rank"], found_E[e]["kind"] = _noted(window, ranks, int(known[k]), rank)
        return cls(int(within_K.sum()), float(times_K[within_K].sum()), int(step_K[within_K][-1]), found_E)


def _usual(times_K: FloatArray) -> FloatArray:
    """The median of the steps around each step."""
    around_KW = np.lib.stride_tricks.sliding_window_view(
        np.pad(times_K, MARGIN_STEPS, mode="reflect" if len(times_K) > 1 else "edge"), 2 * MARGIN_STEPS + 1
    )
    return medians(around_KW)


def _own(window: Window, spent_KRS: FloatArray, known: NDArray[np.intp]) -> FloatArray:
    """The time of each rank outside the sync stages, and in the split one until its last gradient was ready."""
    schema = window.schema
    local = [index for index, stage in enumerate(schema.stages) if stage not in schema.sync]
    own_KR: FloatArray = spent_KRS[:, :, local].sum(axis=2)
    if window.ready_NR is not None and schema.split_sync is not None:
        own_KR = own_KR + np.nan_to_num(window.ready_NR[known])
    return own_KR


def _whose(
    window: Window, ranks: Sequence[int], more_S: FloatArray, own_R: FloatArray, over_s: float
) -> tuple[int, str]:
    """The rank that causes a long step's extra time, and the stage; `ALL_RANKS` if all of them have most of it."""
    stages, stage = window.schema.stages, int(np.argmax(more_S))
    if more_S[stage] >= MOST * over_s:
        return ALL_RANKS, stages[stage]
    if own_R.min() >= MOST * over_s:
        return ALL_RANKS, ""
    last = int(own_R.argmax())
    others = np.delete(own_R, last)
    if len(others) and own_R[last] - np.median(others) >= MOST * over_s:
        return ranks[last], ""
    return NO_RANK, ""


def _noted(window: Window, ranks: Sequence[int], n: int, rank: int) -> tuple[int, str]:
    """The rank that causes a step's extra time, by what the ranks note of it, and that note."""
    if window.kinds is not None and window.kinds[n]:
        return rank, window.kinds[n]
    noted = [] if window.noted_NR is None else window.noted_NR[n].tolist()
    by = [r for r, kind in zip(ranks, noted, strict=True) if kind] if noted else []
    if not by or rank == ALL_RANKS:
        return rank, ""
    of = rank if rank in by else by[0]
    return of, str(noted[ranks.index(of)])


class _Attempt:
    """Reads the logs of one attempt's ranks block by block; blocks that can no longer change are read once."""

    def __init__(self, first: int) -> None:
        self.first, self.blocks, self.next_step = first, list[StepBlock](), first

    def read(self, readers: Mapping[int, LogReader], *, ended: bool) -> list[StepBlock]:
        """All blocks, as far as the logs have grown."""
        ranks, open_blocks, step = list(readers), list[tuple[int, StepBlock]](), self.next_step
        while True:
            run = max(0, step - MARGIN_STEPS), BLOCK_STEPS + MARGIN_STEPS + min(step, MARGIN_STEPS)
            (window,) = windows(readers, [run], MAX_READ_RANKS * 2 * BLOCK_STEPS)
            block = StepBlock.of(window, ranks, step, step + BLOCK_STEPS)
            if not block.n_steps:
                starts = (log.first_step(path) for log in readers.values() for path in log.files.segments)
                later = min((start for start in starts if start is not None and start > step), default=None)
                if later is None:
                    break
                step = max(step + BLOCK_STEPS, later)
                continue
            open_blocks.append((step, block))
            step += BLOCK_STEPS
            whole = bool(np.isfinite(window.durations_NRS[-1]).all())
            # The newest steps may still grow; two blocks behind them nothing does.
            final = open_blocks if whole or ended else open_blocks[:-2]
            self.blocks += [found for _, found in final]
            del open_blocks[: len(final)]
            self.next_step = open_blocks[0][0] if open_blocks else step
        return [*self.blocks, *(found for _, found in open_blocks)]


@dataclass(slots=True)
class TimesReader:
    """The times of a run's recorded steps, from the logs of a sample of its ranks, read as they grow."""

    logs: StepLogs
    _attempts: dict[int, _Attempt] = field(default_factory=dict)
    _closed: dict[int, AttemptTimes] = field(default_factory=dict)

    def read(self, *, ended: bool) -> list[AttemptTimes]:
        """The attempts with a recorded step, in order. ``ended``: no step will follow."""
        self.logs.refresh()
        found = []
        for attempt in sorted(self.logs.attempts):
            over = ended or attempt < max(self.logs.attempts)
            times = self._closed.get(attempt) or self._of(attempt, over)
            if times is not None:
                found.append(times)
                if over:
                    self._closed[attempt] = times
        return found

    def _of(self, attempt: int, ended: bool) -> AttemptTimes | None:
        there = sorted(self.logs.attempts[attempt])
        readers = self.logs.of(attempt, there[:: -(-len(there) // MAX_READ_RANKS)])
        starts = (log.first_step(path) for log in readers.values() for path in log.files.segments)
        first = min((start for start in starts if start is not None), default=None)
        if first is None:
            return None
        blocks = self._attempts.setdefault(attempt, _Attempt(first)).read(readers, ended=ended)
        last = max((block.last_step for block in blocks), default=-1)
        ends = [_ends(log, first, last) for log in readers.values()]
        moments = [moment for moment in ends if moment is not None]
        if not moments:
            return None
        return AttemptTimes(
            attempt=attempt,
            ranks=next(iter(readers.values())).info.world_size,
            begin_s=min(begin_s for begin_s, _, _ in moments),
            end_s=max(end_s for _, end_s, _ in moments),
            first_step=first,
            last_step=last,
            n_steps=sum(block.n_steps for block in blocks),
            steps_s=sum(block.steps_s for block in blocks),
            long_E=np.concatenate([block.long_E for block in blocks]),
            removed_steps=min(removed for _, _, removed in moments),
        )


def _ends(log: LogReader, first: int, last: int) -> tuple[float, float, int] | None:
    """When a rank began one step and ended another, and how many steps it had published before the first."""
    _, steps = log.steps([(first, 1), (last, 1)])
    if not len(steps):
        return None
    ends_ns = steps.start_ns_B + steps.durations_ns_BS.sum(axis=1)
    begin_s, end_s = (_wall_s(log.info, int(at_ns)) for at_ns in (steps.start_ns_B[0], ends_ns[-1]))
    return begin_s, end_s, int(steps.seq_B[0]) - 1


def _wall_s(info: RingInfo, at_ns: int) -> float:
    return (info.started_wall_ns + at_ns - info.started_mono_ns) * 1e-9


def attempt_of(window: Window) -> AttemptTimes:
    """The steps of a recording without moments, as if it began at 0."""
    ranks = range(window.durations_NRS.shape[1])
    block = StepBlock.of(window, ranks, window.first_step, window.last_step + 1)
    steps = window.first_step, window.last_step, block.n_steps, block.steps_s, block.long_E
    return AttemptTimes(window.attempt, len(ranks), 0.0, block.steps_s, *steps)


def attempts_of(rows: Sequence[WindowRow], ranks: int) -> list[AttemptTimes]:
    """The attempts of a run whose steps are not on record, by its judged windows."""
    attempts = []
    ended = [row for row in rows if row.label != "stalled"]
    for attempt, grouped in groupby(ended, lambda row: row.attempt):
        of_attempt = list(grouped)
        first, n_steps, steps_s = of_attempt[0].first_step, 0, 0.0
        last, end_s = first - 1, of_attempt[-1].time_s
        for row in of_attempt:
            new = max(0, row.last_step - max(last, row.first_step - 1))
            n_steps, steps_s, last = n_steps + new, steps_s + new * row.exposed_s, max(last, row.last_step)
        moments = end_s - steps_s, end_s
        attempts.append(AttemptTimes(attempt, ranks, *moments, first, last, n_steps, steps_s, np.zeros(0, LONG)))
    return attempts
