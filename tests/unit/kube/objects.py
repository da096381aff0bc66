"""Objects as a server has them, and what it would say of a status."""

import threading
from typing import Any

import jsonschema

from k8s.make_crds import definition
from sftriage.errors import ClusterError
from sftriage.kube.client import NOT_FOUND, STALE, AnsweredError, path_of, plural_of
from sftriage.kube.objects import KINDS

NOW_S = 1_800_000_000.0  # 2027-01-15T08:00:00Z
_SCHEMAS = {
    kind.kind: definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"] for kind in KINDS
}


def made(kind: str, name: str, spec: Any, status: Any = None, **metadata: Any) -> dict[str, Any]:
    about = {"name": name, "namespace": "ml", "uid": "7d", "resourceVersion": "5", "generation": 1, **metadata}
    about.setdefault("creationTimestamp", "2027-01-15T07:00:00Z")
    body = {"apiVersion": "sftriage.dev/v1alpha1", "kind": kind, "metadata": about, "spec": spec}
    return body if status is None else {**body, "status": status}


def kubeconfig(cluster: Any, user: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "own", "cluster": cluster}],
        "users": [{"name": "me", "user": user}],
        "contexts": [{"name": "own", "context": {"cluster": "own", "user": "me"}}],
        "current-context": "own",
    }


def refused(kind: str, part: str, value: Any) -> str:
    """Why a server would refuse a part of an object; "" where it takes it."""
    validator = jsonschema.Draft4Validator(_SCHEMAS[kind][part])
    return "; ".join(f"{one.json_path}: {one.message}" for one in validator.iter_errors(value))


class KeptObjects:
    """A server that keeps what is created, applied or patched, and answers as one does; or not, while it is away."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Any]] = {}
        self.lock, self.version = threading.Lock(), 0
        self.away, self.refused = False, 0

    def request(
        self, method: str, path: str, body: Any = None, *, as_: str = "", tolerate: int = 0, **query: Any
    ) -> dict[str, Any]:
        with self.lock:
            self.check()
            try:
                return self.answer(method, path, body, query)
            except AnsweredError as error:
                if error.status != tolerate:
                    raise
            return {}

    def check(self) -> None:
        if self.away:
            self.refused += 1
            raise ClusterError("away")

    def answer(self, method: str, path: str, body: Any, query: dict[str, Any]) -> dict[str, Any]:
        if method == "GET" and "limit" in query:
            items = [one for where, one in self.kept.items() if where.startswith(f"{path}/")]
            return {"items": items, "metadata": {"resourceVersion": str(self.version)}}
        if method == "POST":
            where = f"{path}/{body['metadata']['name']}"
            if where in self.kept:
                raise AnsweredError(STALE, "there already")
            return self.keep(where, {**body, "metadata": {**body["metadata"], "uid": where, "generation": 1}})
        if path not in self.kept:
            raise AnsweredError(NOT_FOUND, "none")
        now, about = self.kept[path], {} if body is None else body.get("metadata", {})
        version = now["metadata"]["resourceVersion"]
        if about.get("resourceVersion", version) != version:
            raise AnsweredError(STALE, "modified")
        if method == "PUT":
            return self.keep(path, body)
        if method == "PATCH":
            return self.keep(path, {**now, "metadata": {**now["metadata"], **about}})
        return self.kept.pop(path) if method == "DELETE" else now

    def list(self, kind: Any, namespace: str | None) -> list[dict[str, Any]]:
        path = path_of("sftriage.dev/v1alpha1", kind.plural, namespace)
        return list(self.request("GET", path, limit=1)["items"])

    def apply(self, body: dict[str, Any], manager: str) -> dict[str, Any]:
        with self.lock:
            self.check()
            about = body["metadata"]
            path = path_of(body["apiVersion"], plural_of(body["kind"]), about["namespace"], about["name"])
            return self.keep(path, body)

    def put_status(self, kind: Any, body: dict[str, Any], status: Any) -> None:
        with self.lock:
            self.check()
            where = path_of("sftriage.dev/v1alpha1", kind.plural, "ml", body["metadata"]["name"])
            if where not in self.kept:
                raise AnsweredError(NOT_FOUND, "none")
            self.keep(where, {**self.kept[where], "status": status})

    def keep(self, where: str, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.kept[where] = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        return self.kept[where]
