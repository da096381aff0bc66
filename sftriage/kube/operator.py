"""The operator: watches policies, captures and jobs of a cluster; writes statuses, deletes traces, starts controllers.

`policy_states`, `capture_status` and `removal` decide; `Controllers` reconciles jobs. Statuses follow from the current
objects, and an event only triggers a check, so a restart, a lost event or a late write loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import kopf

from sftriage.errors import ClusterError, InputError, StoreError, UsageError
from sftriage.kube import client
from sftriage.kube.client import AnsweredError, ClusterObjects, LeaderElection, path_of, put_condition, short
from sftriage.kube.controllers import JOBS, NAMESPACES, Controllers, ControllerSettings
from sftriage.kube.jobs import COMPONENT_LABEL, CONTROLLER, JOB_LABEL, JobRef
from sftriage.kube.objects import (
    API_VERSION,
    CAPTURES,
    GROUP,
    POLICIES,
    REPORTS,
    VERSION,
    Body,
    Kind,
    Now,
    condition,
    status_of,
)
from sftriage.kube.statuses import (
    KnownCapture,
    Removal,
    capture_status,
    controller_down,
    policy_states,
    removal,
    seconds_of,
)
from sftriage.traces.remote import RemoteStore, checked_url
from sftriage.traces.store import PIN_NAME
from sftriage.words.kube import CAPTURES as CAPTURE_WORDS
from sftriage.words.kube import removal_sentence

RETRY_S = 15.0
"""Delay until an unreachable store is tried again."""
FRESH_S, AGAIN_S = 60.0, 2.0
"""Its controller may be adding the cause to a trace this new: delete it, and check again after this pause."""


def remove_trace(
    body: Body, stores: Collection[str], now_s: float, open_store: Callable[[str], RemoteStore] = RemoteStore.open
) -> Removal:
    """Delete the trace of a deleted capture, unless it has to wait.

    Deletes only in these stores: a status may name any place, and would use our rights there.
    """
    wanted = removal(body, now_s)
    if (stored := wanted.stored) is None:
        return wanted
    try:
        if checked_url(stored.store) not in stores:
            return Removal(removal_sentence("elsewhere", place=stored.store), wait_s=RETRY_S)
        store = open_store(stored.store)
        names = store.names(stored.reference)
        code = "gone" if not names else "pinned" if PIN_NAME in names else "removed"
        if code == "removed":
            store.remove(stored.reference)
            since = condition(body, "Stored")
            if since is not None and now_s < seconds_of(since.lastTransitionTime) + FRESH_S:
                return Removal(removal_sentence("again", place=stored.store), wait_s=AGAIN_S)
    except (UsageError, InputError, StoreError) as error:
        words = removal_sentence("unreachable", place=stored.store, problem=str(error))
        return Removal(words, wait_s=RETRY_S)
    return Removal(removal_sentence(code, place=stored.store))


FINALIZER = f"{GROUP}/trace"
_PREFIX = f"operator.{GROUP}"
_SETTLE_S = 0.2
"""Pause before a namespace is reconciled, to collect bursts of events."""
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_AT_ONCE = 8
"""Namespaces and jobs reconciled at the same time."""
DEPLOYMENTS = "Deployment"
"""What runs the controllers of a namespace; reconciled as policies and captures are, by the namespace."""
DOWN_S = 30.0
"""How often to look for controllers that do not run, and how long one may take to start."""
_log = logging.getLogger(__name__)


class Reconciler:
    """Writes the statuses of whole namespaces until they are up to date, and reconciles jobs and controllers."""

    def __init__(self, objects: ClusterObjects) -> None:
        self._objects = objects
        self.controllers: Controllers | None = None
        self._waiting: set[tuple[str, str]] = set()
        self._pauses_s: dict[tuple[str, str], float] = {}
        self._there = asyncio.Event()

    def start_controllers(self, settings: ControllerSettings, namespaces: Sequence[str], **times_s: Any) -> None:
        """Start controllers of jobs from now on; in the operator's loop."""
        loop = asyncio.get_running_loop()

        def reconcile_soon(kind: str, name: str) -> None:
            # (while pods come by the thousand, most are of jobs that wait already)
            if (kind, name) not in self._waiting:
                loop.call_soon_threadsafe(self.enqueue, kind, name)

        self.controllers = Controllers(self._objects, settings, reconcile_soon, namespaces, **times_s)
        self.controllers.begin()
        for namespace in namespaces or ("",):
            self.enqueue(REPORTS.kind, namespace)
            self.enqueue(DEPLOYMENTS, namespace)

    def enqueue(self, kind: str, namespace: str | None) -> None:
        self._waiting.add((kind, namespace or ""))
        self._there.set()

    async def run(self) -> None:
        while True:
            await self._there.wait()
            await asyncio.sleep(_SETTLE_S)
            self._there.clear()
            waiting, self._waiting = self._waiting, set()
            at_once = asyncio.Semaphore(_AT_ONCE)
            await asyncio.gather(*(self._reconcile(item, at_once) for item in sorted(waiting)))

    async def _reconcile(self, item: tuple[str, str], at_once: asyncio.Semaphore) -> None:
        async with at_once:
            again_s = await asyncio.to_thread(self._try, *item)
        if again_s is None:
            again_s = self._pauses_s[item] = min(2 * self._pauses_s.get(item, _PAUSE_S / 2), _LONGEST_PAUSE_S)
        else:
            self._pauses_s.pop(item, None)
        if again_s:
            asyncio.get_running_loop().call_later(again_s, self.enqueue, *item)

    def _try(self, kind: str, name: str) -> float | None:
        """Reconcile one item; return seconds until the next check (0: none), or log a failure and return None."""
        try:
            if self.controllers is not None and kind == JOBS:
                return self.controllers.reconcile(JobRef.of_id(name)) or 0.0
            if self.controllers is not None and kind == NAMESPACES:
                return self.controllers.reconcile_namespace(name)
            if self.controllers is not None and kind == REPORTS.kind:
                return self.controllers.remove_outdated(name)
            if kind == DEPLOYMENTS:
                return self._find_down(name)
            if kind == CAPTURES.kind:
                found = self._captures(name)
            else:
                policies = policy_states(self._objects.list(POLICIES, name), time.time())
                found = [(POLICIES, each.body, each.status.plain()) for each in policies if each.changed]
        except ClusterError as error:
            if not (isinstance(error, AnsweredError) and error.status == client.STALE):
                _log.warning("%s in %s: %s", kind, name, error)
            return None
        except Exception:
            # Whatever it is: the others continue, and this one is tried again.
            _log.exception("could not reconcile %s in %s", kind, name)
            return None
        written = [self._write(*entry) for entry in found]
        return 0.0 if all(written) else None

    def _find_down(self, namespace: str) -> float:
        """Show in the reports which controllers do not run, and why; return seconds until the next time."""
        selector = f"{COMPONENT_LABEL}={CONTROLLER}"
        # (version 0: from the server's memory)
        path = path_of("apps/v1", "deployments", namespace)
        for body in self._objects.request("GET", path, labelSelector=selector, resourceVersion="0")["items"]:
            about, status = body["metadata"], status_of(body)
            if status.get("availableReplicas") or seconds_of(about["creationTimestamp"]) + DOWN_S > time.time():
                continue
            within, job = about["namespace"], (about.get("labels") or {}).get(JOB_LABEL)
            matching = ",".join(f"{name}={value}" for name, value in body["spec"]["selector"]["matchLabels"].items())
            pods = self._objects.request("GET", path_of("v1", "pods", within), labelSelector=matching)["items"]
            if (down := controller_down(body, pods)) is None:
                continue
            for report in self._objects.list(REPORTS, within):
                was, of = condition(report, "Watched"), (report["metadata"].get("labels") or {}).get(JOB_LABEL)
                if job in (None, of) and (was is None or was.reason != "Ended"):
                    put_condition(self._objects, REPORTS, report, down)
        return DOWN_S

    def _captures(self, namespace: str) -> list[tuple[Kind, Body, dict[str, Any]]]:
        found = self._objects.list(CAPTURES, namespace)
        words: dict[str, str] = {}
        if self.controllers is not None:
            for body in found:
                about = body["metadata"]
                if "deletionTimestamp" in about or JOB_LABEL in (about.get("labels") or {}):
                    continue
                if jobs := self.controllers.named(namespace, str(body["spec"].get("job", ""))):
                    self._address(body, jobs[0])
                else:
                    words[about["name"]] = CAPTURE_WORDS["no_job"]
        known = (
            (body, KnownCapture(words=words.get(body["metadata"]["name"], ""))) for body in filter(_unanswered, found)
        )
        return [(CAPTURES, body, capture_status(body, capture, time.time()).plain()) for body, capture in known]

    def _address(self, body: dict[str, Any], job: JobRef) -> None:
        about = body["metadata"]
        label = {"labels": {JOB_LABEL: job.object_name}, "resourceVersion": about["resourceVersion"]}
        path = path_of(API_VERSION, CAPTURES.plural, about["namespace"], about["name"])
        about |= self._objects.request("PATCH", path, {"metadata": label}, as_=client.MERGE)["metadata"]

    def _write(self, kind: Kind, body: Body, status: dict[str, Any]) -> bool:
        name = f"{kind.kind} {body['metadata']['namespace']}/{body['metadata']['name']}"
        try:
            self._objects.put_status(kind, dict(body), status)
        except ClusterError as error:
            answer = error.status if isinstance(error, AnsweredError) else None
            if answer not in (client.NOT_FOUND, client.STALE):
                _log.warning("%s: %s", name, error)
            # (an object that has changed meanwhile is read again)
            return answer == client.NOT_FOUND
        _log.info("%s: %s", name, ", ".join(f"{each['type']}: {each['reason']}" for each in status["conditions"]))
        return True


