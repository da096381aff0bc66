"""One controller for each job: its objects exist while the job has pods with sftriage in them.

The first part makes these objects, from the job and the policies in force; `Controllers` applies and removes them.
It is level-triggered, as all of the operator: a watch says which job to reconcile, and what to do follows from the
state of the cluster then.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from sftriage.fleet.hub import CA_FILE, CERTIFICATE_FILE, KEY_FILE, PORT
from sftriage.kube import client, jobs
from sftriage.kube.client import AnsweredError, ClusterObjects, ObjectWatch, get_or_create, path_of, plural_of
from sftriage.kube.injecting import InjectionSettings, Made, encrypted, filled, manifest, secret_of, store_environment
from sftriage.kube.jobs import JobRef, annotations_of, job_of, mapping
from sftriage.kube.objects import API_VERSION, GROUP, POLICIES, REPORTS, Body, Now
from sftriage.kube.statuses import PolicyState, outdated, policy_states, policy_text
from sftriage.kube.webhook import AUTHORITY, CERTIFICATE, KEY, issued, service_names
from sftriage.policy.in_force import find
from sftriage.words.kube import REPORTS as REPORT_WORDS

WANTED_ANNOTATION = f"{GROUP}/wanted"
"""On a job's Deployment, which is made last: the digest of what all its objects were made of."""
USER, USER_NAME = 65532, "sftriage"
METRICS_PORT, HUB_VALID_DAYS = 9400, 3650


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """How controllers run: by the settings of injection.

    ``runs_claim`` is a PersistentVolumeClaim of the job's namespace for its runs. By default they go with the pod, and
    without a store their traces with them.
    """

    injection: InjectionSettings
    runs_claim: str = ""


def wanted(
    job: JobRef, settings: ControllerSettings, policies: Mapping[str, str], owners: Sequence[Mapping[str, str]] = ()
) -> list[Made]:
    """All objects of a job's controller but its secret, in order of creation; they go with their ``owners``.

    ``policies`` are the texts of those in force, by file name, see `policy_files`.
    """
    injection, name = settings.injection, job.object_name
    about = job.metadata(labels={jobs.COMPONENT_LABEL: jobs.CONTROLLER}, ownerReferences=list(owners))
    selector = {jobs.JOB_LABEL: name, jobs.COMPONENT_LABEL: jobs.CONTROLLER}
    arguments = ["--nats", injection.nats, "--creds", "/hub"] if injection.nats else ["--creds", f"/hub/{jobs.HUB_KEY}"]
    arguments += ["--tls", "/hub"] if encrypted(injection) else []
    arguments += ["--metrics-port", str(METRICS_PORT)] if injection.metrics_secret else []
    arguments += ["--store", injection.store] if injection.store else []
    values = {
        **dict(injection),
        "metadata": about,
        "name": name,
        "namespace": job.namespace,
        "job_id": job.job_id,
        "policies": policies,
        "selector": selector,
        "labels": {**selector, "app.kubernetes.io/name": "sftriage"},
        "hub": not injection.nats,
        "hub_port": PORT,
        "metrics_port": METRICS_PORT,
        "user": injection.run_as_user or USER,
        "arguments": arguments,
        "store_environment": store_environment(injection),
        "secret": secret_of(job, injection),
        "runs_path": name if settings.runs_claim else None,
        "runs_claim": {"claimName": settings.runs_claim} if settings.runs_claim else None,
        "runs_volume": None if settings.runs_claim else {"sizeLimit": "20Gi"},
    }
    *made, deployment = filled(manifest("controller.yaml"), values)
    digest = hashlib.sha256(json.dumps([*made, deployment]).encode()).hexdigest()[:16]
    annotations = {**about["annotations"], WANTED_ANNOTATION: digest}
    return [*made, {**deployment, "metadata": {**about, "annotations": annotations}}]


def secret(job: JobRef, settings: InjectionSettings, password: str, now: datetime) -> Made:
    """The credentials of a job's hub, made once. Nothing owns them, so a restarted job of that name still has them.

    If the hub is encrypted, they include its certificate, valid longer than any job lasts.
    """
    data = {jobs.HUB_KEY: f"{USER_NAME}:{password}\n"}
    if settings.hub_tls:
        names = (*service_names(job.object_name, job.namespace), "127.0.0.1")
        signed = issued(names, now, HUB_VALID_DAYS)
        data |= {
            CA_FILE: signed[AUTHORITY].decode(),
            CERTIFICATE_FILE: signed[CERTIFICATE].decode(),
            KEY_FILE: signed[KEY].decode(),
        }
    about = job.metadata(name=secret_of(job, settings))
    return {"apiVersion": "v1", "kind": "Secret", "metadata": about, "type": "Opaque", "stringData": data}


