"""Executors: one capture on one rank, from its request to its files; `sftriage.agent.agent` polls them.

`TrainerCapture` is for captures inside the trainer (torch's profiler, sampled stacks): it posts the request in the
rank's mailbox (layout: `sftriage.trainer.executor`) and checks the files that the trainer leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import msgspec

from sftriage.base.files import private
from sftriage.base.process import locked_file
from sftriage.errors import CaptureError, InputError, RingError
from sftriage.model.captures import CaptureRequest, CaptureResult, CaptureState
from sftriage.model.windows import RankStatus, plain
from sftriage.traces.jsonstream import Damage, TraceReader
from sftriage.traces.objects import CHUNK_BYTES
from sftriage.traces.store import FileToStore
from sftriage.trainer import executor as mailbox
from sftriage.trainer import layout
from sftriage.trainer.executor import MAX_MESSAGE_BYTES, State
from sftriage.trainer.layout import LIVE_AT, MAILBOX_MAGIC, MAX_COUNT, RING_MAGIC, WORD_BYTES, OpenFile
from sftriage.trainer.sampler import NAME as SAMPLES_NAME

StatusReader = Callable[[], RankStatus | None]
"""Returns what the rank is doing now, from its ring; None if that cannot be read."""


Turns = Generator[None, None, None]
Course = Generator[None, None, CaptureResult]


class Executor(ABC):
    """One capture, as a generator: `poll` runs it to its next ``yield``.

    No method blocks for longer than a short program needs (`process.MOMENT_S`). While it ``needs_trainer``, it fails
    once the trainer has ended.
    """

    needs_trainer = True

    def __init__(self, request: CaptureRequest) -> None:
        self.request = request
        self._timings_s: dict[str, float] = {}
        self._clock: dict[str, int] = {}
        self._cancelled = False
        self._turns = self._course()

    @property
    def state(self) -> CaptureState:
        """``running`` once it has begun to record, ``armed`` before."""
        return "running" if self._clock else "armed"

    def start(self) -> None:  # noqa: B027 - most begin at their first `poll`
        """Begin; raises CaptureError if it cannot."""

    @abstractmethod
    def _course(self) -> Course:
        """Run the capture, from its first turn to its result."""

    def poll(self) -> CaptureResult | None:
        """Run one turn; return the result once there is one. An error fails the capture."""
        try:
            next(self._turns)
        except StopIteration as ended:
            result: CaptureResult = ended.value
            return result
        except (CaptureError, RingError) as error:
            return self.failed(str(error))
        except OSError as error:
            return self.failed(f"{error.filename or 'the spool'}: {error.strerror}")
        return None

    def cancel(self) -> None:
        """End it soon; it still has a result."""
        self._cancelled = True

    def _give_way(self) -> None:
        if self._cancelled:
            raise CaptureError("cancelled")

    def failed(self, reason: str) -> CaptureResult:
        """The result of this capture without a trace."""
        return CaptureResult(self.request.capture_id, self.request.rank, "failed", reason, timings_s=self._timings_s)

    def verify(self, result: CaptureResult) -> CaptureResult:
        """Check and repair its files, and return the result; raises CaptureError if they contradict the result."""
        return result

    def products(self) -> tuple[FileToStore, ...]:
        """Its files in the spool, the main file first."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Release everything, and remove its files from the spool."""

    def _stored(self, main: Path, first_step: int, last_step: int, notes: Iterable[str]) -> CaptureResult:
        return CaptureResult(
            self.request.capture_id,
            self.request.rank,
            "stored",
            "; ".join(note for note in notes if note),
            first_step,
            last_step,
            main.stat().st_size,
            self._timings_s,
            self._clock,
        )


_LIVE = struct.Struct("=13q")
_WORD = struct.Struct("=q")


@dataclass(frozen=True, slots=True)
class CaptureProgress:
    """A rank's progress with the latest request: its executor's state, and how many steps it has recorded.

    It is ``idle`` until the rank reads the request; ``answered`` says that every request has a result.
    """

    state: State
    steps: int
    answered: bool


