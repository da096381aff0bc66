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

from sftriage.commands.capture import INTERRUPTED
from sftriage.commands.cluster import connected, within
from sftriage.commands.options import ContextOption, JsonOption, NamespaceOption, argument, option
from sftriage.commands.output import lists, notices, print_findings, print_json, say, table, write
from sftriage.errors import CaptureError, UsageError
from sftriage.kube import listing
from sftriage.kube.client import NOT_FOUND, AnsweredError, ClusterObjects
from sftriage.kube.diagnosis import diagnose, gather
from sftriage.kube.injecting import read_settings
from sftriage.kube.objects import CAPTURES, KINDS, POLICIES, REPORTS, Body, capture_of, condition
from sftriage.kube.statuses import STORING_S
from sftriage.model.captures import ProfilerChoice
from sftriage.model.windows import plain
from sftriage.policy.in_force import shipped
from sftriage.reports.watch_lines import clean
from sftriage.traces.remote import checked_url

EverywhereOption = Annotated[bool, option("--all-namespaces -A", "Include all namespaces.")]
DAY_S = 86_400.0


def policies(
    namespace: NamespaceOption = None,
    everywhere: EverywhereOption = False,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the policies of a cluster: whether each is valid and in force, and why not.

    Uses kubectl's configuration: KUBECONFIG or ~/.kube/config.
    """
    objects, namespace = connected(namespace, context, everywhere=everywhere)
    rows = list(map(_policy_row, objects.list(POLICIES, namespace or None)))
    if as_json:
        print_json(rows)
        return
    if not rows:
        say(f"no policy {within(namespace)}")
        return
    lists().print(table(("namespace", "policy", "rules", "in force", "why"), map(_policy_cells, rows)))
    if any(row["accepted"]["status"] == "Unknown" for row in rows):
        say("some of them were not checked since they changed; is `sftriage operator` running?")


def _policy_cells(row: dict[str, Any]) -> tuple[str, ...]:
    accepted, conflicted = row["accepted"], row["conflicted"]
    force = {"True": "no" if conflicted["status"] == "True" else "yes", "False": "no"}
    why = conflicted if accepted["status"] == "True" else accepted
    rules = "" if row["rules"] is None else str(row["rules"])
    return row["namespace"], row["policy"], rules, force.get(accepted["status"], "unknown"), why["message"]


def _policy_row(body: dict[str, Any]) -> dict[str, Any]:
    metadata, status = body["metadata"], body.get("status", {})
    row = {"namespace": metadata["namespace"], "policy": metadata["name"], "rules": status.get("rules")}
    for kind in ("Accepted", "Conflicted"):
        found = condition(body, kind)
        is_current = found is not None and found.observedGeneration == metadata.get("generation")
        current = found.plain() if found is not None and is_current else {}
        row[kind.lower()] = {word: current.get(word, unknown) for word, unknown in _UNCHECKED.items()}
    return row


_UNCHECKED = {"status": "Unknown", "reason": "NotLookedAt", "message": "Not checked since it changed."}


def definitions() -> None:
    """Print the custom resource definitions, for `kubectl apply`."""
    files = shipped("crds", "k8s/crds")
    sys.stdout.write("---\n".join(files[kind.plural].read_text(encoding="utf-8") for kind in KINDS))


@dataclass(frozen=True, slots=True)
class ControllersOptions:
    """How controllers of jobs run."""

    settings: Path | None = option(
        "FILE",
        "Start a controller for each job that sftriage was injected into, with the image and the store of these "
        "settings (the webhook's). Also delete traces of deleted captures in that store.",
        "no controllers",
    )
    runs_claim: str | None = option(
        "NAME", "A PersistentVolumeClaim in jobs' namespaces that keeps their runs.", "runs end with the pod"
    )
    grace_seconds: float = option("N", "How long a controller outlives its job's pods.", min=0, default=300.0)
    report_days: float = option(
        "N", "Days to keep the report of a job of plain pods after its last update.", min=0, default=7.0
    )

    def __post_init__(self) -> None:
        if self.settings is None and self.runs_claim is not None:
            raise UsageError("--runs-claim needs --settings")


def operate(
    store: list[str] | None = option("URL", "Delete traces of deleted captures in this store. Repeatable."),
    namespace: list[str] | None = option("--namespace -n NAME", "Only this namespace. Repeatable.", "all"),
    *,
    of_jobs: ControllersOptions,
    lease: str | None = option(
        "NAMESPACE/NAME", "Work only while holding this Lease, so that one of several operators works.", "no lease"
    ),
    ready_file: Path | None = option("FILE", "With --lease: touch this file whenever the API server has answered."),
    watch_seconds: int = option("N", "Restart each watch of the API after this time.", min=1, max=3600, default=300),
) -> None:
    """Run the operator: it checks the policies of a cluster, and deletes traces of deleted captures.

    With --settings it also starts a controller for each job. It needs only the rights in k8s/rbac/operator.yaml. It
    uses kubectl's configuration, or inside a pod its own cluster. Ctrl-C or SIGTERM ends it; nothing is lost meanwhile.
    """
    pods = None if of_jobs.settings is None else read_settings(of_jobs.settings)
    stores = frozenset(map(checked_url, [*(store or ()), *([pods.store] if pods is not None and pods.store else ())]))
    held, slash, name = (lease or "").partition("/")
    if lease is not None and not (held and slash and name):
        raise UsageError(f"--lease {lease}: expected NAMESPACE/NAME")
    if ready_file is not None and lease is None:
        raise UsageError("--ready-file needs --lease")
    objects = ClusterObjects.connect()
    from sftriage.kube import operator
    from sftriage.kube.client import LeaderElection
    from sftriage.kube.controllers import ControllerSettings

    logging.getLogger("sftriage.kube").setLevel(logging.INFO)
    # kopf and asyncio log a page of traceback if a cluster refuses; the line above it gives the reason.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_in_a_line)
    controllers = None if pods is None else ControllerSettings(pods, of_jobs.runs_claim or "")
    leader = None
    if lease is not None:
        leader = LeaderElection(objects, held, name, f"{socket.gethostname()}-{secrets.token_hex(4)}")
        leader.on_contact = ready_file.touch if ready_file is not None else leader.on_contact
    times_s = {"grace_s": of_jobs.grace_seconds, "keep_s": of_jobs.report_days * DAY_S}
    operator.run(objects, stores, namespace or (), watch_seconds, controllers, leader, **times_s)


def _in_a_line(record: logging.LogRecord) -> bool:
    if record.name.partition(".")[0] == "kopf":
        record.exc_info = record.exc_text = None
    return True


def status(
    job: str | None = argument("JOB", "Only this job.", False),
    namespace: NamespaceOption = None,
    everywhere: EverywhereOption = False,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the jobs of a cluster that sftriage watches: their health, the suspect, and the time it has cost.

    Uses kubectl's configuration: KUBECONFIG or ~/.kube/config.
    """
    objects, namespace = connected(namespace, context, everywhere=everywhere)
    bodies = objects.list(REPORTS, namespace or None)
    rows = [listing.job_row(body) for body in bodies if job is None or listing.is_of(body, job)]
    if as_json:
        print_json(rows)
    elif rows:
        numbers = ("since step", "lost s", "captures")
        titles = ("namespace", "job", "health", "suspect", "node", "pod", *numbers, "summary")
        lists().print(table(titles, map(_job_cells, rows), numbers))
    else:
        say(f"no report on {'any job' if job is None else f'job {job}'} {within(namespace)}; `sftriage kube doctor`")
    if job is not None and not rows:
        raise typer.Exit(1)


def _job_cells(row: dict[str, Any]) -> Iterable[str]:
    health = (row["health"] or "unknown") + (", not watched" if row["watched"] is False else "")
    since = "" if row["since_step"] is None else str(row["since_step"])
    numbers = since, "" if row["lost_s"] is None else f"{row['lost_s']:.0f}", str(row["captures"])
    suspect = row["suspect"], row["node"], row["pod"]
    return map(clean, (row["namespace"], row["job"], health, *suspect, *numbers, row["summary"]))


POLL_S = 1.0
ANSWER_S = 60.0
"""How long to wait for an answer before warning."""


def capture(
    job: Annotated[str, argument("JOB", "Name of the job, as `sftriage kube status` shows it.")],
    rank: Annotated[int, option("N", "The rank to capture.", min=0)],
    reason: Annotated[str, option("TEXT", "Why you capture; saved in the manifest.")],
    profiler: ProfilerChoice | None = option("", "torch, stacks, nsys, or the best fit.", "auto"),
    steps: int | None = option("N", "Steps to record.", "5", min=1, max=1000),
    warmup_steps: int | None = option("N", "Steps the profiler runs before recording.", "1", min=0, max=100),
    max_seconds: int | None = option("S", "End the capture after this time in any case.", "60", min=1, max=3600),
    max_bytes: str | None = option("SIZE", "Discard a trace that is larger.", "512Mi"),
    wait: bool = option("--wait/--no-wait", "Wait for its end, or print the object's name and exit.", default=True),
    timeout: float | None = option("S", "How long to wait.", "its time-box and ten minutes", min=1.0),
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Capture a rank of a job in a cluster: create a TraceCapture, and wait until its trace is stored.

    A capture that the limits of the job's policies forbid is refused, with the reason. Ctrl-C ends only the waiting;
    delete the object to cancel the capture. Exits with 1 if there is no trace.
    """
    objects, namespace = connected(namespace, context)
    spec = {"job": _job_name(objects, namespace, job), "rank": rank, "reason": reason, "profiler": profiler}
    spec |= {"steps": steps, "warmup_steps": warmup_steps, "max_seconds": max_seconds, "max_bytes": max_bytes}
    spec = {word: value for word, value in spec.items() if value is not None}
    body: dict[str, Any] = {"metadata": {"generateName": "look-"}, "spec": spec}
    request, wrong = capture_of(body)
    if request is None:
        raise UsageError(wrong.replace("\n", "; "))
    created = objects.create(CAPTURES, namespace, body)
    name = created["metadata"]["name"]
    if not wait:
        if as_json:
            print_json({"name": name, "namespace": namespace})
        else:
            write(name)
        return
    try:
        with notices().status(f"{name}: requested") as status:
            timeout_s = float(request.max_seconds) + STORING_S if timeout is None else timeout
            latest, state, over, detail = _ended(objects, namespace, created, timeout_s, status.update)
    except KeyboardInterrupt:
        say(f"{name} continues; cancel it with `kubectl delete tcap {name} -n {namespace}`")
        raise typer.Exit(INTERRUPTED) from None
    row = listing.trace_row(latest)
    if as_json:
        print_json({**plain(row), "detail": detail})
    if state != "stored":
        raise CaptureError(f"{name} is {state}{'' if over else ' (timed out waiting)'}: {detail}")
    if not as_json:
        write(name)
        say(f"sftriage traces get {name} --cluster -n {namespace}" if row.store else "the controller has its trace")


def _job_name(objects: ClusterObjects, namespace: str, job: str) -> str:
    reports = [body for body in objects.list(REPORTS, namespace) if listing.is_of(body, job)]
    names = sorted({str(body["spec"]["job"]) for body in reports})
    if not names:
        say(f"no report on job {job} {within(namespace)}; the capture waits for the job")
    if len(names) > 1:
        raise UsageError(f"{job} is ambiguous: {', '.join(names)}")
    return names[0] if names else job


def _ended(
    objects: ClusterObjects, namespace: str, body: Body, timeout_s: float, show: Any
) -> tuple[Body, str, bool, str]:
    """The capture once it has ended or the time is up: object, state, whether it has ended, and the detail."""
    name, begun_s, warned = body["metadata"]["name"], time.monotonic(), False
    while True:
        try:
            body = objects.read(CAPTURES, namespace, name)
            state, over, detail = listing.progress_of(body)
        except AnsweredError as error:
            if error.status != NOT_FOUND:
                raise
            return body, "deleted", True, "The TraceCapture was deleted."
        show(f"{name}: {state}")
        waited_s = time.monotonic() - begun_s
        if over or waited_s > timeout_s:
            return body, state, over, detail
        if state == "requested" and waited_s > ANSWER_S and not warned:
            warned = True
            say(f"no answer to {name} for {ANSWER_S:.0f} s; try `sftriage kube doctor`")
        time.sleep(POLL_S)


def doctor(
    namespace: NamespaceOption = None,
    operator_namespace: str | None = option(
        "NAME", "Namespace of the sftriage installation.", "searched in all that you may read"
    ),
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find out why the jobs of a namespace are not watched, and what to do about it.

    Checks labels and pods, the webhook and its certificate, the operator, the controllers of jobs, rights, quota and
    stores, and changes nothing. A check that you have no rights for is reported as unknown. Exits with 1 if something
    is wrong.
    """
    objects, namespace = connected(namespace, context)
    findings = diagnose(gather(objects, namespace, time.time(), operator_namespace))
    if as_json:
        print_json(findings)
    else:
        print_findings((each.code, each.state, clean(each.says), clean(each.do)) for each in findings)
    if any(finding.state == "wrong" for finding in findings):
        raise typer.Exit(1)
