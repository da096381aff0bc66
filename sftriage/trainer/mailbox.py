"""What others may request of a rank: a capture, by its mailbox; and the stacks of its threads, by a pipe.

The mailbox is a small memory-mapped file that carries one capture request to the rank, and its result back.
``rank-<rank>.<attempt>.mailbox`` is a header (see `layout`), 64 KiB for the request and 64 KiB for the result, both
UTF-8 JSON. The live words of its header, each side's on a cache line of its own::

     0  doorbell       one more at each request and cancellation; then the ring's doorbell, which is all that a trainer
                       reads in a step, is set to it
     1  request_seq    number of the latest request, from 1; then its length (2) and its CRC-32 (3)
     4  cancel_seq     number of the request that is cancelled
     5  allow_seq      number of the request that may begin, once a profiler outside the trainer is ready

     8  state          0 idle, 1 armed, 2 recording, 3 exporting
     9  steps          steps recorded so far
    10  result_seq     number of the answered request, stored after the result; then its length (11) and its CRC-32 (12)

A client posts the next request when the last one has its result, so that no result is lost between two reads, and a
client that was restarted finds the last one. The trainer maps the file; a client (`sftriage.agent.mailbox`) reads and
writes it as a file, and takes a lock (``flock``) while it posts.

The pipe is for where py-spy may not read the rank's process: the rank itself takes the stacks. A thread sleeps in one
system call, on the pipe ``rank-<rank>.<attempt>.asks`` beside the ring: no signal is taken and no clock is set. A
client writes a line into the pipe, a word of its choice; the answer is ``rank-<rank>.<attempt>.stacks``, JSON that
appears whole: ``asked`` is that word, ``threads`` has the frames of each, innermost first, as ``py-spy dump --json``
has them. It comes as long as some thread can get the interpreter, and not from a rank that is stopped or hangs in
native code that keeps it.
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
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from typing import get_args
from zlib import crc32

from sftriage.base.files import permit, write_atomically
from sftriage.base.loops import start_thread
from sftriage.errors import CaptureError
from sftriage.model.captures import CaptureRequest, CaptureResult
from sftriage.model.windows import plain
from sftriage.trainer import files
from sftriage.trainer.executor import State
from sftriage.trainer.layout import HEADER_BYTES, LIVE_AT, MAILBOX_MAGIC, RingInfo, encode_header

MAX_MESSAGE_BYTES = 64 * 1024
MAX_DETAIL_CHARS = 2000
SIZE_BYTES = HEADER_BYTES + 2 * MAX_MESSAGE_BYTES

DOORBELL, REQUEST_SEQ, REQUEST_BYTES, REQUEST_CRC, CANCEL_SEQ, ALLOW_SEQ = range(6)
STATE, STEPS, RESULT_SEQ, RESULT_BYTES, RESULT_CRC = range(8, 13)

STATES: tuple[State, ...] = get_args(State)
REQUEST_AT = HEADER_BYTES
RESULT_AT = HEADER_BYTES + MAX_MESSAGE_BYTES

ASKS, ANSWER = "asks", "stacks"
MAX_WORD_BYTES = 128
MAX_THREADS, MAX_DEPTH = 512, 256

_END = b"\0"


class Mailbox:
    """The trainer's end: reads requests, shows how far it is, writes results. Driven at step boundaries.

    It replaces a mailbox left over from an earlier process.

    Raises:
        OSError: the directory is missing or full, or may not be written.
    """

    def __init__(self, directory: Path, info: RingInfo) -> None:
        header = encode_header(MAILBOX_MAGIC, info)
        path = directory / info.file_name("mailbox")
        descriptor = files.create_whole(path, SIZE_BYTES, lambda _: header, clobber=True)
        try:
            self._map = mmap.mmap(descriptor, SIZE_BYTES)
        finally:
            os.close(descriptor)
        self._bytes = memoryview(self._map)
        self.live = self._bytes[LIVE_AT:HEADER_BYTES].cast("q")
        self._rank = info.rank
        self._taken = 0

    def take(self) -> CaptureRequest | None:
        """The request that has come since the last look, if any.

        Raises:
            CaptureError: there is one, and it is not fit to be carried out; the message says why.
        """
        seq = self.live[REQUEST_SEQ]
        if seq == self._taken:
            return None
        self._taken = seq
        length = self.live[REQUEST_BYTES]
        if not 0 < length <= MAX_MESSAGE_BYTES:
            raise CaptureError(f"the request is said to have {length} bytes")
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
        """Whether the request taken last was cancelled."""
        return bool(self.live[CANCEL_SEQ] == self._taken)

    @property
    def allowed(self) -> bool:
        """Whether the profiler outside the trainer is ready for the request taken last."""
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


class Answering:
    """The pipe of one rank, and the thread that sleeps on it.

    Raises:
        OSError: there can be no pipe.
    """

    def __init__(self, directory: Path, info: RingInfo) -> None:
        self._pid = info.pid
        self._asks, self._answer = (directory / info.file_name(kind) for kind in (ASKS, ANSWER))
        self._asks.unlink(missing_ok=True)
        os.mkfifo(self._asks, 0o600)
        # For both: it is never at its end, however many come and go.
        self._descriptor = os.open(self._asks, os.O_RDWR | os.O_CLOEXEC)
        permit(self._descriptor)
        start_thread("answers", self._run)

    def close(self) -> None:
        """End it, and remove its files."""
        for path in (self._asks, self._answer):
            path.unlink(missing_ok=True)
        # (the thread closes the pipe: a number that is closed here may be another file's when it is read there)
        room = select.poll()  # (select() takes no descriptor over 1,023, of which a trainer may have as many)
        room.register(self._descriptor, select.POLLOUT)
        if room.poll(0):
            os.write(self._descriptor, _END)

    def abandon(self) -> None:
        """Let go of the pipe in a forked child: thread and files are its parent's."""
        os.close(self._descriptor)

    def _run(self) -> None:
        # Signals are for the program's threads: one that came here would not interrupt what its main thread waits in.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with contextlib.suppress(Exception):
            while _END not in (word := os.read(self._descriptor, MAX_WORD_BYTES)):
                stacks = _threads(self._pid, leave_out=threading.get_ident())
                with contextlib.suppress(OSError, ValueError):
                    text = json.dumps({"asked": word.decode("ascii", "replace").strip(), "threads": stacks})
                    write_atomically(self._answer, text, mode=None, synced=False)
        os.close(self._descriptor)


def _threads(pid: int, leave_out: int) -> list[dict[str, object]]:
    known = {one.ident: one for one in threading.enumerate()}
    return [
        {
            "pid": pid,
            "thread_id": ident,
            "thread_name": getattr(known.get(ident), "name", None),
            "os_thread_id": getattr(known.get(ident), "native_id", None),
            "frames": [
                {"name": one.f_code.co_name, "filename": one.f_code.co_filename, "line": line}
                for one, line in islice(walk_stack(frame), MAX_DEPTH)
            ],
        }
        for ident, frame in list(sys._current_frames().items())[:MAX_THREADS]
        if ident != leave_out
    ]
