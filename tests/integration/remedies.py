"""What triage puts on record of remedies, and how a job is told to change in the middle."""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.integration.forked import Forked
from tests.integration.policies import policy
from tests.integration.processes import FORKED, ended
from tests.integration.runs import on_record

POLICY = policy("name: slow, match: {}", steps=(10, 5, 3), limits="")
STRAGGLAR = "  mitigate: {remedies: [stragglar], min_saving: 1%, steps: 8}\n"


def remedies(run: Path) -> list[dict[str, Any]]:
    return on_record(run, "remedy")


def states(run: Path) -> list[tuple[str, str, int]]:
    return [(one["state"], one["reason"], one["rank"]) for one in remedies(run)]


def say(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def under_triage(
    start: Callable[..., subprocess.Popen[str]], directory: Path, policy: str, command: tuple[Any, ...], **spec: Any
) -> tuple[subprocess.Popen[str], Path]:
    """Run a job, whose last argument is its spec as JSON, under a policy; its launcher, and its run directory."""
    (directory / "policy.yaml").write_text(policy)
    options = ["--policy", directory / "policy.yaml", "--out", directory / "run"]
    return start("run", *options, "--", *FORKED, *command, json.dumps(spec)), directory / "run"


@contextmanager
def meeting_ranks(n: int, environment: Mapping[str, str], directory: Path, *job: object) -> Iterator[list[Forked]]:
    about = {"WORLD_SIZE": str(n), "MEETING": str(directory / "meeting"), "SFTRIAGE_RINGS": str(directory)}
    with ExitStack() as stack:
        ranks = []
        for rank in range(n):
            place = {**environment, **about, "RANK": str(rank)}
            ranks.append(Forked(*job, env=place, stderr=subprocess.PIPE, text=True))
            stack.enter_context(ended(ranks[-1]))
        yield ranks
