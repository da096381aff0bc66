"""Why a window cannot be decided, and what would resolve it (design §4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

RESOLVES: Mapping[str, str] = {
    "co_critical": "Several ranks are late together, so mending one of them alone would save nothing: "
    "look at all the late ranks, or at what they share (a host, a switch, a data shard).",
    "sync_ambiguous": "The excess is inside a stage where ranks wait for each other, and there all of them tie: "
    "record when the last gradient is ready on each rank, which splits the stage into work and waiting.",
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
    "clock_limited": "Only the host's clock was recorded and the device runs asynchronously, "
    "so time may show in the wrong stage: record device time with CUDA events.",
    "self_inflicted": "A profiler was running inside this window and slowed it: wait for a window without a capture.",
}
"""For each reason of a ``needs_evidence`` verdict, one plain sentence on what would resolve it."""


def resolves(reasons: Iterable[str]) -> str:
    """What would resolve each of the reasons, in their order; a reason without advice is named as such."""
    return " ".join(RESOLVES.get(reason, f"There is no advice on {reason!r} yet.") for reason in reasons)
