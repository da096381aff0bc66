"""Which ranks belong together: the controller's own count of a job's starts, told by the processes of its ranks.

No host knows it. Under torchrun only the node that failed counts a restart, and one that is replaced counts from 0.
But a rank that starts again is another process, and in a job that exchanges gradients all ranks start again with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from sftriage.fleet.wire import Incarnation

KEPT_GENERATIONS = 8
GOES_ON_S = 10.0
"""A rank that takes steps so long after a generation began is of it: its collectives would wait for it for ever."""


class Known(msgspec.Struct, frozen=True):
    """What is to be known again by a controller that takes over; the processes are those of `Incarnation`."""

    newest: int = -1
    began_s: float = 0.0
    of: tuple[tuple[Incarnation, int], ...] = ()


NOTHING_KNOWN = Known()


class Generations:
    """The generations of a job, newest last. Times are seconds on one clock, whichever it is.

    Attributes:
        newest: the newest one, -1 before there is any.
    """

    def __init__(self, known: Known = NOTHING_KNOWN) -> None:
        self.newest, self._began_s = known.newest, known.began_s
        self._of: dict[Incarnation, int] = dict(known.of)
        self._members: dict[int, Incarnation] = {one.rank: one for one, of in known.of if of == known.newest}

    @property
    def known(self) -> Known:
        """What there is to keep."""
        return Known(self.newest, self._began_s, tuple(self._of.items()))

    def of(self, one: Incarnation) -> int | None:
        """The generation of a process; None where it is not known any more, or was never seen."""
        return self._of.get(one)

    def take(self, seen: Sequence[Incarnation], stepping: Iterable[Incarnation], now_s: float) -> bool:
        """Take note of the processes of one host's newest start, ``stepping`` those that have just taken steps.

        One whose rank is another process's by now opens a generation, and the others join that as they are seen.
        Whether anything has changed.
        """
        before = self.newest, len(self._of), self._began_s
        for one in seen:
            if one in self._of:
                continue
            if self.newest < 0 or one.rank in self._members:
                self._open(now_s)
            self._join(one)
        moved = False
        if now_s > self._began_s + GOES_ON_S:
            # It was seen before its host was heard of: with the others, it has started again long ago.
            late = [one for one in stepping if self._of.get(one, self.newest) < self.newest]
            for one in late:
                if one.rank not in self._members:
                    self._join(one)
                    moved = True
        return moved or before != (self.newest, len(self._of), self._began_s)

    def _open(self, now_s: float) -> None:
        self.newest, self._began_s = self.newest + 1, now_s
        self._members = {}
        oldest = self.newest - KEPT_GENERATIONS
        self._of = {one: of for one, of in self._of.items() if of > oldest}

    def _join(self, one: Incarnation) -> None:
        self._of[one] = self.newest
        self._members[one.rank] = one
