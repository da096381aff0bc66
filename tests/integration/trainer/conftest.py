"""What the recorder's integration tests share: trainers in processes of their own, and waits that end."""

import os
import re
import select
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.forked import Forked

DEADLINE_S = 60.0


class Trainer:
    """A script in a process of its own, which says where it is with lines on its standard output.

    One that imports torch shares that with others, unless it is to import it ``anew``.
    """

    def __init__(self, source: str, *arguments: object, anew: bool = False) -> None:
        words = ["-c", textwrap.dedent(source), *map(str, arguments)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SFTRIAGE_")}
        scripts = [source, *(one.read_text() for one in arguments if isinstance(one, Path) and one.suffix == ".py")]
        if re.search(r"^ *import .*\btorch\b", "".join(scripts), re.MULTILINE) and not anew:
            self.process = Forked(*words, env=environment)
        else:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self.process = subprocess.Popen([sys.executable, *words], env=environment, **pipes)

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
        for pipe in filter(None, (self.process.stdin, self.process.stdout, self.process.stderr)):
            pipe.close()


@pytest.fixture
def train() -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def start(source: str, *arguments: object, **how: bool) -> Trainer:
        made.append(Trainer(source, *arguments, **how))
        return made[-1]

    yield start
    for trainer in made:
        trainer.stop()


@pytest.fixture
def rings(tmp_path: Path) -> Path:
    directory = tmp_path / "rings"
    directory.mkdir()
    return directory
