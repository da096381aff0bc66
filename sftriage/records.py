"""What passes between rooms: frozen records, standard library only.

The trainer's process imports this module, so numpy is named here for the type checker alone.
Arrays carry their axes as suffixes: N steps, R ranks, S stages, G sync stages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from sftriage.counters import MOST_FRACTION, PLACE, SystemCode
from sftriage.errors import SchemaError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]
    BoolArray = NDArray[np.bool_]
    IntArray = NDArray[np.int64]

OTHER = "other"
"""The last stage of a recorded vector: time outside every named stage. It closes the vector to the step."""

MAX_STAGES = 32
MAX_STAGE_NAME_BYTES = 31
STAGE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@-]*")
"""What a stage may be called, up to so many bytes of it."""
CAPTURE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
"""What a capture may be called: a plain file name that is never hidden and never leads elsewhere."""

Label = Literal["healthy", "suspect", "stalled", "needs_evidence"]
NAMING: frozenset[Label] = frozenset({"suspect", "stalled"})
"""The labels under which a suspect is named. Under any other there may be candidates, none of them sure enough."""
Cause = Literal["healthy", "suspect", "stalled", "needs_evidence", "asked"]
"""What a decision is about: a verdict's label, or that a person asked."""
Scope = Literal["rank", "host", "cohort", "all"]
Clock = Literal["host", "device"]
Pattern = Literal["chronic", "recurring", "one-off"]
Outcome = Literal["capture", "hold", "throttle", "ignore"]
Profiler = Literal["torch", "nsys", "stacks"]
ProfilerChoice = Literal["auto", "torch", "nsys", "stacks"]
"""What is asked for; ``auto`` becomes one of the profilers once it is known what there is to see."""
ChoiceReason = Literal["", "host_stage", "compute_stage", "device_clock", "whole_rank", "stands_still", "left_open"]
"""Why ``auto`` chose a profiler; "" where it was named."""
LeftOpen = Literal["", "operators", "stacks", "system"]
"""What a capture that holds its fault does not show and another means would: operators and kernels, Python stacks, or
what only a look at the whole process has; "" where it shows what the time went into."""
SAMPLE_STACKS = "sample_stacks"
"""The option of a capture that has the trainer sample its Python stacks; torch's ``with_stack`` traces every call."""
SAMPLES_PER_SECOND = "samples_per_second"
"""The option that says how often, at most; whole, from 1 to 1,000."""
Role = Literal["suspect", "control"]
CaptureState = Literal["accepted", "armed", "running", "stored", "failed", "refused", "expired"]
ENDED: frozenset[CaptureState] = frozenset({"stored", "failed", "refused", "expired"})
"""The states that a capture does not leave any more."""
CaptureCode = Literal["", "no_nvtx"]
"""What of a capture's detail a program acts on; "" where there is nothing of the sort."""
ReasonCode = Literal[
    "healthy",
    "undecided",
    "standstill",
    "no_rank_named",
    "one_off",
    "descheduled",
    "cgroup_throttled",
    "stopped",
    "page_faults",
    "memory_pressure",
    "no_rule_matched",
    "observe_only",
    "pending",
    "waits_for_windows",
    "rule_matched",
    "follow_up",
    "asked",
    "rank_hangs",
    "captures_per_run",
    "active",
    "overhead_budget",
    "captures_per_hour",
    "captures_per_day",
    "place_kept",
    "already_captured",
    "cooldown",
    "after_failures",
    "rank_busy",
    "concurrent_ranks",
    "no_such_rank",
    "captures_left",
    "recorded",
]
"""Why a decision is what it is; `words` has the sentence of each. ``waits_for_windows`` is in journals of earlier
versions alone, and ``recorded`` is a sentence of theirs."""
Parameter: TypeAlias = str | int | float | bool | tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class StageSchema:
    """The ordered stages of a step, and which of them end in a blocking exchange between the ranks.

    Raises:
        SchemaError: no stages, too many, a bad or repeated name, or a sync stage that is not a stage.
    """

    stages: tuple[str, ...]
    sync: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no later room could make sense of."""
        if not self.stages:
            raise SchemaError("a step needs at least one stage")
        if len(self.stages) > MAX_STAGES:
            raise SchemaError(f"{len(self.stages)} stages; at most {MAX_STAGES} are recorded")
        for name in self.stages:
            if not isinstance(name, str) or not STAGE_NAME.fullmatch(name) or len(name) > MAX_STAGE_NAME_BYTES:
                raise SchemaError(
                    f"stage name {name!r}: 1 to {MAX_STAGE_NAME_BYTES} of letters, digits and _ . : / @ -"
                )
        for kind, names in (("stage", self.stages), ("sync stage", self.sync)):
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                raise SchemaError(f"{kind} named twice: {', '.join(repeated)}")
        unknown = [name for name in self.sync if name not in self.stages]
        if unknown:
            raise SchemaError(
                f"sync stage {', '.join(map(repr, unknown))} is not one of the stages {', '.join(self.stages)}"
            )
        if OTHER in self.stages[:-1]:
            raise SchemaError(f"{OTHER!r} closes the step and can only be the last stage")
        if OTHER in self.sync:
            raise SchemaError(f"{OTHER!r} is time outside every stage and cannot be a sync stage")

    @classmethod
    def closed(cls, stages: tuple[str, ...], sync: tuple[str, ...] = ()) -> StageSchema:
        """The schema with ``other`` as its last stage, added if it is not there."""
        return cls(stages if stages and stages[-1] == OTHER else (*stages, OTHER), sync)

    @property
    def sync_in_order(self) -> tuple[str, ...]:
        """The sync stages in the order of the step (length G)."""
        return tuple(stage for stage in self.stages if stage in self.sync)

    @property
    def split_sync(self) -> str | None:
        """The sync stage that the moment of the last ready gradient splits: ``backward``, or else the first one."""
        return "backward" if "backward" in self.sync else next(iter(self.sync_in_order), None)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One rank's step as the recorder wrote it. Times are nanoseconds on the host's monotonic clock.

    ``durations_ns`` has one entry a stage and sums to the measured step exactly. ``outside_ns`` has one entry a sync
    stage: the part of ``other`` that was spent before that sync stage ended and after the one before it, without which
    a delay between two stages would be accounted after the sync it held up. ``between_ns`` is the time from the end of
    the previous step to the start of this one, outside the step. ``ready_ns`` is the part of the split sync stage until
    the last gradient was ready on this rank, or None where that is not known. ``kind`` and ``work`` are the job's own
    words for the step: what sort it is ("" for an ordinary one) and how much (tokens, samples; 0 where nobody said).
    """

    rank: int
    step: int
    start_ns: int
    between_ns: int
    durations_ns: tuple[int, ...]
    outside_ns: tuple[int, ...]
    complete: bool
    capturing: bool
    ready_ns: int | None = None
    kind: str = ""
    work: int = 0


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What one rank is doing now. Times are ages, which mean the same on every host.

    ``stage`` is None between steps. ``stage_age_ns`` is the time in that stage, or since the last step ended; before
    the first step, since the rank began to record. ``step`` is the one in progress, or the last one; it started
    ``step_age_ns`` ago, and is ``special`` if it is of a kind of its own (a checkpoint, an evaluation). ``published``
    counts the steps that have ended; a rank that is ``closed`` records no more. ``alive`` is whether its process is
    there, None where that cannot be known.
    """

    rank: int
    host: str
    stage: str | None
    stage_age_ns: int
    step: int
    step_age_ns: int
    published: int
    closed: bool
    alive: bool | None
    special: bool = False


@dataclass(frozen=True, slots=True)
class GpuFindings:
    """What drivers say of the GPUs of some ranks, asked at ``time_s`` (seconds since the epoch).

    ``remarks`` say what is out of the ordinary, ``gpus`` has each rank's GPU in plain values, and ``problem`` says why
    some of it is missing; empty where nothing is.
    """

    time_s: float
    remarks: tuple[str, ...] = ()
    gpus: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    problem: str = ""


class _Row:
    """One value of all ranks, as an attribute."""

    def __init__(self, row: int) -> None:
        self._row = row

    def __get__(self, job: JobStatus, owner: type[JobStatus]) -> IntArray:
        row_R: IntArray = job.doing_VR[self._row]
        return row_R


@dataclass(frozen=True, slots=True, eq=False)
class JobStatus:
    """What the ranks of one attempt of a job are doing now, side by side; ranks that show nothing are not among them.

    Attributes:
        hosts: where any of them are.
        doing_VR: the values of a `RankStatus`, in their order, of each rank: its host and its stage by their numbers,
            -1 for no stage; and -1 where it cannot be known whether it is alive.
    """

    schema: StageSchema
    world_size: int
    hosts: tuple[str, ...]
    doing_VR: IntArray
    attempt: int = 0

    rank_R, host_R, stage_R, stage_age_ns_R, step_R, step_age_ns_R, published_R, closed_R, alive_R, special_R = (
        _Row(row) for row in range(10)
    )

    @property
    def ranks(self) -> tuple[RankStatus, ...]:
        """They one by one: for a few of them."""
        return tuple(
            RankStatus(
                *(rank, self.hosts[host], self.schema.stages[stage] if stage >= 0 else None),
                *(stage_age_ns, step, step_age_ns, published),
                *(bool(closed), bool(alive) if alive >= 0 else None, bool(special)),
            )
            for rank, host, stage, stage_age_ns, step, step_age_ns, published, closed, alive, special in (
                self.doing_VR.T.tolist()
            )
        )

    def only(self, some: IntArray | BoolArray) -> JobStatus:
        """Some of the ranks."""
        return replace(self, doing_VR=self.doing_VR[:, some])


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """N consecutive steps × R ranks × S stages of durations, in seconds.

    A rank's missing step is a row of NaN: it is never zero-filled, it lowers coverage. Optional arrays refine it:

    - ``outside_NRG``: the part of ``other`` before the end of each sync stage (see `StepRecord.outside_ns`);
    - ``between_NR``: time between the previous step and this one;
    - ``ready_NR``: seconds from the start of the sync stage that it splits (`StageSchema.split_sync`) until the
      last gradient was ready on the rank;
    - ``capturing_N``: steps during which a heavy profiler ran somewhere in the job;
    - ``hosts``, ``cohorts``: of each rank the host it is on, and its role: ranks of one cohort do the same work;
    - ``kinds``: of each step what sort it is, "" for an ordinary one;
    - ``work_NR``: how much work each rank's step was (tokens, samples), 0 where nobody said;
    - ``counted_NRC``: what the kernel counted of the rank, in the order of `counters.COUNTERS`; NaN where that is not
      known;
    - ``on_device``: some rank's steps run on a device that its host does not wait for: there the host's durations are
      those of launches, and of waiting for the device wherever the host next does;
    - ``device_NRS``, ``device_outside_NRG``, ``device_between_NR`` and ``device_ready_NR``: durations, outside, between
      and ready once more, as the ranks' GPUs saw them; NaN where that is not known.

    Reading is fastest where the ranks of one stage lie side by side in memory, but any layout will do. `steps`,
    `of_ranks` and `joined` take along every field that has an axis, by the axes in its name (see `axes_of`).
    """

    schema: StageSchema
    first_step: int
    durations_NRS: FloatArray
    outside_NRG: FloatArray | None = None
    between_NR: FloatArray | None = None
    ready_NR: FloatArray | None = None
    capturing_N: BoolArray | None = None
    hosts: tuple[str, ...] | None = None
    cohorts: tuple[str, ...] | None = None
    kinds: tuple[str, ...] | None = None
    work_NR: FloatArray | None = None
    attempt: int = 0
    device_NRS: FloatArray | None = None
    device_outside_NRG: FloatArray | None = None
    device_between_NR: FloatArray | None = None
    on_device: bool = False
    counted_NRC: NDArray[np.floating[Any]] | None = None
    device_ready_NR: FloatArray | None = None

    def counted(self, name: str) -> NDArray[np.floating[Any]] | None:
        """What the kernel counted under a name of `counters.COUNTERS` (N, R)."""
        return None if self.counted_NRC is None else self.counted_NRC[:, :, PLACE[name]]

    @property
    def last_step(self) -> int:
        """The number of the window's last step, inclusive."""
        return self.first_step + int(self.durations_NRS.shape[0]) - 1

    def steps(self, first_step: int, last_step: int) -> Window:
        """Some of the steps, by number, the last one included. Arrays are views.

        Raises:
            ValueError: none, or not all of them in the window.
        """
        if not self.first_step <= first_step <= last_step <= self.last_step:
            raise ValueError(f"steps {first_step} to {last_step} of a window of {self.first_step} to {self.last_step}")
        rows = slice(first_step - self.first_step, last_step - self.first_step + 1)
        return replace(self, first_step=first_step, **{name: values[rows] for name, values in self._along("N")})

    def of_ranks(self, ranks: Sequence[int]) -> Window:
        """Some of the ranks, in the order given; they are numbered anew from 0."""
        chosen: dict[str, Any] = {}
        for name, values in self._along("R"):
            of_each = isinstance(values, tuple)
            chosen[name] = tuple(values[rank] for rank in ranks) if of_each else values[:, list(ranks)]
        return replace(self, **chosen)

    @staticmethod
    def joined(windows: Sequence[Window]) -> Window:
        """Windows of one attempt that follow one another, as one.

        An array that only some have is unknown in the others (NaN; no work, an ordinary kind, no capture). Between and
        outside times are left out instead where durations are there without them: such a step would be incomplete.
        Hosts and cohorts are the last that are there.

        Raises:
            ValueError: of different ranks, stages or attempts, or they do not follow one another.
        """
        for before, after in pairwise(windows):
            same = [(one.schema, one.attempt, one.durations_NRS.shape[1:]) for one in (before, after)]
            if before.last_step + 1 != after.first_step or same[0] != same[1]:
                raise ValueError(f"steps from {after.first_step} on do not continue those up to {before.last_step}")
        whole = {name: _joined(name, windows) for name in Window.__dataclass_fields__ if axes_of(name)}
        return replace(windows[0], on_device=any(window.on_device for window in windows), **whole)

    def _along(self, axis: str) -> list[tuple[str, Any]]:
        """The fields with this axis that are there."""
        named = [(name, getattr(self, name)) for name in Window.__dataclass_fields__ if axis in axes_of(name)]
        return [(name, values) for name, values in named if values is not None]


