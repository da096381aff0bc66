"""The hosts of a job, by what their agents have sent, and which ranks belong together: a generation.

The controller counts the job's starts by the processes of its ranks, since no host does. Under torchrun only the node
that failed counts a restart, and one that is replaced counts from 0. But a rank that starts again is another process,
and in a job that exchanges gradients all ranks start again with it:

- in a generation, rank numbers are unique, the world size is the same, and a host's ranks belong to one start there;
- no rank ends its first step before all ranks have begun, so a rank that begins later belongs to a later generation.

Where that leaves a choice, for example when a host reports late, a process belongs to the generation whose ranks began
when it did. All times are on the hub's clock, so the order in which hosts report does not matter.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import msgspec
import numpy as np

from sftriage.base.loops import LogOnce
from sftriage.fleet.incoming import AgentMessage
from sftriage.fleet.wire import Incarnation, Shipment
from sftriage.mitigate.switching import UNLIKE, Setting, SwitchStatus, whole_groups
from sftriage.model.windows import JobStatus, ReadCounts
from sftriage.trainer.layout import RingInfo
from sftriage.windows.rings import Rows, joined_statuses
from sftriage.words.verdicts import counted

log = logging.getLogger("sftriage")

KEPT_GENERATIONS = 8
GOES_ON_S = 10.0  # a rank that takes steps later than that after a generation began is of it
MARGIN_S = 5.0  # how far hosts may be wrong about when something was on the hub's clock


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A process of a generation, of the ``start``-th start on its host, that began at ``began_s``.

    One that has ``moved`` was of an earlier generation before, and has begun long ago.
    """

    one: Incarnation
    generation: int
    host: str
    start: int
    world_size: int
    began_s: float
    moved: bool = False


@dataclass(slots=True)
class _Generation:
    """The members of a generation by rank, when the first and the last of them began, and when one ended a step."""

    world_size: int
    first_s: float = inf
    last_s: float = -inf
    stepped_s: float = inf
    members: dict[int, Member] = field(default_factory=dict)

    def add(self, member: Member) -> None:
        self.members[member.one.rank] = member
        if not member.moved:
            self.first_s, self.last_s = min(self.first_s, member.began_s), max(self.last_s, member.began_s)

    def apart_s(self, began_s: float) -> float:
        return max(self.first_s - began_s, began_s - self.last_s, 0.0)


class Known(msgspec.Struct, frozen=True):
    """What is to be known again by a controller that takes over; ``stepped_s`` is when generations ended a step."""

    newest: int = -1
    opened_s: float = 0.0
    members: tuple[Member, ...] = ()
    stepped_s: dict[int, float] = {}


NOTHING_KNOWN = Known()


