"""What an agent tells of its ranks' steps, and what it does about captures that are wanted of them."""

import os
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sftriage.agent.agent import ANSWER_GRACE_S, Agent, Switches
from sftriage.errors import RingError
from sftriage.mitigate.switching import Setting, Switch, SwitchFile, make_switch
from sftriage.model.captures import CaptureRequest, CaptureResult, Trigger, WantedCapture
from sftriage.traces import disk as module
from sftriage.traces.disk import Disk
from sftriage.traces.store import LocalStore
from sftriage.trainer.monitor import Monitor
from sftriage.windows.log_files import find_logs
from sftriage.windows.logs import LogReader
from sftriage.windows.steplog import CountersLog, StepLog
from tests.disks import small_disk
from tests.scenario import kept_of

WHY = Trigger(0, 49, "suspect", "rank", (1,), "data", 0.02, 0.3, 0.9, "default", "ab" * 32, "slow")


def wanted(rank: int, **about: object) -> WantedCapture:
    return WantedCapture(request(rank), WHY, **about)


def reported(agent: Agent) -> list[tuple[str, str]]:
    return [(one.result.state, one.result.detail) for one in agent.reports()]


def train(*monitors: Monitor, steps: int) -> None:
    for _ in range(steps):
        for monitor in monitors:
            with monitor.step(), monitor.stage("data"):
                pass


def request(rank: int) -> CaptureRequest:
    return CaptureRequest(f"w0-3-r{rank}-x-1", rank, "torch", steps=1, warmup_steps=0, max_seconds=5, max_bytes=10**6)


def test_every_step_is_returned_once_and_logged(agent, monitor, places):
    assert (agent.rows(), agent.statuses()) == ([], None)
    ranks = monitor(0), monitor(1)
    train(*ranks, steps=6)
    (rows,) = agent.rows()
    assert (rows.generation, rows.world_size, sorted(rows.ranks)) == (0, 2, [0, 1])
    assert sorted(zip(rows.steps.rank_B.tolist(), rows.steps.step_B.tolist(), strict=True)) == [
        (rank, step) for rank in (0, 1) for step in range(6)
    ]
    # WHEN nothing has come since THEN it says that the ranks are there, further on in its stream
    (again,) = agent.rows()
    assert (len(again.steps), again.position > rows.position) == (0, True)
    # AND WHEN the last steps are to be returned again THEN they are, with newer ones
    agent.rewind(2)
    train(*ranks, steps=1)
    (rows,) = agent.rows()
    assert sorted(set(rows.steps.step_B.tolist())) == [4, 5, 6]
    assert (agent.telemetry().steps, agent.telemetry().missed) == (6, 0)
    for rank in (0, 1):
        kept = LogReader(places["steps"] / f"rank-{rank}.0.steps").read()
        assert kept.step_B.tolist() == list(range(7))


def test_rows_have_times_that_any_host_can_read(agent, monitor):
    before_ns = time.time_ns()
    train(monitor(0), monitor(1), steps=1)
    (rows,) = agent.rows()
    start_ns_B = rows.steps.start_ns_B + rows.wall_ns
    # (the two clocks are read one after the other)
    assert before_ns - 10**8 <= start_ns_B.min() <= start_ns_B.max() <= time.time_ns() + 10**8


@pytest.mark.parametrize(("log", "takes"), [(StepLog, "append"), (CountersLog, "add")])
def test_a_full_disk_costs_what_is_kept_and_not_the_triage(agent, monitor, monkeypatch, caplog, log, takes):
    def full(log, *_):
        raise RingError(f"{log.path}: cannot be written: No space left on device")

    # GIVEN a disk that takes no steps, or no readings of counters, WHEN the job goes on
    monkeypatch.setattr(log, takes, full)
    ranks = monitor(0), monitor(1)
    train(*ranks, steps=4)
    first = agent.rows()
    train(*ranks, steps=4)
    (last,) = agent.rows()
    # THEN both have their steps returned, with one warning per rank
    assert [len(rows.steps) for rows in (*first, last)] == [8, 8]
    assert last.steps.counted_BC is not None
    assert caplog.text.count("No space left") == 2


def test_a_rank_that_records_other_stages_counts_as_missing(agent, monitor):
    train(monitor(0), monitor(1, stages=("load", "backward")), steps=8)
    agent.rows()
    (problem,) = agent.telemetry().problems.values()
    assert "rank 1 records different stages from the other ranks" in problem