def removed(job: JobRef) -> list[tuple[str, str, str]]:
    """API version, plural and name of all objects a controller may have; its Deployment, which marks it, comes last."""
    secrets = (job.object_name, secret_of(job, InjectionSettings(hub_tls=True)))
    template = manifest("controller.yaml")
    *made, deployment = ((each["apiVersion"], plural_of(each["kind"]), secrets[0]) for each in template)
    return [*made, *(("v1", "secrets", name) for name in secrets), deployment]


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
_NAMED = 5


@dataclass(frozen=True, slots=True)
class PodState:
    """The job of a pod, and whether the pod contains sftriage and has not ended."""

    name: str
    job: JobRef | None
    injected: bool
    active: bool

    @classmethod
    def of(cls, body: Body) -> PodState:
        active = mapping(body, "status").get("phase") not in ("Succeeded", "Failed")
        return cls(_name(body), _annotated(body) or job_of(body), jobs.is_injected(body), active)


@dataclass(frozen=True, slots=True)
class JobPods:
    """The pods of a job that have not ended: how many there are, and the names of those without sftriage."""

    count: int
    missing: tuple[str, ...]

    @classmethod
    def of(cls, pods: Iterable[PodState]) -> JobPods:
        """The pods of a job; several watches may have the same pod."""
        there = {pod.name: pod for pod in pods if pod.active}
        return cls(len(there), tuple(sorted(name for name, pod in there.items() if not pod.injected)))

    @property
    def watched(self) -> bool:
        return self.count > len(self.missing)

    def condition(self) -> Now:
        if not self.missing:
            return Now("Injected", "True", "Injected", REPORT_WORDS["injected"])
        names = ", ".join(self.missing[:_NAMED]) + (", …" if len(self.missing) > _NAMED else "")
        words = REPORT_WORDS["not_injected"].format(missing=len(self.missing), pods=self.count, names=names)
        return Now("Injected", "False", "NotInjected" if not self.watched else "PartlyInjected", words)


@dataclass(frozen=True, slots=True)
class Deployed:
    """The job of a Deployment, and the digest of what it was made of."""

    job: JobRef | None
    made_of: str

    @classmethod
    def of(cls, body: Body) -> Deployed:
        return cls(_annotated(body), annotations_of(body).get(WANTED_ANNOTATION, ""))


def _annotated(body: Body) -> JobRef | None:
    try:
        return JobRef.of_id(annotations_of(body)[jobs.JOB_ID_ANNOTATION])
    except (KeyError, ValueError):
        return None


