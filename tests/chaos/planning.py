"""What befalls a job, and which of its ranks become slow when: all of it from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

WORLD_SIZE = 4
FIRST_FAULT_STEP, FAULT_STEPS, FAULT_EVERY_STEPS = 60, 160, 240
SLOW = [(rank, stage) for rank in range(WORLD_SIZE) for stage in ("data", "forward")]
MOST_FAULTS = 400

KILLS = (
    "kill agent",
    "kill agent in capture",
    "kill controller",
    "kill controller at request",
    "kill hub",
    "kill trainers",
)
"""What is killed is started again after a while, as a supervisor would."""
WHILES = (
    "stop agent",
    "stop controller",
    "stop hub",
    "cut link",
    "slow link",
    "drop link",
    "fill agent's disk",
    "fill run's disk",
)
"""What is so for a while, and mended then. What is stopped does not go on, as on a host that sleeps."""
ONCE = ("restart hub", "lose hub's store", "lose consumer")
KINDS = (*KILLS, *WHILES, *ONCE)


@dataclass(frozen=True, slots=True)
class Action:
    """Something that befalls a part of the job ``at_s`` seconds after its begin; of an agent, that of a ``host``."""

    at_s: float
    kind: str
    host: int
    for_s: float

    def __str__(self) -> str:
        whose = f" of host {self.host}" if "agent" in self.kind or self.kind in ("slow link", "drop link") else ""
        return f"{self.at_s:.1f} s: {self.kind}{whose}, for {self.for_s:.1f} s"


@dataclass(frozen=True, slots=True)
class Fault:
    """A rank is slow in a stage, from one step to another."""

    first_step: int
    last_step: int
    rank: int
    stage: str

    def __str__(self) -> str:
        return f"{self.first_step}-{self.last_step}:{self.rank}:{self.stage}"


def actions(
    seed: int, kinds: Sequence[str] = KINDS, *, first_s: float = 4.0, last_s: float, every_s: float, longest_s: float
) -> tuple[Action, ...]:
    """Actions between two times, one every so many seconds or so; each kind comes before any comes again."""
    draw, found, left = random.Random(seed), [], list[str]()
    at_s = first_s
    while at_s < last_s:
        left = left or draw.sample(kinds, len(kinds))
        found.append(Action(at_s, left.pop(), draw.randrange(2), draw.uniform(0.2, longest_s)))
        at_s += draw.uniform(0.2, 2.0) * every_s
    return tuple(found)


def faults(seed: int, start: int) -> tuple[Fault, ...]:
    """Faults of one start of the job, one after the other, no two of them in the same steps."""
    draw, left, found = random.Random(f"{seed} {start}"), list[tuple[int, str]](), []
    for number in range(MOST_FAULTS):
        left = left or draw.sample(SLOW, len(SLOW))
        first_step = FIRST_FAULT_STEP + number * FAULT_EVERY_STEPS
        found.append(Fault(first_step, first_step + FAULT_STEPS - 1, *left.pop()))
    return tuple(found)
