"""What was done in some spans of a trace: self time by name, work against waiting, and what the device made of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sftriage.reduce.events import ANNOTATION, KERNEL, ON_DEVICE, ON_HOST, RUNTIME, Trace
from sftriage.reduce.intervals import Intervals, Ints, Links, both, union
from sftriage.reduce.naming import COLLECTIVES, IDLES, WAITS, matching, steplike
from sftriage.reduce.packed import Events
from sftriage.reduce.self_time import self_time_slices

# Annotations that stand for work or waiting of their own, and not only for a part of the program.
_TELLING: Final = (*WAITS, "enumerate(DataLoader)*", "Optimizer.*")
_ADDRESS = re.compile(r"(?: object)? at 0x[0-9a-f]+")
_NAME_SHIFT = 4
_REST = (1 << _NAME_SHIFT) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """Self time and calls by kind, name and whether it waits (C of them): codes, in order, that say all three."""

    names: Sequence[str]
    code_C: Ints
    self_ns_C: Ints
    calls_C: Ints

    @classmethod
    def nothing(cls, names: Sequence[str]) -> Tally:
        """Of no event yet; the names are by number."""
        return cls(names, *(np.zeros(0, dtype=np.int64) for _ in range(3)))

    @staticmethod
    def codes(kind_X: Ints, name_X: Ints, waits_X: NDArray[np.bool_]) -> Ints:
        """The codes of events."""
        return name_X << _NAME_SHIFT | kind_X << 1 | ~waits_X

    def key(self, index: int) -> tuple[int, str, bool]:
        """The kind, the name and whether it waits."""
        code = int(self.code_C[index])
        return code >> 1 & 7, self._name(code), not code & 1

    def and_of(self, code_X: Ints, self_ns_X: Ints, calls_X: NDArray[np.bool_]) -> Tally:
        """With those of events added up."""
        code_C, which = np.unique(np.concatenate([self.code_C, code_X]), return_inverse=True)
        sums = (
            np.bincount(which, weights=np.concatenate(both_parts), minlength=len(code_C)).astype(np.int64)
            for both_parts in ((self.self_ns_C, self_ns_X), (self.calls_C, calls_X))
        )
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


@dataclass(frozen=True, slots=True, eq=False)
class OnHost:
    """What the threads of a process did: by name, how long any of them worked, and how long any worked or waited."""

    tally: Tally
    working_ns: int
    busy_ns: int


def on_host(trace: Trace, track: int, spans: Intervals) -> OnHost:
    """What was done in some spans by the process that one of the trace's threads, the steps' own, is of."""
    names = trace.names
    idles, tells, steps = matching(names, IDLES), matching(names, _TELLING), steplike(names)
    waits = idles | matching(names, WAITS)
    process = trace.tracks[track][0]
    same = np.fromiter((its[0] == process for its in trace.tracks), np.bool_, len(trace.tracks))
    # A copy back from the device lasts until the device has come to it.
    back = _copies_back(trace)
    alike = _alike(names)
    tally, working_ns, busy_ns = Tally.nothing(names), 0, 0
    for slab, events, pieces in self_time_slices(trace, kinds=ON_HOST, tracks=same, inside=spans):
        here = spans.between(slab.since_ns, slab.until_ns)
        name_X, kind_X = events.name_E, events.kind_E
        waits_X = waits[name_X] | ((kind_X == RUNTIME) & back.have(events.link_E))
        shown_X = tells[name_X] | (kind_X != ANNOTATION)
        shown_X &= ~(steps[name_X] | (idles[name_X] & (events.track_E != track)))
        began_X = here.before(events.start_E + 1) > here.before(events.start_E)
        inside_P = here.within(pieces.start_P, pieces.end_P)
        self_X = np.bincount(pieces.owner_P, weights=inside_P, minlength=len(events)).astype(np.int64)
        code_X = Tally.codes(kind_X, alike[name_X], waits_X)
        tally = tally.and_of(code_X[shown_X], self_X[shown_X], began_X[shown_X])
        working, waiting = (
            union(pieces.start_P[of_P], pieces.end_P[of_P])
            for of_P in ((shown_X & ~waits_X)[pieces.owner_P], (shown_X & waits_X)[pieces.owner_P])
        )
        working_ns += _shared_ns(working, here)
        busy_ns += _shared_ns(both(working, waiting), here)
    return OnHost(tally, working_ns, busy_ns)


def _shared_ns(one: Intervals, other: Intervals) -> int:
    return int(other.within(one.start_K, one.end_K).sum())


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


def _copies_back(trace: Trace) -> Links:
    """The links of copies from the device to the host."""
    names = np.fromiter((name.startswith("Memcpy DtoH") for name in trace.names), np.bool_, len(trace.names))
    return Links(part.link_E for part in trace.parts(kinds=ON_DEVICE, names=names))


@dataclass(frozen=True, slots=True)
class OnDevice:
    """What was launched, and what it came to."""

    busy_ns: int
    collective_ns: int
    kernels: int
    launches: int
    launch_ns: int


def on_device(trace: Trace, spans: Intervals) -> OnDevice:
    """What was launched in some spans, whenever the device came to it."""
    launching = matching(trace.names, ("*Launch*Kernel*", "*GraphLaunch*"))
    links = Links()
    launches = launch_ns = 0
    for part in trace.parts(kinds=(RUNTIME,)):
        called = part.at(spans.before(part.start_E + 1) > spans.before(part.start_E))
        links.add(called.link_E)
        launch = launching[called.name_E]
        launches += int(launch.sum())
        launch_ns += int((called.end_E - called.start_E)[launch].sum())
    collectives = matching(trace.names, COLLECTIVES)
    busy, in_collectives, kernels = _Covered(), _Covered(), 0
    for until_ns, part in trace.slabs(kinds=ON_DEVICE) if links else ():
        device = part.at(links.have(part.link_E))
        kernels += int((device.kind_E == KERNEL).sum())
        busy.add(device, until_ns)
        in_collectives.add(device.at(collectives[device.name_E]), until_ns)
    return OnDevice(busy.total_ns, in_collectives.total_ns, kernels, launches, launch_ns)


class _Covered:
    """How long any of some events lasted, which come in slabs of time."""

    def __init__(self) -> None:
        self.total_ns = 0
        self._since_ns = self._reach_ns = 0

    def add(self, events: Events, until_ns: int | None) -> None:
        """Take those that began in a slab, and the moment it ends."""
        # What is still open goes on from where the last slab ended.
        start_E, end_E = np.append(events.start_E, self._since_ns), np.append(events.end_E, self._reach_ns)
        self.total_ns += union(start_E, end_E if until_ns is None else np.minimum(end_E, until_ns)).total_ns
        if until_ns is not None:
            self._since_ns, self._reach_ns = until_ns, int(end_E.max())
