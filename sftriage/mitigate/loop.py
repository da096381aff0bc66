"""Starts, keeps and undoes remedies against chronic stragglers. Pure; the controller calls it once per turn.

Since a job's steps drift, a trial has four parts of equal length, alternately with and without the remedy. The loop
keeps the remedy if the typical step is shorter with it, by the policy's minimum and by more than chance, and undoes it
once its cause is gone. Each group of ranks has at most one remedy, and one trial runs at a time.
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
"""The parts of a trial: with the remedy, or without."""
SWITCH_S = 120.0
"""Maximum time for all ranks to switch."""
LOOK_S = 30.0
"""How often a pipeline is planned anew, which simulates many steps."""
SLOW_STEPS = 27
"""Steps for which every look must find a link slow: three times those of one median, which other processes may
disturb."""
ERRORS = 2.0
"""Standard errors that a saving must exceed."""
_MIN_RANKS = 4
"""Among fewer ranks, StragglAR is never faster than a ring."""


@dataclass(frozen=True, slots=True)
class JobNow:
    """The job's state at ``time_s``.

    Attributes:
        step_s: durations of undisturbed steps, by number.
        switches: the groups of ranks that can switch a remedy on.
        straggler: the chronic straggler, if any; meaningful only if ``is_known``.
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
    """A remedy on trial, or kept.

    Attributes:
        latest: its latest event.
        steps: length of each part.
        wanted_since_s: when the current setting was first wanted.
        parts: first full step of each part that has begun; all but the last have ended.
        is_over: the last part has ended, and the next is wanted.
        interrupted: it must end: an earlier controller began it, or the steps changed meanwhile.
    """

    latest: RemedyChanged
    steps: int
    wanted_since_s: float
    parts: tuple[int, ...] = ()
    is_over: bool = True
    interrupted: bool = False

    @property
    def kept(self) -> bool:
        return self.latest.state == "kept"

    @property
    def is_on(self) -> bool:
        return not self.interrupted and (self.kept or PARTS[len(self.parts) - (not self.is_over)])

    def of(self, now: JobNow) -> SwitchStatus | None:
        """The trial's group; None if no host reports it."""
        found = (switch for switch in now.switches if switch.name == self.latest.switch)
        return next(found, None) if now.attempt == self.latest.attempt else None

    def is_replaced(self, switches: Sequence[SwitchStatus]) -> bool:
        """Whether its ranks have restarted as a new group of the same kind."""
        latest = self.latest
        kind = len(latest.ahead_S) or int(latest.numbers.get("ring_ranks", 0)), latest.remedy == "pipeline"
        others = [switch for switch in switches if switch.name != latest.switch and latest.rank in switch.ranks]
        return any((len(other.ranks), other.microbatches > 0) == kind for other in others)

    def setting(self, switch: SwitchStatus) -> Setting:
        if not self.is_on or self.latest.rank not in switch.ranks:
            return Setting()
        ahead_S = self.latest.ahead_S
        return Setting.of_plan(ahead_S) if ahead_S else Setting(switch.ranks.index(self.latest.rank) + 1)


