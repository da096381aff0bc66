"""The times of a run's recorded steps for its time table: how long they took, and which were long, and why.

`TimesReader` reads the logs of a sample of the ranks as they grow, in blocks of steps, and keeps of each block a few
numbers and its long steps. It reads a long step of all ranks if no rank of the sample explains it. Axes: N steps, K of
them that are complete, R ranks, S stages, W steps around a step, E long steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sftriage.model.windows import LOADER_START, OTHER, Window
from sftriage.verdict.accounting import anchored, medians
from sftriage.windows.logs import LogReader, StepLogs, windows

BLOCK_STEPS, MARGIN_STEPS = 512, 24
"""Steps of a block, and the steps on either side of a step whose median is its usual time."""
MAX_READ_RANKS = 4
MAX_SOUGHT, SOUGHT_RANKS, BEFORE_STEPS = 8192, 1024, 8
"""The longest of a block's long steps are read of all ranks, each with the steps before it: the most steps of ranks
that are read, the most ranks, and the steps before."""
MIN_LONG_FRACTION, MIN_LONG_SPREADS = 0.5, 4.0
"""A long step exceeds the usual step by at least this fraction, and by this multiple of the upper quartile's excess."""
MOST, SOME = 0.5, 0.2
"""The part of a long step's extra time that a stage of all ranks, or one rank, must explain; and that each of the two
must have where both do."""
ALL_RANKS, NO_RANK = -1, -2

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
_WHOSE = [("rank", "i4"), ("stage", "U32"), ("kind", "U16"), ("shared_s", "f8"), ("anew", "?")]
LONG = np.dtype([("step", "i8"), ("over_s", "f8"), *_WHOSE])
"""A step, its time over the usual step's, the rank that the others wait for (`ALL_RANKS`, `NO_RANK`), the stage in
which it does, and the kind that it notes; how much of it all ranks had in that stage, where the rest is one rank's; and
whether it was in ``data`` and loaders started their workers ``anew``."""


@dataclass(frozen=True, slots=True, eq=False)
class StepBlock:
    """What is kept of consecutive steps: their number, the time they took, the last of them, and the long ones."""

    n_steps: int
    steps_s: float
    last_step: int
    long_E: NDArray[np.void]

    @classmethod
    def of(cls, window: Window, ranks: Sequence[int], n_ranks: int, first_step: int, end_step: int) -> StepBlock:
        """The block from ``first_step`` to before ``end_step``; the window may have steps around it."""
        # (a rank's time after the last sync stage is in the step to which it belongs, and not where others wait for it)
        exact = anchored(window)
        known_K = np.flatnonzero(exact.complete_N)
        times_K, step_K = exact.advances_NS[known_K].sum(axis=1), window.first_step + known_K
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
        explain(found_E, window, ranks, n_ranks)
        return cls(int(within_K.sum()), float(times_K[within_K].sum()), int(step_K[within_K][-1]), found_E)


def _usual(times_K: FloatArray) -> FloatArray:
    """The median of the steps around each step."""
    around_KW = np.lib.stride_tricks.sliding_window_view(
        np.pad(times_K, MARGIN_STEPS, mode="reflect" if len(times_K) > 1 else "edge"), 2 * MARGIN_STEPS + 1
    )
    return medians(around_KW)


