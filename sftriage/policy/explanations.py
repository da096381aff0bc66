"""Why a decision is what it is, as a code with parameters and numbers, and why a capture exists, for its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeAlias, cast

from sftriage.model.captures import ChoiceReason, Decision, Parameter, ReasonCode, Trigger
from sftriage.model.counters import MOST_FRACTION
from sftriage.model.verdicts import Suspect, Verdict
from sftriage.policy.choosing import Means
from sftriage.policy.policy_set import PolicySet
from sftriage.policy.schema import Rule
from sftriage.policy.state import Reproduction
from sftriage.words.verdicts import verdict_sentence

Parameters: TypeAlias = Mapping[str, Parameter]


@dataclass(frozen=True, slots=True)
class Why:
    """A decision's reason, and what it is said with; `words.reason_sentence` says it."""

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


def captured(rule: Rule, found: Parameters, means: Means, follows: Reproduction | None) -> Why:
    """Why a rule captures: what was found, what ``auto`` made of it, and what an earlier capture left open."""
    chosen: Parameters = {"profiler": means.profiler, "chosen": means.chosen} if means.chosen else {}
    if follows is None:
        return Why("rule_matched", {"rule": rule.name, **found, **chosen})
    first = {"follows": follows.capture_id, "left_open": follows.left_open}
    return Why("follow_up", {"rule": rule.name, **first, **found, **chosen})


def saved(suspect: Suspect) -> Parameters:
    """What it would save to mend a suspect."""
    return {**_named(suspect), "gain_s": suspect.gain_s, "share": suspect.share, "persistence": suspect.persistence}


def by_system(suspect: Suspect) -> Why:
    """What the system did to a suspect, and how much of its lateness that was."""
    code, fraction = suspect.by_system or ("descheduled", suspect.descheduled_fraction or 0.0)
    share = "descheduled_share" if code == "descheduled" else "system_share"
    return Why(code, {**_named(suspect), share: fraction})


def contended(suspect: Suspect, lasted_s: float, for_s: float) -> Why:
    """For how long contention for CPUs may have made a suspect late, and how much of it now, if it is most."""
    share = suspect.contended_fraction or 0.0
    now = {"contended_share": share} if share >= MOST_FRACTION else {}
    return Why("contended", {**_named(suspect), **now, "lasted_s": lasted_s, "for_s": for_s})


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


def trigger(
    verdict: Verdict, policies: PolicySet, rule: str, rank: int | None = None, given: Parameters = MappingProxyType({})
) -> Trigger:
    """What goes into the manifest of a capture that ``rule`` asked for because of ``verdict``.

    Of several suspects, it is about the one that ``rank`` is of, which is captured. What was chosen, and followed up,
    is in the decision's parameters, ``given``.

    Raises:
        ValueError: the verdict has no suspect, or the policy has no such rule.
    """
    if not verdict.suspects:
        raise ValueError("a verdict without a suspect triggers nothing")
    owner = policies.owner(rule)
    suspect = next((one for one in verdict.suspects if rank in one.ranks), verdict.suspects[0])
    return Trigger(
        first_step=verdict.first_step,
        last_step=verdict.last_step,
        label=verdict.label,
        scope=suspect.scope,
        ranks=suspect.ranks,
        stage=suspect.stage,
        gain_s=suspect.gain_s,
        share=suspect.share,
        persistence=suspect.persistence,
        policy=owner.policy.metadata.name,
        policy_sha256=owner.sha256,
        rule=rule,
        pattern=suspect.pattern,
        period_steps=suspect.period_steps,
        onset_step=suspect.onset_step,
        why=verdict_sentence(verdict),
        chosen=cast("ChoiceReason", given.get("chosen", "")),
        follows=str(given.get("follows", "")),
        clock=verdict.clock,
    )


def labelled(decision: Decision, triggers: Mapping[str, Trigger]) -> Decision:
    """The decision, with what led to each capture in its request: a trace says itself why it exists."""
    requests = tuple(replace(one, labels=_labels(triggers[one.capture_id])) for one in decision.requests)
    return replace(decision, requests=requests)


def _labels(why: Trigger) -> dict[str, str]:
    labels = {"policy": why.policy, "rule": why.rule, "window": f"{why.first_step}-{why.last_step}"}
    return labels | ({} if why.stage is None else {"stage": why.stage})
