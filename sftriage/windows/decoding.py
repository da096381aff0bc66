"""The only decoder: slots of a log, and moments of a ring, to columns of steps. A slot is one step of one rank on disk.

``rank-<rank>.<attempt>.steps`` is a header (see `sftriage.trainer.layout`) and consecutive slots, ``.device-steps`` the
same for times on the device. A slot is ``10 + S + G`` 64-bit signed words (S stages, G sync stages), native order::

    seq           1 for the first step that this writer published, and one more for each step after it
    step          the job's own number of the step
    start_ns      start, monotonic clock
    between_ns    from the end of the previous step to this start; 0 if unknown
    flags         1: the step was left half-way; 2: a heavy profiler touched it
    kind          16 bytes of UTF-8 in two words, padded with zeros; all zeros: an ordinary step
    work          tokens or samples, as the job counts them; 0 if unknown
    ready_ns      the split sync stage's own time, until the last gradient was ready; -1 if unknown
    durations_ns  S words
    outside_ns    G words, sync stages in the order of the step
    crc           CRC-32 of all bytes before it

Steps whose stages were not closed in order are decoded one by one, all others at once. Axes: B steps of single ranks, S
stages, G sync stages, W words of a slot, M words of a ring, C cuts (moments at which another stage begins to run).
Times of moments are nanoseconds since the ring's start.
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

from sftriage.model.windows import COUNTERS, StageSchema, StepRecord
from sftriage.trainer import layout
from sftriage.trainer.layout import MAX_COUNT, WORD_BYTES, RingInfo, bounded_text

SEQ, STEP, START, BETWEEN, FLAGS, KIND, KIND_REST, WORK, READY = range(9)
DURATIONS = 9
"""Word of the slot at which the S durations begin."""

INCOMPLETE = 1
CAPTURING = 2

UNKNOWN = -1
"""``ready_ns`` of a step whose last ready gradient is unknown."""
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
    """Minimum and maximum of each word of a slot but its checksum (W, 1); times are below `MAX_NS`."""
    least_W, most_W = np.zeros(slot_words(schema) - 1, np.int64), np.full(slot_words(schema) - 1, MAX_NS - 1)
    least_W[SEQ], least_W[READY] = 1, UNKNOWN
    least_W[STEP], most_W[[SEQ, STEP, START]] = 1 - MAX_COUNT, MAX_COUNT - 1
    anything = np.iinfo(np.int64)
    least_W[[FLAGS, KIND, KIND_REST]], most_W[[FLAGS, KIND, KIND_REST, WORK, READY]] = anything.min, anything.max
    return least_W[:, None], most_W[:, None]


def kind_of(first: int, rest: int) -> str:
    """The kind that two words of a slot hold; invalid text shows replacement characters, and is no error."""
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
        rank_B: each step's rank.
        slots_BW: the slots as written; read them through the columns.
        counted_BC: the kernel's counters (see `sftriage.model.windows`), NaN if unknown (see `windows.logs`); None if
            none were read.
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
    """The number of steps that the rank had published, this one included."""
    step_B = _Column(STEP)
    start_ns_B = _Column(START)
    between_ns_B = _Column(BETWEEN)
    """The time from the end of the previous step."""
    times_ns_BV = _Column(slice(DURATIONS, -1))
    """The durations of the stages, then the times outside the stages before each sync stage ended."""
    ready_ns_B = _Column(READY)
    """The time until the last gradient was ready; negative if unknown."""
    work_B = _Column(WORK)
    """The amount of work; 0 if unknown."""
    kind_B2 = _Column(slice(KIND, KIND_REST + 1))
    """The kind of step in two words (`kind_of` converts them to text); 0, 0 is an ordinary step."""

    @property
    def durations_ns_BS(self) -> IntArray:
        return self.times_ns_BV[:, : len(self.schema.stages)]

    @property
    def complete_B(self) -> BoolArray:
        return np.asarray(self.slots_BW[:, FLAGS] & INCOMPLETE == 0)

    @property
    def capturing_B(self) -> BoolArray:
        return np.asarray(self.slots_BW[:, FLAGS] & CAPTURING != 0)

    def in_order(self) -> StepArrays:
        return self[np.argsort(self.step_B, kind="stable")]

    def records(self) -> list[StepRecord]:
        """The steps as records; slow for many."""
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
    """The steps in whole slots of some ranks, which the caller has checked (see `checked`)."""
    ranks, raws = zip(*of_ranks, strict=True)
    width = slot_words(schema)
    lengths = [len(raw) // (width * WORD_BYTES) for raw in raws]
    slots_BW = np.frombuffer(raws[0] if len(raws) == 1 else b"".join(raws), dtype=np.int64).reshape(-1, width)
    return StepArrays(schema, np.repeat(np.array(ranks, dtype=np.int64), lengths), slots_BW)


def records(raw: bytes, width: int) -> tuple[IntArray, BoolArray]:
    """The words of whole records of ``width`` words, and which records (B) match their checksum."""
    size = width * WORD_BYTES
    view = memoryview(raw)[: len(raw) // size * size]
    words_BW = np.frombuffer(view, dtype=np.int64).reshape(-1, width)
    sums = [crc32(view[start : start + size - WORD_BYTES]) for start in range(0, len(view), size)]
    return words_BW, np.asarray(words_BW[:, -1] == np.array(sums, dtype=np.int64))


def checked(rank: int, raw: bytes, schema: StageSchema) -> tuple[StepArrays, BoolArray]:
    """The steps in slots of one rank, and which of them (B) were written whole and have possible values."""
    slots_BW, sound_B = records(raw, slot_words(schema))
    steps = StepArrays(schema, np.full(len(slots_BW), rank, dtype=np.int64), slots_BW)
    sound_B &= (steps.seq_B >= 1) & (steps.seq_B < MAX_COUNT)
    # A valid checksum does not prove a correct writer: later arithmetic must not meet a negative time.
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
    """Steps of one schema joined; at least one part is required."""
    if len(parts) == 1:
        return parts[0]
    slots_BW = np.concatenate([part.slots_BW for part in parts])
    counted_BC = None
    if any(part.counted_BC is not None for part in parts):
        unknown = (np.full((len(part), len(COUNTERS)), np.nan) for part in parts)
        known = zip(parts, unknown, strict=True)
        counted_BC = np.concatenate([nan_BC if part.counted_BC is None else part.counted_BC for part, nan_BC in known])
    return StepArrays(parts[0].schema, np.concatenate([part.rank_B for part in parts]), slots_BW, counted_BC)


_STEP_BITS = 44
"""Low bits of a number that orders moments of all steps: four hours per step, and half a million steps."""


@dataclass(frozen=True, slots=True, eq=False)
class Copied:
    """The words of consecutive steps of one rank, copied from its ring.

    Attributes:
        info: the writer, with the stages known so far.
        first_seq: the first step's number in the index.
        words_M: the words, possibly preceded by the word that ends the previous step.
        bounds: where each step begins, and the last one ends (B + 1).
        tail: the last part is no step, but the end of a closed ring after its last step.
        missed: steps that were overwritten before they were copied.
    """

    info: RingInfo
    first_seq: int
    words_M: NDArray[np.uint64]
    bounds: IntArray
    tail: bool = False
    missed: int = 0

    @property
    def ended_ns(self) -> int:
        """The end of the step before the first one; -1 if unknown."""
        return int(self.words_M[0]) & layout.MAX_VALUE if self.bounds[0] else -1


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The result of a read. ``len(steps) + missed + torn`` is the number of steps published since the last read.

    Attributes:
        device: device times of any steps, if the rank records them.
        missed: steps that were overwritten before they were read.
        torn: invalid steps, which are skipped.
        misuse: the number of stages that were left without being open, or out of order.
    """

    steps: StepArrays
    device: StepArrays
    missed: int = 0
    torn: int = 0
    misuse: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Cuts:
    """Moments at which another stage begins to run, in order, of whole steps: step (``of_C``), time and stage.

    ``visit_C`` counts the visits to the split sync stage so far, in all steps; ``left_C`` is whether the stage that ran
    before was left for good, ``last_C`` whether the step ends here.
    """

    of_C: IntArray
    at_ns_C: IntArray
    stage_C: IntArray
    visit_C: IntArray
    left_C: BoolArray
    last_C: BoolArray

    @property
    def took_ns_C(self) -> IntArray:
        took_ns_C = np.diff(self.at_ns_C, append=0)
        took_ns_C[self.last_C] = 0
        return took_ns_C


