"""Decides what to do about a verdict. Pure: takes time and state, returns a decision and the next state.

The controller calls `decide` for each window and stall. Without an unambiguous suspect it captures nothing, and every
capture is within all limits. A decision not to capture is recorded like any other, with its reason and numbers.

A rule's ``for`` and ``detection.contended_after`` require a suspect to last. The suspect is the same as long as
consecutive windows of an attempt name the same scope, ranks and stage (or no stage). It lasts from its onset in the
first window that names it (or that window's first step, if earlier) to the last step of the current window. Each step
counts once, although windows overlap. A window that a capture disturbed neither counts nor ends the streak. Time is the
mean step of each window times its new steps: a wall clock would count pauses, and miss steps that arrive in bulk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from sftriage.model.captures import CaptureRequest, Decision, Outcome, Parameter
from sftriage.model.verdicts import Suspect, Verdict
from sftriage.model.windows import MOST_FRACTION
from sftriage.policy.captures import (
    Means,
    Parameters,
    Why,
    already_captured,
    by_system,
    choose,
    for_all_ranks,
    limits_in_numbers,
    missed,
    named,
    place_kept,
    places_left,
    ranks_limit,
    request_of,
    run_limit,
    suspect_limit,
    to_follow_up,
    whole_job_limit,
)
from sftriage.policy.fields import CONTENTION, Lasting
from sftriage.policy.in_force import PolicySet
from sftriage.policy.schema import Capture, Rule
from sftriage.policy.state import (
    Lasted,
    Losses,
    Reproduction,
    State,
    Streak,
    Target,
    key_of,
    key_of_ranks,
    opened,
    remembered,
    started,
    suspect_key,
)

_MAX_ID_LENGTH = 100

STALL = "stalled"
"""The common scope of a stall's suspects."""

NOTHING_LOST = Losses()
NOTHING: Parameters = MappingProxyType({})

HEALTHY_GAIN_FRACTION = 0.1
"""Fraction of the first suspect's gain below which another suspect counts as healthy."""

_END = "{} (end)"
"""The name under which notifications of a regression's end are remembered; no rule can have it."""


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
    """Decide about one window or stall; return the decision and the state for the next call.

    The first rule decides that has matched for its ``for`` and may capture. If no rule may capture, the decision
    records the first refusal; if only rules without a capture match, the first of them.

    ``now_s`` is seconds since the Unix epoch. ``peers`` are ranks to compare a suspect with, the most typical of its
    cohort first, and in a stall all other ranks. ``losses`` are what stragglers have cost since the run began, this
    window included.
    """
    due, state = _due_on_job(policies.rules, verdict, opened(state, now_s), now_s)
    suspect = verdict.suspects[0] if verdict.suspects else None
    found = losses.of(suspect) if suspect is not None else None
    cost_hours = 0.0 if found is None else found.rank_hours
    case = _Case(verdict, policies, state, now_s, peers, due, nsys, cost_hours)
    if verdict.label == "stalled":
        return case.of_stall()
    if verdict.label != "suspect" or suspect is None or not suspect.ranks:
        # A capture hides the fault; the same suspect may return after it.
        hidden = state.streak is None or verdict.reasons == ("self_inflicted",)
        return case.without_suspect(), state if hidden else replace(state, streak=None)
    return case.of_suspect(suspect)


def _shows(rule: Rule, suspect: Suspect) -> bool:
    """Whether a capture by this rule can show why a suspect is late.

    A rank's own trace does not show what the system did to it. If it waited on a CPU, only nsys shows which process
    ran instead; the other profilers show the rest of the lateness, if that reaches the rule. A slow host is captured
    regardless: its ranks are slow alike, and comparing them shows nothing.
    """
    by_nsys = rule.capture is not None and rule.capture.profiler == "nsys"
    if by_nsys or suspect.scope == "host" or suspect.host is not None:
        return True
    left = 1.0 - (suspect.descheduled_fraction or 0.0)
    return suspect.by_system is None and rule.reached(suspect.share * left, suspect.gain_s * left)


def _stalled_ranks(rule: Rule, verdict: Verdict) -> tuple[int, ...] | None:
    """The ranks of a stall's suspects that a rule matches; None if it does not match this stall at all.

    A rule with a scope, stage or gain does not match a stall without suspects.
    """
    if verdict.suspects:
        found = [
            suspect
            for suspect in verdict.suspects
            if not any(rule.misses(verdict.label, suspect)) and rule.reached(suspect.share, suspect.gain_s)
        ]
        return tuple(rank for suspect in found for rank in suspect.ranks) if found else None
    return None if rule.match.scope or rule.match.stage or not rule.reached(0.0, 0.0) else ()


