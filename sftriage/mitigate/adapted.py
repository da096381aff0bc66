"""Pipelines of ``torch.distributed.pipelining`` whose stages run as far ahead as planned. Runs in the trainer.

    schedule = adapted_schedule(stage, n_microbatches, loss_fn, ahead_S)
    schedule.step(...)
    adapt(schedule, other_ahead_S)   # between two steps, on all ranks

The results are the same whatever the order. Each computation waits for what it receives; a step ends when all that was
sent has arrived. `sftriage.mitigate.pipelines` plans how far ahead. torch's runtime of such orders is not public: one
of another shape than in torch 2.13 is refused before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sftriage.errors import UsageError
from sftriage.mitigate.ordering import order_of

_PREPARE = "_prepare_schedule_with_comms"


def adapted_schedule(
    stage: Any, n_microbatches: int, loss_fn: Callable[..., torch.Tensor] | None, ahead_S: Sequence[int], **options: Any
) -> Any:
    """A schedule of one stage a rank, to `step` as torch's own; ``options`` are those of torch's schedules.

    Raises UsageError where this torch has no such runtime, or stages would wait for each other.
    """
    runtime, _ = _private("_PipelineScheduleRuntime"), _private("_Action")
    schedule = runtime([stage], n_microbatches, loss_fn=loss_fn, **options)
    adapt(schedule, ahead_S)
    return schedule


def adapt(schedule: Any, ahead_S: Sequence[int]) -> None:
    """Have stages run as far ahead from the next step on: on all ranks, between the same two steps."""
    n_stages = schedule._num_stages
    if len(ahead_S) != n_stages or list(ahead_S) != sorted(ahead_S, reverse=True) or ahead_S[-1] < 1:
        raise UsageError(f"{n_stages} stages ahead by {list(ahead_S)}: each is as far ahead as the next, at least")
    action, kinds = _private("_Action"), _private("_ComputationType")
    kind_of = {"F": kinds.FORWARD, "B": kinds.FULL_BACKWARD}
    schedule.pipeline_order = {
        stage: [action(stage, kind_of[one.kind], one.microbatch) for one in order_of(ahead, schedule._n_microbatches)]
        for stage, ahead in enumerate(ahead_S)
    }
    getattr(schedule, _PREPARE)(schedule.pipeline_order)


def is_known() -> bool:
    """Whether this torch runs pipelines in the way that is known here."""
    try:
        return all(map(_private, ("_PipelineScheduleRuntime", "_Action", "_ComputationType")))
    except UsageError:
        return False


def _private(name: str) -> Any:
    from torch.distributed.pipelining import schedules

    found, runtime = getattr(schedules, name, None), getattr(schedules, "_PipelineScheduleRuntime", None)
    if found is None or not hasattr(runtime, _PREPARE):
        raise UsageError(f"torch {torch.__version__} runs pipelines in another way: their order stays as it is")
    return found
