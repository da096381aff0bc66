"""The Helm chart: it is what the manifests make it, and makes the objects that `kubectl apply -k` makes.

Helm itself renders it where it is there; else Go's own templates do, with the functions that Helm adds.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from k8s.make_chart import CHART, schema, written
from tests import needs
from tests.unit.kube.test_manifests import K8S, built

SPRIG = Path("/usr/share/gocode/src/github.com/Masterminds/sprig")
HELM = shutil.which("helm")
renders = needs.needs(HELM or (shutil.which("go") and SPRIG.exists()), "Helm, nor Go with sprig to stand in for it")


@functools.cache
def renderer() -> str:
    """Go's templates with Helm's functions, as a program."""
    folder = Path(tempfile.mkdtemp(prefix="sftriage-helm-"))
    environment = {**os.environ, "GO111MODULE": "off", "GOPATH": "/usr/share/gocode", "GOCACHE": str(folder / "cache")}
    program = str(folder / "helm_template")
    source = Path(__file__).with_name("helm_template.go")
    subprocess.run(["go", "build", "-o", program, str(source)], env=environment, check=True, timeout=300)
    return program


def rendered(values: dict[str, Any], namespace: str = "sftriage-system") -> list[dict[str, Any]]:
    """The objects that the chart makes of some values."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values, file)
        file.flush()
        command = [renderer(), str(CHART), namespace, file.name]
        if HELM is not None:
            command = [HELM, "template", "sftriage", str(CHART), "--namespace", namespace, "--values", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [one for one in yaml.safe_load_all(done.stdout) if one is not None]


def by_name(bodies: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Objects as they are compared: without what tells Helm when to make them, and with settings as they are read."""
    found = {}
    for body in json.loads(json.dumps(bodies)):
        about = body["metadata"]
        about["annotations"] = {
            name: one for name, one in about.get("annotations", {}).items() if not name.startswith("helm.sh/")
        }
        if "settings.yaml" in body.get("data", {}):
            body["data"]["settings.yaml"] = yaml.safe_load(body["data"]["settings.yaml"])
        found[body["kind"], about["name"]] = body
    return found


def test_the_chart_is_what_the_manifests_make_it():
    """GIVEN the manifests THEN the chart is that of `python k8s/make_chart.py`, and there is nothing else in it"""
    found = {
        str(path.relative_to(CHART)): path
        for path in CHART.rglob("*")
        if path.is_file() and not path.parent.is_symlink()
    }
    assert {name: path.read_text() for name, path in found.items()} == dict(written())
    assert {name: (CHART / name).resolve() for name in ("crds", "files")} == {
        "crds": K8S / "crds",
        "files": K8S / "dashboards",
    }


@renders
@pytest.mark.parametrize(
    ("overlays", "values"),
    [
        ((".",), {}),
        (("cert-manager",), {"certificates": "cert-manager"}),
        ((".", "nats", "dashboards"), {"nats": {"enabled": True}, "dashboards": True}),
        (
            ("cert-manager-nats",),
            {
                "certificates": "cert-manager",
                "nats": {"enabled": True},
                "settings": {"nats": "tls://sftriage-nats.sftriage-system:4222", "nats_ca": True},
            },
        ),
    ],
    ids=str,
)
def test_it_makes_the_objects_of_the_kustomization(overlays, values):
    """GIVEN values that say what an overlay says THEN object for object the same; but who installs makes namespaces"""
    wanted = by_name([body for one in overlays for body in built(one)])
    wanted = {key: body for key, body in wanted.items() if key[0] not in ("CustomResourceDefinition", "Namespace")}
    assert by_name(rendered(values)) == wanted


@renders
def test_values_are_followed():
    """GIVEN another image, namespace, replicas, resources and store THEN nothing is as it was by default"""
    resources = {"requests": {"cpu": "1", "memory": "1Gi"}}
    part = {"replicas": 3, "resources": resources}
    settings = {"store": "s3://traces", "resources": {"cpu": "7m"}}
    bodies = rendered(
        {"image": "r.example/s@sha256:12", "operator": part, "webhook": part, "settings": settings}, "ours"
    )
    said = yaml.safe_dump_all(bodies)
    assert "sftriage-system" not in said
    assert not re.search(r"image: sftriage", said)
    found = by_name(bodies)
    for name in ("sftriage-operator", "sftriage-webhook"):
        spec = found["Deployment", name]["spec"]
        assert spec["replicas"] == 3
        assert spec["template"]["spec"]["containers"][0]["resources"]["requests"] == resources["requests"]
    kept = found["ConfigMap", "sftriage-injection"]["data"]["settings.yaml"]
    assert kept == {**settings, "image": "r.example/s@sha256:12"}


VALUES = {
    "defaults": ({}, True),
    "a store": ({"settings": {"store": "s3://traces", "resources": {"cpu": "100m"}}}, True),
    "a setting that there is not": ({"settings": {"stores": "s3://traces"}}, False),
    "an image among the settings": ({"settings": {"image": "x"}}, False),
    "an amount that is none": ({"settings": {"rings": "many"}}, False),
    "certificates of nobody": ({"certificates": "none"}, False),
    "a part's other field": ({"operator": {"replica": 1}}, False),
}


@pytest.mark.parametrize(("values", "fine"), VALUES.values(), ids=VALUES)
def test_what_values_may_be_is_checked_before_anything_is_made(values, fine):
    checks = jsonschema.Draft7Validator(schema())
    assert checks.is_valid({**yaml.safe_load((CHART / "values.yaml").read_text()), **values}) is fine


@pytest.mark.skipif(HELM is None, reason="no Helm here")
def test_helm_has_nothing_to_say_of_it():
    done = subprocess.run([str(HELM), "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
