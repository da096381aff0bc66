"""Marks for a profiler that runs outside the trainer: Nsight Systems sees NVTX ranges, and starts and stops on one.

NVTX is torch's own where torch was built with CUDA, else the ``nvtx`` package if the job has it; it is looked for when
a capture asks for it, not before. All ranges are of the default domain: torch's NVTX has no other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from time import monotonic, monotonic_ns, time_ns

from sftriage.errors import CaptureError

RANGE = "SFT_CAPTURE"
"""The range around the steps of a capture: ``nsys --capture-range=nvtx --nvtx-capture=SFT_CAPTURE@*`` waits for it."""


class NvtxSession:
    """The ranges of one capture: one around it all, one a step, one a stage. Named as in a torch trace.

    Attributes:
        steps: how many steps have been marked.
        first_step: the first step that was marked.
        last_step: the last one.
        timings_s: seconds between the first mark and the last, as ``run``.
        clock: ``mono_ns`` and ``wall_ns``, read together at the first mark.

    Raises:
        CaptureError: there is no NVTX in this process.
    """

    def __init__(self) -> None:
        self._push, self._pop = _backend()
        self._open = 0
        self._stages = 0
        self._started_s = 0.0
        self.steps = 0
        self.first_step: int | None = None
        self.last_step: int | None = None
        self.timings_s: dict[str, float] = {}
        self.clock: dict[str, int] = {}

    def prepare(self) -> None:
        """Nothing: ranges cost nothing while no profiler listens."""

    def start(self, capture_id: str, first_step: int, labels: Mapping[str, str]) -> None:
        """Open the range around the capture. What it is called is agreed with nsys: there is no room for the rest."""
        self.clock = {"mono_ns": monotonic_ns(), "wall_ns": time_ns()}
        self._started_s = monotonic()
        self.first_step = first_step
        self._begin(RANGE)

    def begin_step(self, number: int) -> None:
        """Open a step's range."""
        self._begin(f"ProfilerStep#{number}")
        self.last_step = number

    def end_step(self) -> None:
        """Close the step's range."""
        self._close_to(1)
        self.steps += 1

    def follow(self, stages: Sequence[str]) -> None:
        """Open and close ranges until those of these stages are open, outermost first."""
        step = self._open - self._stages
        self._close_to(step + min(self._stages, len(stages)))
        for stage in stages[self._stages :]:
            self._begin(f"sftriage:{stage}")
            self._stages += 1

    def stop(self) -> None:
        """Close every range. Does nothing where none is open."""
        if self._open:
            self.timings_s["run"] = monotonic() - self._started_s
        self._close_to(0)

    def _begin(self, name: str) -> None:
        self._push(name)
        self._open += 1

    def _close_to(self, depth: int) -> None:
        while self._open > depth:
            self._pop()
            self._open -= 1
            self._stages = max(0, self._stages - 1)


def _backend() -> tuple[Callable[[str], object], Callable[[], object]]:
    """What opens a range on this thread, and what closes the innermost one."""
    if hasattr(getattr(sys.modules.get("torch"), "_C", None), "_nvtx"):
        torch_nvtx = import_module("torch.cuda.nvtx")
        return torch_nvtx.range_push, torch_nvtx.range_pop
    try:
        package = import_module("nvtx")
        return package.push_range, package.pop_range
    except (ImportError, AttributeError) as error:
        why = "torch has none in this build, and the nvtx package is not there"
        raise CaptureError(f"no NVTX in the trainer: {why}") from error
