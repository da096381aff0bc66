"""The events of a job as typed records, with one encoder and one decoder.

An `Event` is recorded: a JSON object with a ``type``, and `VERSION` as its ``version``. An `Observation` is only
exchanged between the parts of one process, and is not kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from sftriage.errors import UsageError
from sftriage.model import captures
from sftriage.model.verdicts import Verdict
from sftriage.model.windows import JobStatus, ReadCounts, Window

VERSION = 1


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    version: int = VERSION


class WindowJudged(_Event, tag="window", frozen=True):
    """A judged window, or a stalled step in progress: the verdict, and the decision about it.

    ``triggers`` has the reasons of captures, by id, for a controller that takes over.
    """

    verdict: Verdict
    decision: captures.Decision
    triggers: Mapping[str, captures.Trigger] = {}


class ManualRequestDecided(_Event, tag="manual_request", frozen=True):
    """A person's request for a capture, and the decision about it."""

    request: captures.ManualRequest
    decision: captures.Decision
    triggers: Mapping[str, captures.Trigger] = {}


class FollowUpDecided(_Event, tag="follow_up", frozen=True):
    """A capture that follows up another one, ``capture_id``."""

    capture_id: str
    decision: captures.Decision
    triggers: Mapping[str, captures.Trigger] = {}


class CaptureChanged(_Event, tag="capture", frozen=True):
    """A capture changed its state. ``reproduced`` and ``stored_bytes`` are those of a stored one."""

    time_s: float
    result: captures.CaptureResult
    reproduced: captures.Reproduced | None = None
    stored_bytes: int = 0


class NamedPolicy(msgspec.Struct, frozen=True):
    """A policy by name and content; ``document`` is the whole new policy, since no other file keeps it."""

    name: str
    sha256: str = ""
    document: dict[str, Any] | None = None


class PolicyChanged(_Event, tag="policy", frozen=True):
    """The policy files changed while the job ran: accepted (``changed``), refused, or equal to those in force again.

    ``problems`` has a line for each mistake; ``later`` names the fields whose change waits for the next run.
    """

    time_s: float
    kind: Literal["changed", "refused", "restored"]
    policies: tuple[NamedPolicy, ...]
    problems: tuple[str, ...] = ()
    later: tuple[str, ...] = ()


class CostMeasured(_Event, tag="cost", frozen=True):
    """What the captures that touched some steps cost the job, over all ranks.

    ``cost_s`` is by how much these steps, and some after them, took longer than they would have without (see
    `sftriage.controller`): the fault that led to a capture is no part of it. It is nothing where the machine was
    quicker meanwhile, and None where too little is known of before. ``before_s`` is what a step took before.
    """

    time_s: float
    attempt: int
    first_step: int
    last_step: int
    cost_s: float | None
    before_s: float | None


class EvidenceGathered(_Event, tag="evidence", frozen=True):
    """Evidence beside a verdict, which decided nothing.

    ``gpus`` is what the driver says of the suspects' GPUs; ``ready_fraction`` the share of the steps whose sync stage
    is split at the last ready gradient, where that has changed.
    """

    time_s: float
    first_step: int
    last_step: int
    remarks: tuple[str, ...] = ()
    gpus: dict[str, Any] | None = None
    ready_fraction: float | None = None


PauseReason = Literal["in_sync", "in_own_work"]
"""Whether all ranks were inside a sync stage, or each at its own work."""


class JobPaused(_Event, tag="pause", frozen=True):
    """All ranks took many times as long as in other steps, and no single rank is the reason.

    ``lasted_s`` is by how much longer than typical steps these were, most of it in ``stage``.
    """

    time_s: float
    attempt: int
    first_step: int
    last_step: int
    lasted_s: float
    stage: str
    reason: PauseReason


class TakenOver(_Event, tag="taken_over", frozen=True):
    """Another controller took over the run, with the windows judged and captures stored by then."""

    time_s: float
    host: str
    pid: int
    windows: int = 0
    captures: int = 0


class DiskRecovered(_Event, tag="disk", frozen=True):
    """The run's disk failed from ``since_s`` on, and works again; with ``over`` false, it never recovered.

    ``problem`` is what it said. Of what was to be written meanwhile, ``late`` was, and ``lost`` is not: how many, by
    kind (windows, other records, steps, device times, readings, notes on captures). Lost windows are of the steps from
    and to ``lost_steps``.
    """

    time_s: float
    since_s: float
    problem: str
    over: bool = True
    late: Mapping[str, int] = {}
    lost: Mapping[str, int] = {}
    lost_steps: tuple[int, int] | None = None


class Place(msgspec.Struct, frozen=True):
    """A line of the program."""

    function: str
    file: str
    line: int


class JournalCompacted(_Event, tag="compacted", frozen=True):
    """The first line of a journal that replaced a longer one, which was the file ``inode``.

    What that had from ``kept_from`` on follows whole, after ``older_bytes`` of what came before. ``dropped`` windows,
    the last of which ended at ``dropped_step``, are not in it. ``losses`` are what suspects had cost by ``kept_from``,
    as values of `sftriage.policy.state.Losses`.
    """

    inode: int
    kept_from: int
    older_bytes: int
    dropped: int
    dropped_step: int
    losses: dict[str, Any] = {}


class RingGivenUp(_Event, tag="ring", frozen=True):
    """A rank's records cannot be read: from now on the rank counts as missing."""

    time_s: float
    rank: int
    reason: str


