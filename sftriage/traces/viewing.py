"""Traces of several ranks laid side by side in one file for Perfetto's viewer, and where in it the fault is.

Each rank's tracks say its name. Beside what its profiler has recorded are the stacks that were sampled meanwhile, or
they stand alone. Times are whole nanoseconds since the first event, so that what is named in a link is found: the
viewer selects a slice by its exact time.
"""

from __future__ import annotations

import gzip
import itertools
import json
import urllib.parse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from sftriage.traces.manifest import Manifest

MAX_BYTES = 96 << 20
"""More JSON than this is not laid out anew: it would take some gigabytes of memory."""

_STEP, _STAGE, _FLOWS = "ProfilerStep#", "sftriage:", ("s", "t", "f")
_NAMES = ("process_name", "process_labels", "process_sort_index")
_BESIDE_FRACTION = 0.1
"""How much of a step is shown on both sides of it."""


@dataclass(frozen=True, slots=True)
class FirstView:
    """What is looked at first, in nanoseconds of the trace: the selected slice, and what is on the screen."""

    selected_ns: int
    selected_length_ns: int
    first_ns: int
    last_ns: int

    @property
    def parameters(self) -> str:
        """It as the viewer's documented deep link says it, with its commands that expand and pin tracks.

        A process's are called ``rank 2 (suspect)``, and those of the thread that takes its steps ``rank 2 suspect``.
        """
        commands = [
            {"id": "dev.perfetto.ExpandTracksByRegex", "args": [r"^rank \d+ \("]},
            {"id": "dev.perfetto.PinTracksByRegex", "args": [r"^rank \d+ [a-z]"]},
        ]
        values = {
            "ts": self.selected_ns,
            "dur": self.selected_length_ns,
            "visStart": self.first_ns,
            "visEnd": self.last_ns,
            "startupCommands": json.dumps(commands, separators=(",", ":")),
        }
        return urllib.parse.urlencode(values, quote_via=urllib.parse.quote)


@dataclass(frozen=True, slots=True)
class StackSlice:
    """A function for as long as it was met in one stack after the other, on the monotonic clock of its host."""

    name: str
    start_ns: int
    length_ns: int
    args: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StackTrack:
    """The sampled stacks of a thread, outer functions before those in them; ``process`` is "" for the trainer's own."""

    name: str
    process: str
    slices: tuple[StackSlice, ...]


@dataclass(frozen=True, slots=True)
class StackTracks:
    """The sampled stacks of a rank, of its training thread first; ``marks`` are its steps and stages."""

    tracks: tuple[StackTrack, ...]
    marks: tuple[StackSlice, ...]


@dataclass(frozen=True, slots=True)
class _Slice:
    name: str
    track: tuple[object, object]
    start_ns: int
    length_ns: int

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.length_ns


def lay_out(
    traces: Sequence[tuple[Manifest, Path]], target: Path, stacks: Mapping[str, StackTracks] = MappingProxyType({})
) -> FirstView | None:
    """Write one trace of several, the suspect's first; None, and nothing is written, where they are no such traces.

    Times are those of the hosts' clocks. ``stacks`` are those that were sampled, by capture.
    """
    ranks = []
    for manifest, path in traces:
        sampled = _Stacks.of(manifest, stacks.get(manifest.capture_id))
        document = _document(path)
        if document is None and sampled is not None:
            document = sampled.document()
        if document is None:
            return None
        ranks.append(_Rank(manifest, document, sampled))
    if not ranks:
        return None
    if not all(rank.steps for rank in ranks):
        return None
    origin_ns = min(rank.first_ns for rank in ranks)
    numbers, taken = itertools.count(1 << 22), set[object]()
    events = [event for rank in ranks for event in rank.events(origin_ns, numbers, taken)]
    with gzip.open(target, "wb", compresslevel=1) as file:
        file.write(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events}))
    selected, step = ranks[0].flagged()
    beside_ns = int(step.length_ns * _BESIDE_FRACTION)
    return FirstView(
        selected.start_ns - origin_ns,
        selected.length_ns,
        max(0, step.start_ns - origin_ns - beside_ns),
        min(max(rank.last_ns for rank in ranks), step.end_ns + beside_ns) - origin_ns,
    )


def _document(path: Path) -> dict[str, Any] | None:
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        found = msgspec.json.decode(text) if len(text) <= MAX_BYTES else None
    except (OSError, EOFError, ValueError):
        return None
    events = found.get("traceEvents") if isinstance(found, dict) else None
    return found if isinstance(events, list) and all(isinstance(one, dict) for one in events) else None


