"""The controller of one job: judges windows and stalls, applies the policy, and records every decision.

`sftriage.runtime.triage` calls it for each window. Its `Ledger` measures what captures cost the job's steps.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from sftriage.controller.agents import ResumeState, peers_of
from sftriage.mitigate.advice import RECENT_WINDOWS, Straggler, is_settled, straggler_in
from sftriage.mitigate.loop import JobNow, RemedyLoop
from sftriage.mitigate.switching import Setting, SwitchStatus
from sftriage.model import events
from sftriage.model.captures import ENDED, CaptureRequest, CaptureResult, Decision, ManualRequest, Reproduced, Trigger
from sftriage.model.hangs import HangEvidence
from sftriage.model.verdicts import Clock, Settings, Verdict, is_informative
from sftriage.model.windows import JobStatus, Window
from sftriage.policy.captures import budget_s, decide_follow_up, decide_manual_request, labelled, trigger
from sftriage.policy.engine import decide
from sftriage.policy.in_force import PolicyFiles, PolicySet, change_lines
from sftriage.policy.schema import Detection
from sftriage.policy.state import GRACE_S, State, charged, finished, left_open
from sftriage.verdict.accounting import FloatArray, medians
from sftriage.verdict.evidence import Past
from sftriage.verdict.judging import judge, reproduced
from sftriage.verdict.stalls import Watch, observe, on_clock, still_ranks
from sftriage.windows.gather import Shape
from sftriage.words.verdicts import slow_stage, subject

if TYPE_CHECKING:
    from sftriage.runs.journal import Journal

log = logging.getLogger("sftriage")


def settings_of(detection: Detection) -> Settings:
    """The thresholds of a policy's ``detection``; the others keep their defaults."""
    return Settings(
        min_gain_fraction=detection.min_gain_fraction,
        false_names_per_million_steps=detection.false_names_per_million_steps,
        min_persistence_fraction=detection.min_persistence,
        min_coverage_fraction=detection.min_coverage,
    )


def shape_of(detection: Detection, **overrides: int) -> Shape:
    """How ``detection`` or ``overrides`` cut windows; values set by neither shrink if steps are long."""
    cuts = {name: getattr(detection, name) for name in ("window_steps", "stride_steps", "warmup_steps")}
    return Shape(**cuts | overrides, shrinks=frozenset(cuts) - detection.model_fields_set - overrides.keys())


def all_peers(stall: Verdict, window: Window | None, ranks: Iterable[int]) -> tuple[int, ...]:
    """All ranks that a stall does not name: those that resemble the first suspect come first."""
    suspected = {rank for suspect in stall.suspects for rank in suspect.ranks}
    every = dict.fromkeys((*peers_of(stall, window), *sorted(ranks)))
    return tuple(rank for rank in every if rank not in suspected)


