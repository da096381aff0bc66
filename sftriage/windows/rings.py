"""Reading rings from outside: their new steps, what their ranks are doing now, and the records that agents send.

Agents and `runs.recordings` call it. Everything in a ring is checked before use.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path
from time import monotonic_ns

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import RingError
from sftriage.model.windows import OTHER, JobStatus, LinkUse, RankStatus, StageSchema
from sftriage.trainer import layout
from sftriage.trainer.layout import MAX_COUNT, OpenFile, RingInfo
from sftriage.windows.decoding import Batch, BoolArray, Copied, IntArray, StepArrays, batches


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """New steps of some ranks of one agent; without steps, a sign that the ranks exist.

    Attributes:
        generation: the start of the job to which the ranks belong.
        schema: the stages of every rank.
        world_size: the job's number of ranks, by its own account.
        ranks: the ring of each of the agent's ranks.
        steps: by the clocks of the hosts.
        device_steps: the same steps, or earlier ones, by the clocks of the devices; None if no rank runs on a device
            for which its host does not wait.
        device_over: the ranks that will have no more device times.
        away: silent ranks; windows do not wait for them until they report again.
        wall_ns: the offset from the times of these steps to nanoseconds since the epoch.
        agent, position: the agent's stream, and the position after these rows.
        links: what the host sent to others since the last rows.
    """

    generation: int
    schema: StageSchema
    world_size: int
    ranks: Mapping[int, RingInfo]
    steps: StepArrays
    device_steps: StepArrays | None = None
    device_over: tuple[int, ...] = ()
    away: tuple[int, ...] = ()
    wall_ns: int = 0
    agent: str = ""
    position: int = 0
    links: tuple[LinkUse, ...] = ()


N_VALUES = 10
"""Values per rank."""
_HOST, _AGES = 1, [3, 5]


@lru_cache(maxsize=64)
def bounds(world_size: int, n_hosts: int, n_stages: int) -> tuple[IntArray, IntArray]:
    """Minimum and maximum of each value of a rank (V, 1)."""
    most = MAX_COUNT - 1
    least_V = np.array([0, 0, -1, -most, -most, -most, 0, 0, -1, 0])
    most_V = np.array([world_size - 1, n_hosts - 1, n_stages - 1, most, most, most, most, 1, 1, 1])
    return least_V[:, None], most_V[:, None]


def status_of(schema: StageSchema, world_size: int, ranks: Sequence[RankStatus], attempt: int = 0) -> JobStatus:
    """The status of some ranks of an attempt, by rank; numbers stay in bounds even for damaged rings."""
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    hosts = {name: number for number, name in enumerate(dict.fromkeys(rank.host for rank in ranks))}
    doing_VR = np.empty((N_VALUES, len(ranks)), dtype=np.int64)
    for at, rank in enumerate(ranks):
        numbers = (rank.stage_age_ns, rank.step, rank.step_age_ns, rank.published)
        doing_VR[:, at] = (
            *(rank.rank, hosts[rank.host], -1 if rank.stage is None else schema.stages.index(rank.stage)),
            *(max(1 - MAX_COUNT, min(number, MAX_COUNT - 1)) for number in numbers),
            *(rank.closed, -1 if rank.alive is None else rank.alive, rank.special),
        )
    return JobStatus(schema, world_size, tuple(hosts), doing_VR, attempt)


def joined_statuses(statuses: Sequence[JobStatus], older_ns: Sequence[int]) -> JobStatus | None:
    """The status of the ranks of several hosts, by rank, with the age of each host's status added; None if empty.

    Only statuses with the stages, number of ranks and attempt of the first one count.
    """

    def key(status: JobStatus) -> tuple[object, ...]:
        return status.schema, status.world_size, status.attempt

    ages = zip(statuses, older_ns, strict=True)
    alike = [(status, age_ns) for status, age_ns in ages if key(status) == key(statuses[0])]
    if not alike:
        return None
    doing_VR = np.concatenate([status.doing_VR for status, _ in alike], axis=1)
    sizes = [status.doing_VR.shape[1] for status, _ in alike]
    bases = list(accumulate((len(status.hosts) for status, _ in alike), initial=0))[:-1]
    doing_VR[_HOST] += np.repeat(np.array(bases, dtype=np.int64), sizes)
    doing_VR[_AGES] += np.repeat(np.array([age_ns for _, age_ns in alike], dtype=np.int64), sizes)
    hosts = tuple(chain.from_iterable(status.hosts for status, _ in alike))
    return replace(statuses[0], hosts=hosts, doing_VR=doing_VR[:, np.argsort(doing_VR[0], kind="stable")])


_LIVE = struct.Struct("=6q")


class Ring(OpenFile):
    """A ring whose first ``skip`` steps have been read before (see `StepLog`).

    Unless it ``grows``, all steps get the stages that are declared now. `read` and `status` update the attributes.

    Attributes:
        info: the writer, with the stages known so far.
        on_device: the trainer uses a device for which its host does not wait.
        untimed: no device times come, or no more of them.
        misuse: the number of invalid calls to the recorder.
        over: the writer had closed the ring before: nothing more will come.
        late_stages: stages that were declared too late to be in ``info``; their time stays with the stage around it.

    Raises RingError if the file is foreign, truncated, of another version or byte order, or damaged.
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
            # The bytes of additions that `info` includes.
            self._added = 0
            # Where the first unread step begins, and the words of the step before it.
            self._at = 0
            self._last = np.zeros(0, dtype=np.uint64)
            # The number of steps that end before that place. A new reader skips those that an earlier one has read.
            self._ended = 0
            self._grows = True
            expected = layout.LOG_AT + self._log_words * layout.WORD_BYTES
            if (found := self.length_bytes()) != expected:
                raise RingError(f"{self.path}: truncated or foreign: {found} bytes, but its header declares {expected}")
            self._live()
        except BaseException:
            self.close()
            raise
        self._grows = grows

    def read(self) -> Batch:
        """The steps published since the last read.

        Raises RingError if the file was truncated, or its header is invalid.
        """
        return batches([self.copied()])[0]

    def reopened(self, n_steps: int) -> Ring:
        """The same ring, before the last ``n_steps`` steps that were read, as far as they still exist.

        Raises RingError if it cannot be opened any more.
        """
        ring = Ring(self.path, max(0, self._read - n_steps), grows=False)
        ring.info = self.info
        return ring

    @property
    def writer_alive(self) -> bool | None:
        """Whether the process that writes the ring exists; None if unknown."""
        return self.is_writer_alive(self.info)

    def copied(self) -> Copied:
        """Copy the steps published since the last read.

        Raises RingError if the file was truncated, or its header is invalid.
        """
        over = bool(self._live()[layout.CLOSED])
        last_read, self.over = over and not self.over, over
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
        if last_read:
            # The words after the last step.
            bounds = np.append(bounds, len(words_M))
        return Copied(self.info, first + 1, words_M, bounds[skipped:], last_read, missed)

    def status(self) -> RankStatus:
        """What the rank is doing now; raises RingError if the file was truncated, or its header is invalid."""
        words_M = self._unread(keep=True)
        words = np.concatenate([self._last, words_M]).tolist()
        stage, since_ns, step, step_since_ns, special = _now(words, self.info.schema)
        since_start_ns = monotonic_ns() - self.info.started_mono_ns
        return RankStatus(
            rank=self.info.rank,
            host=self.info.host,
            stage=stage,
            stage_age_ns=since_start_ns - since_ns,
            step=step,
            step_age_ns=since_start_ns - step_since_ns,
            published=self._ended + int(_is_end(words_M).sum()),
            closed=bool(self._live()[layout.CLOSED]),
            special=special,
            alive=self.writer_alive,
        )

    def ended_in(self) -> tuple[int, str | None]:
        """The step in which the writer has ended, or -1, and its stage: None after a step, "" if it is unknown.

        Raises RingError if the file was truncated, or its header is invalid.
        """
        words = np.concatenate([self._last, self._unread(keep=True)]).tolist()
        codes = [word >> layout.CODE_AT for word in words if word >> layout.CODE_AT in _LIMITS]
        if not codes:
            return -1, None
        stage, _, step, _, _ = _now(words, self.info.schema)
        return step, "" if codes[-1] == layout.LEFT else stage

    def _unread(self, *, keep: bool = False) -> NDArray[np.uint64]:
        """The words since the last read, without block headers.

        The place moves to the end of the last step among them, unless ``keep``.
        """
        live = self._live()
        opened = live[layout.OPENED]
        claimed = live[layout.CLAIMED]
        if not self._at <= opened <= claimed <= opened + self._log_words or opened % layout.BLOCK_WORDS:
            raise RingError(f"{self.path}: bad header: {opened} words opened, {claimed} claimed, {self._at} read")
        start = max(self._at, claimed - self._log_words)
        raw = self._circular(start, opened)
        # The writer continued during the copy.
        oldest = self._live()[layout.CLAIMED] - self._log_words
        whole = min(max(start, oldest), opened)
        words_M = np.frombuffer(raw, dtype=np.uint64)[whole - start :]
        unwritten = np.flatnonzero(words_M == 0)
        words_M = words_M[: unwritten[0]] if len(unwritten) else words_M
        is_block_M = np.zeros(len(words_M), dtype=np.bool_)
        is_block_M[-whole % layout.BLOCK_WORDS :: layout.BLOCK_WORDS] = True
        if (words_M[is_block_M] >> np.uint64(layout.CODE_AT) != layout.BLOCK).any():
            raise RingError(f"{self.path}: damaged: no block header where a block begins")
        if whole > self._at:
            # The step that continues into this block has lost its start; wait until it ends.
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
            raise RingError(f"{self.path}: truncated: the last steps are missing")
        return data

    def _live(self) -> tuple[int, ...]:
        # Each word is atomic, and the writer updates them in a fixed order.
        found = self.read_at(_LIVE.size, layout.LIVE_AT)
        if len(found) < _LIVE.size:
            raise RingError(f"{self.path}: truncated: its header is incomplete")
        live: tuple[int, ...] = _LIVE.unpack(found)
        if not 0 <= live[layout.CLAIMED] < layout.MAX_COUNT:
            raise RingError(f"{self.path}: bad header: {live[layout.CLAIMED]} words claimed")
        self.on_device, self.untimed = live[layout.ON_DEVICE] > 0, live[layout.ON_DEVICE] == layout.UNTIMED
        self.misuse = live[layout.MISUSE]
        added = live[layout.ADDITIONS]
        if added != self._added:
            if not 0 < added <= layout.ADDITIONS_BYTES:
                raise RingError(f"{self.path}: bad header: {added} bytes of additions")
            info = layout.with_additions(self._declared, self.read_at(added, layout.ADDITIONS_AT))
            self.late_stages = info.schema.stages[len(self.info.schema.stages) - 1 : -1]
            self.info = info if self._grows else replace(info, schema=self.info.schema)
            self._added = added
        return live


