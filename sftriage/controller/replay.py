"""Replays recorded windows under a policy, on a clock made of the recorded steps: what the policy would have done.

Pure; `sftriage policy test` uses it. It assumes that each capture runs as requested, from the step after its window,
and contains its fault, and marks the windows that the capture would have disturbed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from sftriage.controller.agents import peers_of
from sftriage.controller.controller import all_peers, settings_of
from sftriage.model.captures import CaptureRequest, CaptureResult, Decision
from sftriage.model.events import JobPaused
from sftriage.model.verdicts import Settings, Verdict
from sftriage.model.windows import Window
from sftriage.policy.engine import decide
from sftriage.policy.in_force import PolicySet
from sftriage.policy.state import Losses, State, finished
from sftriage.verdict.accounting import known_medians
from sftriage.verdict.evidence import Past
from sftriage.verdict.judging import judge


def verdicts_and_pauses(
    windows: Iterable[Window], settings: Settings
) -> Iterator[tuple[Verdict, tuple[JobPaused, ...]]]:
    """Verdicts on recorded windows in order, each attempt of the job with its own history.

    Each verdict comes with the pauses that its window is the first to show.
    """
    pasts: dict[int, Past] = {}
    for window in windows:
        verdict, pasts[window.attempt] = judge(window, pasts.get(window.attempt), settings)
        yield verdict, pasts[window.attempt].paused


@dataclass(frozen=True, slots=True)
class ReplayedDecision:
    """The decision about a window or stall at ``time_s`` of the replay's clock.

    ``captured_steps`` has the steps that each requested capture would have recorded; None for stacks taken at once.
    """

    time_s: float
    verdict: Verdict
    decision: Decision
    captured_steps: tuple[tuple[int, int] | None, ...] = ()


def replay(
    windows: Iterable[Window], policies: PolicySet, start_s: float, stalls: Iterable[Verdict] = ()
) -> Iterator[ReplayedDecision]:
    """Decide on windows, in step order within an attempt; the first began at ``start_s`` seconds since the epoch.

    ``stalls`` are verdicts on steps that stalled during the recording, in order; no window shows them.
    """
    state = _Replay(policies, start_s)
    pending = list(stalls)
    for window in windows:
        while pending and (pending[0].attempt, pending[0].first_step) <= (window.attempt, window.last_step):
            yield state.stall(pending.pop(0))
        yield state.take(window)
    for stall in pending:
        yield state.stall(stall)


@dataclass(frozen=True, slots=True)
class _Running:
    """A capture that would be running, from its warm-up to its latest end."""

    request: CaptureRequest
    attempt: int
    begins: int
    first_step: int
    last_step: int
    until_s: float


@dataclass(slots=True)
class _Replay:
    """The replay's state between windows; ``ends_s`` has the ends of the last window's new steps."""

    policies: PolicySet
    now_s: float
    ends_s: dict[int, float] = field(default_factory=dict)
    attempt: int | None = None
    next_step: int = 0
    step_s: float = 0.0
    state: State = field(default_factory=State)
    losses: Losses = field(default_factory=Losses)
    pasts: dict[int, Past] = field(default_factory=dict)
    captured: list[_Running] = field(default_factory=list)
    last: Window | None = None
    decided_s: float = -np.inf

    def take(self, window: Window) -> ReplayedDecision:
        self._pass(window)
        self._end_captures(window, self.now_s)
        step_N = window.first_step + np.arange(len(window.durations_NRS))
        capturing_N = np.zeros(len(step_N), dtype=bool) if window.capturing_N is None else window.capturing_N.copy()
        for running in self.captured:
            # The profiler's own warm-up slows a step as well.
            capturing_N |= (step_N >= running.begins) & (step_N <= running.last_step)
        window = replace(window, capturing_N=capturing_N) if capturing_N.any() else window
        verdict, self.pasts[window.attempt] = judge(
            window, self.pasts.get(window.attempt), settings_of(self.policies.detection)
        )
        self.last = window
        return self._decided(verdict, self.now_s, peers_of(verdict, window))

    def stall(self, verdict: Verdict) -> ReplayedDecision:
        last = self.last if self.last is not None and self.last.attempt == verdict.attempt else None
        ranks = () if last is None else range(last.durations_NRS.shape[1])
        return self._decided(verdict, self.now_s + verdict.exposed_s, all_peers(verdict, last, ranks))

    def _pass(self, window: Window) -> None:
        """Advance to the end of a window. A step takes as long as its median rank, or without ranks, as the last."""
        if window.attempt != self.attempt:
            self.attempt, self.next_step = window.attempt, window.first_step
        self.now_s += max(0, window.first_step - self.next_step) * self.step_s
        total_NR = window.durations_NRS.sum(axis=2)
        if window.between_NR is not None:
            total_NR = total_NR + np.nan_to_num(window.between_NR, nan=0.0)
        self.ends_s = {}
        for step, step_s in enumerate(known_medians(total_NR), start=window.first_step):
            if step >= self.next_step:
                self.step_s = self.step_s if np.isnan(step_s) else float(step_s)
                self.now_s += self.step_s
                self.ends_s[step] = self.now_s
        self.next_step = max(self.next_step, window.last_step + 1)

    def _decided(self, verdict: Verdict, now_s: float, peers: tuple[int, ...]) -> ReplayedDecision:
        # A stall that ended the job is in none of its steps.
        now_s = self.decided_s = max(now_s, self.decided_s)
        self.losses = self.losses.after(verdict)
        decision, self.state = decide(verdict, self.policies, self.state, now_s, peers, losses=self.losses)
        begun = [self._begun(request, verdict, now_s) for request in decision.requests]
        self.captured += begun
        spans = [(running.first_step, running.last_step) for running in begun]
        steps = tuple((first, last) if last >= first else None for first, last in spans)
        return ReplayedDecision(now_s, verdict, decision, steps)

    def _begun(self, request: CaptureRequest, verdict: Verdict, now_s: float) -> _Running:
        begins = verdict.last_step + 1
        if not request.takes_steps:
            # Taken at once, in whatever step the rank is, and over before the next step ends.
            return _Running(request, verdict.attempt, begins, begins, verdict.last_step, now_s)
        first = request.begins_at(begins + request.warmup_steps)
        begins = first - request.warmup_steps
        last = first + request.steps - 1
        return _Running(request, verdict.attempt, begins, first, last, now_s + request.max_seconds)

    def _end_captures(self, window: Window, now_s: float) -> None:
        self.captured = [self._cut_short(running, window, now_s) for running in self.captured]
        for running in self.captured:
            if running.attempt != window.attempt or running.last_step <= window.last_step:
                ended = CaptureResult(running.request.capture_id, running.request.rank, "stored")
                self.state = finished(self.state, ended, now_s, reproduced=True)
        # Drop captures that end before this window, and those of earlier attempts.
        here = window.attempt, window.first_step
        self.captured = [running for running in self.captured if (running.attempt, running.last_step) >= here]

    def _cut_short(self, running: _Running, window: Window, now_s: float) -> _Running:
        if running.attempt != window.attempt or now_s < running.until_s or running.last_step <= window.last_step:
            return running
        reached = [step for step, end_s in self.ends_s.items() if end_s >= running.until_s]
        return replace(running, last_step=max(running.begins, min(reached, default=window.last_step)))
