"""What a job records: stages, steps, windows, and the kernel's counters with the lateness that they explain.

The training process imports this module, so numpy is imported for type checking only.
Arrays carry their axes as suffixes: N steps, R ranks, S stages, G sync stages, C counters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal

from sftriage.errors import SchemaError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]
    BoolArray = NDArray[np.bool_]
    IntArray = NDArray[np.int64]

OTHER = "other"
"""The last stage of a recorded vector: time outside all named stages, so that the vector sums to the step."""

EXCHANGE = "exchange"
"""Sync stage of collectives timed wherever they occur (`sftriage.trainer.seams`): in any stage, perhaps in some
steps only."""

LOADER_START = "loader start"
"""What a rank notes of a step, if nothing else, in which its data loader starts its workers anew."""

MAX_STAGES = 32
MAX_STAGE_NAME_BYTES = 31
STAGE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@-]*")
"""The pattern of a stage's name, of at most `MAX_STAGE_NAME_BYTES`."""


@dataclass(frozen=True, slots=True)
class StageSchema:
    """The ordered stages of a step, and which of them end in a blocking exchange between the ranks.

    Raises:
        SchemaError: no stages, too many, a bad or repeated name, or a sync stage that is not a stage.
    """

    stages: tuple[str, ...]
    sync: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse stages that no reader could interpret."""
        if not self.stages:
            raise SchemaError("a step needs at least one stage")
        if len(self.stages) > MAX_STAGES:
            raise SchemaError(f"{len(self.stages)} stages; at most {MAX_STAGES} are allowed")
        for name in self.stages:
            if not isinstance(name, str) or not STAGE_NAME.fullmatch(name) or len(name) > MAX_STAGE_NAME_BYTES:
                raise SchemaError(
                    f"stage name {name!r}: must be 1 to {MAX_STAGE_NAME_BYTES} letters, digits and _ . : / @ -"
                )
        for kind, names in (("stage", self.stages), ("sync stage", self.sync)):
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                raise SchemaError(f"{kind} listed twice: {', '.join(repeated)}")
        unknown = [name for name in self.sync if name not in self.stages]
        if unknown:
            raise SchemaError(
                f"sync stage {', '.join(map(repr, unknown))} is not one of the stages {', '.join(self.stages)}"
            )
        if OTHER in self.stages[:-1]:
            raise SchemaError(f"{OTHER!r} must be the last stage, because it ends the step")
        if OTHER in self.sync:
            raise SchemaError(f"{OTHER!r} cannot be a sync stage, because it is time outside all stages")

    @classmethod
    def closed(cls, stages: tuple[str, ...], sync: tuple[str, ...] = ()) -> StageSchema:
        """The schema with ``other`` as its last stage, added if missing."""
        return cls(stages if stages and stages[-1] == OTHER else (*stages, OTHER), sync)

    @property
    def sync_in_order(self) -> tuple[str, ...]:
        """The sync stages in the order of the step (length G)."""
        return tuple(stage for stage in self.stages if stage in self.sync)

    @property
    def split_sync(self) -> str | None:
        """The sync stage that the last ready gradient splits: ``backward``, or otherwise the first one."""
        return "backward" if "backward" in self.sync else next(iter(self.sync_in_order), None)


OF_THREAD: Final = (
    "run_s",
    "queued_s",
    "preempted",
    "woken",
    "minor_faults",
    "major_faults",
    "system_s",
    "disk_s",
    "read_bytes",
    "written_bytes",
)
"""The kernel's counters of the training thread: time on a CPU and in the run queue; involuntary and voluntary context
switches; page faults; time in the kernel; time waiting for a disk; bytes read from disks and written to them. A unit is
in its counter's name: ``_s`` is seconds (in files nanoseconds), all others are counts."""

OF_INTERPRETER: Final = ("collected_s", "compiled_s")
"""Counted by the trainer itself: time in Python's garbage collector, and in torch's compiler."""

OF_PROCESS: Final = ("throttled_s", "stopped_s", "memory_s", "io_s", "retransmitted", *OF_INTERPRETER)
"""Counters of the process: time throttled by its cgroup's CPU limit; time stopped (state T); time in which some thread
of its cgroup, or else of its host, was stalled on memory and on disks (pressure stall information); TCP segments
retransmitted in its network namespace; and those `OF_INTERPRETER`."""

SHARED: Final = frozenset({"memory_s", "io_s", "retransmitted"})
"""Counters that ranks of one host may share, and that are read less often: a difference counts only if a rank has twice
as much as its peers."""

