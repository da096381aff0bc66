"""What one row of the matrix is: the job, what is wrong with it, and what a verdict should say. Pure values.

A delay's size is a fraction of the job's own healthy step, which the job measures before its first recorded step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

STAGES = ("data", "h2d", "forward", "backward", "optimizer")
SYNC = ("backward",)

# Where a delay can be, and the stage that has to be named for it.
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
LOCAL_PLACES = tuple(place for place in STAGE_OF if place != "backward")

BAR_FRACTION = 0.05
"""From this fraction of the step on a single fault has to be named; below it, healthy or held will do as well."""

WARMUP_STEPS, WINDOW_STEPS, STRIDE_STEPS = 20, 50, 10


@dataclass(frozen=True, slots=True)
class Delay:
    """So much longer in one place, on some ranks, in some steps.

    Attributes:
        where: a key of `STAGE_OF`.
        ranks: who is slow; of a delay that roams, those it roams over.
        fraction: of the healthy step; of a growing delay, its mean over the last window.
        first: first step.
        last: step after the last one.
        every: only every so many steps.
        full_at: a growing delay is 0 at ``first`` and has grown to ``fraction`` here, and goes on growing.
        busy: the rank is kept busy; else it sleeps.
        roams: another one of ``ranks`` each step.
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
        """Who has it in this step."""
        if not self.roams:
            return self.ranks
        return (random.Random(f"{self.ranks}-{step}").choice(self.ranks),)


@dataclass(frozen=True, slots=True)
class Pressure:
    """A rank made slow from outside, from a step on.

    Attributes:
        how: ``pulses`` (SIGSTOP and SIGCONT in turn), ``squeeze`` (pinned to a core with busy neighbours) or ``nice``.
        rank: the rank.
        strength: of pulses the share of time stopped; else the number of busy neighbours.
        first: the step from which on.
    """

    how: str
    rank: int
    strength: float
    first: int


@dataclass(frozen=True, slots=True)
class Truth:
    """What is to be said of the row.

    Attributes:
        label: ``suspect``, ``needs_evidence`` (to be held) or ``healthy``.
        scope: of a suspect, ``rank`` or ``host``.
        ranks: the ranks of the suspect; of a row to be held, those that are slow.
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
    """One job of the matrix. `msgspec.convert` makes it again of its JSON.

    Attributes:
        number: its place in the matrix.
        sort: ``local``, ``split``, ``outside``, ``host``, ``hold`` or ``healthy``.
        name: what is done to it, in a word or two.
        n_ranks: processes.
        n_steps: recorded steps.
        seed: of all that the job draws.
        profile: ``wait`` (its ranks mostly sleep, as a GPU job's host does), ``compute`` (they share the cores) or
            ``hungry`` (they do nothing but compute); ``brisk`` and ``busy`` are the first two with shorter steps.
        split: whether the moment of the last ready gradient is recorded.
        hosts: the host of each rank.
        delays: what slows it from inside.
        pressure: what slows it from outside.
        checkpoint_every: every so many steps is one of kind ``checkpoint``, which takes longer; 0 for none.
        checkpoint_ranks: who takes longer then.
        work: ``even``, ``varied`` (each step its own size, the same on all ranks), ``uneven`` (each step and rank its
            own) or ``doubled`` (from the middle on).
        evaluate_every: every so many steps all ranks evaluate after the step's last stage; 0 for never.
        collect_every: about every so many steps, each by its own count, a rank collects garbage; 0 for never.
        says_kinds: whether the job says of what kind its checkpoints and evaluations are.
        lasts_s: about how long it is recorded, if that is over before ``n_steps``; 0 for all of them.
        least_steps: so many steps are recorded, however long they take.
        missing: a rank that records nothing.
        truth: what is to be said.
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
    pressure: Pressure | None = None
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
    def single(self) -> bool:
        """Whether one rank and one stage are to be named."""
        return self.sort in ("local", "split")

    @property
    def fraction(self) -> float:
        """The size of its greatest delay, as drawn."""
        return max((delay.fraction for delay in self.delays), default=0.0)

    def steps_at(self, healthy_step_s: float) -> int:
        """How many steps are recorded if a healthy one takes so long."""
        if not self.lasts_s:
            return self.n_steps
        return min(self.n_steps, max(self.least_steps, int(self.lasts_s / healthy_step_s)))

    def fraction_at(self, step: int) -> float:
        """All that slows this step from inside or outside; what comes from outside counts as one."""
        outside = self.pressure is not None and step >= self.pressure.first
        return sum(delay.fraction_at(step) for delay in self.delays) + float(outside)

    @property
    def words(self) -> str:
        """The row in a line."""
        parts = [f"{delay_words(delay)}" for delay in self.delays]
        if self.pressure is not None:
            parts.append(f"{self.pressure.how} {self.pressure.strength:g} on rank {self.pressure.rank}")
        if self.missing is not None:
            parts.append(f"rank {self.missing} records nothing")
        if self.checkpoint_every:
            parts.append(f"checkpoint every {self.checkpoint_every} on {len(self.checkpoint_ranks)} ranks")
        if self.work != "even":
            parts.append(f"{self.work} work")
        for what, every in (("evaluation", self.evaluate_every), ("garbage collection", self.collect_every)):
            if every:
                parts.append(f"{what} every {every}")
        return f"{self.sort}/{self.name} ({self.profile}{', split' if self.split else ''})" + (
            ": " + "; ".join(parts) if parts else ""
        )


def delay_words(delay: Delay) -> str:
    """A delay in a few words."""
    who = ", ".join(map(str, delay.ranks))
    size = f"{delay.fraction:.0%} in {delay.where} of rank{'s' * (len(delay.ranks) > 1)} {who}"
    when = f"steps {delay.first}-{delay.last - 1}" if delay.first or delay.every == 1 else ""
    how = [
        "roaming" * delay.roams,
        f"every {delay.every}" * (delay.every > 1),
        "growing" * (delay.full_at is not None),
        when,
        "busy" if delay.busy else "asleep",
    ]
    return f"{size} [{', '.join(filter(None, how))}]"


@dataclass(slots=True)
class Outcome:
    """What running a row gave beside its steps: the healthy step that delays are fractions of, or why it failed."""

    healthy_step_s: float = 0.0
    failed: str | None = None
    machine: dict[str, Any] = field(default_factory=dict)
