"""Python stacks of one rank, sampled by its trainer over some steps; no profiler runs."""

from __future__ import annotations

from pathlib import Path

from sftriage.capture.torch_profiler import TorchCapture, verify_stacks
from sftriage.decisions import CaptureRequest, CaptureResult
from sftriage.sampling.sampler import NAME
from sftriage.traces.store import FileToStore


class SampledCapture(TorchCapture):
    """One capture, from asking for it to the stacks in the spool.

    Raises:
        CaptureError: the mailbox cannot be used.
    """

    def __init__(self, request: CaptureRequest, mailbox: Path, spool: Path) -> None:
        super().__init__(request, mailbox, spool)
        self.trace = spool / f"{request.capture_id}.{NAME}"

    def verify(self, result: CaptureResult) -> CaptureResult:
        """See `verify_stacks`."""
        verify_stacks(self.trace, self.request, result)
        return result

    def products(self) -> tuple[FileToStore, ...]:
        """The stacks, which any viewer of speedscope's format shows."""
        return (FileToStore(self.trace, NAME, "application/json", compress=False),)