class Controller:
    """Decides about windows, stalls and requests; ``now_s`` is seconds since the epoch.

    It saves the policy engine's state in ``state_file`` before it returns a decision, so that a restarted controller
    resumes there. While the disk fails, the state is only in memory.

    Args:
        policy: the policies in force, or files to watch for changes.
        publish: called with every recorded event, and with each window before it is judged.
        left: the state of an earlier controller; this one only learns from windows that it has decided.

    Attributes:
        losses: what stragglers have cost the job since the run began.
        costs: what captures have cost, as far as the last window shows.

    Raises:
        InputError: the state file is invalid.
    """

    def __init__(
        self,
        policy: PolicySet | PolicyFiles,
        records: Journal,
        state_file: Path,
        publish: Callable[[events.Event | events.Observation], None] = lambda event: None,
        left: ResumeState | None = None,
        *,
        nsys: bool = False,
    ) -> None:
        self._policy = policy
        self._records = records
        self._state_file = state_file
        self._publish = publish
        self._adopt(policy.current)
        self._watch = Watch()
        self._last: Window | None = None
        self._nsys = nsys
        self._clock: Clock = "host"
        self._split: bool | None = None
        self._pasts: dict[int, Past] = {}
        self._ledgers = defaultdict[int, Ledger](Ledger)
        self._left = left or ResumeState()
        self.losses = self._left.losses
        self.costs: list[events.CostMeasured] = []
        self._triggers = {capture_id: why for capture_id, (_, why) in self._left.unended.items()}
        self._learnt: dict[int, int] = {}
        self._loop = RemedyLoop.resumed(self._left.remedies) if self._left.remedies else RemedyLoop()
        # Of the newest attempt: the chronic stragglers of the last informative windows, and the number of ranks.
        self._recent: deque[Straggler | None] = deque(maxlen=RECENT_WINDOWS)
        self._attempt = self._n_ranks = 0
        self._state = State.from_json(state_file.read_bytes()) if state_file.exists() else State()

    def budget(self, now_s: float) -> tuple[float, float]:
        """What captures have cost the job, and their budget by now, in seconds."""
        return self._state.spent_s, budget_s(self.policies.limits, self._state, now_s)

    def decided(self, window: Window) -> bool:
        """Whether an earlier controller has decided about a window."""
        return window.last_step <= self._left.judged.get(window.attempt, (-1, -1))[1]

    def learn(self, window: Window, spans: Mapping[int, events.Span] | None = None) -> None:
        """Learn what is normal, and what recurs, from a window that was decided before. Records nothing.

        A repeated window changes nothing.
        """
        if window.last_step <= self._learnt.get(window.attempt, -1):
            return
        self._learnt[window.attempt] = window.last_step
        self._publish(events.WindowObserved(window, spans or {}, learnt=True))
        self._ledgers[window.attempt].add(window, 0.0)
        self._judged(window)

    def take(self, window: Window, now_s: float, spans: Mapping[int, events.Span] | None = None) -> events.WindowJudged:
        """Judge a window, decide, and record both; ``spans`` has start and end of each of its steps."""
        self._follow(now_s)
        if spans and self._state.started_s is None:
            # (a run that begins in the middle of a job is charged for all captures in the steps that it takes)
            first_s = min(span.start_ns for span in spans.values()) / 1e9
            self._remember(replace(self._state, started_s=min(first_s, now_s)))
        self._publish(events.WindowObserved(window, spans or {}))
        self.costs = self._ledgers[window.attempt].add(window, now_s)
        for cost in self.costs:
            if cost.cost_s:
                self._remember(charged(self._state, cost.cost_s))
            self.record(cost)
        verdict = self._judged(window)
        self._clock = verdict.clock
        if verdict.label == "needs_evidence" and "bucket_ready" in self.policies.gathers:
            # Record when the split of the sync stage at the last ready gradient begins or ends.
            ready_NR = window.ready_NR
            known = 0.0 if ready_NR is None else float(np.isfinite(ready_NR).all(axis=1).mean())
            if self._split != (known > 0.0):
                self._split = known > 0.0
                first_step, last_step = window.first_step, window.last_step
                self.record(events.EvidenceGathered(now_s, first_step, last_step, ready_fraction=known))
        judged = self._decided(verdict, now_s, peers_of(verdict, window))
        for pause in self._pasts[window.attempt].paused:
            self.record(msgspec.structs.replace(pause, time_s=now_s))
        return judged

    def _judged(self, window: Window) -> Verdict:
        # A restarted job may run elsewhere, or with other data, so each attempt has its own past.
        known = self._pasts.get(window.attempt)
        verdict, self._pasts[window.attempt] = judge(window, known, self._settings)
        # (without the kernel's counters: they are most of its size, and only the judged window needs them)
        self._last = replace(window, counted_NRC=None)
        if window.attempt != self._attempt:
            self._recent.clear()
        self._attempt, self._n_ranks = window.attempt, window.durations_NRS.shape[1]
        if is_informative(verdict.label, verdict.reasons):
            suspect, chronic = verdict.named, None
            if suspect is not None and suspect.pattern == "chronic":
                who, where = subject(suspect), slow_stage(suspect)
                chronic = Straggler(who, where, suspect.ranks, 0, suspect.gain_s, verdict.step_s)
            self._recent.append(chronic)
        return verdict

    def look(self, job: JobStatus, now_ns: int, now_s: float) -> events.WindowJudged | None:
        """Check whether the job stalls; decide and record a stall when it begins, or when its suspects change.

        ``now_ns`` is of a monotonic clock, read after ``job``.
        """
        # A profiler holds up its rank within its time-box, and stacks do not: a rank that is stopped answers neither.
        running = [one for one in self._state.running.values() if one.profiler != "stacks"]
        capturing = {one.rank for one in running if one.deadline_s - GRACE_S > now_s}
        since = on_clock(job, self._watch.job, now_ns)
        verdict, self._watch = observe(since, self._watch, self._stalled_after_s, now_ns, capturing)
        if verdict is None:
            return None
        # No window arrives during a stall.
        self._follow(now_s)
        last = self._last if self._last is not None and self._last.attempt == job.attempt else None
        return self._decided(verdict, now_s, all_peers(verdict, last, job.rank_R.tolist()))

    @property
    def evidence_due(self) -> bool:
        """Whether to gather the evidence of all ranks now, which may prove a hang before its time is over."""
        return self._watch.evidence_due

    def consider(self, evidence: HangEvidence, began_ns: int, ended_ns: int) -> None:
        """Take evidence that was due, for the next check; records nothing."""
        self._watch = self._watch.with_evidence(evidence, began_ns, ended_ns)

    def decide_request(self, request: ManualRequest, job: JobStatus | None, now_s: float) -> Decision:
        """Decide about a person's request for a capture, and record the decision."""
        still = () if job is None else still_ranks(job, self._watch.pace.typical_s)
        decision, state = decide_manual_request(
            request, self.policies, self._state, now_s, job, still, clock=self._clock, nsys=self._nsys
        )
        triggers = {made.capture_id: trigger(request, self.policies, decision, made) for made in decision.requests}
        decision = self._known(decision, triggers, state)
        self.record(events.ManualRequestDecided(request, decision, triggers))
        return decision

    def follow_up(self, hung: CaptureRequest, job: JobStatus | None, now_s: float) -> Decision | None:
        """Request the stacks of a rank that hangs inside an abandoned capture, and record the decision.

        None if the rank no longer exists.
        """
        if job is None or not hung.takes_steps:
            return None
        rank = next((status for status in job.ranks if status.rank == hung.rank), None)
        if rank is None or rank.closed or rank.alive is False:
            return None
        decision, why, state = decide_follow_up(
            hung, self._triggers[hung.capture_id], self._state, now_s, step=max(0, rank.step), attempt=job.attempt
        )
        triggers = {request.capture_id: why for request in decision.requests}
        decision = self._known(decision, triggers, state)
        self.record(events.FollowUpDecided(hung.capture_id, decision, triggers))
        return decision

    def mitigate(self, switches: Sequence[SwitchStatus], now_s: float) -> Mapping[str, Setting]:
        """Start, continue or undo remedies, and record each change first; return the setting of each group.

        ``switches`` are the groups of ranks that can switch a remedy on.
        """
        if not switches and not self._loop.trials:
            return {}
        ledger = self._ledgers[self._attempt]
        now = JobNow(
            time_s=now_s,
            attempt=self._attempt,
            last_step=max(ledger.steps, default=0),
            step_s={n: step.took_s for n, step in ledger.steps.items() if step.is_usual},
            switches=switches,
            straggler=straggler_in(self._recent, self._n_ranks),
            is_known=is_settled(self._recent),
            allowed=self.policies.mitigate,
        )
        self._loop, changed = self._loop.after(now)
        if changed is not None:
            self.record(changed)
        return self._loop.wanted(switches)

    def answered(self, request: ManualRequest) -> bool:
        """Whether an earlier controller has decided about a person's request."""
        return request.request_id in self._left.request_ids

    def _decided(self, verdict: Verdict, now_s: float, peers: tuple[int, ...]) -> events.WindowJudged:
        self.losses, about = self.losses.after(verdict), (self.policies, self._state, now_s, peers)
        decision, state = decide(verdict, *about, nsys=self._nsys, losses=self.losses)
        triggers = {made.capture_id: trigger(verdict, self.policies, decision, made) for made in decision.requests}
        judged = events.WindowJudged(verdict, self._known(decision, triggers, state), triggers)
        self.record(judged)
        return judged

    def _known(self, decision: Decision, triggers: Mapping[str, Trigger], state: State) -> Decision:
        """Save the state after a decision, then return the decision with its captures' triggers."""
        if state != self._state:
            self._remember(state)
        self._triggers |= triggers
        return labelled(decision, triggers)

    def _adopt(self, policies: PolicySet) -> None:
        self.policies = policies
        self._settings = settings_of(policies.detection)
        self._stalled_after_s = policies.detection.stalled_after_s

    def _follow(self, now_s: float) -> None:
        change = self._policy.poll(now_s) if isinstance(self._policy, PolicyFiles) else None
        if change is None:
            return
        if change.kind == "changed":
            self._adopt(self._policy.current)
        for line in change_lines(change):
            log.error("%s", line) if change.kind == "refused" else log.warning("%s", line)
        self.record(change)

    def trigger_of(self, capture_id: str) -> Trigger:
        return self._triggers[capture_id]

    def reproduced(self, capture_id: str, steps: Window | None) -> Reproduced | None:
        """Whether the captured steps contain the fault that led to the capture; None if unknown."""
        return None if steps is None else reproduced(steps, self.trigger_of(capture_id), self._settings)

    def changed(
        self, result: CaptureResult, now_s: float, found: Reproduced | None = None, stored_bytes: int = 0
    ) -> None:
        """Record that a capture changed its state; once it has ended, its rank may be captured again."""
        if result.state in ENDED:
            holds_fault = found is not None and found.answer != "no"
            self._remember(finished(self._state, result, now_s, reproduced=holds_fault))
        self.record(events.CaptureChanged(now_s, result, found, stored_bytes))

    def explained(self, found: events.CauseFound) -> None:
        """Record the cause that a capture shows, and remember what it leaves open."""
        self._remember(left_open(self._state, found.capture_id, found.left_open))
        self.record(found)

    def record(self, event: events.Event) -> None:
        self._records.append(event)
        self._publish(event)

    def _remember(self, state: State) -> None:
        self._state = state
        self._records.keep(self._state_file, self._state.to_json())


