"""What is captured: by which profiler, and captures that no rule asks for. Pure.

A profiler is the one that is named, or what ``auto`` makes of where the time goes. Where the host does the work, Python
stacks alone say which line does it, and nothing is started that would have to be stopped again. Where a stage computes,
operators and kernels do; so they do where it is not known what is slow, and the stacks are sampled beside them. What
one leaves open, another may show: see `left_open` in `sftriage.reduce`.

A manual request needs no suspect; the limits are those of every capture.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

from sftriage.model.captures import (
    SAMPLE_STACKS,
    SAMPLES_PER_SECOND,
    CaptureRequest,
    ChoiceReason,
    Decision,
    LeftOpen,
    ManualRequest,
    Profiler,
    Trigger,
)
from sftriage.model.verdicts import Clock, Verdict
from sftriage.policy import limits
from sftriage.policy.limits import Parameters, Why
from sftriage.policy.loading import PolicySet
from sftriage.policy.schema import Capture
from sftriage.policy.state import State, opened, started
from sftriage.words.decisions import SENTENCES, reason_sentence
from sftriage.words.verdicts import verdict_sentence

COMPUTE = frozenset({"h2d", "forward", "fwd", "loss", "backward", "bwd", "optimizer", "optim"})
"""Words in the name of a stage that computes: what fills it are operators. Any other is the host's own work, unless
ranks wait for each other in it."""


@dataclass(frozen=True, slots=True)
class Means:
    """What runs, and why ``auto`` chose it; "" where it was named. ``once``: the stacks, one time, from outside."""

    profiler: Profiler
    chosen: ChoiceReason = ""
    once: bool = False

    def steps(self, asked: int) -> int:
        """The steps of a request, which is bounded in them also where it is of none."""
        return 1 if self.once else asked

    def warmup_steps(self, asked: int) -> int:
        """The steps before those: stacks need none."""
        return 0 if self.profiler == "stacks" else asked


def choose(
    capture: Capture,
    stage: str | None,
    *,
    sync: Collection[str] = (),
    clock: Clock = "host",
    nsys: bool = False,
    stands_still: bool = False,
    left_open: LeftOpen = "",
) -> Means | None:
    """What runs; None where nothing would show what was ``left_open`` by an earlier capture of the same suspect.

    ``stage`` is None for all local stages, or without a suspect; in the stages ``sync``, ranks wait for each other.

    A rank that stands still takes no step in which its trainer could do anything: it is captured from outside. So is
    one whose native frames are wanted, or its flight recorder's dump, which only that can have.
    """
    if capture.profiler == "stacks":
        from_outside = stands_still or capture.stacks.native or capture.stacks.flight_recorder
        return Means("stacks", once=from_outside)
    if capture.profiler != "auto":
        return Means(capture.profiler)
    if stands_still:
        return Means("stacks", "stands_still", once=True)
    on_device = nsys and clock == "device"
    if left_open == "stacks":
        return Means("stacks", "left_open")
    if left_open == "system":
        return Means("nsys", "left_open") if nsys else None
    if left_open:
        return Means("nsys" if on_device else "torch", "left_open")
    if stage is not None and not computes(stage, sync):
        return Means("stacks", "host_stage")
    if on_device:
        return Means("nsys", "device_clock")
    return Means("torch", "whole_rank" if stage is None else "compute_stage")


def computes(stage: str, sync: Collection[str] = ()) -> bool:
    """Whether a stage is filled by operators, or waits for other ranks' operators."""
    return stage in sync or not COMPUTE.isdisjoint(re.split(r"[^a-z0-9]+", stage.lower()))


