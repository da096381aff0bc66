"""``sftriage traces``: find, show, fetch, open, keep and upload captures."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sftriage.base.files import refusing, replacing
from sftriage.commands.options import (
    CapturesChoice,
    ClusterCapture,
    ClusterChoice,
    JsonOption,
    RunOption,
    argument,
    meant,
    option,
)
from sftriage.commands.output import (
    copying,
    counting,
    ending_on_sigterm,
    lists,
    notices,
    print_json,
    say,
    tell,
    uploading,
    write,
)
from sftriage.commands.ui import serve_page
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
from sftriage.traces.manifest import Artefact, Manifest, manifest_schema
from sftriage.traces.objects import destination_of
from sftriage.traces.remote import catalogue_url
from sftriage.traces.retention import RetentionLimits, outlook, remove
from sftriage.traces.store import LocalStore, Store, StoreCondition
from sftriage.trainer.sampler import FOLDED_NAME
from sftriage.trainer.sampler import NAME as STACKS_NAME
from sftriage.words.verdicts import place, size, span

if TYPE_CHECKING:
    from sftriage.kube.listing import TraceRow
    from sftriage.reduce.opening import Program, StoredFile
    from sftriage.web.serving import Starter


def complete_capture(context: typer.Context, incomplete: str) -> Iterable[str]:
    """The captures of the selected run, for completion in a shell."""
    try:
        if not context.params.get("store") and not context.params.get("catalogue"):
            ids = LocalStore(find_run(context.params.get("run")).path).ids()
            return sorted(one for one in ids if one.startswith(incomplete))
    except (SftriageError, OSError):
        pass  # completion prints no errors
    return ()


_CAPTURE = "Capture id, as `sftriage traces list` shows it, or its beginning."
CaptureArgument = Annotated[str, argument("CAPTURE", _CAPTURE, autocompletion=complete_capture)]
JobOption = Annotated[str | None, option("--job NAME", "Only captures of this job.")]
RunIdOption = Annotated[str | None, option("--run-id ID", "Only captures of the run of this id.")]


def captures_of(meant: CapturesChoice) -> CatalogueCaptures:
    """The captures that the options select; prints problems of their store or catalogue."""
    with counting("Reading manifests") as progress:
        captures = catalogues.captures_of(meant.run, meant.store, meant.catalogue, progress)
    say(*captures.problems)
    return captures


def list_traces(
    *,
    of: CapturesChoice,
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
    cluster.exclude(run=of.run, store=of.store, catalogue=of.catalogue, run_id=run_id, since=since, host=host)
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
    if cluster.cluster:
        from sftriage.commands.cluster import list_captures

        list_captures(cluster, wanted, as_json=as_json)
        return
    captures = captures_of(of)
    rows, states = _found(captures, wanted)
    conditions = [condition for _, condition in states]
    say(*captures.damage(rows, conditions))
    if as_json:
        print_json(described(rows, states, captures.run if of.store is None else None))
    elif rows:
        console = lists()
        console.print(captures_table(rows, conditions, console.width))
    else:
        tell(_none(captures, wanted))


def _found(captures: CatalogueCaptures, wanted: CaptureQuery) -> tuple[list[CaptureRow], list[StoredState]]:
    """Rows by their manifests, if these are here (the catalogue lacks later notes), and their states."""
    rows = captures.find(wanted)
    states = [captures.state(row) for row in rows]
    rows = [
        row if manifest is None else CaptureRow.of(manifest, row.store, row.reference)
        for row, (manifest, _) in zip(rows, states, strict=True)
    ]
    return rows, states


def _none(captures: CatalogueCaptures, wanted: CaptureQuery) -> str:
    if wanted != CaptureQuery() and (others := len(captures.find(CaptureQuery()))):
        return f"No matching capture among the {others} in {captures.place}."
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
    """Find the captures of a step or of its fault, or the nearest capture, and the decisions about the step.

    A capture belongs to the steps that it recorded and to the window that led to it. A step has a fault from the
    fault's onset to the last window that names it. If there is no capture, the decisions show why; only a run has
    decisions, so for a store or a catalogue this prints captures only.
    """
    from sftriage.runs import decisions

    captures = captures_of(of)
    rows, seen = _found(captures, CaptureQuery(job=job, run=run_id))
    states = {row.reference: state for row, state in zip(rows, seen, strict=True)}
    holding = [row for row in rows if row.distance_from(step) == 0]
    nearest = min(rows, key=lambda row: (row.distance_from(step), row.first_step), default=None)
    fault = None if holding else decisions.fault_at(step, rows, decisions.faults_in(captures.run))
    shown = holding or [one for one in (fault or nearest,) if one is not None]
    conditions = [states[row.reference][1] for row in shown]
    say(*captures.damage(shown, conditions))
    about, gone, why = [], None, None
    if captures.run is not None:
        about = decisions.decided_about(decisions.decisions_of(captures.run), step)
        gone = decisions.kept_no_longer(captures.run, step)
        why = None if about else decisions.why_none(captures.run, step)
    if as_json:
        its_run = captures.run if of.store is None else None
        near = holding[:1] or [row for row in (nearest,) if row is not None]
        of_holding, of_fault, of_nearest = (
            described(few, [states[row.reference] for row in few], its_run)
            for few in (holding, [fault] if fault else [], near)
        )
        found = {"captures": of_holding, "fault": next(iter(of_fault), None), "nearest": next(iter(of_nearest), None)}
        print_json({"step": step, **found, "decisions": about, "reason": why, "kept_no_longer": gone})
        return
    _print_of_step(step, shown, conditions, captures, holding=bool(holding), fault=fault)
    if about:
        lists().print(decisions_table(decisions.unlike(about)))
    elif captures.run is not None:
        tell(f"No decision about step {step}: {why}.")
    if gone is not None:
        tell(f"The durations of step {step} are no longer kept. {gone}")


def _print_of_step(
    step: int,
    shown: Sequence[CaptureRow],
    conditions: Sequence[StoreCondition | None],
    captures: CatalogueCaptures,
    *,
    holding: bool,
    fault: CaptureRow | None,
) -> None:
    console = lists()
    if fault is not None:
        where = f"{fault.capture_id} (steps {fault.first_step} to {fault.last_step} of rank {fault.rank})"
        cause = f": {fault.why_slow.short}" if fault.why_slow is not None else ""
        tell(f"No capture of step {step}; {where} shows its fault{cause}.")
    if holding or fault is not None:
        console.print(captures_table(shown, conditions, console.width))
    elif shown:
        where = f"{span(shown[0].first_step, shown[0].last_step)} of rank {shown[0].rank}"
        tell(f"No capture of step {step}; the nearest is {shown[0].capture_id}, {where}.")
    else:
        tell(f"No capture in {captures.place}.")


def show_trace(capture_id: CaptureArgument, *, of: CapturesChoice, as_json: JsonOption = False) -> None:
    """Show what triggered a capture, what it contains and what it cost."""
    captures = captures_of(of)
    its_store, reference = captures.one(capture_id)
    manifest, condition = its_store.look(reference)
    upload = upload_of(captures.run if of.store is None else None, manifest.capture_id)
    if as_json:
        beside = {"upload": upload_values(upload), "cause": cause_values(manifest)}
        print_json({**manifest.model_dump(mode="json"), **condition_values(condition), **beside})
        return
    state = [] if condition.whole else [f"state       {condition.state}: {condition.problem}"]
    elsewhere = [] if upload is None else [f"upload      {upload_words(upload)}"]
    write(*manifest_lines(manifest), *state, *elsewhere)


def show_schema() -> None:
    """Print the JSON Schema of a capture's manifest."""
    print_json(manifest_schema())


