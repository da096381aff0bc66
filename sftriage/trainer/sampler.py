"""Samples Python stacks of the trainer, in a thread that runs only while a capture records.

``sys._current_frames`` needs no privileges and works where ptrace is forbidden. A sample costs some microseconds a
thread; a training thread that is busy in Python releases the interpreter every 5 ms, for at most 200 samples a second.

The DataLoader's workers sample themselves meanwhile, with the same limits. A forked worker gets one end of a socket,
and a thread that sleeps there until a capture begins. It hands its samples over on request, or when it ends. The
trainer waits for them only briefly, on the thread that exports. A worker that was not forked, or forked before there
was a `Monitor`, is not reached; the file says so if the kernel's name of the process shows that it is a worker.

The same thread of a worker describes its threads at once if the trainer's job hangs (`Workers.threads`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import monotonic, sleep
from types import CodeType
from typing import Any

from sftriage.base import files
from sftriage.base.loops import start_thread
from sftriage.errors import CaptureError
from sftriage.model.captures import SAMPLES_PER_SECOND
from sftriage.trainer.stacks import At, ProcessSamples, Stacks, written

NAME = "stacks.speedscope.json"
FOLDED_NAME = "stacks.folded"
"""Names of the files among a capture's artefacts."""

PERIOD_S = 0.005

_BEGIN, _END, _KEEP, _THREADS = b"B", b"E", b"K", b"T"
_REQUEST, _ANSWER = struct.Struct("<cId"), struct.Struct("<II")
"""A request: its command, the number of the capture, and the seconds between samples; or for the threads, a number with
the highest bit, and whether in detail. An answer: that number, and of the bytes of packed JSON that follow."""
_FIRST_OF_THREADS = 1 << 31

MAX_WORKER_BYTES = 4 << 20
"""Maximum size of one worker's samples, unpacked."""

ANSWER_S = 3.0
"""How long the workers have to hand over their samples once a capture has ended."""

KEPT_S = 60.0
"""How long a worker keeps its samples until they are requested."""

LEAVE_S = 1.0
"""Maximum delay of a worker that ends during a capture, to hand over its samples."""

THREADS_S = 1.0
"""How long the workers have to describe their threads."""

ENDS_S, LOOK_S = 0.5, 0.001
"""How long a worker that has closed its files may take to end, and how often that is checked."""

_LOOP = "torch.utils.data._utils.worker"
_NAME = "pt_data_worker"
"""The module of a worker's loop, and the kernel's name of its process."""


def period_of(options: Mapping[str, int]) -> float:
    """Seconds from one sample to the next by a capture's options, or a CaptureError if that is out of bounds."""
    wanted = options.get(SAMPLES_PER_SECOND, round(1 / PERIOD_S))
    if not 1 <= wanted <= 1000:
        raise CaptureError(f"{SAMPLES_PER_SECOND} {wanted}: must be 1 to 1000")
    return 1 / wanted


