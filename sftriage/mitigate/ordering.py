"""In which order a stage of a pipeline goes through its microbatches."""

from __future__ import annotations

from typing import Literal, NamedTuple


class ScheduledStep(NamedTuple):
    """One computation of a stage: forward (F) or backward (B) of a microbatch."""

    kind: Literal["F", "B"]
    microbatch: int


def order_of(warmup: int, microbatches: int) -> tuple[ScheduledStep, ...]:
    """What a stage computes: ``warmup`` forwards, then back and forth, then the backwards that are left."""
    ahead = min(warmup, microbatches)
    steps = [ScheduledStep("F", number) for number in range(ahead)]
    for number in range(microbatches):
        steps.append(ScheduledStep("B", number))
        if ahead + number < microbatches:
            steps.append(ScheduledStep("F", ahead + number))
    return tuple(steps)
