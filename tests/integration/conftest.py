"""Real jobs, in processes of their own that end with their test."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sftriage.policy.in_force import find
from tests.integration.browsing import browser, page, serve  # noqa: F401 (fixtures)
from tests.integration.kube import laptop, namespace, server, stored  # noqa: F401 (fixtures)
from tests.integration.processes import ended, output_of, sftriage_process
from tests.unit.conftest import sftriage  # noqa: F401 (a fixture)

# Whoever starts pytest in the background of a script has it ignore Ctrl-C, and with it all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def own_environment(directory: Path) -> dict[str, str]:
    """An environment in which a run's notes, and torchrun's logs, lie in a directory."""
    own = {f"XDG_{what}_HOME": str(directory / what.lower()) for what in ("STATE", "CACHE")}
    own["PET_LOG_DIR"] = str(directory / "cache" / "torchrun")
    return {**os.environ, **own, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    return own_environment(tmp_path)


@pytest.fixture(scope="session")
def moto() -> Iterator[Any]:
    from tests.integration.s3 import served

    with served() as found:
        yield found


class Demonstrated(NamedTuple):
    """A demo that has ended: where its run is, what it said, and from which of its steps on rank 2 was slow in data."""

    run: Path
    said: str
    steps: int
    fault_step: int


@pytest.fixture(scope="session")
def demonstrated(tmp_path_factory) -> Demonstrated:
    """A real job of four ranks, one of which becomes slow in data and is captured by torch's profiler.

    Tests of it are of one group.
    """
    directory, steps = tmp_path_factory.mktemp("demonstrated"), 160
    policy = directory / "policy.yaml"
    policy.write_text(find("default").read_text().replace("profiler: auto", "profiler: torch"))
    command = ["demo", "--steps", steps, "--fault", "data:2:200", "--out", directory / "run", "--policy", policy]
    said = output_of(sys.executable, "-m", "sftriage", *command, env=own_environment(directory), timeout=280)
    return Demonstrated(directory / "run", said, steps, steps * 2 // 5)


@pytest.fixture
def start(environment) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start `sftriage ...` in a process; it, and all it started, are gone when the test ends."""
    started: list[subprocess.Popen] = []

    def start(*arguments: object, **options: object) -> subprocess.Popen:
        options = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        started.append(sftriage_process(*arguments, **options))
        return started[-1]

    with contextlib.ExitStack() as ending:
        yield start
        for process in started:
            ending.enter_context(ended(process))
