"""The ranges that a profiler outside sees, and the word that they wait for."""

import sys
from types import SimpleNamespace

import pytest

from sftriage.errors import CaptureError
from sftriage.profiling.session import NvtxSession


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
