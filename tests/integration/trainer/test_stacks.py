"""Stacks that are sampled in real processes: DataLoader workers sample themselves, also where little is allowed."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from sftriage.base.process import start_ticks
from sftriage.reduce.samples import read_samples, spots
from sftriage.trainer import sampler
from sftriage.trainer.sampler import WORKERS, StackSampler
from tests import needs
from tests.integration.processes import wait_until

DEADLINE_S = 30.0
SLEEPS_S = 0.002


class Slow(Dataset):
    """Samples that take their time: the process that makes them, and its thread of ours (0 where there is none)."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.stand_here()
        ours = [thread.native_id for thread in threading.enumerate() if thread.name == "sftriage-samples"]
        return torch.tensor([os.getpid(), *(ours or [0])])

    def stand_here(self):
        time.sleep(SLEEPS_S)


class Forks(Slow):
    """Each worker makes a child of its own, which outlives it until it is killed."""

    def __getitem__(self, index):
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
        return torch.tensor([os.getpid(), child])


@pytest.fixture(autouse=True)
def reached():
    """Workers are reached, and all is let go of afterwards."""
    WORKERS.attend()
    yield
    WORKERS.leave()
    assert not WORKERS._channels


def loader(dataset=None, **options):
    options = {"batch_size": 4, "num_workers": 2, "multiprocessing_context": "fork", **options}
    return DataLoader(dataset or Slow(), **options)


class Capture:
    def __init__(self, path):
        self._path = path
        self._sampler = StackSampler(lambda: (7, "data", 1), period_s=0.001)

    def __enter__(self):
        self._sampler.start()
        return self

    def __exit__(self, *_):
        self._sampler.stop()

    def read(self):
        assert self._sampler.keep(self._path, 1 << 24) == ""
        return read_samples(self._path)


@pytest.fixture
def ended_in_peace():
    """torch has a worker that is killed raise in the main thread, wherever that is."""
    before = signal.getsignal(signal.SIGCHLD)
    yield lambda: signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, before)


@pytest.fixture
def capture(tmp_path):
    numbers = iter(range(9))
    return lambda: Capture(tmp_path / f"{next(numbers)}.json")


def stands(samples, worker):
    """How many of a worker's samples found it at the line at which it sleeps."""
    met = [{samples.frames[frame].function for frame in stack} for stack in worker.threads[0].stacks_N]
    return sum(any(function.endswith("stand_here") for function in functions) for functions in met)


def threads_of(batch):
    """Our thread of the process that made a batch, as the kernel has it."""
    pid, thread = map(int, batch[0][:2])
    return pid, Path(f"/proc/{pid}/task/{thread}/status")


def field(status, name):
    return next(line.split()[1] for line in status.read_text().splitlines() if line.startswith(name))


def test_workers_that_last_are_sampled_and_idle_at_all_other_times(capture, tmp_path):
    # GIVEN a loader whose workers last, with a thread of ours each that sleeps in the kernel, whatever signal comes
    batches = loader(persistent_workers=True)
    first = list(batches)
    asleep = dict(threads_of(batch) for batch in first)
    assert len(asleep) == 2
    woken = {pid: field(status, "voluntary_ctxt") for pid, status in asleep.items()}
    assert all(int(field(status, "SigBlk"), 16) & 1 << signal.SIGTERM - 1 for status in asleep.values())
    list(batches)
    assert woken == {pid: field(status, "voluntary_ctxt") for pid, status in asleep.items()}
    with capture() as captured:
        list(batches)
    samples = captured.read()
    # THEN both were found where they are, by their own clocks
    assert [worker.number for worker in samples.workers] == [0, 1]
    assert {worker.pid for worker in samples.workers} == set(asleep)
    for worker in samples.workers:
        assert stands(samples, worker) > 0
        assert list(worker.time_ns_W) == sorted(worker.time_ns_W)
        assert list(worker.threads[0].run_ns_N) == sorted(worker.threads[0].run_ns_N)
        # AND what was its trainer's when it was forked is in no stack
        assert {samples.frames[stack[0]].function for stack in worker.threads[0].stacks_N if stack} == {"_worker_loop"}
    # AND they are profiles of the same document, as long as their weights say
    document = json.loads((tmp_path / "0.json").read_text())
    for worker in samples.workers:
        name = f"DataLoader worker {worker.number} (pid {worker.pid})"
        (profile,) = (profile for profile in document["profiles"] if profile["name"] == name)
        assert sum(profile["weights"]) == profile["endValue"] - profile["startValue"]
    # AND a second capture has them again, and nothing of the first
    with capture() as captured:
        list(batches)
    again = captured.read()
    assert [worker.number for worker in again.workers] == [0, 1]
    assert again.workers[0].time_ns_W[0] > samples.workers[0].time_ns_W[-1]
    # AND with the last user their threads end, and they work on
    WORKERS.leave()
    wait_until(lambda: not any(status.exists() for status in asleep.values()))
    assert len(list(batches)) == 10
    WORKERS.attend()


