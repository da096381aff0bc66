"""`sftriage kube inject` and `carry`, and the settings: what is done without a cluster."""

from __future__ import annotations

import copy
import io
import sys
from typing import Any

import pytest
import yaml

from sftriage.errors import InputError
from sftriage.kube.injecting import injected, injection
from sftriage.kube.jobs import JobRef
from sftriage.kube.sidecar import InjectionSettings, read_settings
from tests.unit.kube.pods import pod

NEW, SETTINGS = (1, 29), InjectionSettings()
TEMPLATE: dict[str, Any] = {"metadata": {}, "spec": pod()["spec"]}


def made(api: str, kind: str, spec: Any) -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": "resnet", "namespace": "ml"}, "spec": spec}


def at(value: Any, *path: Any) -> Any:
    for name in path:
        value = value[name]
    return value


WORKLOADS: dict[str, tuple[dict[str, Any], JobRef, list[tuple[Any, ...]]]] = {
    "Job": (
        made("batch/v1", "Job", {"template": TEMPLATE}),
        JobRef("job", "resnet", "ml"),
        [("spec", "template")],
    ),
    "JobSet": (
        made(
            "jobset.x-k8s.io/v1alpha2", "JobSet", {"replicatedJobs": [{"template": {"spec": {"template": TEMPLATE}}}]}
        ),
        JobRef("jobset", "resnet", "ml"),
        [("spec", "replicatedJobs", 0, "template", "spec", "template")],
    ),
    "PyTorchJob": (
        made(
            "kubeflow.org/v1",
            "PyTorchJob",
            {"pytorchReplicaSpecs": {r: {"template": TEMPLATE} for r in ("Master", "Worker")}},
        ),
        JobRef("pytorchjob", "resnet", "ml"),
        [("spec", "pytorchReplicaSpecs", role, "template") for role in ("Master", "Worker")],
    ),
    "LeaderWorkerSet": (
        made("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", {"leaderWorkerTemplate": {"workerTemplate": TEMPLATE}}),
        JobRef("leaderworkerset", "resnet-0", "ml"),
        [("spec", "leaderWorkerTemplate", "workerTemplate")],
    ),
    "Volcano": (
        made("batch.volcano.sh/v1alpha1", "Job", {"tasks": [{"template": TEMPLATE}, {"template": TEMPLATE}]}),
        JobRef("volcano", "resnet", "ml"),
        [("spec", "tasks", 0, "template"), ("spec", "tasks", 1, "template")],
    ),
    "RayJob": (
        made(
            "ray.io/v1",
            "RayJob",
            {"rayClusterSpec": {"headGroupSpec": {"template": TEMPLATE}, "workerGroupSpecs": [{"template": TEMPLATE}]}},
        ),
        JobRef("rayjob", "resnet", "ml"),
        [
            ("spec", "rayClusterSpec", "headGroupSpec", "template"),
            ("spec", "rayClusterSpec", "workerGroupSpecs", 0, "template"),
        ],
    ),
    "StatefulSet by a label of ours": (
        made(
            "apps/v1",
            "StatefulSet",
            {"template": {**TEMPLATE, "metadata": {"labels": {"sftriage.dev/job-name": "mine"}}}},
        ),
        JobRef("pod", "mine", "ml"),
        [("spec", "template")],
    ),
}


@pytest.mark.parametrize(("body", "job", "places"), WORKLOADS.values(), ids=WORKLOADS)
def test_every_template_is_as_the_webhook_would_have_its_pods(body, job, places):
    before = copy.deepcopy(body)
    found = injected(body, "elsewhere", SETTINGS, NEW)
    assert body == before
    assert (found.templates, found.warnings) == (len(places), ())
    for place in places:
        template = at(found.body, *place)
        assert template["metadata"]["annotations"]["sftriage.dev/job-id"] == job.job_id
        assert injection(template, job, SETTINGS, NEW).patch == ()
    assert injected(found.body, "elsewhere", SETTINGS, NEW).body == found.body


AS_IT_IS = {
    "a Service": made("v1", "Service", {"ports": []}),
    "a Deployment": made("apps/v1", "Deployment", {"template": TEMPLATE}),
    "another's Job": made("example.com/v1", "Job", {"template": TEMPLATE}),
    "an odd one": made("batch/v1", "Job", {"template": None}),
}


@pytest.mark.parametrize("body", AS_IT_IS.values(), ids=AS_IT_IS)
def test_what_is_no_training_job_comes_out_as_it_is(body):
    found = injected(body, "ml", SETTINGS, NEW)
    assert (found.body, found.templates) == (body, 0)


