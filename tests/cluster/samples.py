"""What a platform team applies: `k8s/` with an image and settings of its own, and the job of `k8s/samples`."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sftriage.kube.jobs import COMPONENT_LABEL, CONTROLLER
from tests.cluster import node
from tests.cluster.node import TRAINER, Node, for_old
from tests.integration.kube import SYSTEM, Laptop
from tests.integration.processes import ROOT, wait_until
from tests.integration.s3 import BUCKET, Server, environment_of

OURS, SECRET = "sftriage:latest", "sftriage-store"
CONTROLLERS = f"{COMPONENT_LABEL}={CONTROLLER}"


@dataclass(frozen=True, slots=True)
class Store:
    """An S3 server on this machine that pods reach."""

    server: Server
    url: str = f"s3://{BUCKET}/traces"

    @property
    def environment(self) -> dict[str, str]:
        return environment_of(self.server.url)

    @property
    def settings(self) -> dict[str, str]:
        return {"store": self.url, "store_secret": SECRET}

    def secret(self, cluster: Node, namespace: str) -> None:
        """Put the store's credentials into a namespace."""
        about = {"metadata": {"name": SECRET, "namespace": namespace}, "stringData": self.environment}
        cluster.kubectl("apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "Secret", **about}))

    def references(self, namespace: str) -> set[str]:
        """Where the whole traces of a namespace's jobs are, as captures have it."""
        keys = (key.removeprefix("traces/") for key in self.server.objects() if key.endswith("/manifest.json"))
        return {key.removesuffix("/manifest.json") for key in keys if key.startswith(f"{namespace}%2F")}


def kustomized(cluster: Node, settings: Mapping[str, Any], image: str = OURS, checkout: Path = ROOT) -> str:
    """The manifests of a kustomization on top of a checkout's `k8s/`, with an image and settings."""
    name, _, tag = image.rpartition(":")
    data = {"settings.yaml": yaml.safe_dump({"image": image, **settings})}
    with tempfile.TemporaryDirectory() as folder:
        made = {
            "resources": [os.path.relpath(checkout / "k8s", Path(folder).resolve())],
            "images": [{"name": "sftriage", "newName": name, "newTag": tag}],
            "patches": [
                {
                    "target": {"kind": "ConfigMap", "name": "sftriage-injection"},
                    "patch": json.dumps([{"op": "replace", "path": "/data", "value": data}]),
                }
            ],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(made))
        return for_old(cluster.kubectl("kustomize", folder).stdout)


def install(cluster: Node, store: Store, checkout: Path = ROOT) -> None:
    """Install a checkout's `k8s/` with its image, or change the installation to it."""
    image = load(cluster, checkout)
    cluster.install(kustomized(cluster, store.settings, image, checkout), lambda: store.secret(cluster, SYSTEM))


def load(cluster: Node, checkout: Path) -> str:
    """Give the node a checkout's image, and return its tag."""
    archive = node.images(checkout)[0]
    cluster.load(archive)
    return node.tag(archive)


@dataclass(frozen=True, slots=True)
class Sample:
    """The job of `k8s/samples`, in a namespace of its own."""

    cluster: Node
    namespace: str
    job: str = "sample"

    @classmethod
    @contextlib.contextmanager
    def running(
        cls,
        cluster: Node,
        store: Store | None,
        namespace: str,
        steps: int = 2000,
        edit: Callable[[list[Any]], object] = lambda objects: None,
    ) -> Iterator[Sample]:
        """Apply it, with changes; end it at the end."""
        found = cls(cluster, namespace)
        cluster.kubectl("apply", "-f", "-", text=json.dumps(_namespace(namespace)))
        try:
            if store is not None:
                store.secret(cluster, namespace)
            cluster.kubectl("apply", "-f", "-", text=manifests(cluster, namespace, steps, edit))
            yield found
        finally:
            found.end()

    def end(self) -> None:
        """Delete its namespace."""
        self.cluster.kubectl("delete", "namespace", self.namespace, "--wait=false", check=False)
        wait_until(lambda: released(self.cluster, self.namespace), 120)

    def get(self, *what: str) -> list[Any]:
        """Objects of the namespace, the oldest first."""
        found: list[Any] = self.cluster.get(*what, namespace=self.namespace)["items"]
        return sorted(found, key=lambda each: str(each["metadata"]["creationTimestamp"]))

    @property
    def pods(self) -> list[Any]:
        return self.get("pods", "-l", f"job-name={self.job}")

    @property
    def controllers(self) -> list[Any]:
        return self.get("deployments", "-l", CONTROLLERS)

    @property
    def report(self) -> Any:
        """The newest report, or None."""
        return next(reversed(self.get("triagereports")), None)

    def condition(self, kind: str) -> dict[str, str]:
        found = (self.report or {}).get("status", {}).get("conditions", [])
        return next((each for each in found if each["type"] == kind), {})

    def stored(self) -> list[Any]:
        return [each for each in self.get("tracecaptures") if "stored" in each.get("status", {})]

    def until(self, what: Any, deadline_s: float = 300) -> Any:
        """Wait until something holds; if it does not, say what the cluster shows."""
        try:
            return wait_until(what, deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def said(self) -> str:
        shown = [
            ("get", "pods,deployments,tracecaptures,triagereports", "-o", "wide"),
            ("get", "events", "--sort-by=.lastTimestamp"),
            *(
                ("logs", "-l", label, "--all-containers", "--tail=30", "--prefix")
                for label in (f"job-name={self.job}", CONTROLLERS)
            ),
        ]
        return "\n".join(self.cluster.kubectl(*each, "-n", self.namespace, check=False).stdout for each in shown)

    def step(self) -> int:
        """The last step that the job has printed: each tenth."""
        printed = (self._log(each["metadata"]["name"]) for each in self.pods)
        return max(
            (int(line.split()[0]) for text in printed for line in text.splitlines() if _is_step(line)), default=-1
        )

    def _log(self, pod: str) -> str:
        return self.cluster.kubectl("logs", pod, "-c", "train", "-n", self.namespace, check=False).stdout

    def laptop(self, home: Path, store: Store | None = None) -> Laptop:
        found = Laptop(self.cluster.kubeconfig, home, self.namespace)
        found.environment |= store.environment if store else {}
        return found


def _is_step(line: str) -> bool:
    return line.split(" ")[0].isdigit()


def _namespace(name: str) -> dict[str, Any]:
    labels = {"as-newer": "yes", "sftriage.dev/inject": "enabled", "pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def manifests(
    cluster: Node, namespace: str, steps: int, edit: Callable[[list[Any]], object] = lambda objects: None
) -> str:
    """`k8s/samples` in a namespace, with the image of the tests' trainers, and indexed as 1.20 can have it."""
    objects = [*yaml.safe_load_all(cluster.kubectl("kustomize", str(ROOT / "k8s" / "samples")).stdout)]
    kept = [each for each in objects if each["kind"] != "Namespace"]
    for each in kept:
        each["metadata"]["namespace"] = namespace
    (job,) = (each["spec"] for each in kept if each["kind"] == "Job")
    del job["completionMode"]
    job["template"]["metadata"] = {"annotations": {"as-newer/indexed": "true"}}
    (train,) = job["template"]["spec"]["containers"]
    train |= {
        "image": TRAINER,
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "4Gi"}},
    }
    # (beside other work, steps take longer, and 100 ms do not stand out)
    made = {"STEPS": steps, "SLOW_FROM": 50, "SLOW_S": 0.4}
    train["env"] += [{"name": name, "value": str(value)} for name, value in made.items()]
    edit(kept)
    return yaml.safe_dump_all(kept)


def released(cluster: Node, namespace: str) -> bool:
    """Whether a namespace is gone; takes the finalizers of its captures: the operator waits for unfinished ones."""
    for each in cluster.kubectl("get", "tcap", "-n", namespace, "-o", "name", check=False).stdout.split():
        nothing = '{"metadata":{"finalizers":null}}'
        cluster.kubectl("patch", each, "-n", namespace, "--type=merge", "-p", nothing, check=False)
    return cluster.kubectl("get", "namespace", namespace, check=False).returncode != 0
