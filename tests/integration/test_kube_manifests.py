"""What lies in k8s/, applied as it is to a real API server. `tests/unit/kube/test_manifests.py` has current schemas."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.integration.kube import K8S, Cluster, missing, prepared

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    with prepared("crds") as one:
        yield one


NOT_YET = {("policy/v1", "PodDisruptionBudget"), ("batch/v1", "CronJob")}
"""What servers before 1.21 do not have."""


def _about(text: str) -> tuple[str, str]:
    body = yaml.safe_load(text)
    return body["apiVersion"], body["kind"]


FOREIGN = {"cert-manager.io": ("Issuer", "Certificate"), "monitoring.coreos.com": ("PodMonitor",)}
"""Kinds of others that manifests of ours have objects of; here any object is one."""


def _definition(group: str, kind: str) -> dict[str, Any]:
    names = {"kind": kind, "plural": f"{kind.lower()}s", "singular": kind.lower()}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    about = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [version]}
    return {**about, "metadata": {"name": f"{names['plural']}.{group}"}, "spec": spec}


@pytest.mark.parametrize(
    "overlay", [".", "cert-manager", "cert-manager-nats", "nats", "dashboards", "prometheus", "samples"]
)
def test_the_manifests_are_taken_as_they_are(server, namespace, overlay):
    """GIVEN all of k8s/ WHEN it is applied, twice THEN the server takes it, but for kinds that are newer than it."""
    foreign = [_definition(group, kind) for group, kinds in FOREIGN.items() for kind in kinds]
    server.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(foreign))
    server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    done = subprocess.run(["kubectl", "kustomize", str(K8S / overlay)], capture_output=True, text=True, check=True)
    served = server.kubectl("api-versions").stdout.split()
    old = "policy/v1" not in served
    manifests = done.stdout.replace("  completionMode: Indexed\n", "") if old else done.stdout
    # (as texts: numbers such as 1e-06 are none to every reader)
    texts = [text for text in manifests.split("\n---\n") if not (old and _about(text) in NOT_YET)]
    # (what says no namespace goes where the person who applies it is)
    where = ("-n", namespace) if overlay == "prometheus" else ()
    try:
        server.kubectl("apply", *where, "-f", "-", text="\n---\n".join(texts))
        again = server.kubectl("apply", *where, "-f", "-", text="\n---\n".join(texts)).stdout
        assert len(again.splitlines()) == len(texts)
    finally:
        server.kubectl("delete", "mutatingwebhookconfiguration", "sftriage", "--ignore-not-found")


def test_the_sample_of_a_capture_is_taken(server, namespace):
    sample = (K8S / "samples" / "capture.yaml").read_text().replace("sftriage-samples", namespace)
    server.kubectl("create", "-f", "-", text=sample)
