"""What an agent reads of its ranks' training threads, from outside, and what it does where nothing is to be read."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sftriage.agent import counting
from sftriage.agent.counting import (
    MAX_HIDDEN,
    SLOWLY_NS,
    TICK_NS,
    Descriptors,
    RankCounters,
    parsed,
    pressure,
    retransmissions,
    schedstat,
    stat,
    switches,
    throttled,
    transfers,
)
from sftriage.base.process import cgroups, start_ticks
from sftriage.model.windows import COUNTERS, OF_THREAD, PLACE, StageSchema
from sftriage.runs.recordings import load_recording
from sftriage.trainer.executor import COUNTERS_SOCKET, COUNTERS_TOKEN, STACK_REQUESTS
from sftriage.trainer.layout import COUNTERS_MAGIC, OpenFile, find_rings
from sftriage.windows.decoding import UNKNOWN
from sftriage.windows.gather import Gatherer, Shape
from sftriage.windows.rings import Ring
from tests.integration.processes import limited_cgroup, wait_until
from tests.scenario import info_of, kept_of, run_at
from tests.unit.agent.test_agent import train

STATUS = b"Name:\tpython\nvoluntary_ctxt_switches:\t150\nnonvoluntary_ctxt_switches:\t12\n"
STAT = b"41 (a) S) T 1 1 1 0 -1 4194304 100 7 3 8 50 25" + b" 0" * 26 + b" 4 0 0\n"
IO = b"rchar: 9\nwchar: 9\nsyscr: 1\nsyscw: 1\nread_bytes: 4096\nwrite_bytes: 512\ncancelled_write_bytes: 0\n"
V1 = b"nr_periods 22\nnr_throttled 18\nthrottled_time 454716899\n"
V2 = b"usage_usec 9\nuser_usec 5\nsystem_usec 4\nnr_periods 2\nnr_throttled 1\nthrottled_usec 7000\n"
PSI = b"some avg10=0.83 avg60=0.86 avg300=1.28 total=1571477\nfull avg10=0.00 avg60=0.00 avg300=0.24 total=54\n"
SNMP = b"Ip: Forwarding\nIp: 1\nTcp: InSegs OutSegs RetransSegs InErrs\nTcp: 9 8 77 0\nUdp: InDatagrams\nUdp: 3\n"


@pytest.mark.parametrize(
    ("parse", "content", "found"),
    [
        (schedstat, b"5000 300 7\n", [5000, 300]),
        # A kernel that does not count says so with zeros: also of a thread that has run.
        (schedstat, b"0 0 0\n", [-1, -1]),
        (schedstat, b"0 661623 1\n", [0, 661623]),
        (schedstat, b"", [-1, -1]),
        (schedstat, b"5000 300\n", [-1, -1]),
        (schedstat, b"a b c\n", [-1, -1]),
        (schedstat, b"5000 -300 7\n", [-1, -1]),
        (schedstat, b"99999999999999999999 300 7\n", [-1, -1]),
        (switches, STATUS, [12, 150]),
        (switches, b"Name:\tpython\n", [-1, -1]),
        # A process may be called anything.
        (switches, b"Name:\tnonvoluntary_ctxt_switches:\t9\n" + STATUS, [12, 150]),
        (partial(stat, True), STAT, [100, 3, 25 * TICK_NS, 4 * TICK_NS, 1]),
        # What waits for disks take is not counted by every kernel, which writes zeros then.
        (partial(stat, False), STAT.replace(b" T ", b" D "), [100, 3, 25 * TICK_NS, -1, 0]),
        # A traced thread is stopped for a moment, and continues at once.
        (partial(stat, True), STAT.replace(b" T ", b" t "), [100, 3, 25 * TICK_NS, 4 * TICK_NS, 0]),
        (partial(stat, True), b"41 (python) S 1", [-1] * 5),
        (transfers, IO, [4096, 512]),
        (transfers, b"rchar: 9\n", [-1, -1]),
        (throttled, V1, [454716899]),
        (throttled, V2, [7_000_000]),
        (throttled, b"throttled_usec 7\n", [7000]),
        # A cgroup without a controller of CPU time has no such line.
        (throttled, b"usage_usec 9\n", [-1]),
        (pressure, PSI, [1_571_477_000]),
        (pressure, b"", [-1]),
        (retransmissions, SNMP, [77]),
        (retransmissions, b"Ip: 1\n", [-1]),
    ],
)
def test_what_the_kernel_writes_is_read_or_is_unknown(parse, content, found):
    assert list(parsed(parse, content, len(found))) == found


def here(parse, path, n_values):
    """What this machine's kernel says of this process; unknown where it has no such file."""
    return list(parsed(parse, Path(path).read_bytes() if Path(path).exists() else b"", n_values))


