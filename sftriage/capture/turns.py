"""What executors have in common that make a capture from outside, a little at each turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator

from sftriage.errors import CaptureError, RingError
from sftriage.records import CaptureRequest, CaptureResult, CaptureState

Turns = Generator[None, None, None]


class InTurns(ABC):
    """A capture that goes on as a generator does: `poll` takes it to its next ``yield``, and never waits.

    Attributes:
        request: what is asked for.
    """

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
