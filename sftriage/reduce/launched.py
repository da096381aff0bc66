"""What the device did of what a stage launched: by kernel, and by the operators that launched it.

Axes: L launches, M operators, D the device's events, K kernels with who launched them, N steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from sftriage.errors import InputError
from sftriage.reduce.events import (
    KERNEL,
    ON_DEVICE,
    OPERATOR,
    RUNTIME,
    EventQuery,
    Events,
    Trace,
    gathered,
    self_time_slices,
)
from sftriage.reduce.intervals import Intervals, Ints, union
from sftriage.reduce.naming import COLLECTIVES, matching, steplike
from sftriage.traces.documents import CONTROL
from sftriage.traces.findings import MAX_KERNELS, KernelShare

MAX_LAUNCHES = 1 << 20
"""Of a stage, and of what the device did, those that are looked at as one."""

_ENGINE = re.compile(r"^(autograd::engine::evaluate_function: )?(torch::autograd::)?")
_NAMESPACES = re.compile(r"^(?:[\w~]+::|\(anonymous namespace\)::)*")
_MAX_NAME: Final = 100

Launcher = tuple[str, str, str]
"""A kernel, the operator that launched it, and the outermost one around that."""

Took = Mapping[Launcher, tuple[int, int]]
"""How long a device was at each, in nanoseconds, and how often."""


@dataclass(frozen=True, slots=True)
class Launched:
    """What the device did of what was launched in some steps.

    Attributes:
        took: for each kernel and copy (no collectives), with its launcher, nanoseconds and how often it ran. What
            overlaps on one stream counts once.
        own_ns: how long the device was at any of these.
        idle_ns: how long it waited for its host, from the end of what came before to the end of all of this. None, as
            ``own_ns``, where nothing was launched, or too much.
    """

    took: Took
    own_ns: int | None = None
    idle_ns: int | None = None


def launched(trace: Trace, track: int, spans: Intervals, start_N: Ints) -> Launched:
    """What the device did of what some spans launched, whenever it came to it.

    ``track`` is a thread of the launching process, ``start_N`` is when the steps began.
    """
    calls = _calls(trace, track, spans)
    device = _device_events(trace)
    if not len(calls) or device is None:
        return Launched({})
    inner_L, outer_L = _launchers(trace, track, spans, calls)
    order = np.argsort(calls.link_E, kind="stable")
    link_L = calls.link_E[order]
    at_D = np.minimum(np.searchsorted(link_L, device.link_E), len(link_L) - 1)
    tied_D = (device.link_E >= 0) & (link_L[at_D] == device.link_E)
    step_L = np.searchsorted(start_N, calls.start_E, side="right")
    # (after its last kernel a sync stage may wait for others, as one does whose exchange is on the host)
    works_D = tied_D & (device.kind_E == KERNEL) & (inner_L[order[at_D]] >= 0)
    idle_ns = _idle_ns(device, np.where(works_D, step_L[order[at_D]], -1))
    tied_D &= ~matching(trace.names, COLLECTIVES)[device.name_E]
    its, by_D = device.at(tied_D), order[at_D[tied_D]]
    keys_D = np.stack([its.name_E, inner_L[by_D], outer_L[by_D]], axis=1)
    key_K, which_D, calls_K = np.unique(keys_D, axis=0, return_inverse=True, return_counts=True)
    took_K = np.bincount(which_D.ravel(), _alone_ns(its), len(key_K)).astype(np.int64)
    found: dict[Launcher, tuple[int, int]] = {}
    for (kernel, inner, outer), took_ns, n_calls in zip(key_K.tolist(), took_K.tolist(), calls_K.tolist(), strict=True):
        names = _shown(trace, inner), _shown(trace, outer)
        launcher = kernel_name(trace.names[kernel]), names[0], names[1] if names[1] != names[0] else ""
        before_ns, before = found.get(launcher, (0, 0))
        found[launcher] = before_ns + took_ns, before + n_calls
    return Launched(found, union(its.start_E, its.end_E).total_ns, idle_ns)


def _device_events(trace: Trace) -> Events | None:
    try:
        found = gathered(trace.parts(EventQuery(ON_DEVICE)), MAX_LAUNCHES, "")
    except InputError:
        return None
    return found.at(np.argsort(found.start_E, kind="stable"))


def _alone_ns(device: Events) -> Ints:
    """How long each of a device's events, in order, took of its stream beyond those that began before it.

    A stream does one thing after the other: where its events overlap, their sum is no more than the time they cover.
    """
    alone_D = np.zeros(len(device), dtype=np.int64)
    for stream in np.unique(device.track_E).tolist():
        at = np.flatnonzero(device.track_E == stream)
        start, end = device.start_E[at], device.end_E[at]
        reach = np.append(start[:1], np.maximum.accumulate(end)[:-1])
        alone_D[at] = np.maximum(end - np.maximum(start, reach), 0)
    return alone_D


def _idle_ns(device: Events, step_D: Ints) -> int:
    """How long a device was idle before and between what it did of each step's; -1 is not of them."""
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