class Controllers:
    """The controllers of the jobs of a cluster, or of some ``namespaces``.

    A controller outlives the pods of its job for ``grace_s``, and reports of plain pods stay for ``keep_s``. It calls
    ``reconcile_soon``, in any thread, with a job that has to be reconciled; ``now`` is monotonic, in seconds.
    """

    def __init__(
        self,
        objects: ClusterObjects,
        settings: ControllerSettings,
        reconcile_soon: Callable[[JobRef], None],
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
        self._watch_s = watch_s
        labelled, ours = f"{jobs.INJECT_LABEL}={jobs.ENABLED}", f"{jobs.JOB_LABEL},{jobs.COMPONENT_LABEL}"
        injected, made = f"{ours}!={jobs.CONTROLLER}", f"{ours}={jobs.CONTROLLER}"
        within = namespaces or ("",)
        self._pods = [self._watch_pods(each, selector) for each in within for selector in (labelled, injected)]
        self._deployments = [
            self._watch(path_of("apps/v1", "deployments", each), made, Deployed.of, self._enqueue) for each in within
        ]
        self._labelled: dict[str, ObjectWatch[PodState]] = {}
        """In a labelled namespace, pods that the webhook has missed have no label of ours."""
        self.watches: list[ObjectWatch[Any]] = [*self._pods, *self._deployments]
        if not namespaces:
            # (controllers start without the right to list namespaces, too)
            self.watches.append(self._watch(path_of("v1", "namespaces"), labelled, _name, self._namespace))

    def _watch_pods(self, namespace: str, selector: str) -> ObjectWatch[PodState]:
        return self._watch(path_of("v1", "pods", namespace), selector, PodState.of, self._enqueue)

    def _watch(self, path: str, selector: str, keep: Any, changed: Any) -> ObjectWatch[Any]:
        query = {"labelSelector": selector}
        return ObjectWatch(self._objects, path, keep, changed, query=query, watch_s=self._watch_s)

    def begin(self) -> None:
        for watch in self.watches:
            watch.start()

    def named(self, namespace: str, name: str = "") -> list[JobRef]:
        """The jobs of a namespace; with a ``name``, those of this name or id."""
        found = (job for job in self._known() if job.namespace == namespace)
        return sorted((job for job in found if name in ("", job.name, job.job_id)), key=lambda job: job.job_id)

    def _states(self) -> Iterator[PodState | Deployed]:
        for watch in (*self._pods, *list(self._labelled.values()), *self._deployments):
            yield from watch.kept()

    def _known(self) -> set[JobRef]:
        return {state.job for state in self._states() if state.job is not None}

    @property
    def _all_listed(self) -> bool:
        watches = (*self._pods, *list(self._labelled.values()), *self._deployments)
        return all(watch.listed.is_set() for watch in watches)

    def reconcile(self, job: JobRef) -> float | None:
        """Reconcile a job's objects; return seconds until the next check, None where none is due. ClusterError."""
        if not self._all_listed:
            # (a pod that no list has shown yet is not gone)
            return 1.0
        states = [state for state in self._states() if state.job == job]
        pods = JobPods.of(state for state in states if isinstance(state, PodState))
        made_of = next((state.made_of for state in states if isinstance(state, Deployed)), None)
        if pods.count:
            owners = self._owners(job)
            body = get_or_create(self._objects, path_of(API_VERSION, REPORTS.plural, job.namespace), job.report(owners))
            client.put_condition(self._objects, REPORTS, body, pods.condition())
            if pods.watched:
                self._gone_s.pop(job, None)
                self._make(job, owners, made_of)
                return None
        if made_of is None:
            self._gone_s.pop(job, None)
            return None
        left_s = self._gone_s.setdefault(job, self._now()) + self._grace_s - self._now()
        if left_s > 0:
            return left_s
        for version, plural, name in removed(job):
            self._objects.request("DELETE", path_of(version, plural, job.namespace, name), tolerate=client.NOT_FOUND)
        log.info("%s: removed its controller, since its pods are gone", job.job_id)
        return None

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

    def _make(self, job: JobRef, owners: list[dict[str, str]], made_of: str | None) -> None:
        found = policy_states(self._objects.list(POLICIES, job.namespace), time.time())
        made = wanted(job, self._settings, policy_files(found), owners)
        if made[-1]["metadata"]["annotations"][WANTED_ANNOTATION] == made_of:
            return
        if not self._settings.injection.nats:
            now = datetime.now(timezone.utc)
            first = secret(job, self._settings.injection, secrets.token_urlsafe(32), now)
            self._objects.request("POST", path_of("v1", "secrets", job.namespace), first, tolerate=client.STALE)
        for body in made:
            self._objects.apply(body, MANAGER)
        log.info("%s: %s its controller", job.job_id, "started" if made_of is None else "updated")

    def _owners(self, job: JobRef) -> list[dict[str, str]]:
        """The owner reference to the object of a job; none if it is missing or unreadable."""
        if job.owner is None:
            return []
        version, kind, name = job.owner
        try:
            found = self._objects.request("GET", path_of(version, plural_of(kind), job.namespace, name))
        except AnsweredError as error:
            if error.status not in (client.FORBIDDEN, client.NOT_FOUND):
                raise
            log.debug("%s: could not make %s %s its owner: %s", job.job_id, kind, name, error)
            return []
        return [{"apiVersion": version, "kind": kind, "name": name, "uid": str(found["metadata"]["uid"])}]

    def _namespace(self, before: str | None, now: str | None) -> None:
        if now is not None and now not in self._labelled:
            self._labelled[now] = self._watch_pods(now, f"!{jobs.INJECT_LABEL},!{jobs.JOB_LABEL}")
            self._labelled[now].start()
        elif now is None and before is not None and (watch := self._labelled.pop(before, None)) is not None:
            watch.end()
            self._enqueue(*watch.kept())

    def _enqueue(self, *states: PodState | Deployed | None) -> None:
        for job in {state.job for state in states if state is not None and state.job is not None}:
            self._reconcile_soon(job)


def _name(body: Body) -> str:
    return str(body["metadata"]["name"])