AFTER_STEPS = 10
"""Steps after a capture that it may still slow: the trace is exported and compressed meanwhile."""

BEFORE_STEPS = 50
"""Steps before a capture whose mean is a step's time without a capture, including what recurs every few steps."""

NEAR_STEPS = 10
"""The last of these steps; their median counts if steps slowed just before the capture, which is not its cost."""

MOST_MEDIANS = 5.0
"""Maximum weight of a step in the mean, in medians: a checkpoint is no usual step."""

MIN_BEFORE_STEPS = 5
"""Minimum steps to know what a step takes without a capture."""

SEEN_STEPS = 500
"""Steps before a capture to search for a slow step that recurs in it."""

SLOW_FRACTION, SLOW_SPREADS = 0.25, 7.4
"""A slow step exceeds a usual one by this share, and by this many median deviations (five standard deviations)."""

KEPT_STEPS = 2048
"""Steps to remember: the longest capture, with those before and after it."""


@dataclass(frozen=True, slots=True)
class CostedStep:
    """A step of the job: how long it took, its kind, and whether a profiler ran.

    ``rank`` took ``over_s`` longer than the median rank in one ``part`` of its own, by number: no rank exceeded its
    peers by more in any part.
    """

    took_s: float
    capturing: bool
    kind: str = ""
    rank: int = 0
    part: int = 0
    over_s: float = 0.0

    @property
    def is_usual(self) -> bool:
        """Whether it is an ordinary step that nothing disturbed, as far as known."""
        return isfinite(self.took_s) and not self.capturing and not self.kind

    def place(self, usual_s: float) -> tuple[int, int] | None:
        """Where it was longer than usual; None if all ranks share it, or no single rank explains it."""
        # (of two ranks, the median is half way between them)
        return (self.rank, self.part) if self.over_s >= 0.4 * (self.took_s - usual_s) else None


