"""The captures that are wanted of a job's agents now: what was decided, less what has ended or is called off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sftriage.decisions import CaptureRequest, CaptureResult, Trigger, WantedCapture

EXPIRES_S = 60.0
"""How long after it was decided a capture may begin: later the job is another one than what was decided about."""


class Wants:
    """Desired state.

    The capture of a healthy peer that begins before its suspects are known to have come to nothing is called off all
    the same: what it has recorded by then compares with nothing, and the rest of it would cost the job. One whose trace
    is being written is kept.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, WantedCapture] = {}
        self._expire_s: dict[str, float] = {}
        self._called_off: dict[str, tuple[WantedCapture, str]] = {}
        self._suspects: dict[str, set[str]] = {}

    def wanted(self, now_s: float) -> tuple[WantedCapture, ...]:
        """All captures that are wanted now, suspects first; ``now_s`` is in seconds of a clock that only goes on."""
        return tuple(
            replace(one, expires_s=self._expire_s[capture_id] - now_s) if capture_id in self._expire_s else one
            for capture_id, one in self._wanted.items()
        )

    @property
    def unended(self) -> tuple[CaptureRequest, ...]:
        """Captures that nothing has come of yet, also those that are called off."""
        return tuple(one.request for one in (*self._wanted.values(), *(one for one, _ in self._called_off.values())))

    def add(
        self,
        requests: Sequence[CaptureRequest],
        triggers: Mapping[str, Trigger],
        generation: int,
        now_s: float,
    ) -> None:
        """These captures are wanted, together; none of them is to begin later than `EXPIRES_S` from ``now_s``."""
        suspects = {request.capture_id for request in requests if request.role == "suspect"}
        for one in requests:
            self._wanted[one.capture_id] = WantedCapture(one, triggers[one.capture_id], generation)
            self._expire_s[one.capture_id] = now_s + EXPIRES_S
            if suspects and one.role == "control":
                self._suspects[one.capture_id] = set(suspects)

    def resume(self, request: CaptureRequest, trigger: Trigger, generation: int) -> None:
        """A capture that an earlier process has asked for is wanted still."""
        self._wanted[request.capture_id] = WantedCapture(request, trigger, generation, resumed=True)

    def ended(self, result: CaptureResult) -> tuple[WantedCapture | None, CaptureResult]:
        """A capture has ended: what was wanted, and the result with why it was called off where it was.

        Captures that were to be compared with it, and have nothing else to be compared with, are wanted no more.
        """
        called_off = self._called_off.pop(result.capture_id, None)
        self._expire_s.pop(result.capture_id, None)
        wanted = self._wanted.pop(result.capture_id, called_off[0] if called_off else None)
        self._suspects.pop(result.capture_id, None)
        for control, suspects in list(self._suspects.items()):
            if result.capture_id not in suspects:
                continue
            suspects.discard(result.capture_id)
            if result.state == "stored" or not suspects:
                del self._suspects[control]
            if result.state != "stored" and not suspects:
                how = "was refused" if result.state == "refused" else "failed"
                reason = f"nothing to compare it with, the capture of rank {result.rank} {how}"
                self._called_off[control] = (self._wanted.pop(control), reason)
        if called_off is None or result.state == "stored":
            return wanted, result
        return wanted, replace(result, detail=f"{result.detail}: {called_off[1]}" if result.detail else called_off[1])
