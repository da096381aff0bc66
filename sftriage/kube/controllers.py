"""The controllers of a namespace's jobs: one pod with a process for each job, while the namespace has injected pods.

The first part makes the objects of a namespace, from the policies in force; `Controllers` applies and removes them,
and marks the reports of jobs to watch. It is level-triggered, as all of the operator: a watch says which job or
namespace to reconcile, and what to do follows from the state of the cluster then.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache, partial
from typing import Any

from sftriage.fleet.hub import CA_FILE, CERTIFICATE_FILE, KEY_FILE, PORT
from sftriage.kube import client, jobs
from sftriage.kube.client import AnsweredError, ClusterObjects, Kept, ObjectWatch, path_of, plural_of
from sftriage.kube.injecting import InjectionSettings, Made, encrypted, filled, manifest, secret_of, store_environment
from sftriage.kube.jobs import HUB_NAME, JobRef, annotations_of, items, job_of, labels_of, text
from sftriage.kube.objects import API_VERSION, CAPTURES, GROUP, POLICIES, REPORTS, Body, Now, condition
from sftriage.kube.statuses import PolicyState, outdated, policy_states, policy_text
from sftriage.kube.webhook import AUTHORITY, CERTIFICATE, KEY, issued, service_names
from sftriage.policy.in_force import find
from sftriage.words.kube import REPORTS as REPORT_WORDS

NAME = "sftriage"
"""Of the objects of a namespace's controllers, except `HUB_NAME`."""
WANTED_ANNOTATION = f"{GROUP}/wanted"
"""On their Deployment, which is made last: the digest of what all of them were made of."""
WATCH_LABEL, YES = f"{GROUP}/watch", "true"
"""The label of the reports whose jobs have a controller."""
JOBS, NAMESPACES = "Job", "Namespace"
"""What is reconciled: a job by its id, and the controllers of a namespace by its name."""
USER, USER_NAME = 65532, "sftriage"
METRICS_PORT, HUB_VALID_DAYS = 9400, 3650


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """How controllers run: by the settings of injection.

    ``runs_claim`` is a PersistentVolumeClaim of the namespace for its runs. By default they go with the pod, and
    without a store their traces with them.
    """

    injection: InjectionSettings
    runs_claim: str = ""


def wanted(namespace: str, settings: ControllerSettings, policies: Mapping[str, str]) -> list[Made]:
    """All objects of a namespace's controllers but their secret, in order of creation.

    ``policies`` are the texts of those in force, by file name, see `policy_files`.
    """
    injection, selector = settings.injection, {jobs.OUR_COMPONENT_LABEL: jobs.CONTROLLER}
    about = _metadata(NAME, namespace)
    arguments = ["--nats", injection.nats, "--creds", "/hub"] if injection.nats else ["--creds", f"/hub/{jobs.HUB_KEY}"]
    arguments += ["--tls", "/hub"] if encrypted(injection) else []
    arguments += ["--metrics-port", str(METRICS_PORT)] if injection.metrics_secret else []
    arguments += ["--store", injection.store] if injection.store else []
    arguments += ["--keep-runs"] if settings.runs_claim else []
    sizes = injection.controllers
    values = {
        **dict(injection),
        "metadata": about,
        "hub_metadata": _metadata(HUB_NAME, namespace),
        "name": NAME,
        "namespace": namespace,
        "policies": policies,
        "selector": selector,
        "labels": {**selector, jobs.COMPONENT_LABEL: jobs.CONTROLLER, "app.kubernetes.io/name": "sftriage"},
        "hub": not injection.nats,
        "hub_port": PORT,
        "metrics_port": METRICS_PORT,
        "user": injection.run_as_user or USER,
        "arguments": arguments,
        "store_environment": store_environment(injection),
        "secret": secret_of(injection),
        "requests": {"cpu": sizes.cpu, "memory": sizes.memory},
        "limits": {"cpu": sizes.cpu_limit, "memory": sizes.memory_limit},
        "runs_claim": {"claimName": settings.runs_claim} if settings.runs_claim else None,
        "runs_volume": None if settings.runs_claim else {"sizeLimit": injection.runs},
    }
    *made, deployment = filled(manifest("controller.yaml"), values)
    digest = hashlib.sha256(json.dumps([*made, deployment]).encode()).hexdigest()[:16]
    return [*made, {**deployment, "metadata": {**about, "annotations": {WANTED_ANNOTATION: digest}}}]


