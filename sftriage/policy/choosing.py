"""Which profiler runs: the one that is named, or what ``auto`` makes of where the time goes. Pure.

Where the host does the work, Python stacks alone say which line does it, and nothing is started that would have to be
stopped again. Where a stage computes, operators and kernels do; so they do where it is not known what is slow, and the
stacks are sampled beside them. What one leaves open, another is asked for: see `left_open` in `sftriage.reduce`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sftriage.model.captures import SAMPLE_STACKS, SAMPLES_PER_SECOND, ChoiceReason, LeftOpen, Profiler
from sftriage.model.verdicts import Clock
from sftriage.policy.schema import Capture

COMPUTE = frozenset({"h2d", "forward", "fwd", "loss", "backward", "bwd", "optimizer", "optim"})
"""Words in the name of a stage that computes: what fills it are operators. Any other is the host's own work, unless
ranks wait for each other in it."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What there is to see.

    ``stage`` is None for all local stages, or without a suspect. ``sync`` are the stages in which ranks wait for each
    other. ``left_open`` is what an earlier capture of the same suspect does not show.
    """

    stage: str | None
    sync: Collection[str] = ()
    clock: Clock = "host"
    nsys: bool = False
    stands_still: bool = False
    left_open: LeftOpen = ""


@dataclass(frozen=True, slots=True)
class Means:
    """What runs, and why ``auto`` chose it; "" where it was named. ``once``: the stacks, one time, from outside."""

    profiler: Profiler
    chosen: ChoiceReason = ""
    once: bool = False

    def steps(self, asked: int) -> int:
        """The steps of a request, which is bounded in them also where it is of none."""
        return 1 if self.once else asked

    def warmup_steps(self, asked: int) -> int:
        """The steps before those: stacks need none."""
        return 0 if self.profiler == "stacks" else asked


def choose(capture: Capture, case: Situation) -> Means | None:
    """What runs; None where nothing would show what was left open.

    A rank that stands still takes no step in which its trainer could do anything: it is looked at from outside.
    So is one of whom native frames are wanted, or its flight recorder's dump, which only that can have.
    """
    if capture.profiler == "stacks":
        return Means("stacks", once=case.stands_still or capture.stacks.from_outside)
    if capture.profiler != "auto":
        return Means(capture.profiler)
    if case.stands_still:
        return Means("stacks", "stands_still", once=True)
    on_device = case.nsys and case.clock == "device"
    if case.left_open == "stacks":
        return Means("stacks", "left_open")
    if case.left_open == "system":
        return Means("nsys", "left_open") if case.nsys else None
    if case.left_open:
        return Means("nsys" if on_device else "torch", "left_open")
    if case.stage is not None and not computes(case.stage, case.sync):
        return Means("stacks", "host_stage")
    if on_device:
        return Means("nsys", "device_clock")
    return Means("torch", "whole_rank" if case.stage is None else "compute_stage")


def computes(stage: str, sync: Collection[str] = ()) -> bool:
    """Whether a stage is filled by operators, or waits for other ranks' operators."""
    return stage in sync or not COMPUTE.isdisjoint(re.split(r"[^a-z0-9]+", stage.lower()))


def options_of(capture: Capture, means: Means) -> dict[str, Any]:
    """The options of what runs, ready for JSON."""
    if means.profiler == "stacks" and not means.once:
        return {SAMPLE_STACKS: True, SAMPLES_PER_SECOND: capture.samples_per_second}
    options = {"torch": capture.torch, "nsys": capture.nsys, "stacks": capture.stacks}[means.profiler]
    values: dict[str, Any] = options.model_dump(mode="json", exclude_none=True)
    if values.get(SAMPLE_STACKS):
        values[SAMPLES_PER_SECOND] = capture.samples_per_second
    return values
