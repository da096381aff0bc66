"""The byte layout that rings, step logs and mailboxes share, and who reads and writes headers.

Every file starts with a header of 4096 bytes, so that what follows is page aligned::

    0     8   magic: what kind of file this is
    8     4   byte-order mark 0x01020304, native order
    12    4   format version
    16    4   length of the document in bytes
    20    4   CRC-32 of the document
    24    n   document: UTF-8 JSON of everything that never changes (who writes, the stages, the number of slots)
    3584  -   live words, 64-bit signed, native order; each kind of file says what its own words mean

A recorded step is one slot of ``10 + S + G`` 64-bit signed words (S stages, G sync stages), native order::

    seq           1 for the first step that this writer published, and one more for each one after it
    step          the job's own number of the step
    start_ns      start, monotonic clock
    between_ns    from the end of the previous step to this start
    flags         1: the step was left half-way; 2: a heavy profiler touched it
    kind          what sort of step: 16 bytes of UTF-8 in two words, zeros after it; all zeros is an ordinary one
    work          how much of it: tokens or samples, as the job counts them; 0 where nobody said
    ready_ns      of the first sync stage's own time, until the last gradient was ready; -1 where that is not known
    durations_ns  S words
    outside_ns    G words, sync stages in the order of the step
    crc           CRC-32 of all the bytes before it

Words are all of one width so that the writer can keep a slot in one ``array`` and publish it with one slice assignment.
The CRC shows a torn slot whatever order the machine makes its stores visible in.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from sftriage.errors import RingError, SftriageError
from sftriage.records import StageSchema

HEADER_BYTES = 4096
WORD_BYTES = 8
LIVE_AT = 3584
"""Byte offset of the live words: on cache lines of their own, away from what is only ever read."""

VERSION = 2
RING_MAGIC = b"SFTRING\n"
LOG_MAGIC = b"SFTSTEPS"
MAILBOX_MAGIC = b"SFTMAIL\n"
SCHEDULING_MAGIC = b"SFTSCHED"

MAGICS = {"ring": RING_MAGIC, "steps": LOG_MAGIC, "device": b"SFTDEVT\n", "device-steps": b"SFTDEVST"}
"""Of the kinds of file that hold slots, by the ending of their names. ``device``: see `sftriage.recorder.device`."""

MAX_SLOTS = 1 << 20
MAX_TEXT_BYTES = 255
MAX_COUNT = 1 << 62
"""No process counts this far: a greater number in a file is damage, not data."""

SEQ, STEP, START, BETWEEN, FLAGS, KIND, KIND_REST, WORK, READY = range(9)
DURATIONS = 9
"""Word of the slot at which the S durations begin."""

INCOMPLETE = 1
CAPTURING = 2

UNKNOWN = -1
"""``ready_ns`` of a step in which nobody saw the last gradient become ready."""

MAX_KIND_BYTES = 16
_KIND = struct.Struct("=2q")

_PROLOGUE = struct.Struct("=8sIIII")
_BYTE_ORDER_MARK = 0x01020304
_FOREIGN_MARK = 0x04030201
_KINDS = {
    RING_MAGIC: "ring",
    LOG_MAGIC: "step log",
    MAILBOX_MAGIC: "mailbox",
    SCHEDULING_MAGIC: "file of readings of a thread's scheduling",
    MAGICS["device"]: "ring of device times",
    MAGICS["device-steps"]: "log of device times",
}


@dataclass(frozen=True, slots=True)
class RingInfo:
    """Who writes a ring, and what its slots hold. Constant for the life of the file.

    ``started_mono_ns`` and ``started_wall_ns`` were read together: they place the host's monotonic clock in wall time.
    ``pid_start_ticks`` is when the kernel started ``pid`` (clock ticks since boot), so that a reused pid is not
    mistaken for the writer.

    Raises:
        RingError: numbers that cannot be, or a text that is too long.
    """

    rank: int
    world_size: int
    local_rank: int
    attempt: int
    job: str
    host: str
    cohort: str
    schema: StageSchema
    started_mono_ns: int
    started_wall_ns: int
    pid: int
    pid_start_ticks: int

    def __post_init__(self) -> None:
        """An info is also made from what a file says: check it wherever it is made."""
        numbers = (
            *(self.rank, self.world_size, self.local_rank, self.attempt),
            *(self.started_mono_ns, self.started_wall_ns, self.pid, self.pid_start_ticks),
        )
        # type(), not isinstance(): JSON's true would pass for 1.
        if any(type(number) is not int or not 0 <= number < MAX_COUNT for number in numbers):
            raise RingError("rank, world size, attempt, clocks and pid have to be whole numbers from 0 on")
        if self.rank >= self.world_size:
            raise RingError(f"rank {self.rank} of a world of {self.world_size}")
        for text in (self.job, self.host, self.cohort):
            if not isinstance(text, str) or bounded_text(text) != text:
                raise RingError(f"job, host and cohort are printable text of at most {MAX_TEXT_BYTES} bytes")

    @property
    def slot_words(self) -> int:
        """Words in one slot."""
        return slot_words(self.schema)

    @property
    def slot_bytes(self) -> int:
        """Bytes in one slot."""
        return self.slot_words * WORD_BYTES

    def file_name(self, kind: str) -> str:
        """The name of this rank's file of a kind: ``mailbox``, or one of `MAGICS`."""
        return f"rank-{self.rank}.{self.attempt}.{kind}"


def slot_words(schema: StageSchema) -> int:
    """Words in one slot: nine fixed ones, S durations, G outside times, and the CRC."""
    return DURATIONS + len(schema.stages) + len(schema.sync) + 1


