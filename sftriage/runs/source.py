"""One run as all views show it, and the list of this machine's runs.

The page, `sftriage watch`, reports, assistants and the cluster mirror read through it. It reads files and writes none,
and reads only what changed since the last time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import lru_cache, partial
from itertools import chain, groupby, islice
from pathlib import Path

from sftriage.errors import InputError, IntegrityError, UsageError
from sftriage.model.events import CostMeasured, JobPaused
from sftriage.model.verdicts import Clock
from sftriage.runs import liveness
from sftriage.runs.decisions import JournalRecord, JournalTail, RequestRow, WindowRow
from sftriage.runs.directory import RunDirectory, RunInfo, read_info, started_runs
from sftriage.runs.lateness import HeatMap, HeatSource, StepTracks, steps_beside, tracks_of
from sftriage.runs.promises import AttemptRows, Mend, mends_of
from sftriage.runs.step_times import TimesReader
from sftriage.runs.timetable import AMOUNT, Charges, TimeTable, time_table
from sftriage.traces.manifest import MANIFEST_NAME, Artefact, Manifest
from sftriage.traces.store import UPLOAD_NAME, LocalStore, Upload
from sftriage.windows.logs import LOG_KIND, LogReader, StepLogs

log = logging.getLogger("sftriage")

PRICE_ENV = "SFTRIAGE_RANK_HOUR"
KEPT_MAPS = 8
STALE_S = 120.0
"""A running job is marked as late if no window was judged for longer."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """An entry of the store that is not a readable capture, and why."""

    capture_id: str
    problem: str


class CaptureShelf:
    """The captures in a run directory."""

    def __init__(self, directory: Path) -> None:
        self._store = LocalStore(directory)
        self._known: dict[str, tuple[object, Manifest]] = {}
        self._sent: dict[str, tuple[object, Upload | None]] = {}

    def all(self) -> list[Manifest | Damaged]:
        """Every capture, newest first, and damaged ones at the end."""
        ids = self._store.ids()
        self._known = {name: known for name, known in self._known.items() if name in ids}
        found = [self.get(name) for name in sorted(ids)]
        whole = [capture for capture in found if isinstance(capture, Manifest)]
        whole.sort(key=lambda manifest: (manifest.created_at, manifest.capture_id), reverse=True)
        return [*whole, *(capture for capture in found if isinstance(capture, Damaged))]

    def get(self, capture_id: str) -> Manifest | Damaged | None:
        """One capture; None if there is none with that id, or the id is invalid."""
        known = self._known.get(capture_id)
        if known is not None and known[0] == self._signature(capture_id, known[1].artefacts):
            return known[1]
        try:
            # Taken before reading, so that a change meanwhile is noticed.
            signature = self._signature(capture_id, ())
            found = self._store.manifest(capture_id)
        except (UsageError, ValueError):  # (no file has such a name)
            return None
        except (InputError, IntegrityError, OSError) as error:
            return Damaged(capture_id, str(error))
        sizes = tuple(self._sizes(capture_id, found.artefacts))
        if all(size in (None, artefact.size_bytes) for size, artefact in zip(sizes, found.artefacts, strict=True)):
            self._known[capture_id] = ((*signature, *sizes), found)
        return found

    def uploads(self, url: str | None) -> tuple[dict[str, Upload], bool]:
        """The state of each capture's upload, and whether a process uploads them now."""
        found: dict[str, Upload] = {}
        for name in self._store.ids():
            # A finished upload no longer changes.
            signature = self._store.signature(name, UPLOAD_NAME)
            known = self._sent.get(name)
            if known is None or known[0] != signature:
                known = self._sent[name] = (signature, self._store.noted_upload(name))
            if (upload := known[1]) is not None:
                found[name] = upload
            elif url is not None:
                found[name] = Upload(url=url, state="waiting")
        self._sent = {name: known for name, known in self._sent.items() if name in found}
        if all(upload.state in ("stored", "removed") for upload in found.values()):
            return found, False
        busy = self._store.busy
        for name, sent in found.items():
            # An upload whose sender died waits.
            if not busy and sent.state == "uploading":
                found[name] = sent.model_copy(update={"state": "waiting"})
        return found, busy

    def signature(self) -> tuple[object, ...]:
        """A value that changes whenever a capture is added, removed or extended."""
        artefacts = {name: manifest.artefacts for name, (_, manifest) in self._known.items()}
        return tuple((name, self._signature(name, artefacts.get(name, ()))) for name in sorted(self._store.ids()))

    def _signature(self, capture_id: str, artefacts: Sequence[Artefact]) -> tuple[object, ...]:
        return (*self._store.signature(capture_id, MANIFEST_NAME), *self._sizes(capture_id, artefacts))

    def _sizes(self, capture_id: str, artefacts: Sequence[Artefact]) -> Iterator[int | None]:
        for artefact in artefacts:
            try:
                yield self._store.file(capture_id, artefact.name).lstat().st_size
            except OSError:
                yield None


