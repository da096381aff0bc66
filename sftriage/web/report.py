"""The report of a run or a capture as Markdown or one HTML file, for `sftriage report` and assistants.

Its readers may have neither the run directory nor an account on its host, so it names directories without their place.
The HTML file contains its pictures, needs no script and loads nothing.
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

from sftriage.runs.lateness import UNKNOWN, HeatMap, StepTracks
from sftriage.runs.source import Damaged, View
from sftriage.runs.summary import MAX_CAPTURES, RunSummary
from sftriage.traces.manifest import Manifest
from sftriage.traces.store import Store, Upload, beside
from sftriage.web.charts import Timeline, bars_of
from sftriage.web.flames import FlameGraph, StackDownloads
from sftriage.web.page import templates
from sftriage.words.captures import capture_facts
from sftriage.words.verdicts import milliseconds, place, span


@dataclass(frozen=True, slots=True)
class CaptureNote:
    """One capture: why it was made, ``facts`` (name and text), and the command that fetches its trace."""

    title: str
    why: str
    facts: tuple[tuple[str, str], ...]
    fetch: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class RunReport:
    """The contents of a report; ``about`` identifies the run or capture, ``glance`` is the state of a run.

    Captures are newest first; ``left_out`` older ones are left out.
    """

    title: str
    about: tuple[tuple[str, str], ...]
    captures: tuple[CaptureNote, ...]
    glance: RunSummary | None = None
    left_out: int = 0


def run_report(view: View) -> RunReport:
    """The report of a run."""
    name, where = Path(view.directory).name, run_named(Path(view.directory))
    view = replace(view, directory=where)
    stored = [manifest for manifest in view.captures if isinstance(manifest, Manifest)]
    info = view.info
    about = [("run", name)] if info is None else [("job", info.job), ("run", info.run_id), ("policy", info.policy)]
    if view.rows:
        first, last = min(row.first_step for row in view.rows), view.rows[-1].last_step
        about.append(("judged", f"steps {first:,} to {last:,}, {view.windows:,} windows"))
    if view.telemetry.world_size:
        about.append(("ranks", f"{view.telemetry.ranks:,} of {view.telemetry.world_size:,} record"))
    damaged = sum(isinstance(capture, Damaged) for capture in view.captures)
    if damaged:
        about.append(("damaged", f"{damaged:,} captures cannot be read"))
    return RunReport(
        title=name if info is None else f"{info.job}, {info.run_id}",
        about=tuple(about),
        glance=RunSummary(view),
        captures=tuple(_note(found, view.uploads, f"--run {shlex.quote(where)}") for found in stored[:MAX_CAPTURES]),
        left_out=max(0, len(stored) - MAX_CAPTURES),
    )


def run_named(directory: Path) -> str:
    """A run as `--run` accepts it in this directory: its relative path or its name, never an absolute path."""
    found = Path(os.path.abspath(directory))  # noqa: PTH100  # `resolve` follows links, which have names too
    return place(found) if found.is_relative_to(Path.cwd()) else found.name


def capture_report(manifest: Manifest, uploads: Mapping[str, Upload], where: str) -> RunReport:
    """The report of one capture. ``where`` is the option (``--run`` or ``--store``) that finds it."""
    note = _note(manifest, uploads, where)
    about = (("job", manifest.job), ("run", manifest.run), ("capture", manifest.capture_id))
    return RunReport(title=f"{manifest.job}, {note.title[:1].lower()}{note.title[1:]}", about=about, captures=(note,))


REPORTED_FACTS = ("rule", "captured", "reproduced", "found", "cost", "trace", "may contain")


def _note(manifest: Manifest, uploads: Mapping[str, Upload], where: str) -> CaptureNote:
    capture = manifest.capture
    whose = "every rank" if manifest.of_hang else f"rank {capture.rank}"
    upload = uploads.get(manifest.capture_id)
    if upload is not None and upload.state == "stored":
        # More people can reach the copy.
        where = f"--store {upload.url.removesuffix(f'/{manifest.job}/{manifest.run}/{manifest.capture_id}')}"
    return CaptureNote(
        title=f"Capture of {whose}, {span(capture.first_step, capture.last_step)}",
        why=manifest.trigger.why,
        facts=tuple((name, text) for name, text in capture_facts(manifest) if name in REPORTED_FACTS),
        fetch=f"sftriage traces get {manifest.capture_id} {where}",
        manifest=manifest,
    )


_MARKUP = re.compile(r"([\\`*_{}\[\]<>|#]|:(?=(?:[a-z+-][\w+-]*|100|1234):))")


def markdown(report: RunReport, made: str) -> str:
    """A report for a chat or a pull request; ``made`` says which version made it and when."""
    environment = templates({}, time.time).overlay(autoescape=False)
    environment.filters.update(plain=lambda words: _MARKUP.sub(r"\\\1", words), in_ms=milliseconds)
    return environment.get_template("report.md").render(report=report, made=made) + "\n"


SHADES = 8
"""Shades of lateness in the picture; the first means in time and is not drawn."""


def shades_of(heat: HeatMap) -> tuple[str, ...]:
    """The heat map as SVG paths, one unit per cell: one for each shade but the first, and last the unknown cells."""
    levels_GC = heat.levels_GC.astype(np.int64)
    shade_GC = np.where(levels_GC == UNKNOWN, SHADES, levels_GC * SHADES // UNKNOWN)
    outlines: list[list[str]] = [[] for _ in range(SHADES + 1)]
    for row, shade_C in enumerate(shade_GC):
        ends = [*(np.flatnonzero(np.diff(shade_C)) + 1).tolist(), len(shade_C)]
        start = 0
        for end in ends:
            outlines[shade_C[start]].append(f"M{start} {row}h{end - start}v1h{start - end}z")
            start = end
    return tuple(map("".join, outlines[1:]))


def flames_of(store: Store, captures: Sequence[Manifest]) -> dict[str, FlameGraph]:
    """The flame graph of the first capture that has one, by its id."""
    for manifest in captures:
        others = ((other, store) for _, other in beside(store, store.reference(manifest), manifest))
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
    tracks: StepTracks | None = None,
    flames: Mapping[str, FlameGraph] = MappingProxyType({}),
) -> str:
    """The HTML file: the report with its charts, of a run, or with the captured steps ``tracks``, of a capture.

    ``made`` says which version made it and when; ``flames`` are by capture.
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
        tracks=tracks,
        flames=flames,
        bars={note.manifest.capture_id: bars_of(note.manifest.findings) for note in report.captures},
    )
