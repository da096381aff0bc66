"""What every executor is, seen by who runs it: one capture on one rank, from asking for it to what it leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
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
    """A file that a capture leaves in the spool, and what it is to be in the store."""

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


Turns = Generator[None, None, None]


class InTurns(ABC):
    """A capture that goes on as a generator does: `poll` takes it to its next ``yield``, and never waits."""

    def __init__(self, request: CaptureRequest) -> None:
        self.request = request
        self._timings_s: dict[str, float] = {}
        self._clock: dict[str, int] = {}
        self._turns = self._course()

    @property
    def state(self) -> CaptureState:
        """``running`` from when the clocks were read, where it began to record."""
        return "running" if self._clock else "armed"

    @abstractmethod
    def _course(self) -> Turns:
        """The capture, from its first turn to its last."""

    @abstractmethod
    def _result(self) -> CaptureResult:
        """What became of it, once its course is over."""

    def start(self) -> None:  # noqa: B027 - there is nothing to do yet
        """Begin; the reason why it could not is the result of a later `poll`."""

    def poll(self) -> CaptureResult | None:
        """Go on with it; the result, once there is one."""
        try:
            self._go_on()
        except StopIteration:
            return self._result()
        except (CaptureError, RingError) as error:
            return self.failed(str(error))
        except OSError as error:
            return self.failed(f"{error.filename or 'the spool'}: {error.strerror}")
        return None

    def _go_on(self) -> None:
        next(self._turns)

    def failed(self, reason: str) -> CaptureResult:
        """The result of this capture where it left nothing."""
        return CaptureResult(self.request.capture_id, self.request.rank, "failed", reason, timings_s=self._timings_s)
