"""Captures that no rule asks for: manual requests, follow-ups of ones that hang; and several in the same steps. Pure.

A manual request needs no suspect; the limits are those of every capture.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from sftriage.policy import limits
from sftriage.policy.capture import Capture
from sftriage.policy.explanations import Why
from sftriage.policy.limits import Chosen
from sftriage.policy.policy_set import PolicySet
from sftriage.policy.state import State, opened, started
from sftriage.records import CaptureRequest, Decision, ManualRequest, Profiler, Trigger
from sftriage.words import SENTENCES, reason_sentence

NO_RULE = ""
"""The rule of what no rule asked for."""


def decide_manual_request(
    manual: ManualRequest,
    policies: PolicySet,
    state: State,
    now_s: float,
    *,
    ranks: Collection[int],
    step: int,
    attempt: int = 0,
) -> tuple[Decision, State]:
    """What to do about a capture that a person asks for, and the state to pass to the next call.

    ``ranks`` are those that there are, ``step`` is the last one that is known of; ``now_s`` as in `engine.decide`.
    """
    state = opened(state, now_s)
    bounds = policies.limits
    missing = sorted(set(manual.ranks) - set(ranks))
    why = limits.of_the_run(policies, state, now_s) or limits.of_the_ranks(Chosen(manual.ranks, ()), bounds, state)
    if missing:
        why = Why("no_such_rank", {"ranks": tuple(missing), **({"last_rank": max(ranks)} if ranks else {})})
    elif why is None and len(manual.ranks) > limits.left(bounds, state, now_s):
        why = Why("captures_left", {"wanted": len(manual.ranks), "left": limits.left(bounds, state, now_s)})
    requests = () if why is not None else _requests(manual, state, step, attempt)
    said = why or Why("asked", {"who": manual.who, "why": manual.reason})
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


def trigger_of_request(
    manual: ManualRequest, request: CaptureRequest, policies: PolicySet, decision: Decision
) -> Trigger:
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


def _requests(manual: ManualRequest, state: State, step: int, attempt: int) -> tuple[CaptureRequest, ...]:
    asked = max(state.asked, state.captures)
    stacks = manual.profiler == "stacks"
    again = f"a{attempt}-" if attempt else ""
    return tuple(
        CaptureRequest(
            capture_id=f"asked-s{step}-r{rank}-{again}{asked + number}",
            rank=rank,
            profiler=manual.profiler,
            steps=1 if stacks else manual.steps,
            warmup_steps=0 if stacks else manual.warmup_steps,
            max_seconds=manual.max_seconds,
            max_bytes=manual.max_bytes,
            # (nsys takes what its rank was launched with)
            options=Capture().options if manual.profiler == "torch" else {},
        )
        for number, rank in enumerate(manual.ranks, start=1)
    )


STACKS_S = 30.0
"""The time-box of the stacks of a rank that hangs inside its capture."""

_MOST_OF_AN_ID = 93


def decide_follow_up(
    hung: CaptureRequest, why: Trigger, state: State, now_s: float, *, step: int, attempt: int = 0
) -> tuple[Decision, Trigger, State]:
    """Have the stacks taken of a rank that hangs inside its capture, and the state to pass to the next call.

    No limit is asked: the capture had its place, and this only looks at a process that does nothing. It counts.
    """
    request = CaptureRequest(
        capture_id=f"{hung.capture_id[:_MOST_OF_AN_ID]}-stacks",
        rank=hung.rank,
        profiler="stacks",
        steps=1,
        warmup_steps=0,
        max_seconds=STACKS_S,
        max_bytes=hung.max_bytes,
        role=hung.role,
    )
    decision = Decision(
        time_s=now_s,
        first_step=step,
        last_step=step,
        label=why.label,
        outcome="capture",
        reason="rank_hangs",
        rule=why.rule or None,
        parameters={"rank": hung.rank, "capture_id": hung.capture_id},
        requests=(request,),
        attempt=attempt,
    )
    hangs = SENTENCES[decision.reason][0].format_map(decision.parameters)
    because = replace(why, why=f"{hangs}; {why.why}")
    return decision, because, started(opened(state, now_s), "", (request,), now_s)


READY_S: dict[Profiler, float] = {"torch": 0.5, "nsys": 4.0}
"""How long it may take until every rank has its request, and its profiler is there, on a busy host too."""

_SPARE_STEPS = 4
"""Ranks are not all in the same step, and a step may be recorded beforehand to know what it takes."""


def in_the_same_steps(requests: Sequence[CaptureRequest], step: int, step_s: float) -> tuple[CaptureRequest, ...]:
    """The requests made at once, with the step before which none is to begin, where there are several.

    The foremost rank is in ``step``; a step takes about ``step_s``.
    """
    ready_s = max((READY_S.get(one.profiler, 0.0) for one in requests), default=0.0)
    if len(requests) < 2 or ready_s == 0.0:
        return tuple(requests)
    lead = max(one.warmup_steps for one in requests) + _SPARE_STEPS + math.ceil(ready_s / max(step_s, 1e-3))
    return tuple(replace(one, first_step=step + lead) if one.profiler in READY_S else one for one in requests)
