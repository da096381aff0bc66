"""What `sftriage watch` shows of a run, and what a report of a run or of one capture says.

Reports go to people who have neither the run directory nor an account on its host: they name directories, and not where
these are.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sftriage.errors import InputError
from sftriage.model.captures import CaptureRequest
from sftriage.runs.captures import Damaged
from sftriage.runs.decisions import DecisionGroup, groups_of
from sftriage.runs.directory import run_so_far
from sftriage.runs.following import WindowRow
from sftriage.runs.glance import Glance, Outlook, glance_of, telling_row
from sftriage.runs.source import RunSource, View
from sftriage.traces.manifest import Manifest
from sftriage.traces.store import Upload
from sftriage.words.amounts import lasted, milliseconds, place, size, span
from sftriage.words.decisions import caused
from sftriage.words.run import reproduced_words

FRONTIER_WINDOWS = 5
"""Windows that the frontier is the mean of."""

TREND_WINDOWS = 120
MAX_DECISIONS = 20
MAX_CAPTURES = 20

State = Literal["waiting", "warming_up", "going", "ended"]


@dataclass(frozen=True, slots=True)
class Frontier:
    """Where the time of the last windows' steps went: the mean of exact stacks, which is one.

    ``advances_s``, by stage in the order of the step, sum to the ``exposed_s`` of a step. ``trend_s`` is what
    a step took in each of more windows, oldest first.
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
    """A run at one moment, as its ``view`` tells it; ``place`` is its directory, or what is waited for.

    It is ``warming_up`` until its first window is judged; before that there is no ``glance``. ``telling`` is the
    newest window that no capture disturbed.
    ``decisions`` (like ones in a row as one) and ``captures`` are the newest first; there are ``captured`` in all.
    """

    view: View
    state: State
    place: str
    glance: Glance | None = None
    telling: WindowRow | None = None
    frontier: Frontier | None = None
    decisions: tuple[DecisionGroup, ...] = ()
    captures: tuple[CaptureView, ...] = ()
    captured: int = 0

    @property
    def outlook(self) -> Outlook | None:
        """How the job stands; None before it was judged."""
        return None if self.glance is None else self.glance.outlook

    @property
    def newest(self) -> WindowRow | None:
        """The newest window."""
        return self.view.rows[-1] if self.view.rows else None


def picture(view: View, place: str) -> Picture:
    """What there is to show of a run."""
    if view.info is None:
        return Picture(view, "waiting", place)
    known = captures_of(view)
    state: State = "ended" if not view.going else "going" if view.rows else "warming_up"
    blank = Picture(view, state, place, captures=known[:MAX_CAPTURES], captured=len(known))
    if not view.rows:
        return replace(blank, glance=glance_of(view)) if view.unknown else blank
    return replace(
        blank,
        glance=glance_of(view),
        telling=telling_row(view.rows),
        frontier=frontier_of(view.rows),
        decisions=tuple(reversed(groups_of(view.rows, view.became)[-MAX_DECISIONS:])),
    )


def frontier_of(rows: Sequence[WindowRow]) -> Frontier | None:
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
    taken = recent[:FRONTIER_WINDOWS][::-1]
    of_stages = zip(*(row.advances_s for row in taken), strict=True)
    advances_s = {stage: sum(values) / len(taken) for stage, values in zip(recent[0].stages, of_stages, strict=True)}
    return Frontier(
        first_step=taken[0].first_step,
        last_step=taken[-1].last_step,
        windows=len(taken),
        exposed_s=sum(advances_s.values()),
        advances_s=advances_s,
        trend_s=tuple(row.step_s for row in reversed(recent)),
    )


def captures_of(view: View) -> tuple[CaptureView, ...]:
    """Every capture that was asked for, newest first; at the end those in the store that nobody asked for here."""
    stored = {one.capture_id: one for one in view.captures}
    asked = [(row.time_s, "", one) for row in view.rows for one in row.asked]
    asked += [(row.time_s, row.by, one) for row in view.asks for one in row.asked]
    asked.sort(key=lambda entry: entry[0])
    known = [_asked_for(view, one, by, stored.pop(one.capture_id, None)) for _, by, one in asked]
    captures = (*reversed(known), *map(_only_stored, stored.values()))
    return tuple(
        replace(one, upload=sent.state, upload_reason=sent.reason)
        if (sent := view.uploads.get(one.capture_id))
        else one
        for one in captures
    )


