"""From a verdict to a decision. Pure: time and state come in, a decision and the next state go out.

Nothing is captured without an unambiguous suspect, and no limit is passed on the way. A decision not to
capture is a decision like any other, with its reason and its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from sftriage.policy import explanations, limits
from sftriage.policy.explanations import Parameters, Why
from sftriage.policy.limits import Chosen
from sftriage.policy.plan import Plan, PlannedRule
from sftriage.policy.policy_set import PolicySet
from sftriage.policy.schema import TriagePolicy
from sftriage.policy.state import State, Streak, opened, started
from sftriage.records import CaptureRequest, Decision, Outcome, Suspect, Verdict

_MAX_ID_LENGTH = 100

HEALTHY_GAIN_FRACTION = 0.1
"""Of the first suspect's gain: whose gain is less is taken for healthy beside it."""


def decide(
    verdict: Verdict, policy: TriagePolicy | PolicySet, state: State, now_s: float, peers: Sequence[int] = ()
) -> tuple[Decision, State]:
    """What to do about one window, and the state to pass to the next call.

    Rules are tried in order: the first that matches for as many windows as it wants, and that no limit keeps from
    capturing, decides. Where none may, the first that a limit kept from it is put on record; where only rules without a
    capture match, the first of them.

    Args:
        verdict: the window's verdict.
        policy: the policy in force, or several.
        state: what the run has done so far.
        now_s: seconds on a clock that a restart does not reset (the Unix epoch).
        peers: ranks to compare a suspect with, the most typical of its cohort first.
    """
    state = opened(state, now_s)
    plan = policy.plan
    if verdict.label == "stalled":
        return _on_stall(verdict, plan, state, now_s, peers)
    suspect = verdict.suspects[0] if verdict.suspects else None
    if verdict.label != "suspect" or suspect is None or not suspect.ranks:
        # A capture hides what goes on: whoever was suspected before it may be so again after it.
        kept = state if verdict.reasons == ("self_inflicted",) else _without_streak(state)
        return _without_suspect(verdict, now_s), kept
    group = plan.group(verdict, suspect)
    matching = group.reached(suspect)
    state = _continued(state, verdict, suspect, matching) if group.lasting else _without_streak(state)
    due: tuple[str, ...] = ()
    if group.notifying:
        due, state = _notifications(matching, state, now_s)
    case = _Case(verdict, plan, state, now_s, peers, due)
    if suspect.pattern == "one-off":
        # A trace of the steps after it would show healthy ones.
        return case.decision("hold", Why("one_off")), state
    if not matching:
        return case.decision("ignore", explanations.missed(group.nearest, verdict, suspect)), state
    return case.decided(matching, lambda _: suspect.ranks, explanations.saved(suspect))


def _without_suspect(verdict: Verdict, now_s: float) -> Decision:
    if verdict.label == "healthy":
        return _decision(verdict, now_s, "ignore", Why("healthy"))
    if verdict.label == "needs_evidence":
        return _decision(verdict, now_s, "hold", Why("undecided", {"reasons": verdict.reasons}))
    return _decision(verdict, now_s, "hold", Why("no_rank_named"))


def _on_stall(verdict: Verdict, plan: Plan, state: State, now_s: float, peers: Sequence[int]) -> tuple[Decision, State]:
    """What to do about a stall. It is no window: it neither continues nor breaks what windows show."""
    stalled = {rule.name: ranks for rule in plan.on("stalled") if (ranks := _waited_for(rule, verdict)) is not None}
    matching = [rule for rule in plan.on("stalled") if rule.name in stalled]
    due, state = _notifications(matching, state, now_s)
    # Where nobody is named there is nobody to capture.
    able = [rule for rule in matching if rule.capture is None or stalled[rule.name]]
    case = _Case(verdict, plan, state, now_s, peers, due)
    found = explanations.standstill(verdict)
    if not able:
        return case.decision("hold", Why("standstill", found)), state
    return case.decided(able, lambda rule: stalled[rule.name], found, found)


def _waited_for(rule: PlannedRule, verdict: Verdict) -> tuple[int, ...] | None:
    """The ranks of a stall's suspects that a rule is about; None if it is not about this stall at all.

    Where nobody is named, a rule that asks for a scope, a stage or a gain is about something else.
    """
    if verdict.suspects:
        found = [suspect for suspect in verdict.suspects if rule.matches(verdict.label, suspect)]
        return tuple(rank for suspect in found for rank in suspect.ranks) if found else None
    asks = rule.scopes or rule.stages or not rule.reached(0.0, 0.0)
    return None if asks else ()


def _without_streak(state: State) -> State:
    return state if state.streak is None else replace(state, streak=None)


