"""What filled a stage: self time by name, work and waiting, kernels with their launches.

For a rank without a trace, its sampled stacks show the contents, and its recorded steps the stage's time.

Axes: C codes of a tally, P pieces of time, X events that are open in a slab of time, L launches, M operators, D the
device's events, K kernels with their launchers, N steps.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
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
    Intervals,
    Ints,
    Links,
    Trace,
    both,
    gathered,
    self_time_slices,
    union,
)
from sftriage.reduce.samples import RUNS_FRACTION, StackSamples, spots
from sftriage.reduce.stages import COLLECTIVES, IDLES, OURS, WAITS, Reduction, matching, steplike
from sftriage.traces.manifest import CONTROL, MAX_KERNELS, MAX_SHARES, Findings, KernelShare, Kind, Share, StageProfile

MAX_LAUNCHES = 1 << 20
"""Maximum number of launches of a stage, and of the device's events for them, to analyse at once."""

_ENGINE = re.compile(r"^(autograd::engine::evaluate_function: )?(torch::autograd::)?")
_NAMESPACES = re.compile(r"^(?:[\w~]+::|\(anonymous namespace\)::)*")
_MAX_NAME: Final = 100

Launcher = tuple[str, str, str]
"""A kernel, the operator that launched it, and the outermost operator around that."""

Took = Mapping[Launcher, tuple[int, int]]
"""The device's time for each, in nanoseconds, and the number of runs."""


def launched(trace: Trace, track: int, spans: Intervals, start_N: Ints) -> tuple[Took, int | None, int | None]:
    """The device's work that was launched in some spans, whenever it ran, without collectives.

    ``track`` is a thread of the launching process, ``start_N`` has the starts of the steps. Returns the times by kernel
    (overlaps on one stream count once), the time in any of these, and the device's time of waiting for its host, from
    the end of its earlier work to the end of all of this. None: nothing was launched, or too much.
    """
    try:
        of_process = trace.parts(EventQuery((RUNTIME,), tracks=trace.process(track)))
        within = (part.at(spans.hold(part.start_E) & (part.link_E >= 0)) for part in of_process)
        calls = gathered(within, MAX_LAUNCHES, "")
        device = gathered(trace.parts(EventQuery(ON_DEVICE)), MAX_LAUNCHES, "")
    except InputError:
        return {}, None, None
    if not len(calls):
        return {}, None, None
    device = device.at(np.argsort(device.start_E, kind="stable"))
    inner_L, outer_L = _launchers(trace, track, spans, calls)
    order = np.argsort(calls.link_E, kind="stable")
    link_L = calls.link_E[order]
    at_D = np.minimum(np.searchsorted(link_L, device.link_E), len(link_L) - 1)
    tied_D = (device.link_E >= 0) & (link_L[at_D] == device.link_E)
    step_L = np.searchsorted(start_N, calls.start_E, side="right")
    # (after its last kernel a sync stage may wait for others, if the exchange is on the host)
    works_D = tied_D & (device.kind_E == KERNEL) & (inner_L[order[at_D]] >= 0)
    idle_ns = _idle_ns(device, np.where(works_D, step_L[order[at_D]], -1))
    tied_D &= ~matching(trace.names, COLLECTIVES)[device.name_E]
    own, by_D = device.at(tied_D), order[at_D[tied_D]]
    keys_D = np.stack([own.name_E, inner_L[by_D], outer_L[by_D]], axis=1)
    key_K, which_D, calls_K = np.unique(keys_D, axis=0, return_inverse=True, return_counts=True)
    took_K = np.bincount(which_D.ravel(), _alone_ns(own), len(key_K)).astype(np.int64)
    found: dict[Launcher, tuple[int, int]] = {}
    for (kernel, inner, outer), took_ns, n_calls in zip(key_K.tolist(), took_K.tolist(), calls_K.tolist(), strict=True):
        names = _shown(trace, inner), _shown(trace, outer)
        launcher = kernel_name(trace.names[kernel]), names[0], names[1] if names[1] != names[0] else ""
        before_ns, before = found.get(launcher, (0, 0))
        found[launcher] = before_ns + took_ns, before + n_calls
    return found, union(own.start_E, own.end_E).total_ns, idle_ns


