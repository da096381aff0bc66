"""What agents and the controller of a job tell each other; `sftriage.fleet.wire` has it as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sftriage.mitigate.switch_state import Setting, SwitchStatus
from sftriage.model.captures import Report, WantedCapture
from sftriage.model.windows import JobStatus
from sftriage.recorder.layout import RingInfo
from sftriage.windows.shipped import ReadCounts, Rows

MAX_SECONDS = 1e12
"""Every time that is told is below."""


class Incarnation(NamedTuple):
    """One process of one rank: no other one, of whatever host and start of the job, is the same."""

    boot_id: str
    pid: int
    start_ticks: int
    rank: int

    @classmethod
    def of(cls, boot_id: str, info: RingInfo) -> Incarnation:
        """That of the process that writes a ring."""
        return cls(boot_id, info.pid, info.pid_start_ticks, info.rank)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows of the ranks of one host's own count of starts, and the rings that these ranks write."""

    infos: Mapping[int, RingInfo]
    rows: Rows


@dataclass(frozen=True, slots=True, eq=False)
class Shipment:
    """What an agent tells. Without anything in it, that it is there.

    Attributes:
        agent: who.
        boot_id: of its host.
        process: of the agent itself: another one after each start of it.
        blocks: rows by the host's own count of starts.
        status: what its ranks are doing now, by that count; None where that was not looked at.
        counts: what this process has read so far.
        reports: what has become of captures.
        over: the host's part of the job has ended, and this is the last there is to tell.
        mono_ns: what the host's monotonic clock shows as the message is sent.
        rings_id: which rings it reads: by others of the same host, starts are counted anew.
        switches: how the groups stand that a remedy can be switched on; None where that was not looked at.
    """

    agent: str
    boot_id: str
    process: str
    blocks: tuple[Block, ...] = ()
    status: JobStatus | None = None
    counts: ReadCounts = field(default_factory=ReadCounts)
    reports: tuple[Report, ...] = ()
    over: bool = False
    mono_ns: int = 0
    rings_id: str = ""
    switches: tuple[SwitchStatus, ...] | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """A capture that is wanted, of this process of its rank; of whichever there is, where it is None.

    That it is stored may have been ``heard``, and need not be told again.
    """

    wanted: WantedCapture
    of: Incarnation | None = None
    heard: bool = False


@dataclass(frozen=True, slots=True)
class RunName:
    """What a run and its job are called where captures are kept, and the URL of the store that copies of them go to."""

    job: str = ""
    run_id: str = ""
    store: str = ""


NO_NAME = RunName()


@dataclass(frozen=True, slots=True)
class Orders:
    """All that is wanted of one ``agent`` now, and for which run; and, by their names, of groups of its ranks.

    Of two, the one with the higher ``epoch`` is the newer controller's.
    """

    epoch: int
    captures: tuple[Order, ...] = ()
    agent: str = ""
    run: RunName = NO_NAME
    switches: Mapping[str, Setting] = field(default_factory=dict)
