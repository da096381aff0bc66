"""The per-host loop's work: find rings, read them, keep every step, gather windows, run captures.

Nothing here waits: `poll` and `results` are called again and again by whoever owns the loop.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from sftriage.agent.device_rings import DeviceRings
from sftriage.agent.executors import Places, adopted, executor_for, overlap
from sftriage.agent.kept import kept_steps
from sftriage.capture import Executor, NsysPlace
from sftriage.errors import CaptureError, RingError
from sftriage.recorder import RingInfo, RingReader, RingStatus, StepLog, find_rings
from sftriage.records import CaptureRequest, CaptureResult, JobStatus, RankStatus, Window
from sftriage.windows.decoding import StepArrays, decode, together
from sftriage.windows.gather import Gatherer, Shape
from sftriage.windows.times import StepTimes

log = logging.getLogger("sftriage")


@dataclass(slots=True)
class Telemetry:
    """What has come in so far, and what has not."""

    steps: int = 0
    missed: int = 0
    torn: int = 0
    problems: dict[str, str] = field(default_factory=dict)


class Agent:
    """Reads one host's rings into windows, and runs captures on its ranks.

    Args:
        rings: directory of the trainers' rings and mailboxes.
        steps: directory where every step is kept.
        spool: directory where trainers leave traces.
        shape: how windows are cut.
        nsys: how the trainers were launched under nsys, if they were.
    """

    def __init__(self, rings: Path, steps: Path, spool: Path, shape: Shape, nsys: NsysPlace | None = None) -> None:
        self._rings, self._steps, self._shape = rings, steps, shape
        self._places = Places(rings, spool, nsys)
        self._readers: dict[Path, tuple[RingReader, StepLog]] = {}
        self._device = DeviceRings(rings, steps, self._say_once)
        self._gatherers: dict[int, Gatherer] = {}
        self._captures: dict[str, Executor] = {}
        self._given_up: list[Executor] = []
        self._first_info: dict[int, RingInfo] = {}
        self._said: set[str] = set()
        self.telemetry = Telemetry()
        self.times = StepTimes(2 * shape.window_steps)

    def poll(self, *, ended: bool = False) -> list[Window]:
        """Windows that have become ready since the last call; with ``ended``, the job's last ones too."""
        self._find()
        found: dict[int, list[tuple[int, bytes]]] = {}
        on_device: list[RingInfo] = []
        for path, (reader, kept) in list(self._readers.items()):
            try:
                batch = reader.read()
            except RingError as error:
                self._give_up(path, str(error))
                continue
            try:
                kept.append(kept.unknown(batch.raw))
            except RingError as error:
                self._say_once(f"{error}; some steps are judged but not kept")
            self.telemetry.steps += batch.steps
            self.telemetry.missed += batch.missed
            self.telemetry.torn += batch.torn
            found.setdefault(reader.info.attempt, []).append((reader.info.rank, batch.raw))
            if reader.on_device:
                on_device.append(reader.info)
        windows = []
        for attempt, gatherer in sorted(self._gatherers.items()):
            if attempt in found:
                steps = decode(found[attempt], self._first_info[attempt].schema)
                self.times.note(attempt, steps)
                of_device = [info for info in on_device if info.attempt == attempt]
                if of_device:
                    self._gather_both(gatherer, steps, of_device)
                else:
                    gatherer.add(steps)
            # An attempt that another one has followed is over.
            over = attempt < max(self._gatherers)
            windows += gatherer.ready(ended=ended or over)
            if over:
                del self._gatherers[attempt]
        return windows

    def statuses(self) -> JobStatus | None:
        """What the ranks of the newest attempt are doing now; None before there is one."""
        attempt = max((reader.info.attempt for reader, _ in self._readers.values()), default=0)
        newest = [pair for pair in self._readers.items() if pair[1][0].info.attempt == attempt]
        ranks = []
        for path, (reader, _) in newest:
            try:
                now = reader.status()
            except RingError as error:
                self._give_up(path, str(error))
                continue
            ranks.append(_status(reader.info, now))
        if not ranks:
            return None
        info = newest[0][1][0].info
        return JobStatus(info.schema, info.world_size, tuple(sorted(ranks, key=attrgetter("rank"))), info.attempt)

    def capture(self, request: CaptureRequest) -> CaptureResult | None:
        """Start a capture. What cannot even be started is a result at once."""
        info = self.ranks.get(request.rank)
        if info is None:
            return CaptureResult(request.capture_id, request.rank, "failed", f"rank {request.rank} has no ring here")
        reason = overlap(request, [capture.request for capture in self._captures.values()])
        if reason is not None:
            return CaptureResult(request.capture_id, request.rank, "refused", reason)
        try:
            capture = executor_for(request, info, self._places, lambda: self._now(info))
        except CaptureError as error:
            return CaptureResult(request.capture_id, request.rank, "refused", str(error))
        try:
            capture.start()
        except CaptureError as error:
            capture.close()
            return CaptureResult(request.capture_id, request.rank, "failed", str(error))
        self._captures[request.capture_id] = capture
        return None

    def adopt(self, request: CaptureRequest) -> CaptureResult | None:
        """Go on with a capture that an earlier agent began. What cannot be gone on with is a result at once."""
        self._find()
        info = self.ranks.get(request.rank)
        reason = "its rank has no ring here any more"
        if info is not None:
            try:
                capture = adopted(request, info, self._places)
            except CaptureError as error:
                reason = str(error)
            else:
                self._captures[request.capture_id] = capture
                return None
        return CaptureResult(request.capture_id, request.rank, "failed", f"sftriage ended during it: {reason}")

    def results(self) -> list[tuple[Executor, CaptureResult]]:
        """Captures that have ended since the last call; the caller closes each, once it has taken the trace."""
        for capture in list(self._given_up):
            if capture.poll() is not None or not self._alive(capture.request.rank):
                capture.close()
                self._given_up.remove(capture)
        ended = []
        for capture_id, capture in list(self._captures.items()):
            result = capture.poll()
            if result is None and capture.needs_trainer and not self._alive(capture.request.rank):
                result = capture.poll() or capture.failed("the trainer ended during the capture")
            if result is not None:
                ended.append((self._captures.pop(capture_id), result))
        return ended

    def steps(self, rank: int, first_step: int, last_step: int) -> Window | None:
        """Some of the newest steps of a rank's job, from memory or the logs; None where they are not there."""
        info = self.ranks.get(rank)
        gatherer = None if info is None else self._gatherers.get(info.attempt)
        if info is None or gatherer is None:
            return None
        held = gatherer.cut(first_step, last_step)
        of_attempt = [pair for pair in self._readers.values() if pair[0].info.attempt == info.attempt]
        if held is not None or any(reader.on_device for reader, _ in of_attempt):
            return held
        logs = {reader.info.rank: kept for reader, kept in of_attempt}
        return kept_steps(info, logs, first_step, last_step)

    def cancel(self, capture_id: str) -> None:
        """Ask for a capture to end now."""
        if capture_id in self._captures:
            self._captures[capture_id].cancel()

    def abandon(self, capture_id: str, reason: str) -> list[tuple[CaptureRequest, CaptureResult]]:
        """End a capture whose rank does not answer. What it leaves should it answer after all is removed then."""
        capture = self._captures.pop(capture_id, None)
        if capture is None:
            return []
        if capture.needs_trainer and self._alive(capture.request.rank):
            capture.cancel()
            self._given_up.append(capture)
        else:
            capture.close()
        return [(capture.request, capture.failed(reason))]

    @property
    def running(self) -> tuple[str, ...]:
        """Captures that have not ended."""
        return tuple(self._captures)

    @property
    def ranks(self) -> dict[int, RingInfo]:
        """The newest ring of each rank, by rank."""
        infos = sorted((reader.info for reader, _ in self._readers.values()), key=attrgetter("attempt"))
        return {info.rank: info for info in infos}

    def writers_alive(self) -> bool:
        """Whether any trainer is still there."""
        return any(reader.writer_alive for reader, _ in self._readers.values())

    def close(self) -> None:
        """Close every file, and end what has not ended."""
        for capture in (*self._captures.values(), *self._given_up):
            capture.cancel()
            capture.close()
        for reader, kept in self._readers.values():
            reader.close()
            kept.close()
        self._device.close()
        self._readers.clear()
        self._captures.clear()

    def _now(self, info: RingInfo) -> RankStatus | None:
        """What one rank is doing now."""
        reader = next((reader for reader, _ in self._readers.values() if reader.info == info), None)
        try:
            return None if reader is None else _status(info, reader.status())
        except RingError:
            return None

    def _gather_both(self, gatherer: Gatherer, host: StepArrays, on_device: list[RingInfo]) -> None:
        """Gather the times of host and device of a job with ranks on devices."""
        gatherer.runs_on_device()
        read = [(info.rank, *self._device.read(info)) for info in on_device]
        gatherer.add_both(host, together([steps for _, steps, _ in read]))
        for rank, steps, over in read:
            if over and not len(steps):
                gatherer.device_over(rank)

    def _find(self) -> None:
        for path in find_rings(self._rings):
            if path in self._readers or str(path) in self.telemetry.problems:
                continue
            try:
                reader = RingReader(path)
                kept = StepLog(self._steps, reader.info)
            except (RingError, OSError) as error:
                self._give_up(path, str(error))
                continue
            info = reader.info
            known = info.attempt in self._first_info
            first = self._first_info.setdefault(info.attempt, info)
            if (info.schema, info.world_size) != (first.schema, first.world_size):
                self._give_up(path, f"{path}: rank {info.rank} records other stages than rank {first.rank}")
                continue
            self._readers[path] = (reader, kept)
            if not known:
                self._gatherers[info.attempt] = Gatherer(
                    info.schema, info.world_size, self._shape, attempt=info.attempt
                )
            if info.attempt in self._gatherers:
                self._gatherers[info.attempt].describe(info.rank, info.host, info.cohort)

    def _give_up(self, path: Path, reason: str) -> None:
        """A ring that cannot be read lowers coverage; it does not end the job's triage."""
        log.warning("%s; its rank counts as missing", reason)
        self.telemetry.problems[str(path)] = reason
        if path in self._readers:
            reader, kept = self._readers.pop(path)
            reader.close()
            kept.close()

    def _say_once(self, problem: str) -> None:
        """A disk that is full is so at every look."""
        if problem not in self._said:
            self._said.add(problem)
            log.warning("%s", problem)

    def _alive(self, rank: int) -> bool:
        return any(reader.writer_alive for reader, _ in self._readers.values() if reader.info.rank == rank)


def _status(info: RingInfo, now: RingStatus) -> RankStatus:
    return RankStatus(
        rank=info.rank,
        host=info.host,
        stage=now.stage,
        # Before the first step the header has no time yet.
        since_ns=max(now.since_ns, info.started_mono_ns),
        step=now.step,
        step_since_ns=now.step_since_ns,
        published=now.published,
        closed=now.closed,
        alive=now.alive,
        special=now.special,
    )
