"""A DDP job over Gloo in which ranks become slow, in the ways that `WAYS` names.

torchrun --nproc-per-node 3 bench/jobs/causes.py --cause disk --rank 1 --from-step 100 --steps 400
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import http.server
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import sftriage

WIDTH, BATCH, SLOW_S = 384, 64, 0.03


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(12)))
        self.extra = False

    def forward(self, x: Tensor) -> Tensor:
        if self.extra:
            big = torch.randn(900, 900)
            with torch.no_grad():
                for _ in range(3):
                    x = x + (big @ big).mean() * 0.0
        out: Tensor = self.layers(x)
        return out


class Job:
    def __init__(self, folder: Path) -> None:
        self.folder, self.network = folder, Model()
        self.heap: list[list[int]] = []
        self.repeats = 1
        self.port = 0
        self.held = contextlib.ExitStack()

    def start(self, *command: str) -> None:
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self.held.callback(process.wait)
        self.held.callback(process.kill)


class Images(Dataset[Tensor]):
    def __init__(self, job: Job, causes: list[str], from_item: int) -> None:
        self.job, self.from_item = job, from_item
        # (what a worker prepares ahead hides as much as a step takes)
        self.sleep_s = {"dataset_sleeps": SLOW_S, "worker_sleeps": 4 * SLOW_S}.get("".join(causes), 0.0)
        self.acts = [WAYS[cause][1] for cause in causes if WAYS[cause][0] == "item" and not self.sleep_s]

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.from_item and index % BATCH == 0:
            if self.sleep_s:
                time.sleep(self.sleep_s)
            for act in self.acts:
                act(self.job)
        return torch.randn(WIDTH)


def sleep(job: Job) -> None:
    """What `Images` does itself."""


def decode(job: Job) -> None:
    """Python that computes, for about as long as the faults last."""
    end_s, total = time.perf_counter() + SLOW_S, 0
    while time.perf_counter() < end_s:
        for byte in range(256):
            total = (total * 31 + byte) % 1_000_003


def read_slowly(job: Job) -> None:
    """Writes and reads past the page cache, for as long."""
    end_s = time.perf_counter() + SLOW_S
    while time.perf_counter() < end_s:
        with (job.folder / "shard.bin").open("wb") as file:
            file.write(os.urandom(1 << 16))
            file.flush()
            os.fsync(file.fileno())


def fetch(job: Job) -> None:
    """One fetch from a slow server of this host."""
    if not job.port:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowServer)
        job.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
    urllib.request.urlopen(f"http://127.0.0.1:{job.port}/", timeout=10).read()


class SlowServer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        time.sleep(SLOW_S)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"x" * 1000)

    def log_message(self, *_: object) -> None:
        pass


def hold_the_interpreter(job: Job) -> None:
    """Start a thread that computes in Python most of the time, and lets go of the interpreter only when it has to."""

    def statistics() -> None:
        total = 0
        while True:
            time.sleep(0.01)
            for number in range(400_000):
                total += number * number

    threading.Thread(target=statistics, name="statistics", daemon=True).start()


def crowd(job: Job) -> None:
    """Share a core with two busy processes."""
    core = min(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})
    for _ in range(2):
        job.start("taskset", "-c", str(core), sys.executable, "-c", "while True: pass")


def be_stopped(job: Job) -> None:
    me = os.getpid()
    job.held.callback(os.kill, me, signal.SIGCONT)
    pulse = f"while kill -STOP {me} && sleep {SLOW_S} && kill -CONT {me} && sleep 0.03; do :; done"
    job.start("bash", "-c", pulse)


def be_limited(job: Job) -> None:
    job.held.callback(os.kill, os.getpid(), signal.SIGCONT)
    job.start("cpulimit", "-q", "-p", str(os.getpid()), "-l", "10")


def lengthen(job: Job) -> None:
    job.repeats = 40


def add_operator(job: Job) -> None:
    job.network.extra = True


def log_metrics(job: Job) -> None:
    with (job.folder / "metrics.jsonl").open("a") as file:
        for number in range(30):
            file.write(f"{number}\n")
            file.flush()
            os.fsync(file.fileno())
        time.sleep(SLOW_S)


def collect_garbage(job: Job) -> None:
    job.heap = job.heap or [[number] for number in range(400_000)]
    gc.collect()


def touch(job: Job) -> None:
    with mmap.mmap(-1, 64 << 20) as fresh:
        for at in range(0, len(fresh), 4096):
            fresh[at] = 1


def recompile(job: Job) -> None:
    torch._dynamo.reset()
    torch.compile(lambda x: x.sin().sum(), backend="aot_eager")(torch.randn(BATCH, WIDTH))


def save_checkpoint(job: Job) -> None:
    state = {"model": job.network.state_dict(), "ballast": torch.zeros(4 << 20)}
    torch.save(state, job.folder / "checkpoint.pt")


WAYS: dict[str, tuple[str, Callable[[Job], Any]]] = {
    "dataset_sleeps": ("item", sleep),
    "worker_sleeps": ("item", sleep),
    "decoding": ("item", decode),
    "gil_thread": ("once", hold_the_interpreter),
    "gc": ("between", collect_garbage),
    "neighbour": ("once", crowd),
    "sigstop": ("once", be_stopped),
    "cpulimit": ("once", be_limited),
    "disk": ("item", read_slowly),
    "http": ("item", fetch),
    "longer_sequences": ("once", lengthen),
    "extra_operator": ("once", add_operator),
    "callback": ("between", log_metrics),
    "checkpoint": ("optimizer", save_checkpoint),
    "recompilation": ("forward", recompile),
    "page_faults": ("forward", touch),
}
"""Of each way the stage in which it is slow; ``once`` when it begins, ``item`` in the data set."""


def batches(loader: DataLoader[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from loader


def train(job: Job, causes: list[str], options: argparse.Namespace) -> None:
    workers = int("worker_sleeps" in options.cause)
    samples = Images(job, causes, options.from_step * BATCH)
    source = batches(DataLoader(samples, BATCH, num_workers=workers, prefetch_factor=2 if workers else None))
    torch.manual_seed(0)
    model = DistributedDataParallel(job.network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with sftriage.Monitor(stages=("data", "forward", "backward", "optimizer"), sync=("backward",)) as monitor:
        monitor.watch(model)
        for step in range(options.steps):

            def slow_in(stage: str, step: int = step) -> None:
                for where, act in (WAYS[cause] for cause in causes if step >= options.from_step):
                    if where == stage:
                        act(job)

            if step == options.from_step:
                sys.stderr.write(f"onset {time.time()}\n")
                slow_in("once")
            with monitor.step():
                with monitor.stage("data"):
                    slow_in("data")
                    x = next(source)
                with monitor.stage("forward"):
                    slow_in("forward")
                    x = x.repeat(job.repeats, 1)
                    loss = F.mse_loss(model(x), x)
                with monitor.stage("backward"):
                    optimizer.zero_grad()
                    loss.backward()
                with monitor.stage("optimizer"):
                    slow_in("optimizer")
                    optimizer.step()
            slow_in("between")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cause", action="append", default=[], choices=WAYS)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--from-step", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mine = options.cause if options.rank == dist.get_rank() else []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        with job.held:
            train(job, mine, options)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
