"""What a report of a run or of one capture says.

Reports go to people who have neither the run directory nor an account on its host: they name directories, and not where
these are.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sftriage.runs.captures import Damaged
from sftriage.runs.following import WindowRow
from sftriage.runs.glance import Glance, glance_of
from sftriage.runs.source import View
from sftriage.traces.manifest import Manifest
from sftriage.traces.store import Upload
from sftriage.words.amounts import lasted, milliseconds, place, size, span
from sftriage.words.decisions import caused
from sftriage.words.run import reproduced_words

FRONTIER_WINDOWS = 5
"""Windows that the frontier is the mean of."""

TREND_WINDOWS = 120
MAX_CAPTURES = 20


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
        captures: the newest first, and ``left_out`` how many more there are.
    """

    title: str
    about: tuple[tuple[str, str], ...]
    captures: tuple[CaptureNote, ...]
    glance: Glance | None = None
    frontier: Frontier | None = None
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
    fault = cost = why = ""
    if (found := manifest.reproduced) is not None:
        there = f"in {found.steps_with} of {found.steps} captured steps"
        over = f"{milliseconds(found.over_s)} over its peers a step"
        fault = f"{reproduced_words(found.answer, capture.role)}: {there}, {over}"
    if manifest.cause is not None and manifest.cause.code != "unknown":
        why = f"{caused(manifest.cause)} {manifest.cause.next_step}"
    elif manifest.findings is not None:
        why = manifest.findings.summary
    if manifest.cost is not None and manifest.cost.cost_s is not None:
        shared = "" if manifest.cost.captures == 1 else f", shared by {manifest.cost.captures} captures"
        cost = f"{lasted(max(0.0, manifest.cost.cost_s))} of the job's time{shared}"
    facts = [
        ("decided by", f"{rule} (sha256 {trigger.policy_sha256[:12]})"),
        ("recorded", f"{span(capture.first_step, capture.last_step)} of rank {capture.rank} on {capture.host}"),
        ("fault", fault),
        ("cause", why),
        ("cost", cost),
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
