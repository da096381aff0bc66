"""One controller for each job: its objects are made while the job has pods with sftriage in them, and removed after.

Level-triggered, as all of the operator: what is watched says which job is to be looked at, and what is done follows
from how things stand then.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

from sftriage.kube.client import (
    NOT_FOUND,
    STALE,
    AnsweredError,
    ClusterObjects,
    ObjectWatch,
    ask_unless,
    get_or_create,
    path_of,
)
from sftriage.kube.deploying import (
    COMPONENT_LABEL,
    CONTROLLER,
    WANTED_ANNOTATION,
    ControllerSettings,
    policy_files,
    removed,
    secret,
    wanted,
)
from sftriage.kube.fields import Now, dated, readable, status_of
from sftriage.kube.jobs import (
    ENABLED,
    INJECT_LABEL,
    INJECTED,
    JOB_ID_ANNOTATION,
    JOB_LABEL,
    STATUS_ANNOTATION,
    JobRef,
    annotations_of,
    job_of,
    mapping,
)
from sftriage.kube.mirrored import job_named, report_body
from sftriage.kube.objects import API_VERSION, POLICIES, REPORTS
from sftriage.kube.policies import standings
from sftriage.kube.reports import outdated
from sftriage.words.kube import REPORTS as SAID

log = logging.getLogger(__name__)

MANAGER = "sftriage-operator"
GRACE_S = 300.0
"""How long a job may be without pods until its controller goes: it may start again, and traces are on their way."""
KEEP_S, SWEEP_S = 7 * 86_400.0, 3600.0
"""How long reports of plain pods stay, and how often they are looked through."""
_NAMED = 5
_OVER = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class PodSeen:
    """As much of a pod as matters: of which job it is, whether sftriage is in it, and whether it has ended."""

    name: str
    job: JobRef | None
    injected: bool
    active: bool


def pod_seen(body: Mapping[str, Any]) -> PodSeen:
    """What matters of a pod."""
    about, job = annotations_of(body), None
    try:
        job = job_named(about[JOB_ID_ANNOTATION])
    except (KeyError, ValueError):
        found = job_of(body)
        job = None if found is None else found.job
    active = mapping(body, "status").get("phase") not in _OVER
    return PodSeen(str(body["metadata"]["name"]), job, about.get(STATUS_ANNOTATION) == INJECTED, active)


@dataclass(frozen=True, slots=True)
class JobPods:
    """The pods of a job that have not ended: how many there are, and those that sftriage was not put into."""

    count: int
    missing: tuple[str, ...]

    @classmethod
    def of(cls, pods: Mapping[Any, PodSeen]) -> JobPods:
        """How a job's pods stand; one that several watches have seen is one."""
        there = {one.name: one for one in pods.values() if one.active}
        return cls(len(there), tuple(sorted(name for name, one in there.items() if not one.injected)))

    @property
    def watched(self) -> bool:
        """Whether there is anything to be watched."""
        return self.count > len(self.missing)

    def condition(self) -> Now:
        """Whether sftriage is in all of them."""
        if not self.missing:
            return Now("Injected", "True", "Injected", SAID["injected"])
        names = ", ".join(self.missing[:_NAMED]) + (", …" if len(self.missing) > _NAMED else "")
        words = SAID["not_injected"].format(missing=len(self.missing), pods=self.count, names=names)
        return Now("Injected", "False", "NotInjected" if not self.watched else "PartlyInjected", words)


@dataclass(frozen=True, slots=True)
class Deployed:
    """A job's Deployment: whose it is, and of what it was made."""

    job: JobRef | None
    made_of: str


def _deployed(body: Mapping[str, Any]) -> Deployed:
    about = annotations_of(body)
    try:
        return Deployed(job_named(about[JOB_ID_ANNOTATION]), about.get(WANTED_ANNOTATION, ""))
    except (KeyError, ValueError):
        return Deployed(None, "")


def _name(body: Mapping[str, Any]) -> str:
    return str(body["metadata"]["name"])


