"""Train the same model twice under DDP over Gloo, plain and watched, and say where a gradient differs in any bit.

``bits.py DIRECTORY CASE...``: each CASE is one of `moments.CASES`. Prints a line of JSON a case: in how many places
gradients or parameters differ, and of how many steps the ready moment is known.
"""

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import sftriage
from sftriage.windows.rings import Ring
from tests.integration.jobs.moments import CASES
from tests.integration.jobs.moments import COMPARED_STEPS as STEPS
from tests.integration.jobs.ready import BACKEND

WIDTH = 24


class Network(nn.Module):
    """Four layers; by default the first one comes last in backward."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        if case == "tied":
            self.layers[3].weight = self.layers[0].weight
        self.case = case
        self.step = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        layers = list(self.layers)
        if self.case == "unused" and self.step % 3 == 1:
            layers = layers[1:]
        elif self.case == "used twice":
            layers = [layers[0], *layers]
        for layer in layers:
            value = layer(value).tanh() if self.case != "checkpoint" else checkpoint(layer, value, use_reentrant=False)
        return value


def ddp_options(case: str) -> dict[str, object]:
    return {
        "static graph": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
        "bucket view": {"gradient_as_bucket_view": True},
        "bucket view and zeros": {"gradient_as_bucket_view": True},
    }.get(case, {})


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def users_hooks(network: Network, *, before: bool) -> None:
    """Hooks of every sort, on the parameters that come last too: some are there before watch(), some come after."""
    weight, bias = network.layers[0].weight, network.layers[0].bias
    if before:
        weight.register_hook(lambda grad: grad * 1.5)
        weight.register_post_accumulate_grad_hook(halve)
        network.layers[0].register_full_backward_hook(lambda *_: None)
    else:
        bias.register_post_accumulate_grad_hook(halve)
        bias.register_hook(lambda grad: grad + 1e-2)
        weight.expand_as(weight).grad_fn.next_functions[0][0].register_hook(lambda *_: None)
        network.layers[1].register_full_backward_pre_hook(lambda _, grads: tuple(grad * 2 for grad in grads))


def in_float16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.fp16_compress_hook(state, bucket)


def one_by_one(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that waits in backward itself."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer() / dist.get_world_size())
    return done


COMM_HOOKS: dict[str, Callable[..., torch.futures.Future[torch.Tensor]]] = {
    "comm hook": in_float16,
    "comm hook that waits": one_by_one,
}


def train(case: str, monitor: sftriage.Monitor, *, watch: bool) -> list[torch.Tensor]:
    """Every gradient of every step, and the parameters at the end."""
    torch.manual_seed(1)
    network = Network(case)
    bucket_mb = 25 if case == "compile" else 0.003
    if case == "frozen, then thawed":
        network.layers[0].requires_grad_(False)
    ddp = DistributedDataParallel(network, bucket_cap_mb=bucket_mb, **ddp_options(case))
    if case in COMM_HOOKS:
        ddp.register_comm_hook(None, COMM_HOOKS[case])
    if case == "users' hooks":
        users_hooks(network, before=True)
    if watch:
        monitor.watch(ddp)
    if case == "users' hooks":
        users_hooks(network, before=False)
    model = torch.compile(ddp, backend=BACKEND) if case == "compile" else ddp
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(100 + dist.get_rank())
    kept = []
    batches = 3 if case == "accumulate" else 1
    for step in range(STEPS):
        network.step = step
        if case == "frozen, then thawed" and step == STEPS // 2:
            # Wrapped again, as DDP wants it; the network that is watched below it stays.
            network.layers[0].requires_grad_(True)
            model = ddp = DistributedDataParallel(network, bucket_cap_mb=0.003)
            if watch:
                monitor.watch(ddp)
        with monitor.step():
            for batch in range(batches):
                with contextlib.nullcontext() if batch == batches - 1 else ddp.no_sync():
                    with monitor.stage("forward"):
                        loss = model(torch.randn(8, WIDTH)).square().mean()
                    with monitor.stage("backward"):
                        loss.backward()
        kept += [
            torch.zeros(0) if parameter.grad is None else parameter.grad.clone() for parameter in network.parameters()
        ]
        optimizer.step()
        optimizer.zero_grad(set_to_none=case != "bucket view and zeros")
    return kept + [parameter.detach().clone() for parameter in network.parameters()]


def compare(case: str, directory: Path) -> dict[str, object]:
    rings = directory / str(CASES.index(case))
    rings.mkdir(exist_ok=True)
    with sftriage.Monitor(stages=("forward", "backward"), sync=("backward",), rings=rings) as monitor:
        plain = train(case, monitor, watch=False)
        watched = train(case, monitor, watch=True)
    # As integers: a NaN, or a zero of the other sign, is a bit like any other.
    pairs = [(one.view(torch.int32), other.view(torch.int32)) for one, other in zip(plain, watched, strict=True)]
    with Ring(rings / f"rank-{dist.get_rank()}.0.ring") as ring:
        records = ring.read().steps.records()
    return {
        "case": case,
        "compared": len(pairs),
        "parameters": len(plain) // (STEPS + 1),
        "differ": sum(not torch.equal(one, other) for one, other in pairs),
        "not_zero": sum(bool(one.any()) for one, _ in pairs),
        "ready_plain": sum(record.ready_ns is not None for record in records[:STEPS]),
        "ready_watched": sum(record.ready_ns is not None for record in records[STEPS:]),
    }


def main() -> None:
    directory, cases = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in cases:
        try:
            found = compare(case, directory)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            found = {"case": case, "skip": str(error).splitlines()[0]}
        sys.stdout.write(json.dumps(found | {"rank": dist.get_rank()}) + "\n")
    dist.barrier()


if __name__ == "__main__":
    main()
