"""What the recorder's integration tests share: trainers in processes of their own, and waits that end."""

import os
import select
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
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

    def says(self) -> str:
        """The next line it prints; an error if none comes in time."""
        line = b""
        deadline_s = time.monotonic() + DEADLINE_S
        # One byte at a time from the pipe itself: select() does not see what a buffered reader has taken already.
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"nothing was said in {DEADLINE_S} s"
            byte = os.read(self.process.stdout.fileno(), 1)
            assert byte, f"it ended and said {line!r}"
            line += byte
        return line.decode().strip()

    def hears(self, line: str) -> None:
        os.write(self.process.stdin.fileno(), line.encode() + b"\n")

    def ends(self) -> int:
        return self.process.wait(DEADLINE_S)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


@pytest.fixture
def train() -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def start(source: str, *arguments: object) -> Trainer:
        made.append(Trainer(source, *arguments))
        return made[-1]

    yield start
    for trainer in made:
        trainer.stop()


@pytest.fixture
def rings(tmp_path: Path) -> Path:
    directory = tmp_path / "rings"
    directory.mkdir()
    return directory
