"""Each tool as its documentation says to use it, with a switch: what differs between a step with it and one without."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.overhead_modes.monitored import NoMonitor
from bench.overhead_modes.training import STAGES, Training
from sftriage.seams.patches import RINGS_ENV, Seams

AUTO = "sftriage --auto"
STRIDE_STEPS = 80
"""Until then each step looks whether a GPU is in use, and the seams are not in their stride."""


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Mode:
    """One way to take a step.

    Attributes:
        step: a step.
        enter: before the block, untimed.
        leave: after it, untimed.
        begin: at the start of the block, timed.
        finish: at its end, timed.
        warm_steps: steps after `enter` that are not timed.
    """

    step: Callable[[], None]
    enter: Callable[[], None] = nothing
    leave: Callable[[], None] = nothing
    begin: Callable[[], None] = nothing
    finish: Callable[[], None] = nothing
    warm_steps: int = 1


class Sftriage:
    """A monitor as `docs/record.md` has it, in a job under ``sftriage run``, whose process is frozen in blocks without.

    ``control`` is ``off`` a second time, ``none`` has calls that do nothing. ``watched`` has the hooks of
    ``monitor.watch`` too.
    """

    def __init__(self) -> None:
        from sftriage.recorder import Monitor

        self.monitor = Monitor(STAGES)
        if not self.monitor.active:
            raise SystemExit("the monitor is inert: not under `sftriage run`?")
        self._agent = os.getppid()

    @staticmethod
    def step_of(monitor: Any, training: Training) -> Callable[[], None]:
        def step() -> None:
            with monitor.step():
                with monitor.stage("data"):
                    batch = training.data()
                with monitor.stage("forward"):
                    loss = training.forward(batch)
                with monitor.stage("backward"):
                    loss.backward()
                with monitor.stage("optimizer"):
                    training.optimizer.step()
                    training.optimizer.zero_grad()

        return step

    def modes(self, training: Training) -> dict[str, Mode]:
        from sftriage.recorder.gradients import LEARNING_STEPS

        step = self.step_of(self.monitor, training)
        off = Mode(training.step, self.freeze, self.thaw)

        def watch() -> None:
            self.monitor.watch(training.model)

        def unwatch() -> None:
            # A watch of nothing would go on at the end of each step.
            recording = self.monitor._recording
            recording.watch.close()
            recording.set_watch(None)

        return {
            "off": off,
            "control": off,
            "none": Mode(self.step_of(NoMonitor(), training)),
            "on": Mode(step),
            "watched": Mode(step, watch, unwatch, warm_steps=LEARNING_STEPS + 1),
        }

    def freeze(self) -> None:
        os.kill(self._agent, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._agent, signal.SIGCONT)


class Auto:
    """The seams of ``sftriage run --auto``, which nothing in the script tells; without, torch has its own back.

    Nobody reads what it records. Batches are made beforehand, so that the seam of a loader is not in it
    (`bench/seams_cost.py` has that one).
    """

    def __init__(self) -> None:
        self._seams: Seams | None = None

    def modes(self, training: Training) -> dict[str, Mode]:
        def enter() -> None:
            # (each block is a rank of its own)
            os.environ[RINGS_ENV] = tempfile.mkdtemp(prefix="overhead-", dir="/dev/shm")
            self._seams = Seams()
            self._seams.install()

        def leave() -> None:
            assert self._seams is not None, "enter() comes first"
            if not self._seams.steps.rounds or self._seams.failed:
                raise SystemExit(f"the seams saw no steps: {self._seams.failed}")
            self._seams.stop()
            shutil.rmtree(os.environ.pop(RINGS_ENV))

        off = Mode(training.step)
        return {"off": off, "control": off, "on": Mode(training.step, enter, leave, warm_steps=STRIDE_STEPS)}


class TraceML:
    """``traceml run`` with ``traceml.init(mode="auto")`` and ``trace_step``, its documentation's plain PyTorch loop.

    Its patches and threads stay when a step is not traced, so what they cost is in its ``off`` too.
    """

    def __init__(self) -> None:
        import traceml_ai as traceml

        traceml.init(mode="auto")
        self._trace_step = traceml.trace_step

    def modes(self, training: Training) -> dict[str, Mode]:
        trace_step = self._trace_step

        def step() -> None:
            with trace_step(training.model):
                training.step()

        return {"off": Mode(training.step), "control": Mode(training.step), "on": Mode(step)}


class Gpuprof:
    """``with gpuprof.profile(...)`` around the loop, its documentation's quick start; the summary is not printed."""

    def __init__(self) -> None:
        import gpuprof

        self._profile = gpuprof.profile
        self._stack = contextlib.ExitStack()
        self._database = str(Path(tempfile.mkdtemp(prefix="overhead-")) / "gpuprof.db")

    def modes(self, training: Training) -> dict[str, Mode]:
        def enter() -> None:
            self._stack.enter_context(self._profile("overhead", db_path=self._database, summary=False))

        off = Mode(training.step)
        return {"off": off, "control": off, "on": Mode(training.step, enter, self._stack.close)}


class TorchProfiler:
    """torch.profiler without a schedule, on the processor's activities, exported after each block and begun again."""

    def __init__(self) -> None:
        self._trace = str(Path(tempfile.mkdtemp(prefix="overhead-")) / "trace.json")
        self._profiler: torch.profiler.profile | None = None

    def modes(self, training: Training) -> dict[str, Mode]:
        def begin() -> None:
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._profiler.start()

        def finish() -> None:
            assert self._profiler is not None, "begin() comes first"
            self._profiler.stop()
            self._profiler.export_chrome_trace(self._trace)

        off = Mode(training.step)
        return {"off": off, "control": off, "on": Mode(training.step, begin=begin, finish=finish)}


TOOLS = {"sftriage": Sftriage, AUTO: Auto, "traceml-ai": TraceML, "gpuprof": Gpuprof, "torch.profiler": TorchProfiler}
