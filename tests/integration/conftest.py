"""Real jobs, in processes of their own that end with their test."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.integration.processes import DEADLINE_S, descendants

# Whoever starts pytest in the background of a script has it ignore Ctrl-C, and with it all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """An environment in which a run's notes are its own."""
    own = {f"XDG_{what}_HOME": str(tmp_path / what.lower()) for what in ("STATE", "CACHE")}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture
def start(environment) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start `sftriage ...` in a process; it, and all it started, are gone when the test ends."""
    started: list[subprocess.Popen] = []

    def start(*arguments: object, **options: object) -> subprocess.Popen:
        command = [sys.executable, "-m", "sftriage", *map(str, arguments)]
        options = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        process = subprocess.Popen(command, **options)
        started.append(process)
        return process

    yield start
    for process in started:
        for pid in [*descendants(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ValueError):
            process.communicate(timeout=DEADLINE_S)