def batches(copied: Sequence[Copied]) -> list[Batch]:
    """Decode copies from some rings, those with the same stages at once."""
    by_place: dict[int, Batch] = {}
    for schema in dict.fromkeys(part.info.schema for part in copied):
        places = [at for at, part in enumerate(copied) if part.info.schema == schema]
        by_place.update(zip(places, _decoded([copied[at] for at in places], schema), strict=True))
    return [by_place[at] for at in range(len(copied))]


def _decoded(parts: Sequence[Copied], schema: StageSchema) -> list[Batch]:
    words_M = np.concatenate([part.words_M[part.bounds[0] : part.bounds[-1]] for part in parts])
    code_M = (words_M >> np.uint64(layout.CODE_AT)).astype(np.int64)
    value_M = (words_M & np.uint64(layout.MAX_VALUE)).astype(np.int64)
    counts = np.array([len(part.bounds) - 1 for part in parts])
    of_M = np.repeat(np.arange(counts.sum()), np.concatenate([np.diff(part.bounds) for part in parts]))
    values = _Values(code_M, value_M, of_M, int(counts.sum()), np.bincount(code_M, minlength=256))
    begun_ns_B = np.repeat([part.info.started_mono_ns for part in parts], counts)
    begins = np.cumsum(counts) - counts

    found, whole_B = _boundaries(values, schema)
    cuts, took_ns_BS, passed_ns_BG, misuse_B = _times(found, schema, values.n_steps)
    left_ns_B, begin_ns_B = values.last(layout.LEFT, -1), values.last(layout.BEGIN)
    before_ns_B = np.roll(np.where(whole_B, np.maximum(values.last(layout.END, -1), left_ns_B), -1), 1)
    before_ns_B[begins[counts > 0]] = [part.ended_ns for part in parts if len(part.bounds) > 1]
    slots_BW = np.zeros((values.n_steps, slot_words(schema)), dtype=np.int64)
    slots_BW[:, SEQ] = np.arange(values.n_steps) + np.repeat([part.first_seq for part in parts] - begins, counts)
    slots_BW[:, STEP] = values.last(layout.NUMBER)
    slots_BW[:, START] = begin_ns_B + begun_ns_B
    slots_BW[:, BETWEEN] = np.where(before_ns_B >= 0, np.maximum(begin_ns_B - before_ns_B, 0), 0)
    slots_BW[:, FLAGS] = np.where(left_ns_B >= 0, INCOMPLETE, 0)
    slots_BW[values.last(layout.CAPTURING) > 0, FLAGS] |= CAPTURING
    slots_BW[:, KIND : KIND_REST + 1] = _kinds(values)
    slots_BW[:, WORK] = values.last(layout.WORK)
    slots_BW[:, READY] = _ready(cuts, schema, *values.all_of(layout.READY), values.n_steps)
    slots_BW[:, DURATIONS:-1] = np.concatenate([took_ns_BS, passed_ns_BG], axis=1)
    device, of_device = _device(values, schema, begun_ns_B)
    torn_B = ~whole_B
    torn_B[(begins + counts - 1)[[part.tail for part in parts]]] = False
    decoded = []
    for part, first, count in zip(parts, begins.tolist(), counts.tolist(), strict=True):
        of = slice(first, first + count)
        device_BW = device[(of_device >= first) & (of_device < first + count)]
        decoded.append(
            Batch(
                _of_rank(part.info.rank, schema, slots_BW[of][whole_B[of]]),
                _of_rank(part.info.rank, schema, device_BW),
                part.missed,
                int(torn_B[of].sum()),
                int(misuse_B[of].sum()),
            )
        )
    return decoded