def _alone_ns(device: Events) -> Ints:
    """The time of each of a device's events, in order, on its stream, without the overlap with earlier events.

    A stream runs one thing at a time, so the sum of overlapping events must not exceed the time that they cover.
    """
    alone_D = np.zeros(len(device), dtype=np.int64)
    for stream in np.unique(device.track_E).tolist():
        at = np.flatnonzero(device.track_E == stream)
        start, end = device.start_E[at], device.end_E[at]
        reach = np.append(start[:1], np.maximum.accumulate(end)[:-1])
        alone_D[at] = np.maximum(end - np.maximum(start, reach), 0)
    return alone_D


def _idle_ns(device: Events, step_D: Ints) -> int:
    """How long a device was idle before and between its work of each step; -1: of no step."""
    busy, idle_ns = union(device.start_E, device.end_E), 0
    reach_D = np.maximum.accumulate(device.end_E) if len(device) else device.end_E
    for step in np.unique(step_D[step_D >= 0]).tolist():
        at = np.flatnonzero(step_D == step)
        first, end_ns = int(at[0]), int(device.end_E[at].max())
        since_ns = int(reach_D[first - 1]) if first else int(device.start_E[0])
        if end_ns > since_ns:
            within_ns = busy.within(np.array([since_ns]), np.array([end_ns]))[0]
            idle_ns += end_ns - since_ns - int(within_ns)
    return idle_ns


def kernel_shares(suspect: Took, steps: int, control: Took | None, control_steps: int) -> tuple[KernelShare, ...]:
    """The kernels with the most time per step, or with the most extra time compared with a control."""
    shares = [
        KernelShare(
            name=kernel,
            operator=operator,
            within=within,
            device_s=took_ns * 1e-9 / steps,
            calls=calls / steps,
            control_device_s=None
            if control is None
            else control.get((kernel, operator, within), (0, 0))[0] * 1e-9 / control_steps,
        )
        for (kernel, operator, within), (took_ns, calls) in suspect.items()
    ]
    shares.sort(key=lambda share: (-share.more_s, -share.device_s, share.name, share.operator, share.within))
    return tuple(shares[:MAX_KERNELS])


