"""Why a capture exists, for its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sftriage.policy.loading import LoadedPolicy
from sftriage.policy.policy_set import PolicySet
from sftriage.records import Decision, Trigger, Verdict
from sftriage.words import verdict_sentence


def trigger(verdict: Verdict, loaded: LoadedPolicy | PolicySet, rule: str, rank: int | None = None) -> Trigger:
    """What goes into the manifest of a capture that ``rule`` asked for because of ``verdict``.

    Args:
        verdict: what was found.
        loaded: the policy that the rule is of, or the set of policies in force.
        rule: the rule's name.
        rank: the rank that is captured: of several suspects, the one that it is of.

    Raises:
        ValueError: the verdict has no suspect, or the policy has no such rule.
    """
    if not verdict.suspects:
        raise ValueError("a verdict without a suspect triggers nothing")
    owner = (loaded if isinstance(loaded, PolicySet) else PolicySet((loaded,))).owner(rule)
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
    )


def labelled(decision: Decision, triggers: Mapping[str, Trigger]) -> Decision:
    """The decision, with what led to each capture in its request: a trace says itself why it exists.

    Args:
        decision: what is to be captured.
        triggers: why, by capture id.
    """
    requests = tuple(replace(one, labels=_labels(triggers[one.capture_id])) for one in decision.requests)
    return replace(decision, requests=requests)


def _labels(why: Trigger) -> dict[str, str]:
    labels = {"policy": why.policy, "rule": why.rule, "window": f"{why.first_step}-{why.last_step}"}
    return labels | ({} if why.stage is None else {"stage": why.stage})
