"""The step log: the steps of one rank on disk, in slots (see `windows.slots`), the newest whole and older ones thinned.

The agent appends to it; the trainer never touches it, so that it may lie on a disk. A segment that is beyond what is
kept whole goes, and some of its steps stay in a log beside it, ``thinned-steps``: the same ones of every rank, and so
many in a row that windows can be judged over them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sftriage.recorder.files import OpenFile
from sftriage.recorder.layout import DEVICE_LOG_MAGIC, HEADER_BYTES, LOG_MAGIC, RingInfo
from sftriage.windows.decoding import BoolArray, IntArray, StepArrays, checked, sealed
from sftriage.windows.log_segments import LogLimits, SegmentedLog, thinned_kind
from sftriage.windows.slots import START, slot_bytes

MAGICS = {"steps": LOG_MAGIC, "device-steps": DEVICE_LOG_MAGIC}

BLOCK_STEPS = 128
BLOCKS_A_PERIOD = 8
"""Where steps are thinned, one of so many blocks of so many steps is kept, counted from step 0: the first one."""

PERIOD_STEPS = BLOCK_STEPS * BLOCKS_A_PERIOD

_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class KeptSteps:
    """How much is kept of a job's steps: bytes for all its ranks together, and for how long.

    Each rank has its share: a quarter of it for whole steps, an eighth for thinned ones, the same again for device
    times, and a quarter for readings of its counters.
    """

    max_bytes: int
    age_s: float

    def whole(self, world_size: int) -> LogLimits:
        """What is kept of the steps of one rank as they are, or of the readings of its counters."""
        return LogLimits(self.max_bytes // (4 * world_size), round(self.age_s * _S))

    def thinned(self, world_size: int) -> LogLimits:
        """What is kept of its thinned steps."""
        return LogLimits(self.max_bytes // (8 * world_size), round(self.age_s * _S))


def blocks_of(steps: StepArrays) -> set[int]:
    """The blocks of steps that stay, with those before them, where others are thinned: a profiler touched them."""
    captured = np.unique(steps.step_B[steps.capturing_B] // BLOCK_STEPS).tolist()
    # The cause of a capture lies before it.
    return {block - before for block in captured for before in (0, 1)}


def stay(step_B: IntArray, blocks: Set[int] = frozenset()) -> BoolArray:
    """Which steps, by their numbers, are kept where steps are thinned; those of some blocks too."""
    block_B = step_B // BLOCK_STEPS
    return np.asarray((block_B % BLOCKS_A_PERIOD == 0) | np.isin(block_B, list(blocks)))


class StepLog:
    """Appends steps to a rank's step log, and goes on where an earlier agent stopped.

    Args:
        directory: where the log lies; it has to exist.
        info: the ring's info.
        kind: ``steps``, or ``device-steps`` for the log of device times.
        kept: how much of it is kept; by default all.
        there: its files, whole and thinned, by kind and oldest first; by default those in the directory.

    Attributes:
        info: what its header says: an earlier agent's log has the stages and the cohort that were known then.

    Raises:
        RingError: the log cannot be written, or belongs to another writer.
    """

    def __init__(
        self,
        directory: Path | str,
        info: RingInfo,
        *,
        kind: str = "steps",
        kept: KeptSteps | None = None,
        there: Mapping[str, Sequence[Path]] | None = None,
    ) -> None:
        self._directory, self._kind, self._kept, self._there = Path(directory), kind, kept, there
        self._whole = self._log(kind, info, None if kept is None else kept.whole(info.world_size))
        self.info = self._whole.info
        self._thinned: SegmentedLog | None = None

    @property
    def path(self) -> Path:
        """The file that is written to."""
        return self._whole.path

    @property
    def last_seq(self) -> int:
        """Sequence number of the last step in the log, or 0.

        A reader opened with ``skip=log.last_seq`` goes on from there.
        """
        return self._whole.last

    def append(self, steps: StepArrays, blocks: Set[int] = frozenset()) -> None:
        """Append steps of the rank, but for those that the log has: a ring is read again after a restart.

        Args:
            steps: in order.
            blocks: of steps that stay where others are thinned (see `blocks_of`).

        Raises:
            RingError: the disk did not take all of them.
        """
        new = steps[steps.seq_B > self.last_seq]
        if not len(new):
            return
        self._whole.append(sealed(new))
        for path in self._whole.old():
            try:
                self._thin(path, blocks)
            finally:
                # Also where the disk is full: there it is in the way.
                self._whole.drop(path)

    def join(self, cohort: str) -> None:
        """The rank is of this cohort; whoever reads the log later knows it from the newest segment."""
        self._whole.join(cohort)
        self.info = self._whole.info

    def close(self) -> None:
        """Close the files, until steps are appended. A second call does nothing."""
        for log in (self._whole, self._thinned):
            if log is not None:
                log.close()

    def _log(self, kind: str, info: RingInfo, limits: LogLimits | None) -> SegmentedLog:
        there = None if self._there is None else self._there.get(kind, ())
        return SegmentedLog(self._directory, info, kind, MAGICS[self._kind], slot_bytes, START, limits, there)

    def _thin(self, path: Path, blocks: Set[int]) -> None:
        assert self._kept is not None
        if self._thinned is None:
            limits = self._kept.thinned(self.info.world_size)
            self._thinned = self._log(thinned_kind(self._kind), self.info, limits)
        with OpenFile(path, os.O_RDONLY) as file:
            raw = file.read_at(file.length_bytes(), HEADER_BYTES)
        steps, sound_B = checked(self.info.rank, raw, self.info.schema)
        steps = steps[sound_B]
        left = steps[stay(steps.step_B, blocks | blocks_of(steps)) & (steps.seq_B > self._thinned.last)]
        if len(left) and not self._whole.is_too_old(int(left.start_ns_B[-1])):
            self._thinned.append(sealed(left))
        for older in self._thinned.old():
            self._thinned.drop(older)