def _of_rank(rank: int, schema: StageSchema, slots_BW: IntArray) -> StepArrays:
    return StepArrays(schema, np.full(len(slots_BW), rank, dtype=np.int64), slots_BW)


@dataclass(frozen=True, slots=True, eq=False)
class _Values:
    """Moments as codes with values, and their steps. ``codes``: the number of moments with each code."""

    code_M: IntArray
    value_M: IntArray
    of_M: IntArray
    n_steps: int
    codes: IntArray

    def last(self, code: int, default: int = 0) -> IntArray:
        found_B = np.full(self.n_steps, default, dtype=np.int64)
        if self.codes[code]:
            at = self.code_M == code
            found_B[self.of_M[at]] = self.value_M[at]
        return found_B

    def all_of(self, code: int) -> tuple[IntArray, IntArray]:
        at = self.code_M == code
        return self.of_M[at], self.value_M[at]

    def count(self, codes_M: BoolArray) -> IntArray:
        return np.bincount(self.of_M[codes_M], minlength=self.n_steps)


@dataclass(frozen=True, slots=True, eq=False)
class _Boundaries:
    """The moments at which steps and stages begin and end, in order of time: their steps, codes and times (C each)."""

    of_C: IntArray
    code_C: IntArray
    at_ns_C: IntArray

    def of_steps(self, wanted_B: BoolArray) -> _Boundaries:
        keep_C = wanted_B[self.of_C]
        return _Boundaries(self.of_C[keep_C], self.code_C[keep_C], self.at_ns_C[keep_C])


