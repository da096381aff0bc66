"""The operator: watches policies, captures and jobs of a cluster; writes statuses, deletes traces, starts controllers.

`standings`, `capture_status` and `removal` decide, and `Controllers` looks after jobs. Statuses follow from the objects
as they are now: an event only triggers a look. So a restart, a lost event or a late write loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from sftriage.errors import ClusterError, InputError, StoreError, UsageError
from sftriage.kube.client import (
    MERGE,
    NOT_FOUND,
    STALE,
    AnsweredError,
    ClusterObjects,
    LeaderElection,
    ObjectWatch,
    path_of,
    put_condition,
)
from sftriage.kube.controllers import Controllers, ControllerSettings
from sftriage.kube.jobs import JOB_LABEL, JobRef
from sftriage.kube.objects import API_VERSION, CAPTURES, GROUP, POLICIES, REPORTS, Body, Kind, Now, status_of
from sftriage.kube.statuses import KnownCapture, Removal, capture_status, removal, standings
from sftriage.traces.remote import RemoteStore, checked_url
from sftriage.traces.store import PIN_NAME
from sftriage.words.kube import CAPTURES as CAPTURE_WORDS
from sftriage.words.kube import removal_sentence

RETRY_S = 15.0
"""How long after a store could not be reached it is tried again."""


def remove_trace(
    body: Body, stores: Collection[str], now_s: float, open_store: Callable[[str], RemoteStore] = RemoteStore.open
) -> Removal:
    """Delete the trace of a deleted capture, unless that has to ``wait``.

    Only in these stores: a status may name any place, and the rights to delete there are ours.
    """
    wanted = removal(body, now_s)
    if (stored := wanted.stored) is None:
        return wanted
    try:
        if checked_url(stored.store) not in stores:
            return Removal("wait", removal_sentence("elsewhere", place=stored.store), wait_s=RETRY_S)
        store = open_store(stored.store)
        names = store.names(stored.reference)
        if not names:
            return Removal("release", removal_sentence("gone", place=stored.store))
        if PIN_NAME in names:
            return Removal("release", removal_sentence("pinned", place=stored.store))
        store.remove(stored.reference)
    except (UsageError, InputError, StoreError) as error:
        words = removal_sentence("unreachable", place=stored.store, problem=str(error))
        return Removal("wait", words, wait_s=RETRY_S)
    return Removal("release", removal_sentence("removed", place=stored.store))


FINALIZER = f"{GROUP}/trace"
_SETTLE_S = 0.2
"""Events come in crowds: pause before a namespace is reconciled."""
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_AT_ONCE = 8
"""Namespaces and jobs that are reconciled side by side."""
UNAUTHORIZED = 401
JOBS, TRACES = "Job", "Trace"
"""Reconciled by a job's id, and by the namespace of deleted captures, as policies and captures are by theirs."""
_log = logging.getLogger(__name__)


