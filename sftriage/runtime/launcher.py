"""Runs the launcher as a child with our terminal and signals, and triage beside it, which cannot disturb the job."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

from sftriage.base.loops import start_thread
from sftriage.errors import InputError, SftriageError, UsageError, missing_extra

_OWN = {
    *("SIGKILL", "SIGSTOP"),  # cannot be caught
    "SIGCHLD",  # the end of our own children
    *("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"),  # our own faults: a handler that returns runs into them again
    *("SIGPIPE", "SIGXFSZ"),  # our own writes
    *("SIGTTIN", "SIGTTOU"),  # our own use of the terminal
}
FORWARDED = tuple(sorted(signal.valid_signals() - {getattr(signal, name) for name in _OWN if hasattr(signal, name)}))
"""The signals that are the job's, wherever they are sent: all but those about this process itself."""
_HARMLESS = {signal.SIGCONT, signal.SIGWINCH, signal.SIGURG, signal.SIGTSTP}
"""Of these, those that do not end a process by default."""


class Launcher:
    """Runs a command in a process group of its own, in the foreground if there is a terminal.

    Until `close`, signals are the job's: those that come before it starts are kept, the others passed on. What we
    ignore from the start, such as SIGHUP under ``nohup``, the job ignores too. A handler never raises. If we die, the
    job continues.

    Attributes:
        last_signal: the last of INT, TERM, HUP and QUIT that the job got; ``sigterm_s`` is when its first SIGTERM came,
            and ``signalled_s`` when the first of them all did, since the epoch.
        ended: set once the job has ended, and ``status`` as a shell gives it (128 + a signal).
        hurried: Ctrl-C has come since the job ended: wait no longer.
    """

    def __init__(self) -> None:
        self._terminal = _foreground_terminal()
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self.last_signal: int | None = None
        self.sigterm_s: float | None = None
        self.signalled_s: float | None = None
        self.ended = threading.Event()
        self.status: int | None = None
        self._ended_s = float("inf")
        self.hurried = False
        self._before = {signum: signal.signal(signum, self._forward) for signum in FORWARDED}
        self._ignored = {signum for signum, handler in self._before.items() if handler is signal.SIG_IGN}

    @property
    def ended_by(self) -> int | None:
        """The signal that ended this process before the job started; None if the job may start."""
        deadly = (signum for signum in self._early if signum not in _HARMLESS | self._ignored)
        return next(deadly, None) if self._process is None else None

    @property
    def pid(self) -> int:
        assert self._process is not None, "nothing has been started"
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """The exit status of the command, negative for a signal; None while it runs."""
        return None if self._process is None else self._process.returncode

    def start(self, command: tuple[str, ...], environment: Mapping[str, str], output: int | None = None) -> None:
        """Start the job, with ``environment`` added to ours. It gets the signals received so far.

        ``output`` is the descriptor for its standard output and error, by default ours.
        """
        try:
            env, child = {**os.environ, **environment}, self._step_forward
            self._process = subprocess.Popen(command, env=env, stdout=output, stderr=output, preexec_fn=child)
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            raise UsageError(f"cannot start {command[0]}: {getattr(error, 'strerror', error)}") from error
        for signum in self._early:
            self._pass_on(signum)

    def wait(self) -> int:
        """Wait for the command to end, passing signals on; its exit status as a shell gives it (128 + a signal)."""
        status = self._ended()
        self._ended_s, self.status = time.monotonic(), 128 - status if status < 0 else status
        self.ended.set()
        self._take_back()
        return self.status

    def left_s(self, patience_s: float) -> float:
        """What is left of a time that begins as the job ends; nothing after Ctrl-C."""
        return 0.0 if self.hurried else min(patience_s, max(0.0, self._ended_s + patience_s - time.monotonic()))

    def close(self) -> None:
        """Restore our handlers of signals."""
        self._take_back()
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _step_forward(self) -> None:
        """In the child: create its process group, and give it the terminal before it needs it, as a shell does."""
        for signum in self._ignored:
            signal.signal(signum, signal.SIG_IGN)
        os.setpgrp()
        if self._terminal is not None:
            _give_terminal(self._terminal, os.getpgrp())

    def _ended(self) -> int:
        """Wait for the child. If Ctrl-Z stops it, we stop too: the shell gets its terminal, and continues both."""
        assert self._process is not None, "nothing has been started"
        while True:
            # (between the two calls, a handler can still send a signal to the group)
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
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

    def _forward(self, signum: int, _frame: FrameType | None) -> None:
        if self._process is None:
            self._early.append(signum)
        else:
            self._pass_on(signum)

    def _pass_on(self, signum: int) -> None:
        assert self._process is not None, "nothing has been started"
        if self._process.returncode is not None:
            self.hurried = self.hurried or signum in (signal.SIGINT, signal.SIGQUIT)
            return
        if signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            self.last_signal = signum
            self.signalled_s = self.signalled_s or time.time()
        if signum == signal.SIGTERM and self.sigterm_s is None:
            self.sigterm_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signum)


