"""Monitors to compare a real one with, and a loop of empty steps.

It imports no torch: under valgrind everything is some fifty times as slow.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from time import perf_counter_ns
from typing import Any

from sftriage.trainer.monitor import Monitor

STAGES = ("data", "forward", "backward", "optimizer")


class NoMonitor:
    """Calls that do nothing, where the monitor's would be."""

    _nothing = nullcontext()

    def step(self) -> nullcontext[None]:
        return self._nothing

    def stage(self, name: str) -> nullcontext[None]:
        return self._nothing


class TimedMonitor:
    """A monitor whose calls are timed.

    Attributes:
        spent_ns: their sum.
    """

    def __init__(self, monitor: Any) -> None:
        self._monitor = monitor
        self.spent_ns = 0

    def step(self) -> _Timed:
        return _Timed(self, self._monitor.step)

    def stage(self, name: str) -> _Timed:
        return _Timed(self, partial(self._monitor.stage, name))


class _Timed:
    def __init__(self, of: TimedMonitor, make: Any) -> None:
        self._of, self._make = of, make

    def __enter__(self) -> None:
        before_ns = perf_counter_ns()
        self._inner = self._make()
        self._inner.__enter__()
        self._of.spent_ns += perf_counter_ns() - before_ns

    def __exit__(self, *error: Any) -> None:
        before_ns = perf_counter_ns()
        self._inner.__exit__(*error)
        self._of.spent_ns += perf_counter_ns() - before_ns


def steps(mode: str, count: int, rings: str) -> None:
    monitor = Monitor(STAGES, rings=rings) if mode == "on" else NoMonitor()
    for _ in range(count):
        with monitor.step():
            for name in STAGES:
                with monitor.stage(name):
                    pass
