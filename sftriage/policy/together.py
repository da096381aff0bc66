"""Captures that belong together are made in the same steps, to be laid side by side. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sftriage.records import CaptureRequest, Profiler

READY_S: dict[Profiler, float] = {"torch": 0.1, "nsys": 4.0}
"""How long it may take until every rank has its request, and its profiler is there."""

_SPARE_STEPS = 4
"""Ranks are not all in the same step, and a step may be recorded beforehand to know what it takes."""


def in_the_same_steps(requests: Sequence[CaptureRequest], step: int, step_s: float) -> tuple[CaptureRequest, ...]:
    """The requests, with the step before which none is to begin, where there are several.

    Args:
        requests: what was asked for at once.
        step: the step that the foremost rank is in.
        step_s: what a step takes, or about.
    """
    ready_s = max((READY_S.get(one.profiler, 0.0) for one in requests), default=0.0)
    if len(requests) < 2 or ready_s == 0.0:
        return tuple(requests)
    lead = max(one.warmup_steps for one in requests) + _SPARE_STEPS + math.ceil(ready_s / max(step_s, 1e-3))
    return tuple(replace(one, first_step=step + lead) if one.profiler in READY_S else one for one in requests)
