"""Captures: the limits on them, the profiler of each, and those that no rule requests. Pure.

A rule names its profiler, or ``auto`` chooses by where the time goes. If the host does the work, Python stacks alone
name the line, and no profiler has to be started and stopped. If a stage computes, or it is not known what is slow,
``auto`` records operators and kernels, with stacks. What one profiler leaves open, another may show: see `left_open`
in `sftriage.reduce`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, cast

from sftriage.model.captures import (
    DETAIL,
    SAMPLE_STACKS,
    SAMPLES_PER_SECOND,
    WHOLE_JOB,
    CaptureRequest,
    ChoiceReason,
    Decision,
    LeftOpen,
    ManualRequest,
    Parameter,
    Profiler,
    ReasonCode,
    Trigger,
)
from sftriage.model.verdicts import Clock, Suspect, Verdict
from sftriage.model.windows import JobStatus
from sftriage.policy.in_force import PolicySet
from sftriage.policy.schema import PROFILERS, Capture, Limits, Rule
from sftriage.policy.state import DAY_S, HOUR_S, Reproduction, State, Target, key_of, opened, started
from sftriage.words.decisions import SENTENCES, reason_sentence
from sftriage.words.verdicts import verdict_sentence

Parameters: TypeAlias = Mapping[str, Parameter]


@dataclass(frozen=True, slots=True)
class Why:
    """A decision's reason and its parameters; `words.decisions.reason_sentence` makes the sentence."""

    reason: ReasonCode
    parameters: Parameters = field(default_factory=dict)


def missed(rule: Rule, verdict: Verdict, suspect: Suspect, cost_hours: float = 0.0) -> Why:
    """The conditions of the nearest rule that do not match."""
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
        # NaN reaches no threshold.
        if not suspect.share >= rule.min_share:
            found |= {"share": suspect.share, "min_share": rule.min_share}
        if not suspect.gain_s >= rule.min_gain_s:
            found |= {"gain_s": suspect.gain_s, "min_gain_s": rule.min_gain_s}
    elif suspect.pattern in (match.pattern or (suspect.pattern,)) and cost_hours < rule.min_cost_hours:
        found |= {"cost_hours": cost_hours, "min_cost_hours": rule.min_cost_hours}
    else:
        found |= {"pattern": suspect.pattern, "patterns": match.pattern}
    return Why("no_rule_matched", found)


def by_system(suspect: Suspect) -> Why:
    """What the system did to a suspect, and its share of the lateness."""
    code, fraction = suspect.by_system or ("descheduled", suspect.descheduled_fraction or 0.0)
    share = "descheduled_share" if code == "descheduled" else "system_share"
    return Why(code, {**named(suspect), share: fraction})


def named(suspect: Suspect) -> dict[str, Parameter]:
    """The ranks and the stage of a suspect."""
    alone = len(suspect.ranks) == 1
    ranks: dict[str, Parameter] = {"rank": suspect.ranks[0]} if alone else {"rank_count": len(suspect.ranks)}
    return {**ranks, **({"stage": suspect.stage} if suspect.stage else {})}


WORSE_TIMES = 1.5
"""A suspect is worse than when captured once its cost has grown by this factor; a window's noise is far less."""

EVIDENCE_S = 7 * DAY_S
"""How long a trace represents its fault. In a month of work, everything around the fault changes."""


def run_limit(policies: PolicySet, state: State, now_s: float) -> Why | None:
    """Why no rule may capture now. The limit that lasts longest comes first."""
    bounds = policies.limits
    if bounds.captures_per_run is not None and state.captures >= bounds.captures_per_run:
        return Why("captures_per_run", {"captures": state.captures, "limit": bounds.captures_per_run})
    opens_s = policies.opens_s(now_s)
    if opens_s is None:
        return Why("active")
    if opens_s > now_s:
        return Why("active", {"until_s": opens_s})
    if state.spent_s > 0 and state.started_s is not None:
        until_s = state.started_s + state.spent_s / bounds.overhead_fraction
        if now_s < until_s:
            spent = {"spent_s": state.spent_s, "budget_s": budget_s(bounds, state, now_s)}
            return Why("overhead_budget", {**spent, "budget_share": bounds.overhead_fraction, "until_s": until_s})
    for period in periods(bounds, state, now_s):
        if period.left <= 0:
            count = {"captures": len(period.requested_s), "limit": period.limit}
            return Why(period.name, {**count, "until_s": period.frees_s(0)})
    return None


