"""What every executor is, seen by who runs it: one capture on one rank, from asking for it to what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sftriage.errors import CaptureError, RingError
from sftriage.recorder import MailboxClient
from sftriage.records import CaptureRequest, CaptureResult, CaptureState, RankStatus

RankLook = Callable[[], RankStatus | None]
"""What the rank is doing now, from its ring; None where that cannot be read."""


@dataclass(frozen=True, slots=True)
class Product:
    """A file that a capture leaves in the spool, and what it is to be in the store.

    Attributes:
        path: where it lies.
        name: its name in the store.
        media_type: what it is there.
        compress: it is stored gzipped.
    """

    path: Path
    name: str
    media_type: str
    compress: bool = False


class Executor(Protocol):
    """One capture. None of its methods waits.

    Attributes:
        request: what is asked for.
        needs_trainer: it comes to nothing once the trainer has ended.
        state: ``armed``, or ``running`` once it records.
    """

    @property
    def request(self) -> CaptureRequest:
        """See the class."""

    @property
    def needs_trainer(self) -> bool:
        """See the class."""

    @property
    def state(self) -> CaptureState:
        """See the class."""

    def start(self) -> None:
        """Begin.

        Raises:
            CaptureError: it cannot even begin; the message is the reason.
        """

    def poll(self) -> CaptureResult | None:
        """Go on; the result, once there is one."""

    def cancel(self) -> None:
        """End it soon; there is still a result."""

    def failed(self, reason: str) -> CaptureResult:
        """The result of this capture where it gives none itself."""

    def verify(self, result: CaptureResult) -> None:
        """Check what it left against what was promised.

        Raises:
            CaptureError: it is not that; the message says why.
        """

    def products(self) -> tuple[Product, ...]:
        """What it has left in the spool, the main file first."""

    def close(self) -> None:
        """Let go of everything, and remove what is left in the spool."""


def mailbox_of(request: CaptureRequest, mailbox: Path) -> MailboxClient:
    """A client of the mailbox of a request's rank.

    Raises:
        CaptureError: it cannot be used.
    """
    try:
        return MailboxClient(mailbox)
    except (RingError, OSError) as error:
        raise CaptureError(f"rank {request.rank} cannot be reached: {error}") from error
