"""A decision in words and numbers."""

from __future__ import annotations

from sftriage.policy.plan import PlannedRule
from sftriage.policy.quantities import GainCondition
from sftriage.records import Suspect, Verdict


def shortfall(rule: PlannedRule, verdict: Verdict, suspect: Suspect) -> str:
    """Why a rule, of all the nearest, does not match."""
    label, scope, stage, _ = rule.misses(verdict.label, suspect)
    match = rule.rule.match
    if label:
        return f"no rule is about {verdict.label}"
    if scope:
        return f"scope {suspect.scope} is not one of {', '.join(match.scope)} of rule {rule.name}"
    if stage:
        where = f"stage {suspect.stage}" if suspect.stage else "a whole rank"
        return f"{where} is not one of {', '.join(match.stage)} of rule {rule.name}"
    if not rule.reached(suspect.share, suspect.gain_s):
        gain = GainCondition(rule.min_share, rule.min_gain_s)
        return f"{gain.shortfall(suspect.share, suspect.gain_s)} of rule {rule.name}"
    return f"pattern {suspect.pattern} is not one of {', '.join(match.pattern)} of rule {rule.name}"


def explained(suspect: Suspect, rule: PlannedRule) -> str:
    """Why a rule captures a suspect."""
    return (
        f"rule {rule.name}: {where(suspect)} of {who(suspect)} would save {1000 * suspect.gain_s:.3g} ms a step "
        f"({100 * suspect.share:.3g}%), in {100 * suspect.persistence:.3g}% of the steps"
    )


def standstill(verdict: Verdict) -> str:
    """Why a job stands still, and for whom, if that is known."""
    reason = ", ".join(verdict.reasons) or "no reason given"
    if not verdict.suspects:
        return reason
    first = verdict.suspects[0]
    others = sum(len(suspect.ranks) for suspect in verdict.suspects[1:])
    return f"{reason}: {who(first)} in {where(first)}" + (f" and {others} more" if others else "")


def who(suspect: Suspect) -> str:
    """The ranks of a suspect."""
    return f"rank {suspect.ranks[0]}" if len(suspect.ranks) == 1 else f"{len(suspect.ranks)} ranks"


def where(suspect: Suspect) -> str:
    """The stage of a suspect."""
    return suspect.stage or "all local stages"


def gain_in_numbers(verdict: Verdict, rule: PlannedRule | None) -> dict[str, float]:
    """What was found, and what a rule asks for."""
    numbers = {"exposed_s": verdict.exposed_s}
    if verdict.suspects:
        first = verdict.suspects[0]
        numbers |= {"gain_s": first.gain_s, "share": first.share, "persistence": first.persistence}
    if rule is not None:
        numbers |= {
            "min_share": rule.min_share,
            "min_gain_s": rule.min_gain_s,
            "cooldown_s": rule.cooldown_s,
            "for_windows": rule.windows,
        }
        if rule.capture is not None:
            numbers |= {"sample": rule.capture.sample, "control_ranks": rule.capture.control_ranks}
    return numbers
