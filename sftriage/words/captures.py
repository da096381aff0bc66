"""Captures in words: by what, why that, what became of them, what they cost, and what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sftriage.decisions import CaptureRequest, CaptureResult, CaptureState, ChoiceReason, LeftOpen, Profiler
from sftriage.words.amounts import counted, milliseconds, size, some_ranks, span

CONTROL_PART = "healthy, captured in the same steps to compare the suspect with"
"""What the capture of a control is."""

PROFILERS: Mapping[Profiler, str] = {
    "torch": "PyTorch Profiler",
    "nsys": "Nsight Systems",
    "stacks": "the stack sampler",
}

CHOICES: Mapping[ChoiceReason, str] = {
    "host_stage": "{stage} is the host's own work, and Python stacks name the line",
    "compute_stage": "{stage} computes, and operators say what it computes",
    "device_clock": "the rank computes on a device, and the job runs under nsys",
    "whole_rank": "no single stage is suspected, and it has operators and stacks",
    "stands_still": "the rank takes no steps, and is looked at from outside",
    "left_open": "the capture that it follows does not show why the rank is slow",
}
"""Why ``auto`` chose a profiler."""

LEFT_OPEN: Mapping[LeftOpen, str] = {
    "": "nothing is left open",
    "operators": "its stacks do not show what the time went into",
    "stacks": "its operators do not show what the time went into",
    "system": "neither its operators nor its stacks show what the time went into",
}
"""What a capture does not show."""


def choice_words(chosen: ChoiceReason, profiler: Profiler, stage: str | None) -> str:
    """What ``auto`` chose, and why."""
    why = CHOICES[chosen].format(stage=stage or "all local stages")
    return f"auto chose {PROFILERS[profiler]}: {why}"


ENDINGS: Mapping[CaptureState, str] = {
    "failed": "the capture failed",
    "refused": "the capture was refused",
    "expired": "the capture was given up",
}
"""How a capture that left no trace has ended."""


def capturing_sentence(requests: Sequence[CaptureRequest]) -> str:
    """What is captured, of whom, and beside whom."""
    first = requests[0]
    what = counted(first.steps, "step") if first.takes_steps else "the stacks"
    by = f" with {PROFILERS[first.profiler]}" if first.takes_steps else ""
    suspects = some_ranks([one.rank for one in requests if one.role == "suspect"])
    controls = some_ranks([one.rank for one in requests if one.role == "control"])
    beside = f"; {controls} too, to compare with" if controls else ""
    return f"Capturing {what} of {suspects or controls}{by}{beside if suspects else ''}."


def ended_sentence(result: CaptureResult, stored_bytes: int) -> str:
    """What became of a capture that has ended: where its trace is, or why there is none."""
    if result.state != "stored" or result.first_step is None or result.last_step is None:
        why = f": {result.detail}" if result.detail else ""
        return f"No trace of rank {result.rank}: {ENDINGS.get(result.state, result.state)}{why}."
    steps = span(result.first_step, result.last_step)
    return f"Captured {steps} of rank {result.rank} ({size(stored_bytes)}): sftriage traces show {result.capture_id}"


class CauseDetails(Protocol):
    """A cause that was found, as a manifest or the journal has it."""

    @property
    def code(self) -> str:
        """What it is."""

    @property
    def sure(self) -> bool:
        """Whether most of it is certain."""

    @property
    def sentence(self) -> str:
        """It in words."""


def caused(cause: CauseDetails) -> str:
    """Why a captured rank was slow, and whether that is sure."""
    unsure = "" if cause.sure or cause.code == "unknown" else " This is likely, and not sure."
    return f"{cause.sentence}{unsure}"


def cost_sentence(
    cost_s: float | None, before_s: float | None, first_step: int, last_step: int, captures: int = 1
) -> str:
    """What so many captures in some steps cost the job together."""
    if cost_s is None or before_s is None:
        return "not known: too few steps before it to compare with"
    shared = "" if captures == 1 else f"; shared by {counted(captures, 'capture')}"
    steps = f"in {span(first_step, last_step)} and just after; a step took {milliseconds(before_s)} before{shared}"
    return f"{milliseconds(cost_s)} in all, {steps}" if cost_s > 0.0 else f"nothing that could be measured, {steps}"


def stage_suspected(label: str, stage: str | None) -> str:
    """The stage that led to a capture, by what triggered it; "" where a person asked, and nothing was suspected."""
    return stage or ("" if label == "asked" else "all local stages")
