"""The state of a job's hosts, from their agents' messages, and the generations of its ranks. `NatsFleet` keeps both.

A generation is one start of the job. The controller counts generations by the processes of the ranks, since no host
counts them reliably: under torchrun only the node that failed counts a restart, and a replacement counts from 0. But a
restarted rank is a new process, and in a job that exchanges gradients all ranks restart with it:

- in a generation, rank numbers are unique, the world size is the same, and a host's ranks belong to one start there;
- no rank ends its first step before all ranks have begun, so a rank that begins later belongs to a later generation.

If that leaves a choice, for example because a host reports late, a process belongs to the generation whose ranks began
at the same time. All times are on the hub's clock, so the order in which hosts report does not matter.
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
from sftriage.model.ends import HostEnds, RankEnd
from sftriage.model.windows import JobStatus, RankStatus, ReadCounts
from sftriage.trainer.layout import RingInfo
from sftriage.windows.rings import Rows, joined_statuses
from sftriage.words.verdicts import counted

log = logging.getLogger("sftriage")

KEPT_GENERATIONS = 8
GOES_ON_S = 10.0  # a rank that still takes steps this long after a generation began belongs to it
MARGIN_S = 5.0  # maximum error of a host's times on the hub's clock


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A process of a generation, from start number ``start`` of its host, that began at ``began_s``.

    A member that has ``moved`` began in an earlier generation.
    """

    process: Incarnation
    generation: int
    host: str
    start: int
    world_size: int
    began_s: float
    moved: bool = False


@dataclass(slots=True)
class _Generation:
    """The members of a generation by rank, when the first and last of them began, and when the first step ended."""

    world_size: int
    first_s: float = inf
    last_s: float = -inf
    stepped_s: float = inf
    members: dict[int, Member] = field(default_factory=dict)

    def add(self, member: Member) -> None:
        self.members[member.process.rank] = member
        if not member.moved:
            self.first_s, self.last_s = min(self.first_s, member.began_s), max(self.last_s, member.began_s)

    def apart_s(self, began_s: float) -> float:
        return max(self.first_s - began_s, began_s - self.last_s, 0.0)


class Known(msgspec.Struct, frozen=True):
    """The saved state, for a controller that takes over; ``stepped_s`` is when generations ended their first step."""

    newest: int = -1
    opened_s: float = 0.0
    members: tuple[Member, ...] = ()
    stepped_s: dict[int, float] = {}


NOTHING_KNOWN = Known()


