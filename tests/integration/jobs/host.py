"""One host of a job, in a process of its own: its ranks, and its agent, on a clock that is `offset` seconds ahead.

``host.py OFFSET_S DIRECTORY STORE``: reads pickled calls, ``(name, arguments)``, from standard input, and answers each
with a pickle on standard output. Time passes only where a call says so.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

OFFSET_S, DIRECTORY, STORE = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
EPOCH_NS = 1_700_000_000_000_000_000


class Now:
    """The job's time, which is wall time, too; the monotonic clock is as far from it as this host was told."""

    ns = 10**9


time.monotonic_ns = lambda: OFFSET_S * 10**9 + Now.ns
time.monotonic = lambda: time.monotonic_ns() / 1e9
time.time_ns = lambda: EPOCH_NS + Now.ns

# Not before the clock is the host's: modules take it by its name.
from sftriage.agent.agent import Agent  # noqa: E402
from sftriage.recorder import Monitor  # noqa: E402
from sftriage.traces.store import LocalStore  # noqa: E402

STAGES = ("data", "forward", "backward", "optimizer")


class Host:
    """The ranks of one host, and its agent. What the ranks do is worked out for all of the job, and done for these."""

    def __init__(self) -> None:
        made = {name: DIRECTORY / name for name in ("rings", "steps", "spool")}
        for path in made.values():
            path.mkdir(parents=True)
        self._places = made
        self._agent = Agent(**made, store=LocalStore(STORE), job="job", run="run-1")
        self._monitors: dict[int, Monitor] = {}
        self._step = 0

    def begin(self, hosts: dict[int, str], world_size: int) -> None:
        """Start the monitors of some ranks."""
        own = {"rings": self._places["rings"], "spool": self._places["spool"], "world_size": world_size}
        self._monitors = {r: Monitor(STAGES, ("backward",), rank=r, host=name, **own) for r, name in hosts.items()}
        self._world_size = world_size

    def train(self, steps: int, late_ms: dict[int, int]) -> None:
        """Take steps; ranks may be late in data."""
        for number in range(self._step, self._step + steps):
            began_ns = Now.ns
            local_us = [
                (
                    4000 + (number * 7 + rank * 3) % 5 * 100 + late_ms.get(rank, 0) * 1000,
                    9000 + (number + rank) % 3 * 100,
                )
                for rank in range(self._world_size)
            ]
            arrived_us = max(map(sum, local_us))
            for rank, monitor in self._monitors.items():
                Now.ns = began_ns
                took_us = (*local_us[rank], 12_000 + arrived_us - sum(local_us[rank]), 5000)
                with monitor.step(number):
                    for stage, stage_us in zip(STAGES, took_us, strict=True):
                        with monitor.stage(stage):
                            Now.ns += stage_us * 1000
            Now.ns = began_ns + (arrived_us + 17_000) * 1000
        self._step += steps

    def stand(self, missing: int) -> None:
        """Begin a step that does not end: one rank stays in data, the others wait for it."""
        for rank, monitor in self._monitors.items():
            monitor.step(self._step).__enter__()
            monitor.stage("data" if rank == missing else "backward").__enter__()

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        Now.ns += int(seconds * 10**9)

    def import_torch(self) -> None:
        """Have what a trainer has."""
        import torch  # noqa: F401

    def written(self) -> None:
        """Wait until the traces that ranks write out are written."""
        for thread in threading.enumerate():
            if thread.name == "sftriage-export":
                thread.join()

    def answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """What a call comes to."""
        if name == "telemetry":
            return self._agent.telemetry
        of = self._agent if name in ("rows", "statuses", "want", "reports", "gpus") else self
        return getattr(of, name)(*arguments)


def main() -> None:
    """Answer until nobody asks any more."""
    host = Host()
    # What is printed must not be in between the answers.
    asked, answers, sys.stdout = sys.stdin.buffer, sys.stdout.buffer, sys.stderr
    while True:
        try:
            name, arguments = pickle.load(asked)
        except EOFError:
            return
        pickle.dump(host.answer(name, arguments), answers)
        answers.flush()


if __name__ == "__main__":
    main()