@dataclass(frozen=True, slots=True)
class Copying:
    """Which files of a capture to copy, and where to."""

    out: str = option("--out PATH", "File or directory to copy to; for several files, a directory.", default=".")
    artefact: list[str] | None = option(
        "--artefact NAME",
        "File to copy instead of the main one. Repeatable. stacks.folded: the sampled stacks, collapsed.",
    )
    every: bool = option("--all", "Copy every file of the capture.")
    force: bool = option("--force", "Overwrite an existing file.")

    def __post_init__(self) -> None:
        if self.every and self.artefact:
            raise UsageError("give either --all or --artefact")
        if self.out.endswith("/") and not Path(self.out).is_dir():
            raise UsageError(f"{self.out}: no such directory")


def _chosen(capture_id: str | None, of: CapturesChoice, cluster: ClusterCapture) -> tuple[Store, str, TraceRow | None]:
    """The store and reference of the selected capture; in a cluster also the row of its TraceCapture."""
    cluster.exclude(run=of.run, catalogue=of.catalogue)
    if cluster.cluster:
        if (capture_id is None) == (cluster.job is None):
            raise UsageError("give either a capture or --job")
        from sftriage.commands.cluster import stored_capture

        return stored_capture(capture_id, cluster, of.store)
    if capture_id is None:
        raise UsageError("give a capture; list them with `sftriage traces list`")
    return *captures_of(of).one(capture_id), None


