"""A pipeline of a stage a rank over Gloo that is watched, and has taken in that its stages may run further ahead.

``slow_link.py SPEC``: JSON with ``delays``, a file of JSON: by how much each link delays what is sent over it, in
seconds; ``forward_s`` and ``backward_s`` of a microbatch on each stage, of which ``slow_rank`` takes twice as long;
``microbatches``, ``most`` and ``steps``. Computations sleep. ``killed`` says which ``rank`` is killed as it is to run
further ahead: ``once`` it has ``voted`` for that, or has ``switched``, and computed nothing since. With ``copies``,
ranks are of so many pipelines, one after the other, and the copies of a stage share gradients, and have taken StragglAR
in. Ranks meet in the file MEETING, where no launcher has said how else.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from delayed_pipeline import WIDTH, Layer, Link, really_exchange
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules
from torch.nn.parallel import DistributedDataParallel

from sftriage.mitigate import adapted, stragglar
from sftriage.mitigate.switching import Switch
from sftriage.trainer.monitor import Monitor


def delayed(rank: int, n: int) -> dict[int, Link]:
    """The links of this rank, by the number of the one before them: what is sent over them leaves later."""
    links = {link: Link(0.0) for link in (rank - 1, rank) if 0 <= link < n - 1}

    def exchange(operations: list[dist.P2POp], desc: str | None = None) -> list[object]:
        sent = [one for one in operations if one.op is dist.isend]
        received = [one for one in operations if one.op is not dist.isend]
        works = [work for one in sent for work in links[min(rank, one.peer)].send([one])]
        return [*works, *(really_exchange(received) if received else ())]

    schedules._batch_p2p = exchange
    return links


def killed_once(where: str) -> None:
    """Have this rank be gone where all are about to run further ahead."""
    begin, adapt = Switch.begin, adapted.adapt

    def begun(switch: Switch, step: int) -> int:
        value = begin(switch, step)
        if switch._vote:
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    def adapt_and_die(*plan: object) -> None:
        adapt(*plan)
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "voted":
        Switch.begin = begun
    else:
        adapted.adapt = adapt_and_die


def group_of(ranks: Iterable[range]) -> dist.ProcessGroup:
    groups = {of: dist.new_group(list(of)) for of in ranks}
    return next(group for of, group in groups.items() if dist.get_rank() in of)


def main(spec: dict) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    n = world_size // spec.get("copies", 1)
    at = rank % n
    if rank == spec.get("killed", {}).get("rank"):
        killed_once(spec["killed"]["once"])
    links = delayed(rank, world_size)
    times = 2.0 if rank == spec.get("slow_rank") else 1.0
    layer = module = Layer(spec["forward_s"] * times, spec["backward_s"] * times)
    pipeline = group_of(range(first, first + n) for first in range(0, world_size, n))
    if n < world_size:
        module = DistributedDataParallel(layer, process_group=group_of(range(at, world_size, n) for at in range(n)))
    microbatches, example = spec["microbatches"], torch.zeros(1, WIDTH)
    sent = example.clone().requires_grad_()
    of_stage = {"input_args": (sent if at else example,), "output_args": (sent,), "group": pipeline}
    stage = PipelineStage(module, at, n, torch.device("cpu"), **of_stage)
    schedule = adapted.attach(Schedule1F1B(stage, microbatches, loss_fn=nn.functional.mse_loss), most=spec["most"])
    if module is not layer:
        stragglar.attach(module)
    inputs, targets = torch.randn(microbatches, WIDTH), torch.randn(microbatches, WIDTH)
    with Monitor(("data", "pipeline", "optimizer"), ("pipeline",), cohort=f"pp{at}") as monitor:
        for _ in range(spec["steps"]):
            with monitor.step():
                with monitor.stage("data"):
                    delays = json.loads(Path(spec["delays"]).read_text())
                    for link, of in links.items():
                        of.delay_s = delays[link]
                    layer.order.clear()
                with monitor.stage("pipeline"):
                    schedule.step(*([inputs] if at == 0 else []), **({"target": targets} if at == n - 1 else {}))
                with monitor.stage("optimizer"):
                    layer.zero_grad()


if __name__ == "__main__":
    place = {"init_method": f"file://{os.environ['MEETING']}"} if "MEETING" in os.environ else {}
    ranks = {name: int(os.environ[name.upper()]) for name in ("rank", "world_size")} if place else {}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **place, **ranks)
    main(json.loads(sys.argv[1]))
    os._exit(0)
