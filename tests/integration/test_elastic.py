"""Real jobs under torchrun on several hosts that start again: which ranks belong together is never mixed up."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from sftriage.records import ENDED
from sftriage.runs.journal import read_journal
from sftriage.windows.log_segments import find_logs
from sftriage.windows.logs import LogReader
from tests.integration.namespaces import hosts_of
from tests.integration.processes import DEADLINE_S, wait_until
from tests.integration.runs import captures, verdicts
from tests.journals import entries

pytest.importorskip("torch")
pytest.importorskip("nats", reason="many hosts want the extra `nats`")
ELASTIC = Path(__file__).parent / "jobs" / "elastic.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
POLICY = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: elastic}
spec:
  detection: {window_steps: 40, stride_steps: 20, warmup_steps: 10}
  rules:
    - name: slow
      match: {scope: [rank], gain: ">= 20% and >= 10ms"}
      capture: {profiler: stacks, steps: 3, max_seconds: 20}
"""
A, B, C = range(3)


class Job:
    """A job of one rank a host, that `sftriage run` starts on each of its hosts."""

    def __init__(self, hosts, directory, environment, nodes="2", head=A):
        self.hosts, self.directory, self.nodes, self.head = hosts, directory, nodes, head
        self.run, self.running = directory / "run", {}
        self.environment = {
            **environment,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            # (torch's launcher shares one store between all starts, and what ranks have put there before is found)
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        (directory / "elastic.yaml").write_text(POLICY, encoding="utf-8")

    def start(self, *numbers):
        for number in numbers:
            address, head = self.hosts.addresses[number], self.hosts.addresses[self.head]
            launcher = [*TORCHRUN, "--nnodes", self.nodes, "--nproc-per-node", 1, "--max-restarts", 3]
            launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head}:29511", "--rdzv-id", "elastic"]
            conf = f"is_host={number == self.head},last_call_timeout=1,keep_alive_interval=1"
            launcher += ["--local-addr", address, "--rdzv-conf", conf, ELASTIC, self.directory]
            run = [sys.executable, "-m", "sftriage", "run", "--job-id", "job/8", "--hub", head]
            run += ["--out", self.run, "--creds", self.directory / "secret"]
            run += ["--policy", self.directory / "elastic.yaml"]
            place = self.directory / f"host-{number}"
            place.mkdir(exist_ok=True)
            command = ["env", "-C", place, *run, "--", *launcher]
            self.running[number] = self.hosts.start(
                number, command, self.environment, self.directory / f"said-{number}"
            )

    def say(self, name, text=""):
        (self.directory / "new").write_text(text)
        (self.directory / "new").rename(self.directory / name)

    @property
    def windows(self):
        return verdicts(self.run) if (self.run / "decisions.jsonl").exists() else []

    def said(self):
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("said-*")))

    def end(self):
        self.say("release")
        statuses = {number: one.wait(DEADLINE_S) for number, one in self.running.items()}
        assert set(statuses.values()) == {0}, self.said()


def test_try(tmp_path, environment, start):
    with hosts_of(2) as hosts:
        job = Job(hosts, tmp_path, environment)
        job.start(A, B)
        wait_until(lambda: len(job.windows) > 3)
        job.say("die-node-b")
        wait_until(lambda: len([one for one in job.windows if one["attempt"] == 1]) > 3, 60)
        job.say("slow-node-b", "data 0.05")
        wait_until(lambda: captures(job.run), 60)
        job.end()
