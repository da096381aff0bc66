"""What a group of ranks is asked to have in force, and how it stands: what crosses between it and who asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from zlib import crc32

PLANNED = 1 << 15
MAX_RANKS = PLANNED - 2
MAX_STAGES = 56
ROUNDS_AHEAD = 3
"""A request is for the so-manieth round after the newest: all ranks see it in time, unless who asks is held up."""


class Request(NamedTuple):
    """A value to be in force from a round on; ``number`` tells requests apart.

    Both are 0 where the ranks are on several hosts: it is to be in force once all see it.
    """

    number: int
    round: int
    value: int

    @property
    def word(self) -> int:
        """It in one word."""
        return self.number << 48 | self.round << 16 | self.value

    @classmethod
    def of(cls, word: int) -> Request:
        """The request that a word is."""
        return cls(word >> 48 & 0x7FFF, word >> 16 & 0xFFFFFFFF, word & 0xFFFF)


UNLIKE = Request(0, 0, -1)
"""Not the same on all hosts, or not known of one that is silent."""


class Setting(NamedTuple):
    """What is to be in force: a value, and of a pipeline how far ahead each stage is."""

    value: int = 0
    ahead_S: tuple[int, ...] = ()

    @classmethod
    def of_plan(cls, ahead_S: Sequence[int]) -> Setting:
        """Stages so far ahead."""
        return cls(PLANNED | crc32(bytes(ahead_S)) & (PLANNED - 1), tuple(ahead_S))


class StageTimes(NamedTuple):
    """What a microbatch takes a stage, and on its way there, in seconds; 0 where that is not known.

    ``there_s`` is from the end of the stage before's computation, ``back_s`` from that of the one after; ``most`` is of
    how many microbatches it can hold the activations.
    """

    forward_s: float
    backward_s: float
    there_s: float
    back_s: float
    most: int


@dataclass(frozen=True, slots=True)
class SwitchStatus:
    """The state of a group, as far as one host knows; `whole_groups` has the whole of a group on several hosts.

    Attributes:
        name: of its file; on several hosts, what all of its files call it.
        ranks: the job's ranks in it, in the group's order.
        round: the newest that a rank has begun; ``all_begun`` is the newest that all have.
        value: in force on all ranks; None while they are between two rounds with different ones.
        since_step: the job's step from which on it is, by the last of them; -1 where unknown.
        request: the last one; `UNLIKE` while hosts have different ones.
        exchange_s: duration of an exchange without waiting and with nothing in force, of ``exchanged_bytes``; 0: none
            yet.
        stages: what microbatches take, of a pipeline.
        microbatches: of its step; 0 of no pipeline.
        here: on several hosts, the places of the ranks of this host; empty on one host.
    """

    name: str
    ranks: Sequence[int]
    round: int
    all_begun: int
    value: int | None
    since_step: int
    request: Request
    exchange_s: float = 0.0
    exchanged_bytes: int = 0
    stages: tuple[StageTimes, ...] = ()
    microbatches: int = 0
    here: Sequence[int] = ()

    @property
    def ranks_here(self) -> Iterable[int]:
        """The ranks that this is told by."""
        return map(self.ranks.__getitem__, self.here) if self.here else self.ranks

    def next_request(self, value: int) -> Request | None:
        """What to ask for so that a value comes into force; None where it is, or was asked for and may yet be."""
        if self.here or self.request == UNLIKE:
            return None if self.request.value == value else Request(0, 0, value)
        may_come = self.all_begun < self.request.round
        if (self.request.value if may_come else self.value) == value:
            return None
        return Request(self.request.number % 0x7FFF + 1, self.round + ROUNDS_AHEAD, value)


def whole_groups(told: Iterable[SwitchStatus]) -> list[SwitchStatus]:
    """The groups of a job, by what all of its hosts tell: those of which some rank is not told of are left out."""
    groups: dict[str, list[SwitchStatus]] = {}
    for one in told:
        groups.setdefault(one.name, []).append(one)
    return [whole for some in groups.values() if (whole := _whole(some)) is not None]


def _whole(parts: Sequence[SwitchStatus]) -> SwitchStatus | None:
    first, *others = parts
    if not (others or first.here):
        return first
    here = sorted(place for one in parts for place in one.here)
    if any(one.ranks != first.ranks for one in others) or here != list(range(len(first.ranks))):
        return None
    values, requests = {one.value for one in parts}, {one.request for one in parts}
    return replace(
        first,
        round=max(one.round for one in parts),
        all_begun=min(one.all_begun for one in parts),
        value=first.value if len(values) == 1 else None,
        since_step=max(one.since_step for one in parts),
        request=first.request if len(requests) == 1 else UNLIKE,
        exchange_s=min(one.exchange_s for one in parts),
        exchanged_bytes=max(one.exchanged_bytes for one in parts),
        here=tuple(here),
    )


def as_range(numbers: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Numbers in short: a run of them, as most groups are, is its start, end and step; and whether it is one."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    run = range(numbers[0], numbers[0] + step * len(numbers), step) if numbers and step > 0 else range(0)
    is_range = len(run) > 0 and list(run) == list(numbers)
    return ((run.start, run.stop, run.step) if is_range else tuple(numbers)), is_range


def numbers_of(short: Sequence[int], is_range: bool, below: int) -> Sequence[int]:
    """The numbers that `as_range` has shortened: a range takes no room, however long it is.

    Raises ValueError where they are not distinct, not in 0 up to ``below``, or more than a group has ranks.
    """
    if not all(type(one) is int for one in short) or (is_range and len(short) != 3):
        raise ValueError(f"{len(short)} numbers that are no ranks")
    found = range(*short) if is_range else tuple(short)
    if isinstance(found, range):
        ends, differ = (*found[:1], *found[-1:]), found.step > 0
    else:
        ends, differ = found, len(set(found)) == len(found)
    if not differ or len(found) > MAX_RANKS or not all(0 <= one < below for one in ends):
        raise ValueError(f"{len(found)} numbers that are no ranks")
    return found
