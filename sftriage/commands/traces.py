"""``sftriage traces``: find, look at and fetch what was captured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sftriage.commands.decisions import RunOption
from sftriage.commands.output import notices, print_json, results
from sftriage.commands.reduce_report import finding_lines
from sftriage.commands.runs import find_run
from sftriage.commands.tables import captures_table
from sftriage.commands.words import place
from sftriage.traces import Catalogue, LocalStore, Manifest
from sftriage.traces.rundir import RunDirectory
from sftriage.words import milliseconds, size

JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
CaptureArgument = Annotated[str, typer.Argument(help="Capture id, as `sftriage traces list` shows it.")]

traces = typer.Typer(help="Find, look at and fetch the traces that were captured.", no_args_is_help=True)


@traces.command("list")
def list_traces(
    run: RunOption = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only captures of this rank.")] = None,
    stage: Annotated[str | None, typer.Option(help="Only captures whose suspect was in this stage.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List a run's captures, oldest first."""
    directory = find_run(run)
    rows = catalogued(directory).find(rank=rank, stage=stage)
    if as_json:
        print_json(rows)
    elif rows:
        results().print(captures_table(rows))
    else:
        notices().print(f"No such capture in {directory.path}; `sftriage decisions` says why.", soft_wrap=True)


def catalogued(directory: RunDirectory) -> Catalogue:
    """A run's catalogue, which has what the store has."""
    store = LocalStore(directory.path)
    catalogue = Catalogue(directory.catalogue, store)
    # A crash between storing and indexing, or a damaged capture: the store is the truth.
    if store.ids() != {row.capture_id for row in catalogue.find()}:
        for problem in catalogue.reindex().problems:
            notices().print(f"sftriage: {problem}", soft_wrap=True, markup=False)
    return catalogue


@traces.command("show")
def show_trace(capture_id: CaptureArgument, run: RunOption = None, as_json: JsonOption = False) -> None:
    """Show what triggered a capture, what it holds and what it cost."""
    manifest = LocalStore(find_run(run).path).manifest(capture_id)
    if as_json:
        print_json(manifest_values(manifest))
        return
    console = results()
    for line in _described(manifest):
        console.print(line, soft_wrap=True, markup=False)


@traces.command("get")
def get_trace(
    capture_id: CaptureArgument,
    run: RunOption = None,
    out: Annotated[Path, typer.Option(help="File or directory to copy the trace to.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy a capture's trace out of the store, verified against its manifest."""
    store = LocalStore(find_run(run).path)
    manifest = store.manifest(capture_id)
    artefact = manifest.artefacts[0]
    target = out / f"{capture_id}-{artefact.name}" if out.is_dir() else out
    path = store.get(capture_id, artefact.name, target, force=force)
    if as_json:
        print_json({"path": str(path), "size_bytes": artefact.size_bytes, "sha256": artefact.sha256})
    else:
        results().print(str(path), soft_wrap=True, markup=False)


def manifest_values(manifest: Manifest) -> dict[str, Any]:
    """A manifest as JSON values."""
    return manifest.model_dump(mode="json")


def fetch_command(manifest: Manifest, directory: RunDirectory) -> str:
    """The command that fetches a capture's trace, for whoever wants to open it."""
    return f"sftriage traces get {manifest.capture_id} --run {place(directory.path)}"


def _described(manifest: Manifest) -> list[str]:
    trigger, capture, trace = manifest.trigger, manifest.capture, manifest.artefacts[0]
    timings = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in capture.timings_s.items())
    return [
        f"capture     {manifest.capture_id}",
        f"job, run    {manifest.job}, {manifest.run}",
        f"created     {manifest.created_at:%Y-%m-%d %H:%M:%S} UTC",
        f"because     {trigger.why or _why(manifest)}",
        f"rule        {trigger.rule} of policy {trigger.policy} (sha256 {trigger.policy_sha256[:12]})",
        f"captured    steps {capture.first_step} to {capture.last_step} of rank {capture.rank} on {capture.host}, "
        f"{capture.profiler} profiler" + (f" ({capture.detail})" if capture.detail else ""),
        f"reproduced  {_reproduced(manifest)}",
        *(f"its GPU     {remark}" for remark in manifest.evidence),
        f"cost        {timings or 'not measured'} on that rank",
        f"trace       {trace.name}, {size(trace.size_bytes)}, sha256 {trace.sha256}",
        f"may contain {manifest.may_contain}",
        *_found(manifest),
    ]


def _reproduced(manifest: Manifest) -> str:
    """Whether the fault was there while it was captured."""
    found = manifest.reproduced
    if found is None:
        return "not told"
    return (
        f"{found.answer}: in {found.steps_with} of {found.steps} captured steps, {milliseconds(found.over_s)} over its "
        f"peers a step ({milliseconds(found.expected_s)} before)"
    )


def _why(manifest: Manifest) -> str:
    """Why it was captured, of a manifest that does not say it in words yet."""
    trigger = manifest.trigger
    ranks = ", ".join(map(str, trigger.ranks[:8])) + (", ..." if len(trigger.ranks) > 8 else "")
    return (
        f"rank {ranks} in {trigger.stage or 'all local stages'} cost {milliseconds(trigger.gain_s)} a step "
        f"({trigger.share:.0%}), steps {trigger.window.first_step} to {trigger.window.last_step}"
    )


def _found(manifest: Manifest) -> list[str]:
    """What the trace showed, once it was reduced."""
    findings = manifest.findings
    if findings is None:
        return []
    lines = [f"found       {line}" for line in finding_lines(findings)]
    stood_out = [share for share in findings.shares[:5] if share.self_s >= 0.05 * findings.suspect.stage_s]
    if stood_out:
        most = (f"{share.name} {milliseconds(share.self_s)}" for share in stood_out)
        lines.append(f"most        {', '.join(most)}")
    return lines
