"""A terminal that a program runs in, and what is to be seen on it."""

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyte

from tests.integration.processes import wait_until

TAKEN, GIVEN_BACK = b"\x1b[?1049h", b"\x1b[?1049l"
"""What takes the terminal's other screen, and gives back the one that was there."""


class Terminal:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str], columns: int, lines: int) -> None:
        self._master, slave = pty.openpty()
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        self.resize(columns, lines)
        kept = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**kept, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)

    @property
    def echoes(self) -> bool:
        """Whether keys are shown as they are typed."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._screen.resize(lines, columns)

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def lines(self, patience_s: float = 0.1) -> list[str]:
        while select.select([self._master], [], [], patience_s)[0]:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:
                # Nobody has it open any more.
                break
            self.raw += data
            self._stream.feed(data)
            patience_s = 0.0
        return [line.rstrip() for line in self._screen.display]

    def wait_for(self, *words: str) -> list[str]:
        """Wait until some words are to be seen; all that is."""

        def seen() -> list[str]:
            lines = self.lines()
            return lines if all(word in "\n".join(lines) for word in words) else []

        try:
            return wait_until(seen)
        except AssertionError:
            raise AssertionError(f"not to be seen: {words}; but:\n" + "\n".join(self.lines())) from None

    def wait_for_end(self) -> int:
        def ended() -> bool:
            self.lines()
            return self.process.poll() is not None

        wait_until(ended)
        self.lines()
        return self.process.returncode

    def close(self) -> None:
        os.close(self._master)


@contextlib.contextmanager
def terminals(environment: Mapping[str, str]) -> Iterator[Callable[..., Terminal]]:
    """Open terminals; each is gone, with its program, after the block."""
    opened: list[Terminal] = []

    def open_one(*command: object, columns: int = 80, lines: int = 24) -> Terminal:
        terminal = Terminal([str(word) for word in command], environment, columns, lines)
        opened.append(terminal)
        return terminal

    yield open_one
    for terminal in opened:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(terminal.process.pid, 9)
        terminal.process.wait()
        terminal.close()
