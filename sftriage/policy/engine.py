"""From a verdict to a decision. Pure: time and state come in, a decision and the next state go out.

Nothing is captured without an unambiguous suspect, and no limit is passed on the way (design §7). A decision not to
capture is a decision like any other, with its reason and its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone

from sftriage.policy.loading import LoadedPolicy
from sftriage.policy.reasons import resolves
from sftriage.policy.schema import Capture, Limits, Rule, TriagePolicy
from sftriage.policy.state import Running, State
from sftriage.records import CaptureRequest, Decision, Outcome, Suspect, Trigger, Verdict

GRACE_S = 120.0
"""Past its time-box, how long a capture counts as running: to reach a step boundary, export and report."""

_MAX_ID_LENGTH = 100


PASSED = "Nothing to capture any more: wait whether it comes back; `sftriage explain` says in which steps it was."
"""What would resolve the hold-off on a fault that is over."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a capture has to wait, and what would end the wait."""

    reason: str
    resolves: str


def decide(verdict: Verdict, policy: TriagePolicy, state: State, now_s: float) -> tuple[Decision, State]:
    """What to do about one window, and the state to pass to the next call.

    The first rule that matches and has a capture decides; where only rules without one match, the first of them is put
    on record. Of a scope of many ranks, the first ``limits.concurrent_ranks`` are captured.

    Args:
        verdict: the window's verdict.
        policy: the policy in force.
        state: what the run has done so far.
        now_s: seconds on a clock that a restart does not reset (the Unix epoch).
    """
    state = _without_lost(state, now_s)
    if verdict.label == "healthy":
        return _decision(verdict, now_s, "ignore", "healthy"), state
    suspect = verdict.suspects[0] if verdict.suspects else None
    if verdict.label == "needs_evidence":
        reason = ", ".join(verdict.reasons) or "no reason given"
        return _decision(verdict, now_s, "hold", reason, resolves=resolves(verdict.reasons)), state
    if verdict.label == "stalled":
        return _on_stall(verdict, policy.spec.rules, now_s), state
    if suspect is None or not suspect.ranks:
        return _decision(verdict, now_s, "hold", f"{verdict.label}, but no rank is named"), state
    if suspect.pattern == "one-off":
        # A trace of the steps after it would show healthy ones.
        return _decision(verdict, now_s, "hold", "one-off, and has passed", resolves=PASSED), state

    rules = policy.spec.rules
    matching = [rule for rule in rules if _matches(rule, verdict, suspect)]
    if not matching:
        return _decision(verdict, now_s, "ignore", _nearest(rules, verdict, suspect)), state
    rule = next((rule for rule in matching if rule.capture is not None), matching[0])
    if rule.capture is None:
        reason = f"observe-only: rule {rule.name} matched"
        return _decision(verdict, now_s, "ignore", reason, rule=rule), state

    ranks = _ranks(suspect, policy.spec.limits, state)
    numbers = _limits_in_numbers(policy.spec.limits, state)
    refusal = _refusal(ranks, rule, policy.spec.limits, state, now_s)
    if refusal is not None:
        decision = _decision(
            verdict, now_s, "throttle", refusal.reason, rule=rule, resolves=refusal.resolves, numbers=numbers
        )
        return decision, state
    requests = _requests(ranks, verdict, rule, rule.capture, state)
    decision = _decision(
        verdict, now_s, "capture", _explained(suspect, rule), rule=rule, numbers=numbers, requests=requests
    )
    return decision, _started(state, rule, requests, now_s)


def finished(state: State, capture_id: str) -> State:
    """The state once a capture has ended, however it ended. An id that is not running changes nothing."""
    return replace(state, running={key: one for key, one in state.running.items() if key != capture_id})


def trigger(verdict: Verdict, loaded: LoadedPolicy, rule: str) -> Trigger:
    """What goes into the manifest of a capture that ``rule`` asked for because of ``verdict``.

    Raises:
        ValueError: the verdict has no suspect, or the policy has no such rule.
    """
    if not verdict.suspects:
        raise ValueError("a verdict without a suspect triggers nothing")
    if rule not in {one.name for one in loaded.policy.spec.rules}:
        raise ValueError(f"policy {loaded.policy.metadata.name} has no rule {rule!r}")
    suspect = verdict.suspects[0]
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
        policy=loaded.policy.metadata.name,
        policy_sha256=loaded.sha256,
        rule=rule,
    )


