"""Objects of a cluster through the official client: read, write, watch, and elect a leader. Requests block."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import msgspec
import yaml

from sftriage.base.loops import Backoff, Loop
from sftriage.errors import ClusterError, UsageError
from sftriage.kube.objects import API_VERSION, Kind, Now, dated, status_of

_PATIENCE_S = (5.0, 30.0)
"""Time-outs for connecting, and for the answer."""
_LISTS_S = (5.0, 180.0)
"""Those for a page of a list: for one, a server may read all pods of the cluster, whatever the selector."""
_MAX_CHARS = 300
FORBIDDEN, NOT_FOUND, STALE, GONE = 403, 404, 409, 410
"""Status if a right or an object is missing, an object changed meanwhile or exists already, or events have expired."""
_JSON = "application/json"
_METADATA = "application/json;as=PartialObjectMetadata{};g=meta.k8s.io;v=v1"
"""What to accept for objects without spec and status, in a list (``List``) or one."""
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"

log = logging.getLogger(__name__)

PAGE = 500
"""Objects in one answer, so that those of a large cluster are never in memory together."""
WATCH_S = 300
_PAUSE_S = 0.5

Kept = TypeVar("Kept")
Key = tuple[str, str]
"""Namespace and name."""


class AnsweredError(ClusterError):
    """The server refused a request; ``status`` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class ClusterObjects:
    """The objects of one API server; ``namespace`` is the default one.

    All methods raise `ClusterError` where they fail, and `AnsweredError` where the server refuses.
    """

    def __init__(self, api_client: Any, namespace: str = "default") -> None:
        self._client = api_client
        self.namespace = namespace

    @classmethod
    def connect(cls, context: str | None = None) -> ClusterObjects:
        """Connect where kubectl would, by ``KUBECONFIG`` or ``~/.kube/config``, or inside a pod to its own server.

        Raises UsageError if there is neither, or no such context, or the client is not installed.
        """
        try:
            from kubernetes import client
        except ImportError:
            raise UsageError("the Kubernetes client is not installed: pip install 'sftriage[k8s]'") from None
        namespace = _configured(context)
        configuration = client.Configuration.get_default_copy()
        configuration.retries = False
        return cls(client.ApiClient(configuration), namespace)

    def list(self, kind: Kind, namespace: str | None) -> list[dict[str, Any]]:
        """The objects of a kind, in one namespace or (None) in all."""
        page = self.request("GET", path_of(API_VERSION, kind.plural, namespace))
        # (in a list, the server leaves out the kind of each item)
        return [{"apiVersion": API_VERSION, "kind": kind.kind, **item} for item in page.get("items", ())]

    def put_status(self, kind: Kind, body: dict[str, Any], status: dict[str, Any]) -> None:
        """Replace the status of an object; `STALE` if it has changed since ``body``, `NOT_FOUND` if it is gone."""
        path = path_of(API_VERSION, kind.plural, body["metadata"]["namespace"], body["metadata"]["name"], "status")
        self.request("PUT", path, {**body, "status": status})

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        as_: str = _JSON,
        tolerate: int | None = None,
        metadata_only: bool = False,
        **query: Any,
    ) -> dict[str, Any]:
        """Send a request and return the server's answer; an empty one if it refuses with the status ``tolerate``.

        ``as_`` is the content type of the JSON ``body``, such as `APPLY`; parameters that are None are left out. With
        ``metadata_only``, objects in a list have no more than that.
        """
        accept = _METADATA.format("List") if metadata_only else _JSON
        patience_s = _LISTS_S if "limit" in query else _PATIENCE_S
        try:
            return dict(msgspec.json.decode(self._response(method, path, body, as_, query, patience_s, accept).read()))
        except AnsweredError as error:
            if error.status != tolerate:
                raise
        return {}

    def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object, and return it as the server has it; unknown fields are refused."""
        path = path_of(API_VERSION, kind.plural, namespace)
        return self.request(
            "POST", path, {"apiVersion": API_VERSION, "kind": kind.kind, **body}, fieldValidation="Strict"
        )

    def read(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        return self.request("GET", path_of(API_VERSION, kind.plural, namespace, quote(name, safe="")))

    def apply(self, body: Mapping[str, Any], manager: str) -> dict[str, Any]:
        """Apply ``body`` to an object, whatever it was: its fields become those of ``manager``."""
        about = body["metadata"]
        path = path_of(body["apiVersion"], plural_of(body["kind"]), about.get("namespace"), about["name"])
        # (a body in JSON is one in YAML too)
        return self.request("PATCH", path, json.dumps(body), as_=APPLY, fieldManager=manager, force="true")

    def watch(self, path: str, seconds: int, *, metadata_only: bool = False, **query: Any) -> Iterator[dict[str, Any]]:
        """Events of some objects for ``seconds``, each with ``type`` and ``object``; `GONE` where they have expired."""
        from kubernetes import watch

        follow: Any = watch.Watch
        query |= {"watch": "true", "timeoutSeconds": seconds, "allowWatchBookmarks": "true"}
        patience_s = (_PATIENCE_S[0], seconds + _PATIENCE_S[1])

        accept = _METADATA.format("") if metadata_only else _JSON

        def opened(**_: Any) -> Any:
            return self._response("GET", path, None, _JSON, query, patience_s, accept).response

        with _reaching():
            # (with a time-out, it does not connect again by itself)
            yield from follow().stream(opened, timeout_seconds=seconds)

    def _response(
        self,
        method: str,
        path: str,
        body: Any,
        as_: str,
        query: Mapping[str, Any],
        patience_s: tuple[float, float],
        accept: str,
    ) -> Any:
        from kubernetes.client import ApiException

        headers = {"Accept": accept} | ({} if body is None else {"Content-Type": as_})
        request = self._client.param_serialize(
            *(method, path),
            query_params=[(name, value) for name, value in query.items() if value is not None],
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
        )
        with _reaching():
            response = self._client.call_api(*request, _request_timeout=patience_s)
            if response.status >= 300:
                raise ApiException(status=response.status, reason=response.reason, body=response.read())
        return response


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        try:
            message = json.loads(error.body or "")["message"]
        except (TypeError, ValueError, KeyError):
            message = error.reason
        raise AnsweredError(error.status, f"the cluster refused the request: {short(str(message))}") from None
    except (HTTPError, OSError, ValueError, KeyError) as error:
        raise ClusterError(f"cannot reach the cluster: {short(str(error))}") from error


def get_or_create(objects: ClusterObjects, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The object of a name, created if it is missing."""
    existing = objects.request("GET", f"{path}/{body['metadata']['name']}", tolerate=NOT_FOUND)
    return existing or objects.request("POST", path, body)


