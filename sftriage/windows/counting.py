"""What the kernel counted of the ranks: readings, kept in a log named ``counters``, and laid over the steps.

A reading is signed 64-bit words in native order (see `windows.steplog`)::

    at_ns       when it was taken, on the host's monotonic clock
    ...         the counters in the order of `counters.COUNTERS`, in nanoseconds or as counts; -1 where unknown
    crc         CRC-32 of the bytes before it

What passed between two readings is spread evenly over the time between them: a wait is known about as exactly as
readings lie apart (a quarter of a second to a second, or a step where that is longer). Over all steps the sum is exact.
A counter that is read less often than the others stands still meanwhile, and counts late by up to some seconds.
"""

from __future__ import annotations

import os
import struct
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np

from sftriage.errors import RingError
from sftriage.model.counters import COUNTERS, OF_THREAD, PLACE, UNITS
from sftriage.trainer.layout import COUNTERS_MAGIC, HEADER_BYTES, WORD_BYTES, OpenFile, RingInfo
from sftriage.windows.decoding import FloatArray, IntArray, StepArrays, records
from sftriage.windows.log_files import LogFiles, segment_name
from sftriage.windows.steplog import LogLimits, SegmentedLog, same_writer

KIND = "counters"
UNKNOWN = -1
MAX_APART_NS = 2_000_000_000
"""Readings around a step may lie so much further apart than the step is long. Of more, it is unknown where it was."""

_WORDS = 1 + len(COUNTERS)
_BYTES = (_WORDS + 1) * WORD_BYTES
_READING, _SUM = struct.Struct(f"={_WORDS}q"), struct.Struct("=q")
_UNITS, _N_OF_THREAD = np.array(UNITS), len(OF_THREAD)


def counted_of(known: Mapping[str, FloatArray | None]) -> FloatArray | None:
    """The counters of a window (N x R x C), of which some are known (N x R each); None where none is."""
    there = {name: values_NR for name, values_NR in known.items() if values_NR is not None}
    if not there:
        return None
    counted_NRC = np.full((*next(iter(there.values())).shape, len(COUNTERS)), np.nan)
    for name, values_NR in there.items():
        counted_NRC[:, :, PLACE[name]] = values_NR
    return counted_NRC


def none_taken(count: int) -> IntArray:
    """So many readings (T × K) in place of those that were not taken: further from any step than they may lie apart."""
    found_TK = np.zeros((count, _WORDS), dtype=np.int64)
    found_TK[:, 0] = np.arange(count) - 2**60
    return found_TK


def laid_over(readings_TK: IntArray, steps: StepArrays) -> StepArrays:
    """The steps of one rank with what each has of what passed between readings, which are in order of time."""
    return _with(steps, spread(readings_TK, *_times_ns(steps)))


def of_ranks_laid_over(readings_RTK: IntArray, row_B: IntArray, steps: StepArrays) -> StepArrays:
    """The same for steps of several ranks at once, with for each the row of its rank's last few readings.

    A rank of which there are fewer has some of `none_taken` before them.
    """
    times_ns_X, row_X = np.concatenate(_times_ns(steps)), np.concatenate([row_B, row_B])
    after_X = (readings_RTK[row_X, :, 0] < times_ns_X[:, None]).sum(axis=1).clip(1, readings_RTK.shape[1] - 1)
    return _with(steps, _passed(readings_RTK[row_X, after_X - 1], readings_RTK[row_X, after_X], times_ns_X))


def spread(readings_TK: IntArray, begin_ns_B: IntArray, end_ns_B: IntArray) -> FloatArray:
    """What was counted from some times to others, in seconds or as counts (B × C).

    NaN where no reading was taken before or after it, or none near enough; and of the counters of a thread where that
    did not run meanwhile: then it is another one that trains.
    """
    if len(readings_TK) < 2:
        return np.full((len(begin_ns_B), len(COUNTERS)), np.nan)
    times_ns_X = np.concatenate([begin_ns_B, end_ns_B])
    after_X = np.searchsorted(readings_TK[:, 0], times_ns_X).clip(1, len(readings_TK) - 1)
    return _passed(readings_TK[after_X - 1], readings_TK[after_X], times_ns_X)