def kernel_shares(
    suspect: Took,
    steps: int,
    control: Took | None,
    control_steps: int,
) -> tuple[KernelShare, ...]:
    """Those that took the most, a step; against a control, those that took the most more."""
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
    shares.sort(key=lambda one: (-one.more_s, -one.device_s, one.name, one.operator, one.within))
    return tuple(shares[:MAX_KERNELS])


def kernel_name(name: str) -> str:
    """A kernel as it is spoken of: without its parameters, what it returns, and namespaces."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    end = min((at for at in (plain.find("<"), plain.find("(")) if at > 0), default=len(plain))
    head, rest = _NAMESPACES.sub("", plain[:end]).strip(), plain[end:]
    # What is made of one template is told apart by what that is given, where this is but a name.
    given = re.match(r"<(\w{8,})>", rest)
    return CONTROL.sub("?", f"{head}<{given[1]}>" if given else head or name)[:_MAX_NAME]


def _shown(trace: Trace, number: int) -> str:
    return "" if number < 0 else CONTROL.sub("?", _ENGINE.sub("", trace.names[number]))[:_MAX_NAME]


def _calls(trace: Trace, track: int, spans: Intervals) -> Events:
    found, n_found = [], 0
    for part in trace.parts(EventQuery((RUNTIME,), tracks=trace.process(track))):
        its = part.at(spans.hold(part.start_E) & (part.link_E >= 0))
        found.append(its)
        n_found += len(its)
        if n_found > MAX_LAUNCHES:
            break
    return Events.joined(found)


def _launchers(trace: Trace, track: int, spans: Intervals, calls: Events) -> tuple[Ints, Ints]:
    """The names of the innermost and the outermost operator around each launch; -1 where there is none (L)."""
    inner_L, outer_L = (np.full(len(calls), -1, dtype=np.int64) for _ in range(2))
    # (some traces have what marks a step for an operator)
    wanted = EventQuery((OPERATOR,), ~steplike(trace.names), trace.process(track))
    for since_ns, operators, pieces in self_time_slices(trace, wanted, inside=spans):
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
    """In which of some pieces, which are in order and do not overlap, each moment is; -1 where in none."""
    if not len(start_P):
        return np.full(len(moments), -1, dtype=np.int64)
    at = np.searchsorted(start_P, moments, side="right") - 1
    return np.where((at >= 0) & (moments < end_P[np.maximum(at, 0)]), at, -1)


def _outermost(start_M: Ints, end_M: Ints) -> Ints:
    """Of each event of a thread the one that is around it and in no other: itself, where none is."""
    order = np.lexsort((-end_M, start_M))
    reach_M = np.maximum.accumulate(end_M[order])
    begins_M = np.append(True, start_M[order][1:] >= reach_M[:-1])
    top_M = np.zeros(len(order), dtype=np.int64)
    top_M[order] = order[begins_M][np.cumsum(begins_M) - 1]
    return top_M
