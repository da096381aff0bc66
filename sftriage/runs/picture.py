"""What `sftriage watch` has to show of a run at one moment. Pure: from what was read to a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from sftriage.records import CaptureResult
from sftriage.runs.captures import Damaged
from sftriage.runs.decisions import DecisionGroup, page_of
from sftriage.runs.following import RequestedCapture, WindowRow, columns_of
from sftriage.runs.outlook import DISTURBED, Outlook, outlook, telling_row
from sftriage.runs.source import View
from sftriage.traces.manifest import Manifest
from sftriage.traces.uploads import Upload

FRONTIER_WINDOWS = 5
"""Windows that the frontier is the mean of."""

TREND_WINDOWS = 120
MAX_DECISIONS = 20
MAX_CAPTURES = 20

NO_UPLOADS: Mapping[str, Upload] = MappingProxyType({})

State = Literal["waiting", "warming_up", "going", "ended"]


@dataclass(frozen=True, slots=True)
class Recorders:
    """How many ranks of a job's newest attempt have recorded steps, and of how many; 0 of 0 where nobody did."""

    ranks: int = 0
    world_size: int = 0


@dataclass(frozen=True, slots=True)
class Frontier:
    """Where the time of the last windows' steps went: the mean of exact stacks, which is one.

    Attributes:
        first_step: the first step that it is made of.
        last_step: the last one.
        windows: how many windows it is the mean of.
        exposed_s: a step's exposed time, which ``advances_s`` sum to.
        advances_s: by stage, in the order of the step.
        trend_s: the exposed time of each of the last windows, oldest first.
    """

    first_step: int
    last_step: int
    windows: int
    exposed_s: float
    advances_s: Mapping[str, float]
    trend_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CaptureView:
    """A capture that was asked for, and how it stands.

    ``state`` is a `CaptureState`, or ``damaged`` where what is stored is none.
    ``asked_by`` is the person who asked, "" where a policy did; ``reproduced`` says whether the fault was in it;
    ``upload`` is how far it is on its way to a store elsewhere, "" where it goes to none.
    """

    capture_id: str
    rank: int | None
    role: str
    state: str
    detail: str = ""
    first_step: int | None = None
    last_step: int | None = None
    size_bytes: int = 0
    asked_by: str = ""
    reproduced: str = ""
    upload: str = ""
    upload_reason: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """A run at one moment.

    Attributes:
        state: ``waiting`` for a run, ``warming_up`` until its first window is judged, ``going``, or ``ended``.
        place: the run directory, or what is waited for.
        job: the job's name.
        run_id: the run's.
        policy: the policies that it began under.
        windows: how many windows have been judged.
        recorders: who records.
        outlook: how the job stands; None before the first window.
        newest: the newest window.
        telling: the newest one that no capture disturbed.
        healthy_since: of a healthy job, the window since which it is.
        frontier: where the time goes; None before there is a step to say it of.
        decisions: like ones in a row as one, newest first.
        captures: newest first, and how many there are in all.
        skipped: lines of the journal that could not be read.
        unwatched: the job goes on, and nobody triages it.
    """

    state: State
    place: str
    job: str = ""
    run_id: str = ""
    policy: str = ""
    windows: int = 0
    recorders: Recorders = Recorders()
    outlook: Outlook | None = None
    newest: WindowRow | None = None
    telling: WindowRow | None = None
    healthy_since: WindowRow | None = None
    frontier: Frontier | None = None
    decisions: tuple[DecisionGroup, ...] = ()
    captures: tuple[CaptureView, ...] = ()
    captured: int = 0
    skipped: int = 0
    unwatched: bool = False


def picture(view: View, recorders: Recorders, place: str, uploads: Mapping[str, Upload] = NO_UPLOADS) -> Picture:
    """What there is to show of a run."""
    if view.info is None:
        return Picture("waiting", place)
    known = captures_of(view, uploads)
    blank = Picture(
        state="going" if view.going else "ended",
        place=place,
        job=view.info.job,
        run_id=view.info.run_id,
        policy=view.info.policy,
        windows=len(view.rows),
        recorders=recorders,
        captures=known[:MAX_CAPTURES],
        captured=len(known),
        skipped=view.skipped,
        unwatched=view.going and view.watcher.state == "unwatched",
    )
    if not view.rows:
        return replace(blank, state="warming_up") if view.going else blank
    stands = outlook(view.rows, view.became)
    return replace(
        blank,
        outlook=stands,
        newest=view.rows[-1],
        telling=telling_row(view.rows),
        healthy_since=_healthy_since(view.rows) if stands.face == "healthy" else None,
        frontier=frontier_of(view.rows),
        decisions=page_of(view.rows, view.became, size=MAX_DECISIONS).entries,
    )


def _healthy_since(rows: Sequence[WindowRow]) -> WindowRow:
    """The first window of this attempt since which none was anything but healthy, or disturbed by a capture."""
    since = telling_row(rows)
    for row in reversed(rows):
        if row.attempt != since.attempt or (row.label != "healthy" and row.reasons != DISTURBED):
            break
        since = row if row.label == "healthy" else since
    return since


