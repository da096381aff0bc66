"""The results of checks of a host, before a job starts there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["ok", "limited", "missing", "wrong"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check: its state, the detail, and what to do ("": nothing).

    ``limited`` works, but not as well as it could; ``missing`` is not there; ``wrong`` would stop the run.
    """

    what: str
    state: State
    detail: str
    do: str = ""


@dataclass(frozen=True, slots=True)
class HostReport:
    """The checks of one host of a job.

    Attributes:
        host: its name in the job.
        name: its host name.
        number: its number in the job, if a launcher sets it.
        versions: versions that must be the same on all hosts, by program.
        ahead_s: how far its clock is ahead of the first host's; known to ``margin_s``.
    """

    host: str
    name: str
    number: int | None
    checks: tuple[CheckResult, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    ahead_s: float = 0.0
    margin_s: float = 0.0
