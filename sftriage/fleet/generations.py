"""Which ranks belong together: the controller's own count of a job's starts, told by the processes of its ranks.

No host knows it. Under torchrun only the node that failed counts a restart, and one that is replaced counts from 0.
But a rank that starts again is another process, and in a job that exchanges gradients all ranks start again with it:

- of one generation, no two ranks have the same number, all have the same world size, and those of a host are of the
  same start there;
- nobody ends a first step before all have begun, so that who begins after that is of a later generation.

Where that leaves a choice, as it does for a host that is heard of late, a process is of the generation whose others
began when it did. All times are by one clock, the hub's, so that it does not matter whose word comes first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

import msgspec

from sftriage.base.log_once import LogOnce
from sftriage.fleet.wire import Incarnation
from sftriage.trainer.layout import RingInfo

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
            self._say_two(member, other)
        if other is not None or member.world_size != newest.world_size:
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
        elif self.newest < 0 or began_s > self._generations[self.newest].last_s:
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

    def _say_two(self, one: Member, other: Member) -> None:
        hosts = one.host.partition(":")[0], other.host.partition(":")[0]
        if hosts[0] != hosts[1]:
            self._log_once(
                "hosts %s and %s both have a rank %d that takes steps; the newer one counts. Are these two jobs under"
                " one --job-id, or launchers that do not know of each other?",
                *(*hosts, one.one.rank),
                key=hosts,
            )


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