class Generations:
    """The generations of a job, up to the ``newest`` (-1: none yet), and the number of ``changes`` to them.

    Times are seconds on the hub's clock.
    """

    def __init__(self, known: Known = NOTHING_KNOWN) -> None:
        self.newest, self._opened_s, self.changes = known.newest, known.opened_s, 0
        self._of: dict[Incarnation, Member] = {}
        self._generations: dict[int, _Generation] = {}
        # By host, the generations of its starts.
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
        stepped_s = {
            number: generation.stepped_s
            for number, generation in self._generations.items()
            if generation.stepped_s < inf
        }
        return Known(self.newest, self._opened_s, tuple(self._of.values()), stepped_s)

    def of(self, process: Incarnation) -> int | None:
        """The generation of a process; None if it is unknown, or no longer known."""
        member = self._of.get(process)
        return None if member is None else member.generation

    def goes_on(self, generation: int) -> bool:
        """Whether a generation is the newest one and takes steps, so that its known ranks change nothing."""
        return generation == self.newest and self._generations[generation].stepped_s < inf

    def take(self, host: str, ahead_s: float, infos: Mapping[int, RingInfo], of: Mapping[int, Incarnation]) -> bool:
        """Note the ranks of one start of a host, older starts first; return whether anything is new.

        A ``host`` is AGENT:RINGS, which has one count of starts. Its monotonic clock is ``ahead_s`` behind the hub's.
        """
        new = [rank for rank, process in of.items() if process not in self._of]
        new.sort(key=lambda rank: infos[rank].started_mono_ns)
        changed = sum([self._place(host, ahead_s, infos[rank], of[rank]) for rank in new])
        self.changes += changed
        return changed > 0

    def stepped(self, processes: Iterable[Incarnation], ended_s: Callable[[], tuple[float, float]]) -> bool:
        """Note that processes took steps; return whether anything is new.

        ``ended_s`` returns when the first (infinite if ranks do not wait for each other) and the last step ended.
        """
        changed = False
        for process in processes:
            member = self._of.get(process)
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
        other = newest.members.get(member.process.rank)
        if other is not None:
            hosts = member.host.partition(":")[0], other.host.partition(":")[0]
            if hosts[0] != hosts[1]:
                self._log_once(
                    "hosts %s and %s both have a rank %d that takes steps; the newer one counts. Do two jobs"
                    " share one --job-id, or do launchers not know of each other?",
                    *(*hosts, member.process.rank),
                    key=hosts,
                )
            return False
        if member.world_size != newest.world_size:
            return False
        del self._generations[member.generation].members[member.process.rank]
        self._join(msgspec.structs.replace(member, generation=self.newest, moved=True))
        return True

    def _place(self, host: str, ahead_s: float, info: RingInfo, process: Incarnation) -> bool:
        """Add an unknown process to its generation; return whether it has one."""
        began_s = info.started_mono_ns / 1e9 + ahead_s
        new = Member(process, self.newest, host, info.attempt, info.world_size, began_s)
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
        if new.process.rank in generation.members or new.world_size != generation.world_size:
            return False
        starts = self._starts.get(new.host, {})
        if any(_sign(start - new.start) != _sign(of - number) for start, of in starts.items()):
            return False
        if before is not None and before.stepped_s < inf and new.began_s < before.stepped_s - MARGIN_S:
            return False
        return new.began_s <= generation.stepped_s + MARGIN_S

    def _is_later(self, new: Member) -> bool:
        """Whether a process began after all of the newest generation, and not as a second one of its rank there."""
        newest = self._generations[self.newest]
        if new.process.rank in newest.members and self._starts.get(new.host, {}).get(new.start) == self.newest:
            return False
        return new.began_s > newest.last_s

    def _open(self, first: Member) -> None:
        self.newest, self._opened_s = self.newest + 1, first.began_s
        self._generations[self.newest] = _Generation(first.world_size)
        for old in [number for number in self._generations if number <= self.newest - KEPT_GENERATIONS]:
            for member in self._generations.pop(old).members.values():
                del self._of[member.process]
        for host, starts in list(self._starts.items()):
            self._starts[host] = {start: of for start, of in starts.items() if of in self._generations}

    def _join(self, member: Member) -> None:
        self._of[member.process] = member
        self._generations[member.generation].add(member)
        if not member.moved:
            self._starts.setdefault(member.host, {})[member.start] = member.generation


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


CLOCK_DRIFT = 1e-4  # maximum drift of a host's clock, in seconds per second


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """A host's ranks of one generation: their processes, and their rings with the controller's count of starts."""

    generation: int
    of: Mapping[int, Incarnation]
    infos: Mapping[int, RingInfo]


