"""Objects of a cluster, read and their status written, through the official client. Requests block: not for a loop."""

from __future__ import annotations

import json
import os
from typing import Any

import yaml

from sftriage.errors import ClusterError, UsageError
from sftriage.kube.crds import Kind
from sftriage.kube.objects import GROUP, VERSION

_PATIENCE_S = (5.0, 30.0)
"""To connect, and until there is an answer."""
_MAX_SAID = 300
NOT_FOUND, STALE = 404, 409
"""What a server answers where an object is not there, and where it has changed meanwhile."""


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