class MailboxClient(OpenFile):
    """The agent's end of a rank's mailbox.

    Every method raises RingError if the file is foreign, truncated, damaged, or of another version or byte order.
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__(path, os.O_RDWR)
        self._polled = 0
        self._ring: OpenFile | None = None
        try:
            self.info = self.checked_header(MAILBOX_MAGIC).info
            if (found := self.length_bytes()) != mailbox.SIZE_BYTES:
                raise RingError(f"{path}: truncated or foreign: {found} bytes of {mailbox.SIZE_BYTES}")
        except BaseException:
            self.close()
            raise

    def post(self, request: CaptureRequest) -> int:
        """Post a request and return its number; raises CaptureError if it does not fit, or another is unanswered."""
        body = json.dumps(plain(request)).encode("ascii")
        if request.rank != self.info.rank:
            raise CaptureError(f"a request for rank {request.rank} in the mailbox of rank {self.info.rank}")
        if len(body) > MAX_MESSAGE_BYTES:
            raise CaptureError(f"a request of {len(body)} bytes; at most {MAX_MESSAGE_BYTES} fit")
        with self._locked() as live:
            if live[mailbox.RESULT_SEQ] != live[mailbox.REQUEST_SEQ]:
                raise CaptureError(f"rank {self.info.rank} has not answered its last request yet")
            seq = live[mailbox.REQUEST_SEQ] + 1
            self._write(mailbox.REQUEST_AT, body)
            self._store(mailbox.REQUEST_BYTES, len(body))
            self._store(mailbox.REQUEST_CRC, crc32(body))
            self._store(mailbox.REQUEST_SEQ, seq)
            self._knock(live[mailbox.DOORBELL] + 1)
        return seq

    def cancel(self, capture_id: str) -> bool:
        """Cancel a request; return whether it is the current one, which still gets a result."""
        return self._mark(mailbox.CANCEL_SEQ, capture_id)

    def allow(self, capture_id: str) -> bool:
        """Let a request that waits for the agent proceed; return whether it is the current one."""
        return self._mark(mailbox.ALLOW_SEQ, capture_id)

    def poll(self) -> CaptureResult | None:
        """The latest result, once: None until the next one. A new client gets the last result again."""
        live = self._live()
        seq = live[mailbox.RESULT_SEQ]
        if seq == self._polled:
            return None
        message = self._message(mailbox.RESULT_AT, live[mailbox.RESULT_BYTES], live[mailbox.RESULT_CRC])
        try:
            result = CaptureResult(**message)
        except TypeError as error:
            raise RingError(f"{self.path}: not a capture result: {error}") from error
        self._polled = seq
        return result

    def result_of(self, capture_id: str) -> CaptureResult | None:
        """The latest result (see `poll`), or None if it belongs to another request."""
        result = self.poll()
        return result if result is not None and result.capture_id == capture_id else None

    def latest(self) -> str | None:
        """The id of the latest request, answered or not; None if there was none."""
        live = self._live()
        if not live[mailbox.REQUEST_SEQ]:
            return None
        return str(self._request(live).get("capture_id"))

    def progress(self) -> CaptureProgress:
        live = self._live()
        state, steps = live[mailbox.STATE], live[mailbox.STEPS]
        if not (0 <= state < len(mailbox.STATES) and 0 <= steps < MAX_COUNT):
            raise RingError(f"{self.path}: state {state}, {steps} steps")
        return CaptureProgress(mailbox.STATES[state], steps, live[mailbox.RESULT_SEQ] == live[mailbox.REQUEST_SEQ])

    def _mark(self, word: int, capture_id: str) -> bool:
        """If this is the current request, write its number to a word, and ring the doorbell."""
        with self._locked() as live:
            if live[mailbox.RESULT_SEQ] == live[mailbox.REQUEST_SEQ]:
                return False
            if self._request(live).get("capture_id") != capture_id:
                return False
            self._store(word, live[mailbox.REQUEST_SEQ])
            self._knock(live[mailbox.DOORBELL] + 1)
        return True

    def close(self) -> None:
        super().close()
        if self._ring is not None:
            self._ring.close()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[tuple[int, ...]]:
        """The live words, under a lock: a person's request and the controller's must not mix."""
        if self._ring is None:
            self._ring = OpenFile(self.path.with_suffix(".ring"), os.O_RDWR)
            self._ring.checked_header(RING_MAGIC)
        with locked_file(self._descriptor):
            yield self._live()

    def _knock(self, count: int) -> None:
        """Set both doorbells to ``count``: the trainer reads the ring's."""
        assert self._ring is not None, "it is locked"
        self._store(mailbox.DOORBELL, count)
        self._ring.write_at(_WORD.pack(count), LIVE_AT + layout.DOORBELL * WORD_BYTES)

    def _live(self) -> tuple[int, ...]:
        found = self.read_at(_LIVE.size, LIVE_AT)
        if len(found) < _LIVE.size:
            raise RingError(f"{self.path}: truncated: its header has become shorter")
        live: tuple[int, ...] = _LIVE.unpack(found)
        if not all(0 <= live[word] < MAX_COUNT for word in (mailbox.DOORBELL, mailbox.REQUEST_SEQ, mailbox.RESULT_SEQ)):
            raise RingError(f"{self.path}: its counts of requests and results are invalid")
        return live

    def _request(self, live: tuple[int, ...]) -> Mapping[str, Any]:
        return self._message(mailbox.REQUEST_AT, live[mailbox.REQUEST_BYTES], live[mailbox.REQUEST_CRC])

    def _message(self, offset: int, length: int, checksum: int) -> Mapping[str, Any]:
        if not 0 < length <= MAX_MESSAGE_BYTES:
            raise RingError(f"{self.path}: a message of {length} bytes")
        body = self.read_at(length, offset)
        if crc32(body) != checksum:
            raise RingError(f"{self.path}: a message does not match its checksum")
        message: Mapping[str, Any] = json.loads(body)
        return message

    def _store(self, word: int, value: int) -> None:
        self._write(LIVE_AT + word * WORD_BYTES, _WORD.pack(value))

    def _write(self, offset: int, data: bytes) -> None:
        # Checked, because pwrite past the end of a truncated file would make it grow again, with holes.
        if self.length_bytes() != mailbox.SIZE_BYTES:
            raise RingError(f"{self.path}: truncated")
        self.write_at(data, offset)


