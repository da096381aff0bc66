"""The job of the overhead bench, under ``sftriage run``: measures, and writes the figures as JSON.

``OVERHEAD_PLAN`` holds the bench's options as JSON, with ``out``, ``requests`` and ``root_pid``. Modes are ways to take
a step: ``off`` without a recorder, with its process frozen, ``control`` the same again, ``none`` with calls that do
nothing, ``on`` with a monitor as `docs/record.md` has it, and ``watched`` with the hooks of ``monitor.watch`` too.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from bench.monitors import STAGES, NoMonitor, TimedMonitor
from bench.processes import beside_ns
from bench.runner import interleaved
from sftriage.agent.executor import MailboxClient
from sftriage.model.captures import ManualRequest
from sftriage.model.windows import plain
from sftriage.trainer.gradients import LEARNING_STEPS
from sftriage.trainer.monitor import Monitor

WIDTH, SMALL_WIDTH, SMALL_BATCH = 512, 8, 4
FIRST_BATCH, BATCH_STEP, SIZING_STEPS = 512, 16, 15
SMALL_STEPS, SMALL_ROUNDS, SMALL_WARM_STEPS = 50, 80, 5
BLOCK_STEPS, ROUNDS, STEADY_STEPS = 10, 16, 80
COLD_DIVISOR = 10
"""Steps of this part of a real one still push everything else out of the caches, and their noise is as much less."""
BEFORE_STEPS, AFTER_STEPS, MOST_STEPS = 50, 20, 400
"""Around a capture, and how long to wait for it."""
STORED_S = 60.0

Times = dict[str, float]


class Training:
    """A model of five layers on one thread, its optimiser, and batches that are made beforehand."""

    def __init__(self, width: int, batch: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(5)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.batch = batch
        self._batches = [torch.randn(batch, width) for _ in range(2)]
        self._next = 0

    def data(self) -> Tensor:
        self._next ^= 1
        return self._batches[self._next]

    def forward(self, batch: Tensor) -> Tensor:
        return self.model(batch).square().mean()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        """A step without a recorder: what all else is compared with."""
        self.forward(self.data()).backward()
        self.update()

    def step_with(self, monitor: Monitor | NoMonitor | TimedMonitor) -> None:
        with monitor.step():
            with monitor.stage("data"):
                batch = self.data()
            with monitor.stage("forward"):
                loss = self.forward(batch)
            with monitor.stage("backward"):
                loss.backward()
            with monitor.stage("optimizer"):
                self.update()


def sized(step_s: float) -> Training:
    trial = Training(WIDTH, FIRST_BATCH)
    usual_s = statistics.median(timed(trial.step)[0] / 1e9 for _ in range(SIZING_STEPS))
    return Training(WIDTH, max(BATCH_STEP, round(FIRST_BATCH * step_s / usual_s / BATCH_STEP) * BATCH_STEP))


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Mode:
    """A way to take a step; ``enter`` before a block and ``leave`` after it are not timed, nor are ``warm_steps``."""

    step: Callable[[], None]
    enter: Callable[[], None] = nothing
    leave: Callable[[], None] = nothing
    warm_steps: int = 1


def modes_of(monitor: Monitor, training: Training) -> dict[str, Mode]:
    agent = os.getppid()
    off = Mode(training.step, partial(os.kill, agent, signal.SIGSTOP), partial(os.kill, agent, signal.SIGCONT))

    def unwatch() -> None:
        # Watching nothing would still cost something at the end of each step.
        recording = monitor._recording
        recording.watch.close()
        recording.set_watch(None)

    on = partial(training.step_with, monitor)
    return {
        "off": off,
        "control": off,
        "none": Mode(partial(training.step_with, NoMonitor())),
        "on": Mode(on),
        "watched": Mode(on, partial(monitor.watch, training.model), unwatch, warm_steps=LEARNING_STEPS + 1),
    }


def timed(act: Callable[[], None], times: int = 1) -> tuple[int, int]:
    """Nanoseconds by the wall clock, and of the processor by the training thread."""
    began_ns, began_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
    for _ in range(times):
        act()
    ended_cpu_ns, ended_ns = time.thread_time_ns(), time.perf_counter_ns()
    return ended_ns - began_ns, ended_cpu_ns - began_cpu_ns


def block(mode: Mode, steps: int, warm_steps: int) -> Times:
    """Mean times of a step in a block."""
    mode.enter()
    try:
        for _ in range(max(warm_steps, mode.warm_steps)):
            mode.step()
        wall_ns, cpu_ns = timed(mode.step, steps)
    finally:
        mode.leave()
    return {"wall_ns": wall_ns / steps, "cpu_ns": cpu_ns / steps}


def turn(mode: Mode) -> Times:
    return dict(zip(("wall_ns", "cpu_ns"), timed(mode.step), strict=True))


def steady(step: Callable[[], None], root_pid: int) -> Times:
    """What runs beside the training thread, as shares of a core: other threads of the trainer, and other processes."""

    def read() -> tuple[int, int, int]:
        beside = beside_ns(root_pid, os.getpid())
        return time.perf_counter_ns(), time.process_time_ns() - time.thread_time_ns(), beside

    step()
    began = read()
    for _ in range(STEADY_STEPS):
        step()
    wall_ns, threads_ns, others_ns = (now - then for now, then in zip(read(), began, strict=True))
    return {"seconds": wall_ns / 1e9, "threads_share": threads_ns / wall_ns, "processes_share": others_ns / wall_ns}


def calls_ns(monitor: Monitor | NoMonitor, training: Training) -> int:
    """What the calls of a monitor take in one real step, with caches as the step's own work leaves them."""
    timed = TimedMonitor(monitor)
    training.step_with(timed)
    return timed.spent_ns


