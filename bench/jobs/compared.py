"""The job of the comparison: a plain training loop with DDP over Gloo, to which one tool is attached as documented.

``COMPARED_PLAN`` holds a `Plan` as JSON. A rank writes its process id before its first step, and when each step ended
after its last one. Work is matrix products and waits, as on the host of a GPU job; the fault is the same for all tools.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STAGES_S = {"data": 0.002, "forward": 0.010, "backward": 0.014, "optimizer": 0.004}
"""How long a healthy rank waits in each stage; its matrix products come on top."""
JITTER, WIDTH, BATCH = 0.04, 256, 16


@dataclass(frozen=True, slots=True)
class Plan:
    """One job. The fault is ``more_s`` in ``stage`` of ``rank`` (None: in all stages), in every ``every``-th step."""

    tool: str
    out: str
    steps: int
    seed: int
    onset: int
    rank: int | None = None
    stage: str | None = None
    more_s: float = 0.0
    every: int = 1
    busy: bool = False
    last: int = 1 << 30  # the step after the last with the fault


class Pace:
    """How long this rank takes in each stage of the step in progress."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan, self._slow, self.step = plan, plan.rank == rank, 0
        self._jitter = random.Random(f"{plan.seed}-{rank}")

    def take(self, stage: str) -> None:
        plan = self._plan
        time.sleep(STAGES_S[stage] * max(0.5, self._jitter.gauss(1.0, JITTER)))
        late = plan.onset <= self.step < plan.last and (self.step - plan.onset) % plan.every == 0
        if not (self._slow and late and plan.stage in (stage, None)):
            return
        more_s = plan.more_s if plan.stage else plan.more_s * STAGES_S[stage] / sum(STAGES_S.values())
        if not plan.busy:
            time.sleep(more_s)
        until = time.monotonic() + more_s * plan.busy
        while time.monotonic() < until:
            pass


class Batches(Dataset[Tensor]):
    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        self._pace.take("data")
        return torch.randn(BATCH, WIDTH)


class Network(nn.Module):
    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, batch: Tensor) -> Tensor:
        self._pace.take("forward")
        hidden = self.layers(batch)
        hidden.register_hook(lambda _: self._pace.take("backward"))
        out: Tensor = self.head(hidden)
        return out


class Optimizer(torch.optim.SGD):
    def __init__(self, pace: Pace, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._pace = pace

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self._pace.take("optimizer")


class Bare:
    """No tool, and what the tools below have in common: where a user attaches one to a loop."""

    def attach(self, model: DistributedDataParallel) -> None:
        """After the model is made."""

    def batches(self, loader: DataLoader[Tensor]) -> Iterator[Tensor]:
        return iter(loader)

    def step(self) -> AbstractContextManager[Any]:
        """Around a step with its batch."""
        return nullcontext()

    def training(self) -> AbstractContextManager[Any]:
        """Around a step without its batch."""
        return nullcontext()

    def stage(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def close(self) -> None:
        """After the last step."""


class Sftriage(Bare):
    """docs/record.md: a Monitor, which watches for the last gradient."""

    def __init__(self) -> None:
        import sftriage

        self._monitor = sftriage.Monitor(tuple(STAGES_S))
        self.step, self.stage = self._monitor.step, self._monitor.stage  # type: ignore[method-assign]

    def attach(self, model: DistributedDataParallel) -> None:
        self._monitor.watch(model)

    def close(self) -> None:
        self._monitor.close()


class TraceML(Bare):
    """https://traceopt-ai.github.io/traceml/user_guide/distributed-training/: ``init(mode="auto")``, ``trace_step``."""

    def __init__(self) -> None:
        import traceml_ai

        traceml_ai.init(mode="auto")
        self._trace_step = traceml_ai.trace_step

    def attach(self, model: DistributedDataParallel) -> None:
        self.training = lambda: self._trace_step(model)  # type: ignore[method-assign]


class Gpuprof(Bare):
    """https://github.com/peppe-tringali/gpuprof#distributed-training--first-class: each rank pushes to one server.

    With the waits of the loader and the time of each bucket, which its README has as options.
    """

    def __init__(self) -> None:
        import gpuprof

        # The server keeps everything: no file of this rank, and no summary printed from it.
        self._profile = gpuprof.profile("compared", db_path=None, summary=False)
        self._profiler = self._profile.__enter__()

    def attach(self, model: DistributedDataParallel) -> None:
        self._profiler.instrument_ddp(model)

    def batches(self, loader: DataLoader[Tensor]) -> Iterator[Tensor]:
        return iter(self._profiler.wrap_dataloader(loader))

    def close(self) -> None:
        self._profile.__exit__(None, None, None)


TOOLS: dict[str, type[Bare]] = {"bare": Bare, "sftriage": Sftriage, "traceml-ai": TraceML, "gpuprof": Gpuprof}


@contextmanager
def written(out: Path, rank: int) -> Iterator[list[float]]:
    """When each step ended, in seconds since the epoch; kept at the end."""
    (out / f"{rank}.pid").write_text(str(os.getpid()))
    ended_s: list[float] = []
    yield ended_s
    part = out / f".{rank}"
    part.write_text(json.dumps(ended_s))
    part.replace(out / f"{rank}.json")


def main() -> None:
    plan = Plan(**json.loads(os.environ["COMPARED_PLAN"]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(plan.seed)
    pace, tool = Pace(plan, rank), TOOLS[plan.tool]()
    model = DistributedDataParallel(Network(pace), bucket_cap_mb=0.5)
    optimizer = Optimizer(pace, model.parameters(), lr=1e-4)
    tool.attach(model)
    batches = tool.batches(DataLoader(Batches(pace), batch_size=None))
    with written(Path(plan.out), rank) as ended_s:
        for step in range(plan.steps):
            pace.step = step
            with tool.step():
                with tool.stage("data"):
                    batch = next(batches)
                with tool.training():
                    with tool.stage("forward"):
                        loss = model(batch).square().mean()
                    with tool.stage("backward"):
                        loss.backward()
                    with tool.stage("optimizer"):
                        optimizer.step()
                        optimizer.zero_grad()
            ended_s.append(time.time())
    tool.close()
    dist.barrier()
    # Gloo's threads live on; one that lets go of its last tensor while the interpreter is torn down aborts the process.
    dist.destroy_process_group()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