counted = pytest.mark.skipif(
    here(schedstat, "/proc/self/schedstat", 2)[0] < 0,
    reason="this kernel does not count how long threads wait for a CPU",
)


def run(monitor, agent, turns=3, steps=4):
    """Steps of two ranks, read in several turns, in which the thread runs; the steps of each."""
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
def test_steps_have_wait_times_after_the_first_reading_of_their_thread(agent, monitor):
    first, *later = run(monitor, agent)
    # GIVEN no reading before the first steps THEN nothing is known of them
    assert first.counted_BC is None
    # AND of those after a look it is
    for steps in later:
        for rank in (0, 1):
            waited_B2 = steps.counted_BC[steps.rank_B == rank][:, [PLACE["queued_s"], PLACE["preempted"]]]
            # (the first one of a turn began in the turn before, which the other rank's look may have missed)
            assert np.isfinite(waited_B2[1:]).all()
            assert (waited_B2[1:] >= 0.0).all()


@counted
def test_steps_have_the_garbage_that_their_trainer_collected(agent, monitor):
    ranks = monitor(0), monitor(1)
    for _ in range(3):
        train(*ranks, steps=4)
        gc.collect()
        train(*ranks, steps=1)
        sum(range(2_000_000))
        (rows,) = agent.rows()
    # (both monitors are of this process, and count what it collects)
    collected_s_B = rows.steps.counted_BC[:, PLACE["collected_s"]]
    assert np.nansum(collected_s_B) > 0.0
    assert (rows.steps.counted_BC[1:, PLACE["compiled_s"]] == 0.0).any()


@counted
def test_readings_are_kept_and_only_where_steps_have_come(agent, monitor, places):
    run(monitor, agent, turns=2)
    sizes = [path.stat().st_size for path in sorted(places["steps"].glob("*.counters"))]
    assert len(sizes) == 2
    for _ in range(5):
        agent.rows()
    assert [path.stat().st_size for path in sorted(places["steps"].glob("*.counters"))] == sizes
    with Ring(find_rings(places["rings"])[0]) as ring:
        assert kept_of(places["steps"], ring.info) is not None
        path = places["steps"] / ring.info.file_name("counters")
        with OpenFile(path, os.O_RDONLY) as file:
            assert file.checked_header(COUNTERS_MAGIC).info == ring.info


def test_a_kernel_that_counts_nothing_is_reported_once(agent, monitor, monkeypatch, caplog):
    monkeypatch.setitem(counting.KINDS, "schedstat", (("run_s", "queued_s"), lambda _: (), 0))
    *_, last = run(monitor, agent)
    # THEN what became of the process is known all the same
    known = {COUNTERS[place] for place in np.flatnonzero(np.isfinite(last.counted_BC).any(axis=0))}
    assert "stopped_s" in known
    assert not known & set(OF_THREAD)
    assert [record.message.count("are unknown") for record in caplog.records] == [1]


