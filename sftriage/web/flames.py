"""Flame graphs of captures: the boxes of the suspect's drawing and of what it is compared with, on one scale.

The page of a capture and reports draw them. Callers are above what they call. Functions too small to draw are merged
into one box; choosing a function draws it in full width. `StackDownloads` reads and caches the samples.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import PurePath
from typing import Literal

from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from sftriage.errors import SftriageError
from sftriage.reduce.flames import Flame, Folded, flames, fold
from sftriage.reduce.samples import Frame, StackSamples, ThreadSamples, collapsed, meanwhile, samples_in
from sftriage.traces.manifest import Artefact, Manifest, PlaceInfo, StageProfile, are_beside
from sftriage.traces.store import Store
from sftriage.trainer.sampler import FOLDED_NAME, NAME
from sftriage.web.page import milliseconds, reading_stored
from sftriage.words.verdicts import size

MAX_BOXES = 150
"""Maximum boxes of a drawing, the widest."""
LEAST_WIDTH = 0.4
"""Minimum width of a box, of the drawing's 100."""
MAX_ROWS = 40
MAX_LINES = 20
MAX_THREADS = 16

LEVELS = (0.01, 0.05, 0.2, 0.5)
"""The colour of a difference, by its fraction of the longer of the two times."""
CHANCE = 2.0
"""Standard deviations of sampling up to which a difference has no colour."""
WHOLE_STEP = ""
"""Stands for all stages."""

