"""What the kernel counts of a rank, and how much of its lateness that accounts for. Pure; the one table of counters.

A counter is known by its name, and its name by its unit: ``_s`` is seconds (in files nanoseconds), all else is counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

SystemCode = Literal["cgroup_throttled", "stopped", "page_faults", "memory_pressure", "descheduled"]
"""What can be why a rank is late with no line of its program having to do with it."""

AccountCode = SystemCode | Literal["disk", "network", "gpu_throttled"]
"""With what a line of the program waits for, or does; and what makes operators slow."""

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
"""Of the training thread: how long it ran, and stood in the run queue instead; how often a CPU was taken from it, and
how often it gave one up by itself, to be woken later; its page faults; of its time that in the kernel; how long it
waited for a disk; what it read from disks, and wrote."""

OF_PROCESS: Final = ("throttled_s", "stopped_s", "memory_s", "io_s", "retransmitted")
"""Of the whole process: how long its cgroup's CPU limit kept it from running; how long it stood still (state T); how
long some thread of its cgroup (or else of its host) waited for memory, and for disks, by the kernel's pressure stall
information; and the TCP segments that were sent again in its network namespace."""

SHARED: Final = frozenset({"memory_s", "io_s", "retransmitted"})
"""What the ranks of a host may have in common, and is not read at every look: a rank has more of it than its peers
where it has twice as much."""

COUNTERS: Final = (*OF_THREAD, *OF_PROCESS)
PLACE: Final[Mapping[str, int]] = {name: place for place, name in enumerate(COUNTERS)}

UNITS: Final = tuple(1e-9 if name.endswith("_s") else 1.0 for name in COUNTERS)
"""What one of a counter as it is kept is in its unit."""

MOST_FRACTION = 0.5
"""Of a lateness: what accounts for so much of it is why, more than anything else."""

MAJOR_FAULTS = 1.0
"""A step: with fewer, what is waited for disks is no paging."""

FAULT_S = 10e-6
"""What a fault takes at most where nothing has to be read, in a virtual machine under load: time in the kernel beyond
that is for something else."""

RETRANSMISSION_S = 0.2
"""What waiting for a TCP segment takes at least before it is sent again, unless others tell of the gap (RFC 6298)."""


@dataclass(frozen=True, slots=True)
class Account:
    """What the system did to a rank, and how much of its lateness that is.

    Attributes:
        code: what it did.
        took_s: seconds a step.
        counted: it was counted, and not only inferred.
        alone: the same, where no line of the program is needed to explain it and no profiler of the rank shows more.
    """

    code: AccountCode
    took_s: float
    counted: bool = True
    alone: SystemCode | None = None

    @property
    def of_rank(self) -> bool:
        """It is of the whole rank, whatever line or operator it is at."""
        return self.alone is not None or self.code == "gpu_throttled"


def accounts(over: Mapping[str, float]) -> Iterator[Account]:
    """What the system did to a rank, by how much more it counted for it than for its peers, a step.

    Args:
        over: of each counter that is known; where it is not, nothing is said of it.
    """
    disk_s = over.get("disk_s")
    pages = over.get("major_faults", 0.0) >= MAJOR_FAULTS
    throttled_s = max(0.0, over.get("throttled_s", 0.0))
    yield _alone("cgroup_throttled", throttled_s)
    yield _alone("stopped", over.get("stopped_s", 0.0))
    if disk_s is not None:
        yield _alone("page_faults", disk_s) if pages else Account("disk", disk_s)
    yield _alone("memory_pressure", over.get("memory_s", 0.0), counted=False)
    # A thread that its cgroup keeps from running stands in the queue, too.
    yield _alone("descheduled", over.get("queued_s", 0.0) - throttled_s)
    if disk_s is None:
        yield Account("disk", over.get("io_s", 0.0), counted=False)
    if _faults(over):
        yield Account("page_faults", over["system_s"], counted=False)
    # (what no kernel counts: it comes with what is known of a capture)
    yield Account("gpu_throttled", over.get("gpu_s", 0.0), counted=False)
    yield Account("network", over.get("retransmitted", 0.0) * RETRANSMISSION_S, counted=False)


def runs_for_faults(over: Mapping[str, float]) -> bool:
    """Whether most of what it ran longer than its peers was spent on page faults of which none had to be read."""
    system_s = over.get("system_s", 0.0)
    return _faults(over) and system_s > 0.0 and system_s >= MOST_FRACTION * over.get("run_s", 0.0)


def _faults(over: Mapping[str, float]) -> bool:
    return 0.0 <= over.get("system_s", -1.0) <= over.get("minor_faults", 0.0) * FAULT_S


def _alone(code: SystemCode, took_s: float, *, counted: bool = True) -> Account:
    return Account(code, took_s, counted, alone=code)


def accounting(over: Mapping[str, float], late_s: float) -> Account | None:
    """What accounts for most of a lateness (seconds a step): the largest, of several that account for all the first."""
    found = [one for one in accounts(over) if late_s > 0.0 and one.took_s >= MOST_FRACTION * late_s]
    return max(found, key=lambda one: (one.counted, min(one.took_s, late_s)), default=None)
