"""``sftriage kube`` and ``operator``: jobs, captures and policies of a Kubernetes cluster."""

from __future__ import annotations

import logging
import secrets
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from sftriage.commands.capture import INTERRUPTED
from sftriage.commands.options import JsonOption, argument, option
from sftriage.commands.output import bare_table, lists, notices, print_json, results, say, table, tell, write
from sftriage.commands.traces import Copying, Showing, copied_out, shown_in_program
from sftriage.errors import CaptureError, IntegrityError, UsageError
from sftriage.kube import listing
from sftriage.kube.client import NOT_FOUND, AnsweredError, ClusterObjects
from sftriage.kube.diagnosis import Finding, diagnose, gather
from sftriage.kube.injecting import read_settings
from sftriage.kube.listing import TraceRow
from sftriage.kube.objects import CAPTURES, KINDS, POLICIES, REPORTS, Body, capture_of, condition
from sftriage.kube.statuses import STORING_S
from sftriage.model.captures import ProfilerChoice
from sftriage.model.windows import plain
from sftriage.policy.in_force import shipped
from sftriage.reports.watch_lines import clean
from sftriage.traces.manifest import Manifest
from sftriage.traces.remote import RemoteStore, checked_url
from sftriage.words.verdicts import span

NamespaceOption = Annotated[str | None, option("--namespace -n NAME", "The namespace.", "the context's")]
EverywhereOption = Annotated[bool, option("--all-namespaces -A", "Those of all namespaces.")]
ContextOption = Annotated[str | None, option("NAME", "A context of the kubeconfig.", "the current one")]


def _connected(namespace: str | None, context: str | None, *, everywhere: bool = False) -> tuple[ClusterObjects, str]:
    """The cluster of the options, and their namespace: "" for all of them."""
    if everywhere and namespace is not None:
        raise UsageError("--namespace is one, and --all-namespaces all of them: give one of the two")
    objects = ClusterObjects.connect(context)
    return objects, "" if everywhere else namespace or objects.namespace


def _within(namespace: str) -> str:
    return f"in namespace {namespace}" if namespace else "in any namespace"


DAY_S = 86_400.0