def explain(found_E: NDArray[np.void], window: Window, ranks: Sequence[int], n_ranks: int) -> None:
    """Set whose some long steps of a window of ``ranks``, of ``n_ranks`` in all, are: rank, stage and kind."""
    if not len(found_E):
        return
    schema, known_K = window.schema, np.flatnonzero(np.isfinite(window.durations_NRS).all(axis=(1, 2)))
    spent_KRS = window.durations_NRS[known_K]
    if window.between_NR is not None:
        spent_KRS[:, :, schema.stages.index(OTHER)] += np.nan_to_num(window.between_NR[known_K])
    # The time of each rank outside the sync stages, and in the split one until its last gradient was ready.
    local = [index for index, stage in enumerate(schema.stages) if stage not in schema.sync]
    own_KR: FloatArray = spent_KRS[:, :, local].sum(axis=2)
    if window.ready_NR is not None and schema.split_sync is not None:
        own_KR = own_KR + np.nan_to_num(window.ready_NR[known_K])
    common_KS = spent_KRS.min(axis=1)
    more_KS, more_KR = common_KS - np.median(common_KS, axis=0), own_KR - np.median(own_KR, axis=0)
    # (ranks of a sample may all wait for one of the others)
    stages_S = local if len(ranks) < n_ranks else list(range(len(schema.stages)))
    for found, n in zip(found_E, (found_E["step"] - window.first_step).tolist(), strict=True):
        (k,), over_s = np.flatnonzero(known_K == n), float(found["over_s"])
        index, last = max(stages_S, key=more_KS[k].__getitem__), int(more_KR[k].argmax())
        shared_s, others_s = float(more_KS[k, index]), np.delete(more_KR[k], last)
        alone_s = more_KR[k, last] - np.median(others_s) if len(others_s) else 0.0
        two = index in local and SOME * over_s <= shared_s <= (1.0 - SOME) * over_s
        if two and (alone_s >= SOME * over_s or len(ranks) < n_ranks) and not (window.kinds and window.kinds[n]):
            rank = ranks[last] if alone_s >= SOME * over_s else NO_RANK
        else:
            two, rank = False, ranks[last] if alone_s >= MOST * over_s else NO_RANK
            if shared_s >= MOST * over_s or more_KR[k].min() >= MOST * over_s:
                rank = ALL_RANKS
        stage = schema.stages[index] if two or (rank == ALL_RANKS and shared_s >= MOST * over_s) else ""
        found["stage"], found["shared_s"] = stage, shared_s if two else 0.0
        found["anew"] = stage == "data" and window.loaders_N is not None and window.loaders_N[n]
        found["rank"], found["kind"] = _noted(window, ranks, n, rank)


def _noted(window: Window, ranks: Sequence[int], n: int, rank: int) -> tuple[int, str]:
    """The rank that causes a step's extra time, by what the ranks note of it, and that note."""
    if window.kinds is not None and window.kinds[n]:
        return rank, window.kinds[n]
    noted = {} if window.noted_NR is None else dict(zip(ranks, window.noted_NR[n].tolist(), strict=True))
    by = [each for each, kind in noted.items() if kind]
    if not by or rank == ALL_RANKS:
        return rank, ""
    of = rank if rank in by else by[0]
    return of, noted[of]


def apart(long_E: NDArray[np.void]) -> NDArray[np.void]:
    """Long steps, with the time that all ranks had where another part is one rank's in an entry of its own."""
    shared_E, rest_E = long_E[long_E["shared_s"] > 0.0], long_E.copy()
    shared_E["over_s"], shared_E["rank"], shared_E["kind"] = shared_E["shared_s"], ALL_RANKS, ""
    rest_E["over_s"] -= rest_E["shared_s"]
    rest_E["stage"][rest_E["shared_s"] > 0.0] = ""
    found_E = np.concatenate([rest_E, shared_E])
    anew_E = found_E["anew"] & (found_E["stage"] != "") & (found_E["kind"] == "")
    found_E["kind"][anew_E] = LOADER_START
    return found_E[found_E["step"].argsort(kind="stable")]


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