@dataclass(frozen=True, slots=True)
class Period:
    """A limit per hour or day, with the times of the captures requested within the last one, in order."""

    name: Literal["captures_per_day", "captures_per_hour"]
    limit: int
    length_s: float
    requested_s: Sequence[float]

    @property
    def left(self) -> int:
        return self.limit - len(self.requested_s)

    @property
    def kept(self) -> int:
        """Places reserved for a suspect larger than any before: the last one, unless it is the only one."""
        return 1 if self.limit > 1 else 0

    def frees_s(self, kept: int) -> float:
        """When a place is free besides the reserved ones."""
        return self.requested_s[len(self.requested_s) - self.limit + kept] + self.length_s


def periods(bounds: Limits, state: State, now_s: float) -> tuple[Period, Period]:
    """The limits for any day and any hour."""
    return (
        Period("captures_per_day", bounds.day_limit, DAY_S, state.captures_within(DAY_S, now_s)),
        Period("captures_per_hour", bounds.captures_per_hour, HOUR_S, state.captures_within(HOUR_S, now_s)),
    )


def place_kept(target: Target, bounds: Limits, state: State, now_s: float) -> Why | None:
    """Why a suspect does not get the remaining place: it is reserved for one larger than any before.

    So useless captures never delay a job's largest fault. A stall is always the largest.
    """
    if target.gain_s > state.largest_gain_s:
        return None
    for period in periods(bounds, state, now_s):
        if period.left <= period.kept:
            gains = {"gain_s": target.gain_s, "largest_gain_s": state.largest_gain_s}
            return Why("place_kept", {"place_of": period.name, **gains, "until_s": period.frees_s(period.kept)})
    return None


def budget_s(bounds: Limits, state: State, now_s: float) -> float:
    """What captures may have cost the job by now, in seconds; 0 before the first decision."""
    started_s = now_s if state.started_s is None else state.started_s
    return bounds.overhead_fraction * max(0.0, now_s - started_s)


def suspect_limit(
    rule: Rule, target: Target, fired_s: Mapping[str, float], state: State, now_s: float, *, following: bool = False
) -> Why | None:
    """Why a rule must wait with a suspect: it was captured and has not changed, is in cooldown, or its captures failed.

    ``fired_s`` is the state's `last_fired_s`. The longest wait comes first. A capture that is ``following`` up what an
    earlier capture left open waits for neither.
    """
    # (there may be a thousand rules)
    unchanged = already_captured(rule, target, state, now_s) if state.reproductions and not following else None
    if unchanged is not None:
        return unchanged
    key = key_of(rule.name, target.suspect)
    last_s = -math.inf if following else fired_s.get(key, -math.inf)
    failures = state.failures.get(key)
    cooled_s = last_s + rule.cooldown_s
    again_s = -math.inf if failures is None else failures.until_s(rule.cooldown_s)
    if now_s >= cooled_s and now_s >= again_s:
        return None
    if failures is None or again_s < cooled_s:
        return Why("cooldown", {"rule": rule.name, "until_s": cooled_s})
    return Why("after_failures", {"rule": rule.name, "failures": failures.count, "until_s": again_s})


def already_captured(rule: Rule, target: Target, state: State, now_s: float) -> Why | None:
    """Why a capture would show nothing new: one in this attempt contains the fault, which is no worse now.

    This holds for captures by any rule, except by another profiler, unless ``auto`` chose it.
    """
    profiler = rule.capture.profiler if rule.capture is not None else ""
    profilers = PROFILERS if profiler == "auto" else (profiler,)
    held = max(_held(profilers, target, state, now_s), key=lambda known: known.gain_s, default=None)
    if held is None:
        return None
    worse_gain_s = WORSE_TIMES * held.gain_s
    if target.gain_s >= worse_gain_s:
        return None
    gains = {"captured_gain_s": held.gain_s, "gain_s": target.gain_s, "worse_gain_s": worse_gain_s}
    until_s = held.fired_s + EVIDENCE_S
    return Why("already_captured", {"rule": rule.name, "capture_id": held.capture_id, **gains, "until_s": until_s})


