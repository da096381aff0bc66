"""``sftriage traces``: find, show, keep, upload and remove captures; `opening` has ``get`` and ``open``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from typing import Annotated, Literal

import typer

from sftriage.commands.options import CapturesChoice, ClusterChoice, JsonOption, RunOption, argument, option, parsed
from sftriage.commands.output import (
    counting,
    ending_on_sigterm,
    lists,
    notices,
    print_json,
    say,
    table,
    tell,
    uploading,
    write,
)
from sftriage.errors import CatalogueError, SftriageError, StoreError, UsageError
from sftriage.model.captures import Profiler
from sftriage.policy import fields
from sftriage.reports.texts import captures_table, decisions_table, manifest_lines
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
from sftriage.runs.directory import find_run, read_info
from sftriage.runtime import catalogues
from sftriage.runtime.catalogues import CatalogueCaptures, own_catalogue, whole_store
from sftriage.traces.catalogue import CaptureQuery, CaptureRow, Catalogue
from sftriage.traces.manifest import manifest_schema
from sftriage.traces.remote import catalogue_url
from sftriage.traces.retention import RetentionLimits, outlook, remove
from sftriage.traces.store import LocalStore
from sftriage.words.decisions import caused
from sftriage.words.verdicts import counted, place, size, span


def complete_capture(context: typer.Context, incomplete: str) -> Iterable[str]:
    """The captures of the selected run, for completion in a shell."""
    try:
        if not any(context.params.get(name) for name in ("store", "catalogue", "cluster")):
            ids = LocalStore(find_run(context.params.get("run")).path).ids()
            return sorted(name for name in ids if name.startswith(incomplete))
    except (SftriageError, OSError):
        pass  # completion prints no errors
    return ()


_HELP = "Capture id, as `sftriage traces list` shows it, or its beginning."
CaptureArgument = Annotated[str, argument("CAPTURE", _HELP, autocompletion=complete_capture)]
AnyCaptureArgument = Annotated[str | None, argument("CAPTURE", _HELP, False, autocompletion=complete_capture)]
JobOption = Annotated[str | None, option("--job NAME", "Only captures of this job.")]
RunIdOption = Annotated[str | None, option("--run-id ID", "Only captures of the run of this id.")]


def captures_of(choice: CapturesChoice) -> CatalogueCaptures:
    """The captures that the options select; prints problems of their store or catalogue."""
    with counting("Reading manifests") as progress:
        captures = catalogues.captures_of(choice.run, choice.store, choice.catalogue, progress)
    say(*captures.problems)
    return captures


def list_traces(
    *,
    choice: CapturesChoice,
    cluster: ClusterChoice,
    job: JobOption = None,
    run_id: RunIdOption = None,
    rank: int | None = option("N", "Only captures of this rank.", min=0),
    stage: str | None = option("NAME", "Only captures whose suspect was in this stage."),
    step: str | None = option(
        "N or A..B", "Only captures that recorded one of these steps, or were made because of one."
    ),
    since: str | None = option("WHEN", "Only captures since: 2h, 3d, 2026-11-20, or 2026-11-20T08:30:00Z. UTC."),
    reproduced: Literal["yes", "no", "partly"] | None = option(
        "", "Only captures that reproduced the fault, did not, or did in part."
    ),
    profiler: Profiler | None = option("", "Only captures by this profiler."),
    host: str | None = option("NAME", "Only captures on this host."),
    as_json: JsonOption = False,
) -> None:
    """List captures, oldest first: those of a run, of a store, or of a catalogue that many jobs share.

    With --cluster, those of a job in a Kubernetes cluster, newest first, after the state of the job. If no capture is
    of --step, this names the nearest one.
    """
    elsewhere = {"run": choice.run, "store": choice.store, "catalogue": choice.catalogue}
    cluster.exclude(**elsewhere, run_id=run_id, since=since, host=host)
    query = CaptureQuery(
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
    if cluster.cluster:
        from sftriage.commands.cluster import list_captures

        list_captures(cluster, query, as_json=as_json)
        return
    captures = captures_of(choice)
    rows, states = _found(captures, query)
    conditions = [condition for _, condition in states]
    say(*captures.damage(rows, conditions))
    if as_json:
        print_json(described(rows, states, captures.run if choice.store is None else None))
    elif rows:
        lists().print(captures_table(rows, conditions, lists().width))
    else:
        tell(_why_empty(captures, query))


def _found(captures: CatalogueCaptures, query: CaptureQuery) -> tuple[list[CaptureRow], list[StoredState]]:
    """The matching captures with their states; rows by manifests that are here, as the catalogue lacks later notes."""
    rows = captures.find(query)
    states = [captures.state(row) for row in rows]
    rows = [
        row if manifest is None else CaptureRow.of(manifest, row.store, row.reference)
        for row, (manifest, _) in zip(rows, states, strict=True)
    ]
    return rows, states


def _why_empty(captures: CatalogueCaptures, query: CaptureQuery) -> str:
    if query != CaptureQuery() and (others := len(captures.find(CaptureQuery()))):
        return f"No matching capture among the {others} in {captures.place}."
    if captures.store is not None and captures.store.ids():
        return f"No capture in {captures.place} can be used."
    why = f"; `sftriage decisions --run {place(captures.run.path)}` says why" if captures.run is not None else ""
    return f"No capture in {captures.place}{why}."


def traces_for_step(
    step: Annotated[int, argument("STEP", "A step of the job.", min=0)],
    *,
    choice: CapturesChoice,
    job: JobOption = None,
    run_id: RunIdOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the captures of a step or of its fault, or the nearest capture, and the decisions about the step.

    A capture belongs to the steps that it recorded and to the window that led to it. A step has a fault from the
    fault's onset to the last window that names it. If there is no capture, the decisions show why; only a run has
    decisions, so for a store or a catalogue this prints captures only.
    """
    from sftriage.runs import decisions

    captures = captures_of(choice)
    run = captures.run
    rows, states = _found(captures, CaptureQuery(job=job, run=run_id))
    by_row = {row.reference: state for row, state in zip(rows, states, strict=True)}
    matching = [row for row in rows if row.distance_from(step) == 0]
    nearest = min(rows, key=lambda row: (row.distance_from(step), row.first_step), default=None)
    fault = None if matching else decisions.fault_at(step, rows, decisions.faults_in(run))
    shown = matching or [row for row in (fault or nearest,) if row is not None]
    conditions = [by_row[row.reference][1] for row in shown]
    say(*captures.damage(shown, conditions))
    about = [] if run is None else decisions.decided_about(decisions.decisions_of(run), step)
    why = None if run is None or about else decisions.why_none(run, step)
    removed = None if run is None else decisions.kept_no_longer(run, step)
    if as_json:
        own_run = run if choice.store is None else None
        captured, of_fault, closest = (
            described(few, [by_row[row.reference] for row in few], own_run)
            for few in (matching, [fault] if fault else [], matching[:1] or ([nearest] if nearest else []))
        )
        values = {"captures": captured, "fault": of_fault[0] if fault else None, "nearest": next(iter(closest), None)}
        print_json({"step": step, **values, "decisions": about, "reason": why, "kept_no_longer": removed})
        return
    if not rows:
        tell(f"No capture in {captures.place}.")
    elif not matching:
        where = f"{span(shown[0].first_step, shown[0].last_step)} of rank {shown[0].rank}"
        cause = f": {fault.why_slow.short}" if fault is not None and fault.why_slow is not None else ""
        found = f"{shown[0].capture_id} ({where}) shows its fault{cause}"
        tell(f"No capture of step {step}; {found if fault else f'the nearest is {shown[0].capture_id}, {where}'}.")
    if matching or fault is not None:
        lists().print(captures_table(shown, conditions, lists().width))
    if about:
        lists().print(decisions_table(decisions.unlike(about)))
    elif run is not None:
        tell(f"No decision about step {step}: {why}.")
    if removed is not None:
        tell(f"The durations of step {step} are no longer kept. {removed}")


