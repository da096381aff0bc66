"""Prepares a file of a capture for its viewer: a verified copy, or for Perfetto the traces of several ranks in one.

Each rank's tracks have its name, and sampled stacks are beside the profiler's events, or alone. Times are whole
nanoseconds since the first event, because the viewer selects a slice by its exact time.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import tempfile
import urllib.parse
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from sftriage.errors import SftriageError, UsageError
from sftriage.model.captures import Profiler
from sftriage.reduce.samples import Frame, StackSamples, ThreadSamples, read_samples
from sftriage.traces.manifest import Artefact, Manifest
from sftriage.traces.objects import destination_of
from sftriage.traces.store import LocalStore, Store, beside
from sftriage.trainer.sampler import NAME as SAMPLES_NAME

Program = Literal["perfetto", "nsys-ui", "sqlite3", "text", "none"]

Copying = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows the progress of copying a named file, in bytes."""


def program_for(name: str, profiler: Profiler) -> Program:
    """The program that shows a file of a capture."""
    if name == SAMPLES_NAME or (profiler == "torch" and name.endswith((".json", ".json.gz"))):
        return "perfetto"
    by_suffix: Mapping[str, Program] = {".nsys-rep": "nsys-ui", ".sqlite": "sqlite3", ".json": "text"}
    return by_suffix.get(Path(name).suffix, "none")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a capture in its store; ``out`` is the target for a copy, and ``copying`` shows its progress."""

    store: Store
    reference: str
    manifest: Manifest
    artefact: Artefact
    out: Path | None
    copying: Copying

    @property
    def name(self) -> str:
        return f"{self.manifest.capture_id}-{self.artefact.name}"

    @property
    def here(self) -> Path | None:
        """Its path, if it is on this machine."""
        if not isinstance(self.store, LocalStore):
            return None
        try:
            return self.store.path(self.reference, self.artefact.name)
        except UsageError:
            # It was uploaded, and is there alone.
            return None

    @contextlib.contextmanager
    def verified(self) -> Iterator[Path]:
        """A verified copy: in ``out``, or in a private directory for the block."""
        if self.out is not None:
            yield self._copied(destination_of(self.name, self.out, force=False))
            return
        with tempfile.TemporaryDirectory(prefix="sftriage-open-") as directory:
            yield self._copied(Path(directory) / self.name)

    def _copied(self, target: Path) -> Path:
        with self.copying(self.artefact.name, self.artefact.size_bytes) as progress:
            return self.store.get(self.reference, self.artefact.name, target, progress=progress)


@contextlib.contextmanager
def for_viewer(trace: StoredFile) -> Iterator[tuple[Path, Path, FirstView | None]]:
    """A capture's trace, the file for the viewer, and the viewer's first view: the suspect beside its control.

    If they cannot be laid out like this, the viewer gets the trace as stored. The files exist during the block.
    """
    with contextlib.ExitStack() as made:
        file = made.enter_context(trace.verified())
        target = Path(made.enter_context(tempfile.TemporaryDirectory(prefix="sftriage-open-"))) / trace.name
        alone = [(trace.manifest, file)]
        both, stacks = list(alone), _stacks(trace, file, made)
        with contextlib.suppress(SftriageError):
            if trace.artefact == trace.manifest.artefacts[0]:
                for reference, manifest in beside(trace.store, trace.reference, trace.manifest)[:1]:
                    other = StoredFile(trace.store, reference, manifest, manifest.artefacts[0], None, trace.copying)
                    own = made.enter_context(other.verified())
                    both.append((manifest, own))
                    stacks |= _stacks(other, own, made)
        both.sort(key=lambda found: found[0].capture.role == "control")
        spot = lay_out(both, target, stacks) or lay_out(alone, target, stacks)
        yield file, file if spot is None else target, spot


def _stacks(trace: StoredFile, file: Path, made: contextlib.ExitStack) -> dict[str, StackSamples]:
    with contextlib.suppress(SftriageError):
        for artefact in trace.manifest.artefacts:
            if artefact.name == SAMPLES_NAME:
                if artefact != trace.artefact:
                    file = made.enter_context(replace(trace, artefact=artefact, out=None).verified())
                return {trace.manifest.capture_id: read_samples(file)}
    return {}


MAX_BYTES = 96 << 20
"""Larger JSON is shown as stored: laying it out would take gigabytes of memory."""

_STEP, _STAGE, _FLOWS = "ProfilerStep#", "sftriage:", ("s", "t", "f")
_NAMES = ("process_name", "process_labels", "process_sort_index")
_BESIDE_FRACTION = 0.1
"""The fraction of a step to show on both sides of it."""


@dataclass(frozen=True, slots=True)
class FirstView:
    """The viewer's first view, in nanoseconds of the trace: the selected slice, and the visible range."""

    selected_ns: int
    selected_length_ns: int
    first_ns: int
    last_ns: int

    @property
    def parameters(self) -> str:
        """The parameters of the viewer's documented deep link, with its commands that expand and pin tracks.

        A process is called ``rank 2 (suspect)``, and its thread that takes the steps ``rank 2 suspect``.
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
    """A slice of a track: a mark of the profiler, or a function during successive stacks that have it."""

    name: str
    start_ns: int
    length_ns: int
    args: Mapping[str, str]
    track: tuple[object, object] = ("", "")

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.length_ns


@dataclass(frozen=True, slots=True)
class StackTrack:
    """The sampled stacks of a thread, outer functions first; ``process`` is "" for the trainer itself."""

    name: str
    process: str
    slices: tuple[StackSlice, ...]


def lay_out(
    traces: Sequence[tuple[Manifest, Path]], target: Path, stacks: Mapping[str, StackSamples] = MappingProxyType({})
) -> FirstView | None:
    """Write several traces into one, the suspect's first; returns None, without writing, if they are unsuitable.

    Times are on the hosts' clocks. ``stacks`` are the sampled stacks, by capture.
    """
    ranks = []
    for manifest, path in traces:
        found, clock = stacks.get(manifest.capture_id), manifest.capture.clock
        if not {"mono_ns", "wall_ns"} <= clock.keys():
            found = None
        ahead_ns = clock.get("wall_ns", 0) - clock.get("mono_ns", 0)
        document = _document(path) or (None if found is None else _document_of(marks_of(found), ahead_ns))
        if document is None:
            return None
        ranks.append(_Rank(manifest, document, [] if found is None else tracks_of(found), ahead_ns))
    if not ranks or not all(rank.steps for rank in ranks):
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
    return found if isinstance(events, list) and all(isinstance(event, dict) for event in events) else None


def _document_of(marks: Sequence[StackSlice], ahead_ns: int) -> dict[str, Any]:
    """A trace of only the steps and stages, on a clock that is ``ahead_ns`` ahead of the samples'."""
    base_ns = min((mark.start_ns for mark in marks), default=0)
    events = [
        {"ph": "X", "cat": "user_annotation", "name": mark.name, "pid": 1, "tid": 1, "args": {}}
        | {"ts": (mark.start_ns - base_ns) / 1000, "dur": mark.length_ns / 1000}
        for mark in marks
    ]
    return {"baseTimeNanoseconds": base_ns + ahead_ns, "traceEvents": [*events, _named("thread_name", 1, 1, "")]}


