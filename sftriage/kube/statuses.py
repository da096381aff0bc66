"""The status of each object: a policy, a capture and its removal, a report and its events. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple, cast

import yaml
from pydantic import ValidationError

from sftriage.kube import objects
from sftriage.kube.jobs import JobRef, items, mapping, text
from sftriage.kube.objects import Body, Now, capture_of, dated, readable, status_of
from sftriage.model.captures import ENDED, CaptureResult
from sftriage.model.events import JobBroken, RemedyChanged
from sftriage.policy.in_force import PolicySet
from sftriage.policy.parsing import MAX_SHOWN, LoadedPolicy, PolicyError, Problem, parse
from sftriage.runs.decisions import WindowRow
from sftriage.runs.source import View
from sftriage.runs.summary import RunSummary, advice_of_run, captures_cost_s, remedy_line, tried_in
from sftriage.traces.manifest import Manifest, first_problem
from sftriage.words.decisions import caused
from sftriage.words.kube import CAPTURE_STATES, NEWS, PODS, REPRODUCED, removal_sentence
from sftriage.words.kube import POLICIES as POLICY_WORDS
from sftriage.words.kube import REPORTS as REPORT_WORDS
from sftriage.words.run import NOTHING, disk_now, event_sentence, link_name, reproduced_words
from sftriage.words.verdicts import clock, explained


def policy_text(body: Body, metadata: Mapping[str, Any]) -> str:
    """The policy of an object as the text of a file."""
    document = {"apiVersion": objects.API_VERSION, "kind": objects.POLICIES.kind, **body, "metadata": metadata}
    # (through JSON, for YAML would write what occurs twice as an alias, which no policy has)
    kept = json.loads(json.dumps({word: document.get(word) for word in ("apiVersion", "kind", "metadata", "spec")}))
    return yaml.safe_dump(kept, allow_unicode=True, sort_keys=False)


def loaded(body: Body) -> LoadedPolicy:
    """The policy of an object, checked as a file of the command line is; its source is its name.

    Raises PolicyError with all problems, but without lines, since an object has no text.
    """
    name = str(body["metadata"]["name"])
    try:
        found = parse(policy_text(body, body["metadata"]), name)
    except PolicyError as error:
        raise PolicyError(name, [replace(problem, line=0, column=0) for problem in error.problems]) from None
    return replace(found, places={})


@dataclass(frozen=True, slots=True)
class PolicyState:
    """A policy, whether jobs of its namespace run under it (it is valid, and no older one forbids it), its status."""

    body: Body
    in_force: bool
    status: objects.TriagePolicyStatus

    @property
    def changed(self) -> bool:
        return dict(status_of(self.body)) != self.status.plain()


def policy_states(bodies: Iterable[Body], now_s: float) -> list[PolicyState]:
    """The state of each policy of one namespace, the oldest first.

    All of them are in force together. Of two that conflict, the older one is, so that a new policy never disables
    another; of the same age, the first by name.
    """
    found: list[PolicyState] = []
    in_force: tuple[LoadedPolicy, ...] = ()

    def age(body: Body) -> tuple[str, str]:
        # (the server writes times such that the text of an older one is less)
        return str(body["metadata"].get("creationTimestamp", "")), str(body["metadata"]["name"])

    for body in sorted(bodies, key=age):
        policy, problems = None, ""
        try:
            policy = loaded(body)
            in_force = PolicySet((*in_force, policy)).loaded
        except PolicyError as error:
            problems = _lines(error.problems)
        status = objects.TriagePolicyStatus(
            observedGeneration=body["metadata"].get("generation"),
            conditions=dated(body, _policy_conditions(policy, problems), now_s),
            rules=None if policy is None else len(policy.policy.spec.rules),
        )
        found.append(PolicyState(body, not problems, status))
    return found


def _lines(problems: Sequence[Problem]) -> str:
    lines = [f"{each.path}: {each.message}" if each.path else each.message for each in problems[:MAX_SHOWN]]
    more = len(problems) - MAX_SHOWN
    return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)


def _policy_conditions(policy: LoadedPolicy | None, problems: str) -> Iterator[Now]:
    if policy is None:
        yield Now("Accepted", "False", "Invalid", problems)
        yield Now("Conflicted", "Unknown", "Invalid", POLICY_WORDS["not_compared"])
        return
    yield Now("Accepted", "True", "Valid", POLICY_WORDS["valid"])
    if problems:
        yield Now("Conflicted", "True", "Conflicts", f"{POLICY_WORDS['conflicts']}\n{problems}")
    else:
        yield Now("Conflicted", "False", "InForce", POLICY_WORDS["in_force"])


STORING_S = 600.0
"""Maximum time from the end of a capture's time-box until its trace is in the store."""


