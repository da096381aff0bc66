"""Why a rank does not carry out a capture that it is asked for. Pure."""

from __future__ import annotations

import sys
from pathlib import Path

from sftriage.recorder.session import OPTIONS
from sftriage.records import CaptureRequest


def refusal(request: CaptureRequest, *, spool: Path | None, cancelled: bool, busy: str | None) -> str | None:
    """The reason, or None where there is none.

    Args:
        request: what is asked for.
        spool: where traces go, if anywhere.
        cancelled: it has been called off.
        busy: what other profiler is in the way, if any is.
    """
    if request.profiler == "stacks":
        return "stacks are taken from outside"
    if request.profiler == "torch":
        unknown = sorted(set(request.options) - OPTIONS)
        if unknown:
            return f"unknown options: {', '.join(unknown)}"
        # Importing torch would take seconds, and nobody asked for it.
        if "torch" not in sys.modules:
            return "torch is not imported in this process"
        if spool is None:
            return "no spool directory is set (SFTRIAGE_SPOOL)"
    return "cancelled" if cancelled else busy
