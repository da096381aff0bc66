"""Rules on the job against itself. They tell somebody, and never capture: nobody alone is why the job is slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sftriage.decisions import Regression, Verdict
from sftriage.policy.schema import Rule
from sftriage.policy.state import State

_END = "{} (end)"
"""Under which the end of what a rule told is noted; no rule can be called so."""


def matching(rules: Sequence[Rule], verdict: Verdict) -> tuple[Rule, ...]:
    """The rules that are about the verdict's regression, whatever its label and whoever is suspected beside it."""
    found = verdict.regression
    if found is None:
        return ()
    return tuple(rule for rule in rules if rule.match.reason == "regressed" and _about(rule, found))


def told(rules: Sequence[Rule], verdict: Verdict, state: State, now_s: float) -> tuple[tuple[str, ...], State]:
    """Those whose notifications are due, and the state once they have been told.

    A regression is told of at most once in a rule's cooldown, and its end only where its beginning was.
    """
    due = [rule for rule in matching(rules, verdict) if rule.notify]
    if verdict.regression is not None and verdict.regression.until_step is not None:
        names = {rule.name: _END.format(rule.name) for rule in due if _unended(rule.name, state)}
    else:
        names = {
            rule.name: rule.name
            for rule in due
            if rule.name not in state.notified_s or now_s >= state.notified_s[rule.name] + rule.cooldown_s
        }
    if names:
        state = replace(state, notified_s={**state.notified_s, **dict.fromkeys(names.values(), now_s)})
    return tuple(names), state


def _about(rule: Rule, found: Regression) -> bool:
    stages = rule.match.stage
    return rule.reached(found.fraction, found.fraction * found.best_step_s) and (
        not stages or bool(set(stages) & set(found.stages))
    )


def _unended(rule: str, state: State) -> bool:
    """Whether a rule has told of a regression since it last told of an end."""
    begun_s, ended_s = (state.notified_s.get(name) for name in (rule, _END.format(rule)))
    return begun_s is not None and (ended_s is None or ended_s < begun_s)