@dataclass(frozen=True, slots=True)
class KnownCapture:
    """How far a capture is, its manifest once it is stored, and where that is.

    ``words`` describe a capture without an answer.
    """

    result: CaptureResult | None = None
    manifest: Manifest | None = None
    store: str = ""
    reference: str = ""
    words: str = ""


def capture_status(body: Body, known: KnownCapture, now_s: float) -> objects.TraceCaptureStatus:
    """The status of a capture. An invalid object is refused, whatever is known of its capture."""
    spec, wrong = capture_of(dict(body))
    result, manifest = known.result, known.manifest
    state: objects.RequestState = "refused" if spec is None else "requested" if result is None else result.state
    detail = wrong or (result.detail if result is not None else known.words)
    found = (*_progress(state, detail, invalid=spec is None), _reproduced(state, manifest))
    profiler = "auto" if spec is None else spec.profiler
    return objects.TraceCaptureStatus(
        observedGeneration=body["metadata"].get("generation"),
        conditions=dated(body, found, now_s),
        state=state,
        profiler=profiler if manifest is None else manifest.capture.profiler,
        host=None if manifest is None else manifest.capture.host,
        first_step=None if result is None else result.first_step,
        last_step=None if result is None else result.last_step,
        reproduced=None if manifest is None else manifest.holds_fault,
        detail=detail or None,
        cause=_cause(manifest),
        cost_s=None if manifest is None or manifest.cost is None else manifest.cost.cost_s,
        stored=_stored(known),
    )


def _cause(manifest: Manifest | None) -> str | None:
    cause = manifest.cause if manifest is not None else None
    # (that a hang has no known reason is news too)
    silent = cause is None or (cause.code == "unknown" and manifest is not None and manifest.trigger.label != "stalled")
    return None if cause is None or silent else caused(cause)


def _progress(state: objects.RequestState, detail: str, *, invalid: bool) -> Iterator[Now]:
    reason, words = "Invalid" if invalid else state.capitalize(), f"{CAPTURE_STATES[state]} {detail}".strip()
    accepted: objects.Answer = "Unknown" if state == "requested" else "False" if state == "refused" else "True"
    yield Now("Accepted", accepted, "Accepted" if accepted == "True" else reason, words)
    stored: objects.Answer = "True" if state == "stored" else "False" if state in ENDED else "Unknown"
    yield Now("Stored", stored, reason, words)


def _reproduced(state: objects.RequestState, manifest: Manifest | None) -> Now:
    if manifest is None:
        never = state in ENDED and state != "stored"
        return Now("Reproduced", "Unknown", "NoTrace" if never else "NotYet", REPRODUCED["never" if never else ""])
    found = manifest.reproduced
    if found is None:
        return Now("Reproduced", "Unknown", "NotJudged", REPRODUCED["unjudged"])
    words = reproduced_words(found.answer, manifest.capture.role)
    message = f"{words[0].upper()}{words[1:]}."
    if manifest.holds_fault is None:
        return Now("Reproduced", "Unknown", "Control", message)
    reason = {"yes": "Reproduced", "partly": "PartlyReproduced", "no": "NotReproduced"}[found.answer]
    return Now("Reproduced", "False" if found.answer == "no" else "True", reason, message)


