"""How a job stands, from its windows: whether it is healthy, since when not, who is at fault, and what was done. Pure.

Windows that a capture disturbed say nothing about the job: they neither end a trouble nor begin one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sftriage.records import CaptureResult, Label
from sftriage.runs.following import RequestedCapture, RequestRow, WindowRow

Face = Literal["no_run", "warming_up", "healthy", "suspect", "captured", "held", "regressed", "throttled", "stalled"]

HEADLINES: Mapping[Face, str] = {
    "no_run": "No run yet",
    "warming_up": "Warming up",
    "healthy": "Healthy",
    "suspect": "Slow",
    "captured": "Slow, and captured",
    "held": "Undecided: held",
    "regressed": "Slower than its own best",
    "throttled": "Slow, capture throttled",
    "stalled": "Stalled",
}

DISTURBED = ("self_inflicted",)


@dataclass(frozen=True, slots=True)
class CaptureStatus:
    """A capture that was asked for, and what became of it: None while it runs."""

    asked: RequestedCapture
    result: CaptureResult | None

    @classmethod
    def of(cls, result: CaptureResult) -> CaptureStatus:
        """That of a capture that has ended, wherever it was asked for."""
        return cls(RequestedCapture(result.capture_id, result.rank, "suspect"), result)

    @property
    def state(self) -> str:
        """``running``, or how it has ended."""
        return "running" if self.result is None else self.result.state

    @property
    def lost(self) -> bool:
        """It has come to nothing."""
        return self.result is not None and self.result.state != "stored"


def statuses(asked: Iterable[RequestedCapture], results: Mapping[str, CaptureResult]) -> tuple[CaptureStatus, ...]:
    """What became of captures that were asked for."""
    return tuple(CaptureStatus(one, results.get(one.capture_id)) for one in asked)


@dataclass(frozen=True, slots=True)
class Outlook:
    """How the job stands: its ``face`` in one word, and a sentence of the newest verdict that says something.

    The present trouble began in ``since_step``, was first seen at ``since_s`` (seconds since the epoch), ``named`` who
    and where, or "", and has led to ``captures``, newest first. ``done`` is what was done about the newest window and
    why, and ``resolves`` what would resolve a hold-off. ``before`` is, of a healthy job, the last window that named
    somebody. ``disturbed``: a capture disturbed the newest window.
    """

    face: Face
    sentence: str
    since_step: int | None = None
    since_s: float | None = None
    named: str = ""
    done: str = ""
    resolves: str = ""
    captures: tuple[CaptureStatus, ...] = ()
    before: WindowRow | None = None
    disturbed: bool = False

    @property
    def headline(self) -> str:
        """The face in words."""
        return HEADLINES[self.face]

    @property
    def lost(self) -> tuple[CaptureStatus, ...]:
        """The captures of the present trouble that have come to nothing."""
        return tuple(one for one in self.captures if one.lost)


def outlook(
    rows: Sequence[WindowRow], results: Mapping[str, CaptureResult], asks: Sequence[RequestRow] = ()
) -> Outlook:
    """How a job stands that has been judged at least once, from its windows and what became of captures, by id.

    Of the ``asks``, which no window led to, those that a capture of the present trouble led to belong to it.
    """
    newest, telling = rows[-1], telling_row(rows)
    if telling.label == "healthy":
        before = next((row for row in reversed(rows) if row.named and row.label != "healthy"), None)
        return Outlook("healthy", telling.sentence, before=before, disturbed=newest is not telling)
    trouble = _trouble(rows)
    named = next((row.named for row in reversed(trouble) if row.named), "")
    # What came before somebody was named may have been something else.
    of_named = [row for row in trouble if named and row.named == named] or trouble
    first = of_named[0]
    onsets = [row.onset_step for row in of_named if named and row.onset_step is not None]
    if not named and telling.regression is not None and "regressed" in telling.reasons:
        onsets = [telling.regression.since_step]
    asked = [one for row in reversed(trouble) for one in row.asked]
    for ask in asks:
        if ask.beside and any(one.capture_id == ask.beside for one in asked):
            asked = [*ask.asked, *asked]
    captures = statuses(asked, results)
    return Outlook(
        face=_face(telling, captures),
        sentence=telling.sentence,
        since_step=min(onsets, default=first.first_step),
        since_s=first.time_s,
        named=named,
        done=f"{OUTCOMES.get(newest.outcome, newest.outcome)}: {newest.words}",
        resolves=newest.resolves,
        captures=captures,
        disturbed=newest is not telling,
    )


def telling_row(rows: Sequence[WindowRow]) -> WindowRow:
    """The newest window that no capture disturbed, or, of this attempt of the job, the oldest."""
    at = len(rows) - 1
    while at > 0 and rows[at].reasons == DISTURBED and rows[at - 1].attempt == rows[-1].attempt:
        at -= 1
    return rows[at]


OUTCOMES: Mapping[str, str] = {
    "capture": "Captured",
    "hold": "Held, nothing heavy was started",
    "throttle": "Throttled, nothing heavy was started",
    "ignore": "Nothing was done",
}


def _trouble(rows: Sequence[WindowRow]) -> Sequence[WindowRow]:
    """The windows of this attempt since the last healthy one."""
    start = len(rows)
    while start > 0 and rows[start - 1].label != "healthy" and rows[start - 1].attempt == rows[-1].attempt:
        start -= 1
    trouble = rows[start:]
    told = next((n for n, row in enumerate(trouble) if row.reasons != DISTURBED), 0)
    return trouble[told:]


def _face(row: WindowRow, captures: Sequence[CaptureStatus]) -> Face:
    if row.label == "stalled":
        return "stalled"
    if row.label == "needs_evidence":
        return "regressed" if "regressed" in row.reasons else "held"
    if any(not one.lost for one in captures):
        return "captured"
    if row.outcome == "throttle":
        return "throttled"
    return "held" if row.outcome == "hold" else "suspect"


_SEVERITY: tuple[Label, ...] = ("healthy", "needs_evidence", "suspect", "stalled")


@dataclass(frozen=True, slots=True)
class TimelineColumn:
    """Windows in a row, as one. ``advances_s`` are means, one a stage of the chart, and sum to ``exposed_s``."""

    first_step: int
    last_step: int
    attempt: int
    windows: int
    label: Label
    named: str
    exposed_s: float
    advances_s: tuple[float, ...]


def stages_of(rows: Sequence[WindowRow]) -> tuple[str, ...]:
    """Every stage that is named, in the order of the newest window's step."""
    kinds = dict.fromkeys(row.stages for row in reversed(rows))
    return tuple(dict.fromkeys(stage for stages in kinds for stage in stages))


def columns_of(rows: Sequence[WindowRow], stages: Sequence[str], max_columns: int) -> tuple[TimelineColumn, ...]:
    """Windows put together into columns of as many each, the last of the rest."""
    each = -(-len(rows) // max_columns)
    return tuple(_column(rows[start : start + each], stages) for start in range(0, len(rows), each))


def _column(rows: Sequence[WindowRow], stages: Sequence[str]) -> TimelineColumn:
    # A step that hangs has no frontier yet: it is in the label, not in the stack.
    timed = [row for row in rows if row.stages]
    sums = dict.fromkeys(stages, 0.0)
    for row in timed:
        for stage, advance_s in zip(row.stages, row.advances_s, strict=True):
            sums[stage] += advance_s
    worst = max(rows, key=lambda row: _SEVERITY.index(row.label))
    advances_s = tuple(sums[stage] / max(1, len(timed)) for stage in stages)
    return TimelineColumn(
        first_step=rows[0].first_step,
        last_step=rows[-1].last_step,
        attempt=rows[-1].attempt,
        windows=len(rows),
        label=worst.label,
        named=worst.named,
        exposed_s=sum(advances_s),
        advances_s=advances_s,
    )
