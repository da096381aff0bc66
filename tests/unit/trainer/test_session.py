"""Sessions, with stand-ins for torch and NVTX (the real ones are in tests/integration), the guard, and the spool."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import ModuleType, SimpleNamespace

import pytest

from sftriage.base.files import MODE_ENV
from sftriage.errors import CaptureError
from sftriage.model.captures import CaptureRequest
from sftriage.trainer.session import NvtxSession, ProfilerGuard, TorchSession, ends_whole, write_trace

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
def test_a_compiler_that_the_job_does_not_use_is_not_imported(prepared, compiler):
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
    with pytest.raises(CaptureError, match="samples_per_second 0: must be 1 to 1000"):
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
    while not session.sampler._stacks._rows:
        assert monotonic() < end_s
    # WHEN it is stopped and stored THEN the stacks are there, and it says why there is no trace
    session.stop()
    assert session.store(tmp_path, request) == (0, "no trace: the profiler could not be stopped: division by zero")
    assert [path.name for path in tmp_path.iterdir()] == ["c-1.stacks.speedscope.json"]
    # AND without stacks it is an error
    with pytest.raises(CaptureError, match=r"no trace: .*; no stacks: "):
        session.store(tmp_path, replace(request, max_bytes=10))


@pytest.fixture
def fake_torch(monkeypatch):
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
def guard(fake_torch):
    made = ProfilerGuard()
    made.install()
    return made


def test_the_guard_ignores_our_calls_and_finds_a_profiler_that_began_before_it(fake_torch, guard):
    with guard.ours():
        fake_torch.module._prepare_profiler()
    assert guard.busy() is None
    fake_torch.enabled = True
    assert guard.busy() == "a profiler is already running in this process"


def test_a_capture_that_cannot_make_way_does_not_break_the_job(fake_torch, guard, caplog):
    def broken() -> None:
        raise RuntimeError("stuck")

    guard.hold(broken)
    fake_torch.module._prepare_profiler()
    assert fake_torch.calls == ["_prepare_profiler"]
    assert "stuck" in caplog.text


def test_only_the_holder_gives_the_profiler_back(guard):
    guard.hold(test_only_the_holder_gives_the_profiler_back)
    guard.release(lambda: None)
    assert guard.busy() is not None


def test_a_profiler_that_could_not_be_prepared_is_not_held(fake_torch, monkeypatch):
    def broken() -> None:
        raise RuntimeError("CUPTI")

    monkeypatch.setattr(fake_torch.module, "_prepare_profiler", broken)
    guard = ProfilerGuard()
    guard.install()
    with pytest.raises(RuntimeError, match="CUPTI"):
        fake_torch.module._prepare_profiler()
    assert guard.busy() is None


def test_wrapping_twice_wraps_once_and_without_torch_not_at_all(fake_torch, monkeypatch):
    guard = ProfilerGuard()
    monkeypatch.delitem(sys.modules, "torch.autograd.profiler")
    guard.install()
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", fake_torch.module)
    guard.install()
    wrapped = fake_torch.module._prepare_profiler
    guard.install()
    assert fake_torch.module._prepare_profiler is wrapped


@pytest.fixture
def ranges(monkeypatch):
    """An nvtx package that keeps the tree of ranges: opened ones, innermost last, and all that were closed."""
    seen = SimpleNamespace(open=[], closed=[])
    package = SimpleNamespace(
        push_range=seen.open.append, pop_range=lambda: seen.closed.append("/".join(seen.open)) or seen.open.pop()
    )
    monkeypatch.setitem(sys.modules, "nvtx", package)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return seen


def test_the_ranges_of_a_capture_lie_in_each_other(ranges):
    session = NvtxSession()
    session.prepare()
    session.start("c-1", 7, {})
    for step in (7, 8):
        session.begin_step(step)
        for stages in (["data"], [], ["forward"], ["forward", "inner"], ["forward"], []):
            session.follow(stages)
        session.end_step()
    session.stop()
    inside = ("/sftriage:data", "/sftriage:forward/sftriage:inner", "/sftriage:forward", "")
    steps = [f"SFT_CAPTURE/ProfilerStep#{step}{name}" for step in (7, 8) for name in inside]
    assert (ranges.open, ranges.closed) == ([], [*steps, "SFT_CAPTURE"])
    assert (session.steps, session.first_step, session.last_step) == (2, 7, 8)
    assert (set(session.timings_s), set(session.clock)) == ({"run"}, {"mono_ns", "wall_ns"})


@pytest.mark.parametrize("stages", [[], ["data"], ["data", "inner"]])
def test_a_capture_that_ends_in_the_middle_leaves_no_range_open(ranges, stages):
    session = NvtxSession()
    session.start("c-1", 7, {})
    session.begin_step(7)
    session.follow(stages)
    session.stop()
    assert ranges.open == []
    session.stop()
    assert len(ranges.closed) == 2 + len(stages)


@pytest.mark.parametrize("package", [None, SimpleNamespace()])
def test_without_nvtx_the_reason_says_so(monkeypatch, package):
    monkeypatch.setitem(sys.modules, "nvtx", package)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(CaptureError, match=r"^no NVTX in the trainer"):
        NvtxSession()


def test_torchs_own_nvtx_comes_first(monkeypatch, ranges):
    # GIVEN a torch that was built with CUDA
    seen = []
    own = SimpleNamespace(range_push=seen.append, range_pop=lambda: seen.append("pop"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=SimpleNamespace(_nvtx=object())))
    monkeypatch.setitem(sys.modules, "torch.cuda.nvtx", own)
    session = NvtxSession()
    session.start("c-1", 7, {})
    session.stop()
    assert (seen, ranges.closed) == (["SFT_CAPTURE", "pop"], [])


TRACE = b'{"traceEvents": [{"name": "x"}],"traceName": "a]b.json.partial", "displayTimeUnit": "ms"}\n'


def writes(data: bytes):
    def export(path: str) -> None:
        # As Kineto does: a file of its own, with the process's umask.
        Path(path).unlink(missing_ok=True)
        Path(path).write_bytes(data)

    return export


@pytest.mark.parametrize(("allowed", "mode"), [("", 0o600), ("0666", 0o666)])
def test_a_whole_trace_takes_its_name_and_is_private_unless_files_are_for_others(tmp_path, monkeypatch, allowed, mode):
    monkeypatch.setenv(MODE_ENV, allowed)
    assert write_trace(writes(TRACE), tmp_path, "c-1", 1000) == len(TRACE)
    (path,) = tmp_path.iterdir()
    assert (path.name, path.read_bytes(), path.stat().st_mode & 0o777) == ("c-1.json", TRACE, mode)


def raises(path: str) -> None:
    raise RuntimeError("in Kineto")


@pytest.mark.parametrize(
    ("export", "max_bytes", "error", "reason"),
    [
        # A disk that was full at any moment.
        *((writes(TRACE[:length]), 1000, CaptureError, "not written whole") for length in range(0, len(TRACE) - 2, 5)),
        (writes(TRACE), len(TRACE) - 1, CaptureError, f"{len(TRACE)} bytes; {len(TRACE) - 1} are allowed"),
        (raises, 1000, RuntimeError, "in Kineto"),
        (lambda path: Path(path).unlink(), 1000, CaptureError, "No such file"),
    ],
)
def test_a_trace_that_is_not_whole_or_too_large_leaves_nothing(tmp_path, export, max_bytes, error, reason):
    with pytest.raises(error, match=reason):
        write_trace(export, tmp_path, "c-1", max_bytes)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_never_takes_the_place_of_another_nor_makes_its_directory(tmp_path):
    with pytest.raises(CaptureError, match="cannot be written: No such file"):
        write_trace(writes(TRACE), tmp_path / "gone", "c-1", 1000)
    (tmp_path / "c-1.json").write_bytes(b"earlier")
    (tmp_path / "c-2.json.partial").write_bytes(b"of one that died")
    for capture_id in ("c-1", "c-2"):
        with pytest.raises(CaptureError):
            write_trace(writes(TRACE), tmp_path, capture_id, 1000)
    assert (tmp_path / "c-1.json").read_bytes() == b"earlier"
    assert (tmp_path / "c-2.json.partial").read_bytes() == b"of one that died"


@pytest.mark.parametrize("path", ['a "b" c', "C:\\dir", "end\\", '{"x": 1'])
def test_an_unescaped_path_in_a_trace_does_not_fail_it(tmp_path, path):
    whole = b'{"traceEvents": [{"name": "x"}\n  ],"traceName": "' + path.encode() + b'" }'
    for length in range(len(whole) - 1):
        (tmp_path / "t.json").write_bytes(whole[:length])
        assert not ends_whole(tmp_path / "t.json")
    (tmp_path / "t.json").write_bytes(whole)
    assert ends_whole(tmp_path / "t.json")


@pytest.mark.parametrize("events", [0, 1000])
def test_the_end_of_a_trace_is_found_at_any_length(tmp_path, events):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [{"name": "x" * 50}] * events, "traceName": "n", "more": {"a": [1]}}))
    assert ends_whole(path)
