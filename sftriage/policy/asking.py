"""A capture that a person asks for: no suspect is needed, and the limits are those of every capture. Pure."""

from __future__ import annotations

from collections.abc import Collection

from sftriage.policy import limits
from sftriage.policy.limits import Chosen
from sftriage.policy.policy_set import PolicySet
from sftriage.policy.state import State, opened, started
from sftriage.policy.telling import Why
from sftriage.records import Ask, CaptureRequest, Decision, Trigger
from sftriage.words import reason_sentence

NO_RULE = ""
"""The rule of what no rule asked for."""


def decide_ask(
    ask: Ask, policies: PolicySet, state: State, now_s: float, *, ranks: Collection[int], step: int, attempt: int = 0
) -> tuple[Decision, State]:
    """What to do about a capture that a person asks for, and the state to pass to the next call.

    Args:
        ask: what is asked for.
        policies: the policies in force, for their limits.
        state: what the run has done so far.
        now_s: seconds on a clock that a restart does not reset (the Unix epoch).
        ranks: the ranks that there are.
        step: the last step that is known of.
        attempt: which start of the job this is.
    """
    state = opened(state, now_s)
    bounds = policies.plan.bounds
    missing = sorted(set(ask.ranks) - set(ranks))
    why = limits.of_the_run(policies.plan, state, now_s) or limits.of_the_ranks(Chosen(ask.ranks, ()), bounds, state)
    if missing:
        why = Why("no_such_rank", {"ranks": tuple(missing), **({"last_rank": max(ranks)} if ranks else {})})
    elif why is None and len(ask.ranks) > limits.left(bounds, state, now_s):
        why = Why("captures_left", {"wanted": len(ask.ranks), "left": limits.left(bounds, state, now_s)})
    requests = () if why is not None else _requests(ask, state, step, attempt)
    said = why or Why("asked", {"who": ask.who, "why": ask.reason})
    decision = Decision(
        time_s=now_s,
        first_step=step,
        last_step=step,
        label="asked",
        outcome="capture" if why is None else "throttle",
        reason=said.reason,
        parameters=said.parameters,
        numbers=limits.in_numbers(bounds, state, now_s),
        requests=requests,
        attempt=attempt,
    )
    return decision, started(state, NO_RULE, requests, now_s) if requests else state


def trigger_of_ask(ask: Ask, request: CaptureRequest, policies: PolicySet, decision: Decision) -> Trigger:
    """What goes into the manifest of a capture that a person asked for."""
    first = policies.loaded[0]
    return Trigger(
        first_step=decision.first_step,
        last_step=decision.last_step,
        label="asked",
        scope="rank",
        ranks=(request.rank,),
        stage=None,
        gain_s=0.0,
        share=0.0,
        persistence=0.0,
        policy=first.policy.metadata.name,
        policy_sha256=first.sha256,
        rule=NO_RULE,
        why=reason_sentence(decision),
    )


def _requests(ask: Ask, state: State, step: int, attempt: int) -> tuple[CaptureRequest, ...]:
    asked = max(state.asked, state.captures)
    stacks = ask.profiler == "stacks"
    again = f"a{attempt}-" if attempt else ""
    return tuple(
        CaptureRequest(
            capture_id=f"asked-s{step}-r{rank}-{again}{asked + number}",
            rank=rank,
            profiler=ask.profiler,
            steps=1 if stacks else ask.steps,
            warmup_steps=0 if stacks else ask.warmup_steps,
            max_seconds=ask.max_seconds,
            max_bytes=ask.max_bytes,
        )
        for number, rank in enumerate(ask.ranks, start=1)
    )
