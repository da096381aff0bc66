"""The trainer's half of a capture: a state machine driven at step boundaries, on the training thread.

::

    idle ──request──▶ armed ──warm-up steps──▶ recording ──steps──▶ exporting ──▶ idle
                        │                         │
                        └─ cancelled, out of time, an error, the job's own profiler ─▶ idle, result "failed"

Armed for a recurring step, it leaves the profiler alone until that step. Armed for many steps, it first records one
(`session.Probe`) to learn how many fit into the allowed bytes and the allowed time for stop and export.

It prepares, starts and stops torch's profiler between two steps, on the training thread, so it cannot cut a hung step
short; only the export runs in a background thread. Stacks alone need no profiler. Nsight Systems records from outside,
and this module marks its steps.

Requests and results pass through the rank's mailbox, a small memory-mapped file. ``rank-<rank>.<attempt>.mailbox`` is a
header (see `layout`), 64 KiB for the request and 64 KiB for the result, both UTF-8 JSON. The live words of its header,
each side's on a cache line of its own::

     0  doorbell       one more at each request and cancellation; the client then copies it to the ring's doorbell,
                       the only word that a trainer reads in a step
     1  request_seq    number of the latest request, from 1; then its length (2) and its CRC-32 (3)
     4  cancel_seq     number of the cancelled request
     5  allow_seq      number of the request that may begin: the profiler outside the trainer is ready

     8  state          0 idle, 1 armed, 2 recording, 3 exporting
     9  steps          steps recorded so far
    10  result_seq     number of the answered request, stored after the result; then its length (11) and its CRC-32 (12)

A client posts the next request when the last has its result, so that no result is lost between two reads, and a
restarted client finds the last one. The trainer maps the file; a client (`sftriage.agent.executor`) reads and writes it
as a file, and takes a lock (``flock``) while it posts.

A rank also answers with its threads' stacks if py-spy may not read its process. A thread sleeps in one system call, on
the pipe ``rank-<rank>.<attempt>.asks`` beside the ring, without signals or timers. A client writes a line into the
pipe, a token of its choice; the answer is ``rank-<rank>.<attempt>.stacks``, JSON that appears whole: ``asked`` is that
token, ``threads`` has the frames of each, innermost first, as in ``py-spy dump --json``. The answer needs the
interpreter: a rank that is stopped, or hangs in native code that keeps it, gives none. If the token is ``hang`` or
``hang-detail`` and another word, the answer has ``rank_evidence`` in place of ``threads``: the fields of `RankEvidence`
that a rank knows itself (`sftriage.trainer.evidence`); for a token of `FACTS`, its facts (`sftriage.trainer.facts`). An
agent in another container cannot open the kernel's files on the rank (`sftriage.agent.counting`). On one fixed token
the rank opens them, and sends the descriptors to the socket on which the agent listens: once, and it pays nothing from
then on.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from typing import Literal, get_args
from zlib import crc32

from sftriage.base.files import permit, write_atomically
from sftriage.base.loops import start_thread
from sftriage.base.process import files_of_cgroup, files_of_thread
from sftriage.errors import CaptureError
from sftriage.log import warn
from sftriage.model.captures import SAMPLE_STACKS, CaptureCode, CaptureRequest, CaptureResult, CaptureState
from sftriage.model.hangs import FACTS
from sftriage.model.windows import plain
from sftriage.trainer.layout import HEADER_BYTES, LIVE_AT, MAILBOX_MAGIC, RingInfo, create_whole, encode_header
from sftriage.trainer.sampler import WORKERS
from sftriage.trainer.session import (
    GUARD,
    OPTIONS,
    STACK_OPTIONS,
    NvtxSession,
    Probe,
    ProfilerGuard,
    SampledSession,
    Session,
    StepSizes,
    TorchSession,
    TraceCost,
)
from sftriage.trainer.stacks import no_fork

LAST_EXPORT_S = 10.0
"""How long an ending trainer waits for an export. The job is done, so nothing is held up."""

STACK_REQUESTS, STACK_ANSWER = "asks", "stacks"
COUNTERS_TOKEN, COUNTERS_SOCKET = b"send the counters' files", "counters.socket"
"""The token, and the kind of the file on which the agent listens (`RingInfo.file_name`)."""
HANG_TOKEN, HANG_DETAIL_TOKEN = "hang", "hang-detail"
"""The first words of tokens for the evidence of a hang: of the main thread and what keeps it, and of all threads."""
MAX_FILES = 16
MAX_TOKEN_BYTES = 128
MAX_THREADS, MAX_FRAMES = 512, 256
_END = b"\0"

State = Literal["idle", "armed", "recording", "exporting"]

MAX_MESSAGE_BYTES = 64 * 1024
MAX_DETAIL_CHARS = 2000
SIZE_BYTES = HEADER_BYTES + 2 * MAX_MESSAGE_BYTES

DOORBELL, REQUEST_SEQ, REQUEST_BYTES, REQUEST_CRC, CANCEL_SEQ, ALLOW_SEQ = range(6)
STATE, STEPS, RESULT_SEQ, RESULT_BYTES, RESULT_CRC = range(8, 13)

STATES: tuple[State, ...] = get_args(State)
REQUEST_AT = HEADER_BYTES
RESULT_AT = HEADER_BYTES + MAX_MESSAGE_BYTES


@dataclass(slots=True)
class _Capture:
    request: CaptureRequest
    deadline_s: float
    session: Session
    most_steps: int
    why_fewer: str = ""
    probe: Probe | None = None
    prepared: bool = False
    warmed: int = 0


class Mailbox:
    """The trainer's end of a mailbox: reads requests, shows progress, writes results. Driven at step boundaries.

    It replaces a mailbox of an earlier process. Raises OSError if the directory is missing or full, or may not be
    written.
    """

    def __init__(self, directory: Path, info: RingInfo) -> None:
        header = encode_header(MAILBOX_MAGIC, info)
        path = directory / info.file_name("mailbox")
        descriptor = create_whole(path, SIZE_BYTES, lambda _: header, clobber=True)
        try:
            self._map = mmap.mmap(descriptor, SIZE_BYTES)
        finally:
            os.close(descriptor)
        self._bytes = memoryview(self._map)
        self.live = self._bytes[LIVE_AT:HEADER_BYTES].cast("q")
        self._rank = info.rank
        self._taken = 0

    def take(self) -> CaptureRequest | None:
        """A new request, or None; raises CaptureError if the request cannot be carried out; the message says why."""
        seq = self.live[REQUEST_SEQ]
        if seq == self._taken:
            return None
        self._taken = seq
        length = self.live[REQUEST_BYTES]
        if not 0 < length <= MAX_MESSAGE_BYTES:
            raise CaptureError(f"the request claims to have {length} bytes")
        body = bytes(self._bytes[REQUEST_AT : REQUEST_AT + length])
        if crc32(body) != self.live[REQUEST_CRC]:
            raise CaptureError("the request does not match its checksum")
        try:
            request = CaptureRequest(**json.loads(body))
        except (ValueError, TypeError) as error:
            raise CaptureError(f"the request cannot be read: {error}") from error
        if request.rank != self._rank:
            raise CaptureError(f"the request is for rank {request.rank}, this is rank {self._rank}")
        return request

    @property
    def cancelled(self) -> bool:
        return bool(self.live[CANCEL_SEQ] == self._taken)

    @property
    def allowed(self) -> bool:
        """Whether the profiler outside the trainer is ready for the current request."""
        return bool(self.live[ALLOW_SEQ] == self._taken)

    def show(self, state: State, steps: int = 0) -> None:
        self.live[STEPS] = steps
        self.live[STATE] = STATES.index(state)

    def answer(self, result: CaptureResult) -> None:
        body = json.dumps(plain(result) | {"detail": result.detail[:MAX_DETAIL_CHARS]}).encode("ascii")
        self._bytes[RESULT_AT : RESULT_AT + len(body)] = body
        self.live[RESULT_BYTES] = len(body)
        self.live[RESULT_CRC] = crc32(body)
        self.live[RESULT_SEQ] = self._taken

    def close(self) -> None:
        """Unmap; the file stays. A second call does nothing."""
        self.live.release()
        self._bytes.release()
        self._map.close()


class CaptureExecutor:
    """Carries out requests for captures of one rank, driven at step boundaries. None of its public methods raises.

    It closes its ``requests``. A ``spool`` for traces that is not ``named`` may be missing; it then refuses traces.
    """

    def __init__(
        self, requests: Mailbox, subject: RingInfo, spool: Path, guard: ProfilerGuard = GUARD, *, named: bool = True
    ) -> None:
        self._requests, self._subject, self._guard = requests, subject, guard
        self._spool, self._named = spool, named
        self._state: State = "idle"
        self._capture: _Capture | None = None
        self._export: threading.Thread | None = None
        self._stalled = False
        self._sizes = StepSizes()
        guard.install()
        WORKERS.attend()

    @property
    def busy(self) -> bool:
        """Whether to call `before_step` at the next step without a new request."""
        return self._state != "idle" or self._stalled

    @property
    def _touching(self) -> bool:
        """Whether a profiler slows the rank; not while the capture waits for its step."""
        waiting = (capture := self._capture) is not None and not capture.prepared and capture.probe is None
        return self._stalled or (self.busy and not waiting)

    @property
    def annotating(self) -> bool:
        return self._state == "recording"

    def before_step(self, number: int) -> bool:
        """Continue or begin a capture; returns whether a profiler touched this step, or the time since the last one."""
        touched = self._touching
        self._stalled = False
        self._guard.install()
        try:
            if self._capture is not None:
                self._continue(self._capture, number)
            elif self._state == "idle" and (request := self._request()) is not None:
                self._begin(request, number)
        except Exception as error:
            self._fail(_reason(error))
        # A stop in here ends before the step starts: it is part of this step's between_ns, not of the next one's.
        touched = touched or self._touching
        self._stalled = False
        return touched

    def after_step(self) -> None:
        """Count the step that has ended, and stop after enough steps."""
        if (capture := self._capture) is None:
            return
        try:
            if self._state == "armed":
                if capture.probe is not None:
                    self._end_probe(capture, capture.probe)
                capture.warmed += capture.prepared
                return
            session = capture.session
            session.end_step()
            self._requests.show("recording", session.steps)
            if session.steps >= capture.most_steps:
                why = capture.why_fewer
                self._stop(capture, why and f"{capture.most_steps} of {capture.request.steps} steps: {why}")
            elif time.monotonic() >= capture.deadline_s:
                self._finish_early(capture, "time-box reached")
        except Exception as error:
            self._fail(_reason(error))

    def follow(self, stages: Sequence[str]) -> None:
        """Mark the open stages in the trace, outermost first."""
        try:
            if self._capture is not None:
                self._capture.session.follow(stages)
        except Exception as error:
            self._fail(_reason(error))

    def close(self, wait: bool) -> None:
        """Keep the steps, and answer: training or the recorder has ended. ``wait`` gives an export `LAST_EXPORT_S`."""
        try:
            if self._capture is not None:
                self._finish_early(self._capture, "training ended")
        except Exception as error:
            self._fail(_reason(error))
        if self._export is not None:
            self._export.join(LAST_EXPORT_S if wait else 0)
            if self._export.is_alive():
                return  # (it still writes into the mailbox, which goes with the process)
        WORKERS.leave()
        if (late := self._request()) is not None:
            self._refuse(late.capture_id, "training ended")
        self._requests.close()

    def abandon(self) -> None:
        """Become inert in a forked child: capture and mailbox are its parent's."""
        self._capture = None
        self._state = "idle"
        self._guard.release(self._yield_to_job)
        self._requests.close()

    def _request(self) -> CaptureRequest | None:
        try:
            return self._requests.take()
        except CaptureError as error:
            self._refuse("unreadable", str(error))
            return None

    def _refusal(self, request: CaptureRequest) -> str | None:
        stacks = request.profiler == "stacks"
        if not request.takes_steps:
            return "stacks are taken from outside"
        if request.profiler != "nsys":
            unknown = sorted(set(request.options) - (STACK_OPTIONS if stacks else OPTIONS))
            if unknown:
                return f"unknown options: {', '.join(unknown)}"
            # Importing torch would take seconds.
            if not stacks and "torch" not in sys.modules:
                return "torch is not imported in this process"
            # (check only the link beside the ring: the disk behind it may not answer)
            if not self._named and not os.path.lexists(self._spool):
                return "no spool directory is set (SFTRIAGE_SPOOL)"
        return "cancelled" if self._requests.cancelled else None if stacks else self._guard.busy()

    def _begin(self, request: CaptureRequest, number: int) -> None:
        if (reason := self._refusal(request)) is not None:
            self._refuse(request.capture_id, reason)
            return
        options = request.options
        session: Session
        try:
            if request.profiler == "nsys":
                session = NvtxSession()
            elif request.profiler == "stacks":
                session = SampledSession(options)
            else:
                sample = bool(options.get(SAMPLE_STACKS))
                session = TorchSession(self._subject, options, self._guard, sample=sample)
        except CaptureError as error:
            self._refuse(request.capture_id, str(error), "no_nvtx" if request.profiler == "nsys" else "")
            return
        deadline_s = time.monotonic() + request.max_seconds
        self._capture = capture = _Capture(request, deadline_s, session, request.steps)
        if not isinstance(session, SampledSession):
            self._guard.hold(self._yield_to_job)
        self._enter("armed")
        self._arm(capture, number)

    def _arm(self, capture: _Capture, number: int) -> None:
        """Prepare the profiler when its step is near, and start it once it is warm."""
        if isinstance(capture.session, TorchSession) and self._sizes.wants_probe(capture.request):
            # Record this one step, to learn its cost; the capture begins after it.
            make = partial(TorchSession, self._subject, capture.request.options, self._guard)
            capture.probe = Probe(make, self._spool, capture.request.capture_id)
            capture.probe.start(number)
            return
        request = capture.request
        if not capture.prepared and request.begins_at(number + request.warmup_steps) == number + request.warmup_steps:
            capture.prepared = True
            capture.session.prepare()
        warm = capture.prepared and capture.warmed >= request.warmup_steps
        if warm and (not isinstance(capture.session, NvtxSession) or self._requests.allowed):
            if isinstance(capture.session, TorchSession):
                capture.most_steps, capture.why_fewer = self._sizes.limit(request)
            capture.session.start(request.capture_id, number, request.labels)
            capture.session.begin_step(number)
            self._enter("recording")

    def _end_probe(self, capture: _Capture, probe: Probe) -> None:
        self._stalled = True
        self._sizes.note(capture.request.options, probe.finish())
        capture.session.timings_s["probe"] = probe.took_s
        capture.probe = None

    def _continue(self, capture: _Capture, number: int) -> None:
        if capture.probe is not None:  # (the end of its step was interrupted)
            self._end_probe(capture, capture.probe)
        if self._requests.cancelled:
            self._fail("cancelled")
        elif time.monotonic() >= capture.deadline_s:
            self._finish_early(capture, "time-box reached")
        elif self._state == "recording":
            capture.session.begin_step(number)
        else:
            self._arm(capture, number)

    def _finish_early(self, capture: _Capture, why: str) -> None:
        if capture.session.steps:
            self._stop(capture, f"{why} after {capture.session.steps} of {capture.request.steps} steps")
        else:
            self._fail(f"{why} before a step was recorded")

    def _stop(self, capture: _Capture, detail: str) -> None:
        self._stalled = True
        capture.session.stop()
        self._enter("exporting")
        self._capture = None
        # Our session is over: from here on the job may start its own profiler.
        self._guard.release(self._yield_to_job)
        if isinstance(capture.session, TorchSession | SampledSession):
            try:
                self._export = start_thread("export", self._export_all, capture, capture.session, detail)
            except RuntimeError as error:
                self._ended(capture, "failed", _reason(error))
        else:
            # The recording is outside the trainer.
            self._ended(capture, "stored", detail)

    def _export_all(self, capture: _Capture, session: TorchSession | SampledSession, detail: str) -> None:
        began_s = time.monotonic()
        state: CaptureState = "stored"
        size_bytes = 0
        try:
            size_bytes, missing = session.store(self._spool, capture.request)
            detail = "; ".join(filter(None, (detail, missing)))
            if isinstance(session, TorchSession) and size_bytes:
                self._sizes.note(capture.request.options, TraceCost(session.steps, size_bytes, session.stall_s))
        except Exception as error:
            state, detail = "failed", _reason(error)
        session.timings_s["export"] = time.monotonic() - began_s
        self._ended(capture, state, detail, size_bytes)

    def _yield_to_job(self) -> None:
        self._fail("the job started a profiler of its own")

    def _fail(self, reason: str) -> None:
        """Stop and discard, whatever state the profiler is in. Does not raise."""
        capture, self._capture = self._capture, None
        if capture is None:
            warn("a capture failed: %s", reason)
            return
        self._stalled = True
        try:
            if capture.probe is not None:
                capture.probe.stop()
            capture.session.stop()
        except Exception as error:
            warn("a failed capture's profiler could not be stopped: %r", error)
        self._guard.release(self._yield_to_job)
        self._ended(capture, "failed", reason)

    def _refuse(self, capture_id: str, reason: str, code: CaptureCode = "") -> None:
        self._answer(CaptureResult(capture_id, self._subject.rank, "refused", reason, code=code))

    def _ended(self, capture: _Capture, state: CaptureState, detail: str, size_bytes: int = 0) -> None:
        """Publish the result of a capture, which makes way for the next request."""
        request, session = capture.request, capture.session
        first, last = (session.first_step, session.last_step) if state == "stored" else (None, None)
        costs = dict(session.timings_s), dict(session.clock)
        self._answer(CaptureResult(request.capture_id, request.rank, state, detail, first, last, size_bytes, *costs))
        # (last: until then the training thread leaves the mailbox to the exporting thread)
        self._enter("idle")

    def _answer(self, result: CaptureResult) -> None:
        """Publish a result. Does not raise: the mailbox may be gone."""
        try:
            self._requests.answer(result)
        except Exception as error:
            warn("the result of capture %s could not be delivered: %r", result.capture_id, error)

    def _enter(self, state: State) -> None:
        self._requests.show(state, self._capture.session.steps if self._capture else 0)
        self._state = state


_NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")
"""Of Python and of C++, where the system starts no more threads."""


def _reason(error: Exception) -> str:
    text = str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"
    return f"{text}: raise the limit on processes (pids.max, ulimit -u)" if str(error) in _NO_THREAD else text


class Answering:
    """Answers requests for the stacks and the counters of this process: a pipe, and the thread that sleeps on it.

    Raises OSError if the pipe cannot be created.
    """

    def __init__(self, directory: Path, info: RingInfo) -> None:
        self._pid, self._socket = info.pid, info.file_name(COUNTERS_SOCKET)
        self._requests, self._answer = (directory / info.file_name(kind) for kind in (STACK_REQUESTS, STACK_ANSWER))
        self._requests.unlink(missing_ok=True)
        os.mkfifo(self._requests, 0o600)
        # For reading and writing, so that it never reaches its end when clients close it.
        self._descriptor = os.open(self._requests, os.O_RDWR | os.O_CLOEXEC)
        permit(self._descriptor)
        start_thread("answers", self._run)

    def close(self) -> None:
        for path in (self._requests, self._answer):
            path.unlink(missing_ok=True)
        # (the thread closes the pipe: a descriptor closed here may be another file's when the thread reads it)
        poll = select.poll()  # (select() takes no descriptor over 1,023, and a trainer may have more)
        poll.register(self._descriptor, select.POLLOUT)
        if poll.poll(0):
            os.write(self._descriptor, _END)

    def abandon(self) -> None:
        """Close the pipe in a forked child: thread and files are its parent's."""
        os.close(self._descriptor)

    def _run(self) -> None:
        # Leave signals to the program's threads: one handled here would not interrupt the main thread's wait.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with contextlib.suppress(Exception), no_fork:
            # (now: once the program hangs, its disk may hang too)
            from sftriage.trainer import evidence, facts  # noqa: F401
        with contextlib.suppress(Exception):
            while _END not in (tokens := os.read(self._descriptor, MAX_TOKEN_BYTES)):
                for token in tokens.splitlines():
                    with contextlib.suppress(OSError, ValueError):
                        self._answer_to(token)
        os.close(self._descriptor)

    def _answer_to(self, token: bytes) -> None:
        if token == COUNTERS_TOKEN:
            _send_descriptors(self._answer.parent, self._socket, self._pid)
            return
        name = token.decode("ascii", "replace").strip()
        if (word := name.partition(" ")[0]) in (HANG_TOKEN, HANG_DETAIL_TOKEN):
            from sftriage.trainer import evidence

            found: dict[str, object] = {"rank_evidence": evidence.answer(detail=word == HANG_DETAIL_TOKEN)}
        elif name.startswith(FACTS):
            from sftriage.trainer import facts

            found = {"rank_evidence": {"facts": facts.answer()}}
        else:
            found = {"threads": _threads(self._pid, leave_out=threading.get_ident())}
        text = json.dumps({"asked": name, **found}, separators=(",", ":"))
        write_atomically(self._answer, text, mode=None, synced=False)


