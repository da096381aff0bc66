"""``sftriage kube status``, ``traces``, ``get``, ``open``: which job is slow, at which step, and its trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Column, Table

from sftriage.commands.kube_options import (
    ContextOption,
    EverywhereOption,
    NamespaceOption,
    connected,
    within,
)
from sftriage.commands.opening import Showing, shown_in_program
from sftriage.commands.options import JsonOption, argument, option
from sftriage.commands.output import lists, print_json, say, tell, write
from sftriage.commands.traces import Copying, copied_out
from sftriage.errors import IntegrityError, UsageError
from sftriage.kube.client import NOT_FOUND, AnsweredError, ClusterObjects
from sftriage.kube.listing import (
    Body,
    JobRow,
    TraceRow,
    best,
    is_of,
    job_row,
    of_step,
    stored_of,
    trace_row,
)
from sftriage.kube.objects import CAPTURES, REPORTS, StoredTrace
from sftriage.reports.watch_lines import clean
from sftriage.traces.manifest import Manifest
from sftriage.traces.remote import RemoteStore, checked_url
from sftriage.words.amounts import span

JobArgument = Annotated[
    str, argument("JOB", "Name of the job: that of the TrainJob, JobSet, PyTorchJob, Job and so on.")
]
CaptureArgument = Annotated[
    str | None, argument("CAPTURE", "Name of a TraceCapture, as `sftriage kube traces` shows it.", False)
]
JobOption = Annotated[str | None, option("--job JOB", "The trace of this job that tells most, rather than CAPTURE.")]
StepOption = Annotated[int | None, option("--step N", "Of captures of this step, or made because of it.", min=0)]
RankOption = Annotated[int | None, option("--rank N", "Of captures of this rank.", min=0)]
SeenFromHereOption = Annotated[
    str | None,
    option(
        "--store URL",
        "The store as it is reached from here, where that is not as the cluster names it. Credentials come from "
        "the environment.",
        "as the capture says",
    ),
]


def status(
    job: Annotated[str | None, argument("JOB", "Only this job.", False)] = None,
    namespace: NamespaceOption = None,
    everywhere: EverywhereOption = False,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the jobs of a cluster that sftriage watches: how each stands, who is slow, and what that has cost.

    The cluster is the one that kubectl would ask, by KUBECONFIG or ~/.kube/config.
    """
    objects, namespace = connected(namespace, context, everywhere=everywhere)
    bodies = objects.list(REPORTS, namespace or None)
    rows = [job_row(body) for body in bodies if job is None or is_of(body, job)]
    if as_json:
        print_json(rows)
    elif rows:
        lists().print(_jobs_table(rows))
    else:
        say(f"no report on {'any job' if job is None else f'job {job}'} {within(namespace)}: `sftriage kube doctor`")
    if job is not None and not rows:
        raise typer.Exit(1)


def _jobs_table(rows: Sequence[JobRow]) -> Table:
    table = Table(
        "namespace", "job", "health", "suspect", *map(_number, ("since step", "lost s", "captures")), "summary"
    )
    for row in rows:
        health = (row.health or "not known") + (", not watched" if row.watched is False else "")
        since = "" if row.since_step is None else str(row.since_step)
        lost = "" if row.lost_s is None else f"{row.lost_s:.0f}"
        cells = (row.namespace, row.job, health, row.suspect, since, lost, str(row.captures), row.summary)
        table.add_row(*map(clean, cells))
    return table


def _number(title: str) -> Column:
    return Column(title, justify="right")


