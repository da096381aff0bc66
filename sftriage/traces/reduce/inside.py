"""What filled a stage: self time by name, work against waiting, kernels against their launches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import InputError
from sftriage.records import OTHER
from sftriage.traces.fields import CONTROL
from sftriage.traces.findings import MAX_SHARES, Findings, Kind, Share, StageProfile
from sftriage.traces.reduce.events import ANNOTATION, KERNEL, ON_DEVICE, ON_HOST, OPERATOR, PYTHON, RUNTIME, Trace
from sftriage.traces.reduce.intervals import NOTHING, Ints, Spans, self_time, union
from sftriage.traces.reduce.naming import COLLECTIVES, IDLES, STEP, WAITS, matching
from sftriage.traces.reduce.stages import Reduction

# Annotations that stand for work or waiting of their own, and not only for a part of the program.
_TELLING: Final = (*WAITS, "enumerate(DataLoader)*", "Optimizer.*")
_ADDRESS = re.compile(r"(?: object)? at 0x[0-9a-f]+")
_KIND_NAMES: Final[dict[int, Kind]] = {
    ANNOTATION: "annotation",
    OPERATOR: "operator",
    PYTHON: "python",
    RUNTIME: "call",
}


@dataclass(frozen=True, slots=True, eq=False)
class _Named:
    """Self time and calls by kind and name, totals over the stage: ``key`` is (kind, name, whether it waits)."""

    self_ns: dict[tuple[int, str, bool], int]
    calls: dict[tuple[int, str, bool], int]


def find(suspect: Reduction, stage: str, control: Reduction | None = None) -> Findings:
    """What filled a stage of one rank, against the same stage of a control rank where there is one.

    Steps that both have are compared; where there are none, all of each are.

    Raises:
        InputError: the trace has no such stage.
    """
    for reduction in (suspect, control):
        if reduction is not None and stage not in reduction.schema.stages:
            raise InputError(
                f"{reduction.trace.source}: no stage {stage!r} in it; there are: {', '.join(reduction.schema.stages)}"
            )
    common = None
    if control is not None:
        shared = np.intersect1d(suspect.steps.number_N, control.steps.number_N)
        common = shared if len(shared) else None
    profile, named = _looked_at(suspect, stage, common)
    against, its_named = (None, None) if control is None else _looked_at(control, stage, common)
    shares = _shares(named, profile.steps, its_named, against.steps if against else 1)
    return Findings(
        stage=stage, suspect=profile, control=against, shares=shares, summary=_summary(stage, profile, against, shares)
    )


def _looked_at(reduction: Reduction, stage: str, common: Ints | None) -> tuple[StageProfile, _Named]:
    """One rank's stage, in the steps that are wanted."""
    trace, steps = reduction.trace, reduction.steps
    chosen = np.ones(len(steps.number_N), np.bool_) if common is None else np.isin(steps.number_N, common)
    inside = Spans(steps.start_N[chosen], steps.end_N[chosen])
    if stage == OTHER:
        spans = inside
        for named_stage in reduction.spans.values():
            spans = spans.without(named_stage)
    else:
        spans = reduction.spans[stage].clipped(inside)
    named, working, waiting = _on_host(trace, steps.track, spans)
    n = len(inside.start_K)
    worked_ns = working.total_ns
    busy_ns = _both(working, waiting).total_ns
    per_step = 1e-9 / n
    device = _on_device(trace, spans)
    numbers = steps.number_N[chosen]
    return (
        StageProfile(
            source=CONTROL.sub("?", trace.source)[-2000:],
            rank=trace.rank,
            first_step=int(numbers[0]),
            last_step=int(numbers[-1]),
            steps=n,
            step_s=inside.total_ns * per_step,
            stage_s=spans.total_ns * per_step,
            working_s=worked_ns * per_step,
            waiting_s=(busy_ns - worked_ns) * per_step,
            unseen_s=(spans.total_ns - busy_ns) * per_step,
            device_s=device.busy.total_ns * per_step,
            collective_s=device.collective.total_ns * per_step,
            kernels=device.kernels / n,
            launches=device.launches / n,
            launch_s=device.launch_ns * per_step,
        ),
        named,
    )


def _on_host(trace: Trace, track: int, spans: Spans) -> tuple[_Named, Spans, Spans]:
    """Self time of every name in the spans, and when a thread worked and when one waited."""
    idles, shows = matching(trace.names, IDLES), _shows(trace)
    waits = idles | matching(trace.names, WAITS)
    process = trace.tracks[track][0]
    same = np.fromiter((its[0] == process for its in trace.tracks), np.bool_, len(trace.tracks))
    host = trace.of_kinds(*ON_HOST) & same[trace.track_E]
    at = np.flatnonzero(host & (spans.within(trace.start_E, trace.end_E) > 0))
    # A copy back from the device lasts until the device has come to it.
    back = _copies_back(trace)
    self_ns: dict[tuple[int, str, bool], int] = {}
    calls: dict[tuple[int, str, bool], int] = {}
    busy: dict[bool, list[Spans]] = {True: [], False: []}
    for thread in np.unique(trace.track_E[at]).tolist():
        its = at[trace.track_E[at] == thread]
        pieces = self_time(trace.start_E[its], trace.end_E[its])
        name_X, kind_X = trace.name_E[its], trace.kind_E[its]
        waits_X = waits[name_X] | ((kind_X == RUNTIME) & np.isin(trace.link_E[its], back))
        shown_X = shows[name_X] | (kind_X != ANNOTATION)
        shown_X &= ~(_steplike(trace) | (idles & (thread != track)))[name_X]
        began_X = spans.before(trace.start_E[its] + 1) > spans.before(trace.start_E[its])
        inside_P = spans.within(pieces.start_P, pieces.end_P)
        self_X = np.bincount(pieces.owner_P, weights=inside_P, minlength=len(its)).astype(np.int64)
        for waiting in (True, False):
            mine = shown_X & (waits_X == waiting)
            owned = mine[pieces.owner_P]
            busy[waiting].append(union(pieces.start_P[owned], pieces.end_P[owned]).clipped(spans))
            _count(self_ns, calls, trace, (kind_X[mine], name_X[mine], waiting), self_X[mine], began_X[mine])
    return _Named(self_ns, calls), _both(*busy[False]), _both(*busy[True])