@dataclass(slots=True)
class Host:
    """The state of one agent; its newest message came at ``heard_s``, and its status at ``status_s``, on our clock."""

    generations: Generations  # of its job
    heard_s: float = 0.0
    boot_id: str = ""
    process: str = ""
    rings_id: str = ""
    # How far the hub's clock is ahead of the host's monotonic one, by the newest message.
    ahead_s: float = float("inf")
    sent_s: float = 0.0
    status: JobStatus | None = None
    status_s: float = 0.0
    # The rings by the host's own count of starts; and the newest rows, for their ranks.
    rings: dict[int, dict[int, RingInfo]] = field(default_factory=dict)
    newest: Rows | None = None
    counts: ReadCounts = field(default_factory=ReadCounts)
    over: bool = False
    ends: HostEnds | None = None
    silent: bool = False
    waiting: deque[AgentMessage] = field(default_factory=deque)
    # Cache, by start: the members among its rings, and the state on which they depend.
    _known: dict[int, tuple[tuple[object, ...], Sequence[Members]]] = field(default_factory=dict)
    # Ranks that take no more steps, by the newest status.
    _left: tuple[int, ...] = ()
    # Cache: the ranks of the newest generation, and the state on which they depend.
    _in_newest: tuple[tuple[int, int, str, int] | None, Collection[int]] = None, ()

    def heard(self, shipment: Shipment, sent_s: float, at_s: float) -> None:
        """Take all of a message but its rows; it was sent at ``sent_s`` on the hub's clock, and came at ``at_s``."""
        if shipment.process != self.process:
            # The agent restarted: it reads the rings again, or other rings, whose starts count anew.
            self.newest, self.status, self.ends, self._left, self.ahead_s = None, None, None, (), float("inf")
            self.counts = ReadCounts()
        self.heard_s, self.boot_id, self.process = at_s, shipment.boot_id, shipment.process
        self.rings_id = shipment.rings_id
        self.over, self.ends, self.silent = shipment.over, shipment.ends or self.ends, False
        # (the fastest message gives the best bound)
        ahead_s = self.ahead_s + (sent_s - self.sent_s) * CLOCK_DRIFT
        self.ahead_s, self.sent_s = min(sent_s - shipment.mono_ns / 1e9, ahead_s), sent_s
        if shipment.rows or shipment.status is not None:
            self.counts = shipment.counts
        if shipment.status is not None:
            self.status, self.status_s = shipment.status, at_s
            left_R = (shipment.status.closed_R != 0) | (shipment.status.alive_R == 0)
            self._left = tuple(shipment.status.rank_R[left_R].tolist())

    def take(self, agent: str, rows: Rows) -> Sequence[Members]:
        """Take the ranks of some rows, older starts first; return those that belong to a generation."""
        generation, infos, generations = rows.generation, rows.ranks, self.generations
        if self.newest is None or generation >= self.newest.generation:
            self.newest = rows
        was, known = self._known.get(generation, ((), ()))
        if was == (self.boot_id, generations.changes, infos):
            of_any = sum(len(some.of) for some in known) == len(infos)
            if of_any and all(generations.goes_on(some.generation) for some in known):
                return known
        processes = {rank: Incarnation.of(self.boot_id, info) for rank, info in infos.items()}
        generations.take(f"{agent}:{self.rings_id}", self.ahead_s, infos, processes)
        steps = rows.steps

        def ended_s() -> tuple[float, float]:
            ended_ns_B = steps.start_ns_B + steps.durations_ns_BS.sum(axis=1)
            first_s, last_s = (self.ahead_s + int(at_ns) / 1e9 for at_ns in (ended_ns_B.min(), ended_ns_B.max()))
            return first_s if rows.schema.sync else float("inf"), last_s

        generations.stepped([processes[rank] for rank in set(steps.rank_B.tolist())], ended_s)
        self.rings.setdefault(generation, {}).update(infos)
        for old in [start for start in self.rings if start <= self.newest.generation - KEPT_GENERATIONS]:
            del self.rings[old]
            self._known.pop(old, None)
        known = self._members(infos)
        self._known[generation] = (self.boot_id, generations.changes, infos), known
        return known

    def takes_part(self) -> bool:
        """Whether it has ranks of the newest generation, or no ranks yet."""
        infos = {} if self.newest is None else self.newest.ranks
        return not infos or self.generations.newest in map(self.generation_of, infos.values())

    @property
    def n_ranks(self) -> int:
        return 0 if self.newest is None else len(self.newest.ranks)

    @property
    def ranks(self) -> set[int]:
        """All ranks of its recent starts."""
        return set().union(*self.rings.values())

    def away(self) -> list[int]:
        """The host's ranks of the newest generation that take no more steps, as far as is known."""
        if self.newest is None or not (self.silent or (self.status is not None and (self.over or self._left))):
            return []
        infos = self.newest.ranks
        left: Iterable[int] = infos if self.silent or self.over else [rank for rank in self._left if rank in infos]
        return [rank for rank in left if self.generation_of(infos[rank]) == self.generations.newest]

    def doing(self) -> JobStatus | None:
        """What its ranks of the newest generation are doing, by the newest status; None without such ranks."""
        status, generations = self.status, self.generations
        if status is None:
            return None
        rings = self.rings.get(status.attempt, {})
        key = status.attempt, len(rings), self.boot_id, generations.changes
        if self._in_newest[0] != key:
            in_newest = {rank for rank, info in rings.items() if self.generation_of(info) == generations.newest}
            self._in_newest = key, in_newest
        here = [rank in self._in_newest[1] for rank in status.rank_R.tolist()]
        status = status if all(here) else status.only(np.array(here))
        if status.attempt != generations.newest:
            status = replace(status, attempt=generations.newest)
        return status if any(here) else None

    def ended(self) -> HostEnds:
        """How its ranks ended, by the hub's clock and in the job's generations; where unknown, what was last heard."""
        ends, newest = self.ends, max(self.generations.newest, 0)
        if ends is None:
            job = self.doing()
            ranks = () if job is None else tuple(_last_heard(rank, job, silent=self.silent) for rank in job.ranks)
            return HostEnds(ranks)
        # Starts that have no ring yet follow those that have.
        known = {
            start: generation
            for start, infos in self.rings.items()
            if (generation := next(filter(lambda of: of is not None, map(self.generation_of, infos.values())), None))
            is not None
        }
        last = max((end.attempt for end in ends.ranks), default=0)
        start, generation = max(known.items(), default=(last, newest))
        ahead_s = self.ahead_s - ends.ahead_s

        def moved(end: RankEnd) -> RankEnd:
            attempt = known.get(end.attempt, max(0, generation + end.attempt - start))
            time_s = None if end.time_s is None else end.time_s + ahead_s
            return replace(end, attempt=attempt, time_s=time_s, margin_s=ends.margin_s)

        signalled_s = None if ends.signalled_s is None else ends.signalled_s + ahead_s
        return replace(ends, ranks=tuple(map(moved, ends.ranks)), signalled_s=signalled_s)

    def generation_of(self, info: RingInfo) -> int | None:
        """The generation of the process of a ring, if known."""
        return self.generations.of(Incarnation.of(self.boot_id, info))

    def _members(self, infos: Mapping[int, RingInfo]) -> Sequence[Members]:
        found: dict[int, dict[int, RingInfo]] = {}
        for rank, info in infos.items():
            if (generation := self.generation_of(info)) is not None:
                counted = info if info.attempt == generation else replace(info, attempt=generation)
                found.setdefault(generation, {})[rank] = counted
        return [
            Members(generation, {rank: Incarnation.of(self.boot_id, info) for rank, info in infos_of.items()}, infos_of)
            for generation, infos_of in found.items()
        ]

    def quiet_s(self, now_s: float, connected_s: float) -> float:
        """How long the agent has been silent while the hub was connected."""
        return now_s - max(self.heard_s, connected_s)