def _continued(state: State, verdict: Verdict, suspect: Suspect, matching: Sequence[PlannedRule]) -> State:
    """The state with one more window for each rule that waits for several of the same suspect."""
    before = state.streak
    ranks = tuple(suspect.ranks)
    same = (
        before is not None
        and (before.attempt, before.scope, before.stage) == (verdict.attempt, suspect.scope, suspect.stage)
        and tuple(before.ranks) == ranks
    )
    counted = before.windows if before is not None and same else {}
    windows = {}
    for rule in matching:
        if rule.windows > 1:
            so_far = counted.get(rule.name, 0)
            windows[rule.name] = so_far + 1 if so_far < rule.windows else so_far
    if same and windows == counted:
        return state
    streak = Streak(verdict.attempt, suspect.scope, ranks, suspect.stage, windows) if windows else None
    return replace(state, streak=streak)


def _seen(rule: PlannedRule, state: State) -> int:
    """For how many windows a rule that matches this one has matched."""
    return 1 if rule.windows == 1 or state.streak is None else state.streak.windows.get(rule.name, 1)


def _ready(matching: Sequence[PlannedRule], state: State) -> list[PlannedRule]:
    """Those of the rules that have matched for as many windows as they want."""
    seen = state.streak.windows if state.streak is not None else {}
    return [rule for rule in matching if rule.windows == 1 or seen.get(rule.name, 1) >= rule.windows]


def _notifications(matching: Sequence[PlannedRule], state: State, now_s: float) -> tuple[tuple[str, ...], State]:
    """The rules whose notifications are due, and the state once they have gone out."""
    due = tuple(
        rule.name
        for rule in _ready(matching, state)
        if rule.notifies
        and (rule.name not in state.notified_s or now_s >= state.notified_s[rule.name] + rule.cooldown_s)
    )
    return due, replace(state, notified_s={**state.notified_s, **dict.fromkeys(due, now_s)}) if due else state


