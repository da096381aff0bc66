"""torch.profiler on one rank, commanded from outside the trainer.

The profiler itself runs in the trainer (`sftriage.recorder`), on its training thread and between steps; here is the
other end of its mailbox.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

from sftriage.capture.executor import Executor, mailbox_of
from sftriage.decisions import CaptureRequest, CaptureResult, CaptureState
from sftriage.errors import CaptureError, RingError
from sftriage.sampling.sampler import NAME as SAMPLES_NAME
from sftriage.traces.files import chunks
from sftriage.traces.store import FileToStore

WHOLE_PARSE_BYTES = 64 * 2**20
"""Up to this size a trace is parsed whole; a larger one would take many times its size in memory, and is searched."""

_STEP = re.compile(rb'"ProfilerStep#(\d+)"')


def verify_trace(trace: Path, request: CaptureRequest, result: CaptureResult) -> None:
    """Check a plain Kineto JSON file against the request and what the trainer says it did.

    Raises:
        CaptureError: missing, too large, not JSON, without the promised steps, or of another rank.
    """
    if result.first_step is None or result.last_step is None:
        raise CaptureError("the trainer names no steps that it captured")
    try:
        size_bytes = trace.stat().st_size
        if size_bytes > request.max_bytes:
            raise CaptureError(f"the trace has {size_bytes} bytes; at most {request.max_bytes} were allowed")
        found = _whole(trace, request.rank) if size_bytes <= WHOLE_PARSE_BYTES else _searched(trace)
    except OSError as error:
        raise CaptureError(f"the trace cannot be read: {error.strerror or error}") from error
    missing = [step for step in range(result.first_step, result.last_step + 1) if step not in found]
    if missing:
        raise CaptureError(f"the trace lacks step{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}")


def _whole(trace: Path, rank: int) -> set[int]:
    try:
        document = json.loads(trace.read_bytes())
        events = document["traceEvents"]
        names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
        its_rank = document.get("distributedInfo", {}).get("rank", rank)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CaptureError(f"the trace is not Kineto JSON: {error}") from error
    if its_rank != rank:
        raise CaptureError(f"the trace is of rank {its_rank}; rank {rank} was asked for")
    return {int(name.removeprefix("ProfilerStep#")) for name in names if re.fullmatch(r"ProfilerStep#\d+", name)}


def _searched(trace: Path) -> set[int]:
    """The steps in a trace that is too large to be parsed. Read, and not mapped: a disk that fails is an error then."""
    found, kept = set(), b""
    with trace.open("rb") as file:
        for piece in chunks(file):
            # A trace as torch writes it begins with a space.
            if not kept and piece[:64].lstrip()[:1] != b"{":
                break
            text = kept + piece
            found |= {int(match.group(1)) for match in _STEP.finditer(text)}
            kept = text[-64:]
    if kept.rstrip()[-1:] != b"}":
        raise CaptureError("the trace is not whole JSON")
    return found


class TorchCapture(Executor):
    """One capture, from asking for it to the trace in the spool.

    Raises:
        CaptureError: the mailbox cannot be used.
    """

    def __init__(self, request: CaptureRequest, mailbox: Path, spool: Path) -> None:
        super().__init__(request)
        self.trace = spool / f"{request.capture_id}.json"
        self._mailbox = mailbox_of(request, mailbox)

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

    def verify(self, result: CaptureResult) -> None:
        """See `verify_trace`."""
        verify_trace(self.trace, self.request, result)

    def products(self) -> tuple[FileToStore, ...]:
        """The trace, which the trainer left as it is to save its own time; and the stacks, where they were sampled."""
        trace = FileToStore(self.trace, "trace.json.gz", "application/gzip")
        stacks = self.trace.with_name(f"{self.request.capture_id}.{SAMPLES_NAME}")
        if not stacks.exists():
            return (trace,)
        return trace, FileToStore(stacks, SAMPLES_NAME, "application/json", compress=False)

    def close(self) -> None:
        """Let go of the mailbox, and of what the trainer may have left in the spool."""
        self._mailbox.close()
        with contextlib.suppress(OSError):
            for leftover in self.trace.parent.glob(f"{self.request.capture_id}.*"):
                leftover.unlink(missing_ok=True)