def _metadata(name: str, namespace: str) -> dict[str, Any]:
    labels = dict.fromkeys((jobs.OUR_COMPONENT_LABEL, jobs.COMPONENT_LABEL), jobs.CONTROLLER)
    return {"name": name, "namespace": namespace, "labels": labels}


def secret(namespace: str, settings: InjectionSettings, password: str, now: datetime) -> Made:
    """The credentials of a namespace's hub, made once.

    If the hub is encrypted, they include its certificate, valid longer than any job lasts.
    """
    data = {jobs.HUB_KEY: f"{USER_NAME}:{password}\n"}
    if settings.hub_tls:
        signed = issued((*service_names(HUB_NAME, namespace), "127.0.0.1"), now, HUB_VALID_DAYS)
        data |= {
            CA_FILE: signed[AUTHORITY].decode(),
            CERTIFICATE_FILE: signed[CERTIFICATE].decode(),
            KEY_FILE: signed[KEY].decode(),
        }
    about = _metadata(secret_of(settings), namespace)
    return {"apiVersion": "v1", "kind": "Secret", "metadata": about, "type": "Opaque", "stringData": data}


def removed(job: JobRef | None = None) -> list[tuple[str, str, str]]:
    """API version, plural and name of all objects that a namespace's controllers may have, the Deployment last.

    Or those of the controller that a ``job`` has for itself, from an earlier version.
    """
    *made, deployment = (
        (each["apiVersion"], plural_of(each["kind"]), HUB_NAME if each["metadata"] == "<hub_metadata>" else NAME)
        for each in manifest("controller.yaml")
    )
    made += [("v1", "secrets", secret_of(InjectionSettings(hub_tls=tls))) for tls in (False, True)]
    if job is not None:
        own = {HUB_NAME: job.object_name, NAME: job.object_name, f"{HUB_NAME}-tls": f"{job.object_name}-tls"}
        return [(version, plural, own[name]) for version, plural, name in (*made, deployment)]
    return [*made, deployment]


def policy_files(found: Iterable[PolicyState]) -> dict[str, str]:
    """The policies in force as files, in their order; the shipped default if there are none."""
    in_force = [policy.body for policy in found if policy.in_force]
    if not in_force:
        return {"default.yaml": find("default").read_text(encoding="utf-8")}
    named = ((body, body["metadata"]["name"]) for body in in_force)
    return {f"{n:03}-{name}.yaml": policy_text(body, {"name": name}) for n, (body, name) in enumerate(named)}


log = logging.getLogger(__name__)

MANAGER = "sftriage-operator"
SWEEP_S = 3600.0
"""Seconds between two sweeps of reports."""
PODS_FIRST_S = 5.0
"""How long after its first pod a namespace gets controllers: they must not take the quota that pods need."""
_NAMED = 5
_UNENDED = "status.phase!=Succeeded,status.phase!=Failed"
_MISSED = f"!{jobs.INJECT_LABEL},!{jobs.JOB_LABEL}"


@dataclass(frozen=True, slots=True)
class PodState:
    """The job of a pod that has not ended, the uid of the job's object if it owns the pod, and what the pod contains.

    ``hub`` says that its agent, if it is ``injected``, looks for the namespace's hub. Earlier versions' do not.
    """

    name: str
    job: JobRef | None
    uid: str
    injected: bool
    hub: bool

    @classmethod
    def of(cls, body: Body) -> PodState:
        about, annotations = body["metadata"], annotations_of(body)
        job = _annotated(body) or job_of(body)
        owners = (each for each in items(about, "ownerReferences") if job is not None and _is_owner(each, job))
        uid = sys.intern(text(next(owners, {}), "uid"))
        return cls(_name(body), job, uid, jobs.is_injected(body), jobs.HUB_ANNOTATION in annotations)


