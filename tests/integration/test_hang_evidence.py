"""The evidence of a host's ranks in a job that hangs, from real processes, each with a Monitor."""

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sftriage.agent.agent import Agent
from sftriage.agent.hangs import ANSWER_S
from sftriage.agent.stacks import StacksCapture
from sftriage.model.captures import CaptureRequest
from sftriage.traces.store import LocalStore
from tests.integration.namespaces import printed_elsewhere
from tests.integration.processes import HANGING, ROOT, kill, wait_until


class Ranks:
    """The ranks of a host, and its agent."""

    def __init__(self, directory: Path) -> None:
        self.rings, self.processes, self.workers = directory / "rings", [], []
        for name in ("rings", "steps", "spool"):
            (directory / name).mkdir()
        self.agent = Agent(self.rings, directory, LocalStore(directory), job="job", run="run-1")

    def start(self, *hangs: str, each: int = 1) -> None:
        """Start a process for each, of one rank or some, which hangs in that way."""
        self.world_size = each * len(hangs)
        for number, way in enumerate(hangs):
            about = map(str, (HANGING, self.rings, "node-a", each * number, self.world_size, each))
            command = [sys.executable, *about, *way.split()]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.processes.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes))
        self.workers = [int(process.stdout.readline()) for process in self.processes]
        for process, way in zip(self.processes, hangs, strict=True):
            sleeping = Path(f"/proc/{process.pid}/wchan")
            if "later" not in way:
                call = "nanosleep" if "keeps" in way else "pipe"
                wait_until(lambda sleeping=sleeping, call=call: call in sleeping.read_text())
        self.agent.rows()

    def gathered(self, *detail: int, token: str = "c-1"):
        """The evidence by rank, and how long it took."""
        began_s = time.monotonic()
        found = wait_until(lambda: self.agent.hang_evidence(token, detail), 60.0)
        took_s = time.monotonic() - began_s
        assert [evidence.rank for evidence in found] == list(range(self.world_size))
        return {evidence.rank: evidence for evidence in found}, took_s

    def stop(self, rank: int) -> None:
        self.processes[rank].send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.processes[rank].pid, os.WSTOPPED | os.WNOWAIT)

    def close(self) -> None:
        self.agent.close()
        kill(*filter(None, self.workers), *(process.pid for process in self.processes if process.poll() is None))
        for process in self.processes:
            process.communicate(timeout=30)


@pytest.fixture
def ranks(tmp_path):
    found = Ranks(tmp_path)
    yield found
    found.close()


@pytest.fixture
def without_py_spy(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))


def functions(evidence):
    return [line.function for thread in evidence.threads if thread.main for line in thread.frames]


def test_ranks_that_answer_give_their_account_and_the_kernel_adds_their_states(ranks):
    # GIVEN three ranks that answer, one of them as an older sftriage does
    ranks.start("account", "account", "old")
    # WHEN their evidence is gathered, of one of them in detail
    found, took_s = ranks.gathered(1)
    # THEN it is there as soon as the last has answered
    assert took_s < ANSWER_S - 1.0
    # AND each is in its step and stage, where the kernel has it in a read
    for rank, evidence in found.items():
        assert (evidence.host, evidence.pid) == ("node-a", ranks.processes[rank].pid)
        assert (evidence.step, evidence.stage, evidence.alive, evidence.answered) == (7, "data", True, True)
        assert 0.0 < evidence.in_stage_s < 60.0
        assert evidence.state == "S"
        assert "pipe" in evidence.wchan or "read" in evidence.wchan
    # AND it has what the trainer knows, and nothing that would move a cursor
    assert [(call.op, call.sizes) for call in found[0].calls] == [("all_reduce", ((3,),))]
    assert [(group.first, group.calls, group.pending) for group in found[0].groups] == [(1, (0, 0), (2,))]
    assert (found[0].timeout_s, found[0].threads) == (1800, ())
    assert [thread.name for thread in found[1].threads] == ["Main?Thread"]
    # AND of the older one its stacks
    assert functions(found[2])[0] == "hangs_here"
    assert "stacks alone" in found[2].problem
    # AND the same token brings the same evidence, and another one evidence of a later moment
    assert ranks.gathered(1)[0] == found
    assert ranks.gathered(1, token="c-2")[0][0].in_stage_s > found[0].in_stage_s


def test_a_stopped_rank_costs_no_time_and_py_spy_reads_it_as_it_is(ranks):
    # GIVEN a rank that answers, and one that is stopped
    ranks.start("account", "account")
    ranks.stop(1)
    found, took_s = ranks.gathered(0, 1)
    # THEN nobody waits for it
    assert took_s < ANSWER_S - 1.0
    stopped = found[1]
    assert (stopped.answered, stopped.state, stopped.wchan) == (False, "T", "do_signal_stop")
    assert stopped.problem == "its process is stopped"
    # AND its stacks are from outside
    assert functions(stopped)[0] == "hangs_here"
    assert {thread.wait.state for thread in stopped.threads} == {"T"}
    assert found[0].answered