class Controllers:
    """The controllers of the jobs of a cluster, or of some ``namespaces``.

    Args:
        objects: the cluster.
        settings: how they run.
        look: is called, in any thread, with a job that has to be reconciled.
        namespaces: none means all.
        grace_s, keep_s, watch_s: see `sftriage.kube.operator.Looked`.
        now: monotonic, in seconds.
    """

    def __init__(
        self,
        objects: ClusterObjects,
        settings: ControllerSettings,
        look: Callable[[JobRef], None],
        namespaces: Sequence[str] = (),
        grace_s: float = GRACE_S,
        keep_s: float = KEEP_S,
        watch_s: int = 300,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objects, self._settings, self._look = objects, settings, look
        self._grace_s, self._keep_s, self._now = grace_s, keep_s, now
        self._lock = threading.Lock()
        self._pods: dict[JobRef, dict[tuple[str, str], PodSeen]] = {}
        self._deployed: dict[JobRef, str] = {}
        self._gone_s: dict[JobRef, float] = {}
        self._watches: list[ObjectWatch[Any]] = []
        self._unneeded: set[ObjectWatch[Any]] = set()
        self._watch_s = watch_s
        labelled, ours = f"{INJECT_LABEL}={ENABLED}", f"{JOB_LABEL},{COMPONENT_LABEL}"
        for namespace in namespaces or ("",):
            pods, deployments = path_of("v1", "pods", namespace), path_of("apps/v1", "deployments", namespace)
            self._watch(pods, labelled, pod_seen, partial(self._pod, "labelled"))
            self._watch(pods, f"{ours}!={CONTROLLER}", pod_seen, partial(self._pod, "injected"))
            self._watch(deployments, f"{ours}={CONTROLLER}", _deployed, self._deployment)
        # In a namespace that is labelled, the pods that the webhook has missed have no label of ours.
        self._labelled: dict[str, ObjectWatch[PodSeen]] = {}
        if not namespaces:
            # Whoever may not list these starts controllers all the same.
            self._unneeded.add(self._watch(path_of("v1", "namespaces"), labelled, _name, self._namespace))

    def _watch(self, path: str, selector: str, keep: Any, changed: Any) -> ObjectWatch[Any]:
        query = {"labelSelector": selector}
        found = ObjectWatch(self._objects, path, keep, changed, query=query, watch_s=self._watch_s)
        self._watches.append(found)
        return found

    def begin(self) -> None:
        """Begin to watch, in threads of their own."""
        for one in list(self._watches):
            one.start()

    def named(self, namespace: str, name: str = "") -> list[JobRef]:
        """The jobs of a namespace; with a ``name``, those that are called so, or whose id it is."""
        with self._lock:
            known = {*self._pods, *self._deployed}
        found = (one for one in known if one.namespace == namespace)
        return sorted((one for one in found if name in ("", one.name, one.job_id)), key=lambda one: one.job_id)

    @property
    def _all_listed(self) -> bool:
        return all(one.listed.is_set() or one in self._unneeded for one in list(self._watches))

    def reconcile(self, job: JobRef) -> float | None:
        """Have a job's objects be as they should be; in how many seconds it is to be looked at again, if so.

        Raises:
            ClusterError: the cluster is away, or refuses.
        """
        if not self._all_listed:
            # (what has not been seen has not gone)
            return 1.0
        with self._lock:
            pods = JobPods.of(self._pods.get(job, {}))
            made_of = self._deployed.get(job)
        if pods.count:
            owners = self._owners(job)
            self._report(job, pods, owners)
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
            ask_unless(self._objects, NOT_FOUND, "DELETE", path_of(version, plural, job.namespace, name))
        log.info("%s: its pods are gone, and so is its controller", job.job_id)
        return None

    def remove_outdated(self, namespace: str) -> float:
        """Remove reports of plain pods that ended long ago, which go with no object; when to look again, in seconds.

        Raises:
            ClusterError: the cluster is away, or refuses.
        """
        if not self._all_listed:
            return 1.0
        for body in self._objects.list(REPORTS, namespace or None):
            job, about = _deployed(body).job, body["metadata"]
            with self._lock:
                there = job in self._pods or job in self._deployed
            if job is None or there or not outdated(body, time.time(), self._keep_s):
                continue
            # (one that has changed meanwhile is news)
            only = {"preconditions": {"uid": about["uid"], "resourceVersion": about["resourceVersion"]}}
            path = path_of(API_VERSION, REPORTS.plural, about["namespace"], about["name"])
            ask_unless(self._objects, STALE, "DELETE", path, only)
            log.info("%s: its report is removed, which was the last of it", job.job_id)
        return SWEEP_S

    def _make(self, job: JobRef, owners: list[dict[str, str]], made_of: str | None) -> None:
        found = standings(self._objects.list(POLICIES, job.namespace), time.time())
        made = wanted(job, self._settings, policy_files(found), owners)
        if made[-1]["metadata"]["annotations"][WANTED_ANNOTATION] == made_of:
            return
        if not self._settings.injection.nats:
            now = datetime.now(timezone.utc)
            first = secret(job, self._settings.injection, secrets.token_urlsafe(32), now)
            ask_unless(self._objects, STALE, "POST", path_of("v1", "secrets", job.namespace), first)
        for one in made:
            self._objects.apply(one, MANAGER)
        log.info("%s: its controller is %s", job.job_id, "started" if made_of is None else "as is wanted now")

    def _owners(self, job: JobRef) -> list[dict[str, str]]:
        """The owner reference to the object of a job; none if it is missing or unreadable."""
        if job.owner is None:
            return []
        version, kind, name = job.owner
        try:
            found = self._objects.ask("GET", path_of(version, f"{kind.lower()}s", job.namespace, name))
        except AnsweredError as error:
            if error.status not in (403, NOT_FOUND):
                raise
            log.debug("%s: %s %s cannot be its owner: %s", job.job_id, kind, name, error)
            return []
        return [{"apiVersion": version, "kind": kind, "name": name, "uid": str(found["metadata"]["uid"])}]

    def _report(self, job: JobRef, pods: JobPods, owners: list[dict[str, str]]) -> None:
        path = path_of(API_VERSION, REPORTS.plural, job.namespace)
        body = get_or_create(self._objects, path, report_body(job, owners))
        status = dict(status_of(body))
        before = readable(status.get("conditions"))
        generation = body["metadata"].get("generation")
        (now,) = dated([pods.condition()], status.get("conditions"), generation, time.time())
        if now in before:
            return
        others = [one.plain() for one in before if one.type != now.type]
        self._objects.put_status(REPORTS, body, {**status, "conditions": [*others, now.plain()]})

    def _pod(self, watch: str, before: PodSeen | None, now: PodSeen | None) -> None:
        with self._lock:
            for one in filter(None, (before, now)):
                if one.job is None:
                    continue
                pods = self._pods.setdefault(one.job, {})
                if one is now:
                    pods[watch, one.name] = one
                elif now is None or now.job != one.job:
                    pods.pop((watch, one.name), None)
                if not pods:
                    del self._pods[one.job]
        self._look_at(before, now)

    def _namespace(self, before: str | None, now: str | None) -> None:
        if now is not None and now not in self._labelled:
            pods, selector = path_of("v1", "pods", now), f"!{INJECT_LABEL},!{JOB_LABEL}"
            self._labelled[now] = self._watch(pods, selector, pod_seen, partial(self._pod, "namespace"))
            self._labelled[now].start()
        elif now is None and before is not None and (watch := self._labelled.pop(before, None)) is not None:
            watch.end()
            self._watches.remove(watch)
            for pod in watch.kept():
                self._pod("namespace", pod, None)

    def _deployment(self, before: Deployed | None, now: Deployed | None) -> None:
        with self._lock:
            if now is not None and now.job is not None:
                self._deployed[now.job] = now.made_of
            elif before is not None and before.job is not None:
                self._deployed.pop(before.job, None)
        self._look_at(before, now)

    def _look_at(self, *seen: PodSeen | Deployed | None) -> None:
        for job in {one.job for one in seen if one is not None and one.job is not None}:
            self._look(job)
