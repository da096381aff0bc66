"""The closed loop: a remedy that a policy allows is tried on a straggler that stays, and kept or undone. Pure.

A job's steps drift, so a trial has four parts of as many steps, with the remedy and without in turn. It is kept where
the typical step is shorter with it: by the least that the policy asks for, and by more than chance; and undone where
its reason is gone. Each group of ranks keeps one remedy at most, and one trial runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import hypot, sqrt
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sftriage.mitigate import advice
from sftriage.mitigate.advice import Straggler
from sftriage.mitigate.switching import Setting, SwitchStatus
from sftriage.model.events import Pipeline, RemedyChanged, RemedyReason, RemedyState
from sftriage.policy.schema import Mitigate

PARTS = (True, False, True, False)
"""Of a trial: with the remedy, or without."""
SWITCH_S = 120.0
"""How long it is waited for all ranks to have switched."""
LOOK_S = 30.0
"""How often it is worked out how far ahead stages would best be: that is a simulation of many steps."""
SLOW_STEPS = 27
"""For so many steps a link has to be slow at every look: thrice those whose median its delay is, for beside other
processes one such median may be anything."""
ERRORS = 2.0
"""By so many standard errors a saving is more than chance."""
_MIN_RANKS = 4
"""Among fewer, a ring is never slower."""


@dataclass(frozen=True, slots=True)
class JobNow:
    """What is known now.

    ``step_s`` are the steps that nothing disturbs. ``switches`` are the groups of ranks that a remedy can be switched
    on. The ``straggler`` has been slow for long, and is still, as far as ``is_known``. ``allowed`` is what the policy
    allows.
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
    """A remedy that is being tried, or kept, as last ``told``.

    Attributes:
        steps: of each part.
        parts: the first whole step of each part that has begun; all but the last are over.
        asked_s: since when the present setting is wanted.
        is_over: the last part is over, and the next one is wanted.
        interrupted: it cannot go on: it is an earlier controller's, or the steps changed meanwhile.
    """

    told: RemedyChanged
    steps: int
    asked_s: float
    parts: tuple[int, ...] = ()
    is_over: bool = True
    interrupted: bool = False

    @property
    def kept(self) -> bool:
        return self.told.state == "kept"

    @property
    def is_on(self) -> bool:
        return not self.interrupted and (self.kept or PARTS[len(self.parts) - (not self.is_over)])

    def of(self, now: JobNow) -> SwitchStatus | None:
        """The group that it is for; None where that is not known to be there."""
        found = (one for one in now.switches if one.name == self.told.switch)
        return next(found, None) if now.attempt == self.told.attempt else None

    def is_replaced(self, switches: Sequence[SwitchStatus]) -> bool:
        """Whether its ranks have joined anew, as another group of the same kind."""
        told = self.told
        n = len(told.ahead_S) or int(told.numbers.get("ring_ranks", 0))
        return any(
            (told.rank in one.ranks, len(one.ranks), one.microbatches > 0) == (True, n, told.remedy == "pipeline")
            for one in switches
            if one.name != told.switch
        )

    def setting(self, switch: SwitchStatus) -> Setting:
        if not self.is_on or self.told.rank not in switch.ranks:
            return Setting()
        ahead_S = self.told.ahead_S
        return Setting.of_plan(ahead_S) if ahead_S else Setting(switch.ranks.index(self.told.rank) + 1)


