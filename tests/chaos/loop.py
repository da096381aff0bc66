"""One round of the chaos loop: a job on two hosts, all that befalls it by a seed, and what was wrong in the end."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sftriage.errors import RingError
from sftriage.windows.gather import Shape
from tests.chaos.checking import Outcome, attempts, checked
from tests.chaos.hosts import apart_hosts
from tests.chaos.planning import Action
from tests.chaos.world import World
from tests.disks import small_disk
from tests.integration.processes import wait_until
from tests.integration.runs import verdicts

SHAPE = Shape(40, 20, 5)
CATCH_UP_S = 120.0
LOSES = ("lose hub's store",)
"""What the hub had is lost by it, and steps with it."""


@dataclass(slots=True)
class Round:
    """What was done, and what was found."""

    actions: Sequence[Action]
    outcome: Outcome = field(default_factory=Outcome)
    log: Sequence[str] = ()
    said: str = ""

    @property
    def text(self) -> str:
        return "\n".join([*self.outcome.problems, "", *self.log, "", self.said])


def play(directory: Path, environment: dict[str, str], actions: Sequence[Action], seed: int) -> Round:
    """Let a job run on two hosts while the actions befall it, and end; what became of it."""
    played = Round(actions)
    with contextlib.ExitStack() as held:
        hosts = held.enter_context(apart_hosts(directory))
        (directory / "run").parent.mkdir(parents=True, exist_ok=True)
        sizes = {"run": "96m", "host-0": "48m", "host-1": "48m"}
        disks = {name: held.enter_context(small_disk(directory / name, size, 20_000)) for name, size in sizes.items()}
        world = held.enter_context(contextlib.closing(World(directory, environment, hosts, disks, seed)))
        played.log = world.log.lines
        try:
            _befall(world, actions)
            _catch_up(world)
            world.end()
            streams = world.at_hub("streams").split()
            played.outcome = checked(
                world.run,
                {start.pids: start.faults for start in world.starts},
                SHAPE,
                lossless=not any(one.kind in LOSES for one in actions),
            )
            if streams != ["KV_sft_job_lease"]:
                played.outcome.problems.append(f"left on the hub: {streams}")
            played.outcome.problems += _left(world)
        except AssertionError as error:
            played.outcome.problems.append(f"it did not end well: {error}")
        played.said = world.said
        if played.outcome.problems:
            # (the disk that it is on goes)
            shutil.copytree(world.run, directory / "failed", dirs_exist_ok=True)
    return played


def _befall(world: World, actions: Sequence[Action]) -> None:
    """Each action at its time; what is so for a while is mended after it."""
    begin_s = time.monotonic()
    todo = [(one.at_s, number, one) for number, one in enumerate(actions)]
    mending: list[tuple[float, int, Callable[[], None]]] = []
    while todo or mending:
        at_s = min([one[0] for one in (*todo, *mending)])
        time.sleep(max(0.0, begin_s + at_s - time.monotonic()))
        if todo and todo[0][0] <= at_s:
            _, number, action = todo.pop(0)
            mend = world.act(action)
            if mend is not None:
                mending.append((at_s + action.for_s, number, mend))
                mending.sort(key=lambda one: one[:2])
            continue
        _, number, mend = mending.pop(0)
        mend()
        world.log.say(f"mended: {actions[number].kind}")


def _catch_up(world: World) -> None:
    """All is whole again: wait until the steps that the job takes now are judged."""
    wanted = world.step() + SHAPE.window_steps
    pids = world.starts[-1].pids
    world.settle()

    def judged() -> bool:
        try:
            found = attempts(world.run)
        except (RingError, OSError):
            # (just made)
            return False
        # (of a start of which a host was heard late there may be two)
        newest = max((attempt for attempt, pid in found.items() if pid in pids), default=None)
        return any(one["attempt"] == newest and one["last_step"] >= wanted for one in verdicts(world.run))

    world.log.say("all is mended")
    wait_until(judged, CATCH_UP_S)
    world.log.say("it has caught up")


def _left(world: World) -> list[str]:
    """What is left behind by the parts of a run that has ended."""
    found = [f"{path} is left in memory" for path in Path("/dev/shm/sftriage-0").glob("*") if _of(path, world)]
    for number in range(2):
        spool = world.host(number) / "spool"
        found += [f"{path} is left" for path in spool.iterdir()]
    return found


def _of(rings: Path, world: World) -> bool:
    return str(rings) in (world.run / "run.json").read_text()
