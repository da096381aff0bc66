"""A training job over Gloo that hangs, in the kinds that `KINDS` names, or that only takes its time.

torchrun --nproc-per-node 4 bench/jobs/hanging.py --kind evaluation --folder DIR

A comment ``# line: KIND`` is on each line that a right sentence may name: `bench.hangs` reads them.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import multiprocessing
import os
import queue
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WIDTH, BATCH = 64, 8
EPOCHS, STEPS, AT = 2, 60, 40


class Job:
    """What the ways to hang have in common: this rank, its folder, and groups of ranks."""

    def __init__(self, kind: str, folder: Path, pause_s: float) -> None:
        self.kind, self.folder, self.pause_s = kind, folder, pause_s
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.inbox: queue.Queue[Tensor] = queue.Queue()
        self.ready = threading.Event()
        self.cache_lock = threading.Lock()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.at_fault = self.rank in KINDS[kind].ranks

    def thread(self, target: Callable[[], object], name: str) -> None:
        threading.Thread(target=target, name=name, daemon=True).start()


def next_shard(job: Job) -> None:
    job.inbox.get()  # line: second_epoch, queue_of_two


def wait_for_weights(job: Job) -> None:
    job.ready.wait()  # line: auto, fsdp


def answer(job: Job) -> bytes:
    """What a server that accepts connections and never sends anything answers."""
    with socket.create_connection(job.listening.getsockname()) as connection:
        return connection.recv(1024)


def refresh(job: Job) -> None:
    with job.cache_lock:
        answer(job)  # line: lock_in_socket


def cached(job: Job) -> None:
    job.thread(lambda: refresh(job), "cache-refresher")
    time.sleep(0.2)
    with job.cache_lock:  # line: lock_in_socket
        pass


def prefetched(job: Job) -> None:
    """Join a thread that waits for a condition."""
    ready = threading.Condition()

    def prefetch() -> None:
        with ready:
            ready.wait()

    prefetching = threading.Thread(target=prefetch, name="prefetcher", daemon=True)
    prefetching.start()
    prefetching.join()  # line: thread


def forgotten_breakpoint(job: Job) -> None:
    """Wait for input from a terminal without anyone typing."""
    _, terminal = os.openpty()
    os.dup2(terminal, 0)
    input()  # line: breakpoint


def leave(job: Job) -> None:
    """Exit, while a thread that is no daemon goes on."""
    threading.Thread(target=job.ready.wait, name="uploader").start()
    raise SystemExit(1)


def tokenize(job: Job) -> None:
    subprocess.run(["sleep", "1000"], check=True)  # line: subprocess


def report_progress(job: Job) -> None:
    host, port = job.listening.getsockname()
    urllib.request.urlopen(f"http://{host}:{port}/metrics").read()  # line: http


def save_under_lock(job: Job) -> None:
    """Wait for the lock of a file that another process holds."""
    path = job.folder / "checkpoint.lock"
    with subprocess.Popen(["flock", str(path), "sleep", "1000"]), path.open("w") as lock:
        time.sleep(0.5)
        fcntl.flock(lock, fcntl.LOCK_EX)  # line: file_lock


def throttled(job: Job) -> None:
    time.sleep(1000)  # line: one_of_eight, one_of_64, short_timeout


def match_tags(job: Job) -> None:
    """A regular expression that never ends, in C, with the interpreter held."""
    re.match(r"(a+)+$", "a" * 60 + "!")  # line: interpreter_held


def log_to_pipe(job: Job) -> None:
    """Write into a pipe that has no reader until it is full."""
    _, write = os.pipe()
    while True:
        os.write(write, bytes(4096))  # line: full_pipe


def other_dtype(job: Job) -> None:
    """Gloo aborts a rank that receives more than it expects: the job ends instead of hanging."""
    dtype = torch.float64 if job.at_fault else torch.float32
    dist.all_reduce(torch.ones(3, dtype=dtype))


def other_group(job: Job) -> None:
    first, second = GROUPS if job.rank == max(KINDS[job.kind].ranks) else reversed(GROUPS)
    dist.all_reduce(torch.ones(5), group=first)  # line: crossed_groups, pair_order
    dist.all_reduce(torch.ones(5), group=second)  # line: crossed_groups, pair_order


def synchronize(job: Job) -> None:
    if not job.at_fault:
        dist.barrier()  # line: barrier_forgotten


def gather_norms(job: Job) -> None:
    if job.at_fault:
        norms = [torch.zeros(4) for _ in range(job.ranks)]
        dist.all_gather(norms, torch.ones(4))  # line: auto_collective, gather_of_two


def gather_names(job: Job) -> None:
    dist.all_gather_object([None] * job.ranks, f"sample of rank {job.rank}")  # line: objects


def reduce_loss(job: Job) -> None:
    dist.reduce(torch.ones(4), dst=job.rank if job.at_fault else 0)  # line: roots


def two_calls(job: Job) -> None:
    if job.rank == 1:
        dist.broadcast(torch.ones(2), src=0)  # line: two_calls
    gather_norms(job)


def clip(job: Job) -> None:
    """A rank whose gradient is bad goes on without the norms that the others gather."""
    try:
        if job.at_fault:
            raise ValueError("the gradient is not finite")
        dist.all_gather([torch.zeros(2) for _ in range(job.ranks)], torch.ones(2))  # line: exception_caught
    except ValueError:
        pass


def two_faults(job: Job) -> None:
    (next_shard if job.rank == 1 else gather_norms)(job)


def checkpoint(job: Job) -> None:
    """Save for a while on one rank, on slow storage, while the others wait in a barrier."""
    if job.rank == 0:
        with (job.folder / "checkpoint.pt").open("wb") as file:
            slow: Any = SlowFile(file, job.pause_s)
            torch.save(nn.Linear(WIDTH, WIDTH).state_dict(), slow)  # line: healthy_checkpoint
    dist.barrier()  # line: healthy_checkpoint


class SlowFile:
    """A file whose storage takes its time to write."""

    def __init__(self, file: Any, pause_s: float) -> None:
        self.file, self.left_s = file, pause_s

    def write(self, data: bytes) -> int:
        pause_s, self.left_s = min(self.left_s, 4.0), max(0.0, self.left_s - 4.0)
        time.sleep(pause_s)
        return int(self.file.write(data))

    def flush(self) -> None:
        self.file.flush()


def evaluate_alone(job: Job) -> None:
    end_s = time.monotonic() + job.pause_s
    while job.rank == 0 and time.monotonic() < end_s:
        time.sleep(0.05)  # line: healthy_evaluation, healthy_long_evaluation


class Way(NamedTuple):
    """A kind: the ranks at fault, all of which run ``act`` in ``where``; ``everywhere``: the others run it, too."""

    ranks: tuple[int, ...]
    where: str
    act: Callable[[Job], object] | None = None
    everywhere: bool = False
    workers: int = 0
    monitor: bool = True
    step_s: float = 0.02


KINDS: dict[str, Way] = {
    "second_epoch": Way((2,), "data", next_shard),
    "evaluation": Way((2,), "evaluate"),
    "auto": Way((2,), "forward", wait_for_weights, monitor=False),
    "auto_collective": Way((1,), "backward", gather_norms, monitor=False),
    "uneven": Way((2,), "uneven"),
    "pipeline": Way((1,), "pipeline"),
    "tensor_parallel": Way((3,), "tensor_parallel"),
    "two_faults": Way((1, 3), "forward", two_faults),
    "gloo_aborts": Way((2,), "backward", other_dtype, everywhere=True),
    "crossed_groups": Way((3,), "backward", other_group, everywhere=True),
    "pair_order": Way((1, 2), "backward", other_group),
    "objects": Way((1,), "forward", gather_names, monitor=False),
    "roots": Way((3,), "optimizer", reduce_loss, everywhere=True),
    "two_calls": Way((1, 3), "backward", two_calls),
    "lock_in_socket": Way((2,), "data", cached),
    "thread": Way((1,), "data", prefetched),
    "breakpoint": Way((3,), "forward", forgotten_breakpoint),
    "leaves": Way((2,), "optimizer", leave),
    "helper_stopped": Way((0,), "item", workers=2),
    "subprocess": Way((1,), "data", tokenize),
    "worker_lock": Way((2,), "item", workers=2),
    "worker_sleep": Way((2,), "item", workers=2),
    "worker_fifo": Way((0,), "item", workers=2),
    "file_lock": Way((0,), "optimizer", save_under_lock),
    "http": Way((3,), "optimizer", report_progress),
    "barrier_forgotten": Way((2,), "optimizer", synchronize, everywhere=True),
    "exception_caught": Way((2,), "backward", clip, everywhere=True),
    "interpreter_held": Way((2,), "data", match_tags),
    "full_pipe": Way((2,), "optimizer", log_to_pipe),
    "fsdp": Way((2,), "fsdp"),
    "one_of_eight": Way((6,), "data", throttled),
    "one_of_64": Way((41,), "data", throttled),
    # (on several hosts, it takes seconds until the job's pace is known)
    "two_hosts": Way((3,), "evaluate", step_s=0.25),
    "between_steps": Way((2,), "evaluate"),
    "short_timeout": Way((0,), "between", throttled),
    "healthy_checkpoint": Way((), "between", checkpoint, everywhere=True),
    "healthy_evaluation": Way((), "between", evaluate_alone, everywhere=True),
    "healthy_long_evaluation": Way((), "between", evaluate_alone, everywhere=True),
    "healthy_compile": Way((), "compile"),
    "healthy": Way((), ""),
}
GROUPS: list[Any] = []


class Images(Dataset[Tensor]):
    """Samples; a worker hangs at one of them in the kinds that say so."""

    def __init__(self, job: Job) -> None:
        self.kind, self.folder = job.kind, job.folder
        self.last = AT * BATCH if job.at_fault and KINDS[job.kind].where == "item" else -1
        self.index_lock = threading.Lock()

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> Tensor:
        if index == self.last:
            getattr(self, self.kind)()
        return torch.randn(WIDTH)

    def worker_lock(self) -> None:
        with self.index_lock, self.index_lock:  # line: worker_lock
            pass

    def worker_sleep(self) -> None:
        time.sleep(1000)  # line: worker_sleep

    def helper_stopped(self) -> None:
        time.sleep(1000)  # line: helper_stopped

    def worker_fifo(self) -> None:
        path = self.folder / "shard.fifo"
        os.mkfifo(path)
        with path.open("rb") as shard:  # line: worker_fifo
            shard.read()


class Recorder:
    """A Monitor, or what has its methods and records nothing: the seams find the stages then."""

    def __init__(self, way: Way, sync: tuple[str, ...] = ("backward",)) -> None:
        self.monitor: Any = None
        if way.monitor:
            import sftriage

            self.monitor = sftriage.Monitor(stages=("data", "forward", "backward", "optimizer"), sync=sync)

    def step(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.monitor is None else self.monitor.step()

    def stage(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.monitor is None else self.monitor.stage(name)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))


def evaluate(job: Job, model: nn.Module) -> None:
    with torch.no_grad():
        hits = model(torch.randn(BATCH, WIDTH)).sum().reshape(1)
    if KINDS[job.kind].where == "evaluate" and job.at_fault:
        dist.all_gather([torch.zeros(1) for _ in range(job.ranks)], hits)  # line: evaluation, between_steps, two_hosts
    else:
        dist.all_reduce(hits)


def train(job: Job, way: Way) -> None:
    """Data-parallel training, with an evaluation after each epoch."""
    recorder, network = Recorder(way), layers()
    model: Any = DistributedDataParallel(network)
    if way.where == "compile":
        model = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if job.kind == "helper_stopped" and job.at_fault:
        helper = multiprocessing.get_context("fork").Process(target=signal.raise_signal, args=(signal.SIGSTOP,))
        helper.start()
    loader = DataLoader(Images(job), BATCH, num_workers=way.workers)

    def act(where: str, epoch: int, step: int) -> None:
        now = where == way.where and step == AT and epoch == int(job.kind == "second_epoch")
        if now and way.act is not None and (job.at_fault or way.everywhere):
            way.act(job)

    for epoch in range(EPOCHS):
        steps = AT if way.where == "uneven" and job.at_fault else STEPS
        batches = iter(loader)
        for step in range(steps):
            with recorder.step():
                with recorder.stage("data"):
                    time.sleep(way.step_s)
                    images = next(batches)
                    act("data", epoch, step)
                with recorder.stage("forward"):
                    loss = model(images).square().mean()
                    act("forward", epoch, step)
                with recorder.stage("backward"):
                    loss.backward()
                    dist.all_reduce(loss.detach())
                    act("backward", epoch, step)
                with recorder.stage("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
                    act("optimizer", epoch, step)
            act("between", epoch, step)
        if way.where == "uneven":
            dist.barrier()  # line: uneven
        evaluate(job, network)


def steps(recorder: Recorder) -> Iterator[int]:
    for step in range(EPOCHS * STEPS):
        with recorder.step():
            with recorder.stage("data"):
                time.sleep(0.02)
            yield step


def pipeline(job: Job, way: Way) -> None:
    """Each rank has a stage: activations go down, gradients come back up. One stage is stuck."""
    model, x = layers(), torch.zeros(BATCH, WIDTH)
    recorder = Recorder(way, sync=("forward", "backward"))
    for step in steps(recorder):
        with recorder.stage("forward"):
            if job.rank:
                dist.recv(x, job.rank - 1)
            model(x)
            if job.at_fault and step == AT:
                job.inbox.get()  # line: pipeline
            if job.rank < job.ranks - 1:
                dist.send(x, job.rank + 1)
        with recorder.stage("backward"):
            if job.rank < job.ranks - 1:
                dist.recv(x, job.rank + 1)
            if job.rank:
                dist.send(x, job.rank - 1)


def tensor_parallel(job: Job, way: Way) -> None:
    """Two groups of two share their activations, and average their gradients across; one rank of a group is wrong."""
    rows, columns = ([dist.new_group(ranks) for ranks in pairs] for pairs in (([0, 1], [2, 3]), ([0, 2], [1, 3])))
    row, column = rows[job.rank // 2], columns[job.rank % 2]
    recorder = Recorder(way, sync=("forward", "backward"))
    for step in steps(recorder):
        with recorder.stage("forward"):
            part = torch.ones(BATCH)
            if job.at_fault and step == AT:
                dist.all_gather([torch.zeros(BATCH) for _ in range(2)], part, group=row)  # line: tensor_parallel
            else:
                dist.all_reduce(part, group=row)
        with recorder.stage("backward"):
            dist.all_reduce(torch.ones(WIDTH), group=column)


def fsdp(job: Job, way: Way) -> None:
    """Sharded parameters: each layer is gathered before its forward and its backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = init_device_mesh("cpu", (job.ranks,)), layers()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    recorder = Recorder(way, sync=("forward", "backward"))
    for step in steps(recorder):
        with recorder.stage("forward"):
            if job.at_fault and step == AT:
                wait_for_weights(job)
            loss = model(torch.randn(BATCH, WIDTH)).sum()
        with recorder.stage("backward"):
            loss.backward()
        with recorder.stage("optimizer"):
            optimizer.step()
            optimizer.zero_grad()


LOOPS = {"pipeline": pipeline, "tensor_parallel": tensor_parallel, "fsdp": fsdp}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--pause-s", type=float, default=40.0, help="how long a healthy pause lasts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60) if options.kind == "short_timeout" else None
    dist.init_process_group("gloo", timeout=timeout)
    way = KINDS[options.kind]
    if way.act is other_group:
        members = range(dist.get_world_size()) if way.everywhere else way.ranks
        GROUPS[:] = [dist.new_group(members) for _ in range(2)]
    LOOPS.get(way.where, train)(Job(options.kind, options.folder, options.pause_s), way)
    # Gloo's threads live on: skip the teardown.
    os._exit(0)


if __name__ == "__main__":
    main()
