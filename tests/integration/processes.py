"""Looking after the processes that a test starts."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 240.0

ROOT = Path(__file__).parents[2]
JOBS = Path(__file__).parent / "jobs"
HANGING, IN_TURN, LOOP, SLOW_DATA, STUCK = (
    JOBS / f"{name}.py" for name in ("hanging", "in_turn", "loop", "slow_data", "stuck")
)
UNEDITED = JOBS / "unedited"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
LAUNCH = JOBS / "launch.py"
FORKED = (sys.executable, str(LAUNCH))
"""Launchers of a job: how many ranks comes next, and then their script. The second takes a third of the time."""

SLOW_S, SLOW_SHARE = 0.03, 0.6
"""By how much a rank is slow: so long in a step, and by this share of it at least, however busy the machine is."""


def slowed(rank: int, a_step: int, after: int) -> dict[str, str]:
    """What a data set of so many samples a step reads of its environment, to be slow on a rank after so many steps."""
    return {
        "SLOW_RANK": str(rank),
        "SLOW_AFTER": str(a_step * after),
        "SLOW_S": str(SLOW_S / a_step),
        "SLOW_SHARE": str(SLOW_SHARE),
    }


def sftriage_process(*words: object, **options: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen([sys.executable, "-m", "sftriage", *map(str, words)], **options)


def output_of(*command: object, **options: Any) -> str:
    """What a command prints that ends with status 0."""
    options = {"capture_output": True, "text": True, "timeout": DEADLINE_S, **options}
    done = subprocess.run([*map(str, command)], check=False, **options)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def is_controller(pid: int) -> bool:
    return b"\0controller\0" in Path(f"/proc/{pid}/cmdline").read_bytes()


def wait_until(what: Callable[[], object], deadline_s: float = DEADLINE_S) -> object:
    """Wait until something is so; what it gave. Looking takes a tenth of a CPU at most: the job needs it, too."""
    end_s = time.monotonic() + deadline_s
    while True:
        began_s, used_s = time.monotonic(), time.thread_time()
        if found := what():
            return found
        now_s = time.monotonic()
        assert now_s < end_s, f"not within {deadline_s} s: {what}"
        time.sleep(max(0.02, now_s - began_s, 9 * (time.thread_time() - used_s)))


def kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def peak_bytes(pid: int) -> int:
    """The largest resident size of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


@contextlib.contextmanager
def ended(process: subprocess.Popen) -> Iterator[None]:
    """A process, and all that it started, are gone when this ends, however it does."""
    try:
        yield
    finally:
        kill(*descendants(process.pid), process.pid)
        with contextlib.suppress(ValueError):
            process.communicate(timeout=DEADLINE_S)


class Processes:
    """Processes that write into a file ``said`` of a directory; they end with `close`."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.directory, self.environment = directory, environment
        self._held = contextlib.ExitStack()

    @property
    def said(self) -> str:
        return (self.directory / "said").read_text(encoding="utf-8")

    def start(self, *command: object, **more: str) -> subprocess.Popen:
        with (self.directory / "said").open("ab") as said:
            process = subprocess.Popen([*map(str, command)], env={**self.environment, **more}, stdout=said, stderr=said)
        self._held.enter_context(ended(process))
        return process

    def close(self) -> None:
        self._held.close()


@contextlib.contextmanager
def limited_cgroup() -> Iterator[Path]:
    """A real cgroup that may run for a tenth of the time."""
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    cgroup = (first if first.is_dir() else second) / f"sftriage-test-{os.getpid()}"
    name, quota = ("cpu.cfs_quota_us", "10000") if first.is_dir() else ("cpu.max", "10000 100000")
    try:
        cgroup.mkdir()
        (cgroup / name).write_text(quota)
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield cgroup
    # (what has just been killed leaves it in a moment)
    until_s = time.monotonic() + 20.0
    while cgroup.exists() and time.monotonic() < until_s:
        with contextlib.suppress(OSError):
            cgroup.rmdir()
        time.sleep(0.01)
