"""What filled a stage: self time by name, work against waiting, kernels against their launches.

Axes: C codes of a tally, P pieces of time, X events that are open in a slab of time.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sftriage.errors import InputError
from sftriage.model.windows import OTHER
from sftriage.reduce.events import (
    ANNOTATION,
    KERNEL,
    ON_DEVICE,
    ON_HOST,
    OPERATOR,
    PYTHON,
    RUNTIME,
    EventQuery,
    Events,
    Trace,
    self_time_slices,
)
from sftriage.reduce.intervals import Intervals, Ints, Links, both, union
from sftriage.reduce.launched import Launched, Took, kernel_shares, launched
from sftriage.reduce.naming import COLLECTIVES, IDLES, OURS, WAITS, matching, steplike
from sftriage.reduce.stages import Reduction
from sftriage.traces.documents import CONTROL
from sftriage.traces.findings import MAX_SHARES, Findings, Kind, Share, StageProfile

_KIND_NAMES: Final[dict[int, Kind]] = {
    ANNOTATION: "annotation",
    OPERATOR: "operator",
    PYTHON: "python",
    RUNTIME: "call",
}
# Annotations that stand for work or waiting of their own, and not only for a part of the program.
_MEANINGFUL: Final = (*WAITS, "enumerate(DataLoader)*", "Optimizer.*")
UNSEEN = "without any event in the trace"
_ADDRESS = re.compile(r"(?: object)? at 0x[0-9a-f]+")
_NAME_SHIFT = 4
_REST = (1 << _NAME_SHIFT) - 1


def find(
    suspect: Reduction, stage: str, control: Reduction | None = None, fault_steps: Collection[int] = ()
) -> Findings:
    """What filled a stage of one rank, against the same stage of a control rank where there is one.

    Compares the steps that both have, or else all of each. With ``fault_steps`` only those count, and without a control
    rank they are compared with the suspect's other steps. Raises InputError where the trace has no such stage.
    """
    for reduction in (suspect, control):
        if reduction is not None and stage not in reduction.schema.stages:
            raise InputError(
                f"{reduction.trace.source}: no stage {stage!r} in it; there are: {', '.join(reduction.schema.stages)}"
            )
    steps = suspect.steps.number_N
    have = np.isin(steps, np.array(sorted(fault_steps), dtype=np.int64))
    wanted, others = (steps[have], steps[~have]) if have.any() else (steps, steps[:0])
    beside, its_steps, than = None, others, "in its other steps"
    if control is not None:
        shared = np.intersect1d(wanted, control.steps.number_N)
        wanted, its_steps = (shared, shared) if len(shared) else (wanted, control.steps.number_N)
        beside, than = control, "its control" if control.trace.rank is None else f"rank {control.trace.rank}"
    elif len(others):
        beside = suspect
    profile, named, took = _profile_of(suspect, stage, wanted)
    against, its_named, its_took = (None,) * 3 if beside is None else _profile_of(beside, stage, its_steps)
    quicker = against is not None and against.stage_s >= profile.stage_s and against.device_s >= profile.device_s
    if beside is suspect and quicker:
        # What makes these steps the faulty ones is not that the stage is longer in them: its peers were quicker.
        against = its_named = its_took = None
    its_n = against.steps if against else 1
    shares = _shares(named, profile.steps, its_named, its_n)
    of_steps = len(steps) if len(others) else None
    return Findings(
        stage=stage,
        suspect=profile,
        control=against,
        shares=shares,
        kernels=kernel_shares(took, profile.steps, its_took, its_n),
        summary=_summary(stage, profile, against, shares, of_steps, than),
        of_steps=of_steps,
        beside="steps" if beside is suspect else "rank",
    )


def _profile_of(reduction: Reduction, stage: str, numbers: Ints) -> tuple[StageProfile, Tally, Took]:
    trace, steps = reduction.trace, reduction.steps
    chosen = np.isin(steps.number_N, numbers)
    inside = Intervals(steps.start_N[chosen], steps.end_N[chosen])
    spans = (
        inside.without(both(*reduction.spans.values())) if stage == OTHER else reduction.spans[stage].clipped(inside)
    )
    tally, working_ns, busy_ns = _on_host(trace, steps.track, spans)
    counts, times_ns = _on_device(trace, spans)
    times_ns |= {
        "step_s": inside.total_ns,
        "stage_s": spans.total_ns,
        "working_s": working_ns,
        "waiting_s": busy_ns - working_ns,
        "unseen_s": spans.total_ns - busy_ns,
    }
    looked_at = steps.number_N[chosen]
    n = len(looked_at)
    device = launched(trace, steps.track, spans, steps.start_N) if counts["kernels"] else Launched({})
    per_step = 1e-9 / n
    profile = StageProfile(
        source=CONTROL.sub("?", trace.source)[-2000:],
        rank=trace.rank,
        first_step=int(looked_at[0]),
        last_step=int(looked_at[-1]),
        steps=n,
        device_own_s=None if device.own_ns is None else device.own_ns * per_step,
        device_idle_s=None if device.idle_ns is None else device.idle_ns * per_step,
        **{name: count / n for name, count in counts.items()},
        **{name: time_ns * per_step for name, time_ns in times_ns.items()},
    )
    return profile, tally, device.took


def _shares(tally: Tally, steps: int, control: Tally | None, control_steps: int) -> tuple[Share, ...]:
    self_C = tally.self_ns_C * 1e-9 / steps
    control_C = np.zeros_like(self_C) if control is None else control.self_ns_of(tally) * 1e-9 / control_steps
    more_C = self_C - control_C
    at = np.flatnonzero(tally.self_ns_C)
    if len(at) > MAX_SHARES:
        # Those that are among the first however the names of equal ones come.
        at = at[more_C[at] >= np.partition(more_C[at], -MAX_SHARES)[-MAX_SHARES]]

    def place(index: int) -> tuple[float, float, str]:
        return -float(more_C[index]), -float(self_C[index]), tally.key(index)[1]

    shares = []
    for index in heapq.nsmallest(MAX_SHARES, at.tolist(), key=place):
        kind, name, waits = tally.key(index)
        shares.append(
            Share(
                name=name,
                kind=_KIND_NAMES[kind],
                waits=waits,
                self_s=float(self_C[index]),
                calls=int(tally.calls_C[index]) / steps,
                control_self_s=None if control is None else float(control_C[index]),
            )
        )
    return tuple(shares)


def _summary(
    stage: str,
    profile: StageProfile,
    control: StageProfile | None,
    shares: tuple[Share, ...],
    of_steps: int | None,
    than: str,
) -> str:
    parts = {"at work": profile.working_s, "waiting": profile.waiting_s, UNSEEN: profile.unseen_s}
    said = ", ".join(f"{seconds * 1e3:.1f} ms {what}" for what, seconds in parts.items())
    where = "" if of_steps is None else f" in the {profile.steps} of {of_steps} captured steps that have the fault"
    sentence = f"{stage} took {profile.stage_s * 1e3:.1f} of the {profile.step_s * 1e3:.1f} ms of a step{where}: {said}"
    more = dict(parts)
    if control is not None:
        longer_s = profile.stage_s - control.stage_s
        way = "more" if longer_s >= 0 else "less"
        sentence += f"; {abs(longer_s) * 1e3:.1f} ms {way} than {than}"
        for what, its_s in zip(more, (control.working_s, control.waiting_s, control.unseen_s), strict=True):
            more[what] -= its_s
    most = max(more, key=lambda what: more[what])
    if most == UNSEEN and profile.unseen_s > 0.1 * profile.stage_s:
        return f"{sentence}. What stands out is time in Python or in the system, which leaves no events."
    first = next((share for share in shares if share.waits == (most == "waiting")), None)
    if first is not None and first.self_s > 0.1 * profile.stage_s:
        return f"{sentence}. What stands out is {first.name}."
    return f"{sentence}."


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """Self time and calls by kind, name and whether it waits (C of them): codes, in order, that say all three."""

    names: Sequence[str]
    code_C: Ints
    self_ns_C: Ints
    calls_C: Ints

    def key(self, index: int) -> tuple[int, str, bool]:
        """The kind, the name as it can be shown, and whether it waits."""
        code = int(self.code_C[index])
        return code >> 1 & 7, CONTROL.sub("?", self._name(code))[:100], not code & 1

    def and_of(self, *code_self_calls_X: Ints) -> Tally:
        """With those of events added up: their codes, self times and calls."""
        columns = zip((self.code_C, self.self_ns_C, self.calls_C), code_self_calls_X, strict=True)
        code_X, *values = (np.concatenate(column) for column in columns)
        code_C, which = np.unique(code_X, return_inverse=True)
        sums = (np.bincount(which, its_X, minlength=len(code_C)).astype(np.int64) for its_X in values)
        return Tally(self.names, code_C, *sums)

    def self_ns_of(self, other: Tally) -> Ints:
        """The self time, here, of what another trace's tally has; its names have other numbers."""
        code_of = {(code & _REST, other._name(code)): at for at, code in enumerate(other.code_C.tolist())}
        found = np.zeros(len(other.code_C), dtype=np.int64)
        for code, self_ns in zip(self.code_C.tolist(), self.self_ns_C.tolist(), strict=True):
            at = code_of.get((code & _REST, self._name(code)))
            if at is not None:
                found[at] = self_ns
        return found

    def _name(self, code: int) -> str:
        return _ADDRESS.sub("", self.names[code >> _NAME_SHIFT])