class Generations:
    """The generations of a job, up to the ``newest`` (-1: none yet), and how many ``changes`` there were.

    Times are seconds on the hub's clock.
    """

    def __init__(self, known: Known = NOTHING_KNOWN) -> None:
        self.newest, self._opened_s, self.changes = known.newest, known.opened_s, 0
        self._of: dict[Incarnation, Member] = {}
        self._generations: dict[int, _Generation] = {}
        # Of each host, the generations of its starts.
        self._starts: dict[str, dict[int, int]] = {}
        self._log_once = LogOnce(log)
        for member in known.members:
            self._generations.setdefault(member.generation, _Generation(member.world_size))
            self._join(member)
        for generation, stepped_s in known.stepped_s.items():
            if generation in self._generations:
                self._generations[generation].stepped_s = stepped_s

    @property
    def known(self) -> Known:
        stepped_s = {number: one.stepped_s for number, one in self._generations.items() if one.stepped_s < inf}
        return Known(self.newest, self._opened_s, tuple(self._of.values()), stepped_s)

    def of(self, one: Incarnation) -> int | None:
        """The generation of a process; None where it is not known any more, or was never seen."""
        member = self._of.get(one)
        return None if member is None else member.generation

    def goes_on(self, generation: int) -> bool:
        """Whether a generation is the newest one, and takes steps: its ranks have nothing new to say."""
        return generation == self.newest and self._generations[generation].stepped_s < inf

    def take(self, host: str, ahead_s: float, infos: Mapping[int, RingInfo], ones: Mapping[int, Incarnation]) -> bool:
        """Note the ranks of one start of a host, older starts first; return whether anything is new.

        A ``host`` is AGENT:RINGS, which has one count of starts; the hub's clock is ``ahead_s`` of its monotonic one.
        """
        new = [rank for rank, one in ones.items() if one not in self._of]
        new.sort(key=lambda rank: infos[rank].started_mono_ns)
        changed = sum([self._place(host, ahead_s, infos[rank], ones[rank]) for rank in new])
        self.changes += changed
        return changed > 0

    def stepped(self, ones: Iterable[Incarnation], ended_s: Callable[[], tuple[float, float]]) -> bool:
        """Note that processes took steps; return whether anything is new.

        ``ended_s`` gives when the first step ended (infinite where ranks do not wait for each other), and the last.
        """
        changed = False
        for one in ones:
            member = self._of.get(one)
            if member is None:
                continue
            generation = self._generations[member.generation]
            if generation.stepped_s == inf and not member.moved:
                generation.stepped_s = ended_s()[0]
                changed |= generation.stepped_s < inf
            if member.generation < self.newest and ended_s()[1] > self._opened_s + GOES_ON_S:
                changed |= self._moved(member)
        self.changes += changed
        return changed

    def _moved(self, member: Member) -> bool:
        """Count a rank that still takes steps, long after others restarted, as one of the newest generation."""
        newest = self._generations[self.newest]
        other = newest.members.get(member.one.rank)
        if other is not None:
            hosts = member.host.partition(":")[0], other.host.partition(":")[0]
            if hosts[0] != hosts[1]:
                self._log_once(
                    "hosts %s and %s both have a rank %d that takes steps; the newer one counts. Do two jobs"
                    " share one --job-id, or do launchers not know of each other?",
                    *(*hosts, member.one.rank),
                    key=hosts,
                )
            return False
        if member.world_size != newest.world_size:
            return False
        del self._generations[member.generation].members[member.one.rank]
        self._join(msgspec.structs.replace(member, generation=self.newest, moved=True))
        return True

    def _place(self, host: str, ahead_s: float, info: RingInfo, one: Incarnation) -> bool:
        """Have an unknown process join its generation; whether it has one."""
        began_s = info.started_mono_ns / 1e9 + ahead_s
        new = Member(one, self.newest, host, info.attempt, info.world_size, began_s)
        fitting = [number for number in sorted(self._generations, reverse=True) if self._fits(new, number)]
        if fitting:
            nearest = min(fitting, key=lambda number: self._generations[number].apart_s(began_s))
            new = msgspec.structs.replace(new, generation=nearest)
        elif self.newest < 0 or self._is_later(new):
            self._open(new)
            new = msgspec.structs.replace(new, generation=self.newest)
        else:
            return False
        self._join(new)
        return True

    def _fits(self, new: Member, number: int) -> bool:
        generation, before = self._generations[number], self._generations.get(number - 1)
        if new.one.rank in generation.members or new.world_size != generation.world_size:
            return False
        starts = self._starts.get(new.host, {})
        if any(_sign(start - new.start) != _sign(of - number) for start, of in starts.items()):
            return False
        if before is not None and before.stepped_s < inf and new.began_s < before.stepped_s - MARGIN_S:
            return False
        return new.began_s <= generation.stepped_s + MARGIN_S

    def _is_later(self, new: Member) -> bool:
        """Whether a process began after all of the newest generation.

        No process takes another host's rank while its own start is of that generation: what claims to is refused.
        """
        newest = self._generations[self.newest]
        if new.one.rank in newest.members and self._starts.get(new.host, {}).get(new.start) == self.newest:
            return False
        return new.began_s > newest.last_s

    def _open(self, first: Member) -> None:
        self.newest, self._opened_s = self.newest + 1, first.began_s
        self._generations[self.newest] = _Generation(first.world_size)
        for old in [number for number in self._generations if number <= self.newest - KEPT_GENERATIONS]:
            for member in self._generations.pop(old).members.values():
                del self._of[member.one]
        for host, starts in list(self._starts.items()):
            self._starts[host] = {start: of for start, of in starts.items() if of in self._generations}

    def _join(self, member: Member) -> None:
        self._of[member.one] = member
        self._generations[member.generation].add(member)
        if not member.moved:
            self._starts.setdefault(member.host, {})[member.start] = member.generation


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


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

    generations: Generations  # of its job
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
    newest: Rows | None = None
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
        if shipment.rows or shipment.status is not None:
            self.counts = shipment.counts
        if shipment.status is not None:
            self.status, self.status_s = shipment.status, at_s
            left_R = (shipment.status.closed_R != 0) | (shipment.status.alive_R == 0)
            self._left = tuple(shipment.status.rank_R[left_R].tolist())

    def take(self, agent: str, rows: Rows) -> Sequence[Members]:
        """Note the ranks of some rows, older starts first; those that are of a generation."""
        generation, infos, generations = rows.generation, rows.ranks, self.generations
        if self.newest is None or generation >= self.newest.generation:
            self.newest = rows
        was, known = self._known.get(generation, ((), ()))
        if was == (self.boot_id, generations.changes, infos):
            of_any = sum(len(some.of) for some in known) == len(infos)
            if of_any and all(generations.goes_on(some.generation) for some in known):
                return known
        ones = {rank: Incarnation.of(self.boot_id, info) for rank, info in infos.items()}
        generations.take(f"{agent}:{self.rings_id}", self.ahead_s, infos, ones)
        steps = rows.steps

        def ended_s() -> tuple[float, float]:
            ended_ns_B = steps.start_ns_B + steps.durations_ns_BS.sum(axis=1)
            first_s, last_s = (self.ahead_s + int(at_ns) / 1e9 for at_ns in (ended_ns_B.min(), ended_ns_B.max()))
            return first_s if rows.schema.sync else float("inf"), last_s

        generations.stepped([ones[rank] for rank in set(steps.rank_B.tolist())], ended_s)
        self.rings.setdefault(generation, {}).update(infos)
        for old in [one for one in self.rings if one <= self.newest.generation - KEPT_GENERATIONS]:
            del self.rings[old]
            self._known.pop(old, None)
        known = self._members(infos)
        self._known[generation] = (self.boot_id, generations.changes, infos), known
        return known

    def takes_part(self) -> bool:
        """Whether it has ranks of the newest generation, or none at all yet."""
        infos = {} if self.newest is None else self.newest.ranks
        return not infos or self.generations.newest in map(self._generation_of, infos.values())

    @property
    def n_ranks(self) -> int:
        return 0 if self.newest is None else len(self.newest.ranks)

    @property
    def ranks(self) -> set[int]:
        """Those that it has had of late."""
        return set().union(*self.rings.values())

    def away(self) -> list[int]:
        """The ranks of the newest generation that are the host's and take no more steps, as far as is known."""
        if self.newest is None or not (self.silent or (self.status is not None and (self.over or self._left))):
            return []
        infos = self.newest.ranks
        left: Iterable[int] = infos if self.silent or self.over else [rank for rank in self._left if rank in infos]
        return [rank for rank in left if self._generation_of(infos[rank]) == self.generations.newest]

    def doing(self) -> JobStatus | None:
        """What the ranks of the newest generation are doing, by the newest status; None where that has none."""
        status, generations = self.status, self.generations
        if status is None:
            return None
        rings = self.rings.get(status.attempt, {})
        key = status.attempt, len(rings), self.boot_id, generations.changes
        if self._in_newest[0] != key:
            its = {rank for rank, info in rings.items() if self._generation_of(info) == generations.newest}
            self._in_newest = key, its
        here = [rank in self._in_newest[1] for rank in status.rank_R.tolist()]
        status = status if all(here) else status.only(np.array(here))
        if status.attempt != generations.newest:
            status = replace(status, attempt=generations.newest)
        return status if any(here) else None

    def _generation_of(self, info: RingInfo) -> int | None:
        return self.generations.of(Incarnation.of(self.boot_id, info))

    def _members(self, infos: Mapping[int, RingInfo]) -> Sequence[Members]:
        found: dict[int, dict[int, RingInfo]] = {}
        for rank, info in infos.items():
            if (generation := self._generation_of(info)) is not None:
                counted = info if info.attempt == generation else replace(info, attempt=generation)
                found.setdefault(generation, {})[rank] = counted
        return [
            Members(generation, {rank: Incarnation.of(self.boot_id, info) for rank, info in its.items()}, its)
            for generation, its in found.items()
        ]

    def quiet_s(self, now_s: float, connected_s: float) -> float:
        """For how long nothing has come from it, though something could."""
        return now_s - max(self.seen_s, connected_s)


