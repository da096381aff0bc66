"""Defines a rank's files: the header, the byte layout of the ring of moments, and how to create, lock and sweep them.

The recorder in the trainer writes them; agents and readers import the layout.

Numbers are 64-bit words in native byte order unless it says otherwise. Every file starts with a header::

    0     8   magic: what kind of file this is
    8     4   byte-order mark 0x01020304
    12    4   format version
    16    4   length of the document in bytes
    20    4   CRC-32 of the document
    24    n   document: UTF-8 JSON of everything that never changes (the writer, its stages, the size of the log)
    3584  -   live words, by kind of file
    4096      the file's contents

The trainer writes a ring (``rank-<rank>.<attempt>.ring``), and any process with permission reads it::

    header    live words, below
    4096      additions: UTF-8 JSON lines for facts that were unknown at the start: {"stage": NAME, "sync": true or
              false} is the next stage, {"cohort": TEXT} the cohort
    8192      log: ``log_words`` words, in blocks of 512. The n-th word, from 0, is in word n % log_words

    live word 0  claimed     words before this one may have been written, or are being written now
              1  opened      words before this one have been written, or are zero
              2  misuse      wrong calls of the writer
              3  closed      1 once the writer has ended
              4  on_device   1 once the trainer uses a device that its host does not wait for (CUDA); 2 without device
                             times, or once they have ended
              5  additions   bytes of the additions; stored after them
              6  collected   nanoseconds of garbage collection in the trainer so far
              7  compiled    the same of torch.compile
              8  doorbell    written by a client that has put something into the rank's mailbox

The first word of each block is BLOCK, with the number of steps that had ended before it: an index of steps. Every other
word of the log is a moment: a code of 8 bits, and below it a value of 56. Of the codes up to 127, and BEGIN to NOTED,
the value is a time: nanoseconds since the document's ``started_mono_ns``, monotonic clock, never before the last time.
The other values are::

    2 s, 2 s + 1       stage s, counted from 1, is entered, is left; the last, ``other``, is always number 63
    128 + s            on the device: stage s runs from here on, in nanoseconds since the step began there
    192  BEGIN         a step begins
    193  END           it ends
    194  LEFT          it ends incomplete
    195  NOTED         closes values that were noted inside a step
    199  BLOCK         begins a block
    200  NUMBER        the job's own number of the step that begins next
    201  KIND          the step's kind: UTF-8, 7 bytes each in 201, 202 and 203, the first ones lowest
    204  WORK          the step's work: tokens or samples, as the job counts them. The last value counts
    205  READY         (a time) the last gradient of a visit to the split sync stage was ready
    206  CAPTURING     a heavy profiler touches the step
    208  DEVICE_STEP   device times follow, of this step, counted as the index counts
    209  DEVICE_NUMBER   the job's own number of the step
    210  DEVICE_START    (a time) when the host began the step
    211  DEVICE_FLAGS    1 if a heavy profiler touched the step
    212  DEVICE_BETWEEN  nanoseconds from the end of the step before, on the device; 0 if unknown
    213  DEVICE_READY    the last gradient was ready on the device: nanoseconds since the step began there
    214  DEVICE_END      the device times are complete: nanoseconds since the step began there

A step is its BEGIN, at the first level the stages that are entered and left in it, and its END or LEFT. Between the end
of one step and the BEGIN of the next lie values of the next step, and device times of earlier steps; after the last
step, the remaining device times.

To read on from the n-th word: load ``claimed`` and ``opened``; copy the words from n on, up to ``opened``; load
``claimed`` again. Words before ``claimed - log_words`` may have been overwritten: begin again with the first block
after them, after the first step that ends in it. The first word that is zero is not written yet; all before it are
whole, in whatever order the machine makes stores visible. A step is complete once its END is there.

Rings belong on tmpfs (``/dev/shm``): on a disk file system the kernel write-protects a page while it writes it back, so
the next store to it, a plain assignment in the training loop, waits for the disk. Readers use ``pread`` and never map a
file: a truncated map ends in SIGBUS, a read in a short result.

A writer holds a POSIX record lock on its ring. Such a lock is visible from another PID namespace, forked children do
not inherit it, and it ends with the process. But it also ends when the process closes *any* descriptor of the file, so
a reader in the writer's own process takes the lock again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

from sftriage.base.files import create, open_regular
from sftriage.base.process import Process
from sftriage.errors import RingError, SftriageError
from sftriage.model.windows import StageSchema

if TYPE_CHECKING:
    from typing_extensions import Self

    from sftriage.trainer.moments import Log

HEADER_BYTES = 4096
WORD_BYTES = 8
LIVE_AT = 3584
"""Byte offset of the live words: on cache lines of their own, away from words that are only read."""

ADDITIONS_AT = HEADER_BYTES
ADDITIONS_BYTES = 4096
LOG_AT = ADDITIONS_AT + ADDITIONS_BYTES
"""Byte offsets in a ring of moments."""

CLAIMED, OPENED, MISUSE, CLOSED, ON_DEVICE, ADDITIONS, COLLECTED, COMPILED = range(8)
DOORBELL = 8
"""Live words of a ring of moments."""
TIMED, UNTIMED = 1, 2
"""Values of ON_DEVICE: the rank has device times, or none."""

CODE_AT = 56
BLOCK_WORDS = 512
"""Words that the writer claims at a time: a page. A steady step touches no other page of the log."""

OTHER_STAGE = 63
ON_STREAM = 128
BEGIN, END, LEFT, NOTED = range(192, 196)
BLOCK = 199
NUMBER, KIND, KIND_2, KIND_3, WORK, READY, CAPTURING = range(200, 207)
DEVICE_STEP, DEVICE_NUMBER, DEVICE_START, DEVICE_FLAGS, DEVICE_BETWEEN, DEVICE_READY, DEVICE_END = range(208, 215)

KIND_BYTES_A_WORD = 7
MAX_KIND_BYTES = 16
MAX_VALUE = (1 << CODE_AT) - 1

RING_MAGIC = b"SFTRING\n"
LOG_MAGIC = b"SFTSTEPS"
MAILBOX_MAGIC = b"SFTMAIL\n"
COUNTERS_MAGIC = b"SFTCOUNT"
DEVICE_LOG_MAGIC = b"SFTDEVST"

MAX_SLOTS = 1 << 20
MAX_TEXT_BYTES = 255
MAX_RANKS = 1 << 17
"""Maximum ranks of a job: a window holds some kilobytes of each rank."""
MAX_COUNT = 1 << 62
"""No process counts this far: a greater number in a file is damage, not data."""

WORDS_A_STEP = 16
"""Words of the log for each step of the ring: a step of five stages has 13."""

KEPT_RINGS = 8
"""Dead attempts whose rings are kept: a late agent may still read their last steps."""

_NAME = re.compile(r"rank-(\d+)\.(\d+)\.ring")

STALE_PARTIAL_S = 60.0
"""Age from which a partial file belongs to a process that was killed."""

_FLOCK = struct.Struct("hhqqi4x")
"""``struct flock`` of 64-bit Linux: type, whence, start, length, process."""

_locked: dict[tuple[int, int], int] = {}
"""Descriptors on which this process holds a lock, by device and inode."""
os.register_at_fork(after_in_child=_locked.clear)

_PROLOGUE = struct.Struct("=8sIIII")
_BYTE_ORDER_MARK = 0x01020304
_KINDS = {
    RING_MAGIC: "ring",
    LOG_MAGIC: "step log",
    MAILBOX_MAGIC: "mailbox",
    COUNTERS_MAGIC: "file of readings of a rank's counters",
    DEVICE_LOG_MAGIC: "log of device times",
}
_VERSION = 1
"""The one format version of all these files."""


@dataclass(frozen=True, slots=True)
class RingInfo:
    """The writer of a ring, and the stages of its steps.

    ``started_mono_ns`` and ``started_wall_ns`` were read together: they place the host's monotonic clock in wall time.
    ``pid_start_ticks`` is when the kernel started ``pid`` (clock ticks since boot), so that a reused pid is not
    mistaken for the writer. ``writer`` is the form of the recorder ("C", "Python"); ``locked``: it holds a lock on the
    ring for as long as it lives. Raises RingError for invalid numbers, or a text that is too long.
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
    writer: str = ""
    locked: bool = False

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            # type(), not isinstance(): JSON's true would pass for 1.
            if type(number := getattr(self, name)) is not int or not 0 <= number < MAX_COUNT:
                raise RingError(f"{name} {number!r}: must be a whole number from 0")
        if not self.rank < self.world_size <= MAX_RANKS:
            raise RingError(f"rank {self.rank} of a world of {self.world_size}; at most {MAX_RANKS} ranks")
        # An info may also come over the network.
        for text in (self.job, self.host, self.cohort, self.writer):
            if not isinstance(text, str) or bounded_text(text) != text:
                raise RingError(f"job, host, cohort and writer are printable text of at most {MAX_TEXT_BYTES} bytes")

    def file_name(self, kind: str) -> str:
        """The name of this rank's file of a kind: ``ring``, ``mailbox``, ``steps``, ..."""
        return f"rank-{self.rank}.{self.attempt}.{kind}"


