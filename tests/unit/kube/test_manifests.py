"""What lies in k8s/, the chart and the definitions, and pods after injection: as Kubernetes and Helm want them."""

import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import pytest
import yaml
from pydantic import BaseModel

from k8s.make_chart import CHART, schema, written
from k8s.make_crds import DEFINITIONS, definition, structural
from k8s.make_crds import written as definitions_written
from sftriage.kube.controllers import ControllerSettings, secret, wanted
from sftriage.kube.injecting import InjectionSettings, injected, injection
from sftriage.kube.jobs import job_of
from sftriage.kube.objects import KINDS
from tests import needs
from tests.unit.kube.pods import TRAINERS

K8S = Path(__file__).parents[3] / "k8s"
NOW = datetime(2027, 1, 15, tzinfo=timezone.utc)
VERSIONS = ("1.29", kubernetes_validate.latest_version())
NOT_BUILT_IN = ("CustomResourceDefinition", "Issuer", "Certificate", "PodMonitor", "TriagePolicy")
_HASHED = re.compile(r"(?<=sftriage-injection)-[0-9a-z]{10}\b")
"""What Kustomize and Helm end the name of the settings with."""
SETTINGS = InjectionSettings(image="registry.example.com/sftriage:1", store="s3://traces", store_secret="s3")


@pytest.fixture(scope="module", autouse=True)
def _each_schema_is_read_once() -> Iterator[None]:
    """The validator reads megabytes of definitions anew for each object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kubernetes_validate.utils, "schema_contents", functools.cache(kubernetes_validate.utils.schema_contents)
        )
        yield


def validate(body: dict[str, Any], versions: tuple[str, ...] = VERSIONS) -> None:
    """Hold an object against the schemas; a field that there is not is an error, too."""
    for version in versions:
        kubernetes_validate.validate(body, version, strict=True)


@functools.cache
def built(overlay: str) -> list[dict[str, Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    done = subprocess.run(["kubectl", "kustomize", str(K8S / overlay)], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(_HASHED.sub("", done.stdout)))


@pytest.mark.parametrize("body", [body for body, _ in TRAINERS.values()], ids=TRAINERS)
def test_an_injected_pod_of_any_job_is_valid(body):
    """GIVEN a pod of root's or of whoever its image has THEN it is valid before and after"""
    validate(body)
    for user in ({}, {"securityContext": {"runAsUser": 0}}):
        validate(injection({**body, "spec": {**body["spec"], **user}}, job_of(body, "ml"), SETTINGS, (1, 29)).pod)


ALL = {"MutatingWebhookConfiguration", "Deployment", "PodDisruptionBudget", "NetworkPolicy"}
OVERLAYS = {
    ".": ALL,
    "cert-manager": ALL | {"Certificate"},
    "nats": {"StatefulSet", "Service", "NetworkPolicy"},
    "cert-manager-nats": ALL | {"Certificate", "StatefulSet"},
    "dashboards": {"ConfigMap"},
    "prometheus": {"PodMonitor"},
    "samples": {"Namespace", "Job", "TriagePolicy"},
}


@pytest.mark.parametrize(("overlay", "there"), OVERLAYS.items(), ids=OVERLAYS)
def test_every_manifest_is_valid(overlay, there):
    assert there <= {body["kind"] for body in built(overlay)}
    for body in built(overlay):
        if body["kind"] not in NOT_BUILT_IN:
            validate(body)


def test_the_objects_of_a_controller_are_valid():
    tls, nats = InjectionSettings(hub_tls=True, metrics_secret="m"), InjectionSettings(nats="tls://nats:4222")
    for settings in (*map(ControllerSettings, (SETTINGS, tls, nats)), ControllerSettings(InjectionSettings(), "claim")):
        for one in (*wanted("ml", settings, {"a.yaml": "a"}), secret("ml", settings.injection, "x", NOW)):
            validate(one)


def test_the_certificate_of_a_shared_hub_fits_its_address_and_pod():
    bodies = {(one["kind"], one["metadata"]["name"]): one for one in built("cert-manager-nats")}
    made = bodies["Certificate", "sftriage-nats"]["spec"]
    said = yaml.safe_load(bodies["ConfigMap", "sftriage-injection"]["data"]["settings.yaml"])
    assert urlsplit(InjectionSettings.model_validate(said).nats).hostname in made["dnsNames"]
    volumes = bodies["StatefulSet", "sftriage-nats"]["spec"]["template"]["spec"]["volumes"]
    assert made["secretName"] in {one.get("secret", {}).get("secretName") for one in volumes}


@pytest.mark.parametrize("overlay", [".", "cert-manager", "cert-manager-nats"])
def test_sftriage_s_own_pods_are_restricted_and_bounded(overlay):
    """GIVEN our own pods THEN they keep to the pod security standard "restricted", and ask for what they take."""
    specs = list(_pod_specs(built(overlay)))
    assert specs
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert set(container["resources"]) == {"requests", "limits"}


def documented(word: str) -> dict[str, Any]:
    """The one block of YAML in the documentation that begins so."""
    page = (K8S.parent / "docs" / "kubernetes.md").read_text()
    (found,) = re.findall(rf"```yaml\n({word}.*?)```", page, re.DOTALL)
    return dict(yaml.safe_load(found))


def test_the_documented_job_is_valid_before_and_after_injection():
    job = documented("apiVersion: batch/v1")
    validate(job)
    found = injected(job, "training", SETTINGS, (1, 29))
    assert (found.templates, found.warnings) == (1, ())
    validate(found.body)
    assert (
        found.body["spec"]["template"]["metadata"]["annotations"]["sftriage.dev/job-id"] == "training/job/pretraining"
    )


