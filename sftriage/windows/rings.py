"""Reading rings from outside: their new steps, and what their ranks are doing now. Nothing found there is trusted."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic_ns

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import RingError
from sftriage.model.windows import OTHER, RankStatus, StageSchema
from sftriage.trainer import layout
from sftriage.trainer.layout import OpenFile
from sftriage.windows.decoding import BoolArray
from sftriage.windows.moments import Batch, Copied, batches

_LIVE = struct.Struct("=6q")


class Ring(OpenFile):
    """A ring whose first ``skip`` steps have been read before (see `StepLog`).

    Unless it ``grows``, all steps get the stages that are declared now.

    Attributes:
        info: who writes it, with the stages that are known by now.
        on_device: at the last look, the trainer used a device that its host does not wait for.
        untimed: no device times come from there, or none any more.
        misuse: at the last look, calls the recorder could make no sense of.
        over: at the last read, the writer had taken its leave before: nothing more will come.
        late_stages: stages that were declared too late to be in ``info``; their time stays with what is around it.

    Raises:
        RingError: the file is foreign, truncated, of another version or byte order, or damaged.
    """

    def __init__(self, path: Path | str, skip: int = 0, *, grows: bool = True) -> None:
        super().__init__(path, os.O_RDONLY)
        try:
            header = self.checked_header(layout.RING_MAGIC)
            self.info = self._declared = header.info
            self._log_words = header.log_words
            self.on_device = self.untimed = self.over = False
            self.misuse = 0
            self.late_stages: tuple[str, ...] = ()
            self._read = skip
            # The additions that `info` has, in bytes.
            self._added = 0
            # Where the first unread step begins, and the words of the step before it.
            self._at = 0
            self._last = np.zeros(0, dtype=np.uint64)
            # Steps that end before that place. A new reader passes over those that an earlier reader has read.
            self._ended = 0
            self._grows = True
            expected = layout.LOG_AT + self._log_words * layout.WORD_BYTES
            if (found := self.length_bytes()) != expected:
                raise RingError(f"{self.path}: truncated or foreign: {found} bytes, its header says {expected}")
            self._live()
        except BaseException:
            self.close()
            raise
        self._grows = grows

    def read(self) -> Batch:
        """The steps published since the last read.

        Raises:
            RingError: the file was truncated, or what its header says cannot be.
        """
        return batches([self.copied()])[0]

    def reopened(self, n_steps: int) -> Ring:
        """The same ring, which reads the last ``n_steps`` read steps once more, as far as they are there.

        Raises:
            RingError: it cannot be opened any more.
        """
        ring = Ring(self.path, max(0, self._read - n_steps), grows=False)
        ring.info = self.info
        return ring

    @property
    def writer_alive(self) -> bool | None:
        """Whether the process that writes the ring is there; None where that cannot be known."""
        return self.is_writer_alive(self.info)

    def copied(self) -> Copied:
        """Copy the steps that were published since the last read.

        Raises:
            RingError: the file was truncated, or what its header says cannot be.
        """
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
        return Copied(self.info, first + 1, words_M, bounds[skipped:], last_look, missed)

    def status(self) -> RankStatus:
        """What the rank is doing now.

        Raises:
            RingError: the file was truncated, or its header holds what cannot be.
        """
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
        if not self._at <= opened <= claimed <= opened + self._log_words or opened % layout.BLOCK_WORDS:
            raise RingError(f"{self.path}: bad header: {opened} words opened, {claimed} claimed, {self._at} read")
        start = max(self._at, claimed - self._log_words)
        raw = self._circular(start, opened)
        # The writer went on while we copied.
        oldest = self._live()[layout.CLAIMED] - self._log_words
        whole = min(max(start, oldest), opened)
        words_M = np.frombuffer(raw, dtype=np.uint64)[whole - start :]
        unwritten = np.flatnonzero(words_M == 0)
        words_M = words_M[: unwritten[0]] if len(unwritten) else words_M
        is_block_M = np.zeros(len(words_M), dtype=np.bool_)
        is_block_M[-whole % layout.BLOCK_WORDS :: layout.BLOCK_WORDS] = True
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

    def _circular(self, first: int, end: int) -> bytes:
        start, count = first % self._log_words, end - first
        before_wrap = min(count, self._log_words - start)
        data = self.read_at(before_wrap * layout.WORD_BYTES, layout.LOG_AT + start * layout.WORD_BYTES)
        if count > before_wrap:
            data += self.read_at((count - before_wrap) * layout.WORD_BYTES, layout.LOG_AT)
        if len(data) < count * layout.WORD_BYTES:
            raise RingError(f"{self.path}: truncated: steps are missing at its end")
        return data

    def _live(self) -> tuple[int, ...]:
        # Each word is right by itself, and what is between two of them the writer has put in their order.
        found = self.read_at(_LIVE.size, layout.LIVE_AT)
        if len(found) < _LIVE.size:
            raise RingError(f"{self.path}: truncated: its header has become shorter")
        live: tuple[int, ...] = _LIVE.unpack(found)
        if not 0 <= live[layout.CLAIMED] < layout.MAX_COUNT:
            raise RingError(f"{self.path}: {live[layout.CLAIMED]} words are said to be there")
        self.on_device, self.untimed = live[layout.ON_DEVICE] > 0, live[layout.ON_DEVICE] == layout.UNTIMED
        self.misuse = live[layout.MISUSE]
        added = live[layout.ADDITIONS]
        if added != self._added:
            if not 0 < added <= layout.ADDITIONS_BYTES:
                raise RingError(f"{self.path}: {added} bytes of additions")
            info = layout.with_additions(self._declared, self.read_at(added, layout.ADDITIONS_AT))
            self.late_stages = info.schema.stages[len(self.info.schema.stages) - 1 : -1]
            self.info = info if self._grows else replace(info, schema=self.info.schema)
            self._added = added
        return live


def _is_end(words_M: NDArray[np.uint64]) -> BoolArray:
    code_M = words_M >> np.uint64(layout.CODE_AT)
    return np.asarray((code_M == layout.END) | (code_M == layout.LEFT))


@dataclass(slots=True)
class _Now:
    stage: str | None = None
    since_ns: int = 0
    step: int = 0
    step_since_ns: int = 0
    special: bool = False


def _now(words: Sequence[int], schema: StageSchema) -> _Now:
    found = _Now()
    open_stages: list[int] = []
    values: list[tuple[int, int]] = []
    number = last_ns = 0
    for word in words:
        code, value = word >> layout.CODE_AT, word & layout.MAX_VALUE
        if code > layout.NOTED or layout.ON_STREAM <= code < layout.BEGIN:
            values.append((code, value))
            continue
        if value < last_ns:
            break
        last_ns = value
        for of, what in values:
            number = what if of == layout.NUMBER else number
            found.special = bool(what) if of == layout.KIND else found.special
        values.clear()
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


def open_ring(path: Path | str, skip: int = 0, *, grows: bool = True) -> Ring:
    """Open a ring (see `Ring`)."""
    return Ring(path, skip, grows=grows)