@dataclass(slots=True)
class Ledger:
    """The last steps of one attempt of a job, and the last of them up to which captures have been accounted for.

    ``left_R`` is the part of the last one after its sync stages, in seconds.
    """

    steps: dict[int, CostedStep] = field(default_factory=dict)
    settled: int = -1
    left_R: FloatArray | None = None

    def add(self, window: Window, now_s: float) -> list[events.CostMeasured]:
        """Take one more window; return the costs it reveals, at ``now_s`` in seconds since the epoch."""
        last = max(self.steps, default=-1)
        if last < window.last_step:
            before_R = self.left_R if window.first_step <= last + 1 else None
            found, self.left_R = _steps(window.steps(max(window.first_step, last + 1), window.last_step), before_R)
            self.steps |= found
        for number in list(self.steps)[: max(0, len(self.steps) - KEPT_STEPS)]:
            del self.steps[number]
        costs = []
        while (touched := self._next()) is not None:
            costs.append(events.CostMeasured(now_s, window.attempt, *touched, *self._cost_s(*touched)))
            self.settled = touched[1] + AFTER_STEPS
        return costs

    def _next(self) -> tuple[int, int] | None:
        touched = [number for number, step in self.steps.items() if step.capturing and number > self.settled]
        if not touched:
            return None
        first = last = touched[0]
        for number in touched:
            if number - last > AFTER_STEPS:
                break
            last = number
        return (first, last) if last + AFTER_STEPS <= max(self.steps) else None

    def _cost_s(self, first: int, last: int) -> tuple[float | None, float | None]:
        """What captures in these steps cost, and what a step took before; None if that is unknown.

        It compares a step with earlier ones of its kind. A step of a new kind is not charged, since it may take as long
        without a capture.
        """
        affected = [step for number, step in self.steps.items() if first <= number <= last + AFTER_STEPS]
        during = [step for step in affected if isfinite(step.took_s)]
        before = list(self._free(first))
        kinds = Counter(step.kind for step in affected)
        ordinary = max(kinds, key=lambda kind: kinds[kind])
        like = {kind: [step for step in before if step.kind == kind] for kind in kinds}
        if len(like[ordinary]) < MIN_BEFORE_STEPS:
            return None, None
        expected_s = {kind: _expected_s(like[kind], [step for step in during if step.kind == kind]) for kind in kinds}
        cost_s = sum(step.took_s for step in during if like[step.kind]) - sum(expected_s.values())
        return max(0.0, cost_s), _usual_s(like[ordinary])

    def _free(self, first: int) -> Iterator[CostedStep]:
        captured = -AFTER_STEPS - 1
        for number, step in self.steps.items():
            captured = number if step.capturing else captured
            if number < first and number - captured > AFTER_STEPS and isfinite(step.took_s):
                yield step


