"""What a policy would have done: recorded windows through judge and decide, on a clock made of the recorded steps.

Pure: windows come in, decisions go out. A capture that would have been started is taken to run as its request says,
from the step after its window on, and to hold its fault; the windows that it would have touched are marked as a running
profiler marks them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from sftriage.controller.controller import settings_of
from sftriage.controller.windows import peers_of
from sftriage.frontier.accounting import known_medians
from sftriage.model.captures import CaptureRequest, Decision
from sftriage.model.events import JobPaused
from sftriage.model.verdicts import Verdict
from sftriage.model.windows import Window
from sftriage.policy.engine import decide
from sftriage.policy.loading import PolicySet
from sftriage.policy.losses import Losses
from sftriage.policy.state import State, finished
from sftriage.verdicts import Past, Settings, judge


def verdicts_and_pauses(
    windows: Iterable[Window], settings: Settings
) -> Iterator[tuple[Verdict, tuple[JobPaused, ...]]]:
    """Verdicts on recorded windows in order, each attempt of the job with a past of its own.

    With each come the pauses that its window is the first to show.
    """
    pasts: dict[int, Past] = {}
    for window in windows:
        verdict, past = judge(window, pasts.get(window.attempt), settings)
        pasts[window.attempt] = past
        yield verdict, past.paused


@dataclass(frozen=True, slots=True)
class ReplayedDecision:
    """One window, or one stall, as it would have been decided at ``time_s`` of the replay's clock.

    ``captured_steps`` has, for each capture asked for, the first and the last step that it would have recorded; stacks
    are of no step.
    """

    time_s: float
    verdict: Verdict
    decision: Decision
    captured_steps: tuple[tuple[int, int] | None, ...] = ()


def replay(
    windows: Iterable[Window], policies: PolicySet, start_s: float, stalls: Iterable[Verdict] = ()
) -> Iterator[ReplayedDecision]:
    """Decide on windows, each attempt's in order of their steps, the first of which began at ``start_s`` of the epoch.

    ``stalls`` are verdicts on steps that stalled when this was recorded, in order; no window shows them.
    """
    going = _Replay(policies, _Clock(start_s))
    waiting = list(stalls)
    for window in windows:
        while waiting and (waiting[0].attempt, waiting[0].first_step) <= (window.attempt, window.last_step):
            yield going.stall(waiting.pop(0))
        yield going.take(window)
    for stall in waiting:
        yield going.stall(stall)


@dataclass(frozen=True, slots=True)
class _Running:
    """A capture that would be running: from where its profiler warms up, and no longer than until then."""

    capture_id: str
    attempt: int
    begins: int
    first_step: int
    last_step: int
    until_s: float


@dataclass(slots=True)
class _Clock:
    """The time at the end of each window, and of each step that is new in it (``ends_s``).

    A step takes what its median rank took; a step nobody saw, as the last.
    """

    now_s: float
    ends_s: dict[int, float] = field(default_factory=dict)
    _attempt: int | None = None
    _next_step: int = 0
    _step_s: float = 0.0

    def at_end_of(self, window: Window) -> float:
        if window.attempt != self._attempt:
            self._attempt, self._next_step = window.attempt, window.first_step
        self.now_s += max(0, window.first_step - self._next_step) * self._step_s
        self.ends_s = {}
        first = max(self._next_step, window.first_step)
        for step, step_s in enumerate(_step_times(window, first), start=first):
            self._step_s = self._step_s if np.isnan(step_s) else float(step_s)
            self.now_s += self._step_s
            self.ends_s[step] = self.now_s
        self._next_step = max(self._next_step, window.last_step + 1)
        return self.now_s


def _step_times(window: Window, first_step: int) -> NDArray[np.float64]:
    """What each step (N) from ``first_step`` on took, in seconds; NaN where no rank saw it."""
    if first_step > window.last_step:
        return np.zeros(0)
    new = window.steps(first_step, window.last_step)
    total_NR = new.durations_NRS.sum(axis=2)
    if new.between_NR is not None:
        total_NR = total_NR + np.nan_to_num(new.between_NR, nan=0.0)
    return known_medians(total_NR)


@dataclass(slots=True)
class _Replay:
    policies: PolicySet
    clock: _Clock
    state: State = field(default_factory=State)
    losses: Losses = field(default_factory=Losses)
    pasts: dict[int, Past] = field(default_factory=dict)
    captured: list[_Running] = field(default_factory=list)
    last: Window | None = None
    decided_s: float = -np.inf

    def take(self, window: Window) -> ReplayedDecision:
        now_s = self.clock.at_end_of(window)
        self._end_captures(window, now_s)
        window = self._marked(window)
        verdict, self.pasts[window.attempt] = judge(
            window, self.pasts.get(window.attempt), settings_of(self.policies.detection)
        )
        self.last = window
        return self._decided(verdict, now_s, peers_of(verdict, window))

    def stall(self, verdict: Verdict) -> ReplayedDecision:
        last = self.last if self.last is not None and self.last.attempt == verdict.attempt else None
        return self._decided(verdict, self.clock.now_s + verdict.exposed_s, peers_of(verdict, last))

    def _decided(self, verdict: Verdict, now_s: float, peers: tuple[int, ...]) -> ReplayedDecision:
        # A stall that ended the job is in none of its steps.
        now_s = self.decided_s = max(now_s, self.decided_s)
        self.losses = self.losses.after(verdict)
        decision, self.state = decide(verdict, self.policies, self.state, now_s, peers, losses=self.losses)
        begun = [self._begun(request, verdict, now_s) for request in decision.requests]
        self.captured += begun
        steps = [(one.first_step, one.last_step) if one.last_step >= one.first_step else None for one in begun]
        return ReplayedDecision(now_s, verdict, decision, tuple(steps))

    def _begun(self, request: CaptureRequest, verdict: Verdict, now_s: float) -> _Running:
        begins = verdict.last_step + 1
        if not request.takes_steps:
            # Taken at once, wherever the rank stands: over before the next step is.
            return _Running(request.capture_id, verdict.attempt, begins, begins, verdict.last_step, now_s)
        first = request.begins_at(begins + request.warmup_steps)
        begins = first - request.warmup_steps
        last = first + request.steps - 1
        return _Running(request.capture_id, verdict.attempt, begins, first, last, now_s + request.max_seconds)

    def _end_captures(self, window: Window, now_s: float) -> None:
        self.captured = [self._cut_short(one, window, now_s) for one in self.captured]
        for one in self.captured:
            if one.attempt != window.attempt or one.last_step <= window.last_step:
                self.state = finished(self.state, one.capture_id, reproduced=True)
        # What no window to come holds is of no more use; captures of attempts before this one are none of its.
        here = window.attempt, window.first_step
        self.captured = [one for one in self.captured if (one.attempt, one.last_step) >= here]

    def _cut_short(self, one: _Running, window: Window, now_s: float) -> _Running:
        if one.attempt != window.attempt or now_s < one.until_s or one.last_step <= window.last_step:
            return one
        reached = [step for step, end_s in self.clock.ends_s.items() if end_s >= one.until_s]
        return replace(one, last_step=max(one.begins, min(reached, default=window.last_step)))

    def _marked(self, window: Window) -> Window:
        step_N = window.first_step + np.arange(len(window.durations_NRS))
        capturing_N = np.zeros(len(step_N), dtype=bool) if window.capturing_N is None else window.capturing_N.copy()
        for one in self.captured:
            # The profiler's own warm-up slows a step as well.
            capturing_N |= (step_N >= one.begins) & (step_N <= one.last_step)
        return replace(window, capturing_N=capturing_N) if capturing_N.any() else window
