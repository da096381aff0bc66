"""What the recorder's tests share: an info, a ring with its reader, and a clock that only moves when told."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sftriage.model.windows import StepRecord
from sftriage.recorder import files, gradients, moments, monitor
from sftriage.recorder.monitor import COHORT_ENV, HOST_ENV, JOB_ENV, RINGS_ENV, SPOOL_ENV, Monitor
from sftriage.windows import rings
from sftriage.windows.rings import Ring, open_ring
from tests.unit.slotted import make_info

__all__ = ["make_info"]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may themselves run under torchrun, or beside a recorded job."""
    torchrun = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    launched = [name for variables in monitor.LAUNCHERS for name in variables]
    for name in (RINGS_ENV, SPOOL_ENV, JOB_ENV, HOST_ENV, COHORT_ENV, *torchrun, *launched):
        monkeypatch.delenv(name, raising=False)


class Clock:
    """Nanoseconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000
        self.instead: Callable[[], int] | None = None

    def __call__(self) -> int:
        return self.now_ns if self.instead is None else self.instead()

    def passes(self, ns: int) -> None:
        self.now_ns += ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (files, gradients, monitor, rings):
        monkeypatch.setattr(module, "monotonic_ns", made)
    return made


@pytest.fixture(params=["C", "Python"])
def form(request, monkeypatch: pytest.MonkeyPatch) -> moments.Form:
    """Each of the two forms that write moments."""
    if request.param == "Python":
        monkeypatch.setattr(moments, "FORM", moments.PYTHON)
        for name in ("step", "stage"):
            monkeypatch.setattr(Monitor, name, getattr(Monitor, f"_{name}_in_python"))
    elif moments.FORM.name != "C":
        pytest.skip(moments.WHY_NOT_C)
    return moments.FORM


@dataclass
class Watched:
    """A monitor and a reader of its ring."""

    monitor: Monitor
    reader: Ring
    misused: int = 0

    def steps(self) -> list[StepRecord]:
        batch = self.reader.read()
        assert (batch.missed, batch.torn) == (0, 0)
        self.misused += batch.misuse
        return batch.steps.records()

    def step(self) -> StepRecord:
        (record,) = self.steps()
        return record

    @property
    def misuse(self) -> int:
        """What the writer has counted, and what the steps show that were read."""
        self.reader.status()
        return self.reader.misuse + self.misused


@pytest.fixture
def watch(tmp_path: Path, form: moments.Form) -> Iterator[Callable[..., Watched]]:
    """Makes monitors that record, each into a fresh directory, each with a reader."""
    made: list[Watched] = []

    def make(*stages: tuple[str, ...]) -> Watched:
        directory = Path(tempfile.mkdtemp(dir=tmp_path))
        watched = Watched(Monitor(*stages, rings=directory, slots=64), open_ring(directory / "rank-0.0.ring"))
        made.append(watched)
        return watched

    yield make
    for watched in made:
        watched.monitor.close()
        watched.reader.close()
