"""Why a window cannot be decided, and what would resolve it (design §4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

RESOLVES: Mapping[str, str] = {
    "co_critical": "Several ranks are late together, so mending one of them alone would save nothing: "
    "look at all the late ranks, or at what they share (a host, a switch, a data shard).",
    "sync_ambiguous": "The excess is inside a stage where ranks wait for each other, and there all of them tie: "
    "call monitor.watch(model), so that the last ready gradient splits the stage into work and waiting.",
    "roaming": "A different rank leads from step to step: look for what moves with the data or the clock "
    "(uneven batches, garbage collection, a shared filesystem), or wait until one rank stays in front.",
    "low_coverage": "Ranks or steps are missing from the window: check that every rank runs the recorder "
    "and that its ring can be read, then wait for a complete window.",
    "no_baseline": "Every rank is slower alike and there is nothing yet to compare with: "
    "let the job run through its warm-up, so that its own normal step is known.",
    "intermittent": "Too few steps of the window are slow: wait for it to come back more often, "
    "or lower min_persistence if short bursts are what you are after.",
    "mixed_roles": "The ranks do different work (pipeline stages, a rank that also evaluates) and cannot be compared: "
    "declare cohorts, so that each rank is compared with ranks of its own role.",
    "clock_limited": "Only the host's clock can be judged by and the device runs asynchronously, so time may show in "
    "the wrong stage: record device time (SFTRIAGE_DEVICE_TIME=1 in the job's environment). Where it is recorded, "
    "`sftriage explain` says whether too few steps have theirs or the two clocks contradict each other.",
    "self_inflicted": "A profiler was running inside this window and slowed it: wait for a window without a capture.",
    "not_arrived": "The other ranks wait for the ranks that are named: "
    "look at their stacks (py-spy dump --pid), and at what their stage reads from or calls.",
    "died": "The process of a named rank is gone, and the others wait for it: "
    "look for its last words, and in the kernel's log whether memory ran out; then restart the job.",
    "left_early": "A named rank has stopped recording while the others wait in a step: "
    "check that every rank takes the same number of steps (uneven data, a `break` on one rank).",
    "in_sync": "All ranks are inside the same sync stage, where they look alike: compare their stacks "
    "(py-spy dump --pid) or the flight recorder of torch.distributed, to find a collective that some did not enter.",
    "no_rank_waits": "No rank is in a sync stage: look at the stacks of the ranks that have got least far, "
    "and at what the others share with them (a file system, a collective in a stage that is not declared as sync).",
    "outside_steps": "No rank is in a step: see whether the job still evaluates, saves or loads, "
    "or look at the stacks of its ranks (py-spy dump --pid).",
    "unseen_ranks": "Some ranks of the job show nothing here: see whether they run, and record.",
}
"""For each reason of a ``needs_evidence`` or ``stalled`` verdict, one plain sentence on what would resolve it."""


def resolves(reasons: Iterable[str]) -> str:
    """What would resolve each of the reasons, in their order; a reason without advice is named as such."""
    return " ".join(RESOLVES.get(reason, f"There is no advice on {reason!r} yet.") for reason in reasons)