def mailbox_of(request: CaptureRequest, mailbox: Path) -> MailboxClient:
    """A client of the mailbox of a request's rank; raises CaptureError if it cannot be used."""
    try:
        return MailboxClient(mailbox)
    except (RingError, OSError) as error:
        raise CaptureError(f"rank {request.rank} cannot be reached: {error}") from error


def verify_trace(trace: Path, request: CaptureRequest, result: CaptureResult) -> str:
    """Check a plain Kineto JSON file against the request and the trainer's result; return its damage in words.

    torch does not escape names: if the file is not valid JSON for that reason, a repaired one replaces it. Raises
    CaptureError if it is missing, too large, not JSON, lacks a promised step, or is of another rank.
    """
    steps = _steps_of(result)
    found = _TraceFile(trace)
    try:
        check_size(request, "trace", trace.stat().st_size)
        damage = found.read()
        found.replace()
    except OSError as error:
        raise CaptureError(f"the trace cannot be read or repaired: {error.strerror or error}") from error
    except InputError as error:
        raise CaptureError(f"the trace is not Kineto JSON: {error}") from error
    finally:
        found.close()
    if found.rank not in (None, request.rank):
        raise CaptureError(f"the trace is of rank {found.rank}; expected rank {request.rank}")
    missing = [step for step in steps if step not in found.steps]
    if missing:
        raise CaptureError(f"the trace lacks step{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}")
    return "; ".join(damage.words)


def verify_stacks(file: Path, request: CaptureRequest, result: CaptureResult) -> None:
    """Check sampled stacks as `verify_trace` checks a trace; raises CaptureError if they contradict the result."""
    promised = _steps_of(result)
    try:
        check_size(request, "stacks", file.stat().st_size)
        steps = set(json.loads(file.read_bytes())["sftriage"]["step"])
    except OSError as error:
        raise CaptureError(f"the stacks cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CaptureError(f"not a file of sampled stacks: {error}") from error
    if not steps:
        raise CaptureError("no stack was sampled")
    if not all(type(sample) is int and sample in promised for sample in steps):
        raise CaptureError(f"the stacks are not of steps {result.first_step} to {result.last_step}")


def _steps_of(result: CaptureResult) -> range:
    if result.first_step is None or result.last_step is None:
        raise CaptureError("the trainer did not name the steps that it captured")
    return range(result.first_step, result.last_step + 1)


def check_options(options: Collection[str], known: Set[str]) -> None:
    """Raise CaptureError for unknown options."""
    if unknown := sorted(set(options) - known):
        raise CaptureError(f"unknown options: {', '.join(unknown)}")


def check_size(request: CaptureRequest, name: str, size_bytes: int) -> None:
    """Raise CaptureError for a file that is larger than its request allows."""
    if size_bytes > request.max_bytes:
        has = "have" if name == "stacks" else "has"
        raise CaptureError(f"the {name} {has} {size_bytes} bytes; at most {request.max_bytes} were allowed")


_DISTRIBUTED = "distributedInfo"
_STEP = re.compile(r"ProfilerStep#(\d+)")


class _Mark(msgspec.Struct, gc=False):
    cat: Any = None
    name: Any = None


_MARKS = msgspec.json.Decoder(list[_Mark])


class _TraceFile:
    """Reads a trace piece by piece, collects its marked ``steps``, and writes a copy with its damage mended."""

    def __init__(self, trace: Path) -> None:
        self._trace, self._copy = trace, trace.with_suffix(".mended")
        self._target: BinaryIO | None = None
        self._values: dict[str, Any] = {_DISTRIBUTED: None}
        self.steps: set[int] = set()

    @property
    def rank(self) -> Any:
        """The rank that it names, if any."""
        about = self._values[_DISTRIBUTED]
        return about.get("rank") if isinstance(about, dict) else None

    def read(self) -> Damage:
        """Read it all; raises InputError if it is no trace, or is cut short."""
        with self._trace.open("rb") as source, self._trace.open("rb") as self._source:
            # torch begins a trace with a space.
            if not source.peek(64).lstrip().startswith(b"{"):
                raise InputError(f"{self._trace}: no JSON object")
            reader = TraceReader(source, self._trace.name, self._take, lambda _: False, self._values, self._edit)
            reader.read()
            if self._target is not None:
                self._copy_until(None)
        return reader.damage

    def replace(self) -> None:
        if self._target is not None:
            self._target.close()
            self._copy.replace(self._trace)

    def close(self) -> None:
        if self._target is not None:
            self._target.close()
            self._copy.unlink(missing_ok=True)

    def _take(self, piece: bytes) -> None:
        # (the decoder does not check strings that it skips)
        piece.decode()
        for event in _MARKS.decode(piece):
            if event.cat == "user_annotation" and isinstance(event.name, str):
                step = _STEP.fullmatch(event.name)
                if step is not None:
                    self.steps.add(int(step[1]))

    def _edit(self, start: int, end: int, instead: bytes) -> None:
        if self._target is None:
            self._target = private(self._copy)
        self._copy_until(start)
        self._target.write(instead)
        self._source.seek(end)

    def _copy_until(self, end: int | None) -> None:
        assert self._target is not None, "there is a copy"
        while piece := self._source.read(CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - self._source.tell())):
            self._target.write(piece)