class Reconciler:
    """Writes the statuses of whole namespaces until they are up to date, deletes traces, and reconciles jobs.

    Only in ``stores`` are traces deleted, as `checked_url` has them.
    """

    def __init__(self, objects: ClusterObjects, stores: Collection[str] = ()) -> None:
        self._objects, self._stores = objects, stores
        self.controllers: Controllers | None = None
        self._waiting: set[tuple[str, str]] = set()
        self._pauses_s: dict[tuple[str, str], float] = {}
        self._there = asyncio.Event()

    def start_controllers(self, settings: ControllerSettings, namespaces: Sequence[str], **times_s: Any) -> None:
        """Start controllers of jobs from now on; in the operator's loop."""
        loop = asyncio.get_running_loop()

        def look(job: JobRef) -> None:
            loop.call_soon_threadsafe(self.look, JOBS, job.job_id)
            loop.call_soon_threadsafe(self.look, CAPTURES.kind, job.namespace)

        self.controllers = Controllers(self._objects, settings, look, namespaces, **times_s)
        self.controllers.begin()
        for namespace in namespaces or ("",):
            self.look(REPORTS.kind, namespace)

    def watch(self, removals: Reconciler, namespaces: Sequence[str], watch_s: int) -> None:
        """Look at policies and captures, of all namespaces or of these, as they change; in the operator's loop.

        A store may be slow or away: ``removals`` delete traces, and keep nothing else waiting.
        """
        loop = asyncio.get_running_loop()

        def changed(kind: Kind, before: tuple[str, ...] | None, now: tuple[str, ...] | None) -> None:
            namespace, *_, deleted = now or before or ("", "")
            loop.call_soon_threadsafe(self.look, kind.kind, namespace)
            if kind == POLICIES and self.controllers is not None:
                for job in self.controllers.named(namespace):
                    loop.call_soon_threadsafe(self.look, JOBS, job.job_id)
            elif deleted and now is not None:
                loop.call_soon_threadsafe(removals.look, TRACES, namespace)

        for namespace in namespaces or ("",):
            for kind in (POLICIES, CAPTURES):
                path = path_of(API_VERSION, kind.plural, namespace)
                ObjectWatch(self._objects, path, _generation, partial(changed, kind), watch_s=watch_s).start()

    def look(self, kind: str, namespace: str | None) -> None:
        self._waiting.add((kind, namespace or ""))
        self._there.set()

    async def run(self) -> None:
        while True:
            await self._there.wait()
            await asyncio.sleep(_SETTLE_S)
            self._there.clear()
            waiting, self._waiting = self._waiting, set()
            at_once = asyncio.Semaphore(_AT_ONCE)
            await asyncio.gather(*(self._reconcile(what, at_once) for what in sorted(waiting)))

    async def _reconcile(self, what: tuple[str, str], at_once: asyncio.Semaphore) -> None:
        async with at_once:
            again_s = await asyncio.to_thread(self._try, *what)
        if again_s is None:
            again_s = self._pauses_s[what] = min(2 * self._pauses_s.get(what, _PAUSE_S / 2), _LONGEST_PAUSE_S)
        else:
            self._pauses_s.pop(what, None)
        if again_s:
            asyncio.get_running_loop().call_later(again_s, self.look, *what)

    def _try(self, kind: str, name: str) -> float | None:
        """Reconcile one item; return seconds until the next check (0: none), or None where it failed, and log that."""
        try:
            if kind == JOBS:
                return (self.controllers.reconcile(JobRef.of_id(name)) or 0.0) if self.controllers is not None else 0.0
            if kind == REPORTS.kind:
                return self.controllers.remove_outdated(name) if self.controllers is not None else 0.0
            if kind == TRACES:
                return self._traces(name)
            found = self._policies(name) if kind == POLICIES.kind else self._captures(name)
        except ClusterError as error:
            if not (isinstance(error, AnsweredError) and error.status == STALE):
                _log.warning("%s in %s: %s", kind, name, error)
            return None
        except Exception:
            # Whatever it is: the others go on, and this one is tried again.
            _log.exception("%s in %s cannot be looked at", kind, name)
            return None
        written = [self._write(*one) for one in found]
        return 0.0 if all(written) else None

    def _policies(self, namespace: str) -> list[tuple[Kind, Body, dict[str, Any]]]:
        found = standings(self._objects.list(POLICIES, namespace), time.time())
        return [(POLICIES, one.body, one.status.plain()) for one in found if one.changed]

    def _captures(self, namespace: str) -> list[tuple[Kind, Body, dict[str, Any]]]:
        found, words = self._objects.list(CAPTURES, namespace), dict[str, str]()
        for body in found:
            about, change = body["metadata"], dict[str, Any]()
            if "deletionTimestamp" in about:
                continue
            if FINALIZER not in (finalizers := about.get("finalizers", [])):
                change["finalizers"] = [*finalizers, FINALIZER]
            if self.controllers is not None and JOB_LABEL not in (about.get("labels") or {}):
                if jobs := self.controllers.named(namespace, str(body["spec"].get("job", ""))):
                    change["labels"] = {JOB_LABEL: jobs[0].object_name}
                else:
                    words[about["name"]] = CAPTURE_WORDS["no_job"]
            if change:
                self._patch(body, change)
        known = ((one, KnownCapture(words=words.get(one["metadata"]["name"], ""))) for one in found if _unanswered(one))
        return [(CAPTURES, one, capture_status(one, capture, time.time()).plain()) for one, capture in known]

    def _patch(self, body: dict[str, Any], change: dict[str, Any]) -> None:
        """Change the metadata of a capture, unless it has changed meanwhile."""
        about = body["metadata"]
        path = path_of(API_VERSION, CAPTURES.plural, about["namespace"], about["name"])
        change["resourceVersion"] = about["resourceVersion"]
        about |= self._objects.ask("PATCH", path, {"metadata": change}, as_=MERGE)["metadata"]

    def _traces(self, namespace: str) -> float:
        """Let deleted captures go once their traces are deleted; return seconds until the next try, or 0."""
        waits_s = [0.0]
        for body in self._objects.list(CAPTURES, namespace):
            about = body["metadata"]
            if "deletionTimestamp" not in about or FINALIZER not in about.get("finalizers", ()):
                continue
            done = remove_trace(body, self._stores, time.time())
            _log.info("TraceCapture %s/%s is deleted: %s", namespace, about["name"], done.words)
            if done.action == "wait":
                waits_s.append(min(done.wait_s, RETRY_S))
                with contextlib.suppress(ClusterError):
                    put_condition(self._objects, CAPTURES, body, Now("Removed", "False", "Waiting", done.words))
            else:
                self._patch(body, {"finalizers": [one for one in about["finalizers"] if one != FINALIZER]})
        return max(waits_s)

    def _write(self, kind: Kind, body: Body, status: dict[str, Any]) -> bool:
        name = f"{kind.kind} {body['metadata']['namespace']}/{body['metadata']['name']}"
        try:
            self._objects.put_status(kind, dict(body), status)
        except ClusterError as error:
            answer = error.status if isinstance(error, AnsweredError) else None
            if answer not in (NOT_FOUND, STALE):
                _log.warning("%s: %s", name, error)
            # (an object that has changed meanwhile is read again)
            return answer == NOT_FOUND
        _log.info("%s: %s", name, ", ".join(f"{one['type']}: {one['reason']}" for one in status["conditions"]))
        return True


