"""What filled a stage: self time by name, work against waiting, kernels against their launches."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import Final

import numpy as np

from sftriage.errors import InputError
from sftriage.records import OTHER
from sftriage.reduce.events import ANNOTATION, OPERATOR, PYTHON, RUNTIME
from sftriage.reduce.filling import Tally, on_device, on_host
from sftriage.reduce.intervals import Intervals, Ints
from sftriage.reduce.stages import Reduction
from sftriage.traces.manifest import CONTROL, MAX_SHARES, Findings, Kind, Share, StageProfile

_KIND_NAMES: Final[dict[int, Kind]] = {
    ANNOTATION: "annotation",
    OPERATOR: "operator",
    PYTHON: "python",
    RUNTIME: "call",
}


def find(
    suspect: Reduction, stage: str, control: Reduction | None = None, fault_steps: Collection[int] = ()
) -> Findings:
    """What filled a stage of one rank, against the same stage of a control rank where there is one.

    Steps that both have are compared; where there are none, all of each are. Where it is known which steps have the
    fault, only those are looked at; without a control rank they are compared with the suspect's other steps.

    Args:
        suspect: the rank's trace.
        stage: the stage.
        control: the control rank's trace.
        fault_steps: the numbers of the steps that have the fault; none where that is not known.

    Raises:
        InputError: the trace has no such stage.
    """
    for reduction in (suspect, control):
        if reduction is not None and stage not in reduction.schema.stages:
            raise InputError(
                f"{reduction.trace.source}: no stage {stage!r} in it; there are: {', '.join(reduction.schema.stages)}"
            )
    steps = suspect.steps.number_N
    wanted, others = _told_apart(steps, fault_steps)
    beside, its_steps = control, control.steps.number_N if control is not None else steps
    if control is not None:
        shared = np.intersect1d(wanted, its_steps)
        wanted, its_steps = (shared, shared) if len(shared) else (wanted, its_steps)
    elif len(others):
        beside, its_steps = suspect, others
    profile, named = _looked_at(suspect, stage, wanted)
    against, its_named = (None, None) if beside is None else _looked_at(beside, stage, its_steps)
    shares = _shares(named, profile.steps, its_named, against.steps if against else 1)
    of_steps = len(steps) if len(others) else None
    of_control = "in its other steps" if beside is suspect else None
    return Findings(
        stage=stage,
        suspect=profile,
        control=against,
        shares=shares,
        summary=_summary(stage, profile, against, shares, of_steps, of_control),
        of_steps=of_steps,
        beside="rank" if of_control is None else "steps",
    )


def _told_apart(steps: Ints, fault_steps: Collection[int]) -> tuple[Ints, Ints]:
    """The steps to look at, and the others: all and none where it is not known that some alone have the fault."""
    have = np.isin(steps, np.array(sorted(fault_steps), dtype=np.int64))
    return (steps[have], steps[~have]) if have.any() else (steps, steps[:0])


def _looked_at(reduction: Reduction, stage: str, numbers: Ints) -> tuple[StageProfile, Tally]:
    """One rank's stage, in the steps that are wanted."""
    trace, steps = reduction.trace, reduction.steps
    chosen = np.isin(steps.number_N, numbers)
    inside = Intervals(steps.start_N[chosen], steps.end_N[chosen])
    if stage == OTHER:
        spans = inside
        for named_stage in reduction.spans.values():
            spans = spans.without(named_stage)
    else:
        spans = reduction.spans[stage].clipped(inside)
    host = on_host(trace, steps.track, spans)
    n = len(inside.start_K)
    per_step = 1e-9 / n
    device = on_device(trace, spans)
    looked_at = steps.number_N[chosen]
    return (
        StageProfile(
            source=CONTROL.sub("?", trace.source)[-2000:],
            rank=trace.rank,
            first_step=int(looked_at[0]),
            last_step=int(looked_at[-1]),
            steps=n,
            step_s=inside.total_ns * per_step,
            stage_s=spans.total_ns * per_step,
            working_s=host.working_ns * per_step,
            waiting_s=(host.busy_ns - host.working_ns) * per_step,
            unseen_s=(spans.total_ns - host.busy_ns) * per_step,
            device_s=device.busy_ns * per_step,
            collective_s=device.collective_ns * per_step,
            kernels=device.kernels / n,
            launches=device.launches / n,
            launch_s=device.launch_ns * per_step,
        ),
        host.tally,
    )


def _shares(tally: Tally, steps: int, control: Tally | None, control_steps: int) -> tuple[Share, ...]:
    """The names that took the most; against a control rank, those that took the most more."""
    self_C = tally.self_ns_C * 1e-9 / steps
    control_C = np.zeros_like(self_C) if control is None else control.self_ns_of(tally) * 1e-9 / control_steps
    more_C = self_C - control_C
    at = np.flatnonzero(tally.self_ns_C)
    if len(at) > MAX_SHARES:
        # Those that are among the first however the names of equal ones come.
        at = at[more_C[at] >= np.partition(more_C[at], -MAX_SHARES)[-MAX_SHARES]]

    def place(index: int) -> tuple[float, float, str]:
        return -float(more_C[index]), -float(self_C[index]), _shown(tally.key(index)[1])

    shares = []
    for index in heapq.nsmallest(MAX_SHARES, at.tolist(), key=place):
        kind, name, waits = tally.key(index)
        shares.append(
            Share(
                name=_shown(name),
                kind=_KIND_NAMES[kind],
                waits=waits,
                self_s=float(self_C[index]),
                calls=int(tally.calls_C[index]) / steps,
                control_self_s=None if control is None else float(control_C[index]),
            )
        )
    return tuple(shares)


def _shown(name: str) -> str:
    return CONTROL.sub("?", name)[:100]


def _summary(
    stage: str,
    profile: StageProfile,
    control: StageProfile | None,
    shares: tuple[Share, ...],
    of_steps: int | None,
    of_control: str | None,
) -> str:
    """What stands out, in words."""
    parts = {"at work": profile.working_s, "waiting": profile.waiting_s, "in nothing the trace shows": profile.unseen_s}
    said = ", ".join(f"{seconds * 1e3:.1f} ms {what}" for what, seconds in parts.items())
    where = "" if of_steps is None else f", in the {profile.steps} of {of_steps} captured steps that have the fault"
    sentence = f"{stage} took {profile.stage_s * 1e3:.1f} of {profile.step_s * 1e3:.1f} ms a step{where}: {said}"
    more = dict(parts)
    if control is not None:
        longer_s = profile.stage_s - control.stage_s
        of_control = of_control or ("its control" if control.rank is None else f"rank {control.rank}")
        way = "more" if longer_s >= 0 else "less"
        sentence += f"; {abs(longer_s) * 1e3:.1f} ms {way} than {of_control}"
        for what, its_s in zip(more, (control.working_s, control.waiting_s, control.unseen_s), strict=True):
            more[what] -= its_s
    most = max(more, key=lambda what: more[what])
    if most == "in nothing the trace shows" and profile.unseen_s > 0.1 * profile.stage_s:
        return f"{sentence}. Most of it is in Python or in the system: a capture with stacks would show where."
    first = next((share for share in shares if share.waits == (most == "waiting")), None)
    if first is not None and first.self_s > 0.1 * profile.stage_s:
        return f"{sentence}. First of all it is {first.name}."
    return f"{sentence}."
