"""Reads a run's step logs: from beginning to end, or some steps of some ranks by number.

A log that is still written to, has gaps, or is damaged in places yields its whole steps. Axes: N steps, R ranks, B
slots, X runs of steps.

The difference between two readings of counters is spread evenly over the time between them: over all steps the sum is
exact, and a wait is known to about the distance between readings (a quarter of a second to a second, or a step if that
is longer). A counter that is read less often counts late by up to some seconds.
"""

from __future__ import annotations

import contextlib
import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sftriage.errors import RingError
from sftriage.model.windows import COUNTERS, OF_THREAD, UNITS, Window
from sftriage.trainer.layout import COUNTERS_MAGIC, HEADER_BYTES, MAX_COUNT, WORD_BYTES, OpenFile, RingInfo
from sftriage.windows.decoding import (
    BoolArray,
    FloatArray,
    IntArray,
    StepArrays,
    checked,
    decode,
    records,
    slot_bytes,
    together,
)
from sftriage.windows.gather import StepRows
from sftriage.windows.log_files import LogFiles, find_logs, segment_name
from sftriage.windows.steplog import BLOCK_STEPS, COUNTERS_KIND, MAGICS, PERIOD_STEPS, READING_BYTES, same_writer, stay
from sftriage.words.run import thinning

MAX_APART_NS = 2_000_000_000
"""Maximum distance between the readings around a step, less the step's length. Beyond it, counts are unknown."""
_UNITS, _N_OF_THREAD = np.array(UNITS), len(OF_THREAD)


def none_taken(count: int) -> IntArray:
    """Placeholders for ``count`` readings that were not taken (T × K), too far from any step to count."""
    found_TK = np.zeros((count, 1 + len(COUNTERS)), dtype=np.int64)
    found_TK[:, 0] = np.arange(count) - 2**60
    return found_TK


def laid_over(readings_TK: IntArray, steps: StepArrays) -> StepArrays:
    """The steps of one rank with their counters, from readings in order of time."""
    return _with(steps, spread(readings_TK, *_times_ns(steps)))


def of_ranks_laid_over(readings_RTK: IntArray, row_B: IntArray, steps: StepArrays) -> StepArrays:
    """The steps of several ranks with their counters; ``row_B`` is each step's row of its rank's last few readings.

    A rank with fewer readings has some of `none_taken` before them.
    """
    times_ns_X, row_X = np.concatenate(_times_ns(steps)), np.concatenate([row_B, row_B])
    after_X = (readings_RTK[row_X, :, 0] < times_ns_X[:, None]).sum(axis=1).clip(1, readings_RTK.shape[1] - 1)
    return _with(steps, _passed(readings_RTK[row_X, after_X - 1], readings_RTK[row_X, after_X], times_ns_X))


def spread(readings_TK: IntArray, begin_ns_B: IntArray, end_ns_B: IntArray) -> FloatArray:
    """The counters' differences between times, in seconds or as counts (B × C).

    NaN without a reading before and after it that is near enough; and for the counters of a thread that did not run
    meanwhile: then another thread trains.
    """
    if len(readings_TK) < 2:
        return np.full((len(begin_ns_B), len(COUNTERS)), np.nan)
    times_ns_X = np.concatenate([begin_ns_B, end_ns_B])
    after_X = np.searchsorted(readings_TK[:, 0], times_ns_X).clip(1, len(readings_TK) - 1)
    return _passed(readings_TK[after_X - 1], readings_TK[after_X], times_ns_X)


def _passed(low_XK: IntArray, high_XK: IntArray, times_ns_X: IntArray) -> FloatArray:
    """The differences (B × C) from the first half of the times to the second, each between a reading and the next."""
    n_steps = len(times_ns_X) // 2
    begin_ns_B, end_ns_B = times_ns_X[:n_steps], times_ns_X[n_steps:]
    part_X1 = ((times_ns_X - low_XK[:, 0]) / (high_XK[:, 0] - low_XK[:, 0]))[:, None]
    # Subtract integers first: a count since boot may exceed the exact range of a float.
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


