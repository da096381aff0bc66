"""A run's step logs as they are read: from beginning to end, or by position, some steps of some ranks.

A log that is written to meanwhile, has gaps, or is damaged in places gives the steps that are whole. Axes: N steps,
R ranks, B slots, X runs of steps.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from sftriage.errors import RingError
from sftriage.recorder import RingInfo, files
from sftriage.recorder.layout import HEADER_BYTES, MAX_COUNT, decode_header
from sftriage.records import Window
from sftriage.windows.decoding import BoolArray, IntArray, StepArrays, checked, decode, together
from sftriage.windows.gather import Gatherer, Shape
from sftriage.windows.slots import slot_bytes
from sftriage.windows.steplog import MAGICS

NS = 1e-9
LOG_NAME = re.compile(r"rank-(\d{1,9})\.(\d{1,9})\.steps")
"""A log, by rank and attempt."""

Run = tuple[int, int]
"""Steps one after the other: the first, and how many."""

STEPS_AT_A_TIME = 4096

LOG_KIND = "device-steps"
"""What logs of device times are called."""


class LogReader:
    """Reads a step log from its beginning to its end, a bounded number of steps at a time.

    No file is open between two reads: the logs of a job's every rank can be read side by side.

    Attributes:
        info: who wrote the ring that it was taken from.
        skipped: slots so far that were damaged, half-written or out of order.

    Raises:
        RingError: the header cannot be read: foreign, truncated, of another version or byte order, or damaged.
    """

    def __init__(self, path: Path | str, *, kind: str = "steps") -> None:
        self.path = Path(path)
        self.info = decode_header(MAGICS[kind], self._bytes_at(0, HEADER_BYTES), str(path)).info
        self.skipped = 0
        self._last_seq = 0
        self._at: int | None = HEADER_BYTES

    def read(self, n_steps: int = STEPS_AT_A_TIME) -> StepArrays:
        """The next steps, at most so many; none once all have been read.

        Raises:
            RingError: the file has gone, or the file system answered with an error.
        """
        wanted = n_steps * slot_bytes(self.info.schema)
        while self._at is not None:
            data = self._bytes_at(self._at, wanted)
            self._at = self._at + wanted if len(data) == wanted else None
            half = len(data) % slot_bytes(self.info.schema)
            steps, sound_B = checked(self.info.rank, data[: len(data) - half], self.info.schema)
            # What comes twice, or late, is not taken again: only what is beyond all before it.
            seq_B = np.concatenate([[self._last_seq], np.where(sound_B, steps.seq_B, 0)])
            highest_B = np.maximum.accumulate(seq_B)
            self._last_seq = int(highest_B[-1])
            new_B = seq_B[1:] > highest_B[:-1]
            self.skipped += int((~new_B).sum()) + bool(half)
            if new_B.any():
                return steps if new_B.all() else steps[new_B]
        return decode([(self.info.rank, b"")], self.info.schema)

    def _bytes_at(self, offset: int, size_bytes: int) -> bytes:
        descriptor = files.open_regular(self.path, os.O_RDONLY)
        try:
            return files.read_at(descriptor, size_bytes, offset, str(self.path))
        finally:
            os.close(descriptor)


@dataclass(slots=True)
class StepFile:
    """One rank's log."""

    path: Path
    info: RingInfo
    _first_step: int | None = None

    def steps(self, runs: Sequence[Run]) -> tuple[IntArray, StepArrays]:
        """The complete steps of some runs of them that are there whole.

        Returns:
            Their places (B) in the runs laid end to end, and the steps (B).
        """
        nothing = np.zeros(0, dtype=np.int64), decode([(self.info.rank, b"")], self.info.schema)
        try:
            descriptor = files.open_regular(self.path, os.O_RDONLY)
        except RingError:
            return nothing
        try:
            n_slots = (os.fstat(descriptor).st_size - HEADER_BYTES) // slot_bytes(self.info.schema)
            if self._first_step is None and n_slots:
                self._first_step = self._step_at(descriptor, 0)
            return self._steps(descriptor, n_slots, np.array(runs, dtype=np.int64).reshape(-1, 2))
        except OSError:
            return nothing
        finally:
            os.close(descriptor)

    def _steps(self, descriptor: int, n_slots: int, runs_X2: IntArray) -> tuple[IntArray, StepArrays]:
        """Mostly no step is missing, so that where one is follows from its number: all runs are read, checked as one.

        What is not where it should be is looked for.
        """
        size = slot_bytes(self.info.schema)
        starts_X, lengths_X = runs_X2[:, 0], runs_X2[:, 1]
        bases_X = np.cumsum(lengths_X) - lengths_X
        at_X = starts_X - (self._first_step or 0)
        right_X = (at_X >= 0) & (at_X + lengths_X <= n_slots)
        raw = b"".join(
            os.pread(descriptor, length * size, HEADER_BYTES + at * size)
            for at, length in zip(at_X[right_X].tolist(), lengths_X[right_X].tolist(), strict=True)
        )
        if len(raw) != int(lengths_X[right_X].sum()) * size:
            right_X[:], raw = False, b""
        steps, whole_B = self._checked(raw)
        within_B = _ranges(lengths_X[right_X])
        placed_B = steps.step_B == np.repeat(starts_X[right_X], lengths_X[right_X]) + within_B
        runs_B = np.repeat(np.flatnonzero(right_X), lengths_X[right_X])
        # What is damaged says nothing of where the others are.
        right_X[runs_B[whole_B & ~placed_B]] = False
        keep_B = whole_B & right_X[runs_B]
        places_B = bases_X[runs_B] + within_B
        if keep_B.all() and right_X.all():
            return places_B, steps
        places, found = [places_B[keep_B]], [steps[keep_B]]
        for run in np.flatnonzero(~right_X).tolist():
            searched = self._searched(descriptor, n_slots, int(starts_X[run]), int(lengths_X[run]))
            places.append(bases_X[run] + searched.step_B - starts_X[run])
            found.append(searched)
        return np.concatenate(places), together(found)

    def _searched(self, descriptor: int, n_slots: int, first: int, n_steps: int) -> StepArrays:
        at = bisect_left(range(n_slots), first, key=lambda index: self._step_at(descriptor, index))
        size = slot_bytes(self.info.schema)
        raw = os.pread(descriptor, n_steps * size, HEADER_BYTES + at * size)
        steps, whole_B = self._checked(raw[: len(raw) // size * size])
        return steps[whole_B & (steps.step_B >= first) & (steps.step_B < first + n_steps)]

    def _step_at(self, descriptor: int, index: int) -> int:
        """The number of a step by its place; beyond any step where the log ends before that."""
        size = slot_bytes(self.info.schema)
        raw = os.pread(descriptor, size, HEADER_BYTES + index * size)
        return int(decode([(self.info.rank, raw)], self.info.schema).step_B[0]) if len(raw) == size else MAX_COUNT

    def _checked(self, raw: bytes) -> tuple[StepArrays, BoolArray]:
        """Slots, and which of them (B) were written whole, of a complete step."""
        steps, sound_B = checked(self.info.rank, raw, self.info.schema)
        return steps, sound_B & steps.complete_B


def _ranges(lengths_X: IntArray) -> IntArray:
    """0, 1, ... of each length, one after the other."""
    ends_X = np.cumsum(lengths_X)
    return np.asarray(np.arange(int(lengths_X.sum())) - np.repeat(ends_X - lengths_X, lengths_X))


@dataclass(slots=True)
class StepLogs:
    """The logs of a run, by attempt and rank."""

    directory: Path
    attempts: dict[int, dict[int, StepFile]] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)

    def look(self) -> None:
        """Take up logs that have appeared. One that cannot be read is looked at again the next time."""
        try:
            names = {entry.name for entry in os.scandir(self.directory)} - self._seen
        except OSError:
            return
        for name in names:
            if not LOG_NAME.fullmatch(name):
                continue
            path = self.directory / name
            try:
                info = LogReader(path).info
            except RingError:
                continue
            self._seen.add(name)
            self.attempts.setdefault(info.attempt, {})[info.rank] = StepFile(path, info)

    def of(self, attempt: int) -> Mapping[int, StepFile]:
        """The logs of the ranks of one attempt that recorded the same stages as the lowest of them."""
        ranks = dict(sorted(self.attempts.get(attempt, {}).items()))
        schema = next(iter(ranks.values())).info.schema if ranks else None
        return {rank: one for rank, one in ranks.items() if one.info.schema == schema}


def windows(
    ranks: Mapping[int, StepFile], runs: Sequence[Run], take: Callable[[Window], None], max_vectors: int
) -> None:
    """Hand out runs of steps of the ranks as windows, in order; few at a time, so that memory stays bounded.

    A step that a rank does not have is NaN.
    """
    logs = list(ranks.values())
    longest = max((n_steps for _, n_steps in runs), default=1)
    at_a_time = max(1, max_vectors // (longest * max(1, len(logs))))
    for start in range(0, len(runs), at_a_time):
        some = runs[start : start + at_a_time]
        whole = _end_to_end(logs, some)
        base = 0
        for first, n_steps in some:
            run = whole.steps(base, base + n_steps - 1)
            known = run.ready_NR is not None and np.isfinite(run.ready_NR).any()
            take(replace(run, first_step=first, ready_NR=run.ready_NR if known else None))
            base += n_steps


def _end_to_end(logs: Sequence[StepFile], runs: Sequence[Run]) -> Window:
    """Runs of steps laid end to end, as if they were one, numbered from 0."""
    schema = logs[0].info.schema
    shape = sum(n_steps for _, n_steps in runs), len(logs)
    n_stages = len(schema.stages)
    times_NRV = np.full((*shape, n_stages + len(schema.sync)), np.nan)
    between_NR, ready_NR = np.full(shape, np.nan), np.full(shape, np.nan)
    for r, log in enumerate(logs):
        places_B, steps = log.steps(runs)
        times_NRV[places_B, r] = steps.times_ns_BV * NS
        between_NR[places_B, r] = steps.between_ns_B * NS
        ready_NR[places_B, r] = steps.ready_ns_B * NS
    ready_NR[ready_NR < 0.0] = np.nan
    cohorts = tuple(log.info.cohort for log in logs)
    return Window(
        schema=schema,
        first_step=0,
        durations_NRS=times_NRV[:, :, :n_stages],
        outside_NRG=times_NRV[:, :, n_stages:] if schema.sync else None,
        between_NR=between_NR,
        ready_NR=ready_NR,
        cohorts=cohorts if any(cohorts) else None,
    )


def kept_steps(logs: StepLogs, attempt: int, first_step: int, last_step: int) -> Window | None:
    """Some steps of one attempt of a job by the host's clock, from its logs; None where none of them has any."""
    logs.look()
    of_attempt = logs.of(attempt)
    run = (first_step, last_step - first_step + 1)
    found = [log.steps([run])[1] for log in of_attempt.values()]
    if not any(map(len, found)):
        return None
    info = next(iter(of_attempt.values())).info
    gatherer = Gatherer(info.schema, info.world_size, Shape(run[1], run[1], 0), attempt=attempt)
    gatherer.add(together(found))
    return next(iter(gatherer.ready(ended=True)), None)