def _stored(known: KnownCapture) -> objects.StoredTrace | None:
    if known.manifest is None or not known.store:
        return None
    files = known.manifest.artefacts
    return objects.StoredTrace(
        store=known.store,
        reference=known.reference,
        size_bytes=sum(file.size_bytes for file in files),
        artefacts=tuple(map(objects.StoredArtefact.model_validate, files)),
    )


class Removal(NamedTuple):
    """The trace to delete of an object that is being deleted, or else why there is none.

    If ``wait_s`` is not 0, a trace may still come: the object stays, for at most that time.
    """

    words: str
    stored: objects.StoredTrace | None = None
    wait_s: float = 0.0


def removal(body: Body, now_s: float) -> Removal:
    """What to do with the trace of a capture being deleted, by its object alone: its controller may be gone.

    The trace of a running capture would arrive after its object is gone, and stay forever: so this waits for it, no
    longer than it can take.
    """
    status = status_of(body)
    if "stored" in status:
        try:
            stored = objects.StoredTrace.model_validate(status["stored"])
        except ValidationError as error:
            return Removal(removal_sentence("unreadable", problem=first_problem(error)), wait_s=STORING_S)
        return Removal(removal_sentence("stored", place=stored.store), stored)
    if status.get("state") not in ("accepted", "armed", "running"):
        return Removal(removal_sentence("nothing"))
    spec, _ = capture_of(dict(body))
    box_s = objects.TraceCaptureSpec.model_fields["max_seconds"].default if spec is None else spec.max_seconds
    deleted_s = seconds_of(str(body["metadata"]["deletionTimestamp"]))
    wait_s = deleted_s + float(box_s) + STORING_S - now_s
    if wait_s > 0:
        return Removal(removal_sentence("running", wait_s=wait_s), wait_s=wait_s)
    return Removal(removal_sentence("unfinished"))


class PodTrouble(NamedTuple):
    """Why a pod does not run as it should: a reason of `sftriage.words.kube.PODS`, and the cluster's own message."""

    reason: str
    message: str
    pod: str
    namespace: str
    container: str = ""
    node: str = ""

    @property
    def what_to_do(self) -> str:
        return PODS[self.reason].format(**self._asdict())

    @property
    def words(self) -> str:
        where = f"{self.pod}, container {self.container}" if self.container else self.pod
        return f"{where}: {self.message.strip().rstrip('.')}. {self.what_to_do}"


_WAITING = {
    **dict.fromkeys(("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"), "ImageMissing"),
    **dict.fromkeys(("CreateContainerConfigError", "CreateContainerError", "RunContainerError"), "NotStarted"),
    "CrashLoopBackOff": "Crashes",
}
"""The reasons of the kubelet for a container that does not start."""


def pod_trouble(pod: Body) -> PodTrouble | None:
    """Why a pod does not run as it should, by its object; None if it does, or is starting or over."""
    status, about = status_of(pod), pod["metadata"]
    where = str(about["name"]), str(about.get("namespace", ""))
    conditions = {text(each, "type"): each for each in items(status, "conditions")}
    if status.get("phase") == "Failed" and status.get("reason"):
        reason = "Evicted" if status["reason"] == "Evicted" else "NotStarted"
        return PodTrouble(reason, f"{status['reason']}: {text(status, 'message')}", *where)
    if (scheduled := conditions.get("PodScheduled", {})).get("reason") == "Unschedulable":
        return PodTrouble("Unschedulable", text(scheduled, "message"), *where)
    for container in (*items(status, "initContainerStatuses"), *items(status, "containerStatuses")):
        name, waiting = text(container, "name"), mapping(container, "state", "waiting")
        ended = mapping(container, "state", "terminated") or mapping(container, "lastState", "terminated")
        if text(ended, "reason") == "OOMKilled":
            times = f"killed for its memory, {container.get('restartCount', 0)} restarts"
            return PodTrouble("OutOfMemory", times, *where, name)
        if reason := _WAITING.get(text(waiting, "reason"), ""):
            return PodTrouble(reason, text(waiting, "message") or text(waiting, "reason"), *where, name)
    ready = {of: text(conditions.get(of, {}), "status") for of in ("Ready", "ContainersReady")}
    if status.get("phase") == "Running" and ready == {"Ready": "False", "ContainersReady": "True"}:
        # (the kubelet would set both; a cluster sets the first one where the kubelet is silent)
        node = text(mapping(pod, "spec"), "nodeName")
        return PodTrouble("NodeLost", f"its node {node} does not answer", *where, node=node)
    return None