def to_follow_up(target: Target, state: State, now_s: float) -> Reproduction | None:
    """The capture of a suspect that contains its fault but not the reason, if none has followed it up."""
    if not state.reproductions:
        return None
    followed = {running.follows for running in state.running.values()}
    held = (known for known in _held(PROFILERS, target, state, now_s) if known.left_open and not known.follows)
    return next((known for known in held if not known.followed and known.capture_id not in followed), None)


def _held(profilers: Iterable[str], target: Target, state: State, now_s: float) -> Iterator[Reproduction]:
    """The recent captures of a suspect in this attempt of the job that contain its fault."""
    for profiler in profilers:
        known = state.reproductions.get(key_of(profiler, target.suspect))
        if known is not None and known.attempt == target.attempt and now_s < known.fired_s + EVIDENCE_S:
            yield known


def places_left(bounds: Limits, state: State, now_s: float, target: Target | None = None) -> int:
    """How many captures may be requested: what run, day and hour have left, and what may run at once.

    Only the largest suspect so far gets the reserved places. A person's request has no suspect, and may use every
    place.
    """
    keeps = target is not None and not target.gain_s > state.largest_gain_s
    free = [period.left - (period.kept if keeps else 0) for period in periods(bounds, state, now_s)]
    if bounds.captures_per_run is not None:
        free.append(bounds.captures_per_run - state.captures)
    return max(0, min(*free, bounds.concurrent_ranks))


def ranks_limit(ranks: Sequence[int], bounds: Limits, state: State) -> Why | None:
    """Why these ranks cannot be captured now."""
    running = state.busy_ranks
    for rank in ranks:
        if rank in running:
            return Why("rank_busy", {"rank": rank, "capture_id": running[rank]})
    if len(running) + len(ranks) > bounds.concurrent_ranks:
        limit = bounds.concurrent_ranks
        return Why("concurrent_ranks", {"running": len(running), "limit": limit, "wanted": len(ranks)})
    return None


def whole_job_limit(state: State) -> Why | None:
    """Why the evidence of a hang cannot be gathered now. It needs no rank to itself, but one capture has all ranks."""
    under_way = (each for each in state.running.items() if each[1].of_whole_job)
    return next((Why("rank_busy", {"rank": one.rank, "capture_id": at}) for at, one in under_way), None)


def limits_in_numbers(bounds: Limits, state: State, now_s: float) -> dict[str, float]:
    """Every limit, and how much of it is used."""
    of_day, of_hour = periods(bounds, state, now_s)
    return {
        "captures": state.captures,
        **({} if bounds.captures_per_run is None else {"captures_per_run": bounds.captures_per_run}),
        "captures_last_hour": len(of_hour.requested_s),
        "captures_per_hour": of_hour.limit,
        "captures_last_day": len(of_day.requested_s),
        "captures_per_day": of_day.limit,
        "largest_gain_s": state.largest_gain_s,
        "running_ranks": len(state.busy_ranks),
        "concurrent_ranks": bounds.concurrent_ranks,
        "spent_s": state.spent_s,
        "budget_s": budget_s(bounds, state, now_s),
        "overhead_budget": bounds.overhead_fraction,
    }


COMPUTE = frozenset({"h2d", "forward", "fwd", "loss", "backward", "bwd", "optimizer", "optim"})
"""Words in the names of stages that compute, which consist of operators. Any other stage is host work, unless ranks
wait for each other in it."""


@dataclass(frozen=True, slots=True)
class Means:
    """The profiler, and why ``auto`` chose it ("" if it was named). ``once``: stacks, taken once, from outside."""

    profiler: Profiler
    chosen: ChoiceReason = ""
    once: bool = False


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
    """The profiler; None if none would show what an earlier capture of the same suspect has ``left_open``.

    ``stage`` is None for all local stages, or without a suspect; in the stages ``sync``, ranks wait for each other.

    A stalled rank reaches no step in which its trainer could act, so it is captured from outside. Native frames are
    only available from outside, too.
    """
    if capture.profiler == "stacks":
        return Means("stacks", once=stands_still or capture.stacks.native)
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
    """Whether a stage consists of operators, or waits for other ranks' operators."""
    return stage in sync or not COMPUTE.isdisjoint(re.split(r"[^a-z0-9]+", stage.lower()))


