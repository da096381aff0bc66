"""Rows with faults, from a seed. Every property is dealt from a deck of its own, so that a few rows cover it evenly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from bench.rows import LOCAL_PLACES, STAGE_OF, WINDOW_STEPS, Deck, Delay, Row, Truth

SHARES = {"local": 30, "split": 5, "host": 3, "hold": 6, "healthy": 6}
"""Of 50 rows: how many of each sort. Other numbers of rows keep the proportions, with at least one of each."""
FRACTIONS = (0.02, 0.03, 0.05, 0.08, 0.12, 0.20, 0.35, 0.60, 1.00)
COURSES = ("constant", "onset", "every", "growing", "span")
HOLDS = ("co-critical", "roaming", "missing")
HEALTHY = ("plain", "checkpoint-0", "plain", "checkpoint-all")


def shares(n_rows: int, sorts: Sequence[str] = tuple(SHARES)) -> dict[str, int]:
    """How many rows of each sort: the proportions of `SHARES`, at least one of each where there are enough rows."""
    wanted = {sort: SHARES[sort] for sort in SHARES if sort in sorts}
    exact = {sort: n_rows * share / sum(wanted.values()) for sort, share in wanted.items()}
    counts = {sort: max(int(part), 1 if n_rows >= len(wanted) else 0) for sort, part in exact.items()}
    while sum(counts.values()) > n_rows:
        counts[max(counts, key=lambda sort: counts[sort])] -= 1
    while sum(counts.values()) < n_rows:
        counts[max(counts, key=lambda sort: exact[sort] - counts[sort])] += 1
    return counts


def draw(n_rows: int, n_ranks: int, seed: int, n_steps: int = 180, sorts: Sequence[str] = tuple(SHARES)) -> list[Row]:
    """The same rows for the same arguments, in a mixed order."""
    if n_ranks < 4:
        # There is no host of several ranks that is not more than half of the job.
        sorts = [sort for sort in sorts if sort != "host"] or ["local"]
    rng = random.Random(f"{n_rows}-{n_ranks}-{seed}-{n_steps}-{sorted(sorts)}")
    dealer = _Dealer(rng, n_ranks, n_steps)
    order = [sort for sort, count in shares(n_rows, sorts).items() for _ in range(count)]
    rng.shuffle(order)
    return [dealer.row(number, sort) for number, sort in enumerate(order)]


class _Dealer:
    def __init__(self, rng: random.Random, n_ranks: int, n_steps: int) -> None:
        self._rng, self._n_ranks, self._n_steps = rng, n_ranks, n_steps
        self._decks: dict[str, Deck[Any]] = {}

    def row(self, number: int, sort: str) -> Row:
        name, truth, values = getattr(self, f"_{sort}")()
        profile = self._deal(f"{sort} profile", ("wait", "compute"))
        values = {"split": self._deal("watched", (True, False)), "profile": profile, **values}
        seed = self._rng.randrange(1 << 30)
        return Row(number, sort, name, self._n_ranks, self._n_steps, seed, truth=truth, **values)

    def _deal(self, name: str, cards: Sequence[Any]) -> Any:
        return self._decks.setdefault(name, Deck(cards, self._rng)).deal()

    def _fault(self, sort: str, where: str, fraction: float, **values: Any) -> tuple[str, Truth, dict[str, Any]]:
        rank, course = self._deal("rank", range(self._n_ranks)), self._deal(f"{sort} course", COURSES)
        first, last, every, full_at = 0, self._n_steps, 1, None
        if course == "onset" or (course == "every" and self._rng.random() < 0.5):
            first = self._onset()
        if course == "every":
            every = self._deal("period", range(3, 13))
            first += self._rng.randrange(every)
        if course == "growing":
            first = self._rng.randrange(10, max(11, self._n_steps // 3))
            full_at = self._n_steps - WINDOW_STEPS // 2
        if course == "span":
            length = self._deal("length", (25, 40, 60, 80))
            first = self._rng.randrange(40, max(41, self._n_steps - length - 10))
            last = min(self._n_steps, first + length)
        busy = self._deal(f"{sort} busy", (False, True))
        delay = Delay(where, (rank,), fraction, first, last, every, full_at, busy)
        truth = Truth("suspect", "rank", (rank,), STAGE_OF[where], first)
        return f"{where}-{course}", truth, {"delays": (delay,), **values}

    def _onset(self) -> int:
        """A step late enough for windows before it, and early enough for whole windows after it."""
        return self._rng.randrange(int(0.45 * self._n_steps), int(0.65 * self._n_steps))

    def _local(self) -> tuple[str, Truth, dict[str, Any]]:
        return self._fault("local", self._deal("place", LOCAL_PLACES), self._deal("fraction", FRACTIONS))

    def _split(self) -> tuple[str, Truth, dict[str, Any]]:
        return self._fault("split", "backward", self._deal("split fraction", FRACTIONS[2:]), split=True)

    def _host(self) -> tuple[str, Truth, dict[str, Any]]:
        """A host of several ranks, at most half of them, that is slow, and other hosts of as many or fewer."""
        of_one = self._rng.randrange(2, self._n_ranks // 2 + 1)
        slow = self._rng.randrange(0, self._n_ranks // of_one)
        hosts = tuple(f"node-{rank // of_one}" for rank in range(self._n_ranks))
        ranks = tuple(rank for rank in range(self._n_ranks) if rank // of_one == slow)
        where = self._deal("host place", ("data", "all", "forward", "all", "optimizer", "h2d"))
        fraction = self._deal("host fraction", FRACTIONS[4:])
        first = self._deal("host first", (0, self._onset()))
        places = ("data", "h2d", "forward", "optimizer") if where == "all" else (where,)
        delays = tuple(Delay(place, ranks, fraction / len(places), first, self._n_steps) for place in places)
        stage = None if where == "all" else where
        return where, Truth("suspect", "host", ranks, stage, first), {"delays": delays, "hosts": hosts}

    def _hold(self) -> tuple[str, Truth, dict[str, Any]]:
        name, fraction = self._deal("hold", HOLDS), self._deal("hold fraction", FRACTIONS[5:])
        if name == "missing":
            return name, Truth("needs_evidence"), {"missing": self._deal("rank", range(self._n_ranks))}
        first, last = self._deal("hold first", (0, self._onset())), self._n_steps
        busy = self._deal("hold busy", (False, True))
        if name == "roaming":
            ranks = tuple(range(self._n_ranks))
            where = self._deal("roaming place", LOCAL_PLACES)
            delays: tuple[Delay, ...] = (Delay(where, ranks, fraction, first, last, busy=busy, roams=True),)
            return name, Truth("needs_evidence", ranks=ranks, onset=first), {"delays": delays}
        pair, places = self._rng.sample(range(self._n_ranks), 2), self._rng.sample(LOCAL_PLACES[:4], 2)
        # Of two ranks that are slow in the same stage, nothing would show that they are.
        if self._n_ranks > 2 and self._deal("same place", (False, True)):
            places[1] = places[0]
        delays = tuple(
            Delay(place, (rank,), fraction, first, last, busy=busy) for place, rank in zip(places, pair, strict=True)
        )
        return name, Truth("needs_evidence", ranks=tuple(sorted(pair)), onset=first), {"delays": delays}

    def _healthy(self) -> tuple[str, Truth, dict[str, Any]]:
        name = self._deal("healthy", HEALTHY)
        ranks = {"plain": (), "checkpoint-0": (0,), "checkpoint-all": tuple(range(self._n_ranks))}[name]
        return name, Truth("healthy"), {"checkpoint_every": 25 if ranks else 0, "checkpoint_ranks": ranks}
