"""What the recorder's integration tests share: trainers in processes of their own, and waits that end."""

import multiprocessing
import os
import select
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

DEADLINE_S = 60.0


class Trainer:
    """A script in a process of its own, which says where it is with lines on its standard output."""

    def __init__(self, source: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if not name.startswith("SFTRIAGE_")},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.reads, self.writes = self.process.stdout.fileno(), self.process.stdin.fileno()

    def says(self) -> str:
        """The next line it prints; an error if none comes in time."""
        line = b""
        deadline_s = time.monotonic() + DEADLINE_S
        # One byte at a time from the pipe itself: select() does not see what a buffered reader has taken already.
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self.reads], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"nothing was said in {DEADLINE_S} s"
            byte = os.read(self.reads, 1)
            assert byte, f"it ended and said {line!r}"
            line += byte
        return line.decode().strip()

    def hears(self, line: str) -> None:
        os.write(self.writes, line.encode() + b"\n")

    def ends(self) -> int:
        return self.process.wait(DEADLINE_S)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["torch"])


def act(source: str, arguments: tuple[str, ...], speaks: Connection) -> None:
    """Run a script whose standard streams are this connection."""
    os.dup2(speaks.fileno(), 0)
    os.dup2(speaks.fileno(), 1)
    sys.stdin, sys.stdout = open(0), open(1, "w", buffering=1)  # noqa: SIM115 (as long as the process)
    sys.argv = ["-c", *arguments]
    exec(source, {"__name__": "__main__"})


class ForkedTrainer(Trainer):
    """A trainer that has torch imported already: a fork of a process that has done nothing else."""

    def __init__(self, source: str, *arguments: object) -> None:
        self.ours, theirs = FORKED.Pipe()
        self.forked = FORKED.Process(target=act, args=(textwrap.dedent(source), tuple(map(str, arguments)), theirs))
        self.forked.start()
        theirs.close()
        self.reads = self.writes = self.ours.fileno()

    def stop(self) -> None:
        self.forked.kill()
        self.forked.join(DEADLINE_S)
        self.ours.close()


def started(kind: type[Trainer]) -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def start(source: str, *arguments: object) -> Trainer:
        made.append(kind(source, *arguments))
        return made[-1]

    yield start
    for trainer in made:
        trainer.stop()


@pytest.fixture
def fork_trainer() -> Iterator[Callable[..., Trainer]]:
    """Start a trainer for which importing torch has been done; it does not end as a script does."""
    yield from started(ForkedTrainer)


@pytest.fixture
def train() -> Iterator[Callable[..., Trainer]]:
    yield from started(Trainer)


@pytest.fixture
def rings(tmp_path: Path) -> Path:
    directory = tmp_path / "rings"
    directory.mkdir()
    return directory
