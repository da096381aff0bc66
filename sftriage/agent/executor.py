"""Executors: one capture on one rank, from asking for it to what it leaves; and those that the trainer carries out.

torch's profiler and the sampler of stacks run in the trainer (`sftriage.trainer`), on its training thread and between
steps; here is the other end of its mailbox.
"""

from __future__ import annotations

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from pathlib import Path

from sftriage.agent.mailbox import MailboxClient
from sftriage.errors import CaptureError, InputError, RingError
from sftriage.model.captures import CaptureRequest, CaptureResult, CaptureState
from sftriage.model.windows import RankStatus
from sftriage.traces.store import FileToStore
from sftriage.trainer.sampler import NAME as SAMPLES_NAME

RankLook = Callable[[], RankStatus | None]
"""What the rank is doing now, from its ring; None where that cannot be read."""


Turns = Generator[None, None, None]
Course = Generator[None, None, CaptureResult]


class Executor(ABC):
    """One capture, which goes on as a generator does: `poll` takes it to its next ``yield``.

    None of its methods waits, but for the moment that a short program needs (`children.MOMENT_S`). While it
    ``needs_trainer``, it comes to nothing once the trainer has ended.
    """

    needs_trainer = True

    def __init__(self, request: CaptureRequest) -> None:
        self.request = request
        self._timings_s: dict[str, float] = {}
        self._clock: dict[str, int] = {}
        self._cancelled = False
        self._turns = self._course()

    @property
    def state(self) -> CaptureState:
        """``running`` once it has begun to record, ``armed`` before."""
        return "running" if self._clock else "armed"

    def start(self) -> None:  # noqa: B027 - most begin at their first `poll`
        """Begin; raises CaptureError, with the reason, where it cannot."""

    @abstractmethod
    def _course(self) -> Course:
        """The capture, from its first turn to its result."""

    def poll(self) -> CaptureResult | None:
        """Go on; the result, once there is one. Whatever goes wrong is the reason of a failed capture."""
        try:
            next(self._turns)
        except StopIteration as ended:
            result: CaptureResult = ended.value
            return result
        except (CaptureError, RingError) as error:
            return self.failed(str(error))
        except OSError as error:
            return self.failed(f"{error.filename or 'the spool'}: {error.strerror}")
        return None

    def cancel(self) -> None:
        """End it soon; there is still a result."""
        self._cancelled = True

    def _give_way(self) -> None:
        if self._cancelled:
            raise CaptureError("cancelled")

    def failed(self, reason: str) -> CaptureResult:
        """The result of this capture where it left nothing."""
        return CaptureResult(self.request.capture_id, self.request.rank, "failed", reason, timings_s=self._timings_s)

    def verify(self, result: CaptureResult) -> CaptureResult:
        """The result, once its files are checked and repaired; raises CaptureError where they are not as promised."""
        return result

    def products(self) -> tuple[FileToStore, ...]:
        """What it has left in the spool, the main file first."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Let go of everything, and remove what is left in the spool."""

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


def mailbox_of(request: CaptureRequest, mailbox: Path) -> MailboxClient:
    """A client of the mailbox of a request's rank; raises CaptureError where it cannot be used."""
    try:
        return MailboxClient(mailbox)
    except (RingError, OSError) as error:
        raise CaptureError(f"rank {request.rank} cannot be reached: {error}") from error


def verify_trace(trace: Path, request: CaptureRequest, result: CaptureResult) -> str:
    """Check a plain Kineto JSON file against the request and what the trainer says it did; return its damage in words.

    torch writes names as they are: where that is no valid JSON, a valid file takes its place. Raises CaptureError where
    it is missing, too large, not JSON, lacks a promised step, or is of another rank.
    """
    from sftriage.agent.trace_file import TraceFile  # not above: what reads JSON is wanted by few commands

    steps = _steps_of(result)
    found = TraceFile(trace)
    try:
        check_size(request, "trace", trace.stat().st_size)
        damage = found.read()
        found.replace()
    except OSError as error:
        raise CaptureError(f"the trace cannot be read or repaired: {error.strerror or error}") from error
    except InputError as error:
        raise CaptureError(f"the trace is not Kineto JSON: {error}") from error
    finally:
        found.close()
    if found.rank not in (None, request.rank):
        raise CaptureError(f"the trace is of rank {found.rank}; rank {request.rank} was asked for")
    missing = [step for step in steps if step not in found.steps]
    if missing:
        raise CaptureError(f"the trace lacks step{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}")
    return "; ".join(damage.words)