COUNTERS: Final = (*OF_THREAD, *OF_PROCESS)
PLACE: Final[Mapping[str, int]] = {name: place for place, name in enumerate(COUNTERS)}

UNITS: Final = tuple(1e-9 if name.endswith("_s") else 1.0 for name in COUNTERS)
"""The factor from a counter as it is stored to its unit."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One rank's step as the recorder wrote it. Times are nanoseconds on the host's monotonic clock.

    ``durations_ns`` has one entry per stage and sums to the measured step exactly. ``outside_ns`` has one entry per
    sync stage: the part of ``other`` between the end of the previous sync stage and the end of this one; without it, a
    delay between two stages would be accounted after the sync that it delayed. ``between_ns`` is the time from the end
    of the previous step to the start of this one. ``ready_ns`` is the part of the split sync stage until the last
    gradient was ready on this rank, or None if unknown. ``kind`` and ``work`` are the job's own notes: the kind of step
    ("" for an ordinary one) and its amount of work (tokens, samples; 0 if not noted).
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
    the first step, since the rank began to record. ``step`` is in progress, or the last one; it started ``step_age_ns``
    ago. It is ``special`` if it has a kind (a checkpoint, an evaluation), or is in a stage that the step before it did
    not enter. ``published`` counts the steps that have ended; a rank that is ``closed`` records no more. ``alive`` is
    whether its process exists, None if unknown.
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
    """The drivers' values for the GPUs of some ranks, read at ``time_s`` (seconds since the epoch).

    ``remarks`` are sentences about unusual values, ``gpus`` has each rank's GPU in plain values, and ``problem`` is why
    some values are missing; "" if none are.
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


