"""A DDP job over Gloo in which one rank becomes slow, in one of the ways that `CAUSES` names.

torchrun --nproc-per-node 3 bench/causes_jobs/train.py --cause disk --rank 1 --from-step 100 --steps 400
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import http.server
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import sftriage

WIDTH, BATCH, SLOW_S = 384, 64, 0.03


class Images(Dataset[Tensor]):
    """Samples, some of them made with care."""

    def __init__(self, cause: str, from_item: int, folder: Path) -> None:
        self.cause, self.from_item, self.folder = cause, from_item, folder

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.from_item and index % BATCH == 0:
            if self.cause in ("dataset_sleeps", "worker_sleeps"):
                # (what a worker prepares ahead hides as much as a step takes)
                time.sleep(SLOW_S if self.cause == "dataset_sleeps" else 4 * SLOW_S)
            elif self.cause == "decoding":
                decode(bytes(range(256)) * 64)
            elif self.cause == "disk":
                read_slowly(self.folder)
            elif self.cause == "http":
                fetch(self.folder)
        return torch.randn(WIDTH)


def decode(data: bytes) -> int:
    """Python that computes, for about as long as the faults last."""
    end_s, total = time.perf_counter() + SLOW_S, 0
    while time.perf_counter() < end_s:
        for byte in data[:512]:
            total = (total * 31 + byte) % 1_000_003
    return total


def read_slowly(folder: Path) -> None:
    """Writes and reads past the page cache, for as long."""
    end_s, path = time.perf_counter() + SLOW_S, folder / "shard.bin"
    while time.perf_counter() < end_s:
        with path.open("wb") as file:
            file.write(os.urandom(1 << 16))
            file.flush()
            os.fsync(file.fileno())


def fetch(folder: Path) -> None:
    """One fetch from a server of this host, which takes its time."""
    port = int((folder / "port").read_text())
    urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10).read()


class SlowServer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        time.sleep(SLOW_S)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"x" * 1000)

    def log_message(self, *_: object) -> None:
        pass


def serve(folder: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowServer)
    (folder / "port").write_text(str(server.server_address[1]))
    threading.Thread(target=server.serve_forever, daemon=True).start()


def hold_the_interpreter(until: threading.Event) -> None:
    """A thread that computes in Python, most of the time, and then lets go of the interpreter only when it has to."""
    total = 0
    while not until.wait(0.01):
        for number in range(400_000):
            total += number * number


def limited(pid: int) -> Path:
    """A cgroup of its own for a process, with a tenth of a core; where there are both versions, of the first."""
    first = Path("/sys/fs/cgroup/cpu")
    of_first = first.is_dir()
    cgroup = (first if of_first else Path("/sys/fs/cgroup")) / f"sftriage-bench-{pid}"
    for left in cgroup.parent.glob("sftriage-bench-*"):
        # (of a trainer that was killed before it could)
        with contextlib.suppress(OSError):
            left.rmdir()
    cgroup.mkdir()
    limit, quota = ("cpu.cfs_quota_us", "10000") if of_first else ("cpu.max", "10000 100000")
    (cgroup / limit).write_text(quota)
    (cgroup / "cgroup.procs").write_text(str(pid))
    return cgroup


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


class Ways:
    """The ways to be slow that are no part of a sample."""

    def __init__(self, cause: str, folder: Path) -> None:
        self.cause, self.folder = cause, folder
        self.ended = threading.Event()
        self.neighbours: list[subprocess.Popen[bytes]] = []
        self.cgroup: Path | None = None
        self.heap = [[number] for number in range(400_000)] if cause == "gc" else []

    def begin(self) -> None:
        me = os.getpid()
        if self.cause == "gil_thread":
            threading.Thread(target=hold_the_interpreter, args=(self.ended,), name="statistics", daemon=True).start()
        elif self.cause == "neighbour":
            core = str(min(os.sched_getaffinity(0)))
            for thread in Path("/proc/self/task").iterdir():
                os.sched_setaffinity(int(thread.name), {int(core)})
            busy = [sys.executable, "-c", "while True: pass"]
            self.neighbours = [subprocess.Popen(["taskset", "-c", core, *busy]) for _ in range(2)]
        elif self.cause == "sigstop":
            pulse = f"while kill -STOP {me} && sleep {SLOW_S} && kill -CONT {me} && sleep 0.03; do :; done"
            self.neighbours = [subprocess.Popen(["bash", "-c", pulse], stderr=subprocess.DEVNULL)]
        elif self.cause == "cpulimit":
            self.neighbours = [subprocess.Popen(["cpulimit", "-q", "-p", str(me), "-l", "10"])]
        elif self.cause == "cgroup":
            self.cgroup = limited(me)

    def end(self) -> None:
        self.ended.set()
        for neighbour in self.neighbours:
            neighbour.kill()
            neighbour.wait()
        with contextlib.suppress(OSError):
            os.kill(os.getpid(), 18)
        if self.cgroup is not None:
            (self.cgroup.parent / "cgroup.procs").write_text(str(os.getpid()))
            self.cgroup.rmdir()

    def log(self) -> None:
        if self.cause == "callback":
            with (self.folder / "metrics.jsonl").open("a") as file:
                for number in range(30):
                    file.write(f"{number}\n")
                    file.flush()
                    os.fsync(file.fileno())
                time.sleep(SLOW_S)
        elif self.cause == "gc":
            gc.collect()

    def touch(self) -> None:
        if self.cause == "page_faults":
            with mmap.mmap(-1, 64 << 20) as fresh:
                for at in range(0, len(fresh), 4096):
                    fresh[at] = 1


def batches(loader: DataLoader[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from loader


def train(options: argparse.Namespace, folder: Path) -> None:
    rank = dist.get_rank()
    cause = options.cause if rank == options.rank else ""
    if cause == "http":
        serve(folder)
    torch.manual_seed(0)
    network = Model()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    workers = 1 if options.cause == "worker_sleeps" else 0
    samples = Images(cause, options.from_step * BATCH, folder)
    source = batches(DataLoader(samples, BATCH, num_workers=workers, prefetch_factor=2 if workers else None))
    ways = Ways(cause, folder)
    compiled = torch.compile(lambda x: x.sin().sum(), backend="aot_eager") if cause == "recompilation" else None
    with sftriage.Monitor(stages=("data", "forward", "backward", "optimizer"), sync=("backward",)) as monitor:
        monitor.watch(model)
        for step in range(options.steps):
            slow = step >= options.from_step
            if step == options.from_step:
                sys.stderr.write(f"onset {time.time()}\n")
                ways.begin()
            with monitor.step():
                with monitor.stage("data"):
                    x = next(source)
                with monitor.stage("forward"):
                    network.extra = slow and cause == "extra_operator"
                    if slow and cause == "longer_sequences":
                        x = x.repeat(40, 1)
                    if slow and compiled is not None:
                        torch._dynamo.reset()
                        compiled(x.detach())
                    if slow:
                        ways.touch()
                    loss = F.mse_loss(model(x), x)
                with monitor.stage("backward"):
                    optimizer.zero_grad()
                    loss.backward()
                with monitor.stage("optimizer"):
                    optimizer.step()
                    if slow and cause == "checkpoint":
                        big = torch.zeros(4 << 20)
                        torch.save({"model": model.state_dict(), "ballast": big}, folder / "checkpoint.pt")
                if slow:
                    ways.log()
    ways.end()


CAUSES = (
    "dataset_sleeps", "worker_sleeps", "decoding", "gil_thread", "gc", "neighbour", "sigstop", "cpulimit", "cgroup",
    "disk", "http", "longer_sequences", "extra_operator", "callback", "checkpoint", "recompilation", "page_faults",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cause", choices=(*CAUSES, "none"), default="none")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--from-step", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        train(options, Path(folder))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