def options_of(capture: Capture, means: Means) -> dict[str, Any]:
    """The options of what runs, ready for JSON."""
    if means.profiler == "stacks" and not means.once:
        return {SAMPLE_STACKS: True, SAMPLES_PER_SECOND: capture.samples_per_second}
    options = {"torch": capture.torch, "nsys": capture.nsys, "stacks": capture.stacks}[means.profiler]
    values: dict[str, Any] = options.model_dump(mode="json", exclude_none=True)
    if values.get(SAMPLE_STACKS):
        values[SAMPLES_PER_SECOND] = capture.samples_per_second
    return values


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
    clock: Clock = "host",
    nsys: bool = False,
) -> tuple[Decision, State]:
    """What to do about a capture that a person asks for, and the state to pass to the next call.

    ``ranks`` are all there are, of which ``still`` take no steps now; ``step`` is the last one known. Without a
    suspect, ``auto`` takes what shows both operators and lines.
    """
    state = opened(state, now_s)
    bounds = policies.limits
    missing = sorted(set(manual.ranks) - set(ranks))
    why = limits.of_the_run(policies, state, now_s) or limits.of_the_ranks(manual.ranks, bounds, state)
    if missing:
        why = Why("no_such_rank", {"ranks": tuple(missing), **({"last_rank": max(ranks)} if ranks else {})})
    elif why is None and len(manual.ranks) > limits.left(bounds, state, now_s):
        why = Why("captures_left", {"wanted": len(manual.ranks), "left": limits.left(bounds, state, now_s)})
    options = {"profiler": manual.profiler, SAMPLES_PER_SECOND: manual.samples_per_second, **manual.options}
    capture, again = Capture.model_validate(options), f"a{attempt}-" if attempt else ""
    requests: tuple[CaptureRequest, ...] = ()
    for rank in dict.fromkeys(manual.ranks) if why is None else ():
        means = choose(capture, None, clock=clock, nsys=nsys, stands_still=rank in still)
        assert means is not None, "where nothing is left open, there is something to begin with"
        request = CaptureRequest(
            capture_id=f"asked-s{step}-r{rank}-{again}{state.asked + len(requests) + 1}",
            rank=rank,
            profiler=means.profiler,
            steps=means.steps(manual.steps),
            warmup_steps=means.warmup_steps(manual.warmup_steps),
            max_seconds=manual.max_seconds,
            max_bytes=manual.max_bytes,
            options=options_of(capture, means),
        )
        requests += (request,)
    reason = why or Why("asked", {"who": manual.who, "why": manual.reason})
    decision = Decision(
        time_s=now_s,
        first_step=step,
        last_step=step,
        label="asked",
        outcome="capture" if why is None else "throttle",
        reason=reason.reason,
        parameters=reason.parameters,
        numbers=limits.in_numbers(bounds, state, now_s),
        requests=requests,
        attempt=attempt,
    )
    return decision, started(state, "", requests, now_s) if requests else state


def trigger(
    verdict: Verdict, policies: PolicySet, rule: str, rank: int | None = None, given: Parameters = MappingProxyType({})
) -> Trigger:
    """What goes into the manifest of a capture that ``rule`` asked for because of ``verdict``.

    Of several suspects, it is about the one that ``rank`` is of, which is captured. What was chosen, and followed up,
    is in the decision's parameters, ``given``.
    Raises ValueError where the verdict has no suspect, or the policy no such rule.
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

    def labels(why: Trigger) -> dict[str, str]:
        stage = {} if why.stage is None else {"stage": why.stage}
        return {"policy": why.policy, "rule": why.rule, "window": f"{why.first_step}-{why.last_step}", **stage}

    requests = tuple(replace(one, labels=labels(triggers[one.capture_id])) for one in decision.requests)
    return replace(decision, requests=requests)


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
        rule="",
        why=reason_sentence(decision),
        chosen="" if manual.profiler != "auto" else _CHOSEN[request.profiler],
    )


_CHOSEN: Mapping[Profiler, ChoiceReason] = {"stacks": "stands_still", "torch": "whole_rank", "nsys": "device_clock"}
"""Why ``auto`` chose a profiler without a suspect."""


STACKS_S = 30.0
"""The time-box of the stacks of a rank that hangs inside its capture."""

_MOST_OF_AN_ID = 93


def decide_follow_up(
    hung: CaptureRequest, why: Trigger, state: State, now_s: float, *, step: int, attempt: int = 0
) -> tuple[Decision, Trigger, State]:
    """Have the stacks taken of a rank that hangs inside its capture, and the state to pass to the next call.

    No limit applies: the capture had its place, and this only looks at a process that does nothing. It counts.
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
