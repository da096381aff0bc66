"""Events that are written as two, one where they begin and one where they end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sftriage.errors import InputError
from sftriage.reduce.columns import Columns
from sftriage.reduce.events import Trace
from sftriage.reduce.intervals import Ints

IGNORED: Final = 7
"""The kind of an event that does not matter."""

MAX_OPEN = 1_000_000

_ENDS: Final = 8


@dataclass(slots=True)
class Paired:
    """How many events came of the halves, how many of them began at a moment or later, and the halves left over."""

    n_pairs: int = 0
    n_dated: int = 0
    n_left: int = 0


class Halves:
    """Keeps halves until all are there, for they are in no order, and puts them together."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._halves = Columns(columns.source)

    def add(
        self,
        moment_ns_E: Ints,
        ends_E: NDArray[np.bool_],
        kind_E: NDArray[np.uint8],
        name_E: NDArray[np.int32],
        track_E: NDArray[np.int32],
    ) -> None:
        """Take halves; names and tracks are numbers of the columns that the whole events go to."""
        nothing_E = np.zeros(len(moment_ns_E), dtype=np.int64)
        self._halves.add_all(moment_ns_E, nothing_E, kind_E + _ENDS * ends_E, name_E, track_E, nothing_E)

    def pair(self, dated_ns: int) -> Paired:
        """Put beginnings and ends together by their nesting, and the events that come of it into the columns.

        Raises:
            InputError: too many are open at once.
        """
        paired = Paired()
        open_halves: dict[int, list[tuple[int, int, int]]] = {}
        blocks = self._halves.finish()
        for _, slab in Trace(self._columns.source, blocks, (), (), absolute=False).slabs():
            # An end comes before a beginning at the same moment.
            order = np.lexsort((slab.kind_E < _ENDS, slab.start_E))
            rows = (column[order].tolist() for column in (slab.start_E, slab.kind_E, slab.name_E, slab.track_E))
            for moment_ns, kind, name, track in zip(*rows, strict=True):
                opened = open_halves.setdefault(track, [])
                if kind < _ENDS:
                    opened.append((moment_ns, kind, name))
                elif not opened:
                    paired.n_left += 1
                else:
                    start_ns, its_kind, its_name = opened.pop()
                    if its_kind != IGNORED:
                        self._columns.add(start_ns, moment_ns - start_ns, its_kind, its_name, track, -1)
                        paired.n_pairs += 1
                        paired.n_dated += start_ns >= dated_ns
            if sum(map(len, open_halves.values())) > MAX_OPEN:
                raise InputError(f"{self._columns.source}: more than {MAX_OPEN} events begin and do not end")
        paired.n_left += sum(map(len, open_halves.values()))
        return paired
