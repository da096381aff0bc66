"""The closed loop: a remedy that a policy allows is tried on a straggler that stays, and kept or undone. Pure.

A remedy is tried in four parts of as many steps, with it and without in turn, for a job's steps drift. It is kept where
the typical step is shorter with it: by the least that the policy asks for, and by more than chance. From there on, and
meanwhile, it is undone where what it was for is no longer so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import hypot, sqrt

import msgspec
import numpy as np
from numpy.typing import NDArray

from sftriage.events import RemedyChanged, RemedyReason, RemedyState
from sftriage.mitigate.advice import MIN_SHARE, Straggler, around
from sftriage.mitigate.costs import as_measured
from sftriage.mitigate.switching import SwitchStatus
from sftriage.policy.schema import Mitigate

PARTS = (True, False, True, False)
"""Of a trial: with the remedy, or without."""
SWITCH_S = 120.0
"""How long it is waited for all ranks to have switched."""
ERRORS = 2.0
"""By so many standard errors a saving is more than chance."""
_MIN_RANKS = 4
"""Among fewer, a ring is never slower."""


@dataclass(frozen=True, slots=True)
class JobNow:
    """What is known now.

    Attributes:
        last_step: the last of the job's steps that was seen, and ``step_s`` what those took that nothing disturbs.
        switches: the groups of ranks that a remedy can be switched on.
        straggler: who has been slow for long, and is still, as far as ``is_known``.
        allowed: what the policy allows.
    """

    time_s: float
    attempt: int
    last_step: int
    step_s: Mapping[int, float]
    switches: Sequence[SwitchStatus]
    straggler: Straggler | None
    is_known: bool
    allowed: Mitigate | None


@dataclass(frozen=True, slots=True)
class Trial:
    """A remedy that is being tried, or kept, as ``told`` last.

    Attributes:
        steps: of each part.
        parts: the first whole step of each part that has begun; of them all but the last are over.
        asked_s: when what is wanted now was first so.
        is_over: the last part is over, and the next one is wanted.
        interrupted: it is an earlier controller's, and not to be gone on with.
    """

    told: RemedyChanged
    steps: int
    asked_s: float
    parts: tuple[int, ...] = ()
    is_over: bool = True
    interrupted: bool = False

    @property
    def kept(self) -> bool:
        """Whether it helps."""
        return self.told.state == "kept"

    @property
    def is_on(self) -> bool:
        """Whether the remedy is wanted now."""
        return not self.interrupted and (self.kept or PARTS[len(self.parts) - (not self.is_over)])

    def of(self, switches: Sequence[SwitchStatus]) -> SwitchStatus | None:
        """The group that it is for; None where that is gone."""
        return next((one for one in switches if one.name == self.told.switch), None)

    def value(self, switch: SwitchStatus) -> int:
        """What is wanted of it."""
        return switch.ranks.index(self.told.rank) + 1 if self.is_on and self.told.rank in switch.ranks else 0


@dataclass(frozen=True, slots=True)
class Loop:
    """What is done about stragglers: the remedy that is tried or kept, if any, and when which rank's was undone.

    ``advised`` are the ranks of an attempt for which the policy allows no more than advice.
    """

    trial: Trial | None = None
    undone_s: Mapping[int, float] = field(default_factory=dict)
    advised: frozenset[tuple[int, int]] = frozenset()

    @classmethod
    def resumed(cls, told: Sequence[RemedyChanged]) -> Loop:
        """The loop of a controller that goes on with a run, by what is on record."""
        loop = cls()
        for one in told:
            if one.state == "advised":
                loop = replace(loop, advised=loop.advised | {(one.attempt, one.rank)})
            elif one.state == "undone":
                loop = loop._without_trial(one)
            else:
                loop = replace(loop, trial=Trial(one, 0, one.time_s, interrupted=one.state == "trying"))
        return loop

    def wanted(self, switches: Sequence[SwitchStatus]) -> Mapping[str, int]:
        """What is to be in force in each group."""
        found = None if self.trial is None else self.trial.of(switches)
        return {one.name: self.trial.value(one) if self.trial is not None and one is found else 0 for one in switches}

    def after(self, now: JobNow) -> tuple[Loop, RemedyChanged | None]:
        """The loop as it goes on, and what is to go on record of that before anything is switched."""
        trial = self.trial
        if trial is None:
            return self._considered(now)
        switch = trial.of(now.switches)
        reason = _stops(trial, switch, now)
        if reason is not None or switch is None:
            return self._undone(trial, now, reason or "restarted")
        if trial.kept:
            return self, None
        trial = _gone_on(trial, switch, now)
        if not (trial.is_over and len(trial.parts) == len(PARTS)):
            return replace(self, trial=trial), None
        numbers = _effect(trial, now.step_s)
        least_s = (now.allowed.min_saving_fraction if now.allowed is not None else 0.0) * numbers.get("off_s", 0.0)
        if numbers.get("saves_s", 0.0) < max(least_s, ERRORS * numbers.get("error_s", float("inf"))):
            return self._undone(trial, now, "no_help", numbers)
        told = _changed(trial, now, "kept", "helps", numbers)
        return replace(self, trial=replace(trial, told=told)), told

    def _considered(self, now: JobNow) -> tuple[Loop, RemedyChanged | None]:
        straggler, allowed = now.straggler, now.allowed
        if straggler is None or len(straggler.ranks) != 1:
            return self, None
        (rank,) = straggler.ranks
        switch = next((one for one in now.switches if rank in one.ranks), None)
        if switch is None or switch.exchange_s <= 0.0 or len(switch.ranks) < _MIN_RANKS:
            return self, None
        remedy = around(straggler, as_measured(len(switch.ranks), switch.exchange_s))
        expected_s = remedy.saves_s or 0.0
        numbers = {"late_s": straggler.late_s, "step_s": straggler.step_s, "ring_s": switch.exchange_s}
        numbers |= {"break_even_s": remedy.pays_from_s or 0.0, "expected_s": expected_s}
        if allowed is None or "stragglar" not in allowed.remedies:
            if expected_s < MIN_SHARE * straggler.step_s or (now.attempt, rank) in self.advised:
                return self, None
            state: RemedyState = "advised"
            reason: RemedyReason = "not_allowed"
        else:
            is_cooling = now.time_s < self.undone_s.get(rank, float("-inf")) + allowed.cooldown_s
            if expected_s < allowed.min_saving_fraction * straggler.step_s or is_cooling:
                return self, None
            state, reason = "trying", "worthwhile"
        told = RemedyChanged(
            time_s=now.time_s,
            attempt=now.attempt,
            step=now.last_step,
            remedy="stragglar",
            state=state,
            reason=reason,
            rank=rank,
            who=straggler.who,
            where=straggler.where,
            switch=switch.name,
            numbers=numbers,
        )
        if allowed is None or state == "advised":
            return replace(self, advised=self.advised | {(now.attempt, rank)}), told
        return replace(self, trial=Trial(told, allowed.steps, now.time_s)), told

    def _undone(
        self, trial: Trial, now: JobNow, reason: RemedyReason, numbers: Mapping[str, float] = {}
    ) -> tuple[Loop, RemedyChanged]:
        told = _changed(trial, now, "undone", reason, numbers)
        return self._without_trial(told), told

    def _without_trial(self, told: RemedyChanged) -> Loop:
        # (what was cut off has shown nothing)
        waits = {} if told.reason in ("interrupted", "restarted") else {told.rank: told.time_s}
        return replace(self, trial=None, undone_s={**self.undone_s, **waits})


def _changed(
    trial: Trial, now: JobNow, state: RemedyState, reason: RemedyReason, numbers: Mapping[str, float]
) -> RemedyChanged:
    changed = {"time_s": now.time_s, "step": now.last_step, "state": state, "reason": reason}
    return msgspec.structs.replace(trial.told, **changed, numbers={**trial.told.numbers, **numbers})


def _stops(trial: Trial, switch: SwitchStatus | None, now: JobNow) -> RemedyReason | None:
    """Why a remedy is not gone on with; None where it is."""
    if switch is None or now.attempt != trial.told.attempt:
        return "restarted"
    if trial.interrupted:
        return "interrupted"
    if now.allowed is None or trial.told.remedy not in now.allowed.remedies:
        return "not_allowed"
    if now.is_known and now.straggler is None:
        return "gone"
    if now.is_known and now.straggler is not None and now.straggler.ranks != (trial.told.rank,):
        return "moved"
    waits = not trial.kept and trial.is_over
    return "not_switched" if waits and now.time_s > trial.asked_s + SWITCH_S else None


def _gone_on(trial: Trial, switch: SwitchStatus, now: JobNow) -> Trial:
    """The trial with the part that has begun, or is over, by now."""
    if not trial.is_over:
        is_over = now.last_step >= trial.parts[-1] + trial.steps - 1
        return replace(trial, is_over=is_over, asked_s=now.time_s) if is_over else trial
    wanted = trial.value(switch)
    if switch.value != wanted or switch.next_request(wanted) is not None:
        return trial
    # (the step in which they switched has begun without)
    since_step = switch.since_step if switch.since_step >= 0 else now.last_step
    return replace(trial, parts=(*trial.parts, since_step + 1), is_over=False)


def _effect(trial: Trial, step_s: Mapping[int, float]) -> dict[str, float]:
    """What the remedy does to a step, give or take what is chance (see `RemedyChanged.numbers`)."""
    sides: list[NDArray[np.float64]] = []
    for side in (True, False):
        parts = [first for first, is_on in zip(trial.parts, PARTS, strict=True) if is_on is side]
        numbers = [number for first in parts for number in range(first, first + trial.steps)]
        sides.append(np.array([step_s[number] for number in numbers if number in step_s]))
    counts: dict[str, float] = {"on_steps": len(sides[0]), "off_steps": len(sides[1])}
    if not all(counts.values()):
        return counts
    (on_s, on_error_s), (off_s, off_error_s) = map(_median, sides)
    effect = {"on_s": on_s, "off_s": off_s, "saves_s": off_s - on_s, "error_s": hypot(on_error_s, off_error_s)}
    return effect | counts


def _median(values: NDArray[np.float64]) -> tuple[float, float]:
    """The median, and its standard error by that of the median deviation: 1.2533 σ / √n, σ being 1.4826 deviations."""
    median = float(np.median(values))
    deviation = float(np.median(np.abs(values - median)))
    return median, 1.2533 * 1.4826 * deviation / sqrt(len(values))
