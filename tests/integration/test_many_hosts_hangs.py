"""The evidence of a job that hangs on two hosts, over a hub: trainers and agents are processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from sftriage.fleet import hangs, over_nats, wire
from sftriage.fleet.hosts import Generations
from sftriage.fleet.hub import Leader, Lease, Subjects, make_places
from sftriage.fleet.over_nats import NatsFleet
from sftriage.fleet.transfers import Fetching
from sftriage.fleet.wire import MAX_PARTS, encode_evidence
from sftriage.model.hangs import RankEvidence
from sftriage.runtime.controlling import KeptRows
from sftriage.traces.disk import Disk
from sftriage.traces.store import LocalStore
from tests.integration.hubs import connection, own_hub
from tests.integration.processes import DEADLINE_S, HANGING, ROOT, Processes, wait_until

pytest.importorskip("nats", reason="many hosts want the extra `nats`")
PLACES = Subjects.of("job")


class TwoHosts(Processes):
    """Two hosts with the same number of ranks, their agents, and the fleet of their job."""

    def __init__(self, directory, environment, ranks):
        super().__init__(directory, {**environment, "PYTHONPATH": str(ROOT)})
        self.world_size = 2 * ranks
        _, port = self._held.enter_context(own_hub(directory))
        self.port, hub = port, self._held.enter_context(connection(port, directory / "secret"))
        lease = Lease(hub, PLACES, Leader("run-1", "here", 1))
        hub.call(make_places(hub, PLACES, "run-1"), 20.0)
        keep, fetching = KeptRows(directory / "steps", None, Disk()), Fetching(LocalStore(directory), directory)
        self.fleet = NatsFleet(lease, Generations(), lambda _: None, keep, fetching)
        self._held.callback(self.fleet.close)
        where = "--job-id", "job", "--nats", f"nats://127.0.0.1:{port}", "--creds", directory / "secret"
        self.trainers, self.agents = [], []
        for number in range(2):
            host = directory / f"host-{number}"
            (host / "rings").mkdir(parents=True)
            about = host / "rings", host.name, number * ranks, self.world_size, ranks, "account"
            self.trainers.append(self.start_trainer(*about))
            place = "--rings", host / "rings", "--directory", host, "--name", host.name
            self.agents.append(self.start(sys.executable, "-m", "sftriage", "agent", *where, *place))
        wait_until(lambda: self.fleet.rows() is None or len(self.statuses) == self.world_size, 60.0)

    @property
    def statuses(self):
        job = self.fleet.statuses()
        return () if job is None else job.ranks

    def start_trainer(self, *about):
        command = [sys.executable, *map(str, (HANGING, *about))]
        trainer = subprocess.Popen(command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._held.callback(trainer.communicate, timeout=DEADLINE_S)
        self._held.callback(trainer.kill)
        assert trainer.stdout.readline() == b"0\n"
        return trainer

    def gathered(self, *detail, token="c-1"):
        """The evidence by rank, and how long it took."""
        began_s = time.monotonic()
        found = wait_until(lambda: self.fleet.hang_evidence(token, detail), 60.0)
        assert [evidence.rank for evidence in found] == list(range(self.world_size))
        return found, time.monotonic() - began_s

    def stop(self, process):
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


@pytest.fixture
def two_hosts(tmp_path, environment):
    with contextlib.ExitStack() as held:

        def make(ranks=2):
            return held.enter_context(contextlib.closing(TwoHosts(tmp_path, environment, ranks)))

        yield make


def test_all_ranks_of_two_hosts_give_their_evidence_over_the_hub(two_hosts):
    # GIVEN a job on two hosts that hangs, one process of which is stopped
    job = two_hosts()
    found, took_s = job.gathered(0, 2)
    assert took_s < hangs.PATIENCE_S
    for evidence in found:
        number = evidence.rank // 2
        assert (evidence.host, evidence.pid, evidence.answered) == (f"host-{number}", job.trainers[number].pid, True)
        assert [call.op for call in evidence.calls] == ["all_reduce"]
        assert evidence.groups[0].calls == (0, 0)
        assert (evidence.state, evidence.timeout_s, evidence.alive) == ("S", 1800, True)
    assert [evidence.step for evidence in found[::2]] == [7, 7]
    assert [bool(evidence.threads) for evidence in found] == [True, False, True, False]
    # WHEN the ranks of one host are stopped
    job.stop(job.trainers[1])
    found, _ = job.gathered(2, token="c-2")
    # THEN its agent says so
    assert [evidence.answered for evidence in found] == [True, True, False, False]
    assert {evidence.problem for evidence in found[2:]} == {"its process is stopped"}
    assert found[2].threads


@pytest.mark.parametrize("killed", [False, True])
def test_a_host_that_does_not_answer_has_its_last_status(two_hosts, killed, monkeypatch):
    # GIVEN a job on two hosts, the agent of one of which is stopped, or has been silent for a while
    job = two_hosts()
    if killed:
        monkeypatch.setattr(over_nats, "SILENT_S", 3.0)
        job.agents[1].kill()
        job.agents[1].wait(DEADLINE_S)
        wait_until(lambda: job.fleet.rows() is None or len(job.statuses) == 2, 60.0)
    else:
        job.stop(job.agents[1])
    # WHEN their evidence is gathered, and the job stays as it is
    found, took_s = job.gathered(0, 2)
    # THEN it is there in time, of every rank once
    assert took_s < hangs.PATIENCE_S + 1.0
    assert [evidence.answered for evidence in found] == [True, True, False, False]
    # AND those of the silent host have what was last heard of them
    for evidence, pid in zip(found[2:], [job.trainers[1].pid] * 2, strict=True):
        assert evidence.problem == "its host does not answer"
        assert (evidence.host, evidence.pid, evidence.alive, evidence.closed) == ("host-1", pid, True, False)
    assert (found[2].step, found[2].stage) == (7, "data")
    assert found[2].in_stage_s > 0.0


FORGED = RankEvidence(0, "host-0", 1, answered=True, problem="forged")
REPLIES = {
    "no message": (b"\x1b[2J", 1, "the answer of its host cannot be read: "),
    "the evidence of another host's rank": (encode_evidence([FORGED])[0], 1, hangs.UNKNOWN),
    "the same part again": (wire._framed(wire._packed_evidence([FORGED], MAX_PARTS)), MAX_PARTS, hangs.UNKNOWN),
}


@pytest.mark.parametrize("kind", REPLIES)
def test_the_answer_of_one_host_changes_nothing_of_the_others(two_hosts, kind):
    # GIVEN a job on two hosts, in place of one of which somebody answers with something else
    job = two_hosts()
    job.agents[1].kill()
    job.agents[1].wait(DEADLINE_S)
    data, n_queries, problem = REPLIES[kind]
    queries = []

    async def answer(message):
        queries.append(message.data)
        await message.respond(data)

    with connection(job.port, job.directory / "secret") as other:
        other.call(other.client.subscribe(PLACES.query("host-1"), cb=answer), 10.0)
        other.call(other.client.flush(), 10.0)
        found, took_s = job.gathered(0, 2)
    # THEN the ranks of the other host have their own evidence, in time
    assert took_s < hangs.PATIENCE_S + 2.0
    assert len(queries) == n_queries
    assert [(evidence.answered, evidence.problem) for evidence in found[:2]] == [(True, "")] * 2
    # AND those of that one a reason
    for evidence in found[2:]:
        assert not evidence.answered
        assert evidence.problem.startswith(problem)
        assert evidence.problem.isprintable()


def test_the_evidence_of_64_ranks_comes_in_time(two_hosts):
    job = two_hosts(ranks=32)
    found, took_s = job.gathered(0, 63)
    assert all(evidence.answered for evidence in found)
    assert took_s < hangs.PATIENCE_S