def _threads(pid: int, leave_out: int) -> list[dict[str, object]]:
    known = {thread.ident: thread for thread in threading.enumerate()}
    return [
        {
            "pid": pid,
            "thread_id": ident,
            "thread_name": getattr(known.get(ident), "name", None),
            "os_thread_id": getattr(known.get(ident), "native_id", None),
            "frames": [
                {"name": caller.f_code.co_name, "filename": caller.f_code.co_filename, "line": line}
                for caller, line in islice(walk_stack(frame), MAX_FRAMES)
            ],
        }
        for ident, frame in list(sys._current_frames().items())[:MAX_THREADS]
        if ident != leave_out
    ]


def _send_descriptors(directory: Path, name: str, pid: int) -> None:
    import socket

    process, opened = Path("/proc/self"), dict[str, int]()
    place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for kind, path in (*files_of_thread(process, pid), *files_of_cgroup(process)):
            with contextlib.suppress(OSError):
                opened[kind] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with socket.socket(socket.AF_UNIX) as channel:
            # An agent that is stopped does not keep this thread, which also answers with stacks.
            channel.settimeout(1.0)
            # (the path of a socket has 107 bytes at most)
            channel.connect(f"/proc/self/fd/{place}/{name}")
            socket.send_fds(channel, [" ".join(opened).encode()], list(opened.values()))
    finally:
        for descriptor in (place, *opened.values()):
            os.close(descriptor)
