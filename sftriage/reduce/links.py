"""What ties events to others, as a set of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftriage.reduce.intervals import Ints


class Links:
    """Numbers of which it is asked whether they are among these; what is below 0 ties nothing."""

    def __init__(self, parts: Iterable[Ints] = ()) -> None:
        self._parts: list[NDArray[Any]] = []
        for part in parts:
            self.add(part)

    def add(self, link_E: Ints) -> None:
        """Take more of them, in as few bytes as they need: they may be those of half the events."""
        links = np.unique(link_E[link_E >= 0])
        if len(links):
            self._parts.append(links.astype(np.min_scalar_type(int(links[-1]))))

    def __bool__(self) -> bool:
        return bool(self._parts)

    def have(self, link_E: Ints) -> NDArray[np.bool_]:
        """Of each number whether it is one of these."""
        if not self._parts:
            return np.zeros(len(link_E), dtype=np.bool_)
        if len(self._parts) > 1:
            self._parts = [np.unique(np.concatenate(self._parts))]
        (links,) = self._parts
        possible_E = (link_E >= 0) & (link_E <= int(links[-1]))
        # Of one type, or all of these would be widened for each question.
        asked_E = np.where(possible_E, link_E, 0).astype(links.dtype)
        return np.asarray(possible_E & (links[np.searchsorted(links, asked_E)] == asked_E))
