"""The guard against a stand-in for torch: three functions and a module to find them in."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from sftriage.profiling.guard import ProfilerGuard


@pytest.fixture
def torch(monkeypatch):
    """What the guard can see of torch; ``calls`` lists what got through to it."""
    module = ModuleType("torch.autograd.profiler")
    calls: list[str] = []
    for name in ("_prepare_profiler", "_enable_profiler", "_disable_profiler"):
        setattr(module, name, lambda *args, name=name, **kwargs: calls.append(name) or (args, kwargs))
    state = SimpleNamespace(module=module, calls=calls, enabled=False)
    root = ModuleType("torch")
    root._C = SimpleNamespace(_autograd=SimpleNamespace(_profiler_enabled=lambda: state.enabled))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", root)
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", module)
    return state


@pytest.fixture
def guard(torch):
    made = ProfilerGuard()
    made.install()
    return made


def test_the_jobs_own_profiler_is_seen_from_its_warm_up_to_its_end(torch, guard):
    assert guard.busy() is None
    # WHEN the job prepares a profiler THEN the process's one profiler is taken, and arguments pass through untouched
    assert torch.module._prepare_profiler(1, x=2) == ((1,), {"x": 2})
    assert guard.busy() == "a profiler is already running in this process"
    torch.module._enable_profiler()
    assert guard.busy() is not None
    torch.module._disable_profiler()
    assert guard.busy() is None
    assert torch.calls == ["_prepare_profiler", "_enable_profiler", "_disable_profiler"]


def test_our_own_calls_are_not_the_jobs_and_one_that_began_before_the_guard_is_seen_by_asking_torch(torch, guard):
    with guard.ours():
        torch.module._prepare_profiler()
    assert guard.busy() is None
    torch.enabled = True
    assert guard.busy() == "a profiler is already running in this process"


def test_a_capture_makes_way_before_the_jobs_profiler_starts(torch, guard):
    # GIVEN a capture that holds the profiler
    def make_way() -> None:
        assert torch.calls == []
        torch.calls.append("ours stopped")
        guard.release(make_way)

    guard.hold(make_way)
    assert guard.busy() == "another capture is under way in this process"
    # WHEN the job prepares its own THEN the capture is stopped first
    torch.module._prepare_profiler()
    torch.module._enable_profiler()
    assert torch.calls == ["ours stopped", "_prepare_profiler", "_enable_profiler"]


def test_a_capture_that_cannot_make_way_does_not_break_the_job(torch, guard, caplog):
    def broken() -> None:
        raise RuntimeError("stuck")

    guard.hold(broken)
    torch.module._prepare_profiler()
    assert torch.calls == ["_prepare_profiler"]
    assert "stuck" in caplog.text


def test_only_the_holder_gives_the_profiler_back(guard):
    guard.hold(test_only_the_holder_gives_the_profiler_back)
    guard.release(lambda: None)
    assert guard.busy() is not None


def test_a_profiler_that_could_not_be_prepared_is_not_held(torch, monkeypatch):
    def broken() -> None:
        raise RuntimeError("CUPTI")

    monkeypatch.setattr(torch.module, "_prepare_profiler", broken)
    guard = ProfilerGuard()
    guard.install()
    with pytest.raises(RuntimeError, match="CUPTI"):
        torch.module._prepare_profiler()
    assert guard.busy() is None


def test_wrapping_twice_wraps_once_and_without_torch_not_at_all(torch, monkeypatch):
    guard = ProfilerGuard()
    monkeypatch.delitem(sys.modules, "torch.autograd.profiler")
    guard.install()
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", torch.module)
    guard.install()
    wrapped = torch.module._prepare_profiler
    guard.install()
    assert torch.module._prepare_profiler is wrapped