def test_workers_of_one_epoch_hand_over_their_samples_at_their_end(capture):
    # GIVEN workers of an epoch each WHEN two epochs are captured
    batches = loader()
    with capture() as captured:
        pids = {threads_of(batch)[0] for _ in range(2) for batch in batches}
    samples = captured.read()
    # THEN all four are there, though they were forked in the middle, and two had ended before it was over
    assert len(pids) == 4
    assert {worker.pid for worker in samples.workers} == pids
    assert all(stands(samples, worker) for worker in samples.workers)
    # AND those that are gone leave no file open, once there are others
    list(batches)
    assert len(WORKERS._channels) == 2


def test_a_worker_that_is_killed_costs_its_samples_alone(capture, ended_in_peace):
    batches = iter(loader(persistent_workers=True))
    ended_in_peace()
    with capture() as captured:
        (pid, _), (other, _) = threads_of(next(batches)), threads_of(next(batches))
        # WHEN one of two is killed in the middle of a capture
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: start_ticks(pid) is None)
    samples = captured.read()
    # THEN the other's samples are there
    assert [worker.pid for worker in samples.workers] == [other]
    assert samples.not_sampled == ("it has ended",)


def test_a_stopped_worker_delays_nothing_and_answers_the_next_time(capture, monkeypatch):
    monkeypatch.setattr(sampler, "ANSWER_S", 0.05)
    batches = loader(persistent_workers=True)
    epoch = iter(batches)
    pid, _ = threads_of(next(epoch))
    # GIVEN a worker that is stopped WHEN a capture begins and ends
    os.kill(pid, signal.SIGSTOP)
    try:
        with capture() as captured:
            time.sleep(0.01)
        samples = captured.read()
    finally:
        os.kill(pid, signal.SIGCONT)
    # THEN that is said of it, and the other's samples are there
    assert [worker.pid == pid for worker in samples.workers] == [False]
    assert samples.not_sampled == ("it did not answer in time, or began before the recorder",)
    # AND what it answers late is not taken for what it answers to the next
    monkeypatch.setattr(sampler, "ANSWER_S", DEADLINE_S)
    list(epoch)
    with capture() as captured:
        list(batches)
    samples = captured.read()
    assert len(samples.workers) == 2
    assert all(stands(samples, worker) for worker in samples.workers)


def test_the_samples_of_an_unclaimed_capture_are_dropped(capture):
    # GIVEN a capture that failed: it was stopped and never kept WHEN the next one ends
    batches = loader(persistent_workers=True)
    list(batches)
    with capture():
        list(batches)
    with capture() as captured:
        list(batches)
    # THEN it has its own samples
    began_ns = captured._sampler._stacks._began_ns
    assert [worker.time_ns_W[0] > began_ns for worker in captured.read().workers] == [True, True]


@pytest.fixture
def server_ended():
    """The process that forkserver starts others from is gone with the test: it would outlive this one, and keep its
    output open."""
    yield
    server = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_are_listed_as_missing(capture, server_ended, method):
    batches = iter(loader(persistent_workers=True, multiprocessing_context=method, num_workers=1))
    with capture() as captured:
        next(batches)
    samples = captured.read()
    assert samples.workers == ()
    assert samples.not_sampled == (f"it was not forked, but started by {method}",)


def test_a_child_of_a_worker_is_not_sampled(ended_in_peace):
    # GIVEN a worker that has made a child, which lives on when the worker is killed
    batches = iter(loader(Forks(), num_workers=1, batch_size=1, prefetch_factor=1))
    ended_in_peace()
    pid, child = map(int, next(batches)[0])
    try:
        assert len(list(Path(f"/proc/{child}/task").iterdir())) == 1
        os.kill(pid, signal.SIGKILL)
        # THEN the trainer sees that the worker is gone
        (channel,) = WORKERS._channels
        wait_until(channel.over)
    finally:
        os.kill(child, signal.SIGKILL)


