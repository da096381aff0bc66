"""Rows from a seed. Every property of a row is dealt from a deck of its own, so that a few rows cover it evenly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Generic, TypeVar

from bench.hidden_rank_matrix.rows import (
    LOCAL_PLACES,
    STAGE_OF,
    WINDOW_STEPS,
    Delay,
    Pressure,
    Row,
    Truth,
)

# Of 50 rows: how many of each sort. Other numbers of rows keep the proportions, with at least one of each.
SHARES = {"local": 30, "split": 4, "outside": 3, "host": 2, "hold": 6, "healthy": 5}

FRACTIONS = (0.02, 0.03, 0.05, 0.08, 0.12, 0.20, 0.35, 0.60, 1.00)
COURSES = ("constant", "onset", "every", "growing", "span")
HOLDS = ("co-critical", "roaming", "in-sync", "co-critical", "roaming", "missing")
HEALTHY = ("plain", "checkpoint-0", "plain", "varied", "plain", "checkpoint-all", "plain", "doubled")
STRENGTHS = {"pulses": (0.6, 0.8), "squeeze": (2.0, 3.0), "nice": (2.0, 3.0)}

Card = TypeVar("Card")


class Deck(Generic[Card]):
    """Cards in a shuffled order, and when they are all dealt, shuffled again."""

    def __init__(self, cards: Sequence[Card], rng: random.Random) -> None:
        self._cards, self._rng, self._left = list(cards), rng, list[Card]()

    def deal(self) -> Card:
        """The next card."""
        if not self._left:
            self._left = self._cards.copy()
            self._rng.shuffle(self._left)
        return self._left.pop()


def shares(n_rows: int, sorts: Sequence[str] = tuple(SHARES)) -> dict[str, int]:
    """How many rows of each sort: the proportions of `SHARES`, one at least of each where there are rows enough."""
    wanted = {sort: SHARES[sort] for sort in SHARES if sort in sorts}
    total = sum(wanted.values())
    exact = {sort: n_rows * share / total for sort, share in wanted.items()}
    counts = {sort: max(int(part), 1 if n_rows >= len(wanted) else 0) for sort, part in exact.items()}
    while sum(counts.values()) > n_rows:
        counts[max(counts, key=lambda sort: counts[sort])] -= 1
    while sum(counts.values()) < n_rows:
        counts[max(counts, key=lambda sort: exact[sort] - counts[sort])] += 1
    return counts


def draw(n_rows: int, n_ranks: int, seed: int, n_steps: int = 180, sorts: Sequence[str] = tuple(SHARES)) -> list[Row]:
    """The rows of a matrix, the same ones for the same arguments, in a mixed order."""
    if n_ranks < 3:
        # With two ranks there is no host of several ranks that is not half of the job or all of it.
        sorts = [sort for sort in sorts if sort != "host"] or ["local"]
    rng = random.Random(f"{n_rows}-{n_ranks}-{seed}-{n_steps}-{sorted(sorts)}")
    dealer = _Dealer(rng, n_ranks, n_steps)
    order = [sort for sort, count in shares(n_rows, sorts).items() for _ in range(count)]
    rng.shuffle(order)
    return [dealer.row(number, sort) for number, sort in enumerate(order)]


class _Dealer:
    """The decks, and how a row of each sort is put together."""

    def __init__(self, rng: random.Random, n_ranks: int, n_steps: int) -> None:
        self._rng, self._n_ranks, self._n_steps = rng, n_ranks, n_steps
        self._decks: dict[str, Deck] = {}

    def row(self, number: int, sort: str) -> Row:
        return getattr(self, f"_{sort}")(number)

    def _deal(self, name: str, cards: Sequence[Card]) -> Card:
        card: Card = self._decks.setdefault(name, Deck(cards, self._rng)).deal()
        return card

    def _row(self, number: int, sort: str, name: str, truth: Truth, **values: object) -> Row:
        plain = {
            "profile": self._deal(f"{sort} profile", ("wait", "compute")),
            "split": self._deal("watched", (True, False)),
            "seed": self._rng.randrange(1 << 30),
            **values,
        }
        return Row(number, sort, name, self._n_ranks, self._n_steps, truth=truth, **plain)

    def _delay(self, sort: str, where: str, rank: int, fraction: float) -> tuple[str, Delay]:
        course = self._deal(f"{sort} course", COURSES)
        busy = self._deal(f"{sort} busy", (False, True))
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
        return course, Delay(where, (rank,), fraction, first, last, every, full_at, busy)

    def _onset(self) -> int:
        """A step late enough for windows before it, and early enough for whole windows after it."""
        return self._rng.randrange(int(0.45 * self._n_steps), int(0.65 * self._n_steps))

    def _local(self, number: int) -> Row:
        where = self._deal("place", LOCAL_PLACES)
        rank = self._deal("rank", range(self._n_ranks))
        course, delay = self._delay("local", where, rank, self._deal("fraction", FRACTIONS))
        truth = Truth("suspect", "rank", (rank,), STAGE_OF[where], delay.first)
        return self._row(number, "local", f"{where}-{course}", truth, delays=(delay,))

    def _split(self, number: int) -> Row:
        rank = self._deal("rank", range(self._n_ranks))
        fraction = self._deal("split fraction", FRACTIONS[2:])
        course, delay = self._delay("split", "backward", rank, fraction)
        truth = Truth("suspect", "rank", (rank,), "backward", delay.first)
        return self._row(number, "split", f"backward-{course}", truth, delays=(delay,), split=True)

    def _outside(self, number: int) -> Row:
        how = self._deal("pressure", tuple(STRENGTHS))
        rank = self._deal("rank", range(self._n_ranks))
        strength = self._deal(how, STRENGTHS[how])
        first = self._deal("outside first", (0, self._onset()))
        truth = Truth("suspect", "rank", (rank,), None, first)
        pressure = Pressure(how, rank, strength, first)
        # A rank that sleeps is not slower for being stopped meanwhile: only one that computes is.
        return self._row(number, "outside", how, truth, pressure=pressure, profile="hungry")

    def _host(self, number: int) -> Row:
        hosts = self._hosts()
        ranks = tuple(rank for rank, host in enumerate(hosts) if host == "node-1")
        where = self._deal("host place", ("data", "all", "forward", "all", "optimizer", "h2d"))
        fraction = self._deal("host fraction", FRACTIONS[4:])
        first = self._deal("host first", (0, self._onset()))
        busy = self._deal("host busy", (False, True))
        places = ("data", "h2d", "forward", "optimizer") if where == "all" else (where,)
        delays = tuple(Delay(place, ranks, fraction / len(places), first, self._n_steps, busy=busy) for place in places)
        truth = Truth("suspect", "host", ranks, None if where == "all" else where, first)
        return self._row(number, "host", where, truth, delays=delays, hosts=hosts)

    def _hosts(self) -> tuple[str, ...]:
        """A host of several ranks, at most half of them, that may be slow, and other hosts of as many or fewer."""
        of_one = self._rng.randrange(2, self._n_ranks // 2 + 1) if self._n_ranks >= 4 else 2
        slow_at = self._rng.randrange(0, self._n_ranks // of_one)
        names = [f"node-{2 + rank // of_one}" for rank in range(self._n_ranks)]
        for rank in range(slow_at * of_one, (slow_at + 1) * of_one):
            names[rank] = "node-1"
        return tuple(names)

    def _hold(self, number: int) -> Row:
        name = self._deal("hold", HOLDS)
        fraction = self._deal("hold fraction", FRACTIONS[5:])
        if name == "missing":
            rank = self._deal("rank", range(self._n_ranks))
            return self._row(number, "hold", name, Truth("needs_evidence"), missing=rank)
        busy = self._deal("hold busy", (False, True))
        first = self._deal("hold first", (0, self._onset()))
        if name == "in-sync":
            # From the first step on it would be the job's own backward. From 35 %: what all ranks share counts from 15.
            rank = self._deal("rank", range(self._n_ranks))
            delay = Delay("backward", (rank,), max(fraction, 0.35), self._onset(), self._n_steps, busy=busy)
            truth = Truth("needs_evidence", ranks=(rank,), onset=delay.first)
            return self._row(number, "hold", name, truth, delays=(delay,), split=False)
        if name == "roaming":
            ranks = tuple(range(self._n_ranks))
            where = self._deal("roaming place", LOCAL_PLACES)
            delay = Delay(where, ranks, fraction, first, self._n_steps, busy=busy, roams=True)
            truth = Truth("needs_evidence", ranks=ranks, onset=first)
            return self._row(number, "hold", name, truth, delays=(delay,))
        pair = tuple(self._rng.sample(range(self._n_ranks), 2))
        # Of two ranks that are slow in the same stage, nothing would show that they are.
        same = self._n_ranks > 2 and self._deal("same place", (False, True))
        places = self._rng.sample(LOCAL_PLACES[:4], 2)
        places = [places[0], places[0]] if same else places
        delays = tuple(
            Delay(place, (rank,), fraction, first, self._n_steps, busy=busy)
            for place, rank in zip(places, pair, strict=True)
        )
        truth = Truth("needs_evidence", ranks=tuple(sorted(pair)), onset=first)
        return self._row(number, "hold", name, truth, delays=delays)

    def _healthy(self, number: int) -> Row:
        name = self._deal("healthy", HEALTHY)
        truth = Truth("healthy")
        if name.startswith("checkpoint"):
            ranks = (0,) if name == "checkpoint-0" else tuple(range(self._n_ranks))
            return self._row(number, "healthy", name, truth, checkpoint_every=25, checkpoint_ranks=ranks)
        if name in ("varied", "doubled"):
            return self._row(number, "healthy", name, truth, work=name)
        return self._row(number, "healthy", name, truth)
