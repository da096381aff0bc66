"""``sftriage traces list``, ``for-step``, ``show``, ``get``, ``schema``: find, look at and fetch captures."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sftriage.base.files import refusing, replacing
from sftriage.commands.options import CapturesChoice, JsonOption, argument, option
from sftriage.commands.output import copying, counting, lists, print_json, say, tell, write
from sftriage.errors import SftriageError, UsageError
from sftriage.model.captures import Profiler
from sftriage.reports.tables import captures_table, decisions_table
from sftriage.reports.texts import manifest_lines
from sftriage.runs.captures import (
    StoredState,
    cause_values,
    condition_values,
    described,
    since_of,
    steps_of,
    upload_of,
    upload_values,
    upload_words,
)
from sftriage.runs.directory import find_run
from sftriage.runtime import catalogues
from sftriage.runtime.catalogues import CatalogueCaptures
from sftriage.sampling.sampler import FOLDED_NAME
from sftriage.sampling.sampler import NAME as STACKS_NAME
from sftriage.traces.databases import CaptureQuery, CaptureRow
from sftriage.traces.manifest import Artefact, Manifest, manifest_schema
from sftriage.traces.store import LocalStore
from sftriage.traces.stores import Store, copy, destination_of
from sftriage.words.amounts import place, span


def complete_capture(context: typer.Context, incomplete: str) -> Iterable[str]:
    """The captures of the run that is meant, for a shell that completes a command line."""
    try:
        if not context.params.get("store") and not context.params.get("catalogue"):
            ids = LocalStore(find_run(context.params.get("run")).path).ids()
            return sorted(one for one in ids if one.startswith(incomplete))
    except (SftriageError, OSError):
        pass  # a shell that asks what could come next wants no errors
    return ()


CaptureArgument = Annotated[
    str,
    argument(
        "CAPTURE", "Capture id, as `sftriage traces list` shows it, or its beginning.", autocompletion=complete_capture
    ),
]
JobOption = Annotated[str | None, option("--job NAME", "Only captures of this job.")]
RunIdOption = Annotated[str | None, option("--run-id ID", "Only captures of the run of this id.")]


def captures_of(meant: CapturesChoice) -> CatalogueCaptures:
    """The captures that the options mean; what is to be known of where they are is said."""
    with counting("Reading manifests") as progress:
        captures = catalogues.captures_of(meant.run, meant.store, meant.catalogue, progress)
    say(*captures.problems)
    return captures


def list_traces(
    *,
    of: CapturesChoice,
    job: JobOption = None,
    run_id: RunIdOption = None,
    rank: Annotated[int | None, option("N", "Only captures of this rank.", min=0)] = None,
    stage: Annotated[str | None, option("NAME", "Only captures whose suspect was in this stage.")] = None,
    step: Annotated[
        str | None, option("N or A..B", "Only captures that recorded one of these steps, or were made because of one.")
    ] = None,
    since: Annotated[
        str | None, option("WHEN", "Only captures made since: 2h, 3d, 2026-11-20, or 2026-11-20T08:30:00Z. UTC.")
    ] = None,
    reproduced: Annotated[
        Literal["yes", "no", "partly"] | None,
        option("", "Only captures in which the fault was still there, was not, or partly."),
    ] = None,
    profiler: Annotated[Profiler | None, option("", "Only captures of this profiler.")] = None,
    host: Annotated[str | None, option("NAME", "Only captures on this host.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List captures, oldest first: those of a run, of a store, or of a catalogue that many jobs share."""
    wanted = CaptureQuery(
        job=job,
        run=run_id,
        rank=rank,
        stage=stage,
        profiler=profiler,
        host=host,
        reproduced=reproduced,
        steps=None if step is None else steps_of(step),
        since=None if since is None else since_of(since, datetime.now(timezone.utc)),
    )
    captures = captures_of(of)
    rows = captures.find(wanted)
    seen = [captures.seen(row) for row in rows]
    rows = _as_noted(rows, seen)
    conditions = [condition for _, condition in seen]
    say(*captures.damage(rows, conditions))
    if as_json:
        print_json(described(rows, seen, captures.run if of.store is None else None))
    elif rows:
        console = lists()
        console.print(captures_table(rows, conditions, console.width))
    else:
        tell(_none(captures, wanted))


