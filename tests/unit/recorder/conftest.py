"""What the recorder's tests share: an info, a ring with its reader, and a clock that only moves when told."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import pytest

from sftriage.recorder import contexts, gradients, monitor, recording
from sftriage.recorder import ring as rings_module
from sftriage.recorder.files import start_ticks
from sftriage.recorder.layout import RingInfo
from sftriage.recorder.monitor import COHORT_ENV, HOST_ENV, JOB_ENV, RINGS_ENV, SPOOL_ENV, Monitor
from sftriage.recorder.ring import RingReader, RingWriter
from sftriage.records import StageSchema, StepRecord
from tests.recorded import records_in

MakeInfo = Callable[..., RingInfo]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may themselves run under torchrun, or beside a recorded job."""
    torchrun = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    for name in (RINGS_ENV, SPOOL_ENV, JOB_ENV, HOST_ENV, COHORT_ENV, *torchrun):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def make_info() -> MakeInfo:
    def make(**changes: object) -> RingInfo:
        schema = StageSchema.closed(("data", "forward", "backward"), ("backward",))
        pid = os.getpid()
        info = RingInfo(3, 8, 1, 0, "job-7", "node-a", "", schema, 1_000, 2_000, pid, start_ticks(pid) or 0)
        return replace(info, **changes)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def slot_of() -> Callable[..., array[int]]:
    """Words of a whole slot of sequence number ``seq``, every number in it derived from it."""

    def make(info: RingInfo, seq: int, *, crc: int | None = None) -> array[int]:
        stages, sync = len(info.schema.stages), len(info.schema.sync)
        times = [seq * 100 + index for index in range(stages + sync)]
        words = array("q", [seq, seq + 40, seq * 1000, seq * 10, 0, 0, 0, 0, -1, *times, 0])
        words[-1] = crc32(memoryview(words)[:-1]) if crc is None else crc
        return words

    return make


@pytest.fixture(scope="session")
def record_of() -> Callable[[RingInfo, int], StepRecord]:
    """The record that `slot_of` stands for."""

    def make(info: RingInfo, seq: int) -> StepRecord:
        stages, sync = len(info.schema.stages), len(info.schema.sync)
        return StepRecord(
            rank=info.rank,
            step=seq + 40,
            start_ns=seq * 1000,
            between_ns=seq * 10,
            durations_ns=tuple(seq * 100 + index for index in range(stages)),
            outside_ns=tuple(seq * 100 + stages + index for index in range(sync)),
            complete=True,
            capturing=False,
        )

    return make


@dataclass
class Ring:
    writer: RingWriter
    info: RingInfo
    path: Path
    reader: RingReader
    slot_of: Callable[..., array[int]]

    def publish(self, *seqs: int) -> None:
        for seq in seqs:
            self.writer.publish(self.slot_of(self.info, seq))


@pytest.fixture
def ring(tmp_path: Path, make_info: MakeInfo, slot_of: Callable[..., array[int]]) -> Iterator[Ring]:
    """A ring of four slots."""
    info = make_info()
    writer = RingWriter(tmp_path, info, 4)
    with RingReader(writer.path) as reader:
        yield Ring(writer, info, writer.path, reader, slot_of)
    writer.close()


class Clock:
    """Nanoseconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000

    def __call__(self) -> int:
        return self.now_ns

    def passes(self, ns: int) -> None:
        self.now_ns += ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (recording, contexts, gradients, monitor, rings_module):
        monkeypatch.setattr(module, "monotonic_ns", made)
    return made


@dataclass
class Watched:
    """A monitor and a reader of its ring."""

    monitor: Monitor
    reader: RingReader

    def steps(self) -> list[StepRecord]:
        batch = self.reader.read()
        assert (batch.missed, batch.torn) == (0, 0)
        return records_in(batch.raw, self.reader.info)

    def step(self) -> StepRecord:
        (record,) = self.steps()
        return record

    @property
    def misuse(self) -> int:
        self.reader.status()
        return self.reader.misuse


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Makes monitors that record, each into a fresh directory, each with a reader."""
    made: list[Watched] = []

    def make(*stages: tuple[str, ...]) -> Watched:
        rings = Path(tempfile.mkdtemp(dir=tmp_path))
        watched = Watched(Monitor(*stages, rings=rings, slots=64), RingReader(rings / "rank-0.0.ring"))
        made.append(watched)
        return watched

    yield make
    for watched in made:
        watched.monitor.close()
        watched.reader.close()
