"""What a journal has beside its windows: what people asked for, what captures cost, other policies, evidence.

Each is kept as short as it is shown, and checked: the journal lies on a disk that others can write to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from sftriage.events import (
    CostMeasured,
    EvidenceGathered,
    FollowUpDecided,
    ManualRequestDecided,
    PolicyChanged,
    TakenOver,
)
from sftriage.records import CaptureResult, Decision, Outcome, Parameter, ReasonCode, Role
from sftriage.words import reason_sentence, resolution

MAX_TEXT = 4000
MAX_NAMED = 8
MAX_S = 1e11
"""No time is longer, and no date later than some three thousand years from now."""

_MAX_ASKED = 256
_MAX_LINES = 20


@dataclass(frozen=True, slots=True)
class RequestedCapture:
    """A capture that a decision asked for."""

    capture_id: str
    rank: int
    role: Role


@dataclass(frozen=True, slots=True)
class RequestRow:
    """Captures that no window led to, and what was decided about them: a person asked, or another capture led to them.

    ``by`` is the person, or "", and ``why`` what they said, or the other capture, whose id is then in ``beside``.
    """

    time_s: float
    by: str
    why: str
    outcome: Outcome
    reason: ReasonCode
    words: str
    asked: tuple[RequestedCapture, ...]
    resolves: str = ""
    beside: str = ""
    attempt: int = 0

    @property
    def kind(self) -> str:
        """What it is listed as."""
        return "beside" if self.beside else "ask"


@dataclass(frozen=True, slots=True)
class CostRow:
    """What the captures that touched some steps cost the job, over all ranks (see `controller.costs.Cost`)."""

    time_s: float
    attempt: int
    first_step: int
    last_step: int
    cost_s: float | None
    before_s: float | None
    kind: ClassVar[str] = "cost"


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """Other policies were found while the job ran, and taken over or refused."""

    time_s: float
    change: Literal["changed", "refused", "restored"]
    names: tuple[str, ...]
    problems: tuple[str, ...]
    later: tuple[str, ...]
    kind: ClassVar[str] = "policy"


@dataclass(frozen=True, slots=True)
class EvidenceRow:
    """What the GPUs of suspects said of themselves, beside a verdict. It decided nothing."""

    time_s: float
    first_step: int
    last_step: int
    remarks: tuple[str, ...]
    kind: ClassVar[str] = "evidence"


@dataclass(frozen=True, slots=True)
class TakeOverRow:
    """Another process goes on with the run."""

    time_s: float
    host: str
    pid: int
    kind: ClassVar[str] = "taken_over"


Row = CostRow | PolicyRow | EvidenceRow | TakeOverRow
Note = RequestRow | Row


def request_row(event: ManualRequestDecided | FollowUpDecided) -> RequestRow:
    """What is kept of captures that no window led to.

    Raises:
        ValueError: numbers that cannot be.
    """
    decision = event.decision
    _check(decision.time_s)
    if isinstance(event, ManualRequestDecided):
        by, why, led_by = event.request.who, event.request.reason, ""
    else:
        by, why, led_by = "", f"capture {event.capture_id}", event.capture_id
    return RequestRow(
        time_s=decision.time_s,
        by=by[:MAX_TEXT],
        why=why[:MAX_TEXT],
        outcome=decision.outcome,
        reason=decision.reason,
        words=reason_sentence(decision)[:MAX_TEXT],
        asked=asked_in(decision),
        resolves=resolution(decision)[:MAX_TEXT],
        beside=led_by[:MAX_TEXT],
        attempt=decision.attempt,
    )


def note_of(event: CostMeasured | PolicyChanged | EvidenceGathered | TakenOver) -> Row | None:
    """What is kept of the other events; None where there is nothing to be shown.

    Raises:
        ValueError: numbers that cannot be.
    """
    _check(event.time_s)
    match event:
        case CostMeasured():
            _check(abs(event.cost_s or 0.0), event.before_s or 0.0)
            return CostRow(event.time_s, event.attempt, event.first_step, event.last_step, event.cost_s, event.before_s)
        case PolicyChanged():
            names = _lines([one.name for one in event.policies])
            return PolicyRow(event.time_s, event.kind, names, _lines(event.problems), _lines(event.later))
        case TakenOver():
            return TakeOverRow(event.time_s, event.host[:MAX_TEXT], event.pid)
    if not event.remarks:
        return None
    return EvidenceRow(event.time_s, event.first_step, event.last_step, _lines(event.remarks))


def asked_in(decision: Decision) -> tuple[RequestedCapture, ...]:
    """The captures that a decision asked for."""
    return tuple(RequestedCapture(one.capture_id, one.rank, one.role) for one in decision.requests[:_MAX_ASKED])


def captures_in(cost: CostRow, attempts: Mapping[str, int], results: Mapping[str, CaptureResult]) -> tuple[str, ...]:
    """The captures that a cost is of: those of its attempt that measured any of its steps."""
    return tuple(
        result.capture_id
        for result in results.values()
        if result.first_step is not None
        and result.last_step is not None
        and result.first_step <= cost.last_step
        and result.last_step >= cost.first_step
        and attempts.get(result.capture_id) == cost.attempt
    )


def bounded(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """As many of a decision's parameters, and as much of each, as any decision has."""

    def cut(value: str | int) -> str | int:
        return value[:MAX_TEXT] if isinstance(value, str) else value

    return {
        name[:MAX_TEXT]: tuple(map(cut, value[:_MAX_LINES]))
        if isinstance(value, tuple)
        else value[:MAX_TEXT]
        if isinstance(value, str)
        else value
        for name, value in list(parameters.items())[:_MAX_LINES]
    }


def _lines(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(text[:MAX_TEXT] for text in texts[:_MAX_LINES])


def _check(*seconds: float) -> None:
    if not all(0.0 <= one < MAX_S for one in seconds):
        raise ValueError("a time that cannot be")
