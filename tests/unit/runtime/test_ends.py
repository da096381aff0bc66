"""What is collected of how a job's ranks ended, from real rings, notes, and files of cgroups as the kernel has them."""

import os

import pytest

from sftriage.base.process import MemoryCgroups, memory_cgroups
from sftriage.runtime.ends import JobEnds, KernelLog, ends_in
from sftriage.trainer.ends import ends_file
from sftriage.trainer.monitor import Monitor
from tests.integration.processes import kill, wait_until


@pytest.fixture
def forked(tmp_path):
    """Run a function of a monitor as a rank in a forked process to its end; return its pid."""
    pids = []

    def forked(act, rank=0, world_size=1):
        pid = os.fork()
        if pid == 0:
            try:
                act(Monitor(rank=rank, world_size=world_size, rings=tmp_path))
            finally:
                os._exit(7)
        pids.append(pid)
        os.waitpid(pid, 0)
        pids.remove(pid)
        return pid

    yield forked
    kill(*pids)


def exits_in_data(monitor):
    with monitor.step(41), monitor.stage("data"):
        os._exit(3)


def exits_after_a_step(monitor):
    with monitor.step(41), monitor.stage("data"):
        pass
    os._exit(3)


def leaves_a_step(monitor):
    with monitor.step(41), monitor.stage("data"):
        raise ValueError


def exits_at_once(_):
    os._exit(3)


@pytest.mark.parametrize(
    ("act", "step", "stage"),
    [(exits_in_data, 41, "data"), (exits_after_a_step, 41, None), (leaves_a_step, 41, ""), (exits_at_once, -1, None)],
)
def test_a_ring_has_the_stage_in_which_its_rank_ended(tmp_path, forked, capsys, act, step, stage):
    pid = forked(act)
    ((end, world_size),) = ends_in(tmp_path)
    assert (end.pid, end.step, end.stage, end.attempt, world_size) == (pid, step, stage, 0, 1)
    assert (end.alive, end.status, end.time_s) == (False, None, None)


def test_the_notes_about_a_rank_count_as_far_as_they_are_valid(tmp_path, forked):
    path = ends_file(tmp_path, forked(exits_in_data))
    with path.open("a") as file:
        file.write(
            '{"time_s": 5.0, "error": "ValueError", "message": "no", "chain": ["a"], "place": ["f", "a.py", 3]}\n'
        )
        file.write('{"time_s": 6.0, "worker": 77, "status": -9}\nnot JSON\n{"worker": "x", "status": 0}\n[]\n')
        file.write('{"time_s": 7.0, "status": 1}\n{"time_s": 8.0, "sta')
    ((end, *_),) = ends_in(tmp_path)
    assert (end.time_s, end.error, end.message, end.chain, end.status) == (5.0, "ValueError", "no", ("a",), 1)
    assert (end.place.line, dict(end.workers), end.sent) == (3, {77: -9}, False)


def test_a_rank_that_has_recorded_nothing_is_known_by_its_notes_alone(tmp_path):
    ends_file(tmp_path, 4711).write_text(
        '{"time_s": 1.0, "rank": 1, "attempt": 2, "world_size": 4}\n{"time_s": 2.0, "status": 1}\n'
    )
    ends_file(tmp_path, 4712).write_text('{"time_s": 1.0, "rank": "x"}\n')
    ((end, world_size),) = ends_in(tmp_path)
    assert (end.rank, end.pid, end.step, end.status, end.attempt, world_size) == (1, 4711, -1, 1, 2, 4)


def test_the_end_of_a_rank_has_a_time_though_its_parent_reports_nothing(tmp_path):
    # GIVEN a rank that is known
    ends = JobEnds(tmp_path)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        Monitor(rank=1, world_size=2, rings=tmp_path)
        os.read(read, 1)
        os._exit(7)
    wait_until(lambda: ends_file(tmp_path, pid) in ends._known)
    # WHEN it ends
    os.close(write)
    wait_until(lambda: ends.of_host().ranks[0].time_s)
    ends.close()
    os.close(read)
    os.waitpid(pid, 0)
    ((end, _),) = ends_in(tmp_path)
    assert (end.rank, end.alive, end.status) == (1, False, None)