def _asked_for(view: View, asked: CaptureRequest, by: str, stored: Manifest | Damaged | None) -> CaptureView:
    result = view.became.get(asked.capture_id)
    now = view.states.get(asked.capture_id) if result is None else result
    state, detail = ("running", "") if now is None else (now.state, now.detail)
    one = CaptureView(asked.capture_id, asked.rank, asked.role, state, detail, asked_by=by)
    if isinstance(stored, Damaged):
        return replace(one, state="damaged", detail=stored.problem)
    if result is not None:
        one = replace(one, first_step=result.first_step, last_step=result.last_step)
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
    view, info, stands, newest = shown.view, shown.view.info, shown.outlook, shown.newest
    return {
        "type": "picture",
        "state": shown.state,
        "unwatched": view.unwatched,
        "run_dir": shown.place,
        "job": "" if info is None else info.job,
        "run": "" if info is None else info.run_id,
        "policy": "" if info is None else info.policy,
        "windows": view.windows,
        "health": stands and stands.face,
        "since_step": stands and stands.since_step,
        "since_until_step": stands and stands.until_step,
        **{name: stands and getattr(stands, name) for name in ("since_s", "sentence", "done", "resolves")},
        "answers": shown.glance and shown.glance.answers,
        "next": shown.glance and shown.glance.steps,
        "cause": shown.glance and shown.glance.cause and shown.glance.cause.model_dump(mode="json"),
        "window": None if newest is None else window_values(newest),
        "frontier": shown.frontier,
        "suspects": () if shown.telling is None else shown.telling.suspects,
        "candidates": () if shown.telling is None else shown.telling.candidates,
        "captures": shown.captures,
        "losses": view.losses.largest,
        "telemetry": {
            "ranks": view.telemetry.ranks,
            "world_size": view.telemetry.world_size,
            "coverage": newest and newest.coverage,
            "lines_skipped": view.skipped,
        },
    }


def window_values(row: WindowRow) -> dict[str, Any]:
    """A window, and what was decided about it, as JSON values."""
    return {
        "type": "window",
        **_picked(row, "first_step", "last_step", "attempt", "time_s", "label", "reasons", "sentence", "exposed_s"),
        "advances_s": dict(zip(row.stages, row.advances_s, strict=True)),
        **_picked(row, "suspects", "candidates", "regression", "coverage"),
        "decision": {
            **_picked(row, "outcome", "reason", "parameters", "words"),
            "rule": row.rule or None,
            "resolves": row.resolves,
            "captures": [
                _picked(one, *_REQUEST_FIELDS) | {"trigger": row.triggers.get(one.capture_id)} for one in row.asked
            ],
        },
    }


_REQUEST_FIELDS = ("capture_id", "rank", "role", "profiler", "steps", "warmup_steps", "max_seconds", "max_bytes")


