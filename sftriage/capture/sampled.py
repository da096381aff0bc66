"""Python stacks of one rank, sampled by its trainer over some steps; no profiler runs."""

from __future__ import annotations

import json
from pathlib import Path

from sftriage.capture.torch_profiler import TorchCapture
from sftriage.decisions import CaptureRequest, CaptureResult
from sftriage.errors import CaptureError
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

    def verify(self, result: CaptureResult) -> None:
        """See `verify_stacks`."""
        verify_stacks(self.trace, self.request, result)

    def products(self) -> tuple[FileToStore, ...]:
        """The stacks, which any viewer of speedscope's format shows."""
        return (FileToStore(self.trace, NAME, "application/json", compress=False),)


def verify_stacks(file: Path, request: CaptureRequest, result: CaptureResult) -> None:
    """Check sampled stacks against the request and what the trainer says it did.

    Raises:
        CaptureError: missing, too large, no such file, or of other steps.
    """
    if result.first_step is None or result.last_step is None:
        raise CaptureError("the trainer names no steps that it captured")
    try:
        size_bytes = file.stat().st_size
        if size_bytes > request.max_bytes:
            raise CaptureError(f"the stacks have {size_bytes} bytes; at most {request.max_bytes} were allowed")
        steps = set(json.loads(file.read_bytes())["sftriage"]["step"])
    except OSError as error:
        raise CaptureError(f"the stacks cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CaptureError(f"no file of sampled stacks: {error}") from error
    if not steps:
        raise CaptureError("no stack was sampled")
    if not all(type(one) is int and result.first_step <= one <= result.last_step for one in steps):
        raise CaptureError(f"the stacks are of other steps than {result.first_step} to {result.last_step}")
