"""What lies in k8s/, and pods that come out of injection, against the schemas of current Kubernetes."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

from sftriage.kube.controllers import ControllerSettings, secret, wanted
from sftriage.kube.injecting import applied, injected, injection
from sftriage.kube.jobs import JobRef, job_of
from sftriage.kube.sidecar import InjectionSettings
from tests.unit.kube.pods import JOBS

K8S = Path(__file__).parents[3] / "k8s"
NOW = datetime(2027, 1, 15, tzinfo=timezone.utc)
VERSIONS = ("1.29", kubernetes_validate.latest_version())
NOT_BUILT_IN = ("CustomResourceDefinition", "Issuer", "Certificate", "PodMonitor", "TriagePolicy")
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
    """The objects that `kubectl apply -k` has for an overlay."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    done = subprocess.run(["kubectl", "kustomize", str(K8S / overlay)], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("user", [None, 0])
@pytest.mark.parametrize(
    "body", [one for one, found in JOBS.values() if found], ids=[n for n, (_, f) in JOBS.items() if f]
)
def test_an_injected_pod_of_any_job_is_valid(body, user):
    """GIVEN a pod of root's or of whoever its image has THEN it is valid, and goes through the webhook a second time"""
    found = job_of(body, "ml")
    assert found is not None
    if user is not None:
        body = {**body, "spec": {**body["spec"], "securityContext": {"runAsUser": user}}}
    out = applied(body, injection(body, found.job, SETTINGS, (1, 29)).patch)
    assert injection(out, found.job, SETTINGS, (1, 29)).patch == ()
    validate(out)


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


def test_what_the_operator_makes_for_a_job_is_valid():
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "pretraining", "uid": "7d"}
    job = JobRef("job", "pretraining", "ml")
    tls, nats = InjectionSettings(hub_tls=True, metrics_secret="m"), InjectionSettings(nats="tls://nats:4222")
    for settings in (*map(ControllerSettings, (SETTINGS, tls, nats)), ControllerSettings(InjectionSettings(), "claim")):
        for one in (*wanted(job, settings, {"a.yaml": "a"}, [owner]), secret(job, settings.injection, "x", NOW)):
            validate(one)


def test_a_shared_hub_has_the_certificate_that_its_address_and_its_pod_want():
    bodies = {(one["kind"], one["metadata"]["name"]): one for one in built("cert-manager-nats")}
    made = bodies["Certificate", "sftriage-nats"]["spec"]
    said = yaml.safe_load(bodies["ConfigMap", "sftriage-injection"]["data"]["settings.yaml"])
    assert urlsplit(InjectionSettings.model_validate(said).nats).hostname in made["dnsNames"]
    volumes = bodies["StatefulSet", "sftriage-nats"]["spec"]["template"]["spec"]["volumes"]
    assert made["secretName"] in {one.get("secret", {}).get("secretName") for one in volumes}


@pytest.mark.parametrize("overlay", [".", "cert-manager", "cert-manager-nats"])
def test_pods_of_ours_are_restricted_and_bounded(overlay):
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


def test_the_job_of_the_documentation_is_valid_before_and_after():
    job = documented("apiVersion: batch/v1")
    validate(job)
    found = injected(job, "training", SETTINGS, (1, 29))
    assert (found.templates, found.warnings) == (1, ())
    validate(found.body)
    assert (
        found.body["spec"]["template"]["metadata"]["annotations"]["sftriage.dev/job-id"] == "training/job/pretraining"
    )


def test_the_sample_of_a_job_is_watched():
    (job,) = (one for one in built("samples") if one["kind"] == "Job")
    found = injected(job, "sftriage-samples", SETTINGS, (1, 29))
    assert (found.templates, found.warnings) == (1, ())
    validate(found.body)


def test_the_settings_of_the_documentation_are_all_that_there_are():
    said = documented("image: ")
    settings = InjectionSettings.model_validate(said)
    assert set(said) == set(InjectionSettings.model_fields)
    # AND what is shown as a size is the default
    assert (settings.rings, settings.spool, settings.resources) == (
        InjectionSettings().rings,
        InjectionSettings().spool,
        InjectionSettings().resources,
    )


def test_the_settings_that_are_installed_are_valid():
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


def test_no_webhook_ever_keeps_a_pod_from_starting():
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
def test_each_right_has_its_reason_beside_it(file):
    rights = re.findall(r"^  verbs: .*$", (K8S / file).read_text(), re.MULTILINE)
    assert rights
    assert all(re.search(r"\] # \w", line) for line in rights)
