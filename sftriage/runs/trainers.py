"""Whether a run's trainers, and what started them, are still there: told by what lies in the directory of its rings."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sftriage.errors import RingError
from sftriage.recorder import RingReader, files, find_rings
from sftriage.recorder.files import start_ticks

_LAUNCHER = "launcher"
_MAX_NOTE_BYTES = 64


def note_launcher(rings: Path, pid: int) -> None:
    """Leave word which process started the trainers, for whoever has to know that without having started it."""
    with contextlib.suppress(OSError):
        (rings / _LAUNCHER).write_text(f"{pid} {start_ticks(pid)}", encoding="ascii")


def launcher_of(rings: Path) -> int | None:
    """The process that started the trainers, while it is there; a pid used again by another one is not it."""
    pid, _, ticks = (short_note(rings / _LAUNCHER) or "").partition(" ")
    number, started = whole_number(pid), whole_number(ticks)
    if number is None or started is None:
        return None
    return number if start_ticks(number) == started else None


def trainers_alive(rings: Path) -> bool:
    """Whether any trainer is there that writes into one of the rings."""
    for path in find_rings(rings):
        try:
            with RingReader(path) as reader:
                if reader.writer_alive:
                    return True
        except RingError:
            continue
    return False


def short_note(path: Path) -> str | None:
    """The few characters that a process has left; None where there is no such file."""
    try:
        descriptor = files.open_regular(path, os.O_RDONLY)
    except RingError:
        return None
    try:
        return os.read(descriptor, _MAX_NOTE_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return None
    finally:
        os.close(descriptor)


def whole_number(text: str | None) -> int | None:
    """The number that a note holds; None where it holds none."""
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 20 else None
