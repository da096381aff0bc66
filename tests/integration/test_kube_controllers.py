"""A job's controller in a cluster: a real job here, whose captures and report are objects of a real API server."""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sftriage.traces.remote import RemoteStore
from tests.integration.beside_hub import free_port
from tests.integration.kube import ANY, Cluster, OwnCluster, cluster, missing
from tests.integration.processes import DEADLINE_S, FORKED, ended, wait_until
from tests.integration.runs import captures, verdicts
from tests.integration.test_kube_jobs import OBJECTS, Operators, TrainingJob

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
    pytest.mark.skipif(bool(os.environ.get(ANY)), reason="a cluster in which something runs makes pods of its own"),
]
pytest.importorskip("torch")
pytest.importorskip("nats", reason="many hosts want the extra `nats`")

REPOSITORY = Path(__file__).parents[2]
SLOW_DATA = Path(__file__).parent / "jobs" / "slow_data.py"
POLICY = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: input}
spec:
  detection: {window_steps: 30, stride_steps: 10, warmup_steps: 10}
  rules:
    - name: slow-input
      match: {scope: [rank], stage: [data], gain: ">= 20% and >= 10ms"}
      capture: {profiler: stacks, steps: 3, max_seconds: 20, control_ranks: 0}
  limits: {captures_per_run: 3, overhead_budget: 100%}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    with cluster() as one:
        one.kubectl("apply", "-f", str(REPOSITORY / "k8s" / "crds"), "-f", str(REPOSITORY / "k8s" / "rbac"))
        one.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        yield one


class Job:
    """A job of two ranks on this host, and what its pods would run, as the operator wants it, from its objects here."""

    def __init__(self, server: Cluster, namespace: str, folder: Path, environment: dict[str, str]) -> None:
        self._held = contextlib.ExitStack()
        self.server, self.folder, self.port, self.release = server, folder, free_port(), folder / "release"
        self.policies, self.store, self.host = folder / "policies", folder / "traces", folder / "host"
        for path in (self.policies, self.store):
            path.mkdir()
        self.environment = {
            **environment,
            "PYTHONPATH": str(REPOSITORY),
            "SFTRIAGE_RINGS": str(self.host / "rings"),
            "SFTRIAGE_SPOOL": str(self.host / "spool"),
        }
        self.operators = Operators(server, folder, namespace, store=str(self.store))
        self._held.callback(self.operators.close)
        try:
            self._begin(namespace)
        except BaseException:
            self.close()
            raise

    def _begin(self, namespace: str) -> None:
        """Have the operator make the job's objects, and bring them here."""
        self.server.create(yaml.safe_load(POLICY), namespace)
        self.operators.start()
        self.training = TrainingJob(self.server, namespace)
        self.training.add_pod(0)
        self.ref = self.training.ref
        wait_until(lambda: self.training.policies() == ["input"], 60.0)
        self._objects = wait_until(lambda: len(found := self.training.objects()) == len(OBJECTS) and found, 60.0)
        (self.folder / "hub").write_bytes(base64.b64decode(self._objects["secret"]["data"]["hub"]))
        self.bring_policies()
        self._kubeconfig = self.server.as_account(self.folder, self.ref.object_name, namespace)

    def bring_policies(self) -> None:
        """Bring the ConfigMap to where the controller has it, as a kubelet does."""
        data = self.training.objects()["configmap"]["data"]
        for name, text in data.items():
            (self.policies / name).write_text(text)
        for path in self.policies.iterdir():
            if path.name not in data:
                path.unlink()

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def start(self, *command: object, **more: str) -> subprocess.Popen[bytes]:
        with (self.folder / "said").open("ab") as said:
            environment = {**self.environment, **more}
            process = subprocess.Popen([*map(str, command)], env=environment, stdout=said, stderr=said)
        self._held.enter_context(ended(process))
        return process

    def start_controller(self) -> subprocess.Popen[bytes]:
        spec = self._objects["deployment"]["spec"]["template"]["spec"]
        here = {"/policies": self.policies, "/runs": self.folder / "runs", "/hub/hub": self.folder / "hub"}
        command = [here.get(word, word) for word in spec["containers"][0]["command"]]
        assert command[0] == "sftriage"
        return self.start(*(sys.executable, "-m", *command, "--port", self.port), KUBECONFIG=str(self._kubeconfig))

    def start_agent(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "sftriage", "agent", "--job-id", self.ref.job_id, "--name", "node-0"]
        command += ["--job", self.ref.name, "--hub", f"127.0.0.1:{self.port}", "--creds", self.folder / "hub"]
        return self.start(*command, "--directory", self.host, "--store", self.store)

    def start_trainers(self) -> subprocess.Popen[bytes]:
        wait_until((self.host / "host.json").exists, 60.0)
        return self.start(*FORKED, 2, SLOW_DATA, self.release, 0.05)

    def captures(self) -> list[Any]:
        return self.server.get("tracecaptures", namespace=self.ref.namespace)["items"]

    def report(self) -> dict[str, Any]:
        found = self.server.get("triagereports", namespace=self.ref.namespace)["items"]
        return found[0].get("status", {}) if found else {}

    def ask(self, name: str, **spec: Any) -> None:
        """Ask for a capture as a person."""
        body = {"apiVersion": "sftriage.dev/v1alpha1", "kind": "TraceCapture"}
        about = {"name": name}
        said = {"job": self.ref.name, "reason": "why?", "requested_by": {"username": "jane"}, **spec}
        self.server.create({**body, "metadata": about, "spec": said}, self.ref.namespace)

    def close(self) -> None:
        self._held.close()