def kernel_name(name: str) -> str:
    """The short name of a kernel: without parameters, return type and namespaces."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    end = min((at for at in (plain.find("<"), plain.find("(")) if at > 0), default=len(plain))
    head, rest = _NAMESPACES.sub("", plain[:end]).strip(), plain[end:]
    # (kernels of one template differ by its argument, if that is a plain name)
    argument = re.match(r"<(\w{8,})>", rest)
    return CONTROL.sub("?", f"{head}<{argument[1]}>" if argument else head or name)[:_MAX_NAME]


def _shown(trace: Trace, number: int) -> str:
    return "" if number < 0 else CONTROL.sub("?", _ENGINE.sub("", trace.names[number]))[:_MAX_NAME]


def _launchers(trace: Trace, track: int, spans: Intervals, calls: Events) -> tuple[Ints, Ints]:
    """The names of the innermost and the outermost operator around each launch (L); -1: none."""
    inner_L, outer_L = (np.full(len(calls), -1, dtype=np.int64) for _ in range(2))
    # (in some traces the mark of a step is an operator)
    query = EventQuery((OPERATOR,), ~steplike(trace.names), trace.process(track))
    for since_ns, operators, pieces in self_time_slices(trace, query, inside=spans):
        for thread in np.unique(operators.track_E).tolist():
            of_track = np.flatnonzero(operators.track_E == thread)
            top_M = np.zeros(len(operators), dtype=np.int64)
            top_M[of_track] = of_track[_outermost(operators.start_E[of_track], operators.end_E[of_track])]
            mine = np.flatnonzero(operators.track_E[pieces.owner_P] == thread)
            mine = mine[np.argsort(pieces.start_P[mine], kind="stable")]
            at_L = np.flatnonzero((calls.track_E == thread) & (calls.start_E >= since_ns))
            at_P = _held(calls.start_E[at_L], pieces.start_P[mine], pieces.end_P[mine])
            at_L, owner_M = at_L[at_P >= 0], pieces.owner_P[mine][at_P[at_P >= 0]]
            inner_L[at_L], outer_L[at_L] = operators.name_E[owner_M], operators.name_E[top_M[owner_M]]
    return inner_L, outer_L


def _held(moments: Ints, start_P: Ints, end_P: Ints) -> Ints:
    """The index of the piece that contains each moment, among disjoint pieces in order; -1: none."""
    if not len(start_P):
        return np.full(len(moments), -1, dtype=np.int64)
    at = np.searchsorted(start_P, moments, side="right") - 1
    return np.where((at >= 0) & (moments < end_P[np.maximum(at, 0)]), at, -1)


def _outermost(start_M: Ints, end_M: Ints) -> Ints:
    """For each event of a thread, the outermost event around it, or itself."""
    order = np.lexsort((-end_M, start_M))
    reach_M = np.maximum.accumulate(end_M[order])
    begins_M = np.append(True, start_M[order][1:] >= reach_M[:-1])
    top_M = np.zeros(len(order), dtype=np.int64)
    top_M[order] = order[begins_M][np.cumsum(begins_M) - 1]
    return top_M


_KIND_OF: Final[dict[int, Kind]] = {
    ANNOTATION: "annotation",
    OPERATOR: "operator",
    PYTHON: "python",
    RUNTIME: "call",
}
# Annotations that are work or waiting of their own, rather than a part of the program.
_MEANINGFUL: Final = (*WAITS, "enumerate(DataLoader)*", "Optimizer.*")
UNSEEN = "without any event in the trace"
_ADDRESS = re.compile(r"(?: object)? at 0x[0-9a-f]+")
_NAME_SHIFT = 4
_REST = (1 << _NAME_SHIFT) - 1


def find(
    suspect: Reduction, stage: str, control: Reduction | None = None, fault_steps: Collection[int] = ()
) -> Findings:
    """What filled a stage of one rank, compared with the same stage of a control rank, if given.

    Compares the common steps, or else all of each. With ``fault_steps`` only those count; without a control rank, the
    suspect's other steps are the control. Raises InputError if the trace has no such stage.
    """
    for reduction in (suspect, control):
        if reduction is not None:
            _check(stage, reduction.trace.source, reduction.schema.stages)
    theirs = None if control is None else control.steps.number_N.tolist()
    steps, control_steps, others = _steps_of(suspect.steps.number_N.tolist(), theirs, fault_steps)
    beside = control or (suspect if others else None)
    profile, named, took = _traced(suspect, stage, steps)
    against, control_named, control_took = (None,) * 3 if beside is None else _traced(beside, stage, control_steps)
    if beside is suspect and _as_long(against, profile):
        against = control_named = control_took = None
    n_control = against.steps if against else 1
    shares = _shares(named, profile.steps, control_named, n_control)
    of_steps = len(steps) + len(others) if others else None
    than = "in its other steps"
    if control is not None:
        than = "its control" if control.trace.rank is None else f"rank {control.trace.rank}"
    return Findings(
        stage=stage,
        suspect=profile,
        control=against,
        shares=shares,
        kernels=kernel_shares(took, profile.steps, control_took, n_control),
        summary=_summary(stage, profile, against, shares, of_steps, than),
        of_steps=of_steps,
        beside="steps" if beside is suspect else "rank",
    )


def _check(stage: str, source: str, stages: Sequence[str]) -> None:
    if stage not in stages:
        raise InputError(f"{source}: no stage {stage!r} in it; it has: {', '.join(stages)}")


def _steps_of(
    has: Sequence[int], control_has: Sequence[int] | None, fault_steps: Collection[int]
) -> tuple[list[int], list[int], list[int]]:
    """The suspect's steps to analyse, the steps to compare them with, and the suspect's other steps."""
    chosen = sorted(set(has) & set(fault_steps)) or sorted(has)
    others = sorted(set(has) - set(chosen))
    if control_has is None:
        return chosen, others, others
    shared = sorted(set(chosen) & set(control_has))
    return shared or chosen, shared or sorted(control_has), others


def _as_long(others: StageProfile | None, faulty: StageProfile) -> bool:
    """Whether the stage is no longer in the faulty steps than in others, so that its peers were quicker there."""
    return others is not None and others.stage_s >= faulty.stage_s and others.device_s >= faulty.device_s


def _traced(reduction: Reduction, stage: str, numbers: list[int]) -> tuple[StageProfile, Tally, Took]:
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
    number_N = steps.number_N[chosen]
    n = len(number_N)
    took, own_ns, idle_ns = (
        launched(trace, steps.track, spans, steps.start_N) if counts["kernels"] else ({}, None, None)
    )
    per_step = 1e-9 / n
    profile = StageProfile(
        source=CONTROL.sub("?", trace.source)[-2000:],
        rank=trace.rank,
        first_step=int(number_N[0]),
        last_step=int(number_N[-1]),
        steps=n,
        device_own_s=None if own_ns is None else own_ns * per_step,
        device_idle_s=None if idle_ns is None else idle_ns * per_step,
        **{name: count / n for name, count in counts.items()},
        **{name: time_ns * per_step for name, time_ns in times_ns.items()},
    )
    return profile, tally, took


def _shares(tally: Tally, steps: int, control: Tally | None, control_steps: int) -> tuple[Share, ...]:
    self_C = tally.self_ns_C * 1e-9 / steps
    control_C = np.zeros_like(self_C) if control is None else control.self_ns_of(tally) * 1e-9 / control_steps
    more_C = self_C - control_C

    def place(index: int) -> tuple[float, float, str]:
        return -float(more_C[index]), -float(self_C[index]), tally.key(index)[1]

    shares = []
    for index in heapq.nsmallest(MAX_SHARES, np.flatnonzero(tally.self_ns_C).tolist(), key=place):
        kind, name, waits = tally.key(index)
        shares.append(
            Share(
                name=name,
                kind=_KIND_OF[kind],
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
    where = "" if of_steps is None else f" in the {profile.steps} of {of_steps} captured steps that have the fault"
    more = {"at work": profile.working_s, "waiting": profile.waiting_s, UNSEEN: profile.unseen_s}
    sentence = _took(stage, profile, control, where, more, than)
    if control is not None:
        for kind, control_s in zip(more, (control.working_s, control.waiting_s, control.unseen_s), strict=True):
            more[kind] -= control_s
    most = max(more, key=lambda kind: more[kind])
    if most == UNSEEN and profile.unseen_s > 0.1 * profile.stage_s:
        return f"{sentence}. What stands out is time in Python or in the system, which leaves no events."
    first = next((share for share in shares if share.waits == (most == "waiting")), None)
    if first is not None and first.self_s > 0.1 * profile.stage_s:
        return f"{sentence}. What stands out is {first.name}."
    return f"{sentence}."


def _took(
    stage: str, profile: StageProfile, control: StageProfile | None, how: str, parts: Mapping[str, float], than: str
) -> str:
    split = ", ".join(f"{seconds * 1e3:.1f} ms {kind}" for kind, seconds in parts.items()) or "no sample"
    took = f"{stage} took {profile.stage_s * 1e3:.1f} of the {profile.step_s * 1e3:.1f} ms of a step{how}: {split}"
    if control is None:
        return took
    longer_s = profile.stage_s - control.stage_s
    return f"{took}; {abs(longer_s) * 1e3:.1f} ms {'more' if longer_s >= 0 else 'less'} than {than}"


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """Self time and calls by kind, name and whether it waits, as C sorted codes of all three."""

    names: Sequence[str]
    code_C: Ints
    self_ns_C: Ints
    calls_C: Ints

    def key(self, index: int) -> tuple[int, str, bool]:
        """The kind, the printable name, and whether it waits."""
        code = int(self.code_C[index])
        return code >> 1 & 7, CONTROL.sub("?", self._name(code))[:100], not code & 1

    def and_of(self, *code_self_calls_X: Ints) -> Tally:
        """The tally with the codes, self times and calls of events added."""
        columns = zip((self.code_C, self.self_ns_C, self.calls_C), code_self_calls_X, strict=True)
        code_X, *values = (np.concatenate(column) for column in columns)
        code_C, which = np.unique(code_X, return_inverse=True)
        sums = (np.bincount(which, values_X, minlength=len(code_C)).astype(np.int64) for values_X in values)
        return Tally(self.names, code_C, *sums)

    def self_ns_of(self, other: Tally) -> Ints:
        """The self time here of the entries of another trace's tally, whose names have other numbers."""
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
    """What the steps' process did in some spans, by name; how long any thread worked, and worked or waited."""
    names = trace.names
    idles, shown, beside = matching(names, IDLES), matching(names, _MEANINGFUL), steplike(names) | matching(names, OURS)
    waits = idles | matching(names, WAITS)
    # (a copy from the device lasts until the device has finished the work before it)
    copies_back = EventQuery(ON_DEVICE, matching(names, ("Memcpy DtoH*",)))
    back = Links(part.link_E for part in trace.parts(copies_back))
    alike = _alike(names)
    tally, working_ns, busy_ns = Tally(names, *(np.zeros(0, dtype=np.int64) for _ in range(3))), 0, 0
    query = EventQuery(ON_HOST, tracks=trace.process(track))
    for since_ns, events, pieces in self_time_slices(trace, query, inside=spans):
        name_X, kind_X = events.name_E, events.kind_E
        waits_X = waits[name_X] | ((kind_X == RUNTIME) & back.have(events.link_E))
        shown_X = shown[name_X] | (kind_X != ANNOTATION)
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
    """For each name, the first one that differs only in an object's address, which is different on each rank."""
    bare = {number: _ADDRESS.sub("", name) for number, name in enumerate(names) if " at 0x" in name}
    alike = np.arange(len(names), dtype=np.int64)
    if bare:
        several, first = set(bare.values()), dict[str, int]()
        for number, name in enumerate(names):
            if (bare_name := bare.get(number, name)) in several:
                alike[number] = first.setdefault(bare_name, number)
    return alike


