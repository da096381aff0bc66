"""The hosts of a job and their groups of ranks, as a controller knows them by what their agents have sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sftriage.fleet.generations import KEPT_GENERATIONS, Generations
from sftriage.fleet.incoming import AgentMessage
from sftriage.fleet.wire import Block, Incarnation, Shipment
from sftriage.mitigate.switching import UNLIKE, Setting, SwitchStatus, whole_groups
from sftriage.model.windows import JobStatus
from sftriage.trainer.layout import RingInfo
from sftriage.windows.rings import ReadCounts, joined_statuses
from sftriage.words.amounts import counted

CLOCK_DRIFT = 1e-4  # seconds that a host's clock may go wrong in a second


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """Ranks of a host that are of one generation: their processes, and rings that have the controller's count."""

    generation: int
    of: Mapping[int, Incarnation]
    infos: Mapping[int, RingInfo]


@dataclass(slots=True)
class Host:
    """What is known of one agent: on our clock, its newest message is of ``seen_s``, and its status of ``status_s``."""

    seen_s: float = 0.0
    boot_id: str = ""
    process: str = ""
    rings_id: str = ""
    # What the hub's clock is ahead of the host's monotonic one, as of the newest message.
    ahead_s: float = float("inf")
    sent_s: float = 0.0
    status: JobStatus | None = None
    status_s: float = 0.0
    # The rings by the host's own count of starts, and the newest rows, for what they say of the ranks.
    rings: dict[int, dict[int, RingInfo]] = field(default_factory=dict)
    newest: Block | None = None
    counts: ReadCounts = field(default_factory=ReadCounts)
    over: bool = False
    silent: bool = False
    waiting: deque[AgentMessage] = field(default_factory=deque)
    # By start, the members that its rings come to, and of what: neither they nor the generations have changed since.
    _known: dict[int, tuple[tuple[object, ...], Sequence[Members]]] = field(default_factory=dict)
    # Ranks that take no more steps, by the newest status.
    _left: tuple[int, ...] = ()
    # Those of the newest generation, and what that was told by.
    _in_newest: tuple[tuple[int, int, str, int] | None, Collection[int]] = None, ()

    def heard(self, shipment: Shipment, sent_s: float, at_s: float) -> None:
        """A message has come, that was sent by the hub's clock and came by ours; what is in it beside rows."""
        if shipment.process != self.process:
            # It reads the rings again from their beginning, or others, whose starts are counted anew.
            self.newest, self.status, self._left, self.ahead_s = None, None, (), float("inf")
            self.counts = ReadCounts()
        self.seen_s, self.boot_id, self.process = at_s, shipment.boot_id, shipment.process
        self.rings_id = shipment.rings_id
        self.over, self.silent = shipment.over, False
        # (no more than the quickest message says)
        ahead_s = self.ahead_s + (sent_s - self.sent_s) * CLOCK_DRIFT
        self.ahead_s, self.sent_s = min(sent_s - shipment.mono_ns / 1e9, ahead_s), sent_s
        if shipment.blocks or shipment.status is not None:
            self.counts = shipment.counts
        if shipment.status is not None:
            self.status, self.status_s = shipment.status, at_s
            left_R = (shipment.status.closed_R != 0) | (shipment.status.alive_R == 0)
            self._left = tuple(shipment.status.rank_R[left_R].tolist())

    def take(self, agent: str, block: Block, generations: Generations) -> Sequence[Members]:
        """Note the ranks of a block of rows, older starts first; those that are of a generation."""
        generation = block.rows.generation
        if self.newest is None or generation >= self.newest.rows.generation:
            self.newest = block
        was, known = self._known.get(generation, ((), ()))
        if was == (self.boot_id, generations.changes, block.infos):
            of_any = sum(len(some.of) for some in known) == len(block.infos)
            if of_any and all(generations.goes_on(some.generation) for some in known):
                return known
        ones = {rank: Incarnation.of(self.boot_id, info) for rank, info in block.infos.items()}
        generations.take(f"{agent}:{self.rings_id}", self.ahead_s, block.infos, ones)
        steps = block.rows.steps

        def ended_s() -> tuple[float, float]:
            ended_ns_B = steps.start_ns_B + steps.durations_ns_BS.sum(axis=1)
            first_s, last_s = (self.ahead_s + int(at_ns) / 1e9 for at_ns in (ended_ns_B.min(), ended_ns_B.max()))
            return first_s if block.rows.schema.sync else float("inf"), last_s

        generations.stepped([ones[rank] for rank in set(steps.rank_B.tolist())], ended_s)
        self.rings.setdefault(generation, {}).update(block.infos)
        for old in [one for one in self.rings if one <= self.newest.rows.generation - KEPT_GENERATIONS]:
            del self.rings[old]
            self._known.pop(old, None)
        known = _members(self.boot_id, block.infos, generations)
        self._known[generation] = (self.boot_id, generations.changes, block.infos), known
        return known

    def takes_part(self, generations: Generations) -> bool:
        """Whether it has ranks of the newest generation, or none at all yet."""
        infos = {} if self.newest is None else self.newest.infos
        of = [generations.of(Incarnation.of(self.boot_id, info)) for info in infos.values()]
        return not of or generations.newest in of

    @property
    def n_ranks(self) -> int:
        return 0 if self.newest is None else len(self.newest.infos)

    @property
    def ranks(self) -> set[int]:
        """Those that it has had of late."""
        return set().union(*self.rings.values())

    def process_of(self, rank: int, generation: int, generations: Generations) -> Incarnation | None:
        """The process that is a rank of one of the controller's generations here."""
        of = (Incarnation.of(self.boot_id, infos[rank]) for infos in self.rings.values() if rank in infos)
        return next((one for one in of if generations.of(one) == generation), None)

    def away(self, generations: Generations) -> list[int]:
        """The ranks of the newest generation that are the host's and take no more steps, as far as is known."""
        if self.newest is None or not (self.silent or (self.status is not None and (self.over or self._left))):
            return []
        infos = self.newest.infos
        left: Iterable[int] = infos if self.silent or self.over else [rank for rank in self._left if rank in infos]
        of = ((rank, generations.of(Incarnation.of(self.boot_id, infos[rank]))) for rank in left)
        return [rank for rank, generation in of if generation == generations.newest]

    def doing(self, generations: Generations) -> JobStatus | None:
        """What the ranks of the newest generation are doing, by the newest status; None where that has none."""
        status = self.status
        if status is None:
            return None
        rings = self.rings.get(status.attempt, {})
        key = status.attempt, len(rings), self.boot_id, generations.changes
        if self._in_newest[0] != key:
            found = _members(self.boot_id, rings, generations)
            self._in_newest = key, {rank for one in found if one.generation == generations.newest for rank in one.of}
        here = [rank in self._in_newest[1] for rank in status.rank_R.tolist()]
        status = status if all(here) else status.only(np.array(here))
        if status.attempt != generations.newest:
            status = replace(status, attempt=generations.newest)
        return status if any(here) else None

    def quiet_s(self, now_s: float, connected_s: float) -> float:
        """For how long nothing has come from it, though something could."""
        return now_s - max(self.seen_s, connected_s)


