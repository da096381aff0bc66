"""The byte layout of a slot: one step of one rank on disk.

``rank-<rank>.<attempt>.steps`` is a header (see `sftriage.recorder.layout`) and slots in a line, ``.device-steps`` the
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
"""

from __future__ import annotations

import struct

from sftriage.model.windows import StageSchema
from sftriage.recorder.layout import WORD_BYTES, bounded_text

SEQ, STEP, START, BETWEEN, FLAGS, KIND, KIND_REST, WORK, READY = range(9)
DURATIONS = 9
"""Word of the slot at which the S durations begin."""

INCOMPLETE = 1
CAPTURING = 2

UNKNOWN = -1
"""``ready_ns`` of a step whose last gradient was not seen to become ready."""

_KIND = struct.Struct("=2q")


def slot_words(schema: StageSchema) -> int:
    """Words in one slot: nine fixed ones, S durations, G outside times, and the CRC."""
    return DURATIONS + len(schema.stages) + len(schema.sync) + 1


def slot_bytes(schema: StageSchema) -> int:
    """Bytes in one slot."""
    return slot_words(schema) * WORD_BYTES


def kind_of(first: int, rest: int) -> str:
    """The kind that two words of a slot hold; what is no text is shown as such, never an error."""
    return bounded_text(_KIND.pack(first, rest).rstrip(b"\0").decode("utf-8", "replace"))