def axes_of(name: str) -> str:
    """The axes of a field of `Window`; none of what is not an array."""
    suffix = name.rpartition("_")[2]
    return suffix if suffix.isupper() else {"hosts": "R", "cohorts": "R", "kinds": "N"}.get(name, "")


_REFINED = {
    "outside_NRG": "durations_NRS",
    "between_NR": "durations_NRS",
    "device_outside_NRG": "device_NRS",
    "device_between_NR": "device_NRS",
}
"""The durations that these belong to."""


def _joined(name: str, windows: Sequence[Window]) -> Any:
    import numpy as np  # not above: the trainer imports this module

    parts = [getattr(window, name) for window in windows]
    there = [part for part in parts if part is not None]
    if not there or axes_of(name) == "R":
        return there[-1] if there else None
    refined = _REFINED.get(name)
    if refined and any(
        part is None and getattr(window, refined) is not None for part, window in zip(parts, windows, strict=True)
    ):
        return None
    lengths = [len(window.durations_NRS) for window in windows]
    if name == "kinds":
        return tuple(kind for part, n in zip(parts, lengths, strict=True) for kind in part or ("",) * n)
    unknown = 0 if name in ("work_NR", "capturing_N") else np.nan
    shape, dtype = there[0].shape[1:], there[0].dtype
    known = (np.full((n, *shape), unknown, dtype) if p is None else p for p, n in zip(parts, lengths, strict=True))
    return np.concatenate(tuple(known))