class Notes:
    """The signals of a process beside a job: notes those that end it, and ignores those for the job.

    Attributes:
        last_signal: the last signal that ends it, if any.
    """

    def __init__(self, ends: Iterable[int] = (signal.SIGINT, signal.SIGTERM)) -> None:
        self.last_signal: int | None = None
        self._ends = frozenset(ends)
        # (SIGHUP ends it, as by default; signals that stop and continue it keep their effect)
        kept = {signal.SIGHUP, signal.SIGTSTP, signal.SIGCONT} - self._ends
        for signum in {*FORWARDED, *self._ends} - kept:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._note)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        if signum in self._ends:
            self.last_signal = signum


def _foreground_terminal() -> int | None:
    """The terminal we read from, if we are in its foreground."""
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


log = logging.getLogger("sftriage")

START_S = 15.0
"""How long the start of a job may wait for triage."""
END_S = 14.0
"""How long triage may work after the end of its job; with the end of the process, 15 s."""
LEAVE_S = 0.75
"""How long the end of this process may take then."""
_POLL_S = 0.05
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Triaged:
    """A job that triage is ready for: its command, and what is added to its environment.

    ``watch`` watches the started job to its end; ``abandon`` undoes the preparation if it was not started.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    watch: Callable[[Launcher], None]
    abandon: Callable[[], None]


def supervise(
    launcher: Launcher,
    command: tuple[str, ...],
    prepare: Callable[[], Triaged],
    *,
    required: bool = False,
    output: int | None = None,
) -> int:
    """Run a job to its end, with the triage that ``prepare`` returns; return its exit status.

    ``command`` is the job without triage, ``output`` a descriptor for its standard output and error, by default ours.
    If triage is ``required``, no job starts without it. Raises UsageError if the job cannot be started, or an option is
    invalid, and SftriageError if triage is required, but cannot watch the job.
    """
    preparing: Future[Triaged] = Future()
    if required or not _in_thread(preparing, prepare):
        _fill(preparing, prepare)
    _wait(preparing, START_S, lambda: launcher.ended_by is not None)
    error = preparing.exception() if preparing.done() else None
    if isinstance(error, Exception) and (required or is_mistake(error)):
        raise error
    if launcher.ended_by is not None:
        _abandon(preparing)
        return 128 + launcher.ended_by
    if error is not None or not preparing.done():
        why = f"its preparation took more than {START_S:.0f} s" if error is None else _problem(error)
        log.error("the job runs unwatched: %s", why)
        launcher.start(command, {}, output)
        status = launcher.wait()
        if preparing.done() and preparing.exception() is None:
            _abandon(preparing)
        return status
    ready = preparing.result()
    try:
        launcher.start(ready.command, ready.environment, output)
    except BaseException:
        _abandon(preparing)
        raise

    watching: Future[None] = Future()

    def watch() -> None:
        try:
            ready.watch(launcher)
        except Exception as error:
            log.error("the job continues without triage: %s", _problem(error))
            raise

    if not _in_thread(watching, watch):
        log.error("the job runs unwatched: cannot start a thread")
    status = launcher.wait()
    _wait(watching, END_S, lambda: launcher.hurried)
    if launcher.hurried:
        _wait(watching, LEAVE_S)
    elif not watching.done():
        log.error("triage did not end within %.0f s of the job; exiting without it", END_S)
    return status


def leave_with(status: int) -> None:
    """Make this process, once it begins to end, exit with that status, even if triage hangs."""

    def leave() -> None:
        threading.main_thread().join()
        time.sleep(LEAVE_S)
        os._exit(status)

    # (if no thread can be started, none hangs)
    with contextlib.suppress(RuntimeError):
        start_thread("leaves", leave)


def is_mistake(error: Exception) -> bool:
    """Whether a person can fix it: a mistake, not a refusal of the system."""
    from sftriage.traces.disk import refusal

    return bool(missing_extra(error)) or (isinstance(error, UsageError | InputError) and refusal(error) is None)


def _abandon(preparing: Future[Triaged]) -> None:
    """Undo the preparation, finished or not, within the time that the end may take."""

    def undo() -> None:
        _wait(preparing, START_S)
        if preparing.done() and preparing.exception() is None:
            preparing.result().abandon()

    undoing: Future[None] = Future()
    # (if no thread can be started, the next run sweeps what stays in memory)
    if _in_thread(undoing, undo):
        _wait(undoing, END_S)


def _in_thread(future: Future[Result], act: Callable[[], Result]) -> bool:
    try:
        start_thread("beside", _fill, future, act)
    except RuntimeError:
        return False
    return True


def _fill(future: Future[Result], act: Callable[[], Result]) -> None:
    try:
        future.set_result(act())
    except BaseException as error:
        log.debug("triage failed", exc_info=True)
        future.set_exception(error)
        if not isinstance(error, Exception):
            raise


def _problem(error: BaseException) -> str:
    return str(error) if isinstance(error, SftriageError) else f"{type(error).__name__}: {error}"


def _wait(future: Future[Result], for_s: float, enough: Callable[[], bool] = lambda: False) -> None:
    deadline_s = time.monotonic() + for_s
    while not future.done() and not enough() and time.monotonic() < deadline_s:
        futures.wait([future], _POLL_S)