def traces(
    job: JobArgument,
    step: Annotated[int | None, option("N", "Only captures of this step, or made because of it.", min=0)] = None,
    rank: Annotated[int | None, option("N", "Only captures of this rank.", min=0)] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say which steps of a job were slow, where, and which traces there are of them.

    The first line is how the job stands; then its captures follow, the newest first. Where none is of the step that
    is asked for, the nearest is named.
    """
    objects, namespace = connected(namespace, context)
    reports = [job_row(body) for body in objects.list(REPORTS, namespace) if is_of(body, job)]
    bodies = [body for body in objects.list(CAPTURES, namespace) if is_of(body, job)]
    rows = sorted(map(trace_row, bodies), key=lambda row: (row.created, row.name), reverse=True)
    rows = [row for row in rows if rank in (None, row.rank)]
    shown, exactly = (rows, True) if step is None else of_step(rows, step)
    if as_json:
        print_json({"reports": reports, "captures": shown if exactly else [], "nearest": [] if exactly else shown})
        return
    for report in reports:
        since = "" if report.since_step is None else f", since step {report.since_step}"
        line = f"{report.job}: {report.suspect}{since}. {report.summary}" if report.suspect else report.summary
        write(clean(line))
    if not exactly:
        nearest = f"; the nearest is {_where(shown[0])}" if shown else ""
        tell(f"No capture of step {step}{nearest}.")
        return
    if not shown:
        say(
            f"no capture of job {job} {within(namespace)}"
            + ("" if reports else ", and no report: `sftriage kube doctor`")
        )
        return
    lists().print(_traces_table(shown))
    if any(row.store for row in shown):
        tell(f"`sftriage kube get NAME -n {namespace}` fetches one, and `sftriage kube open` shows it.")


def _where(row: TraceRow) -> str:
    of = row.steps or row.because_of
    return f"{row.name}, rank {row.rank}" + ("" if of is None else f", {span(*of)}")


def _traces_table(rows: Sequence[TraceRow]) -> Table:
    texts = ("stage", "because of", "steps", "profiler", "state", "reproduced", "cause")
    table = Table("name", _number("rank"), *texts)
    for row in rows:
        because, steps = ("" if one is None else f"{one[0]} to {one[1]}" for one in (row.because_of, row.steps))
        cells = (row.stage, because, steps, row.profiler, row.state, row.reproduced, row.cause)
        table.add_row(*map(clean, (row.name, str(row.rank), *cells)))
    return table


def get(
    capture: CaptureArgument = None,
    job: JobOption = None,
    step: StepOption = None,
    rank: RankOption = None,
    *,
    how: Copying,
    store: SeenFromHereOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch the trace of a TraceCapture to this machine, out of its store, verified.

    With --job, and --step or --rank where they matter, the trace that tells most: one in which the fault is, and of
    those the newest. Its sums are held against its manifest, and against what the object says.
    """
    objects, namespace = connected(namespace, context)
    body = _chosen(objects, namespace, capture, job, step, rank)
    its_store, stored = _opened(body, store)
    manifest, _ = its_store.look(stored.reference)
    _agree(body, stored, manifest)
    row, files = trace_row(body), copied_out(its_store, stored.reference, manifest, how)
    if as_json:
        print_json({**files[0], "files": files, "capture": row})
        return
    if capture is None:
        because = "" if row.because_of is None else f", because of {span(*row.because_of)}"
        say(f"{_where(row)}{f' in {row.stage}' if row.stage else ''}{because}")
    for file in files:
        write(file["path"])


def open_trace(
    capture: CaptureArgument = None,
    job: JobOption = None,
    step: StepOption = None,
    rank: RankOption = None,
    *,
    how: Showing,
    store: SeenFromHereOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Open the trace of a TraceCapture in Perfetto's viewer, which fetches it from this machine; nothing is uploaded.

    It is fetched out of its store and verified, as by `sftriage kube get`, and shown as by `sftriage traces open`.
    """
    objects, namespace = connected(namespace, context)
    body = _chosen(objects, namespace, capture, job, step, rank)
    its_store, stored = _opened(body, store)
    manifest, _ = its_store.look(stored.reference)
    _agree(body, stored, manifest)
    shown_in_program(its_store, stored.reference, how)


def _chosen(
    objects: ClusterObjects, namespace: str, capture: str | None, job: str | None, step: int | None, rank: int | None
) -> Body:
    if (capture is None) == (job is None):
        raise UsageError("name a capture, or --job, and not both")
    if job is not None:
        return best([one for one in objects.list(CAPTURES, namespace) if is_of(one, job)], step, rank)
    if step is not None or rank is not None:
        raise UsageError("--step and --rank choose among the captures of --job")
    try:
        return objects.read(CAPTURES, namespace, capture or "")
    except AnsweredError as error:
        if error.status != NOT_FOUND:
            raise
        raise UsageError(f"no capture {capture} {within(namespace)}: `sftriage kube traces JOB` lists them") from None


def _opened(body: Body, store: str | None) -> tuple[RemoteStore, StoredTrace]:
    stored = stored_of(body)
    url = checked_url(store or stored.store)
    try:
        return RemoteStore.open(url), stored
    except UsageError as error:
        if store is None and url.startswith("file:"):
            raise UsageError(
                f"{error}: it is one of the cluster; --store URL says how it is reached from here"
            ) from None
        raise


def _agree(body: Body, stored: StoredTrace, manifest: Manifest) -> None:
    said = {one.name: (one.size_bytes, one.sha256) for one in stored.artefacts}
    there = {one.name: (one.size_bytes, one.sha256) for one in manifest.artefacts}
    if said and said != there:
        name = body["metadata"]["name"]
        raise IntegrityError(f"the files of {name} in {stored.store} are others than the cluster says")