def _boundaries(values: _Values, schema: StageSchema) -> tuple[_Boundaries, BoolArray]:
    code_M, of_M = values.code_M, values.of_M
    end_M = (code_M == layout.END) | (code_M == layout.LEFT)
    whole_B = (values.count(code_M == layout.BEGIN) == 1) & (values.count(end_M) == 1)
    whole_B &= values.count(code_M == layout.NUMBER) == 1
    stage_M, number_M = code_M < layout.ON_STREAM, code_M >> 1
    whole_B[of_M[stage_M & (number_M == 0)]] = False
    # The time of a stage that was declared later stays with the stage around it.
    stage_M = stage_M & ((number_M < len(schema.stages)) | (number_M == layout.OTHER_STAGE))
    at_M = np.flatnonzero(stage_M | (code_M == layout.BEGIN) | end_M)
    of_C, code_C, at_ns_C = of_M[at_M], code_M[at_M], values.value_M[at_M]
    # A whole step runs from its BEGIN to its end, and its time never goes back.
    first_C, last_C = np.diff(of_C, prepend=-1) > 0, np.diff(of_C, append=values.n_steps) > 0
    whole_B[of_C[(first_C != (code_C == layout.BEGIN)) | (last_C != end_M[at_M])]] = False
    whole_B[of_C[~first_C & (np.diff(at_ns_C, prepend=0) < 0)]] = False
    found = _Boundaries(of_C, code_C, at_ns_C)
    return (found if whole_B.all() else found.of_steps(whole_B)), whole_B


