"""The controllers of a namespace: a real job here, whose captures and report are objects of a real API server."""

import base64
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sftriage.fleet.hub import AGENTS_FILE
from sftriage.kube.controllers import METRICS_PORT
from sftriage.kube.injecting import InjectionSettings
from sftriage.runtime.hub_server import is_up, nats_server
from sftriage.traces.remote import RemoteStore
from tests.disks import small_disk
from tests.integration.kube import ANY, Cluster, Operators, OwnCluster, made
from tests.integration.policies import policy
from tests.integration.processes import DEADLINE_S, FORKED, ROOT, SLOW_DATA, Processes, ended, free_port, wait_until
from tests.integration.runs import captures, verdicts
from tests.integration.shared_nats import account, documented
from tests.integration.test_kube_jobs import OBJECTS, TrainingJob

pytestmark = pytest.mark.skipif(ANY in os.environ, reason="a cluster in which something runs makes pods of its own")
pytest.importorskip("torch")
pytest.importorskip("nats", reason="many hosts want the extra `nats`")

OTHER = """
import sftriage.fleet.wire as wire
wire.VERSION += {}
from sftriage.commands import main
main()
"""
"""A release whose messages are so many versions newer than ours."""
TOKEN = "a-token-of-sixteen-characters"
RULE = """name: slow-input, match: {scope: [rank], stage: [data], gain: ">= 20% and >= 10ms"},
  capture: {profiler: stacks, steps: 3, max_seconds: 20, control_ranks: 0}"""
POLICY = policy(RULE, name="input", limits="captures_per_run: 3, overhead_budget: 100%")


class Job(Processes):
    """A job of two ranks on this host, and what its pods would run, as the operator wants it, from its objects here."""

    def __init__(
        self, server: Cluster, namespace: str, folder: Path, environment: dict[str, str], **settings: object
    ) -> None:
        self.server, self.folder, self.port, self.release = server, folder, free_port(), folder / "release"
        self.policies, self.store, self.host = folder / "policies", folder / "traces", folder / "host"
        for path in (self.policies, self.store):
            path.mkdir()
        places = {"SFTRIAGE_RINGS": str(self.host / "rings"), "SFTRIAGE_SPOOL": str(self.host / "spool")}
        super().__init__(folder, {**environment, "PYTHONPATH": str(ROOT), **places})
        said = {"image": "registry.example/sftriage@sha256:12", "store": str(self.store), **settings}
        self.settings = InjectionSettings.model_validate(said)
        self.operators = Operators(server, folder, namespace, self.settings)
        self._shared = "nats" in settings
        self._held.callback(self.operators.close)
        try:
            self._begin(namespace)
        except BaseException:
            self.close()
            raise

    def _begin(self, namespace: str) -> None:
        self.server.create(yaml.safe_load(POLICY), namespace)
        self.operators.start()
        self.training = TrainingJob(self.server, namespace, nodeName=socket.gethostname())
        self.training.add_pod(0, self.settings)
        self.ref = self.training.ref
        wait_until(lambda: self.training.policies() == ["input"], 60.0)
        wanted = set(OBJECTS) - ({"secret", "service"} if self._shared else set())
        self._objects = wait_until(lambda: (found := self.training.objects()).keys() == wanted and found, 60.0)
        self.hub = self.folder / "hub"
        self.hub.mkdir(exist_ok=True)
        for name, value in self._objects.get("secret", {"data": {}})["data"].items():
            (self.hub / name).write_bytes(base64.b64decode(value))
        self.bring_policies()
        self._kubeconfig = self.server.as_account(self.folder, "sftriage", namespace)
        self.run = self.folder / "runs" / self.ref.object_name / "run"

    def bring_policies(self) -> None:
        """Bring the ConfigMap to where the controller has it, as a kubelet does."""
        data = self.training.objects()["configmap"]["data"]
        for name, text in data.items():
            (self.policies / name).write_text(text)
        for path in self.policies.iterdir():
            if path.name not in data:
                path.unlink()

    def start_controller(self) -> subprocess.Popen[bytes]:
        spec = self._objects["deployment"]["spec"]["template"]["spec"]
        here = {"/policies": self.policies, "/runs": self.folder / "runs", "/hub/hub": self.hub / "hub"}
        here |= {"/hub": self.hub, "/tmp/ready": self.folder / "ready", str(METRICS_PORT): free_port()}
        command = [here.get(word, word) for word in spec["containers"][0]["command"]]
        assert command[0] == "sftriage"
        if "--metrics-port" in command:
            self.metrics = f"http://127.0.0.1:{command[command.index('--metrics-port') + 1]}/metrics"
        more = {"KUBECONFIG": str(self._kubeconfig), "SFTRIAGE_METRICS_TOKEN": TOKEN}
        return self.start(*(sys.executable, "-m", *command, "--port", self.port), **more)

    def start_agent(self, newer: int = 0) -> subprocess.Popen[bytes]:
        """Start what a pod's sidecar is, of this release or of another one."""
        command = [sys.executable, "-c", OTHER.format(newer)]
        command += ["agent", "--job-id", self.ref.job_id, "--name", "node-0"]
        (sidecar,) = (one for one in self.training.pod["spec"]["initContainers"] if one["name"] == "sftriage-agent")
        said = sidecar["command"]
        where = said[said.index("--job-id") + 2 : said.index("--rings")]
        here = {"/sftriage-hub": self.hub, **{f"/sftriage-hub/{one.name}": one for one in self.hub.iterdir()}}
        hub = f"sftriage-hub.{self.ref.namespace}.svc:7422"
        command += ["--job", self.ref.name, *({**here, hub: f"127.0.0.1:{self.port}"}.get(one, one) for one in where)]
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
        said = {"job": self.ref.name, "reason": "why?", "requested_by": {"username": "jane"}, **spec}
        self.server.create(made("TraceCapture", name, said), self.ref.namespace)


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
    # AND the report names the slow rank, its node and its pod, and an event how to fetch the trace
    wait_until(lambda: job.report().get("captures_total"))
    found = [job.report()[name] for name in ("suspect", "node", "pod")]
    assert found == ["rank 1 in data", socket.gethostname(), "pretraining-0"]
    fetch = f"kubectl sftriage get --job pretraining -n {job.ref.namespace}"
    wait_until(lambda: fetch in job.server.kubectl("get", "events", "-n", job.ref.namespace).stdout)
    # WHEN a person asks, for a rank that there is and for one that there is not
    job.ask("look", rank=0, profiler="stacks", steps=2)
    job.ask("nobody", rank=7)
    wait_until(lambda: (state_of(job, "look"), state_of(job, "nobody")) == ("stored", "refused"))
    nobody = job.server.get("tracecapture", "nobody", namespace=job.ref.namespace)["status"]
    assert "rank" in nobody["detail"]
    asked = wait_until(
        lambda: job.server.get("tracecapture", "look", namespace=job.ref.namespace)["status"].get("stored")
    )
    assert RemoteStore.open(asked["store"]).manifest(asked["reference"]).trigger.why == "requested by jane: why?"
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
    wait_until(lambda: "the policy has changed; now in force: input, other" in job.said)
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


