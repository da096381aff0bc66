"""Which hosts of a job are there, as a person is told of it: one line for all that comes or goes together. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sftriage.words.amounts import counted

SETTLE_S = 2.0
"""For how long nothing has to change before what has changed is said."""
AWAY_S = 5.0
"""For how long the hub may be away before that is said."""
MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class HostLook:
    """One host: how many ranks it has, whether it is silent, and whether its part of the job is over."""

    ranks: int
    silent: bool = False
    over: bool = False


@dataclass(slots=True)
class RollCall:
    """What was said of hosts and hub."""

    _said: dict[str, bool] = field(default_factory=dict)
    _seen: dict[str, bool] = field(default_factory=dict)
    _ranks: int = 0
    _changed_s: float = 0.0
    _away_s: float | None = None
    _said_away: bool = False

    def look(self, hosts: Mapping[str, HostLook], away: str, now_s: float) -> list[str]:
        """The lines that are due; ``away`` is why the hub cannot be reached, "" while it can."""
        said = self._of_hub(away, now_s)
        if away:
            return said
        # (whoever has left is silent, and no news)
        seen = {name: one.silent for name, one in sorted(hosts.items()) if not one.over and (one.ranks or one.silent)}
        ranks = sum(one.ranks for one in hosts.values())
        if (seen, ranks) != (self._seen, self._ranks):
            self._seen, self._ranks, self._changed_s = seen, ranks, now_s
        if now_s < self._changed_s + SETTLE_S:
            return said
        new = [name for name in seen if name not in self._said]
        silent = [name for name in seen if seen[name] and not self._said.get(name)]
        back = [name for name in seen if not seen[name] and self._said.get(name)]
        if new:
            where = counted(len(seen), "host")
            said.append(f"{counted(ranks, 'rank')} on {where}: {_names(list(seen))}")
        if silent:
            its = "its" if len(silent) == 1 else "their"
            said.append(f"nothing is heard of {_names(silent)}: windows go out without {its} ranks")
        if back:
            said.append(f"{_names(back)} {'is' if len(back) == 1 else 'are'} back")
        self._said |= seen
        return said

    def _of_hub(self, away: str, now_s: float) -> list[str]:
        if not away:
            was_s, said = self._away_s, self._said_away
            self._away_s, self._said_away = None, False
            if was_s is None or not said:
                return []
            # (nobody could be heard of)
            self._changed_s = now_s
            return [f"the hub is back after {now_s - was_s:.0f} s; what was recorded meanwhile is judged now"]
        if self._away_s is None:
            self._away_s = now_s
        if self._said_away or now_s < self._away_s + AWAY_S:
            return []
        self._said_away = True
        return [f"{away} The job goes on, and nobody is judged meanwhile"]


def _names(names: Sequence[str]) -> str:
    shown = [*names[:MAX_NAMED]]
    if more := len(names) - len(shown):
        shown.append(f"{more:,} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
