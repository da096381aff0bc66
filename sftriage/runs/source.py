"""One run, as the page sees it: everything that is read from disk goes through here, and nothing is read twice."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

from sftriage.errors import InputError
from sftriage.records import CaptureResult, CaptureState
from sftriage.runs.captures import CaptureShelf, Damaged
from sftriage.runs.directory import RunDirectory, RunInfo, read_info
from sftriage.runs.following import JournalTail, WindowRow
from sftriage.runs.lanes import MAX_STEPS, Lanes, lanes_of
from sftriage.runs.lateness import HeatMap, HeatSource
from sftriage.runs.liveness import RankCoverage, TelemetryLook, Watcher, WatcherLook
from sftriage.runs.notes import CostRow, RequestRow, Row
from sftriage.traces.manifest import Manifest
from sftriage.traces.store import LocalStore
from sftriage.traces.uploads import Upload
from sftriage.windows.logs import StepLogs

KEPT_MAPS = 8


class Drawing:
    """A heat map that is not there yet."""


@dataclass(frozen=True, slots=True)
class View:
    """What is known of a run at one moment.

    Attributes:
        version: changes whenever something that a page shows does.
        info: what was run, or None before there is a run.
        problem: why there is nothing to be seen of a run that is there.
        going: the run has not ended.
        rows: its windows in order.
        results: what became of captures that have ended, by id.
        states: how far each is.
        captures: the stored ones, newest first.
        skipped: lines of the journal that could not be read.
        asks: captures that were asked for beside them, in order.
        notes: what else is on record, in order: policies, costs, evidence, take-overs.
        watcher: who watches a run that goes on.
        telemetry: whether all of its ranks are heard of.
        uploads: how far captures are on their way to a store elsewhere, by id; of a run that has none, none.
        uploading: somebody sends them now.
        directory: where the run is, for the commands that are named to a person.
    """

    version: str
    info: RunInfo | None = None
    problem: str = ""
    going: bool = False
    rows: tuple[WindowRow, ...] = ()
    results: Mapping[str, CaptureResult] | None = None
    states: Mapping[str, CaptureState] = field(default_factory=dict)
    captures: tuple[Manifest | Damaged, ...] = ()
    skipped: int = 0
    asks: tuple[RequestRow, ...] = ()
    notes: tuple[Row, ...] = ()
    watcher: Watcher = field(default_factory=Watcher)
    telemetry: RankCoverage = field(default_factory=RankCoverage)
    uploads: Mapping[str, Upload] = field(default_factory=dict)
    uploading: bool = False
    directory: str = ""

    def has_ended(self) -> bool:
        """Whether it is a run that has ended."""
        return self.info is not None and not self.going

    @property
    def became(self) -> Mapping[str, CaptureResult]:
        """What became of captures, by id."""
        return self.results or {}

    def asked_by(self, capture_id: str) -> WindowRow | RequestRow | None:
        """What a capture was asked for by: the window whose decision it was, a person, or another capture."""
        both: tuple[Sequence[WindowRow | RequestRow], ...] = (self.rows, self.asks)
        return next(
            (row for rows in both for row in reversed(rows) if any(one.capture_id == capture_id for one in row.asked)),
            None,
        )

    def cost_of(self, manifest: Manifest) -> CostRow | None:
        """What a capture, and those that ran beside it, cost the job; None where that is not known."""
        asked, capture = self.asked_by(manifest.capture_id), manifest.capture
        costs = (note for note in reversed(self.notes) if isinstance(note, CostRow))
        return next(
            (
                cost
                for cost in costs
                if asked is not None
                and cost.attempt == asked.attempt
                and cost.first_step <= capture.last_step
                and cost.last_step >= capture.first_step
            ),
            None,
        )


class RunSource:
    """A run that may not be there yet.

    Its methods may be called from any thread; one at a time reads.

    Args:
        find: the run directory to look at, or None as long as there is none. Once found, it is not asked again.
    """

    def __init__(self, find: Callable[[], RunDirectory | None]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._run: RunDirectory | None = None
        self._view = View("none")
        self._journal: JournalTail | None = None
        self._shelf: CaptureShelf | None = None
        # Maps of large runs take seconds: they are made one after the other, beside everything else.
        self._drawing = futures.ThreadPoolExecutor(1, thread_name_prefix="heat")
        self._heat: HeatSource | None = None
        self._maps: OrderedDict[tuple[int, int, int, int], futures.Future[HeatMap | None]] = OrderedDict()
        self._late_maps = 0
        self._beside: HeatSource | None = None
        self._watcher: WatcherLook
        self._telemetry: TelemetryLook

    @property
    def directory(self) -> Path | None:
        """The run directory, once it is found."""
        return None if self._run is None else self._run.path

    def view(self) -> View:
        """The run as it is now."""
        with self._lock:
            if self._run is None:
                self._open()
            return self._view if self._run is None else self._look(self._run)

    def heat(
        self, attempt: int, first_step: int, last_step: int, patience_s: float | None = None
    ) -> HeatMap | Drawing | None:
        """The heat map of some steps that windows have been judged over; None where no step of them is on record.

        If it takes longer than ``patience_s``, it is still being drawn, and the view changes once it is there.
        """
        with self._lock:
            if self._heat is None:
                return None
            wanted = (attempt, first_step, last_step, len(self._view.rows))
            map_ = self._maps.get(wanted)
            if map_ is None:
                map_ = self._maps[wanted] = self._drawing.submit(self._heat.map, attempt, first_step, last_step)
                while len(self._maps) > KEPT_MAPS:
                    self._maps.popitem(last=False)[1].cancel()
        try:
            return map_.result(patience_s)
        except futures.TimeoutError:
            map_.add_done_callback(self._drawn)
            return Drawing()
        except futures.CancelledError:
            # So many others were asked for that this one was given up.
            return Drawing()

    def _drawn(self, _: futures.Future[HeatMap | None]) -> None:
        with self._lock:
            self._late_maps += 1

    def capture(self, capture_id: str) -> Manifest | Damaged | None:
        """One stored capture."""
        with self._lock:
            return None if self._shelf is None else self._shelf.get(capture_id)

    @property
    def store(self) -> LocalStore:
        """Where its captures are.

        Raises:
            InputError: there is no run yet.
        """
        if self._run is None:
            raise InputError("there is no run yet")
        return LocalStore(self._run.path)

    def beside(self, manifest: Manifest, attempt: int, control: int | None) -> Lanes | None:
        """The captured steps of the rank that was captured, beside those of a control rank.

        Without one, it is the rank that came nearest to the median in these steps.
        """
        with self._lock:
            if self._beside is None:
                return None
            capture = manifest.capture
            n_steps = min(capture.steps, MAX_STEPS)
            self._beside.logs.look()
            ranks = self._beside.logs.of(attempt)
            if control is None or control not in ranks or control == capture.rank:
                late = self._beside.lateness(attempt, capture.first_step, n_steps)
                others = {
                    rank: late_s for rank, late_s in late.items() if rank not in {capture.rank, *manifest.trigger.ranks}
                }
                control = min(others, key=lambda rank: (abs(others[rank]), rank), default=None)
            pair = [("captured", capture.rank), ("control", control)]
            return lanes_of(
                [
                    (title, ranks[rank].info, ranks[rank].steps([(capture.first_step, n_steps)])[1].records())
                    for title, rank in pair
                    if rank is not None and rank in ranks
                ]
            )

    def _open(self) -> None:
        run = self._find()
        if run is None or not run.info_file.is_file():
            return
        self._run = run
        self._journal = JournalTail(run.decisions)
        self._shelf = CaptureShelf(run.path)
        self._heat = HeatSource(StepLogs(run.steps))
        self._beside = HeatSource(StepLogs(run.steps))
        self._watcher = WatcherLook(run)
        self._telemetry = TelemetryLook(run.steps)

    def _look(self, run: RunDirectory) -> View:
        assert self._journal is not None
        assert self._shelf is not None
        moved = self._journal.follow()
        try:
            info, problem = read_info(run), ""
        except InputError as error:
            info, problem = None, str(error)
        there = info is not None and Path(info.rings).is_dir()
        watcher = self._watcher.at(time.monotonic(), Path(info.rings)) if info is not None and there else Watcher()
        journal, shelf = self._journal, self._shelf
        telemetry = self._telemetry.at(journal.rows[-1].attempt if journal.rows else None)
        uploads, uploading = shelf.uploads(info.store if info is not None else None)
        going = there and watcher.state != "left"
        counts = (
            len(journal.rows),
            len(journal.asks),
            len(journal.notes),
            sorted(journal.states.items()),
            journal.skipped,
        )
        about = (going, problem, watcher, telemetry, uploading, self._late_maps)
        seen = (counts, shelf.signature(), about, sorted((name, one.state) for name, one in uploads.items()))
        version = hashlib.sha256(repr(seen).encode()).hexdigest()[:16]
        if moved or version != self._view.version:
            self._view = View(
                version=version,
                info=info,
                problem=problem,
                going=going,
                rows=tuple(journal.rows),
                results=dict(journal.results),
                states=dict(journal.states),
                captures=tuple(shelf.all()),
                skipped=journal.skipped,
                asks=tuple(journal.asks),
                notes=tuple(journal.notes),
                watcher=watcher,
                telemetry=telemetry,
                uploads=uploads,
                uploading=uploading,
                directory=str(run.path),
            )
        return self._view