@pytest.fixture
def job(server, tmp_path, environment) -> Iterator[Job]:
    with server.namespace() as namespace, contextlib.closing(Job(server, namespace, tmp_path, environment)) as one:
        yield one


def state_of(job: Job, name: str) -> str:
    return job.server.get("tracecapture", name, namespace=job.ref.namespace).get("status", {}).get("state", "")


def test_a_slow_rank_becomes_a_capture_and_a_report_of_the_cluster(job):
    """GIVEN a job with a slow rank WHEN its policy fires, and a person asks THEN both are objects, with their traces"""
    controller, agent = job.start_controller(), job.start_agent()
    trainers = job.start_trainers()
    # THEN what the policy asked for is an object, which says why, and where the trace is
    stored = wait_until(lambda: [one for one in job.captures() if one.get("status", {}).get("state") == "stored"])[0]
    spec = stored["spec"]
    assert (spec["job"], spec["rank"], spec["profiler"], spec["steps"]) == ("pretraining", 1, "stacks", 3)
    assert (spec["trigger"]["policy"], spec["trigger"]["rule"], spec["trigger"]["stage"]) == (
        "input",
        "slow-input",
        "data",
    )
    assert stored["metadata"]["labels"] == {"sftriage.dev/job": job.ref.object_name}
    stored = wait_until(lambda: [one for one in job.captures() if "stored" in one.get("status", {})])[0]
    place = stored["status"]["stored"]
    assert RemoteStore.open(place["store"]).manifest(place["reference"]).capture.rank == 1
    # AND the report names who is slow
    wait_until(lambda: job.report().get("captures_total"))
    assert job.report()["suspect"] == "rank 1 in data"
    # WHEN a person asks, for a rank that there is and for one that there is not
    job.ask("look", rank=0, profiler="stacks", steps=2)
    job.ask("nobody", rank=7)
    wait_until(lambda: (state_of(job, "look"), state_of(job, "nobody")) == ("stored", "refused"))
    nobody = job.server.get("tracecapture", "nobody", namespace=job.ref.namespace)["status"]
    assert "rank" in nobody["detail"]
    asked = wait_until(
        lambda: job.server.get("tracecapture", "look", namespace=job.ref.namespace)["status"].get("stored")
    )
    assert RemoteStore.open(asked["store"]).manifest(asked["reference"]).trigger.why == "jane asked for it: why?"
    # WHEN the controller is killed, and started again
    controller.kill()
    controller.wait(DEADLINE_S)
    before = {one["metadata"]["name"]: one["metadata"]["resourceVersion"] for one in job.captures()}
    controller = job.start_controller()
    wait_until(lambda: "took over the job" in job.said)
    # AND one of the captures was deleted meanwhile THEN it is not made again
    windows = job.report()["windows"]
    job.server.kubectl("delete", "tracecapture", stored["metadata"]["name"], "-n", job.ref.namespace)
    wait_until(lambda: job.report()["windows"] > windows)
    assert place["reference"] not in RemoteStore.open(place["store"]).ids()
    # WHEN a policy comes THEN the controller is under it, too
    other = {**yaml.safe_load(POLICY), "metadata": {"name": "other"}}
    other["spec"] = {**other["spec"], "rules": [{"name": "any", "match": {"stage": ["forward"]}}]}
    job.server.create(other, job.ref.namespace)
    wait_until(lambda: job.training.policies() == ["input", "other"])
    job.bring_policies()
    wait_until(lambda: "the policy has changed: now under input, other" in job.said)
    assert {one["metadata"]["name"] for one in job.captures()} <= before.keys() - {stored["metadata"]["name"]}
    # WHEN the job ends THEN its report says so
    job.release.touch()
    assert trainers.wait(DEADLINE_S) == 0
    assert agent.wait(DEADLINE_S) == 0, job.said

    def watched() -> str:
        return next(one["reason"] for one in job.report()["conditions"] if one["type"] == "Watched")

    wait_until(lambda: watched() == "Ended")
    # AND a few events tell of it
    events = {
        (one["involvedObject"]["kind"], one["reason"])
        for one in job.server.get("events", namespace=job.ref.namespace)["items"]
    }
    assert ("TriageReport", "CaptureStored") in events
    # AND the controller waits for the next one, until it is ended
    controller.terminate()
    assert controller.wait(DEADLINE_S) == 0, job.said
    assert "Traceback" not in job.said


def test_a_cluster_that_is_away_holds_nothing_up_and_is_shown_later(job):
    """GIVEN a job WHEN the API server is away meanwhile THEN its rank is captured, and that is shown later."""
    assert isinstance(job.server, OwnCluster)
    controller, agent = job.start_controller(), job.start_agent()
    wait_until(lambda: job.report().get("health"))
    job.server.stop()
    trainers, run = job.start_trainers(), job.folder / "runs" / "run"
    wait_until(lambda: (run / "captures").is_dir() and captures(run))
    judged = len(verdicts(run))
    wait_until(lambda: len(verdicts(run)) > judged + 3)
    job.release.touch()
    assert [one.wait(DEADLINE_S) for one in (trainers, agent)] == [0, 0], job.said
    # WHEN the job is over, and the server is back
    job.server.start()
    (stored,) = wait_until(lambda: [one for one in job.captures() if "stored" in one.get("status", {})])
    assert stored["status"]["state"] == "stored"
    wait_until(lambda: job.report().get("captures_total") == 1)
    controller.terminate()
    assert controller.wait(DEADLINE_S) == 0, job.said
    assert "Traceback" not in job.said