def _on_device(trace: Trace, spans: Intervals) -> tuple[dict[str, int], dict[str, int]]:
    """The work launched in some spans: the counts of a `StageProfile`, and its times in nanoseconds, over all steps."""
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
    """The time covered by events that come in slabs of time."""

    def __init__(self) -> None:
        self.total_ns = 0
        self._since_ns = self._reach_ns = 0

    def add(self, events: Events, until_ns: int) -> None:
        # (open events continue from the end of the last slab)
        start_E, end_E = np.append(events.start_E, self._since_ns), np.append(events.end_E, self._reach_ns)
        self.total_ns += union(start_E, np.minimum(end_E, until_ns)).total_ns
        self._since_ns, self._reach_ns = until_ns, int(end_E.max())


@dataclass(frozen=True, slots=True)
class SampledRank:
    """One rank's captured steps: the times of its stages by step, in seconds, and its stacks, from file ``source``."""

    source: str
    rank: int
    steps: Mapping[int, Mapping[str, float]]
    samples: StackSamples

    def mean_s(self, stage: str | None = None, steps: Collection[int] = ()) -> float:
        """The mean time of a stage over some steps, or all; without a stage that of the step itself."""
        chosen = [self.steps[number] for number in steps or self.steps]
        return sum(sum(step.values()) if stage is None else step.get(stage, 0.0) for step in chosen) / len(chosen)

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(next(iter(self.steps.values())))


