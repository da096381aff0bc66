"""Why a capture has to wait: limits of the run, and of the rule that asks for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sftriage.policy.capture import Capture
from sftriage.policy.explanations import Why
from sftriage.policy.policy_set import PolicySet
from sftriage.policy.schema import Limits, Rule
from sftriage.policy.state import HOUR_S, Failures, State


@dataclass(frozen=True, slots=True)
class Chosen:
    """The ranks to capture, and the healthy peers to compare them with."""

    ranks: tuple[int, ...]
    controls: tuple[int, ...]


def of_the_run(policies: PolicySet, state: State, now_s: float) -> Why | None:
    """Why no rule may capture now. What lasts longest is said first."""
    bounds = policies.limits
    if state.captures >= bounds.captures_per_run:
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
    recent_s = state.captures_within_hour(now_s)
    if len(recent_s) >= bounds.captures_per_hour:
        until_s = recent_s[len(recent_s) - bounds.captures_per_hour] + HOUR_S
        asked = {"captures": len(recent_s), "limit": bounds.captures_per_hour}
        return Why("captures_per_hour", {**asked, "until_s": until_s})
    return None


def budget_s(bounds: Limits, state: State, now_s: float) -> float:
    """What captures may have cost the job by now, in seconds; nothing before the first decision."""
    started_s = now_s if state.started_s is None else state.started_s
    return bounds.overhead_fraction * max(0.0, now_s - started_s)


def of_the_rule(rule: Rule, fired_s: float | None, failures: Failures | None, now_s: float) -> Why | None:
    """Why a rule that last asked for a capture at ``fired_s`` has to wait: for its cooldown, or after failures."""
    cooled_s = -math.inf if fired_s is None else fired_s + rule.cooldown_s
    again_s = -math.inf if failures is None else failures.until_s(rule.cooldown_s)
    if now_s >= max(cooled_s, again_s):
        return None
    if failures is None or again_s < cooled_s:
        return Why("cooldown", {"rule": rule.name, "until_s": cooled_s})
    return Why("after_failures", {"rule": rule.name, "failures": failures.count, "until_s": again_s})


def left(bounds: Limits, state: State, now_s: float) -> int:
    """How many captures a rule may ask for: what the run and the hour have left, and what may run at once."""
    of_hour = bounds.captures_per_hour - len(state.captures_within_hour(now_s))
    return max(0, min(bounds.captures_per_run - state.captures, of_hour, bounds.concurrent_ranks))


def choose(capture: Capture, ranks: Sequence[int], healthy: Sequence[int], most: int) -> Chosen:
    """Whom a rule captures, suspects first, at ``most`` so many; ``healthy`` has the most typical ranks first."""
    chosen = (capture.ranks or tuple(dict.fromkeys(ranks))[: capture.sample])[:most]
    wanted = min(capture.control_ranks, most - len(chosen))
    return Chosen(chosen, tuple([rank for rank in dict.fromkeys(healthy) if rank not in chosen][:wanted]))


def of_the_ranks(chosen: Chosen, bounds: Limits, state: State) -> Why | None:
    """Why these ranks cannot be captured now."""
    running = {one.rank: capture_id for capture_id, one in sorted(state.running.items())}
    ranks = chosen.ranks + chosen.controls
    for rank in ranks:
        if rank in running:
            return Why("rank_busy", {"rank": rank, "capture_id": running[rank]})
    if len(running) + len(ranks) > bounds.concurrent_ranks:
        limit = bounds.concurrent_ranks
        return Why("concurrent_ranks", {"running": len(running), "limit": limit, "wanted": len(ranks)})
    return None


def in_numbers(bounds: Limits, state: State, now_s: float) -> dict[str, float]:
    """Every limit, and how near it is."""
    return {
        "captures": state.captures,
        "captures_per_run": bounds.captures_per_run,
        "captures_last_hour": len(state.captures_within_hour(now_s)),
        "captures_per_hour": bounds.captures_per_hour,
        "running_ranks": len(state.running),
        "concurrent_ranks": bounds.concurrent_ranks,
        "spent_s": state.spent_s,
        "budget_s": budget_s(bounds, state, now_s),
        "overhead_budget": bounds.overhead_fraction,
    }
