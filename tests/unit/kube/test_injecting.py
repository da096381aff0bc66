"""From a pod to its job, and to a pod that sftriage watches; `sftriage kube inject` and `carry`."""

import copy
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sftriage.kube import controllers, injecting
from sftriage.kube.diagnosis import diagnose
from sftriage.kube.injecting import SITE, Injection, InjectionSettings, injection
from sftriage.kube.injecting import injected as change_of
from sftriage.kube.jobs import JobRef, job_of
from sftriage.words.kube import MAX_CHARS
from tests.golden.clusters import TIMES, WELL
from tests.unit.kube.pods import INJECTED, JOBS, NEW, SETTINGS, TRAINERS, additions, injected, pod


@pytest.mark.parametrize(("body", "found"), JOBS.values(), ids=JOBS)
def test_labels_name_the_job_of_a_pod(body, found):
    expected = None if found is None else JobRef.of_id(f"ml/{found}")
    assert job_of(body, "ml") == expected
    # AND where its own metadata says the namespace, that is it
    body = {**body, "metadata": {**body["metadata"], "namespace": "ml"}}
    assert job_of(body, "elsewhere") == expected
    # AND a pod that trains nothing stays as it is, whoever injects a file with it
    if expected is None and "ownerReferences" in body["metadata"]:
        assert change_of(body, "ml", SETTINGS, NEW).body == body


@given(st.text(min_size=1, max_size=300), st.sampled_from(["ml", "n" * 63]))
def test_object_names_are_valid_for_any_job(name, namespace):
    job = JobRef("pod", name, namespace)
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,61}[a-z0-9]", job.object_name)
    assert job.object_name == JobRef("pod", name, namespace).object_name


def test_two_jobs_do_not_share_objects():
    jobs = [JobRef(system, name, where) for system in ("job", "jobset") for name in ("a", "A", "a-") for where in "xy"]
    assert len({job.object_name for job in jobs}) == len({job.job_id for job in jobs}) == len(jobs)


def test_the_owner_of_a_job_s_objects():
    assert JobRef("trainjob", "resnet", "ml").owner == ("trainer.kubeflow.org/v1alpha1", "TrainJob", "resnet")
    owner = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "resnet")
    assert JobRef("leaderworkerset", "resnet-2", "ml").owner == owner
    assert JobRef("pod", "resnet", "ml").owner is None


JOB = JobRef("jobset", "resnet", "ml")


def class_of(spec: dict[str, Any]) -> str:
    """The quality-of-service class that Kubernetes gives a pod."""
    given = [each.get("resources", {}) for each in (*spec["containers"], *spec.get("initContainers", ()))]
    limits = [each.get("limits", {}).get(name) for each in given for name in ("cpu", "memory")]
    requests = [each.get("requests", {}).get(name) for each in given for name in ("cpu", "memory")]
    if not any([*limits, *requests]):
        return "BestEffort"
    equal = all(most and least in (None, most) for most, least in zip(limits, requests, strict=True))
    return "Guaranteed" if equal else "Burstable"


def test_our_volumes_add_to_a_pod_s_limit_of_disk():
    """GIVEN a container that may use so much disk THEN the agent adds the spool; a pod without a limit gets none"""
    for limits, added in (({}, None), ({"ephemeral-storage": "200Mi"}, "20Gi")):
        body = copy.deepcopy(next(iter(TRAINERS.values()))[0])
        body["spec"]["containers"][0]["resources"] = {"limits": limits}
        agent = next(each for each in injected(body).pod["spec"]["initContainers"] if each["name"] == "sftriage-agent")
        assert agent["resources"]["limits"].get("ephemeral-storage") == added
        assert agent["resources"]["requests"].get("ephemeral-storage") == (added and "0")


@pytest.mark.parametrize(("body", "job"), TRAINERS.values(), ids=TRAINERS)
def test_a_pod_of_any_job_is_injected_once(body, job):
    """GIVEN a pod as its controller makes it WHEN it goes through twice THEN it is as after once, and complete."""
    once = injected(body)
    assert once.warnings == ()
    assert {operation["op"] for operation in once.patch} == {"add"}
    out = once.pod
    assert out == jsonpatch.apply_patch(body, list(once.patch))
    assert kept(body, out)
    assert job_of(out, "ml") == job
    assert injected(out) == Injection()
    assert out["metadata"]["labels"]["sftriage.dev/job"] == job.object_name
    # AND what its controller put there runs first, such as what waits for the job's head
    *theirs, _, agent = out["spec"]["initContainers"]
    assert theirs == body["spec"].get("initContainers", [])
    assert "sftriage-hub.ml.svc:7422" in agent["command"]
    # AND it keeps its class; a pod without any request or limit gets one
    before = class_of(body["spec"])
    assert class_of(out["spec"]) == (before if before != "BestEffort" else "Burstable")
    # AND it is as `sftriage kube inject` writes it
    assert change_of(body, "ml", SETTINGS, NEW).body == out