def slowest(suspect: SampledRank, control: SampledRank | None) -> str:
    """The longest stage, or with a control the one with the most extra time."""
    return max(suspect.stages, key=lambda stage: suspect.mean_s(stage) - (control.mean_s(stage) if control else 0.0))


def find_sampled(
    suspect: SampledRank, stage: str, control: SampledRank | None = None, fault_steps: Collection[int] = ()
) -> Findings:
    """What filled a stage of one rank, from its sampled stacks alone, as `find` does for a trace.

    ``working_s`` is the time in which the training thread ran, or was ready to; ``waiting_s`` is other time. Raises
    InputError without steps, or if they have no such stage.
    """
    if not suspect.steps or (control is not None and not control.steps):
        raise InputError(f"{suspect.source}: none of its steps were recorded")
    _check(stage, suspect.source, suspect.stages)
    theirs = None if control is None else [*control.steps]
    steps, control_steps, others = _steps_of([*suspect.steps], theirs, fault_steps)
    beside = control or (suspect if others else None)
    profile, named = _sampled(suspect, stage, steps)
    against, control_named = (None, {}) if beside is None else _sampled(beside, stage, control_steps)
    if beside is suspect and _as_long(against, profile):
        against, control_named = None, {}
    control_s = {key: share.self_s for key, share in control_named.items()}
    shares = tuple(
        share if against is None else share.model_copy(update={"control_self_s": control_s.get(key, 0.0)})
        for key, share in named.items()
    )
    parts = {
        "running": profile.working_s,
        "waiting": profile.waiting_s,
        "not accounted for by the system": profile.unseen_s,
    }
    parts = {kind: seconds for kind, seconds in parts.items() if seconds > 0.0}
    than = "its other steps" if beside is suspect else "" if control is None else f"rank {control.rank}"
    summary = _took(stage, profile, against, ", by its stacks", parts, than)
    return Findings(
        stage=stage,
        suspect=profile,
        control=against,
        shares=shares,
        summary=f"{summary}. What stands out is {shares[0].name}." if shares else f"{summary}.",
        of_steps=len(suspect.steps) if others else None,
        beside="steps" if beside is suspect else "rank",
    )


