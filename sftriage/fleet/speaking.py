"""One host that speaks for many: what all of them find out at the same time is said once."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import BinaryIO


class Speaker:
    """Whether this process speaks for those that share a file. Where it cannot be shared, each speaks for itself.

    The kernel gives the word back when a process dies, however it does.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def may_speak(self) -> bool:
        """Whether it has the word, or has it from now on."""
        if self._file is not None:
            return True
        try:
            file = self._path.open("ab")
        except OSError:
            return True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        except OSError:
            pass
        self._file = file
        return True

    def done(self) -> None:
        """Give the word back."""
        if self._file is not None:
            self._file.close()
            self._file = None