@dataclass(frozen=True, slots=True)
class Regression:
    """The job is slower than the best it has shown, by itself.

    Attributes:
        since_step: the step it began at, about: somewhere from ``since_first_step`` to ``since_last_step``.
        fraction: by how much a typical step is longer than ``best_step_s``, as a fraction of that.
        scope: ``all`` where the ranks have become slower alike, ``some`` where the step is longer for ranks that are
            late in it, and what the ranks have in common is not.
        stages: where, in the order of the step; none where it is in all of them alike, or only some ranks are slower.
        best_step_s: what a typical step took when the job was at its best, with as much work.
        kind: the kind of step that has become slower, "" for ordinary ones.
        until_step: the step, about, from which on the job has been as good as its best again; None while it is not.
    """

    since_step: int
    since_first_step: int
    since_last_step: int
    fraction: float
    scope: Literal["all", "some"]
    stages: tuple[str, ...]
    best_step_s: float
    kind: str = ""
    until_step: int | None = None


@dataclass(frozen=True, slots=True)
class Suspect:
    """Who and what would have to be mended: a scope, a stage, and what that would save.

    Attributes:
        scope: one rank, the ranks of one host, those of one cohort, or all; the field of that name says which.
        ranks: the ranks of the scope.
        stage: the stage, or None where all local stages of the scope are slow alike.
        gain_s: exposed seconds a step that would be saved if the suspect were as its reference: the mean over the steps
            that its fault fills (all of the window for a ``chronic`` one that was there from its start).
        share: what it adds to those steps, as a fraction of their exposed time: ``gain_s``, or a little more, where
            that is hardly worth a capture and the jitter of others hides a part of what is always there.
        persistence: fraction of the window's steps in which the suspect's gain was there.
        pattern: ``chronic``: it is there to stay; ``recurring``: it comes back; ``one-off``: it came, and has passed.
        period_steps: of a ``recurring`` one, the steps from one time to the next.
        onset_step: the step it most likely began at; of a ``recurring`` one, one of its own steps.
        onset_range: the earliest and the latest step that it may have begun at instead.
        descheduled_fraction: how much of its lateness over its peers was waiting for a CPU; None where that is not
            known. It decides nothing about who is named.
        system: what else the system did to it that was more of its lateness than anything else, and how much of it was
            that; None where it was nothing of the sort, or that is not known.
    """

    scope: Scope
    ranks: tuple[int, ...]
    stage: str | None
    gain_s: float
    share: float
    persistence: float
    rank: int | None = None
    host: str | None = None
    cohort: str | None = None
    pattern: Pattern = "chronic"
    period_steps: int | None = None
    onset_step: int | None = None
    onset_range: tuple[int, int] | None = None
    descheduled_fraction: float | None = None
    system: tuple[SystemCode, float] | None = None

    @property
    def by_system(self) -> tuple[SystemCode, float] | None:
        """What the system did to it that was more of its lateness than anything else, and how much of it was that."""
        if self.system is not None:
            return self.system
        waited = self.descheduled_fraction
        return None if waited is None or waited < MOST_FRACTION else ("descheduled", waited)


