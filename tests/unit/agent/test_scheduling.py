"""What an agent reads of its ranks' training threads, from outside, and what it does where nothing is to be read."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sftriage.agent import scheduling
from sftriage.agent.scheduling import TrainingThread, parsed
from sftriage.errors import RingError
from sftriage.recorder import find_rings
from sftriage.records import StageSchema
from sftriage.runs.recordings import load_recording
from sftriage.windows.gather import Gatherer, Shape
from sftriage.windows.rings import open_ring
from sftriage.windows.scheduling import SchedulingLog
from tests.recorded import kept_of
from tests.unit.agent.test_agent import train
from tests.unit.recorded import run_at

STATUS = b"Name:\tpython\nvoluntary_ctxt_switches:\t150\nnonvoluntary_ctxt_switches:\t12\n"


@pytest.mark.parametrize(
    ("counters", "status", "found"),
    [
        (b"5000 300 7\n", STATUS, (5000, 300, 12)),
        # A kernel that does not count says so with zeros: also of a thread that has run.
        (b"0 0 0\n", STATUS, None),
        (b"0 661623 1\n", STATUS, (0, 661623, 12)),
        (b"", STATUS, None),
        (b"5000 300\n", STATUS, None),
        (b"a b c\n", STATUS, None),
        (b"5000 -300 7\n", STATUS, None),
        (b"5000 300 7\n", b"Name:\tpython\n", None),
        (b"5000 300 7\n", b"", None),
        # A process may be called anything.
        (b"5000 300 7\n", b"Name:\tnonvoluntary_ctxt_switches:\t9\n" + STATUS, (5000, 300, 12)),
    ],
)
def test_what_the_kernel_writes_is_read_or_is_nothing(counters, status, found):
    assert parsed(counters, status) == found


counted = pytest.mark.skipif(
    parsed(Path("/proc/self/schedstat").read_bytes() if Path("/proc/self/schedstat").exists() else b"", STATUS) is None,
    reason="this kernel does not count how long threads wait for a CPU",
)


def run(monitor, agent, turns=3, steps=4):
    """Steps of two ranks, read in several turns, in which the thread is seen to run; the steps of each."""
    ranks = monitor(0), monitor(1)
    found = []
    for _ in range(turns):
        train(*ranks, steps=steps)
        # (the kernel counts what a thread has run at its ticks)
        sum(range(2_000_000))
        (rows,) = agent.rows()
        found.append(rows.steps)
    return found


@counted
def test_steps_come_with_what_their_thread_waited_once_it_has_been_looked_at_before(agent, monitor):
    first, *later = run(monitor, agent)
    # GIVEN nobody had looked before the first steps THEN nothing is known of them
    assert first.scheduled_B2 is None
    # AND of those after a look it is
    for steps in later:
        for rank in (0, 1):
            waited_B2 = steps.scheduled_B2[steps.rank_B == rank]
            # (the first one of a turn began in the turn before, which the other rank's look may have missed)
            assert np.isfinite(waited_B2[1:]).all()
            assert (waited_B2[1:] >= 0.0).all()


@counted
def test_readings_are_kept_and_only_where_steps_have_come(agent, monitor, places):
    run(monitor, agent, turns=2)
    sizes = [path.stat().st_size for path in sorted(places["steps"].glob("*.scheduling"))]
    assert len(sizes) == 2
    for _ in range(5):
        agent.rows()
    assert [path.stat().st_size for path in sorted(places["steps"].glob("*.scheduling"))] == sizes
    with open_ring(find_rings(places["rings"])[0]) as ring:
        assert kept_of(places["steps"], ring.info).info == ring.info


def test_a_kernel_that_counts_nothing_is_said_once_and_the_steps_go_without(
    agent, monitor, places, monkeypatch, caplog
):
    monkeypatch.setattr(scheduling, "parsed", lambda *_: None)
    assert all(steps.scheduled_B2 is None for steps in run(monitor, agent))
    assert [record.message.count("not known") for record in caplog.records] == [1]
    assert not list(places["steps"].glob("*.scheduling"))


def test_threads_that_are_not_to_be_seen_are_said_once(agent, monitor, monkeypatch, caplog):
    def unseen(info):
        raise FileNotFoundError(info.pid)

    # GIVEN a trainer in another namespace of processes
    monkeypatch.setattr(scheduling, "TrainingThread", unseen)
    ranks = monitor(0), monitor(1)
    train(*ranks, steps=2)
    agent.rows()
    # THEN as long as it may have ended nothing is said
    assert not caplog.records
    # WHEN it goes on THEN it is, once
    for _ in range(3):
        train(*ranks, steps=2)
        (rows,) = agent.rows()
        assert rows.steps.scheduled_B2 is None
    assert [record.message.count("not seen in /proc") for record in caplog.records] == [1]


@counted
def test_a_disk_that_takes_no_readings_costs_their_keeping_alone(agent, monitor, monkeypatch, caplog):
    def full(log, reading):
        raise RingError(f"{log.path}: cannot be written: No space left on device")

    monkeypatch.setattr(SchedulingLog, "add", full)
    *_, last = run(monitor, agent)
    assert last.scheduled_B2 is not None
    assert [record.message.count("No space left") for record in caplog.records] == [1, 1]


@counted
def test_a_thread_is_known_by_when_its_process_started(monitor, places):
    monitor(0)
    with open_ring(find_rings(places["rings"])[0]) as ring:
        info = ring.info
    thread = TrainingThread(info)
    assert thread.read()[1] > 0
    thread.close()
    thread.close()
    # GIVEN a pid that another process has by now, or nobody, THEN it is not taken for the trainer
    for other in (replace(info, pid_start_ticks=info.pid_start_ticks - 1), replace(info, pid=2**22 + 1)):
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(OSError, match=r"not the one that records|No such file"):
            TrainingThread(other)
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_main_thread_that_does_not_run_is_not_the_one_that_trains(agent, monitor, monkeypatch):
    # GIVEN steps that another thread takes, while the main one waits for it
    monkeypatch.setattr(scheduling, "parsed", lambda *_: (5_000_000, 7_000_000, 3))
    # THEN nothing is said of its waits
    assert all(steps.scheduled_B2 is None for steps in run(monitor, agent))


def test_a_process_that_has_ended_is_left(agent, monitor, monkeypatch, caplog):
    ranks = monitor(0), monitor(1)
    train(*ranks, steps=2)
    agent.rows()

    def ended(thread):
        raise ProcessLookupError(3, "No such process")

    # GIVEN processes that have ended, of which some steps are still to be read
    monkeypatch.setattr(TrainingThread, "read", ended)
    for _ in range(3):
        train(*ranks, steps=2)
        (rows,) = agent.rows()
        # THEN these go without
        assert rows.steps.scheduled_B2 is None
    assert not caplog.records


@counted
def test_a_run_read_from_disk_has_what_its_steps_had_when_they_came(agent, monitor, places, tmp_path):
    # GIVEN a run whose steps have come in several turns
    kept = run_at(tmp_path / "run").directory
    shape, live = Shape(4, 4, 0), Gatherer(StageSchema.closed(("data", "backward"), ("backward",)), 2, Shape(4, 4, 0))
    for steps in run(monitor, agent):
        live.add(steps)
    # WHEN it is read from what the agent has kept
    for path in places["steps"].iterdir():
        (kept.steps / path.name).write_bytes(path.read_bytes())
    windows = list(load_recording(kept.path).windows(shape))
    # THEN its windows have the same waits
    assert len(windows) == 3
    for mine, its in zip(live.ready(ended=True), windows, strict=True):
        for name in ("queued_NR", "preempted_NR"):
            one, other = getattr(mine, name), getattr(its, name)
            assert (one is None) == (other is None) == (mine.first_step == 0)
            if one is not None:
                np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-12)
    # AND a run of before they were kept goes without
    for path in kept.steps.glob("*.scheduling"):
        path.unlink()
    assert [window.queued_NR for window in load_recording(kept.path).windows(shape)] == [None] * 3
