"""Verdicts on windows, and the suspects they name: frozen records, standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sftriage.model.windows import MOST_FRACTION, SystemCode

Label = Literal["healthy", "suspect", "stalled", "needs_evidence"]
NAMING: frozenset[Label] = frozenset({"suspect", "stalled"})
"""The labels under which a suspect is named. Under any other there may be candidates, none of them sure enough."""
Scope = Literal["rank", "host", "cohort", "all"]
Clock = Literal["host", "device"]
Pattern = Literal["chronic", "recurring", "one-off"]


@dataclass(frozen=True, slots=True)
class Regression:
    """The job is slower than the best it has shown, by itself.

    Attributes:
        since_step: the step it began at, about: somewhere from ``since_first_step`` to ``since_last_step``.
        fraction: by how much a typical step is longer than ``best_step_s``, as a fraction of that.
        scope: ``all`` where the ranks have become slower alike, ``some`` where the step is longer for ranks that are
            late in it, and what the ranks have in common is not.
        stages: where, in the order of the step; none where it is in all of them alike, or only some ranks are slower.
        best_step_s: what a typical step took when the job was at its best, with as much work.
        kind: the kind of step that has become slower, "" for ordinary ones.
        until_step: the step, about, from which on the job has been as good as its best again; None while it is not.
        descheduled_fraction: how much of that the rank that waits longest for a CPU waits more than at the job's best;
            None where it waits no more, or that is not known. It decides nothing.
    """

    since_step: int
    since_first_step: int
    since_last_step: int
    fraction: float
    scope: Literal["all", "some"]
    stages: tuple[str, ...]
    best_step_s: float
    kind: str = ""
    until_step: int | None = None
    descheduled_fraction: float | None = None


@dataclass(frozen=True, slots=True)
class OwnWork:
    """What a rank does alone by its own note (``kind``) while the others wait, as an evaluation.

    ``fraction`` of the steps that its fault fills have the note. In the run so far it held up the others in ``times``
    steps, which cost ``lost_s`` seconds.
    """

    kind: str
    fraction: float
    times: int
    lost_s: float


@dataclass(frozen=True, slots=True)
class Suspect:
    """Who and what would have to be mended: a scope, a stage, and what that would save.

    Attributes:
        scope: one rank, the ranks of one host, those of one cohort, or all; the field of that name says which.
        ranks: the ranks of the scope.
        host: its name; also that of a rank which is alone on its host.
        stage: the stage, or None where all local stages of the scope are slow alike.
        gain_s: exposed seconds a step that would be saved if the suspect were as its reference: the mean over the steps
            that its fault fills (all of the window for a ``chronic`` one that was there from its start).
        share: what it adds to those steps, as a fraction of their exposed time: ``gain_s``, or a little more, where
            that is hardly worth a capture and the jitter of others hides a part of what is always there.
        persistence: fraction of the window's steps in which the suspect's gain was there.
        pattern: ``chronic``: it is there to stay; ``recurring``: it comes back; ``one-off``: it came, and has passed.
        period_steps: of a ``recurring`` one, the steps from one time to the next.
        onset_step: the step it most likely began at; of a ``recurring`` one, one of its own steps.
        onset_range: the earliest and the latest step that it may have begun at instead.
        descheduled_fraction: how much of its lateness over its peers was waiting for a CPU; None where that is not
            known.
        contended_fraction: how much of its lateness contention for CPUs may explain: what it waited for one more than
            its peers, or than is usual in the job, and, unless it is slow in one stage alone, what it ran longer; None
            where that is not known.
        system: what else the system did to it that was more of its lateness than anything else, and how much of it was
            that; None where it was nothing of the sort, or that is not known.
        alone: what it does alone by its own note in most of the steps that its fault fills; None where it notes none.
        on_host: of a ``rank``, the host it is on, where the job has several.
    """

    scope: Scope
    ranks: tuple[int, ...]
    stage: str | None
    gain_s: float
    share: float
    persistence: float
    rank: int | None = None
    host: str | None = None
    cohort: str | None = None
    pattern: Pattern = "chronic"
    period_steps: int | None = None
    onset_step: int | None = None
    onset_range: tuple[int, int] | None = None
    descheduled_fraction: float | None = None
    contended_fraction: float | None = None
    system: tuple[SystemCode, float] | None = None
    alone: OwnWork | None = None
    on_host: str | None = None

    @property
    def identity(self) -> tuple[Scope, tuple[int, ...], str | None]:
        """Who and where, however that is worded. A slow host is slow in now one stage, now another: it has none."""
        return self.scope, self.ranks, None if self.scope == "host" else self.stage

    @property
    def by_system(self) -> tuple[SystemCode, float] | None:
        """What the system did to it that was more of its lateness than anything else, and how much of it was that."""
        if self.system is not None:
            return self.system
        waited = self.descheduled_fraction
        return None if waited is None or waited < MOST_FRACTION else ("descheduled", waited)


@dataclass(frozen=True, slots=True)
class Lost:
    """What one suspect cost a job of so many ``ranks``, in steps that no window before has counted: each counts once.

    ``step_s`` has the exposed seconds that mending it would have saved in each step, from ``first_step`` on. ``of``
    says whom, where the verdict itself does not: the one named before a capture that disturbs the window.
    """

    first_step: int
    step_s: tuple[float, ...]
    ranks: int
    of: Suspect | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One window's label, its reasons, its ranked suspects, and every number that decided.

    ``exposed_s`` is the mean exposed time of a step; ``advances_s`` sums to it to floating-point precision. What a step
    takes is ``step_s``, the median: of no pause, and of no other step that is longer now and then.
    ``leaders`` names for each stage the rank that led the frontier at its boundary, weighted by what it
    advanced; None where the frontier never moved. At the end of one of the ``sync`` stages all ranks are together, and
    who leads there is a matter of microseconds. ``clock`` is the one that all of its times are on.

    A ``stalled`` verdict is about the step in progress: it is both the first and the last step, ``exposed_s`` is how
    long it has lasted so far, a suspect's ``gain_s`` how long it has been waited for, and there is no frontier yet.

    ``regression`` is there while the job is slower than its own best, whoever is suspected, and once when that ends.
    ``lost`` is what the window adds to what stragglers have cost.
    """

    first_step: int
    last_step: int
    label: Label
    reasons: tuple[str, ...]
    suspects: tuple[Suspect, ...]
    exposed_s: float
    advances_s: Mapping[str, float]
    leaders: Mapping[str, int | None]
    numbers: Mapping[str, float]
    sync: tuple[str, ...] = ()
    clock: Clock = "host"
    attempt: int = 0
    regression: Regression | None = None
    lost: Lost | None = None

    @property
    def step_s(self) -> float:
        """What a step takes; the mean where no typical one is known."""
        return self.numbers.get("typical_step_s", self.exposed_s)

    @property
    def named(self) -> Suspect | None:
        """Who is named; None where nobody is: the suspects of a window that is held are candidates and no more."""
        return self.suspects[0] if self.suspects and self.label in NAMING else None
