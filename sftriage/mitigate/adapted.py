"""Pipelines of ``torch.distributed.pipelining`` whose stages run further ahead. Runs in the trainer.

With a plan of your own, such as `sftriage.mitigate.advice.planned` makes::

    schedule = adapted_schedule(stage, n_microbatches, loss_fn, ahead_S)
    schedule.step(...)
    adapt(schedule, other_ahead_S)   # between two steps, on all ranks

or as a policy's ``mitigate`` decides::

    schedule = attach(Schedule1F1B(stage, n_microbatches, loss_fn), most=12)   # on all ranks, before the first step

The order does not change results. With ``HostTransfers(stage)``, activations and gradients are sent from the host, so
that later computations do not queue behind them. torch's schedule runtime is not public: if it differs from torch 2.13,
these functions refuse before anything runs.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from statistics import median
from time import monotonic_ns
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B

from sftriage.errors import UsageError
from sftriage.log import warn
from sftriage.mitigate.schedule import order_of
from sftriage.mitigate.switching import BACK_NS, BACKWARD_NS, FORWARD_NS, THERE_NS, Switch, joined
from sftriage.trainer.monitor import RINGS_ENV
from sftriage.trainer.recording import step_now

_PREPARE = "_prepare_schedule_with_comms"


def adapted_schedule(
    stage: Any, n_microbatches: int, loss_fn: Callable[..., torch.Tensor] | None, ahead_S: Sequence[int], **options: Any
) -> Any:
    """A schedule with one stage per rank, used like torch's own; ``options`` are those of torch's schedules.

    Raises UsageError if torch's runtime is unknown, or the stages would deadlock.
    """
    runtime, _ = _private("_PipelineScheduleRuntime"), _private("_Action")
    schedule = runtime([stage], n_microbatches, loss_fn=loss_fn, **options)
    adapt(schedule, ahead_S)
    return schedule


def adapt(schedule: Any, ahead_S: Sequence[int]) -> None:
    """Change the plan from the next step on. Call on all ranks, between the same two steps."""
    n_stages = schedule._num_stages
    if len(ahead_S) != n_stages or list(ahead_S) != sorted(ahead_S, reverse=True) or ahead_S[-1] < 1:
        raise UsageError(f"{n_stages} stages ahead by {list(ahead_S)}: each must be at least as far ahead as the next")
    action, kinds = _private("_Action"), _private("_ComputationType")
    kind_of = {"F": kinds.FORWARD, "B": kinds.FULL_BACKWARD}
    schedule.pipeline_order = {
        stage: [action(stage, kind_of[kind], number) for kind, number in order_of(ahead, schedule._n_microbatches)]
        for stage, ahead in enumerate(ahead_S)
    }
    getattr(schedule, _PREPARE)(schedule.pipeline_order)


def is_known() -> bool:
    """Whether torch's schedule runtime has the known shape."""
    try:
        return all(map(_private, ("_PipelineScheduleRuntime", "_Action", "_ComputationType")))
    except UsageError:
        return False


def _private(name: str) -> Any:
    from torch.distributed.pipelining import schedules

    found, runtime = getattr(schedules, name, None), getattr(schedules, "_PipelineScheduleRuntime", None)
    if found is None or not hasattr(runtime, _PREPARE):
        raise UsageError(f"torch {torch.__version__} runs pipelines in an unknown way: their order is unchanged")
    return found


TYPICAL_STEPS = 9
"""Recent steps whose median a stage notes."""
WAITED = 4
"""A stage that waited less than 1/WAITED of a message's time may have been busy when the message arrived."""
MOST = 255
AS_BEFORE = "stages run as before"

_COMPUTES = ("forward_one_chunk", "backward_one_chunk")


def attach(schedule: Any, most: int) -> Any:
    """Wrap torch's ``Schedule1F1B`` so that a policy can let stages run further ahead. Call on all ranks before a step.

    Returns ``schedule`` itself if sftriage does not watch the job, and with a warning if the pipeline spans hosts, has
    stages on a GPU, is another schedule, or torch is unknown. This stage can hold activations of ``most`` microbatches.
    """
    if type(schedule) is not Schedule1F1B or not is_known():
        if RINGS_ENV in os.environ:
            warn("%s: running further ahead needs Schedule1F1B and a known torch", AS_BEFORE)
        return schedule
    stage = schedule._stage
    fits = stage.stage_index == stage.group_rank and stage.num_stages == stage.group_size
    switch = joined(
        AS_BEFORE,
        "running further ahead needs one stage a rank, on the CPU, on one host",
        stage.group,
        fits=fits and stage.device.type == "cpu",
        microbatches=schedule._n_microbatches,
    )
    if switch is None:
        return schedule
    usual_S = tuple(range(stage.num_stages, 0, -1))
    switch.most = min(max(most, usual_S[stage.stage_index]), MOST)
    options = {name: getattr(schedule, f"_{name}") for name in ("args_chunk_spec", "kwargs_chunk_spec")}
    options |= {"output_merge_spec": schedule._output_merge_spec, "scale_grads": schedule.scale_grads}
    followed = adapted_schedule(stage, schedule._n_microbatches, schedule._loss_fn, usual_S, **options)
    followed.step = _Followed(followed, stage, switch, usual_S).step
    return followed


