"""Reading rings from outside: their new steps, and what their ranks are doing now. Nothing found there is trusted."""

from __future__ import annotations

import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic_ns

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import RingError
from sftriage.recorder import layout
from sftriage.recorder.files import OpenFile
from sftriage.recorder.layout import (
    ADDITIONS_AT,
    ADDITIONS_BYTES,
    BLOCK_WORDS,
    HEADER_BYTES,
    LIVE_AT,
    LOG_AT,
    MAX_COUNT,
    RING_MAGIC,
    WORD_BYTES,
    Header,
    with_additions,
)
from sftriage.records import OTHER, RankStatus, StageSchema
from sftriage.windows.decoding import BoolArray, StepArrays, checked, decode
from sftriage.windows.moments import Moments, decoded
from sftriage.windows.slots import slot_bytes

_READS_TO_SETTLE = 8


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What a read found. ``len(steps) + missed + torn`` is the number of steps published since the last read.

    Attributes:
        steps: the new steps.
        device: device times of any steps, where the rank records them.
        missed: steps that were overwritten before they were read.
        torn: steps that do not hold what they should, and are skipped.
        misuse: how many stages were left that were not open, or not in their order.
    """

    steps: StepArrays
    device: StepArrays
    missed: int = 0
    torn: int = 0
    misuse: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Copied:
    """What was copied from a ring and is yet to be decoded: moments; of a ring of slots, the ``batch`` itself."""

    missed: int
    moments: Moments | None = None
    batch: Batch | None = None


class Ring(OpenFile, ABC):
    """A ring of either version, opened by `open_ring`.

    Attributes:
        info: who writes it, with the stages that are known by now.
        on_device: at the last look, the trainer used a device that its host does not wait for.
        untimed: no device times come from there, or none any more.
        misuse: at the last look, calls the recorder could make no sense of.
        over: at the last read, the writer had taken its leave before: nothing more will come.
        late_stages: stages that were declared too late to be in ``info``; their time stays with what is around it.
    """

    _LIVE: struct.Struct

    def __init__(self, path: Path | str, header: Header, skip: int) -> None:
        super().__init__(path, os.O_RDONLY)
        self.info = header.info
        self.on_device = self.untimed = self.over = False
        self.misuse = 0
        self.late_stages: tuple[str, ...] = ()
        self._read = skip

    @abstractmethod
    def copied(self) -> Copied:
        """Copy the steps that were published since the last read.

        Raises:
            RingError: the file was truncated, or what its header says cannot be.
        """

    @abstractmethod
    def status(self) -> RankStatus:
        """What the rank is doing now.

        Raises:
            RingError: the file was truncated, or its header holds what cannot be.
        """

    def read(self) -> Batch:
        """The steps published since the last read.

        Raises:
            RingError: the file was truncated, or what its header says cannot be.
        """
        return batches([self.copied()])[0]

    def reopened(self, n_steps: int) -> Ring:
        """The same ring, with so many of the steps that were read last to be read once more, as far as they are there.

        Raises:
            RingError: it cannot be opened any more.
        """
        ring = open_ring(self.path, max(0, self._read - n_steps), grows=False)
        ring.info = self.info
        return ring

    @property
    def writer_alive(self) -> bool | None:
        """Whether the process that writes the ring is there; None where that cannot be known."""
        return self.is_writer_alive(self.info)

    def _words(self) -> tuple[int, ...]:
        """The live words."""
        found = self.read_at(self._LIVE.size, LIVE_AT)
        if len(found) < self._LIVE.size:
            raise RingError(f"{self.path}: truncated: its header has become shorter")
        live: tuple[int, ...] = self._LIVE.unpack(found)
        if not 0 <= live[0] < MAX_COUNT:
            raise RingError(f"{self.path}: {live[0]} steps or words are said to be there")
        return live

    def _new(self, published: int, room: int) -> int:
        """The first step, counted from 0, that was not read before and may be there."""
        if published < self._read:
            raise RingError(f"{self.path}: its count of steps went back from {self._read} to {published}")
        return max(self._read, published - room)

    def _circular(self, first: int, end: int, room: int, at: int, width: int = WORD_BYTES) -> bytes:
        """The bytes of what is numbered ``first`` up to ``end``, at most one turn of ``room``, each ``width`` wide."""
        start, count = first % room, end - first
        before_wrap = min(count, room - start)
        data = self.read_at(before_wrap * width, at + start * width)
        if count > before_wrap:
            data += self.read_at((count - before_wrap) * width, at)
        if len(data) < count * width:
            raise RingError(f"{self.path}: truncated: steps are missing at its end")
        return data

    def _check_size(self, expected: int) -> None:
        found = self.length_bytes()
        if found != expected:
            raise RingError(f"{self.path}: truncated or foreign: {found} bytes, its header says {expected}")


class MomentRing(Ring):
    """A ring of moments, version 3 (see `sftriage.recorder.layout`)."""

    _LIVE = struct.Struct("=6q")

    def __init__(self, path: Path | str, header: Header, skip: int, *, grows: bool) -> None:
        super().__init__(path, header, skip)
        self._declared, self._added = header.info, 0
        self._log_words = header.log_words
        # Where the first step that was not read begins, and the words of the one before it.
        self._at = 0
        self._last = np.zeros(0, dtype=np.uint64)
        # Steps that end before that place. What was read before this reader was there is passed over.
        self._ended = 0
        self._grows = True
        self._check_size(LOG_AT + self._log_words * WORD_BYTES)
        self._live()
        self._grows = grows

    def copied(self) -> Copied:
        """See `Ring`."""
        over = bool(self._live()[layout.CLOSED])
        last_look, self.over = over and not self.over, over
        words_M = self._unread()
        ends = np.flatnonzero(_is_end(words_M)) + 1
        skipped = min(max(0, self._read - self._ended), len(ends))
        first = self._ended + skipped
        missed = max(0, first - self._read)
        self._ended += len(ends)
        self._read = max(self._read, self._ended)
        bounds = np.concatenate([[0], ends])
        if len(ends):
            self._last = words_M[bounds[-2] : bounds[-1]]
        if last_look:
            # What was written after the last step.
            bounds = np.append(bounds, len(words_M))
        return Copied(missed, Moments(self.info, first + 1, words_M, bounds[skipped:], last_look))

    def status(self) -> RankStatus:
        """See `Ring`."""
        words_M = self._unread(keep=True)
        now = _now(np.concatenate([self._last, words_M]).tolist(), self.info.schema)
        since_start_ns = monotonic_ns() - self.info.started_mono_ns
        return RankStatus(
            rank=self.info.rank,
            host=self.info.host,
            stage=now.stage,
            stage_age_ns=since_start_ns - now.since_ns,
            step=now.step,
            step_age_ns=since_start_ns - now.step_since_ns,
            published=self._ended + int(_is_end(words_M).sum()),
            closed=bool(self._live()[layout.CLOSED]),
            special=now.special,
            alive=self.writer_alive,
        )

    def _unread(self, *, keep: bool = False) -> NDArray[np.uint64]:
        """The words from the first step on that was not read, without those that begin blocks.

        The place goes on to the end of the last step among them, unless it is to ``keep``.
        """
        live = self._live()
        opened = live[layout.OPENED]
        claimed = live[layout.CLAIMED]
        if not self._at <= opened <= claimed <= opened + self._log_words or opened % BLOCK_WORDS:
            raise RingError(f"{self.path}: bad header: {opened} words opened, {claimed} claimed, {self._at} read")
        start = max(self._at, claimed - self._log_words)
        raw = self._circular(start, opened, self._log_words, LOG_AT)
        # The writer went on while we copied.
        oldest = self._live()[layout.CLAIMED] - self._log_words
        whole = min(max(start, oldest), opened)
        words_M = np.frombuffer(raw, dtype=np.uint64)[whole - start :]
        unwritten = np.flatnonzero(words_M == 0)
        words_M = words_M[: unwritten[0]] if len(unwritten) else words_M
        is_block_M = np.zeros(len(words_M), dtype=np.bool_)
        is_block_M[-whole % BLOCK_WORDS :: BLOCK_WORDS] = True
        if (words_M[is_block_M] >> np.uint64(layout.CODE_AT) != layout.BLOCK).any():
            raise RingError(f"{self.path}: its log makes no sense")
        if whole > self._at:
            # Of the step that goes on into this block the beginning is gone; as long as it goes on, so does this.
            begun = np.flatnonzero(_is_end(words_M))[:1] + 1
            if not len(begun):
                return words_M[~is_block_M]
            self._at, self._ended = whole + int(begun[0]), (int(words_M[0]) & layout.MAX_VALUE) + 1
            words_M, is_block_M = words_M[begun[0] :], is_block_M[begun[0] :]
        ends = np.flatnonzero(_is_end(words_M))
        if len(ends) and not keep:
            self._at += int(ends[-1]) + 1
        return words_M[~is_block_M]

    def _live(self) -> tuple[int, ...]:
        # Each word is right by itself, and what is between two of them the writer has put in their order.
        live = self._words()
        self.on_device, self.untimed = live[layout.ON_DEVICE] > 0, live[layout.ON_DEVICE] == layout.UNTIMED
        self.misuse = live[layout.MISUSE]
        added = live[layout.ADDITIONS]
        if added != self._added:
            if not 0 < added <= ADDITIONS_BYTES:
                raise RingError(f"{self.path}: {added} bytes of additions")
            info = with_additions(self._declared, self.read_at(added, ADDITIONS_AT))
            self.late_stages = info.schema.stages[len(self.info.schema.stages) - 1 : -1]
            self.info = info if self._grows else replace(info, schema=self.info.schema)
            self._added = added
        return live


def _is_end(words_M: NDArray[np.uint64]) -> BoolArray:
    code_M = words_M >> np.uint64(layout.CODE_AT)
    return np.asarray((code_M == layout.END) | (code_M == layout.LEFT))


@dataclass(slots=True)
class _Now:
    """Where a rank is: in which stage (None between steps) since when, and in which step since when."""

    stage: str | None = None
    since_ns: int = 0
    step: int = 0
    step_since_ns: int = 0
    special: bool = False


def _now(words: Sequence[int], schema: StageSchema) -> _Now:
    """Where the rank is after these words."""
    found = _Now()
    open_stages: list[int] = []
    said: list[tuple[int, int]] = []
    number = last_ns = 0
    for word in words:
        code, value = word >> layout.CODE_AT, word & layout.MAX_VALUE
        if code > layout.NOTED or layout.ON_STREAM <= code < layout.BEGIN:
            said.append((code, value))
            continue
        if value < last_ns:
            break
        last_ns = value
        for of, what in said:
            number = what if of == layout.NUMBER else number
            found.special = bool(what) if of == layout.KIND else found.special
        said.clear()
        if code == layout.BEGIN:
            found.step, found.step_since_ns, found.special = number, value, False
            open_stages = [layout.OTHER_STAGE]
        elif code in (layout.END, layout.LEFT):
            open_stages = []
        elif code < layout.ON_STREAM and not code & 1:
            open_stages.append(code >> 1)
        elif code < layout.ON_STREAM and code >> 1 in open_stages[1:]:
            while open_stages.pop() != code >> 1:
                pass
        else:
            continue
        found.since_ns = value
        top = open_stages[-1] if open_stages else -1
        known = 0 < top < len(schema.stages)
        found.stage = None if top < 0 else schema.stages[top - 1] if known else OTHER
    return found


class SlotRing(Ring):
    """A ring of slots, version 2 (see `windows.slots`)."""

    _LIVE = struct.Struct("=9q")

    def __init__(self, path: Path | str, header: Header, skip: int) -> None:
        super().__init__(path, header, skip)
        self._slots = header.slots
        self._slot_bytes = slot_bytes(self.info.schema)
        if not self._slots:
            raise RingError(f"{self.path}: bad header: a ring of no slots")
        self._check_size(HEADER_BYTES + self._slots * self._slot_bytes)

    def copied(self) -> Copied:
        """See `Ring`."""
        published, *_, closed, _, _ = self._live()
        self.over = bool(closed)
        first = self._new(published, self._slots)
        raw = self._circular(first, published, self._slots, HEADER_BYTES, self._slot_bytes)
        # The writer went on while we copied: it may be anywhere up to, and in, the slot of its next step.
        overrun = self._live()[0] - self._slots
        steps, sound_B = checked(self.info.rank, raw, self.info.schema)
        right_B = sound_B & (steps.seq_B == np.arange(first + 1, published + 1))
        gone = int((~right_B & (np.arange(first, published) <= overrun)).sum())
        missed, self._read = first - self._read + gone, published
        nothing = decode([(self.info.rank, b"")], self.info.schema)
        return Copied(missed, batch=Batch(steps[right_B], nothing, missed, int((~right_B).sum()) - gone))

    def status(self) -> RankStatus:
        """See `Ring`."""
        published, stage, since_ns, step, step_since_ns, _, closed, special, _ = self._live()
        stages = self.info.schema.stages
        if not -1 <= stage < len(stages):
            raise RingError(f"{self.path}: the rank is said to be in stage {stage} of {len(stages)}")
        now_ns = monotonic_ns()
        return RankStatus(
            rank=self.info.rank,
            host=self.info.host,
            stage=None if stage < 0 else stages[stage],
            # Before the first step the header has no time yet.
            stage_age_ns=now_ns - max(since_ns, self.info.started_mono_ns),
            step=step,
            step_age_ns=now_ns - step_since_ns,
            published=published,
            closed=bool(closed),
            special=special == step,
            alive=self.writer_alive,
        )

    def _live(self) -> tuple[int, ...]:
        # Read again until two reads agree: they say one thing together, and are stored one at a time.
        live: tuple[int, ...] = self._words()
        before: tuple[int, ...] = ()
        for _ in range(_READS_TO_SETTLE):
            if live == before:
                break
            live, before = self._words(), live
        # Its device times are in a ring of their own, which is not read any more.
        self.misuse, self.on_device, self.untimed = live[5], bool(live[8]), True
        return live


def open_ring(path: Path | str, skip: int = 0, *, grows: bool = True) -> Ring:
    """Open a ring, of which the first ``skip`` steps have been read before (see `StepLog.last_seq`).

    Unless it ``grows``, the stages that are there now are all that steps are given.

    Raises:
        RingError: the file is foreign, truncated, of another version or byte order, or damaged.
    """
    with OpenFile(path, os.O_RDONLY) as file:
        header = file.checked_header(RING_MAGIC)
    return MomentRing(path, header, skip, grows=grows) if header.log_words else SlotRing(path, header, skip)


def batches(copied: Sequence[Copied]) -> list[Batch]:
    """What was copied from some rings, decoded: those of the same stages at once."""
    found: dict[int, Batch] = {at: one.batch for at, one in enumerate(copied) if one.batch is not None}
    by_schema: dict[StageSchema, list[int]] = {}
    for at, one in enumerate(copied):
        if one.moments is not None:
            by_schema.setdefault(one.moments.info.schema, []).append(at)
    for schema, places in by_schema.items():
        parts = [one.moments for one in (copied[at] for at in places) if one.moments is not None]
        for at, each in zip(places, decoded(parts, schema), strict=True):
            found[at] = Batch(each.steps, each.device, copied[at].missed, each.torn, each.misuse)
    return [found[at] for at in range(len(copied))]