def test_a_replaced_controller_loses_no_capture(job):
    """GIVEN a capture in progress WHEN the pod ends, and its runs go with it THEN the trace has its object."""
    controller, _ = job.start_controller(), job.start_agent()
    trainers = job.start_trainers()
    wait_until(lambda: job.report().get("windows"))
    job.ask("look", rank=0, profiler="stacks", steps=300)
    wait_until(lambda: state_of(job, "look") == "running")
    controller.terminate()
    # AND what a person asks for meanwhile waits for the next controller
    job.ask("later", rank=0, profiler="stacks", steps=2)
    assert controller.wait(DEADLINE_S) == 0, job.said
    assert state_of(job, "look") == "stored", job.said
    assert state_of(job, "later") in ("", "requested")
    shutil.rmtree(job.folder / "runs")
    job.start_controller()
    wait_until(lambda: state_of(job, "later") == "stored")
    job.release.touch()
    assert trainers.wait(DEADLINE_S) == 0

    def references() -> list[str]:
        return sorted(each["status"]["stored"]["reference"] for each in job.captures() if "stored" in each["status"])

    wait_until(lambda: references() == sorted(RemoteStore.open(str(job.store)).ids()))


def shared_hub(folder: Path, namespace: str, held: contextlib.ExitStack) -> str:
    """A NATS server as k8s/nats has it, with an account of a namespace, whose keys are in ``hub``; its URL."""
    text = documented("kubernetes.md", "sft_namespace_training").replace("training", namespace)
    (folder / "accounts").mkdir()
    (folder / "accounts" / "accounts.conf").write_text(account(text, folder / "hub", {"*": AGENTS_FILE}))
    port = free_port()
    for name, text in yaml.safe_load((ROOT / "k8s" / "nats" / "config.yaml").read_text())["data"].items():
        here = {
            "0.0.0.0:4222": f"127.0.0.1:{port}",
            "/data": f"{folder}/data",
            "127.0.0.1:8222": f"127.0.0.1:{free_port()}",
        }
        for said, instead in here.items():
            text = text.replace(f'"{said}"', f'"{instead}"')
        (folder / name).write_text(text)
    with (folder / "nats.log").open("wb") as log:
        server = subprocess.Popen([nats_server(), "-c", str(folder / "plain.conf")], stdout=log, stderr=log)
    held.enter_context(ended(server))
    wait_until(lambda: is_up("127.0.0.1", port), 30)
    return f"nats://127.0.0.1:{port}"