@dataclass(frozen=True, slots=True)
class Lost:
    """What one suspect cost a job of so many ``ranks``, in steps that no window before has counted: each counts once.

    ``step_s`` has the exposed seconds that mending it would have saved in each step, from ``first_step`` on. ``of``
    says whom, where the verdict itself does not: the one named before a capture that disturbs the window.
    """

    first_step: int
    step_s: tuple[float, ...]
    ranks: int
    of: Suspect | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One window's label, its reasons, its ranked suspects, and every number that decided.

    ``exposed_s`` is the mean exposed time of a step; ``advances_s`` sums to it to floating-point precision.
    ``leaders`` names for each stage the rank that led the frontier at its boundary, weighted by what it
    advanced; None where the frontier never moved. At the end of one of the ``sync`` stages all ranks are together, and
    who leads there is a matter of microseconds. ``clock`` is the one that all of its times are on.

    A ``stalled`` verdict is about the step in progress: it is both the first and the last step, ``exposed_s`` is how
    long it has lasted so far, a suspect's ``gain_s`` how long it has been waited for, and there is no frontier yet.

    ``regression`` is there while the job is slower than its own best, whoever is suspected, and once when that ends.
    ``lost`` is what the window adds to what stragglers have cost.
    """

    first_step: int
    last_step: int
    label: Label
    reasons: tuple[str, ...]
    suspects: tuple[Suspect, ...]
    exposed_s: float
    advances_s: Mapping[str, float]
    leaders: Mapping[str, int | None]
    numbers: Mapping[str, float]
    sync: tuple[str, ...] = ()
    clock: Clock = "host"
    attempt: int = 0
    regression: Regression | None = None
    lost: Lost | None = None

    @property
    def named(self) -> Suspect | None:
        """Who is named; None where nobody is: the suspects of a window that is held are candidates and no more."""
        return self.suspects[0] if self.suspects and self.label in NAMING else None


@dataclass(frozen=True, slots=True)
class Trigger:
    """Why a capture exists: the window and the suspect, and the rule of the policy that asked for it.

    ``why`` says it in a sentence. ``chosen`` is why it is by this profiler, where nobody named one, and ``follows`` the
    earlier capture of the same suspect that left open what this one is to show.
    """

    first_step: int
    last_step: int
    label: Cause
    scope: Scope
    ranks: tuple[int, ...]
    stage: str | None
    gain_s: float
    share: float
    persistence: float
    policy: str
    policy_sha256: str
    rule: str
    pattern: Pattern = "chronic"
    period_steps: int | None = None
    onset_step: int | None = None
    why: str = ""
    chosen: ChoiceReason = ""
    follows: str = ""


@dataclass(frozen=True, slots=True)
class ManualRequest:
    """A capture that a person asks for; ``who`` does, and why. The answer has the same ``request_id``.

    ``options`` are those of each profiler under its name, as a policy has them; what is not there is as it is there.
    """

    request_id: str
    ranks: tuple[int, ...]
    who: str
    reason: str
    profiler: ProfilerChoice = "auto"
    steps: int = 5
    warmup_steps: int = 1
    max_seconds: float = 60.0
    max_bytes: int = 512 * 2**20
    samples_per_second: int = 200
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WantedCapture:
    """A capture that is wanted of an agent: desired state, which it brings about once, however often it is told.

    Its rank has to be of that ``generation`` (start) of the job, if one is given, and it has to begin within
    ``expires_s`` seconds from now, if there are any. One that is ``resumed`` was asked for by an earlier process: it is
    gone on with, and not begun again. The ``trigger`` goes into its manifest.
    """

    request: CaptureRequest
    trigger: Trigger
    generation: int | None = None
    expires_s: float | None = None
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Reproduced:
    """Whether the fault that led to a capture was there while it was captured: in most steps, in some, or in none.

    It was there in ``steps_with`` captured steps, whose numbers are ``fault_steps``, of ``steps`` in which it was due:
    all of them, or, of what comes back, one a period (at least one; more, where it was there more often), whichever
    these are. In so many steps, those in which the suspect was furthest over its peers, it was so by ``over_s`` seconds
    a step, where the gain that led to the capture was ``expected_s``.
    """

    answer: Literal["yes", "no", "partly"]
    steps: int
    steps_with: int
    over_s: float
    expected_s: float
    fault_steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """One time-boxed run of a profiler on one rank. Bounded in steps, seconds and bytes, whatever the profiler does.

    ``options`` are the profiler's own, ready for JSON: switches, and for nsys a word and a list of words. ``role`` says
    whether the rank is suspected, or a healthy peer to compare with. ``labels`` say in the trace itself what led to it.

    What comes back is caught: with a ``period_steps``, the capture begins so that a step whose number leaves ``phase``
    over a multiple of it is among those recorded. Without one (0) it begins at the rank's next step. No step before
    ``first_step`` is recorded: ranks that are captured together are so in the same steps.

    Raises:
        ValueError: a bound that is no bound, or an id that could not be a file name.
    """

    capture_id: str
    rank: int
    profiler: Profiler
    steps: int
    warmup_steps: int
    max_seconds: float
    max_bytes: int
    options: Mapping[str, Any] = field(default_factory=dict)
    role: Role = "suspect"
    period_steps: int = 0
    phase: int = 0
    first_step: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """A request travels through a file that another process reads: check it wherever it is made."""
        if not CAPTURE_ID.fullmatch(self.capture_id):
            raise ValueError(f"capture id {self.capture_id!r} is not a plain file name")
        if self.profiler not in get_args(Profiler):
            raise ValueError(f"unknown profiler {self.profiler!r}")
        if self.role not in get_args(Role):
            raise ValueError(f"unknown role {self.role!r}")
        if not (1 <= self.steps <= 1000 and 0 <= self.warmup_steps <= 100 and self.rank >= 0):
            raise ValueError(f"steps {self.steps}, warmup_steps {self.warmup_steps} or rank {self.rank} out of bounds")
        if not (self.period_steps == self.phase == 0 or 0 <= self.phase < self.period_steps):
            raise ValueError(f"phase {self.phase} of a period of {self.period_steps} steps")
        if not (0 < self.max_seconds <= 3600 and self.max_bytes > 0):
            raise ValueError(f"max_seconds {self.max_seconds} or max_bytes {self.max_bytes} out of bounds")

    @property
    def takes_steps(self) -> bool:
        """Whether the trainer carries it out, or marks its steps; else its stacks are taken once, from outside."""
        return self.profiler != "stacks" or bool(self.options.get(SAMPLE_STACKS))

    def begins_at(self, step: int) -> int:
        """The first step to be recorded, if none before ``step`` can be: with what comes back in the middle."""
        step = max(step, self.first_step)
        if not self.period_steps or self.steps >= self.period_steps:
            return step
        before = (self.steps - 1) // 2
        to_go = (self.phase - step) % self.period_steps
        # It comes soon enough to be recorded from now on, or later than half of the steps.
        return step if to_go <= before else step + to_go - before


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """How far a request is. ``first_step``..``last_step`` are the measured steps, without warm-up.

    ``stored`` is one whose trace is whole: in the spool where an executor says so, in the store once it was collected.

    ``timings_s`` holds what the capture cost its rank: ``start``, ``run``, ``stop`` and ``export`` seconds, of torch's
    profiler also ``import`` and ``prepare``.
    ``clock`` maps the host's monotonic clock to wall time: two readings taken together, in nanoseconds.
    ``detail`` is for people; what programs have to know of it is ``code``.
    """

    capture_id: str
    rank: int
    state: CaptureState
    detail: str = ""
    first_step: int | None = None
    last_step: int | None = None
    size_bytes: int = 0
    timings_s: Mapping[str, float] = field(default_factory=dict)
    clock: Mapping[str, int] = field(default_factory=dict)
    code: CaptureCode = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What an agent says of a capture that is wanted of it: ``result`` is the state it is in, with the reason.

    One that ``hangs`` was given up, and its rank is still there. ``stored_bytes`` is its size in the store. Of one that
    is ``elsewhere``, its host has put a copy into the store that its run keeps copies in, and verified it there.
    """

    result: CaptureResult
    hangs: bool = False
    stored_bytes: int = 0
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What was done about one window, why, and the numbers it was taken from.

    ``requests`` is not empty exactly when ``outcome`` is ``capture``. ``parameters`` are what ``reason`` is said with:
    `words.reason_sentence` makes the sentence of the two, and `words.resolution` says what would resolve a hold-off.
    ``notify`` names the rules whose notifications are due, whatever the outcome is.
    """

    time_s: float
    first_step: int
    last_step: int
    label: Cause
    outcome: Outcome
    reason: ReasonCode
    rule: str | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    requests: tuple[CaptureRequest, ...] = ()
    attempt: int = 0
    notify: tuple[str, ...] = ()


def plain(record: Any) -> Any:
    """A record as JSON-ready values: dataclasses and mappings to dicts, tuples to lists, the rest as it is."""
    names = getattr(type(record), "__dataclass_fields__", None)
    if names is not None:
        return {name: plain(getattr(record, name)) for name in names}
    if isinstance(record, Mapping):
        return {str(key): plain(value) for key, value in record.items()}
    if isinstance(record, (tuple, list)):
        return [plain(value) for value in record]
    return record
