"""The events of a job as typed records, with one encoder and one decoder.

An `Event` is recorded: a JSON object with a ``type``, and `VERSION` as its ``version``. An `Observation` is only
exchanged between the parts of one process, and is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from sftriage.errors import UsageError
from sftriage.model import captures
from sftriage.model.hangs import Fact, Hang
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

    ``cost_s`` is by how much these steps, and some after them, took longer than without captures (see
    `sftriage.controller`), not counting the fault that led to a capture. It is 0 if the machine was faster meanwhile,
    and None if too few earlier steps are known. ``before_s`` is the duration of a step before.
    """

    time_s: float
    attempt: int
    first_step: int
    last_step: int
    cost_s: float | None
    before_s: float | None


class EvidenceGathered(_Event, tag="evidence", frozen=True):
    """Evidence beside a verdict, which decided nothing.

    ``gpus`` has the driver's values for the suspects' GPUs; ``ready_fraction`` is the share of steps whose sync stage
    is split at the last ready gradient, if that has changed.
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

    ``lasted_s`` is by how much these steps were longer than typical ones, mostly in ``stage``.
    """

    time_s: float
    attempt: int
    first_step: int
    last_step: int
    lasted_s: float
    stage: str
    reason: PauseReason


class TakenOver(_Event, tag="taken_over", frozen=True):
    """Another controller took over the run, with the numbers of windows judged and captures stored so far."""

    time_s: float
    host: str
    pid: int
    windows: int = 0
    captures: int = 0


class DiskRecovered(_Event, tag="disk", frozen=True):
    """The run's disk failed from ``since_s`` on, and works again; with ``over`` false, it never recovered.

    ``problem`` is its error. ``late`` and ``lost`` count the writes of that time that succeeded later or never did, by
    kind (windows, other records, steps, device times, readings, notes on captures). ``lost_steps`` are the first and
    the last step of lost windows.
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
    """The first line of a journal that replaced a longer one, the file ``inode``.

    After it come ``older_bytes`` of selected older lines, then all lines of that file from ``kept_from`` on.
    ``dropped`` windows, the last of which ended at ``dropped_step``, are not in it. ``losses`` is what suspects had
    cost before ``kept_from``, as values of `sftriage.policy.state.Losses`.
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


Departed = Literal["raised", "exited", "killed", "worker", "left", "died", "gave_up", "silent"]
"""How a rank left. By an uncaught exception (``raised``); with an exit status other than 0 (``exited``), or 0
(``left``); by a signal (``killed``); because its DataLoader ``worker`` died; in an unknown way (``died``); or because
the exchange with other ranks failed, or took too long (``gave_up``). The host of a ``silent`` rank does not report.
"""


class Departure(msgspec.Struct, frozen=True):
    """How ranks left a job, all in the same way and place.

    Attributes:
        status: the exit status, negative for a signal, of the ranks or of the ``worker`` of the first; None if unknown.
        error, message: the type and text of the exception.
        stage: where the ranks were in ``step``; "" if unknown, None: after that step. A step of -1: before the first.
        worker: the process of the DataLoader worker.
        out_of_memory: whether the kernel killed it for lack of memory, and which of its accounts says so;
            ``limit_bytes`` is the limit of the cgroup that was exceeded, if it was one.
    """

    ranks: tuple[int, ...]
    how: Departed
    hosts: tuple[str, ...] = ()
    status: int | None = None
    error: str = ""
    message: str = ""
    place: Place | None = None
    stage: str | None = None
    step: int = -1
    worker: int | None = None
    out_of_memory: Literal["", "cgroup", "kernel_log"] = ""
    limit_bytes: int | None = None


class JobBroken(_Event, tag="broken", frozen=True):
    """An attempt of the job ended early. ``first`` left first; with more than one, it is not certain which.

    ``others`` followed; those whose exchanges failed come before those that were ended. ``restarted``: another attempt
    came after it. ``mismatch``: how the ranks' last calls of collectives disagree, if an exchange failed because of it.
    """

    time_s: float
    attempt: int
    first: tuple[Departure, ...]
    others: tuple[Departure, ...] = ()
    world_size: int = 1
    restarted: bool = False
    mismatch: Hang | None = None


class CauseFound(_Event, tag="cause", frozen=True):
    """Why a captured rank was slow, by the capture's trace and the stacks sampled with it.

    The fields are those of `sftriage.traces.manifest.CauseInfo`. ``left_open``: another profiler would show more, and
    one capture with it follows.
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
"""Why a remedy is in a state: its model predicts a gain (``worthwhile``); the measured gain is there or not (``helps``,
``no_help``); the straggler has ``moved`` or is ``gone``; the policy does not allow it; the activations do not fit
(``no_room``); the ranks did not switch; they restarted; or the trial was ``interrupted``.
"""


class Pipeline(msgspec.Struct, frozen=True):
    """The durations of a microbatch in a pipeline, in seconds: each stage's computations (S), each link's delay (L).

    A delay runs, either way, from the end of a computation until its output can be used. Stage i can hold the
    activations of ``most_S[i]`` microbatches (None: any number).

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

    The straggler is ``rank``; in a ``pipeline``, the link from that rank to the next stage, and stages run ``ahead_S``
    microbatches ahead. ``switch`` is the name of the group that switches (`sftriage.mitigate.switching`). ``numbers``
    decided: from the model ``late_s``, ``step_s``, ``ring_s`` of ``ring_bytes`` among ``ring_ranks``, ``break_even_s``
    and ``expected_s``, or for a link ``delay_s`` per microbatch, the longer of ``there_s`` and ``back_s``; from the
    trial the typical step with and without the remedy, ``on_s`` and ``off_s``, over ``on_steps`` and ``off_steps``,
    and the saving ``saves_s`` with its ``error_s``.
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


class Difference(msgspec.Struct, frozen=True):
    """A fact by which a suspect differs: it has ``value``, ``alike`` of its peers have ``others``; None is no value."""

    name: str
    value: Fact | None
    others: Fact | None
    alike: int


MAX_COMPARED = 8
"""Ranks of a suspect that are compared with its peers."""


class DifferencesFound(_Event, tag="differences", frozen=True):
    """What differs between a suspect's processes and those of its peers, the likeliest reason first.

    ``ranks`` are the first ones of the suspect, and ``peers`` those that answered.
    """

    time_s: float
    attempt: int
    who: str
    ranks: tuple[int, ...]
    peers: tuple[int, ...]
    differences: tuple[Difference, ...]


Decided = WindowJudged | ManualRequestDecided | FollowUpDecided
_Common = Decided | CaptureChanged | PolicyChanged | CostMeasured | EvidenceGathered
_Rare = TakenOver | DiskRecovered | RingGivenUp | JournalCompacted
Event = _Common | _Rare | CauseFound | RemedyChanged | JobPaused | JobBroken | DifferencesFound

encode: Callable[[Event], bytes] = msgspec.json.Encoder().encode
"""An event as one line of JSON, without its end."""
_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


class _Kind(msgspec.Struct):
    type: str
    version: int


_KIND = msgspec.json.Decoder(_Kind)
_TYPES = {kind.__struct_config__.tag for kind in get_args(Event)}


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
