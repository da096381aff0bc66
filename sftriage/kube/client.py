"""Objects of a cluster, read, written and watched through the official client. Requests block: not for a loop."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import yaml

from sftriage.base.loops import Backoff, Loop
from sftriage.errors import ClusterError, UsageError
from sftriage.kube.objects import API_VERSION, Kind

_PATIENCE_S = (5.0, 30.0)
"""To connect, and until there is an answer."""
_MAX_SAID = 300
NOT_FOUND, STALE = 404, 409
"""What a server answers where an object is not there, and where it has changed meanwhile (or is there already)."""
GONE = 410
"""And where it is asked for what happened so long ago that it has forgotten."""
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"

log = logging.getLogger(__name__)

PAGE = 500
"""So many objects are read at once: those of a large cluster are never in memory together."""
WATCH_S = 300
_PAUSE_S = 0.5

Kept = TypeVar("Kept")
Key = tuple[str, str]
"""Namespace and name."""


class AnsweredError(ClusterError):
    """The server has answered, and refuses; ``status`` is HTTP's."""

    def __init__(self, status: int, said: str) -> None:
        self.status = status
        super().__init__(said)


class ClusterObjects:
    """The objects of one API server; ``namespace`` is the default one."""

    def __init__(self, api_client: Any, namespace: str = "default") -> None:
        self._client = api_client
        self.namespace = namespace

    @classmethod
    def connect(cls, context: str | None = None) -> ClusterObjects:
        """Connect where kubectl would, by ``KUBECONFIG`` or ``~/.kube/config``, or inside a pod to its own server.

        Raises:
            UsageError: there is neither, or no such context, or the client is not installed.
        """
        try:
            from kubernetes import client
        except ImportError:
            raise UsageError("a cluster is asked through its own client; install sftriage[k8s]") from None
        namespace = _configured(context)
        configuration = client.Configuration.get_default_copy()
        configuration.retries = False
        return cls(client.ApiClient(configuration), namespace)

    def list(self, kind: Kind, namespace: str | None) -> list[dict[str, Any]]:
        """The objects of a kind, in one namespace or (None) in all.

        Raises:
            ClusterError: they cannot be read; `AnsweredError` if the server refuses.
        """
        found = self.ask("GET", path_of(API_VERSION, kind.plural, namespace))
        # (in a list, the server leaves out what each of its items is)
        return [{"apiVersion": API_VERSION, "kind": kind.kind, **one} for one in found.get("items", ())]

    def put_status(self, kind: Kind, body: dict[str, Any], status: dict[str, Any]) -> None:
        """Replace the status of an object, provided that it has not changed since ``body``.

        Raises:
            ClusterError: it was not written; `AnsweredError` `STALE` if the object has changed, `NOT_FOUND` if it has
                gone.
        """
        path = path_of(API_VERSION, kind.plural, body["metadata"]["namespace"], body["metadata"]["name"], "status")
        self.ask("PUT", path, {**body, "status": status})

    def ask(
        self, method: str, path: str, body: Any = None, *, as_: str = "application/json", **query: Any
    ) -> dict[str, Any]:
        """Send a request and return the server's answer.

        Args:
            method: HTTP's.
            path: of the object or objects, see `path_of`.
            body: sent as JSON.
            as_: the content type of the body, such as `APPLY`.
            query: parameters; those that are None are left out.

        Raises:
            ClusterError: it failed; `AnsweredError` if the server refuses.
        """
        found = json.loads(self._response(method, path, body, as_, query, _PATIENCE_S).read())
        return dict(found)

    def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object, whose unknown fields are refused; as the server has it then.

        Raises:
            ClusterError: it was not created; `AnsweredError` where the server says why.
        """
        path = path_of(API_VERSION, kind.plural, namespace)
        return self.ask("POST", path, {"apiVersion": API_VERSION, "kind": kind.kind, **body}, fieldValidation="Strict")

    def read(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        """One object.

        Raises:
            ClusterError: it cannot be read; `AnsweredError` `NOT_FOUND` where it is not there.
        """
        return self.ask("GET", path_of(API_VERSION, kind.plural, namespace, quote(name, safe="")))

    def apply(self, body: Mapping[str, Any], manager: str) -> dict[str, Any]:
        """Make an object as ``body`` says, whatever it was: its fields become those of ``manager``.

        Raises:
            ClusterError: it failed; `AnsweredError` if the server refuses.
        """
        about = body["metadata"]
        path = path_of(body["apiVersion"], plural_of(body["kind"]), about.get("namespace"), about["name"])
        # (a body in JSON is one in YAML too)
        return self.ask("PATCH", path, json.dumps(body), as_=APPLY, fieldManager=manager, force="true")

    def watch(self, path: str, seconds: int, **query: Any) -> Iterator[dict[str, Any]]:
        """What happens to some objects for so many seconds, as the server says it: ``type`` and ``object``.

        Raises:
            ClusterError: the connection broke; `AnsweredError` `GONE` where the server has forgotten what was before.
        """
        from urllib3.exceptions import HTTPError

        asked = {**query, "watch": "true", "timeoutSeconds": seconds, "allowWatchBookmarks": "true"}
        patience_s = (_PATIENCE_S[0], seconds + _PATIENCE_S[1])
        response = self._response("GET", path, None, "application/json", asked, patience_s).response
        rest = b""
        try:
            for part in response.stream(None):
                *lines, rest = (rest + part).split(b"\n")
                for line in filter(None, lines):
                    yield _event(line)
        except (HTTPError, OSError) as error:
            raise ClusterError(f"the cluster cannot be reached: {_short(str(error))}") from error
        finally:
            response.close()

    def _response(
        self, method: str, path: str, body: Any, as_: str, query: Mapping[str, Any], patience_s: tuple[float, float]
    ) -> Any:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        headers = {"Accept": "application/json"} | ({} if body is None else {"Content-Type": as_})
        given = [(name, value) for name, value in query.items() if value is not None]
        try:
            asked = self._client.param_serialize(
                method, path, query_params=given, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            response = self._client.call_api(*asked, _request_timeout=patience_s)
            if response.status >= 300:
                raise ApiException(status=response.status, reason=response.reason, body=response.read())
        except ApiException as error:
            raise AnsweredError(error.status, _answer(error)) from None
        except (HTTPError, OSError) as error:
            raise ClusterError(f"the cluster cannot be reached: {_short(str(error))}") from error
        return response


def ask_unless(objects: ClusterObjects, status: int, *request: Any) -> dict[str, Any] | None:
    """Send a request, see `ClusterObjects.ask`; None if the server answers with this status."""
    try:
        return objects.ask(*request)
    except AnsweredError as error:
        if error.status != status:
            raise
    return None


def get_or_create(objects: ClusterObjects, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The object of a name, created if it is missing."""
    found = ask_unless(objects, NOT_FOUND, "GET", f"{path}/{body['metadata']['name']}")
    return objects.ask("POST", path, body) if found is None else found