def _unanswered(body: Body) -> bool:
    status = status_of(body)
    if "deletionTimestamp" in body["metadata"] or status.get("state", "requested") not in ("requested", "refused"):
        return False
    return bool(status.get("observedGeneration") != body["metadata"].get("generation"))


def settings() -> kopf.OperatorSettings:
    """Settings of kopf: it needs no rights but ours, and uses annotations under our name."""
    wanted = kopf.OperatorSettings()
    wanted.persistence.finalizer = FINALIZER
    wanted.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=_PREFIX)
    wanted.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=_PREFIX)
    # Its peering freezes both of two operators that are equal; looking around needs the right to list everything.
    wanted.peering.standalone = True
    wanted.scanning.disabled = True
    wanted.posting.enabled = False
    wanted.networking.request_timeout = 60
    wanted.networking.error_backoffs = (1, 1, 2, 3, 5, 8, 13)
    return wanted


def registry(
    objects: ClusterObjects, reconciler: Reconciler, stores: Collection[str], begun: Callable[[], None]
) -> kopf.OperatorRegistry:
    """The handlers of the operator; ``begun`` is called in its loop once that runs."""
    found = kopf.OperatorRegistry()
    tasks: list[asyncio.Task[None]] = []

    # As our own client does, and again where credentials have run out.
    kopf.on.login(registry=found, errors=kopf.ErrorsMode.TEMPORARY)(kopf.login_via_client)

    @kopf.on.startup(registry=found)
    async def begin(**_: Any) -> None:
        begun()
        tasks.append(asyncio.create_task(reconciler.run()))

    @kopf.on.cleanup(registry=found)
    async def end(**_: Any) -> None:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    @kopf.on.event(GROUP, VERSION, POLICIES.plural, registry=found)
    async def policy(namespace: str | None, **_: Any) -> None:
        reconciler.enqueue(POLICIES.kind, namespace)
        if reconciler.controllers is not None:
            reconciler.enqueue(NAMESPACES, namespace)

    @kopf.on.event(GROUP, VERSION, CAPTURES.plural, registry=found)
    async def capture(namespace: str | None, **_: Any) -> None:
        reconciler.enqueue(CAPTURES.kind, namespace)

    @kopf.on.delete(GROUP, VERSION, CAPTURES.plural, registry=found, id="trace", backoff=RETRY_S)
    def deleted(body: kopf.Body, **_: Any) -> None:
        _delete(objects, stores, dict(body))

    return found