def _followed(found: _Boundaries, schema: StageSchema, n_steps: int) -> tuple[_Cuts, BoolArray]:
    """The stage that runs from each boundary on, and the steps (B) for which this method fails."""
    of_C, code_C = found.of_C, found.code_C
    other = len(schema.stages) - 1
    stage_C = np.where(code_C >> 1 == layout.OTHER_STAGE, other, (code_C >> 1) - 1)
    entered_C = (code_C < layout.ON_STREAM) & (code_C & 1 == 0)
    left_C = (code_C < layout.ON_STREAM) & (code_C & 1 == 1)
    depth_C = np.cumsum(entered_C.astype(np.int64) - left_C)
    begin_C = np.flatnonzero(code_C == layout.BEGIN)[np.cumsum(code_C == layout.BEGIN) - 1]
    depth_C = depth_C - depth_C[begin_C]
    runs_C = np.where(entered_C, stage_C, other)
    places_C = np.arange(len(of_C))
    for depth in range(1, int(depth_C[left_C].max(initial=0)) + 1):
        # After a nested stage, the stage around it runs again: the last one entered at its depth.
        outer_C = np.maximum.accumulate(np.where(entered_C & (depth_C == depth), places_C, 0))
        inner_C = left_C & (depth_C == depth)
        runs_C[inner_C] = stage_C[outer_C[inner_C]]
    astray_C = left_C & ((depth_C < 0) | (np.roll(runs_C, 1) != stage_C))
    astray_B = np.bincount(of_C[astray_C], minlength=n_steps) > 0
    split = schema.stages.index(schema.split_sync) if schema.split_sync else -1
    visit_C = np.cumsum(entered_C & (stage_C == split))
    last_C = np.diff(of_C, append=n_steps) > 0
    return _Cuts(of_C, found.at_ns_C, runs_C, visit_C, left_C, last_C), astray_B


def _durations(cuts: _Cuts, schema: StageSchema, n_steps: int) -> tuple[IntArray, IntArray]:
    """Each stage's duration (B × S), and the time in ``other`` before the end of each sync stage (B × G).

    The latter counts from the end of the previous sync stage.
    """
    n_stages = len(schema.stages)
    took_ns_C = cuts.took_ns_C
    # Sums of whole numbers below 2**53 are exact in floating point.
    sums = np.bincount(cuts.of_C * n_stages + cuts.stage_C, took_ns_C, n_steps * n_stages)
    in_other_C = np.where(cuts.stage_C == n_stages - 1, took_ns_C, 0)
    so_far_C = np.cumsum(in_other_C) - in_other_C
    first_C = np.flatnonzero(np.diff(cuts.of_C, prepend=-1) > 0)[np.cumsum(np.diff(cuts.of_C, prepend=-1) > 0) - 1]
    so_far_C = so_far_C - so_far_C[first_C]
    before_C = np.roll(cuts.stage_C, 1)
    passed_ns_BG = np.zeros((n_steps, len(schema.sync)), dtype=np.int64)
    for g, name in enumerate(schema.sync_in_order):
        ends_C = cuts.left_C & (before_C == schema.stages.index(name))
        # Of several visits in a step, the last one counts.
        passed_ns_BG[cuts.of_C[ends_C], g] = so_far_C[ends_C]
    return sums.astype(np.int64).reshape(n_steps, n_stages), _split(passed_ns_BG)


def _split(passed_ns_BG: IntArray) -> IntArray:
    """Subtract from the time until the end of each sync stage the time until the end of the previous one."""
    return np.asarray(np.diff(np.maximum.accumulate(passed_ns_BG, axis=1), axis=1, prepend=0))


def _ready(cuts: _Cuts, schema: StageSchema, of_X: IntArray, ready_ns_X: IntArray, n_steps: int) -> IntArray:
    """The part (B) of each step's split sync stage until its last gradient was ready, from the ready moments (X).

    In each visit, the time after the last gradient is a wait; a visit without any gradient is all wait. Unknown for a
    step without any gradient.
    """
    ready_ns_B = np.full(n_steps, UNKNOWN, dtype=np.int64)
    known_B = np.bincount(of_X, minlength=n_steps) > 0
    known_B &= np.bincount(cuts.of_C, minlength=n_steps) > 0
    if not known_B.any():
        return ready_ns_B
    of_X, ready_ns_X = of_X[known_B[of_X]], ready_ns_X[known_B[of_X]]
    place_C = (cuts.of_C << _STEP_BITS) + _within(cuts.at_ns_C, cuts.of_C, cuts)
    place_X = (of_X << _STEP_BITS) + _within(ready_ns_X, of_X, cuts)
    visit_X = cuts.visit_C[np.searchsorted(place_C, place_X, side="right") - 1]
    until_V = np.full(int(cuts.visit_C[-1]) + 1, -1, dtype=np.int64)
    np.maximum.at(until_V, visit_X, ready_ns_X)
    split = -1 if schema.split_sync is None else schema.stages.index(schema.split_sync)
    until_C = until_V[cuts.visit_C]
    own_C = (cuts.stage_C == split) & (until_C >= 0)
    local_C = np.clip(until_C - cuts.at_ns_C, 0, cuts.took_ns_C)
    sums_B = np.bincount(cuts.of_C[own_C], local_C[own_C], n_steps).astype(np.int64)
    ready_ns_B[known_B] = sums_B[known_B]
    return ready_ns_B