class CauseFound(_Event, tag="cause", frozen=True):
    """Why a captured rank was slow, by the capture's trace and the stacks sampled with it.

    As `sftriage.traces.manifest.CauseInfo` has it. What is ``left_open`` another means would show: a capture by it
    follows, once.
    """

    time_s: float
    capture_id: str
    rank: int
    code: str
    sure: bool
    sentence: str
    place: Place | None = None
    compared_with: int | None = None
    next_step: str = ""
    left_open: captures.LeftOpen = ""


RemedyState = Literal["advised", "trying", "kept", "undone"]
_Unfit = Literal["not_allowed", "no_room", "not_switched"]
_Over = Literal["moved", "gone", "restarted", "interrupted"]
RemedyReason = Literal["worthwhile", "helps", "no_help", _Unfit, _Over]
"""Why a remedy is in a state: its model has it worth the trouble; measured, it helps, or does not; it is another
straggler, or none; the policy does not allow it; there is no room for the activations; the ranks did not switch; they
began anew; or its trial was cut off.
"""


class Pipeline(msgspec.Struct, frozen=True):
    """What a microbatch takes in a pipeline: seconds of a computation of each stage (S), and on each link (L).

    A delay is, either way, from the end of a computation to where its output can be used. Stage i holds the activations
    of ``most_S[i]`` microbatches (None: any).

    Raises:
        UsageError: the numbers do not describe a pipeline.
    """

    forward_S: tuple[float, ...]
    backward_S: tuple[float, ...]
    delay_L: tuple[float, ...]
    microbatches: int
    most_S: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        n = len(self.forward_S)
        most = self.most_S if self.most_S is not None else (1,) * n
        if not n or (len(self.backward_S), len(self.delay_L), len(most)) != (n, n - 1, n) or self.microbatches < 1:
            raise UsageError("a pipeline needs a forward, backward and bound for each stage, and links between them")
        if min(self.forward_S) <= 0 or min((*self.backward_S, *self.delay_L)) < 0 or min(most) < 1:
            raise UsageError("forward times must be positive, others not negative, and stages must hold a microbatch")


class RemedyChanged(_Event, tag="remedy", frozen=True):
    """A remedy against a straggler changed its state: advised only, tried, kept, or undone.

    The straggler is ``rank``; of a ``pipeline`` it is the link from there to the next stage, and stages are to be
    ``ahead_S`` microbatches ahead. ``switch`` is the name of the group that it is switched on
    (`sftriage.mitigate.switching`), and ``numbers`` are what it was decided from: of its model ``late_s``,
    ``step_s``, ``ring_s`` of ``ring_bytes`` among ``ring_ranks``, ``break_even_s``, ``expected_s``, or of a link
    ``delay_s`` a microbatch, the longer of ``there_s`` and ``back_s``; of its trial the typical step with it and
    without, ``on_s`` and ``off_s``, what it saves, ``saves_s``, give or take ``error_s``, and of how many steps,
    ``on_steps`` and ``off_steps``.
    """

    time_s: float
    attempt: int
    step: int
    remedy: Literal["stragglar", "pipeline"]
    state: RemedyState
    reason: RemedyReason
    rank: int
    who: str
    where: str
    switch: str = ""
    numbers: Mapping[str, float] = {}
    ahead_S: tuple[int, ...] = ()
    pipeline: Pipeline | None = None


Decided = WindowJudged | ManualRequestDecided | FollowUpDecided
_Common = Decided | CaptureChanged | PolicyChanged | CostMeasured | EvidenceGathered
Event = _Common | TakenOver | DiskRecovered | RingGivenUp | JournalCompacted | CauseFound | RemedyChanged | JobPaused

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class _Kind(msgspec.Struct):
    type: str
    version: int


_KIND = msgspec.json.Decoder(_Kind)
_TYPES = {kind.__struct_config__.tag for kind in get_args(Event)}


def encode(event: Event) -> bytes:
    """An event as one line of JSON, without its end."""
    return _ENCODER.encode(event)


def decode(line: bytes) -> Event | None:
    """The event on a line; None if its version or type is unknown.

    Raises:
        ValueError: the line is not an event.
    """
    kind = _KIND.decode(line)
    return _DECODER.decode(line) if kind.version == VERSION and kind.type in _TYPES else None


class Span(NamedTuple):
    """Start and end, in nanoseconds since the epoch."""

    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class WindowObserved:
    """A window is about to be judged; with ``learnt``, only learnt from, since an earlier controller has decided it.

    ``spans`` has start and end of each step, by number, as far as known.
    """

    window: Window
    spans: Mapping[int, Span] = field(default_factory=dict)
    learnt: bool = False


@dataclass(frozen=True, slots=True)
class JobObserved:
    """The state of the job at ``time_s`` since the epoch.

    There is no ``job`` before it has ranks, and once it has ended. Captures have cost it ``spent_s`` of the
    ``budget_s`` that they may have cost by now. ``lost_rank_s`` is what suspects have cost since the run began, of
    every rank's time, by who and where.
    """

    time_s: float
    received: ReadCounts
    job: JobStatus | None
    spent_s: float
    budget_s: float
    lost_rank_s: Mapping[tuple[str, str], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resumed:
    """Running captures that an earlier process has requested."""

    requests: Sequence[captures.CaptureRequest]


@dataclass(frozen=True, slots=True)
class DiskFailed:
    """The run's disk fails, in whole or in part, since ``time_s``. ``problem`` is its error."""

    time_s: float
    problem: str


Observation: TypeAlias = WindowObserved | JobObserved | Resumed | DiskFailed
