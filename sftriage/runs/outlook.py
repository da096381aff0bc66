"""How a job stands, from its windows: whether it is healthy, since when not, who is at fault, and what was done. Pure.

Windows that a capture disturbed say nothing about the job: they neither end a trouble nor begin one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sftriage.model.captures import CaptureRequest, CaptureResult, Role
from sftriage.runs.following import RequestRow, WindowRow
from sftriage.words.glance import decision_phrase, face_words

Face = Literal[
    "no_run", "warming_up", "healthy", "suspect", "captured", "held", "regressed", "throttled", "stalled", "unknown"
]

DISTURBED = ("self_inflicted",)


@dataclass(frozen=True, slots=True)
class CaptureStatus:
    """A capture that was asked for, and what became of it: None while it runs."""

    capture_id: str
    rank: int
    role: Role
    result: CaptureResult | None

    @property
    def state(self) -> str:
        """``running``, or how it has ended."""
        return "running" if self.result is None else self.result.state

    @property
    def lost(self) -> bool:
        """It has come to nothing."""
        return self.result is not None and self.result.state != "stored"


def statuses(asked: Iterable[CaptureRequest], results: Mapping[str, CaptureResult]) -> tuple[CaptureStatus, ...]:
    """What became of captures that were asked for."""
    return tuple(CaptureStatus(one.capture_id, one.rank, one.role, results.get(one.capture_id)) for one in asked)


@dataclass(frozen=True, slots=True)
class Outlook:
    """How the job stands: its ``face`` in one word, and a sentence of the newest verdict that says something.

    It stands so since ``since_step``, or since a step from there to ``until_step``; that was first seen at ``since_s``
    (seconds since the epoch). Of a trouble, ``named`` is who and where, "" while nobody is, and ``captures`` are those
    that it has led to, newest first.
    ``done`` is what was done about the newest window and why, and ``resolves`` what would resolve a hold-off.
    ``before`` is the last window that named somebody, where the job is healthy now or nobody is named any more.
    ``disturbed``: a capture disturbed the newest window. Of a run that nobody watches any more, ``unknown_since`` is
    the last step that was judged, and all but the face is how it stood then.
    """

    face: Face
    sentence: str
    since_step: int | None = None
    until_step: int | None = None
    since_s: float | None = None
    named: str = ""
    done: str = ""
    resolves: str = ""
    captures: tuple[CaptureStatus, ...] = ()
    before: WindowRow | None = None
    disturbed: bool = False
    unknown_since: int | None = None

    @property
    def headline(self) -> str:
        """The face in words."""
        return face_words(self.face, self.unknown_since)

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
        since = _healthy_since(rows, telling)
        return Outlook(
            "healthy",
            telling.sentence,
            since_step=since.first_step,
            until_step=since.first_step,
            since_s=since.time_s,
            before=_last_named(rows),
            disturbed=newest is not telling,
        )
    trouble = _trouble(rows)
    # What came before somebody was named may have been something else.
    of_named = [row for row in trouble if row.is_trouble_of(telling)] or trouble
    first = of_named[0]
    since_step, until_step = _since(of_named, telling)
    asked = [one for row in reversed(trouble) for one in row.asked]
    for ask in asks:
        if ask.beside and any(one.capture_id == ask.beside for one in asked):
            asked = [*ask.asked, *asked]
    captures = statuses(asked, results)
    return Outlook(
        face=_face(telling, captures),
        sentence=telling.sentence,
        since_step=since_step,
        until_step=until_step,
        since_s=first.time_s,
        named=telling.named,
        done=decision_phrase(newest.outcome, newest.words),
        resolves=newest.resolves,
        captures=captures,
        before=None if telling.named else _last_named(trouble),
        disturbed=newest is not telling,
    )


def _healthy_since(rows: Sequence[WindowRow], telling: WindowRow) -> WindowRow:
    since = telling
    for row in reversed(rows):
        if row.attempt != since.attempt or (row.label != "healthy" and row.reasons != DISTURBED):
            break
        since = row if row.label == "healthy" else since
    return since


def _last_named(rows: Sequence[WindowRow]) -> WindowRow | None:
    return next((row for row in reversed(rows) if row.named), None)


def _since(trouble: Sequence[WindowRow], telling: WindowRow) -> tuple[int, int]:
    """Between which steps a trouble began, from the windows that it is told by; the same one twice where that is known.

    Nobody's onset counts but that of who is named; without one, it began in a step that the window before did not have.
    """
    # The newest knows best, and its sentence says it.
    newest = [telling.onset_step] if telling.named and telling.onset_step is not None else []
    onsets = newest or [row.onset_step for row in trouble if telling.named and row.onset_step is not None]
    if not onsets and telling.regression is not None and "regressed" in telling.reasons:
        onsets = [telling.regression.since_step]
    if onsets:
        return min(onsets), min(onsets)
    first = trouble[0]
    return first.first_step, first.last_step


def telling_row(rows: Sequence[WindowRow]) -> WindowRow:
    """The newest window that no capture disturbed, or, of this attempt of the job, the oldest."""
    at = len(rows) - 1
    while at > 0 and rows[at].reasons == DISTURBED and rows[at - 1].attempt == rows[-1].attempt:
        at -= 1
    return rows[at]


def _trouble(rows: Sequence[WindowRow]) -> Sequence[WindowRow]:
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