def put_condition(objects: ClusterObjects, kind: Kind, body: dict[str, Any], *now: Now) -> None:
    """Write conditions into the status of an object, unless it has them; keep those of other types."""
    status = dict(status_of(body))
    conditions = [each.plain() for each in dated(body, now, time.time(), others=True)]
    if any(each not in (status.get("conditions") or ()) for each in conditions):
        objects.put_status(kind, body, {**status, "conditions": conditions})


def plural_of(kind: str) -> str:
    """The plural of a built-in kind."""
    return f"{kind.lower().removesuffix('y')}ies" if kind.endswith("y") else f"{kind.lower()}s"


def path_of(api_version: str, plural: str, namespace: str | None = None, name: str = "", sub: str = "") -> str:
    """The path of the objects of a kind, of one of them, or of a part (``sub``) of one."""
    root = "/apis" if "/" in api_version else "/api"
    within = f"/namespaces/{namespace}" if namespace else ""
    return "/".join(filter(None, (f"{root}/{api_version}{within}/{plural}", name, sub)))


def _configured(context: str | None) -> str:
    from kubernetes import config

    kube: Any = config
    file = os.environ.get("KUBECONFIG") or kube.kube_config.KUBE_CONFIG_DEFAULT_LOCATION
    try:
        kube.load_kube_config(file, context)
        named, current = kube.list_kube_config_contexts(file)
        chosen = next((entry for entry in named if entry["name"] == context), current)
        return str(chosen["context"].get("namespace") or "default")
    except (kube.ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, KeyError) as error:
        problem = short(str(error))
    try:
        # (a named context excludes any other cluster)
        if context is None:
            kube.load_incluster_config()
            return "default"
    except kube.ConfigException:
        pass
    raise UsageError(f"no cluster configured: {problem}")