def status_of_all(hosts: Iterable[Host], generations: Generations, now_s: float) -> JobStatus | None:
    """What the ranks of the newest generation are doing, on all hosts that agree on the stages; None without any."""
    found = [(status, host.status_s) for host in hosts if (status := host.doing(generations)) is not None]
    return joined_statuses([status for status, _ in found], [int((now_s - at_s) * 1e9) for _, at_s in found])


def _members(boot_id: str, infos: Mapping[int, RingInfo], generations: Generations) -> Sequence[Members]:
    found: dict[int, dict[int, Incarnation]] = {}
    for rank, info in infos.items():
        one = Incarnation.of(boot_id, info)
        generation = generations.of(one)
        if generation is not None:
            found.setdefault(generation, {})[rank] = one

    def counted(rank: int, generation: int) -> RingInfo:
        info = infos[rank]
        return info if info.attempt == generation else replace(info, attempt=generation)

    return [
        Members(generation, of, {rank: counted(rank, generation) for rank in of}) for generation, of in found.items()
    ]


SETTLE_S = 2.0  # without a change before changes are printed
AWAY_S = 5.0  # how long the hub may be away before that is printed
MAX_NAMED = 4


@dataclass(slots=True)
class RollCall:
    """What was said of hosts and hub."""

    _said: dict[str, bool] = field(default_factory=dict)
    _seen: dict[str, bool] = field(default_factory=dict)
    _ranks: int = 0
    _changed_s: float = 0.0
    _away_s: float | None = None
    _said_away: bool = False

    def look(self, hosts: Mapping[str, Host], away: str, now_s: float) -> list[str]:
        """The lines that are due; ``away`` is why the hub cannot be reached, "" while it can."""
        said = self._of_hub(away, now_s)
        if away:
            return said
        # (whoever has left is silent, and no news)
        seen = {name: one.silent for name, one in sorted(hosts.items()) if not one.over and (one.n_ranks or one.silent)}
        ranks = sum(one.n_ranks for one in hosts.values())
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


class Groups:
    """The groups of a job as their agents report them, and the settings wanted of each agent (``wanted``).

    An agent ``takes_part`` while its host has ranks in the job's newest start, as far as is known.
    """

    def __init__(self, takes_part: Callable[[str], bool], is_silent: Callable[[str], bool]) -> None:
        self._takes_part, self._is_silent = takes_part, is_silent
        self._reported: dict[str, tuple[SwitchStatus, ...]] = {}
        self.wanted: Mapping[str, Mapping[str, Setting]] = {}

    def heard(self, agent: str, reported: Collection[SwitchStatus], has: Collection[int]) -> None:
        """Take an agent's report of groups; what it reports of ranks that it does not have is dropped."""
        mine = frozenset(has) if reported else frozenset()
        self._reported[agent] = tuple(one for one in reported if mine.issuperset(one.ranks_here))

    def statuses(self) -> list[SwitchStatus]:
        """The groups whose ranks are all reported; those on a silent host as last reported."""
        of_now = self._of_now()
        unheard = {one.name for agent, reported in of_now.items() if self._is_silent(agent) for one in reported}
        found = whole_groups(one for reported in of_now.values() for one in reported)
        return [replace(one, request=UNLIKE) if one.name in unheard else one for one in found]

    def want(self, wanted: Mapping[str, Setting]) -> None:
        """What is to be in force in each group; it stays an order of each of its agents until all have passed it on."""
        due = {
            one.name: setting
            for one in self.statuses()
            if (setting := wanted.get(one.name)) is not None and one.next_request(setting.value) is not None
        }
        names = {agent: {one.name for one in reported} & due.keys() for agent, reported in self._of_now().items()}
        self.wanted = {agent: {name: due[name] for name in some} for agent, some in names.items() if some}

    def _of_now(self) -> Mapping[str, Sequence[SwitchStatus]]:
        """Groups by agents that take part: a host that is gone may have had one of the same name."""
        return {agent: reported for agent, reported in self._reported.items() if reported and self._takes_part(agent)}
