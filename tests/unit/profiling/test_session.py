"""Preparing torch's profiler does not import its compiler: with stand-ins. The real ones are in tests/integration."""

from __future__ import annotations

import sys
from dataclasses import replace
from time import monotonic
from types import ModuleType

import pytest

from sftriage.errors import CaptureError
from sftriage.model.captures import CaptureRequest
from sftriage.profiling.guard import ProfilerGuard
from sftriage.profiling.session import TorchSession

torch = pytest.importorskip("torch")
profiler = pytest.importorskip("torch.profiler")


class Profile:
    """Both of torch's profiles: the one that a session holds, and the one that this holds."""

    use_device = "a device"

    def __init__(self, **settings: object) -> None:
        self.settings = settings
        self.profiler: Profile | None = None
        self.called: list[str] = []

    def prepare_trace(self) -> None:
        self.called.append("prepare_trace")

    def _prepare_trace(self) -> None:
        self.called.append("_prepare_trace")


@pytest.fixture
def prepared(monkeypatch, make_info):
    """Prepares a session with what the job has of the compiler."""
    monkeypatch.setattr(profiler, "_KinetoProfile", Profile)
    monkeypatch.setattr(sys.modules["torch.autograd.profiler"], "profile", Profile)

    def prepare(compiler: ModuleType | None) -> Profile:
        if compiler is None:
            monkeypatch.delitem(vars(torch), "_inductor", raising=False)
        else:
            monkeypatch.setitem(vars(torch), "_inductor", compiler)
        session = TorchSession(make_info(), {"with_stack": True}, ProfilerGuard())
        session.prepare()
        return session._profile

    return prepare


@pytest.mark.parametrize("compiler", [None, ModuleType("torch._inductor")], ids=["not imported", "being imported"])
def test_a_compiler_that_the_job_does_not_use_is_neither_imported_nor_waited_for(prepared, compiler):
    # GIVEN a job that has not imported torch's compiler, or has not done so yet WHEN the profiler is prepared
    profile = prepared(compiler)
    # THEN it is without torch's own call, which would import that, and with the same settings
    assert profile.called == []
    assert profile.profiler.called == ["_prepare_trace"]
    assert profile.profiler.settings == {"use_kineto": True, "use_device": "a device", "with_stack": True}


def test_where_the_job_uses_the_compiler_torchs_own_call_heeds_its_settings(prepared):
    compiler = ModuleType("torch._inductor")
    vars(compiler)["config"] = ModuleType("torch._inductor.config")
    profile = prepared(compiler)
    assert (profile.called, profile.profiler) == (["prepare_trace"], None)


def test_a_capture_says_how_often_stacks_are_sampled(make_info):
    # GIVEN what a policy asks for WHEN a session is made of it THEN its sampler has that, its profiler nothing of it
    options = {"sample_stacks": True, "samples_per_second": 50}
    session = TorchSession(make_info(), options, ProfilerGuard(), sample=True)
    assert session.sampler._period_s == 0.02
    assert session._options == {}
    # AND what is out of bounds is refused
    with pytest.raises(CaptureError, match="samples_per_second 0: 1 to 1000"):
        TorchSession(make_info(), {"samples_per_second": 0}, ProfilerGuard())


def test_stacks_are_kept_where_the_profiler_does_not_stop_or_its_trace_is_not_written(tmp_path, make_info):
    # GIVEN a session whose stacks were sampled, and whose profiler breaks
    options = {"sample_stacks": True}
    request = CaptureRequest("c-1", 0, "torch", 1, 0, max_seconds=5, max_bytes=10**6, options=options)
    session = TorchSession(make_info(), options, ProfilerGuard(), sample=True)
    session._profile.stop_trace = lambda: 1 / 0
    session._prepared, session.first_step = True, 3
    session.sampler.start()
    end_s = monotonic() + 20.0
    while not len(session.sampler):
        assert monotonic() < end_s
    # WHEN it is stopped and stored THEN the stacks are there, and it says why there is no trace
    session.stop()
    assert session.store(tmp_path, request) == (0, "no trace: the profiler could not be stopped: division by zero")
    assert [one.name for one in tmp_path.iterdir()] == ["c-1.stacks.speedscope.json"]
    # AND without stacks it is an error
    with pytest.raises(CaptureError, match=r"no trace: .*; no stacks: "):
        session.store(tmp_path, replace(request, max_bytes=10))
