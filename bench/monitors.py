"""Monitors to compare a real one with, and a loop of empty steps.

It imports no torch: under valgrind everything is some fifty times as slow.
"""

from __future__ import annotations

from contextlib import nullcontext
from time import monotonic_ns
from types import TracebackType

from sftriage.recorder import Monitor

STAGES = ("data", "forward", "backward", "optimizer")


class NoMonitor:
    """Calls that do nothing, where the monitor's would be."""

    _nothing = nullcontext()

    def step(self) -> nullcontext[None]:
        return self._nothing

    def stage(self, name: str) -> nullcontext[None]:
        return self._nothing


class ClockMonitor:
    """Calls that read the clock and keep the result: the least that a recorder written in Python can do."""

    def __init__(self) -> None:
        kept_ns = [0] * (2 * len(STAGES) + 2)
        *stages, self._step = (_Clock(kept_ns, 2 * index) for index in range(len(STAGES) + 1))
        self._stages = dict(zip(STAGES, stages, strict=True))

    def step(self) -> _Clock:
        return self._step

    def stage(self, name: str) -> _Clock:
        return self._stages[name]


class _Clock:
    __slots__ = ("_at", "_kept_ns")

    def __init__(self, kept_ns: list[int], at: int) -> None:
        self._kept_ns, self._at = kept_ns, at

    def __enter__(self) -> None:
        self._kept_ns[self._at] = monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept_ns[self._at + 1] = monotonic_ns()


def steps(mode: str, count: int, rings: str) -> None:
    monitor = Monitor(STAGES, rings=rings) if mode == "on" else NoMonitor()
    for _ in range(count):
        with monitor.step():
            for name in STAGES:
                with monitor.stage(name):
                    pass
