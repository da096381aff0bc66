"""Objects of a cluster, read and their status written, through the official client. Requests block: not for a loop."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import yaml

from sftriage.errors import ClusterError, UsageError
from sftriage.kube.objects import GROUP, VERSION, Kind

_PATIENCE_S = (5.0, 30.0)
"""To connect, and until there is an answer."""
_MAX_SAID = 300
NOT_FOUND, STALE = 404, 409
"""What a server answers where an object is not there, and where it has changed meanwhile (or is there already)."""
GONE = 410
"""And where it is asked for what happened so long ago that it has forgotten."""
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"


class AnsweredError(ClusterError):
    """The server has answered, and refuses; ``status`` is HTTP's."""

    def __init__(self, status: int, said: str) -> None:
        self.status = status
        super().__init__(said)


class ClusterObjects:
    """The objects of sftriage on one API server."""

    def __init__(self, api: Any, namespace: str = "default") -> None:
        self._api = api
        self.namespace = namespace

    @classmethod
    def connect(cls, context: str | None = None) -> ClusterObjects:
        """Whatever kubectl would ask: by ``KUBECONFIG`` or ``~/.kube/config``, or inside a pod its own server.

        Its ``namespace`` is the one of that context.

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
        return cls(client.CustomObjectsApi(client.ApiClient(configuration)), namespace)

    @property
    def api_client(self) -> Any:
        """The client behind it, for what is no object of ours."""
        return self._api.api_client

    def list(self, kind: Kind, namespace: str | None) -> list[dict[str, Any]]:
        """The objects of a kind, in one namespace or (None) in all.

        Raises:
            ClusterError: they cannot be read; `AnsweredError` where the server says so.
        """
        where = {"group": GROUP, "version": VERSION, "plural": kind.plural}
        if namespace is None:
            found = self._asked(self._api.list_cluster_custom_object, **where)
        else:
            found = self._asked(self._api.list_namespaced_custom_object, namespace=namespace, **where)
        # (of a list, the server leaves out what each of its items is)
        about = {"apiVersion": f"{GROUP}/{VERSION}", "kind": kind.kind}
        return [{**about, **one} for one in found.get("items", ())]

    def put_status(self, kind: Kind, body: dict[str, Any], status: dict[str, Any]) -> None:
        """Give an object another status, whole, if it is still as ``body`` has it.

        Raises:
            ClusterError: it was not written; `AnsweredError` `STALE` where the object has changed, `NOT_FOUND` where it
                has gone.
        """
        metadata = body["metadata"]
        self._asked(
            self._api.replace_namespaced_custom_object_status,
            group=GROUP,
            version=VERSION,
            plural=kind.plural,
            namespace=metadata["namespace"],
            name=metadata["name"],
            body={**body, "status": status},
        )

    def ask(
        self, method: str, path: str, body: Any = None, *, as_: str = "application/json", **query: Any
    ) -> dict[str, Any]:
        """Ask for what has no method of its own here; what the server answers.

        Args:
            method: HTTP's.
            path: that of the object or objects, see `path_of`.
            body: what is sent, as JSON.
            as_: what kind of a body it is, such as `APPLY`.
            query: parameters; those that are None are left out.

        Raises:
            ClusterError: it was not done; `AnsweredError` where the server says why.
        """
        found = json.loads(self._response(method, path, body, as_, query, _PATIENCE_S).read())
        return dict(found)

    def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object, whose unknown fields are refused; as the server has it then.

        Raises:
            ClusterError: it was not created; `AnsweredError` where the server says why.
        """
        about = {"apiVersion": f"{GROUP}/{VERSION}", "kind": kind.kind}
        path = path_of(about["apiVersion"], kind.plural, namespace)
        return self.ask("POST", path, {**about, **body}, fieldValidation="Strict")

    def read(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        """One object.

        Raises:
            ClusterError: it cannot be read; `AnsweredError` `NOT_FOUND` where it is not there.
        """
        return self.ask("GET", path_of(f"{GROUP}/{VERSION}", kind.plural, namespace, quote(name, safe="")))

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

        client = self._api.api_client
        headers = {"Accept": "application/json"} | ({} if body is None else {"Content-Type": as_})
        given = [(name, value) for name, value in query.items() if value is not None]
        try:
            asked = client.param_serialize(
                method, path, query_params=given, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            response = client.call_api(*asked, _request_timeout=patience_s)
            if response.status >= 300:
                raise ApiException(status=response.status, reason=response.reason, body=response.read())
        except ApiException as error:
            raise AnsweredError(error.status, _answer(error)) from None
        except (HTTPError, OSError) as error:
            raise ClusterError(f"the cluster cannot be reached: {_short(str(error))}") from error
        return response

    @staticmethod
    def _asked(ask: Any, **what: Any) -> Any:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return ask(**what, _request_timeout=_PATIENCE_S)
        except ApiException as error:
            raise AnsweredError(error.status, _answer(error)) from None
        except (HTTPError, OSError) as error:
            raise ClusterError(f"the cluster cannot be reached: {_short(str(error))}") from error


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