def show_trace(capture_id: CaptureArgument, *, choice: CapturesChoice, as_json: JsonOption = False) -> None:
    """Show what triggered a capture, what it contains and what it cost."""
    captures = captures_of(choice)
    store, reference = captures.resolve(capture_id)
    manifest, condition = store.look(reference)
    upload = upload_of(captures.run if choice.store is None else None, manifest.capture_id)
    hang = None
    if manifest.of_hang:
        # (imported here: no other capture needs these)
        from msgspec import to_builtins

        from sftriage.reports.watch_lines import clean
        from sftriage.runs.hangs import HEADINGS, hang_rows, read_hang

        # (if it is damaged, the state says so)
        with suppress(SftriageError):
            hang = read_hang(store, manifest)
    if as_json:
        more = {"upload": upload_values(upload), "cause": cause_values(manifest)}
        more |= {"hang": None if hang is None else to_builtins(hang)} if manifest.of_hang else {}
        print_json({**manifest.model_dump(mode="json"), **condition_values(condition), **more})
        return
    state = [] if condition.whole else [f"state       {condition.state}: {condition.problem}"]
    elsewhere = [] if upload is None else [f"upload      {upload_words(upload)}"]
    if hang is not None:
        cause = manifest.cause
        write(*(() if cause is None else (caused(cause), cause.next_step)))
        lists().print(table(HEADINGS, (map(clean, row.cells) for row in hang_rows(hang))))
    # (the cause of a hang is above its table)
    facts = [line for line in manifest_lines(manifest) if hang is None or not line.startswith("found ")]
    write(*facts, *state, *elsewhere)


def show_schema() -> None:
    """Print the JSON Schema of a capture's manifest."""
    print_json(manifest_schema())


def pin_trace(capture_id: CaptureArgument, *, choice: CapturesChoice) -> None:
    """Keep a capture regardless of the policy's retention."""
    store, reference = captures_of(choice).resolve(capture_id)
    store.pin(reference)
    write(f"{reference} is pinned")


