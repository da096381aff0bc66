"""Which executor carries out a request, and which captures of one rank must not overlap."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sftriage.capture.abandoned import AbandonedNsys, AbandonedStacks
from sftriage.capture.executor import Executor, RankLook
from sftriage.capture.nsys import NsysCapture, NsysPlace
from sftriage.capture.sampled import SampledCapture
from sftriage.capture.stacks import StacksCapture
from sftriage.capture.torch_profiler import TorchCapture
from sftriage.decisions import CaptureRequest
from sftriage.errors import CaptureError
from sftriage.recorder import RingInfo


@dataclass(frozen=True, slots=True)
class Places:
    """Where captures find the trainers' rings and mailboxes, the spool, and, where it launched them, nsys."""

    rings: Path
    spool: Path
    nsys: NsysPlace | None = None


def executor_for(request: CaptureRequest, info: RingInfo, places: Places, look: RankLook) -> Executor:
    """The executor of a request, not yet started.

    Raises:
        CaptureError: there can be none; the message is the reason.
    """
    if not request.takes_steps:
        return StacksCapture(request, info, places.rings, places.spool, look)
    mailbox = places.rings / info.file_name("mailbox")
    if request.profiler != "nsys":
        return _by_trainer(request, mailbox, places.spool)
    if places.nsys is None:
        raise CaptureError("the job was not launched under nsys: sftriage run --nsys")
    return NsysCapture(request, places.nsys, mailbox, places.spool, look)


def adopted(request: CaptureRequest, info: RingInfo, places: Places) -> Executor:
    """The executor of a request that was handed to its rank before, by an agent that is no more.

    The trainer works by itself, and its answer waits in the mailbox. What worked outside ended with that agent: what
    it left is ended, too.

    Raises:
        CaptureError: it cannot be gone on with; the message is the reason.
    """
    mailbox = places.rings / info.file_name("mailbox")
    if not request.takes_steps:
        return AbandonedStacks(request, places.spool)
    if request.profiler == "nsys":
        if places.nsys is None:
            raise CaptureError("the note of how its rank was launched under nsys is gone")
        return AbandonedNsys(request, places.nsys, mailbox, places.spool, lambda: None)
    capture = _by_trainer(request, mailbox, places.spool)
    if capture.handed_over:
        return capture
    capture.cancel()
    capture.close()
    raise CaptureError("its rank was never asked")


def _by_trainer(request: CaptureRequest, mailbox: Path, spool: Path) -> TorchCapture:
    """The executor of what the trainer does by itself."""
    return (SampledCapture if request.profiler == "stacks" else TorchCapture)(request, mailbox, spool)


def overlap(request: CaptureRequest, running: Iterable[CaptureRequest]) -> str | None:
    """Why a request cannot begin beside those that run, or None.

    A trainer does one thing at a time. A look from outside troubles only another one.
    """
    for other in running:
        if other.rank == request.rank and other.takes_steps == request.takes_steps:
            return f"capture {other.capture_id} ({other.profiler}) of rank {request.rank} is under way"
    return None