class StackSampler:
    """Samples all threads of this process from `start` to `stop`, which the training thread calls; see `Stacks`."""

    def __init__(self, at: Callable[[], At], period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._stacks = Stacks(period_s, threading.get_ident(), at)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._number = 0
        self._problem = ""

    def start(self) -> None:
        """Begin to sample. Does not raise: if no thread can start, there are no stacks."""
        try:
            self._thread = start_thread("samples", self._run)
        except RuntimeError as error:
            self._problem = str(error)
        self._number = WORKERS.begin(self._period_s)

    def stop(self) -> None:
        self._ended.set()
        WORKERS.end(self._number)

    def _run(self) -> None:
        try:
            self._stacks.run(self._ended.wait)
        except Exception as error:
            self._problem = repr(error)

    def keep(self, path: Path, max_bytes: int) -> str:
        """Write the samples after `stop`, on another thread; returns why there is no file, or "". Does not raise."""
        try:
            if self._thread is not None:
                self._thread.join()
            if self._problem:
                return f"no stacks: {self._problem}"
            workers = WORKERS.collect(self._number)
            own, at = self._stacks.samples(), self._stacks.at()
            pieces = [piece.encode() for piece in written(path.name, own, at, workers)]
            size_bytes = sum(map(len, pieces))
            if size_bytes > max_bytes:
                return f"no stacks: they would take {size_bytes} bytes, and {max(0, max_bytes)} were left"
            with os.fdopen(files.create(path), "wb") as file:
                file.writelines(pieces)
        except Exception as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return f"no stacks: {error}"
        return ""


class _Channel:
    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._read = b""

    def send(self, command: bytes, number: int, period_s: float = 0.0) -> None:
        """Send a request without waiting; a worker that is gone or busy gets none."""
        with contextlib.suppress(OSError):
            # (SIGPIPE would kill a process that has not set it to be ignored)
            self.end.send(_REQUEST.pack(command, number, period_s), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def answer(self, number: int) -> bytes | None:
        """The worker's whole answer for this capture, None until it has arrived; OSError if the worker is gone."""
        while True:
            while len(self._read) >= _ANSWER.size:
                answered, size_bytes = _ANSWER.unpack_from(self._read)
                if len(self._read) < _ANSWER.size + size_bytes:
                    break
                found = self._read[_ANSWER.size : _ANSWER.size + size_bytes]
                self._read = self._read[_ANSWER.size + size_bytes :]
                if answered == number:  # (else a late answer for an earlier capture)
                    return found
            try:
                more = self.end.recv(1 << 18, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            if not more:
                raise OSError("gone")
            self._read += more

    def over(self) -> bool:
        try:
            return not self.end.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


class Workers:
    """The trainer's side of its DataLoader workers. None of its public methods raises."""

    def __init__(self) -> None:
        self._hooked = False
        self._users = 0
        self._number = self._looks = 0
        self._reading = threading.Lock()
        self._sampling: tuple[int, float] | None = None
        self._channels: list[_Channel] = []
        # Forks under way, by thread: the trainer's end, and the worker's.
        self._forking: dict[int, tuple[socket.socket, socket.socket]] = {}
        # The worker's own end, in a worker.
        self._own: socket.socket | None = None

    def attend(self) -> None:
        """Reach the workers that are forked from now on, until `leave` has been called as often."""
        self._users += 1
        if not self._hooked:
            self._hooked = True
            os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)

    def leave(self) -> None:
        """See `attend`; the last call ends the workers' threads."""
        self._users = max(0, self._users - 1)
        if not self._users:
            self._drop(list(self._channels))

    def begin(self, period_s: float) -> int:
        """Make all workers sample themselves, also those forked meanwhile; returns the number of this capture."""
        self._number += 1
        self._sampling = self._number, period_s
        for channel in list(self._channels):
            channel.send(_BEGIN, *self._sampling)
        return self._number

    def end(self, number: int) -> None:
        if self._sampling is not None and self._sampling[0] == number:
            self._sampling = None
            for channel in list(self._channels):
                channel.send(_END, number)

    def collect(self, number: int) -> list[ProcessSamples]:
        """The workers' samples of a capture that has ended, or the ``problem`` of those that have none.

        Takes up to `ANSWER_S`, and `ENDS_S` if a worker is gone, on another thread than the training one.
        """
        found: list[ProcessSamples] = []
        with self._reading:
            gone = self._answers(_KEEP, number, 0.0, monotonic() + ANSWER_S, found)
        found.sort(key=lambda samples: (samples.get("worker", 0), samples["pid"]))
        return found + _not_reached({samples["pid"] for samples in found}, monotonic() + (ENDS_S if gone else 0.0))

    def threads(self, detail: bool) -> dict[int, list[Any]]:
        """The threads of the workers that answer within `THREADS_S`, by pid, as JSON of `ThreadEvidence`."""
        found: list[ProcessSamples] = []
        until_s = monotonic() + THREADS_S
        # (an export may be reading the same sockets)
        if self._reading.acquire(timeout=THREADS_S):
            try:
                self._looks += 1
                self._answers(_THREADS, _FIRST_OF_THREADS | self._looks, float(detail), until_s, found)
            finally:
                self._reading.release()
        return {answer["pid"]: answer["threads"] for answer in found if "threads" in answer}

    def _answers(self, command: bytes, number: int, value: float, until_s: float, found: list[ProcessSamples]) -> bool:
        """Send a request to all workers, and add their answers until then; whether one of them is gone."""
        gone = False
        waiting = selectors.PollSelector()
        for channel in list(self._channels):
            channel.send(command, number, value)
            with contextlib.suppress(ValueError):  # (closed meanwhile)
                waiting.register(channel.end, selectors.EVENT_READ, channel)
        with contextlib.suppress(OSError):
            while waiting.get_map() and (ready := waiting.select(max(0.0, until_s - monotonic()))):
                for key, _ in ready:
                    channel, samples = key.data, None
                    try:
                        answer = channel.answer(number)
                        if answer is None:
                            continue
                        samples = json.loads(zlib.decompress(answer))
                    except Exception:
                        over = samples is None and channel.over()
                        self._drop([channel] if over else [])
                        gone |= over
                    waiting.unregister(channel.end)
                    found += [] if samples is None else [samples]
        return gone

    def _drop(self, channels: list[_Channel]) -> None:
        for channel in channels:
            with contextlib.suppress(ValueError):
                self._channels.remove(channel)
            channel.end.close()

    def _before(self) -> None:
        if not self._users or not _of_loader():
            return
        if self._sampling is None:
            self._drop([channel for channel in self._channels if channel.over()])
        with contextlib.suppress(OSError):
            self._forking[threading.get_ident()] = socket.socketpair()

    def _in_parent(self) -> None:
        ends = self._forking.pop(threading.get_ident(), None)
        if ends is None:
            return
        ends[1].close()
        channel = _Channel(ends[0])
        self._channels.append(channel)
        if self._sampling is not None:
            channel.send(_BEGIN, *self._sampling)

    def _in_child(self) -> None:
        ends = self._forking.pop(threading.get_ident(), None)
        theirs = [channel.end for channel in self._channels]
        theirs += [end for pair in self._forking.values() for end in pair]
        # (a worker's own child is not a worker)
        theirs += [] if self._own is None else [self._own]
        theirs += [] if ends is None else [ends[0]]
        for end in theirs:
            with contextlib.suppress(OSError):
                end.close()
        self._users, self._sampling, self._own, self._reading = 0, None, None, threading.Lock()
        self._channels.clear()
        self._forking.clear()
        if ends is None:
            return
        self._own = ends[1]
        with contextlib.suppress(RuntimeError):
            start_thread("samples", _serve, self._own)


WORKERS = Workers()
"""The workers of this process."""


def _of_loader() -> bool:
    """Whether multiprocessing is about to fork a DataLoader's worker."""
    try:
        frame = sys._getframe(2)
    except ValueError:
        return False
    if frame.f_code.co_name != "_launch":
        return False
    target = getattr(frame.f_locals.get("process_obj"), "_target", None)
    return getattr(target, "__module__", None) == _LOOP


def _not_reached(answered: set[int], until_s: float) -> list[ProcessSamples]:
    """The trainer's worker processes that did not answer, and why, as far as known.

    A worker closes its files before its last thread ends: it may take until ``until_s`` to end.
    """
    missing: list[ProcessSamples] = []
    for pid, method, _ in children():
        if pid in answered or _name(pid) != _NAME:
            continue
        if method != "fork":
            why = f"it was not forked, but started by {method}"
        elif _ended(pid, until_s):
            why = "it has ended"
        else:
            why = "it did not answer in time, or began before the recorder"
        missing.append({"pid": pid, "problem": why})
    return sorted(missing, key=lambda worker: int(worker["pid"]))


def children() -> Iterator[tuple[int, str | None, int | None]]:
    """Multiprocessing's children of this process: pid, how each was started, and the exit status of a reaped one."""
    for process in list(getattr(sys.modules.get("multiprocessing.process"), "_children", ())):
        popen = getattr(process, "_popen", None)
        if (pid := getattr(popen, "pid", None)) is not None:
            yield pid, getattr(popen, "method", None), getattr(popen, "returncode", None)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _ended(pid: int, until_s: float) -> bool:
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if monotonic() >= until_s:
                return False
            sleep(LOOK_S)
    return True


def _serve(channel: socket.socket) -> None:
    """A worker's thread, asleep until a request comes. A failure here ends the thread alone."""
    with contextlib.suppress(Exception), channel:
        # (a worker that waits for signals has blocked them in its own threads only)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        request = _next(channel)
        while request is not None:
            command, number, period_s = request
            request = _sample(channel, number, period_s) if command == _BEGIN else _next(channel)


def _next(channel: socket.socket) -> tuple[bytes, int, float] | None:
    """The next request; those for the threads are answered meanwhile."""
    while len(message := channel.recv(_REQUEST.size, socket.MSG_WAITALL)) == _REQUEST.size:
        request: tuple[bytes, int, float] = _REQUEST.unpack(message)
        if request[0] != _THREADS:
            return request
        _send(channel, request[1], THREADS_S, _threads(request[2] > 0))
    return None


def _only_threads(channel: socket.socket) -> bool:
    """Answer one request for the threads, if that is the next one."""
    message = channel.recv(_REQUEST.size, socket.MSG_PEEK)
    if message[:1] != _THREADS:
        return False
    _, number, value = _REQUEST.unpack(channel.recv(_REQUEST.size, socket.MSG_WAITALL))
    _send(channel, number, THREADS_S, _threads(value > 0))
    return True


def _threads(detail: bool) -> bytes:
    from sftriage.trainer.waits import plain, threads_of_this_process

    try:
        threads = [plain(thread) for thread in threads_of_this_process(detail)]
        found = {"pid": os.getpid(), "threads": threads}
    except Exception as error:
        found = {"pid": os.getpid(), "problem": repr(error)}
    return zlib.compress(json.dumps(found).encode(), 1)


def _send(channel: socket.socket, number: int, patience_s: float, answer: bytes) -> None:
    channel.settimeout(patience_s)
    channel.sendall(_ANSWER.pack(number, len(answer)) + answer, socket.MSG_NOSIGNAL)
    channel.settimeout(None)


def _readable(channel: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(seconds * 1e3))


def _sample(channel: socket.socket, number: int, period_s: float) -> tuple[bytes, int, float] | None:
    """Sample this process until the next request, and hand over the samples; returns the request after that."""
    stacks = Stacks(period_s, threading.main_thread().ident or 0, outermost=_loop())
    done, leaving = threading.Event(), list[Any]()

    def ended(wait_s: float) -> bool:
        # An ending worker runs multiprocessing's finalizers, and stops everything else. (Those registered before the
        # worker is in its loop are its trainer's, and are forgotten.)
        if not leaving and _info() is not None:
            finalize = sys.modules["multiprocessing.util"].Finalize
            leaving.append(finalize(None, _leave, (channel, done), exitpriority=100))
        return _readable(channel, wait_s) and not _only_threads(channel)

    try:
        stacks.run(ended)
        request = _next(channel)
        if request is not None and request[0] == _END:
            if not _readable(channel, KEPT_S):
                return _next(channel)
            request = _next(channel)
        # Also if the worker is about to end: the request may come later.
        if request is None or request[0] == _KEEP:
            _send(channel, number, LEAVE_S if request is None else KEPT_S, _answer(stacks))
        return request
    finally:
        done.set()
        for finalizer in leaving:
            finalizer.cancel()


def _leave(channel: socket.socket, done: threading.Event) -> None:
    """Give the thread of an ending worker a moment: it gets no more requests."""
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_RD)
        done.wait(LEAVE_S)


def _info() -> object | None:
    info: object | None = getattr(sys.modules.get(_LOOP), "_worker_info", None)
    return info


def _loop() -> CodeType | None:
    return getattr(getattr(sys.modules.get(_LOOP), "_worker_loop", None), "__code__", None)


def _answer(stacks: Stacks) -> bytes:
    info, samples = _info(), stacks.samples()
    # The first thread is the worker itself.
    samples["threads"][0]["name"] = ""
    samples["worker"], samples["of"] = getattr(info, "id", -1), getattr(info, "num_workers", -1)
    text = json.dumps(samples, separators=(",", ":")).encode()
    if len(text) > MAX_WORKER_BYTES:
        text = json.dumps({"pid": samples["pid"], "problem": f"its samples have {len(text)} bytes"}).encode()
    return zlib.compress(text, 1)