def _delete(objects: ClusterObjects, stores: Collection[str], body: dict[str, Any]) -> None:
    done = remove_trace(body, stores, time.time())
    name = f"{body['metadata']['namespace']}/{body['metadata']['name']}"
    _log.info("TraceCapture %s is being deleted: %s", name, done.words)
    if done.wait_s:
        with contextlib.suppress(ClusterError):
            put_condition(objects, CAPTURES, body, Now("Removed", "False", "Waiting", done.words))
        raise kopf.TemporaryError(done.words, delay=min(done.wait_s, RETRY_S))


def run(
    objects: ClusterObjects,
    stores: Collection[str],
    namespaces: Sequence[str],
    watch_s: int,
    controllers: ControllerSettings | None,
    leader: LeaderElection | None,
    **times_s: float,
) -> None:
    """Run until SIGTERM or Ctrl-C, or until another replica leads.

    Args:
        objects: for statuses; kopf watches with the credentials of the same kubeconfig.
        stores: those in which traces may be deleted, as from `checked_url`.
        namespaces: none means the whole cluster.
        watch_s: duration of a watch; the next one notices a dropped connection.
        controllers: how controllers of jobs run; None starts none.
        leader: the election to win first; None: no election.
        times_s: ``grace_s`` and ``keep_s`` of `Controllers`.

    Raises ClusterError if the cluster has refused the operator for half a minute, or another replica leads.
    """
    wanted = settings()
    wanted.watching.server_timeout, wanted.watching.client_timeout = watch_s, watch_s + 10
    # (an event of the loop's own: one of threads keeps kopf from ending)
    stop, reconciler = asyncio.Event(), Reconciler(objects)

    def begun() -> None:
        if controllers is not None:
            reconciler.start_controllers(controllers, namespaces, watch_s=watch_s, **times_s)
        if leader is not None:
            leader.on_lost = partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)
            if leader.lost.is_set():
                stop.set()

    if leader is not None:
        leader.lead()
    try:
        kopf.run(
            registry=registry(objects, reconciler, stores, begun),
            settings=wanted,
            # (by default kopf looks up its user's name, and in an image there is none)
            identity=_PREFIX,  # type: ignore[arg-type]  # a str by another name
            standalone=True,
            namespaces=namespaces,
            clusterwide=not namespaces,
            stop_flag=stop,
        )
    except kopf.LoginError as error:
        raise ClusterError("the operator has stopped: the cluster rejected its credentials") from error
    except Exception as error:  # kopf's own are private; any is reported in one line, and the caller restarts
        problem = short(str(error.args[0] if error.args else error))
        raise ClusterError(f"the operator has stopped: {problem}") from error
    finally:
        if leader is not None:
            leader.release()
    if leader is not None and leader.lost.is_set():
        raise ClusterError(f"the operator has stopped: {leader.why}")
