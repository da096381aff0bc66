"""Whoever reads what commands print: `head` and `less` go when they have seen enough.

That ends a command, as SIGPIPE ends `git log | head`: without a word, and with 141. The signal itself stays ignored,
as Python has it: it would end a job's triage too when somebody else's connection breaks.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

READER_GONE = 128 + signal.SIGPIPE
"""What a shell says of a command that SIGPIPE ended."""


class ReaderGone(Exception):  # noqa: N818  # not an error: nobody reads the results any more
    """What is left to print is not printed."""


@contextlib.contextmanager
def told_of() -> Iterator[None]:
    """Say that a reader has gone before typer does, which ends with 1 as if something had failed."""
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error