def options_of(capture: Capture, means: Means) -> dict[str, Any]:
    """The options of the profiler, ready for JSON."""
    if means.profiler == "stacks" and not means.once:
        return {SAMPLE_STACKS: True, SAMPLES_PER_SECOND: capture.samples_per_second}
    options = {"torch": capture.torch, "nsys": capture.nsys, "stacks": capture.stacks}[means.profiler]
    values: dict[str, Any] = options.model_dump(mode="json", exclude_none=True)
    if values.get(SAMPLE_STACKS):
        values[SAMPLES_PER_SECOND] = capture.samples_per_second
    return values


def request_of(capture: Capture, means: Means, capture_id: str, rank: int, **more: Any) -> CaptureRequest:
    """The request of a capture of one rank, within the bounds of its rule."""
    return CaptureRequest(
        capture_id=capture_id,
        rank=rank,
        profiler=means.profiler,
        # (a request needs a step bound even if it takes no steps)
        steps=1 if means.once else capture.steps,
        warmup_steps=0 if means.profiler == "stacks" else capture.warmup_steps,
        max_seconds=float(capture.max_seconds),
        max_bytes=capture.max_trace_bytes,
        options=options_of(capture, means),
        **more,
    )


DETAIL_RANKS = 64
"""A job of as many ranks at most has all of them in detail."""
GATHER_S = 10.0
"""The time-box of a capture of a whole job: its hosts answer within seconds, or not at all."""


def for_all_ranks(
    request: CaptureRequest, capture: Capture, missing: Sequence[int], waiting: Sequence[int]
) -> CaptureRequest:
    """The request of a rule for the evidence of all ranks of a job that hangs.

    In a large job only some ranks have their stacks in it: the first missing ones, and a few of those that wait.
    """
    ranks = sorted({*missing, *waiting})
    if len(ranks) > DETAIL_RANKS:
        some = max(capture.control_ranks, 0 if missing else 1)
        ranks = [*(capture.ranks or missing[: capture.sample]), *waiting[:some]]
    box_s = min(request.max_seconds, GATHER_S)
    return replace(request, max_seconds=box_s, options={WHOLE_JOB: True, DETAIL: list(dict.fromkeys(ranks))})


def decide_manual_request(
    manual: ManualRequest,
    policies: PolicySet,
    state: State,
    now_s: float,
    job: JobStatus | None,
    still: Collection[int] = (),
    *,
    clock: Clock = "host",
    nsys: bool = False,
) -> tuple[Decision, State]:
    """Decide about a person's request for a capture; return the state for the next call, too.

    It needs no suspect, and counts against the same limits. ``job`` is None before it has ranks; the ranks in ``still``
    take no steps now. Without a suspect, ``auto`` chooses the profiler that shows both operators and lines.
    """
    state, bounds = opened(state, now_s), policies.limits
    ranks, step, attempt = (), 0, 0
    if job is not None:
        ranks, step, attempt = tuple(job.rank_R.tolist()), max(0, int(job.step_R.max(initial=0))), job.attempt
    missing = sorted(set(manual.ranks) - set(ranks))
    why = run_limit(policies, state, now_s) or ranks_limit(manual.ranks, bounds, state)
    left = places_left(bounds, state, now_s)
    if missing:
        why = Why("no_such_rank", {"ranks": tuple(missing), **({"last_rank": max(ranks)} if ranks else {})})
    elif why is None and len(manual.ranks) > left:
        why = Why("captures_left", {"wanted": len(manual.ranks), "left": left})
    fields = {name: getattr(manual, name) for name in ("profiler", "steps", "warmup_steps", SAMPLES_PER_SECOND)}
    capture, again = Capture.model_validate({**fields, **manual.options}), f"a{attempt}-" if attempt else ""
    requests: list[CaptureRequest] = []
    for rank in dict.fromkeys(manual.ranks) if why is None else ():
        means = choose(capture, None, clock=clock, nsys=nsys, stands_still=rank in still)
        assert means is not None, "a first capture always has a profiler"
        capture_id = f"asked-s{step}-r{rank}-{again}{state.asked + len(requests) + 1}"
        request = request_of(capture, means, capture_id, rank)
        requests.append(replace(request, max_seconds=manual.max_seconds, max_bytes=manual.max_bytes))
    reason = why or Why("asked", {"who": manual.who, "why": manual.reason})
    decision = Decision(
        time_s=now_s,
        first_step=step,
        last_step=step,
        label="asked",
        outcome="capture" if why is None else "throttle",
        reason=reason.reason,
        parameters=reason.parameters,
        numbers=limits_in_numbers(bounds, state, now_s),
        requests=tuple(requests),
        attempt=attempt,
    )
    return decision, started(state, "", requests, now_s) if requests else state