def test_other_forks_carry_no_socket_or_thread():
    # GIVEN processes that are no workers of a DataLoader, while there are some THEN they have one thread, no socket
    batches = loader(persistent_workers=True)
    list(batches)
    process = multiprocessing.get_context("fork").Process(target=look_at_itself)
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    child = os.fork()
    if not child:
        look_at_itself()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def look_at_itself():
    try:
        assert len(list(Path("/proc/self/task").iterdir())) == 1
        assert not WORKERS._channels
        assert WORKERS._own is None
    except BaseException:
        os._exit(1)


FORKS = """
    import os, sys, threading
    from pathlib import Path
    from sftriage.trainer.sampler import WORKERS, StackSampler
    WORKERS.attend()
    busy = threading.Thread(target=lambda: [sum(range(100)) for _ in iter(int, 1)], daemon=True)
    busy.start()
    sampler = StackSampler(lambda: (0, "data", 0), period_s=0.0001)
    sampler.start()
    for _ in range(40):
        child = os.fork()
        if not child:
            here = (f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd"))
            os._exit(any("schedstat" in os.readlink(link) for link in here if os.path.lexists(link)))
        assert os.waitpid(child, 0)[1] == 0
    sampler.stop()
    print(repr(sampler.keep(Path(sys.argv[1]), 1 << 24)))
"""


def test_forks_in_the_middle_of_a_capture_do_not_hang(tmp_path):
    # GIVEN a process that is sampled as often as can be, and has a busy thread WHEN it forks again and again
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORKS), tmp_path / "s.json"],
        timeout=120, capture_output=True, text=True, check=False,
    )  # fmt: skip
    # THEN each child ends, with none of the files that the sampler had open, and the samples are there
    assert done.stdout == "''\n", done.stderr
    assert len(read_samples(tmp_path / "s.json").time_ns_N) > 1


JOB = """
    import os, resource, sys, threading, time
    import torch
    from pathlib import Path
    from torch.utils.data import DataLoader, Dataset
    from sftriage.trainer.sampler import WORKERS, StackSampler

    class Slow(Dataset):
        def __len__(self):
            return 60
        def __getitem__(self, index):
            time.sleep(0.002)
            return torch.zeros(1)

    without, path = sys.argv[1].split(), Path(sys.argv[2])

    def threads(allowed):
        soft = 0 if not allowed else resource.getrlimit(resource.RLIMIT_NPROC)[1]
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, resource.getrlimit(resource.RLIMIT_NPROC)[1]))

    # (around the thread that a worker would have: torch's own threads there are none of ours)
    if "worker" in without:
        os.register_at_fork(after_in_child=lambda: threads(False))
    WORKERS.attend()
    if "worker" in without:
        os.register_at_fork(after_in_child=lambda: threads(True))
    loader = DataLoader(Slow(), 4, num_workers=1, multiprocessing_context="fork")
    sampler = StackSampler(lambda: (1, "data", 1), period_s=0.001)
    if "trainer" in without:
        threads(False)
    sampler.start()
    threads(True)
    batches = sum(1 for _ in loader)
    sampler.stop()
    why = sampler.keep(path, 1 << 24)
    WORKERS.leave()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("sftriage")]
    print(batches, left, why, sep="|")
"""

NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--no-new-privs"]
# (the interpreter may lie where only its owner reads)
NOBODY += [f"--{option}=-all,+dac_read_search" for option in ("inh-caps", "ambient-caps", "bounding-set")]
MOUNTS = ["unshare", "--mount"]


def shell(before):
    return [*MOUNTS, "sh", "-c", f'{before} && exec "$@"', "sh"]


