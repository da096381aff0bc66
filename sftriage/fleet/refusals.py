"""What agents tell that is not taken: dropped, counted, and said once of each."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from sftriage.fleet.hub import is_token

log = logging.getLogger("sftriage")

MAX_NAMED = 16
_OTHERS = "other names"


class Refusals:
    """Counts by agent. Of names that no agent has, and of more than there is room for, all count as one."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def note(self, agent: str, why: object) -> None:
        """Something of an agent is not taken."""
        if not is_token(agent) or (agent not in self._counts and len(self._counts) >= MAX_NAMED):
            agent = _OTHERS
        if agent not in self._counts:
            log.warning("a message of host %s is not taken: %s", agent, why)
        self._counts[agent] = self._counts.get(agent, 0) + 1

    def sum_up(self) -> None:
        """Say how many there were."""
        counts = [f"{number:,} messages of host {agent}" for agent, number in self._counts.items()]
        if counts:
            log.warning("not taken: %s", ", ".join(counts))

    @property
    def problems(self) -> Mapping[str, str]:
        """As what is wrong with what is read."""
        return {f"messages of {agent}": f"{number} refused" for agent, number in self._counts.items()}
