"""Real jobs under torchrun on several hosts that start again: which ranks belong together is never mixed up."""

import json
import re
import sys
from pathlib import Path

import pytest

from sftriage.model.captures import ENDED
from sftriage.model.events import CaptureChanged
from sftriage.runs.journal import read_journal
from sftriage.windows.log_files import find_logs
from sftriage.windows.logs import LogReader
from tests.integration.namespaces import hosts_of
from tests.integration.policies import policy
from tests.integration.processes import DEADLINE_S, wait_until
from tests.integration.runs import captures, named, on_record, verdicts

pytest.importorskip("torch")
pytest.importorskip("nats", reason="many hosts want the extra `nats`")
ELASTIC = Path(__file__).parent / "jobs" / "elastic.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
POLICY = policy(
    'name: slow, match: {scope: [rank], gain: ">= 20% and >= 10ms"}, '
    "capture: {profiler: stacks, steps: 3, max_seconds: 20}",
    steps=(40, 20, 10),
    limits="overhead_budget: 50%",
)
A, B, C = range(3)
WARMUP_STEPS, RULE_S = 10, 0.01
KEPT_ALIVE = "keep_alive_interval=1,keep_alive_max_attempt=10"
"""A launcher that says nothing for 10 s is gone: by default it is after 15."""


class Job:
    """A job of one rank a host, that `sftriage run` starts on each of its hosts. The head has hub and controller."""

    def __init__(self, hosts, directory, environment, nodes="2", head=A):
        self.hosts, self.directory, self.nodes, self.head = hosts, directory, nodes, head
        self.run, self.running = directory / "run", {}
        self.environment = {
            **environment,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            # (torch's launchers share one store between all starts, and what ranks have put there before is found)
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        (directory / "elastic.yaml").write_text(POLICY, encoding="utf-8")

    def start(self, *numbers):
        for number in numbers:
            address, head = self.hosts.addresses[number], self.hosts.addresses[self.head]
            launcher = [*TORCHRUN, "--nnodes", self.nodes, "--nproc-per-node", 1, "--max-restarts", 3]
            launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head}:29511", "--rdzv-id", "elastic"]
            about = f"is_host={number == self.head},last_call_timeout=3,{KEPT_ALIVE}"
            launcher += ["--local-addr", address, "--rdzv-conf", about, ELASTIC, self.directory]
            run = [sys.executable, "-m", "sftriage", "run", "--job-id", "job/8", "--hub", head]
            run += ["--out", self.run, "--creds", self.directory / "secret"]
            run += ["--policy", self.directory / "elastic.yaml"]
            place = self.directory / f"host-{number}"
            place.mkdir(exist_ok=True)
            command = ["env", "-C", place, *run, "--", *launcher]
            said = self.directory / f"said-{number}"
            self.running[number] = self.hosts.start(number, command, self.environment, said)

    def say(self, name, text=""):
        (self.directory / "new").write_text(text)
        (self.directory / "new").rename(self.directory / name)

    @property
    def starts(self):
        """Who has started together, in order: by rank."""
        together = {}
        noted = self.directory / "started"
        for line in noted.read_text().splitlines() if noted.exists() else ():
            one = json.loads(line)
            together.setdefault(one["together"], {})[one["rank"]] = one
        return list(together.values())

    @property
    def windows(self):
        return verdicts(self.run)

    def judged(self, attempt, more=3):
        """Wait until so many windows more of an attempt are judged than there are now."""

        def of_attempt():
            return len([one for one in self.windows if one["attempt"] == attempt])

        wanted = of_attempt() + more
        wait_until(lambda: of_attempt() >= wanted)

    @property
    def captures(self):
        events = [one for one in read_journal(self.run / "decisions.jsonl") if isinstance(one, CaptureChanged)]
        ids = dict.fromkeys(one.result.capture_id for one in events)
        return {each: [one.result for one in events if one.result.capture_id == each] for each in ids}

    def ask(self, rank):
        """Ask for a capture that lasts, on the head; its id once it is under way."""
        about = ["--rank", rank, "--profiler", "stacks", "--steps", 1000, "--reason", "asked for"]
        command = [sys.executable, "-m", "sftriage", "capture", "--run", self.run, *about]
        self.hosts.start(self.head, command, self.environment, self.directory / "said-capture")
        wait_until(lambda: any(one[-1].state == "running" for one in self.captures.values()))
        return next(reversed(self.captures))

    def ended(self, capture_id):
        wait_until(lambda: self.captures[capture_id][-1].state in ENDED)
        return self.captures[capture_id][-1].state, self.captures[capture_id][-1].detail

    def end(self):
        self.say("release")
        statuses = {number: one.wait(DEADLINE_S) for number, one in self.running.items()}
        assert set(statuses.values()) == {0}, self.said

    @property
    def said(self):
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("said-*")))


def generations(run):
    """Of each generation on record, by rank: its process, host, and the first and last step that is kept."""
    found = {}
    for log in find_logs(run / "steps", "steps"):
        reader = LogReader(log)
        steps = reader.read(1 << 20).step_B
        if not len(steps):
            continue
        about = {"host": reader.info.host, "pid": reader.info.pid, "world_size": reader.info.world_size}
        found.setdefault(log.attempt, {})[log.rank] = about | {"first": int(steps.min()), "last": int(steps.max())}
    return found