@dataclass(frozen=True, slots=True)
class _Case:
    """One window with all that a decision on it is taken from."""

    verdict: Verdict
    plan: Plan
    state: State
    now_s: float
    peers: Sequence[int]
    due: tuple[str, ...]

    def decided(
        self,
        matching: Sequence[PlannedRule],
        ranks_of: Callable[[PlannedRule], tuple[int, ...]],
        found: Parameters,
        observed: Parameters = MappingProxyType({}),
    ) -> tuple[Decision, State]:
        """The decision between rules that match, and the state after it."""
        ready = _ready(matching, self.state)
        capturing = [rule for rule in ready if rule.capture is not None]
        if capturing:
            return self._captured(capturing, ranks_of, found)
        waiting = next((rule for rule in matching if rule.capture is not None), None)
        if waiting is None and ready:
            why = Why("observe_only", {"rule": ready[0].name, **observed})
            return self.decision("ignore", why, rule=ready[0]), self.state
        first = waiting or matching[0]
        so_far: Parameters = {"rule": first.name, "window": _seen(first, self.state), "windows": first.windows}
        outcome: Outcome = "ignore" if waiting is None else "hold"
        return self.decision(outcome, Why("waits_for_windows", so_far), rule=first), self.state

    def _captured(
        self,
        capturing: Sequence[PlannedRule],
        ranks_of: Callable[[PlannedRule], tuple[int, ...]],
        found: Parameters,
    ) -> tuple[Decision, State]:
        """The first of the rules that nothing keeps from capturing does it; or why none may."""
        refusal = limits.of_the_run(self.plan, self.state, self.now_s)
        if refusal is not None:
            return self.decision("throttle", refusal, rule=capturing[0]), self.state
        fired_s, failures = self.state.last_fired_s(), self.state.failures
        tried: dict[int, tuple[Chosen, Why | None]] = {}
        before: tuple[int, ...] | None = None
        for rule in capturing:
            if rule.name in fired_s or rule.name in failures:
                until_s = limits.waits_until_s(rule, fired_s.get(rule.name), failures.get(rule.name))
                if self.now_s < until_s:
                    refusal = refusal or limits.waits(rule, failures.get(rule.name), until_s)
                    continue
            # There may be a thousand rules: those that want the same of the same ranks are told the same.
            ranks = ranks_of(rule)
            if ranks is not before:
                before = ranks
                tried.clear()
            if rule.wish not in tried:
                tried[rule.wish] = self._chosen(rule, ranks)
            chosen, refused = tried[rule.wish]
            if refused is None:
                requests = self._requests(rule, chosen)
                wanted = rule.capture is not None and rule.capture.control_ranks > 0
                beside = {"controls": chosen.controls} if chosen.controls or wanted else {}
                why = Why("rule_matched", {"rule": rule.name, **found, **beside})
                decision = self.decision("capture", why, rule=rule, requests=requests)
                return decision, started(self.state, rule.name, requests, self.now_s)
            refusal = refusal or refused
        assert refusal is not None, "a rule that nothing refused captures"
        return self.decision("throttle", refusal, rule=capturing[0]), self.state

    def _chosen(self, rule: PlannedRule, ranks: tuple[int, ...]) -> tuple[Chosen, Why | None]:
        """Whom a rule captures, and what keeps it from them."""
        capture = rule.capture
        assert capture is not None, "only rules with a capture are asked"
        bounds = self.plan.bounds
        # Who would hardly save anything is no suspect beside the first, and may well be who to compare with.
        least_s = HEALTHY_GAIN_FRACTION * max((one.gain_s for one in self.verdict.suspects), default=0.0)
        suspected = {rank for one in self.verdict.suspects if one.gain_s >= least_s for rank in one.ranks}
        healthy = [rank for rank in self.peers if rank not in suspected] if capture.control_ranks else []
        chosen = limits.choose(capture, ranks, healthy, limits.left(bounds, self.state, self.now_s))
        return chosen, limits.of_the_ranks(chosen, bounds, self.state)

    def _requests(self, rule: PlannedRule, chosen: Chosen) -> tuple[CaptureRequest, ...]:
        capture = rule.capture
        assert capture is not None, "only rules with a capture fire"
        asked = max(self.state.asked, self.state.captures)
        stacks = capture.profiler == "stacks"
        period, phase = (0, 0) if stacks else _comes_back(self.verdict)
        return tuple(
            CaptureRequest(
                capture_id=_capture_id(self.verdict, rank, rule, asked + number),
                rank=rank,
                profiler=capture.profiler,
                # Stacks are taken at once, and a request is bounded in steps all the same.
                steps=1 if stacks else capture.steps,
                warmup_steps=0 if stacks else capture.warmup_steps,
                max_seconds=float(capture.max_seconds),
                max_bytes=capture.max_trace_bytes,
                options=capture.options,
                role="suspect" if number <= len(chosen.ranks) else "control",
                period_steps=period,
                phase=phase,
            )
            for number, rank in enumerate(chosen.ranks + chosen.controls, start=1)
        )

    def decision(
        self,
        outcome: Outcome,
        why: Why,
        *,
        rule: PlannedRule | None = None,
        requests: tuple[CaptureRequest, ...] = (),
    ) -> Decision:
        """The decision; a rule that wants to capture brings the limits along."""
        numbers: dict[str, float] = {}
        if rule is not None:
            if rule.windows > 1:
                numbers["windows"] = _seen(rule, self.state)
            if rule.capture is not None:
                numbers |= limits.in_numbers(self.plan.bounds, self.state, self.now_s)
        return _decision(self.verdict, self.now_s, outcome, why, rule, numbers, requests, self.due)


def _comes_back(verdict: Verdict) -> tuple[int, int]:
    """The period and phase of what is suspected to come back; zeros where nothing is."""
    first = verdict.suspects[0]
    if first.pattern != "recurring" or not first.period_steps or first.onset_step is None:
        return 0, 0
    return first.period_steps, first.onset_step % first.period_steps


def _capture_id(verdict: Verdict, rank: int, rule: PlannedRule, number: int) -> str:
    """``w<first>-<last>-r<rank>-<rule>-<number>``: readable, a plain file name, unique by its number in the run."""
    head = f"w{verdict.first_step}-{verdict.last_step}-r{rank}-"
    # A job that starts again counts its steps again, perhaps with a controller that has lost its state.
    tail = f"-a{verdict.attempt}-{number}" if verdict.attempt else f"-{number}"
    return head + rule.name[: _MAX_ID_LENGTH - len(head) - len(tail)] + tail


def _decision(
    verdict: Verdict,
    now_s: float,
    outcome: Outcome,
    why: Why,
    rule: PlannedRule | None = None,
    numbers: Mapping[str, float] | None = None,
    requests: tuple[CaptureRequest, ...] = (),
    notify: tuple[str, ...] = (),
) -> Decision:
    return Decision(
        time_s=now_s,
        first_step=verdict.first_step,
        last_step=verdict.last_step,
        label=verdict.label,
        outcome=outcome,
        reason=why.reason,
        rule=rule.name if rule else None,
        parameters=why.parameters,
        numbers={**explanations.gain_in_numbers(verdict, rule), **(numbers or {})},
        requests=requests,
        attempt=verdict.attempt,
        notify=notify,
    )