@dataclass(frozen=True, slots=True)
class Header:
    """A file's decoded header: its writer, and the words in the log of a ring (0 in other files)."""

    info: RingInfo
    log_words: int = 0


def bounded_text(text: str) -> str:
    """A text fit for a header: printable, and cut to `MAX_TEXT_BYTES` bytes of UTF-8."""
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable.encode("utf-8", "replace")[:MAX_TEXT_BYTES].decode("utf-8", "ignore")


def encode_header(magic: bytes, info: RingInfo, *, log_words: int = 0) -> bytes:
    """A whole header, with live words of zero."""
    document = {name: getattr(info, name) for name in _FIELDS} | {
        "stages": info.schema.stages,
        "sync": [info.schema.stages.index(name) for name in info.schema.sync],
        "log_words": log_words,
    }
    body = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    head = _PROLOGUE.pack(magic, _BYTE_ORDER_MARK, _VERSION, len(body), crc32(body)) + body
    # 32 stage names of 31 bytes and three bounded texts fit easily; a format that grows must not overlap.
    if len(head) > LIVE_AT:
        raise RingError(f"the header's document of {len(body)} bytes does not fit")
    return head.ljust(HEADER_BYTES, b"\0")


@lru_cache(maxsize=64)
def kind_words(kind: str) -> tuple[tuple[int, int], ...]:
    """The codes and values of a step's kind; none if it is not printable, or too long."""
    encoded = kind.encode("utf-8", "replace")
    if not kind.isprintable() or len(encoded) > MAX_KIND_BYTES:
        return ()
    parts = (encoded[at : at + KIND_BYTES_A_WORD] for at in range(0, MAX_KIND_BYTES, KIND_BYTES_A_WORD))
    return tuple((code, int.from_bytes(part, "little")) for code, part in enumerate(parts, KIND))


