"""Why a decision is what it is, as a code with parameters, and the numbers it was taken from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from sftriage.policy.plan import PlannedRule
from sftriage.records import Parameter, ReasonCode, Suspect, Verdict

Parameters: TypeAlias = Mapping[str, Parameter]


@dataclass(frozen=True, slots=True)
class Why:
    """A decision's reason, and what it is said with; `words.reason_sentence` says it."""

    reason: ReasonCode
    parameters: Parameters = field(default_factory=dict)


def missed(rule: PlannedRule, verdict: Verdict, suspect: Suspect) -> Why:
    """By which of its conditions a rule, of all the nearest, does not match."""
    label, scope, stage, _ = rule.misses(verdict.label, suspect)
    match = rule.rule.match
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
    else:
        found |= {"pattern": suspect.pattern, "patterns": match.pattern}
    return Why("no_rule_matched", found)


def saved(suspect: Suspect) -> Parameters:
    """What it would save to mend a suspect."""
    return {
        **_named(suspect),
        "gain_s": suspect.gain_s,
        "share": suspect.share,
        "persistence": suspect.persistence,
    }


def standstill(verdict: Verdict) -> Parameters:
    """Why a job stands still, and for whom, if that is known."""
    if not verdict.suspects:
        return {"reasons": verdict.reasons}
    more = sum(len(suspect.ranks) for suspect in verdict.suspects[1:])
    return {"reasons": verdict.reasons, **_named(verdict.suspects[0]), **({"more_ranks": more} if more else {})}


def _named(suspect: Suspect) -> Parameters:
    alone = len(suspect.ranks) == 1
    ranks = {"rank": suspect.ranks[0]} if alone else {"rank_count": len(suspect.ranks)}
    return {**ranks, **({"stage": suspect.stage} if suspect.stage else {})}


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
