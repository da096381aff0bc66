"""What a journal has beside its windows: what people asked for, what captures cost, other policies, evidence.

Each is kept as short as it is shown, and checked: the journal lies on a disk that others can write to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import msgspec

from sftriage.records import Ask, CaptureResult, Decision, Outcome, Role

MAX_TEXT = 4000
MAX_NAMED = 8
MAX_S = 1e11
"""No time is longer, and no date later than some three thousand years from now."""

_MAX_ASKED = 256
_MAX_LINES = 20


@dataclass(frozen=True, slots=True)
class Asked:
    """A capture that a decision asked for."""

    capture_id: str
    rank: int
    role: Role


@dataclass(frozen=True, slots=True)
class AskRow:
    """Captures that no window led to, and what was decided about them: a person asked, or another capture led to them.

    ``by`` is the person, or "", and ``why`` what they said, or the other capture, whose id is then in ``beside``.
    """

    time_s: float
    by: str
    why: str
    outcome: Outcome
    reason: str
    asked: tuple[Asked, ...]
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


Note = AskRow | CostRow | PolicyRow | EvidenceRow


class Asking(msgspec.Struct, tag="ask", tag_field="type"):
    """An ``ask`` of the journal."""

    ask: Ask
    decision: Decision


class Beside(msgspec.Struct, tag="beside", tag_field="type"):
    """A ``beside`` of the journal."""

    capture_id: str
    decision: Decision


class CostEntry(msgspec.Struct, tag="cost", tag_field="type"):
    """A ``cost`` of the journal."""

    class Cost(msgspec.Struct):
        """What it says."""

        time_s: float
        attempt: int
        first_step: int
        last_step: int
        cost_s: float | None
        before_s: float | None

    cost: Cost


class PolicyEntry(msgspec.Struct, tag="policy", tag_field="type"):
    """A ``policy`` of the journal; the documents it holds are passed over."""

    class Change(msgspec.Struct):
        """What it says."""

        class Named(msgspec.Struct):
            """A policy."""

            name: str

        time_s: float
        kind: Literal["changed", "refused", "restored"]
        policies: list[Named]
        problems: list[str] = []
        later: list[str] = []

    change: Change


class EvidenceEntry(msgspec.Struct, tag="evidence", tag_field="type"):
    """An ``evidence`` of the journal. Only what GPUs say of themselves is shown."""

    class Evidence(msgspec.Struct):
        """What it says."""

        class Gpus(msgspec.Struct):
            """What was asked of the driver."""

            time_s: float
            remarks: list[str] = []

        first_step: int = 0
        last_step: int = 0
        gpus: Gpus | None = None

    evidence: Evidence


def ask_row(entry: Asking | Beside) -> AskRow:
    """What is kept of captures that no window led to.

    Raises:
        ValueError: numbers that cannot be.
    """
    decision = entry.decision
    _check(decision.time_s)
    by, why = (entry.ask.who, entry.ask.reason) if isinstance(entry, Asking) else ("", f"capture {entry.capture_id}")
    return AskRow(
        time_s=decision.time_s,
        by=by[:MAX_TEXT],
        why=why[:MAX_TEXT],
        outcome=decision.outcome,
        reason=decision.reason[:MAX_TEXT],
        asked=asked_in(decision),
        resolves=decision.resolves[:MAX_TEXT],
        beside="" if isinstance(entry, Asking) else entry.capture_id[:MAX_TEXT],
        attempt=decision.attempt,
    )


def note_of(entry: CostEntry | PolicyEntry | EvidenceEntry) -> CostRow | PolicyRow | EvidenceRow | None:
    """What is kept of the other entries; None where there is nothing to be shown.

    Raises:
        ValueError: numbers that cannot be.
    """
    if isinstance(entry, CostEntry):
        cost = entry.cost
        _check(cost.time_s, abs(cost.cost_s or 0.0), cost.before_s or 0.0)
        return CostRow(cost.time_s, cost.attempt, cost.first_step, cost.last_step, cost.cost_s, cost.before_s)
    if isinstance(entry, PolicyEntry):
        change = entry.change
        _check(change.time_s)
        names = _lines([one.name for one in change.policies])
        return PolicyRow(change.time_s, change.kind, names, _lines(change.problems), _lines(change.later))
    gpus = entry.evidence.gpus
    if gpus is None or not gpus.remarks:
        return None
    _check(gpus.time_s)
    return EvidenceRow(gpus.time_s, entry.evidence.first_step, entry.evidence.last_step, _lines(gpus.remarks))


def asked_in(decision: Decision) -> tuple[Asked, ...]:
    """The captures that a decision asked for."""
    return tuple(Asked(one.capture_id, one.rank, one.role) for one in decision.requests[:_MAX_ASKED])


def captures_in(cost: CostRow, attempts: Mapping[str, int], results: Mapping[str, CaptureResult]) -> tuple[str, ...]:
    """The captures that a cost is of: those of its attempt that measured any of its steps.

    Args:
        cost: the cost.
        attempts: the attempt that each capture was asked for in.
        results: what became of captures, by id.
    """
    return tuple(
        result.capture_id
        for result in results.values()
        if result.first_step is not None
        and result.last_step is not None
        and result.first_step <= cost.last_step
        and result.last_step >= cost.first_step
        and attempts.get(result.capture_id) == cost.attempt
    )


def _lines(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(text[:MAX_TEXT] for text in texts[:_MAX_LINES])


def _check(*seconds: float) -> None:
    if not all(0.0 <= one < MAX_S for one in seconds):
        raise ValueError("a time that cannot be")
