"""Reading one host's rings: every new step is kept, and told once; what every rank is doing now."""

from __future__ import annotations

import logging
import socket
import time
from operator import attrgetter
from pathlib import Path

from sftriage.agent.device_rings import DeviceRings
from sftriage.agent.scheduling import Scheduling
from sftriage.errors import RingError
from sftriage.recorder import RingInfo, RingReader, StepLog, find_rings
from sftriage.records import JobStatus, RankStatus
from sftriage.windows.decoding import decode, together
from sftriage.windows.shipped import RankLocation, ReadCounts, Rows

log = logging.getLogger("sftriage")


class RankRings:
    """The rings of the ranks on one host, as they appear and end. Every step is kept in the directory ``steps``.

    Attributes:
        telemetry: what has come in so far.
    """

    def __init__(self, rings: Path, steps: Path) -> None:
        self._rings, self._steps = rings, steps
        self._readers: dict[Path, tuple[RingReader, StepLog]] = {}
        self._device = DeviceRings(rings, steps, self._say_once)
        self._scheduling = Scheduling(steps, self._say_once)
        self._first_info: dict[int, RingInfo] = {}
        self._said: set[str] = set()
        self._host, self._position = socket.gethostname(), 0
        self.telemetry = ReadCounts()

    def rows(self) -> list[Rows]:
        """The steps that were written since the last call, by generation; also of one that has appeared, if none."""
        self.look()
        found: dict[int, list[tuple[int, bytes]]] = {}
        on_device: dict[int, list[RingInfo]] = {}
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
            if batch.steps:
                self._scheduling.look(reader.info)
            found.setdefault(reader.info.attempt, []).append((reader.info.rank, batch.raw))
            if reader.on_device:
                on_device.setdefault(reader.info.attempt, []).append(reader.info)
        self._position += 1
        # A step's own clock is the host's monotonic one, which nobody else can read.
        wall_ns = time.time_ns() - time.monotonic_ns()
        return [
            self._rows(generation, raws, on_device.get(generation, ()), wall_ns)
            for generation, raws in sorted(found.items())
        ]

    def _rows(
        self, generation: int, raws: list[tuple[int, bytes]], on_device: list[RingInfo] | tuple[()], wall_ns: int
    ) -> Rows:
        first = self._first_info[generation]
        read = [(info.rank, *self._device.read(info)) for info in on_device]
        of_generation = [reader.info for reader, _ in self._readers.values() if reader.info.attempt == generation]
        return Rows(
            generation=generation,
            schema=first.schema,
            world_size=first.world_size,
            ranks={info.rank: RankLocation(info.host, info.cohort) for info in of_generation},
            steps=self._scheduling.laid_over(generation, decode(raws, first.schema)),
            device_steps=together([steps for _, steps, _ in read]) if read else None,
            device_over=tuple(rank for rank, steps, over in read if over and not len(steps)),
            wall_ns=wall_ns,
            agent=self._host,
            position=self._position,
        )

    def statuses(self) -> JobStatus | None:
        """What the ranks of the newest generation are doing now; None before there is one."""
        newest = max((reader.info.attempt for reader, _ in self._readers.values()), default=0)
        ranks, about = [], None
        for path, (reader, _) in list(self._readers.items()):
            if reader.info.attempt != newest:
                continue
            try:
                ranks.append(reader.status())
            except RingError as error:
                self._give_up(path, str(error))
            else:
                about = about or reader.info
        if about is None:
            return None
        return JobStatus(about.schema, about.world_size, tuple(sorted(ranks, key=attrgetter("rank"))), newest)

    def status(self, info: RingInfo) -> RankStatus | None:
        """What one rank is doing now; None where that cannot be read."""
        reader = next((reader for reader, _ in self._readers.values() if reader.info == info), None)
        try:
            return None if reader is None else reader.status()
        except RingError:
            return None

    @property
    def ranks(self) -> dict[int, RingInfo]:
        """The newest ring of each rank, by rank."""
        infos = sorted((reader.info for reader, _ in self._readers.values()), key=attrgetter("attempt"))
        return {info.rank: info for info in infos}

    def alive(self, rank: int) -> bool:
        """Whether the process of a rank is there."""
        return any(reader.writer_alive for reader, _ in self._readers.values() if rank == reader.info.rank)

    def close(self) -> None:
        """Close every file."""
        for reader, kept in self._readers.values():
            reader.close()
            kept.close()
        self._device.close()
        self._scheduling.close()
        self._readers.clear()

    def look(self) -> None:
        """Take up rings that have appeared."""
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
            first = self._first_info.setdefault(info.attempt, info)
            if (info.schema, info.world_size) != (first.schema, first.world_size):
                self._give_up(path, f"{path}: rank {info.rank} records other stages than rank {first.rank}")
                continue
            self._readers[path] = (reader, kept)

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
