"""A loop of empty steps, recorded or not. It imports no torch: valgrind makes everything some fifty times as slow."""

from __future__ import annotations

from contextlib import nullcontext

from sftriage.recorder import Monitor

STAGES = ("data", "forward", "backward", "optimizer")


class NoMonitor:
    """Calls that do nothing, where the monitor's would be."""

    _nothing = nullcontext()

    def step(self) -> nullcontext[None]:
        return self._nothing

    def stage(self, name: str) -> nullcontext[None]:
        return self._nothing


def steps(mode: str, count: int, rings: str) -> None:
    monitor = Monitor(STAGES, rings=rings) if mode == "on" else NoMonitor()
    for _ in range(count):
        with monitor.step():
            for name in STAGES:
                with monitor.stage(name):
                    pass
