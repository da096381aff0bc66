"""A second DDP job over Gloo, unlike the first: ways to be slow that nobody had in mind when causes were written.

torchrun --nproc-per-node 3 bench/causes_jobs/more.py --cause json --rank 1 --from-step 100 --steps 400
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import hashlib
import importlib
import json
import logging
import os
import queue
import re
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sftriage

WIDTH, BATCH, SLOW_S = 256, 64, 0.03


class Job:
    """What the ways to be slow work on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(16)))
        self.records = json.dumps([{"id": n, "tokens": list(range(n % 50))} for n in range(8000)])
        self.packed = zlib.compress(np.arange(1_200_000, dtype=np.int64).tobytes(), 1)
        self.lines = "\n".join(f"2026-11-23 04:05:{n % 60:02} rank={n % 8} loss={n / 7:.4f}" for n in range(50_000))
        self.lock = threading.Lock()
        self.seen: list[Tensor] = []
        self.begun: set[str] = set()

    def once(self, what: Callable[[], None]) -> bool:
        """Whether a helper thread of this name has to be started, which is then done."""
        if what.__name__ in self.begun:
            return False
        self.begun.add(what.__name__)
        threading.Thread(target=what, name=what.__name__, daemon=True).start()
        return True


def parse_lines(job: Job) -> None:
    sum(float(found["loss"]) for found in re.finditer(r"rank=(?P<rank>\d+) loss=(?P<loss>[\d.]+)", job.lines))


def is_valid(job: Job) -> None:
    re.match(r"(a+)+$", "a" * 19 + "b")


def load_records(job: Job) -> None:
    json.loads(job.records)


def unpack(job: Job) -> None:
    zlib.decompress(job.packed)


def checksum(job: Job) -> None:
    hashlib.sha256(job.packed * 8).hexdigest()


def shuffle(job: Job) -> None:
    order = np.random.default_rng(0).permutation(250_000)
    np.sort(order)


def run_tool(job: Job) -> None:
    subprocess.run(["sleep", str(SLOW_S)], check=True)


def note(job: Job) -> None:
    with sqlite3.connect(job.folder / "samples.db") as db:
        db.execute("create table if not exists seen (id integer, at real)")
        for n in range(3):
            db.execute("insert into seen values (?, ?)", (n, time.time()))
            db.commit()


def flush_all(job: Job) -> None:
    end_s = time.perf_counter() + SLOW_S
    while time.perf_counter() < end_s:
        (job.folder / "marker").write_text("x" * 100_000)
        os.sync()


def refresh(job: Job) -> None:
    def refresher() -> None:
        while True:
            with job.lock:
                time.sleep(2 * SLOW_S)
            time.sleep(0.002)

    job.once(refresher)
    with job.lock:
        pass


def prefetched(job: Job) -> None:
    def prefetcher() -> None:
        while True:
            time.sleep(2 * SLOW_S)
            job.ready.put(1)

    if "prefetcher" not in job.begun:
        job.ready: queue.Queue[int] = queue.Queue(2)
    job.once(prefetcher)
    job.ready.get()


def wait_for_file(job: Job) -> None:
    lock = job.folder / "index.lock"
    if "holder" not in job.begun:
        job.begun.add("holder")
        hold = (
            f"import fcntl, time\nf = open({str(lock)!r}, 'w')\n"
            f"while True:\n fcntl.flock(f, fcntl.LOCK_EX); time.sleep({2 * SLOW_S}); "
            "fcntl.flock(f, fcntl.LOCK_UN); time.sleep(0.001)"
        )
        job.holder = subprocess.Popen([sys.executable, "-c", hold])
        time.sleep(0.2)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def report(job: Job) -> None:
    if "drain" not in job.begun:
        reading, writing = os.pipe()
        job.log = logging.getLogger("progress")
        job.log.addHandler(logging.StreamHandler(os.fdopen(writing, "w", buffering=1)))
        job.log.setLevel(logging.INFO)

        def drain() -> None:
            while os.read(reading, 4096):
                time.sleep(0.002)

        job.once(drain)
    job.log.info("x" * 60_000)


def snapshot(job: Job) -> None:
    for _ in range(2):
        copy.deepcopy(job.network.state_dict())
    copy.deepcopy([[n] for n in range(8000)])


