"""Why a decision is what it is: limits on captures, and reasons with their parameters and numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from sftriage.model.captures import Parameter, ReasonCode
from sftriage.model.verdicts import Suspect, Verdict
from sftriage.policy.contradictions import PROFILERS
from sftriage.policy.loading import PolicySet
from sftriage.policy.schema import Limits, Rule
from sftriage.policy.state import DAY_S, HOUR_S, Reproduction, State, Target, key_of

Parameters: TypeAlias = Mapping[str, Parameter]


@dataclass(frozen=True, slots=True)
class Why:
    """A decision's reason and its parameters; `words.decisions.reason_sentence` makes the sentence."""

    reason: ReasonCode
    parameters: Parameters = field(default_factory=dict)


def missed(rule: Rule, verdict: Verdict, suspect: Suspect, cost_hours: float = 0.0) -> Why:
    """By which of its conditions a rule, of all the nearest, does not match."""
    label, scope, stage, _ = rule.misses(verdict.label, suspect)
    match = rule.match
    found: dict[str, Parameter] = {"rule": rule.name}
    if label:
        found = {}
    elif scope:
        found |= {"scope": suspect.scope, "scopes": match.scope}
    elif stage:
        found |= {"stage": suspect.stage or "", "stages": match.stage}
    elif not rule.reached(suspect.share, suspect.gain_s):
        # Not a number reaches nothing.
        if not suspect.share >= rule.min_share:
            found |= {"share": suspect.share, "min_share": rule.min_share}
        if not suspect.gain_s >= rule.min_gain_s:
            found |= {"gain_s": suspect.gain_s, "min_gain_s": rule.min_gain_s}
    elif suspect.pattern in (match.pattern or (suspect.pattern,)) and cost_hours < rule.min_cost_hours:
        found |= {"cost_hours": cost_hours, "min_cost_hours": rule.min_cost_hours}
    else:
        found |= {"pattern": suspect.pattern, "patterns": match.pattern}
    return Why("no_rule_matched", found)


def by_system(suspect: Suspect) -> Why:
    """What the system did to a suspect, and how much of its lateness that was."""
    code, fraction = suspect.by_system or ("descheduled", suspect.descheduled_fraction or 0.0)
    share = "descheduled_share" if code == "descheduled" else "system_share"
    return Why(code, {**named(suspect), share: fraction})


def named(suspect: Suspect) -> dict[str, Parameter]:
    """The ranks and the stage of a suspect."""
    alone = len(suspect.ranks) == 1
    ranks: dict[str, Parameter] = {"rank": suspect.ranks[0]} if alone else {"rank_count": len(suspect.ranks)}
    return {**ranks, **({"stage": suspect.stage} if suspect.stage else {})}


def gain_in_numbers(verdict: Verdict, rule: Rule | None, cost_hours: float = 0.0) -> dict[str, float]:
    """What was found, and what a rule asks for; ``cost_hours`` is what the suspect has cost since the run began."""
    numbers = {"exposed_s": verdict.exposed_s}
    if verdict.suspects:
        first = verdict.suspects[0]
        numbers |= {"gain_s": first.gain_s, "share": first.share, "persistence": first.persistence}
    if cost_hours:
        numbers["cost_hours"] = cost_hours
    if rule is not None:
        numbers |= {"min_share": rule.min_share, "min_gain_s": rule.min_gain_s, "cooldown_s": rule.cooldown_s}
        if rule.min_cost_hours:
            numbers["min_cost_hours"] = rule.min_cost_hours
        if rule.capture is not None:
            numbers |= {"sample": rule.capture.sample, "control_ranks": rule.capture.control_ranks}
    return numbers


WORSE_TIMES = 1.5
"""A suspect is worse than when it was captured once its cost has grown by this factor; a window's noise is far less."""

EVIDENCE_S = 7 * DAY_S
"""How long a trace stands for the fault that it holds. In a month of work, what is beside the fault changes."""


