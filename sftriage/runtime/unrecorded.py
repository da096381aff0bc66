"""Why nothing of a job is recorded, or nothing yet: one answer for `run`, `doctor` and the page, from facts alone."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from sftriage.words.amounts import counted

ROOM_BYTES = 1 << 20
"""What a rank's ring takes at most, and some more."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a job, and of how it ended where it has.

    Attributes:
        auto: its stages are found by seams; otherwise the script makes a Monitor.
        steps: steps that are recorded.
        rings: ranks that record, or are about to.
        torch: processes that were seen to have torch loaded.
        hidden: why what looks for steps is not in processes that have torch: a flag of Python as "-I", or the name of
            a variable of their environment that is not as it was given.
        fired: how often each seam saw something, over all processes that train.
        failed: why seams were switched off, by their name.
        by_hand: the script makes a Monitor itself.
        compiling: torch compiles just now, or did when it was last seen.
        free_bytes: the least room that was seen where rings are; None where that is not known.
        place: that place.
        over: the job has ended.
        status: with which exit status; None where it was ended for having had its time.
        told: the signal by which somebody has told it to end; None for none.
        seconds: after how long its time was up; None where it had no such time.
    """

    auto: bool
    steps: int = 0
    rings: int = 0
    torch: int = 0
    hidden: frozenset[str] = frozenset()
    fired: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    by_hand: bool = False
    compiling: bool = False
    free_bytes: int | None = None
    place: str = "/dev/shm"
    over: bool = False
    status: int | None = None
    told: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Reason:
    """Why: a code, and a clause for people."""

    code: str
    what: str


def why_nothing(facts: Facts) -> Reason | None:
    """Why no step is recorded; None where one is. Where a fact is not known, no more is said than what is."""
    if facts.steps:
        return None
    so_far = _so_far(facts)
    if not facts.over:
        return so_far
    if facts.told is not None:
        return Reason("stopped", f"the job was stopped by {signal_name(facts.told)}, before any step was recorded")
    if facts.seconds is not None and facts.status is None:
        return Reason(so_far.code, f"the time was up after {facts.seconds:g} s; until then {so_far.what}")
    if facts.status:
        what = f"the job ended by itself with exit status {facts.status}, before any step was recorded"
        number = facts.status - 128
        why = f"{signal_name(number)} ended it" if number in signal.valid_signals() else "its own output says why"
        return Reason("failed", f"{what}: {why}")
    return so_far


def _so_far(facts: Facts) -> Reason:
    trains = bool(facts.rings or facts.by_hand or any(facts.fired.values()))
    if facts.auto and not trains:
        for reason in _HIDDEN:
            if reason.code in facts.hidden:
                return reason
    if not facts.auto and not facts.rings and RINGS.code in facts.hidden:
        return RINGS
    if not (facts.torch or trains):
        never = "was seen to import torch" if facts.over else "has imported torch so far"
        return Reason("no_torch", f"no process of the job on this host {never}")
    if not facts.rings and facts.free_bytes is not None and facts.free_bytes < ROOM_BYTES:
        return Reason("no_room", f"{facts.place} has no room for a recording ({facts.free_bytes >> 10} KiB are free)")
    if why := facts.failed.get("optimizer"):
        return Reason("seam", f"the seam optimizer was switched off: {why}")
    if facts.by_hand or not facts.auto:
        return _by_hand(facts)
    return _under_seams(facts)


def _by_hand(facts: Facts) -> Reason:
    if facts.rings:
        return Reason("monitor_unused", "the Monitor that the script makes has no step that has ended")
    if facts.by_hand:
        return Reason("monitor_elsewhere", "the Monitor that the script makes records elsewhere (rings=)")
    return Reason("no_monitor", "no sftriage.Monitor was made; --auto finds the stages of a script without one")


def _under_seams(facts: Facts) -> Reason:
    """Of a script under seams that are in place."""
    backwards, steps = facts.fired.get("backward", 0), facts.fired.get("optimizer", 0)
    if facts.rings or steps > 2:
        return Reason("first_step", "recording has begun, and no step has ended since")
    if facts.compiling:
        return Reason("compiling", "torch compiles (torch.compile), and recording begins with the third step")
    if steps:
        return Reason("few_steps", f"{counted(steps, 'step')} of an optimizer, and recording begins with the third")
    return Reason("no_optimizer" if backwards else "no_step", "no step of a torch.optim.Optimizer was seen")


def signal_name(number: int) -> str:
    """What a signal is called."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


RINGS = Reason("SFTRIAGE_RINGS", "SFTRIAGE_RINGS is missing in the trainers' environment: what starts them cleared it")
_HIDDEN = (
    *(
        Reason(flag, f"the trainers' Python was started with {flag}, and then {without}: leave it out, or use Monitor")
        for flag, without in (
            ("-I", "does not look at PYTHONPATH"),
            ("-E", "does not look at PYTHONPATH"),
            ("-S", "imports no sitecustomize"),
        )
    ),
    RINGS,
    Reason("SFTRIAGE_SEAMS", "SFTRIAGE_SEAMS=off switches the seams off"),
    Reason(
        "PYTHONPATH", "what starts the trainers overwrote PYTHONPATH, by which --auto reaches them: have it add to it"
    ),
)