def get_trace(
    capture_id: str | None = argument("CAPTURE", _CAPTURE, False, autocompletion=complete_capture),
    *,
    of: CapturesChoice,
    cluster: ClusterCapture,
    how: Copying,
    as_json: JsonOption = False,
) -> None:
    """Copy a capture's trace out of the store, verified against its manifest.

    With --cluster, the store is the one that the TraceCapture names, or --store, if this machine reaches it by another
    URL; the files must also match the TraceCapture.
    """
    its_store, reference, row = _chosen(capture_id, of, cluster)
    # A damaged file is no reason to withhold the others.
    manifest, _ = its_store.look(reference)
    files = copied_out(its_store, reference, manifest, how)
    if as_json:
        print_json({**files[0], "files": files, **({} if row is None else {"capture": row})})
        return
    write(*(file["path"] for file in files))


def copied_out(its_store: Store, reference: str, manifest: Manifest, how: Copying) -> list[dict[str, Any]]:
    """Copy files of a capture out of its store, verified; return each path, size and checksum."""
    names = [file.name for file in manifest.artefacts]
    if not how.every:
        names = list(dict.fromkeys(how.artefact or names[:1]))
    # (collapsed stacks are made from the sampled ones)
    chosen = [manifest.artefact(STACKS_NAME if name == FOLDED_NAME else name) for name in names]
    out = Path(how.out)
    if len(names) > 1 and not out.is_dir():
        with refusing(f"{len(names)} files need a directory; cannot create {out}"):
            out.mkdir()
    targets = [out / f"{manifest.capture_id}-{name}" if out.is_dir() else out for name in names]
    if not how.force and (there := [target for target in targets if target.exists()]):
        raise UsageError(f"{there[0]} exists already; --force overwrites it")
    files = []
    for name, one, to in zip(names, chosen, targets, strict=True):
        fetch = _fetch_folded if name == FOLDED_NAME else _fetch
        path = fetch(its_store, reference, one, to, force=how.force)
        size_bytes, sha256 = one.size_bytes, one.sha256
        if name == FOLDED_NAME:
            size_bytes, sha256 = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
        files.append({"path": str(path), "size_bytes": size_bytes, "sha256": sha256})
    return files


def _fetch(store: Store, reference: str, artefact: Artefact, target: Path, *, force: bool) -> Path:
    with copying(artefact.name, artefact.size_bytes) as progress:
        return store.get(reference, artefact.name, target, force=force, progress=progress)


def _fetch_folded(store: Store, reference: str, stacks: Artefact, target: Path, *, force: bool) -> Path:
    from sftriage.reduce.samples import collapsed, read_samples

    target = destination_of(FOLDED_NAME, target, force=force)
    with tempfile.TemporaryDirectory() as folder:
        sampled = read_samples(_fetch(store, reference, stacks, Path(folder) / stacks.name, force=False))
    with refusing(f"cannot write {target}"), replacing(target) as file:
        file.writelines(f"{line}\n".encode(errors="replace") for line in collapsed(sampled))
    return target


PATIENCE_S = 600.0
GRACE_S = 30
"""How long receiving the last bytes of a file may take."""


@dataclass(frozen=True, slots=True)
class Showing:
    """How to show a capture."""

    artefact: str | None = option("--artefact NAME", "File to open.", "the trace itself")
    browser: bool = option("--browser/--no-browser", "Start a browser, or print the link.", default=True)
    offline: bool = option("--offline", "Open sftriage's own page instead, which contacts no other host.")
    port: int | None = option("--port PORT", "Port to serve on.", "9001", min=1, max=65535)
    out: Path | None = option("--out PATH", "Also save the trace to this file or directory.", False)
    wait: float = option("--wait SECONDS", "How long to serve the file.", min=1.0, default=PATIENCE_S)
    as_json: bool = option("--json", "Print one JSON object with links and paths.")

    def __post_init__(self) -> None:
        if self.offline and self.artefact is not None:
            raise UsageError("--offline shows all files of the capture; leave out --artefact")


