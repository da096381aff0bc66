"""A child process that is started again where it ends before its time, and ends when its parent does."""

from __future__ import annotations

import ctypes
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Callable

from sftriage.base.loops import start_thread

log = logging.getLogger("sftriage")

QUICK_S, MOST_QUICK, AGAIN_S = 10.0, 3, 0.2
"""A child that has not lived so long, so often in a row, is given up."""
LOOK_S = 5.0
"""How often it is asked whether a child is stuck."""
_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl
LET_GO = signal.SIGRTMAX - 2
"""Tells a controller that its parent has died: a signal that no launcher or scheduler sends."""
_TOLD = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, LET_GO}


class KeptChild:
    """A process that is there until it is closed, or this process ends.

    Args:
        what: its name, for people.
        start: starts it; its argument is true for a restart. May raise an OSError.
        is_due: whether to start it again, by its exit status; by default always.
        end_s: how long it may take to end.
        where: where it says why it has ended.
        is_stuck: whether to restart it though it lives; called now and then.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        what: str,
        start: Callable[[bool], subprocess.Popen[bytes]],
        is_due: Callable[[int], bool] = lambda _: True,
        end_s: float = 10.0,
        where: str = "its log",
        is_stuck: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_stuck = is_stuck
        self._what, self._start, self._is_due, self._end_s, self._where = what, start, is_due, end_s, where
        self._process = start(False)
        self._closing, self._over = threading.Event(), threading.Event()
        self._keeper: threading.Thread | None = None

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has ended, be it to be started again."""
        return self._process.poll() is not None

    def keep(self) -> None:
        """From now on, start it again where it ends by itself.

        Whoever ends a job under SLURM ends all of its processes at once, with the last of what they say on its way.
        """
        # (what it starts lives as long as this thread does)
        self._keeper = start_thread(f"keeps-{self._what}", self._keep)

    def terminate(self) -> None:
        """Tell it to end."""
        self._process.terminate()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended for good.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        if self._keeper is not None and not self._over.wait(timeout_s):
            raise subprocess.TimeoutExpired(self._what, timeout_s or 0.0)
        self._process.wait(timeout_s)

    def close(self) -> None:
        """End it."""
        self._closing.set()
        end(self._process, self._end_s)
        while self._keeper is not None and self._keeper.is_alive():
            # (it may have been started just now)
            end(self._process, self._end_s)
            self._keeper.join(AGAIN_S)

    def _keep(self) -> None:
        quick, began_s = 0, time.monotonic()
        looked_s = began_s
        while not self._closing.wait(AGAIN_S):
            status = self._process.poll()
            if status is None:
                if time.monotonic() > looked_s + LOOK_S:
                    looked_s = time.monotonic()
                    if self._is_stuck():
                        self._process.terminate()
                continue
            if not self._is_due(status):
                break
            quick = quick + 1 if time.monotonic() < began_s + QUICK_S else 0
            if quick >= MOST_QUICK:
                log.error("the %s has ended, again and again; %s says why", self._what, self._where)
                break
            began_s = time.monotonic()
            try:
                self._process = self._start(True)
            except OSError as error:
                log.error("the %s has ended, and cannot be started again: %s", self._what, error)
                break
        self._over.set()
        self._closing.wait()
        # (it is told to end by who closes this, and not by the end of this thread)
        self._process.wait()


def was_killed(status: int) -> bool:
    """Whether a process has ended by a signal that was not to tell it to end."""
    return status < 0 and -status not in _TOLD


def end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """End a child of ours, by force if need be."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def die_with_parent(signum: int = signal.SIGTERM) -> None:
    """In a child: be told to end when who started it does, however that ends."""
    _PRCTL(_PR_SET_PDEATHSIG, signum)
