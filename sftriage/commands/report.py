"""``sftriage report``: a run, or one capture, as a file to share."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Literal

from sftriage import __version__
from sftriage.base.files import refusing
from sftriage.commands.options import CapturesChoice, argument, option
from sftriage.commands.output import results, write
from sftriage.commands.traces import captures_of, complete_capture
from sftriage.errors import UsageError
from sftriage.runs.directory import RunDirectory, find_run
from sftriage.runs.lateness import control_of
from sftriage.runs.source import RunSource
from sftriage.words.verdicts import clock_time, place


def report(
    target: str = argument(
        "RUN|CAPTURE",
        "A run directory, or the id of a capture (or its beginning).",
        "the newest run started here",
        autocompletion=complete_capture,
        default="",
    ),
    *,
    choice: CapturesChoice,
    out: Path | None = option("--out -o FILE", "File to write.", "stdout"),
    form: Literal["html", "md"] | None = option("--format", "HTML (one file), or Markdown.", "by FILE's name, or md"),
    force: bool = option("--force", "Overwrite an existing file."),
) -> None:
    """Write a report to share: the finding, since when, how certain, its cost, what to do, and the traces.

    HTML is one file with embedded figures, readable offline and without scripts, for a ticket; Markdown is for a chat
    or a pull request. The report has no paths of this machine, and nothing of the job's environment.
    """
    form = form or ("html" if out is not None and out.suffix.lower() in (".html", ".htm") else "md")
    if out is not None and out.exists() and not force:
        raise UsageError(f"{out} exists already; --force overwrites it")
    made = f"Made by sftriage {__version__}, {clock_time(time.time())} UTC."
    if target and not Path(target).is_dir():
        text = _of_capture(target, choice, form, made)
    elif choice.store is not None or choice.catalogue is not None:
        raise UsageError("a store has captures, not runs: give a capture, or a run directory")
    elif target and choice.run is not None:
        raise UsageError("give the run directory only once")
    else:
        text = _of_run(find_run(Path(target) if target else choice.run), form, made)
    if out is None:
        results().print(text, soft_wrap=True, end="")
        return
    with refusing(str(out)):
        out.write_text(text, encoding="utf-8", errors="replace")
    write(place(out))


def _of_run(directory: RunDirectory, form: str, made: str) -> str:
    from sftriage.web.report import flames_of, html, markdown, run_report

    source = RunSource(lambda: directory)
    view = source.view()
    if view.problem:
        raise UsageError(view.problem)
    found = run_report(view)
    if form == "md":
        return markdown(found, made)
    from sftriage.web.charts import StepRange
    from sftriage.web.run_page import charts_of

    charts = charts_of(source, view, StepRange())
    suspects = [row.manifest for row in found.captures if row.manifest.capture.role == "suspect"]
    flames = flames_of(source.store, suspects)
    return html(found, made, time.time, charts.timeline, charts.heat, flames=flames)


def _of_capture(target: str, choice: CapturesChoice, form: str, made: str) -> str:
    from sftriage.web.report import capture_report, flames_of, html, markdown, run_named

    captures = captures_of(choice)
    store, reference = captures.resolve(target)
    manifest, _ = store.look(reference)
    of_run = captures.run
    source = None if of_run is None else RunSource(lambda: of_run)
    view = None if source is None else source.view()
    where = f"--store {store.place}" if of_run is None else f"--run {shlex.quote(run_named(of_run.path))}"
    found = capture_report(manifest, {} if view is None else view.uploads, where)
    if form == "md":
        return markdown(found, made)
    tracks = None
    if source is not None and view is not None:
        row = view.request_behind(manifest.capture_id)
        tracks = source.beside(manifest, row.attempt if row else 0, control_of(manifest))
    return html(found, made, time.time, tracks=tracks, flames=flames_of(store, [manifest]))
