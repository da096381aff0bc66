"""The definitions and the manifests in k8s/ on a real API server."""

import copy
import json
import re
import subprocess

import pytest
import yaml

from sftriage.kube.objects import KINDS, capture_of
from sftriage.kube.statuses import KnownCapture, capture_status, loaded, policy_states, report_status
from sftriage.model.captures import CaptureResult
from sftriage.policy.in_force import find, shipped
from sftriage.policy.parsing import parse
from sftriage.policy.state import Losses, SuspectLoss
from sftriage.runs.directory import RunInfo
from sftriage.runs.source import View
from sftriage.traces.manifest import ReproducedInfo
from tests.integration.kube import K8S, definition_of_any, made, put_status
from tests.integration.processes import wait_until
from tests.scenario import row
from tests.unit.conftest import manifest_of

NOW_S = 1_800_000_000.0


def documented(kind: str = "TriagePolicy") -> dict[str, str]:
    pages = {page.stem: page.read_text() for page in sorted((K8S.parent / "docs").glob("*.md"))}
    blocks = {name: re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) for name, text in pages.items()}
    return {
        f"{name}-{number}": block
        for name, found in blocks.items()
        for number, block in enumerate(found)
        if f"kind: {kind}" in block
    }


POLICIES = {**{name: find(name).read_text() for name in shipped()}, **documented()}


def test_the_documentation_has_policies():
    assert documented()
    assert documented("TraceCapture")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_the_server_accepts_the_schemas_as_structural(server, kind):
    """GIVEN the definitions as they lie in k8s/crds THEN the server serves them, with no complaint about a schema."""
    conditions = {
        one["type"]: one["status"] for one in server.get("crd", kind.crd, namespace="default")["status"]["conditions"]
    }
    assert conditions["Established"] == conditions["NamesAccepted"] == "True"
    assert "NonStructuralSchema" not in conditions


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("triagepolicy", "The format is that of `sftriage run --policy`"),
        ("triagepolicy.spec.detection.window_steps", "down to 10. Default: `50`."),
        ("tracecapture.spec.rank", "The rank to capture."),
        ("tracecapture.status.conditions.reason", "The reason, as one word for programs."),
        ("triagereport.status.holds.resolves", "What would resolve it."),
    ],
)
def test_kubectl_explains_every_field(server, path, said):
    def explained() -> str:
        return " ".join(server.kubectl("explain", path, check=False).stdout.split())

    # (a server publishes what it has learnt some moments later)
    wait_until(lambda: said in explained(), 30)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_survives_a_round_trip(server, namespace, name):
    """GIVEN a policy of the command line WHEN the server has taken it THEN our validator takes what it gives back."""
    text = POLICIES[name]
    server.kubectl("create", "-n", namespace, "-f", "-", text=text)
    said = yaml.safe_load(text)
    served = server.get("triagepolicy", said["metadata"]["name"], namespace=namespace)
    assert served["metadata"]["uid"]
    assert served["spec"] == said["spec"]
    # WHEN its status was written too
    (found,) = policy_states([served], NOW_S)
    assert found.in_force, found.status
    put_status(server, namespace, "triagepolicies", said["metadata"]["name"], found.status.plain())
    # THEN it is that policy still, with all that the server keeps beside it
    again = server.get("triagepolicy", said["metadata"]["name"], namespace=namespace)
    assert again["status"] == found.status.plain()
    assert loaded(again).policy == parse(text, "file").policy
    written = server.kubectl("get", "triagepolicy", said["metadata"]["name"], "-n", namespace, "-o", "yaml").stdout
    assert parse(written, "written").policy == parse(text, "file").policy
    # AND the columns say how it stands
    shown = server.kubectl("get", "tpol", "-n", namespace).stdout.splitlines()
    assert shown[0].split() == ["NAME", "ACCEPTED", "CONFLICTED", "RULES", "AGE"]
    assert shown[1].split()[1:4] == ["True", "False", str(len(said["spec"]["rules"]))]