def _last_heard(rank: RankStatus, job: JobStatus, *, silent: bool) -> RankEnd:
    alive, sync = rank.alive is True and not silent, rank.stage in job.schema.sync
    end = RankEnd(rank.rank, 0, rank.host, None, rank.step, rank.stage, sync, alive, attempt=job.attempt)
    return replace(end, silent=True)


def status_of_all(hosts: Iterable[Host], now_s: float) -> JobStatus | None:
    """What the ranks of the newest generation are doing, on all hosts with the same stages; None without any."""
    found = [(status, host.status_s) for host in hosts if (status := host.doing()) is not None]
    return joined_statuses([status for status, _ in found], [int((now_s - at_s) * 1e9) for _, at_s in found])


SETTLE_S = 2.0  # print changes after this long without another change
AWAY_S = 5.0  # print that the hub is away after this long
MAX_NAMED = 4


@dataclass(slots=True)
class RollCall:
    """Reports changes of the hosts and of the hub's connection, each once."""

    _reported: dict[str, bool] = field(default_factory=dict)
    _silent: dict[str, bool] = field(default_factory=dict)
    _ranks: int = 0
    _changed_s: float = 0.0
    _away_s: float | None = None
    _away_reported: bool = False

    def update(self, hosts: Mapping[str, Host], away: str, now_s: float) -> list[str]:
        """The lines that are due; ``away`` is why the hub cannot be reached, "" while it can."""
        lines = self._of_hub(away, now_s)
        if away:
            return lines
        # (a host that has left is silent too)
        there = {name: host for name, host in sorted(hosts.items()) if not host.over and (host.n_ranks or host.silent)}
        is_silent = {name: host.silent for name, host in there.items()}
        ranks = sum(host.n_ranks for host in hosts.values())
        if (is_silent, ranks) != (self._silent, self._ranks):
            self._silent, self._ranks, self._changed_s = is_silent, ranks, now_s
        if now_s < self._changed_s + SETTLE_S:
            return lines
        new = [name for name in there if name not in self._reported]
        silent = [name for name in there if is_silent[name] and not self._reported.get(name)]
        back = [name for name in there if not is_silent[name] and self._reported.get(name)]
        if new:
            where = counted(len(there), "host")
            lines.append(f"{counted(ranks, 'rank')} on {where}: {_names(list(there))}")
        if silent:
            lines.append(_unheard(silent))
        if back:
            lines.append(f"{_names(back)} {'is' if len(back) == 1 else 'are'} back")
        self._reported |= is_silent
        return lines

    @property
    def unheard(self) -> str:
        """Which hosts are silent, as reported; "" if none is."""
        silent = [name for name, is_silent in self._silent.items() if is_silent and self._reported.get(name)]
        return _unheard(silent) if silent else ""

    def _of_hub(self, away: str, now_s: float) -> list[str]:
        if not away:
            was_s, reported = self._away_s, self._away_reported
            self._away_s, self._away_reported = None, False
            if was_s is None or not reported:
                return []
            # (meanwhile, no host could send anything)
            self._changed_s = now_s
            return [f"the hub is back after {now_s - was_s:.0f} s; judging what was recorded meanwhile"]
        if self._away_s is None:
            self._away_s = now_s
        if self._away_reported or now_s < self._away_s + AWAY_S:
            return []
        self._away_reported = True
        return [f"{away} The job keeps running, and is not judged meanwhile"]