def _count(
    self_ns: dict[tuple[int, str, bool], int],
    calls: dict[tuple[int, str, bool], int],
    trace: Trace,
    what: tuple[NDArray[np.uint8], NDArray[np.int32], bool],
    self_X: Ints,
    began_X: NDArray[np.bool_],
) -> None:
    """Add up self time and calls by kind and name."""
    kind_X, name_X, waits = what
    keys, which = np.unique(kind_X.astype(np.int64) << 32 | name_X, return_inverse=True)
    total = np.bincount(which, weights=self_X, minlength=len(keys))
    count = np.bincount(which, weights=began_X, minlength=len(keys))
    for key, its_ns, its_calls in zip(keys.tolist(), total.tolist(), count.tolist(), strict=True):
        # An object's address differs from rank to rank, and would keep apart what is the same.
        named = (key >> 32, _ADDRESS.sub("", trace.names[key & 0xFFFFFFFF]), waits)
        self_ns[named] = self_ns.get(named, 0) + int(its_ns)
        calls[named] = calls.get(named, 0) + int(its_calls)


def _steplike(trace: Trace) -> NDArray[np.bool_]:
    return np.fromiter((STEP.fullmatch(name) is not None for name in trace.names), np.bool_, len(trace.names))


def _shows(trace: Trace) -> NDArray[np.bool_]:
    """The names of annotations that say what is done there, and not only which part of the program it is."""
    return matching(trace.names, _TELLING)


def _copies_back(trace: Trace) -> Ints:
    """The links of copies from the device to the host."""
    names = np.fromiter((name.startswith("Memcpy DtoH") for name in trace.names), np.bool_, len(trace.names))
    links = np.unique(trace.link_E[trace.of_kinds(*ON_DEVICE) & trace.named(names)])
    return links[links >= 0]


def _both(*all_spans: Spans) -> Spans:
    if not all_spans:
        return NOTHING
    return union(
        np.concatenate([spans.start_K for spans in all_spans]), np.concatenate([spans.end_K for spans in all_spans])
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Device:
    """What was launched in a stage, and what it came to."""

    busy: Spans
    collective: Spans
    kernels: int
    launches: int
    launch_ns: int


def _on_device(trace: Trace, spans: Spans) -> _Device:
    called = trace.of_kinds(RUNTIME) & (spans.before(trace.start_E + 1) > spans.before(trace.start_E))
    launch = called & trace.named(matching(trace.names, ("*Launch*Kernel*", "*GraphLaunch*")))
    links = np.unique(trace.link_E[called])
    device = trace.of_kinds(*ON_DEVICE) & np.isin(trace.link_E, links[links >= 0])
    collective = device & trace.named(matching(trace.names, COLLECTIVES))
    return _Device(
        busy=union(trace.start_E[device], trace.end_E[device]),
        collective=union(trace.start_E[collective], trace.end_E[collective]),
        kernels=int((device & trace.of_kinds(KERNEL)).sum()),
        launches=int(launch.sum()),
        launch_ns=int((trace.end_E[launch] - trace.start_E[launch]).sum()),
    )


def _shares(named: _Named, steps: int, control: _Named | None, control_steps: int) -> tuple[Share, ...]:
    """The names that took the most; against a control rank, those that took the most more."""
    shares = [
        Share(
            name=CONTROL.sub("?", name)[:100],
            kind=_KIND_NAMES[kind],
            waits=waits,
            self_s=its_ns * 1e-9 / steps,
            calls=named.calls[kind, name, waits] / steps,
            control_self_s=None
            if control is None
            else control.self_ns.get((kind, name, waits), 0) * 1e-9 / control_steps,
        )
        for (kind, name, waits), its_ns in named.self_ns.items()
        if its_ns
    ]
    shares.sort(key=lambda share: (-(share.self_s - (share.control_self_s or 0.0)), -share.self_s, share.name))
    return tuple(shares[:MAX_SHARES])


def _summary(stage: str, profile: StageProfile, control: StageProfile | None, shares: tuple[Share, ...]) -> str:
    """What stands out, in words."""
    parts = {"at work": profile.working_s, "waiting": profile.waiting_s, "in nothing the trace shows": profile.unseen_s}
    said = ", ".join(f"{seconds * 1e3:.1f} ms {what}" for what, seconds in parts.items())
    sentence = f"{stage} took {profile.stage_s * 1e3:.1f} of {profile.step_s * 1e3:.1f} ms a step: {said}"
    more = dict(parts)
    if control is not None:
        longer_s = profile.stage_s - control.stage_s
        of_control = "its control" if control.rank is None else f"rank {control.rank}"
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