@dataclass(frozen=True, slots=True)
class _Case:
    """One window, with everything a decision on it depends on, and the rules whose notifications are due."""

    verdict: Verdict
    policies: PolicySet
    state: State
    now_s: float
    peers: Sequence[int]
    due: tuple[str, ...] = ()
    nsys: bool = False
    cost_hours: float = 0.0

    def notified(self, matching: Sequence[Rule], suspect: str) -> _Case:
        state = self.state
        due = {
            key_of(rule.name, suspect): rule.name
            for rule in matching
            if rule.notify
            and self.has_lasted(rule)
            and self.now_s >= state.notified_s.get(key_of(rule.name, suspect), -math.inf) + rule.cooldown_s
        }
        if due:
            notified_s = remembered(state.notified_s, dict.fromkeys(due, self.now_s), lambda at_s: at_s)
            state = replace(state, notified_s=notified_s)
        return replace(self, state=state, due=(*self.due, *due.values()))

    def continued(self, suspect: Suspect, key: str, matching: Sequence[Rule]) -> State:
        """The state with one more window for each rule that waits for the suspect to last, and for contention."""
        verdict, before, wanted = self.verdict, self.state.streak, self.policies.lasting
        same = before is not None and (before.attempt, before.suspect) == (verdict.attempt, key)
        known = before.lasted if before is not None and same else {}
        waiting = [rule.name for rule in matching if rule.name in wanted]
        is_contended = (suspect.contended_fraction or 0.0) >= MOST_FRACTION and suspect.pattern != "recurring"
        if is_contended or CONTENTION in known:
            waiting.append(CONTENTION)
        lasted = {name: _longer(known.get(name), wanted[name], verdict, suspect) for name in waiting}
        streak = Streak(verdict.attempt, key, lasted) if waiting else None
        return self.state if streak == before else replace(self.state, streak=streak)

    def lasted(self, name: str) -> Lasted | None:
        return None if self.state.streak is None else self.state.streak.lasted.get(name)

    def has_lasted(self, rule: Rule) -> bool:
        lasted, wanted = self.lasted(rule.name), self.policies.lasting.get(rule.name)
        return wanted is None or (lasted is not None and _is_long(lasted, wanted))

    def progress(self, rule: Rule) -> dict[str, float]:
        """How long a rule has matched, and how long it must, in the unit of its ``for``."""
        lasted, whole = self.lasted(rule.name) or Lasted(0, 0.0, 0), self.policies.lasting[rule.name]
        if whole.steps:
            return {"lasted_steps": lasted.steps, "for_steps": whole.steps}
        return {"lasted_s": lasted.seconds, "for_s": whole.seconds}

    def passing(self, suspect: Suspect) -> Why | None:
        """Why contention for CPUs may have made a suspect late; None if it did not, or has for long enough.

        Contention passes within seconds, however many steps that is: a process ends, or moves to another core. Its
        suspect may stay late a while longer, so contention counts from the first window that shows it for as long as
        windows name the suspect. It does not recur at regular steps.
        """
        lasted, for_s = self.lasted(CONTENTION), self.policies.lasting[CONTENTION].seconds
        if lasted is None or lasted.seconds >= for_s or suspect.pattern == "recurring":
            return None
        share = suspect.contended_fraction or 0.0
        now = {"contended_share": share} if share >= MOST_FRACTION else {}
        return Why("contended", {**named(suspect), **now, "lasted_s": lasted.seconds, "for_s": for_s})

    def without_suspect(self) -> Decision:
        verdict = self.verdict
        if verdict.label == "healthy":
            return self.decision("ignore", Why("healthy"))
        if verdict.label != "needs_evidence":
            return self.decision("hold", Why("no_rank_named"))
        # Rules on the job against itself only observe: the first that matches is put on record.
        rule = next(iter(_rules_on_job(self.policies.rules, verdict)), None)
        split: Parameters = {"split": True} if verdict.numbers.get("split") else {}
        why = Why("undecided", {"reasons": verdict.reasons, **split})
        # The kernel counts what stopped a process or its cgroup, whether or not the rank can be named. (Waiting for a
        # CPU is no such reason: any rank on a busy host does so now and then.)
        first = verdict.suspects[0] if verdict.suspects else None
        if first is not None and first.system is not None and "self_inflicted" not in verdict.reasons:
            why = by_system(first)
        return self.decision("hold", why, rule=rule)

    def of_suspect(self, suspect: Suspect) -> tuple[Decision, State]:
        about, nearest = self.policies.about(self.verdict.label, suspect)
        share, gain_s = suspect.share, suspect.gain_s
        reached = [rule for rule in about if rule.reached(share, gain_s)]
        matching = [rule for rule in reached if self.cost_hours >= rule.min_cost_hours]
        target = Target(suspect_key(suspect, self.state.suspects), gain_s, self.verdict.attempt)
        case = replace(self, state=self.continued(suspect, target.suspect, matching))
        passing = case.passing(suspect)
        # A rule that captures notifies when it may capture.
        notifying = [rule for rule in matching if rule.capture is None or passing is None]
        case = case.notified(notifying, target.suspect)
        if suspect.pattern == "one-off":
            # A trace of the steps after it would show healthy ones.
            return case.decision("hold", Why("one_off")), case.state
        capturing = [rule for rule in matching if rule.capture is not None]
        showing = [rule for rule in capturing if _shows(rule, suspect)]
        if capturing and not showing:
            return case.decision("hold", by_system(suspect)), case.state
        if showing and passing is not None:
            return case.decision("hold", passing, rule=showing[0]), case.state
        if len(showing) < len(capturing):
            matching = showing
        if not matching:
            nearest = next(iter(reached), nearest)
            return case.decision("ignore", missed(nearest, self.verdict, suspect, self.cost_hours)), case.state
        saved = {"gain_s": gain_s, "share": share, "persistence": suspect.persistence}
        targets = {rule.name: (suspect.ranks, target) for rule in matching}
        return case.decided(matching, targets, {**named(suspect), **saved})

    def of_stall(self) -> tuple[Decision, State]:
        """Decide about a stall. It is not a window: it neither continues nor interrupts what windows show."""
        verdict = self.verdict
        on_stalls = [rule for rule in self.policies.rules if rule.match.label == "stalled"]
        stalled = {rule.name: ranks for rule in on_stalls if (ranks := _stalled_ranks(rule, verdict)) is not None}
        matching = [rule for rule in on_stalls if rule.name in stalled]
        # A stall is the whole job's, whichever ranks are missing, so it notifies once.
        case = self.notified(matching, STALL)
        # (the ranks of a job without suspects are its peers, as far as they are known)
        able = [rule for rule in matching if rule.capture is None or stalled[rule.name] or self.peers]
        found: dict[str, Parameter] = {"reasons": verdict.reasons}
        if verdict.suspects:
            more = sum(len(suspect.ranks) for suspect in verdict.suspects[1:])
            found |= {**named(verdict.suspects[0]), **({"more_ranks": more} if more else {})}
        if not able:
            return case.decision("hold", Why("standstill", found)), case.state

        # A job that starts, and has shown no step yet, does not use up the cooldown of a later hang.
        phase = None if verdict.numbers.get("typical_step_s") else "start"
        targets = {
            name: (ranks, Target(key_of_ranks(STALL, ranks, phase), math.inf, verdict.attempt))
            for name, ranks in stalled.items()
        }
        return case.decided(able, targets, found, found)

    def decided(
        self,
        matching: Sequence[Rule],
        targets: Mapping[str, tuple[tuple[int, ...], Target]],
        found: Parameters,
        observed: Parameters = NOTHING,
    ) -> tuple[Decision, State]:
        ready = [rule for rule in matching if self.has_lasted(rule)]
        capturing = [rule for rule in ready if rule.capture is not None]
        if capturing:
            return self._captured(capturing, targets, found)
        waiting = next((rule for rule in matching if rule.capture is not None), None)
        if waiting is None and ready:
            why = Why("observe_only", {"rule": ready[0].name, **observed})
            return self.decision("ignore", why, rule=ready[0]), self.state
        first = waiting or matching[0]
        so_far: Parameters = {"rule": first.name, **self.progress(first)}
        outcome: Outcome = "ignore" if waiting is None else "hold"
        return self.decision(outcome, Why("pending", so_far), rule=first), self.state

    def _captured(
        self, capturing: Sequence[Rule], targets: Mapping[str, tuple[tuple[int, ...], Target]], found: Parameters
    ) -> tuple[Decision, State]:
        refusal = run_limit(self.policies, self.state, self.now_s)
        if refusal is not None:
            # If its trace already exists, raising another limit would not help.
            known = (
                already_captured(rule, targets[rule.name][1], self.state, self.now_s)
                for rule in capturing
                if to_follow_up(targets[rule.name][1], self.state, self.now_s) is None
            )
            refusal = next(filter(None, known), refusal)
            return self.decision("throttle", refusal, rule=capturing[0]), self.state
        fired_s = self.state.last_fired_s()
        for rule in capturing:
            (ranks, target), capture = targets[rule.name], rule.capture
            assert capture is not None, "only rules with a capture come here"
            means, follows = self._means(capture, target)
            waits = suspect_limit(rule, target, fired_s, self.state, self.now_s, following=follows is not None)
            if waits is not None:
                refusal = refusal or waits
                continue
            beside: Parameters = {}
            if self.verdict.label == "stalled":
                requests, refused = self._for_all_ranks(rule, capture, ranks, means), whole_job_limit(self.state)
            else:
                suspects, controls, refused = self._chosen(capture, ranks, target)
                requests = self._requests(rule, capture, suspects, controls, means) if refused is None else ()
                beside = {"controls": controls} if controls or capture.control_ranks > 0 else {}
            if refused is None:
                by: Parameters = {"profiler": means.profiler, "chosen": means.chosen} if means.chosen else {}
                first = follows.capture_id if follows is not None else ""
                opened_by = {"follows": first, "left_open": follows.left_open} if follows is not None else {}
                about: Parameters = {"rule": rule.name, **opened_by, **found, **beside, **by}
                why = Why("follow_up" if first else "rule_matched", about)
                decision = self.decision("capture", why, rule=rule, requests=requests)
                return decision, started(self.state, rule.name, requests, self.now_s, target, first)
            refusal = refusal or refused
        assert refusal is not None, "a rule that nothing refused captures"
        return self.decision("throttle", refusal, rule=capturing[0]), self.state

    def _means(self, capture: Capture, target: Target) -> tuple[Means, Reproduction | None]:
        """The profiler that a rule uses for a suspect, and the earlier capture that it follows up."""
        verdict = self.verdict
        if verdict.label == "stalled":
            return Means("stacks", once=True), None
        stage = verdict.suspects[0].stage if verdict.suspects else None
        about: dict[str, Any] = {"sync": verdict.sync, "clock": verdict.clock, "nsys": self.nsys}
        first = to_follow_up(target, self.state, self.now_s) if capture.profiler == "auto" else None
        if first is not None:
            means = choose(capture, stage, **about, left_open=first.left_open)
            if means is not None:
                return means, first
        means = choose(capture, stage, **about)
        assert means is not None, "a first capture always has a profiler"
        return means, None

    def _chosen(
        self, capture: Capture, ranks: tuple[int, ...], target: Target
    ) -> tuple[tuple[int, ...], tuple[int, ...], Why | None]:
        """The ranks to capture, the healthy peers to compare them with, and why these cannot be captured now."""
        bounds = self.policies.limits
        # A suspect with hardly any gain beside the first counts as a healthy peer.
        least_s = HEALTHY_GAIN_FRACTION * max((suspect.gain_s for suspect in self.verdict.suspects), default=0.0)
        suspected = {rank for suspect in self.verdict.suspects if suspect.gain_s >= least_s for rank in suspect.ranks}
        most = places_left(bounds, self.state, self.now_s, target)
        ranks = (capture.ranks or tuple(dict.fromkeys(ranks))[: capture.sample])[:most]
        healthy = [rank for rank in dict.fromkeys(self.peers) if rank not in suspected and rank not in ranks]
        controls = tuple(healthy[: min(capture.control_ranks, most - len(ranks))])
        kept = place_kept(target, bounds, self.state, self.now_s)
        return ranks, controls, kept or ranks_limit(ranks + controls, bounds, self.state)

    def _for_all_ranks(
        self, rule: Rule, capture: Capture, missing: Sequence[int], means: Means
    ) -> tuple[CaptureRequest, ...]:
        """One request for all ranks of a stalled job; named by the first missing rank, or else the lowest rank."""
        rank = missing[0] if missing else min(self.peers)
        suspected = dict.fromkeys((*missing, *(rank for suspect in self.verdict.suspects for rank in suspect.ranks)))
        waiting = [peer for peer in self.peers if peer not in suspected]
        request = request_of(capture, means, _capture_id(self.verdict, rank, rule, self.state.asked + 1), rank)
        return (for_all_ranks(request, capture, tuple(suspected), waiting),)

    def _requests(
        self, rule: Rule, capture: Capture, suspects: tuple[int, ...], controls: tuple[int, ...], means: Means
    ) -> tuple[CaptureRequest, ...]:
        first, period, phase = self.verdict.suspects[0], 0, 0
        if not means.once and first.pattern == "recurring" and first.period_steps and first.onset_step is not None:
            period, phase = first.period_steps, first.onset_step % first.period_steps
        return tuple(
            request_of(
                capture,
                means,
                _capture_id(self.verdict, rank, rule, self.state.asked + number),
                rank,
                role="suspect" if number <= len(suspects) else "control",
                period_steps=period,
                phase=phase,
            )
            for number, rank in enumerate(suspects + controls, start=1)
        )

    def decision(
        self, outcome: Outcome, why: Why, *, rule: Rule | None = None, requests: tuple[CaptureRequest, ...] = ()
    ) -> Decision:
        verdict, numbers = self.verdict, {"exposed_s": self.verdict.exposed_s}
        if verdict.suspects:
            first = verdict.suspects[0]
            numbers |= {"gain_s": first.gain_s, "share": first.share, "persistence": first.persistence}
        if self.cost_hours:
            numbers["cost_hours"] = self.cost_hours
        if rule is not None:
            numbers |= {"min_share": rule.min_share, "min_gain_s": rule.min_gain_s, "cooldown_s": rule.cooldown_s}
            if rule.min_cost_hours:
                numbers["min_cost_hours"] = rule.min_cost_hours
            if rule.capture is not None:
                numbers |= {"sample": rule.capture.sample, "control_ranks": rule.capture.control_ranks}
            if rule.name in self.policies.lasting and verdict.label != "stalled":
                numbers |= self.progress(rule)
            if rule.capture is not None:
                numbers |= limits_in_numbers(self.policies.limits, self.state, self.now_s)
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


