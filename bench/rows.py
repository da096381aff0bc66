"""A job that benches record: what it does, what is wrong with it, and what a verdict should say. Pure values.

A delay's size is a fraction of the job's own healthy step, which the job measures before its first recorded step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

STAGES = ("data", "h2d", "forward", "backward", "optimizer")
SYNC = ("backward",)

STAGE_OF = {
    "data": "data",
    "h2d": "h2d",
    "forward": "forward",
    "before": "other",  # outside every stage, before the sync
    "backward": "backward",  # in the middle of the backward pass, by a hook on a hidden tensor
    "optimizer": "optimizer",
    "after": "other",  # outside every stage, after the sync
    "between": "other",  # between two steps
}
"""Where a delay can be, and the stage that has to be named for it."""
LOCAL_PLACES = tuple(place for place in STAGE_OF if place != "backward")

BAR_FRACTION = 0.05
"""From this fraction of the step on a single fault has to be named; below it, healthy or held is as good."""

WARMUP_STEPS, WINDOW_STEPS, STRIDE_STEPS = 20, 50, 10

Card = TypeVar("Card")


class Deck(Generic[Card]):
    """Cards in a shuffled order, and when they are all dealt, shuffled again: a few draws cover them evenly."""

    def __init__(self, cards: Sequence[Card], rng: random.Random) -> None:
        self._cards, self._rng, self._left = list(cards), rng, list[Card]()

    def deal(self) -> Card:
        if not self._left:
            self._left = self._cards.copy()
            self._rng.shuffle(self._left)
        return self._left.pop()


@dataclass(frozen=True, slots=True)
class Delay:
    """A delay in one place, on some ranks, in some steps."""

    where: str  # a key of `STAGE_OF`
    ranks: tuple[int, ...]
    fraction: float  # of the healthy step; of a growing delay, its mean over the last window
    first: int
    last: int  # the step after the last
    every: int = 1  # the period of the steps that have it
    full_at: int | None = None  # a growing delay is 0 at ``first``, ``fraction`` here, and goes on growing
    busy: bool = False  # the rank is kept busy; else it sleeps
    roams: bool = False  # another of ``ranks`` each step

    def fraction_at(self, step: int) -> float:
        if not self.first <= step < self.last or (step - self.first) % self.every:
            return 0.0
        if self.full_at is None:
            return self.fraction
        return self.fraction * (step - self.first) / max(1, self.full_at - self.first)

    def ranks_at(self, step: int) -> tuple[int, ...]:
        return (random.Random(f"{self.ranks}-{step}").choice(self.ranks),) if self.roams else self.ranks


@dataclass(frozen=True, slots=True)
class Truth:
    """What a verdict should say of the row."""

    label: str  # ``suspect``, ``needs_evidence`` (to be held) or ``healthy``
    scope: str | None = None  # of a suspect, ``rank`` or ``host``
    ranks: tuple[int, ...] = ()  # the ranks of the suspect; of a row to be held, the slow ones
    stage: str | None = None  # the suspect's stage; None where the scope is slow in all its local stages
    onset: int = 0  # the first step that has it


@dataclass(frozen=True, slots=True)
class Row:
    """One job. `msgspec.convert` makes it again of its JSON."""

    number: int
    sort: str  # ``local``, ``split``, ``host``, ``hold`` or ``healthy``
    name: str  # what is done to it, in a word or two
    n_ranks: int
    n_steps: int
    seed: int  # of all that the job draws
    profile: str  # of `jobs/rows.py`: its ranks mostly sleep, as a GPU job's host does, or share the cores
    split: bool  # whether the moment of the last ready gradient is recorded
    truth: Truth
    hosts: tuple[str, ...] | None = None
    delays: tuple[Delay, ...] = ()
    checkpoint_every: int = 0  # the period of steps of kind ``checkpoint``, which take longer; 0 for none
    checkpoint_ranks: tuple[int, ...] = ()
    work: str = "even"  # or ``uneven``: each step and rank its own size
    evaluate_every: int = 0  # the period of evaluations by all ranks, after a step's last stage
    collect_every: int = 0  # about the period in which a rank collects garbage, each by its own count
    says_kinds: bool = True  # whether the job marks its checkpoints and evaluations as such
    lasts_s: float = 0.0  # about how long it is recorded, if that is over before ``n_steps``; 0 for all of them
    least_steps: int = 0  # steps that are recorded in any case, however long they take
    missing: int | None = None  # a rank that records nothing

    @property
    def fraction(self) -> float:
        return max((delay.fraction for delay in self.delays), default=0.0)

    def steps_at(self, healthy_step_s: float) -> int:
        """The number of recorded steps, where a healthy step takes this long."""
        if not self.lasts_s:
            return self.n_steps
        return min(self.n_steps, max(self.least_steps, int(self.lasts_s / healthy_step_s)))

    @property
    def words(self) -> str:
        return f"{self.sort}/{self.name} {self.fraction:.0%} ({self.profile}{', split' if self.split else ''})"


@dataclass(slots=True)
class Outcome:
    """The result of running a row, beside its steps: the healthy step that delays refer to, or why it failed."""

    healthy_step_s: float = 0.0
    failed: str | None = None