@pytest.mark.parametrize(("body", "job"), JOBS.values(), ids=JOBS)
def test_doctor_misses_sftriage_in_the_same_pods(body, job):
    """GIVEN a labelled namespace with a pod that the webhook has missed THEN doctor names it if it is of a job."""
    labelled = {"metadata": {"name": "ml", "labels": {"sftriage.dev/inject": "enabled"}}}
    named = {**body, "metadata": {"name": "x", **body["metadata"], "creationTimestamp": TIMES["before"]}}
    found = diagnose(replace(WELL, about=labelled, pods=[named]))
    missed = [one.says for one in found if (one.code, one.state) == ("injected", "wrong")]
    assert len(missed) == (job is not None)


def test_classes_of_all_kinds_are_covered():
    assert {class_of(body["spec"]) for body, _ in TRAINERS.values()} == {"Guaranteed", "Burstable", "BestEffort"}


def test_what_is_added_to_each_kind_of_pod_is_as_recorded():
    """WHEN it changes on purpose THEN `python -m tests.unit.kube.pods` writes it anew."""
    assert additions() == INJECTED.read_text(encoding="utf-8")


def test_a_container_added_by_another_webhook_is_injected_too():
    out = injection(pod(), JOB, SETTINGS, NEW).pod
    out["spec"]["containers"].append({"name": "late"})
    again = injection(out, JOB, SETTINGS, NEW).pod
    assert {"name": "PYTHONPATH", "value": SITE} in again["spec"]["containers"][1]["env"]
    assert [one["name"] for one in again["spec"]["initContainers"]] == ["sftriage-carry", "sftriage-agent"]


def test_the_version_of_a_server_is_read_from_its_answer():
    assert [injecting.version_of({"major": "1", "minor": minor}) for minor in ("29", "27+")] == [(1, 29), (1, 27)]
    assert injecting.version_of({"major": "", "minor": ""}) is injecting.version_of({}) is None


_TEXT = st.sampled_from(["", "a", "b", "PYTHONPATH", "SFTRIAGE_RINGS", "/app", "sftriage", SITE])
_VARIABLE = st.fixed_dictionaries({"name": _TEXT}, optional={"value": _TEXT, "valueFrom": st.just({"fieldRef": {}})})


def _some(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | st.lists(inner, max_size=3)


_CONTAINER = st.fixed_dictionaries(
    {"name": _TEXT},
    optional={
        "env": _some(_VARIABLE),
        "envFrom": _some(st.just({"configMapRef": {"name": "c"}})),
        "volumeMounts": _some(st.fixed_dictionaries({"name": _TEXT, "mountPath": _TEXT})),
        "resources": st.none() | st.just({"limits": {"cpu": "1", "memory": "1Gi"}}),
    },
)
_SPEC = st.fixed_dictionaries(
    {"containers": _some(_CONTAINER)},
    optional={
        "initContainers": _some(_CONTAINER),
        "volumes": _some(st.fixed_dictionaries({"name": _TEXT, "emptyDir": st.just({})})),
        "securityContext": st.none() | st.just({"runAsUser": 0}),
        "hostNetwork": st.booleans(),
        "shareProcessNamespace": st.none() | st.booleans(),
        "os": st.none() | st.just({"name": "linux"}),
    },
)
_TEXTS = st.none() | st.dictionaries(_TEXT, _TEXT, max_size=2)
_METADATA = st.none() | st.fixed_dictionaries({}, optional={"labels": _TEXTS, "annotations": _TEXTS})
_POD = st.fixed_dictionaries({"spec": _SPEC}, optional={"metadata": _METADATA})


def kept(before: Any, after: Any, path: str = "") -> bool:
    """Whether all that was there is there as it was; of PYTHONPATH, behind ours."""
    if isinstance(before, dict):
        if before.get("name") == "PYTHONPATH" and path.split("/")[-2:-1] == ["env"]:
            return str(after.get("value") or "").endswith(before.get("value") or "")
        return all(name in after and kept(value, after[name], f"{path}/{name}") for name, value in before.items())
    if isinstance(before, list):
        pairs = zip(before, after, strict=False)
        return len(before) <= len(after) and all(kept(*pair, f"{path}/{at}") for at, pair in enumerate(pairs))
    return before is None or before == after


@given(_POD)
def test_injection_only_adds_and_is_idempotent(body):
    before = copy.deepcopy(body)
    found = injection(body, JOB, SETTINGS, NEW)
    assert body == before
    assert all(operation["op"] == "add" for operation in found.patch)
    out = found.pod or body
    assert out == jsonpatch.apply_patch(body, list(found.patch))
    assert kept(body, out)
    again = injection(out, JOB, SETTINGS, NEW)
    assert again.patch == ()
    assert all(len(warning) <= MAX_CHARS for warning in found.warnings)


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=10,
)


