"""Why a capture has to wait: limits of the run, and of the rule that asks for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sftriage.policy.capture import Capture
from sftriage.policy.cron import clock
from sftriage.policy.plan import Bounds, Plan, PlannedRule
from sftriage.policy.state import HOUR_S, Failures, State


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a capture has to wait, and what would end the wait."""

    reason: str
    resolves: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """The ranks to capture, and the healthy peers to compare them with."""

    ranks: tuple[int, ...]
    controls: tuple[int, ...]


def of_the_run(plan: Plan, state: State, now_s: float) -> Refusal | None:
    """Why no rule may capture now. What lasts longest is said first."""
    bounds = plan.bounds
    if state.captures >= bounds.captures_per_run:
        return Refusal(
            f"captures_per_run: {state.captures} of {bounds.captures_per_run} captures made",
            "Raise limits.captures_per_run, or start another run.",
        )
    opens_s = plan.opens_s(now_s)
    if opens_s is None:
        return Refusal("active: captures are never allowed again", "Change active.cron.")
    if opens_s > now_s:
        return Refusal(
            f"active: captures are not allowed until {clock(opens_s)}", "Wait until then, or change active.cron."
        )
    until_s = budget_until_s(bounds, state)
    if until_s is not None and now_s < until_s:
        return Refusal(
            f"overhead_budget: captures have cost {state.spent_s:.3g} s of the {budget_s(bounds, state, now_s):.3g} s "
            f"that are {100 * bounds.overhead_fraction:.3g}% of the run so far, until {clock(until_s)}",
            "Wait until the run has earned it, or raise limits.overhead_budget.",
        )
    recent_s = state.captures_within_hour(now_s)
    if len(recent_s) >= bounds.captures_per_hour:
        until_s = recent_s[len(recent_s) - bounds.captures_per_hour] + HOUR_S
        return Refusal(
            f"captures_per_hour: {len(recent_s)} of {bounds.captures_per_hour} captures asked for, "
            f"until {clock(until_s)}",
            "Wait until then, or raise limits.captures_per_hour.",
        )
    return None


def budget_s(bounds: Bounds, state: State, now_s: float) -> float:
    """What captures may have cost the job by now, in seconds."""
    return bounds.overhead_fraction * max(0.0, now_s - _started_s(state, now_s))


def budget_until_s(bounds: Bounds, state: State) -> float | None:
    """When what was spent will have been earned; None if nothing was spent."""
    if state.spent_s <= 0 or state.started_s is None:
        return None
    return state.started_s + state.spent_s / bounds.overhead_fraction


def waits_until_s(rule: PlannedRule, fired_s: float | None, failures: Failures | None) -> float:
    """Until when a rule has to wait for its cooldown, or after captures that failed."""
    cooled_s = -math.inf if fired_s is None else fired_s + rule.cooldown_s
    return cooled_s if failures is None else max(cooled_s, failures.until_s(rule.cooldown_s))


def waits(rule: PlannedRule, failures: Failures | None, until_s: float) -> Refusal:
    """Why a rule has to wait until then, in words."""
    if failures is None or failures.until_s(rule.cooldown_s) < until_s:
        return Refusal(f"cooldown of rule {rule.name} until {clock(until_s)}", "Wait for the cooldown to end.")
    failed = "the last capture" if failures.count == 1 else f"the last {failures.count} captures"
    return Refusal(
        f"{failed} of rule {rule.name} failed or {'was' if failures.count == 1 else 'were'} refused, "
        f"next attempt from {clock(until_s)} on",
        "See why in `sftriage decisions`, and wait for the next attempt.",
    )


def left(bounds: Bounds, state: State, now_s: float) -> int:
    """How many captures a rule may ask for: what the run and the hour have left, and what may run at once."""
    of_hour = bounds.captures_per_hour - len(state.captures_within_hour(now_s))
    return max(0, min(bounds.captures_per_run - state.captures, of_hour, bounds.concurrent_ranks))


def choose(capture: Capture, ranks: Sequence[int], healthy: Sequence[int], most: int) -> Chosen:
    """Whom a rule captures.

    Args:
        capture: how many it wants.
        ranks: the suspected ranks.
        healthy: the ranks that are not suspected, the most typical first.
        most: how many captures are left; the suspects come first.
    """
    chosen = (capture.ranks or tuple(dict.fromkeys(ranks))[: capture.sample])[:most]
    wanted = min(capture.control_ranks, most - len(chosen))
    return Chosen(chosen, tuple([rank for rank in dict.fromkeys(healthy) if rank not in chosen][:wanted]))


def of_the_ranks(chosen: Chosen, bounds: Bounds, state: State) -> Refusal | None:
    """Why these ranks cannot be captured now."""
    running = {one.rank: capture_id for capture_id, one in sorted(state.running.items())}
    ranks = chosen.ranks + chosen.controls
    for rank in ranks:
        if rank in running:
            return Refusal(f"rank {rank} is being captured already ({running[rank]})", "Wait for that capture to end.")
    if len(running) + len(ranks) > bounds.concurrent_ranks:
        return Refusal(
            f"concurrent_ranks: {len(running)} of {bounds.concurrent_ranks} ranks are being captured, "
            f"{len(ranks)} more asked for",
            "Wait for a running capture to end, or raise limits.concurrent_ranks.",
        )
    return None


def in_numbers(bounds: Bounds, state: State, now_s: float) -> dict[str, float]:
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


def _started_s(state: State, now_s: float) -> float:
    return now_s if state.started_s is None else state.started_s