_LIMITS = {layout.BEGIN, layout.END, layout.LEFT}


def _is_end(words_M: NDArray[np.uint64]) -> BoolArray:
    code_M = words_M >> np.uint64(layout.CODE_AT)
    return np.asarray((code_M == layout.END) | (code_M == layout.LEFT))


def _now(words: Sequence[int], schema: StageSchema) -> tuple[str | None, int, int, int, bool]:
    """The stage that runs and since when; the step, since when, and whether it or its stage is special."""
    stage: str | None = None
    since_ns = step = step_since_ns = number = last_ns = 0
    special, top = False, -1
    open_stages: list[int] = []
    entered: set[int] = set()
    usual: set[int] = set()
    values: list[tuple[int, int]] = []
    for word in words:
        code, value = word >> layout.CODE_AT, word & layout.MAX_VALUE
        if code > layout.NOTED or layout.ON_STREAM <= code < layout.BEGIN:
            values.append((code, value))
            continue
        if value < last_ns:
            break
        last_ns = value
        for kind, known in values:
            number = known if kind == layout.NUMBER else number
            special = bool(known) if kind == layout.KIND else special
        values.clear()
        if code == layout.BEGIN:
            step, step_since_ns, special = number, value, False
            open_stages = [layout.OTHER_STAGE]
            usual, entered = entered, {layout.OTHER_STAGE}
        elif code in (layout.END, layout.LEFT):
            open_stages = []
        elif code < layout.ON_STREAM and not code & 1:
            open_stages.append(code >> 1)
            entered.add(code >> 1)
        elif code < layout.ON_STREAM and code >> 1 in open_stages[1:]:
            while open_stages.pop() != code >> 1:
                pass
        else:
            continue
        since_ns = value
        top = open_stages[-1] if open_stages else -1
        named = 0 < top < len(schema.stages)
        stage = None if top < 0 else schema.stages[top - 1] if named else OTHER
    return stage, since_ns, step, step_since_ns, special or (top >= 0 and bool(usual) and top not in usual)