def seconds_of(time: str) -> float:
    """A time of the server, in seconds since the epoch."""
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


def running_s(pod: Body, now_s: float) -> float:
    """Seconds since the first of the running containers of a pod has started; 0 if none runs."""
    running = [mapping(each, "state", "running") for each in items(status_of(pod), "containerStatuses")]
    times = [seconds_of(started) for each in running if (started := text(each, "startedAt"))]
    return max(0.0, now_s - min(times)) if times else 0.0


def replica_failure(deployment: Body) -> str:
    """Why a deployment cannot create its pods, such as a quota; "" if it can."""
    found = (entry for entry in items(status_of(deployment), "conditions") if entry.get("type") == "ReplicaFailure")
    return text(next(found, {}), "message")


def controller_down(deployment: Body, pods: Iterable[Body]) -> Now | None:
    """The condition of reports whose controller does not run and why; None if it runs, starts or is out of sight."""
    about = deployment["metadata"]
    found = next(filter(None, map(pod_trouble, pods)), None)
    if message := replica_failure(deployment):
        found = PodTrouble("Refused", message, str(about["name"]), str(about["namespace"]))
    if found is None or found.reason == "NodeLost" or status_of(deployment).get("availableReplicas"):
        return None
    return Now("Watched", "False", "ControllerDown", REPORT_WORDS["controller_down"].format(why=found.words))


MAX_NODES = 4
_NOT_KNOWN = ("no_run", "warming_up", "unknown")


def suspect_nodes(view: View) -> tuple[str, ...]:
    """The first few nodes of the ranks named last."""
    return tuple(dict.fromkeys(view.hosts.values()))[:MAX_NODES]


def report_status(body: Body, view: View, now_s: float, pod: str = "", trouble: str = "") -> objects.TriageReportStatus:
    """The status of the report on a job, from a view of its newest run; bounded, however long the run.

    ``pod`` names the pods on `suspect_nodes`; ``trouble`` says why steps of its pods do not arrive.
    """
    summary = RunSummary(view)
    held = [row for row in view.rows if row.outcome in ("hold", "throttle")]
    captures = list(_captures(view))
    return objects.TriageReportStatus(
        observedGeneration=body["metadata"].get("generation"),
        conditions=dated(body, (_healthy(summary), _watched(view, trouble), *_restarted(view)), now_s, others=True),
        run=None if view.info is None else view.info.run_id,
        health=summary.health,
        summary=_summary(summary),
        since_step=summary.since_step,
        suspect=summary.named or None,
        node=(", ".join(suspect_nodes(view)) or None) if summary.named else None,
        pod=(pod or None) if summary.named else None,
        verdict=objects.LastVerdict.model_validate(view.rows[-1]) if view.rows else None,
        windows=view.windows,
        windows_held=len(held),
        holds=tuple(_holds(held)),
        captures=tuple(captures[: objects.MAX_CAPTURES]),
        captures_total=len(captures),
        cost=_cost(view),
        advice=_advice(view),
        remedy=_remedy(view),
    )


def _summary(summary: RunSummary) -> str:
    """The state in a sentence, with the next step of a hang, what differs on a suspect, or what was mended last."""
    if summary.health == "no_run":
        return REPORT_WORDS["no_run"]
    if summary.health == "healthy":
        return " ".join((summary.sentence, *summary.mended[-1:]))
    hang = summary.cause if summary.health == "stalled" else None
    more = "" if hang is None else hang.next_step
    more = more if summary.differences is None else event_sentence(summary.differences)
    return f"{summary.sentence or summary.headline} {more}".strip()


