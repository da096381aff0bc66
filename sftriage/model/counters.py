"""The kernel's counters of a rank, and what they account for of its lateness. Pure; the one table of counters.

A counter's unit is in its name: ``_s`` is seconds (in files nanoseconds), all others are counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

SystemCode = Literal["cgroup_throttled", "stopped", "page_faults", "memory_pressure", "descheduled"]
"""Causes of lateness that no line of the rank's program has to do with."""

AccountCode = SystemCode | Literal["disk", "network", "gpu_throttled"]
"""These, and what a line of the program waits for or does, or what makes operators slow."""

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
"""Counters of the training thread: time on a CPU and in the run queue; involuntary and voluntary context switches; page
faults; time in the kernel; time waiting for a disk; bytes read from disks and written to them."""

OF_PROCESS: Final = ("throttled_s", "stopped_s", "memory_s", "io_s", "retransmitted")
"""Counters of the process: time throttled by its cgroup's CPU limit; time stopped (state T); time in which some thread
of its cgroup, or else of its host, waited for memory and for disks (pressure stall information); TCP segments
retransmitted in its network namespace."""

SHARED: Final = frozenset({"memory_s", "io_s", "retransmitted"})
"""Counters that ranks of one host may share, and that are read less often: a rank has more of one than its peers only
from twice as much on."""

COUNTERS: Final = (*OF_THREAD, *OF_PROCESS)
PLACE: Final[Mapping[str, int]] = {name: place for place, name in enumerate(COUNTERS)}

UNITS: Final = tuple(1e-9 if name.endswith("_s") else 1.0 for name in COUNTERS)
"""The factor from a counter as it is stored to its unit."""

MOST_FRACTION = 0.5
"""Fraction of a lateness from which something is its cause."""

MAJOR_FAULTS = 1.0
"""Major faults a step below which time waiting for disks is not paging."""

FAULT_S = 20e-6
"""The longest time in the kernel that a minor fault takes, in a virtual machine under load; one in a mapped file, which
brings sixteen pages in, takes 10 us."""

RETRANSMISSION_S = 0.2
"""The least timeout before a TCP segment is retransmitted, without duplicate acknowledgements (RFC 6298)."""


@dataclass(frozen=True, slots=True)
class Account:
    """One thing that the system did to a rank.

    Attributes:
        took_s: seconds a step.
        counted: whether a counter says so, rather than an inference.
        alone: ``code``, if no line of the program is involved and no profiler of the rank would show more.
    """

    code: AccountCode
    took_s: float
    counted: bool = True
    alone: SystemCode | None = None

    @property
    def of_rank(self) -> bool:
        """Whether it concerns the whole rank, whatever line or operator it is at."""
        return self.alone is not None or self.code == "gpu_throttled"


def accounts(over: Mapping[str, float]) -> Iterator[Account]:
    """All that the system did to a rank.

    Args:
        over: for each known counter, by how much the rank has more of it than its peers, a step.
    """
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
    # (from a capture: no kernel counts it)
    yield Account("gpu_throttled", over.get("gpu_s", 0.0), counted=False)
    yield Account("network", over.get("retransmitted", 0.0) * RETRANSMISSION_S, counted=False)


def runs_for_faults(over: Mapping[str, float]) -> bool:
    """Whether most of the CPU time that a rank has over its peers was spent on minor page faults."""
    system_s = over.get("system_s", 0.0)
    return _faults(over) and system_s > 0.0 and system_s >= MOST_FRACTION * over.get("run_s", 0.0)


def _faults(over: Mapping[str, float]) -> bool:
    return 0.0 <= over.get("system_s", -1.0) <= over.get("minor_faults", 0.0) * FAULT_S


def _alone(code: SystemCode, took_s: float, *, counted: bool = True) -> Account:
    return Account(code, took_s, counted, alone=code)


def accounting(over: Mapping[str, float], late_s: float) -> Account | None:
    """What accounts for most of a lateness (seconds a step): the largest, or the first of those that explain all."""
    found = [one for one in accounts(over) if min(late_s, one.took_s) > 0.0 and one.took_s >= MOST_FRACTION * late_s]
    return max(found, key=lambda one: (one.counted, min(one.took_s, late_s)), default=None)
