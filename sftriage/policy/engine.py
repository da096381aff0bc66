"""From a verdict to a decision. Pure: time and state come in, a decision and the next state go out.

Nothing is captured without an unambiguous suspect, and no limit is passed on the way. A decision not to
capture is a decision like any other, with its reason and its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from sftriage.model.captures import CaptureRequest, Decision, Outcome
from sftriage.model.verdicts import Suspect, Verdict
from sftriage.policy import explanations, lasting, limits
from sftriage.policy.choosing import Means, Situation, choose, options_of
from sftriage.policy.explanations import Parameters, Why
from sftriage.policy.lasting import regression_rules, regressions_due
from sftriage.policy.limits import Chosen
from sftriage.policy.losses import Losses, Target, key_of_ranks, suspect_key
from sftriage.policy.policy_set import PolicySet
from sftriage.policy.schema import Capture, Rule
from sftriage.policy.state import Reproduction, State, key_of, opened, remembered, started

_MAX_ID_LENGTH = 100

STALL = "stalled"
"""The scope of a stall's suspects, together."""

NOTHING_LOST = Losses()

HEALTHY_GAIN_FRACTION = 0.1
"""Of the first suspect's gain: whose gain is less is taken for healthy beside it."""


def decide(
    verdict: Verdict,
    policies: PolicySet,
    state: State,
    now_s: float,
    peers: Sequence[int] = (),
    *,
    nsys: bool = False,
    losses: Losses = NOTHING_LOST,
) -> tuple[Decision, State]:
    """What to do about one window, and the state to pass to the next call.

    Rules are tried in order: the first that matches for as long as it asks for, and that nothing keeps from capturing,
    decides. Where none may, the first that something kept from it is put on record; where only rules without a capture
    match, the first of them.

    ``now_s`` is of the Unix epoch, ``peers`` are ranks to compare a suspect with, the most typical of its cohort first,
    ``losses`` what stragglers have cost since the run began, with this window.
    """
    due, state = regressions_due(policies.rules, verdict, opened(state, now_s), now_s)
    suspect = verdict.suspects[0] if verdict.suspects else None
    found = losses.of(suspect) if suspect is not None else None
    cost_hours = 0.0 if found is None else found.rank_hours
    case = _Case(verdict, policies, state, now_s, peers, due, nsys, cost_hours)
    if verdict.label == "stalled":
        return case.of_stall()
    if verdict.label != "suspect" or suspect is None or not suspect.ranks:
        # A capture hides what goes on: whoever was suspected before it may be so again after it.
        kept = state if verdict.reasons == ("self_inflicted",) else lasting.broken(state)
        return case.without_suspect(), kept
    return case.of_suspect(suspect)


def _shows(rule: Rule, suspect: Suspect) -> bool:
    """Whether a capture by this rule can show why a suspect is late.

    What the system did to a rank is in no trace of its own. Where it waited for a CPU, nsys alone sees who had it
    instead; the others show what is left without the waiting, if that is worth it. A slow host is captured all the
    same: its ranks are slow alike, and no peer on it shows what else it has in common.
    """
    if (
        suspect.scope == "host"
        or suspect.host is not None
        or (rule.capture is not None and rule.capture.profiler == "nsys")
    ):
        return True
    left = 1.0 - (suspect.descheduled_fraction or 0.0)
    return suspect.by_system is None and rule.reached(suspect.share * left, suspect.gain_s * left)


def _counted(verdict: Verdict) -> Why | None:
    """What the system did to the first candidate of a window that is held, if that is why it is late.

    That somebody stops a process, or its cgroup keeps it from running, was counted, whether the rank can be named or
    not. Who waits for a CPU now and then is anybody on a busy host.
    """
    first = verdict.suspects[0] if verdict.suspects else None
    if first is None or first.system is None or "self_inflicted" in verdict.reasons:
        return None
    return explanations.by_system(first)


