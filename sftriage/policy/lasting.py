"""For how long a suspect has been there: what a rule's ``for`` and ``detection.contended_after`` ask for. Pure.

A suspect is the same over windows that follow on one another and name the same scope, ranks and stage, or no stage, in
the same attempt of the job. It counts from its first step in the window that named it first (its onset, or that
window's first step where it was there already) to the last step of this one. Windows overlap, and a step counts once; a
window that a capture disturbed says nothing of a suspect, and neither breaks nor counts. The time is what these steps
took, by their windows' mean: a clock would count pauses of the job, and nothing where windows come late and at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sftriage.model.counters import MOST_FRACTION
from sftriage.model.verdicts import Regression, Suspect, Verdict
from sftriage.policy import explanations
from sftriage.policy.explanations import Parameters, Why
from sftriage.policy.quantities import CONTENTION, Lasting
from sftriage.policy.schema import Rule
from sftriage.policy.state import Lasted, State, Streak


def broken(state: State) -> State:
    """The state once a window has shown that nobody, or somebody else, is suspected."""
    return state if state.streak is None else replace(state, streak=None)


def continued(
    state: State, verdict: Verdict, suspect: Suspect, who: str, matching: Sequence[Rule], wanted: Mapping[str, Lasting]
) -> State:
    """The state with one more window for each rule that waits for the suspect, by its key, to last.

    ``wanted`` has what rules wait for, and how long `CONTENTION` is to last.
    """
    before = state.streak
    same = before is not None and (before.attempt, before.suspect) == (verdict.attempt, who)
    known = before.lasted if before is not None and same else {}
    waiting = [rule.name for rule in matching if rule.name in wanted]
    contended = (suspect.contended_fraction or 0.0) >= MOST_FRACTION and suspect.pattern != "recurring"
    if contended or CONTENTION in known:
        waiting.append(CONTENTION)
    if not waiting:
        return broken(state)
    lasted = {name: _longer(known.get(name), wanted[name], verdict, suspect) for name in waiting}
    streak = Streak(verdict.attempt, who, lasted)
    return state if streak == before else replace(state, streak=streak)


def reached(rule: Rule, wanted: Mapping[str, Lasting], state: State) -> bool:
    """Whether a rule that matches has matched for as long as it asks for."""
    if rule.name not in wanted:
        return True
    lasted = _lasted(rule.name, state)
    return lasted is not None and _is_long(lasted, wanted[rule.name])


def progress(rule: Rule, wanted: Mapping[str, Lasting], state: State) -> Parameters:
    """How long a rule has matched, and for how long it has to, in the unit that it says."""
    lasted = _lasted(rule.name, state)
    if wanted[rule.name].steps:
        return {"lasted_steps": 0 if lasted is None else lasted.steps, "for_steps": wanted[rule.name].steps}
    return {"lasted_s": 0.0 if lasted is None else lasted.seconds, "for_s": wanted[rule.name].seconds}


def contended(suspect: Suspect, wanted: Mapping[str, Lasting], state: State) -> Why | None:
    """That contention for CPUs may have made a suspect late; None if it did not, or has for as long as ``wanted``.

    Contention passes after some seconds, however many steps these are: a process ends, or is moved to another core.
    What it named a suspect for is evidence for a while after it: it counts from the first window that found it on, as
    long as windows name the suspect. It does not come back at regular steps.
    """
    lasted, for_s = _lasted(CONTENTION, state), wanted[CONTENTION].seconds
    if lasted is None or lasted.seconds >= for_s or suspect.pattern == "recurring":
        return None
    return explanations.contended(suspect, lasted.seconds, for_s)


def _lasted(name: str, state: State) -> Lasted | None:
    return None if state.streak is None else state.streak.lasted.get(name)


def _longer(known: Lasted | None, wanted: Lasting, verdict: Verdict, suspect: Suspect) -> Lasted:
    # Once it is long enough, nothing changes any more: a state that changes is written.
    if known is not None and _is_long(known, wanted):
        return known
    known = known or _begun(verdict, suspect)
    new = max(0, verdict.last_step - max(known.last_step, verdict.first_step - 1))
    took_s = new * verdict.exposed_s
    seconds = known.seconds + (took_s if math.isfinite(took_s) else 0.0)
    return Lasted(known.steps + new, seconds, max(known.last_step, verdict.last_step))


def _begun(verdict: Verdict, suspect: Suspect) -> Lasted:
    """Nothing yet, up to the step before the suspect's first in a window."""
    onset = verdict.first_step if suspect.onset_step is None else suspect.onset_step
    return Lasted(0, 0.0, min(max(onset, verdict.first_step), verdict.last_step) - 1)


def _is_long(lasted: Lasted, wanted: Lasting) -> bool:
    return lasted.steps >= wanted.steps if wanted.steps else lasted.seconds >= wanted.seconds


_END = "{} (end)"
"""Under which the end of what a rule told is noted; no rule can be called so."""


def regression_rules(rules: Sequence[Rule], verdict: Verdict) -> tuple[Rule, ...]:
    """The rules that are about the verdict's regression, whatever its label and whoever is suspected beside it."""
    found = verdict.regression
    if found is None:
        return ()
    return tuple(rule for rule in rules if rule.match.reason == "regressed" and _about(rule, found))


def regressions_due(
    rules: Sequence[Rule], verdict: Verdict, state: State, now_s: float
) -> tuple[tuple[str, ...], State]:
    """Those whose notifications are due, and the state once they have been told.

    A regression is told of at most once in a rule's cooldown, and its end only where its beginning was.
    """
    due = [rule for rule in regression_rules(rules, verdict) if rule.notify]
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
    begun_s, ended_s = (state.notified_s.get(name) for name in (rule, _END.format(rule)))
    return begun_s is not None and (ended_s is None or ended_s < begun_s)