def with_additions(info: RingInfo, additions: bytes) -> RingInfo:
    """The info with the later additions to its ring; raises RingError if the additions are invalid."""
    try:
        for line in additions.splitlines():
            added = json.loads(line)
            if "stage" in added:
                stages, sync = info.schema.stages, info.schema.sync
                grown = (*stages[:-1], added["stage"], stages[-1])
                info = replace(info, schema=StageSchema(grown, (*sync, added["stage"]) if added["sync"] else sync))
            elif "cohort" in added:
                info = replace(info, cohort=added["cohort"])
    except (ValueError, TypeError, KeyError, SftriageError) as error:
        raise RingError(f"bad additions: {error}") from error
    return info


def decode_header(magic: bytes, header: bytes, name: str) -> Header:
    """Check the first `HEADER_BYTES` of a file, or as many as it has.

    Raises RingError if it is foreign, truncated, of another version or byte order, or damaged.
    """
    kind = _KINDS[magic]
    if header[: len(magic)] != magic[: len(header)] or not header:
        raise RingError(f"{name}: not a {kind} of sftriage")
    if len(header) < HEADER_BYTES:
        raise RingError(f"{name}: truncated: {len(header)} of the header's {HEADER_BYTES} bytes")
    _, mark, version, length, checksum = _PROLOGUE.unpack_from(header)
    if mark != _BYTE_ORDER_MARK:
        raise RingError(f"{name}: damaged, or written in another byte order: byte-order mark {mark:#010x}")
    if version != _VERSION:
        raise RingError(f"{name}: format version {version}; this sftriage reads version {_VERSION}")
    if length > LIVE_AT - _PROLOGUE.size:
        raise RingError(f"{name}: bad header: a document of {length} bytes")
    body = header[_PROLOGUE.size : _PROLOGUE.size + length]
    if crc32(body) != checksum:
        raise RingError(f"{name}: bad header: its checksum does not match")
    try:
        document = json.loads(body)
        stages, log_words = tuple(document["stages"]), document["log_words"]
        schema = StageSchema(stages, tuple(stages[index] for index in document["sync"]))
        info = RingInfo(schema=schema, **{name: document[name] for name in _FIELDS})
        if magic == RING_MAGIC and (log_words <= 0 or log_words % BLOCK_WORDS):
            raise RingError(f"log_words {log_words!r}")
    except (ValueError, TypeError, KeyError, IndexError, SftriageError) as error:
        raise RingError(f"{name}: bad header: {error}") from error
    return Header(info, log_words)


