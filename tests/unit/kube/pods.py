"""Pods of jobs of every kind, as their controllers make them: with the labels and variables that these document.

Each is as it arrives at admission, so without what the server fills in; LeaderWorkerSet's as they are before its own
webhook has seen them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def pod(
    labels: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    name: str | None = None,
    container: str = "train",
    annotations: Mapping[str, str] | None = None,
    owner: str | None = None,
    **spec: Any,
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"labels": {"sftriage.dev/inject": "enabled", **(labels or {})}}
    metadata |= {"generateName": "train-"} if name is None else {"name": name}
    if annotations:
        metadata["annotations"] = dict(annotations)
    if owner is not None:
        about = {"apiVersion": "v1", "kind": owner, "name": "o", "uid": "7d", "controller": True}
        metadata["ownerReferences"] = [about]
    trains: dict[str, Any] = {"name": container, "image": "example.com/train:1", "command": ["torchrun", "train.py"]}
    if env:
        trains["env"] = [{"name": name, "value": value} for name, value in env.items()]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"restartPolicy": "Never", "containers": [trains], **spec},
    }


GIVEN = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
JOBSET: dict[str, str] = GIVEN["labels"]["jobset"]
JOBS: dict[str, tuple[dict[str, Any], str | None]] = {
    name: (pod(**one["pod"]), one.get("job")) for name, one in GIVEN["jobs"].items()
}
"""Pods, and the system and name of the job that each is of."""
