"""A flame graph, laid out: boxes of a drawing for the suspect and for what it is compared with, on one scale. Pure.

It hangs from its top, as it is read: what called is above what was called. What is too small to draw is put
together; choosing a function draws it in full width, with what is in it.
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
"""Of one drawing: the widest."""
LEAST_WIDTH = 0.4
"""Of a box, of the drawing's 100."""
MAX_ROWS = 40
MAX_LINES = 20
MAX_THREADS = 16

LEVELS = (0.01, 0.05, 0.2, 0.5)
"""Of the longer of the two times: a difference from each on has a colour of its own."""
CHANCE = 2.0
"""A difference of no more than so many times what chance makes of as few samples (its standard deviation) has none."""

WHOLE_STEP = ""
"""In place of a stage: all of them."""

Compared = Literal["rank", "steps"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A capture, and the stacks that were sampled in it."""

    manifest: Manifest
    stacks: StackSamples


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a drawing. ``x`` and ``width`` are of its 100; ``level`` is from -4, much less, to 4, much more.

    ``path`` is where one goes on to, "" where there is nothing more to see; ``marked`` is where the cause is.
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
    """One drawing: of whom, how long the stage took there a step, or what somebody went on to; its samples."""

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
    """A line at which the thread stood, and for how long a step: on the suspect, and beside it."""

    where: str
    source: str
    took_s: float
    beside_s: float


@dataclass(frozen=True, slots=True)
class FlameGraph:
    """What is drawn, and what there is to choose from.

    Attributes:
        stage, thread: what is shown, of ``stages`` (`WHOLE_STEP` is all of them) and ``threads``.
        sides: the suspect's drawing, and that of what it is compared with.
        compared: with another ``rank``, or with the suspect's other ``steps``; None where with nothing.
        callers: above what is drawn, outermost first: by path and name, of which the stage itself has none.
        zoomed: somebody went on to a function.
        lines: what differs the most first, or else what took the most.
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


def flame_graph(its: Sampled, control: Sampled | None, query: Mapping[str, str]) -> FlameGraph:
    """The drawing that an address asks for; where it asks for what is not there, it is as if it had not asked.

    Args:
        its: the suspect's capture.
        control: that of the same steps to compare it with.
        query: ``stage``, ``thread``, ``frame`` (a `Flame.path`).
    """
    stacks, manifest = its.stacks, its.manifest
    found, met = manifest.findings, dict.fromkeys(stacks.stage_N)
    order = manifest.recorded.stages if manifest.recorded is not None else ()
    stages = (*(one for one in order if one in met), *(one for one in met if one not in order), WHOLE_STEP)
    usual = found.stage if found is not None else manifest.trigger.stage
    stage = next((one for one in (query.get("stage"), usual) if one in stages), WHOLE_STEP)
    threads = _threads(stacks)
    thread = next((one for one in (query.get("thread", ""),) if one in threads), stacks.training.name)

    parts, compared = _parts(its, control, thread, stage)
    root = flames(*parts.values())
    callers, focus = _focused(root, query.get("frame"))
    shown = focus if (zoomed := focus.path == query.get("frame")) else root
    whole = [(root.seconds(number), part.samples) for number, part in enumerate(parts.values())]
    place = None if manifest.cause is None else manifest.cause.place
    drawing = _Drawing(focus, stage, list(parts), whole, place)
    sides = (
        Side(name, shown.seconds(at), part.samples, part.steps, tuple(drawing.boxes(at)))
        for at, (name, part) in enumerate(parts.items())
    )
    return FlameGraph(
        stage=stage,
        stages=stages,
        thread=thread,
        threads=tuple(threads),
        sides=tuple(sides),
        compared=compared,
        callers=tuple((one.path, _name(one)) for one in callers),
        zoomed=zoomed,
        lines=_lines(focus),
    )


def _parts(its: Sampled, control: Sampled | None, thread: str, stage: str) -> tuple[dict[str, Folded], Compared | None]:
    """The suspect in the steps that have the fault, and beside it the control in the same, or itself in the others."""
    manifest, stacks = its.manifest, its.stacks
    found, rank, training = manifest.findings, manifest.capture.rank, thread == stacks.training.name
    fault = frozenset(manifest.reproduced.fault_steps if manifest.reproduced is not None else ())

    def part(
        profile: StageProfile | None, of: tuple[int, StackSamples, ThreadSamples], steps: Collection[int]
    ) -> Folded:
        its_rank, samples, its_thread = of
        measured_s = _measured_s(manifest, profile, its_rank, stage, steps) if training else None
        return fold(samples, its_thread, stage or None, steps or None, measured_s)

    captured = (rank, *_threads(stacks)[thread])
    suspect, beside = (None, None) if found is None else (found.suspect, found.control)
    faulty = part(suspect, captured, fault)
    alone = {f"on rank {rank}": faulty}
    if control is not None:
        others, its_rank = control.stacks, control.manifest.capture.rank
        same = (others, others.training) if training else _threads(others).get(thread)
        if same is None:
            return alone, None
        profile = beside if beside is not None and beside.rank == its_rank else None
        theirs = part(profile, (its_rank, *same), set(others.step_N) & fault)
        return {**alone, f"on rank {its_rank}": theirs}, "rank"
    without = set(stacks.step_N) - fault
    if not fault or not without:
        return alone, None
    profile = beside if found is not None and found.beside == "steps" else None
    return {"in steps with the fault": faulty, "in the others": part(profile, captured, without)}, "steps"


def _threads(stacks: StackSamples) -> dict[str, tuple[StackSamples, ThreadSamples]]:
    found = {stacks.training.name: (stacks, stacks.training)}
    for worker in stacks.workers[:MAX_THREADS]:
        theirs = meanwhile(stacks, worker)
        found.setdefault(f"DataLoader worker {worker.number}", (theirs, theirs.training))
    for one in sorted(stacks.others, key=lambda one: one.name)[:MAX_THREADS]:
        found.setdefault(one.name, (stacks, one))
    return found


def _measured_s(
    manifest: Manifest, profile: StageProfile | None, rank: int, stage: str, steps: Collection[int]
) -> float | None:
    """How long a stage took, a step, as its trace has it or else its recorded steps; None where neither does."""
    found, recorded = manifest.findings, manifest.recorded
    if found is not None and profile is not None and stage in (found.stage, WHOLE_STEP):
        return profile.stage_s if stage else profile.step_s
    if recorded is None:
        return None
    of_rank = (step for one in recorded.ranks if one.rank == rank for step in one.steps)
    rows = [
        dict(zip(recorded.stages, one.durations_ns, strict=True)) for one in of_rank if one.step in steps or not steps
    ]
    if not rows or stage not in (*recorded.stages, WHOLE_STEP):
        return None
    return sum(row[stage] if stage else sum(row.values()) for row in rows) * 1e-9 / len(rows)


def _focused(root: Flame, path: str | None) -> tuple[tuple[Flame, ...], Flame]:
    """What is drawn, and what is above it: where somebody went on to, or else where there is more than one way."""
    waiting: list[tuple[Flame, ...]] = [(root,)] if path else []
    while waiting:
        *above, last = way = waiting.pop()
        if last.path == path:
            return tuple(above), last
        waiting += ((*way, one) for one in last.children)
    way = (root,)
    while len(below := way[-1].children) == 1 and below[0].children:
        way = (*way, below[0])
    return way[:-1], way[-1]


@dataclass(frozen=True, slots=True)
class _Drawing:
    """What is drawn of a stage, and how.

    ``names`` are those of both sides, and ``whole`` says of each how long the stage took and how often it was sampled.
    """

    focus: Flame
    stage: str
    names: Sequence[str]
    whole: Sequence[tuple[float, int]]
    place: PlaceInfo | None

    @property
    def _scale(self) -> float:
        return 100.0 / (max(self.focus.took_s, self.focus.beside_s) or 1.0)

    def boxes(self, side: int) -> Iterator[Box]:
        """The drawing of the suspect (0), or of what it is compared with (1)."""
        seen = (one for one in self.focus.walk() if one.seconds(side) * self._scale >= LEAST_WIDTH)
        # (what calls is no narrower than what it calls, and comes before what is as wide)
        widest = sorted(seen, key=lambda one: -one.seconds(side))[: MAX_BOXES if self.whole[side][1] else 0]
        drawn = {one.path for one in widest}
        waiting = [(self.focus, 0.0, 0)] if drawn else []
        while waiting:
            one, x, row = waiting.pop()
            yield self._box(one, side, x, row)
            if row + 1 == MAX_ROWS:
                continue
            left_s, left = 0.0, 0
            for below in one.children:
                if below.path in drawn:
                    waiting.append((below, x, row + 1))
                    x += below.seconds(side) * self._scale
                elif below.seconds(side) > 0.0:
                    left_s, left = left_s + below.seconds(side), left + 1
            if left_s * self._scale >= LEAST_WIDTH:
                words = f"{left} more, {milliseconds(left_s)} a step together"
                yield Box(
                    round(x, 3), round(left_s * self._scale, 3), row + 1, f"{left} more", words, one.path, 0, False
                )

    def _box(self, one: Flame, side: int, x: float, row: int) -> Box:
        took = milliseconds(one.seconds(side))
        compared, place = len(self.names) > 1, self.place
        words, more, other = f"{milliseconds(one.took_s)} a step", "", milliseconds(abs(one.more_s))
        if compared:
            words = f"{words} {self.names[0]}, {milliseconds(one.beside_s)} {self.names[1]}: {other} "
            words += "more" if one.more_s >= 0.0 else "less"
            more = f" ({'-' if one.more_s < 0.0 else '+'}{other})" if side == 0 else ""
        return Box(
            x=round(x, 3),
            width=round(one.seconds(side) * self._scale, 3),
            row=row,
            label=f"{_name(one) or self.stage or 'whole step'} {took}{more}",
            title=f"{_where(one)}\n{words}",
            path=one.path if one.kind == "function" else "",
            level=self._level(one) if compared else 0,
            marked=place is not None
            and (one.frame.function, one.frame.file) == (place.function, place.file)
            and (one.kind == "function" or one.frame.line == place.line),
        )

    def _level(self, one: Flame) -> int:
        # The binomial variance of each side: a part of a known whole, estimated from samples.
        variance = sum(
            one.seconds(side) * max(0.0, whole_s - one.seconds(side)) / samples
            for side, (whole_s, samples) in enumerate(self.whole)
            if samples
        )
        part = abs(one.more_s) * self._scale / 100.0
        level = sum(part >= least for least in LEVELS) if abs(one.more_s) > CHANCE * sqrt(variance) else 0
        return level if one.more_s > 0.0 else -level


def _name(one: Flame) -> str:
    if one.kind == "line":
        return f"{one.frame.line}: {one.frame.source}" if one.frame.source else f"line {one.frame.line}"
    return one.frame.function


def _where(one: Flame) -> str:
    """A function or a line with the end of its file's path; it is shown to people who know the program."""
    frame = one.frame
    if not frame.file:
        return frame.function or "all of it"
    place = f"{frame.function} ({'/'.join(PurePath(frame.file).parts[-2:])}:{frame.line})"
    return f"{place}: {frame.source}" if one.kind == "line" and frame.source else place


def _lines(focus: Flame) -> tuple[Line, ...]:
    took: dict[Frame, list[float]] = {}
    for one in focus.walk():
        if one.kind == "line":
            both = took.setdefault(one.frame, [0.0, 0.0])
            both[0] += one.took_s
            both[1] += one.beside_s
    lines = [
        Line(f"{at.function} ({PurePath(at.file).name}:{at.line})" if at.file else at.function, at.source, *both)
        for at, both in took.items()
    ]
    return tuple(sorted(lines, key=lambda one: (-abs(one.took_s - one.beside_s), -one.took_s))[:MAX_LINES])


KEPT = 8
MOST_BYTES = 8 * 2**20
"""Of a file that a page draws: of four threads, a minute."""


class StackDownloads:
    """What reads them. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, StackSamples] = OrderedDict()

    def drawn(
        self, manifest: Manifest, store: Store, others: Iterable[tuple[Manifest, Store]], query: Mapping[str, str]
    ) -> FlameGraph | str | None:
        """The flame graph of a capture; in words why there is none; None where no stacks were sampled.

        Args:
            manifest: the capture.
            store: where it is.
            others: those among which the one to compare it with is.
            query: see `flame_graph`.
        """
        if (artefact := stacks_of(manifest)) is None:
            return None
        if artefact.size_bytes > MOST_BYTES:
            return f"{size(artefact.size_bytes)} is too much for a page; download the file"
        try:
            beside = next((one for one in others if are_beside(manifest, one[0]) and stacks_of(one[0])), None)
            pair = [(manifest, store), beside] if beside is not None else [(manifest, store)]
            # Of a control's capture, too, the suspect is drawn first.
            pair.sort(key=lambda one: one[0].capture.role != "suspect")
            its, *control = (Sampled(one, self.read(one, where)) for one, where in pair)
            return flame_graph(its, next(iter(control), None), query)
        except SftriageError as error:
            return str(error)

    def read(self, manifest: Manifest, store: Store) -> StackSamples:
        """The samples of a capture that has some.

        Raises:
            SftriageError: they cannot be read, or are not what was stored.
        """
        artefact = manifest.artefact(NAME)
        with self._lock:
            known = self._kept.get(artefact.sha256)
        if known is None:
            known = samples_in(b"".join(store.content(manifest, artefact)), NAME)
        with self._lock:
            self._kept[artefact.sha256] = known
            self._kept.move_to_end(artefact.sha256)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return known

    def folded(self, manifest: Manifest, store: Store) -> Response:
        if stacks_of(manifest) is None:
            raise HTTPException(404, "No stacks were sampled in this capture.")
        with reading_stored():
            text = "".join(f"{line}\n" for line in collapsed(self.read(manifest, store)))
        headers = {"Content-Disposition": f'attachment; filename="{manifest.capture_id}-{FOLDED_NAME}"'}
        return PlainTextResponse(text, headers=headers)


def stacks_of(manifest: Manifest) -> Artefact | None:
    """The file of the stacks that were sampled in a capture, if they were."""
    return next((one for one in manifest.artefacts if one.name == NAME), None)
