"""``sftriage policy``: check policies before use, and replay them over recordings."""

from __future__ import annotations

import difflib
import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer
import yaml

from sftriage.base.files import refusing
from sftriage.commands.options import JsonOption, argument, option
from sftriage.commands.output import print_json, tell, write
from sftriage.controller.controller import shape_of
from sftriage.controller.replay import ReplayedDecision, replay
from sftriage.errors import InputError, UsageError
from sftriage.model.events import WindowJudged
from sftriage.model.verdicts import Verdict
from sftriage.policy.in_force import PolicySet, find, load, load_set, shipped
from sftriage.policy.parsing import PolicyError, Problem
from sftriage.policy.schema import TriagePolicy
from sftriage.reports.texts import ReplayReport
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.runs.journal import read_journal
from sftriage.runs.recordings import load_recording

Files = Annotated[list[str], argument("POLICY", "Policy files, or names of shipped policies.")]


def validate(files: Files, as_json: JsonOption = False) -> None:
    """Check policies; print every mistake with its file, line, column and field."""
    checked, mistakes = [], []
    for name in files:
        try:
            loaded = load(find(name))
            about = {"valid": True, "policy": loaded.policy.metadata.name, "sha256": loaded.sha256, "problems": []}
        except (PolicyError, UsageError) as error:
            problems = error.problems if isinstance(error, PolicyError) else [Problem(0, 0, "", str(error))]
            words = (("line", "line"), ("column", "column"), ("field", "path"), ("message", "message"))
            about = {"valid": False, "problems": [{to: getattr(each, of) for to, of in words} for each in problems]}
            mistakes.append(str(error))
        checked.append({"file": name, **about})
    if as_json:
        print_json(checked)
    elif mistakes:
        tell(*mistakes)
    else:
        write(f"{len(files)} valid")
    if mistakes:
        raise typer.Exit(2)


def show(
    file: Annotated[str, argument("POLICY", "A policy file, or the name of a shipped policy.")],
    as_json: JsonOption = False,
) -> None:
    """Print a policy with all defaults filled in: what a short policy means in full."""
    document = load(find(file)).policy.filled()
    if as_json:
        print_json(document)
    else:
        sys.stdout.write(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100))


def schema() -> None:
    """Print the JSON Schema of a policy, for editors and CI."""
    described = TriagePolicy.model_json_schema(by_alias=True)
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def list_policies() -> None:
    """List the policies that ship with sftriage."""
    for name, path in shipped().items():
        write(f"{name:20} {path}")


def try_out(
    files: Files,
    on: Annotated[Path, option("--on RUN|FILE.npz", "A run directory, or an .npz as for `sftriage analyze`.")],
    expect: Path | None = option("FILE", "Compare with a saved outcome; if it differs, print how and exit with 1."),
    save: Path | None = option("FILE", "Save the outcome, for --expect."),
    start: datetime | None = option("TIME", "When the recording began, in UTC, for `active`.", "the run's, or 2000"),
    as_json: JsonOption = False,
) -> None:
    """Replay a recording under these policies: what they would have captured, held or throttled, and why.

    Time is that of the recorded steps. Captures are assumed to run their steps and succeed; their cost is not
    simulated. Stalls are replayed from the run's journal.
    """
    if expect is not None and save is not None:
        raise UsageError("give either --expect or --save")
    tried = load_set(files)
    name, start_s, replayed = _replayed(tried, on, start)
    names = tuple(loaded.policy.metadata.name for loaded in tried.loaded)
    report = ReplayReport(names, name, start_s, replayed)
    text = report.text()
    if expect is not None and (difference := _difference(expect, text)):
        sys.stdout.write(difference)
        raise typer.Exit(1)
    if save is not None:
        with refusing(f"--save {save}"):
            save.write_text(text, encoding="utf-8")
    if as_json:
        print_json(report.values())
    else:
        sys.stdout.write(text)


def _difference(expect: Path, text: str) -> str:
    try:
        saved = expect.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise UsageError(f"--expect {expect}: {why}; save an outcome with --save") from error
    lines = difflib.unified_diff(saved.splitlines(), text.splitlines(), "expected", "replayed", lineterm="")
    return "".join(f"{line}\n" for line in lines)


_EPOCH_2000 = datetime(2000, 1, 1, tzinfo=timezone.utc)
"""The default start of a recording: on a Saturday, at midnight."""


def _replayed(tried: PolicySet, on: Path, start: datetime | None) -> tuple[str, float, list[ReplayedDecision]]:
    """A recording's name, its start, and the policies' decision about each window and stall."""
    recording, shape = load_recording(on), shape_of(tried.detection)
    name, began, stalls = on.name, _EPOCH_2000, list[Verdict]()
    if on.is_dir():
        run = RunDirectory(on)
        info = read_info(run)
        try:
            name, began = info.run_id, datetime.fromisoformat(info.created_at)
        except ValueError as error:
            raise InputError(f"{run.info_file}: created_at: {error}") from None
        judged = (event.verdict for event in read_journal(run.decisions) if isinstance(event, WindowJudged))
        stalls = [verdict for verdict in judged if verdict.label == "stalled"]
    began = began if start is None else start
    start_s = began.replace(tzinfo=began.tzinfo or timezone.utc).timestamp()
    return name, start_s, list(replay(recording.windows(shape), tried, start_s, stalls))