def _within(at_ns_X: IntArray, of_X: IntArray, cuts: _Cuts) -> IntArray:
    """Times since the start of their steps, limited to `_STEP_BITS`."""
    begin_ns_B = np.zeros(int(cuts.of_C[-1]) + 1, dtype=np.int64)
    begin_ns_B[cuts.of_C[::-1]] = cuts.at_ns_C[::-1]
    return np.asarray(np.clip(at_ns_X - begin_ns_B[of_X], 0, (1 << _STEP_BITS) - 1))


def _one_by_one(found: _Boundaries, schema: StageSchema) -> tuple[list[int], list[int], int]:
    """One step whose stages were not closed in order: its `_durations`, and its misuse.

    Leaving a stage that is not open does nothing. Leaving an outer stage closes those inside it.
    """
    other = len(schema.stages) - 1
    sync = [schema.stages.index(name) for name in schema.sync_in_order]
    took_ns, passed_ns = [0] * len(schema.stages), [0] * len(sync)
    open_stages = [other]
    misuse = since_ns = 0
    for code, at_ns in zip(found.code_C.tolist(), found.at_ns_C.tolist(), strict=True):
        if code != layout.BEGIN:
            took_ns[open_stages[-1]] += at_ns - since_ns
        since_ns = at_ns
        if code >= layout.ON_STREAM:
            continue
        stage = other if code >> 1 == layout.OTHER_STAGE else (code >> 1) - 1
        if not code & 1:
            open_stages.append(stage)
            continue
        misuse += open_stages[-1] != stage or len(open_stages) == 1
        left = -1
        while left != stage and stage in open_stages[1:]:
            left = open_stages.pop()
            if left in sync:
                passed_ns[sync.index(left)] = took_ns[other]
    return took_ns, passed_ns, misuse


def _times(found: _Boundaries, schema: StageSchema, n_steps: int) -> tuple[_Cuts, IntArray, IntArray, IntArray]:
    cuts, astray_B = _followed(found, schema, n_steps)
    misuse_B = np.zeros(n_steps, dtype=np.int64)
    if not astray_B.any():
        return cuts, *_durations(cuts, schema, n_steps), misuse_B
    cuts, _ = _followed(found.of_steps(~astray_B), schema, n_steps)
    took_ns_BS, passed_ns_BG = _durations(cuts, schema, n_steps)
    for step in np.flatnonzero(astray_B).tolist():
        alone_B = np.arange(n_steps) == step
        took_ns, passed_ns, misuse_B[step] = _one_by_one(found.of_steps(alone_B), schema)
        took_ns_BS[step], passed_ns_BG[step] = took_ns, _split(np.array([passed_ns], dtype=np.int64))[0]
    return cuts, took_ns_BS, passed_ns_BG, misuse_B


