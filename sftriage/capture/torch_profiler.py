"""torch.profiler on one rank, commanded from outside the trainer.

The profiler itself runs in the trainer (`sftriage.recorder`), on its training thread and between steps; here is the
other end of its mailbox.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from sftriage.capture.executor import Product, mailbox_of
from sftriage.capture.verify import verify_trace
from sftriage.errors import CaptureError, RingError
from sftriage.records import CaptureRequest, CaptureResult, CaptureState


class TorchCapture:
    """One capture, from asking for it to the trace in the spool.

    Args:
        request: what is asked for.
        mailbox: the rank's mailbox file.
        spool: where the trainer leaves its trace.

    Raises:
        CaptureError: the mailbox cannot be used.
    """

    def __init__(self, request: CaptureRequest, mailbox: Path, spool: Path) -> None:
        self.request = request
        self.trace = spool / f"{request.capture_id}.json"
        self._mailbox = mailbox_of(request, mailbox)

    @property
    def needs_trainer(self) -> bool:
        """It is the trainer that writes the trace, to the end."""
        return True

    @property
    def state(self) -> CaptureState:
        """``running`` from when the rank records or exports."""
        try:
            return "running" if self._mailbox.progress().state in ("recording", "exporting") else "armed"
        except RingError:
            return "armed"

    @property
    def handed_over(self) -> bool:
        """Whether this is the latest that the rank was asked for, answered or not."""
        try:
            return self._mailbox.latest() == self.request.capture_id
        except RingError:
            return False

    def start(self) -> None:
        """Ask the rank. It looks at its next step.

        Raises:
            CaptureError: the rank is busy with another capture, or its mailbox is no more.
        """
        try:
            self._mailbox.post(self.request)
        except RingError as error:
            raise CaptureError(f"rank {self.request.rank} cannot be reached: {error}") from error

    def poll(self) -> CaptureResult | None:
        """The result, once there is one. A mailbox that broke is a failed capture."""
        try:
            result = self._mailbox.poll()
        except RingError as error:
            return self.failed(str(error))
        return result if result is not None and result.capture_id == self.request.capture_id else None

    def cancel(self) -> None:
        """Ask the rank to stop; its result says so. A rank that cannot be reached any more is left alone."""
        with contextlib.suppress(RingError):
            self._mailbox.cancel(self.request.capture_id)

    def failed(self, reason: str) -> CaptureResult:
        """The result of this capture where the rank gives none."""
        return CaptureResult(self.request.capture_id, self.request.rank, "failed", reason)

    def verify(self, result: CaptureResult) -> None:
        """Check the trace against the request and what the trainer says it did.

        Raises:
            CaptureError: it is not what was promised.
        """
        verify_trace(self.trace, self.request, result)

    def products(self) -> tuple[Product, ...]:
        """The trace; the trainer left it as it is, to save its own time."""
        return (Product(self.trace, "trace.json.gz", "application/gzip", compress=True),)

    def close(self) -> None:
        """Let go of the mailbox, and of what the trainer may have left in the spool."""
        self._mailbox.close()
        for leftover in self.trace.parent.glob(f"{self.request.capture_id}.*"):
            leftover.unlink(missing_ok=True)