@dataclass(slots=True)
class ReadCounts:
    """Steps read since the run began. ``problems`` has the reason, by path, for each ring that cannot be read."""

    steps: int = 0
    missed: int = 0
    torn: int = 0
    problems: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class JobStatus:
    """What the ranks of one attempt of a job are doing now, side by side; ranks without a status are left out.

    Attributes:
        hosts: the hosts of these ranks.
        doing_VR: the values of a `RankStatus` of each rank, in order: host and stage as numbers, -1 for no stage; -1 if
            it is unknown whether the rank is alive.
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
        return replace(self, doing_VR=self.doing_VR[:, some])


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What the ranks of one host sent to another host between two readings.

    ``address`` is the host's own. ``peer`` is the other host's address, which the controller replaces by its name; ""
    for an RDMA port, which reaches all hosts. Sending ``sent_bytes`` took ``busy_s``, without the time in which the
    receiver read nothing. ``again`` counts segments sent again. By the kernel's last estimate the path takes
    ``delivered_bits_per_s``, or less if it was ``at_rest``. The interface has ``speed_bits_per_s``, 0 if unknown. Times
    are of the host's clock, since the epoch.
    """

    host: str
    address: str
    peer: str
    begin_ns: int
    end_ns: int
    sent_bytes: int
    busy_s: float
    again: int = 0
    delivered_bits_per_s: float = 0.0
    at_rest: bool = True
    speed_bits_per_s: float = 0.0

    @property
    def sent_bits_per_s(self) -> float:
        """The rate while it was sending, which waits of its host for a CPU make lower."""
        return 8 * self.sent_bytes / self.busy_s

    @property
    def bits_per_s(self) -> float:
        """The rate of the link, as far as it shows."""
        return max(self.sent_bits_per_s, self.delivered_bits_per_s)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """N consecutive steps × R ranks × S stages of durations, in seconds.

    A rank's missing step is a row of NaN: it is never zero-filled, it lowers coverage. Optional arrays refine it:

    - ``outside_NRG``: the part of ``other`` before the end of each sync stage (see `StepRecord.outside_ns`);
    - ``between_NR``: time between the previous step and this one;
    - ``ready_NR``: seconds from the start of the split sync stage (`StageSchema.split_sync`) until the last gradient
      was ready on the rank;
    - ``capturing_N``: steps during which a heavy profiler ran somewhere in the job;
    - ``hosts``, ``cohorts``: each rank's host, and its role: ranks of one cohort do the same work;
    - ``kinds``: each step's kind, "" for an ordinary one: what (nearly) all ranks note;
    - ``noted_NR``: kinds that only some ranks note, "" elsewhere;
    - ``loaders_N``: steps in which a rank's data loader started its workers anew;
    - ``work_NR``: the work of each rank's step (tokens, samples), 0 if not noted;
    - ``links``: what the hosts sent each other in its steps, and in the seconds before;
    - ``counted_NRC``: the kernel's counters of the rank, in the order of `COUNTERS`; NaN if unknown;
    - ``on_device``: some rank's steps run on a device for which its host does not wait: the host's durations are then
      those of launches, and of waiting for the device wherever the host next blocks;
    - ``device_NRS``, ``device_outside_NRG``, ``device_between_NR`` and ``device_ready_NR``: durations, outside, between
      and ready by the GPUs' clocks; NaN if unknown.

    Reading is fastest if the ranks of one stage lie side by side in memory, but any layout works. `steps`, `of_ranks`
    and `joined` keep every field that has an axis, by the axes in its name (see `axes_of`).
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
    noted_NR: NDArray[Any] | None = None
    loaders_N: BoolArray | None = None
    links: tuple[LinkUse, ...] = ()

    def noted(self, n: int) -> tuple[str, ...]:
        """The kinds that any rank notes for the n-th step of the window."""
        some = () if self.noted_NR is None else dict.fromkeys(self.noted_NR[n].tolist())
        return tuple(kind for kind in dict.fromkeys(((self.kinds[n] if self.kinds else ""), *some)) if kind)

    def counted(self, name: str) -> NDArray[np.floating[Any]] | None:
        """A counter by its name in `COUNTERS` (N, R); None if unknown."""
        return None if self.counted_NRC is None else self.counted_NRC[:, :, PLACE[name]]

    @property
    def last_step(self) -> int:
        """The number of the window's last step, inclusive."""
        return self.first_step + int(self.durations_NRS.shape[0]) - 1

    def steps(self, first_step: int, last_step: int) -> Window:
        """Some of the steps, by number, the last one included. Arrays are views.

        Raises:
            ValueError: the range is empty, or not all of it is in the window.
        """
        if not self.first_step <= first_step <= last_step <= self.last_step:
            raise ValueError(f"steps {first_step} to {last_step} are not in {self.first_step} to {self.last_step}")
        rows = slice(first_step - self.first_step, last_step - self.first_step + 1)
        return replace(self, first_step=first_step, **{name: values[rows] for name, values in self._along("N")})

    def of_ranks(self, ranks: Sequence[int]) -> Window:
        """Some of the ranks, in this order, renumbered from 0."""
        chosen: dict[str, Any] = {}
        for name, values in self._along("R"):
            of_each = isinstance(values, tuple)
            chosen[name] = tuple(values[rank] for rank in ranks) if of_each else values[:, list(ranks)]
        return replace(self, **chosen)

    @staticmethod
    def joined(windows: Sequence[Window]) -> Window:
        """Consecutive windows of one attempt, joined into one.

        An array that some windows lack is unknown there (NaN; no work, an ordinary kind, no capture). Between and
        outside times are dropped if some window has durations without them: its steps would be incomplete. Hosts and
        cohorts are the last known ones.

        Raises:
            ValueError: ranks, stages or attempts differ, or the windows are not consecutive.
        """
        for before, after in pairwise(windows):
            same = [(window.schema, window.attempt, window.durations_NRS.shape[1:]) for window in (before, after)]
            if before.last_step + 1 != after.first_step or same[0] != same[1]:
                raise ValueError(f"steps from {after.first_step} do not continue those up to {before.last_step}")
        whole = {name: _joined(name, windows) for name in Window.__dataclass_fields__ if axes_of(name)}
        return replace(windows[0], on_device=any(window.on_device for window in windows), **whole)

    def _along(self, axis: str) -> list[tuple[str, Any]]:
        named = [(name, getattr(self, name)) for name in Window.__dataclass_fields__ if axis in axes_of(name)]
        return [(name, values) for name, values in named if values is not None]


def axes_of(name: str) -> str:
    """The axes of a field of `Window`; "" if it is no array."""
    suffix = name.rpartition("_")[2]
    return suffix if suffix.isupper() else {"hosts": "R", "cohorts": "R", "kinds": "N"}.get(name, "")


_REFINED = {
    "outside_NRG": "durations_NRS",
    "between_NR": "durations_NRS",
    "device_outside_NRG": "device_NRS",
    "device_between_NR": "device_NRS",
}
"""The durations that each of these refines."""


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
    unknown = {"work_NR": 0, "capturing_N": 0, "loaders_N": 0, "noted_NR": ""}.get(name, np.nan)
    shape, dtype = there[0].shape[1:], there[0].dtype
    known = (np.full((n, *shape), unknown, dtype) if p is None else p for p, n in zip(parts, lengths, strict=True))
    return np.concatenate(tuple(known))