@dataclass(frozen=True, slots=True)
class RemedyLoop:
    """What is done about stragglers: remedies that are kept or tried, and when others were undone.

    ``trials`` are by the names of their groups. ``advised`` is the advice of an attempt where no more can be done,
    ``looked_s`` the time of the last planning. ``slow_since`` is the step since which a group has had the same slow
    link, by the group's name and the link's first rank.
    """

    trials: Mapping[str, Trial] = field(default_factory=dict)
    undone_s: Mapping[tuple[str, int], float] = field(default_factory=dict)
    advised: Mapping[tuple[int, str, int], RemedyChanged] = field(default_factory=dict)
    looked_s: Mapping[tuple[str, int], float] = field(default_factory=dict)
    slow_since: Mapping[tuple[str, int], int] = field(default_factory=dict)

    @classmethod
    def resumed(cls, told: Sequence[RemedyChanged]) -> RemedyLoop:
        """The loop of a controller that goes on with a run, by what is on record."""
        loop = cls()
        for one in told:
            if one.state == "advised":
                loop = loop._advising(one)
            elif one.state == "undone":
                loop = loop._without_trial(one)
            else:
                loop = loop._with_trial(Trial(one, 0, one.time_s, interrupted=one.state == "trying"))
        return loop

    def wanted(self, switches: Sequence[SwitchStatus]) -> Mapping[str, Setting]:
        trials = self.trials
        return {one.name: trials[one.name].setting(one) if one.name in trials else Setting() for one in switches}

    def after(self, now: JobNow) -> tuple[RemedyLoop, RemedyChanged | None]:
        """The loop as it goes on, and what is to go on record of that before anything is switched."""
        loop, tries = replace(self, slow_since=_slow_since(now, self.slow_since)), False
        for trial in self.trials.values():
            loop, told = loop._after_trial(trial, now)
            if told is not None:
                return loop, told
            tries |= not trial.kept
        return (loop, None) if tries else loop._considered(now)

    def _after_trial(self, trial: Trial, now: JobNow) -> tuple[RemedyLoop, RemedyChanged | None]:
        switch = trial.of(now)
        reason = _end_reason(trial, switch, now)
        if reason is not None:
            return self._undone(trial, now, reason)
        if trial.kept or switch is None:
            return self, None
        trial = _advanced(trial, switch, now)
        if not (trial.is_over and len(trial.parts) == len(PARTS)):
            return self._with_trial(trial), None
        numbers = _effect(trial, now.step_s)
        least_s = (now.allowed.min_saving_fraction if now.allowed is not None else 0.0) * numbers.get("off_s", 0.0)
        if numbers.get("saves_s", 0.0) < max(least_s, ERRORS * numbers.get("error_s", float("inf"))):
            return self._undone(trial, now, "no_help", numbers)
        told = _changed(trial.told, now, "kept", "helps", numbers)
        return self._with_trial(replace(trial, told=told)), told

    def _advising(self, told: RemedyChanged) -> RemedyLoop:
        here = told.attempt, *_subject_of(told)
        others = {about: one for about, one in self.advised.items() if about != here}
        return replace(self, advised=others if told.reason == "gone" else {**others, here: told})

    def _considered(self, now: JobNow) -> tuple[RemedyLoop, RemedyChanged | None]:
        switches = {one.name: one for one in now.switches}
        for told in self.advised.values():
            if told.attempt == now.attempt and told.switch in switches and _is_gone(told, switches[told.switch]):
                gone = _changed(told, now, "advised", "gone", {})
                return self._advising(gone), gone
        looked_s = {about: seen_s for about, seen_s in self.looked_s.items() if now.time_s < seen_s + LOOK_S}
        free = replace(now, switches=[one for one in now.switches if one.name not in self.trials])
        for told, of_step in _found(free, looked_s, self.slow_since):
            if told.remedy == "pipeline":
                looked_s[_subject_of(told)] = now.time_s
            allowed, expected = now.allowed, told.numbers["expected_s"] / of_step
            if told.reason == "no_room" or allowed is None or told.remedy not in allowed.remedies:
                about = now.attempt, *_subject_of(told)
                if (told.reason == "no_room" or expected >= advice.MIN_SHARE) and about not in self.advised:
                    return self._advising(told), told
                continue
            waits = now.time_s < self.undone_s.get(_subject_of(told), float("-inf")) + allowed.cooldown_s
            # (what was in force before may be on all ranks still, where a host has not heard)
            waits |= switches[told.switch].next_request(0) is not None
            if expected >= allowed.min_saving_fraction and not waits:
                tried = msgspec.structs.replace(told, state="trying", reason="worthwhile")
                return self._with_trial(Trial(tried, allowed.steps, now.time_s)), tried
        return replace(self, looked_s=looked_s), None

    def _undone(
        self, trial: Trial, now: JobNow, reason: RemedyReason, numbers: Mapping[str, float] = {}
    ) -> tuple[RemedyLoop, RemedyChanged]:
        told = _changed(trial.told, now, "undone", reason, numbers)
        loop = self._without_trial(told)
        if trial.kept:
            # (the steps of one that is tried meanwhile are other ones from here on)
            cut_off = {name: replace(one, interrupted=not one.kept) for name, one in loop.trials.items()}
            loop = replace(loop, trials=cut_off)
        return loop, told

    def _with_trial(self, trial: Trial) -> RemedyLoop:
        return replace(self, trials={**self.trials, trial.told.switch: trial})

    def _without_trial(self, told: RemedyChanged) -> RemedyLoop:
        # (what was cut off has shown nothing)
        waits = {} if told.reason in ("interrupted", "restarted") else {_subject_of(told): told.time_s}
        others = {name: one for name, one in self.trials.items() if name != told.switch}
        return replace(self, trials=others, undone_s={**self.undone_s, **waits})


def _subject_of(told: RemedyChanged) -> tuple[str, int]:
    return told.remedy, told.rank


def _slow_since(now: JobNow, before: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], int]:
    found = {}
    for switch in now.switches:
        pipeline = advice.pipeline_seen(switch)
        link = None if pipeline is None else advice.slow_link(pipeline)
        if link is not None:
            slow = switch.name, switch.ranks[link]
            # (the steps of a new attempt may be fewer)
            found[slow] = min(before.get(slow, now.last_step), now.last_step)
    return found


