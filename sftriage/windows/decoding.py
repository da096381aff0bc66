"""The one decoder of recorded steps: bytes of slots in, columns out. A slot is one step of one rank on disk.

``rank-<rank>.<attempt>.steps`` is a header (see `sftriage.trainer.layout`) and slots in a line, ``.device-steps`` the
same for times on the device. A slot is ``10 + S + G`` 64-bit signed words (S stages, G sync stages), native order::

    seq           1 for the first step that this writer published, and one more for each one after it
    step          the job's own number of the step
    start_ns      start, monotonic clock
    between_ns    from the end of the previous step to this start; 0 where that is not known
    flags         1: the step was left half-way; 2: a heavy profiler touched it
    kind          what sort of step: 16 bytes of UTF-8 in two words, zeros after it; all zeros is an ordinary one
    work          how much of it: tokens or samples, as the job counts them; 0 where unknown
    ready_ns      of the split sync stage's own time, until the last gradient was ready; -1 where that is not known
    durations_ns  S words
    outside_ns    G words, sync stages in the order of the step
    crc           CRC-32 of all the bytes before it

Axes: B steps of single ranks, S stages, G sync stages, W words of a slot.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from sftriage.model.counters import COUNTERS
from sftriage.model.windows import StageSchema, StepRecord
from sftriage.trainer.layout import MAX_COUNT, WORD_BYTES, bounded_text

SEQ, STEP, START, BETWEEN, FLAGS, KIND, KIND_REST, WORK, READY = range(9)
DURATIONS = 9
"""Word of the slot at which the S durations begin."""

INCOMPLETE = 1
CAPTURING = 2

UNKNOWN = -1
"""``ready_ns`` of a step whose last gradient was not seen to become ready."""
MAX_NS = 1 << 56

_KIND = struct.Struct("=2q")


def slot_words(schema: StageSchema) -> int:
    """Words in one slot: nine fixed ones, S durations, G outside times, and the CRC."""
    return DURATIONS + len(schema.stages) + len(schema.sync) + 1


def slot_bytes(schema: StageSchema) -> int:
    """Bytes in one slot."""
    return slot_words(schema) * WORD_BYTES


@lru_cache(maxsize=64)
def slot_bounds(schema: StageSchema) -> tuple[IntArray, IntArray]:
    """The least and the most that each word of a slot but its checksum can be (W, 1); times are below `MAX_NS`."""
    least_W, most_W = np.zeros(slot_words(schema) - 1, np.int64), np.full(slot_words(schema) - 1, MAX_NS - 1)
    least_W[SEQ], least_W[READY] = 1, UNKNOWN
    least_W[STEP], most_W[[SEQ, STEP, START]] = 1 - MAX_COUNT, MAX_COUNT - 1
    anything = np.iinfo(np.int64)
    least_W[[FLAGS, KIND, KIND_REST]], most_W[[FLAGS, KIND, KIND_REST, WORK, READY]] = anything.min, anything.max
    return least_W[:, None], most_W[:, None]


def kind_of(first: int, rest: int) -> str:
    """The kind that two words of a slot hold; what is no text is shown as such, never an error."""
    return bounded_text(_KIND.pack(first, rest).rstrip(b"\0").decode("utf-8", "replace"))


IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


class _Column:
    def __init__(self, words: int | slice) -> None:
        self._words = words

    def __get__(self, steps: StepArrays, owner: type[StepArrays]) -> IntArray:
        return steps.slots_BW[:, self._words]


@dataclass(frozen=True, slots=True, eq=False)
class StepArrays:
    """Steps of any ranks in any order. Columns are views, of 64-bit integers; see `StepRecord` for what they mean.

    Attributes:
        rank_B: whose steps they are.
        slots_BW: the slots as they were written; ask the columns.
        counted_BC: what the kernel counted of each (see `sftriage.model.counters`), NaN where that is not known (see
            `windows.counting`); None where nothing was read.
    """

    schema: StageSchema
    rank_B: IntArray
    slots_BW: IntArray
    counted_BC: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.rank_B)

    def __getitem__(self, rows: slice | IntArray | BoolArray) -> StepArrays:
        counted_BC = None if self.counted_BC is None else self.counted_BC[rows]
        return StepArrays(self.schema, self.rank_B[rows], self.slots_BW[rows], counted_BC)

    seq_B = _Column(SEQ)
    """How many steps the rank had published with this one."""
    step_B = _Column(STEP)
    """The job's numbers of the steps."""
    start_ns_B = _Column(START)
    """When they started."""
    between_ns_B = _Column(BETWEEN)
    """The time before them, from the end of the step before."""
    times_ns_BV = _Column(slice(DURATIONS, -1))
    """What each stage took, and beside it the time outside the stages before each sync stage ended."""
    ready_ns_B = _Column(READY)
    """Until the last gradient was ready; negative where that is not known."""
    work_B = _Column(WORK)
    """How much work they were; 0 where unknown."""
    kind_B2 = _Column(slice(KIND, KIND_REST + 1))
    """What sort of step they are, each in two numbers (`kind_of` makes a text of them): 0, 0 is an ordinary one."""

    @property
    def durations_ns_BS(self) -> IntArray:
        """What each stage took."""
        return self.times_ns_BV[:, : len(self.schema.stages)]

    @property
    def complete_B(self) -> BoolArray:
        """Which were not left half-way."""
        return np.asarray(self.slots_BW[:, FLAGS] & INCOMPLETE == 0)

    @property
    def capturing_B(self) -> BoolArray:
        """Which a heavy profiler touched."""
        return np.asarray(self.slots_BW[:, FLAGS] & CAPTURING != 0)

    def in_order(self) -> StepArrays:
        """The same by step number."""
        return self[np.argsort(self.step_B, kind="stable")]

    def records(self) -> list[StepRecord]:
        """The steps one by one: for a few of them."""
        columns: tuple[Iterable[Any], ...] = (
            self.rank_B.tolist(),
            self.step_B.tolist(),
            self.start_ns_B.tolist(),
            self.between_ns_B.tolist(),
            map(tuple, self.durations_ns_BS.tolist()),
            map(tuple, self.times_ns_BV[:, len(self.schema.stages) :].tolist()),
            self.complete_B.tolist(),
            self.capturing_B.tolist(),
            [None if ready_ns == UNKNOWN else ready_ns for ready_ns in self.ready_ns_B.tolist()],
            [kind_of(first, rest) for first, rest in self.kind_B2.tolist()],
            self.work_B.tolist(),
        )
        return [StepRecord(*values) for values in zip(*columns, strict=True)]


