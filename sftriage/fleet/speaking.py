"""One host that speaks for many: what all of them find out at the same time is said once."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sftriage.base.process import locked


class Speaker:
    """Whether this process speaks for those that share a file. Where it cannot be shared, each speaks for itself.

    The kernel gives the word back when a process dies, however it does.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = contextlib.ExitStack()
        self._has_word = False

    def may_speak(self) -> bool:
        """Whether it has the word, or has it from now on."""
        if not self._has_word:
            try:
                self._held.enter_context(locked(self._path))
            except BlockingIOError:
                return False
            except OSError:
                pass
            self._has_word = True
        return True

    def done(self) -> None:
        """Give the word back."""
        self._held.close()
        self._has_word = False
