"""Steps as the columns of a message. What comes in is checked before anything is made of it."""

from __future__ import annotations

from collections.abc import Set
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sftriage.counters import COUNTERS
from sftriage.errors import InputError
from sftriage.recorder.layout import MAX_COUNT
from sftriage.records import StageSchema
from sftriage.windows.decoding import FloatArray, IntArray, StepArrays
from sftriage.windows.slots import FLAGS, KIND, KIND_REST, READY, SEQ, START, STEP, UNKNOWN, WORK, slot_words

MAX_NS = 1 << 56


class Columns(msgspec.Struct, frozen=True, array_like=True):
    """Steps: ranks as 32-bit integers; words of slots but for their checksums; and some counters, as floats.

    Of words and floats the first bytes of all come first, then the second ones: what is alike lies together.
    """

    ranks: bytes
    words: bytes
    counted: bytes | None = None


def packed(steps: StepArrays) -> Columns:
    """Steps as columns."""
    ranks, words_WB = steps.rank_B.astype("<i4").tobytes(), steps.slots_BW[:, :-1].T
    # (what changes little from step to step packs to a third)
    words = shuffled(np.diff(words_WB.astype("<i8"), axis=1, prepend=0))
    if steps.counted_BC is None:
        return Columns(ranks, words)
    return Columns(ranks, words, shuffled(steps.counted_BC.T.astype("<f8")))


def unpacked(columns: Columns, schema: StageSchema, here: Set[int]) -> StepArrays:
    """Steps that hold what can be, of ranks that are there; no arithmetic further on meets anything else.

    Raises:
        InputError: they do not.
    """
    rank_B = np.frombuffer(columns.ranks, "<i4").astype(np.int64)
    n_words, n_steps = slot_words(schema) - 1, len(rank_B)
    words_WB = _in_order(columns.words, n_words, n_steps, "<i8").cumsum(axis=1, dtype=np.int64)
    slots_BW = np.zeros((n_steps, n_words + 1), dtype=np.int64)
    slots_BW[:, :-1] = words_WB.T
    steps = StepArrays(schema, rank_B, slots_BW, _counted(columns, n_steps))
    least_W, most_W = _bounds(schema)
    if not (set(rank_B.tolist()) <= here and ((words_WB >= least_W) & (words_WB <= most_W)).all()):
        raise InputError("steps that cannot be")
    return steps


@lru_cache(maxsize=64)
def _bounds(schema: StageSchema) -> tuple[IntArray, IntArray]:
    """The least and the most that each word of a slot can be (W, 1), but for its checksum."""
    least_W, most_W = np.zeros(slot_words(schema) - 1, np.int64), np.full(slot_words(schema) - 1, MAX_NS - 1)
    least_W[SEQ], least_W[READY] = 1, UNKNOWN
    least_W[STEP], most_W[[SEQ, STEP, START]] = 1 - MAX_COUNT, MAX_COUNT - 1
    anything = np.iinfo(np.int64)
    least_W[[FLAGS, KIND, KIND_REST]], most_W[[FLAGS, KIND, KIND_REST, WORK, READY]] = anything.min, anything.max
    return least_W[:, None], most_W[:, None]


def shuffled(values_VB: IntArray | FloatArray) -> bytes:
    """Values of 8 bytes, the first bytes of all first."""
    as_bytes = np.ascontiguousarray(values_VB).view(np.uint8)
    return as_bytes.reshape(*values_VB.shape, 8).transpose(0, 2, 1).tobytes()


def _in_order(shuffled: bytes, n_values: int, n_steps: int, kind: str) -> NDArray[Any]:
    if len(shuffled) != 8 * n_values * n_steps:
        raise InputError(f"{len(shuffled)} bytes are not {n_steps} steps of {n_values} values")
    bytes_VB8 = np.frombuffer(shuffled, np.uint8).reshape(n_values, 8, n_steps).transpose(0, 2, 1)
    return np.ascontiguousarray(bytes_VB8).view(kind)[:, :, 0]


def _counted(columns: Columns, n_steps: int) -> FloatArray | None:
    if columns.counted is None:
        return None
    counted_CB = _in_order(columns.counted, len(COUNTERS), n_steps, "<f8")
    # (NaN, which stands for unknown, is neither)
    least, most = (of.reduce(counted_CB, axis=None, initial=0.0) for of in (np.fmin, np.fmax))
    if least < 0 or most == np.inf:
        raise InputError("counters that cannot be")
    return np.ascontiguousarray(counted_CB.T)
