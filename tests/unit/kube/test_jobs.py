"""Which job a pod is of, and what that job's objects are called."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.kube.jobs import JobPod, JobRef, job_of
from tests.unit.kube.pods import JOBS, pod


@pytest.mark.parametrize(("body", "found"), JOBS.values(), ids=JOBS)
def test_a_pod_is_of_the_job_that_its_labels_name(body, found):
    expected = None if found is None else JobPod(JobRef(found[0], found[1], "ml"), *found[2:])
    assert job_of(body, "ml") == expected
    # AND where its own metadata says the namespace, that is it
    body = {**body, "metadata": {**body["metadata"], "namespace": "ml"}}
    assert job_of(body, "elsewhere") == expected


def test_a_pod_that_does_not_ask_for_it_itself_is_no_job_by_itself():
    """GIVEN a namespace that is labelled WHEN somebody starts a shell in it THEN that is no training job."""
    body = pod(name="shell")
    del body["metadata"]["labels"]
    assert job_of(body, "ml") is None


@given(st.text(min_size=1, max_size=300), st.sampled_from(["ml", "n" * 63]))
def test_the_name_of_its_objects_is_one_that_any_object_may_have(name, namespace):
    job = JobRef("pod", name, namespace)
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,61}[a-z0-9]", job.object_name)
    assert job.object_name == JobRef("pod", name, namespace).object_name


def test_two_jobs_do_not_share_objects():
    jobs = [JobRef(system, name, where) for system in ("job", "jobset") for name in ("a", "A", "a-") for where in "xy"]
    assert len({job.object_name for job in jobs}) == len({job.job_id for job in jobs}) == len(jobs)


def test_the_names_of_a_job_stay_as_they_are():
    """GIVEN a job of an earlier release THEN its objects are found under the same name."""
    job = JobRef("jobset", "resnet", "ml")
    assert (job.job_id, job.object_name) == ("ml/jobset/resnet", "sftriage-resnet-08813de0")


def test_a_job_is_owned_by_the_object_that_it_is():
    assert JobRef("trainjob", "resnet", "ml").owner == ("trainer.kubeflow.org/v1alpha1", "TrainJob", "resnet")
    assert JobRef("leaderworkerset", "resnet-2", "ml").owner == (
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        "resnet",
    )
    assert JobRef("pod", "resnet", "ml").owner is None


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(_ANY, _ANY, _ANY, _ANY)
def test_whatever_a_client_writes_into_a_pod_nothing_is_raised(metadata, labels, spec, containers):
    job_of({"metadata": metadata, "spec": spec})
    job_of({"metadata": {"labels": labels, "annotations": labels}, "spec": {"containers": containers}})
