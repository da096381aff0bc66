"""The stacks of a rank by its own word, where py-spy is not there or may not look (`sftriage.recorder.answering`)."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from sftriage.base.files import regular
from sftriage.errors import CaptureError
from sftriage.recorder import RingInfo
from sftriage.recorder.answering import ANSWER, ASKS, MAX_ANSWER_BYTES

ANSWER_S = 5.0
"""How long a rank may take to answer: its threads let go of the interpreter every few milliseconds, if they ever do."""

Asked = Generator[None, None, list[Any]]


def ask(rings: Path, info: RingInfo, word: str, end_s: float) -> Asked:
    """Ask a rank for its stacks, turn by turn, and wait for what it says until then (`time.monotonic`).

    Raises:
        CaptureError: it does not answer; the message is the reason.
    """
    asks, answer = (rings / info.file_name(kind) for kind in (ASKS, ANSWER))
    try:
        descriptor = os.open(asks, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise CaptureError(f"the trainer cannot be asked itself: {asks.name}: {error.strerror}") from error
    with os.fdopen(descriptor, "wb", buffering=0) as pipe:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            raise CaptureError(f"the trainer cannot be asked itself: {asks.name} is no pipe")
        pipe.write(word.encode("ascii", "replace") + b"\n")
    until_s = min(end_s, time.monotonic() + ANSWER_S)
    while time.monotonic() < until_s:
        found = _read(answer)
        if found.get("asked") == word:
            return _checked(found)
        yield
    raise CaptureError("the trainer does not answer: it is stopped, or native code keeps its interpreter")


def _read(path: Path) -> dict[str, Any]:
    try:
        with regular(path, CaptureError) as file:
            found = json.loads(file.read(MAX_ANSWER_BYTES + 1))
    except (CaptureError, OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _checked(found: dict[str, Any]) -> list[Any]:
    threads = found.get("threads")
    if not isinstance(threads, list) or not threads:
        raise CaptureError(f"the trainer has no stacks to show: {found.get('problem', 'no thread')}")
    return threads
