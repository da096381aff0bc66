"""Writing a trace where the agent collects it: whole or not at all, and no larger than allowed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from sftriage.base import files
from sftriage.errors import CaptureError

SPOOL = "spool"
"""What leads to it in the directory of the rings, where the environment does not name it."""
_TAIL_BYTES = 8192
_LAST_KEY = b'"traceName"'


def write_trace(export: Callable[[str], object], spool: Path, capture_id: str, max_bytes: int) -> int:
    """Have ``export`` write a trace to ``<spool>/<capture_id>.json``; its size in bytes.

    It takes its name when it is on disk. A failure leaves nothing behind; Kineto's is silent when the disk is full.

    Raises:
        CaptureError: no whole trace, too large a trace, or the name is taken.
    """
    final = spool / f"{capture_id}.json"
    partial = spool / f"{capture_id}.json.partial"
    if final.exists():
        raise CaptureError(f"there is a trace named {capture_id} already")
    create(partial)
    try:
        export(str(partial))
        size_bytes = partial.stat().st_size
        if size_bytes > max_bytes:
            raise CaptureError(f"the trace has {size_bytes} bytes; {max_bytes} are allowed")
        if not ends_whole(partial):
            raise CaptureError("the trace was not written whole; the disk may be full")
        # Kineto makes a file of its own with the process's umask.
        partial.chmod(0o600)
        with partial.open("rb") as file:
            files.permit(file.fileno())
            os.fsync(file.fileno())
        partial.rename(final)
        files.sync_directory(spool)
    except OSError as error:
        raise CaptureError(f"the trace could not be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return size_bytes


def create(path: Path) -> None:
    """Make an empty file.

    Raises:
        CaptureError: it cannot be made, or is there already.
    """
    try:
        os.close(files.create(path))
    except OSError as error:
        raise CaptureError(f"the spool directory {path.parent} cannot be written: {error.strerror}") from error


def ends_whole(trace: Path) -> bool:
    """Whether a Kineto trace has the end it should: all that follows its last key is valid JSON.

    Or else a string ends there, and the document: torch does not escape the path that the trace is written to. A trace
    may have hundreds of megabytes, and reading it all as JSON would hold the GIL of a training process.
    """
    with trace.open("rb") as file:
        file.seek(max(0, trace.stat().st_size - _TAIL_BYTES))
        tail = file.read()
    at = tail.rfind(_LAST_KEY)
    try:
        return at >= 0 and bool(json.loads(b"{" + tail[at:]))
    except ValueError:
        return at >= 0 and re.search(rb'[^,:{\s]\s*"\s*\}\s*\Z', tail[at + len(_LAST_KEY) :]) is not None
