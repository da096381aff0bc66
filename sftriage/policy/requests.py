"""Captures that no rule asks for: manual requests, follow-ups of ones that hang; and several in the same steps. Pure.

A manual request needs no suspect; the limits are those of every capture.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from sftriage.model.captures import (
    SAMPLES_PER_SECOND,
    CaptureRequest,
    ChoiceReason,
    Decision,
    ManualRequest,
    Profiler,
    Trigger,
)
from sftriage.policy import limits
from sftriage.policy.choosing import Means, Situation, choose, options_of
from sftriage.policy.explanations import Why
from sftriage.policy.limits import Chosen
from sftriage.policy.policy_set import PolicySet
from sftriage.policy.schema import Capture
from sftriage.policy.state import State, opened, started
from sftriage.words.decisions import SENTENCES, reason_sentence

NO_RULE = ""
"""The rule of what no rule asked for."""

ANY = Situation(stage=None)
"""Nothing is known of the job."""


def decide_manual_request(
    manual: ManualRequest,
    policies: PolicySet,
    state: State,
    now_s: float,
    *,
    ranks: Collection[int],
    step: int,
    attempt: int = 0,
    still: Collection[int] = (),
    case: Situation = ANY,
) -> tuple[Decision, State]:
    """What to do about a capture that a person asks for, and the state to pass to the next call.

    ``ranks`` are all there are, of which ``still`` take no steps now; ``step`` is the last one known. Without a
    suspect, ``auto`` takes what shows both operators and lines.
    """
    state = opened(state, now_s)
    bounds = policies.limits
    missing = sorted(set(manual.ranks) - set(ranks))
    why = limits.of_the_run(policies, state, now_s) or limits.of_the_ranks(Chosen(manual.ranks, ()), bounds, state)
    if missing:
        why = Why("no_such_rank", {"ranks": tuple(missing), **({"last_rank": max(ranks)} if ranks else {})})
    elif why is None and len(manual.ranks) > limits.left(bounds, state, now_s):
        why = Why("captures_left", {"wanted": len(manual.ranks), "left": limits.left(bounds, state, now_s)})
    means = {} if why is not None else {rank: _means(manual, rank, still, case) for rank in manual.ranks}
    requests = _requests(manual, means, state, step, attempt)
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
        chosen="" if manual.profiler != "auto" else _CHOSEN[request.profiler],
    )


_CHOSEN: Mapping[Profiler, ChoiceReason] = {"stacks": "stands_still", "torch": "whole_rank", "nsys": "device_clock"}
"""Why ``auto`` chose a profiler of somebody whom nobody suspects."""


def _capture(manual: ManualRequest) -> Capture:
    said = {"profiler": manual.profiler, SAMPLES_PER_SECOND: manual.samples_per_second, **manual.options}
    return Capture.model_validate(said)


def _means(manual: ManualRequest, rank: int, still: Collection[int], case: Situation) -> Means:
    means = choose(_capture(manual), replace(case, stands_still=rank in still))
    assert means is not None, "where nothing is left open, there is something to begin with"
    return means


def _requests(
    manual: ManualRequest, means: Mapping[int, Means], state: State, step: int, attempt: int
) -> tuple[CaptureRequest, ...]:
    capture = _capture(manual)
    again = f"a{attempt}-" if attempt else ""
    return tuple(
        CaptureRequest(
            capture_id=f"asked-s{step}-r{rank}-{again}{state.asked + number}",
            rank=rank,
            profiler=by.profiler,
            steps=by.steps(manual.steps),
            warmup_steps=by.warmup_steps(manual.warmup_steps),
            max_seconds=manual.max_seconds,
            max_bytes=manual.max_bytes,
            options=options_of(capture, by),
        )
        for number, (rank, by) in enumerate(means.items(), start=1)
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


READY_S: dict[Profiler, float] = {"torch": 0.5, "stacks": 0.5, "nsys": 4.0}
"""How long it may take until every rank has its request, and its profiler is there, on a busy host too."""

_SPARE_STEPS = 4
"""Ranks are not all in the same step, and a step may be recorded beforehand to know what it takes."""


def in_the_same_steps(requests: Sequence[CaptureRequest], step: int, step_s: float) -> tuple[CaptureRequest, ...]:
    """The requests made at once, with the step before which none is to begin, where there are several.

    The foremost rank is in ``step``; a step takes about ``step_s``.
    """
    ready_s = max((READY_S[one.profiler] for one in requests if one.takes_steps), default=0.0)
    if len(requests) < 2 or ready_s == 0.0:
        return tuple(requests)
    lead = max(one.warmup_steps for one in requests) + _SPARE_STEPS + math.ceil(ready_s / max(step_s, 1e-3))
    return tuple(replace(one, first_step=step + lead) if one.takes_steps else one for one in requests)
