"""What rings and step logs hold, step by step."""

from pathlib import Path
from typing import NamedTuple

from sftriage.agent.reading import RankRings
from sftriage.controller.windows import WindowAssembly
from sftriage.model.windows import StepRecord, Window
from sftriage.recorder import RingInfo
from sftriage.windows.counting import KIND, KeptReadings, kept_readings
from sftriage.windows.gather import Shape
from sftriage.windows.logs import LogReader
from sftriage.windows.rings import Ring
from sftriage.windows.shipped import ReadCounts
from sftriage.windows.steplog import find_logs


def new_records(ring: Ring) -> list[StepRecord]:
    """The steps that a ring has since it was last read."""
    return ring.read().steps.records()


class Logged(NamedTuple):
    info: RingInfo
    records: list[StepRecord]
    skipped: int


def read_log(path: Path) -> Logged:
    """Every step of a log that can be read, and how many slots could not."""
    reader = LogReader(path)
    records: list[StepRecord] = []
    while steps := reader.read(3):
        records += steps.records()
    return Logged(reader.info, records, reader.skipped)


def kept_of(steps: Path, info: RingInfo) -> KeptReadings | None:
    """The readings of a rank's scheduling that are kept in a directory."""
    logs = {(log.rank, log.attempt): log for log in find_logs(steps, KIND)}
    return kept_readings(logs.get((info.rank, info.attempt)), info)


class Windows:
    """The windows of the ranks of one host, put together as an agent and a controller do."""

    def __init__(self, rings: Path, steps: Path, shape: Shape) -> None:
        self.rings = RankRings(rings, steps)
        self._gathering = WindowAssembly(shape)

    def poll(self, *, ended: bool = False) -> list[Window]:
        """Windows that have become ready since the last call."""
        return self._gathering.add(self.rings.rows(), ended=ended)

    @property
    def telemetry(self) -> ReadCounts:
        return self.rings.telemetry()

    def close(self) -> None:
        self.rings.close()