@pytest.fixture
def job(tmp_path):
    """Runs the job where little is allowed: what it prints, and its samples."""
    tmp_path.chmod(0o777)
    for above in tmp_path.parents[:2]:
        above.chmod(0o755)

    def run(*where, without=""):
        if shutil.which(where[0]) is None:
            pytest.skip(f"no {where[0]} here: {needs.GET_IT}")
        probe = subprocess.run([*where, "true"], capture_output=True, text=True, timeout=60, check=False)
        if probe.returncode:
            pytest.skip(f"this cannot be made here: {probe.stderr.strip()}")
        path = tmp_path / "s.json"
        command = [*where, sys.executable, "-c", textwrap.dedent(JOB), without, path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        batches, left, why = done.stdout.strip().split("|")
        # THEN, whatever is allowed, training has had all its batches, and nothing of ours is left
        assert (batches, left) == ("15", "[]")
        return why, path

    return run


WHERE = {
    "another user, without privileges": NOBODY,
    "in namespaces of users, processes and mounts": [
        "unshare", "--user", "--map-root-user", "--pid", "--mount", "--fork", "--mount-proc"
    ],
    "where processes are hidden from each other": [
        *shell("mount -t proc -o hidepid=2 proc /proc"), *NOBODY
    ],
}  # fmt: skip


@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
def test_sampling_works_without_ptrace(job, where):
    # GIVEN a trainer that may not look into any other process WHEN it is sampled
    why, path = job(*where)
    # THEN all is there: what the training thread waits for, what its worker does, and how long both have run
    assert why == ""
    samples = read_samples(path)
    (worker,) = samples.workers
    assert any(
        samples.frames[stack[-1]].function.endswith("__getitem__") for stack in worker.threads[0].stacks_N if stack
    )
    assert samples.training.run_ns_N[-1] > 0
    assert worker.threads[0].run_ns_N[-1] > 0


def test_without_schedstat_the_times_of_threads_are_unknown(job):
    # GIVEN no /proc at all WHEN the trainer is sampled
    why, path = job(*shell("mount -t tmpfs none /proc"))
    # THEN its stacks and its worker's are there, and of nothing it is said how long it ran
    assert why == ""
    samples = read_samples(path)
    (worker,) = samples.workers
    assert len(worker.time_ns_W) > 0
    for times in (samples.training, worker.threads[0], samples.sampler):
        assert set(times.run_ns_N) == set(times.waited_ns_N) == {-1}
    assert {spot.known_ns for spot in spots(samples, "data")} == {0}


def test_training_goes_on_without_stacks_if_no_thread_can_start(job):
    # GIVEN a user who may have no more threads WHEN a capture begins THEN the reason is what comes of it
    why, path = job(*NOBODY, without="trainer")
    assert why == "no stacks: can't start new thread"
    assert not path.exists()


def test_a_worker_without_a_thread_is_listed_as_missing(job):
    # GIVEN a worker that may have no thread of ours WHEN its trainer is sampled
    why, path = job(*NOBODY, without="worker")
    # THEN the trainer's stacks are there, without it
    assert why == ""
    document = json.loads(path.read_text())
    assert document["sftriage"]["workers"] == []
    assert read_samples(path).time_ns_N


def test_workers_describe_their_threads_at_any_time_also_in_a_capture(capture):
    # GIVEN workers that last
    batches = loader(persistent_workers=True)
    pids = {threads_of(batch)[0] for batch in batches}
    # WHEN their threads are requested before, in and after a capture THEN both answer each time
    answers = [WORKERS.threads(detail=False)]
    with capture() as captured:
        epoch = iter(batches)
        next(epoch)
        answers += [WORKERS.threads(detail=True), WORKERS.threads(detail=False)]
        list(epoch)
    answers.append(WORKERS.threads(detail=True))
    samples = captured.read()
    answers.append(WORKERS.threads(detail=True))
    assert [set(answer) for answer in answers] == [pids] * len(answers)
    for answer in answers:
        for main, *_ in answer.values():
            assert main["main"]
            assert "_worker_loop" in {frame["function"] for frame in main["frames"]}
    # AND the capture has its samples
    assert {worker.pid for worker in samples.workers} == pids
    assert all(stands(samples, worker) for worker in samples.workers)


def test_a_stopped_worker_costs_the_answer_a_moment_and_disturbs_no_later_one(capture, monkeypatch):
    # GIVEN a worker that is stopped while its threads are requested
    monkeypatch.setattr(sampler, "THREADS_S", 0.2)
    batches = loader(persistent_workers=True)
    pids = {threads_of(batch)[0] for batch in batches}
    pid = min(pids)
    os.kill(pid, signal.SIGSTOP)
    try:
        # THEN the other one answers
        assert set(WORKERS.threads(detail=False)) == pids - {pid}
    finally:
        os.kill(pid, signal.SIGCONT)
    # AND what the first answers late is not taken for its samples
    with capture() as captured:
        list(batches)
    assert {worker.pid for worker in captured.read().workers} == pids