def test_a_report_keeps_its_status_and_has_columns(server, namespace):
    """GIVEN a run with a slow rank, hold-offs and captures WHEN its report is written THEN the server has all of it."""
    server.create(made("TriageReport", "r", {"job": "resnet"}), namespace)
    served = server.get("triagereport", "r", namespace=namespace)
    info = RunInfo("run-1", "resnet", "2026-03-01T00:00:00+00:00", ("true",), "default", "0" * 64, "/nowhere")
    rows = (row(0), row(50, "suspect", "throttle", "overhead_budget", onset=60))
    states = {"c0": CaptureResult("c0", 1, "failed", "why"), "c1": CaptureResult("c1", 2, "stored")}
    losses = Losses({"rank 2 in data": SuspectLoss("rank 2", "data", lost_s=0.9, rank_s=3.6)})
    about = {"states": states, "captures": (manifest_of("c1"),), "losses": losses, "hosts": {2: "node-7"}}
    view = View("1", info=info, going=True, rows=rows, **about)
    status = report_status(served, view, NOW_S, "resnet-2").plain()
    put_status(server, namespace, "triagereports", "r", status)
    assert server.get("triagereport", "r", namespace=namespace)["status"] == status
    shown = server.kubectl("get", "trep", "-n", namespace).stdout.splitlines()
    assert "triagereport.sftriage.dev/r" in server.kubectl("get", "sftriage", "-n", namespace).stdout
    assert shown[0].split() == ["NAME", "JOB", "HEALTH", "SUSPECT", "NODE", "POD", "LOST-S", "AGE"]
    suspect = ["rank", "2", "in", "data", "node-7", "resnet-2"]
    assert shown[1].split()[:-1] == ["r", "resnet", "throttled", *suspect, "0.9"]


def test_a_capture_keeps_its_status_and_has_columns(server, namespace):
    trigger = {"policy": "default", "rule": "slow-rank", "stage": "data", "first_step": 100, "last_step": 149}
    spec = {"job": "resnet", "rank": 2, "reason": "slow in data", "trigger": trigger}
    server.create(made("TraceCapture", "c", spec), namespace)
    served = server.get("tracecapture", "c", namespace=namespace)
    found = ReproducedInfo(answer="yes", steps=5, steps_with=5, over_s=0.02, expected_s=0.02)
    manifest = manifest_of("c1").model_copy(update={"reproduced": found})
    took = CaptureResult("c1", 2, "stored", first_step=160, last_step=164)
    status = capture_status(served, KnownCapture(took, manifest, "s3://traces", "resnet/run-1/c1"), NOW_S).plain()
    put_status(server, namespace, "tracecaptures", "c", status)
    assert server.get("tracecapture", "c", namespace=namespace)["status"] == status
    shown = server.kubectl("get", "tcap", "-n", namespace, "-o", "wide").stdout.splitlines()
    assert shown[0].split()[2:6] == ["RANK", "NODE", "STAGE", "STEP"]
    assert shown[1].split()[:-1] == ["c", "resnet", "2", "node-1", "data", "160", "torch", "stored", "yes"]
    # AND what a status cannot be is refused, so that it is worth making it right
    again = server.get("tracecapture", "c", namespace=namespace)
    wrong_ = json.dumps({**again, "status": {**status, "state": "dreaming"}})
    path = f"/apis/sftriage.dev/v1alpha1/namespaces/{namespace}/tracecaptures/c/status"
    assert "dreaming" in server.kubectl("replace", "--raw", path, "-f", "-", text=wrong_, check=False).stderr


def test_a_float_returned_as_an_integer_is_the_same(server, namespace):
    said = {"min_coverage": 1.0, "min_persistence": 0.5, "false_names_per_million_steps": 1e-06}
    server.create(wrong("spec.detection", said), namespace)
    served = server.get("triagepolicy", "default", namespace=namespace)
    detection = loaded(served).policy.spec.detection
    assert (detection.min_coverage, detection.min_persistence) == (1.0, 0.5)
    assert detection.false_names_per_million_steps == 1e-06


