"""The ring: one memory-mapped file a rank, written by the trainer and read by anybody who may.

``rank-<rank>.<attempt>.ring`` is a header (see `layout`) and ``slots`` slots; the step of sequence number ``seq`` is in
slot ``(seq - 1) % slots``. The live words of its header::

    0  published      steps published; stored after the slot itself
    1  current_stage  index of the stage the rank is in now, or -1 between steps
    2  since_ns       when it entered that stage, or left the last step
    3  current_step   number of the step in progress, or of the last one
    4  step_since_ns  when that step started
    5  misuse         calls the recorder could make no sense of
    6  closed         1 once the writer has taken its leave
    7  special_step   number of the last step that was given a kind, or -1
    8  on_device      1 once the trainer uses a device that its host does not wait for (CUDA)

Rings belong on tmpfs (``/dev/shm``): on a disk file system the kernel write-protects a page while it is written back,
so that the next store to it, a plain assignment in the training loop, waits for the disk. (The JVM's ``hsperfdata`` in
``/tmp`` stalls whole applications in just this way.) On tmpfs there is no write-back.
"""

from __future__ import annotations

import os
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns

from sftriage.errors import RingError
from sftriage.recorder.files import OpenFile, create_mapped, start_ticks
from sftriage.recorder.layout import (
    HEADER_BYTES,
    LIVE_AT,
    MAGICS,
    MAX_COUNT,
    WORD_BYTES,
    RingInfo,
    SlotCheck,
    encode_header,
)
from sftriage.records import RankStatus

PUBLISHED, CURRENT_STAGE, SINCE, CURRENT_STEP, STEP_SINCE, MISUSE, CLOSED, SPECIAL_STEP, ON_DEVICE = range(9)
NO_STAGE = -1

_LIVE = struct.Struct("=9q")
_READS_TO_SETTLE = 8


