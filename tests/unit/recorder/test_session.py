"""Preparing torch's profiler imports nothing: with a stand-in for torch. The real one is in tests/integration."""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace

import pytest

from sftriage.recorder.session import _importing_nothing

PROFILER = """
class Profiler:
    cudagraphs = None
    def prepare_trace(self, *, times=1):
        if hasattr(torch, "_inductor"):
            self.cudagraphs = torch._inductor.config.cudagraphs
        self.made = (torch.made, times)
"""


class Torch(ModuleType):
    """Imports on being asked, as torch does."""

    asked: list[str]


@pytest.fixture
def torch(monkeypatch) -> Torch:
    module = Torch("torch")
    module.asked = []
    module.__dict__["made"] = "by torch"

    def imports(name: str) -> object:
        module.asked.append(name)
        return SimpleNamespace(config=SimpleNamespace(cudagraphs=True))

    module.__dict__["__getattr__"] = imports
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def profiler(torch: object):
    names = {"torch": torch}
    exec(PROFILER, names)
    return names["Profiler"]()


def test_torchs_own_code_runs_and_imports_nothing(torch):
    # GIVEN a torch that would import its compiler THEN it is prepared by torch's own code, which finds none
    made = profiler(torch)
    _importing_nothing(made.prepare_trace)()
    assert (made.made, made.cudagraphs, torch.asked) == (("by torch", 1), None, [])


def test_what_the_job_has_imported_itself_is_seen(torch):
    # GIVEN a job that uses the compiler THEN what it has set is heeded
    torch.__dict__["_inductor"] = SimpleNamespace(config=SimpleNamespace(cudagraphs=True))
    made = profiler(torch)
    _importing_nothing(made.prepare_trace)()
    assert (made.made, made.cudagraphs) == (("by torch", 1), True)


def test_a_compiler_that_is_still_being_imported_elsewhere_is_not_waited_for(torch):
    torch.__dict__["_inductor"] = SimpleNamespace()
    made = profiler(torch)
    _importing_nothing(made.prepare_trace)()
    assert (made.made, made.cudagraphs) == (("by torch", 1), None)


@pytest.mark.parametrize("other", ["a builtin", "wrapped", "of another module"])
def test_what_is_no_method_of_torchs_is_called_as_it_is(torch, other):
    made = profiler(torch if other != "of another module" else SimpleNamespace(made="elsewhere"))
    method = {
        "a builtin": [].clear,
        "wrapped": functools.partial(made.prepare_trace),
        "of another module": made.prepare_trace,
    }[other]
    assert _importing_nothing(method) is method