def decode(of_ranks: Iterable[tuple[int, bytes]], schema: StageSchema) -> StepArrays:
    """The steps in whole slots of some ranks, which whoever read them has checked (see `checked`)."""
    ranks, raws = zip(*of_ranks, strict=True)
    width = slot_words(schema)
    lengths = [len(raw) // (width * WORD_BYTES) for raw in raws]
    slots_BW = np.frombuffer(raws[0] if len(raws) == 1 else b"".join(raws), dtype=np.int64).reshape(-1, width)
    return StepArrays(schema, np.repeat(np.array(ranks, dtype=np.int64), lengths), slots_BW)


def records(raw: bytes, width: int) -> tuple[IntArray, BoolArray]:
    """The words of whole records of ``width`` words, and which of them (B) have their checksum."""
    size = width * WORD_BYTES
    view = memoryview(raw)[: len(raw) // size * size]
    words_BW = np.frombuffer(view, dtype=np.int64).reshape(-1, width)
    sums = [crc32(view[start : start + size - WORD_BYTES]) for start in range(0, len(view), size)]
    return words_BW, np.asarray(words_BW[:, -1] == np.array(sums, dtype=np.int64))


def checked(rank: int, raw: bytes, schema: StageSchema) -> tuple[StepArrays, BoolArray]:
    """The steps in slots of one rank, and which of them (B) were written whole and hold what can be."""
    slots_BW, sound_B = records(raw, slot_words(schema))
    steps = StepArrays(schema, np.full(len(slots_BW), rank, dtype=np.int64), slots_BW)
    sound_B &= (steps.seq_B >= 1) & (steps.seq_B < MAX_COUNT)
    # A right checksum does not make a right writer: no arithmetic further on has to expect a negative time.
    sound_B &= (steps.between_ns_B >= 0) & (steps.work_B >= 0) & (steps.ready_ns_B >= UNKNOWN)
    return steps, np.asarray(sound_B & (steps.times_ns_BV >= 0).all(axis=1))


def sealed(steps: StepArrays) -> bytes:
    """Steps as slots, each with its checksum."""
    raw = bytearray(np.ascontiguousarray(steps.slots_BW).tobytes())
    size = steps.slots_BW.shape[1] * WORD_BYTES
    with memoryview(raw) as view, view.cast("q") as words:
        for index, start in enumerate(range(0, len(raw), size)):
            words[(index + 1) * size // WORD_BYTES - 1] = crc32(view[start : start + size - WORD_BYTES])
    return bytes(raw)


def together(parts: Sequence[StepArrays]) -> StepArrays:
    """Steps of one schema, at least one lot, as one."""
    if len(parts) == 1:
        return parts[0]
    slots_BW = np.concatenate([part.slots_BW for part in parts])
    counted_BC = None
    if any(part.counted_BC is not None for part in parts):
        unknown = (np.full((len(part), len(COUNTERS)), np.nan) for part in parts)
        known = zip(parts, unknown, strict=True)
        counted_BC = np.concatenate([nan_BC if part.counted_BC is None else part.counted_BC for part, nan_BC in known])
    return StepArrays(parts[0].schema, np.concatenate([part.rank_B for part in parts]), slots_BW, counted_BC)
