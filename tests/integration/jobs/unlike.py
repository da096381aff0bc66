"""``unlike.py RELEASE HOW...``: trains until RELEASE is there, the last rank slow in data from step 40 on.

HOW the last rank is unlike the others: ``loader`` (it loads batches by itself), ``threads`` (OMP_NUM_THREADS),
``pinned`` (to one core), ``float64`` (its parameters), ``hostile`` (secrets, very long and binary variables).
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import sftriage

SLOW_FROM, MOST_STEPS, SLOW_S = 40, 20_000, 0.03


class Ones(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return MOST_STEPS

    def __getitem__(self, _: int) -> torch.Tensor:
        return torch.ones(8)


def become_unlike(ways: list[str]) -> None:
    if "threads" in ways:
        os.environ["OMP_NUM_THREADS"] = "7"
    if "pinned" in ways:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if "hostile" in ways:
        os.environ["NCCL_COMM_ID"] = "https://ada:s3cret@example.com"
        os.environ["TORCH_HUB_TOKEN"] = "s3cret"
        os.environ["OMP_DISPLAY_ENV"] = "x" * 100_000
        os.environb[b"GLOO_SOCKET_IFNAME"] = b"\x1b[31m\xff\xfe"
        os.environ.update({f"NCCL_{number}": "y" * 199 for number in range(5000)})


def main() -> None:
    release, ways = Path(sys.argv[1]), sys.argv[2:]
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    last = dist.get_rank() == dist.get_world_size() - 1
    ways = ways if last else []
    become_unlike(ways)
    monitor = sftriage.Monitor()
    model = torch.nn.Linear(8, 8).to(torch.float64 if "float64" in ways else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = iter(DataLoader(Ones(), batch_size=1, num_workers=0 if "loader" in ways else 1))
    with monitor:
        for step in range(MOST_STEPS):
            with monitor.step():
                with monitor.stage("data"):
                    batch = next(batches).to(model.weight.dtype)
                    time.sleep(SLOW_S if last and step >= SLOW_FROM else 0.002)
                with monitor.stage("forward"):
                    loss = model(batch).square().mean()
                with monitor.stage("backward"):
                    loss.backward()
                    gradient = model.weight.grad.float()
                    dist.all_reduce(gradient)
                with monitor.stage("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
                ends = torch.tensor(float(dist.get_rank() == 0 and release.exists()))
                dist.broadcast(ends, 0)
            if ends:
                break
    os._exit(0)


if __name__ == "__main__":
    main()