def _on_host(trace: Trace, track: int, spans: Intervals) -> tuple[Tally, int, int]:
    """What the steps' process did in some spans: by name, how long any thread worked, and worked or waited."""
    names = trace.names
    idles, tells, beside = matching(names, IDLES), matching(names, _MEANINGFUL), steplike(names) | matching(names, OURS)
    waits = idles | matching(names, WAITS)
    # A copy back from the device lasts until the device has come to it.
    copies_back = EventQuery(ON_DEVICE, matching(names, ("Memcpy DtoH*",)))
    back = Links(part.link_E for part in trace.parts(copies_back))
    alike = _alike(names)
    tally, working_ns, busy_ns = Tally(names, *(np.zeros(0, dtype=np.int64) for _ in range(3))), 0, 0
    wanted = EventQuery(ON_HOST, tracks=trace.process(track))
    for since_ns, events, pieces in self_time_slices(trace, wanted, inside=spans):
        name_X, kind_X = events.name_E, events.kind_E
        waits_X = waits[name_X] | ((kind_X == RUNTIME) & back.have(events.link_E))
        shown_X = tells[name_X] | (kind_X != ANNOTATION)
        shown_X &= ~(beside[name_X] | (idles[name_X] & (events.track_E != track)))
        began_X = spans.hold(events.start_E) & (events.start_E >= since_ns)
        inside_P = spans.within(pieces.start_P, pieces.end_P)
        self_X = np.bincount(pieces.owner_P, weights=inside_P, minlength=len(events)).astype(np.int64)
        code_X = alike[name_X] << _NAME_SHIFT | kind_X << 1 | ~waits_X
        tally = tally.and_of(code_X[shown_X], self_X[shown_X], began_X[shown_X].astype(np.int64))
        working, waiting = (
            union(pieces.start_P[of_P], pieces.end_P[of_P])
            for of_P in ((shown_X & ~waits_X)[pieces.owner_P], (shown_X & waits_X)[pieces.owner_P])
        )
        busy = both(working, waiting)
        working_ns += int(spans.within(working.start_K, working.end_K).sum())
        busy_ns += int(spans.within(busy.start_K, busy.end_K).sum())
    return tally, working_ns, busy_ns


