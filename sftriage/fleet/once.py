"""Steps that come twice, after a restart of an agent or of the controller, are told once; missing ones are counted."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sftriage.fleet.messages import Incarnation
from sftriage.windows.decoding import StepArrays


class Once:
    """Knows the last step of each process that was told.

    Attributes:
        steps: how many have been.
        missed: how many between them have not come.
    """

    def __init__(self) -> None:
        self.steps = self.missed = 0
        self._last_seq: dict[Incarnation, int] = {}

    def new(self, steps: StepArrays, of: Mapping[int, Incarnation]) -> StepArrays:
        """Those steps of some ranks, each of which is ``of`` a process, that have not been told, in whatever order."""
        # (mostly a few steps of each: a loop is over before numpy has begun)
        before = {rank: self._last_seq.get(one) for rank, one in of.items()}
        new: list[bool] = []
        came: dict[int, list[int]] = {}
        for rank, seq in zip(steps.rank_B.tolist(), steps.seq_B.tolist(), strict=True):
            is_new = rank in before and seq > (before[rank] or 0)
            new.append(is_new)
            if is_new:
                came.setdefault(rank, []).append(seq)
        for rank, seqs in came.items():
            last, highest = before[rank], max(seqs)
            # (of a process that was not known, what it took before nobody has asked for)
            first = min(seqs) if last is None else last + 1
            self.steps += len(seqs)
            self.missed += highest - first + 1 - len(seqs)
            self._last_seq[of[rank]] = highest
        return steps if all(new) else steps[np.array(new, dtype=np.bool_)]