def test_each_attempt_of_a_job_has_its_own_first_rank(tmp_path):
    for pid, attempt, status in ((1, 0, 3), (2, 0, -15), (3, 1, -9), (4, 1, -15)):
        begun = f'{{"time_s": 1.0, "rank": {pid % 2}, "attempt": {attempt}, "world_size": 2}}\n'
        sent = '{"time_s": 2.0, "sent": 15}\n' if status == -15 else ""
        ends_file(tmp_path, pid).write_text(f'{begun}{sent}{{"time_s": 3.0, "status": {status}}}\n')
    ends = JobEnds(tmp_path)
    first, second = ends.broken()
    ends.close()
    assert (first.attempt, first.restarted, first.first[0].ranks, first.first[0].status) == (0, True, (1,), 3)
    assert (second.attempt, second.restarted, second.first[0].ranks, second.first[0].status) == (1, False, (1,), -9)


def cgroup(folder, kills, limit=None, overs=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.events").write_text(f"low 0\nhigh 0\nmax 90\noom {overs}\noom_kill {kills}\noom_group_kill 0\n")
    (folder / "memory.max").write_text(f"{'max' if limit is None else limit}\n")


def test_a_kill_for_lack_of_memory_counts_from_the_start_on_in_our_own_cgroup(tmp_path):
    job, slice_ = tmp_path / "slice" / "job", tmp_path / "slice"
    cgroup(slice_, 5, 8 << 30)
    cgroup(job, 1)
    found = MemoryCgroups((job, slice_))
    # GIVEN a kill beside us
    cgroup(slice_, 6, 8 << 30)
    assert not found.killed()
    # WHEN one of ours is killed, as the cgroup around it has reached its limit
    cgroup(job, 2)
    cgroup(slice_, 7, 8 << 30, overs=1)
    assert (found.killed(), found.limit_bytes()) == (True, 8 << 30)


def test_a_kill_without_a_limit_is_that_of_the_host(tmp_path):
    cgroup(tmp_path, 0)
    found = MemoryCgroups((tmp_path,))
    cgroup(tmp_path, 1)
    assert (found.killed(), found.limit_bytes()) == (True, None)


def test_both_versions_of_cgroups_are_found(tmp_path):
    mounted, process = tmp_path / "cgroup", tmp_path / "self"
    process.mkdir()
    # GIVEN version 2
    cgroup(mounted / "slice" / "job", 0)
    (process / "cgroup").write_text("0::/slice/job\n")
    assert [*memory_cgroups(process, mounted)] == [mounted / "slice" / "job"]
    # GIVEN version 1
    (mounted / "memory" / "job").mkdir(parents=True)
    (mounted / "memory" / "job" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (mounted / "memory" / "job" / "memory.limit_in_bytes").write_text("1048576\n")
    (process / "cgroup").write_text("4:memory:/job\n1:cpu:/job\n")
    assert [*memory_cgroups(process, mounted)] == [mounted / "memory" / "job"]
    found = MemoryCgroups((mounted / "memory" / "job",))
    (mounted / "memory" / "job" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert (found.killed(), found.limit_bytes()) == (True, 1 << 20)


def test_the_kernels_log_names_the_processes_that_it_has_killed_since_the_start(tmp_path):
    path = tmp_path / "kmsg"
    path.write_text("3,1,1,-;Out of memory: Killed process 11 (python) total-vm:1kB\n")
    log = KernelLog(path)
    with path.open("a") as file:
        file.write("3,2,2,-;Memory cgroup out of memory: Killed process 12 (python) total-vm:1kB, anon-rss:1kB\n")
    assert log.killed() == {12}
    log.close()
    # AND none where it cannot be read
    assert KernelLog(tmp_path / "missing").killed() == frozenset()