def capture_rounds(monitor: Monitor, training: Training, captures: int, requests: Path) -> list[dict[str, object]]:
    """Steps before, during and after each capture, which is requested through ``sftriage run`` as a person does it.

    ``during`` goes from the request to the answer: waiting, warming up, recording, and exporting beside steps.
    """
    assert monitor.info is not None, "it is active"
    step = partial(training.step_with, monitor)
    rounds: list[dict[str, object]] = []
    with MailboxClient(Path(os.environ["SFTRIAGE_RINGS"]) / monitor.info.file_name("mailbox")) as client:
        for number in range(captures):
            before = [timed(step) for _ in range(BEFORE_STEPS)]
            request(requests, number)
            during: list[tuple[int, int]] = []
            states: list[str] = []
            began = False
            while not began or states[-1] != "idle":
                if len(during) == MOST_STEPS:
                    raise SystemExit(f"capture {number} was not made in {MOST_STEPS} steps")
                during.append(timed(step))
                states.append(client.progress().state)
                began = began or states[-1] != "idle"
            after = [timed(step) for _ in range(AFTER_STEPS)]
            rounds.append({"before": before, "during": during, "states": states, "after": after})
    return rounds


def request(requests: Path, number: int) -> None:
    wanted = ManualRequest(f"overhead-{number}", ranks=(0,), who="bench", reason="what a capture costs")
    requests.mkdir(mode=0o700, exist_ok=True)
    part = requests / f".overhead-{number}"
    part.write_text(json.dumps(plain(wanted)))
    part.replace(requests / f"{wanted.request_id}.json")


def phases_s(run: Path, captures: int) -> list[Times]:
    end_s = time.monotonic() + STORED_S
    while len(found := list(run.glob("captures/[!.]*/manifest.json"))) < captures:
        if time.monotonic() > end_s:
            raise SystemExit(f"{len(found)} of {captures} captures were stored in {STORED_S:.0f} s")
        time.sleep(0.1)
    found.sort(key=lambda path: path.stat().st_mtime)
    return [json.loads(path.read_text())["capture"]["timings_s"] for path in found]


def measure(plan: SimpleNamespace) -> dict[str, object]:
    torch.set_num_threads(1)
    order, monitor = random.Random(plan.seed), Monitor(STAGES)
    if not monitor.active:
        raise SystemExit("the monitor is inert: not under `sftriage run`?")
    step_s = plan.step_ms / 1e3
    real, small = sized(step_s), Training(SMALL_WIDTH, SMALL_BATCH)
    few, some, many = (modes_of(monitor, one) for one in (small, sized(step_s / COLD_DIVISOR), real))

    def blocks(modes: dict[str, Mode], steps: int, rounds: int, warm_steps: int = 1) -> object:
        acts = {name: partial(block, mode, steps, warm_steps) for name, mode in modes.items()}
        return interleaved(acts, rounds, order)

    turns = {name: partial(turn, some[name]) for name in ("off", "none", "on")}
    monitors = {"on": monitor, "none": NoMonitor()}
    calls = {name: partial(calls_ns, one, real) for name, one in monitors.items()}
    whole = {name: many[name] for name in ("off", "control", "on")}
    phases: dict[str, Callable[[], object]] = {
        "small": lambda: blocks(few, SMALL_STEPS, SMALL_ROUNDS, SMALL_WARM_STEPS),
        "cold": lambda: interleaved(turns, plan.turns, order),
        "real": lambda: blocks(whole, BLOCK_STEPS, ROUNDS),
        "steady": lambda: [steady(many["on"].step, plan.root_pid)],
        "calls": lambda: interleaved(calls, plan.call_steps, order),
    }
    if plan.captures:
        requests = Path(plan.requests)
        phases["captures"] = lambda: capture_rounds(monitor, real, plan.captures, requests)
        phases["capture_phases"] = lambda: phases_s(requests.parent, plan.captures)
        phases["small_after"] = phases["small"]
    return {name: phase() for name, phase in phases.items()}


if __name__ == "__main__":
    plan = SimpleNamespace(**json.loads(os.environ["OVERHEAD_PLAN"]))
    Path(plan.out).write_text(json.dumps(measure(plan)))