@dataclass(frozen=True, slots=True)
class KeptReadings:
    """A rank's log of readings: its files, oldest first, each open only while it is read."""

    segments: Sequence[Path]

    def laid_over(self, steps: StepArrays) -> StepArrays:
        """Steps of the rank with their counters; raises RingError if a file was removed, or the file system failed."""
        if not len(steps):
            return steps
        begin_ns_B, end_ns_B = _times_ns(steps)
        begin_ns, end_ns = int(begin_ns_B.min()), int(end_ns_B.max())
        # From the last file that starts before the steps to the first one that starts after them.
        firsts_ns = [name.first if (name := segment_name(path.name)) else 0 for path in self.segments]
        before, after = max(0, bisect_right(firsts_ns, begin_ns) - 1), bisect_left(firsts_ns, end_ns)
        found = [_between(path, begin_ns, end_ns) for path in self.segments[before : after + 1]]
        return laid_over(np.concatenate(found), steps)


def kept_readings(log: LogFiles | None, info: RingInfo) -> KeptReadings | None:
    """The readings, from their log, of the process that recorded a rank's steps; None if none are kept.

    If a file cannot be read, its steps are judged without counters.
    """
    with contextlib.suppress(RingError):
        if log is not None:
            with OpenFile(log.newest, os.O_RDONLY) as file:
                if same_writer(file.checked_header(COUNTERS_MAGIC).info, info):
                    return KeptReadings(log.segments)
    return None


