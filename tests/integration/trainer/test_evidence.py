"""What a rank answers of the hang that it is in: real processes that hang, each with a Monitor."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec
import pytest

from sftriage.model.hangs import RankEvidence, ThreadEvidence
from sftriage.trainer.evidence import MAX_ANSWER_BYTES
from sftriage.trainer.executor import HANG_DETAIL_TOKEN, HANG_TOKEN, STACK_ANSWER, STACK_REQUESTS
from tests.integration.processes import descendants, kill, wait_until

DEADLINE_S = 90.0
HEAD = """\
import contextlib, fcntl, os, queue, signal, socket, subprocess, sys, threading, time
from sftriage.trainer.monitor import Monitor
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
monitor = Monitor(rings=folder, rank=rank, world_size=world)
up = lambda text="up": print(text, flush=True)
"""
GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
"""
LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset
class Items(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 3:
            hangs_in_worker()
        return torch.ones(2)
def load():
    for batch in DataLoader(Items(), batch_size=1, num_workers=2, multiprocessing_context="fork"):
        pass
"""
RUN = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
"""Runs a script in a file: its lines are the program's own, as those of ``python -c`` are not."""


@pytest.fixture
def job(train, tmp_path):
    """Starts the ranks of a job that runs a script, and waits until each is up; ends their children, too."""
    started = []

    def start(source: str, ranks: int = 1) -> Callable[..., RankEvidence]:
        script = tmp_path / "job.py"
        script.write_text(HEAD + source, encoding="utf-8")
        started.extend(train(RUN, script, rank, ranks, tmp_path) for rank in range(ranks))
        for trainer in started:
            assert trainer.says() == "up"
        tokens = count()

        def evidence(until: Callable[[RankEvidence], object], rank: int = 0, *, detail: bool = False) -> RankEvidence:
            """The first evidence of a rank of which something is so: it may not hang yet."""
            end_s = time.monotonic() + DEADLINE_S
            while not until(found := answer(tmp_path, rank, started[rank].process.pid, detail, next(tokens))):
                assert time.monotonic() < end_s, found
            return found

        evidence.trainers = started
        return evidence

    yield start
    kill(*(child for trainer in started for child in descendants(trainer.process.pid)))


def answer(directory: Path, rank: int, pid: int, detail: bool, number: int) -> RankEvidence:
    """A rank's own account, as an agent reads it."""
    requests, answered = (directory / f"rank-{rank}.0.{kind}" for kind in (STACK_REQUESTS, STACK_ANSWER))
    token = f"{HANG_DETAIL_TOKEN if detail else HANG_TOKEN} {number}"
    with os.fdopen(os.open(requests, os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0) as pipe:
        pipe.write(f"{token}\n".encode())

    def arrived() -> RankEvidence | None:
        with contextlib.suppress(OSError, ValueError):
            text = answered.read_bytes()
            assert len(text) <= MAX_ANSWER_BYTES
            document = json.loads(text)
            if document["asked"] == token:
                account = document["rank_evidence"] | {"rank": rank, "host": "h", "pid": pid}
                return msgspec.convert(account, RankEvidence)
        return None

    return wait_until(arrived, DEADLINE_S)


def own_line(found: RankEvidence | ThreadEvidence) -> str:
    """The innermost line of the program, of the main thread."""
    thread = found.threads[0] if isinstance(found, RankEvidence) else found
    place = next(frame for frame in thread.frames if frame.own)
    return source_of(place.file, place.line)


def source_of(file: str, line: int) -> str:
    return Path(file).read_text(encoding="utf-8").splitlines()[line - 1].strip()


LOCKS = """
first, second, held = threading.Lock(), threading.Lock(), threading.Event()
def refresh_cache():
    with second:
        held.wait()
        with first:
            pass
def idle():
    threading.Event().wait()
def look_up():
    with first:
        held.set()
        up()
        time.sleep(0.1)
        with second:
            pass
for target in (refresh_cache, idle):
    threading.Thread(target=target, name=target.__name__, daemon=True).start()
time.sleep(0.1)
look_up()
"""


def test_two_threads_that_hold_each_others_locks_are_both_named(job):
    # GIVEN a main thread that waits for a lock, whose holder waits for one of the main thread
    evidence = job(LOCKS)
    # WHEN the rank answers THEN both are there, and what each waits for, who holds it, and where that one is
    found = evidence(lambda found: len(found.threads) == 2 and found.threads[1].wait.lock)
    main, holder = found.threads
    assert (main.name, main.main, holder.name, holder.main) == ("MainThread", True, "refresh_cache", False)
    assert (main.wait.lock, main.wait.state, main.wait.syscall) == ("second", "S", "futex")
    assert own_line(main) == "with second:"
    assert own_line(holder) == "with first:"
    if sys.version_info >= (3, 11):
        assert (main.wait.held_by, holder.wait.held_by) == ("thread refresh_cache", "thread MainThread")
        assert source_of(main.wait.held_at.file, main.wait.held_at.line) == "with first:"
        assert source_of(holder.wait.held_at.file, holder.wait.held_at.line) == "with second:"
    assert (found.problem, found.calls, found.groups, found.timeout_s) == ("", (), (), None)
    # AND in detail all threads of the program, and none of ours
    detailed = evidence(lambda found: True, detail=True)
    assert {thread.name for thread in detailed.threads} == {"MainThread", "refresh_cache", "idle"}


WAITS = {
    "a queue": ("inbox = queue.Queue(); up(); inbox.get()", {"lock": "inbox", "held_by": ""}),
    "its own lock": (
        "class Cache: pass\ncache = Cache(); cache._lock = threading.Lock()\ndef inner():\n    cache._lock.acquire()\n"
        "with cache._lock:\n    up(); inner()",
        {"lock": "cache._lock", "held_by": "thread MainThread" if sys.version_info >= (3, 11) else ""},
    ),
    "a reentrant lock": (
        "lock = threading.RLock(); held = threading.Event()\ndef keep():\n    lock.acquire(); held.set()\n"
        "    threading.Event().wait()\nthreading.Thread(target=keep, name='keeper', daemon=True).start()\n"
        "held.wait(); up(); lock.acquire()",
        {"lock": "lock", "held_by": "thread keeper"},
    ),
    "a thread": (
        "worker = threading.Thread(target=time.sleep, args=(600,), name='uploads', daemon=True); worker.start()\n"
        "up(); worker.join()",
        {"lock": "worker", "held_by": "thread uploads"},
    ),
    "a sleep": ("up(); time.sleep(600)", {"syscall": "clock_nanosleep", "path": "", "lock": ""}),
    "a pipe": ("up(); os.read(os.pipe()[0], 1)", {"syscall": "read", "path": re.compile(r"pipe:\[\d+\]")}),
    "a connection": (
        "server = socket.create_server(('127.0.0.1', 0)); client = socket.create_connection(server.getsockname())\n"
        "client.settimeout(None); up(); client.recv(1)",
        {"syscall": "recvfrom", "path": re.compile(r"127\.0\.0\.1:\d+")},
    ),
    "a connection with a timeout": (
        "server = socket.create_server(('127.0.0.1', 0)); client = socket.create_connection(server.getsockname())\n"
        "client.settimeout(600); up(); client.recv(1)",
        {"syscall": "poll", "path": re.compile(r"127\.0\.0\.1:\d+")},
    ),
    "a program": (
        "up(); subprocess.run(['sleep', '600'])",
        {"held_by": re.compile(r"process \d+ \(sleep 600\)"), "state": "S"},
    ),
    "a pipe without a writer": (
        "path = folder + '/fifo'; os.mkfifo(path); up(); open(path)",
        {"syscall": "openat", "path": re.compile(r".*/fifo")},
    ),
}


@pytest.mark.parametrize("waits", WAITS)
def test_a_rank_knows_what_it_waits_for(job, waits):
    # GIVEN a rank whose main thread waits for something WHEN it answers
    script, wanted = WAITS[waits]
    evidence = job(script)

    def fits(found: RankEvidence) -> bool:
        wait = found.threads[0].wait
        pairs = [(getattr(wait, name), value) for name, value in wanted.items()]
        return all(value.fullmatch(got) if isinstance(value, re.Pattern) else got == value for got, value in pairs)

    # THEN it says what it is, and that it uses no core
    found = evidence(fits)
    assert found.threads[0].wait.cpu_fraction < 0.2


@pytest.mark.parametrize(
    ("lock", "syscall"), [("fcntl.flock(file, fcntl.LOCK_EX)", "flock"), ("fcntl.lockf(file, fcntl.LOCK_EX)", "fcntl")]
)
def test_a_rank_that_waits_for_a_file_lock_names_the_file_and_its_holder(job, tmp_path, lock, syscall):
    # GIVEN a process that holds the lock of a file
    path = tmp_path / "shards.lock"
    code = f"import fcntl, time; file = open({str(path)!r}, 'w'); {lock}; print(1, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"1\n"
            # WHEN a rank waits for it
            found = job(f"file = open(folder + '/shards.lock', 'w')\nup()\n{lock}")(
                lambda found: found.threads[0].wait.held_by
            )
            # THEN it says so
            wait = found.threads[0].wait
            assert (wait.syscall, wait.path) == (syscall, str(path))
            assert wait.held_by.startswith(f"process {holder.pid} ({sys.executable} -c import fcntl")
            assert own_line(found) == lock
        finally:
            holder.kill()


def test_a_rank_that_computes_is_running(job):
    # GIVEN a rank in an endless loop WHEN it answers
    found = job("def spin():\n    n = 0\n    while True:\n        n = (n * 31 + 7) % 1000003\nup()\nspin()")(
        lambda found: found.threads[0].wait.state == "R"
    )
    # THEN it used nearly a core, and its wait for the interpreter is no finding
    wait = found.threads[0].wait
    assert wait.cpu_fraction > 0.8
    assert (wait.syscall, wait.wchan, wait.path, wait.lock) == ("", "", "", "")
    assert found.threads[0].frames[0].function == "spin"


TRAINS = """
from torch.nn.parallel import DistributedDataParallel
def train():
    net = DistributedDataParallel(torch.nn.Linear(8, 4))
    pair = dist.new_group([0, 1], group_desc="pair")
    dist.new_group([1])
    for step in range(20):
        loss = net(torch.ones(2, 8)).sum()
        if step == 19:
            up()
            if rank == 1:
                dist.barrier(group=pair)
        loss.backward()
train()
"""


def test_ranks_have_their_calls_with_the_programs_lines_and_the_groups_members(job):
    # GIVEN two ranks of which one waits in another group, before the backward pass that the other is in
    evidence = job(GLOO + TRAINS, ranks=2)
    pending = lambda found: any(group.pending for group in found.groups)  # noqa: E731
    first, second = (evidence(pending, rank) for rank in (0, 1))
    # THEN the default group has all its calls from the first on, and the one that has not ended
    default = {found.rank: found.groups[0] for found in (first, second)}
    assert {(group.name, group.description, group.members, group.first) for group in default.values()} == {
        ("0", "default_pg", ((0, 1, 1),), 1)
    }
    assert default[0].pending == (len(default[0].calls),)
    assert (default[1].pending, len(default[1].calls)) == ((), len(default[0].calls) - 1)
    # AND the call has operation, sizes, types, and the program's own line, also of a backward pass
    call = first.calls[default[0].calls[-1]]
    assert (call.op, call.sizes, call.dtypes) == ("all_reduce", ((36,),), ("Float",))
    assert (call.frames[0].function, source_of(call.frames[0].file, call.frames[0].line)) == (
        "train",
        "loss.backward()",
    )
    assert all(frame.own for frame in call.frames)
    # AND equal calls share a record
    assert len(first.calls) < len(default[0].calls)
    # AND the other group has its name, members and call, and one without calls has its members
    (pair,) = (group for group in second.groups if group.description == "pair")
    assert (pair.members, pair.first, pair.pending) == (((0, 1, 1),), 1, (1,))
    barrier = second.calls[pair.calls[0]]
    assert (barrier.op, source_of(barrier.frames[0].file, barrier.frames[0].line)) == (
        "barrier",
        "dist.barrier(group=pair)",
    )
    assert [(group.members, group.calls) for group in second.groups[2:]] == [(((1, 1, 1),), ())]
    assert (first.problem, first.timeout_s, own_line(first)) == ("", 1800.0, "loss.backward()")


SHARDS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
def train():
    for step in range(3):
        loss = net(torch.ones(2, 8)).sum()
        if step == 2:
            up()
            if rank == 1:
                time.sleep(600)
        loss.backward()
train()
"""


def test_sharded_training_has_the_programs_lines(job):
    # GIVEN a rank in the backward pass of FSDP, which the other has not come to WHEN it answers
    found = job(GLOO + SHARDS, ranks=2)(lambda found: any(group.pending for group in found.groups))
    # THEN its call has the program's line
    (group,) = (group for group in found.groups if group.pending)
    call = found.calls[group.calls[group.pending[0] - group.first]]
    assert source_of(call.frames[0].file, call.frames[0].line) == "loss.backward()"


ANEW = """
for _ in range(2500):
    dist.all_reduce(torch.ones(3))
up()
if rank == 1:
    sys.stdin.readline()
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=world)
dist.all_reduce(torch.ones(5))
dist.all_reduce(torch.ones(6)) if rank == 0 else dist.recv(torch.ones(3), src=0)
"""


def test_long_runs_lose_their_oldest_calls_and_a_group_that_is_created_anew_counts_from_one(job):
    # GIVEN more calls than the recorder keeps WHEN a rank answers
    evidence = job(GLOO + ANEW, ranks=2)
    (group,) = evidence(lambda found: any(group.pending for group in found.groups)).groups
    # THEN the latest are there, by their numbers
    assert (group.name, group.first, len(group.calls), group.pending) == ("0", 502, 2000, (2501,))
    # WHEN the default group was destroyed and created anew THEN its calls are those since then
    evidence.trainers[1].hears("go on")
    found = evidence(lambda found: any(group.pending == (2,) for group in found.groups))
    (group,) = found.groups
    assert (group.name, group.first, [found.calls[at].sizes for at in group.calls]) == ("0", 1, [((5,),), ((6,),)])
    # AND a rank that receives says from which
    other = evidence(lambda found: found.threads[0].wait.peer is not None and found.groups, 1)
    assert (other.threads[0].wait.peer, other.groups[0].pending) == (0, ())
    assert own_line(other).endswith("dist.recv(torch.ones(3), src=0)")


@pytest.mark.parametrize("hangs", ["time.sleep(600)", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_rank_that_waits_for_a_loaders_worker_has_its_line_or_its_state(job, hangs):
    # GIVEN a main thread that waits for a worker, which hangs in its data set, or is stopped
    stopped = "SIGSTOP" in hangs
    evidence = job(f"{LOADER}\ndef hangs_in_worker():\n    {hangs}\nup()\nload()\n")
    # WHEN the rank answers
    wanted = lambda worker: worker.state == "T" if stopped else "hangs_in_worker" in str(worker.threads)  # noqa: E731
    found = evidence(lambda found: any(map(wanted, found.workers)))
    # THEN the worker is there with what is known of it
    (worker,) = filter(wanted, found.workers)
    assert worker.pid in descendants(found.pid)
    if stopped:
        assert (worker.threads, worker.problem) == ((), "it is stopped")
    else:
        (thread,) = worker.threads
        assert (worker.problem, worker.state, thread.main, own_line(thread)) == ("", "S", True, hangs)
        assert thread.wait.syscall == "clock_nanosleep"
    # AND so is the other one
    assert len(found.workers) == 2


@pytest.mark.parametrize(
    ("ends", "status"), [("target=os._exit, args=(3,)", 3), ("target=signal.raise_signal, args=(9,)", -9)]
)
def test_a_child_that_has_ended_is_known_and_left_to_its_parent(job, ends, status):
    # GIVEN a child that has ended, and that the rank has not waited for WHEN it answers, once and again
    child = f"import multiprocessing; child = multiprocessing.get_context('fork').Process({ends})"
    evidence = job(f"{child}; child.start(); up(); time.sleep(600)")
    for _ in range(2):
        # THEN it says how the child ended
        (worker,) = evidence(lambda found: found.workers and found.workers[0].exit_status is not None).workers
        assert (worker.exit_status, worker.state) == (status, "Z")


def test_a_rank_without_a_flight_recorder_says_so(job, monkeypatch):
    # GIVEN a rank whose flight recorder is off
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "0")
    found = job(f"{GLOO}\ndist.barrier()\nup()\nqueue.Queue().get()")(lambda found: True)
    # WHEN it answers THEN that is its problem, and the rest is there
    assert found.problem == "torch's flight recorder is off: its buffer is of size 0"
    assert (found.calls, [group.members for group in found.groups]) == ((), [((0, 0, 1),)])
    assert found.threads[0].name == "MainThread"
