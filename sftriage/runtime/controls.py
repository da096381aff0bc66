"""Captures of healthy peers: what each is to be compared with, and that it is called off where there is nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sftriage.records import CaptureRequest, CaptureResult


class Controls:
    """The control captures under way.

    A control that begins before its suspects are known to have come to nothing is called off all the same: what it
    has recorded by then compares with nothing, and the rest of it would cost the job. One whose trace is being written
    is kept.
    """

    def __init__(self) -> None:
        self._suspects: dict[str, set[str]] = {}
        self._reasons: dict[str, str] = {}

    def asked(self, requests: Sequence[CaptureRequest]) -> None:
        """These captures are started together."""
        suspects = {request.capture_id for request in requests if request.role == "suspect"}
        if suspects:
            self._suspects |= {one.capture_id: set(suspects) for one in requests if one.role == "control"}

    def ended(self, result: CaptureResult) -> tuple[str, ...]:
        """The controls that are to be called off now that a capture has ended: none of their suspects has a trace."""
        self._suspects.pop(result.capture_id, None)
        alone = []
        for control, suspects in list(self._suspects.items()):
            if result.capture_id not in suspects:
                continue
            suspects.discard(result.capture_id)
            if result.state == "done" or not suspects:
                del self._suspects[control]
            if result.state != "done" and not suspects:
                how = "was refused" if result.state == "refused" else "failed"
                self._reasons[control] = f"nothing to compare it with, the capture of rank {result.rank} {how}"
                alone.append(control)
        return tuple(alone)

    def is_off(self, capture_id: str) -> bool:
        """Whether a control is called off, and has not ended yet."""
        return capture_id in self._reasons

    def told(self, result: CaptureResult) -> CaptureResult:
        """The end of a capture, with why it was called off where it was."""
        reason = self._reasons.pop(result.capture_id, None)
        if reason is None or result.state == "done":
            return result
        return replace(result, detail=f"{result.detail}: {reason}" if result.detail else reason)
