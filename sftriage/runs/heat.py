"""The heat map of a run, kept up to date: a column of steps is read once, and its lateness remembered.

Of a long run only some steps of each column are read, the same ones of every rank, and the page says so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from sftriage.records import Window
from sftriage.runs.lateness import MAX_COLUMNS, FloatArray, HeatMap, SingleArray, heat_map, lateness_of
from sftriage.windows.logs import StepFile, StepLogs, windows

MIN_SAMPLED = 4
"""Steps that are read of a column however many ranks there are."""

MAX_READ = 2_000_000
"""About so many steps of single ranks are read for one map that nothing is known of yet."""

MAX_VECTORS = 400_000
"""Steps of single ranks that are held in memory at once."""

MAX_REMEMBERED_BYTES = 96 * 1024 * 1024

Key = tuple[int, int, int]


@dataclass(slots=True)
class HeatSource:
    """Makes maps of a run's logs.

    Attributes:
        logs: the logs.
        read: steps of single ranks that have been read so far.
    """

    logs: StepLogs
    read: int = 0
    _columns: OrderedDict[Key, SingleArray] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def map(self, attempt: int, first_step: int, last_step: int) -> HeatMap | None:
        """The map of some steps of an attempt, all of which its ranks have been through; None without any log."""
        self.logs.look()
        ranks = self.logs.of(attempt)
        if not ranks or last_step < first_step:
            return None
        each = column_steps(first_step, last_step)
        sampled = min(each, max(MIN_SAMPLED, MAX_READ // (MAX_COLUMNS * len(ranks))))
        indices = range(first_step // each, last_step // each + 1)
        columns = {
            index: column
            for index in indices
            if (column := self._known((attempt, each, index), len(ranks))) is not None
        }
        missing = [index for index in indices if index not in columns]
        for index, late_R in zip(missing, self._read(ranks, missing, each, sampled, last_step), strict=True):
            columns[index] = late_R
            # What is not over yet is read again.
            if (index + 1) * each - 1 <= last_step:
                self._remember((attempt, each, index), late_R)
        late_CR = np.stack([columns[index] for index in indices])
        infos = [one.info for one in ranks.values()]
        starts = [index * each for index in indices]
        return heat_map(
            late_CR, starts, each, sampled, last_step, [info.rank for info in infos], [info.host for info in infos]
        )

    def lateness(self, attempt: int, first_step: int, n_steps: int) -> dict[int, float]:
        """The mean lateness of every rank over a run of steps, in seconds; of those that have any of them."""
        self.logs.look()
        ranks = self.logs.of(attempt)
        if not ranks:
            return {}
        (late_R,) = self._lateness(ranks, [(first_step, n_steps)])
        return {rank: float(late_s) for rank, late_s in zip(ranks, late_R, strict=True) if np.isfinite(late_s)}

    def _read(
        self, ranks: Mapping[int, StepFile], indices: list[int], each: int, sampled: int, last_step: int
    ) -> list[SingleArray]:
        runs = []
        for index in indices:
            there = min(each, last_step - index * each + 1)
            looked_at = min(sampled, there)
            # Not always the same place: what comes back every so many steps must not hide.
            offset = (index * 7919) % (there - looked_at + 1)
            runs.append((index * each + offset, looked_at))
        return self._lateness(ranks, runs)

    def _lateness(self, ranks: Mapping[int, StepFile], runs: list[tuple[int, int]]) -> list[SingleArray]:
        """The mean lateness of the ranks over each run of steps."""
        means: list[SingleArray] = []

        def take(window: Window) -> None:
            self.read += window.durations_NRS.shape[0] * window.durations_NRS.shape[1]
            # The step before opens the first segment of the first one, and has no lateness of its own.
            means.append(_mean(lateness_of(window)[1:]))

        windows(ranks, [(first - 1, n_steps + 1) for first, n_steps in runs], take, MAX_VECTORS)
        return means

    def _known(self, key: Key, n_ranks: int) -> SingleArray | None:
        """A column that was read already, or whose two halves were."""
        attempt, each, index = key
        known = self._columns.get(key)
        if known is None and each > 1:
            halves = [self._columns.get((attempt, each // 2, 2 * index + half)) for half in (0, 1)]
            if halves[0] is not None and halves[1] is not None and len(halves[0]) == len(halves[1]):
                known = _mean(np.stack([halves[0], halves[1]]))
                self._remember(key, known)
        # A rank whose log came later was not in it.
        if known is None or len(known) != n_ranks:
            return None
        self._columns.move_to_end(key)
        return known

    def _remember(self, key: Key, late_R: SingleArray) -> None:
        self._bytes += late_R.nbytes
        if (before := self._columns.pop(key, None)) is not None:
            self._bytes -= before.nbytes
        self._columns[key] = late_R
        while self._bytes > MAX_REMEMBERED_BYTES and len(self._columns) > 1:
            self._bytes -= self._columns.popitem(last=False)[1].nbytes


def column_steps(first_step: int, last_step: int) -> int:
    """Steps in a column: a power of two, so that columns of a longer run are made of those of a shorter one."""
    each = 1
    while last_step // each - first_step // each + 1 > MAX_COLUMNS:
        each *= 2
    return each


def _mean(late_NR: FloatArray | SingleArray) -> SingleArray:
    """The mean of what is known of each column, NaN of nothing."""
    known_NR = ~np.isnan(late_NR)
    sums_R = np.where(known_NR, late_NR, 0.0).sum(axis=0)
    counts_R = known_NR.sum(axis=0)
    return np.where(counts_R > 0, sums_R / np.maximum(counts_R, 1), np.nan).astype(np.float32)
