"""What every executor is, seen by who runs it: one capture on one rank, from asking for it to what it leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

from sftriage.capture.mailbox import MailboxClient
from sftriage.errors import CaptureError, RingError
from sftriage.model.captures import CaptureRequest, CaptureResult, CaptureState
from sftriage.model.windows import RankStatus
from sftriage.traces.store import FileToStore

ENDED = "sftriage ended during it"
"""How the reason of a capture begins whose agent is no more."""

RankLook = Callable[[], RankStatus | None]
"""What the rank is doing now, from its ring; None where that cannot be read."""


class Executor(ABC):
    """One capture. None of its methods waits, but for the moment that a short program needs (`children.MOMENT_S`).

    While it ``needs_trainer``, it comes to nothing once the trainer has ended.
    """

    needs_trainer = True

    def __init__(self, request: CaptureRequest) -> None:
        self.request = request
        self._timings_s: dict[str, float] = {}
        self._clock: dict[str, int] = {}

    @property
    def state(self) -> CaptureState:
        """``armed``; ``running`` from when the clocks were read, where it began to record."""
        return "running" if self._clock else "armed"

    def start(self) -> None:  # noqa: B027 - most begin at their first `poll`
        """Begin.

        Raises:
            CaptureError: it cannot even begin; the message is the reason.
        """

    @abstractmethod
    def poll(self) -> CaptureResult | None:
        """Go on; the result, once there is one."""

    @abstractmethod
    def cancel(self) -> None:
        """End it soon; there is still a result."""

    def failed(self, reason: str) -> CaptureResult:
        """The result of this capture where it left nothing."""
        return CaptureResult(self.request.capture_id, self.request.rank, "failed", reason, timings_s=self._timings_s)

    def verify(self, result: CaptureResult) -> CaptureResult:
        """The result, once what it left is checked and repaired, where that was not examined as it was made.

        Raises:
            CaptureError: it is not what was promised; the message says why.
        """
        return result

    def products(self) -> tuple[FileToStore, ...]:
        """What it has left in the spool, the main file first."""
        return ()

    @abstractmethod
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
Course = Generator[None, None, CaptureResult]


class InTurns(Executor):
    """A capture that goes on as a generator does: `poll` takes it to its next ``yield``, and never waits."""

    def __init__(self, request: CaptureRequest) -> None:
        super().__init__(request)
        self._cancelled = False
        self._turns = self._course()

    @abstractmethod
    def _course(self) -> Course:
        """The capture, from its first turn to its result."""

    def poll(self) -> CaptureResult | None:
        """See `Executor`. Whatever goes wrong is the reason of a failed capture."""
        try:
            self._go_on()
        except StopIteration as ended:
            result: CaptureResult = ended.value
            return result
        except (CaptureError, RingError) as error:
            return self.failed(str(error))
        except OSError as error:
            return self.failed(f"{error.filename or 'the spool'}: {error.strerror}")
        return None

    def cancel(self) -> None:
        """See `Executor`."""
        self._cancelled = True

    def _go_on(self) -> None:
        next(self._turns)

    def _stored(self, main: Path, first_step: int, last_step: int, notes: Iterable[str]) -> CaptureResult:
        return CaptureResult(
            self.request.capture_id,
            self.request.rank,
            "stored",
            "; ".join(note for note in notes if note),
            first_step,
            last_step,
            main.stat().st_size,
            self._timings_s,
            self._clock,
        )
