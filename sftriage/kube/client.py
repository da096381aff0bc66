"""Objects of a cluster, read and their status written, through the official client. Requests block: not for a loop."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import yaml

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

    def apply(self, body: Mapping[str, Any], plural: str, manager: str) -> dict[str, Any]:
        """Have an object be as ``body`` says, whatever it was: its fields become those of ``manager``.

        Raises:
            ClusterError: it was not done; `AnsweredError` where the server says why.
        """
        about = body["metadata"]
        path = path_of(body["apiVersion"], plural, about.get("namespace"), about["name"])
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
    """Take over the credentials that there are; the namespace they are for."""
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
    """What the server said, in a line."""
    try:
        said = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        said = error.reason
    return f"the cluster refuses: {_short(str(said))}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_SAID else f"{line[: _MAX_SAID - 1]}…"