def _picked(record: object, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


class FollowedRun:
    """A run that is looked at again and again, or one that is waited for."""

    def __init__(self, run: Path | None) -> None:
        self._run = run
        self._source = RunSource(lambda: run_so_far(run))
        self._picture: Picture | None = None

    @property
    def place(self) -> str:
        """Where the run is, or is waited for."""
        found = self._source.directory or self._run
        return "the first in this directory" if found is None else place(found)

    def look(self) -> View:
        """The run as it is now.

        Raises:
            InputError: what is there is no run, or a newer sftriage's, or cannot be read.
        """
        try:
            view = self._source.view()
            if view.has_ended():
                # What was written between the look at its journal and its end.
                view = self._source.view()
        except OSError as error:
            raise InputError(f"{self.place}: {error.strerror or error}") from error
        if view.problem:
            raise InputError(view.problem)
        return view

    def picture(self, view: View) -> Picture:
        """What there is to show; made anew only where something has changed."""
        if self._picture is None or self._picture.view is not view:
            self._picture = picture(view, self.place)
        return self._picture


@dataclass(frozen=True, slots=True)
class CaptureNote:
    """One capture: what led to it, ``facts`` about it (what, and in words), and the command that fetches its trace."""

    capture_id: str
    title: str
    why: str
    facts: tuple[tuple[str, str], ...]
    fetch: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class RunReport:
    """What is reported.

    Attributes:
        title: of what: a job's run, or one capture.
        about: what else says which one it is.
        glance: how the run stands; None of a capture alone.
        frontier: where the time of its last steps went.
        windows: of the run, in order.
        captures: the newest first, and ``left_out`` how many more there are.
    """

    title: str
    about: tuple[tuple[str, str], ...]
    captures: tuple[CaptureNote, ...]
    glance: Glance | None = None
    frontier: Frontier | None = None
    windows: tuple[WindowRow, ...] = ()
    left_out: int = 0


def run_report(view: View) -> RunReport:
    """The report of a run as it is now."""
    name, where = Path(view.directory).name, run_named(Path(view.directory))
    view = replace(view, directory=where)
    stored = [one for one in view.captures if isinstance(one, Manifest)]
    info = view.info
    about = [("run", name)] if info is None else [("job", info.job), ("run", info.run_id), ("policy", info.policy)]
    if view.rows:
        first, last = min(row.first_step for row in view.rows), view.rows[-1].last_step
        about.append(("judged", f"steps {first:,} to {last:,}, {view.windows:,} windows"))
    if view.telemetry.world_size:
        about.append(("ranks", f"{view.telemetry.ranks:,} of {view.telemetry.world_size:,} record"))
    damaged = sum(isinstance(one, Damaged) for one in view.captures)
    if damaged:
        about.append(("damaged", f"{damaged:,} captures cannot be read"))
    return RunReport(
        title=name if info is None else f"{info.job}, {info.run_id}",
        about=tuple(about),
        glance=glance_of(view),
        frontier=frontier_of(view.rows) if view.rows else None,
        windows=view.rows,
        captures=tuple(capture_note(one, view.uploads, f"--run {shlex.quote(where)}") for one in stored[:MAX_CAPTURES]),
        left_out=max(0, len(stored) - MAX_CAPTURES),
    )


def run_named(directory: Path) -> str:
    """A run as `--run` finds it from here: its path from here, or its name; never where it is on this machine."""
    found = Path(os.path.abspath(directory))  # noqa: PTH100  # `resolve` follows links, which have names too
    return place(found) if found.is_relative_to(Path.cwd()) else found.name


def capture_report(manifest: Manifest, uploads: Mapping[str, Upload], where: str) -> RunReport:
    """The report of one capture. ``where`` is the option that says where it is: of a run, or of a store."""
    note = capture_note(manifest, uploads, where)
    about = (("job", manifest.job), ("run", manifest.run), ("capture", manifest.capture_id))
    return RunReport(title=f"{manifest.job}, {note.title[:1].lower()}{note.title[1:]}", about=about, captures=(note,))


def capture_note(manifest: Manifest, uploads: Mapping[str, Upload], where: str) -> CaptureNote:
    """What a report says of a capture."""
    capture, trigger = manifest.capture, manifest.trigger
    upload = uploads.get(manifest.capture_id)
    if upload is not None and upload.state == "stored":
        # The copy that more people reach.
        where = f"--store {upload.url.removesuffix(f'/{manifest.job}/{manifest.run}/{manifest.capture_id}')}"
    rule = f"rule {trigger.rule} of policy {trigger.policy}" if trigger.rule else "a person asked for it"
    facts = [
        ("decided by", f"{rule} (sha256 {trigger.policy_sha256[:12]})"),
        ("recorded", f"{span(capture.first_step, capture.last_step)} of rank {capture.rank} on {capture.host}"),
        ("fault", _reproduced(manifest)),
        ("cause", _cause(manifest)),
        ("cost", _cost(manifest)),
        ("trace", f"{manifest.artefacts[0].name}, {size(manifest.artefacts[0].size_bytes)}, {capture.profiler}"),
        ("may contain", manifest.may_contain),
    ]
    return CaptureNote(
        capture_id=manifest.capture_id,
        title=f"Capture of rank {capture.rank}, {span(capture.first_step, capture.last_step)}",
        why=trigger.why,
        facts=tuple((name, words) for name, words in facts if words),
        fetch=f"sftriage traces get {manifest.capture_id} {where}",
        manifest=manifest,
    )


def _reproduced(manifest: Manifest) -> str:
    found = manifest.reproduced
    if found is None:
        return ""
    over = f"{milliseconds(found.over_s)} over its peers a step"
    there = reproduced_words(found.answer, manifest.capture.role)
    return f"{there}: in {found.steps_with} of {found.steps} captured steps, {over}"


def _cause(manifest: Manifest) -> str:
    cause = manifest.cause
    if cause is None or cause.code == "unknown":
        return "" if manifest.findings is None else manifest.findings.summary
    return f"{caused(cause)} {cause.next_step}"


def _cost(manifest: Manifest) -> str:
    cost = manifest.cost
    if cost is None or cost.cost_s is None:
        return ""
    shared = "" if cost.captures == 1 else f", shared by {cost.captures} captures"
    return f"{lasted(max(0.0, cost.cost_s))} of the job's time{shared}"
