"""What the policy engine remembers between decisions (`State`), and what each suspect has cost the job (`Losses`).

The controller writes the state to disk before it returns a decision. Both are immutable. A verdict's `Lost` is its
suspect's cost in steps that no earlier window has counted, so the sum over a run's verdicts is the same during the job,
after a takeover by another controller, and after the job.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, TypeVar

import msgspec

from sftriage.errors import InputError
from sftriage.model.captures import CaptureRequest, CaptureResult, LeftOpen, Profiler
from sftriage.model.verdicts import Suspect, Verdict
from sftriage.words.verdicts import link_name, slow_stage, subject

WHOLE = "*"
"""The key for all local stages; no stage has this name."""

_LONGEST = 60
"""Maximum characters of ranks in a key. A cohort may be thousands of ranks in no order; a digest replaces these."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a rule would capture: the ``suspect``'s key, and its cost to the job in this ``attempt``.

    ``gain_s`` is seconds per step; infinite for a stall, in which no step ends.
    """

    suspect: str
    gain_s: float = 0.0
    attempt: int = 0


NO_TARGET = Target("")
"""The suspect of captures that no rule requests."""


def suspect_key(suspect: Suspect, known: Collection[str] = ()) -> str:
    """The key of a suspect: scope, ranks and stage as a short text, such as ``rank 3 data``.

    One window may name the stage and the next the whole rank, so a suspect with a stage matches a ``known`` key without
    one, and the reverse. Likewise a rank of a known slow host matches that host.
    """
    own = key_of_ranks(*suspect.identity)
    if own in known:
        return own
    if suspect.scope == "rank":
        host = next((key for key in known if key.startswith("host ") and same_trouble(key, own)), None)
        if host is not None:
            return host
    prefix = own.removesuffix(own.rpartition(" ")[2])
    if own.endswith(f" {WHOLE}"):
        return min((key for key in known if key.startswith(prefix)), default=own)
    return prefix + WHOLE if prefix + WHOLE in known else own


def key_of_ranks(scope: str, ranks: Sequence[int], stage: str | None) -> str:
    """The key of ranks in a stage, or in all local stages."""
    named = ",".join(_spans(sorted(set(ranks))))
    if len(named) > _LONGEST:
        named = hashlib.sha256(named.encode()).hexdigest()
    return f"{scope} {named} {stage or WHOLE}"


def same_trouble(key: str, other: str) -> bool:
    """Whether two keys describe one fault: one rank in one stage and as a whole, or a host and one of its ranks."""
    (scope, ranks, stage), (scope_, ranks_, stage_) = _parts(key), _parts(other)
    if ranks == ranks_ and scope == scope_:
        return stage == stage_ or WHOLE in (stage, stage_) or scope == "host"
    if {scope, scope_} != {"host", "rank"}:
        return False
    host, rank = (ranks, ranks_) if scope == "host" else (ranks_, ranks)
    return any(int(first) <= int(rank) <= int(last or first) for first, last in _bounds(host))


def _parts(key: str) -> tuple[str, str, str]:
    scope, _, rest = key.partition(" ")
    ranks, _, stage = rest.partition(" ")
    return scope, ranks, stage


def _bounds(ranks: str) -> Iterator[tuple[str, str]]:
    for span in ranks.split(",") if len(ranks) <= _LONGEST else ():
        first, _, last = span.partition("-")
        yield first, last


def _spans(ranks: Iterable[int]) -> Iterator[str]:
    """Ranks as text, with consecutive ranks as a span: ``0-7``."""
    for _, numbered in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        span = [rank for _, rank in numbered]
        yield f"{span[0]}" if len(span) == 1 else f"{span[0]}-{span[-1]}"


HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
MEMORY_S = 30 * DAY_S
"""The longest possible cooldown; older entries delay nothing and are forgotten."""
MOST_REMEMBERED = 1000
"""Maximum suspects remembered; the oldest are forgotten, so the state stays small however long a job is."""
GRACE_S = 120.0
"""How long a capture counts as running after its time-box, to reach a step boundary, export and report."""

_FIRST_WAIT_S = 30.0
_MAX_DOUBLINGS = 20


@dataclass(frozen=True, slots=True)
class Running:
    """A capture that was requested and has not reported its end. After ``deadline_s`` it counts as lost.

    ``rule`` requested it at ``fired_s`` because of a ``suspect`` that cost ``gain_s`` seconds per step in this
    ``attempt`` of the job; with ``control``, its rank is a healthy peer. ``follows`` is the capture that it follows up,
    if any; ``left_open`` is what it does not show, if that is known already. One ``of_whole_job`` keeps no rank busy.
    """

    rank: int
    deadline_s: float
    rule: str = ""
    fired_s: float = 0.0
    control: bool = False
    suspect: str = ""
    gain_s: float = 0.0
    attempt: int = 0
    profiler: Profiler | None = None
    follows: str = ""
    left_open: LeftOpen = ""
    of_whole_job: bool = False

    @property
    def key(self) -> str:
        """Its rule and suspect, to which the cooldown applies."""
        return key_of(self.rule, self.suspect)


@dataclass(frozen=True, slots=True)
class Lasted:
    """How long a rule has matched a suspect, up to a step; a step counts once, however many windows contain it."""

    steps: int
    seconds: float
    last_step: int


@dataclass(frozen=True, slots=True)
class Streak:
    """The suspect of the last window, how long each waiting rule has matched it, and how long contention lasted."""

    attempt: int
    suspect: str
    lasted: Mapping[str, Lasted]


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A capture that contains its suspect's fault: requested at ``fired_s``, when that cost ``gain_s`` a step.

    One follow-up captures what it ``left_open``, unless it ``follows`` another itself or was ``followed`` already.
    """

    capture_id: str
    gain_s: float
    attempt: int
    fired_s: float
    left_open: LeftOpen = ""
    follows: str = ""
    followed: bool = False