def policies(
    namespace: NamespaceOption = None,
    everywhere: EverywhereOption = False,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the policies of a cluster: whether each is valid and in force, and why not.

    The cluster is the one that kubectl would ask, by KUBECONFIG or ~/.kube/config.
    """
    objects, namespace = _connected(namespace, context, everywhere=everywhere)
    bodies = objects.list(POLICIES, namespace or None)
    rows = [_row(body) for body in bodies]
    if as_json:
        print_json(rows)
        return
    if not rows:
        say(f"no policy {_within(namespace)}")
        return
    lists().print(table(("namespace", "policy", "rules", "in force", "why"), map(_policy_cells, rows)))
    if any(row["accepted"]["status"] == "Unknown" for row in rows):
        say("nobody has looked at some of them as they are now: `sftriage operator` does")


def _policy_cells(row: dict[str, Any]) -> tuple[str, ...]:
    accepted, conflicted = row["accepted"], row["conflicted"]
    force = {"True": "no" if conflicted["status"] == "True" else "yes", "False": "no"}
    why = conflicted if accepted["status"] == "True" else accepted
    rules = "" if row["rules"] is None else str(row["rules"])
    return row["namespace"], row["policy"], rules, force.get(accepted["status"], "not known"), why["message"]


def _row(body: dict[str, Any]) -> dict[str, Any]:
    metadata, status = body["metadata"], body.get("status", {})
    row = {"namespace": metadata["namespace"], "policy": metadata["name"], "rules": status.get("rules")}
    for kind in ("Accepted", "Conflicted"):
        found = condition(body, kind)
        answered = found is not None and found.observedGeneration == metadata.get("generation")
        told = {} if found is None or not answered else found.plain()
        row[kind.lower()] = {word: told.get(word, none) for word, none in _UNANSWERED.items()}
    return row


_UNANSWERED = {"status": "Unknown", "reason": "NotLookedAt", "message": "Nobody has looked at it as it is now."}


def definitions() -> None:
    """Print the custom resource definitions, for `kubectl apply`."""
    files = shipped("crds", "k8s/crds")
    sys.stdout.write("---\n".join(files[kind.plural].read_text(encoding="utf-8") for kind in KINDS))


@dataclass(frozen=True, slots=True)
class ControllersOptions:
    """How controllers of jobs run."""

    settings: Path | None = option(
        "FILE",
        "Start a controller for each job whose pods sftriage is in, with the image and the store of these "
        "settings, which are the webhook's. In that store traces of deleted captures are deleted, too.",
        "none are started",
    )
    runs_claim: str | None = option(
        "NAME", "A PersistentVolumeClaim in jobs' namespaces, in which their runs are kept.", "they go with the pod"
    )
    grace_seconds: float = option("N", "How long a controller outlives its job's pods.", min=0, default=300.0)
    report_days: float = option(
        "N",
        "How long the report of a job of plain pods, which goes with no object, stays after its last news.",
        min=0,
        default=7.0,
    )

    def __post_init__(self) -> None:
        if self.settings is None and self.runs_claim is not None:
            raise UsageError("--runs-claim is of controllers: give --settings too")


def operate(
    store: list[str] | None = option("URL", "A store in which traces of deleted captures may be deleted. Repeatable."),
    namespace: list[str] | None = option("--namespace -n NAME", "Only this namespace. Repeatable.", "all"),
    *,
    of_jobs: ControllersOptions,
    lease: str | None = option(
        "NAMESPACE/NAME", "Work only while this Lease is held: of several operators one works.", "no other is asked"
    ),
    watch_seconds: int = option("N", "How long a watch lasts before it is begun again.", min=1, max=3600, default=300),
) -> None:
    """Run the operator: it says which policies of a cluster are in force, and deletes traces of deleted captures.

    With --settings it starts a controller for each job, too. It needs the rights of k8s/rbac/operator.yaml, no more. It
    asks the cluster that kubectl would, or inside a pod its own. Ctrl-C or SIGTERM ends it; nothing is lost meanwhile.
    """
    said = None if of_jobs.settings is None else read_settings(of_jobs.settings)
    stores = frozenset(map(checked_url, [*(store or ()), *([said.store] if said is not None and said.store else ())]))
    held, slash, name = (lease or "").partition("/")
    if lease is not None and not (held and slash and name):
        raise UsageError("--lease: NAMESPACE/NAME")
    objects = ClusterObjects.connect()
    try:
        from sftriage.kube import operator
    except ImportError:
        raise UsageError("the operator needs kopf; install sftriage[k8s]") from None
    from sftriage.kube.client import LeaderElection
    from sftriage.kube.controllers import ControllerSettings

    logging.getLogger("sftriage.kube").setLevel(logging.INFO)
    # What kopf and asyncio say of a cluster that refuses is a page of their insides; the line above it says why.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_in_a_line)
    controllers = None if said is None else ControllerSettings(said, of_jobs.runs_claim or "")
    leader = None
    if lease is not None:
        leader = LeaderElection(objects, held, name, f"{socket.gethostname()}-{secrets.token_hex(4)}")
    times_s = {"grace_s": of_jobs.grace_seconds, "keep_s": of_jobs.report_days * DAY_S}
    operator.run(objects, stores, namespace or (), watch_seconds, controllers, leader, **times_s)


def _in_a_line(record: logging.LogRecord) -> bool:
    if record.name.partition(".")[0] == "kopf":
        record.exc_info = record.exc_text = None
    return True


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
    job: str | None = argument("JOB", "Only this job.", False),
    namespace: NamespaceOption = None,
    everywhere: EverywhereOption = False,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the jobs of a cluster that sftriage watches: how each stands, who is slow, and what that has cost.

    The cluster is the one that kubectl would ask, by KUBECONFIG or ~/.kube/config.
    """
    objects, namespace = _connected(namespace, context, everywhere=everywhere)
    bodies = objects.list(REPORTS, namespace or None)
    rows = [listing.job_row(body) for body in bodies if job is None or listing.is_of(body, job)]
    if as_json:
        print_json(rows)
    elif rows:
        numbers = ("since step", "lost s", "captures")
        titles = ("namespace", "job", "health", "suspect", *numbers, "summary")
        lists().print(table(titles, map(_job_cells, rows), numbers))
    else:
        say(f"no report on {'any job' if job is None else f'job {job}'} {_within(namespace)}: `sftriage kube doctor`")
    if job is not None and not rows:
        raise typer.Exit(1)


def _job_cells(row: dict[str, Any]) -> Iterable[str]:
    health = (row["health"] or "not known") + (", not watched" if row["watched"] is False else "")
    since = "" if row["since_step"] is None else str(row["since_step"])
    numbers = since, "" if row["lost_s"] is None else f"{row['lost_s']:.0f}", str(row["captures"])
    return map(clean, (row["namespace"], row["job"], health, row["suspect"], *numbers, row["summary"]))


def traces(
    job: Annotated[str, argument("JOB", "Name of the job: that of the TrainJob, JobSet, PyTorchJob, Job and so on.")],
    step: int | None = option("N", "Only captures of this step, or made because of it.", min=0),
    rank: int | None = option("N", "Only captures of this rank.", min=0),
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say which steps of a job were slow, where, and which traces there are of them.

    The first line is how the job stands; then its captures follow, the newest first. Where none is of the step that
    is asked for, the nearest is named.
    """
    objects, namespace = _connected(namespace, context)
    reports = [listing.job_row(body) for body in objects.list(REPORTS, namespace) if listing.is_of(body, job)]
    rows = map(listing.trace_row, _captures_of(objects, namespace, job))
    shown = sorted(rows, key=lambda row: (row.created, row.name), reverse=True)
    shown = [row for row in shown if rank in (None, row.rank)]
    shown, exactly = (shown, True) if step is None else listing.of_step(shown, step)
    if as_json:
        print_json({"reports": reports, "captures": shown if exactly else [], "nearest": [] if exactly else shown})
        return
    for report in reports:
        since = "" if report["since_step"] is None else f", since step {report['since_step']}"
        named = f"{report['job']}: {report['suspect']}{since}. " if report["suspect"] else ""
        write(clean(named + report["summary"]))
    if not exactly:
        nearest = f"; the nearest is {_where(shown[0])}" if shown else ""
        tell(f"No capture of step {step}{nearest}.")
        return
    if not shown:
        say(
            f"no capture of job {job} {_within(namespace)}"
            + ("" if reports else ", and no report: `sftriage kube doctor`")
        )
        return
    titles = ("name", "rank", "stage", "because of", "steps", "profiler", "state", "reproduced", "cause")
    lists().print(table(titles, map(_trace_cells, shown), ("rank",)))
    if any(row.store for row in shown):
        tell(f"`sftriage kube get NAME -n {namespace}` fetches one, and `sftriage kube open` shows it.")


def _where(row: TraceRow) -> str:
    of = row.steps or row.because_of
    return f"{row.name}, rank {row.rank}" + ("" if of is None else f", {span(*of)}")


def _trace_cells(row: TraceRow) -> Iterable[str]:
    because, steps = ("" if one is None else f"{one[0]} to {one[1]}" for one in (row.because_of, row.steps))
    cells = (row.stage, because, steps, row.profiler, row.state, row.reproduced, row.cause)
    return map(clean, (row.name, str(row.rank), *cells))


@dataclass(frozen=True, slots=True)
class StoredTraceChoice:
    """The TraceCapture to use: by name, or the most informative one of a job."""

    capture: str | None = argument("CAPTURE", "Name of a TraceCapture, as `sftriage kube traces` shows it.", False)
    job: str | None = option("JOB", "The trace of this job that tells most, rather than CAPTURE.")
    step: int | None = option("N", "Of captures of this step, or made because of it.", min=0)
    rank: int | None = option("N", "Of captures of this rank.", min=0)

    def found(self, objects: ClusterObjects, namespace: str) -> Body:
        if (self.capture is None) == (self.job is None):
            raise UsageError("name a capture, or --job, and not both")
        if self.job is not None:
            return listing.best(_captures_of(objects, namespace, self.job), self.step, self.rank)
        if self.step is not None or self.rank is not None:
            raise UsageError("--step and --rank choose among the captures of --job")
        try:
            return objects.read(CAPTURES, namespace, self.capture or "")
        except AnsweredError as error:
            if error.status != NOT_FOUND:
                raise
            missing = f"no capture {self.capture} {_within(namespace)}"
            raise UsageError(f"{missing}: `sftriage kube traces JOB` lists them") from None


def _captures_of(objects: ClusterObjects, namespace: str, job: str) -> list[Body]:
    return [one for one in objects.list(CAPTURES, namespace) if listing.is_of(one, job)]


def get(
    *,
    of: StoredTraceChoice,
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
    objects, namespace = _connected(namespace, context)
    body = of.found(objects, namespace)
    its_store, reference, manifest = _stored(body, store)
    row, files = listing.trace_row(body), copied_out(its_store, reference, manifest, how)
    if as_json:
        print_json({**files[0], "files": files, "capture": row})
        return
    if of.capture is None:
        because = "" if row.because_of is None else f", because of {span(*row.because_of)}"
        say(f"{_where(row)}{f' in {row.stage}' if row.stage else ''}{because}")
    write(*(file["path"] for file in files))


def open_capture(
    *,
    of: StoredTraceChoice,
    how: Showing,
    store: SeenFromHereOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Open the trace of a TraceCapture in Perfetto's viewer, which fetches it from this machine; nothing is uploaded.

    It is fetched out of its store and verified, as by `sftriage kube get`, and shown as by `sftriage traces open`.
    """
    objects, namespace = _connected(namespace, context)
    its_store, reference, _ = _stored(of.found(objects, namespace), store)
    shown_in_program(its_store, reference, how)


def _stored(body: Body, url: str | None) -> tuple[RemoteStore, str, Manifest]:
    """The store that has a capture's trace, its reference there, and its manifest, which agrees with the object's."""
    stored = listing.stored_of(body)
    checked = checked_url(url or stored.store)
    try:
        store = RemoteStore.open(checked)
    except UsageError as error:
        if url is None and checked.startswith("file:"):
            raise UsageError(
                f"{error}: it is one of the cluster; --store URL says how it is reached from here"
            ) from None
        raise
    manifest, _ = store.look(stored.reference)
    of_object, of_store = (
        {file.name: (file.size_bytes, file.sha256) for file in files}
        for files in (stored.artefacts, manifest.artefacts)
    )
    if of_object and of_object != of_store:
        name = body["metadata"]["name"]
        raise IntegrityError(f"the files of {name} in {stored.store} are others than the cluster says")
    return store, stored.reference, manifest


LOOK_S = 1.0
ANSWER_S = 60.0
"""After so long without an answer, it is said that nobody gives one."""


def capture(
    job: Annotated[str, argument("JOB", "Name of the job, as `sftriage kube status` shows it.")],
    rank: Annotated[int, option("N", "The rank to capture.", min=0)],
    reason: Annotated[str, option("TEXT", "Why; it goes into the manifest.")],
    profiler: ProfilerChoice | None = option("", "torch, stacks, nsys, or what suits.", "auto"),
    steps: int | None = option("N", "Steps to record.", "5", min=1, max=1000),
    warmup_steps: int | None = option("N", "Steps the profiler runs before those.", "1", min=0, max=100),
    max_seconds: int | None = option("S", "When it ends, whatever happens.", "60", min=1, max=3600),
    max_bytes: str | None = option("SIZE", "Size over which a trace is not kept.", "512Mi"),
    wait: bool = option("--wait/--no-wait", "Wait for its end, or print the object's name and leave.", default=True),
    timeout: float | None = option("S", "How long to wait.", "its time-box and ten minutes", min=1.0),
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Capture a rank of a job in a cluster: create a TraceCapture, and wait until its trace is stored.

    The limits of the job's policies hold: what they forbid is refused, with the reason. Ctrl-C ends only the waiting;
    deleting the object takes the request back. It ends with 1 where there is no trace in the end.
    """
    objects, namespace = _connected(namespace, context)
    options: dict[str, Any] = {"profiler": profiler, "steps": steps, "warmup_steps": warmup_steps}
    options |= {"max_seconds": max_seconds, "max_bytes": max_bytes}
    spec = {"job": _job_name(objects, namespace, job), "rank": rank, "reason": reason}
    spec |= {word: value for word, value in options.items() if value is not None}
    body: dict[str, Any] = {"metadata": {"generateName": "look-"}, "spec": spec}
    asked, wrong = capture_of(body)
    if asked is None:
        raise UsageError(wrong.replace("\n", "; "))
    made = objects.create(CAPTURES, namespace, body)
    name = made["metadata"]["name"]
    if not wait:
        if as_json:
            print_json({"name": name, "namespace": namespace})
        else:
            write(name)
        return
    try:
        with notices().status(f"{name}: requested") as status:
            patience_s = float(asked.max_seconds) + STORING_S if timeout is None else timeout
            seen, state, over, words = _ended(objects, namespace, made, patience_s, status.update)
    except KeyboardInterrupt:
        say(f"{name} goes on; `kubectl delete tcap {name} -n {namespace}` takes it back")
        raise typer.Exit(INTERRUPTED) from None
    _tell(seen, state, over, words, as_json=as_json)


def _job_name(objects: ClusterObjects, namespace: str, job: str) -> str:
    reports = [one for one in objects.list(REPORTS, namespace) if listing.is_of(one, job)]
    names = sorted({str(one["spec"]["job"]) for one in reports})
    if not names:
        say(f"no report on job {job} {_within(namespace)}; the capture waits for it")
    if len(names) > 1:
        raise UsageError(f"{job} may be any of {', '.join(names)}")
    return names[0] if names else job


def _ended(
    objects: ClusterObjects, namespace: str, made: Body, patience_s: float, show: Any
) -> tuple[Body, str, bool, str]:
    name, begun_s, warned, body = made["metadata"]["name"], time.monotonic(), False, made
    while True:
        try:
            body = objects.read(CAPTURES, namespace, name)
            state, over, words = listing.progress_of(body)
        except AnsweredError as error:
            if error.status != NOT_FOUND:
                raise
            return body, "deleted", True, "Somebody has deleted it."
        show(f"{name}: {state}")
        waited_s = time.monotonic() - begun_s
        if over or waited_s > patience_s:
            return body, state, over, words
        if state == "requested" and waited_s > ANSWER_S and not warned:
            warned = True
            say(f"nobody has answered {name} for {ANSWER_S:.0f} s; `sftriage kube doctor` may know why")
        time.sleep(LOOK_S)


def _tell(body: Body, state: str, over: bool, words: str, *, as_json: bool) -> None:
    row = listing.trace_row(body)
    if as_json:
        print_json({**plain(row), "detail": words})
    if state != "stored":
        unended = "" if over else ", and is waited for no longer"
        raise CaptureError(f"{row.name} is {state}{unended}: {words}")
    if not as_json:
        write(row.name)
        say(f"sftriage kube get {row.name} -n {row.namespace}" if row.store else "it is with the job's controller")


_STYLES = {"ok": "green", "wrong": "red", "unknown": "yellow"}


def doctor(
    namespace: NamespaceOption = None,
    operator_namespace: str | None = option(
        "NAME", "The namespace that sftriage is installed in.", "looked for in all that you may look at"
    ),
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find out why nothing happens to the jobs of a namespace, and say what to do about it.

    It looks at labels and pods, the webhook and its certificate, the operator, the controllers of jobs, rights, quota
    and stores, and changes nothing. What the person may not look at, it says so. It ends with 1 where something is
    wrong.
    """
    objects, namespace = _connected(namespace, context)
    findings = diagnose(gather(objects, namespace, time.time(), operator_namespace))
    if as_json:
        print_json(findings)
    else:
        results().print(bare_table(map(_finding_cells, findings)))
    if any(one.state == "wrong" for one in findings):
        raise typer.Exit(1)


def _finding_cells(one: Finding) -> tuple[str, Text, Text]:
    do = ("\n", ("do:", "bold"), f" {clean(one.do)}") if one.do else ()
    return one.code, Text(one.state, _STYLES[one.state]), Text.assemble(clean(one.says), *do)
