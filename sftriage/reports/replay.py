"""What a replayed policy would have done, as text that compares well: the same on every machine, and on every day."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sftriage.controller.replay import ReplayedDecision
from sftriage.model.captures import Outcome
from sftriage.model.windows import plain
from sftriage.words.amounts import counted, size
from sftriage.words.decisions import decision_values, reason_kind, reason_sentence
from sftriage.words.verdicts import where, who

OUTCOMES: tuple[Outcome, ...] = ("capture", "hold", "throttle", "ignore")


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """A replay of policies on a recording, by their names: every window and every stall, in order.

    ``start_s`` is when the first window began.
    """

    policies: tuple[str, ...]
    recording: str
    start_s: float
    replayed: Sequence[ReplayedDecision]

    def text(self) -> str:
        """The timeline, with what follows on one another for the same reason in one line, and the summary."""
        groups = groupby(enumerate(self.replayed), key=lambda numbered: _likeness(*numbered))
        lines = [line for _, group in groups for line in self._lines([one for _, one in group])]
        return "\n".join([*_aligned(lines), "", *self._summary()]) + "\n"

    def values(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "policies": list(self.policies),
            "recording": self.recording,
            "outcomes": self._counts(),
            "captures": self._captures,
            "notifications": self._messages,
            "windows": [
                {
                    "time_s": one.time_s,
                    "after_s": one.time_s - self.start_s,
                    "label": one.verdict.label,
                    "reasons": list(one.verdict.reasons),
                    "suspect": plain(one.verdict.named),
                    "decision": decision_values(one.decision),
                    "captured_steps": plain(one.captured_steps),
                }
                for one in self.replayed
            ],
        }

    @property
    def _captures(self) -> int:
        return sum(len(one.decision.requests) for one in self.replayed)

    @property
    def _messages(self) -> int:
        return sum(len(one.decision.notify) for one in self.replayed)

    def _counts(self) -> dict[Outcome, int]:
        counted = Counter(one.decision.outcome for one in self.replayed)
        return {outcome: counted[outcome] for outcome in OUTCOMES}

    def _lines(self, group: list[ReplayedDecision]) -> Iterable[tuple[str, ...]]:
        first, last = group[0].decision, group[-1].decision
        steps = f"{first.first_step}-{last.last_step}" if first.first_step != last.last_step else f"{first.first_step}"
        attempt = f"attempt {first.attempt}, " if first.attempt else ""
        count = counted(len(group), "window") if first.label != "stalled" else "stall"
        about = f"{reason_sentence(first)}{_about(group[0])}"
        yield _elapsed(group[0].time_s - self.start_s), f"{attempt}steps {steps}", count, first.outcome, about
        for request, recorded in zip(first.requests, group[0].captured_steps, strict=True):
            what = f"steps {recorded[0]} to {recorded[1]}, no more" if recorded else "at once, no more"
            healthy = ", healthy, to compare with" if request.role == "control" else ""
            bounds = f"{request.max_seconds:g} s and {size(request.max_bytes)}"
            yield *[""] * 4, f"rank {request.rank}{healthy}: {request.profiler}, {what} than {bounds}"
        for rule in first.notify:
            yield *[""] * 4, f"rule {rule} notifies"

    def _summary(self) -> Iterable[str]:
        yield f"### Policy {', '.join(self.policies)} on {self.recording}"
        yield ""
        if not self.replayed:
            yield "No window: the recording is shorter than the warm-up and one window."
            return
        lasted = _elapsed(max(one.time_s for one in self.replayed) - self.start_s)
        made = [counted(self._captures, "capture")]
        if self._messages:
            made.append(counted(self._messages, "notification"))
        yield f"{counted(len(self.replayed), 'decision')} in {lasted}; {', '.join(made)}."
        yield ""
        yield "| outcome | windows | why |"
        yield "|---|---:|---|"
        for outcome, windows in self._counts().items():
            why = Counter(reason_kind(one.decision) for one in self.replayed if one.decision.outcome == outcome)
            said = ", ".join(f"{reason} ({count})" for reason, count in sorted(why.items(), key=lambda one: -one[1]))
            yield f"| {outcome} | {windows} | {said.replace('|', '&#124;')} |"


def _likeness(number: int, one: ReplayedDecision) -> tuple[object, ...]:
    """What windows have in common that are one line. A capture, a message and a stall are lines of their own."""
    decision, verdict = one.decision, one.verdict
    alone = number if decision.requests or decision.notify or verdict.label == "stalled" else None
    named = verdict.suspects[0].identity if verdict.label == "suspect" else None
    # Numbers go up and down from window to window.
    names = {name: value for name, value in decision.parameters.items() if not isinstance(value, (int, float))}
    which = decision.reason, frozenset(decision.parameters), frozenset(names.items())
    return alone, decision.attempt, decision.outcome, decision.rule, which, named


def _about(one: ReplayedDecision) -> str:
    if one.verdict.label != "suspect" or one.decision.outcome == "capture":
        return ""
    first = one.verdict.suspects[0]
    return f" ({who(first)} in {where(first)}, {1000 * first.gain_s:.3g} ms a step, {first.pattern})"


def _elapsed(seconds: float) -> str:
    minutes, rest = divmod(max(0.0, seconds), 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02}:{rest:04.1f}"


def _aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    columns = list(zip(*lines, strict=True))[:-1]
    widths = [*(max(map(len, column)) for column in columns), 0]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