SystemCode = Literal["cgroup_throttled", "stopped", "page_faults", "memory_pressure", "descheduled"]
"""Causes of lateness that are no line of the rank's program."""

InterpreterCode = Literal["garbage_collection", "recompilation"]
"""Causes that the trainer itself counts. A capture shows the line at which they happen."""

AccountCode = SystemCode | InterpreterCode | Literal["disk", "network", "gpu_throttled"]
"""These, and causes that act on a line of the program or make operators slow."""

MOST_FRACTION = 0.5
"""Fraction of a lateness from which something is its cause."""

MAJOR_FAULTS = 1.0
"""Major faults a step below which time waiting for disks is not paging."""

FAULT_S = 20e-6
"""The longest time in the kernel for a minor fault, in a virtual machine under load; a fault in a mapped file, which
loads sixteen pages, takes 10 us."""

RETRANSMISSION_S = 0.2
"""The least timeout before a TCP segment is retransmitted, without duplicate acknowledgements (RFC 6298)."""


@dataclass(frozen=True, slots=True)
class Account:
    """One effect of the system on a rank.

    Attributes:
        took_s: seconds a step.
        counted: whether a counter measured it; otherwise it is inferred.
        alone: ``code``, if no line of the program is involved and no profiler of the rank would show more.
    """

    code: AccountCode
    took_s: float
    counted: bool = True
    alone: SystemCode | None = None

    @property
    def of_rank(self) -> bool:
        """Whether it affects the whole rank, at any line or operator."""
        return self.alone is not None or self.code == "gpu_throttled"


def accounts(over: Mapping[str, float]) -> Iterator[Account]:
    """All effects of the system on a rank; ``over`` has each known counter, a step, less its peers'."""
    disk_s = over.get("disk_s")
    pages = over.get("major_faults", 0.0) >= MAJOR_FAULTS
    throttled_s = max(0.0, over.get("throttled_s", 0.0))
    yield _alone("cgroup_throttled", throttled_s)
    yield _alone("stopped", over.get("stopped_s", 0.0))
    if disk_s is not None:
        yield _alone("page_faults", disk_s) if pages else Account("disk", disk_s)
    yield _alone("memory_pressure", over.get("memory_s", 0.0), counted=False)
    # A throttled thread is in the run queue too.
    yield _alone("descheduled", over.get("queued_s", 0.0) - throttled_s)
    if disk_s is None:
        yield Account("disk", over.get("io_s", 0.0), counted=False)
    if _faults(over):
        yield Account("page_faults", over["system_s"], counted=False)
    yield Account("garbage_collection", over.get("collected_s", 0.0))
    yield Account("recompilation", over.get("compiled_s", 0.0))
    # (from a capture: no kernel counts it)
    yield Account("gpu_throttled", over.get("gpu_s", 0.0), counted=False)
    yield Account("network", over.get("retransmitted", 0.0) * RETRANSMISSION_S, counted=False)


def runs_for_faults(over: Mapping[str, float]) -> bool:
    """Whether most of a rank's CPU time over its peers was spent on minor page faults."""
    system_s = over.get("system_s", 0.0)
    return _faults(over) and system_s > 0.0 and system_s >= MOST_FRACTION * over.get("run_s", 0.0)


def _faults(over: Mapping[str, float]) -> bool:
    return 0.0 <= over.get("system_s", -1.0) <= over.get("minor_faults", 0.0) * FAULT_S


def _alone(code: SystemCode, took_s: float, *, counted: bool = True) -> Account:
    return Account(code, took_s, counted, alone=code)


def accounting(over: Mapping[str, float], late_s: float) -> Account | None:
    """The effect that explains most of a lateness (seconds a step): the largest, or the first that explains all."""
    least_s = MOST_FRACTION * late_s
    found = [each for each in accounts(over) if min(late_s, each.took_s) > 0.0 and each.took_s >= least_s]
    return max(found, key=lambda each: (each.counted, min(each.took_s, late_s)), default=None)


def plain(record: Any) -> Any:
    """A record as JSON-ready values: dataclasses and mappings become dicts, tuples lists, the rest stays."""
    names = getattr(type(record), "__dataclass_fields__", None)
    if names is not None:
        return {name: plain(getattr(record, name)) for name in names}
    if isinstance(record, Mapping):
        return {str(key): plain(value) for key, value in record.items()}
    if isinstance(record, (tuple, list)):
        return [plain(value) for value in record]
    return record