_OF_SUSPECT = ("scope", "ranks", "stage", "gain_s", "share", "persistence", "pattern", "period_steps", "onset_step")
"""What a trigger says of its suspect."""


def trigger(of: Verdict | ManualRequest, policies: PolicySet, decision: Decision, request: CaptureRequest) -> Trigger:
    """The trigger for a capture's manifest: the suspect that contains its rank.

    A person's request has no suspect, and names the first policy.
    """
    if isinstance(of, ManualRequest):
        owner, suspect = policies.loaded[0], Suspect("rank", (request.rank,), None, 0.0, 0.0, 0.0)
        chosen = _CHOSEN[request.profiler] if of.profiler == "auto" else ""
    else:
        owner = policies.owner(decision.rule or "")
        # If nothing distinguishes the ranks of a stalled job, each is as suspect as the others.
        ranks, lasted_s = request.detail_ranks or (request.rank,), of.numbers.get("still_s", of.exposed_s)
        alike = Suspect("all", ranks, None, lasted_s, 1.0, 1.0)
        first = next(iter(of.suspects), alike)
        suspect = next((suspect for suspect in of.suspects if request.rank in suspect.ranks), first)
        chosen = cast("ChoiceReason", decision.parameters.get("chosen", ""))
    return Trigger(
        **{name: getattr(suspect, name) for name in _OF_SUSPECT},
        first_step=decision.first_step,
        last_step=decision.last_step,
        label=decision.label,
        policy=owner.policy.metadata.name,
        policy_sha256=owner.sha256,
        rule=decision.rule or "",
        why=reason_sentence(decision) if isinstance(of, ManualRequest) else verdict_sentence(of),
        chosen=chosen,
        follows=str(decision.parameters.get("follows", "")),
        clock="" if isinstance(of, ManualRequest) else of.clock,
    )


def labelled(decision: Decision, triggers: Mapping[str, Trigger]) -> Decision:
    """The decision, with the trigger of each capture in its request, so that each trace says why it exists."""

    def labels(why: Trigger) -> dict[str, str]:
        stage = {} if why.stage is None else {"stage": why.stage}
        return {"policy": why.policy, "rule": why.rule, "window": f"{why.first_step}-{why.last_step}", **stage}

    requests = tuple(replace(request, labels=labels(triggers[request.capture_id])) for request in decision.requests)
    return replace(decision, requests=requests)


_CHOSEN: Mapping[Profiler, ChoiceReason] = {"stacks": "stands_still", "torch": "whole_rank", "nsys": "device_clock"}
"""Why ``auto`` chose a profiler without a suspect."""


STACKS_S = 30.0
"""The time-box of the stacks of a rank that hangs inside its capture."""

_MOST_OF_AN_ID = 93


def decide_follow_up(
    hung: CaptureRequest, why: Trigger, state: State, now_s: float, *, step: int, attempt: int = 0
) -> tuple[Decision, Trigger, State]:
    """Request the stacks of a rank that hangs inside its capture; return the state for the next call, too.

    No limit applies, since the capture had its place and the rank does no work. The stacks count as a capture.
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
"""Maximum time until every rank has its request and its profiler is ready, even on a busy host."""

_SPARE_STEPS = 4
"""Spare steps: ranks are not all in the same step, and one may be recorded first to measure its duration."""


def in_the_same_steps(requests: Sequence[CaptureRequest], step: int, step_s: float) -> tuple[CaptureRequest, ...]:
    """The requests made at once; if there are several, with the first step that they may record.

    The foremost rank is in ``step``; a step takes about ``step_s``.
    """
    ready_s = max((READY_S[request.profiler] for request in requests if request.takes_steps), default=0.0)
    if len(requests) < 2 or ready_s == 0.0:
        return tuple(requests)
    lead = max(request.warmup_steps for request in requests) + _SPARE_STEPS + math.ceil(ready_s / max(step_s, 1e-3))
    return tuple(replace(request, first_step=step + lead) if request.takes_steps else request for request in requests)