@given(_ANY, _ANY, _ANY, _ANY)
def test_no_pod_raises(metadata, spec, one, other):
    for body in (
        {"metadata": metadata, "spec": spec},
        {"metadata": {"labels": one, "annotations": other}, "spec": {"containers": [{"name": "a", "env": one}]}},
        {"spec": {"containers": one, "initContainers": other, "volumes": metadata}},
        {"spec": {"containers": [{"name": one, "volumeMounts": other, "resources": metadata}]}},
    ):
        job_of(body)
        injection(body, JOB, SETTINGS, NEW)


OLDEST, DEFAULTS = (1, 29), InjectionSettings()
WORKLOADS = yaml.safe_load((Path(__file__).parent / "workloads.yaml").read_text(encoding="utf-8"))


def templates(value: Any) -> Iterator[dict[str, Any]]:
    """The pod templates in a body."""
    if isinstance(value, dict) and "containers" in (value.get("spec") or {}):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from templates(one)


@pytest.mark.parametrize(("job", "body"), WORKLOADS["injected"].items(), ids=WORKLOADS["injected"])
def test_templates_are_injected_as_the_webhook_injects_pods(job, body):
    before = copy.deepcopy(body)
    found = change_of(body, "elsewhere", DEFAULTS, OLDEST)
    assert body == before
    assert (found.templates, found.warnings) == (len(list(templates(body))), ())
    for template in templates(found.body):
        assert template["metadata"]["annotations"]["sftriage.dev/job-id"] == f"ml/{job}"
        assert injection(template, JobRef.of_id(f"ml/{job}"), DEFAULTS, OLDEST).patch == ()
    assert change_of(found.body, "elsewhere", DEFAULTS, OLDEST).body == found.body


@pytest.mark.parametrize("body", WORKLOADS["as_they_are"])
def test_other_objects_stay_unchanged(body):
    found = change_of(body, "ml", DEFAULTS, OLDEST)
    assert (found.body, found.templates) == (body, 0)


JOB_OF_ONE = WORKLOADS["injected"]["job/resnet"]


def test_a_file_of_several_objects_is_printed_as_kubectl_takes_it(sftriage, tmp_path):
    job, other = JOB_OF_ONE, WORKLOADS["as_they_are"][0]
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
    assert "nothing injected" in again.err


def test_a_job_can_come_from_stdin(sftriage, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(yaml.safe_dump(JOB_OF_ONE)))
    out = sftriage("kube", "inject", "-f", "-").out
    assert yaml.safe_load(out)["spec"]["template"]["spec"]["initContainers"]


def test_carry_copies_the_recorder_and_makes_the_spool(sftriage, tmp_path):
    folder, spool = tmp_path / "sftriage", tmp_path / "disk" / "spool"
    outcome = sftriage("kube", "carry", str(folder), "--spool", str(spool))
    assert (outcome.code, outcome.out) == (0, "")
    assert (folder / "sftriage" / "trainer" / "seams" / "site" / "sitecustomize.py").is_file()
    assert spool.stat().st_mode & 0o777 == 0o777
    # AND once more, as when a pod's first container is started again
    assert sftriage("kube", "carry", str(folder), "--spool", str(spool)).code == 0


def test_settings_have_defaults(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("store: s3://traces\nresources: {cpu: 100m}\n")
    found = injecting.read_settings(path)
    assert (found.store, found.resources.cpu, found.resources.memory) == ("s3://traces", "100m", "192Mi")
    path.write_text("")
    assert injecting.read_settings(path) == InjectionSettings()


def test_pods_may_have_a_smaller_image_than_controllers():
    settings = InjectionSettings(image="sftriage:1", agent_image="agent:1")
    assert {container["image"] for container in injecting.pod_parts(JOB, settings)["initContainers"]} == {"agent:1"}
    *_, deployment = controllers.wanted(JOB.namespace, controllers.ControllerSettings(settings), {})
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "sftriage:1"