_FIELDS = tuple(name for name in RingInfo.__dataclass_fields__ if name != "schema")
_NUMBERS = tuple(name for name in _FIELDS if name not in ("job", "host", "cohort", "writer", "locked"))


def create_whole(
    path: Path, size_bytes: int, header: Callable[[bool], bytes], *, clobber: bool = False, lock: bool = False
) -> int:
    """Create a file of a fixed size, which appears under its name fully formed; returns its descriptor, read and write.

    ``header`` makes the first bytes; its argument says whether the file is locked: with ``lock``, if the file system
    has locks. With ``clobber`` it replaces a file of that name. Raises FileExistsError if there is a file of that name
    already, and OSError if the directory is missing, full or not writable; or the mode or group cannot be set.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    descriptor = create(partial)
    try:
        # Allocate every block now: a store to a hole of a full file system would be a SIGBUS in training.
        os.posix_fallocate(descriptor, 0, size_bytes)
        os.pwrite(descriptor, header(lock and _lock(descriptor)), 0)
        # link() refuses a name that is taken, rename() does not.
        if clobber:
            partial.rename(path)
        else:
            os.link(partial, path)
    except BaseException:
        close(descriptor)
        raise
    finally:
        partial.unlink(missing_ok=True)
    return descriptor


def _lock(descriptor: int) -> bool:
    """Lock a file until it is closed; False if the file system has no locks."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    _locked[_inode(descriptor)] = descriptor
    return True