def test_rows_say_of_which_generation_they_are_and_where_the_ranks_are(agent, monitor, monkeypatch):
    first = monitor(0, host="node-a", cohort="pp0"), monitor(1, host="node-a", cohort="pp1")
    train(*first, steps=2)
    (rows,) = agent.rows()
    assert [(one.host, one.cohort) for one in rows.ranks.values()] == [("node-a", "pp0"), ("node-a", "pp1")]
    # WHEN the launcher has started the ranks again, and a rank of before still takes steps
    with monkeypatch.context() as environment:
        environment.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        second = monitor(0), monitor(1)
    train(*second, first[0], steps=1)
    assert [(rows.generation, len(rows.steps)) for rows in agent.rows()] == [(0, 1), (1, 2)]


@pytest.mark.parametrize(
    ("rank", "about", "outcome"),
    [
        (1, {}, ("failed", "rank 1 has no ring here")),
        (0, {"generation": 4}, ("refused", "rank 0 has restarted since")),
        (0, {"expires_s": -0.5}, ("expired", "its time to begin passed before its host got the order")),
    ],
)
def test_what_cannot_be_begun_is_not(agent, monitor, rank, about, outcome):
    train(monitor(0), steps=1)
    agent.want([wanted(rank, **about)])
    assert reported(agent) == [outcome]


