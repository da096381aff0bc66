"""A pipeline whose stages a policy's ``mitigate`` may have run further ahead under a slow link. Runs in the trainer.

    schedule = attach(Schedule1F1B(stage, n_microbatches, loss_fn), most=12)   # on all ranks, before the first step

Each rank notes what a microbatch takes it, and on its way there: from the end of the computation that sends it, by the
clock that ranks of a host share, to where it could be used. Only a rank that waited for it knows that.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import median
from time import monotonic_ns
from typing import Any

from torch.distributed.pipelining import Schedule1F1B

from sftriage.log import warn
from sftriage.mitigate.adapted import adapt, adapted_schedule, is_known
from sftriage.mitigate.joining import joined
from sftriage.mitigate.switching import BACK_NS, BACKWARD_NS, FORWARD_NS, THERE_NS, Switch
from sftriage.recorder.monitor import RINGS_ENV
from sftriage.recorder.recording import step_now

TYPICAL_STEPS = 9
"""Of so many recent steps, what a stage notes is the median."""
WAITED = 4
"""Who waited for less than such a part of what a message took may have been busy when it came."""
MOST = 255
AS_BEFORE = "stages run as before"

_COMPUTES = ("forward_one_chunk", "backward_one_chunk")


def attach(schedule: Any, most: int) -> Any:
    """The schedule to step in the place of torch's ``Schedule1F1B``: the same until a policy has it run further ahead.

    It is the same object where sftriage does not watch the job; and, with a warning, where the pipeline spans hosts or
    has stages on a GPU, or it is another schedule, or an unknown torch. All ranks call this before the first step. This
    stage has room for the activations of ``most`` microbatches.
    """
    if type(schedule) is not Schedule1F1B or not is_known():
        if RINGS_ENV in os.environ:
            warn("%s: further ahead is here for Schedule1F1B, of a torch that is known", AS_BEFORE)
        return schedule
    stage = schedule._stage
    fits = stage.stage_index == stage.group_rank and stage.num_stages == stage.group_size
    switch = joined(
        AS_BEFORE,
        "further ahead is here for a stage a rank, on the CPU, on one host",
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
        # Of the step in progress: what computing took, and messages that were waited for; and since when it is idle.
        self._worked_ns, self._on_way_ns = [0, 0], [[0], [0]]
        self._idle_ns = 0
        for way, name in enumerate(_COMPUTES):
            setattr(stage, name, partial(self._compute, way, getattr(stage, name)))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._schedule._has_backward:
            # (the first stage may be through before the last one begins)
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