def plural_of(kind: str) -> str:
    """The plural by which a server has a built-in kind."""
    return f"{kind.lower().removesuffix('y')}ies" if kind.endswith("y") else f"{kind.lower()}s"


def path_of(api_version: str, plural: str, namespace: str | None = None, name: str = "", sub: str = "") -> str:
    """Where a server has objects of a kind, or one of them, or a part (``sub``) of one."""
    root = "/apis" if "/" in api_version else "/api"
    within = f"/namespaces/{namespace}" if namespace else ""
    return "/".join(filter(None, (f"{root}/{api_version}{within}/{plural}", name, sub)))


def _event(line: bytes) -> dict[str, Any]:
    try:
        event = dict(json.loads(line))
        if event["type"] == "ERROR":
            raise AnsweredError(int(event["object"].get("code", 0)), _short(str(event["object"].get("message"))))
        return event
    except (ValueError, TypeError, KeyError) as error:
        raise ClusterError(f"the cluster says what cannot be read: {_short(str(error))}") from None


def _configured(context: str | None) -> str:
    from kubernetes import config

    kube: Any = config
    file = os.environ.get("KUBECONFIG") or kube.kube_config.KUBE_CONFIG_DEFAULT_LOCATION
    try:
        kube.load_kube_config(file, context)
        named, current = kube.list_kube_config_contexts(file)
        chosen = next((one for one in named if one["name"] == context), current)
        return str(chosen["context"].get("namespace") or "default")
    except (kube.ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, KeyError) as error:
        problem = _short(str(error))
    try:
        # (where somebody names a context, no other cluster will do)
        if context is None:
            kube.load_incluster_config()
            return "default"
    except kube.ConfigException:
        pass
    raise UsageError(f"no cluster to ask: {problem}")


def _answer(error: Any) -> str:
    try:
        said = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        said = error.reason
    return f"the cluster refuses: {_short(str(said))}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_SAID else f"{line[: _MAX_SAID - 1]}…"


class ObjectWatch(Generic[Kept]):
    """Lists some objects of a kind in a thread of its own, and then watches them.

    After a break, or where the server has forgotten what was before, they are listed again: what is missing then has
    gone. While the server is away, what was seen last stays.

    Args:
        objects: the server.
        path: of the objects, see `path_of`.
        keep: what to keep of each.
        changed: is called in the thread with what was kept of an object and what is now; None while there is none.
        query: selectors, as the server has them.
        watch_s: how long a watch lasts before the next; a network that drops it in silence is noticed then.
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
    ) -> None:
        self._loop = Loop(
            *(f"watch-{path.rpartition('/')[2]}", self._turn, 0.0),
            failing=f"{path} cannot be watched",
            expected=(ClusterError,),
            backoff=Backoff(_PAUSE_S),
        )
        self._objects, self._path, self._keep, self._changed = objects, path, keep, changed
        self._query, self._watch_s = dict(query or {}), watch_s
        self._kept: dict[Key, Kept] = {}
        self._lock = threading.Lock()
        self.listed = threading.Event()
        """Set once all of them have been seen."""

    def kept(self) -> list[Kept]:
        """What is kept of all of them now."""
        with self._lock:
            return list(self._kept.values())

    def start(self) -> None:
        """List and watch, until the end."""
        self._loop.start()

    def end(self, patience_s: float = 0.0) -> bool:
        """Watch no longer than until something happens; whether that was in time."""
        return self._loop.stop(patience_s)

    def _turn(self) -> None:
        version = self._list()
        self.listed.set()
        self._loop.succeeded()
        try:
            while not self._loop.stopping.is_set():
                version = self._follow(version)
        except AnsweredError as error:
            if error.status != GONE:
                raise

    def _list(self) -> str:
        seen, token = set(), None
        while True:
            query: dict[str, Any] = {**self._query, "limit": PAGE, "continue": token}
            page = self._objects.ask("GET", self._path, **query)
            for body in page.get("items") or ():
                seen.add(_key(body))
                self._put(body)
            token = page["metadata"].get("continue")
            if not token:
                break
        with self._lock:
            gone = self._kept.keys() - seen
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
