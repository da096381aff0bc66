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
from dataclasses import dataclass

import msgspec

from sftriage.fleet.wire import Incarnation
from sftriage.recorder.layout import RingInfo

log = logging.getLogger("sftriage")

KEPT_GENERATIONS = 8
GOES_ON_S = 10.0
"""A rank that takes steps so long after a generation began is of it: its collectives would wait for it for ever."""
MARGIN_S = 5.0
"""How far hosts may be wrong about when something was on the hub's clock."""


class Member(msgspec.Struct, frozen=True):
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


class Known(msgspec.Struct, frozen=True):
    """What is to be known again by a controller that takes over; ``stepped_s`` is when generations ended a step."""

    newest: int = -1
    opened_s: float = 0.0
    members: tuple[Member, ...] = ()
    stepped_s: dict[int, float] = {}


NOTHING_KNOWN = Known()


@dataclass(frozen=True, slots=True)
class Teller:
    """Who tells of processes: an agent, by whose messages the hub's clock is ``ahead_s`` of its monotonic one.

    It counts the starts of which it has the rings.
    """

    agent: str
    boot_id: str
    ahead_s: float
    rings_id: str = ""

    @property
    def host(self) -> str:
        """What has one count of starts."""
        return f"{self.agent}:{self.rings_id}"


class Generations:
    """The generations of a job, newest last. Times are seconds on the hub's clock.

    Attributes:
        newest: the newest one, -1 before there is any.
        changes: how often anything has changed.
    """

    def __init__(self, known: Known = NOTHING_KNOWN) -> None:
        self.newest, self._opened_s, self.changes = known.newest, known.opened_s, 0
        self._of = {member.one: member for member in known.members}
        self._stepped_s = dict(known.stepped_s)
        # Of each generation, by rank.
        self._members: dict[int, dict[int, Member]] = {known.newest: {}}
        for member in known.members:
            self._members.setdefault(member.generation, {})[member.one.rank] = member
        self._said: set[tuple[str, str]] = set()

    @property
    def known(self) -> Known:
        """What there is to keep."""
        return Known(self.newest, self._opened_s, tuple(self._of.values()), self._stepped_s)

    def of(self, one: Incarnation) -> int | None:
        """The generation of a process; None where it is not known any more, or was never seen."""
        member = self._of.get(one)
        return None if member is None else member.generation

    def goes_on(self, generation: int) -> bool:
        """Whether a generation is the newest one, and takes steps: its ranks have nothing new to say."""
        return generation == self.newest and generation in self._stepped_s

    def take(self, teller: Teller, infos: Mapping[int, RingInfo], ones: Mapping[int, Incarnation]) -> None:
        """Take note of the ranks of one of a host's starts, its older starts first."""
        new = [rank for rank, one in ones.items() if one not in self._of]
        for rank in sorted(new, key=lambda rank: infos[rank].started_mono_ns):
            self._place(teller, infos[rank], ones[rank])

    def stepped(self, ones: Iterable[Incarnation], first_s: Callable[[], float], now_s: float) -> None:
        """Take note that processes take steps, the first of which ended at ``first_s``."""
        for one in ones:
            member = self._of.get(one)
            if member is None:
                continue
            if member.generation not in self._stepped_s and not member.moved:
                self._stepped_s[member.generation] = first_s()
                self.changes += 1
            if member.generation < self.newest and now_s > self._opened_s + GOES_ON_S:
                self._move(member)

    def _move(self, member: Member) -> None:
        """A rank takes steps though others have started again long ago: it is together with these now."""
        newest = self._members[self.newest]
        other = newest.get(member.one.rank)
        if other is not None:
            self._say_two(member, other)
        if other is not None or member.world_size != next(iter(newest.values())).world_size:
            return
        del self._members[member.generation][member.one.rank]
        self._join(msgspec.structs.replace(member, generation=self.newest, moved=True))

    def _place(self, teller: Teller, info: RingInfo, one: Incarnation) -> None:
        """Have a process that was never seen join the others of its generation, if it has any."""
        began_s = info.started_mono_ns / 1e9 + teller.ahead_s
        new = Member(one, self.newest, teller.host, info.attempt, info.world_size, began_s)
        fitting = [generation for generation in self._members if generation >= 0 and self._fits(new, generation)]
        if fitting:
            nearest = min(sorted(fitting, reverse=True), key=lambda generation: self._apart_s(new, generation))
            new = msgspec.structs.replace(new, generation=nearest)
        elif self.newest < 0 or self._is_later(new):
            self._open(began_s)
            new = msgspec.structs.replace(new, generation=self.newest)
        else:
            return
        self._join(new)

    def _fits(self, new: Member, generation: int) -> bool:
        """Whether a process can be of a generation."""
        others = self._members[generation]
        if new.one.rank in others or any(other.world_size != new.world_size for other in others.values()):
            return False
        of_host = [other for other in self._of.values() if other.host == new.host]
        if any(_sign(other.start - new.start) != _sign(other.generation - generation) for other in of_host):
            return False
        before_s, stepped_s = self._stepped_s.get(generation - 1), self._stepped_s.get(generation)
        if before_s is not None and new.began_s < before_s - MARGIN_S:
            return False
        return stepped_s is None or new.began_s <= stepped_s + MARGIN_S

    def _is_later(self, new: Member) -> bool:
        """Whether a process began after those of the newest generation."""
        return all(new.began_s > other.began_s for other in self._members[self.newest].values())

    def _apart_s(self, new: Member, generation: int) -> float:
        """By how much a process began before, or after, those of a generation."""
        began_s = [other.began_s for other in self._members[generation].values() if not other.moved]
        if not began_s:
            return 0.0
        return max(min(began_s) - new.began_s, new.began_s - max(began_s), 0.0)

    def _open(self, now_s: float) -> None:
        self.newest, self._opened_s = self.newest + 1, now_s
        self._members[self.newest] = {}
        for old in [generation for generation in self._members if generation <= self.newest - KEPT_GENERATIONS]:
            for member in self._members.pop(old).values():
                del self._of[member.one]
            self._stepped_s.pop(old, None)

    def _join(self, member: Member) -> None:
        self.changes += 1
        self._of[member.one] = member
        self._members[member.generation][member.one.rank] = member

    def _say_two(self, one: Member, other: Member) -> None:
        """Two processes are one rank, and both go on."""
        hosts = one.host.partition(":")[0], other.host.partition(":")[0]
        if hosts[0] != hosts[1] and hosts not in self._said:
            self._said.add(hosts)
            log.warning(
                "hosts %s and %s both have a rank %d that takes steps; the newer one counts. Are these two jobs under"
                " one --job-id, or launchers that do not know of each other?",
                *(*hosts, one.one.rank),
            )


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