class TrainerCapture(Executor):
    """A capture in the trainer: a trace, sampled stacks, or both; raises CaptureError without a usable mailbox."""

    def __init__(self, request: CaptureRequest, mailbox: Path, spool: Path) -> None:
        super().__init__(request)
        self._trace, self._stacks = (spool / f"{request.capture_id}.{name}" for name in ("json", SAMPLES_NAME))
        self._mailbox = mailbox_of(request, mailbox)

    @property
    def state(self) -> CaptureState:
        try:
            return "running" if self._mailbox.progress().state in ("recording", "exporting") else "armed"
        except RingError:
            return "armed"

    @property
    def handed_over(self) -> bool:
        """Whether this is the rank's latest request, answered or not."""
        try:
            return self._mailbox.latest() == self.request.capture_id
        except RingError:
            return False

    def start(self) -> None:
        """Post the request; raises CaptureError if the rank has an unanswered one, or cannot be reached."""
        try:
            self._mailbox.post(self.request)
        except RingError as error:
            raise CaptureError(f"rank {self.request.rank} cannot be reached: {error}") from error

    def _course(self) -> Course:
        while (result := self._mailbox.result_of(self.request.capture_id)) is None:
            yield
        return result

    def cancel(self) -> None:
        """Cancel the request in the trainer, which still answers it. Ignores a rank that can no longer be reached."""
        with contextlib.suppress(RingError):
            self._mailbox.cancel(self.request.capture_id)

    def verify(self, result: CaptureResult) -> CaptureResult:
        """See `verify_trace`. Without a trace, the stacks that were sampled meanwhile are kept alone."""
        if self.request.profiler == "stacks":
            verify_stacks(self._stacks, self.request, result)
            return result
        try:
            damage = verify_trace(self._trace, self.request, result)
        except CaptureError as error:
            if not self._stacks.exists():
                raise
            verify_stacks(self._stacks, self.request, result)
            # (if the trainer has written none, its result says why)
            damage = f"no trace: {error}" if self._trace.exists() else ""
            self._trace.unlink(missing_ok=True)
        return replace(result, detail="; ".join(filter(None, (result.detail, damage))))

    def products(self) -> tuple[FileToStore, ...]:
        """The trace, which the trainer leaves unpacked to save its own time, and any sampled stacks."""
        trace = FileToStore(self._trace, "trace.json.gz", "application/gzip")
        sampled = FileToStore(self._stacks, SAMPLES_NAME, "application/json", compress=False)
        return tuple(artefact for artefact in (trace, sampled) if artefact.path.exists())

    def close(self) -> None:
        self._mailbox.close()
        with contextlib.suppress(OSError):
            for leftover in self._trace.parent.glob(f"{self.request.capture_id}.*"):
                leftover.unlink(missing_ok=True)
