"""The orders in which ranks send and stages compute, for the remedies of two papers. Pure, and used in the trainer.

All-reduce with one late rank (StragglAR, arXiv 2505.23523): the sends of each round. While the n - 1 others wait, they
ReduceScatter, so that rank i holds chunk i of n - 1. When the straggler (rank n - 1 here) arrives, it exchanges its
part of chunk i with rank i in round i, and both have the full sum. Meanwhile the others spread full chunks: a broadcast
of n - 1 messages from one source, each to another rank first.

The paper finds schedules for even n by matching. These work for any n by one rule: the newest chunks double, at ranks
that are served last and lack the least; older chunks go to any rank that lacks them. No schedule takes fewer rounds
than n - 2 + ⌈log₂ n⌉. Powers of two take exactly that, other n up to 33 at most one more, except two at n = 29.

`order_of` is the order of a pipeline stage's computations (Adaptra, arXiv 2504.19232).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple

from sftriage.errors import UsageError


@dataclass(frozen=True, slots=True)
class Send:
    """One rank sends the full sum of a chunk."""

    source: int
    target: int
    chunk: int


def fewest_rounds(n: int) -> int:
    """Lower bound: two ranks have the last chunk's full sum in round n - 1, and holders at most double per round."""
    return n - 2 + (n - 1).bit_length()


@lru_cache(maxsize=64)
def schedule_of(n: int) -> tuple[tuple[Send, ...], ...]:
    """The full sums that n ranks send in each round after the arrival of the straggler, rank n - 1.

    In round i < n - 1, rank i and the straggler also exchange their parts of chunk i. No rank sends or receives more
    than one chunk per round. Raises UsageError for fewer than two ranks.
    """
    if n < 2:
        raise UsageError(f"{n} ranks: an all-reduce needs two or more")
    best: tuple[tuple[Send, ...], ...] = ()
    for is_long, low_first in product((False, True), repeat=2):
        rounds = tuple(_Spreading(n, is_long=is_long, low_first=low_first).rounds())
        best = min(best or rounds, rounds, key=len)
        if len(best) == fewest_rounds(n):
            break
    return best


class _Spreading:
    """The holders of each chunk, as bit sets of ranks.

    ``is_long`` adds a round to the initial ramp, and ``low_first`` orders the ranks that the straggler has served:
    no choice is best for every n.
    """

    def __init__(self, n: int, *, is_long: bool, low_first: bool) -> None:
        self._n, self._straggler = n, n - 1
        self._has_C = [0] * (n - 1)
        self._all_ranks = (1 << n) - 1
        self._n_young = n.bit_length() - 2
        self._ramp = n.bit_length() - 1 + is_long
        self._order = 1 if low_first else -1

    def rounds(self) -> Iterator[tuple[Send, ...]]:
        now = 0
        while any(has != self._all_ranks for has in self._has_C):
            served = now < self._n - 1
            free = self._all_ranks & ~(1 << now | 1 << self._straggler) if served else self._all_ranks
            sends = _Round(self._has_C, free)
            self._fill(sends, now, [c for c in range(min(now, self._n - 1)) if self._has_C[c] != self._all_ranks])
            if served:
                self._has_C[now] = 1 << now | 1 << self._straggler
            for send in sends.of.values():
                self._has_C[send.chunk] |= 1 << send.target
            yield tuple(sorted(sends.of.values(), key=lambda send: send.source))
            now += 1

    def _fill(self, sends: _Round, now: int, spreading: list[int]) -> None:
        """Choose the round's sends; ``spreading`` are the chunks that some ranks have and some lack, oldest first."""
        n_young = len(spreading) if now < self._ramp else min(self._n_young, len(spreading))
        old, young = spreading[: len(spreading) - n_young], spreading[len(spreading) - n_young :]
        turn = {rank: self._turn(rank, now) for rank in _ranks(sends.free)}

        def lacks(rank: int) -> tuple[int, bool, int, int]:
            newest = max((chunk for chunk in young if self._has_C[chunk] >> rank & 1), default=-1)
            lacking = [not self._has_C[chunk] >> rank & 1 for chunk in old]
            return newest, bool(old) and lacking[0], sum(lacking), -turn[rank]

        for chunk in reversed(young):
            targets = sorted(sends.lacking(chunk), key=lacks)
            sources = sorted(_ranks(self._has_C[chunk] & sends.idle), key=turn.__getitem__)
            for source, target in zip(sources, targets, strict=False):
                sends.add(source, target, chunk)
        soonest = sorted(turn, key=turn.__getitem__)
        for chunk in old:
            for target in soonest:
                if sends.waits_for(target, chunk):
                    sends.find(target, chunk)
        for target, chunk in product(_ranks(sends.free), spreading):
            if sends.waits_for(target, chunk):
                sends.find(target, chunk)

    def _turn(self, rank: int, now: int) -> int:
        return rank - now if now < rank < self._straggler else 2 * self._n + self._order * rank


class _Round:
    """The sends of one round, by source; ``free`` are the ranks not exchanging with the straggler."""

    def __init__(self, has_C: list[int], free: int) -> None:
        self._has_C, self.free = has_C, free
        self.idle, self._receiving, self._visited = free, 0, 0
        self.of: dict[int, Send] = {}

    def lacking(self, chunk: int) -> Iterator[int]:
        return _ranks(self.free & ~self._has_C[chunk] & ~self._receiving)

    def waits_for(self, rank: int, chunk: int) -> bool:
        return not (self._receiving | self._has_C[chunk]) >> rank & 1

    def add(self, source: int, target: int, chunk: int) -> None:
        self.of[source] = Send(source, target, chunk)
        self.idle &= ~(1 << source)
        self._receiving |= 1 << target

    def find(self, target: int, chunk: int) -> bool:
        """Find a source for a chunk to a rank, reassigning other sends if necessary (Kuhn's augmenting path)."""
        self._visited = 0
        return bool(self.idle) and self._found(target, chunk)

    def _found(self, target: int, chunk: int) -> bool:
        holders = self._has_C[chunk] & self.free
        if idle := holders & self.idle:
            self.add(next(_ranks(idle)), target, chunk)
            return True
        while left := holders & ~self._visited:
            source = next(_ranks(left))
            self._visited |= 1 << source
            if self._found(self.of[source].target, self.of[source].chunk):
                self.add(source, target, chunk)
                return True
        return False


def _ranks(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


class ScheduledStep(NamedTuple):
    """A stage's forward (F) or backward (B) of one microbatch."""

    kind: Literal["F", "B"]
    microbatch: int


def order_of(warmup: int, microbatches: int) -> tuple[ScheduledStep, ...]:
    """A stage's computations: ``warmup`` forwards, then backward and forward in turn, then the remaining backwards."""
    ahead = min(warmup, microbatches)
    steps = [ScheduledStep("F", number) for number in range(ahead)]
    for number in range(microbatches):
        steps.append(ScheduledStep("B", number))
        if ahead + number < microbatches:
            steps.append(ScheduledStep("F", ahead + number))
    return tuple(steps)