def opened_here() -> list[str]:
    """The files that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(descriptor.readlink()))
    return found


@pytest.fixture
def hidden(monkeypatch):
    """Trainers in another PID namespace."""

    def unobserved(process, pid):
        raise FileNotFoundError(pid)

    monkeypatch.setattr(counting, "files_of_thread", unobserved)


@pytest.mark.usefixtures("hidden")
def test_hidden_threads_that_send_nothing_are_reported_once(agent, monitor, places, caplog):
    # GIVEN a trainer that is hidden, and does not take requests
    ranks = monitor(0), monitor(1)
    for requests in places["rings"].glob("*.asks"):
        requests.unlink()
    train(*ranks, steps=2)
    agent.rows()
    # THEN there is no warning while it may have ended, or may yet send its files
    for _ in range(MAX_HIDDEN - 1):
        train(*ranks, steps=2)
        (rows,) = agent.rows()
        assert rows.steps.counted_BC is None
    assert not caplog.records
    # WHEN it still sends none THEN there is one
    for _ in range(3):
        train(*ranks, steps=2)
        (rows,) = agent.rows()
        assert rows.steps.counted_BC is None
    assert [record.message.count("cannot see the trainers' threads in /proc") for record in caplog.records] == [1]


@pytest.mark.parametrize(("text", "files"), [(b"stat nonsense", 2), (b"stat", 2), (b"\xff", 1), (b"", 1), (b"stat", 0)])
def test_files_that_are_none_of_counters_are_refused_and_closed(tmp_path, monkeypatch, text, files):
    # GIVEN a trainer of another version
    monkeypatch.chdir(tmp_path)
    info = info_of(0)
    os.mkfifo(name := info.file_name(STACK_REQUESTS))
    pipe = os.open(name, os.O_RDWR)
    descriptors = Descriptors(tmp_path, info)
    assert os.read(pipe, 99) == COUNTERS_TOKEN + b"\n"
    with pytest.raises(BlockingIOError):
        descriptors.received()
    # WHEN it sends something else
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(info.file_name(COUNTERS_SOCKET))
        socket.send_fds(channel, [text or b" "], [pipe] * files)
        with pytest.raises(OSError, match=f"has sent {files} files"):
            descriptors.received()
    # THEN nothing of it stays open
    descriptors.close()
    os.close(pipe)
    assert str(tmp_path / name) not in opened_here()


@counted
@pytest.mark.usefixtures("hidden")
def test_a_hidden_trainer_sends_its_files(agent, monitor, places, caplog):
    ranks, known = (monitor(0), monitor(1)), set[str]()

    def counts() -> bool:
        train(*ranks, steps=2)
        for rows in agent.rows():
            if rows.steps.counted_BC is not None:
                known.update(COUNTERS[at] for at in np.flatnonzero(np.isfinite(rows.steps.counted_BC).any(axis=0)))
        return {"run_s", "queued_s", "minor_faults", "preempted"} <= known

    wait_until(counts)
    # AND their sockets are gone, and the files are open until the agent ends
    assert list(places["rings"].glob("*.socket")) == []
    assert not caplog.records
    assert any(path.endswith("/schedstat") for path in opened_here())
    agent.close()
    assert not any(path.endswith("/schedstat") for path in opened_here())


@counted
def test_a_thread_is_known_by_when_its_process_started(monitor, places):
    monitor(0)
    with Ring(find_rings(places["rings"])[0]) as ring:
        info = ring.info
    thread = RankCounters(info)
    assert thread.read()[1 + PLACE["run_s"]] > 0
    thread.close()
    thread.close()
    # GIVEN a pid of another process, or of none, THEN it is not taken for the trainer
    for other in (replace(info, pid_start_ticks=info.pid_start_ticks - 1), replace(info, pid=2**22 + 1)):
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(OSError, match=r"not the recording one|No such file"):
            RankCounters(other).read()
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_main_thread_that_does_not_run_is_not_the_one_that_trains(agent, monitor, monkeypatch):
    # GIVEN steps that another thread takes, while the main one waits for it
    monkeypatch.setitem(counting.KINDS, "schedstat", (("run_s", "queued_s"), lambda _: (5_000_000, 7_000_000), 0))
    *_, last = run(monitor, agent)
    assert np.isnan(last.counted_BC[:, : len(OF_THREAD)]).all()


def test_a_process_that_has_ended_is_left(agent, monitor, monkeypatch, caplog):
    ranks = monitor(0), monitor(1)
    train(*ranks, steps=2)
    agent.rows()

    def ended(thread):
        raise ProcessLookupError(3, "No such process")

    # GIVEN processes that have ended, of which some steps are still to be read
    monkeypatch.setattr(RankCounters, "read", ended)
    for _ in range(3):
        train(*ranks, steps=2)
        (rows,) = agent.rows()
        assert rows.steps.counted_BC is None
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
    assert len(windows) == 3
    for mine, its in zip(live.ready(ended=True), windows, strict=True):
        for name in ("queued_s", "preempted", "stopped_s"):
            one, other = mine.counted(name), its.counted(name)
            assert (one is None) == (other is None) == (mine.first_step == 0)
            if one is not None:
                np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-12)
    # AND a run of before they were kept goes without
    for path in kept.steps.glob("*.counters"):
        path.unlink()
    assert [window.counted_NRC for window in load_recording(kept.path).windows(shape)] == [None] * 3


CGROUPS = {
    # (what /proc/PID/cgroup says, what is mounted) -> whose cpu.stat is read
    "version 2": ("0::/kubepods/pod1/c1\n", ["kubepods/pod1/c1"], ["kubepods/pod1/c1"]),
    "version 1": ("5:memory:/a\n3:cpu,cpuacct:/b\n", ["cpu,cpuacct/b", "memory/a"], ["cpu,cpuacct/b"]),
    "version 1, mounted by its own name": ("1:cpu:/b\n0::/\n", ["cpu/b", "unified"], ["cpu/b", "unified"]),
    "both": ("2:cpu:/b\n0::/u\n", ["cpu/b", "unified/u"], ["cpu/b", "unified/u"]),
    "one that is not there": ("0::/gone\n", ["other"], []),
    "none": ("", [""], []),
}


@pytest.mark.parametrize(("content", "mounted", "found"), CGROUPS.values(), ids=CGROUPS)
def test_the_cgroup_of_a_process_is_found(tmp_path, content, mounted, found):
    process, top = tmp_path / "proc", tmp_path / "cgroup"
    process.mkdir()
    (process / "cgroup").write_text(content)
    for folder in mounted:
        (top / folder).mkdir(parents=True, exist_ok=True)
        (top / folder / "cpu.stat").write_bytes(V1)
    assert [str(one.relative_to(top)) for one in cgroups(process, top)] == found


@pytest.mark.parametrize(
    ("content", "controller"), [("0::/../c2\n", ""), ("4:cpu,cpuacct:/kubepods/pod1/c2\n", "cpu,cpuacct")]
)
def test_a_process_in_another_container_is_read_in_its_own_view(tmp_path, content, controller):
    # GIVEN a trainer in a container: from here its cgroup is outside, or has the host's path; there it is the root
    process, top = tmp_path / "proc", tmp_path / "cgroup"
    own = process / "root" / str(top).lstrip("/") / controller
    for folder in (top / controller, own):
        folder.mkdir(parents=True)
        (folder / "cpu.stat").write_bytes(V2)
    (process / "cgroup").write_text(content)
    assert [one.resolve() for one in cgroups(process, top)] == [own]


@pytest.fixture
def spinning():
    """A process that runs all the time, and the ring's info that it would have."""
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as process:
        yield process, info_of(0, pid=process.pid, pid_start_ticks=start_ticks(process.pid))
        process.kill()