@dataclass(frozen=True, slots=True)
class Failures:
    """How many captures for a suspect failed in a row, the last one's time, and when its failure was known."""

    count: int
    fired_s: float
    failed_s: float

    def until_s(self, cooldown_s: float) -> float:
        """When the rule may fire again: it waits longer each time, so that it does not try forever."""
        doubled_s = max(_FIRST_WAIT_S, cooldown_s / 10) * 2.0 ** min(self.count - 1, _MAX_DOUBLINGS)
        return self.failed_s + min(doubled_s, max(cooldown_s, HOUR_S))


@dataclass(frozen=True, slots=True)
class State:
    """What a run has done so far. Times are seconds of the clock that `decide` is given.

    Attributes:
        captures: made in this run or under way; not those that were refused or failed.
        asked: captures ever requested; ``asked_s`` are their times, within the last day.
        fired_s: by rule and suspect (`key_of`), when the last capture that was made, or lost, was requested.
        reproductions: by profiler and suspect, the last capture that contains its fault.
        running: captures under way, by capture id.
        failures: by rule and suspect, those whose last captures failed or were refused.
        notified_s: by rule and suspect, when notifications were last due.
        streak: the suspect of the last window, if a rule waits for it to last.
        largest_gain_s: the largest gain for which a capture was requested, in seconds per step.
        started_s: when the first step of the run began, or the time of the first decision.
        spent_s: what captures have cost the job.
    """

    captures: int = 0
    fired_s: Mapping[str, float] = field(default_factory=dict)
    reproductions: Mapping[str, Reproduction] = field(default_factory=dict)
    running: Mapping[str, Running] = field(default_factory=dict)
    asked: int = 0
    asked_s: tuple[float, ...] = ()
    failures: Mapping[str, Failures] = field(default_factory=dict)
    notified_s: Mapping[str, float] = field(default_factory=dict)
    streak: Streak | None = None
    largest_gain_s: float = 0.0
    started_s: float | None = None
    spent_s: float = 0.0
    version: Literal[1] = 1

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> State:
        """The state that `to_json` wrote; raises InputError if it is not one."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise InputError(f"not a state of the policy engine: {error}") from None

    def last_fired_s(self) -> Mapping[str, float]:
        """For each rule and suspect, when the last capture that is running or was made was requested."""
        fired_s = dict(self.fired_s)
        for running in self.running.values():
            if running.rule and not running.control:
                fired_s[running.key] = max(running.fired_s, fired_s.get(running.key, running.fired_s))
        return fired_s

    @property
    def busy_ranks(self) -> dict[int, str]:
        """The ranks that are being captured by themselves, each with its capture."""
        return {running.rank: at for at, running in sorted(self.running.items()) if not running.of_whole_job}

    @property
    def suspects(self) -> frozenset[str]:
        """The keys of all remembered suspects."""
        remembered = (*self.fired_s, *self.reproductions, *self.failures, *self.notified_s)
        found = {key.partition(" ")[2] for key in remembered} | {running.suspect for running in self.running.values()}
        return frozenset(found | ({self.streak.suspect} if self.streak is not None else set()))

    def captures_within(self, period_s: float, now_s: float) -> list[float]:
        """When the captures of the last hour, or day, were requested, in order."""
        return sorted(asked_s for asked_s in self.asked_s if now_s - asked_s < period_s)


def key_of(name: str, suspect: str) -> str:
    """The remembered value for a rule, or a profiler, and a suspect."""
    return f"{name} {suspect}"


def opened(state: State, now_s: float) -> State:
    """The state at the beginning of a decision: the run has started, and captures past their deadline are lost.

    So a dead trainer does not hold its place forever. The result of its capture is unknown, so it counts as made.
    """
    if state.started_s is None:
        state = replace(state, started_s=now_s)
    for capture_id, running in state.running.items():
        if running.deadline_s <= now_s:
            state = _made(_without(state, capture_id), capture_id, running)
    return state


def started(
    state: State,
    rule: str,
    requests: Sequence[CaptureRequest],
    now_s: float,
    target: Target = NO_TARGET,
    follows: str = "",
) -> State:
    """The state once a rule has requested captures of a suspect, or a person has requested them.

    ``follows`` is the earlier capture that left open what these should show.
    """
    # The duration of a stall does not compare with the time of a step.
    gain_s = target.gain_s if math.isfinite(target.gain_s) else 0.0
    begun = {
        request.capture_id: Running(
            rank=request.rank,
            deadline_s=now_s + request.max_seconds + GRACE_S,
            rule=rule,
            fired_s=now_s,
            control=request.role == "control",
            suspect=target.suspect,
            gain_s=gain_s,
            attempt=target.attempt,
            profiler=request.profiler,
            follows=follows,
            of_whole_job=request.of_whole_job,
        )
        for request in requests
    }
    return replace(
        state,
        captures=state.captures + len(requests),
        asked=state.asked + len(requests),
        running={**state.running, **begun},
        asked_s=(*state.captures_within(DAY_S, now_s), *(now_s for _ in requests)),
        largest_gain_s=max(state.largest_gain_s, gain_s),
    )


def finished(state: State, result: CaptureResult, now_s: float, *, reproduced: bool = False) -> State:
    """The state once a capture has ended, at ``now_s``. One that is not running changes nothing.

    A refused or failed capture frees its place in the run and its suspect's cooldown, but not its place in the hour and
    the day, because it may have disturbed the job. Its suspect waits for a while, longer each time. A stored one has
    ``reproduced`` its fault, or not.
    """
    running = state.running.get(result.capture_id)
    if running is None:
        return state
    state = _without(state, result.capture_id)
    if result.state == "stored":
        return _made(state, result.capture_id, running, reproduced=reproduced)
    state = replace(state, captures=max(0, state.captures - 1))
    # If another rank of the same firing was captured, the rule has succeeded.
    if not running.rule or running.control or state.fired_s.get(running.key) == running.fired_s:
        return state
    known = state.failures.get(running.key)
    count = 1 if known is None else known.count + (known.fired_s != running.fired_s)
    failures = Failures(count, running.fired_s, now_s)
    return replace(state, failures=remembered(state.failures, {running.key: failures}, lambda last: last.failed_s))


def left_open(state: State, capture_id: str, code: LeftOpen) -> State:
    """The state once sftriage knows what a capture does not show."""
    running = state.running.get(capture_id)
    if running is not None:
        return replace(state, running={**state.running, capture_id: replace(running, left_open=code)})
    return _with_reproduction(state, capture_id, left_open=code)


def _with_reproduction(state: State, capture_id: str, **changes: Any) -> State:
    changed = {key: replace(known, **changes) for key, known in state.reproductions.items()}
    held = {key: known for key, known in changed.items() if known.capture_id == capture_id}
    return replace(state, reproductions={**state.reproductions, **held}) if held else state


def charged(state: State, cost_s: float) -> State:
    """The state once sftriage knows what a capture cost the job. A negative cost is noise.

    Raises ValueError if the cost is NaN or infinite.
    """
    if not math.isfinite(cost_s):
        raise ValueError(f"a capture cannot have cost {cost_s} s")
    return replace(state, spent_s=state.spent_s + cost_s) if cost_s > 0 else state


def _without(state: State, capture_id: str) -> State:
    return replace(state, running={key: running for key, running in state.running.items() if key != capture_id})


def _made(state: State, capture_id: str, made: Running, *, reproduced: bool = False) -> State:
    if not made.rule or made.control:
        return state
    fired_s = {made.key: max(made.fired_s, state.fired_s.get(made.key, made.fired_s))}
    # Keep failures of later firings.
    failures = {key: last for key, last in state.failures.items() if key != made.key or last.fired_s > made.fired_s}
    state = replace(state, fired_s=remembered(state.fired_s, fired_s, lambda at_s: at_s), failures=failures)
    if made.follows:
        # Whatever it shows, there is no second follow-up.
        state = _with_reproduction(state, made.follows, followed=True)
    key = key_of(made.profiler or "", made.suspect)
    known = state.reproductions.get(key)
    if not reproduced or made.profiler is None or (known is not None and known.fired_s > made.fired_s):
        return state
    held = {key: Reproduction(capture_id, made.gain_s, made.attempt, made.fired_s, made.left_open, made.follows)}
    return replace(state, reproductions=remembered(state.reproductions, held, lambda last: last.fired_s))


Entry = TypeVar("Entry")


def remembered(
    known: Mapping[str, Entry], new: Mapping[str, Entry], at_s: Callable[[Entry], float]
) -> dict[str, Entry]:
    """The known and new entries, without those too old to delay anything."""
    every = sorted({**known, **new}.items(), key=lambda item: at_s(item[1]))[-MOST_REMEMBERED:]
    since_s = at_s(every[-1][1]) - MEMORY_S if every else 0.0
    return {key: entry for key, entry in every if at_s(entry) >= since_s}


MOST_SUSPECTS = 1000
"""Maximum suspects counted separately; the others are counted together under `OTHERS`."""
OTHERS = "others"


@dataclass(frozen=True, slots=True)
class SuspectLoss:
    """What one suspect has cost the job: exposed seconds in ``steps`` steps, the last of them ``last_step``.

    ``rank_s`` is the same summed over all ranks, since all wait for one. ``who`` and ``where`` name the suspect.
    """

    who: str
    where: str
    lost_s: float = 0.0
    rank_s: float = 0.0
    steps: int = 0
    last_step: int = 0

    @property
    def rank_hours(self) -> float:
        """Hours of the job's ranks: GPU-hours if each rank has a GPU."""
        return self.rank_s / 3600.0