def _passed(low_XK: IntArray, high_XK: IntArray, times_ns_X: IntArray) -> FloatArray:
    """What passed (B × C) from the first half of the times to the second, each between a reading and the next one."""
    n_steps = len(times_ns_X) // 2
    begin_ns_B, end_ns_B = times_ns_X[:n_steps], times_ns_X[n_steps:]
    part_X1 = ((times_ns_X - low_XK[:, 0]) / (high_XK[:, 0] - low_XK[:, 0]))[:, None]
    # Differences of whole numbers first: a count since the machine started may be more than a float holds exactly.
    counted_XC = part_X1 * (high_XK[:, 1:] - low_XK[:, 1:])
    counted_XC[n_steps:] += low_XK[n_steps:, 1:] - low_XK[:n_steps, 1:]
    found_BC = (counted_XC[n_steps:] - counted_XC[:n_steps]) * _UNITS
    around_BK = high_XK[n_steps:] - low_XK[:n_steps]
    known_B = (low_XK[:n_steps, 0] <= begin_ns_B) & (end_ns_B <= high_XK[n_steps:, 0])
    known_B &= around_BK[:, 0] - (end_ns_B - begin_ns_B) <= MAX_APART_NS
    found_BC[~known_B] = np.nan
    found_BC[around_BK[:, 1] <= 0, :_N_OF_THREAD] = np.nan
    found_BC[((low_XK < 0) | (high_XK < 0))[:, 1:].reshape(2, n_steps, -1).any(axis=0)] = np.nan
    return np.asarray(np.maximum(found_BC, 0.0))


def _with(steps: StepArrays, found_BC: FloatArray) -> StepArrays:
    return replace(steps, counted_BC=found_BC if np.isfinite(found_BC).any() else None)


def _times_ns(steps: StepArrays) -> tuple[IntArray, IntArray]:
    return steps.start_ns_B - steps.between_ns_B, steps.start_ns_B + steps.durations_ns_BS.sum(axis=1)


class CountersLog(SegmentedLog):
    """Appends readings to a rank's log of them, and goes on where an earlier agent stopped.

    Args:
        limits: how much of it is kept; by default all.

    Raises:
        RingError: the log cannot be written, or is that of another writer.
    """

    def __init__(self, directory: Path, info: RingInfo, limits: LogLimits | None = None) -> None:
        super().__init__(directory, info, KIND, COUNTERS_MAGIC, lambda _: _BYTES, 0, limits)

    def add(self, reading: tuple[int, ...]) -> None:
        """Append a reading; old ones go.

        Raises:
            RingError: the disk did not take it, and nothing of it is in the log.
        """
        words = _READING.pack(*reading)
        self.extend(words + _SUM.pack(crc32(words)))
        for path in self.old():
            self.drop(path)


class KeptReadings:
    """A rank's log of readings, of which those of some time are read. It is not open in between.

    Args:
        segments: its files, oldest first, as they are named.

    Raises:
        RingError: the header of the newest one cannot be read.
    """

    def __init__(self, segments: Sequence[Path]) -> None:
        self._segments = segments
        names = [segment_name(path.name) for path in segments]
        # Of each the time of its first reading.
        self._first_ns = [0 if name is None else name.first for name in names]
        with OpenFile(segments[-1], os.O_RDONLY) as file:
            self.info = file.checked_header(COUNTERS_MAGIC).info

    def laid_over(self, steps: StepArrays) -> StepArrays:
        """Steps of the rank with what each has of what passed between readings.

        Raises:
            RingError: a file has gone, or the file system answered with an error.
        """
        if not len(steps):
            return steps
        begin_ns_B, end_ns_B = _times_ns(steps)
        begin_ns, end_ns = int(begin_ns_B.min()), int(end_ns_B.max())
        # From the last reading before them to the first one after.
        before, after = max(0, bisect_right(self._first_ns, begin_ns) - 1), bisect_left(self._first_ns, end_ns)
        found = [_between(path, begin_ns, end_ns) for path in self._segments[before : after + 1]]
        return laid_over(np.concatenate(found), steps)


def kept_readings(log: LogFiles | None, info: RingInfo) -> KeptReadings | None:
    """The readings of the process that has recorded a rank's steps, by the log of them; None where none are kept.

    A run from before they were has none, and a file that cannot be read is no reason not to judge its steps.
    """
    try:
        found = None if log is None else KeptReadings(log.segments)
    except RingError:
        return None
    return found if found is not None and same_writer(found.info, info) else None


def _between(path: Path, begin_ns: int, end_ns: int) -> IntArray:
    """The readings of a segment from the last one before a time to the first one after another."""
    with OpenFile(path, os.O_RDONLY) as file:

        def at_ns(index: int) -> int:
            return int.from_bytes(file.read_at(WORD_BYTES, HEADER_BYTES + index * _BYTES), sys.byteorder, signed=True)

        places = range(max(0, file.length_bytes() - HEADER_BYTES) // _BYTES)
        first = max(0, bisect_left(places, begin_ns, key=at_ns) - 1)
        last = min(len(places), bisect_left(places, end_ns, key=at_ns) + 1)
        raw = file.read_at(max(0, last - first) * _BYTES, HEADER_BYTES + first * _BYTES)
    words_TW, whole_T = records(raw, _WORDS + 1)
    whole_TW = words_TW[whole_T]
    # What an agent that took over has read again, or a damaged clock, is passed over.
    latest_T = np.maximum.accumulate(np.concatenate([[-1], whole_TW[:, 0]]))
    return np.asarray(whole_TW[whole_TW[:, 0] > latest_T[:-1], :-1])