def short(text: str) -> str:
    """The beginning of a message, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_CHARS else f"{line[: _MAX_CHARS - 1]}…"


class ObjectWatch(Generic[Kept]):
    """Lists objects of a kind in a thread, and then watches them.

    After a break, or when events have expired, it lists them again: objects missing then are gone. While the server is
    unreachable, it keeps the last known objects.

    Args:
        path: of the objects, see `path_of`; ``query`` has selectors.
        keep: what to keep of each.
        changed: called in the thread with the kept value before and now; None if there is no object.
        watch_s: duration of a watch; the next one notices a dropped connection.
        metadata_only: request objects without spec and status.
        cached: let the server answer the first list from memory, whole: where a selector matches few of many objects.

    Attributes:
        listed: set once all of them have been listed; then ``on_listed`` is called, after each list.
    """

    def __init__(
        self,
        objects: ClusterObjects,
        path: str,
        keep: Callable[[dict[str, Any]], Kept],
        changed: Callable[[Kept | None, Kept | None], None],
        *,
        query: Mapping[str, str] | None = None,
        watch_s: int = WATCH_S,
        metadata_only: bool = False,
        cached: bool = False,
    ) -> None:
        self._loop = Loop(
            *(f"watch-{path.rpartition('/')[2]}", self._turn, 0.0),
            failing=f"cannot watch {path}",
            expected=(ClusterError,),
            backoff=Backoff(_PAUSE_S),
        )
        self._objects, self._path, self._keep, self._changed = objects, path, keep, changed
        self._query: dict[str, Any] = {**(query or {}), **({"metadata_only": True} if metadata_only else {})}
        self._watch_s, self._cached = watch_s, cached
        self._kept: dict[Key, Kept] = {}
        self._lock = threading.Lock()
        self.listed = threading.Event()
        self.on_listed: Callable[[], object] = lambda: None

    def one(self, key: Key) -> Kept | None:
        with self._lock:
            return self._kept.get(key)

    def kept(self) -> list[Kept]:
        with self._lock:
            return list(self._kept.values())

    def start(self) -> None:
        self._loop.start()

    def end(self, patience_s: float = 0.0) -> bool:
        """Stop after the next event; return whether that was in time."""
        return self._loop.stop(patience_s)

    def _turn(self) -> None:
        version = self._list()
        self.listed.set()
        self.on_listed()
        self._loop.succeeded()
        try:
            while not self._loop.stopping.is_set():
                version = self._follow(version)
        except AnsweredError as error:
            if error.status != GONE:
                raise

    def _list(self) -> str:
        listed, token = set(), None
        # (later, its memory may be older than what we have)
        version = "0" if self._cached and not self.listed.is_set() else None
        while True:
            first = version if token is None else None
            query: dict[str, Any] = {**self._query, "limit": PAGE, "continue": token, "resourceVersion": first}
            page = self._objects.request("GET", self._path, **query)
            for body in page.get("items") or ():
                listed.add(_key(body))
                self._put(body)
            token = page["metadata"].get("continue")
            if not token:
                break
        with self._lock:
            gone = self._kept.keys() - listed
        for key in gone:
            self._drop(key)
        return str(page["metadata"].get("resourceVersion", ""))

    def _follow(self, version: str) -> str:
        for event in self._objects.watch(self._path, self._watch_s, resourceVersion=version, **self._query):
            if self._loop.stopping.is_set():
                break
            body = event["object"]
            version = str(body["metadata"].get("resourceVersion", version))
            if event["type"] == "DELETED":
                self._drop(_key(body))
            elif event["type"] in ("ADDED", "MODIFIED"):
                self._put(body)
        return version

    def _put(self, body: dict[str, Any]) -> None:
        now = self._keep(body)
        with self._lock:
            before, self._kept[_key(body)] = self._kept.get(_key(body)), now
        if before != now:
            self._changed(before, now)

    def _drop(self, key: Key) -> None:
        with self._lock:
            before = self._kept.pop(key, None)
        if before is not None:
            self._changed(before, None)


def _key(body: Mapping[str, Any]) -> Key:
    return str(body["metadata"].get("namespace", "")), str(body["metadata"]["name"])


DURATION_S, RENEW_S = 15, 5.0
"""When an unrenewed lease expires, and how often the leader renews it."""
LEASES = "coordination.k8s.io/v1"


class LeaderElection:
    """A candidate called ``me``, for the lease ``name`` of a namespace; ``now`` is monotonic, in seconds."""

    def __init__(
        self, objects: ClusterObjects, namespace: str, name: str, me: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._objects, self._me, self._now = objects, me, now
        self._about, self._path = {"name": name, "namespace": namespace}, path_of(LEASES, "leases", namespace)
        self._holder, self._renewed, self._since_s = "", "", 0.0
        """The holder, its last renewal by the holder's clock, and when we first saw that, by ours."""
        self._led_s = 0.0
        self._loop = Loop("lease", self._renew, RENEW_S, failing="cannot renew the lease")
        self.lost, self.why = threading.Event(), ""
        """Set once the lease is lost, and why; then ``on_lost`` is called, from that thread."""
        self.on_lost: Callable[[], object] = lambda: None
        self.on_contact: Callable[[], object] = lambda: None
        """Called each time that the server has answered, whoever holds the lease."""

    def lead(self) -> None:
        """Wait for the lease, then keep renewing it in a thread."""
        logged = ""
        while not self.try_to_lead():
            if self._holder != logged:
                logged = self._holder
                log.info("waiting for the lease, held by %s", logged)
            self._loop.stopping.wait(RENEW_S / 2)
        log.info("leading as %s", self._me)
        self._loop.start()

    def release(self) -> None:
        """Release the lease, so that another replica can lead at once."""
        self._loop.stop(2 * RENEW_S)
        if not self.lost.is_set():
            try:
                self._write(self._objects.request("GET", f"{self._path}/{self._about['name']}"), "")
            except ClusterError as error:
                log.debug("could not release the lease, so it will expire: %s", error)

    def _renew(self) -> None:
        if not self.try_to_lead() and (self._now() > self._led_s + DURATION_S or self._holder not in ("", self._me)):
            other = self._holder not in ("", self._me)
            self.why = f"another replica leads ({self._holder})" if other else "its lease was not renewed in time"
            log.error("lost the lease: %s", self.why)
            self._loop.stopping.set()
            self.lost.set()
            self.on_lost()

    def try_to_lead(self) -> bool:
        """Take or renew the lease if possible; return whether it is held."""
        began_s = self._now()
        try:
            body = self._objects.request("GET", f"{self._path}/{self._about['name']}", tolerate=NOT_FOUND)
            body = body or {"apiVersion": LEASES, "kind": "Lease", "metadata": self._about}
            with contextlib.suppress(OSError):
                self.on_contact()
            spec = body.get("spec") or {}
            holder, renewed = str(spec.get("holderIdentity") or ""), str(spec.get("renewTime") or "")
            # (clocks of others may be wrong; that something has changed is sure)
            if (holder, renewed) != (self._holder, self._renewed):
                self._holder, self._renewed, self._since_s = holder, renewed, began_s
            expires_s = self._since_s + float(spec.get("leaseDurationSeconds") or DURATION_S)
            if holder not in ("", self._me) and began_s <= expires_s:
                return False
            self._write(body, self._me)
        except ClusterError as error:
            if not (isinstance(error, AnsweredError) and error.status == STALE):
                log.warning("cannot get the lease; trying again: %s", error)
            return False
        self._led_s = began_s
        return True

    def _write(self, body: dict[str, Any], holder: str) -> None:
        """Write the holder; raises ClusterError if the lease has changed since ``body``."""
        spec, now = dict(body.get("spec") or {}), datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if spec.get("holderIdentity") != holder:
            spec |= {"acquireTime": now, "leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1}
        spec |= {"holderIdentity": holder, "leaseDurationSeconds": DURATION_S, "renewTime": now}
        there = "resourceVersion" in body["metadata"]
        path = f"{self._path}/{self._about['name']}" if there else self._path
        self._objects.request("PUT" if there else "POST", path, {**body, "spec": spec})
