"""Pods of jobs of every kind, as their controllers make them, and as they come out of the webhook.

`tests/golden/pods` has each as it arrives at admission, so without what the server fills in, and what injection adds to
the first of each kind: `python -m tests.unit.kube.pods` writes that anew.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sftriage.kube.injecting import Injection, InjectionSettings, injection
from sftriage.kube.jobs import JobRef, job_of


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


NEW, SETTINGS = (1, 31), InjectionSettings(image="registry.example.com/sftriage:1")
FOLDER = Path(__file__).parents[2] / "golden" / "pods"
JOBS: dict[str, tuple[dict[str, Any], str | None]] = {
    f"{path.stem}: {name}": (found["pod"], found.get("job"))
    for path in sorted(FOLDER.glob("*.yaml"))
    for name, found in yaml.safe_load(path.read_text(encoding="utf-8")).items()
}
"""Pods, and the system and name of the job that each is of."""
TRAINERS = {name: (body, JobRef.of_id(f"ml/{job}")) for name, (body, job) in JOBS.items() if job is not None}
INJECTED = FOLDER / "injected.txt"


def injected(body: dict[str, Any]) -> Injection:
    return injection(body, job_of(body, "ml"), SETTINGS, NEW)


def additions() -> str:
    """What injection adds to the first pod of each kind: paths and values."""
    firsts = {name.partition(":")[0]: name for name in reversed(TRAINERS)}
    lines: list[str] = []
    for name in sorted(firsts.values()):
        patch = injected(TRAINERS[name][0]).patch
        lines += [f"# {name}", *(f"{change['path']} {json.dumps(change['value'])}" for change in patch)]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    INJECTED.write_text(additions(), encoding="utf-8")