def _kinds(values: _Values) -> IntArray:
    if not values.codes[layout.KIND : layout.KIND + 3].any():
        return np.zeros((values.n_steps, 2), dtype=np.int64)
    low, middle, high = (values.last(code).astype(np.uint64) for code in range(layout.KIND, layout.KIND + 3))
    bits, byte = np.uint64(8 * layout.KIND_BYTES_A_WORD), np.uint64(8)
    first, rest = low | middle << bits, middle >> byte | high << (bits - byte)
    # The words have the bytes of the text, in order, on any machine.
    return np.asarray(np.stack([first, rest], axis=1).astype("<u8").view(np.int64))


def _device(values: _Values, schema: StageSchema, begun_ns_B: IntArray) -> tuple[IntArray, IntArray]:
    """The device times recorded between steps, as slots, and the step before whose end each was recorded."""
    code_M = values.code_M
    if not values.codes[layout.DEVICE_STEP]:
        return np.zeros((0, slot_words(schema)), dtype=np.int64), np.zeros(0, dtype=np.int64)
    at_M = np.flatnonzero(((code_M >= layout.ON_STREAM) & (code_M < layout.BEGIN)) | (code_M >= layout.DEVICE_STEP))
    code_C, value_C, where_C = code_M[at_M], values.value_M[at_M], values.of_M[at_M]
    begins_C = code_C == layout.DEVICE_STEP
    n_found = int(begins_C.sum())
    slots_BW = np.zeros((n_found, slot_words(schema)), dtype=np.int64)
    of_C = np.cumsum(begins_C) - 1
    found_C = of_C >= 0
    found = _Values(code_C[found_C], value_C[found_C], of_C[found_C], n_found, values.codes)
    mark_C = (found.code_M < layout.BEGIN) | (found.code_M == layout.DEVICE_END)
    of_C, stage_C, at_ns_C = found.of_M[mark_C], found.code_M[mark_C] - layout.ON_STREAM - 1, found.value_M[mark_C]
    other = len(schema.stages) - 1
    last_C = found.code_M[mark_C] == layout.DEVICE_END
    of_other_C = last_C | (stage_C == layout.OTHER_STAGE - 1)
    known_C = of_other_C | (stage_C >= 0)
    stage_C = np.where(of_other_C | (stage_C > other), other, stage_C)
    whole_B = np.bincount(of_C[last_C], minlength=n_found) == 1
    whole_B &= np.bincount(of_C[~known_C], minlength=n_found) == 0
    whole_B &= np.bincount(of_C, minlength=n_found) > 1
    first_C = np.diff(of_C, prepend=-1) > 0
    whole_B[of_C[~first_C & (np.diff(at_ns_C, prepend=0) < 0)]] = False
    whole_B[of_C[last_C != (np.diff(of_C, append=n_found) > 0)]] = False
    keep_C = whole_B[of_C]
    of_C, stage_C, at_ns_C, last_C, first_C = (column[keep_C] for column in (of_C, stage_C, at_ns_C, last_C, first_C))
    changed_C = ~first_C & (np.roll(stage_C, 1) != stage_C)
    split = schema.stages.index(schema.split_sync) if schema.split_sync else -1
    visit_C = np.cumsum((stage_C == split) & (changed_C | first_C))
    cuts = _Cuts(of_C, at_ns_C, stage_C, visit_C, changed_C, last_C)
    took_ns_BS, passed_ns_BG = _durations(cuts, schema, n_found)
    where_B = where_C[begins_C]
    slots_BW[:, SEQ] = value_C[begins_C]
    slots_BW[:, STEP] = found.last(layout.DEVICE_NUMBER)
    slots_BW[:, START] = found.last(layout.DEVICE_START) + begun_ns_B[where_B]
    slots_BW[:, BETWEEN] = found.last(layout.DEVICE_BETWEEN)
    slots_BW[:, FLAGS] = np.where(found.last(layout.DEVICE_FLAGS) > 0, CAPTURING, 0)
    slots_BW[:, READY] = _ready(cuts, schema, *found.all_of(layout.DEVICE_READY), n_found)
    slots_BW[:, DURATIONS:-1] = np.concatenate([took_ns_BS, passed_ns_BG], axis=1)
    return slots_BW[whole_B], where_B[whole_B]