class Drawing:
    """A heat map that is not there yet."""


@dataclass(frozen=True, slots=True)
class TimeColumns:
    """The mean step time of each column of ``column_steps``, oldest first, in seconds; NaN without a complete step."""

    attempt: int
    first_step: int
    last_step: int
    column_steps: int
    mean_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class View(JournalRecord):
    """A snapshot of a run: the contents of its journal and its state. ``version`` changes whenever a page changes.

    Attributes:
        problem: why an existing run cannot be shown, or "".
        going: the run has not ended.
        unwatched: no process watches it, although it has not recorded its end: its state is unknown.
        rings_there: its rings, with the ranks' last steps, still exist.
        captures: the stored ones, newest first; ``uploading``: a process uploads them now.
        disk: why the run directory cannot be written now, or ""; ``failing``: why triage does not work now, or "".
        unheard: which hosts send no steps now, and what follows, or "".
        hosts: the hosts of the ranks named last.
        directory: the run's path, for commands shown to the user.
        times: where its time went; None without a recorded step.
        mends: the suspects that are gone, and what that won.
    """

    version: str
    info: RunInfo | None = None
    problem: str = ""
    going: bool = False
    unwatched: bool = False
    rings_there: bool = False
    captures: tuple[Manifest | Damaged, ...] = ()
    watcher: liveness.Watcher = field(default_factory=liveness.Watcher)
    telemetry: liveness.RankCoverage = field(default_factory=liveness.RankCoverage)
    uploads: Mapping[str, Upload] = field(default_factory=dict)
    uploading: bool = False
    disk: str = ""
    failing: str = ""
    unheard: str = ""
    hosts: Mapping[int, str] = field(default_factory=dict)
    directory: str = ""
    times: TimeTable | None = None
    mends: Sequence[Mend] = ()

    @property
    def windows(self) -> int:
        return len(self.rows) + self.dropped

    @property
    def unknown(self) -> bool:
        """Whether the job is running unjudged, so that its state is unknown."""
        return self.unwatched or self.failing != ""

    def has_ended(self) -> bool:
        return self.info is not None and not self.going

    def request_behind(self, capture_id: str) -> WindowRow | RequestRow | None:
        """What led to a capture: a window's decision, a person's request, or another capture."""
        newest: Iterator[WindowRow | RequestRow] = chain(reversed(self.rows), reversed(self.requests))
        return next((row for row in newest if any(request.capture_id == capture_id for request in row.requests)), None)

    def cost_of(self, manifest: Manifest) -> CostMeasured | None:
        """What a capture, with those that ran beside it, cost the job; None if unknown."""
        origin, capture = self.request_behind(manifest.capture_id), manifest.capture
        for cost in reversed(self.notes):
            if not isinstance(cost, CostMeasured) or origin is None or cost.attempt != origin.attempt:
                continue
            if cost.first_step <= capture.last_step and cost.last_step >= capture.first_step:
                return cost
        return None