REFUSED = {
    "a TrainJob": (
        made("trainer.kubeflow.org/v1alpha1", "TrainJob", {}),
        "TrainJob resnet: a TrainJob has no pod templates",
    ),
    "a CronJob": (made("batch/v1", "CronJob", {}), "named once it is made"),
    "a Job without a name": (
        {**made("batch/v1", "Job", {"template": TEMPLATE}), "metadata": {"generateName": "x-"}},
        "sftriage.dev/job-name",
    ),
    "two groups": (
        made(
            "leaderworkerset.x-k8s.io/v1",
            "LeaderWorkerSet",
            {"replicas": 2, "leaderWorkerTemplate": {"workerTemplate": TEMPLATE}},
        ),
        "each of its replicas is a job",
    ),
}


@pytest.mark.parametrize(("body", "said"), REFUSED.values(), ids=REFUSED)
def test_a_job_whose_name_nobody_knows_yet_is_refused_in_words(body, said):
    with pytest.raises(InputError, match=said):
        injected(body, "ml", SETTINGS, NEW)


def test_a_file_of_several_objects_is_printed_as_kubectl_takes_it(sftriage, tmp_path):
    job, other = WORKLOADS["Job"][0], AS_IT_IS["a Service"]
    both = {"apiVersion": "v1", "kind": "List", "items": [job, other]}
    path, settings = tmp_path / "job.yaml", tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump_all([both, None, other]))
    settings.write_text("image: registry.example.com/sftriage:1\n")
    outcome = sftriage("kube", "inject", "-f", str(path), "--settings", str(settings))
    assert (outcome.code, outcome.err) == (0, "")
    found = list(yaml.safe_load_all(outcome.out))
    assert found[1:] == [other, other]
    (carry, _) = found[0]["spec"]["template"]["spec"]["initContainers"]
    assert carry["image"] == "registry.example.com/sftriage:1"
    # WHEN that is given to it again THEN nothing is left to do, and it says so
    path.write_text(outcome.out)
    again = sftriage("kube", "inject", "-f", str(path), "--settings", str(settings))
    assert again.out == outcome.out
    assert "nothing is injected" in again.err


def test_a_job_can_come_from_stdin(sftriage, monkeypatch):
    text = yaml.safe_dump(WORKLOADS["Job"][0])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    out = sftriage("kube", "inject", "-f", "-").out
    assert yaml.safe_load(out)["spec"]["template"]["spec"]["initContainers"]


@pytest.mark.parametrize("text", ["{", "just words", "kind: [", None])
def test_a_file_that_is_none_is_said_in_a_line(sftriage, tmp_path, text):
    path = tmp_path / "job.yaml"
    if text is not None:
        path.write_text(text)
    outcome = sftriage("kube", "inject", "-f", str(path))
    assert (outcome.code, outcome.out) == (2, "")
    assert len(outcome.err.splitlines()) == 1


def test_an_old_cluster_is_said(sftriage, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(WORKLOADS["Job"][0]))
    outcome = sftriage("kube", "inject", "-f", str(path), "--server-version", "v1.28.3")
    assert "Kubernetes 1.28 has no sidecars that end with their pod" in outcome.err
    assert yaml.safe_load(outcome.out) == WORKLOADS["Job"][0]
    assert sftriage("kube", "inject", "-f", str(path), "--server-version", "new").code == 2


def test_what_trainers_need_is_carried_and_traces_have_a_place_for_any_user(sftriage, tmp_path):
    folder, spool = tmp_path / "sftriage", tmp_path / "disk" / "spool"
    outcome = sftriage("kube", "carry", str(folder), "--spool", str(spool))
    assert (outcome.code, outcome.out) == (0, "")
    assert (folder / "sftriage" / "seams" / "site" / "sitecustomize.py").is_file()
    assert spool.stat().st_mode & 0o777 == 0o777
    # AND once more, as when a pod's first container is started again
    assert sftriage("kube", "carry", str(folder), "--spool", str(spool)).code == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("imag: x", "imag: Extra inputs"),
        ("rings: many", "rings: "),
        ("resources: {cpu: 1 core}", "resources.cpu"),
        ("run_as_user: 0", "run_as_user"),
        ("- x", "cannot be read|valid dictionary"),
        ("{", "cannot be read"),
    ],
)
def test_settings_that_make_no_sense_are_said_in_a_line(tmp_path, text, said):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_settings(path)


def test_settings_say_only_what_differs(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("store: s3://traces\nresources: {cpu: 100m}\n")
    found = read_settings(path)
    assert (found.store, found.resources.cpu, found.resources.memory) == ("s3://traces", "100m", "192Mi")
    path.write_text("")
    assert read_settings(path) == InjectionSettings()