def unpin_trace(capture_id: CaptureArgument, *, choice: CapturesChoice) -> None:
    """Let the policy's retention remove a capture again."""
    store, reference = captures_of(choice).resolve(capture_id)
    store.pin(reference, pinned=False)
    write(f"{reference} is not pinned")


def prune_traces(
    *,
    choice: CapturesChoice,
    age: str | None = option("DURATION", "Remove captures older than this, such as 14d."),
    total: str | None = option("--bytes SIZE", "Remove the oldest captures beyond this total size, such as 50Gi."),
    damaged: bool = option("--damaged", "Remove captures whose trace or manifest is missing or altered."),
    dry_run: bool = option("--dry-run", "List what would be removed, and remove nothing."),
    as_json: JsonOption = False,
) -> None:
    """Remove captures, oldest first: trace, manifest and row in the catalogue.

    Pinned captures stay, and damaged ones unless --damaged is set. Prints which captures were skipped, and why.
    """
    max_age_s = None if age is None else parsed("--age", fields.seconds, age)
    max_bytes = None if total is None else parsed("--bytes", fields.size_bytes, total)
    if age is None and total is None and not damaged:
        raise UsageError("choose what to remove: --age, --bytes or --damaged")
    _, store = whole_store(choice.run, choice.store)
    found = outlook(store, RetentionLimits(max_age_s, max_bytes), time.time(), unfit=damaged)
    captures, problem = found.captures, None
    if not dry_run:
        if shared := catalogue_url(choice.catalogue):
            catalogue = Catalogue(shared, store)
            try:
                for capture in captures:
                    catalogue.drop(capture.capture_id)
            except CatalogueError as error:
                # (its next comparison with the store corrects it)
                say(f"{error}; update it with `sftriage traces reindex`")
        captures, problem = remove(store, captures)
    say(*(f"skipped: {name}: {why}" for name, why in found.left_alone.items()))
    if as_json:
        print_json({"removed": not dry_run, "captures": captures, "left_alone": _reasons(found.left_alone)})
    else:
        write(*(f"{row.capture_id}  {size(row.size_bytes) if row.size_bytes else 'damaged'}" for row in captures))
        if not captures and problem is None:
            notices().print("Nothing to remove.")
    if problem is not None:
        raise UsageError(problem)


def _reasons(captures: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"capture_id": name, "reason": reason} for name, reason in captures.items()]


def reindex_traces(*, choice: CapturesChoice, as_json: JsonOption = False) -> None:
    """Rebuild the catalogue of a run or store from its manifests, and report captures that cannot be used.

    In a shared catalogue, rows of other runs and stores stay as they are.
    """
    directory, store = whole_store(choice.run, choice.store)
    catalogue = Catalogue(catalogue_url(choice.catalogue) or own_catalogue(directory, store), store)
    with counting("Reading manifests") as progress:
        captures, problems = catalogue.reindex(progress)
    say(*problems)
    if as_json:
        print_json({"store": store.place, "catalogue": catalogue.name, "captures": captures, "problems": problems})
    else:
        unusable = f"; {len(problems)} cannot be used" if problems else ""
        tell(f"Indexed {counted(captures, 'capture')} of {store.place}{unusable}.")


TRIES = 3


def upload_traces(
    run: RunOption = None,
    store: str | None = option(
        "--store URL",
        "Destination: s3://, gs:// or az:// with bucket and prefix, or a directory. Credentials come from the "
        "environment. The run remembers it.",
        "the run's own",
    ),
    drop_local: bool = option("--drop-local", "Remove local traces once their copies are verified."),
    as_json: JsonOption = False,
) -> None:
    """Upload the captures of a run that are not in its store yet, each verified by reading it back.

    Intact copies are not sent again, those that were removed there are. Findings, pins and removals since the last
    upload are sent too.
    """
    from sftriage.runtime.copies import follow, uploader_of, what_is_left, with_store

    directory = find_run(run)
    info = with_store(directory, read_info(directory), store)
    uploader = uploader_of(directory, info, keep_local=not (drop_local or info.drop_local), tries=TRIES)
    uploader.release_all()
    uploader.start()
    # SIGTERM aborts uploads in progress: a bucket charges for the parts of unfinished ones.
    with ending_on_sigterm(), uploading() as show:
        try:
            progress = follow(uploader, show=show)
        finally:
            uploader.close(5.0)
    if as_json:
        values = {"left": _reasons(progress.left), "removals": _reasons(progress.removals), "done": progress.done}
        print_json({"store": info.store, "stored": progress.stored, **values})
    elif progress.stored:
        write(f"{progress.stored} of {progress.stored + len(progress.left)} captures are in {info.store}")
    elif progress.done:
        tell(f"No capture in {directory.path}.")
    if progress.taken:
        raise UsageError(f"{what_is_left(progress)}; see the progress of each with `sftriage traces show`")
    if not progress.done:
        raise StoreError(what_is_left(progress))
