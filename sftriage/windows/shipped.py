"""What crosses from the agents of a job to whoever puts windows together: steps in columns, and whose they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sftriage.model.windows import StageSchema
from sftriage.windows.decoding import StepArrays


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where a rank is, and what role it has."""

    host: str
    cohort: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """New steps of some ranks of one agent; without steps, that the ranks are there.

    Attributes:
        generation: which start of the job the ranks are of.
        schema: the stages of every rank.
        world_size: how many ranks the job says it has.
        ranks: where each of the agent's ranks is.
        steps: by the clocks of the hosts.
        device_steps: the same steps, or earlier ones, by the clocks of the devices; None where none of the ranks runs
            on a device that its host does not wait for.
        device_over: the ranks that will have no device times any more.
        away: silent ranks, which windows do not wait for until they report again.
        wall_ns: what is to be added to the times of these steps to have nanoseconds since the epoch.
        agent: whose stream of rows they are of.
        position: where that stream has got to with these.
    """

    generation: int
    schema: StageSchema
    world_size: int
    ranks: Mapping[int, RankLocation]
    steps: StepArrays
    device_steps: StepArrays | None = None
    device_over: tuple[int, ...] = ()
    away: tuple[int, ...] = ()
    wall_ns: int = 0
    agent: str = ""
    position: int = 0


@dataclass(slots=True)
class ReadCounts:
    """What has come in so far, and what has not."""

    steps: int = 0
    missed: int = 0
    torn: int = 0
    problems: dict[str, str] = field(default_factory=dict)