def reads_until(counters, grown, deadline_s=20.0):
    """The first two readings between which it has grown, or the last two before the deadline."""
    until_s, (before, after) = time.monotonic() + deadline_s, (counters.read(), counters.read())
    while not grown(before, after) and time.monotonic() < until_s:
        time.sleep(0.01)
        after = counters.read()
    return before, after


def since(before, after, name):
    return (after[1 + PLACE[name]] - before[1 + PLACE[name]]) * 1e-9


def test_a_stopped_process_is_detected(spinning):
    process, info = spinning
    counters = RankCounters(info)
    before, after = reads_until(counters, lambda one, other: since(one, other, "run_s") > 0)
    assert since(before, after, "stopped_s") == 0.0
    process.send_signal(signal.SIGSTOP)
    before, after = reads_until(counters, lambda one, other: since(one, other, "stopped_s") > 0)
    # THEN it counts as stopped during all readings
    before, after = after, reads_until(counters, lambda *_: True)[1]
    assert since(before, after, "stopped_s") == pytest.approx((after[0] - before[0]) * 1e-9)
    process.send_signal(signal.SIGCONT)
    counters.close()


@pytest.fixture
def limited():
    with limited_cgroup() as cgroup:
        yield cgroup


def test_a_throttled_process_is_detected(limited, spinning, monkeypatch):
    process, info = spinning
    counters = RankCounters(info)
    counters.read()
    # WHEN it is put under a limit, and some time later read again
    (limited / "cgroup.procs").write_text(str(process.pid))
    monkeypatch.setattr(counting, "monotonic_ns", lambda: time.monotonic_ns() + SLOWLY_NS)
    # (at that moment nothing is known of the cgroup that it is in now)
    assert counters.read()[1 + PLACE["throttled_s"]] == UNKNOWN
    # THEN it is known how long that keeps it from running
    before, after = reads_until(counters, lambda one, other: since(one, other, "throttled_s") > 0)
    assert before[1 + PLACE["throttled_s"]] >= 0
    assert since(before, after, "throttled_s") > 0.0
    # AND that it has ended
    process.kill()
    process.wait()
    with pytest.raises(ProcessLookupError):
        counters.read()
    counters.close()