def assert_never_mixed(job, sftriage):
    """Every generation on record is one start of the job, and every window of one generation's steps alone."""
    found = generations(job.run)
    assert [
        {rank: (one["host"], one["pid"], one["world_size"]) for rank, one in sorted(of.items())}
        for of in (*(found[attempt] for attempt in sorted(found)), *job.starts)
    ] == 2 * [
        {rank: (one["host"], one["pid"], one["world_size"]) for rank, one in sorted(of.items())} for of in job.starts
    ]
    for one in job.windows:
        of = found[one["attempt"]].values()
        assert min(rank["first"] for rank in of) <= one["first_step"], one
        assert one["last_step"] <= max(rank["last"] for rank in of), one
        assert all(set(suspect["ranks"]) <= set(found[one["attempt"]]) for suspect in one["suspects"]), one
    # AND judged again afterwards they are the same windows, each of its generation
    lines = sftriage("analyze", job.run, "--json").out.splitlines()
    again = {(one["attempt"], one["first_step"]) for one in map(json.loads, lines)}
    assert again >= {(one["attempt"], one["first_step"]) for one in job.windows if one["label"] != "stalled"}
    # AND every capture has ended, and once
    assert [[one.state for one in some if one.state in ENDED] for some in job.captures.values()] == [
        [some[-1].state] for some in job.captures.values()
    ]


def assert_captured(job, sftriage, rank, host, stage):
    """Who was slow was named, and nobody else, and captured in its newest process."""
    attempt = len(job.starts) - 1
    found = [one for one in job.windows if named(one) and one["suspects"][0]["gain_s"] >= RULE_S]
    # (a busy machine makes a job slower, which is nobody's fault)
    found = [one for one in found if one["suspects"][0]["scope"] == "rank"]
    assert {(one["attempt"], *named(one)) for one in found} == {(attempt, rank, stage)}
    (capture,) = captures(job.run)
    assert (capture.capture.rank, capture.capture.host, capture.trigger.stage) == (rank, host, stage)
    assert capture.capture.world_size == len(job.starts[-1])
    assert capture.reproduced.answer == "yes"
    # AND whoever looks at its steps sees that
    step = capture.capture.first_step
    found = sftriage("traces", "for-step", step, "--run", job.run, "--json").json
    assert [one["capture_id"] for one in found["captures"]] == [capture.capture_id]


def test_a_trainer_that_dies_is_another_generation_for_all_ranks(tmp_path, environment, sftriage):
    with hosts_of(2) as hosts:
        # GIVEN a job on two hosts, and a capture of rank 1 under way
        job = Job(hosts, tmp_path, environment)
        job.start(A, B)
        job.judged(0)
        asked = job.ask(1)
        # WHEN the trainer of the second host dies, and torchrun starts all of them again
        job.say("die-node-b")
        job.judged(1)
        # THEN that capture has failed
        assert job.ended(asked) == ("failed", "the trainer ended during the capture")
        kept = job.captures[asked]
        # AND only the host that failed counts a restart
        assert [[of[rank]["restarts"] for rank in (0, 1)] for of in job.starts] == [[0, 0], [0, 1]]
        # WHEN a rank becomes slow
        job.say("slow-node-b", "forward 0.05")
        # THEN it is captured
        wait_until(lambda: captures(job.run))
        job.end()
        # AND of the capture of the start before nothing has changed
        assert job.captures[asked] == kept
        assert_captured(job, sftriage, 1, "node-b", "forward")
        # AND why it started again is on record, and is the last line of the controller's host
        (broken,) = on_record(job.run, "broken")
        assert (broken["attempt"], broken["restarted"]) == (0, True)
        assert [(departure["ranks"], departure["hosts"]) for departure in broken["first"]] == [([1], ["node-b"])]
        (said,) = re.findall("sftriage: Attempt 0: (.*)", job.said)
        assert said.startswith("Rank 1 on node-b went first: ")
        assert said.endswith("The job was restarted.")
        assert_never_mixed(job, sftriage)


def test_a_node_is_replaced_and_the_ranks_are_numbered_anew(tmp_path, environment, sftriage):
    with hosts_of(3) as hosts:
        # GIVEN a job on two hosts that goes on from the checkpoint of another one, and a capture of rank 1 under way
        job = Job(hosts, tmp_path, environment, nodes="1:2", head=B)
        job.say("checkpoint", "1000")
        job.start(B, C)
        wait_until(lambda: job.starts and len(job.starts[-1]) == 2)
        job.judged(len(job.starts) - 1)
        asked = job.ask(1)
        # WHEN that host is killed, with its agent
        job.say("leave")
        hosts.kill(C)
        del job.running[C]
        # THEN the job goes on alone, and the capture has failed
        wait_until(lambda: len(job.starts[-1]) == 1)
        job.judged(len(job.starts) - 1)
        assert job.ended(asked) == ("failed", "its host is gone, and the job restarted without it")
        # WHEN another host takes its place, whose address comes first
        job.start(A)
        wait_until(lambda: len(job.starts[-1]) == 2)
        job.judged(len(job.starts) - 1)
        job.say("slow-node-b", "data 0.05")
        wait_until(lambda: captures(job.run))
        job.end()
    # THEN the rank that was 0 and is 1 by now is named, and was captured
    hosts_by_rank = [[one["host"] for _, one in sorted(of.items())] for of in job.starts]
    assert hosts_by_rank[-3:] == [["node-b", "node-c"], ["node-b"], ["node-a", "node-b"]]
    assert_captured(job, sftriage, 1, "node-b", "data")
    assert_never_mixed(job, sftriage)
    # AND its steps have the job's own numbers
    assert min(one["first_step"] for one in job.windows) == 1000 + WARMUP_STEPS