def of_the_run(policies: PolicySet, state: State, now_s: float) -> Why | None:
    """Why no rule may capture now. The limit that lasts longest comes first."""
    bounds = policies.limits
    if bounds.captures_per_run is not None and state.captures >= bounds.captures_per_run:
        return Why("captures_per_run", {"captures": state.captures, "limit": bounds.captures_per_run})
    opens_s = policies.opens_s(now_s)
    if opens_s is None:
        return Why("active")
    if opens_s > now_s:
        return Why("active", {"until_s": opens_s})
    if state.spent_s > 0 and state.started_s is not None:
        until_s = state.started_s + state.spent_s / bounds.overhead_fraction
        if now_s < until_s:
            spent = {"spent_s": state.spent_s, "budget_s": budget_s(bounds, state, now_s)}
            return Why("overhead_budget", {**spent, "budget_share": bounds.overhead_fraction, "until_s": until_s})
    for period in periods(bounds, state, now_s):
        if period.left <= 0:
            asked = {"captures": len(period.asked_s), "limit": period.limit}
            return Why(period.name, {**asked, "until_s": period.frees_s(0)})
    return None


@dataclass(frozen=True, slots=True)
class Period:
    """A limit for any hour, or day: when captures were asked for within the last one, in order."""

    name: Literal["captures_per_day", "captures_per_hour"]
    limit: int
    length_s: float
    asked_s: Sequence[float]

    @property
    def left(self) -> int:
        """Places that are left."""
        return self.limit - len(self.asked_s)

    @property
    def kept(self) -> int:
        """Places that are kept for a suspect larger than any before: the last one, where it is not the only one."""
        return 1 if self.limit > 1 else 0

    def frees_s(self, kept: int) -> float:
        """When there is a place beside those that are kept."""
        return self.asked_s[len(self.asked_s) - self.limit + kept] + self.length_s


def periods(bounds: Limits, state: State, now_s: float) -> tuple[Period, Period]:
    """The limits for any day and any hour."""
    return (
        Period("captures_per_day", bounds.day_limit, DAY_S, state.captures_within(DAY_S, now_s)),
        Period("captures_per_hour", bounds.captures_per_hour, HOUR_S, state.captures_within(HOUR_S, now_s)),
    )


def place_kept(target: Target, bounds: Limits, state: State, now_s: float) -> Why | None:
    """Why a suspect does not get the place that is left: it is kept for one that is larger than any before.

    Whatever was captured for nothing, the largest fault of a job never waits for that. A stall is always the largest.
    """
    if target.gain_s > state.largest_gain_s:
        return None
    for period in periods(bounds, state, now_s):
        if period.left <= period.kept:
            gains = {"gain_s": target.gain_s, "largest_gain_s": state.largest_gain_s}
            return Why("place_kept", {"place_of": period.name, **gains, "until_s": period.frees_s(period.kept)})
    return None


def budget_s(bounds: Limits, state: State, now_s: float) -> float:
    """What captures may have cost the job by now, in seconds; nothing before the first decision."""
    started_s = now_s if state.started_s is None else state.started_s
    return bounds.overhead_fraction * max(0.0, now_s - started_s)


def of_the_suspect(
    rule: Rule, target: Target, fired_s: Mapping[str, float], state: State, now_s: float, *, following: bool = False
) -> Why | None:
    """Why a rule has to wait with a suspect: it was captured and has not changed, it cools, or captures of it failed.

    ``fired_s`` is the state's `last_fired_s`. The longest wait comes first. A capture that is ``following`` up what an
    earlier capture left open waits for neither.
    """
    # (there may be a thousand rules)
    unchanged = already_captured(rule, target, state, now_s) if state.reproductions and not following else None
    if unchanged is not None:
        return unchanged
    key = key_of(rule.name, target.suspect)
    last_s = -math.inf if following else fired_s.get(key, -math.inf)
    failures = state.failures.get(key)
    cooled_s = last_s + rule.cooldown_s
    again_s = -math.inf if failures is None else failures.until_s(rule.cooldown_s)
    if now_s >= cooled_s and now_s >= again_s:
        return None
    if failures is None or again_s < cooled_s:
        return Why("cooldown", {"rule": rule.name, "until_s": cooled_s})
    return Why("after_failures", {"rule": rule.name, "failures": failures.count, "until_s": again_s})


