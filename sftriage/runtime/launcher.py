"""The user's launcher as a child: it gets the terminal, it gets our signals, and its exit status becomes ours."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from types import FrameType
from typing import overload

from sftriage.errors import UsageError

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _LateError(Exception):
    """The command was told to end, and has not in time."""


class Launcher:
    """Runs a command in a process group of its own, in the foreground where there is a terminal.

    Ctrl-C then reaches the launcher and its trainers just as it does without us, and a signal sent to us is passed on
    to all of them, from before it is started until it was waited for. If we die, they go on.

    Args:
        command: the program and its arguments.
        environment: added to the environment.
        output: descriptor for its standard output and error; by default they go where ours do.

    Attributes:
        told: it was told to end, by SIGTERM.

    Raises:
        UsageError: it cannot be started.
    """

    def __init__(self, command: tuple[str, ...], environment: Mapping[str, str], output: int | None = None) -> None:
        self._terminal = _foreground_terminal()
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._patience_s: float | None = None
        self.told = False
        self._before = {signum: signal.signal(signum, self._forward) for signum in FORWARDED}
        try:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdout=output,
                stderr=output,
                # Forked before any of our threads is started, so that Python may run here.
                preexec_fn=self._step_forward,
            )
        except BaseException as error:
            self._let_go()
            if isinstance(error, OSError):
                raise UsageError(f"cannot start {command[0]}: {error.strerror}") from error
            raise
        for signum in self._early:
            self._forward(signum, None)

    @property
    def pid(self) -> int:
        """The launcher's process."""
        assert self._process is not None, "a launcher that could not start its command is none"
        return self._process.pid

    @overload
    def wait(self) -> int: ...

    @overload
    def wait(self, patience_s: float) -> int | None: ...

    def wait(self, patience_s: float | None = None) -> int | None:
        """Wait for the command to end, passing signals on; its exit status as a shell gives it (128 + a signal).

        With patience, None where it has not ended so long after it was told to.
        """
        self._patience_s = patience_s
        if self.told:
            self._hurry()
        try:
            status = self._ended()
        except _LateError:
            return None
        except BaseException:
            self._let_go()
            raise
        self._let_go()
        return 128 - status if status < 0 else status

    def _step_forward(self) -> None:
        """In the child: a group of its own, and the terminal before it can ask for it, as a shell hands it over."""
        os.setpgrp()
        if self._terminal is not None:
            _give_terminal(self._terminal, os.getpgrp())

    def _ended(self) -> int:
        """Wait for the child. Where Ctrl-Z stops it, we stop too: the shell gets its terminal, and lets both go on."""
        assert self._process is not None, "a launcher that could not start its command is none"
        while True:
            # (who is interrupted in this has not taken the status from who waits again)
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
            patience_s, self._patience_s = self._patience_s, None
            _, status = os.waitpid(self._process.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                self._process.returncode = os.waitstatus_to_exitcode(status)
                return self._process.returncode
            if self._terminal is not None and os.WSTOPSIG(status) == signal.SIGTSTP:
                self._take_back()
                os.kill(os.getpid(), signal.SIGSTOP)
                if _foreground_terminal() is not None:
                    _give_terminal(self._terminal, self._process.pid)
                os.killpg(self._process.pid, signal.SIGCONT)
            self._patience_s = patience_s

    def _take_back(self) -> None:
        if self._terminal is not None:
            _give_terminal(self._terminal, os.getpgrp())

    def _forward(self, signum: int, _frame: FrameType | None) -> None:
        if self._process is None:
            self._early.append(signum)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signum)
        if signum == signal.SIGTERM and not self.told:
            self.told = True
            self._hurry()

    def _hurry(self) -> None:
        """From now on patience runs out, if there was a limit to it."""
        if self._patience_s is not None:
            before = signal.signal(signal.SIGALRM, self._late)
            self._before.setdefault(signal.SIGALRM, before)
            signal.setitimer(signal.ITIMER_REAL, self._patience_s)

    def _late(self, _signum: int, _frame: FrameType | None) -> None:
        if self._patience_s is not None:
            self._patience_s = None
            raise _LateError

    def _let_go(self) -> None:
        self._patience_s = None
        if signal.SIGALRM in self._before:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        self._take_back()
        for signum, handler in self._before.items():
            signal.signal(signum, handler)


def _foreground_terminal() -> int | None:
    """The terminal we read from, if there is one and it is ours to lend."""
    try:
        terminal = sys.stdin.fileno()
        return terminal if os.tcgetpgrp(terminal) == os.getpgrp() else None
    except (OSError, ValueError, AttributeError):
        return None


def _give_terminal(terminal: int, group: int) -> None:
    # A process in the background that does this is stopped by SIGTTOU, unless it ignores it.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        with contextlib.suppress(OSError):
            os.tcsetpgrp(terminal, group)
    finally:
        signal.signal(signal.SIGTTOU, before)