def test_a_killed_rank_has_ended(ranks):
    # GIVEN two ranks, one of which is killed, and is not reaped
    ranks.start("account", "account")
    ranks.processes[1].kill()
    os.waitid(os.P_PID, ranks.processes[1].pid, os.WEXITED | os.WNOWAIT)
    found, took_s = ranks.gathered(1)
    assert took_s < ANSWER_S - 1.0
    killed = found[1]
    assert (killed.alive, killed.answered, killed.state, killed.exit_status) == (False, False, "Z", -signal.SIGKILL)
    assert killed.problem == "its process has ended"
    # AND once it is reaped, that is all there is
    ranks.processes[1].wait(30)
    found, _ = ranks.gathered(1, token="c-2")
    assert (found[1].alive, found[1].state, found[1].problem) == (False, "", "its process has ended")
    assert found[0].answered


def test_a_rank_that_keeps_its_interpreter_is_read_from_outside_and_says_which_thread_holds_it(ranks):
    ranks.start("account", "keeps")
    found, took_s = ranks.gathered(1)
    assert took_s < ANSWER_S + 1.0
    keeps = found[1]
    assert (keeps.answered, keeps.state) == (False, "S")
    assert "nanosleep" in keeps.wchan
    assert keeps.problem == "it gives no answer: its thread MainThread holds the interpreter"
    assert functions(keeps)[0] == "hangs_here"
    assert found[0].answered


def test_without_py_spy_the_kernel_still_knows_the_state(ranks, request):
    ranks.start("account", "keeps", "account")
    ranks.stop(2)
    request.getfixturevalue("without_py_spy")
    found, _ = ranks.gathered(1, 2)
    assert found[1].problem.startswith("it gives no answer: native code may hold its interpreter; py-spy is not")
    assert found[2].problem.startswith("its process is stopped; py-spy is not installed")
    assert [found[rank].threads for rank in (1, 2)] == [(), ()]


def test_a_stopped_worker_is_read_from_outside(ranks):
    # GIVEN a rank that answers, and one that keeps its interpreter, each with a worker that is stopped
    ranks.start("account worker", "keeps worker")
    found, _ = ranks.gathered(0, 1)
    # THEN both workers are in the evidence, with their states and where they are
    for rank in (0, 1):
        (worker,) = found[rank].workers
        assert (worker.pid, worker.state, worker.wchan) == (ranks.workers[rank], "T", "do_signal_stop")
        assert functions(worker)[0] == "loads"


def test_the_stacks_of_a_rank_include_the_calls_that_it_knows(ranks, tmp_path):
    # GIVEN a rank that answers, and one that is stopped
    ranks.start("account", "account")
    ranks.stop(1)
    for rank, ops in ((0, ["all_reduce"]), (1, [])):
        # WHEN the stacks of each are captured
        request = CaptureRequest(f"c-{rank}", rank, "stacks", 1, 0, max_seconds=20, max_bytes=10**6)
        capture = StacksCapture(request, ranks.agent.ranks[rank], ranks.rings, tmp_path, lambda: None)
        with contextlib.closing(capture):
            assert wait_until(capture.poll, 60.0).state == "stored"
            document = json.loads(capture.products()[0].path.read_text(encoding="utf-8"))
        # THEN the document has its stacks, and the calls of the one that answers
        assert "hangs_here" in str(document["threads"])
        assert [call["op"] for call in document["calls"]] == ops
        assert [group["calls"] for group in document["groups"]] == [[0, 0]] * len(ops)


ELSEWHERE = """
import sys, time
from pathlib import Path
from sftriage.agent.agent import Agent
from sftriage.traces.store import LocalStore
rings, directory = map(Path, sys.argv[1:])
agent, end_s = Agent(rings, directory, LocalStore(directory), job="job", run="run-1"), time.monotonic() + 30
def until(is_so):
    while not (found := is_so()):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    return found
until(lambda: agent.rows() is None or agent.stat(agent.ranks[1]))
(rings / "hang").touch()
until(lambda: b") T " in agent.stat(agent.ranks[1]))
found = until(lambda: agent.hang_evidence("c-1", (0, 1)))
print([(one.rank, one.alive, one.answered, one.state, one.wchan, one.problem) for one in found])
agent.close()
"""


def test_ranks_of_another_container_answer_and_their_pids_mean_nothing(ranks, tmp_path):
    # GIVEN an agent for which the ranks' process ids are of other processes, or of none
    ranks.start("account", "later")
    (tmp_path / "elsewhere" / "steps").mkdir(parents=True)
    printed = printed_elsewhere(ELSEWHERE, ranks.rings, tmp_path / "elsewhere")
    # THEN the rank that runs answers, and of a stopped one the agent knows what its trainer has sent before
    first, second = ast.literal_eval(printed)
    assert first == (0, True, True, "", "", "")
    assert second == (1, True, False, "T", "", "its process is stopped")


def test_the_evidence_of_64_ranks_is_there_in_time(ranks):
    # GIVEN 64 ranks, of which a process each has 16
    ranks.start("account", "account", "account", "account", each=16)
    found, took_s = ranks.gathered(0, 63)
    # THEN all answer, long before the end
    assert all(evidence.answered for evidence in found.values())
    assert [bool(found[rank].threads) for rank in (0, 1, 63)] == [True, False, True]
    assert took_s < ANSWER_S
    # AND with a rank that does not, it takes no longer than it may
    ranks.stop(3)
    found, took_s = ranks.gathered(0, 63, token="c-2")
    assert [rank for rank, evidence in found.items() if not evidence.answered] == list(range(48, 64))
    assert took_s < ANSWER_S + 1.0