class RingWriter:
    """The trainer's end of a ring. The recorder stores into ``live`` and ``words`` directly.

    ``kind`` is ``device`` for the ring of device times (see `sftriage.recorder.device`).

    Attributes:
        live: the header's live words.
        words: the slots, ``slot_words`` words each.

    Raises:
        FileExistsError: there is a ring for this rank and attempt already.
        OSError: the directory is missing or full, or may not be written.
    """

    def __init__(self, directory: Path, info: RingInfo, slots: int, *, kind: str = "ring") -> None:
        self.info = info
        self.slots = slots
        # Asked for once: finding it out walks the schema, and that a step has no time for.
        self._width = info.slot_words
        self.path = directory / info.file_name(kind)
        size_bytes = HEADER_BYTES + slots * info.slot_bytes
        header = encode_header(MAGICS[kind], info, slots)
        # Whoever holds the ring holds the rank: what lies beside it under a name that goes with it is from before.
        self._map = create_mapped(self.path, header, size_bytes, clobber=kind != "ring")
        self._bytes = memoryview(self._map)
        self._all = self._bytes.cast("q")
        self.live = self._all[LIVE_AT // WORD_BYTES : HEADER_BYTES // WORD_BYTES]
        self.words = self._all[HEADER_BYTES // WORD_BYTES :]
        self.live[CURRENT_STAGE] = NO_STAGE
        self.live[SPECIAL_STEP] = -1

    def publish(self, slot: array[int]) -> None:
        """Store a whole slot, its sequence number and CRC included, where its sequence number belongs."""
        width = self._width
        at = (slot[0] - 1) % self.slots * width
        self.words[at : at + width] = slot
        self.live[PUBLISHED] = slot[0]

    def close(self) -> None:
        """Say good-bye in the header and unmap; what was published stays. A second call does nothing."""
        if self._map.closed:
            return
        # The stage first: a reader in between must not find a rank that is stuck.
        self.live[CURRENT_STAGE] = NO_STAGE
        self.live[CLOSED] = 1
        self.abandon()

    def abandon(self) -> None:
        """Unmap without a word in the header: in a forked child, which is not the writer."""
        for view in (self.live, self.words, self._all, self._bytes):
            view.release()
        self._map.close()


@dataclass(frozen=True, slots=True)
class Batch:
    """What a read found. ``steps + missed + torn`` is the number of steps published since the last read.

    Attributes:
        steps: how many new steps.
        missed: steps that were overwritten before they were read.
        torn: slots that do not hold what they should, and are skipped.
        raw: the slots of the new steps in order, as a step log takes them; `sftriage.windows.decoding` reads them.
    """

    steps: int
    missed: int
    torn: int
    raw: bytes


class RingReader(OpenFile):
    """Reads a ring from outside, and never trusts what it finds.

    Args:
        path: the ring.
        skip: how many of its first steps have been read before (see `StepLog.last_seq`).
        kind: ``ring``, or ``device`` for the ring of device times.

    Attributes:
        on_device: at the last look, the trainer used a device that its host does not wait for.
        misuse: at the last look, calls the recorder could make no sense of.
        over: at the last read, the writer had taken its leave before: nothing more will come.

    Raises:
        RingError: the file is foreign, truncated, of another version or byte order, or damaged.
    """

    def __init__(self, path: Path | str, skip: int = 0, *, kind: str = "ring") -> None:
        super().__init__(path, os.O_RDONLY)
        self._read = skip
        self.on_device = self.over = False
        self.misuse = 0
        try:
            self.info, self.slots = self._header(MAGICS[kind])
            self._check_size()
        except BaseException:
            self.close()
            raise
        self._check = SlotCheck(self.info)

    def read(self) -> Batch:
        """The steps published since the last read.

        Raises:
            RingError: the file was truncated, or its count of steps cannot be.
        """
        live = self._live()
        published = live[PUBLISHED]
        self.over = bool(live[CLOSED])
        if published < self._read:
            raise RingError(f"{self.path}: its count of steps went back from {self._read} to {published}")
        first = max(self._read, published - self.slots)
        missed = first - self._read
        data = self._slots(first, published)
        # The writer went on while we copied: it may be anywhere up to, and in, the slot of its next step.
        overrun = self._live()[PUBLISHED] - self.slots
        raw: list[bytes] = []
        torn = 0
        size = self.info.slot_bytes
        for index in range(first, published):
            slot = data[(index - first) * size : (index - first + 1) * size]
            if self._check.sequence(slot) == index + 1:
                raw.append(slot)
            elif index <= overrun:
                missed += 1
            else:
                torn += 1
        self._read = published
        return Batch(len(raw), missed, torn, b"".join(raw))

    def status(self) -> RankStatus:
        """What the rank is doing now.

        Raises:
            RingError: the file was truncated, or its header holds what cannot be.
        """
        live = self._live()
        stage = live[CURRENT_STAGE]
        stages = self.info.schema.stages
        if not NO_STAGE <= stage < len(stages):
            raise RingError(f"{self.path}: the rank is said to be in stage {stage} of {len(stages)}")
        now_ns = monotonic_ns()
        return RankStatus(
            rank=self.info.rank,
            host=self.info.host,
            stage=None if stage == NO_STAGE else stages[stage],
            # Before the first step the header has no time yet.
            stage_age_ns=now_ns - max(live[SINCE], self.info.started_mono_ns),
            step=live[CURRENT_STEP],
            step_age_ns=now_ns - live[STEP_SINCE],
            published=live[PUBLISHED],
            closed=bool(live[CLOSED]),
            special=live[SPECIAL_STEP] == live[CURRENT_STEP],
            alive=self.writer_alive,
        )

    @property
    def writer_alive(self) -> bool:
        """Whether the process that wrote the ring is running; a pid used again by another one is not it."""
        return start_ticks(self.info.pid) == self.info.pid_start_ticks

    def _check_size(self) -> None:
        expected = HEADER_BYTES + self.slots * self.info.slot_bytes
        found = self._size_bytes()
        if not self.slots:
            raise RingError(f"{self.path}: bad header: a ring of no slots")
        if found != expected:
            raise RingError(f"{self.path}: truncated or foreign: {found} bytes, its header says {expected}")

    def _live(self) -> tuple[int, ...]:
        """The live words; read again until two reads agree, for a writer stores them one at a time."""
        before = b""
        for _ in range(_READS_TO_SETTLE):
            found = self._read_at(_LIVE.size, LIVE_AT)
            if found == before:
                break
            before = found
        if len(found) < _LIVE.size:
            raise RingError(f"{self.path}: truncated: its header has become shorter")
        live: tuple[int, ...] = _LIVE.unpack(found)
        if not 0 <= live[PUBLISHED] < MAX_COUNT:
            raise RingError(f"{self.path}: {live[PUBLISHED]} steps are said to be published")
        self.on_device, self.misuse = bool(live[ON_DEVICE]), live[MISUSE]
        return live

    def _slots(self, first: int, end: int) -> bytes:
        """The bytes of the slots of steps ``first`` up to ``end``, at most one turn of the ring."""
        size = self.info.slot_bytes
        start, count = first % self.slots, end - first
        before_wrap = min(count, self.slots - start)
        data = self._read_at(before_wrap * size, HEADER_BYTES + start * size)
        data += self._read_at((count - before_wrap) * size, HEADER_BYTES)
        if len(data) < count * size:
            raise RingError(f"{self.path}: truncated: slots are missing at its end")
        return data


def find_rings(directory: Path | str, kind: str = "ring") -> tuple[Path, ...]:
    """The rings of a kind in a directory, by rank and then attempt. Other files are passed over."""
    found = []
    for path in Path(directory).glob(f"rank-*.*.{kind}"):
        rank, _, attempt = path.name[len("rank-") : -len(f".{kind}")].partition(".")
        if rank.isdecimal() and attempt.isdecimal():
            found.append((int(rank), int(attempt), path))
    return tuple(path for _, _, path in sorted(found))