def _between(path: Path, begin_ns: int, end_ns: int) -> IntArray:
    """The readings of a segment, from the last one before ``begin_ns`` to the first one after ``end_ns``."""
    with OpenFile(path, os.O_RDONLY) as file:

        def at_ns(index: int) -> int:
            return int.from_bytes(
                file.read_at(WORD_BYTES, HEADER_BYTES + index * READING_BYTES), sys.byteorder, signed=True
            )

        places = range(max(0, file.length_bytes() - HEADER_BYTES) // READING_BYTES)
        first = max(0, bisect_left(places, begin_ns, key=at_ns) - 1)
        last = min(len(places), bisect_left(places, end_ns, key=at_ns) + 1)
        raw = file.read_at(max(0, last - first) * READING_BYTES, HEADER_BYTES + first * READING_BYTES)
    words_TW, whole_T = records(raw, READING_BYTES // WORD_BYTES)
    whole_TW = words_TW[whole_T]
    # Readings that a second agent repeated, and those of a damaged clock, are skipped.
    latest_T = np.maximum.accumulate(np.concatenate([[-1], whole_TW[:, 0]]))
    return np.asarray(whole_TW[whole_TW[:, 0] > latest_T[:-1], :-1])


Run = tuple[int, int]
"""Consecutive steps: the first, and their number."""

STEPS_AT_A_TIME = 4096

SLOTS_READ = 16
"""Slots of a segment to read for its first step: some may be damaged."""

LOG_KIND = "device-steps"
"""The kind of logs of device times."""


class LogReader:
    """Reads one rank's step log: from its beginning to its end, or some of its steps by number.

    A bounded number of steps is read at a time, and no file stays open: the logs of all ranks can be read side by side.

    Args:
        log: its files, or the only one. A file that was removed is skipped.
        kind: its kind.

    Attributes:
        info: the writer of the ring from which the log comes.
        files: the files.
        skipped: the number of damaged, half-written or unordered slots that `read` has found so far.

    Raises RingError if a header cannot be read: foreign, truncated, of another version or byte order, or damaged.
    """

    def __init__(self, log: LogFiles | Path, kind: str = "steps") -> None:
        self.files = LogFiles(0, 0, (log,)) if isinstance(log, Path) else log
        with OpenFile(self.files.newest, os.O_RDONLY) as newest:
            self.info = newest.checked_header(MAGICS[kind]).info
        self._slot_bytes = slot_bytes(self.info.schema)
        self._unread, self._at = list(self.files.segments), HEADER_BYTES
        self.skipped = self._last_seq = 0
        self._first_steps: dict[Path, int] = {}

    def read(self, n_steps: int = STEPS_AT_A_TIME) -> StepArrays:
        """The next steps, at most ``n_steps``; empty once all have been read.

        Raises RingError if the file was removed, or the file system failed.
        """
        while self._unread:
            data = self._next(n_steps * self._slot_bytes)
            steps, sound_B = checked(self.info.rank, data, self.info.schema)
            # Repeated or late steps are skipped: the sequence number must exceed all before it.
            seq_B = np.concatenate([[self._last_seq], np.where(sound_B, steps.seq_B, 0)])
            highest_B = np.maximum.accumulate(seq_B)
            self._last_seq = int(highest_B[-1])
            new_B = seq_B[1:] > highest_B[:-1]
            self.skipped += int((~new_B).sum()) + bool(len(data) % self._slot_bytes)
            if new_B.any():
                return steps if new_B.all() else steps[new_B]
        return decode([(self.info.rank, b"")], self.info.schema)

    def _next(self, wanted: int) -> bytes:
        """The next bytes, at most ``wanted``, of the oldest segment that has not been read to its end."""
        path = self._unread[0]
        try:
            with OpenFile(path, os.O_RDONLY) as file:
                data = file.read_at(wanted, self._at)
        except RingError:
            if len(self._unread) == 1 or path.exists():
                raise
            data = b""
        self._at += len(data)
        if len(data) < wanted:
            del self._unread[0]
            self._at = HEADER_BYTES
        return data

    def steps(self, runs: Sequence[Run]) -> tuple[IntArray, StepArrays]:
        """The complete steps of some runs.

        Returns:
            Their places (B) in the concatenated runs, and the steps (B).
        """
        runs_X2 = np.array(runs, dtype=np.int64).reshape(-1, 2)
        bases_X = np.cumsum(runs_X2[:, 1]) - runs_X2[:, 1]
        places, parts = [np.zeros(0, dtype=np.int64)], [decode([(self.info.rank, b"")], self.info.schema)]
        firsts = [(path, first) for path in self.files.segments if (first := self.first_step(path)) is not None]
        for (path, first), end in zip(firsts, [*(first for _, first in firsts[1:]), MAX_COUNT], strict=False):
            # The part of each run in this segment.
            starts_X = np.maximum(runs_X2[:, 0], first)
            lengths_X = np.minimum(runs_X2.sum(axis=1), end) - starts_X
            here_X = lengths_X > 0
            if here_X.any():
                bases_here_X = (bases_X + starts_X - runs_X2[:, 0])[here_X]
                # (a segment that was removed is skipped)
                with contextlib.suppress(RingError), OpenFile(path, os.O_RDONLY) as file:
                    places_B, steps = self._find(file, first, starts_X[here_X], lengths_X[here_X], bases_here_X)
                    places.append(places_B)
                    parts.append(steps)
        return np.concatenate(places), together(parts)

    def whole_from_step(self) -> int | None:
        """The step from which all are kept; None if there is no such step."""
        firsts = map(self.first_step, self.files.segments[self.files.n_thinned :])
        return next((first for first in firsts if first is not None), None)

    def first_step(self, path: Path) -> int | None:
        """The number of the first step in a segment; None if it is empty or gone."""
        if path not in self._first_steps:
            with contextlib.suppress(RingError), OpenFile(path, os.O_RDONLY) as file:
                steps, whole_B = self._slots(file, [(0, SLOTS_READ)])
                if whole_B.any():
                    self._first_steps[path] = int(steps.step_B[whole_B.argmax()])
        return self._first_steps.get(path)

    def _slots(self, file: OpenFile, runs: Iterable[Run]) -> tuple[StepArrays, BoolArray]:
        """Runs of slots, by their places in a segment, and which slots (B) were written whole."""
        size = self._slot_bytes
        raw = b"".join(file.read_at(count * size, HEADER_BYTES + at * size) for at, count in runs)
        return checked(self.info.rank, raw, self.info.schema)

    def _find(
        self, file: OpenFile, first_step: int, starts_X: IntArray, lengths_X: IntArray, bases_X: IntArray
    ) -> tuple[IntArray, StepArrays]:
        """The complete steps of runs in a segment, and their places (B); the places of a run begin at its base.

        Usually no step is missing, and a step's place follows from its number: all runs are read and checked at once.
        Runs that are not at their place are searched for.
        """
        n_slots = (file.length_bytes() - HEADER_BYTES) // self._slot_bytes
        at_X = starts_X - first_step
        right_X = (at_X >= 0) & (at_X + lengths_X <= n_slots)
        steps, whole_B = self._slots(file, zip(at_X[right_X].tolist(), lengths_X[right_X].tolist(), strict=True))
        if len(steps) != int(lengths_X[right_X].sum()):
            right_X[:] = False
            steps, whole_B = steps[:0], whole_B[:0]
        whole_B &= steps.complete_B
        runs_B = np.repeat(np.flatnonzero(right_X), lengths_X[right_X])
        ends_B = np.cumsum(lengths_X[right_X])
        within_B = np.arange(len(steps)) - np.repeat(ends_B - lengths_X[right_X], lengths_X[right_X])
        # A damaged slot does not show where the others are.
        right_X[runs_B[whole_B & (steps.step_B != starts_X[runs_B] + within_B)]] = False
        keep_B = whole_B & right_X[runs_B]
        places_B = bases_X[runs_B] + within_B
        if keep_B.all() and right_X.all():
            return places_B, steps
        places, parts = [places_B[keep_B]], [steps[keep_B]]

        def step_at(index: int) -> int:
            return int(next(iter(self._slots(file, [(index, 1)])[0].step_B), MAX_COUNT))

        for first, count, base in zip(starts_X[~right_X], lengths_X[~right_X], bases_X[~right_X], strict=True):
            at = bisect_left(range(n_slots), first, key=step_at)
            steps, whole_B = self._slots(file, [(at, int(count))])
            steps = steps[whole_B & steps.complete_B & (steps.step_B >= first) & (steps.step_B < first + count)]
            places.append(base + steps.step_B - first)
            parts.append(steps)
        return np.concatenate(places), together(parts)


@dataclass(frozen=True, slots=True)
class Thinning:
    """The removed steps of an attempt.

    Attributes:
        whole_from_step: from this step on, all are kept; before it, those that thinning leaves.
        first_step: before this step, none is kept; 0 if thinning alone removed steps.
    """

    whole_from_step: int
    first_step: int

    def leaves(self, step: int) -> bool:
        """Whether a recorded step is kept. Steps near a capture may be kept although the result is False."""
        return step >= self.whole_from_step or (step >= self.first_step and bool(stay(np.array([step])).all()))

    def __str__(self) -> str:
        return thinning(self.whole_from_step, self.first_step, BLOCK_STEPS, PERIOD_STEPS)


def thinning_of(thinned: Sequence[LogReader]) -> Thinning | None:
    """The removed steps of an attempt, by its incomplete logs; None if there are none."""
    wholes = [step for log in thinned if (step := log.whole_from_step()) is not None]
    # (0 if some of the first steps are kept)
    firsts = [(log.first_step(log.files.segments[0]) or 0) if log.files.oldest_seq else 0 for log in thinned]
    return Thinning(max(wholes), max(firsts)) if wholes else None


@dataclass(slots=True)
class StepLogs:
    """The logs of a run, by attempt and rank. A large job has many: each is opened when first needed.

    Attributes:
        kind: ``steps``, or `LOG_KIND` for device times.
        attempts: the logs at the last `refresh`, by attempt and rank.
    """

    directory: Path
    kind: str = "steps"
    attempts: dict[int, dict[int, LogFiles]] = field(default_factory=dict)
    _opened: dict[tuple[int, int], LogReader] = field(default_factory=dict)
    _names: frozenset[str] = frozenset()

    def refresh(self) -> None:
        """Add new logs, and new segments of known ones."""
        try:
            names = frozenset(entry.name for entry in os.scandir(self.directory))
            logs = find_logs(self.directory, self.kind) if names != self._names else []
        except OSError:
            return
        self._names = names
        for log in logs:
            self.attempts.setdefault(log.attempt, {})[log.rank] = log

    def thinning(self, attempt: int) -> Thinning | None:
        thinned = [rank for rank, log in self.attempts.get(attempt, {}).items() if not log.all_there]
        return thinning_of([log for rank in thinned if (log := self._file(attempt, rank)) is not None])

    def of(self, attempt: int, ranks: Collection[int] | None = None) -> Mapping[int, LogReader]:
        """The logs of one attempt's ranks, or some of them, that recorded the same stages as the lowest rank.

        A log that cannot be read is left out, and tried again at the next call.
        """
        there = sorted(self.attempts.get(attempt, {}))
        lowest = next(filter(None, (self._file(attempt, rank) for rank in there)), None)
        wanted = there if ranks is None else sorted(set(ranks).intersection(there))
        files = {rank: file for rank in wanted if (file := self._file(attempt, rank)) is not None}
        return {rank: file for rank, file in files.items() if lowest and file.info.schema == lowest.info.schema}

    def _file(self, attempt: int, rank: int) -> LogReader | None:
        log, known = self.attempts[attempt][rank], self._opened.get((attempt, rank))
        if known is None:
            try:
                known = self._opened[attempt, rank] = LogReader(log, self.kind)
            except RingError:
                return None
        known.files = log
        return known


def windows(ranks: Mapping[int, LogReader], runs: Sequence[Run], max_vectors: int) -> Iterator[Window]:
    """Runs of steps as windows, in order; at most ``max_vectors`` at a time, so that memory stays bounded.

    A rank's missing step is NaN.
    """
    logs = list(ranks.values())
    schema, cohorts = logs[0].info.schema, tuple(log.info.cohort for log in logs)
    longest = max((n_steps for _, n_steps in runs), default=1)
    at_a_time = max(1, max_vectors // (longest * len(logs)))
    for start in range(0, len(runs), at_a_time):
        some = runs[start : start + at_a_time]
        # Concatenated into one.
        rows = StepRows(schema, len(logs), sum(n_steps for _, n_steps in some))
        for r, log in enumerate(logs):
            places_B, steps = log.steps(some)
            rows.put(replace(steps, rank_B=np.full(len(steps), r)), places_B)
        base = 0
        for first, n_steps in some:
            arrays = rows.window(base, n_steps)
            yield Window(schema, first, cohorts=cohorts if any(cohorts) else None, **arrays)
            base += n_steps


def kept_steps(logs: StepLogs, attempt: int, first_step: int, last_step: int) -> Window | None:
    """Some steps of one attempt of a job by the host's clock, from its logs; None if no log has any."""
    logs.refresh()
    of_attempt = list(logs.of(attempt).values())
    if not of_attempt:
        return None
    steps = together([log.steps([(first_step, last_step - first_step + 1)])[1] for log in of_attempt])
    window = _window_of(steps, of_attempt[0].info.world_size, last_step, attempt=attempt)
    return None if window is None or window.first_step > first_step else window


def counted_steps(logs: StepLogs, attempt: int, ranks: Sequence[int], first_step: int, last_step: int) -> Window | None:
    """Kept steps of some ranks, renumbered from 0, with their counters; None if there are none."""
    of_attempt = logs.of(attempt, ranks)
    readings = {log.rank: log for log in find_logs(logs.directory, COUNTERS_KIND, of_attempt) if log.attempt == attempt}
    infos, parts = [of_attempt[rank].info for rank in ranks], []
    for row, info in enumerate(infos):
        steps = of_attempt[info.rank].steps([(first_step, last_step - first_step + 1)])[1]
        kept = kept_readings(readings.get(info.rank), info)
        steps = steps if kept is None else kept.laid_over(steps)
        parts.append(replace(steps, rank_B=np.full(len(steps), row)))
    hosts, cohorts = tuple(info.host for info in infos), tuple(info.cohort for info in infos)
    places = {"hosts": hosts if any(hosts) else None, "cohorts": cohorts if any(cohorts) else None}
    return _window_of(together(parts), len(ranks), last_step, attempt=attempt, **places)


def _window_of(steps: StepArrays, n_ranks: int, last_step: int, **about: Any) -> Window | None:
    """The window from the first of these steps to ``last_step``; None if no rank has that one."""
    if not len(steps) or int(steps.step_B.max()) < last_step:
        return None
    first_step = int(steps.step_B.min())
    n_steps = last_step + 1 - first_step
    rows = StepRows(steps.schema, n_ranks, n_steps)
    rows.put(steps)
    return Window(steps.schema, first_step, **about, **rows.window(first_step, n_steps))