def _without_lost(state: State, now_s: float) -> State:
    """Without captures past their deadline: a trainer that died must not hold its place for ever."""
    return replace(state, running={key: one for key, one in state.running.items() if one.deadline_s > now_s})


def _on_stall(verdict: Verdict, rules: Sequence[Rule], now_s: float) -> Decision:
    """What to do about a stall: nothing heavy, for a profiler would start at a step that does not come."""
    for rule in rules:
        if _matches_stall(rule, verdict):
            reason = f"observe-only: rule {rule.name} matched, {_standstill(verdict)}"
            return _decision(verdict, now_s, "ignore", reason, rule=rule, resolves=resolves(verdict.reasons))
    return _decision(verdict, now_s, "hold", _standstill(verdict), resolves=resolves(verdict.reasons))


def _matches_stall(rule: Rule, verdict: Verdict) -> bool:
    """Whether a rule is about a stall. One that asks for a scope, a stage or a gain wants a suspect that has it."""
    if verdict.suspects:
        return any(_matches(rule, verdict, suspect) for suspect in verdict.suspects)
    asks = rule.match.scope or rule.match.stage or not rule.match.gain_condition.met(0.0, 0.0)
    return rule.match.label == verdict.label and not asks


def _standstill(verdict: Verdict) -> str:
    """Why a job stands still, and for whom, if that is known."""
    reason = ", ".join(verdict.reasons) or "no reason given"
    if not verdict.suspects:
        return reason
    first = verdict.suspects[0]
    others = sum(len(suspect.ranks) for suspect in verdict.suspects[1:])
    return f"{reason}: {_who(first)} in {_where(first)}" + (f" and {others} more" if others else "")


def _scope_matches(rule: Rule, suspect: Suspect) -> bool:
    return not rule.match.scope or suspect.scope in rule.match.scope


def _stage_matches(rule: Rule, suspect: Suspect) -> bool:
    return not rule.match.stage or suspect.stage in rule.match.stage


def _matches(rule: Rule, verdict: Verdict, suspect: Suspect) -> bool:
    return (
        rule.match.label == verdict.label
        and _scope_matches(rule, suspect)
        and _stage_matches(rule, suspect)
        and rule.match.gain_condition.met(suspect.share, suspect.gain_s)
    )


def _nearest(rules: Sequence[Rule], verdict: Verdict, suspect: Suspect) -> str:
    """Why nothing matched, told of the rule that came closest: scope and stage first, then the lowest threshold."""

    def distance(rule: Rule) -> tuple[bool, bool, bool, float, float]:
        gain = rule.match.gain_condition
        misses = (
            rule.match.label != verdict.label,
            not _scope_matches(rule, suspect),
            not _stage_matches(rule, suspect),
        )
        return *misses, gain.min_share, gain.min_gain_s

    rule = min(rules, key=distance)
    if rule.match.label != verdict.label:
        return f"no rule is about {verdict.label}"
    if not _scope_matches(rule, suspect):
        return f"scope {suspect.scope} is not one of {', '.join(rule.match.scope)} of rule {rule.name}"
    if not _stage_matches(rule, suspect):
        where = f"stage {suspect.stage}" if suspect.stage else "a whole rank"
        return f"{where} is not one of {', '.join(rule.match.stage)} of rule {rule.name}"
    return f"{rule.match.gain_condition.shortfall(suspect.share, suspect.gain_s)} of rule {rule.name}"


def _ranks(suspect: Suspect, limits: Limits, state: State) -> tuple[int, ...]:
    """The ranks to capture: no more than may run at once, nor than the run has left."""
    left = max(0, limits.captures_per_run - state.captures)
    return tuple(dict.fromkeys(suspect.ranks))[: min(limits.concurrent_ranks, left)]


def _refusal(ranks: Sequence[int], rule: Rule, limits: Limits, state: State, now_s: float) -> _Refusal | None:
    """Why these ranks cannot be captured now. What lasts longest is said first."""
    if not ranks:
        return _Refusal(
            f"captures_per_run: {state.captures} of {limits.captures_per_run} captures made",
            "Raise limits.captures_per_run, or start another run.",
        )
    if rule.name in state.fired_s:
        until_s = state.fired_s[rule.name] + rule.cooldown_s
        if now_s < until_s:
            return _Refusal(f"cooldown of rule {rule.name} until {_clock(until_s)}", "Wait for the cooldown to end.")
    running = {one.rank: capture_id for capture_id, one in sorted(state.running.items())}
    for rank in ranks:
        if rank in running:
            return _Refusal(f"rank {rank} is being captured already ({running[rank]})", "Wait for that capture to end.")
    if len(running) + len(ranks) > limits.concurrent_ranks:
        return _Refusal(
            f"concurrent_ranks: {len(running)} of {limits.concurrent_ranks} ranks are being captured, "
            f"{len(ranks)} more asked for",
            "Wait for a running capture to end, or raise limits.concurrent_ranks.",
        )
    return None