def _capture_id(verdict: Verdict, rank: int, rule: Rule, number: int) -> str:
    """``w<first>-<last>-r<rank>-<rule>-<number>``: readable, a plain file name, unique by its number in the run."""
    head = f"w{verdict.first_step}-{verdict.last_step}-r{rank}-"
    # A job that starts again counts its steps again, perhaps with a controller that has lost its state.
    tail = f"-a{verdict.attempt}-{number}" if verdict.attempt else f"-{number}"
    return head + rule.name[: _MAX_ID_LENGTH - len(head) - len(tail)] + tail


def _longer(known: Lasted | None, wanted: Lasting, verdict: Verdict, suspect: Suspect) -> Lasted:
    # Once it is long enough, keep it: every change of the state is written to disk.
    if known is not None and _is_long(known, wanted):
        return known
    if known is None:
        # Nothing counts up to the step before the suspect's first step in this window.
        onset = verdict.first_step if suspect.onset_step is None else suspect.onset_step
        known = Lasted(0, 0.0, min(max(onset, verdict.first_step), verdict.last_step) - 1)
    new = max(0, verdict.last_step - max(known.last_step, verdict.first_step - 1))
    took_s = new * verdict.exposed_s
    seconds = known.seconds + (took_s if math.isfinite(took_s) else 0.0)
    return Lasted(known.steps + new, seconds, max(known.last_step, verdict.last_step))


