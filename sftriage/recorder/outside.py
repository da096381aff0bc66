"""The time outside every stage, shared out among the sync stages that it came before."""

from __future__ import annotations

from array import array
from collections.abc import Mapping


def split_outside(words: array[int], outside: Mapping[int, int]) -> None:
    """Take from each sync stage's outside time what the sync stages before it have claimed.

    Args:
        words: a slot, in which each sync stage's outside time counts from the start of the step.
        outside: of each sync stage the word of its outside time, in the order of the step.
    """
    claimed = 0
    for at in outside.values():
        own = max(0, words[at] - claimed)
        words[at] = own
        claimed += own