def outdated(body: Body, now_s: float, keep_s: float) -> bool:
    """Whether a report without an owner (that of plain pods) has not changed for ``keep_s``."""
    about = body["metadata"]
    changed = [entry.lastTransitionTime for entry in readable(status_of(body).get("conditions"))]
    newest = max([*changed, str(about.get("creationTimestamp", ""))])
    # (times of one form, in UTC, are in the order of their letters)
    return not about.get("ownerReferences") and newest < clock(now_s - keep_s)


def _healthy(summary: RunSummary) -> Now:
    healthy: objects.Answer = "True" if summary.health == "healthy" else "False"
    status: objects.Answer = "Unknown" if summary.health in _NOT_KNOWN else healthy
    reason = "".join(word.capitalize() for word in summary.health.split("_"))
    words = REPORT_WORDS["no_run"] if summary.health == "no_run" else f"{summary.headline}. {summary.sentence}".strip()
    return Now("Healthy", status, reason, words)


def _watched(view: View, trouble: str) -> Now:
    if view.unwatched:
        return Now("Watched", "False", "Unwatched", REPORT_WORDS["unwatched"])
    if view.disk:
        return Now("Watched", "False", "DiskFull", f"{disk_now(view.disk)} {trouble}".strip())
    if trouble:
        return Now("Watched", "False", "Unheard", trouble)
    if view.going:
        return Now("Watched", "True", "Watched", REPORT_WORDS["watched"])
    return Now("Watched", "False", "NoRun" if view.info is None else "Ended", REPORT_WORDS["over"])


def _restarted(view: View) -> Iterator[Now]:
    broken = next((note for note in reversed(view.notes) if isinstance(note, JobBroken) and note.restarted), None)
    if broken is not None:
        yield Now("Restarted", "True", "RankEnded", event_sentence(broken))


def _holds(held: Sequence[WindowRow]) -> Iterator[objects.Hold]:
    rows: dict[tuple[str, str, tuple[str, ...]], list[WindowRow]] = {}
    for row in reversed(held):
        rows.setdefault((row.outcome, row.reason, row.reasons), []).append(row)
    for (outcome, reason, reasons), those in list(rows.items())[: objects.MAX_HOLDS]:
        yield objects.Hold(
            outcome=cast('Literal["hold", "throttle"]', outcome),
            reason=cast("Any", reason),
            reasons=reasons,
            windows=len(those),
            last_step=those[0].last_step,
            words="; ".join(explained(reasons)) if reason in ("undecided", "standstill") else those[0].words,
            resolves=those[0].resolves or None,
        )


def _captures(view: View) -> Iterator[objects.ReportedCapture]:
    stored = {capture.capture_id: capture for capture in view.captures if isinstance(capture, Manifest)}
    for capture_id, result in reversed(list(view.states.items())):
        manifest = stored.get(capture_id)
        yield objects.ReportedCapture(
            capture_id=capture_id,
            rank=result.rank,
            state=result.state,
            reproduced=None if manifest is None else manifest.holds_fault,
            cause=_cause(manifest),
        )


def _advice(view: View) -> objects.ReportedAdvice | None:
    advice = advice_of_run(view)
    if (straggler := advice.straggler) is not None:
        about, late_s = f"{straggler.who} in {straggler.where}", straggler.late_s
    elif advice.slow_link is not None:
        about, late_s = link_name(advice.slow_link.link), None
    else:
        return None
    if (best := advice.best) is None:
        return objects.ReportedAdvice(straggler=about, late_s=late_s, words=NOTHING)
    return objects.ReportedAdvice(
        straggler=about,
        late_s=late_s,
        remedy=best.code,
        saves_s=best.saves_s,
        break_even_s=best.pays_from_s,
        words=remedy_line(best),
    )


