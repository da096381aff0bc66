"""What a controller wants of the job's agents: captures, those that an earlier controller left, and GPU evidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from sftriage.mitigate.switching import Setting, SwitchStatus
from sftriage.model import events
from sftriage.model.captures import ENDED, CaptureRequest, CaptureResult, Report, Trigger, WantedCapture
from sftriage.model.verdicts import Verdict
from sftriage.model.windows import GpuFindings, JobStatus
from sftriage.policy.state import Losses
from sftriage.windows.rings import ReadCounts, Rows


class Fleet(Protocol):
    """The agents of a job. What crosses are records; times are ages, or nanoseconds since the epoch."""

    def rows(self) -> Sequence[Rows]:
        """New steps."""

    def statuses(self) -> JobStatus | None:
        """What each rank of the newest generation is doing now; None before there is one."""

    def want(self, wanted: Sequence[WantedCapture]) -> None:
        """All captures that are wanted now: what is new is begun, what is there no more is called off."""

    def switches(self) -> Sequence[SwitchStatus]:
        """The state of each group of ranks that a remedy can be switched on."""

    def switch(self, wanted: Mapping[str, Setting]) -> None:
        """Set what is to be in force in each group, by its name; repeating it changes nothing."""

    def reports(self) -> Sequence[Report]:
        """What became of captures since the last call."""

    def telemetry(self) -> ReadCounts:
        """What has come in so far."""

    def gpus(self, ranks: Sequence[int]) -> GpuFindings | None:
        """What drivers report of these ranks' GPUs; None while they are queried: call again."""

    def settled(self, agent: str, position: int) -> None:
        """What came of an agent's rows up to this position is on record: they need not be sent again."""

    def close(self) -> None:
        """Let go of the agents; what has not ended is called off."""


EXPIRES_S = 60.0
"""How long after it was decided a capture may begin: later the job is another one than what was decided about."""