def _alike(names: Sequence[str]) -> Ints:
    """Of each name the first that is the same but for an object's address, which differs from rank to rank."""
    bare = {number: _ADDRESS.sub("", name) for number, name in enumerate(names) if " at 0x" in name}
    alike = np.arange(len(names), dtype=np.int64)
    if bare:
        several, first = set(bare.values()), dict[str, int]()
        for number, name in enumerate(names):
            if (its := bare.get(number, name)) in several:
                alike[number] = first.setdefault(its, number)
    return alike


def _on_device(trace: Trace, spans: Intervals) -> tuple[dict[str, int], dict[str, int]]:
    """What was launched in some spans: the counts of a `StageProfile`, and its times in nanoseconds, over all steps."""
    launching = matching(trace.names, ("*Launch*Kernel*", "*GraphLaunch*"))
    links = Links()
    launches = launch_ns = 0
    for part in trace.parts(EventQuery((RUNTIME,))):
        called = part.at(spans.hold(part.start_E))
        links.add(called.link_E)
        launch = launching[called.name_E]
        launches += int(launch.sum())
        launch_ns += int((called.end_E - called.start_E)[launch].sum())
    collectives = matching(trace.names, COLLECTIVES)
    busy, in_collectives, kernels = _Covered(), _Covered(), 0
    for until_ns, part in trace.slabs(EventQuery(ON_DEVICE)) if links else ():
        device = part.at(links.have(part.link_E))
        kernels += int((device.kind_E == KERNEL).sum())
        busy.add(device, until_ns)
        in_collectives.add(device.at(collectives[device.name_E]), until_ns)
    times_ns = {"device_s": busy.total_ns, "collective_s": in_collectives.total_ns, "launch_s": launch_ns}
    return {"kernels": kernels, "launches": launches}, times_ns


class _Covered:
    """How long any of some events lasted, which come in slabs of time."""

    def __init__(self) -> None:
        self.total_ns = 0
        self._since_ns = self._reach_ns = 0

    def add(self, events: Events, until_ns: int) -> None:
        # What is still open goes on from where the last slab ended.
        start_E, end_E = np.append(events.start_E, self._since_ns), np.append(events.end_E, self._reach_ns)
        self.total_ns += union(start_E, np.minimum(end_E, until_ns)).total_ns
        self._since_ns, self._reach_ns = until_ns, int(end_E.max())