class _Followed:
    def __init__(self, schedule: Any, stage: Any, switch: Switch, usual_S: tuple[int, ...]) -> None:
        self._schedule, self._switch, self._usual_S = schedule, switch, usual_S
        self._step = schedule.step
        self._receives = (not stage.is_first, not stage.is_last)
        self._recent: dict[int, deque[int]] = {}
        # Of the step in progress: computing times, times of awaited messages, and when the last computation ended.
        self._worked_ns, self._on_way_ns = [0, 0], [[0], [0]]
        self._idle_ns = 0
        for way, name in enumerate(_COMPUTES):
            setattr(stage, name, partial(self._compute, way, getattr(stage, name)))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._schedule._has_backward:
            # (without backward, the first stage may finish before the last begins)
            return self._step(*args, **kwargs)
        switch = self._switch
        before_S = switch.ahead_S
        switch.begin(step_now())
        if switch.ahead_S != before_S:
            adapt(self._schedule, switch.ahead_S or self._usual_S)
        self._worked_ns, self._on_way_ns = [0, 0], [[], []]
        self._idle_ns = monotonic_ns()
        outputs = self._step(*args, **kwargs)
        for word, worked_ns in zip((FORWARD_NS, BACKWARD_NS), self._worked_ns, strict=True):
            self._note(word, worked_ns // switch.microbatches)
        for word, on_way_ns in zip((THERE_NS, BACK_NS), self._on_way_ns, strict=True):
            if on_way_ns:
                self._note(word, min(on_way_ns))
        return outputs

    def _note(self, word: int, took_ns: int) -> None:
        recent = self._recent.setdefault(word, deque(maxlen=TYPICAL_STEPS))
        recent.append(took_ns)
        if len(recent) > TYPICAL_STEPS // 2:
            self._switch.took(word, int(median(recent)))

    def _compute(self, way: int, original: Callable[..., Any], microbatch: int, *args: Any, **kwargs: Any) -> Any:
        began_ns = monotonic_ns()
        if self._receives[way]:
            on_way_ns = began_ns - self._switch.sent_ns(way, microbatch)
            if began_ns - self._idle_ns > on_way_ns // WAITED:
                self._on_way_ns[way].append(on_way_ns)
        computed = original(microbatch, *args, **kwargs)
        self._idle_ns = monotonic_ns()
        self._switch.send(way, microbatch, self._idle_ns)
        self._worked_ns[way] += self._idle_ns - began_ns
        return computed


_SENDS, _RECEIVES = ("get_fwd_send_ops", "get_bwd_send_ops"), ("get_fwd_recv_ops", "get_bwd_recv_ops")


class HostTransfers:
    """Sends and receives for a stage in its own thread and group. A failed send raises at a later send, or in `finish`.

    Create it on all ranks of the stage's group at the same time. Each transfer has ``timeout`` (torch's default: half
    an hour). Raises UsageError if the stage is not on the CPU, or torch's stages have an unknown shape.
    """

    def __init__(self, stage: Any, timeout: timedelta | None = None) -> None:
        if not all(callable(getattr(stage, name, None)) for name in (*_SENDS, *_RECEIVES)):
            raise UsageError(f"torch {torch.__version__} sends activations in an unknown way: it is unchanged")
        if stage.device.type != "cpu":
            raise UsageError(f"a stage on {stage.device}: transfers from the host need stages on the CPU")
        ranks = dist.get_process_group_ranks(stage.group or dist.group.WORLD)
        self.group = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
        self._worker = ThreadPoolExecutor(1, "sftriage-transfers")
        self._under_way: deque[Future[dist.Work]] = deque()
        for names, instead in ((_SENDS, self._send), (_RECEIVES, self._receive)):
            for name in names:
                setattr(stage, name, partial(instead, getattr(stage, name)))

    def finish(self) -> None:
        """Wait for all sends."""
        while self._under_way:
            self._under_way.popleft().result().wait()

    def _send(self, operations_of: Callable[[int], list[dist.P2POp]], microbatch: int) -> list[dist.P2POp]:
        while self._under_way and self._under_way[0].done() and self._under_way[0].result().is_completed():
            self._under_way.popleft()
        for operation in operations_of(microbatch):
            # (the next computation may reuse this memory)
            self._under_way.append(self._worker.submit(self._leave, operation.tensor.detach().clone(), operation.peer))
        return []

    def _receive(self, operations_of: Callable[[int], list[dist.P2POp]], microbatch: int) -> list[dist.P2POp]:
        receives = operations_of(microbatch)
        return [dist.P2POp(dist.irecv, operation.tensor, operation.peer, self.group) for operation in receives]

    def _leave(self, tensor: torch.Tensor, peer: int) -> dist.Work:
        """In the worker thread. Does not wait, since neighbours may receive in any order."""
        sent = dist.isend(tensor, peer, self.group)
        assert sent is not None  # (it is None on ranks that are not of the group)
        return sent
