"""An agent on real rings: monitors in this process write them, as trainers would."""

from types import SimpleNamespace

import pytest

from sftriage.agent import agent as module
from sftriage.agent.agent import Agent
from sftriage.traces.store import LocalStore
from sftriage.trainer.monitor import Monitor


@pytest.fixture
def places(tmp_path):
    """Where rings, kept steps and traces lie."""
    made = {name: tmp_path / name for name in ("rings", "steps", "spool")}
    for path in made.values():
        path.mkdir()
    return made


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(module, "monotonic", lambda: clock.now_s)
    return clock


@pytest.fixture
def agent(places, clock, tmp_path):
    agent = Agent(places["rings"], tmp_path, LocalStore(tmp_path), job="job", run="run-1")
    yield agent
    agent.close()


@pytest.fixture
def monitor(places):
    """Make the monitor of a rank; all of them are closed in the end."""
    made: list[Monitor] = []

    def monitor(rank: int, world_size: int = 2, **options: object) -> Monitor:
        options = {"stages": ("data", "backward"), "sync": ("backward",), "spool": places["spool"], **options}
        made.append(Monitor(rank=rank, world_size=world_size, rings=places["rings"], **options))
        return made[-1]

    yield monitor
    for one in made:
        one.close()
