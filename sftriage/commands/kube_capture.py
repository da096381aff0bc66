"""``sftriage kube capture``: capture ranks of a job in a cluster, because somebody wants to see them."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from sftriage.commands.capture import INTERRUPTED
from sftriage.commands.kube_options import ContextOption, NamespaceOption, connected, within
from sftriage.commands.options import JsonOption, argument, option
from sftriage.commands.output import notices, print_json, say, write
from sftriage.errors import CaptureError, UsageError
from sftriage.kube.captures import STORING_S
from sftriage.kube.client import NOT_FOUND, AnsweredError, ClusterObjects
from sftriage.kube.listing import Body, FetchProgress, is_of, progress_of, trace_row
from sftriage.kube.objects import CAPTURES, REPORTS, capture_of
from sftriage.model.captures import ProfilerChoice
from sftriage.model.windows import plain

LOOK_S = 1.0
ANSWER_S = 60.0
"""After so long without an answer, it is said that nobody gives one."""


def capture(
    job: Annotated[str, argument("JOB", "Name of the job, as `sftriage kube status` shows it.")],
    rank: Annotated[int, option("N", "The rank to capture.", min=0)],
    reason: Annotated[str, option("TEXT", "Why; it goes into the manifest.")],
    profiler: Annotated[ProfilerChoice | None, option("", "torch, stacks, nsys, or what suits.", "auto")] = None,
    steps: Annotated[int | None, option("N", "Steps to record.", "5", min=1, max=1000)] = None,
    warmup_steps: Annotated[
        int | None, option("N", "Steps the profiler runs before those.", "1", min=0, max=100)
    ] = None,
    max_seconds: Annotated[int | None, option("S", "When it ends, whatever happens.", "60", min=1, max=3600)] = None,
    max_bytes: Annotated[str | None, option("SIZE", "Size over which a trace is not kept.", "512Mi")] = None,
    wait: Annotated[bool, option("--wait/--no-wait", "Wait for its end, or print the object's name and leave.")] = True,
    timeout: Annotated[float | None, option("S", "How long to wait.", "its time-box and ten minutes", min=1.0)] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Capture a rank of a job in a cluster: create a TraceCapture, and wait until its trace is stored.

    The limits of the job's policies hold: what they forbid is refused, with the reason. Ctrl-C ends only the waiting;
    deleting the object takes the request back. It ends with 1 where there is no trace in the end.
    """
    objects, namespace = connected(namespace, context)
    options = {
        "profiler": profiler,
        "steps": steps,
        "warmup_steps": warmup_steps,
        "max_seconds": max_seconds,
        "max_bytes": max_bytes,
    }
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
            seen, progress = _ended(objects, namespace, made, patience_s, status.update)
    except KeyboardInterrupt:
        say(f"{name} goes on; `kubectl delete tcap {name} -n {namespace}` takes it back")
        raise typer.Exit(INTERRUPTED) from None
    _tell(seen, progress, as_json=as_json)


def _job_name(objects: ClusterObjects, namespace: str, job: str) -> str:
    reports = [one for one in objects.list(REPORTS, namespace) if is_of(one, job)]
    names = sorted({str(one["spec"]["job"]) for one in reports})
    if not names:
        say(f"no report on job {job} {within(namespace)}; the capture waits for it")
    if len(names) > 1:
        raise UsageError(f"{job} may be any of {', '.join(names)}")
    return names[0] if names else job


def _ended(
    objects: ClusterObjects, namespace: str, made: Body, patience_s: float, show: Any
) -> tuple[Body, FetchProgress]:
    name, begun_s, warned, body = made["metadata"]["name"], time.monotonic(), False, made
    while True:
        try:
            body = objects.read(CAPTURES, namespace, name)
            progress = progress_of(body)
        except AnsweredError as error:
            if error.status != NOT_FOUND:
                raise
            return body, FetchProgress("deleted", over=True, words="Somebody has deleted it.")
        show(f"{name}: {progress.state}")
        waited_s = time.monotonic() - begun_s
        if progress.over or waited_s > patience_s:
            return body, progress
        if progress.state == "requested" and waited_s > ANSWER_S and not warned:
            warned = True
            say(f"nobody has answered {name} for {ANSWER_S:.0f} s; `sftriage kube doctor` may know why")
        time.sleep(LOOK_S)


def _tell(body: Body, progress: FetchProgress, *, as_json: bool) -> None:
    row = trace_row(body)
    if as_json:
        print_json({**plain(row), "detail": progress.words})
    if progress.state != "stored":
        unended = "" if progress.over else ", and is waited for no longer"
        raise CaptureError(f"{row.name} is {progress.state}{unended}: {progress.words}")
    if not as_json:
        write(row.name)
        where = f"sftriage kube get {row.name} -n {row.namespace}" if row.store else "it is with the job's controller"
        say(where)