@pytest.mark.parametrize("how", ["hub_tls", "nats"])
def test_an_encrypted_or_shared_hub_works(server, tmp_path, environment, how):
    """GIVEN that in the settings WHEN a rank is slow THEN its trace comes, and metrics are for who has the token"""
    with server.namespace() as namespace, contextlib.ExitStack() as held:
        settings: dict[str, object] = {"hub_tls": True}
        if how == "nats":
            settings = {"nats": shared_hub(tmp_path, namespace, held)}
        job = held.enter_context(
            contextlib.closing(Job(server, namespace, tmp_path, environment, **settings, metrics_secret="scraped"))
        )
        job.start_controller()
        job.start_agent()
        trainers = job.start_trainers()
        stored = wait_until(lambda: [one for one in job.captures() if "stored" in one.get("status", {})])[0]
        assert stored["spec"]["rank"] == 1, job.said
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(job.metrics, timeout=10)
        asks = urllib.request.Request(job.metrics, headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(asks, timeout=10) as answer:
            assert b"sftriage_captures_total" in answer.read()
        job.release.touch()
        assert trainers.wait(DEADLINE_S) == 0
        if how == "nats":
            assert "Violation" not in (tmp_path / "nats.log").read_text()


def test_sidecars_of_another_version_are_reported(job):
    """GIVEN pods of before an upgrade THEN the controller says so, and they train on"""
    controller, agent = job.start_controller(), job.start_agent(newer=1)
    trainers = job.start_trainers()
    wait_until(lambda: "reads version" in job.said)
    job.release.touch()
    assert trainers.wait(DEADLINE_S) == 0
    assert (controller.poll(), agent.poll()) == (None, None), job.said
    assert job.captures() == []


def conditions(job: Job) -> set[tuple[str, str, str]]:
    return {(each["type"], each["status"], each["reason"]) for each in job.report().get("conditions", ())}


def test_a_controller_survives_a_full_disk(server, tmp_path, environment):
    """GIVEN a disk of controller and hub that takes nothing THEN the job trains on, and is judged again afterwards"""
    with contextlib.ExitStack() as held:
        disk = held.enter_context(small_disk(tmp_path / "runs", "64m", 5000))
        namespace = held.enter_context(server.namespace())
        job = held.enter_context(contextlib.closing(Job(server, namespace, tmp_path, environment)))
        controller, agent = job.start_controller(), job.start_agent()
        trainers = job.start_trainers()
        wait_until(lambda: job.report().get("windows"))
        disk.fill()
        wait_until(lambda: "cannot be written" in job.said)
        # (the hub's files are on it, too: the agent has no answer)
        wait_until(lambda: "stores nothing" in job.said)
        wait_until(lambda: ("Watched", "False", "DiskFull") in conditions(job))
        assert (controller.poll(), agent.poll(), trainers.poll()) == (None, None, None), job.said
        windows = job.report()["windows"]
        disk.empty()
        wait_until(lambda: "can be written again" in job.said)
        wait_until(lambda: job.report()["windows"] > windows + 3)
        wait_until(lambda: ("Watched", "True", "Watched") in conditions(job))
        job.release.touch()
        assert trainers.wait(DEADLINE_S) == 0
        assert agent.wait(DEADLINE_S) == 0, job.said
        assert controller.poll() is None, job.said


def test_a_controller_survives_an_unreachable_cluster(job):
    """GIVEN a job WHEN the API server is away meanwhile THEN its rank is captured, and that is shown later."""
    assert isinstance(job.server, OwnCluster)
    controller, agent = job.start_controller(), job.start_agent()
    wait_until(lambda: job.report().get("health"))
    job.server.stop()
    trainers, run = job.start_trainers(), job.run
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