class _Rank:
    def __init__(self, manifest: Manifest, document: dict[str, Any], tracks: list[StackTrack], ahead_ns: int) -> None:
        self._manifest, self._tracks, self._ahead_ns = manifest, tracks, ahead_ns
        base = document.get("baseTimeNanoseconds", 0)
        self._base_ns = base if isinstance(base, int) else 0
        self._events: list[dict[str, Any]] = [event for event in document["traceEvents"] if _placed(event)]
        # Events with a duration: they give the trace's extent in the viewer, which does not show what is outside.
        timed = [event for event in self._events if event.get("ph") == "X"]
        slices = [
            StackSlice(event["name"], self._ns(event), _length_ns(event), {}, (event.get("pid"), event.get("tid")))
            for event in timed
            if event.get("cat") == "user_annotation" and str(event.get("name")).startswith((_STEP, _STAGE))
        ]
        self.steps = [mark for mark in slices if mark.name.startswith(_STEP)]
        self._stages = [mark for mark in slices if mark.name == f"{_STAGE}{manifest.trigger.stage}"]
        self.first_ns = min((self._ns(event) for event in timed), default=0)
        self.last_ns = max((self._ns(event) + _length_ns(event) for event in timed), default=0)

    def flagged(self) -> tuple[StackSlice, StackSlice]:
        """The longest suspect stage in a step with the fault, and this step; without such a stage, the step twice."""
        reproduced = self._manifest.reproduced
        faulty = {f"{_STEP}{number}" for number in (reproduced.fault_steps if reproduced else ())}
        steps = [mark for mark in self.steps if mark.name in faulty] or self.steps
        inside = [
            (stage, step)
            for step in steps
            for stage in self._stages
            if step.track == stage.track and step.start_ns <= stage.start_ns and stage.end_ns <= step.end_ns
        ]
        longest = max(steps, key=lambda mark: mark.length_ns)
        return max(inside, key=lambda pair: pair[0].length_ns, default=(longest, longest))

    def events(self, origin_ns: int, numbers: Iterator[int], taken: set[object]) -> Iterable[Mapping[str, Any]]:
        """The rank's events, with its name, and with ids of processes and flows of its own."""
        processes: dict[object, object] = {}
        flows: defaultdict[str, int] = defaultdict(lambda: next(numbers))
        labels = {
            event.get("pid"): args.get("labels")
            for event in self._events
            if event.get("name") == "process_labels" and isinstance(args := event.get("args"), dict)
        }
        threads = {step.track for step in self.steps}
        rank, role = self._manifest.capture.rank, self._manifest.capture.role
        for event in self._events:
            pid, name = event.get("pid"), event.get("name")
            if pid not in processes:
                processes[pid] = pid if isinstance(pid, int) and pid not in taken else next(numbers)
                suffix = "" if labels.get(pid) in (None, "CPU") else f" {labels[pid]}"
                yield _named("process_name", processes[pid], 0, f"rank {rank} ({role}){suffix}")
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
        yield from self._sampled(processes[self.steps[0].track[0]], self._ahead_ns - origin_ns, numbers)

    def _sampled(self, process: object, later_ns: int, numbers: Iterator[int]) -> Iterable[Mapping[str, Any]]:
        rank, role = self._manifest.capture.rank, self._manifest.capture.role
        processes = {"": process}
        for order, track in enumerate(self._tracks):
            thread = next(numbers)
            if track.process not in processes:
                processes[track.process] = next(numbers)
                called = f"rank {rank} ({role}) {track.process}"
                yield _named("process_name", processes[track.process], 0, called)
            pid = processes[track.process]
            called = f"stacks {track.name}".strip() if order else f"rank {rank} {role} stacks"
            yield _named("thread_name", pid, thread, called)
            for part in track.slices:
                about = {"ph": "X", "cat": "stack", "name": part.name, "pid": pid, "tid": thread, "args": part.args}
                yield about | {"ts": (part.start_ns + later_ns) / 1000, "dur": part.length_ns / 1000}

    def _ns(self, event: Mapping[str, Any]) -> int:
        return int(self._base_ns + round(event["ts"] * 1000))