def open_trace(
    capture_id: str | None = argument("CAPTURE", _CAPTURE, False, autocompletion=complete_capture),
    *,
    of: CapturesChoice,
    cluster: ClusterCapture,
    how: Showing,
) -> None:
    """Open a capture's trace in Perfetto's viewer, which fetches it from this machine; nothing is uploaded.

    The verified file is served only on 127.0.0.1, at a secret address, until the viewer has fetched it. For a file
    that Perfetto cannot show, this prints its text (stacks) or the program that opens it (an Nsight Systems report).
    """
    from sftriage.reduce.opening import StoredFile, program_for
    from sftriage.web.serving import browser_starter

    store, reference, _ = _chosen(capture_id, of, cluster)
    start = browser_starter(how.browser, say)
    if how.offline:
        _show_page(store, reference, how, start)
        return
    manifest, _ = store.look(reference)
    wanted = manifest.artefacts[0] if how.artefact is None else manifest.artefact(how.artefact)
    program = program_for(wanted.name, manifest.capture.profiler)
    trace = StoredFile(store, reference, manifest, wanted, how.out, copying)
    if program == "perfetto":
        _hand_over(trace, how, start)
    elif program == "text":
        _print_text(trace, how.as_json)
    else:
        _name_program(trace, program, how.as_json)


def _show_page(store: Store, reference: str, how: Showing, start: Starter) -> None:
    from sftriage.web.serving import HOST
    from sftriage.web.store_page import capture_page

    # A run's own captures are not copied: nothing is left behind.
    ending = contextlib.nullcontext() if isinstance(store, LocalStore) else ending_on_sigterm()
    stopping = threading.Event()
    with ending, capture_page(store, reference, how.out, stopping, copying) as (app, where, name, trace):

        def about(link: str) -> dict[str, str]:
            return {"file_url": f"{link}/files/{name}", "path": str(trace)}

        serve_page(app, stopping, HOST, how.port or 0, about, as_json=how.as_json, where=where, start=start)


def _hand_over(trace: StoredFile, how: Showing, start: Starter) -> None:
    from sftriage.reduce.opening import for_viewer
    from sftriage.web import serving

    port, wait_s = how.port or serving.VIEWER_PORT, how.wait
    started = how.browser and serving.has_browser(os.environ, sys.platform)
    try:
        with ending_on_sigterm(), serving.listen_for_viewer(port) as listener, for_viewer(trace) as (file, shown, spot):
            served = serving.ServedTrace(shown, trace.name, port, "" if spot is None else spot.parameters)
            with serving.BackgroundServer(served.app(), listener, grace_s=GRACE_S):
                if how.as_json:
                    path = str(trace.here or file)
                    print_json({"url": served.link, "file_url": served.url, "path": path, "pid": os.getpid()})
                    sys.stdout.flush()
                else:
                    write(served.link)
                say(f"served to this machine only, until it is fetched, for at most {wait_s:.0f} s (Ctrl-C to stop)")
                if port != serving.VIEWER_PORT:
                    say(
                        f"{serving.VIEWER} can connect only to port {serving.VIEWER_PORT} of this machine; "
                        f"on port {port} only other programs can fetch the file"
                    )
                start(served.link, port)
                if not served.wait(wait_s, say, started=started, away=serving.unreachable):
                    say(f"{trace.artefact.name} was not fetched within {wait_s:.0f} s")
                    raise typer.Exit(1)
    except KeyboardInterrupt:
        return
    say("fetched")


def _print_text(trace: StoredFile, as_json: bool) -> None:
    with trace.verified() as file:
        text = file.read_text(encoding="utf-8", errors="replace")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if as_json:
        print_json({"path": None if trace.here is None else str(trace.here), "opens_with": "text", "content": document})
    elif document is not None:
        write(json.dumps(document, indent=2))
    else:
        from sftriage.reports.watch_lines import clean

        write(*map(clean, text.splitlines()))


def _name_program(trace: StoredFile, program: Program, as_json: bool) -> None:
    if trace.out is None:
        here = trace.here
    else:
        with trace.verified() as here:
            pass
    if as_json:
        print_json({"path": None if here is None else str(here), "opens_with": None if program == "none" else program})
        return
    if here is None:
        where = "" if isinstance(trace.store, LocalStore) else f" --store {trace.store.place}"
        say(f"fetch it first: sftriage traces get {trace.reference} --artefact {trace.artefact.name}{where}")
    file = trace.name if here is None else str(here)
    if program == "none":
        say("no known program shows this file; open a pickle only if you trust the job")
        write(file)
    else:
        write(f"{program} {file}")


def pin_trace(capture_id: CaptureArgument, *, of: CapturesChoice) -> None:
    """Keep a capture regardless of the policy's retention."""
    its_store, reference = captures_of(of).one(capture_id)
    its_store.pin(reference)
    write(f"{reference} is pinned")