def _expected_s(before: Sequence[CostedStep], during: Sequence[CostedStep]) -> float:
    """What some steps would have taken without a capture in total, by earlier ones of their kind; 0 if there are none.

    That is the mean of earlier steps, except that single slow steps that recur in one place count as often as before,
    rounded up, where they occur again. A capture is timed to contain what recurs, so its few steps contain more of it
    than the mean.
    """
    if not before or not during:
        return 0.0
    before = before[-SEEN_STEPS:]
    recent = np.asarray([step.took_s for step in before[-BEFORE_STEPS:]])
    median_s = float(np.median(recent))
    level_s, spread_s = max(median_s, _near_s(before)), float(np.median(np.abs(recent - median_s)))
    slow_s = level_s + max(SLOW_FRACTION * level_s, SLOW_SPREADS * spread_s)
    slow = [step.took_s > slow_s for step in before]
    returning: dict[tuple[int, int] | None, list[float]] = {}
    for step, *around in zip(before, slow, [False, *slow], [*slow[1:], False], strict=False):
        # (a slow phase of the job has no single slow steps)
        if around == [True, False, False]:
            returning.setdefault(step.place(level_s), []).append(step.took_s - level_s)
    returning = {place: over for place, over in returning.items() if len(over) > 1}
    others = [
        step for step, is_slow in zip(before, slow, strict=True) if not is_slow or step.place(level_s) not in returning
    ]
    expected_s = _usual_s(others or before) * len(during)
    for place, over in returning.items():
        typical_s, due = float(np.median(over)), ceil(len(over) * len(during) / len(before))
        again = sorted(step.took_s - level_s for step in during if step.place(level_s) == place)
        expected_s += sum(min(typical_s, over_s) for over_s in again[-due:] if over_s >= 0.5 * typical_s)
    return expected_s


