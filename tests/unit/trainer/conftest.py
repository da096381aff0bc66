"""What the recorder's tests share: an info, a ring with its reader, and a clock that only moves when told."""

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sftriage.model.windows import StepRecord
from sftriage.trainer import gradients, moments, monitor, recording
from sftriage.trainer.monitor import COHORT_ENV, HOST_ENV, JOB_ENV, RINGS_ENV, SPOOL_ENV, Monitor
from sftriage.windows import rings
from sftriage.windows.rings import Ring
from tests.unit.slotted import make_info

__all__ = ["make_info"]

STAGES = ("data", "forward", "backward", "optimizer")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may themselves run under torchrun, or beside a recorded job."""
    torchrun = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    launched = [name for variables in monitor.LAUNCHERS for name in variables]
    for name in (RINGS_ENV, SPOOL_ENV, JOB_ENV, HOST_ENV, COHORT_ENV, *torchrun, *launched):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    import torch  # (most of these tests need none)

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def in_a_thread(act: Callable[..., object], *arguments: object) -> None:
    thread = threading.Thread(target=act, args=arguments)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


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
    for module in (recording, gradients, monitor, rings):
        monkeypatch.setattr(module, "monotonic_ns", made)
    return made


@pytest.fixture(params=["C", "Python"])
def form(request, monkeypatch: pytest.MonkeyPatch) -> moments.Form:
    if request.param == "Python":
        monkeypatch.setattr(moments, "FORM", moments.PYTHON)
        for name in ("step", "stage"):
            monkeypatch.setattr(Monitor, name, getattr(Monitor, f"_{name}_in_python"))
    elif moments.FORM.name != "C":
        pytest.skip(moments.WHY_NOT_C)
    return moments.FORM


class Watched:
    def __init__(self, rings: Path, *stages: tuple[str, ...], slots: int = 64, **options: bool) -> None:
        self.monitor = Monitor(*stages, rings=rings, slots=slots, **options)
        self.reader = Ring(rings / "rank-0.0.ring")
        self._misused = 0
        self._steps: list[StepRecord] = []
        self._device: list[StepRecord] = []

    def _read(self) -> None:
        batch = self.reader.read()
        assert (batch.missed, batch.torn) == (0, 0)
        self._misused += batch.misuse
        self._steps += batch.steps.records()
        self._device += batch.device.records()

    def steps(self) -> list[StepRecord]:
        """The steps that have come since the last call."""
        self._read()
        found, self._steps = self._steps, []
        return found

    def device(self) -> list[StepRecord]:
        """The device times that have come since the last call."""
        self._read()
        found, self._device = self._device, []
        return found

    def step(self) -> StepRecord:
        (record,) = self.steps()
        return record

    @property
    def misuse(self) -> int:
        """What the writer has counted, and what the steps show that were read."""
        self.reader.status()
        return self.reader.misuse + self._misused

    def close(self) -> None:
        self.monitor.close()
        self.reader.close()


class Account:
    """The accounting written down naively: the innermost open stage has the time, summed at the end.

    A sync stage was delayed by what was outside every stage before its last end, less what delayed the one before it.
    """

    def __init__(self, *sync: str) -> None:
        self.misuse = 0
        self.open: list[str] = []
        self.spent = dict.fromkeys((*STAGES, "other"), 0)
        self.outside = dict.fromkeys(sync, 0)

    def passes(self, ns: int) -> None:
        self.spent[self.open[-1] if self.open else "other"] += ns

    def leave(self, name: str) -> None:
        self.misuse += self.open[-1:] != [name]
        while name in self.open:
            left = self.open.pop()
            if left in self.outside:
                self.outside[left] = self.spent["other"]
            if left == name:
                break

    def record(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        outside_ns: list[int] = []
        for before_ns in self.outside.values():
            outside_ns.append(max(0, before_ns - sum(outside_ns)))
        return tuple(self.spent.values()), tuple(outside_ns)


@pytest.fixture
def watch(tmp_path: Path, form: moments.Form) -> Iterator[Callable[..., Watched]]:
    """Makes monitors that record, each into a fresh directory, each with a reader."""
    made: list[Watched] = []

    def make(*stages: tuple[str, ...]) -> Watched:
        made.append(Watched(Path(tempfile.mkdtemp(dir=tmp_path)), *stages))
        return made[-1]

    yield make
    for watched in made:
        watched.close()