def _is_owner(reference: Mapping[str, Any], job: JobRef) -> bool:
    return job.owner == (text(reference, "apiVersion"), text(reference, "kind"), text(reference, "name"))


@dataclass(frozen=True, slots=True)
class JobPods:
    """The pods of a job that have not ended: how many there are, and the names of those without sftriage.

    ``old`` says that some look for a hub of the job's own, and ``new`` that some look for the namespace's.
    """

    count: int
    missing: tuple[str, ...]
    old: bool = False
    new: bool = False

    @classmethod
    def of(cls, pods: Iterable[PodState]) -> JobPods:
        """The pods of a job; several watches may have the same pod."""
        there = {pod.name: pod for pod in pods}
        hubs = {pod.hub for pod in there.values() if pod.injected}
        missing = sorted(name for name, pod in there.items() if not pod.injected)
        return cls(len(there), tuple(missing), False in hubs, True in hubs)

    @property
    def watched(self) -> bool:
        return self.old or self.new

    def condition(self) -> Now:
        if not self.missing:
            return Now("Injected", "True", "Injected", REPORT_WORDS["injected"])
        names = ", ".join(self.missing[:_NAMED]) + (", …" if len(self.missing) > _NAMED else "")
        words = REPORT_WORDS["not_injected"].format(missing=len(self.missing), pods=self.count, names=names)
        return Now("Injected", "False", "NotInjected" if not self.watched else "PartlyInjected", words)


@dataclass(frozen=True, slots=True)
class ReportState:
    """The report of a job: whether the job has a controller, and its condition about the job's pods."""

    job: JobRef | None
    watch: bool
    injected: Now | None

    @classmethod
    def of(cls, body: Body) -> ReportState:
        found = condition(body, "Injected")
        now = None if found is None else Now("Injected", found.status, found.reason, found.message)
        return cls(_annotated(body), labels_of(body).get(WATCH_LABEL) == YES, now)


def _made_of(body: Body) -> tuple[str, str]:
    return str(body["metadata"]["namespace"]), annotations_of(body).get(WANTED_ANNOTATION, "")


# (100,000 pods share the jobs that they are of)
_job = lru_cache(1 << 14)(JobRef.of_id)


def job_id_of(body: Body) -> str:
    """The id of the job of a report or a pod; "" if it has none."""
    job = _annotated(body)
    return "" if job is None else job.job_id


def _annotated(body: Body) -> JobRef | None:
    try:
        return _job(annotations_of(body)[jobs.JOB_ID_ANNOTATION])
    except (KeyError, ValueError):
        return None


