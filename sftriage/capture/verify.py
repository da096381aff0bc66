"""Is a trace what was promised? A profiler's save can fail in silence: then it is a failed capture and no trace."""

from __future__ import annotations

import json
import mmap
import re
from pathlib import Path

from sftriage.errors import CaptureError
from sftriage.records import CaptureRequest, CaptureResult

WHOLE_PARSE_BYTES = 64 * 2**20
"""Up to this size a trace is parsed whole; a larger one would take many times its size in memory, and is searched."""

_STEP = re.compile(rb'"ProfilerStep#(\d+)"')


def verify_trace(trace: Path, request: CaptureRequest, result: CaptureResult) -> None:
    """Check a plain Kineto JSON file against the request and what the trainer says it did.

    Raises:
        CaptureError: missing, too large, not JSON, without the promised steps, or of another rank.
    """
    if result.first_step is None or result.last_step is None:
        raise CaptureError("the trainer names no steps that it captured")
    try:
        size_bytes = trace.stat().st_size
        if size_bytes > request.max_bytes:
            raise CaptureError(f"the trace has {size_bytes} bytes; at most {request.max_bytes} were allowed")
        found = _whole(trace, request.rank) if size_bytes <= WHOLE_PARSE_BYTES else _searched(trace)
    except OSError as error:
        raise CaptureError(f"the trace cannot be read: {error.strerror or error}") from error
    missing = [step for step in range(result.first_step, result.last_step + 1) if step not in found]
    if missing:
        raise CaptureError(f"the trace lacks step{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}")


def _whole(trace: Path, rank: int) -> set[int]:
    try:
        document = json.loads(trace.read_bytes())
        events = document["traceEvents"]
        names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
        its_rank = document.get("distributedInfo", {}).get("rank", rank)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CaptureError(f"the trace is not Kineto JSON: {error}") from error
    if its_rank != rank:
        raise CaptureError(f"the trace is of rank {its_rank}; rank {rank} was asked for")
    return {int(name.removeprefix("ProfilerStep#")) for name in names if re.fullmatch(r"ProfilerStep#\d+", name)}


def _searched(trace: Path) -> set[int]:
    with trace.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        # A trace as torch writes it begins with a space.
        if content[:64].lstrip()[:1] != b"{" or content[-64:].rstrip()[-1:] != b"}":
            raise CaptureError("the trace is not whole JSON")
        return {int(match.group(1)) for match in _STEP.finditer(content)}
