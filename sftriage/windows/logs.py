"""A run's step logs, read by position: some steps of some ranks, without passing over the rest.

A log that is written to meanwhile, has gaps, or is damaged in places gives the steps that are whole. Axes: N steps,
R ranks, B slots, X runs of steps, W words of a slot (see `recorder.layout`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import RingError
from sftriage.recorder import LogReader, RingInfo, files
from sftriage.recorder.layout import (
    BETWEEN,
    DURATIONS,
    FLAGS,
    HEADER_BYTES,
    INCOMPLETE,
    READY,
    STEP,
    WORD_BYTES,
    SlotCodec,
)
from sftriage.records import StepRecord, Window

NS = 1e-9
LOG_NAME = re.compile(r"rank-(\d{1,9})\.(\d{1,9})\.steps")
"""A log, by rank and attempt."""

Run = tuple[int, int]
"""Steps one after the other: the first, and how many."""

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(slots=True)
class StepFile:
    """One rank's log."""

    path: Path
    info: RingInfo
    _first_step: int | None = None

    def rows(self, runs: Sequence[Run]) -> tuple[IntArray, IntArray]:
        """The slots of some runs of steps that are there whole.

        Returns:
            Their places (B) in the runs laid end to end, and the slots (B, W).
        """
        try:
            descriptor = files.open_regular(self.path, os.O_RDONLY)
        except RingError:
            return np.zeros(0, dtype=np.int64), np.zeros((0, self.info.slot_words), dtype=np.int64)
        try:
            n_slots = (os.fstat(descriptor).st_size - HEADER_BYTES) // self.info.slot_bytes
            if self._first_step is None:
                self._first_step = self._step_at(descriptor, 0)
            return self._rows(descriptor, n_slots, np.array(runs, dtype=np.int64).reshape(-1, 2))
        except OSError:
            return np.zeros(0, dtype=np.int64), np.zeros((0, self.info.slot_words), dtype=np.int64)
        finally:
            os.close(descriptor)

    def records(self, first: int, n_steps: int) -> list[StepRecord]:
        """The steps of a run that are there whole."""
        codec = SlotCodec(self.info)
        found = (codec.decode(slot.tobytes()) for slot in self.rows([(first, n_steps)])[1])
        return [record for _, record in filter(None, found)]

    def _rows(self, descriptor: int, n_slots: int, runs_X2: IntArray) -> tuple[IntArray, IntArray]:
        """Mostly no step is missing, so that where one is follows from its number: all runs are read, checked as one.

        What is not where it should be is looked for.
        """
        size = self.info.slot_bytes
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
        slots_BW, whole_B = self._checked(raw)
        within_B = _ranges(lengths_X[right_X])
        placed_B = slots_BW[:, STEP] == np.repeat(starts_X[right_X], lengths_X[right_X]) + within_B
        runs_B = np.repeat(np.flatnonzero(right_X), lengths_X[right_X])
        # What is damaged says nothing of where the others are.
        right_X[runs_B[whole_B & ~placed_B]] = False
        keep_B = whole_B & right_X[runs_B]
        places, slots = [(bases_X[runs_B] + within_B)[keep_B]], [slots_BW[keep_B]]
        for run in np.flatnonzero(~right_X).tolist():
            found_BW = self._searched(descriptor, n_slots, int(starts_X[run]), int(lengths_X[run]))
            places.append(bases_X[run] + found_BW[:, STEP] - starts_X[run])
            slots.append(found_BW)
        return np.concatenate(places), np.concatenate(slots)

    def _searched(self, descriptor: int, n_slots: int, first: int, n_steps: int) -> IntArray:
        at = self._place(descriptor, n_slots, first)
        size = self.info.slot_bytes
        raw = os.pread(descriptor, n_steps * size, HEADER_BYTES + at * size)
        slots_BW, whole_B = self._checked(raw[: len(raw) // size * size])
        steps_B = slots_BW[:, STEP]
        return np.asarray(slots_BW[whole_B & (steps_B >= first) & (steps_B < first + n_steps)])

    def _place(self, descriptor: int, n_slots: int, step: int) -> int:
        """The index of the first slot of this step, or of the next that is there."""
        low, high = 0, n_slots
        while low < high:
            middle = (low + high) // 2
            found = self._step_at(descriptor, middle)
            if found is not None and found < step:
                low = middle + 1
            else:
                high = middle
        return low

    def _step_at(self, descriptor: int, index: int) -> int | None:
        at = HEADER_BYTES + index * self.info.slot_bytes + STEP * WORD_BYTES
        word = os.pread(descriptor, WORD_BYTES, at)
        return int(np.frombuffer(word, dtype=np.int64)[0]) if len(word) == WORD_BYTES else None

    def _checked(self, raw: bytes) -> tuple[IntArray, NDArray[np.bool_]]:
        """Whole slots (B, W), and which of them (B) were written whole."""
        size = self.info.slot_bytes
        view = memoryview(raw)
        slots_BW = np.frombuffer(view, dtype=np.int64).reshape(-1, self.info.slot_words)
        sums = [crc32(view[start : start + size - WORD_BYTES]) for start in range(0, len(view), size)]
        return slots_BW, np.asarray(_sound(slots_BW) & (slots_BW[:, -1] == np.array(sums, dtype=np.int64)))


def _ranges(lengths_X: IntArray) -> IntArray:
    """0, 1, ... of each length, one after the other."""
    ends_X = np.cumsum(lengths_X)
    return np.asarray(np.arange(int(lengths_X.sum())) - np.repeat(ends_X - lengths_X, lengths_X))


def _sound(slots_BW: IntArray) -> NDArray[np.bool_]:
    """Slots of complete steps without a negative time: a right checksum does not make a right writer."""
    times_BV = slots_BW[:, DURATIONS:-1]
    whole_B = slots_BW[:, FLAGS] & INCOMPLETE == 0
    return np.asarray(whole_B & (slots_BW[:, BETWEEN] >= 0) & (times_BV >= 0).all(axis=1))


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
    together = max(1, max_vectors // (longest * max(1, len(logs))))
    for start in range(0, len(runs), together):
        some = runs[start : start + together]
        n_steps = sum(n for _, n in some)
        words_NRW = np.full((n_steps, len(logs), logs[0].info.slot_words), -1, dtype=np.int64)
        for r, log in enumerate(logs):
            places_B, slots_BW = log.rows(some)
            words_NRW[places_B, r] = slots_BW
        base = 0
        for first, n in some:
            take(_window(logs, first, words_NRW[base : base + n]))
            base += n


def _window(logs: Sequence[StepFile], first: int, words_NRW: IntArray) -> Window:
    schema = logs[0].info.schema
    n_stages = len(schema.stages)
    times_NRV: FloatArray = words_NRW[:, :, DURATIONS:-1] * np.float64(NS)
    times_NRV[words_NRW[:, :, 0] < 0] = np.nan
    ready_NR = np.where(words_NRW[:, :, READY] >= 0, words_NRW[:, :, READY] * NS, np.nan)
    between_NR = np.where(words_NRW[:, :, 0] >= 0, words_NRW[:, :, BETWEEN] * NS, np.nan)
    cohorts = tuple(log.info.cohort for log in logs)
    return Window(
        schema=schema,
        first_step=first,
        durations_NRS=times_NRV[:, :, :n_stages],
        outside_NRG=times_NRV[:, :, n_stages:] if schema.sync else None,
        between_NR=between_NR,
        ready_NR=ready_NR if np.isfinite(ready_NR).any() else None,
        cohorts=cohorts if any(cohorts) else None,
    )
