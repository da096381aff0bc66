"""In which order modes follow one another. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator


def shuffled_rounds(names: list[str], rounds: int, order: random.Random) -> Iterator[str]:
    """Every name once a round, in an order of the round's own."""
    for _ in range(rounds):
        yield from order.sample(names, len(names))