CAPTURES = {**documented("TraceCapture"), "the sample": (K8S / "samples" / "capture.yaml").read_text()}


@pytest.mark.parametrize("text", CAPTURES.values(), ids=CAPTURES)
def test_documented_captures_are_accepted(server, namespace, text):
    text = text.replace("sftriage-samples", namespace)
    served = json.loads(server.kubectl("create", "-n", namespace, "-o", "json", "-f", "-", text=text).stdout)
    spec, wrong_ = capture_of(served)
    assert (spec is not None, wrong_) == (True, "")
    assert served["spec"] == yaml.safe_load(text)["spec"]


GOOD = yaml.safe_load(find("default").read_text())


def wrong(path: str, value: object) -> dict:
    changed = copy.deepcopy(GOOD)
    *above, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    inner = changed
    for part in above:
        inner = inner[part]
    inner[last] = value
    return changed


REFUSED = {
    "an enum": ("spec.rules.0.capture.profiler", "perf"),
    "a bound": ("spec.rules.0.capture.steps", 1001),
    "a number out of its bounds": ("spec.detection.min_coverage", 1.5),
    "a percentage that is none": ("spec.detection.min_coverage", "95"),
    "a duration without a unit": ("spec.rules.0.cooldown", "600"),
    "a duration that is a number": ("spec.rules.0.cooldown", 600),
    "a size without a number": ("spec.rules.0.capture.max_bytes", "Mi"),
    "a condition": ("spec.rules.0.match.gain", "> 5%"),
    "a stage": ("spec.rules.0.match.stage", ["a b"]),
    "no rules": ("spec.rules", []),
    "a name": ("metadata.name", "a.b"),
    "a hold that is none": ("spec.on_needs_evidence", {"hold": False}),
}


@pytest.mark.parametrize(("path", "value"), REFUSED.values(), ids=REFUSED)
def test_the_server_refuses_what_violates_the_schema(server, namespace, path, value):
    """GIVEN a policy that is wrong by itself THEN no object is made of it, nor does `policy validate` take it."""
    policy = wrong(path, value)
    done = server.create(policy, namespace, check=False)
    assert done.returncode != 0
    assert path.rpartition(".")[2] in done.stderr
    (found,) = policy_states([policy], NOW_S)
    assert not found.in_force


def test_null_counts_as_absent(server, namespace):
    """GIVEN a field that is null THEN the server leaves it out, and the policy is as if it had not been there."""
    server.create(wrong("spec.limits.captures_per_day", None), namespace)
    served = server.get("triagepolicy", "default", namespace=namespace)
    assert loaded(served).policy.spec.limits.captures_per_day is None


NOT_YET = {("policy/v1", "PodDisruptionBudget")}
"""What servers before 1.21 do not have."""


def _about(text: str) -> tuple[str, str]:
    body = yaml.safe_load(text)
    return body["apiVersion"], body["kind"]


FOREIGN = {"cert-manager.io": ("Issuer", "Certificate"), "monitoring.coreos.com": ("PodMonitor",)}
"""Kinds of others that manifests of ours have objects of; here any object is one."""


@pytest.mark.parametrize(
    "overlay", [".", "cert-manager", "cert-manager-nats", "nats", "dashboards", "prometheus", "samples"]
)
def test_the_server_accepts_the_manifests_and_an_upgrade(server, namespace, overlay):
    """GIVEN all of k8s/ WHEN it is applied, and again with another image THEN the server takes it, but newer kinds."""
    foreign = [definition_of_any(f"{group}/v1", kind) for group, kinds in FOREIGN.items() for kind in kinds]
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
        upgrade = "\n---\n".join(texts).replace("image: sftriage:latest", "image: sftriage:next")
        again = server.kubectl("apply", *where, "-f", "-", text=upgrade).stdout
        assert len(again.splitlines()) == len(texts)
    finally:
        server.kubectl("delete", "mutatingwebhookconfiguration", "sftriage", "--ignore-not-found")