class _Opened:
    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.journal = JournalTail(run.decisions)
        self.shelf = CaptureShelf(run.path)
        # Maps are made in their own thread, so `beside` has a source of its own.
        self.beside, self._host = HeatSource(StepLogs(run.steps)), HeatSource(StepLogs(run.steps))
        self._device = HeatSource(StepLogs(run.steps, LOG_KIND))
        self.times = TimesReader(StepLogs(run.steps))
        self.watcher, self.telemetry = liveness.WatcherLook(run), liveness.TelemetryLook(run.steps)
        self.earlier: Sequence[AttemptRows] | None = None

    def heat(self, attempt: int, first_step: int, last_step: int, each: int, clock: Clock) -> HeatMap | None:
        """The map on a clock; on the hosts' if no device times are recorded."""
        steps = attempt, first_step, last_step, each
        return (self._device.map(*steps) if clock == "device" else None) or self._host.map(*steps)


class RunSource:
    """A run that may not exist yet: ``find`` returns its directory once it does, and ``waits_for`` says so until then.

    Its methods may be called from any thread; one thread at a time reads.
    """

    def __init__(self, find: Callable[[], RunDirectory | None], waits_for: str = "") -> None:
        self._find = find
        self._lock = threading.Lock()
        self._opened: _Opened | None = None
        self._view = View("none", problem=waits_for)
        # Maps of large runs take seconds: one thread makes them, one after the other.
        self._drawing = futures.ThreadPoolExecutor(1, thread_name_prefix="heat")
        self._maps: OrderedDict[tuple[int, int, int, int, Clock, int], futures.Future[HeatMap | None]] = OrderedDict()
        self._late_maps = 0

    @property
    def directory(self) -> Path | None:
        return None if self._opened is None else self._opened.run.path

    def view(self) -> View:
        with self._lock:
            if self._opened is None and (run := self._find()) is not None and run.info_file.is_file():
                self._opened = _Opened(run)
            return self._view if self._opened is None else self._look(self._opened)

    def heat(
        self,
        attempt: int,
        first_step: int,
        last_step: int,
        each: int,
        clock: Clock = "host",
        patience_s: float | None = None,
    ) -> HeatMap | Drawing | None:
        """The heat map of judged steps of an attempt, ``each`` of them in a column, on the clock of their verdicts.

        If it takes longer than ``patience_s``, the result is `Drawing`, and the view changes once the map exists.
        """
        with self._lock:
            if self._opened is None:
                return None
            wanted = (attempt, first_step, last_step, each, clock, len(self._view.rows))
            drawn = self._maps.get(wanted)
            if drawn is None:
                drawn = self._maps[wanted] = self._drawing.submit(self._opened.heat, *wanted[:5])
                while len(self._maps) > KEPT_MAPS:
                    self._maps.popitem(last=False)[1].cancel()
        try:
            return drawn.result(patience_s)
        except futures.TimeoutError:
            drawn.add_done_callback(self._drawn)
            return Drawing()
        except futures.CancelledError:
            # (dropped for newer requests)
            return Drawing()

    def step_times(self, view: View, columns: int, patience_s: float) -> TimeColumns | None:
        """The recorded step times of a view's newest attempt; None if there are none, or not within ``patience_s``."""
        rows = [row for row in view.rows if row.attempt == view.rows[-1].attempt and row.advances_s]
        if not rows:
            return None
        first, last = rows[0].first_step, rows[-1].last_step
        each = 1 << max(0, (last - first) // columns).bit_length()
        found = self.heat(rows[0].attempt, first, last, each, rows[-1].clock, patience_s)
        if not isinstance(found, HeatMap):
            return None
        return TimeColumns(rows[0].attempt, found.first_step, last, each, tuple(found.advances_CS.sum(axis=1).tolist()))

    def _drawn(self, _: futures.Future[HeatMap | None]) -> None:
        with self._lock:
            self._late_maps += 1

    def capture(self, capture_id: str) -> Manifest | Damaged | None:
        with self._lock:
            return None if self._opened is None else self._opened.shelf.get(capture_id)

    @property
    def store(self) -> LocalStore:
        """The store in the run directory; InputError if there is no run yet."""
        if self._opened is None:
            raise InputError("there is no run yet")
        return LocalStore(self._opened.run.path)

    def beside(self, manifest: Manifest, attempt: int, control: int | None) -> StepTracks | None:
        """The captured steps beside those of another rank (see `steps_beside`), or what the manifest kept of them."""
        with self._lock:
            recorded = None
            if self._opened is not None:
                recorded = steps_beside(self._opened.beside, manifest, attempt, control)
            return tracks_of(recorded or manifest.recorded)

    def _look(self, opened: _Opened) -> View:
        run, shelf, moved = opened.run, opened.shelf, opened.journal.follow()
        journal = opened.journal.record
        try:
            info, problem = read_info(run), ""
        except InputError as error:
            info, problem = None, str(error)
        has_rings = info is not None and Path(info.rings).is_dir()
        # (the rings are on the job's host; the run directory may be shared with others)
        look = info is not None and (has_rings or info.ended_at == "")
        watcher = opened.watcher.at(time.monotonic(), Path(info.rings)) if info and look else liveness.Watcher()
        telemetry = opened.telemetry.at(journal.rows[-1].attempt if journal.rows else None)
        uploads, uploading = shelf.uploads(info.store if info is not None else None)
        going = (has_rings or liveness.is_watched(watcher)) and watcher.state != "left"
        unwatched = info is not None and liveness.is_unwatched(info, watcher, rings_there=has_rings)
        notes = liveness.DISK, liveness.FAILING, liveness.UNHEARD
        rings = Path(info.rings) if info is not None and has_rings else None
        disk, fails, unheard = ("" if rings is None else liveness.noted_problem(rings / note) for note in notes)
        lengths = len(journal.rows), len(journal.requests), len(journal.notes), journal.skipped
        about = (going, unwatched, problem, watcher, telemetry, uploading, disk, fails, unheard, self._late_maps)
        sent = sorted((name, upload.state) for name, upload in uploads.items())
        state = (lengths, sorted(journal.states.items()), shelf.signature(), about, sent)
        version = hashlib.sha256(repr(state).encode()).hexdigest()[:16]
        if moved or version != self._view.version:
            named = next((row for row in reversed(journal.rows) if row.suspects), None)
            attempts = _attempts(opened.times.logs, journal.rows)
            if opened.earlier is None and info is not None and attempts and attempts[-1].rows[-1].advances_s:
                opened.earlier = _earlier(run, info, attempts[-1])
            self._view = View(
                # (copied: the journal grows on)
                **{part.name: copy(getattr(journal, part.name)) for part in fields(journal)},
                version=version,
                info=info,
                problem=problem,
                going=going,
                unwatched=unwatched,
                rings_there=has_rings,
                captures=tuple(shelf.all()),
                watcher=watcher,
                telemetry=telemetry,
                uploads=uploads,
                uploading=uploading,
                disk=disk,
                failing=fails,
                unheard=unheard,
                hosts={} if named is None else opened.telemetry.hosts(named.attempt, named.suspects[0].ranks),
                directory=str(run.path),
                mends=mends_of([*(opened.earlier or ()), *attempts], journal.notes),
                times=None if info is None else _times(info, opened.times, journal, going=going),
            )
        return self._view


@lru_cache(maxsize=1)
def rank_hour_price() -> str:
    """The price of a rank-hour; "" if none is set, or it has no amount."""
    price = os.environ.get(PRICE_ENV, "")
    if price and not AMOUNT.search(price):
        log.warning("%s=%s: not a price, such as 2.50 USD", PRICE_ENV, price)
    return price if AMOUNT.search(price) else ""


def _times(info: RunInfo, steps: TimesReader, journal: JournalRecord, *, going: bool) -> TimeTable | None:
    begin_s = datetime.fromisoformat(info.created_at).timestamp()
    end_s = None if going or not info.ended_at else datetime.fromisoformat(info.ended_at).timestamp()
    # (a compaction may have removed the first windows)
    judged_from: dict[int, int] = dict.fromkeys(steps.logs.attempts, 0) if journal.dropped else {}
    for row in journal.rows:
        judged_from[row.attempt] = min(judged_from.get(row.attempt, row.first_step), row.first_step)
    charges = Charges(
        losses=journal.losses,
        added=journal.added,
        pauses=[note for note in journal.notes if isinstance(note, JobPaused)],
        costs=[note for note in journal.notes if isinstance(note, CostMeasured)],
        stalls={(row.attempt, row.first_step): row.exposed_s for row in journal.rows if row.label == "stalled"},
        judged_from=judged_from,
    )
    return time_table(begin_s, end_s, steps.read(ended=not going), charges, price=rank_hour_price())


def _attempts(logs: StepLogs, rows: Iterable[WindowRow], run: str = "") -> list[AttemptRows]:
    """The judged attempts of a run, or of an earlier ``run``, with what is on record of their steps."""
    logs.refresh()
    found = []
    for attempt, of_attempt in groupby(rows, lambda row: row.attempt):
        log = next(iter(logs.of(attempt, sorted(logs.attempts.get(attempt, ()))[:1]).values()), None)
        known = () if log is None else (log.info.world_size, run, partial(_mean_step_s, log))
        found.append(AttemptRows(list(of_attempt), *known))
    return found


def _mean_step_s(log: LogReader, first_step: int, last_step: int) -> float | None:
    _, steps = log.steps([(first_step, 1), (last_step, 1)])
    if len(steps) != 2 or last_step <= first_step:
        return None
    return float(steps.start_ns_B[1] - steps.start_ns_B[0]) * 1e-9 / (last_step - first_step)


MAX_EARLIER = 4
"""Earlier runs of a job that are opened to find one that compares."""


def _earlier(run: RunDirectory, info: RunInfo, newest: AttemptRows) -> Sequence[AttemptRows]:
    """The newest earlier run of the job beside this one that has the same stages and ranks; its last attempt."""
    found = []
    for path in run.path.parent.glob("*/run.json"):
        with suppress(InputError):
            other = read_info(RunDirectory(path.parent))
            if other.job == info.job and other.created_at < info.created_at:
                found.append((other.created_at, other.run_id, path.parent))
    for _, run_id, path in sorted(found, reverse=True)[:MAX_EARLIER]:
        journal = JournalTail(RunDirectory(path).decisions)
        journal.follow()
        for attempt in _attempts(StepLogs(RunDirectory(path).steps), journal.record.rows, run_id)[-1:]:
            stages = [[*rows[-1].advances_s] for rows in (attempt.rows, newest.rows)]
            if stages[0] == stages[1] and attempt.ranks == newest.ranks > 0:
                return [attempt]
    return ()


MAX_LISTED = 50
"""Maximum runs listed, newest first; an older run is shown if named."""

LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run and its watcher; ``left`` if it has ended."""

    directory: Path
    info: RunInfo
    state: liveness.State


@dataclass(frozen=True, slots=True)
class Followed:
    """The newest runs, the newest first; ``before`` was the newest until another began meanwhile."""

    runs: tuple[StartedRun, ...] = ()
    before: StartedRun | None = None

    @property
    def newest(self) -> StartedRun | None:
        return self.runs[0] if self.runs else None


class StartedRuns:
    """Searches for runs periodically. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found = Followed()
        self._due_s = float("-inf")

    def look(self) -> Followed:
        with self._lock:
            if time.monotonic() >= self._due_s:
                runs = tuple(filter(None, map(_started, islice(started_runs(), MAX_LISTED))))
                last, newest = self._found.newest, runs[0] if runs else None
                switched = last is not None and newest is not None and last.directory != newest.directory
                self._found = Followed(runs, last if switched else self._found.before)
                self._due_s = time.monotonic() + LOOK_S
            return self._found


def _started(run: RunDirectory) -> StartedRun | None:
    try:
        info = read_info(run)
    except InputError:
        return None
    rings = Path(info.rings)
    return StartedRun(run.path, info, liveness.watcher_of(run, rings).state if rings.is_dir() else "left")
