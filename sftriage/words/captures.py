"""Captures in words: by what, why that, what became of them, what they cost, and the causes that they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sftriage.model.captures import CaptureRequest, CaptureResult, CaptureState, ChoiceReason, LeftOpen, Profiler
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


DOES: dict[str, str] = {
    "sleep": "which sleeps",
    "dataloader_workers": "which waits for the workers of its DataLoader",
    "lock": "which waits for another thread or process",
    "subprocess": "which starts another program and waits for it",
    "output": "which writes its log or its output",
    "database": "which waits for a database",
    "network": "which waits for the network",
    "disk": "which reads or writes files",
    "checkpoint": "which saves a checkpoint",
    "garbage_collection": "which collects garbage",
    "recompilation": "which compiles again",
    "collective": "which waits in a collective",
    "python": "which computes",
    "operator": "",
    "kernel": "",
    "blocked": "which waits there, for what is not known",
    "gil": "which waits for the interpreter (the GIL), for it is held by thread",
    "descheduled": "it was ready to run and waited for a core",
    "stopped": "the whole process stood still",
    "cgroup_throttled": "its cgroup's CPU limit kept it from running",
    "page_faults": "which touches memory that is not there yet (page faults)",
    "memory_pressure": "it waited for memory",
    "gpu_throttled": "its GPU was behind the others, for its clock is lower",
    "unknown": "which runs or waits there: the system does not say",
}

NEXT_STEP: dict[str, str] = {
    "sleep": "Look at why that line sleeps, and on this rank alone.",
    "dataloader_workers": "Give the loader more workers, or look at what one does: py-spy dump --pid WORKER.",
    "lock": "Look at who holds what it waits for: the other threads are in the same file of stacks.",
    "subprocess": "Do what that program does in the process itself, or in a worker that stays.",
    "output": "Look at who reads it (a full pipe, a slow terminal or disk); log less, or by way of a QueueHandler.",
    "database": "Look at who else holds that database, and make one transaction of many rows.",
    "network": "Look at the network of this rank's host, and at what it fetches at that line.",
    "disk": "Look at this host's disk (iostat -x 1), and at whether the file can be kept in memory.",
    "checkpoint": "Save in the background, or have every rank save a part of it.",
    "garbage_collection": "Collect at the same step on all ranks: gc.disable(), and gc.collect() every so many steps.",
    "recompilation": "Look at what changes from step to step: TORCH_LOGS=recompiles says why it compiles again.",
    "collective": "The others of this collective are who to look at: compare their stacks.",
    "python": "Look at that function; a capture with with_stack counts its calls.",
    "operator": "Compare its inputs with the other rank's: a capture with record_shapes has them.",
    "kernel": "Compare its inputs with the other rank's (record_shapes), and the GPUs' clocks (sftriage evidence).",
    "blocked": "Look at the stacks of the other threads, in the same file, and at what that line calls.",
    "descheduled": "Look at what else runs on its host (top -H), or pin the rank to cores of its own.",
    "gil": "Move what that thread does to a process of its own, or have it let go of the interpreter.",
    "stopped": "Look at who stops it (SIGSTOP, cpulimit), and at the CPU limit of its cgroup (cpu.stat: nr_throttled).",
    "cgroup_throttled": "Raise that limit (cpu.max; in Kubernetes resources.limits.cpu), or run fewer threads.",
    "page_faults": "Keep what that line allocates for the next step (preallocate, reuse), or use larger pages.",
    "gpu_throttled": "Look at why its clock is lower: nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,POWER.",
    "memory_pressure": "Give its cgroup more memory (memory.high, memory.max), or run less in it.",
    "unknown": "Look at the trace, beside that of another rank: sftriage capture --rank N.",
}


COUNTED: dict[str, str] = {
    "cgroup_throttled": DOES["cgroup_throttled"],
    "stopped": DOES["stopped"],
    "page_faults": "it waited for pages of its memory to be read from disk",
    "memory_pressure": DOES["memory_pressure"],
    "descheduled": DOES["descheduled"],
    "disk": "it waited for a disk",
    "network": "its host waited to send TCP segments again",
    "gpu_throttled": DOES["gpu_throttled"],
}
"""What the kernel counted that no line of the program is needed for."""

COUNTED_STEP: dict[str, str] = {
    "page_faults": "See whether its host swaps (vmstat 1), and give it more memory.",
    "network": "Look at the network of this rank's host: nstat -az TcpRetransSegs, ip -s link.",
}

HOST_STEP = "Look at its host: clocks and temperature (nvidia-smi -q -d CLOCK,TEMPERATURE; turbostat)."
"""Where nothing says why a whole rank is slow."""
