"""The user's launcher as a child: it gets the terminal, it gets our signals, and its exit status becomes ours."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from types import FrameType

from sftriage.errors import UsageError

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Launcher:
    """Runs a command in a process group of its own, in the foreground where there is a terminal.

    Ctrl-C then reaches the launcher and its trainers just as it does without us, and a signal sent to us is passed on
    to all of them. If we die, they go on.

    Args:
        command: the program and its arguments.
        environment: added to the environment.
        output: descriptor for its standard output and error; by default they go where ours do.

    Raises:
        UsageError: it cannot be started.
    """

    def __init__(self, command: tuple[str, ...], environment: Mapping[str, str], output: int | None = None) -> None:
        self._terminal = _foreground_terminal()
        try:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdout=output,
                stderr=output,
                # Forked before any of our threads is started, so that Python may run here.
                preexec_fn=self._step_forward,
            )
        except OSError as error:
            self._take_back()
            raise UsageError(f"cannot start {command[0]}: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """The launcher's process."""
        return self._process.pid

    def wait(self) -> int:
        """Wait for the command to end, passing signals on; its exit status as a shell gives it (128 + a signal)."""
        try:
            with self._forwarding():
                status = self._ended()
        finally:
            self._take_back()
        return 128 - status if status < 0 else status

    def _step_forward(self) -> None:
        """In the child: a group of its own, and the terminal before it can ask for it, as a shell hands it over."""
        os.setpgrp()
        if self._terminal is not None:
            _give_terminal(self._terminal, os.getpgrp())

    def _ended(self) -> int:
        """Wait for the child. Where Ctrl-Z stops it, we stop too: the shell gets its terminal, and lets both go on."""
        while True:
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

    def _take_back(self) -> None:
        if self._terminal is not None:
            _give_terminal(self._terminal, os.getpgrp())

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        def forward(signum: int, _frame: FrameType | None) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signum)

        before = {signum: signal.signal(signum, forward) for signum in FORWARDED}
        try:
            yield
        finally:
            for signum, handler in before.items():
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