def _remedy(view: View) -> objects.ReportedRemedy | None:
    changes = [note for note in view.notes if isinstance(note, RemedyChanged)]
    changes += [change for change in tried_in(view) if change.state != "undone"]
    if not changes:
        return None
    newest = changes[-1]
    return objects.ReportedRemedy(
        remedy=newest.remedy,
        state=newest.state,
        rank=newest.rank,
        saves_s=newest.numbers.get("saves_s"),
        words=event_sentence(newest),
    )


def _cost(view: View) -> objects.StragglerCost:
    if not view.rows:
        return objects.StragglerCost()
    return objects.StragglerCost(
        stragglers_s=round(view.losses.lost_s, 1),
        stragglers_rank_hours=round(view.losses.rank_s / 3600, 6),
        stragglers_cost=None if view.times is None else view.times.money(view.losses.rank_s / 3600) or None,
        captures_s=round(captures_cost_s(view.notes), 3),
        wall_s=None if view.times is None else round(view.times.wall_s, 3),
        useful_s=None if view.times is None else round(view.times.rows[0].seconds, 3),
    )


_TROUBLE = ("suspect", "captured", "held", "regressed", "throttled", "stalled", "unknown")
_SILENT = (None, "no_run", "warming_up")
_MAX_MESSAGE = 1024


@dataclass(frozen=True, slots=True)
class ReportNews:
    """A change of a report: ``reason`` is one of a few words; a job has one event for each."""

    reason: str
    kind: Literal["Normal", "Warning"]
    message: str


def news(before: Mapping[str, Any], now: Mapping[str, Any], job: JobRef) -> Iterator[ReportNews]:
    """The changes from one status of a job's report to the next."""
    health, was = now.get("health"), before.get("health")
    if health != was and health not in _SILENT and not (health == "healthy" and was in _SILENT):
        reason = "".join(word.capitalize() for word in str(health).split("_"))
        yield ReportNews(reason, "Warning" if health in _TROUBLE else "Normal", str(now.get("summary") or health))
    restarted = [
        next((each["message"] for each in status.get("conditions", ()) if each["type"] == "Restarted"), "")
        for status in (before, now)
    ]
    if restarted[1] and restarted[1] != restarted[0]:
        yield ReportNews("Restarted", "Warning", restarted[1])
    remedy = now.get("remedy")
    if remedy is not None and remedy != before.get("remedy"):
        yield ReportNews(f"Remedy{remedy['state'].capitalize()}", "Normal", remedy["words"])
    known = {capture["capture_id"]: capture["state"] for capture in before.get("captures", ())}
    captures = now.get("captures", ())
    for state, reason in (("stored", "CaptureStored"), ("failed", "CaptureFailed"), ("expired", "CaptureFailed")):
        new = [capture for capture in captures if capture["state"] == state != known.get(capture["capture_id"])]
        if new:
            words = NEWS[state].format(count=len(new), capture_id=new[0]["capture_id"], rank=new[0]["rank"])
            fetch = job.fetch_command if state == "stored" else ""
            message = " ".join(filter(None, (words, new[0].get("cause"), fetch)))
            yield ReportNews(reason, "Normal" if state == "stored" else "Warning", message)


def event_name(job: JobRef, reason: str) -> str:
    """The name of the one event of a job that has this reason."""
    return f"{job.object_name}.{reason.lower()}"


def event_body(job: JobRef, report: Body, change: ReportNews, before: Body, times: int, now_s: float) -> dict[str, Any]:
    """The event of a change that occurred ``times`` more; ``before`` is the event as the server has it, or empty."""
    about = {name: report["metadata"].get(name) for name in ("name", "namespace", "uid")}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": job.metadata(name=event_name(job, change.reason)),
        "involvedObject": {"apiVersion": report["apiVersion"], "kind": report["kind"], **about},
        "reason": change.reason,
        "type": change.kind,
        "message": change.message[:_MAX_MESSAGE],
        "count": before.get("count", 0) + times,
        "firstTimestamp": before.get("firstTimestamp") or clock(now_s),
        "lastTimestamp": clock(now_s),
        "source": {"component": "sftriage"},
    }
