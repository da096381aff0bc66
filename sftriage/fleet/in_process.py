"""The agents of a job in the controller's own process: what crosses is what would cross a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Protocol

from sftriage.decisions import Report, WantedCapture
from sftriage.mitigate.switch_state import Setting, SwitchStatus, whole_groups
from sftriage.records import GpuFindings, JobStatus
from sftriage.windows.shipped import ReadCounts, Rows
from sftriage.windows.statuses import together


class HostAgent(Protocol):
    """One host's agent."""

    def rows(self) -> Sequence[Rows]:
        """The steps that have come since the last call."""

    def statuses(self) -> JobStatus | None:
        """What the host's ranks are doing now."""

    def want(self, wanted: Sequence[WantedCapture]) -> None:
        """All captures that are wanted of the host."""

    def switches(self) -> Sequence[SwitchStatus]:
        """The host's groups of ranks that a remedy can be switched on, as they stand."""

    def switch(self, wanted: Mapping[str, Setting]) -> None:
        """What is to be in force in each of them."""

    def reports(self) -> Sequence[Report]:
        """What there is to say of captures since the last call."""

    def gpus(self, ranks: Sequence[int]) -> GpuFindings | None:
        """What the driver says of the GPUs of those of these ranks that are the host's; None while it is asked."""

    @property
    def telemetry(self) -> ReadCounts:
        """What has come in so far."""

    def close(self) -> None:
        """Close every file, and end what has not ended."""


class InProcess:
    """A fleet whose agents are called, one after the other.

    Args:
        agents: one a host.
    """

    def __init__(self, agents: Sequence[HostAgent]) -> None:
        self._agents = tuple(agents)
        self._asked: dict[str, int] = {}

    def rows(self) -> Sequence[Rows]:
        """See `controller.needs.Fleet`."""
        return [rows for agent in self._agents for rows in agent.rows()]

    def statuses(self) -> JobStatus | None:
        """See `controller.needs.Fleet`: the ranks of the newest generation, of all hosts that agree on the stages."""
        told = [status for agent in self._agents if (status := agent.statuses()) is not None]
        told.sort(key=attrgetter("attempt"), reverse=True)
        return together(told, [0] * len(told))

    def want(self, wanted: Sequence[WantedCapture]) -> None:
        """See `controller.needs.Fleet`. What is asked of one agent stays with it, or it would be called off."""
        told = [agent.statuses() for agent in self._agents] if len(self._agents) > 1 else []
        self._asked = {
            one.request.capture_id: self._asked.get(one.request.capture_id, _agent_of(one.request.rank, told))
            for one in wanted
        }
        for number, agent in enumerate(self._agents):
            agent.want([one for one in wanted if self._asked[one.request.capture_id] == number])

    def switches(self) -> Sequence[SwitchStatus]:
        """See `controller.needs.Fleet`."""
        return whole_groups(status for agent in self._agents for status in agent.switches())

    def switch(self, wanted: Mapping[str, Setting]) -> None:
        """See `controller.needs.Fleet`."""
        for agent in self._agents:
            agent.switch(wanted)

    def reports(self) -> Sequence[Report]:
        """See `controller.needs.Fleet`."""
        return [report for agent in self._agents for report in agent.reports()]

    def telemetry(self) -> ReadCounts:
        """See `controller.needs.Fleet`."""
        told = [agent.telemetry for agent in self._agents]
        return ReadCounts(
            sum(one.steps for one in told),
            sum(one.missed for one in told),
            sum(one.torn for one in told),
            {path: problem for one in told for path, problem in one.problems.items()},
        )

    def gpus(self, ranks: Sequence[int]) -> GpuFindings | None:
        """See `controller.needs.Fleet`."""
        told = [found for agent in self._agents if (found := agent.gpus(ranks)) is not None]
        return of_all(told) if len(told) == len(self._agents) else None

    def settled(self, agent: str, position: int) -> None:
        """See `controller.needs.Fleet`: agents of this process send nothing twice."""

    def close(self) -> None:
        """See `controller.needs.Fleet`."""
        for agent in self._agents:
            agent.close()


def of_all(told: Sequence[GpuFindings]) -> GpuFindings:
    """What the drivers of several hosts say, as one."""
    return GpuFindings(
        min(one.time_s for one in told),
        tuple(remark for one in told for remark in one.remarks),
        {rank: gpu for one in told for rank, gpu in one.gpus.items()},
        "; ".join(dict.fromkeys(one.problem for one in told if one.problem)),
    )


def _agent_of(rank: int, told: Sequence[JobStatus | None]) -> int:
    """The agent that has a rank, of its newest generation; the first one, which will say so, where none has."""
    having = [n for n, one in enumerate(told) if one is not None and rank in one.rank_R]
    return max(having, key=lambda n: one.attempt if (one := told[n]) is not None else 0, default=0)