@dataclass(frozen=True, slots=True)
class AddedLoss:
    """What a window adds to the loss of the suspect with a ``key``: the seconds of each step from the first one."""

    attempt: int
    first_step: int
    step_s: Sequence[float]
    ranks: int
    key: str
    named: SuspectLoss


@dataclass(frozen=True, slots=True)
class Losses:
    """What stragglers have cost a job, by suspect (`suspect_key`), and up to which step of each attempt."""

    by_suspect: Mapping[str, SuspectLoss] = field(default_factory=dict)
    counted: Mapping[int, int] = field(default_factory=dict)

    @property
    def lost_s(self) -> float:
        """What all suspects have cost the job, in exposed seconds."""
        return sum(loss.lost_s for loss in self.by_suspect.values())

    @property
    def rank_s(self) -> float:
        return sum(loss.rank_s for loss in self.by_suspect.values())

    @property
    def largest(self) -> list[SuspectLoss]:
        """The suspects, the costliest first."""
        return sorted(self.by_suspect.values(), key=lambda loss: -loss.rank_s)

    @property
    def by_name(self) -> Mapping[tuple[str, str], float]:
        return {(loss.who, loss.where): loss.rank_s for loss in self.by_suspect.values()}

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Losses:
        """The losses of what `values` returned; raises ValueError for anything else."""
        return msgspec.convert(values, cls, strict=False)

    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return values

    def of(self, suspect: Suspect) -> SuspectLoss | None:
        return self.by_suspect.get(suspect_key(suspect, self.by_suspect))

    def after(self, verdict: Verdict) -> Losses:
        """The losses with those of one more verdict."""
        added = self.added_by(verdict)
        return self if added is None else self.plus(added)

    def added_by(self, verdict: Verdict) -> AddedLoss | None:
        """What one more verdict adds; None if nothing."""
        lost, link = verdict.lost, verdict.link
        suspect = verdict.named if lost is None or lost.of is None else lost.of
        if lost is None or (suspect is None and link is None):
            return None
        # A controller that takes over may not know which steps are counted already.
        skipped = max(0, self.counted.get(verdict.attempt, -1) + 1 - lost.first_step)
        new_s = lost.step_s[skipped:]
        if not new_s:
            return None
        if suspect is not None:
            key = suspect_key(suspect, self.by_suspect)
            named = SuspectLoss(subject(suspect), slow_stage(replace(suspect, stage=suspect.identity[2])))
        elif link is not None:
            key = f"link {link.host} {link.peer}".strip()
            named = SuspectLoss(link_name(link), " and ".join(verdict.sync))
        if key not in self.by_suspect and len(self.by_suspect) >= MOST_SUSPECTS:
            key, named = OTHERS, SuspectLoss(OTHERS, "")
        return AddedLoss(verdict.attempt, lost.first_step + skipped, new_s, lost.ranks, key, named)

    def plus(self, added: AddedLoss) -> Losses:
        before, last_step = self.by_suspect.get(added.key, added.named), added.first_step + len(added.step_s) - 1
        found = replace(
            before,
            lost_s=before.lost_s + sum(added.step_s),
            rank_s=before.rank_s + sum(added.step_s) * added.ranks,
            steps=before.steps + sum(one_s > 0.0 for one_s in added.step_s),
            last_step=last_step,
        )
        return Losses({**self.by_suspect, added.key: found}, {**self.counted, added.attempt: last_step})