def save_quickly(job: Job) -> None:
    path = f"/dev/shm/causes-{os.getpid()}.pt"
    torch.save({"model": job.network.state_dict(), "moments": torch.zeros(2 << 20)}, path)
    Path(path).unlink()


def remember(job: Job) -> None:
    job.seen.append(torch.randn(3 << 18))
    torch.cat(job.seen[-60:]).mean()


def clip(job: Job) -> None:
    for parameter in job.network.parameters():
        for row in parameter.detach():
            row.clamp_(-1.0, 1.0)


def validate(job: Job) -> None:
    with torch.no_grad():
        for _ in range(3):
            job.network(torch.randn(BATCH * 4, WIDTH))


def reload_plugins(job: Job) -> None:
    for _ in range(12):
        importlib.reload(json.decoder)
        importlib.reload(importlib.import_module("argparse"))


def more_threads(job: Job) -> None:
    torch.set_num_threads(8)
    big = torch.ones(1 << 22)
    for _ in range(2):
        big.exp_().clamp_(0.5, 1.0)
    torch.set_num_threads(1)


def allocate(job: Job) -> None:
    job.buffers = [bytearray(24 << 20) for _ in range(2)]


def wait_for_peer(job: Job) -> None:
    ours, theirs = socket.socketpair()
    payload = b"x" * (8 << 20)
    sender = threading.Thread(target=lambda: [time.sleep(SLOW_S), theirs.sendall(payload)], name="peer", daemon=True)
    sender.start()
    left = len(payload)
    while left:
        left -= len(ours.recv(1 << 20))
    ours.close()
    theirs.close()


WAYS: dict[str, tuple[str, Callable[[Job], Any]]] = {
    "regex": ("data", parse_lines),
    "backtracking": ("data", is_valid),
    "json": ("data", load_records),
    "zlib": ("data", unpack),
    "sha256": ("data", checksum),
    "numpy": ("data", shuffle),
    "subprocess": ("data", run_tool),
    "sqlite": ("data", note),
    "sync": ("other", flush_all),
    "held_lock": ("data", refresh),
    "prefetch": ("data", prefetched),
    "file_lock": ("data", wait_for_file),
    "full_pipe": ("other", report),
    "deepcopy": ("other", snapshot),
    "save_shm": ("optimizer", save_quickly),
    "growing": ("forward", remember),
    "clip": ("optimizer", clip),
    "validate": ("other", validate),
    "reload": ("other", reload_plugins),
    "threads": ("forward", more_threads),
    "allocate": ("data", allocate),
    "peer": ("data", wait_for_peer),
}
"""Of each way the stage in which it is slow."""


class Training:
    """The loop, with its ways to be slow."""

    def __init__(self, job: Job, ways: list[str], from_step: int) -> None:
        self.job, self.ways, self.from_step = job, [WAYS[way] for way in ways], from_step
        self.step = 0

    def slow_in(self, stage: str) -> None:
        for where, way in self.ways if self.step >= self.from_step else ():
            if where == stage:
                way(self.job)

    def next_batch(self) -> Tensor:
        self.slow_in("data")
        return torch.randn(BATCH, WIDTH)

    def run(self, steps: int) -> None:
        model = DistributedDataParallel(self.job.network)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with sftriage.Monitor(stages=("data", "forward", "backward", "optimizer"), sync=("backward",)) as monitor:
            monitor.watch(model)
            for self.step in range(steps):
                if self.step == self.from_step:
                    sys.stderr.write(f"onset {time.time()}\n")
                with monitor.step():
                    with monitor.stage("data"):
                        x = self.next_batch()
                    with monitor.stage("forward"):
                        self.slow_in("forward")
                        loss = F.mse_loss(model(x), x)
                    with monitor.stage("backward"):
                        optimizer.zero_grad()
                        loss.backward()
                    with monitor.stage("optimizer"):
                        self.slow_in("optimizer")
                        optimizer.step()
                    self.slow_in("other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cause", action="append", default=[], metavar="WAY[@RANK]", help=", ".join(WAYS))
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--from-step", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    asked = [one.partition("@")[::2] for one in options.cause]
    mine = [way for way, rank in asked if int(rank or options.rank) == dist.get_rank()]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        Training(job, mine, options.from_step).run(options.steps)
        if "holder" in job.begun:
            job.holder.kill()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