def test_the_documentation_lists_all_settings():
    said = documented("image: ")
    settings = InjectionSettings.model_validate(said)
    assert set(said) == set(InjectionSettings.model_fields)
    # AND what is shown as a size is the default
    assert (settings.rings, settings.spool, settings.resources) == (
        InjectionSettings().rings,
        InjectionSettings().spool,
        InjectionSettings().resources,
    )


def test_the_installed_settings_are_valid():
    (kept,) = (body for body in built(".") if body["metadata"]["name"] == "sftriage-injection")
    InjectionSettings.model_validate(yaml.safe_load(kept["data"]["settings.yaml"]))


def _pod_specs(value: Any) -> Any:
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for inner in value.values():
            yield from _pod_specs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _pod_specs(inner)


def test_no_webhook_can_block_a_pod():
    (configuration,) = (body for body in built(".") if body["kind"] == "MutatingWebhookConfiguration")
    pods = [one for one in configuration["webhooks"] if one["rules"][0]["resources"] == ["pods"]]
    assert len(pods) == 2
    for one in configuration["webhooks"]:
        assert (one["sideEffects"], one["reinvocationPolicy"], one["timeoutSeconds"]) == ("None", "IfNeeded", 5)
    for one in pods:
        assert one["failurePolicy"] == "Ignore"
        (elsewhere,) = one["namespaceSelector"]["matchExpressions"]
        assert set(elsewhere["values"]) == {"kube-system", "sftriage-system"}


@pytest.mark.parametrize("file", ["certificates/rbac.yaml", "rbac/operator.yaml", "rbac/controller.yaml"])
def test_each_right_has_a_comment_with_its_reason(file):
    rights = re.findall(r"^  verbs: .*$", (K8S / file).read_text(), re.MULTILINE)
    assert rights
    assert all(re.search(r"\] # \w", line) for line in rights)


HELM = shutil.which("helm") or shutil.which("helm", path=Path(sys.executable).parent)
renders = needs.needs(HELM, "Helm")


def rendered(values: dict[str, Any], namespace: str = "sftriage-system") -> list[dict[str, Any]]:
    command = [str(HELM), "template", "sftriage", str(CHART), "--namespace", namespace, "--values", "-"]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=True, timeout=60)
    return [one for one in yaml.safe_load_all(_HASHED.sub("", done.stdout)) if one is not None]


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


def test_the_chart_is_current():
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
def test_helm_renders_the_objects_of_the_kustomization(overlays, values):
    """GIVEN values that say what an overlay says THEN object for object the same; but who installs makes namespaces"""
    wanted = by_name([body for one in overlays for body in built(one)])
    wanted = {key: body for key, body in wanted.items() if key[0] not in ("CustomResourceDefinition", "Namespace")}
    assert by_name(rendered(values)) == wanted


@renders
def test_helm_values_take_effect():
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
def test_the_schema_of_the_values_refuses_mistakes(values, fine):
    checks = jsonschema.Draft7Validator(schema())
    assert checks.is_valid({**yaml.safe_load((CHART / "values.yaml").read_text()), **values}) is fine


@renders
def test_helm_lint_finds_nothing():
    done = subprocess.run([str(HELM), "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


CRDS = K8S / "crds"


def test_the_shipped_definitions_are_current():
    """GIVEN the models THEN `k8s/crds` has what `python k8s/make_crds.py` makes of them, and nothing else."""
    assert {path.name: path.read_text() for path in CRDS.glob("*.yaml")} == dict(definitions_written())


def object_schema(kind):
    return definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def every(schema, path=""):
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from every(inner, f"{path}.{name}")
    if "items" in schema:
        yield from every(schema["items"], f"{path}[]")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_every_field_is_described_and_has_no_default(kind):
    """GIVEN a definition THEN `kubectl explain` says something of each field, and the server fills in none."""
    fields = [
        (path, one)
        for path, one in every(object_schema(kind))
        if not path.startswith(".metadata") and not path.endswith("[]")
    ]
    assert len(fields) > 25
    assert [path for path, one in fields if not one.get("description")] == []
    assert [path for path, one in fields if "default" in one] == []
    # AND each has a type, as a structural schema demands: `test_kube_crds` asks a server for the rest
    typed = ("type", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields")
    assert [path for path, one in every(object_schema(kind)) if not one.keys() & set(typed)] == []


COLUMNS = {
    "TriagePolicy": ["Accepted", "Conflicted", "Rules", "Age"],
    "TraceCapture": ["Job", "Rank", "Node", "Stage", "State", "Reproduced", "Age"],
    "TriageReport": ["Job", "Health", "Suspect", "Node", "Pod", "Lost-s", "Age"],
}


@pytest.mark.parametrize("about", DEFINITIONS, ids=lambda about: about.of.kind)
def test_columns_show_existing_fields(about):
    """GIVEN a column THEN its path leads to a field of its type, or to a condition."""
    assert [column.name for column in about.columns if not column.wide] == COLUMNS[about.of.kind]
    fields = {path: one.get("type") for path, one in every(object_schema(about.of))}
    for column in about.columns:
        if column.path.startswith(".status.conditions[?"):
            assert ".status.conditions[].type" in fields
        elif column.path != ".metadata.creationTimestamp":
            assert fields[column.path] == column.type


class Either(BaseModel):
    x: int | str = 1


class Closed(BaseModel):
    x: set[str] = set()


@pytest.mark.parametrize(
    ("model", "said"), [(Either, "Either.x: .* allows no union"), (Closed, "Closed.x: .* allows no uniqueItems")]
)
def test_what_no_structural_schema_allows_is_an_error(model, said):
    with pytest.raises(ValueError, match=said):
        structural(model)
