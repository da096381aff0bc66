"""In which order a stage of a pipeline goes through its microbatches."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Step(NamedTuple):
    """One computation of a stage: forward (F) or backward (B) of a microbatch."""

    kind: Literal["F", "B"]
    microbatch: int


def order_of(warmup: int, microbatches: int) -> tuple[Step, ...]:
    """What a stage computes: ``warmup`` forwards, then back and forth, then the backwards that are left."""
    ahead = min(warmup, microbatches)
    steps = [Step("F", number) for number in range(ahead)]
    for number in range(microbatches):
        steps.append(Step("B", number))
        if ahead + number < microbatches:
            steps.append(Step("F", ahead + number))
    return tuple(steps)
