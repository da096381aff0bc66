"""The whole terminal for a while: drawn anew when it is told to, woken by keys and by a change of its size."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

Lines = Callable[[int, int], list[Text]]
"""What to draw, for a width and a height."""

_Handler = Callable[[int, FrameType | None], None] | signal.Handlers

_KEYS_AT_ONCE = 64


class Screen:
    """Takes the terminal's other screen as long as the block lasts, and gives back the one that was there."""

    def __init__(self, console: Console, lines: Lines) -> None:
        self._live = Live(
            get_renderable=lambda: Text("\n").join(lines(console.width, console.height)),
            console=console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._terminated = self._suspended = False
        self._open = contextlib.ExitStack()
        self._keys: int | None = None
        self._woken = -1

    def __enter__(self) -> Screen:
        """Take the terminal."""
        with contextlib.ExitStack() as taken:
            self._woken = taken.enter_context(_wakened())
            taken.enter_context(_handling({signal.SIGWINCH: _nothing, signal.SIGTERM: self._terminate}))
            taken.enter_context(_handling({signal.SIGTSTP: self._suspend}))
            taken.callback(self._leave)
            self._take()
            self._open = taken.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back."""
        self._open.close()

    @property
    def terminated(self) -> bool:
        """Somebody else has asked for the end (SIGTERM)."""
        return self._terminated

    def wait(self, timeout_s: float) -> bool:
        """Draw, and wait for a key, another size, or the time to pass; whether the end is asked for.

        Raises:
            KeyboardInterrupt: Ctrl-C.
        """
        self._live.refresh()
        listened = [self._woken] if self._keys is None else [self._woken, self._keys]
        ready, _, _ = select.select(listened, [], [], timeout_s)
        if self._woken in ready:
            os.read(self._woken, _KEYS_AT_ONCE)
        if self._suspended:
            self._step_aside()
        if self._keys is not None and self._keys in ready:
            keys = os.read(self._keys, _KEYS_AT_ONCE)
            if not keys:
                self._keys = None
            return self._terminated or b"q" in keys
        return self._terminated

    def _take(self) -> None:
        self._keys = _own_terminal()
        if self._keys is not None:
            self._before = termios.tcgetattr(self._keys)
            # Keys come one by one, and are not shown. Ctrl-C stays what it is.
            tty.setcbreak(self._keys, termios.TCSANOW)
        self._live.start(refresh=True)

    def _leave(self) -> None:
        self._live.stop()
        if self._keys is not None:
            termios.tcsetattr(self._keys, termios.TCSANOW, self._before)

    def _step_aside(self) -> None:
        """Ctrl-Z: the shell gets its screen back, until it lets us go on."""
        self._suspended = False
        self._leave()
        with _handling({signal.SIGTSTP: signal.SIG_DFL}):
            os.kill(os.getpid(), signal.SIGTSTP)
        self._take()

    def _terminate(self, _signum: int, _frame: FrameType | None) -> None:
        self._terminated = True

    def _suspend(self, _signum: int, _frame: FrameType | None) -> None:
        self._suspended = True


def _own_terminal() -> int | None:
    """The terminal that keys come from, if there is one and it is ours: changing another's would stop us."""
    try:
        descriptor = sys.stdin.fileno()
        return descriptor if os.tcgetpgrp(descriptor) == os.getpgrp() else None
    except (OSError, ValueError, AttributeError):
        return None


def _nothing(_signum: int, _frame: FrameType | None) -> None:
    """To be woken is enough."""


@contextlib.contextmanager
def _wakened() -> Iterator[int]:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


@contextlib.contextmanager
def _handling(handlers: dict[signal.Signals, _Handler]) -> Iterator[None]:
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