@dataclass(frozen=True, slots=True)
class RemedyLoop:
    """All remedies of a job.

    Attributes:
        trials: remedies kept or on trial, by group.
        undone_s: when a remedy was last undone, by remedy and rank.
        advised: advice that was only recorded, by attempt, remedy and rank.
        planned_s: when a pipeline was last planned, by remedy and rank.
        slow_since: the step since which a link is slow, by group and the link's first rank.
    """

    trials: Mapping[str, Trial] = field(default_factory=dict)
    undone_s: Mapping[tuple[str, int], float] = field(default_factory=dict)
    advised: Mapping[tuple[int, str, int], RemedyChanged] = field(default_factory=dict)
    planned_s: Mapping[tuple[str, int], float] = field(default_factory=dict)
    slow_since: Mapping[tuple[str, int], int] = field(default_factory=dict)

    @classmethod
    def resumed(cls, recorded: Sequence[RemedyChanged]) -> RemedyLoop:
        """The loop of a controller that resumes a run, from its recorded events."""
        loop = cls()
        for event in recorded:
            if event.state == "advised":
                loop = loop._with_advice(event)
            elif event.state == "undone":
                loop = loop._without_trial(event)
            else:
                loop = loop._with_trial(Trial(event, 0, event.time_s, interrupted=event.state == "trying"))
        return loop

    def wanted(self, switches: Sequence[SwitchStatus]) -> Mapping[str, Setting]:
        free = {switch.name: Setting() for switch in switches if switch.name not in self.trials}
        return free | {s.name: self.trials[s.name].setting(s) for s in switches if s.name in self.trials}

    def after(self, now: JobNow) -> tuple[RemedyLoop, RemedyChanged | None]:
        """The next loop, and the event to record before anything is switched."""
        loop, on_trial = replace(self, slow_since=_slow_since(now, self.slow_since)), False
        for trial in self.trials.values():
            loop, event = loop._after_trial(trial, now)
            if event is not None:
                return loop, event
            on_trial |= not trial.kept
        return (loop, None) if on_trial else loop._next_remedy(now)

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
        event = _changed(trial.latest, now, "kept", "helps", numbers)
        return self._with_trial(replace(trial, latest=event)), event

    def _with_advice(self, event: RemedyChanged) -> RemedyLoop:
        here = event.attempt, *_subject_of(event)
        others = {about: other for about, other in self.advised.items() if about != here}
        return replace(self, advised=others if event.reason == "gone" else {**others, here: event})

    def _next_remedy(self, now: JobNow) -> tuple[RemedyLoop, RemedyChanged | None]:
        switches = {switch.name: switch for switch in now.switches}
        for event in self.advised.values():
            if event.attempt == now.attempt and event.switch in switches and _is_gone(event, switches[event.switch]):
                gone = _changed(event, now, "advised", "gone", {})
                return self._with_advice(gone), gone
        planned_s = {subject: at_s for subject, at_s in self.planned_s.items() if now.time_s < at_s + LOOK_S}
        free = replace(now, switches=[switch for switch in now.switches if switch.name not in self.trials])
        for event, of_step in _candidates(free, planned_s, self.slow_since):
            if event.remedy == "pipeline":
                planned_s[_subject_of(event)] = now.time_s
            allowed, expected = now.allowed, event.numbers["expected_s"] / of_step
            if event.reason == "no_room" or allowed is None or event.remedy not in allowed.remedies:
                subject = now.attempt, *_subject_of(event)
                if (event.reason == "no_room" or expected >= advice.MIN_SHARE) and subject not in self.advised:
                    return self._with_advice(event), event
                continue
            waits = now.time_s < self.undone_s.get(_subject_of(event), float("-inf")) + allowed.cooldown_s
            # (ranks of a host that is behind may still have the previous setting)
            waits |= switches[event.switch].next_request(0) is not None
            if expected >= allowed.min_saving_fraction and not waits:
                tried = msgspec.structs.replace(event, state="trying", reason="worthwhile")
                return self._with_trial(Trial(tried, allowed.steps, now.time_s)), tried
        return replace(self, planned_s=planned_s), None

    def _undone(
        self, trial: Trial, now: JobNow, reason: RemedyReason, numbers: Mapping[str, float] = {}
    ) -> tuple[RemedyLoop, RemedyChanged]:
        event = _changed(trial.latest, now, "undone", reason, numbers)
        loop = self._without_trial(event)
        if trial.kept:
            # (steps change from here on, so a trial in progress cannot go on)
            cut_off = {name: replace(other, interrupted=not other.kept) for name, other in loop.trials.items()}
            loop = replace(loop, trials=cut_off)
        return loop, event

    def _with_trial(self, trial: Trial) -> RemedyLoop:
        return replace(self, trials={**self.trials, trial.latest.switch: trial})

    def _without_trial(self, event: RemedyChanged) -> RemedyLoop:
        # (an interrupted trial has shown nothing: no cooldown)
        waits = {} if event.reason in ("interrupted", "restarted") else {_subject_of(event): event.time_s}
        others = {name: trial for name, trial in self.trials.items() if name != event.switch}
        return replace(self, trials=others, undone_s={**self.undone_s, **waits})


def _subject_of(event: RemedyChanged) -> tuple[str, int]:
    return event.remedy, event.rank


def _slow_since(now: JobNow, before: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], int]:
    found = {}
    for switch in now.switches:
        pipeline = advice.measured_pipeline(switch)
        link = None if pipeline is None else advice.slow_link(pipeline)
        if link is not None:
            slow = switch.name, switch.ranks[link]
            # (the steps of a new attempt may be fewer)
            found[slow] = min(before.get(slow, now.last_step), now.last_step)
    return found


