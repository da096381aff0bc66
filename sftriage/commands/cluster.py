"""Captures of jobs in a Kubernetes cluster (TraceCaptures), for ``sftriage traces list|get|open --cluster``.

Reads the API server that kubectl would, and opens the stores that the captures name.
"""

from __future__ import annotations

from collections.abc import Iterable

from sftriage.commands.options import ClusterCapture, ClusterChoice
from sftriage.commands.output import lists, print_json, say, table, tell, write
from sftriage.errors import IntegrityError, UsageError
from sftriage.kube import listing
from sftriage.kube.client import NOT_FOUND, AnsweredError, ClusterObjects
from sftriage.kube.listing import TraceRow
from sftriage.kube.objects import CAPTURES, REPORTS, Body
from sftriage.reports.watch_lines import clean
from sftriage.traces.catalogue import CaptureQuery
from sftriage.traces.remote import RemoteStore, checked_url
from sftriage.words.verdicts import span


def connected(namespace: str | None, context: str | None, *, everywhere: bool = False) -> tuple[ClusterObjects, str]:
    """The cluster of a kubeconfig's context, and the namespace: "" for all of them."""
    if everywhere and namespace is not None:
        raise UsageError("give either --namespace or --all-namespaces")
    objects = ClusterObjects.connect(context)
    return objects, "" if everywhere else namespace or objects.namespace


def within(namespace: str) -> str:
    """The namespace in a sentence."""
    return f"in namespace {namespace}" if namespace else "in any namespace"


def list_captures(cluster: ClusterChoice, query: CaptureQuery, *, as_json: bool) -> None:
    """Print a job's state and its captures, newest first; if none is of the wanted step, name the nearest one."""
    objects, namespace = connected(cluster.namespace, cluster.context)
    job, (step, last_step) = query.job, query.steps or (None, None)
    if step != last_step:
        raise UsageError(f"--step {step}..{last_step}: with --cluster, give one step")
    bodies = [body for body in objects.list(CAPTURES, namespace) if job is None or listing.is_of(body, job)]
    reports = [] if job is None else objects.list(REPORTS, namespace)
    reports = [listing.job_row(body) for body in reports if listing.is_of(body, job or "")]
    filters = {name: getattr(query, name) for name in ("rank", "stage", "profiler", "reproduced")}
    rows = sorted(map(listing.trace_row, bodies), key=lambda row: (row.created, row.name), reverse=True)
    rows = [row for row in rows if all(value in (None, getattr(row, name)) for name, value in filters.items())]
    rows, exactly = (rows, True) if step is None else listing.of_step(rows, step)
    if as_json:
        print_json({"reports": reports, "captures": rows if exactly else [], "nearest": [] if exactly else rows})
        return
    for report in reports:
        since = "" if report["since_step"] is None else f", since step {report['since_step']}"
        suspect = f"{report['job']}: {report['suspect']}{since}. " if report["suspect"] else ""
        write(clean(suspect + report["summary"]))
    if not exactly:
        nearest = f"; the nearest is {_place(rows[0])}" if rows else ""
        tell(f"No capture of step {step}{nearest}.")
    elif rows:
        steps = ("because of", "steps")
        titles = ("name", "job", "rank", "node", "stage", *steps, "profiler", "state", "reproduced", "cause")
        lists().print(table(titles, map(_cells, rows), ("rank",)))
        if any(row.store for row in rows):
            tell(f"Fetch a trace with `sftriage traces get NAME --cluster -n {namespace}`; `traces open` shows it.")
    else:
        doctor = "" if reports else "; try `sftriage kube doctor`"
        say(f"no capture of {'any job' if job is None else f'job {job}'} {within(namespace)}{doctor}")


def _place(row: TraceRow) -> str:
    steps = row.steps or row.because_of
    return f"{row.name}, rank {row.rank}" + ("" if steps is None else f", {span(*steps)}")


def _cells(row: TraceRow) -> Iterable[str]:
    because, steps = ("" if pair is None else f"{pair[0]} to {pair[1]}" for pair in (row.because_of, row.steps))
    cells = (row.name, row.job, str(row.rank), row.node, row.stage, because, steps)
    return map(clean, (*cells, row.profiler, row.state, row.reproduced, row.cause))


def stored_capture(capture: str | None, cluster: ClusterCapture, url: str | None) -> tuple[RemoteStore, str, TraceRow]:
    """The store that has a capture's trace (at ``url`` from this machine), its reference there, and its row.

    Raises UsageError if there is no such capture, or its trace is not in a store that can be reached, and
    IntegrityError if the manifest in the store differs from the TraceCapture.
    """
    objects, namespace = connected(cluster.namespace, cluster.context)
    body = _chosen(objects, namespace, capture, cluster)
    row, stored = listing.trace_row(body), listing.stored_of(body)
    checked = checked_url(url or stored.store)
    try:
        store = RemoteStore.open(checked)
    except UsageError as error:
        if url is None and checked.startswith("file:"):
            raise UsageError(
                f"{error}: the store is in the cluster; give its URL from this machine with --store"
            ) from None
        raise
    manifest, _ = store.look(stored.reference)
    in_cluster, in_store = (
        {file.name: (file.size_bytes, file.sha256) for file in files}
        for files in (stored.artefacts, manifest.artefacts)
    )
    if in_cluster and in_cluster != in_store:
        raise IntegrityError(f"the files of {row.name} in {stored.store} differ from those of the TraceCapture")
    if capture is None:
        because = "" if row.because_of is None else f", because of {span(*row.because_of)}"
        say(f"{_place(row)}{f' in {row.stage}' if row.stage else ''}{because}")
    return store, stored.reference, row


def _chosen(objects: ClusterObjects, namespace: str, capture: str | None, cluster: ClusterCapture) -> Body:
    if cluster.job is not None:
        bodies = [body for body in objects.list(CAPTURES, namespace) if listing.is_of(body, cluster.job)]
        return listing.best(bodies, cluster.step, cluster.rank)
    try:
        return objects.read(CAPTURES, namespace, capture or "")
    except AnsweredError as error:
        if error.status != NOT_FOUND:
            raise
        missing = f"no capture {capture} in namespace {namespace}"
        raise UsageError(f"{missing}; list them with `sftriage traces list --cluster --job JOB`") from None
