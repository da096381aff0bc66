"""A report of a run or of one capture, to hand on: what it says, in Markdown and as one file of HTML.

Reports go to people who have neither the run directory nor an account on its host: they name directories, and not where
these are. The file of HTML has its pictures inside, is readable without a script, and asks nobody for anything.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

import numpy as np

from sftriage.runs.lateness import UNKNOWN, HeatMap, Lanes
from sftriage.runs.source import Damaged, View
from sftriage.runs.summary import MAX_CAPTURES, RunSummary
from sftriage.traces.manifest import Manifest
from sftriage.traces.store import Store, Upload, beside
from sftriage.web.charts import Timeline, bars_of
from sftriage.web.flames import FlameGraph, StackDownloads
from sftriage.web.page import templates
from sftriage.words.decisions import caused
from sftriage.words.run import reproduced_words
from sftriage.words.verdicts import lasted, milliseconds, place, size, span


@dataclass(frozen=True, slots=True)
class CaptureNote:
    """One capture: what led to it, ``facts`` about it (what, and in words), and the command that fetches its trace."""

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
        captures: the newest first, and ``left_out`` how many more there are.
    """

    title: str
    about: tuple[tuple[str, str], ...]
    captures: tuple[CaptureNote, ...]
    glance: RunSummary | None = None
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
        glance=RunSummary(view),
        captures=tuple(_note(one, view.uploads, f"--run {shlex.quote(where)}") for one in stored[:MAX_CAPTURES]),
        left_out=max(0, len(stored) - MAX_CAPTURES),
    )


def run_named(directory: Path) -> str:
    """A run as `--run` finds it from here: its path from here, or its name; never where it is on this machine."""
    found = Path(os.path.abspath(directory))  # noqa: PTH100  # `resolve` follows links, which have names too
    return place(found) if found.is_relative_to(Path.cwd()) else found.name


def capture_report(manifest: Manifest, uploads: Mapping[str, Upload], where: str) -> RunReport:
    """The report of one capture. ``where`` is the option that says where it is: of a run, or of a store."""
    note = _note(manifest, uploads, where)
    about = (("job", manifest.job), ("run", manifest.run), ("capture", manifest.capture_id))
    return RunReport(title=f"{manifest.job}, {note.title[:1].lower()}{note.title[1:]}", about=about, captures=(note,))


def _note(manifest: Manifest, uploads: Mapping[str, Upload], where: str) -> CaptureNote:
    capture, trigger = manifest.capture, manifest.trigger
    upload = uploads.get(manifest.capture_id)
    if upload is not None and upload.state == "stored":
        # The copy that more people reach.
        where = f"--store {upload.url.removesuffix(f'/{manifest.job}/{manifest.run}/{manifest.capture_id}')}"
    rule = f"rule {trigger.rule} of policy {trigger.policy}" if trigger.rule else "requested by hand"
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
        title=f"Capture of rank {capture.rank}, {span(capture.first_step, capture.last_step)}",
        why=trigger.why,
        facts=tuple((name, words) for name, words in facts if words),
        fetch=f"sftriage traces get {manifest.capture_id} {where}",
        manifest=manifest,
    )


_MEANS_SOMETHING = re.compile(r"([\\`*_{}\[\]<>|#]|:(?=(?:[a-z+-][\w+-]*|100|1234):))")


def markdown(report: RunReport, made: str) -> str:
    """A report for a chat or a pull request; ``made`` says by what and when."""
    environment = templates({}, time.time).overlay(autoescape=False)
    environment.filters.update(plain=lambda words: _MEANS_SOMETHING.sub(r"\\\1", words), in_ms=milliseconds)
    return environment.get_template("report.md").render(report=report, made=made) + "\n"


SHADES = 8
"""So many shades of lateness are told apart in the picture; the first is in time, and not drawn."""


def shades_of(heat: HeatMap) -> tuple[str, ...]:
    """The heat map as outlines, a unit a cell: of each shade but the first, and last of what is not known.

    Cells in a row of one shade are one rectangle.
    """
    levels_GC = heat.levels_GC.astype(np.int64)
    shade_GC = np.where(levels_GC == UNKNOWN, SHADES, levels_GC * SHADES // UNKNOWN)
    outlines: list[list[str]] = [[] for _ in range(SHADES + 1)]
    for row, shade_C in enumerate(shade_GC):
        ends = [*(np.flatnonzero(np.diff(shade_C)) + 1).tolist(), len(shade_C)]
        start = 0
        for end in ends:
            outlines[shade_C[start]].append(f"M{start} {row}h{end - start}v1h{start - end}z")
            start = end
    return tuple("".join(one) for one in outlines[1:])


def flames_of(store: Store, captures: Sequence[Manifest]) -> dict[str, FlameGraph]:
    """The flame graph of the first of some captures that has one: a few tens of kilobytes."""
    for manifest in captures:
        reference = store.reference(manifest)
        others = ((one, store) for _, one in beside(store, reference, manifest))
        graph = StackDownloads().drawn(manifest, store, others, {})
        if isinstance(graph, FlameGraph):
            return {manifest.capture_id: graph}
    return {}


def html(
    report: RunReport,
    made: str,
    now_s: Callable[[], float],
    chart: Timeline | None = None,
    heat: HeatMap | None = None,
    lanes: Lanes | None = None,
    flames: Mapping[str, FlameGraph] = MappingProxyType({}),
) -> str:
    """The whole file.

    Args:
        report: what is said.
        made: by what, and when.
        now_s: seconds since the epoch.
        chart: where the time of the run's steps went.
        heat: who was late, and when.
        lanes: the captured steps, of a report of one capture.
        flames: by capture, where its time went function by function.
    """
    static = files("sftriage.web").joinpath("static")
    style = static.joinpath("page.css").read_text(encoding="utf-8")
    template = templates({}, now_s).get_template("report.html")
    return template.render(
        report=report,
        made=made,
        style=style,
        chart=chart,
        heat=heat,
        shades=() if heat is None else shades_of(heat),
        lanes=lanes,
        flames=flames,
        bars={one.manifest.capture_id: bars_of(one.manifest.findings) for one in report.captures},
    )
