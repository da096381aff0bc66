"""Captures of a job on two hosts: by policy and by hand, by every profiler, kept in a store that hosts write to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sftriage.runs.decisions import decisions_of
from sftriage.runs.directory import RunDirectory
from sftriage.traces.remote import CaptureKey
from sftriage.traces.store import LocalStore
from tests import needs
from tests.integration.namespaces import BOTH, two_hosts
from tests.integration.policies import policy
from tests.integration.processes import DEADLINE_S, SLOW_DATA, wait_until
from tests.integration.runs import captures, on_record
from tests.integration.s3 import BUCKET, environment_of
from tests.integration.test_evidence import FIRST, HOST, SECOND, compiled

pytest.importorskip("torch")
pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: sftriage[nvml]")
pytest.importorskip("nats", reason="many hosts want the extra `nats`")
SLOW, SLOW_HOST = 3, "node-b"
STORE_PORT = 5055
STORE = f"s3://{BUCKET}/kept"
SERVED = f"""
import boto3, sys
from moto.server import ThreadedMotoServer
moto = ThreadedMotoServer("{BOTH[0]}", {STORE_PORT}, verbose=False)
moto.start()
store = boto3.client("s3", endpoint_url="http://{BOTH[0]}:{STORE_PORT}", region_name="us-east-1")
store.create_bucket(Bucket="{BUCKET}")
open(sys.argv[1], "w").close()
moto._thread.join()
"""
READ = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
POLICY = policy(
    'name: slow-input, match: {scope: [rank], stage: [data], gain: ">= 20% and >= 10ms"}, '
    "capture: {profiler: auto, steps: 3, warmup_steps: 1, max_seconds: 60}, cooldown: 2s",
    limits="captures_per_run: 20, captures_per_hour: 20, overhead_budget: 100%",
)


class Job:
    """A job of two ranks on each of two hosts, that keeps its captures in an S3 store; where a third may look, too."""

    def __init__(self, hosts, directory: Path, environment: dict[str, str], drivers: Path) -> None:
        self.hosts, self.directory, self.run = hosts, directory, directory / "run"
        served = environment_of(f"http://{BOTH[0]}:{STORE_PORT}")
        root = {"PYTHONPATH": str(Path(__file__).parents[2]), "LD_LIBRARY_PATH": str(drivers)}
        self.environment = {**environment, **served, **root}
        ready = directory / "served"
        hosts.start(0, [sys.executable, "-c", SERVED, ready], self.environment, directory / "said-store")
        (directory / "policy.yaml").write_text(POLICY, encoding="utf-8")
        for number in range(2):
            # (each host has a driver of its own, with two GPUs)
            facts = HOST | FIRST | SECOND | {"1.uuid": f"GPU-of-{number}"}
            says = directory / f"host-{number}" / "nvml"
            says.parent.mkdir()
            says.write_text("".join(f"{key} {value}\n" for key, value in facts.items()), encoding="utf-8")
        wait_until(ready.exists, 60.0)
        options = ("--job-id", "captured", "--store", STORE, "--nsys", "--nsys-trace", "nvtx,osrt")
        script = SLOW_DATA, directory / "release", 0.05, "opaque"
        self.hosts_run = hosts.torchrun(directory, self.environment, options, *script, ranks=2, port=29512)

    @property
    def said(self) -> str:
        return "\n".join(path.read_text() for path in self.directory.glob("said-*"))

    def sftriage(self, number: int, *arguments: object) -> str:
        """What a command says that is typed on a host, in a directory in which there is nothing else."""
        place, out = self.directory / f"typed-{number}", self.directory / "typed"
        place.mkdir(exist_ok=True)
        out.unlink(missing_ok=True)
        command = ["env", "-C", place, sys.executable, "-m", "sftriage", *arguments]
        # (nothing is known there of any run)
        environment = {**self.environment, "XDG_STATE_HOME": str(place)}
        typed = self.hosts.start(number, command, environment, out)
        assert typed.wait(DEADLINE_S) == 0, out.read_text()
        return out.read_text()

    def page(self, path: str) -> str:
        """A page about the captures in the store, as a browser is shown it on the second host."""
        out = self.directory / "page"
        command = [sys.executable, "-m", "sftriage", "ui", "--store", STORE, "--json"]
        served = self.hosts.start(1, command, self.environment, out)
        url = wait_until(lambda: [json.loads(line)["url"] for line in out.read_text().splitlines() if "url" in line])[0]
        inside = self.hosts.inside(1, [sys.executable, "-c", READ, url + path])
        found = subprocess.run(inside, capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout
        served.terminate()
        return found

    def end(self) -> None:
        (self.directory / "release").touch()
        assert [one.wait(DEADLINE_S) for one in self.hosts_run] == [0, 0], self.said


@pytest.fixture
def job(tmp_path, environment):
    drivers = compiled(tmp_path)
    with two_hosts() as hosts:
        yield Job(hosts, tmp_path, environment, drivers)


@needs.nsys
def test_a_rank_of_another_host_is_captured_by_all_profilers_into_a_store_that_its_host_writes(job, tmp_path):
    # GIVEN a job on two hosts, under nsys, whose rank 3, on the second one, waits in data for nobody knows what
    run = job.run
    # WHEN the policy has its stacks sampled, which do not say why it waits, and follows them up
    wait_until(lambda: run.is_dir() and len(on_record(run, "cause")) >= 2)
    # AND a person asks for more, on the controller's host
    for profiler in ("torch", "nsys", "stacks"):
        by_hand = ["--rank", SLOW, "--profiler", profiler, "--reason", "a look"]
        job.sftriage(0, "capture", "--run", run, *by_hand)
    job.end()
    # THEN each capture was made once, and is stored
    ended = [one["result"] for one in on_record(run, "capture")]
    final = [(one["capture_id"], one["state"]) for one in ended]
    asked = [it["capture_id"] for one in decisions_of(RunDirectory(run)) for it in one["requests"]]
    assert sorted(final) == sorted((capture_id, "stored") for capture_id in asked), job.said
    manifests = captures(run)
    its = [one.capture for one in manifests if one.capture.rank == SLOW]
    assert {one.host for one in its} == {SLOW_HOST}
    assert [one.profiler for one in its if one.profiler == "nsys"]
    # AND what the driver of its host says of its GPU was asked over the hub
    found = [one for one in on_record(run, "evidence") if one["gpus"]["of"]]
    of_it = [one["gpus"]["of"][str(SLOW)] for one in found if str(SLOW) in one["gpus"]["of"]]
    assert {gpu["uuid"] for gpu in of_it} == {"GPU-of-1"}
    # AND of a follow-up it is known what it follows
    assert [one for one in manifests if one.trigger.follows]
    # AND every capture is in the store, written by its host, where the controller knows it to be
    store = LocalStore(run)
    assert {store.copy_elsewhere(one.capture_id) for one in manifests} == {STORE}
    # AND what is large is not on the controller's host, and what is small was looked into there
    (nsys,) = [one for one in manifests if one.capture.profiler == "nsys"]
    assert not (run / "captures" / nsys.capture_id / "trace.nsys-rep").exists()
    # AND a command there fetches it all the same
    job.sftriage(0, "traces", "get", nsys.capture_id, "--run", run, "--out", tmp_path / "got")
    (there,) = (tmp_path / "host-1").glob(f"sftriage-runs/*.hosts/*/captures/{nsys.capture_id}/trace.nsys-rep")
    assert (tmp_path / "got").read_bytes() == there.read_bytes()
    # AND from a third host, that has nothing but the store, all of it is found
    step = nsys.capture.first_step
    found = json.loads(job.sftriage(1, "traces", "for-step", step, "--store", STORE, "--json"))
    assert nsys.capture_id in {one["capture_id"] for one in found["captures"]}
    job.sftriage(1, "traces", "get", nsys.capture_id, "--store", STORE, "--out", tmp_path / "laptop")
    assert (tmp_path / "laptop").read_bytes() == there.read_bytes()
    # AND with what was found out of it on the controller's host
    explained = next(one for one in manifests if one.findings is not None)
    shown = json.loads(job.sftriage(1, "traces", "show", explained.capture_id, "--store", STORE, "--json"))
    assert shown["findings"] is not None
    # AND so does a browser
    assert nsys.capture_id in job.page(f"captures/{CaptureKey.of(nsys).key}")
    # AND nothing that nsys has made stays behind
    assert not list((tmp_path / "host-1").glob("sftriage-runs/*.hosts/*/nsys-*"))