@dataclass(frozen=True, slots=True)
class _Stacks:
    found: StackTracks
    ahead_ns: int

    @classmethod
    def of(cls, manifest: Manifest, found: StackTracks | None) -> _Stacks | None:
        clock = manifest.capture.clock
        if found is None or not found.tracks or not {"mono_ns", "wall_ns"} <= clock.keys():
            return None
        return cls(found, clock["wall_ns"] - clock["mono_ns"])

    def document(self) -> dict[str, Any]:
        base_ns = min((one.start_ns for one in self.found.marks), default=0)
        marks = [
            {"ph": "X", "cat": "user_annotation", "name": one.name, "pid": 1, "tid": 1, "args": {}}
            | {"ts": (one.start_ns - base_ns) / 1000, "dur": one.length_ns / 1000}
            for one in self.found.marks
        ]
        named = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "ts": 0, "args": {"name": ""}}
        return {"baseTimeNanoseconds": base_ns + self.ahead_ns, "traceEvents": [*marks, named]}

    def events(
        self, rank: int, role: str, process: object, origin_ns: int, numbers: Iterator[int]
    ) -> Iterable[Mapping[str, Any]]:
        processes = {"": process}
        for order, track in enumerate(self.found.tracks):
            thread = next(numbers)
            if track.process not in processes:
                processes[track.process] = next(numbers)
                called = f"rank {rank} ({role}) {track.process}"
                yield _named("process_name", processes[track.process], 0, called)
            pid = processes[track.process]
            called = f"stacks {track.name}".strip() if order else f"rank {rank} {role} stacks"
            yield _named("thread_name", pid, thread, called)
            for one in track.slices:
                since_ns = one.start_ns + self.ahead_ns - origin_ns
                yield {"ph": "X", "cat": "stack", "name": one.name, "pid": pid, "tid": thread, "args": one.args} | {
                    "ts": since_ns / 1000,
                    "dur": one.length_ns / 1000,
                }


class _Rank:
    def __init__(self, manifest: Manifest, document: dict[str, Any], stacks: _Stacks | None = None) -> None:
        self._manifest, self._stacks = manifest, stacks
        base = document.get("baseTimeNanoseconds", 0)
        self._base_ns = base if isinstance(base, int) else 0
        self._events: list[dict[str, Any]] = [event for event in document["traceEvents"] if _placed(event)]
        slices = [self._slice(event) for event in self._events if event.get("ph") == "X" and _told(event)]
        self.steps = [one for one in slices if one.name.startswith(_STEP)]
        self._stages = [one for one in slices if one.name == f"{_STAGE}{manifest.trigger.stage}"]
        # What lasts: the viewer takes that for the trace's extent, and what is before it is not shown.
        timed = [event for event in self._events if event.get("ph") == "X"]
        self.first_ns = min((self._ns(event) for event in timed), default=0)
        self.last_ns = max((self._ns(event) + _length_ns(event) for event in timed), default=0)

    def flagged(self) -> tuple[_Slice, _Slice]:
        reproduced = self._manifest.reproduced
        faulty = {f"{_STEP}{number}" for number in (reproduced.fault_steps if reproduced else ())}
        steps = [one for one in self.steps if one.name in faulty] or self.steps
        inside = [(stage, step) for step in steps for stage in self._stages if _holds(step, stage)]
        longest = max(steps, key=lambda one: one.length_ns)
        return max(inside, key=lambda pair: pair[0].length_ns, default=(longest, longest))

    def events(self, origin_ns: int, numbers: Iterator[int], taken: set[object]) -> Iterable[Mapping[str, Any]]:
        processes: dict[object, object] = {}
        flows: defaultdict[str, int] = defaultdict(lambda: next(numbers))
        labels = {
            event.get("pid"): args.get("labels")
            for event in self._events
            if event.get("name") == "process_labels" and isinstance(args := event.get("args"), dict)
        }
        threads = {one.track for one in self.steps}
        rank, role = self._manifest.capture.rank, self._manifest.capture.role
        for event in self._events:
            pid, name = event.get("pid"), event.get("name")
            if pid not in processes:
                processes[pid] = pid if isinstance(pid, int) and pid not in taken else next(numbers)
                what = "" if labels.get(pid) in (None, "CPU") else f" {labels[pid]}"
                called = {"name": f"rank {rank} ({role}){what}"}
                yield {"ph": "M", "name": "process_name", "pid": processes[pid], "tid": 0, "args": called}
            if event.get("ph") == "M" and name in _NAMES:
                continue
            changed = {**event, "pid": processes[pid]}
            changed["ts"] = (self._ns(event) - origin_ns) / 1000 if event.get("ph") != "M" else 0
            if "dur" in event:
                changed["dur"] = _length_ns(event) / 1000
            if event.get("ph") in _FLOWS:
                changed["id"] = flows[str(event.get("id"))]
            if name == "thread_name" and (pid, event.get("tid")) in threads:
                changed["args"] = {"name": f"rank {rank} {role}"}
            yield changed
        taken.update(processes.values())
        if self._stacks is not None and self.steps:
            yield from self._stacks.events(rank, role, processes[self.steps[0].track[0]], origin_ns, numbers)

    def _slice(self, event: Mapping[str, Any]) -> _Slice:
        return _Slice(event["name"], (event.get("pid"), event.get("tid")), self._ns(event), _length_ns(event))

    def _ns(self, event: Mapping[str, Any]) -> int:
        return int(self._base_ns + round(event["ts"] * 1000))


def _placed(event: Mapping[str, Any]) -> bool:
    track = (event.get("pid"), event.get("tid", 0))
    return isinstance(event.get("ts"), int | float) and all(isinstance(one, int | str) for one in track)


def _told(event: Mapping[str, Any]) -> bool:
    """Whether it is one of our marks, on the thread that made them."""
    name = event.get("name")
    return isinstance(name, str) and name.startswith((_STEP, _STAGE)) and event.get("cat") == "user_annotation"


def _length_ns(event: Mapping[str, Any]) -> int:
    length = event.get("dur", 0)
    return round(length * 1000) if isinstance(length, int | float) else 0


def _holds(step: _Slice, stage: _Slice) -> bool:
    return step.track == stage.track and step.start_ns <= stage.start_ns and stage.end_ns <= step.end_ns


def _named(what: str, process: object, thread: int, name: str) -> Mapping[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": {"name": name}}
