"""The operator: watches policies and captures of a cluster, writes what their status says, deletes deleted traces.

A thin shell around `standings`, `capture_status` and `removal`, which decide. Statuses are made from what the server
has now, and never from the event that led to it: an event says only where to look. So a restart, a lost event or a
write that came too late loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import kopf

from sftriage.errors import ClusterError
from sftriage.kube.captures import Seen, capture_status
from sftriage.kube.client import NOT_FOUND, STALE, AnsweredError, ClusterObjects
from sftriage.kube.conditions import Now, dated, status_of
from sftriage.kube.crds import KINDS, Kind
from sftriage.kube.objects import GROUP, VERSION
from sftriage.kube.policies import standings
from sftriage.kube.removing import RETRY_S, Remover

FINALIZER = f"{GROUP}/trace"
_PREFIX = f"operator.{GROUP}"
_SETTLE_S = 0.2
"""Events come in crowds: how long a namespace is left to settle before it is looked at."""
_LONGEST_PAUSE_S = 60.0
_MAX_SAID = 300

POLICIES, CAPTURES = KINDS[0], KINDS[1]
Wanted: TypeAlias = tuple[Kind, dict[str, Any], dict[str, Any]]
"""An object, and the status that it is to have."""
_log = logging.getLogger(__name__)


class Reconciler:
    """Writes the statuses of whole namespaces, again and again until they are as they should be."""

    def __init__(self, objects: ClusterObjects) -> None:
        self._objects = objects
        self._waiting: set[tuple[str, str]] = set()
        self._pauses_s: dict[tuple[str, str], float] = {}
        self._there = asyncio.Event()

    def look(self, kind: str, namespace: str | None) -> None:
        """Something of a kind has changed in a namespace, or has to be looked at again."""
        self._waiting.add((kind, namespace or ""))
        self._there.set()

    async def run(self) -> None:
        """Reconcile what is to be looked at, for ever."""
        while True:
            await self._there.wait()
            await asyncio.sleep(_SETTLE_S)
            self._there.clear()
            waiting, self._waiting = self._waiting, set()
            for what in sorted(waiting):
                if await asyncio.to_thread(self._done, *what):
                    self._pauses_s.pop(what, None)
                else:
                    pause_s = self._pauses_s[what] = min(2 * self._pauses_s.get(what, 0.5), _LONGEST_PAUSE_S)
                    asyncio.get_running_loop().call_later(pause_s, self.look, *what)

    def _done(self, kind: str, namespace: str) -> bool:
        """Whether the statuses of a namespace are as they should be now; what keeps them from it is logged."""
        try:
            wanted = self._policies(namespace) if kind == POLICIES.kind else self._captures(namespace)
        except ClusterError as error:
            _log.warning("%s in %s: %s", kind, namespace, error)
            return False
        except Exception:
            # Whatever it is: the other namespaces are looked after, and this one is tried again.
            _log.exception("%s in %s cannot be looked at", kind, namespace)
            return False
        written = [self._written(*one) for one in wanted]
        return all(written)

    def _policies(self, namespace: str) -> list[Wanted]:
        found = standings(self._objects.list(POLICIES, namespace), time.time())
        return [(POLICIES, dict(one.body), one.status.plain()) for one in found if one.changed]

    def _captures(self, namespace: str) -> list[Wanted]:
        """Of those that nobody has answered: whether they make sense is said at once."""
        new = [one for one in self._objects.list(CAPTURES, namespace) if _unanswered(one)]
        return [(CAPTURES, one, capture_status(one, Seen(), time.time()).plain()) for one in new]

    def _written(self, kind: Kind, body: dict[str, Any], status: dict[str, Any]) -> bool:
        name = f"{kind.kind} {body['metadata']['namespace']}/{body['metadata']['name']}"
        try:
            self._objects.put_status(kind, body, status)
        except ClusterError as error:
            answer = error.status if isinstance(error, AnsweredError) else None
            if answer not in (NOT_FOUND, STALE):
                _log.warning("%s: %s", name, error)
            # Where somebody was quicker, what is so now is looked at anew.
            return answer == NOT_FOUND
        _log.info("%s: %s", name, ", ".join(f"{one['type']}: {one['reason']}" for one in status["conditions"]))
        return True


def _unanswered(body: dict[str, Any]) -> bool:
    status = status_of(body)
    if "deletionTimestamp" in body["metadata"] or status.get("state", "requested") not in ("requested", "refused"):
        return False
    return bool(status.get("observedGeneration") != body["metadata"].get("generation"))


def settings() -> kopf.OperatorSettings:
    """How kopf is to work: it asks for no rights but ours, and leaves its marks under our name."""
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


def registry(objects: ClusterObjects, remover: Remover) -> kopf.OperatorRegistry:
    """What is watched, and what is done about it."""
    found = kopf.OperatorRegistry()
    reconciler = Reconciler(objects)
    tasks: list[asyncio.Task[None]] = []

    @kopf.on.login(registry=found, errors=kopf.ErrorsMode.TEMPORARY)
    def login(**about: Any) -> kopf.ConnectionInfo | None:
        # As our own client does, and again where credentials have run out.
        return kopf.login_via_client(**about)

    @kopf.on.startup(registry=found)
    async def begin(**_: Any) -> None:
        tasks.append(asyncio.create_task(reconciler.run()))

    @kopf.on.cleanup(registry=found)
    async def end(**_: Any) -> None:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    @kopf.on.event(GROUP, VERSION, POLICIES.plural, registry=found)
    async def policy(namespace: str | None, **_: Any) -> None:
        reconciler.look(POLICIES.kind, namespace)

    @kopf.on.event(GROUP, VERSION, CAPTURES.plural, registry=found)
    async def capture(namespace: str | None, **_: Any) -> None:
        reconciler.look(CAPTURES.kind, namespace)

    @kopf.on.delete(GROUP, VERSION, CAPTURES.plural, registry=found, id="trace", backoff=RETRY_S)
    def deleted(body: kopf.Body, **_: Any) -> None:
        _delete(objects, remover, dict(body))

    return found


def _delete(objects: ClusterObjects, remover: Remover, body: dict[str, Any]) -> None:
    """Delete the trace of a capture; where it cannot be done yet, say so where people look, and try again."""
    done = remover.remove(body, time.time())
    name = f"{body['metadata']['namespace']}/{body['metadata']['name']}"
    _log.info("TraceCapture %s is deleted: %s", name, done.words)
    if done.action != "wait":
        return
    _tell(objects, body, done.words)
    raise kopf.TemporaryError(done.words, delay=min(done.wait_s, RETRY_S))


def _tell(objects: ClusterObjects, body: dict[str, Any], words: str) -> None:
    """Put into an object's status why it is not gone yet. That is for people: where it cannot be written, go on."""
    status = dict(status_of(body))
    others = [one for one in status.get("conditions", ()) if isinstance(one, dict) and one.get("type") != "Removed"]
    found = Now("Removed", "False", "Waiting", words)
    (removed,) = dated([found], status.get("conditions"), body["metadata"].get("generation"), time.time())
    if removed.plain() in status.get("conditions", ()):
        return
    with contextlib.suppress(ClusterError):
        objects.put_status(CAPTURES, body, {**status, "conditions": [*others, removed.plain()]})