def _requests(
    ranks: Sequence[int], verdict: Verdict, rule: Rule, capture: Capture, state: State
) -> tuple[CaptureRequest, ...]:
    return tuple(
        CaptureRequest(
            capture_id=_capture_id(verdict, rank, rule, state.captures + number),
            rank=rank,
            profiler=capture.profiler,
            steps=capture.steps,
            warmup_steps=capture.warmup_steps,
            max_seconds=float(capture.max_seconds),
            max_bytes=capture.max_trace_bytes,
            options=capture.torch.model_dump(),
        )
        for number, rank in enumerate(ranks, start=1)
    )


def _capture_id(verdict: Verdict, rank: int, rule: Rule, number: int) -> str:
    """``w<first>-<last>-r<rank>-<rule>-<number>``: readable, a plain file name, unique by its number in the run."""
    head = f"w{verdict.first_step}-{verdict.last_step}-r{rank}-"
    # A job that starts again counts its steps again, perhaps with a controller that has lost its state.
    tail = f"-a{verdict.attempt}-{number}" if verdict.attempt else f"-{number}"
    return head + rule.name[: _MAX_ID_LENGTH - len(head) - len(tail)] + tail


def _started(state: State, rule: Rule, requests: Sequence[CaptureRequest], now_s: float) -> State:
    begun = {request.capture_id: Running(request.rank, now_s + request.max_seconds + GRACE_S) for request in requests}
    return replace(
        state,
        captures=state.captures + len(requests),
        fired_s={**state.fired_s, rule.name: now_s},
        running={**state.running, **begun},
    )


def _decision(
    verdict: Verdict,
    now_s: float,
    outcome: Outcome,
    reason: str,
    *,
    rule: Rule | None = None,
    resolves: str = "",
    numbers: Mapping[str, float] | None = None,
    requests: tuple[CaptureRequest, ...] = (),
) -> Decision:
    return Decision(
        time_s=now_s,
        first_step=verdict.first_step,
        last_step=verdict.last_step,
        label=verdict.label,
        outcome=outcome,
        reason=reason,
        rule=rule.name if rule else None,
        resolves=resolves,
        numbers={**_gain_in_numbers(verdict, rule), **(numbers or {})},
        requests=requests,
        attempt=verdict.attempt,
    )


def _gain_in_numbers(verdict: Verdict, rule: Rule | None) -> dict[str, float]:
    numbers = {"exposed_s": verdict.exposed_s}
    if verdict.suspects:
        first = verdict.suspects[0]
        numbers |= {"gain_s": first.gain_s, "share": first.share, "persistence": first.persistence}
    if rule is not None:
        gain = rule.match.gain_condition
        numbers |= {"min_share": gain.min_share, "min_gain_s": gain.min_gain_s, "cooldown_s": rule.cooldown_s}
    return numbers


def _limits_in_numbers(limits: Limits, state: State) -> dict[str, float]:
    return {
        "captures": state.captures,
        "captures_per_run": limits.captures_per_run,
        "running_ranks": len(state.running),
        "concurrent_ranks": limits.concurrent_ranks,
    }


def _explained(suspect: Suspect, rule: Rule) -> str:
    return (
        f"rule {rule.name}: {_where(suspect)} of {_who(suspect)} would save {1000 * suspect.gain_s:.3g} ms a step "
        f"({100 * suspect.share:.3g}%), in {100 * suspect.persistence:.3g}% of the steps"
    )


def _who(suspect: Suspect) -> str:
    return f"rank {suspect.ranks[0]}" if len(suspect.ranks) == 1 else f"{len(suspect.ranks)} ranks"


def _where(suspect: Suspect) -> str:
    return suspect.stage or "all local stages"


def _clock(time_s: float) -> str:
    """The time in UTC; by addition, because the C library's conversion has a narrower range."""
    moment = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=time_s)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
