"""What a controller needs of the agents of its job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sftriage.mitigate.switch_state import Setting, SwitchStatus
from sftriage.model.captures import Report, WantedCapture
from sftriage.model.windows import GpuFindings, JobStatus
from sftriage.windows.shipped import ReadCounts, Rows


class Fleet(Protocol):
    """The agents of a job. What crosses are records; times are ages, or nanoseconds since the epoch."""

    def rows(self) -> Sequence[Rows]:
        """Steps that were not told before."""

    def statuses(self) -> JobStatus | None:
        """What each rank of the newest generation is doing now; None before there is one."""

    def want(self, wanted: Sequence[WantedCapture]) -> None:
        """All captures that are wanted now: what is new is begun, what is there no more is called off."""

    def switches(self) -> Sequence[SwitchStatus]:
        """The groups of ranks that a remedy can be switched on, as they stand."""

    def switch(self, wanted: Mapping[str, Setting]) -> None:
        """What is to be in force in each group, by its name; told again, nothing happens again."""

    def reports(self) -> Sequence[Report]:
        """What became of captures since the last call."""

    def telemetry(self) -> ReadCounts:
        """What has come in so far."""

    def gpus(self, ranks: Sequence[int]) -> GpuFindings | None:
        """What drivers say of these ranks' GPUs; None as long as they are being asked: call again."""

    def settled(self, agent: str, position: int) -> None:
        """What came of an agent's rows up to this position is on record: they need not be sent again."""

    def close(self) -> None:
        """Let go of the agents; what has not ended is called off."""