def _usual_s(before: Sequence[CostedStep]) -> float:
    recent = np.asarray([step.took_s for step in before[-BEFORE_STEPS:]])
    return max(_near_s(before), float(np.minimum(recent, MOST_MEDIANS * float(np.median(recent))).mean()))


def _near_s(before: Sequence[CostedStep]) -> float:
    return float(np.median([step.took_s for step in before[-NEAR_STEPS:]]))


def _steps(window: Window, left_R: FloatArray | None) -> tuple[dict[int, CostedStep], FloatArray]:
    """The steps of a window, by number, and the part of the last one after its sync stages. Unrecorded steps are NaN.

    A step begins at the end of the previous one's sync stages, where the ranks are in step. Otherwise, what a rank does
    after them, such as a checkpoint, would count twice: as its own work, and as the others' wait in the next step.
    """
    durations_NRS, stages = window.durations_NRS, window.schema.stages
    synced = max((n for n, stage in enumerate(stages) if stage in window.schema.sync), default=len(stages))
    local = [n for n, stage in enumerate(stages) if stage not in window.schema.sync and n < synced]
    between_NR = (
        np.nan_to_num(window.between_NR) if window.between_NR is not None else np.zeros(durations_NRS.shape[:2])
    )
    after_NR = durations_NRS[:, :, synced + 1 :].sum(axis=2)
    if synced < len(stages) and window.outside_NRG is not None:
        after_NR = after_NR - window.outside_NRG.sum(axis=2)
    first_R = left_R if left_R is not None and left_R.shape == after_NR[0].shape else np.zeros(after_NR[0].shape)
    before_NR = np.concatenate((first_R[None], after_NR[:-1]))
    # (fmax passes over missing ranks)
    took_NR = durations_NRS.sum(axis=2) + between_NR - after_NR + np.nan_to_num(before_NR)
    took_N = np.fmax.reduce(took_NR, axis=1, initial=np.nan)
    parts_NRP = np.concatenate((durations_NRS[:, :, local], between_NR[:, :, None], before_NR[:, :, None]), axis=2)
    over_NRP = np.nan_to_num(parts_NRP - medians(parts_NRP, axis=1)[:, None], nan=-np.inf)
    steps = {}
    for n, over_RP in enumerate(over_NRP):
        rank, part = divmod(int(over_RP.argmax()), over_RP.shape[1])
        steps[window.first_step + n] = CostedStep(
            took_s=float(took_N[n]),
            capturing=window.capturing_N is not None and bool(window.capturing_N[n]),
            kind=next(iter(window.noted(n)), ""),
            rank=rank,
            part=part,
            over_s=float(over_RP[rank, part]),
        )
    return steps, after_NR[-1]