def frontier_of(rows: Sequence[WindowRow], windows: int = FRONTIER_WINDOWS) -> Frontier | None:
    """The frontier of the newest windows of the newest attempt that have one; None where none has.

    Windows of other stages than the newest one's are left out: their stacks cannot be laid over each other.
    """
    recent: list[WindowRow] = []
    for row in reversed(rows):
        if row.attempt != rows[-1].attempt or len(recent) == TREND_WINDOWS:
            break
        # A step that hangs has no frontier yet.
        if row.stages and (not recent or row.stages == recent[0].stages):
            recent.append(row)
    if not recent:
        return None
    taken = recent[:windows][::-1]
    (column,) = columns_of(taken, taken[-1].stages, 1)
    return Frontier(
        first_step=column.first_step,
        last_step=column.last_step,
        windows=len(taken),
        exposed_s=column.exposed_s,
        advances_s=dict(zip(taken[-1].stages, column.advances_s, strict=True)),
        trend_s=tuple(row.exposed_s for row in reversed(recent)),
    )


def captures_of(view: View, uploads: Mapping[str, Upload] = NO_UPLOADS) -> tuple[CaptureView, ...]:
    """Every capture that was asked for, newest first; at the end those in the store that nobody asked for here."""
    stored = {one.capture_id: one for one in view.captures}
    asked = [(row.time_s, "", one) for row in view.rows for one in row.asked]
    asked += [(row.time_s, row.by, one) for row in view.asks for one in row.asked]
    asked.sort(key=lambda entry: entry[0])
    known = [
        _with_state(
            _capture(one, by, view.became.get(one.capture_id), stored.pop(one.capture_id, None)),
            view.states.get(one.capture_id, "running"),
        )
        for _, by, one in asked
    ]
    captures = (*reversed(known), *(_only_stored(one) for one in stored.values()))
    return tuple(
        replace(one, upload=sent.state, upload_reason=sent.reason) if (sent := uploads.get(one.capture_id)) else one
        for one in captures
    )


def _with_state(one: CaptureView, state: str) -> CaptureView:
    """A capture under way, and how far it is."""
    return replace(one, state=state) if one.state == "running" else one


def _capture(
    asked: RequestedCapture, by: str, result: CaptureResult | None, stored: Manifest | Damaged | None
) -> CaptureView:
    one = CaptureView(
        asked.capture_id, asked.rank, asked.role, "running" if result is None else result.state, asked_by=by
    )
    if isinstance(stored, Damaged):
        return replace(one, state="damaged", detail=stored.problem)
    if result is not None:
        one = replace(one, detail=result.detail, first_step=result.first_step, last_step=result.last_step)
    return one if stored is None else _with_stored(one, stored)


def _only_stored(stored: Manifest | Damaged) -> CaptureView:
    if isinstance(stored, Damaged):
        return CaptureView(stored.capture_id, None, "suspect", "damaged", stored.problem)
    return _with_stored(CaptureView(stored.capture_id, stored.capture.rank, "suspect", "stored"), stored)


def _with_stored(one: CaptureView, manifest: Manifest) -> CaptureView:
    return replace(
        one,
        first_step=manifest.capture.first_step,
        last_step=manifest.capture.last_step,
        size_bytes=sum(artefact.size_bytes for artefact in manifest.artefacts),
        reproduced="" if manifest.reproduced is None else manifest.reproduced.answer,
    )


def picture_values(shown: Picture) -> dict[str, Any]:
    """A picture as JSON values."""
    stands, newest = shown.outlook, shown.newest
    first_seen = stands.since_s if stands is not None else None
    since_step = stands.since_step if stands is not None else None
    if shown.healthy_since is not None:
        since_step, first_seen = shown.healthy_since.first_step, shown.healthy_since.time_s
    return {
        "type": "picture",
        "state": shown.state,
        "unwatched": shown.unwatched,
        "run_dir": shown.place,
        "job": shown.job,
        "run": shown.run_id,
        "policy": shown.policy,
        "windows": shown.windows,
        "health": None if stands is None else stands.face,
        "since_step": since_step,
        "since_s": first_seen,
        "sentence": None if stands is None else stands.sentence,
        "done": None if stands is None else stands.done,
        "resolves": None if stands is None else stands.resolves,
        "window": None if newest is None else window_values(newest),
        "frontier": shown.frontier,
        "suspects": () if shown.telling is None else shown.telling.suspects,
        "captures": shown.captures,
        "telemetry": {
            "ranks": shown.recorders.ranks,
            "world_size": shown.recorders.world_size,
            "coverage": None if newest is None else newest.coverage,
            "lines_skipped": shown.skipped,
        },
    }


def window_values(row: WindowRow) -> dict[str, Any]:
    """A window, and what was decided about it, as JSON values."""
    return {
        "type": "window",
        "first_step": row.first_step,
        "last_step": row.last_step,
        "attempt": row.attempt,
        "time_s": row.time_s,
        "label": row.label,
        "reasons": row.reasons,
        "sentence": row.sentence,
        "exposed_s": row.exposed_s,
        "advances_s": dict(zip(row.stages, row.advances_s, strict=True)),
        "suspects": row.suspects,
        "coverage": row.coverage,
        "decision": {
            "outcome": row.outcome,
            "reason": row.reason,
            "parameters": row.parameters,
            "words": row.words,
            "rule": row.rule or None,
            "resolves": row.resolves,
            "captures": row.asked,
        },
    }