class _Attempt:
    """Reads the logs of one attempt's ranks block by block; blocks that can no longer change are read once."""

    def __init__(self, first: int) -> None:
        self.first, self.blocks, self.next_step = first, list[StepBlock](), first
        self._sought: dict[int, tuple[object, ...]] = {}

    def read(
        self, readers: Mapping[int, LogReader], everyone: Callable[[], Mapping[int, LogReader]], *, ended: bool
    ) -> list[StepBlock]:
        """All blocks, as far as the logs have grown."""
        n_ranks = next(iter(readers.values())).info.world_size
        ranks, open_blocks, step = list(readers), list[tuple[int, StepBlock]](), self.next_step
        while True:
            run = max(0, step - MARGIN_STEPS), BLOCK_STEPS + MARGIN_STEPS + min(step, MARGIN_STEPS)
            (window,) = windows(readers, [run], len(ranks) * 2 * BLOCK_STEPS)
            block = StepBlock.of(window, ranks, n_ranks, step, step + BLOCK_STEPS)
            if not block.n_steps:
                later = min((start for start in _starts(readers) if start > step), default=None)
                if later is None:
                    break
                step = max(step + BLOCK_STEPS, later)
                continue
            if len(ranks) < n_ranks and (block.long_E["rank"] == NO_RANK).any():
                self._seek(block.long_E, everyone(), n_ranks)
            open_blocks.append((step, block))
            step += BLOCK_STEPS
            whole = bool(np.isfinite(window.durations_NRS[-1]).all())
            # The newest steps may still grow; two blocks behind them nothing does.
            final = open_blocks if whole or ended else open_blocks[:-2]
            self.blocks += [found for _, found in final]
            del open_blocks[: len(final)]
            self.next_step = open_blocks[0][0] if open_blocks else step
        return [*self.blocks, *(found for _, found in open_blocks)]

    def _seek(self, long_E: NDArray[np.void], everyone: Mapping[int, LogReader], n_ranks: int) -> None:
        """Set whose the longest of those steps are for which the sample's ranks all waited. Each step is read once."""
        waited = np.flatnonzero(long_E["rank"] == NO_RANK)
        longest = waited[long_E["over_s"][waited].argsort()[::-1]][: max(1, MAX_SOUGHT // len(everyone))]
        new = [e for e in longest.tolist() if int(long_E["step"][e]) not in self._sought]
        runs = [(max(0, step - BEFORE_STEPS), min(step, BEFORE_STEPS) + 1) for step in long_E["step"][new].tolist()]
        for e, window in zip(new, windows(everyone, runs, len(everyone) * len(runs) * (BEFORE_STEPS + 1)), strict=True):
            exact, one_E = anchored(window), long_E[[e]]
            # (ranks may not have ended it yet)
            if not exact.complete_N[-1]:
                continue
            # What a rank does after the last sync stage belongs to the step before that in which the others wait.
            times_N = exact.advances_NS.sum(axis=1)
            over_s = times_N[-2:-1].sum() - np.median(times_N[exact.complete_N])
            one_E["step"] -= over_s >= MOST * one_E["over_s"]
            explain(one_E, window, list(everyone), n_ranks)
            self._sought[int(long_E["step"][e])] = tuple(one_E[0].item()[2:])
        for e in longest.tolist():
            if (known := self._sought.get(int(long_E["step"][e]))) is not None:
                long_E[e] = (*long_E[e].item()[:2], *known)


def _starts(readers: Mapping[int, LogReader]) -> list[int]:
    """The first steps of all segments."""
    starts = (log.first_step(path) for log in readers.values() for path in log.files.segments)
    return [start for start in starts if start is not None]


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
        def some(most: int) -> Mapping[int, LogReader]:
            there = sorted(self.logs.attempts[attempt])
            return self.logs.of(attempt, there[:: -(-len(there) // most)])

        readers = some(MAX_READ_RANKS)
        if not (starts := _starts(readers)):
            return None
        reading = self._attempts.setdefault(attempt, _Attempt(min(starts)))
        blocks = reading.read(readers, lambda: some(SOUGHT_RANKS), ended=ended)
        last = max((block.last_step for block in blocks), default=-1)
        ends = [ends for log in readers.values() if (ends := _ends(log, reading.first, last)) is not None]
        if not ends:
            return None
        return AttemptTimes(
            attempt=attempt,
            ranks=next(iter(readers.values())).info.world_size,
            begin_s=min(begin_s for begin_s, _, _ in ends),
            end_s=max(end_s for _, end_s, _ in ends),
            first_step=reading.first,
            last_step=last,
            n_steps=sum(block.n_steps for block in blocks),
            steps_s=sum(block.steps_s for block in blocks),
            long_E=apart(np.concatenate([block.long_E for block in blocks])),
            removed_steps=min(removed for _, _, removed in ends),
        )


def _ends(log: LogReader, first: int, last: int) -> tuple[float, float, int] | None:
    """When a rank began one step and ended another, and how many steps it had published before the first."""
    _, steps = log.steps([(first, 1), (last, 1)])
    if not len(steps):
        return None
    wall_ns, end_ns = log.info.started_wall_ns - log.info.started_mono_ns, int(steps.durations_ns_BS[-1].sum())
    begin_ns, last_ns = (int(at_ns) + wall_ns for at_ns in steps.start_ns_B[[0, -1]])
    return begin_ns * 1e-9, (last_ns + end_ns) * 1e-9, int(steps.seq_B[0]) - 1


def attempt_of(window: Window) -> AttemptTimes:
    """The steps of a recording without moments, as if it began at 0."""
    ranks = range(window.durations_NRS.shape[1])
    block = StepBlock.of(window, ranks, len(ranks), window.first_step, window.last_step + 1)
    steps = window.first_step, window.last_step, block.n_steps, block.steps_s, apart(block.long_E)
    return AttemptTimes(window.attempt, len(ranks), 0.0, block.steps_s, *steps)
