"""A job that benches record: what it does, what is wrong with it, and what a verdict should say. Pure values.

A delay's size is a fraction of the job's own healthy step, which the job measures before its first recorded step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

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
    """A delay in one place, on some ranks, in some steps.

    Attributes:
        where: a key of `STAGE_OF`.
        ranks: the slow ranks; of a delay that roams, those it roams over.
        fraction: of the healthy step; of a growing delay, its mean over the last window.
        first, last: first step, and the step after the last.
        every: the period of the steps that have it.
        full_at: a growing delay is 0 at ``first`` and has grown to ``fraction`` here, and goes on growing.
        busy: the rank is kept busy; else it sleeps.
        roams: another of ``ranks`` each step.
    """

    where: str
    ranks: tuple[int, ...]
    fraction: float
    first: int
    last: int
    every: int = 1
    full_at: int | None = None
    busy: bool = False
    roams: bool = False

    def fraction_at(self, step: int) -> float:
        """The delay in this step, as a fraction of the healthy step."""
        if not self.first <= step < self.last or (step - self.first) % self.every:
            return 0.0
        if self.full_at is None:
            return self.fraction
        return self.fraction * (step - self.first) / max(1, self.full_at - self.first)

    def ranks_at(self, step: int) -> tuple[int, ...]:
        """The ranks that have it in this step."""
        return (random.Random(f"{self.ranks}-{step}").choice(self.ranks),) if self.roams else self.ranks


@dataclass(frozen=True, slots=True)
class Truth:
    """What a verdict should say of the row.

    Attributes:
        label: ``suspect``, ``needs_evidence`` (to be held) or ``healthy``.
        scope: of a suspect, ``rank`` or ``host``.
        ranks: the ranks of the suspect; of a row to be held, the slow ones.
        stage: the suspect's stage; None where the scope is slow in all its local stages.
        onset: the first step that has it.
    """

    label: str
    scope: str | None = None
    ranks: tuple[int, ...] = ()
    stage: str | None = None
    onset: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One job. `msgspec.convert` makes it again of its JSON.

    Attributes:
        number: its place among the rows.
        sort: ``local``, ``split``, ``host``, ``hold`` or ``healthy``.
        name: what is done to it, in a word or two.
        n_ranks: processes.
        n_steps: recorded steps.
        seed: of all that the job draws.
        profile: ``wait`` (its ranks mostly sleep, as a GPU job's host does) or ``compute`` (they share the cores);
            ``brisk`` and ``busy`` are the same with shorter steps.
        split: whether the moment of the last ready gradient is recorded.
        truth: what a verdict should say.
        hosts: the host of each rank.
        delays: what slows it.
        checkpoint_every: the period of steps of kind ``checkpoint``, which take longer; 0 for none.
        checkpoint_ranks: the ranks that take longer then.
        work: ``even`` or ``uneven`` (each step and rank its own size).
        evaluate_every: the period of evaluations by all ranks, after a step's last stage; 0 for none.
        collect_every: about the period in which a rank collects garbage, each by its own count; 0 for never.
        says_kinds: whether the job marks its checkpoints and evaluations as such.
        lasts_s: about how long it is recorded, if that is over before ``n_steps``; 0 for all of them.
        least_steps: steps that are recorded in any case, however long they take.
        missing: a rank that records nothing.
    """

    number: int
    sort: str
    name: str
    n_ranks: int
    n_steps: int
    seed: int
    profile: str
    split: bool
    truth: Truth
    hosts: tuple[str, ...] | None = None
    delays: tuple[Delay, ...] = ()
    checkpoint_every: int = 0
    checkpoint_ranks: tuple[int, ...] = ()
    work: str = "even"
    evaluate_every: int = 0
    collect_every: int = 0
    says_kinds: bool = True
    lasts_s: float = 0.0
    least_steps: int = 0
    missing: int | None = None

    @property
    def fraction(self) -> float:
        """The size of its greatest delay, as drawn."""
        return max((delay.fraction for delay in self.delays), default=0.0)

    def steps_at(self, healthy_step_s: float) -> int:
        """The number of recorded steps, where a healthy step takes this long."""
        if not self.lasts_s:
            return self.n_steps
        return min(self.n_steps, max(self.least_steps, int(self.lasts_s / healthy_step_s)))

    @property
    def words(self) -> str:
        """The row in a line."""
        faults = "; ".join(
            f"{delay.fraction:.0%} in {delay.where} of {list(delay.ranks)} from step {delay.first}"
            for delay in self.delays
        )
        return f"{self.sort}/{self.name} ({self.profile}{', split' if self.split else ''}) {faults}".rstrip()


@dataclass(slots=True)
class Outcome:
    """The result of running a row, beside its steps: the healthy step that delays refer to, or why it failed."""

    healthy_step_s: float = 0.0
    failed: str | None = None
    machine: dict[str, Any] = field(default_factory=dict)