def already_captured(rule: Rule, target: Target, state: State, now_s: float) -> Why | None:
    """Why there is nothing new to see: a capture of this attempt of the job holds the fault, and it is no worse.

    Whichever rule asked for it: what another profiler would show is new, unless the choice is ``auto``'s.
    """
    profiler = rule.capture.profiler if rule.capture is not None else ""
    profilers = PROFILERS if profiler == "auto" else (profiler,)
    held = max(_held(profilers, target, state, now_s), key=lambda one: one.gain_s, default=None)
    if held is None:
        return None
    worse_gain_s = WORSE_TIMES * held.gain_s
    if target.gain_s >= worse_gain_s:
        return None
    gains = {"captured_gain_s": held.gain_s, "gain_s": target.gain_s, "worse_gain_s": worse_gain_s}
    until_s = held.fired_s + EVIDENCE_S
    return Why("already_captured", {"rule": rule.name, "capture_id": held.capture_id, **gains, "until_s": until_s})


def left_open(target: Target, state: State, now_s: float) -> Reproduction | None:
    """The capture of a suspect that holds its fault and does not show why, where none has followed it up."""
    if not state.reproductions:
        return None
    asked = {one.follows for one in state.running.values()}
    left = (one for one in _held(PROFILERS, target, state, now_s) if one.left_open and not one.follows)
    return next((one for one in left if not one.followed and one.capture_id not in asked), None)


def _held(profilers: Iterable[str], target: Target, state: State, now_s: float) -> Iterator[Reproduction]:
    """The captures of a suspect in this attempt of the job that hold its fault, and are not too long ago."""
    for profiler in profilers:
        one = state.reproductions.get(key_of(profiler, target.suspect))
        if one is not None and one.attempt == target.attempt and now_s < one.fired_s + EVIDENCE_S:
            yield one


def left(bounds: Limits, state: State, now_s: float, target: Target | None = None) -> int:
    """How many captures may be asked for: what run, day and hour have left, and what may run at once.

    For a suspect that is not the largest so far, without the places that are kept for one that is. Somebody who asks
    has no suspect, and may have every place.
    """
    keeps = target is not None and not target.gain_s > state.largest_gain_s
    free = [period.left - (period.kept if keeps else 0) for period in periods(bounds, state, now_s)]
    if bounds.captures_per_run is not None:
        free.append(bounds.captures_per_run - state.captures)
    return max(0, min(*free, bounds.concurrent_ranks))


def of_the_ranks(ranks: Sequence[int], bounds: Limits, state: State) -> Why | None:
    """Why these ranks cannot be captured now."""
    running = {one.rank: capture_id for capture_id, one in sorted(state.running.items())}
    for rank in ranks:
        if rank in running:
            return Why("rank_busy", {"rank": rank, "capture_id": running[rank]})
    if len(running) + len(ranks) > bounds.concurrent_ranks:
        limit = bounds.concurrent_ranks
        return Why("concurrent_ranks", {"running": len(running), "limit": limit, "wanted": len(ranks)})
    return None


def in_numbers(bounds: Limits, state: State, now_s: float) -> dict[str, float]:
    """Every limit, and how near it is."""
    of_day, of_hour = periods(bounds, state, now_s)
    return {
        "captures": state.captures,
        **({} if bounds.captures_per_run is None else {"captures_per_run": bounds.captures_per_run}),
        "captures_last_hour": len(of_hour.asked_s),
        "captures_per_hour": of_hour.limit,
        "captures_last_day": len(of_day.asked_s),
        "captures_per_day": of_day.limit,
        "largest_gain_s": state.largest_gain_s,
        "running_ranks": len(state.running),
        "concurrent_ranks": bounds.concurrent_ranks,
        "spent_s": state.spent_s,
        "budget_s": budget_s(bounds, state, now_s),
        "overhead_budget": bounds.overhead_fraction,
    }