class DesiredCaptures:
    """Captures that the agents should have.

    The capture of a healthy peer is called off once its suspects' have come to nothing: it would compare with nothing,
    and cost the job. One whose trace is being written is kept.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, WantedCapture] = {}
        self._expire_s: dict[str, float] = {}
        self._called_off: dict[str, tuple[WantedCapture, str]] = {}
        self._suspects: dict[str, set[str]] = {}

    def wanted(self, now_s: float) -> tuple[WantedCapture, ...]:
        """All captures that are wanted now, suspects first; ``now_s`` is in seconds of a clock that only goes on."""
        return tuple(
            replace(one, expires_s=self._expire_s[capture_id] - now_s) if capture_id in self._expire_s else one
            for capture_id, one in self._wanted.items()
        )

    @property
    def unended(self) -> tuple[CaptureRequest, ...]:
        """Captures that nothing has come of yet, also those that are called off."""
        return tuple(one.request for one in (*self._wanted.values(), *(one for one, _ in self._called_off.values())))

    def add(
        self, requests: Sequence[CaptureRequest], triggers: Mapping[str, Trigger], generation: int, now_s: float
    ) -> None:
        """These captures are wanted, together; none of them is to begin later than `EXPIRES_S` from ``now_s``."""
        suspects = {request.capture_id for request in requests if request.role == "suspect"}
        for one in requests:
            self._wanted[one.capture_id] = WantedCapture(one, triggers[one.capture_id], generation)
            self._expire_s[one.capture_id] = now_s + EXPIRES_S
            if suspects and one.role == "control":
                self._suspects[one.capture_id] = set(suspects)

    def resume(self, request: CaptureRequest, trigger: Trigger, generation: int) -> None:
        """A capture that an earlier process has asked for is wanted still."""
        self._wanted[request.capture_id] = WantedCapture(request, trigger, generation, resumed=True)

    def ended(self, result: CaptureResult) -> tuple[WantedCapture | None, CaptureResult]:
        """A capture has ended: what was wanted, and the result with why it was called off where it was.

        Captures that were to be compared with it, and have nothing else to be compared with, are wanted no more.
        """
        called_off = self._called_off.pop(result.capture_id, None)
        self._expire_s.pop(result.capture_id, None)
        wanted = self._wanted.pop(result.capture_id, called_off[0] if called_off else None)
        self._suspects.pop(result.capture_id, None)
        for control, suspects in list(self._suspects.items()):
            if result.capture_id not in suspects:
                continue
            suspects.discard(result.capture_id)
            if result.state == "stored" or not suspects:
                del self._suspects[control]
            if result.state != "stored" and not suspects:
                how = "was refused" if result.state == "refused" else "failed"
                reason = f"nothing to compare it with, the capture of rank {result.rank} {how}"
                self._called_off[control] = (self._wanted.pop(control), reason)
        if called_off is None or result.state == "stored":
            return wanted, result
        return wanted, replace(result, detail=f"{result.detail}: {called_off[1]}" if result.detail else called_off[1])


@dataclass(slots=True)
class Corroboration:
    """Asks the GPUs of suspects, and of undecided windows where the policy says so; never waits, decides nothing.

    Attributes:
        remarks: the last remarks on each rank's GPU.
        slowed: by how much lower its clock was than the others', of those that were slow.
    """

    remarks: dict[int, tuple[str, ...]] = field(default_factory=dict)
    slowed: dict[int, float | None] = field(default_factory=dict)
    _wanted: Verdict | None = None

    def want(self, verdict: Verdict, *, of_undecided: bool) -> None:
        """A verdict has been taken. The latest is the one that evidence is for."""
        if verdict.suspects and (verdict.label == "suspect" or (of_undecided and verdict.label == "needs_evidence")):
            self._wanted = verdict

    def look(self, fleet: Fleet) -> events.EvidenceGathered | None:
        """What the GPUs have answered, to be put on record, once they have; None where nothing is to be said."""
        verdict = self._wanted
        if verdict is None:
            return None
        found = fleet.gpus(verdict.suspects[0].ranks)
        if found is None:
            return None
        self._wanted = None
        for rank in verdict.suspects[0].ranks:
            self.remarks[rank] = found.remarks
            self.slowed[rank] = found.gpus.get(rank, {}).get("slowed_fraction")
        if not (found.remarks or found.gpus or found.problem):
            return None
        gpus = {"problem": found.problem, "of": {str(rank): dict(gpu) for rank, gpu in found.gpus.items()}}
        return events.EvidenceGathered(found.time_s, verdict.first_step, verdict.last_step, found.remarks, gpus)


@dataclass(slots=True)
class ResumeState:
    """What was done, and what was begun, by attempt, capture or request.

    ``decided`` has the last step of the last window that was decided, ``judged`` its first and last step; ``unended``
    captures come with their triggers; ``attempts`` is the attempt that each capture is of.
    """

    decided: dict[int, int] = field(default_factory=dict)
    unended: dict[str, tuple[CaptureRequest, Trigger]] = field(default_factory=dict)
    request_ids: set[str] = field(default_factory=set)
    attempts: dict[str, int] = field(default_factory=dict)
    judged: dict[int, tuple[int, int]] = field(default_factory=dict)
    losses: Losses = field(default_factory=Losses)
    remedies: list[events.RemedyChanged] = field(default_factory=list)
    n_windows: int = 0
    n_stored: int = 0


def resume_state(records: Iterable[events.Event]) -> ResumeState:
    """What a run's records, in order, say is left to be done."""
    left, stored = ResumeState(), set[str]()
    for event in records:
        if isinstance(event, events.CaptureChanged):
            if event.result.state in ENDED:
                left.unended.pop(event.result.capture_id, None)
            if event.result.state == "stored":
                stored.add(event.result.capture_id)
        elif isinstance(event, events.RemedyChanged):
            left.remedies.append(event)
        elif isinstance(event, events.JournalCompacted):
            left.losses, left.n_windows = Losses.of_values(event.losses), event.dropped
        elif isinstance(event, events.WindowJudged | events.ManualRequestDecided | events.FollowUpDecided):
            for one in event.decision.requests:
                left.attempts[one.capture_id] = event.decision.attempt
                if one.capture_id in event.triggers:
                    left.unended[one.capture_id] = one, event.triggers[one.capture_id]
        if isinstance(event, events.WindowJudged) and event.verdict.label != "stalled":
            left.n_windows += 1
            attempt, last_step = event.verdict.attempt, event.verdict.last_step
            left.decided[attempt] = max(last_step, left.decided.get(attempt, last_step))
            left.judged[attempt] = max((event.verdict.first_step, last_step), left.judged.get(attempt, (-1, -1)))
            left.losses = left.losses.after(event.verdict)
        elif isinstance(event, events.ManualRequestDecided):
            left.request_ids.add(event.request.request_id)
    left.n_stored = len(stored)
    return left
