"""What the engine remembers between decisions. Small, serialisable, and never changed in place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from sftriage.errors import InputError
from sftriage.records import CaptureRequest, CaptureResult

HOUR_S = 3600.0
GRACE_S = 120.0
"""Past its time-box, how long a capture counts as running: to reach a step boundary, export and report."""

_FIRST_WAIT_S = 30.0
_MAX_DOUBLINGS = 20


@dataclass(frozen=True, slots=True)
class Running:
    """A capture that was asked for and is not known to have ended. After ``deadline_s`` it is taken for lost.

    ``rule`` asked for it, and for others, at ``fired_s``; ``control`` says that its rank is a healthy peer's.
    """

    rank: int
    deadline_s: float
    rule: str = ""
    fired_s: float = 0.0
    control: bool = False


@dataclass(frozen=True, slots=True)
class Streak:
    """A suspect, and for how many windows in a row each rule that waits for more than one has matched it."""

    attempt: int
    scope: str
    ranks: tuple[int, ...]
    stage: str | None
    windows: Mapping[str, PositiveInt]


@dataclass(frozen=True, slots=True)
class Failures:
    """How many firings of a rule came to nothing in a row: the last one's time, and when that was known."""

    count: PositiveInt
    fired_s: float
    failed_s: float

    def until_s(self, cooldown_s: float) -> float:
        """When the rule may fire again: it waits longer each time, so that what cannot work is not tried for ever."""
        doubled_s = max(_FIRST_WAIT_S, cooldown_s / 10) * 2.0 ** min(self.count - 1, _MAX_DOUBLINGS)
        return self.failed_s + min(doubled_s, max(cooldown_s, HOUR_S))


@dataclass(frozen=True, slots=True)
class State:
    """What a run has done so far. Times are seconds of the clock that `decide` is given.

    Attributes:
        captures: captures made in this run, and those under way; not those that were refused or failed.
        asked: captures ever asked for, whatever became of them.
        fired_s: for each rule, when it asked for the last capture that was made, or was lost.
        running: captures under way, by capture id.
        hour_s: when captures were asked for, within the last hour.
        failures: for each rule whose last captures failed or were refused, what is known of that.
        notified_s: for each rule, when its notifications were last due.
        streak: whom the last window suspected, if a rule waits for more windows of it.
        started_s: when the first decision was taken.
        spent_s: what captures have cost the job.
    """

    # A file read back is checked as strictly as one from a stranger.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")

    captures: NonNegativeInt = 0
    fired_s: Mapping[str, float] = field(default_factory=dict)
    running: Mapping[str, Running] = field(default_factory=dict)
    asked: NonNegativeInt = 0
    hour_s: tuple[float, ...] = ()
    failures: Mapping[str, Failures] = field(default_factory=dict)
    notified_s: Mapping[str, float] = field(default_factory=dict)
    streak: Streak | None = None
    started_s: float | None = None
    spent_s: NonNegativeFloat = 0.0
    version: Literal[1, 2] = 2

    def to_json(self) -> str:
        """The state as one line of JSON."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> State:
        """The state that `to_json` wrote, of this version or of the first.

        Raises:
            InputError: it is not such a state.
        """
        try:
            state = _ADAPTER.validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InputError(f"not the state of a policy engine: {where or 'document'}: {first['msg']}") from None
        # Version 1 counted every capture as made, and knew nothing of the rest.
        return state if state.version == 2 else replace(state, asked=state.captures, version=2)

    def last_fired_s(self) -> Mapping[str, float]:
        """For each rule, when it last asked for a capture that is under way or was made."""
        under_way = {one.rule: one.fired_s for one in self.running.values() if one.rule and not one.control}
        if not under_way:
            return self.fired_s
        return {**self.fired_s, **{rule: max(at, self.fired_s.get(rule, at)) for rule, at in under_way.items()}}

    def captures_within_hour(self, now_s: float) -> list[float]:
        """When the captures of the last hour were asked for, in order."""
        return sorted(asked_s for asked_s in self.hour_s if now_s - asked_s < HOUR_S)


def opened(state: State, now_s: float) -> State:
    """The state at the beginning of a decision: the run has started, and captures past their deadline are lost.

    A trainer that died must not hold its place for ever. What became of its capture is not known, so it counts as made.
    """
    if state.started_s is None:
        state = replace(state, started_s=now_s)
    for capture_id, one in state.running.items():
        if one.deadline_s <= now_s:
            state = _made(_without(state, capture_id), one)
    return state


def started(state: State, rule: str, requests: Sequence[CaptureRequest], now_s: float) -> State:
    """The state once a rule has asked for captures."""
    begun = {
        request.capture_id: Running(
            request.rank, now_s + request.max_seconds + GRACE_S, rule, now_s, request.role == "control"
        )
        for request in requests
    }
    return replace(
        state,
        captures=state.captures + len(requests),
        asked=max(state.asked, state.captures) + len(requests),
        running={**state.running, **begun},
        hour_s=(*state.captures_within_hour(now_s), *(now_s for _ in requests)),
    )


def finished(state: State, result: CaptureResult | str, now_s: float | None = None) -> State:
    """The state once a capture has ended. One that is not running changes nothing.

    A capture that was refused or failed gives back its place in the run and its rule's cooldown, but not its place in
    the hour: it may have touched the job. Its rule waits a while, and longer each time.

    With its id alone in place of a result, it counts as made. ``now_s`` is when that was known, on the clock of
    `decide`; by default when the capture was asked for.
    """
    capture_id = result if isinstance(result, str) else result.capture_id
    one = state.running.get(capture_id)
    if one is None:
        return state
    state = _without(state, capture_id)
    if isinstance(result, str) or result.state == "stored":
        return _made(state, one)
    state = replace(state, captures=max(0, state.captures - 1))
    # Of several ranks, one that was captured is what the rule wanted.
    if not one.rule or one.control or state.fired_s.get(one.rule) == one.fired_s:
        return state
    known = state.failures.get(one.rule)
    count = 1 if known is None else known.count + (known.fired_s != one.fired_s)
    failures = Failures(count, one.fired_s, one.fired_s if now_s is None else now_s)
    return replace(state, failures={**state.failures, one.rule: failures})


def charged(state: State, cost_s: float) -> State:
    """The state once it is known what a capture cost the job. A cost below nothing is a measurement's noise.

    Raises:
        ValueError: the cost is no number, or without end.
    """
    if not math.isfinite(cost_s):
        raise ValueError(f"a capture cannot have cost {cost_s} s")
    return replace(state, spent_s=state.spent_s + cost_s) if cost_s > 0 else state


def _without(state: State, capture_id: str) -> State:
    return replace(state, running={key: one for key, one in state.running.items() if key != capture_id})


def _made(state: State, one: Running) -> State:
    if not one.rule or one.control:
        return state
    fired_s = max(one.fired_s, state.fired_s.get(one.rule, one.fired_s))
    # One of a later firing stays: that this one was made does not unmake it.
    failures = {
        rule: known for rule, known in state.failures.items() if rule != one.rule or known.fired_s > one.fired_s
    }
    return replace(state, fired_s={**state.fired_s, one.rule: fired_s}, failures=failures)


_ADAPTER = TypeAdapter(State)