def _unheard(silent: Sequence[str]) -> str:
    return f"no data from {_names(silent)}: windows leave out {'its' if len(silent) == 1 else 'their'} ranks"


def _names(names: Sequence[str]) -> str:
    shown = [*names[:MAX_NAMED]]
    if more := len(names) - len(shown):
        shown.append(f"{more:,} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


class Groups:
    """The groups of a job as their agents report them, and the settings wanted of each agent (``wanted``).

    An agent ``takes_part`` while its host has ranks in the job's newest generation, as far as is known.
    """

    def __init__(self, takes_part: Callable[[str], bool], is_silent: Callable[[str], bool]) -> None:
        self._takes_part, self._is_silent = takes_part, is_silent
        self._reported: dict[str, tuple[SwitchStatus, ...]] = {}
        self.wanted: Mapping[str, Mapping[str, Setting]] = {}

    def heard(self, agent: str, reported: Collection[SwitchStatus], has: Collection[int]) -> None:
        """Take an agent's report of groups; drops groups of ranks that it does not have."""
        mine = frozenset(has) if reported else frozenset()
        self._reported[agent] = tuple(status for status in reported if mine.issuperset(status.ranks_here))

    def statuses(self) -> list[SwitchStatus]:
        """The groups whose ranks are all reported; those on a silent host as last reported."""
        of_now = self._of_now()
        unheard = {status.name for agent, reported in of_now.items() if self._is_silent(agent) for status in reported}
        found = whole_groups(status for reported in of_now.values() for status in reported)
        return [replace(status, request=UNLIKE) if status.name in unheard else status for status in found]

    def want(self, wanted: Mapping[str, Setting]) -> None:
        """Set the setting of each group; each of its agents keeps this order until all agents have applied it."""
        due = {
            status.name: setting
            for status in self.statuses()
            if (setting := wanted.get(status.name)) is not None and status.next_request(setting.value) is not None
        }
        names = {agent: {status.name for status in reported} & due.keys() for agent, reported in self._of_now().items()}
        self.wanted = {agent: {name: due[name] for name in some} for agent, some in names.items() if some}

    def _of_now(self) -> Mapping[str, Sequence[SwitchStatus]]:
        """Groups by agents that take part: a host that is gone may have reported a group of the same name."""
        return {agent: reported for agent, reported in self._reported.items() if reported and self._takes_part(agent)}