def _sampled(sampled: SampledRank, stage: str, steps: list[int]) -> tuple[StageProfile, dict[tuple[str, str], Share]]:
    found = spots(sampled.samples, stage, steps)
    stage_s, weight_ns = sampled.mean_s(stage, steps), sum(spot.weight_ns for spot in found)
    per_ns = stage_s / weight_ns if weight_ns else 0.0
    known_s = sum(spot.weight_ns for spot in found if spot.known_ns) * per_ns
    working_s = sum(spot.weight_ns * spot.fraction("run", "waited") for spot in found) * per_ns
    profile = StageProfile(
        source=CONTROL.sub("?", sampled.source)[-2000:],
        rank=sampled.rank,
        first_step=steps[0],
        last_step=steps[-1],
        steps=len(steps),
        step_s=sampled.mean_s(None, steps),
        stage_s=stage_s,
        working_s=working_s,
        waiting_s=known_s - working_s,
        unseen_s=stage_s - known_s,
        **dict.fromkeys(("device_s", "collective_s", "kernels", "launches", "launch_s"), 0.0),
    )
    return profile, {
        spot.place: Share(
            name=f"{spot.frame.function} ({PurePath(spot.frame.file).name}:{spot.frame.line})"[-100:],
            kind="python",
            waits=spot.known_ns > 0 and spot.fraction("run", "waited") < RUNS_FRACTION,
            self_s=spot.weight_ns * per_ns,
            calls=0.0,
        )
        for spot in found[:MAX_SHARES]
    }