class Controllers:
    """The controllers of the jobs of a cluster, or of some ``namespaces``.

    A job's controller outlives its pods for ``grace_s``, and reports of plain pods stay for ``keep_s``. It calls
    ``reconcile_soon``, in any thread, with what to reconcile: `JOBS`, `NAMESPACES` or the kind of captures, and a job's
    id or a namespace; ``now`` is monotonic, in seconds.
    """

    def __init__(
        self,
        objects: ClusterObjects,
        settings: ControllerSettings,
        reconcile_soon: Callable[[str, str], None],
        namespaces: Sequence[str] = (),
        *,
        grace_s: float,
        keep_s: float,
        watch_s: int = client.WATCH_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objects, self._settings, self._reconcile_soon = objects, settings, reconcile_soon
        self._grace_s, self._keep_s, self._now = grace_s, keep_s, now
        self._gone_s: dict[JobRef, float] = {}
        self._begun_s: dict[str, float] = {}
        """When namespaces without controllers got their first pod."""
        self._watch_s = watch_s
        self._pods: defaultdict[JobRef, dict[tuple[str, str], PodState]] = defaultdict(dict)
        """The pods of each job, by selector and name: for a moment, two watches may have a pod."""
        self._lock = threading.Lock()
        labelled = f"{jobs.INJECT_LABEL}={jobs.ENABLED}"
        injected = f"{jobs.JOB_LABEL},{jobs.COMPONENT_LABEL}!={jobs.CONTROLLER}"
        ours, own = (
            f"{jobs.OUR_COMPONENT_LABEL}={jobs.CONTROLLER}",
            f"{jobs.JOB_LABEL},{jobs.COMPONENT_LABEL}={jobs.CONTROLLER}",
        )
        within = namespaces or ("",)
        reports = [path_of(API_VERSION, REPORTS.plural, each) for each in within]
        deployments = [path_of("apps/v1", "deployments", each) for each in within]
        self._reports = [self._watch(each, ReportState.of, self._report) for each in reports]
        self._made = [self._watch(each, _made_of, self._deployment, labelSelector=ours) for each in deployments]
        self._own = [self._watch(each, _annotated, self._own_deployment, labelSelector=own) for each in deployments]
        """Deployments of single jobs, from an earlier version."""
        pods = [self._watch_pods(each, injected) for each in within]
        missed = [self._watch_pods(each, f"{labelled},!{jobs.JOB_LABEL}", cached=True) for each in within]
        self._required: list[ObjectWatch[Any]] = [*self._reports, *self._made, *self._own, *pods, *missed]
        self._labelled: dict[str, ObjectWatch[PodState]] = {}
        """In a labelled namespace, pods that the webhook has missed have no label of ours."""
        self.watches = list(self._required)
        if not namespaces:
            # (controllers start without the right to list namespaces, too)
            self.watches.append(
                self._watch(path_of("v1", "namespaces"), _name, self._namespace, labelSelector=labelled)
            )

    def _watch_pods(self, namespace: str, selector: str, *, cached: bool = False) -> ObjectWatch[PodState]:
        path, changed = path_of("v1", "pods", namespace), partial(self._pod, selector)
        query = {"labelSelector": selector, "fieldSelector": _UNENDED}
        return self._watch(path, PodState.of, changed, metadata_only=True, cached=cached, **query)

    def _watch(
        self, path: str, keep: Any, changed: Any, *, metadata_only: bool = False, cached: bool = False, **query: str
    ) -> ObjectWatch[Any]:
        how: Any = {"query": query, "watch_s": self._watch_s, "metadata_only": metadata_only, "cached": cached}
        watch: ObjectWatch[Any] = ObjectWatch(self._objects, path, keep, changed, **how)
        watch.on_listed = self._listed
        return watch

    def begin(self) -> None:
        for watch in self.watches:
            watch.start()

    def named(self, namespace: str, name: str = "") -> list[JobRef]:
        """The jobs of a namespace that have pods or a controller; with a ``name``, those of this name or id."""
        found = (job for job in self._known() if job.namespace == namespace)
        return sorted((job for job in found if name in ("", job.name, job.job_id)), key=lambda job: job.job_id)

    def _known(self) -> set[JobRef]:
        with self._lock:
            there = set(self._pods)
        reports = (state for watch in self._reports for state in watch.kept())
        return there | {state.job for state in reports if state.watch and state.job is not None}

    def _job_pods(self, job: JobRef) -> JobPods:
        with self._lock:
            return JobPods.of(self._pods.get(job, {}).values())

    @property
    def _all_listed(self) -> bool:
        return all(watch.listed.is_set() for watch in (*self._required, *list(self._labelled.values())))

    def reconcile(self, job: JobRef) -> float | None:
        """Reconcile a job's report; return seconds until the next check, None where none is due. ClusterError."""
        if not self._all_listed:
            # (a pod that no list has shown yet is not gone; all jobs are reconciled once there is a list)
            return None
        pods, key = self._job_pods(job), (job.namespace, job.object_name)
        report, has_own = _one(self._reports, key), _one(self._own, key) is not None
        left_s = None
        if pods.watched:
            self._gone_s.pop(job, None)
        elif has_own or (report is not None and report.watch):
            left_s = max(0.0, self._gone_s.setdefault(job, self._now()) + self._grace_s - self._now())
        # (on one hub for all jobs, agents of an earlier version are at home too)
        shares = bool(self._settings.injection.nats)
        watch = pods.new or (shares and pods.old) or (bool(left_s) and report is not None and report.watch)
        if pods.count or (report is not None and report.watch != watch):
            self._put_report(job, pods, report, watch=watch, lost=pods.old and not (watch or has_own))
        if has_own and not left_s and (shares or not pods.old):
            self._remove(job.namespace, removed(job))
        if not left_s and not pods.watched:
            self._gone_s.pop(job, None)
        return left_s or None

    def _put_report(self, job: JobRef, pods: JobPods, known: ReportState | None, *, watch: bool, lost: bool) -> None:
        now = [pods.condition()] if pods.count else []
        now += [Now("Watched", "False", "OldPods", REPORT_WORDS["old_pods"])] if lost else []
        if known is not None and known.watch == watch and known.injected in now and not lost:
            return
        path = path_of(API_VERSION, REPORTS.plural, job.namespace)
        labels = {WATCH_LABEL: YES if watch else None}
        body: dict[str, Any] = {}
        if known is None:
            made = job.report(self._owners(job))
            made["metadata"]["labels"] |= {name: value for name, value in labels.items() if value}
            body = self._objects.request("POST", path, made, tolerate=client.STALE)
        if not body:
            body = self._objects.request(
                "PATCH", f"{path}/{job.object_name}", {"metadata": {"labels": labels}}, as_=client.MERGE
            )
        if now:
            client.put_condition(self._objects, REPORTS, body, *now)
        if known is None or known.watch != watch:
            log.info("%s: %s", job.job_id, "has a controller" if watch else "has no controller")

    def reconcile_namespace(self, namespace: str) -> float:
        """Make or remove the controllers of a namespace; return seconds until the next check, 0 where none is due.

        Their Secret is made at once, since a kubelet refreshes what it mounts once a minute. Raises ClusterError.
        """
        if not self._all_listed:
            return 0.0
        _, made_of = _one(self._made, (namespace, NAME)) or ("", None)
        if not any(self._is_watched(job) for job in self.named(namespace)):
            self._begun_s.pop(namespace, None)
            if made_of is not None:
                self._remove(namespace, removed())
            return 0.0
        found = policy_states(self._objects.list(POLICIES, namespace), time.time())
        made = wanted(namespace, self._settings, policy_files(found))
        if made[-1]["metadata"]["annotations"][WANTED_ANNOTATION] == made_of:
            self._begun_s.pop(namespace, None)
            return 0.0
        self._make_secret(namespace)
        left_s = self._begun_s.setdefault(namespace, self._now()) + PODS_FIRST_S - self._now()
        if made_of is None and left_s > 0:
            return left_s
        for body in made:
            self._objects.apply(body, MANAGER)
        log.info("%s: %s the controllers of its jobs", namespace, "started" if made_of is None else "updated")
        return 0.0

    def _make_secret(self, namespace: str) -> None:
        injection = self._settings.injection
        if not injection.nats:
            first = secret(namespace, injection, secrets.token_urlsafe(32), datetime.now(timezone.utc))
            self._objects.request("POST", path_of("v1", "secrets", namespace), first, tolerate=client.STALE)

    def _is_watched(self, job: JobRef) -> bool:
        report = _one(self._reports, (job.namespace, job.object_name))
        return self._job_pods(job).new or (report is not None and report.watch)

    def _remove(self, namespace: str, all_of_it: Iterable[tuple[str, str, str]]) -> None:
        for version, plural, name in all_of_it:
            self._objects.request("DELETE", path_of(version, plural, namespace, name), tolerate=client.NOT_FOUND)
        log.info("%s: removed the controller %s, since its pods are gone", namespace, name)

    def remove_outdated(self, namespace: str) -> float:
        """Remove reports of plain pods that ended long ago, which no object owns; return seconds until the next sweep.

        Raises ClusterError.
        """
        if not self._all_listed:
            return 1.0
        reports = self._objects.list(REPORTS, namespace or None)
        known = self._known()
        for body in reports:
            job, about = _annotated(body), body["metadata"]
            if job is None or job in known or not outdated(body, time.time(), self._keep_s):
                continue
            # (a report that has changed meanwhile stays)
            only = {"preconditions": {"uid": about["uid"], "resourceVersion": about["resourceVersion"]}}
            path = path_of(API_VERSION, REPORTS.plural, about["namespace"], about["name"])
            self._objects.request("DELETE", path, only, tolerate=client.STALE)
            log.info("%s: removed its report, the last of its objects", job.job_id)
        return SWEEP_S

    def _owners(self, job: JobRef) -> list[dict[str, str]]:
        """The owner reference to the object of a job; none if it is missing or unreadable."""
        if job.owner is None:
            return []
        version, kind, name = job.owner
        with self._lock:
            uid = next((pod.uid for pod in self._pods.get(job, {}).values() if pod.uid), "")
        try:
            if not uid:
                found = self._objects.request("GET", path_of(version, plural_of(kind), job.namespace, name))
                uid = str(found["metadata"]["uid"])
        except AnsweredError as error:
            if error.status not in (client.FORBIDDEN, client.NOT_FOUND):
                raise
            log.debug("%s: could not make %s %s its owner: %s", job.job_id, kind, name, error)
            return []
        return [{"apiVersion": version, "kind": kind, "name": name, "uid": uid}]

    def _listed(self) -> None:
        if not self._all_listed:
            return
        known = self._known() | {job for watch in self._own for job in watch.kept() if job is not None}
        made = {namespace for watch in self._made for namespace, _ in watch.kept()}
        for job in known:
            self._reconcile_soon(JOBS, job.job_id)
        for namespace in made | {job.namespace for job in known}:
            self._reconcile_soon(NAMESPACES, namespace)

    def _pod(self, selector: str, before: PodState | None, now: PodState | None) -> None:
        for state in (before, now):
            if state is None or state.job is None:
                continue
            with self._lock:
                is_new, pods = state.job not in self._pods, self._pods[state.job]
                if state is now:
                    pods[selector, state.name] = state
                elif now is None or now.job != state.job:
                    pods.pop((selector, state.name), None)
                if not pods:
                    del self._pods[state.job]
            self._enqueue(state.job)
            if is_new:
                self._reconcile_soon(CAPTURES.kind, state.job.namespace)

    def _enqueue(self, job: JobRef) -> None:
        if self._all_listed:
            self._reconcile_soon(JOBS, job.job_id)
            if _one(self._made, (job.namespace, NAME)) is None:
                self._reconcile_soon(NAMESPACES, job.namespace)

    def _report(self, before: ReportState | None, now: ReportState | None) -> None:
        for state in (before, now):
            if state is not None and state.job is not None and self._all_listed:
                self._reconcile_soon(JOBS, state.job.job_id)
                self._reconcile_soon(NAMESPACES, state.job.namespace)

    def _deployment(self, before: tuple[str, str] | None, now: tuple[str, str] | None) -> None:
        for namespace, _ in filter(None, (before, now)):
            self._reconcile_soon(NAMESPACES, namespace)

    def _own_deployment(self, *jobs_: JobRef | None) -> None:
        for job in filter(None, jobs_):
            self._reconcile_soon(JOBS, job.job_id)

    def _namespace(self, before: str | None, now: str | None) -> None:
        if now is not None and now not in self._labelled:
            self._labelled[now] = self._watch_pods(now, _MISSED, cached=True)
            self._labelled[now].start()
        elif now is None and before is not None and (watch := self._labelled.pop(before, None)) is not None:
            watch.end()
            for state in watch.kept():
                self._pod(_MISSED, state, None)


def _one(watches: Iterable[ObjectWatch[Kept]], key: client.Key) -> Kept | None:
    return next((found for watch in watches if (found := watch.one(key)) is not None), None)


def _name(body: Body) -> str:
    return str(body["metadata"]["name"])
