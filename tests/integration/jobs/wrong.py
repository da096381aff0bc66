"""A trainer that does everything wrong that `sftriage doctor` may find, or the same as its lines mend it.

How it is recorded (`seams`: not at all; `monitor`: by a Monitor of its own), and `wrong` or `mended`.
"""

import contextlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import sftriage

HOW, MENDED = sys.argv[1], sys.argv[2] == "mended"
STEPS = 2000

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = nn.Linear(32, 1)
optimizer = torch.optim.Adam(model.parameters())


def named(name, **said):
    """A stage, in the script that was mended."""
    return sftriage.stage(name, **said) if MENDED else contextlib.nullcontext()


def without_a_monitor():
    """Batches of its own, `forward` called past all hooks, gradients by `autograd.grad`, averaged in the background."""
    for _ in range(STEPS):
        with named("data"):
            batch = torch.randn(8, 32)
            time.sleep(0.004)
        with named("forward"):
            loss = model.forward(batch).square().mean()
        with named("backward"):
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        with named("exchange", sync=True):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                dist.all_reduce(gradient, async_op=True).wait()
                parameter.grad = gradient
        optimizer.step()


def with_a_monitor():
    """A stage that is never entered, one that was never declared, nothing that waits, and a long time in no stage."""
    parallel = nn.parallel.DistributedDataParallel(model)
    if MENDED:
        monitor = sftriage.Monitor(("data", "forward", "backward", "optimizer"), sync=("backward",))
        monitor.watch(parallel)
    else:
        monitor = sftriage.Monitor(("data", "forward", "backward", "optimizer", "h2d"), sync=())
    for _ in range(STEPS):
        with monitor.step():
            with monitor.stage("data" if MENDED else "loading"):
                batch = torch.randn(8, 32)
                time.sleep(0.004)
            with monitor.stage("forward"):
                loss = parallel(batch).square().mean()
            with monitor.stage("backward"):
                loss.backward()
            with monitor.stage("optimizer"):
                optimizer.step()
                optimizer.zero_grad()


without_a_monitor() if HOW == "seams" else with_a_monitor()