Compared = Literal["rank", "steps"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A capture and its sampled stacks."""

    manifest: Manifest
    stacks: StackSamples


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a drawing that is 100 wide. ``level`` is from -4, much shorter than the other side, to 4, much longer.

    ``path`` is the `Flame.path` to choose, "" if there is none; the cause is ``marked``.
    """

    x: float
    width: float
    row: int
    label: str
    title: str
    path: str
    level: int
    marked: bool


@dataclass(frozen=True, slots=True)
class Side:
    """One drawing; ``took_s`` is the time per step of the stage, or of the chosen function."""

    name: str
    took_s: float
    samples: int
    steps: int
    boxes: tuple[Box, ...]

    @property
    def rows(self) -> int:
        return 1 + max((box.row for box in self.boxes), default=-1)


@dataclass(frozen=True, slots=True)
class Line:
    """A source line and its time per step, on the suspect and on the other side."""

    where: str
    source: str
    took_s: float
    beside_s: float


@dataclass(frozen=True, slots=True)
class FlameGraph:
    """The drawings and the choices.

    Attributes:
        stage, thread: the chosen ones, of ``stages`` (with `WHOLE_STEP`) and ``threads``.
        sides: the suspect's drawing, then the other side's, if any.
        compared: the other side: another ``rank``, the suspect's other ``steps``, or None.
        callers: path and name of the callers above the drawing, outermost first; the stage itself has no name.
        zoomed: a function is chosen.
        lines: largest difference first, else largest time.
    """

    stage: str
    stages: tuple[str, ...]
    thread: str
    threads: tuple[str, ...]
    sides: tuple[Side, ...]
    compared: Compared | None
    callers: tuple[tuple[str, str], ...]
    zoomed: bool
    lines: tuple[Line, ...]


def flame_graph(suspect: Sampled, control: Sampled | None, query: Mapping[str, str]) -> FlameGraph:
    """The drawing that an address's ``query`` (stage, thread, frame) chooses; unknown values are ignored.

    ``control`` is the capture of the same steps to compare with.
    """
    stacks, manifest = suspect.stacks, suspect.manifest
    found, sampled = manifest.findings, dict.fromkeys(stacks.stage_N)
    order = manifest.recorded.stages if manifest.recorded is not None else ()
    stages = (
        *(name for name in order if name in sampled),
        *(name for name in sampled if name not in order),
        WHOLE_STEP,
    )
    usual = found.stage if found is not None else manifest.trigger.stage
    stage = next((name for name in (query.get("stage"), usual) if name in stages), WHOLE_STEP)
    threads = _threads(stacks)
    thread = name if (name := query.get("thread", "")) in threads else stacks.training.name

    parts, compared = _parts(suspect, control, thread, stage)
    root = flames(*parts.values())
    callers, focus = _focused(root, query.get("frame"))
    chosen = focus if (zoomed := focus.path == query.get("frame")) else root
    whole = [(root.seconds(number), part.samples) for number, part in enumerate(parts.values())]
    place = None if manifest.cause is None else manifest.cause.place
    drawing = _Drawing(focus, stage, list(parts), whole, place)
    sides = (
        Side(name, chosen.seconds(at), part.samples, part.steps, tuple(drawing.boxes(at)))
        for at, (name, part) in enumerate(parts.items())
    )
    return FlameGraph(
        stage=stage,
        stages=stages,
        thread=thread,
        threads=tuple(threads),
        sides=tuple(sides),
        compared=compared,
        callers=tuple((caller.path, _name(caller)) for caller in callers),
        zoomed=zoomed,
        lines=_lines(focus),
    )


def _parts(
    suspect: Sampled, control: Sampled | None, thread: str, stage: str
) -> tuple[dict[str, Folded], Compared | None]:
    """The suspect in the steps with the fault, and the control in the same steps, or the suspect in its other ones."""
    manifest, stacks = suspect.manifest, suspect.stacks
    found, rank, training = manifest.findings, manifest.capture.rank, thread == stacks.training.name
    fault = frozenset(manifest.reproduced.fault_steps if manifest.reproduced is not None else ())

    def part(
        profile: StageProfile | None, of: tuple[int, StackSamples, ThreadSamples], steps: Collection[int]
    ) -> Folded:
        of_rank, samples, of_thread = of
        measured_s = _measured_s(manifest, profile, of_rank, stage, steps) if training else None
        return fold(samples, of_thread, stage or None, steps or None, measured_s)

    captured = (rank, *_threads(stacks)[thread])
    profile, other = (None, None) if found is None else (found.suspect, found.control)
    faulty = part(profile, captured, fault)
    alone = {f"on rank {rank}": faulty}
    if control is not None:
        others, other_rank = control.stacks, control.manifest.capture.rank
        same = (others, others.training) if training else _threads(others).get(thread)
        if same is None:
            return alone, None
        other = other if other is not None and other.rank == other_rank else None
        beside = part(other, (other_rank, *same), set(others.step_N) & fault)
        return {**alone, f"on rank {other_rank}": beside}, "rank"
    without = set(stacks.step_N) - fault
    if not fault or not without:
        return alone, None
    other = other if found is not None and found.beside == "steps" else None
    return {"in steps with the fault": faulty, "in the others": part(other, captured, without)}, "steps"


def _threads(stacks: StackSamples) -> dict[str, tuple[StackSamples, ThreadSamples]]:
    found = {stacks.training.name: (stacks, stacks.training)}
    for worker in stacks.workers[:MAX_THREADS]:
        samples = meanwhile(stacks, worker)
        found.setdefault(f"DataLoader worker {worker.number}", (samples, samples.training))
    for thread in sorted(stacks.others, key=lambda thread: thread.name)[:MAX_THREADS]:
        found.setdefault(thread.name, (stacks, thread))
    return found


def _measured_s(
    manifest: Manifest, profile: StageProfile | None, rank: int, stage: str, steps: Collection[int]
) -> float | None:
    """The time per step of a stage by its trace, else by its recorded steps, else None."""
    found, recorded = manifest.findings, manifest.recorded
    if found is not None and profile is not None and stage in (found.stage, WHOLE_STEP):
        return profile.stage_s if stage else profile.step_s
    if recorded is None:
        return None
    of_rank = [step for track in recorded.ranks if track.rank == rank for step in track.steps]
    kept = [step for step in of_rank if step.step in steps or not steps]
    rows = [dict(zip(recorded.stages, step.durations_ns, strict=True)) for step in kept]
    if not rows or stage not in (*recorded.stages, WHOLE_STEP):
        return None
    return sum(row[stage] if stage else sum(row.values()) for row in rows) * 1e-9 / len(rows)


def _focused(root: Flame, path: str | None) -> tuple[tuple[Flame, ...], Flame]:
    """The callers above the drawing, and its top: the chosen function, else where the calls first branch."""
    waiting: list[tuple[Flame, ...]] = [(root,)] if path else []
    while waiting:
        *above, last = way = waiting.pop()
        if last.path == path:
            return tuple(above), last
        waiting += ((*way, child) for child in last.children)
    way = (root,)
    while len(below := way[-1].children) == 1 and below[0].children:
        way = (*way, below[0])
    return way[:-1], way[-1]


@dataclass(frozen=True, slots=True)
class _Drawing:
    """Lays out the boxes below ``focus``. ``whole`` has the stage's time and samples on each side of ``names``."""

    focus: Flame
    stage: str
    names: Sequence[str]
    whole: Sequence[tuple[float, int]]
    place: PlaceInfo | None

    @property
    def _scale(self) -> float:
        return 100.0 / (max(self.focus.took_s, self.focus.beside_s) or 1.0)

    def boxes(self, side: int) -> Iterator[Box]:
        """The boxes of the suspect (0) or the other side (1)."""
        wide = (flame for flame in self.focus.walk() if flame.seconds(side) * self._scale >= LEAST_WIDTH)
        # (a caller is no narrower than what it calls, and the sort keeps it first)
        widest = sorted(wide, key=lambda flame: -flame.seconds(side))[: MAX_BOXES if self.whole[side][1] else 0]
        drawn = {flame.path for flame in widest}
        waiting = [(self.focus, 0.0, 0)] if drawn else []
        while waiting:
            flame, x, row = waiting.pop()
            yield self._box(flame, side, x, row)
            if row + 1 == MAX_ROWS:
                continue
            rest_s, rest = 0.0, 0
            for child in flame.children:
                if child.path in drawn:
                    waiting.append((child, x, row + 1))
                    x += child.seconds(side) * self._scale
                elif child.seconds(side) > 0.0:
                    rest_s, rest = rest_s + child.seconds(side), rest + 1
            if (width := rest_s * self._scale) >= LEAST_WIDTH:
                title = f"{rest} more, {milliseconds(rest_s)} a step together"
                yield Box(round(x, 3), round(width, 3), row + 1, f"{rest} more", title, flame.path, 0, False)

    def _box(self, flame: Flame, side: int, x: float, row: int) -> Box:
        frame, place, compared = flame.frame, self.place, len(self.names) > 1
        times, more, difference = f"{milliseconds(flame.took_s)} a step", "", milliseconds(abs(flame.more_s))
        if compared:
            times += f" {self.names[0]}, {milliseconds(flame.beside_s)} {self.names[1]}: {difference} "
            times += "more" if flame.more_s >= 0.0 else "less"
            more = f" ({'-' if flame.more_s < 0.0 else '+'}{difference})" if side == 0 else ""
        return Box(
            x=round(x, 3),
            width=round(flame.seconds(side) * self._scale, 3),
            row=row,
            label=f"{_name(flame) or self.stage or 'whole step'} {milliseconds(flame.seconds(side))}{more}",
            title=f"{_where(flame)}\n{times}",
            path=flame.path if flame.kind == "function" else "",
            level=self._level(flame) if compared else 0,
            marked=place is not None
            and (frame.function, frame.file) == (place.function, place.file)
            and (flame.kind == "function" or frame.line == place.line),
        )

    def _level(self, flame: Flame) -> int:
        # The binomial variance of each side: a part of a known whole, estimated from samples.
        variance = sum(
            flame.seconds(side) * max(0.0, whole_s - flame.seconds(side)) / samples
            for side, (whole_s, samples) in enumerate(self.whole)
            if samples
        )
        part = abs(flame.more_s) * self._scale / 100.0
        level = sum(part >= least for least in LEVELS) if abs(flame.more_s) > CHANCE * sqrt(variance) else 0
        return level if flame.more_s > 0.0 else -level


def _name(flame: Flame) -> str:
    frame = flame.frame
    if flame.kind == "line":
        return f"{frame.line}: {frame.source}" if frame.source else f"line {frame.line}"
    return frame.function


def _where(flame: Flame) -> str:
    """A function or a line with the end of its file's path."""
    frame = flame.frame
    if not frame.file:
        return frame.function or "all of it"
    place = f"{frame.function} ({'/'.join(PurePath(frame.file).parts[-2:])}:{frame.line})"
    return f"{place}: {frame.source}" if flame.kind == "line" and frame.source else place


def _lines(focus: Flame) -> tuple[Line, ...]:
    took: dict[Frame, list[float]] = {}
    for flame in focus.walk():
        if flame.kind == "line":
            both = took.setdefault(flame.frame, [0.0, 0.0])
            both[0] += flame.took_s
            both[1] += flame.beside_s
    lines = [
        Line(f"{at.function} ({PurePath(at.file).name}:{at.line})" if at.file else at.function, at.source, *both)
        for at, both in took.items()
    ]
    return tuple(sorted(lines, key=lambda line: (-abs(line.took_s - line.beside_s), -line.took_s))[:MAX_LINES])


MAX_CACHED = 8
MAX_BYTES = 8 * 2**20
"""Maximum size of a drawn file: about a minute of four threads."""


class StackDownloads:
    """Reads and caches the samples of captures. Its methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cached: OrderedDict[str, StackSamples] = OrderedDict()

    def drawn(
        self, manifest: Manifest, store: Store, others: Iterable[tuple[Manifest, Store]], query: Mapping[str, str]
    ) -> FlameGraph | str | None:
        """The flame graph of a capture; a text on why there is none; None if no stacks were sampled.

        Of the ``others``, the one of the same steps is compared with it. For ``query``, see `flame_graph`.
        """
        if (artefact := stacks_of(manifest)) is None:
            return None
        if artefact.size_bytes > MAX_BYTES:
            return f"{size(artefact.size_bytes)} is too much for a page; download the file"
        try:
            beside = next((pair for pair in others if are_beside(manifest, pair[0]) and stacks_of(pair[0])), None)
            pairs = [(manifest, store), *([beside] if beside is not None else [])]
            # The suspect comes first, also on the control's page.
            pairs.sort(key=lambda pair: pair[0].capture.role != "suspect")
            suspect, *control = (Sampled(capture, self.read(capture, of_store)) for capture, of_store in pairs)
            return flame_graph(suspect, next(iter(control), None), query)
        except SftriageError as error:
            return str(error)

    def read(self, manifest: Manifest, store: Store) -> StackSamples:
        """The samples of a capture that has some; raises SftriageError if they cannot be read, or are damaged."""
        artefact = manifest.artefact(NAME)
        with self._lock:
            known = self._cached.get(artefact.sha256)
        if known is None:
            known = samples_in(b"".join(store.content(manifest, artefact)), NAME)
        with self._lock:
            self._cached[artefact.sha256] = known
            self._cached.move_to_end(artefact.sha256)
            while len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
        return known

    def folded(self, manifest: Manifest, store: Store) -> Response:
        if stacks_of(manifest) is None:
            raise HTTPException(404, "No stacks were sampled in this capture.")
        with reading_stored():
            text = "".join(f"{line}\n" for line in collapsed(self.read(manifest, store)))
        headers = {"Content-Disposition": f'attachment; filename="{manifest.capture_id}-{FOLDED_NAME}"'}
        return PlainTextResponse(text, headers=headers)


def stacks_of(manifest: Manifest) -> Artefact | None:
    """The file of the sampled stacks, if any."""
    return next((artefact for artefact in manifest.artefacts if artefact.name == NAME), None)