def bounded_text(text: str) -> str:
    """A text as a header may hold it: printable, and cut to `MAX_TEXT_BYTES` bytes of UTF-8."""
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable.encode("utf-8", "replace")[:MAX_TEXT_BYTES].decode("utf-8", "ignore")


def encode_header(magic: bytes, info: RingInfo, slots: int) -> bytes:
    """A whole header with its live words at zero. A file that has no slots, or grows without bound, says 0 slots."""
    document = {name: getattr(info, name) for name in RingInfo.__dataclass_fields__ if name != "schema"} | {
        "stages": info.schema.stages,
        "sync": [info.schema.stages.index(name) for name in info.schema.sync],
        "slots": slots,
    }
    body = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    prologue = _PROLOGUE.pack(magic, _BYTE_ORDER_MARK, VERSION, len(body), crc32(body))
    head = prologue + body
    # 32 stage names of 31 bytes and three bounded texts fit with room to spare; a format that grows must not overlap.
    if len(head) > LIVE_AT:
        raise RingError(f"the header's document of {len(body)} bytes does not fit")
    return head.ljust(HEADER_BYTES, b"\0")


def decode_header(magic: bytes, header: bytes, name: str) -> tuple[RingInfo, int]:
    """Check the first `HEADER_BYTES` of a file, or as many as it has: who writes it, and its number of slots.

    Raises:
        RingError: foreign, truncated, of another version or byte order, or damaged.
    """
    kind = _KINDS[magic]
    if header[: len(magic)] != magic[: len(header)] or not header:
        raise RingError(f"{name}: not a {kind} of sftriage")
    if len(header) < HEADER_BYTES:
        raise RingError(f"{name}: truncated: {len(header)} of the header's {HEADER_BYTES} bytes")
    _, mark, version, length, checksum = _PROLOGUE.unpack_from(header)
    if mark == _FOREIGN_MARK:
        raise RingError(f"{name}: written in another byte order than this machine's ({sys.byteorder}-endian)")
    if mark != _BYTE_ORDER_MARK:
        raise RingError(f"{name}: bad header: byte-order mark {mark:#010x}")
    if version != VERSION:
        raise RingError(f"{name}: format version {version}; this sftriage reads version {VERSION}")
    if length > LIVE_AT - _PROLOGUE.size:
        raise RingError(f"{name}: bad header: a document of {length} bytes")
    body = header[_PROLOGUE.size : _PROLOGUE.size + length]
    if crc32(body) != checksum:
        raise RingError(f"{name}: bad header: its checksum does not match")
    try:
        return _decode_document(json.loads(body))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, SftriageError) as error:
        raise RingError(f"{name}: bad header: {error}") from error


def _decode_document(document: Mapping[str, Any]) -> tuple[RingInfo, int]:
    stages = tuple(document["stages"])
    schema = StageSchema(stages, tuple(stages[index] for index in document["sync"]))
    slots = document["slots"]
    if type(slots) is not int or not 0 <= slots <= MAX_SLOTS:
        raise RingError(f"{slots!r} slots")
    fields = {name: document[name] for name in RingInfo.__dataclass_fields__ if name != "schema"}
    return RingInfo(schema=schema, **fields), slots


def outside_words(schema: StageSchema) -> dict[int, int]:
    """Of each sync stage's word in a slot the word of its outside time, in the order of the step."""
    first = DURATIONS + len(schema.stages)
    return {DURATIONS + schema.stages.index(name): first + index for index, name in enumerate(schema.sync_in_order)}


def split_outside(words: array[int], outside: Mapping[int, int]) -> None:
    """Take from each sync stage's outside time, counted from the step's start, what those before it have claimed."""
    claimed = 0
    for at in outside.values():
        own = max(0, words[at] - claimed)
        words[at] = own
        claimed += own


def kind_words(kind: str) -> tuple[int, int]:
    """A kind as a slot holds it.

    Raises:
        RingError: it is not printable, or longer than `MAX_KIND_BYTES` bytes of UTF-8.
    """
    encoded = kind.encode("utf-8", "replace")
    if len(encoded) > MAX_KIND_BYTES or not (kind.isprintable()):
        raise RingError(f"kind {kind!r}: printable text of at most {MAX_KIND_BYTES} bytes")
    first, rest = _KIND.unpack(encoded.ljust(MAX_KIND_BYTES, b"\0"))
    return first, rest


def kind_of(first: int, rest: int) -> str:
    """The kind that two words of a slot hold; what is no text is shown as such, never an error."""
    return bounded_text(_KIND.pack(first, rest).rstrip(b"\0").decode("utf-8", "replace"))


class SlotCheck:
    """Tells the slots that were written whole. What they say is for readers that may use numpy (`windows.decoding`)."""

    def __init__(self, info: RingInfo) -> None:
        self._words = struct.Struct(f"={info.slot_words}q")
        self.slot_bytes = info.slot_bytes

    def sequence(self, slot: bytes) -> int | None:
        """The sequence number of one slot of ``slot_bytes`` bytes, or None if it is torn or damaged."""
        words: tuple[int, ...] = self._words.unpack(slot)
        if crc32(slot[:-WORD_BYTES]) != words[-1] or not 1 <= words[SEQ] < MAX_COUNT:
            return None
        # A right checksum does not make a right writer: no arithmetic further on has to expect a negative time.
        if min(words[BETWEEN], words[WORK], *words[DURATIONS:-1]) < 0 or words[READY] < UNKNOWN:
            return None
        return words[SEQ]
