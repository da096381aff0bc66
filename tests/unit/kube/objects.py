"""Objects as a server has them, and what it would say of a status."""

from __future__ import annotations

from typing import Any

import jsonschema

from k8s.make_crds import definition
from sftriage.kube.objects import KINDS

NOW_S = 1_800_000_000.0  # 2027-01-15T08:00:00Z
_SCHEMAS = {
    kind.kind: definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"] for kind in KINDS
}


def made(kind: str, name: str, spec: Any, status: Any = None, **metadata: Any) -> dict[str, Any]:
    """An object of a kind as a server has it."""
    about = {"name": name, "namespace": "ml", "uid": "7d", "resourceVersion": "5", "generation": 1, **metadata}
    about.setdefault("creationTimestamp", "2027-01-15T07:00:00Z")
    body = {"apiVersion": "sftriage.dev/v1alpha1", "kind": kind, "metadata": about, "spec": spec}
    return body if status is None else {**body, "status": status}


def refused(kind: str, part: str, value: Any) -> str:
    """Why a server would refuse a part of an object; "" where it takes it."""
    validator = jsonschema.Draft4Validator(_SCHEMAS[kind][part])
    return "; ".join(f"{one.json_path}: {one.message}" for one in validator.iter_errors(value))