def unpin_trace(capture_id: CaptureArgument, *, of: CapturesChoice) -> None:
    """Let the policy's retention remove a capture again."""
    its_store, reference = captures_of(of).one(capture_id)
    its_store.pin(reference, pinned=False)
    write(f"{reference} is not pinned")


def prune_traces(
    *,
    of: CapturesChoice,
    age: str | None = option("DURATION", "Remove captures older than this, such as 14d."),
    total: str | None = option("--bytes SIZE", "Remove the oldest captures beyond this total size, such as 50Gi."),
    damaged: bool = option("--damaged", "Remove captures whose trace or manifest is missing or altered."),
    dry_run: bool = option("--dry-run", "List what would be removed, and remove nothing."),
    as_json: JsonOption = False,
) -> None:
    """Remove captures, oldest first: trace, manifest and row in the catalogue.

    Pinned captures stay, and damaged ones unless --damaged is set. Prints which captures were skipped, and why.
    """
    age_s = None if age is None else meant("--age", fields.seconds, age)
    retention = RetentionLimits(age_s, None if total is None else meant("--bytes", fields.size_bytes, total))
    if age is None and total is None and not damaged:
        raise UsageError("choose what to remove: --age, --bytes or --damaged")
    _, its_store = whole_store(of.run, of.store)
    found = outlook(its_store, retention, time.time(), unfit=damaged)
    captures, problem = found.captures, None
    if not dry_run:
        if shared := catalogue_url(of.catalogue):
            known = Catalogue(shared, its_store)
            try:
                for one in captures:
                    known.drop(one.capture_id)
            except CatalogueError as error:
                # (an unreachable catalogue is corrected when it is next compared with the store)
                say(f"{error}; update it with `sftriage traces reindex`")
        captures, problem = remove(its_store, captures)
    say(*(f"skipped: {name}: {why}" for name, why in found.left_alone.items()))
    if as_json:
        left_alone = [{"capture_id": name, "reason": why} for name, why in found.left_alone.items()]
        print_json({"removed": not dry_run, "captures": captures, "left_alone": left_alone})
    else:
        write(*(f"{one.capture_id}  {size(one.size_bytes) if one.size_bytes else 'damaged'}" for one in captures))
        if not captures and problem is None:
            notices().print("Nothing to remove.")
    if problem is not None:
        raise UsageError(problem)


def reindex_traces(*, of: CapturesChoice, as_json: JsonOption = False) -> None:
    """Rebuild the catalogue of a run or store from its manifests, and report captures that cannot be used.

    In a shared catalogue, rows of other runs and stores stay as they are.
    """
    directory, meant = whole_store(of.run, of.store)
    built = Catalogue(catalogue_url(of.catalogue) or own_catalogue(directory, meant), meant)
    with counting("Reading manifests") as progress:
        number, problems = built.reindex(progress)
    say(*problems)
    if as_json:
        print_json({"store": meant.place, "catalogue": built.name, "captures": number, "problems": problems})
    else:
        captures = "1 capture" if number == 1 else f"{number} captures"
        odd = f"; {len(problems)} cannot be used" if problems else ""
        tell(f"Indexed {captures} of {meant.place}{odd}.")


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

    Intact copies are not sent again. Findings, pins and removals since the last upload are sent too.
    """
    from sftriage.runtime.copies import follow, uploader_of, what_is_left, with_store

    directory = find_run(run)
    info = with_store(directory, read_info(directory), store)
    uploader = uploader_of(directory, info, keep_local=not (drop_local or info.drop_local), tries=TRIES)
    uploader.release_all()
    uploader.start()
    # On SIGTERM it aborts uploads in progress: a bucket charges for parts that are not aborted.
    with ending_on_sigterm(), uploading() as show:
        try:
            standing = follow(uploader, show=show)
        finally:
            uploader.close(5.0)
    if as_json:
        left = [{"capture_id": name, "reason": reason} for name, reason in standing.left.items()]
        removals = [{"capture_id": name, "reason": reason} for name, reason in standing.removals.items()]
        about = {"store": info.store, "stored": standing.stored, "left": left, "removals": removals}
        print_json({**about, "done": standing.done})
    elif standing.stored:
        write(f"{standing.stored} of {standing.stored + len(standing.left)} captures are in {info.store}")
    elif standing.done:
        tell(f"No capture in {directory.path}.")
    if standing.taken:
        raise UsageError(f"{what_is_left(standing)}; see the progress of each with `sftriage traces show`")
    if not standing.done:
        raise StoreError(what_is_left(standing))
