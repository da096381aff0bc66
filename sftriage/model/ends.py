"""How the ranks of a job ended, as far as each host knows: frozen records, also of the messages between hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sftriage.model.events import Place
from sftriage.model.hangs import Call, GroupCalls


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank of an attempt ended, as far as known.

    Attributes:
        time_s: when that was noticed first, since the epoch; None if it was not. ``margin_s``: the error of that time,
            beside those of other hosts.
        step, stage: see `Departure`; ``sync``: ranks wait for one another in that stage.
        alive: its process is still there. ``silent``: its host has not reported how it ended.
        status: its exit status, negative for a signal; None if unknown. ``sent``: its parent had sent it a signal.
        error, message, chain: its uncaught exception, and those before it.
        workers: the exit statuses of DataLoader workers, by process.
        out_of_memory, limit_bytes: see `Departure`, of the rank or of the worker whose end its exception reports.
        calls, groups: its latest calls of collectives, see `RankEvidence`; empty unless an exchange failed.
    """

    rank: int
    pid: int = 0
    host: str = ""
    time_s: float | None = None
    step: int = -1
    stage: str | None = None
    sync: bool = False
    alive: bool = False
    status: int | None = None
    sent: bool = False
    error: str = ""
    message: str = ""
    chain: tuple[str, ...] = ()
    place: Place | None = None
    workers: Mapping[int, int] = field(default_factory=dict)
    attempt: int = 0
    margin_s: float = 0.0
    silent: bool = False
    out_of_memory: Literal["", "cgroup", "kernel_log"] = ""
    limit_bytes: int | None = None
    calls: tuple[Call, ...] = ()
    groups: tuple[GroupCalls, ...] = ()


@dataclass(frozen=True, slots=True)
class HostEnds:
    """How a job ended on one host: its ``ranks``, of all attempts.

    ``status`` is the exit status of the launcher; None if unknown. ``signalled_s``: when that got the first signal that
    ends the job. Times are ``ahead_s`` ahead of the host's monotonic clock; the hub's clock is known to ``margin_s``.
    """

    ranks: tuple[RankEnd, ...] = ()
    world_size: int = 1
    status: int | None = None
    signalled_s: float | None = None
    ahead_s: float = 0.0
    margin_s: float = 0.0