def close(descriptor: int) -> None:
    """Close a file. Only its own lock ends with it, and not one that another descriptor of this process holds."""
    inode = _inode(descriptor)
    holder = _locked.get(inode)
    os.close(descriptor)
    if holder == descriptor:
        del _locked[inode]
    elif holder is not None:
        with contextlib.suppress(OSError):
            fcntl.lockf(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _inode(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


class OpenFile:
    """A file that stays open until `close`, or the end of a ``with`` block.

    Raises RingError if it cannot be opened, or is not a regular file; every method does if the file system
    reports an error.
    """

    def __init__(self, path: Path | str, flags: int) -> None:
        self.path = Path(path)
        self._descriptor = open_regular(self.path, RingError, flags)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._descriptor >= 0:
            close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_at(self, size_bytes: int, offset: int) -> bytes:
        """Read ``size_bytes``; fewer only at the end of the file."""
        parts = []
        try:
            while size_bytes and (part := os.pread(self._descriptor, size_bytes, offset)):
                parts.append(part)
                size_bytes -= len(part)
                offset += len(part)
        except OSError as error:
            raise RingError(f"{self.path}: cannot be read: {error.strerror}") from error
        return b"".join(parts)

    def write_at(self, data: bytes, offset: int) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], offset + written)
        except OSError as error:
            raise RingError(f"{self.path}: cannot be written: {error.strerror}") from error

    def checked_header(self, magic: bytes) -> Header:
        """The decoded header; RingError if the file is of another kind."""
        return decode_header(magic, self.read_at(HEADER_BYTES, 0), str(self.path))

    def length_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def is_writer_alive(self, info: RingInfo) -> bool | None:
        """Whether the process that writes this ring is alive; None if unknown."""
        if not info.locked:
            return Process(info.pid, info.pid_start_ticks).alive
        if _inode(self._descriptor) in _locked:
            return True
        try:
            answer = fcntl.fcntl(self._descriptor, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except OSError:
            return None
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


class RingFile:
    """The file of one rank's ring; its `info` says whether it is locked.

    Raises FileExistsError if there is a ring for this rank and attempt already, and OSError if the directory is
    missing, full or not writable.
    """

    def __init__(self, directory: Path, info: RingInfo, slots: int) -> None:
        self.path = directory / info.file_name("ring")
        # One block is always being overwritten.
        self.log_words = (-(-slots * WORDS_A_STEP // BLOCK_WORDS) + 1) * BLOCK_WORDS
        size_bytes = LOG_AT + self.log_words * WORD_BYTES
        self._written_bytes = 0

        def header(locked: bool) -> bytes:
            self.info = replace(info, locked=locked)
            return encode_header(RING_MAGIC, self.info, log_words=self.log_words)

        self.descriptor = create_whole(self.path, size_bytes, header, lock=True)

    def add(self, log: Log, **addition: object) -> None:
        """Add a line to the additions.

        Raises RingError if there is no room left, and OSError if it could not be written.
        """
        line = json.dumps(addition, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"
        if self._written_bytes + len(line) > ADDITIONS_BYTES:
            raise RingError(f"{self.path}: no room for more stages")
        os.pwrite(self.descriptor, line, ADDITIONS_AT + self._written_bytes)
        self._written_bytes += len(line)
        log.set_live(ADDITIONS, self._written_bytes)

    def close(self) -> None:
        """Close the file, which ends its lock. A second call does nothing."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            close(descriptor)


def claim(directory: Path, info: RingInfo, slots: int) -> RingFile:
    """Create this rank's ring under the first free attempt from the host's newest on, and sweep older ones.

    Raises RingError if a running monitor holds this rank, and OSError if the directory is missing, full or not
    writable.
    """
    attempt = max(info.attempt, _newest(directory, info))
    while True:
        claimed = replace(info, attempt=attempt)
        try:
            ring = RingFile(directory, claimed, slots)
        except FileExistsError:
            if _writer(directory / claimed.file_name("ring"))[1]:
                raise RingError(f"another monitor already records rank {info.rank}") from None
            attempt += 1
        else:
            with contextlib.suppress(OSError):
                _sweep(directory, ring.info)
            return ring


def _newest(directory: Path, mine: RingInfo) -> int:
    """The newest attempt of other ranks' rings, or the next one if all of its writers have ended."""
    others = [(attempt, path) for rank, attempt, path in _numbered(directory) if rank != mine.rank]
    newest = max((attempt for attempt, _ in others), default=0)
    # (a ring that this process has closed belongs to the attempt that goes on)
    writers = [_writer(path) for attempt, path in others if attempt == newest]
    return newest + (bool(writers) and all(pid != mine.pid and lives is False for pid, lives in writers))


def _writer(path: Path) -> tuple[int | None, bool | None]:
    """The pid of a ring's writer, and whether it still writes; None, None if the file is not a ring."""
    try:
        with OpenFile(path, os.O_RDONLY) as ring:
            header, closed = ring.checked_header(RING_MAGIC), b""
            if not header.info.locked:
                # A lock ends when the ring is closed; without locks, the process may live on.
                closed = ring.read_at(WORD_BYTES, LIVE_AT + CLOSED * WORD_BYTES)
            return header.info.pid, bool(ring.is_writer_alive(header.info)) and not any(closed)
    except RingError:
        return None, None


def find_rings(directory: Path | str) -> tuple[Path, ...]:
    """The rings in a directory, by rank and then attempt."""
    return tuple(path for _, _, path in _numbered(directory))


def _numbered(directory: Path | str) -> list[tuple[int, int, Path]]:
    names = ((_NAME.fullmatch(path.name), path) for path in Path(directory).glob("rank-*.*.ring"))
    return sorted((int(name[1]), int(name[2]), path) for name, path in names if name)


def _sweep(directory: Path, mine: RingInfo) -> None:
    """Remove the files of dead attempts, except the last `KEPT_RINGS`, and stale partial files of this rank."""
    earlier = [(attempt, path) for _, attempt, path in _numbered(directory) if attempt < mine.attempt]
    dead = [(attempt, path) for attempt, path in earlier if _writer(path)[1] is False]
    kept = sorted({attempt for attempt, _ in dead})[-KEPT_RINGS:]
    for path in (path for attempt, path in dead if attempt not in kept):
        for kind in ("ring", "mailbox", "device", "asks", "stacks"):
            path.with_suffix(f".{kind}").unlink(missing_ok=True)
    for partial in directory.glob(f".rank-{mine.rank}.*.partial"):
        if time.time() - partial.stat().st_mtime > STALE_PARTIAL_S:
            partial.unlink(missing_ok=True)