def verify_stacks(file: Path, request: CaptureRequest, result: CaptureResult) -> None:
    """Check sampled stacks as `verify_trace` does a trace; raises CaptureError where they are not as promised."""
    promised = _steps_of(result)
    try:
        check_size(request, "stacks", file.stat().st_size)
        steps = set(json.loads(file.read_bytes())["sftriage"]["step"])
    except OSError as error:
        raise CaptureError(f"the stacks cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CaptureError(f"no file of sampled stacks: {error}") from error
    if not steps:
        raise CaptureError("no stack was sampled")
    if not all(type(one) is int and one in promised for one in steps):
        raise CaptureError(f"the stacks are of other steps than {result.first_step} to {result.last_step}")


def _steps_of(result: CaptureResult) -> range:
    if result.first_step is None or result.last_step is None:
        raise CaptureError("the trainer names no steps that it captured")
    return range(result.first_step, result.last_step + 1)


def check_size(request: CaptureRequest, what: str, size_bytes: int) -> None:
    """Refuse a file that is larger than its request allows, by a `CaptureError`."""
    if size_bytes > request.max_bytes:
        has = "have" if what == "stacks" else "has"
        raise CaptureError(f"the {what} {has} {size_bytes} bytes; at most {request.max_bytes} were allowed")


class TrainerCapture(Executor):
    """A capture by the trainer: a trace, sampled stacks, or both; raises CaptureError without a usable mailbox."""

    def __init__(self, request: CaptureRequest, mailbox: Path, spool: Path) -> None:
        super().__init__(request)
        self._trace, self._stacks = (spool / f"{request.capture_id}.{name}" for name in ("json", SAMPLES_NAME))
        self._mailbox = mailbox_of(request, mailbox)

    @property
    def state(self) -> CaptureState:
        try:
            return "running" if self._mailbox.progress().state in ("recording", "exporting") else "armed"
        except RingError:
            return "armed"

    @property
    def handed_over(self) -> bool:
        """Whether this is the rank's latest request, answered or not."""
        try:
            return self._mailbox.latest() == self.request.capture_id
        except RingError:
            return False

    def start(self) -> None:
        """Post the request; raises CaptureError where the rank has not answered another, or cannot be reached."""
        try:
            self._mailbox.post(self.request)
        except RingError as error:
            raise CaptureError(f"rank {self.request.rank} cannot be reached: {error}") from error

    def _course(self) -> Course:
        while (result := self._mailbox.result_of(self.request.capture_id)) is None:
            yield
        return result

    def cancel(self) -> None:
        """Ask the rank to stop; its result says so. A rank that cannot be reached any more is left alone."""
        with contextlib.suppress(RingError):
            self._mailbox.cancel(self.request.capture_id)

    def verify(self, result: CaptureResult) -> CaptureResult:
        """See `verify_trace`. Where there is no trace, the stacks that were sampled meanwhile are kept without it."""
        if self.request.profiler == "stacks":
            verify_stacks(self._stacks, self.request, result)
            return result
        try:
            damage = verify_trace(self._trace, self.request, result)
        except CaptureError as error:
            if not self._stacks.exists():
                raise
            verify_stacks(self._stacks, self.request, result)
            # (where the trainer has written none, it has said why)
            damage = f"no trace: {error}" if self._trace.exists() else ""
            self._trace.unlink(missing_ok=True)
        return replace(result, detail="; ".join(filter(None, (result.detail, damage))))

    def products(self) -> tuple[FileToStore, ...]:
        """The trace, which the trainer left as it is to save its own time; and the stacks, where they were sampled."""
        trace = FileToStore(self._trace, "trace.json.gz", "application/gzip")
        sampled = FileToStore(self._stacks, SAMPLES_NAME, "application/json", compress=False)
        return tuple(one for one in (trace, sampled) if one.path.exists())

    def close(self) -> None:
        self._mailbox.close()
        with contextlib.suppress(OSError):
            for leftover in self._trace.parent.glob(f"{self.request.capture_id}.*"):
                leftover.unlink(missing_ok=True)