def _found(
    now: JobNow, looked: Collection[tuple[str, int]], slow_since: Mapping[tuple[str, int], int]
) -> Iterator[tuple[RemedyChanged, float]]:
    straggler = now.straggler
    common: dict[str, Any] = {"time_s": now.time_s, "attempt": now.attempt, "step": now.last_step, "state": "advised"}
    for switch in now.switches:
        advised = partial(RemedyChanged, **common, switch=switch.name)
        has_one = straggler is not None and len(straggler.ranks) == 1 and straggler.ranks[0] in switch.ranks
        if straggler is not None and has_one and switch.exchange_s > 0.0 and len(switch.ranks) >= _MIN_RANKS:
            yield _around(straggler, switch, advised), straggler.step_s
        for rank in switch.ranks:
            slow_for = now.last_step - slow_since.get((switch.name, rank), now.last_step)
            pipeline = advice.pipeline_seen(switch) if slow_for >= SLOW_STEPS else None
            if pipeline is not None and ("pipeline", rank) not in looked:
                yield _ahead(pipeline, switch.ranks.index(rank), switch, advised)


def _around(straggler: Straggler, switch: SwitchStatus, advised: Callable[..., RemedyChanged]) -> RemedyChanged:
    remedy = advice.around(straggler, advice.as_measured(len(switch.ranks), switch.exchange_s))
    numbers = {"late_s": straggler.late_s, "step_s": straggler.step_s, "ring_s": switch.exchange_s}
    numbers |= {"break_even_s": remedy.pays_from_s or 0.0, "expected_s": remedy.saves_s or 0.0}
    numbers |= {"ring_bytes": switch.exchanged_bytes, "ring_ranks": len(switch.ranks)}
    of_whom = {"rank": straggler.ranks[0], "who": straggler.who, "where": straggler.where}
    return advised(remedy="stragglar", reason="not_allowed", numbers=numbers, **of_whom)


def _ahead(
    pipeline: Pipeline, link: int, switch: SwitchStatus, advised: Callable[..., RemedyChanged]
) -> tuple[RemedyChanged, float]:
    ahead_S, now_s = advice.planned(pipeline), advice.step_s(pipeline, advice.one_f_one_b(pipeline))
    saves_s = now_s - advice.step_s(pipeline, ahead_S)
    costs_s = now_s - advice.step_s(advice.undelayed(pipeline), advice.one_f_one_b(pipeline))
    told = advised(
        remedy="pipeline",
        # (it is a straggler even where nothing can be done about it)
        reason="no_room" if saves_s < advice.MIN_SHARE * now_s <= costs_s else "not_allowed",
        rank=switch.ranks[link],
        who=f"the link between ranks {switch.ranks[link]} and {switch.ranks[link + 1]}",
        where="the pipeline",
        numbers={"delay_s": pipeline.delay_L[link], **_ways(switch, link), "step_s": now_s, "expected_s": saves_s},
        ahead_S=ahead_S,
        pipeline=pipeline,
    )
    return told, now_s


def _ways(switch: SwitchStatus, link: int) -> dict[str, float]:
    return {"there_s": switch.stages[link + 1].there_s, "back_s": switch.stages[link].back_s}


def _is_gone(told: RemedyChanged, switch: SwitchStatus) -> bool:
    """Whether a link that was slow delays half as much now, one way or the other: who is ahead may see but one."""
    if told.remedy != "pipeline" or told.rank not in switch.ranks[:-1]:
        return False
    now, was = _ways(switch, switch.ranks.index(told.rank)), told.numbers
    return any(now[way] < was[way] / 2 for way in now if was[way] > was["delay_s"] / 2)


def _changed(
    told: RemedyChanged, now: JobNow, state: RemedyState, reason: RemedyReason, numbers: Mapping[str, float]
) -> RemedyChanged:
    changed = {"time_s": now.time_s, "step": now.last_step, "state": state, "reason": reason}
    return msgspec.structs.replace(told, **changed, numbers={**told.numbers, **numbers})


def _end_reason(trial: Trial, switch: SwitchStatus | None, now: JobNow) -> RemedyReason | None:
    if now.attempt > trial.told.attempt or (switch is None and trial.is_replaced(now.switches)):
        return "restarted"
    if switch is None:
        # (its ranks are gone: the job ends, or begins anew; or who takes over has not heard of all of its hosts yet)
        return None
    if trial.interrupted:
        return "interrupted"
    if now.allowed is None or trial.told.remedy not in now.allowed.remedies:
        return "not_allowed"
    if trial.told.remedy == "pipeline":
        if _is_gone(trial.told, switch):
            return "gone"
    elif now.is_known and now.straggler is None:
        return "gone"
    elif now.is_known and now.straggler is not None and now.straggler.ranks != (trial.told.rank,):
        return "moved"
    waits = not trial.kept and trial.is_over
    return "not_switched" if waits and now.time_s > trial.asked_s + SWITCH_S else None


def _advanced(trial: Trial, switch: SwitchStatus, now: JobNow) -> Trial:
    if not trial.is_over:
        is_over = now.last_step >= trial.parts[-1] + trial.steps - 1
        return replace(trial, is_over=is_over, asked_s=now.time_s) if is_over else trial
    wanted = trial.setting(switch).value
    if switch.value != wanted or switch.next_request(wanted) is not None:
        return trial
    # (the step in which they switched has begun without)
    since_step = switch.since_step if switch.since_step >= 0 else now.last_step
    return replace(trial, parts=(*trial.parts, since_step + 1), is_over=False)


def _effect(trial: Trial, step_s: Mapping[int, float]) -> dict[str, float]:
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