def test_an_order_begins_once_however_often_it_is_repeated(agent, monitor, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    rank = monitor(0, world_size=1)
    train(rank, steps=1)
    # WHEN a rank that has not imported torch is wanted a capture of, and takes its next step
    for _ in range(3):
        agent.want([wanted(0)])
    assert [state for state, _ in reported(agent)] == ["accepted", "armed"]
    train(rank, steps=1)
    assert reported(agent) == [("refused", "torch is not imported in this process")]
    agent.want([wanted(0)])
    assert reported(agent) == []


def test_a_withdrawn_order_is_cancelled(agent, monitor, monkeypatch):
    cuda = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    rank = monitor(0, world_size=1)
    train(rank, steps=1)
    agent.want([wanted(0)])
    reported(agent)
    agent.want([])
    train(rank, steps=1)
    assert reported(agent) == [("refused", "cancelled")]


def test_an_unanswered_capture_is_given_up_and_reported_as_hanging(agent, monitor, clock):
    only = monitor(0, world_size=1)
    train(only, steps=1)
    agent.want([wanted(0)])
    reported(agent)
    # WHEN its time-box and the time to answer are over
    clock.now_s = request(0).max_seconds + ANSWER_GRACE_S["torch"]
    (report,) = agent.reports()
    assert (report.result.state, report.result.detail) == ("expired", "no answer long after its time-box")
    assert report.hangs
    # AND a late answer of its rank is not a result
    train(only, steps=2)
    assert reported(agent) == []


def test_a_capture_of_a_process_that_has_ended_has_failed_though_its_rank_is_there_again(agent, monitor, places):
    # GIVEN a capture of a rank that is killed
    code = "import sftriage, time; held = sftriage.Monitor(rank=0, world_size=1); print(flush=True); time.sleep(60)"
    environment = {**os.environ, "SFTRIAGE_RINGS": str(places["rings"])}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as trainer:
        trainer.stdout.readline()
        agent.want([wanted(0)])
        assert [state for state, _ in reported(agent)] == ["accepted", "armed"]
        trainer.kill()
    # WHEN its number is another process's
    again = monitor(0, world_size=1)
    assert again.info.attempt == 1
    agent.want([wanted(0)])
    assert reported(agent) == [("failed", "the trainer ended during the capture")]


def test_what_is_in_the_store_already_is_not_made_again(agent, monitor, tmp_path, make_manifest, trace):
    # GIVEN a capture that was stored by an agent that was killed before its report
    train(monitor(0), steps=1)
    capture_id = request(0).capture_id
    store = LocalStore(tmp_path)
    store.put(capture_id, trace, lambda artefact: make_manifest(capture_id, artefact, rank=0))
    agent.want([wanted(0, resumed=True)])
    (report,) = agent.reports()
    assert (report.result.capture_id, report.result.state) == (capture_id, "stored")
    assert report.stored_bytes > 0
    assert isinstance(report.result, CaptureResult)
    # AND WHEN a controller that has lost its run orders it anew THEN it gets the same answer
    agent.want([wanted(0)])
    assert agent.reports() == []
    agent.want([])
    agent.want([wanted(0)])
    assert agent.reports() == [report]


def test_a_capture_that_cannot_be_started_leaves_no_file_open(agent, monitor, clock):
    # GIVEN a rank that has not answered a capture that was given up
    train(monitor(0, world_size=1), steps=1)
    agent.want([wanted(0)])
    clock.now_s = 1000.0
    reported(agent)
    before = len(list(Path("/proc/self/fd").iterdir()))
    # WHEN it is to be captured again and again
    for number in range(5):
        again = replace(wanted(0), request=replace(request(rank=0), capture_id=f"again-{number}"))
        agent.want([again])
        ((state, detail),) = reported(agent)
        assert (state, "has not answered" in detail) == ("failed", True)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("taken_over", [False, True])
def test_what_a_rank_declares_and_joins_late_is_in_what_is_kept(places, tmp_path, monitor, taken_over, caplog):
    # GIVEN ranks that join a cohort: one before its first step has been read, one after, which declares a stage too
    def agent():
        return Agent(places["rings"], tmp_path, LocalStore(tmp_path), job="job", run="run-1")

    first, late = monitor(0), monitor(1)
    first.join("stage-0")
    train(first, late, steps=3)
    one = agent()
    one.rows()
    late.declare("exchange")
    late.join("stage-1")
    if taken_over:
        one.close()
        one = agent()
    train(first, steps=2)
    for _ in range(2):
        with late.step(), late.stage("exchange"):
            pass
    train(first, late, steps=1)
    (rows,) = one.rows()
    one.close()
    # THEN the logs go on with the stages that they have, and no rank is missing
    assert (rows.schema.stages, sorted(rows.ranks)) == (("data", "backward", "other"), [0, 1])
    assert one.telemetry().problems == {}
    # AND their steps are of these stages, with all of their time, with one warning
    assert (rows.steps.durations_ns_BS[rows.steps.rank_B == 1, 2] > 0).all()
    assert rows.ranks[1].cohort == "stage-1"
    assert caplog.text.count("declared exchange after it had begun recording") == 1
    # AND whoever reads the logs later knows both, and has every step once
    logs = find_logs(places["steps"])
    readers = [LogReader(log) for log in logs]
    assert [reader.info.cohort for reader in readers] == ["stage-0", "stage-1"]
    for reader in readers:
        assert [step for steps in _read_all(reader) for step in steps.step_B.tolist()] == list(range(6))
    # AND the readings of their counters are still theirs
    for log, reader in zip(logs, readers, strict=True):
        readings = places["steps"] / f"rank-{log.rank}.0.counters"
        assert not readings.exists() or kept_of(places["steps"], reader.info) is not None


def _read_all(reader):
    while len(steps := reader.read()):
        yield steps


DEADLINE_S = 20.0


@pytest.mark.parametrize("full_from_the_start", [True, False])
def test_steps_on_a_full_disk_are_returned_at_once_and_logged_late(tmp_path, monkeypatch, full_from_the_start):
    monkeypatch.setattr(module, "RETRY_S", 0.005)
    (rings := tmp_path / "rings").mkdir()
    with small_disk(tmp_path / "disk") as small, Monitor(rings=rings, world_size=1) as monitor:
        disk = Disk()
        (steps := small.path / "steps").mkdir()
        agent = Agent(rings, small.path, LocalStore(tmp_path), job="job", run="run-1", do=disk.do)
        reported = []

        def go_on(steps: int) -> None:
            for _ in range(steps):
                with monitor.step():
                    pass
            reported.extend(step for rows in agent.rows() for step in rows.steps.step_B.tolist())

        # GIVEN a job that goes on for longer than its disk has room
        if full_from_the_start:
            small.fill()
        go_on(20)
        disk.settle()
        small.fill()
        go_on(300)
        assert (reported, agent.telemetry().problems) == (list(range(320)), {})
        disk.settle()
        assert not disk.well
        # AND of a log that could not be begun there is nothing
        logs = list(steps.glob("rank-*"))
        assert all(path.stat().st_size for path in logs)
        assert bool(logs) != full_from_the_start
        # WHEN there is room again THEN all of it is kept
        small.empty()
        disk.drain(DEADLINE_S)
        assert LogReader(steps / "rank-0.0.steps").read().step_B.tolist() == list(range(320))
        *_, over = disk.news()
        assert (over.lost, over.late["steps"] >= 300) == ({}, True)
        agent.close()
        disk.drain(DEADLINE_S)
        disk.close()


def test_each_rank_is_in_its_stage_since_it_entered_it(agent, monitor):
    # GIVEN rank 0 is in data of its second step, and rank 1 has not begun its first
    before_ns = time.monotonic_ns()
    first, _ = monitor(0, host="a"), monitor(1, host="b")
    with first.step():
        pass
    with first.step(), first.stage("data"):
        agent.rows()
        job = agent.statuses()
    assert (job.schema.sync, job.world_size, job.attempt) == (("backward",), 2, 0)
    in_data, not_begun = job.ranks
    assert (in_data.rank, in_data.host, in_data.stage, in_data.step, in_data.published) == (0, "a", "data", 1, 1)
    assert 0 <= in_data.stage_age_ns <= in_data.step_age_ns <= time.monotonic_ns() - before_ns
    # THEN the latter has been so since it started, not since the host did
    assert (not_begun.rank, not_begun.host, not_begun.stage, not_begun.published) == (1, "b", None, 0)
    assert 0 <= not_begun.stage_age_ns <= time.monotonic_ns() - before_ns
    assert (not_begun.closed, not_begun.alive) == (False, True)


def test_only_the_newest_attempt_counts(agent, monitor):
    for rank in (0, 1):
        monitor(rank).close()
    agent.rows()
    assert [one.closed for one in agent.statuses().ranks] == [True, True]
    # WHEN rank 0 starts again
    monitor(0)
    agent.rows()
    job = agent.statuses()
    assert (job.attempt, [(one.rank, one.closed) for one in job.ranks]) == (1, [(0, False)])
    # AND once the other one starts it counts, before steps are read again
    monitor(1)
    assert [one.rank for one in agent.statuses().ranks] == [0, 1]


def test_groups_are_found_as_they_appear_and_get_each_request_once(tmp_path):
    with closing(Switches(tmp_path, lambda *_: False)) as switches:
        # GIVEN a host on which there is no group yet, and then one, beside a file that is none
        assert switches.statuses() == []
        path = make_switch(tmp_path, (0, 1))
        (tmp_path / "rank-7.0.switch").write_bytes(b"foreign")
        ranks = [Switch(path, place) for place in range(2)]
        (status,) = switches.statuses()
        assert (status.name, status.ranks, status.value) == (path.name, (0, 1), 0)
        # WHEN a value is set repeatedly THEN it is requested once
        switches.want({path.name: Setting(2), "rank-9.0.switch": Setting(1)})
        with SwitchFile(path) as file:
            requested = file.status().request
        switches.want({path.name: Setting(2)})
        assert switches.statuses()[0].request == requested
        for _ in range(requested.round):
            for rank in ranks:
                rank.begin(step=5)
        assert switches.statuses()[0].value == 2
        # AND the ranks' next start has a file of its own
        again = make_switch(tmp_path, (0, 1))
        assert [one.name for one in switches.statuses()] == [again.name]


def made_by_another(rings, *groups):
    """The files of groups whose first rank is another process, which is gone by now; each with its microbatches."""
    child = os.fork()
    if child == 0:
        for ranks, microbatches in groups:
            make_switch(rings, ranks, microbatches)
        os._exit(0)
    os.waitpid(child, 0)


def test_groups_that_begin_with_the_same_rank_do_not_hide_one_another(tmp_path):
    with closing(Switches(tmp_path, lambda *_: False)) as switches:
        # GIVEN pipelines of two stages, in two copies, whose ranks join both kinds of groups
        mesh = {(0, 1): 4, (2, 3): 4, (0, 2): 0, (1, 3): 0}
        paths = {ranks: make_switch(tmp_path, ranks, microbatches) for ranks, microbatches in mesh.items()}
        assert len(set(paths.values())) == 4
        # THEN all are found, each with a status of its own
        found = {one.ranks: one for one in switches.statuses()}
        assert {ranks: one.microbatches for ranks, one in found.items()} == mesh
        # WHEN one of several groups with the same first rank is set THEN only that one gets a request
        switches.want({found[0, 2].name: Setting(2), found[0, 1].name: Setting()})
        assert {one.ranks: one.request.value for one in switches.statuses()} == dict.fromkeys(mesh, 0) | {(0, 2): 2}
        # WHEN ranks join one of them again THEN the new one is in its place, and the others are as they were
        again = make_switch(tmp_path, (0, 1), 4)
        assert {one.name for one in switches.statuses()} == {again.name, *(one.name for one in found.values())} - {
            found[0, 1].name
        }


def test_groups_of_ended_ranks_are_replaced_by_new_ones(tmp_path):
    with closing(Switches(tmp_path, lambda *_: False)) as switches:
        # GIVEN groups of a first rank that has ended, one of which is there no more
        made_by_another(tmp_path, ((0, 1), 4), ((0, 2), 0), ((0, 2), 0))
        assert switches.statuses() == []
        # WHEN it begins anew and joins THEN it is found, under whatever name
        first = make_switch(tmp_path, (0, 2))
        assert first.name == "rank-0.0.switch"
        assert [one.ranks for one in switches.statuses()] == [(0, 2)]


def test_a_file_in_the_place_of_one_that_was_open_is_found(tmp_path):
    # GIVEN a group that was found while its first rank seemed alive
    alive = True
    with closing(Switches(tmp_path, lambda *_: alive)) as switches:
        made_by_another(tmp_path, ((0, 1), 0))
        (before,) = switches.statuses()
        # WHEN the ranks begin anew between two looks, so that another file has the name of the first
        alive = False
        path = make_switch(tmp_path, (0, 1, 2))
        assert path.name == before.name
        switches.statuses()
        # THEN it is reported once the first rank has another process
        assert [one.ranks for one in switches.statuses()] == [(0, 1, 2)]