def _placed(event: Mapping[str, Any]) -> bool:
    track = (event.get("pid"), event.get("tid", 0))
    return isinstance(event.get("ts"), int | float) and all(isinstance(key, int | str) for key in track)


def _length_ns(event: Mapping[str, Any]) -> int:
    length = event.get("dur", 0)
    return round(length * 1000) if isinstance(length, int | float) else 0


def _named(kind: str, process: object, thread: int, name: str) -> Mapping[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": {"name": name}}


def tracks_of(samples: StackSamples) -> list[StackTrack]:
    """A track for each thread, the training thread first, the DataLoader's workers last, by process."""
    frames, time_ns = samples.frames, samples.time_ns_N
    starts_ns = _starts(time_ns, samples.period_ns)
    # (a stage begins a new stack)
    own_ns = [max(ns, since) for ns, since in zip(starts_ns, samples.since_ns_N, strict=True)]
    tracks = [_track(frames, samples.training, time_ns, own_ns)]
    tracks += [_track(frames, thread, time_ns, starts_ns) for thread in samples.others]
    for worker in samples.workers:
        starts_ns = _starts(worker.time_ns_W, worker.period_ns)
        process = f"DataLoader worker {worker.number} (pid {worker.pid})"
        tracks += [_track(frames, thread, worker.time_ns_W, starts_ns, process) for thread in worker.threads]
    return tracks


def _starts(time_ns: Sequence[int], period_ns: int) -> list[int]:
    return [time_ns[0] - period_ns, *time_ns[:-1]] if time_ns else []


def _track(
    frames: Sequence[Frame], thread: ThreadSamples, time_ns: Sequence[int], starts_ns: Sequence[int], process: str = ""
) -> StackTrack:
    slices = _slices(frames, thread.stacks_N, time_ns, starts_ns)
    found = sorted(slices, key=lambda at: (at[1].start_ns, at[0]))
    name = thread.name.removeprefix(process).lstrip(": ")
    return StackTrack(name, process, tuple(slice_ for _, slice_ in found))


def _slices(
    frames: Sequence[Frame], stacks: Sequence[Sequence[int]], time_ns: Sequence[int], starts_ns: Sequence[int]
) -> Iterator[tuple[int, StackSlice]]:
    """A slice for each frame, while successive samples have it in the same outer frames; and its depth."""
    opened: list[tuple[int, int]] = []
    for stack, start_ns in zip((*stacks, ()), (*starts_ns, *time_ns[-1:]), strict=False):
        pairs = zip(opened, stack, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0][0] == pair[1], pairs))
        while len(opened) > kept:
            number, began_ns = opened.pop()
            frame = frames[number]
            if start_ns > began_ns:
                name = f"{frame.function} ({PurePath(frame.file).name}:{frame.line})"
                args = {"file": f"{frame.file}:{frame.line}", "source": frame.source}
                yield len(opened), StackSlice(name, began_ns, start_ns - began_ns, args)
        opened += [(number, start_ns) for number in stack[kept:]]


def marks_of(samples: StackSamples) -> list[StackSlice]:
    """The steps and stages of a rank, each until the next sampled one."""
    met = list(dict.fromkeys(zip(samples.step_N, samples.stage_N, samples.since_ns_N, strict=True)))
    last = (-1, "", samples.time_ns_N[-1] if met else 0)
    began: dict[int, int] = {}
    marks = []
    for (step, stage, since_ns), (after, _, ends_ns) in pairwise((*met, last)):
        began.setdefault(step, since_ns)
        marks.append(StackSlice(f"{_STAGE}{stage}", since_ns, max(0, ends_ns - since_ns), {}))
        if after != step:
            marks.append(StackSlice(f"{_STEP}{step}", began[step], max(0, ends_ns - began[step]), {}))
    return marks