def _waited_for(rule: Rule, verdict: Verdict) -> tuple[int, ...] | None:
    """The ranks of a stall's suspects that a rule is about; None if it is not about this stall at all.

    Where nobody is named, a rule that asks for a scope, a stage or a gain is about something else.
    """
    if verdict.suspects:
        found = [
            one
            for one in verdict.suspects
            if not any(rule.misses(verdict.label, one)) and rule.reached(one.share, one.gain_s)
        ]
        return tuple(rank for suspect in found for rank in suspect.ranks) if found else None
    asks = rule.match.scope or rule.match.stage or not rule.reached(0.0, 0.0)
    return None if asks else ()


@dataclass(frozen=True, slots=True)
class _Case:
    """One window with all that a decision on it is taken from, and the rules whose notifications are due."""

    verdict: Verdict
    policies: PolicySet
    state: State
    now_s: float
    peers: Sequence[int]
    due: tuple[str, ...] = ()
    nsys: bool = False
    cost_hours: float = 0.0

    def told(self, matching: Sequence[Rule], state: State, suspect: str) -> _Case:
        telling = [rule for rule in matching if rule.notify and lasting.reached(rule, self.policies.lasting, state)]
        due = {key_of(rule.name, suspect): rule.name for rule in telling if self._is_due(rule, suspect, state)}
        if due:
            told = dict.fromkeys(due, self.now_s)
            state = replace(state, notified_s=remembered(state.notified_s, told, lambda at_s: at_s))
        return replace(self, state=state, due=(*self.due, *due.values()))

    def _is_due(self, rule: Rule, suspect: str, state: State) -> bool:
        return self.now_s >= state.notified_s.get(key_of(rule.name, suspect), -math.inf) + rule.cooldown_s

    def without_suspect(self) -> Decision:
        if self.verdict.label == "healthy":
            return self.decision("ignore", Why("healthy"))
        if self.verdict.label == "needs_evidence":
            # Rules on the job against itself only observe: the first that matches is put on record.
            rule = next(iter(regression_rules(self.policies.rules, self.verdict)), None)
            split: Parameters = {"split": True} if self.verdict.numbers.get("split") else {}
            why = _counted(self.verdict) or Why("undecided", {"reasons": self.verdict.reasons, **split})
            return self.decision("hold", why, rule=rule)
        return self.decision("hold", Why("no_rank_named"))

    def of_suspect(self, suspect: Suspect) -> tuple[Decision, State]:
        about, nearest = self.policies.about(self.verdict.label, suspect)
        share, gain_s = suspect.share, suspect.gain_s
        reached = [rule for rule in about if share >= rule.min_share and gain_s >= rule.min_gain_s]
        matching = [rule for rule in reached if self.cost_hours >= rule.min_cost_hours]
        target = Target(suspect_key(suspect, self.state.suspects), gain_s, self.verdict.attempt)
        state = lasting.continued(self.state, self.verdict, suspect, target.suspect, matching, self.policies.lasting)
        passing = lasting.contended(suspect, self.policies.lasting, state)
        # Who is told of what is captured is told when it is.
        telling = [rule for rule in matching if rule.capture is None or passing is None]
        case = self.told(telling, state, target.suspect)
        if suspect.pattern == "one-off":
            # A trace of the steps after it would show healthy ones.
            return case.decision("hold", Why("one_off")), case.state
        capturing = [rule for rule in matching if rule.capture is not None]
        showing = [rule for rule in capturing if _shows(rule, suspect)]
        if capturing and not showing:
            return case.decision("hold", explanations.by_system(suspect)), case.state
        if showing and passing is not None:
            return case.decision("hold", passing, rule=showing[0]), case.state
        if len(showing) < len(capturing):
            matching = showing
        if not matching:
            nearest = next(iter(reached), nearest)
            missed = explanations.missed(nearest, self.verdict, suspect, self.cost_hours)
            return case.decision("ignore", missed), case.state
        return case.decided(matching, lambda _: (suspect.ranks, target), explanations.saved(suspect))

    def of_stall(self) -> tuple[Decision, State]:
        """What to do about a stall. It is no window: it neither continues nor breaks what windows show."""
        on_stalls = [rule for rule in self.policies.rules if rule.match.label == "stalled"]
        stalled = {rule.name: ranks for rule in on_stalls if (ranks := _waited_for(rule, self.verdict)) is not None}
        matching = [rule for rule in on_stalls if rule.name in stalled]
        # A stall is the whole job's, whoever is missing by now: it is told of once.
        case = self.told(matching, self.state, STALL)
        # Where nobody is named there is nobody to capture.
        able = [rule for rule in matching if rule.capture is None or stalled[rule.name]]
        found = explanations.standstill(self.verdict)
        if not able:
            return case.decision("hold", Why("standstill", found)), case.state

        def whom(rule: Rule) -> tuple[tuple[int, ...], Target]:
            ranks = stalled[rule.name]
            return ranks, Target(key_of_ranks(STALL, ranks, None), math.inf, self.verdict.attempt)

        return case.decided(able, whom, found, found)

    def decided(
        self,
        matching: Sequence[Rule],
        whom: Callable[[Rule], tuple[tuple[int, ...], Target]],
        found: Parameters,
        observed: Parameters = MappingProxyType({}),
    ) -> tuple[Decision, State]:
        wanted = self.policies.lasting
        ready = [rule for rule in matching if lasting.reached(rule, wanted, self.state)]
        capturing = [rule for rule in ready if rule.capture is not None]
        if capturing:
            return self._captured(capturing, whom, found)
        waiting = next((rule for rule in matching if rule.capture is not None), None)
        if waiting is None and ready:
            why = Why("observe_only", {"rule": ready[0].name, **observed})
            return self.decision("ignore", why, rule=ready[0]), self.state
        first = waiting or matching[0]
        so_far: Parameters = {"rule": first.name, **lasting.progress(first, wanted, self.state)}
        outcome: Outcome = "ignore" if waiting is None else "hold"
        return self.decision(outcome, Why("pending", so_far), rule=first), self.state

    def _captured(
        self, capturing: Sequence[Rule], whom: Callable[[Rule], tuple[tuple[int, ...], Target]], found: Parameters
    ) -> tuple[Decision, State]:
        """The first of the rules that nothing keeps from capturing does it; or why none may."""
        refusal = limits.of_the_run(self.policies, self.state, self.now_s)
        if refusal is not None:
            # Where its trace is there already, no other limit is worth raising.
            targets = ((rule, whom(rule)[1]) for rule in capturing)
            known = (
                limits.already_captured(rule, target, self.state, self.now_s)
                for rule, target in targets
                if limits.left_open(target, self.state, self.now_s) is None
            )
            refusal = next(filter(None, known), refusal)
            return self.decision("throttle", refusal, rule=capturing[0]), self.state
        fired_s = self.state.last_fired_s()
        tried: dict[object, tuple[Chosen, Why | None]] = {}
        before: tuple[int, ...] | None = None
        for rule in capturing:
            (ranks, target), capture = whom(rule), rule.capture
            assert capture is not None, "only rules with a capture are asked"
            means, follows = self._means(capture, target)
            waits = limits.of_the_suspect(rule, target, fired_s, self.state, self.now_s, following=follows is not None)
            if waits is not None:
                refusal = refusal or waits
                continue
            # There may be a thousand rules: those that want the same of the same ranks are told the same.
            if ranks is not before:
                before = ranks
                tried.clear()
            if capture.wish not in tried:
                tried[capture.wish] = self._chosen(capture, ranks, target)
            chosen, refused = tried[capture.wish]
            if refused is None:
                requests = self._requests(rule, capture, chosen, means)
                beside = {"controls": chosen.controls} if chosen.controls or capture.control_ranks > 0 else {}
                why = explanations.captured(rule, {**found, **beside}, means, follows)
                decision = self.decision("capture", why, rule=rule, requests=requests)
                first = "" if follows is None else follows.capture_id
                return decision, started(self.state, rule.name, requests, self.now_s, target, first)
            refusal = refusal or refused
        assert refusal is not None, "a rule that nothing refused captures"
        return self.decision("throttle", refusal, rule=capturing[0]), self.state

    def _means(self, capture: Capture, target: Target) -> tuple[Means, Reproduction | None]:
        """What a rule captures a suspect with, and the earlier capture that this follows up."""
        verdict, stalled = self.verdict, self.verdict.label == "stalled"
        stage = None if stalled or not verdict.suspects else verdict.suspects[0].stage
        case = Situation(stage, verdict.sync, verdict.clock, self.nsys, stalled)
        first = limits.left_open(target, self.state, self.now_s) if capture.profiler == "auto" else None
        if first is not None:
            means = choose(capture, replace(case, left_open=first.left_open))
            if means is not None:
                return means, first
        means = choose(capture, case)
        assert means is not None, "where nothing is left open, there is something to begin with"
        return means, None

    def _chosen(self, capture: Capture, ranks: tuple[int, ...], target: Target) -> tuple[Chosen, Why | None]:
        bounds = self.policies.limits
        # Who would hardly save anything is no suspect beside the first, and may well be who to compare with.
        least_s = HEALTHY_GAIN_FRACTION * max((one.gain_s for one in self.verdict.suspects), default=0.0)
        suspected = {rank for one in self.verdict.suspects if one.gain_s >= least_s for rank in one.ranks}
        healthy = [rank for rank in self.peers if rank not in suspected]
        most = limits.left(bounds, self.state, self.now_s, target)
        chosen = limits.choose(capture, ranks, healthy, most)
        kept = limits.place_kept(target, bounds, self.state, self.now_s)
        return chosen, kept or limits.of_the_ranks(chosen, bounds, self.state)

    def _requests(self, rule: Rule, capture: Capture, chosen: Chosen, means: Means) -> tuple[CaptureRequest, ...]:
        period, phase = (0, 0) if means.once else _comes_back(self.verdict)
        return tuple(
            CaptureRequest(
                capture_id=_capture_id(self.verdict, rank, rule, self.state.asked + number),
                rank=rank,
                profiler=means.profiler,
                steps=means.steps(capture.steps),
                warmup_steps=means.warmup_steps(capture.warmup_steps),
                max_seconds=float(capture.max_seconds),
                max_bytes=capture.max_trace_bytes,
                options=options_of(capture, means),
                role="suspect" if number <= len(chosen.ranks) else "control",
                period_steps=period,
                phase=phase,
            )
            for number, rank in enumerate(chosen.ranks + chosen.controls, start=1)
        )

    def decision(
        self, outcome: Outcome, why: Why, *, rule: Rule | None = None, requests: tuple[CaptureRequest, ...] = ()
    ) -> Decision:
        """The decision; a rule that wants to capture brings the limits along."""
        verdict, numbers = self.verdict, explanations.gain_in_numbers(self.verdict, rule, self.cost_hours)
        if rule is not None:
            if rule.name in self.policies.lasting and verdict.label != "stalled":
                so_far = lasting.progress(rule, self.policies.lasting, self.state)
                numbers |= {name: value for name, value in so_far.items() if isinstance(value, (int, float))}
            if rule.capture is not None:
                numbers |= limits.in_numbers(self.policies.limits, self.state, self.now_s)
        return Decision(
            time_s=self.now_s,
            first_step=verdict.first_step,
            last_step=verdict.last_step,
            label=verdict.label,
            outcome=outcome,
            reason=why.reason,
            rule=rule.name if rule else None,
            parameters=why.parameters,
            numbers=numbers,
            requests=requests,
            attempt=verdict.attempt,
            notify=self.due,
        )


def _comes_back(verdict: Verdict) -> tuple[int, int]:
    first = verdict.suspects[0]
    if first.pattern != "recurring" or not first.period_steps or first.onset_step is None:
        return 0, 0
    return first.period_steps, first.onset_step % first.period_steps


def _capture_id(verdict: Verdict, rank: int, rule: Rule, number: int) -> str:
    """``w<first>-<last>-r<rank>-<rule>-<number>``: readable, a plain file name, unique by its number in the run."""
    head = f"w{verdict.first_step}-{verdict.last_step}-r{rank}-"
    # A job that starts again counts its steps again, perhaps with a controller that has lost its state.
    tail = f"-a{verdict.attempt}-{number}" if verdict.attempt else f"-{number}"
    return head + rule.name[: _MAX_ID_LENGTH - len(head) - len(tail)] + tail