def _candidates(
    now: JobNow, planned: Collection[tuple[str, int]], slow_since: Mapping[tuple[str, int], int]
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
            pipeline = advice.measured_pipeline(switch) if slow_for >= SLOW_STEPS else None
            if pipeline is not None and ("pipeline", rank) not in planned:
                yield _ahead(pipeline, switch.ranks.index(rank), switch, advised)


def _around(straggler: Straggler, switch: SwitchStatus, advised: Callable[..., RemedyChanged]) -> RemedyChanged:
    remedy = advice.around(straggler, advice.as_measured(len(switch.ranks), switch.exchange_s))
    numbers = {"late_s": straggler.late_s, "step_s": straggler.step_s, "ring_s": switch.exchange_s}
    numbers |= {"break_even_s": remedy.pays_from_s or 0.0, "expected_s": remedy.saves_s or 0.0}
    numbers |= {"ring_bytes": switch.exchanged_bytes, "ring_ranks": len(switch.ranks)}
    subject = {"rank": straggler.ranks[0], "who": straggler.who, "where": straggler.where}
    return advised(remedy="stragglar", reason="not_allowed", numbers=numbers, **subject)


def _ahead(
    pipeline: Pipeline, link: int, switch: SwitchStatus, advised: Callable[..., RemedyChanged]
) -> tuple[RemedyChanged, float]:
    ahead_S, now_s = advice.planned(pipeline), advice.step_s(pipeline, advice.one_f_one_b(pipeline))
    saves_s = now_s - advice.step_s(pipeline, ahead_S)
    costs_s = now_s - advice.step_s(advice.undelayed(pipeline), advice.one_f_one_b(pipeline))
    event = advised(
        remedy="pipeline",
        # (report the straggler even if nothing can be done about it)
        reason="no_room" if saves_s < advice.MIN_SHARE * now_s <= costs_s else "not_allowed",
        rank=switch.ranks[link],
        who=f"the link between ranks {switch.ranks[link]} and {switch.ranks[link + 1]}",
        where="the pipeline",
        numbers={"delay_s": pipeline.delay_L[link], **_ways(switch, link), "step_s": now_s, "expected_s": saves_s},
        ahead_S=ahead_S,
        pipeline=pipeline,
    )
    return event, now_s


def _ways(switch: SwitchStatus, link: int) -> dict[str, float]:
    return {"there_s": switch.stages[link + 1].there_s, "back_s": switch.stages[link].back_s}


def _is_gone(latest: RemedyChanged, switch: SwitchStatus) -> bool:
    """Whether a slow link's delay has halved in either direction: a stage that runs ahead may see only one of them."""
    if latest.remedy != "pipeline" or latest.rank not in switch.ranks[:-1]:
        return False
    now, was = _ways(switch, switch.ranks.index(latest.rank)), latest.numbers
    return any(now[way] < was[way] / 2 for way in now if was[way] > was["delay_s"] / 2)


def _changed(
    latest: RemedyChanged, now: JobNow, state: RemedyState, reason: RemedyReason, numbers: Mapping[str, float]
) -> RemedyChanged:
    changed = {"time_s": now.time_s, "step": now.last_step, "state": state, "reason": reason}
    return msgspec.structs.replace(latest, **changed, numbers={**latest.numbers, **numbers})


def _end_reason(trial: Trial, switch: SwitchStatus | None, now: JobNow) -> RemedyReason | None:
    if now.attempt > trial.latest.attempt or (switch is None and trial.is_replaced(now.switches)):
        return "restarted"
    if switch is None:
        # (the job ends or restarts, or a new controller has not heard from all hosts yet)
        return None
    if trial.interrupted:
        return "interrupted"
    if now.allowed is None or trial.latest.remedy not in now.allowed.remedies:
        return "not_allowed"
    if trial.latest.remedy == "pipeline":
        if _is_gone(trial.latest, switch):
            return "gone"
    elif now.is_known and now.straggler is None:
        return "gone"
    elif now.is_known and now.straggler is not None and now.straggler.ranks != (trial.latest.rank,):
        return "moved"
    waits = not trial.kept and trial.is_over
    return "not_switched" if waits and now.time_s > trial.wanted_since_s + SWITCH_S else None


def _advanced(trial: Trial, switch: SwitchStatus, now: JobNow) -> Trial:
    if not trial.is_over:
        is_over = now.last_step >= trial.parts[-1] + trial.steps - 1
        return replace(trial, is_over=is_over, wanted_since_s=now.time_s) if is_over else trial
    wanted = trial.setting(switch).value
    if switch.value != wanted or switch.next_request(wanted) is not None:
        return trial
    # (the step in which they switched began without it)
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