def _as_noted(rows: Sequence[CaptureRow], seen: Sequence[StoredState]) -> list[CaptureRow]:
    """The rows of captures by their manifests, where these are here: what is noted later is not in the catalogue."""
    return [
        row if manifest is None else CaptureRow.of(manifest, row.store, row.reference)
        for row, (manifest, _) in zip(rows, seen, strict=True)
    ]


def _none(captures: CatalogueCaptures, wanted: CaptureQuery) -> str:
    if wanted != CaptureQuery() and (others := len(captures.find(CaptureQuery()))):
        return f"No such capture among the {others} in {captures.place}."
    if captures.store is not None and captures.store.ids():
        return f"No capture in {captures.place} can be used."
    why = f"; `sftriage decisions --run {place(captures.run.path)}` says why" if captures.run is not None else ""
    return f"No capture in {captures.place}{why}."


def traces_for_step(
    step: Annotated[int, argument("STEP", "A step of the job.", min=0)],
    *,
    of: CapturesChoice,
    job: JobOption = None,
    run_id: RunIdOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the captures of a step, or of the fault that it has, or nearest to it, and what was decided about it.

    A capture is of a step that it recorded, or that lies in the window that led to it; and of the fault of a step that
    lies between this fault's onset and the last window that names it. Where there is none, the decisions say why; they
    are kept where the run is, so of a store or catalogue only the captures are told.
    """
    from sftriage.runs.decisions import (
        decided_about,
        decisions_of,
        fault_at,
        faults_in,
        kept_no_longer,
        unlike,
        why_none,
    )

    captures = captures_of(of)
    rows = captures.find(CaptureQuery(job=job, run=run_id))
    rows = _as_noted(rows, [captures.seen(row) for row in rows])
    holding = [row for row in rows if row.distance_from(step) == 0]
    nearest = min(rows, key=lambda row: (row.distance_from(step), row.first_step), default=None)
    fault = None if holding else fault_at(step, rows, faults_in(captures.run))
    shown = holding or [one for one in (fault or nearest,) if one is not None]
    seen = [captures.seen(row) for row in shown]
    conditions = [condition for _, condition in seen]
    say(*captures.damage(shown, conditions))
    about = None if captures.run is None else decided_about(decisions_of(captures.run), step)
    gone = None if captures.run is None else kept_no_longer(captures.run, step)
    if as_json:
        why = None if about or captures.run is None else why_none(captures.run, step)
        its_run = captures.run if of.store is None else None
        values = {row.reference: value for row, value in zip(shown, described(shown, seen, its_run), strict=True)}
        near = [] if nearest is None else described([nearest], [captures.seen(nearest)], its_run)
        found = {
            "captures": list(values.values()) if holding else [],
            "fault": None if fault is None else values[fault.reference],
            "nearest": next(iter(values.values())) if holding else next(iter(near), None),
        }
        print_json({"step": step, **found, "decisions": about or [], "reason": why, "kept_no_longer": gone})
        return
    console = lists()
    if fault is not None:
        where = f"{fault.capture_id} (steps {fault.first_step} to {fault.last_step} of rank {fault.rank})"
        cause = f": {fault.why_slow.short}" if fault.why_slow is not None else ""
        tell(f"No capture of step {step}; see {where}: the fault of that step is captured there{cause}.")
    if holding or fault is not None:
        console.print(captures_table(shown, conditions, console.width))
    elif nearest is not None:
        where = f"{span(nearest.first_step, nearest.last_step)} of rank {nearest.rank}"
        tell(f"No capture of step {step}; the nearest is {nearest.capture_id}, {where}.")
    else:
        tell(f"No capture in {captures.place}.")
    if about:
        console.print(decisions_table(unlike(about)))
    elif captures.run is not None:
        why = why_none(captures.run, step)
        tell(f"No window that holds step {step} was decided: {why}.")
    if gone is not None:
        tell(f"What each rank took in step {step} is kept no longer. {gone}")


def show_trace(capture_id: CaptureArgument, *, of: CapturesChoice, as_json: JsonOption = False) -> None:
    """Show what triggered a capture, what it holds and what it cost."""
    captures = captures_of(of)
    its_store, reference = captures.one(capture_id)
    manifest, condition = its_store.look(reference)
    its_run = captures.run if of.store is None else None
    if as_json:
        beside = {"upload": upload_values(its_run, manifest.capture_id), "cause": cause_values(manifest)}
        print_json({**manifest.model_dump(mode="json"), **condition_values(condition), **beside})
        return
    upload = None if its_run is None else upload_of(its_run, manifest.capture_id)
    state = [] if condition.whole else [f"state       {condition.state}: {condition.problem}"]
    elsewhere = [] if upload is None else [f"upload      {upload_words(upload)}"]
    for line in [*manifest_lines(manifest), *state, *elsewhere]:
        write(line)


def show_schema() -> None:
    """Print the JSON Schema of a capture's manifest."""
    print_json(manifest_schema())


@dataclass(frozen=True, slots=True)
class Copying:
    """Which files of a capture are copied, and where to.

    Raises:
        UsageError: the options contradict one another, or a directory is meant that is not there.
    """

    out: Annotated[str, option("--out PATH", "File or directory to copy to; of several files, a directory.")] = "."
    artefact: Annotated[
        list[str] | None,
        option(
            "--artefact NAME",
            "Which file, rather than the main one; repeatable. stacks.folded: the sampled stacks, collapsed.",
        ),
    ] = None
    every: Annotated[bool, option("--all", "Every file of the capture.")] = False
    force: Annotated[bool, option("--force", "Overwrite a file that is there.")] = False

    def __post_init__(self) -> None:
        """Say so before anything is fetched."""
        if self.every and self.artefact:
            raise UsageError("--all is every artefact: say it, or --artefact")
        if self.out.endswith("/") and not Path(self.out).is_dir():
            raise UsageError(f"{self.out}: no such directory")

    def names(self, manifest: Manifest) -> list[str]:
        """Those of the files that are wanted."""
        all_of_them = [one.name for one in manifest.artefacts]
        return all_of_them if self.every else list(dict.fromkeys(self.artefact or all_of_them[:1]))


def get_trace(capture_id: CaptureArgument, *, of: CapturesChoice, how: Copying, as_json: JsonOption = False) -> None:
    """Copy a capture's trace out of the store, verified against its manifest."""
    its_store, reference = captures_of(of).one(capture_id)
    # What is the matter with one of its files is no reason to withhold the others.
    manifest, _ = its_store.look(reference)
    files = copied_out(its_store, reference, manifest, how)
    if as_json:
        print_json({**files[0], "files": files})
        return
    for file in files:
        write(file["path"])


def copied_out(its_store: Store, reference: str, manifest: Manifest, how: Copying) -> list[dict[str, Any]]:
    """Copy files of a capture out of its store, verified; where each is now, its size and its sum."""
    names = how.names(manifest)
    # (collapsed stacks are made of the sampled ones)
    chosen = [manifest.artefact(STACKS_NAME if name == FOLDED_NAME else name) for name in names]
    targets = _targets(manifest, names, Path(how.out))
    if not how.force:
        for target in targets:
            if target.exists():
                raise UsageError(f"{target} exists already")
    files = []
    for name, one, to in zip(names, chosen, targets, strict=True):
        fetch = _fetch_folded if name == FOLDED_NAME else _fetch
        path = fetch(its_store, reference, one, to, force=how.force)
        size_bytes, sha256 = one.size_bytes, one.sha256
        if name == FOLDED_NAME:
            size_bytes, sha256 = copy([path.read_bytes()], None)
        files.append({"path": str(path), "size_bytes": size_bytes, "sha256": sha256})
    return files


def _targets(manifest: Manifest, names: Sequence[str], out: Path) -> list[Path]:
    if len(names) > 1 and not out.is_dir():
        with refusing(f"{len(names)} files go into a directory; {out}"):
            out.mkdir()
    return [out / f"{manifest.capture_id}-{name}" if out.is_dir() else out for name in names]


def _fetch(store: Store, reference: str, artefact: Artefact, target: Path, *, force: bool) -> Path:
    with copying(artefact.name, artefact.size_bytes) as progress:
        return store.get(reference, artefact.name, target, force=force, progress=progress)


def _fetch_folded(store: Store, reference: str, stacks: Artefact, target: Path, *, force: bool) -> Path:
    from sftriage.reduce.samples import collapsed, read_samples

    target = destination_of(FOLDED_NAME, target, force=force)
    with tempfile.TemporaryDirectory() as folder:
        sampled = read_samples(_fetch(store, reference, stacks, Path(folder) / stacks.name, force=False))
    with refusing(f"{target} cannot be written"), replacing(target) as file:
        file.writelines(f"{line}\n".encode(errors="replace") for line in collapsed(sampled))
    return target