def run(objects: ClusterObjects, stores: Collection[str], namespaces: Sequence[str], watch_s: float = 300.0) -> None:
    """Run until SIGTERM or Ctrl-C, over some namespaces, or (none named) the whole cluster.

    Args:
        objects: how statuses are read and written; kopf watches with the credentials of the same kubeconfig.
        stores: the stores in which it may delete traces, as `checked_url` has them.
        namespaces: those that it looks after.
        watch_s: how long one watch lasts before it is begun again; a network that drops it in silence is noticed then.

    Raises:
        ClusterError: the cluster has refused for half a minute what the operator needs.
    """
    wanted = settings()
    wanted.watching.server_timeout = watch_s
    wanted.watching.client_timeout = watch_s + 10
    try:
        kopf.run(
            registry=registry(objects, Remover(stores)),
            settings=wanted,
            standalone=True,
            namespaces=namespaces,
            clusterwide=not namespaces,
        )
    except kopf.LoginError as error:
        raise ClusterError("the operator has ended: the cluster does not take its credentials") from error
    except Exception as error:  # kopf's own are private; whatever it was, it is said in a line, and begun anew outside
        said = " ".join(str(error.args[0] if error.args else error).split())
        raise ClusterError(f"the operator has ended: {said[:_MAX_SAID]}") from error
