"""A pipeline over Gloo, a stage a rank, with a delayed link: steps by one schedule after the other.

``delayed_pipeline.py SPEC``: JSON with ``forward_s``, ``backward_s``, ``delay_S`` (of the link after each stage but the
last), ``microbatches`` and ``rounds``: a list of how far ahead each stage is, each for a step; "1F1B" is torch's own
schedule. With ``transfers``, a link holds its sender up ("held"), or what is sent leaves from the host ("host").
Computations sleep, so that it does not matter how many cores there are. What is sent over a delayed link leaves so much
later, in order. The first rank says, in JSON, in which order each stage computed, and from which threads its results
left; that all gradients are those of the first round is checked.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules

from sftriage.errors import UsageError
from sftriage.mitigate.adapted import HostTransfers, adapt, adapted_schedule

WIDTH = 8


class Link(threading.Thread):
    """What is sent leaves after a delay; several may be under way."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(daemon=True)
        self.delay_s = delay_s
        self.sent: queue.Queue[tuple[float, list[dist.P2POp], Sending]] = queue.Queue()
        self.start()

    def send(self, operations: list[dist.P2POp]) -> list[Sending]:
        sending = Sending()
        self.sent.put((time.monotonic() + self.delay_s, operations, sending))
        return [sending]

    def run(self) -> None:
        while True:
            due_s, operations, sending = self.sent.get()
            time.sleep(max(0.0, due_s - time.monotonic()))
            sending.works = really_exchange(operations)
            sending.left.set()


class Sending:
    """As much of a work handle as torch's schedules ask for."""

    def __init__(self) -> None:
        self.left = threading.Event()
        self.works: list[dist.Work] = []

    def is_completed(self) -> bool:
        return self.left.is_set() and all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        self.left.wait()
        for work in self.works:
            work.wait()


really_exchange = schedules._batch_p2p
sent_from: list[str] = []
"""The threads from which this rank's results have left."""


def delay(rank: int, delay_S: list[float], transfers: str) -> None:
    """Have what this rank sends over delayed links leave later."""
    links: dict[int, Link] = {}
    for peer, link in ((rank + 1, rank), (rank - 1, rank - 1)):
        if 0 <= link < len(delay_S) and delay_S[link]:
            links[peer] = Link(delay_S[link])

    def leave(mine: HostTransfers, tensor: torch.Tensor, peer: int) -> Sending | dist.Work:
        sent_from.append(threading.current_thread().name.partition("_")[0])
        operation = dist.P2POp(dist.isend, tensor, peer, mine.group)
        return links[peer].send([operation])[0] if peer in links else really_leave(mine, tensor, peer)

    really_leave, HostTransfers._leave = HostTransfers._leave, leave  # type: ignore[method-assign]

    def exchange(operations: list[dist.P2POp], desc: str | None = None) -> list[object]:
        peer = operations[0].peer if operations else rank
        sent = [one for one in operations if peer in links and one.op is dist.isend]
        at_once = [one for one in operations if one not in sent]
        sent_from.extend(threading.current_thread().name for one in operations if one.op is dist.isend)
        if transfers == "held" and sent:
            time.sleep(links[peer].delay_s)
            return really_exchange(operations)
        return [*(links[peer].send(sent) if sent else ()), *(really_exchange(at_once) if at_once else ())]

    schedules._batch_p2p = exchange


class Asleep(torch.autograd.Function):
    """As much computing as a stage does."""

    @staticmethod
    def forward(ctx, x, stage, number):  # type: ignore[override]
        ctx.stage, ctx.number = stage, number
        stage.order.append(f"F{number}")
        time.sleep(stage.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        ctx.stage.order.append(f"B{ctx.number}")
        time.sleep(ctx.stage.backward_s)
        return grad, None, None


class Layer(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.order: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "meta":
            return self.linear(x)
        # (a computation is of the microbatch that is the next of its kind)
        number = sum(one[0] == "F" for one in self.order)
        return Asleep.apply(self.linear(x), self, number)


def main(spec: dict) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    transfers = spec.get("transfers", "")
    delay(rank, spec["delay_S"], transfers)
    torch.manual_seed(rank)
    layer = Layer(spec["forward_s"], spec["backward_s"])
    microbatches = spec["microbatches"]
    example = torch.zeros(1, WIDTH)
    sent = example.clone().requires_grad_()
    own_stage, stage = (
        PipelineStage(layer, rank, n, torch.device("cpu"), input_args=(sent if rank else example,), output_args=(sent,))
        for _ in range(2)
    )
    own = Schedule1F1B(own_stage, microbatches, loss_fn=nn.functional.mse_loss)
    from_host = HostTransfers(stage, timedelta(seconds=60)) if transfers == "host" else None
    adapted = adapted_schedule(stage, microbatches, nn.functional.mse_loss, range(n, 0, -1))
    torch.manual_seed(99)
    inputs, targets = torch.randn(microbatches, WIDTH), torch.randn(microbatches, WIDTH)
    told, first = [], None
    for ahead in spec["rounds"]:
        schedule = own if ahead == "1F1B" else adapted
        if schedule is adapted:
            adapt(adapted, ahead)
        layer.zero_grad()
        layer.order.clear()
        sent_from.clear()
        dist.barrier()
        schedule.step(*([inputs] if rank == 0 else []), **({"target": targets} if rank == n - 1 else {}))
        gradient = torch.cat([one.grad.flatten() for one in layer.parameters()])
        first = gradient.clone() if first is None else first
        assert torch.equal(gradient, first), "the gradients depend on the schedule"
        of_all: list = [None] * n
        dist.all_gather_object(of_all, (list(layer.order), sorted(set(sent_from))))
        orders, threads = zip(*of_all, strict=True)
        told.append({"orders": orders, "sent_from": threads})
    try:
        adapt(adapted, [1] * (n - 1) + [2])
    except UsageError as error:
        told.append({"refused": str(error)})
    if from_host is not None:
        from_host.finish()
    if rank == 0:
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    main(json.loads(sys.argv[1]))
    os._exit(0)