def _unanswered(body: Body) -> bool:
    status = status_of(body)
    if "deletionTimestamp" in body["metadata"] or status.get("state", "requested") not in ("requested", "refused"):
        return False
    return bool(status.get("observedGeneration") != body["metadata"].get("generation"))


def _generation(body: dict[str, Any]) -> tuple[str, ...]:
    """What has to change of an object before it is looked at again: not its status, which the operator writes."""
    about = body["metadata"]
    return tuple(str(about.get(of, "")) for of in ("namespace", "name", "generation", "deletionTimestamp"))


def run(
    objects: ClusterObjects,
    stores: Collection[str],
    namespaces: Sequence[str],
    watch_s: int,
    controllers: ControllerSettings | None,
    leader: LeaderElection | None,
    **times_s: float,
) -> None:
    """Run until SIGTERM or Ctrl-C, or until another operator leads.

    Args:
        objects: the cluster.
        stores: in which traces may be deleted, as `checked_url` has them.
        namespaces: none means the whole cluster.
        watch_s: duration of a watch; the next one notices that the network has dropped it.
        controllers: how controllers of jobs run; None starts none.
        leader: has to lead first; None: there is no election.
        times_s: ``grace_s`` and ``keep_s`` of `Controllers`.

    Raises:
        ClusterError: at the start the cluster refuses what the operator needs, or another one leads by now.
    """

    async def work() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        reconciler, removals = Reconciler(objects), Reconciler(objects, stores)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        reconciler.watch(removals, namespaces, watch_s)
        if controllers is not None:
            reconciler.start_controllers(controllers, namespaces, watch_s=watch_s, **times_s)
        if leader is not None:
            leader.on_lost = partial(loop.call_soon_threadsafe, stop.set)
            if leader.lost.is_set():
                stop.set()
        working = [asyncio.create_task(one.run()) for one in (reconciler, removals)]
        await stop.wait()
        for one in working:
            one.cancel()

    if leader is not None:
        leader.lead()
    try:
        for namespace in namespaces or ("",):
            for kind in (POLICIES, CAPTURES):
                objects.ask("GET", path_of(API_VERSION, kind.plural, namespace), limit=1)
        asyncio.run(work())
    except AnsweredError as error:
        why = "the cluster does not take its credentials" if error.status == UNAUTHORIZED else str(error)
        raise ClusterError(f"the operator has ended: {why}") from error
    finally:
        if leader is not None:
            leader.release()
    if leader is not None and leader.lost.is_set():
        raise ClusterError("the operator has ended: another one leads")
