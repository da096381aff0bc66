"""Stacks of a rank's own threads, by the rank itself: for where py-spy may not read its process.

A thread sleeps in one system call, on the pipe ``rank-<rank>.<attempt>.asks`` beside the ring: no signal is taken and
no clock is set. A client writes a line into the pipe, a word of its choice; the answer is
``rank-<rank>.<attempt>.stacks``, JSON that appears whole: ``asked`` is that word, and ``threads`` has the frames of
each, innermost first, as ``py-spy dump --json`` has them. It comes as long as some thread can get the interpreter, and
not from a rank that is stopped or hangs in native code that keeps it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
from itertools import islice
from pathlib import Path
from traceback import walk_stack

from sftriage.base.files import permit, write_atomically
from sftriage.base.loops import start_thread
from sftriage.recorder.layout import RingInfo

ASKS, ANSWER = "asks", "stacks"
MAX_WORD_BYTES = 128
MAX_THREADS, MAX_DEPTH = 512, 256

_END = b"\0"


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
        """This is a forked child: the thread is its parent's, and so are the files."""
        os.close(self._descriptor)

    def _run(self) -> None:
        # Signals are for the program's threads: one that came here would not interrupt what its main thread waits in.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with contextlib.suppress(Exception):
            while True:
                word = os.read(self._descriptor, MAX_WORD_BYTES)
                if _END in word:
                    break
                with contextlib.suppress(OSError, ValueError):
                    self._answer_to(word.decode("ascii", "replace").strip())
        os.close(self._descriptor)

    def _answer_to(self, word: str) -> None:
        text = json.dumps({"asked": word, "threads": threads(self._pid, leave_out=threading.get_ident())})
        write_atomically(self._answer, text, mode=None, synced=False)


def threads(pid: int, leave_out: int) -> list[dict[str, object]]:
    """The stacks of this process's threads but one (by its ident)."""
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
