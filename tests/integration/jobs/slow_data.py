"""``slow_data.py RELEASE [SECONDS [HOW]]``: trains until RELEASE is there, the last rank slow in data from step 60 on.

HOW: it sleeps; ``opaque``, waits where no line says for what; ``hangs`` in forward too, once it is profiled and until
there is a file ``go-on`` beside RELEASE; ``profiles`` itself all the time, so that it refuses to be captured.
"""

import os
import select
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from averaging import average_gradients, descend

import sftriage

WHO = (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))
SLOW_FROM, MOST_STEPS = 60, 20_000


def rendezvous() -> None:
    """Find the other ranks, of this attempt: a name of its own, or an address that a killed one left is found."""
    rank, ranks = (int(os.environ.get(name) or os.environ[of_slurm]) for name, of_slurm in WHO)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def hang_here(go_on: Path) -> None:
    while not go_on.exists():
        time.sleep(0.02)


def main() -> None:
    release, slow_s = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.02
    how = sys.argv[3] if len(sys.argv) > 3 else ""
    poller = select.poll()
    torch.set_num_threads(1)
    distributed = any(name in os.environ for name in WHO[0])
    monitor = sftriage.Monitor()
    model = torch.nn.Linear(64, 64)
    if distributed:
        rendezvous()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    last = rank == ranks - 1
    if last and how == "profiles":
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]).start()
    with monitor:
        for step in range(MOST_STEPS):
            with monitor.step():
                with monitor.stage("data"):
                    batch = torch.randn(8, 64)
                    if last and step >= SLOW_FROM and how == "opaque":
                        poller.poll(1000 * slow_s)
                    elif last and step >= SLOW_FROM:
                        time.sleep(slow_s)
                with monitor.stage("forward"):
                    if last and how == "hangs" and torch._C._autograd._profiler_enabled():
                        hang_here(release.with_name("go-on"))
                    loss = model(batch).square().mean()
                with monitor.stage("backward"):
                    loss.backward()
                    if distributed:
                        average_gradients(model)
                with monitor.stage("optimizer"):
                    descend(model)
                # The ranks have to leave at the same step: the first one says so.
                ends = torch.tensor(float(rank == 0 and release.exists()))
                if distributed:
                    dist.broadcast(ends, 0)
            if ends:
                break
    if rank == 0:
        sys.stdout.write("trained\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