def status_of_all(hosts: Iterable[Host], now_s: float) -> JobStatus | None:
    """What the ranks of the newest generation are doing, on all hosts that agree on the stages; None without any."""
    found = [(status, host.status_s) for host in hosts if (status := host.doing()) is not None]
    return joined_statuses([status for status, _ in found], [int((now_s - at_s) * 1e9) for _, at_s in found])


SETTLE_S = 2.0  # without a change before changes are printed
AWAY_S = 5.0  # how long the hub may be away before that is printed
MAX_NAMED = 4


@dataclass(slots=True)
class RollCall:
    """What was reported about hosts and hub."""

    _said: dict[str, bool] = field(default_factory=dict)
    _seen: dict[str, bool] = field(default_factory=dict)
    _ranks: int = 0
    _changed_s: float = 0.0
    _away_s: float | None = None
    _said_away: bool = False

    def look(self, hosts: Mapping[str, Host], away: str, now_s: float) -> list[str]:
        """The lines that are due; ``away`` is why the hub cannot be reached, "" while it can."""
        lines = self._of_hub(away, now_s)
        if away:
            return lines
        # (a host that has left is silent, which is no news)
        seen = {name: one.silent for name, one in sorted(hosts.items()) if not one.over and (one.n_ranks or one.silent)}
        ranks = sum(one.n_ranks for one in hosts.values())
        if (seen, ranks) != (self._seen, self._ranks):
            self._seen, self._ranks, self._changed_s = seen, ranks, now_s
        if now_s < self._changed_s + SETTLE_S:
            return lines
        new = [name for name in seen if name not in self._said]
        silent = [name for name in seen if seen[name] and not self._said.get(name)]
        back = [name for name in seen if not seen[name] and self._said.get(name)]
        if new:
            where = counted(len(seen), "host")
            lines.append(f"{counted(ranks, 'rank')} on {where}: {_names(list(seen))}")
        if silent:
            its = "its" if len(silent) == 1 else "their"
            lines.append(f"no data from {_names(silent)}: windows leave out {its} ranks")
        if back:
            lines.append(f"{_names(back)} {'is' if len(back) == 1 else 'are'} back")
        self._said |= seen
        return lines

    def _of_hub(self, away: str, now_s: float) -> list[str]:
        if not away:
            was_s, reported = self._away_s, self._said_away
            self._away_s, self._said_away = None, False
            if was_s is None or not reported:
                return []
            # (no host could send anything)
            self._changed_s = now_s
            return [f"the hub is back after {now_s - was_s:.0f} s; judging what was recorded meanwhile"]
        if self._away_s is None:
            self._away_s = now_s
        if self._said_away or now_s < self._away_s + AWAY_S:
            return []
        self._said_away = True
        return [f"{away} The job keeps running, and is not judged meanwhile"]


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