def _is_long(lasted: Lasted, wanted: Lasting) -> bool:
    return lasted.steps >= wanted.steps if wanted.steps else lasted.seconds >= wanted.seconds


def _rules_on_job(rules: Sequence[Rule], verdict: Verdict) -> tuple[Rule, ...]:
    """The rules on a reason that match: the job is slower than its best, or a link between its hosts is slow."""
    found, link = verdict.regression, verdict.link
    gains: dict[str, tuple[float, float, Sequence[str]]] = {}
    if found is not None:
        gains["regressed"] = found.fraction, found.fraction * found.best_step_s, found.stages
    if link is not None:
        gains["slow_link"] = link.cost_s / verdict.step_s, link.cost_s, verdict.sync
    return tuple(
        rule
        for rule in rules
        if (gain := gains.get(rule.match.reason or "")) is not None
        and rule.reached(*gain[:2])
        and (not rule.match.stage or not set(rule.match.stage).isdisjoint(gain[2]))
    )


def _due_on_job(rules: Sequence[Rule], verdict: Verdict, state: State, now_s: float) -> tuple[tuple[str, ...], State]:
    """The rules on a reason whose notifications are due, and the state after them.

    The same reason is notified at most once in a rule's cooldown, and a regression's end only if its beginning was.
    """
    last_s, names = state.notified_s, dict[str, str]()
    ended = verdict.regression is not None and verdict.regression.until_step is not None
    for rule in _rules_on_job(rules, verdict):
        known_s = last_s.get(rule.name, -math.inf)
        if rule.notify and ended and rule.match.reason == "regressed":
            end = _END.format(rule.name)
            if last_s.get(end, -math.inf) < known_s:
                names[rule.name] = end
        elif rule.notify and now_s >= known_s + rule.cooldown_s:
            names[rule.name] = rule.name
    if names:
        state = replace(state, notified_s={**last_s, **dict.fromkeys(names.values(), now_s)})
    return tuple(names), state
