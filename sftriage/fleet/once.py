"""Steps that come twice, after a restart of an agent or of the controller, are told once; missing ones are counted."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sftriage.fleet.wire import Incarnation
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
        """Those steps of some ranks, each of which is ``of`` a process, that have not been told."""
        ranks_K = np.fromiter(sorted(of), np.int64, len(of))
        known = [self._last_seq.get(of[rank]) for rank in ranks_K.tolist()]
        last_K = np.array([0 if last is None else last for last in known], dtype=np.int64)
        at_B = np.searchsorted(ranks_K, steps.rank_B)
        at_B[at_B == len(ranks_K)] = 0
        seq_B = steps.seq_B
        new_B = (ranks_K[at_B] == steps.rank_B) & (seq_B > last_K[at_B])
        if not new_B.all():
            steps, at_B, seq_B = steps[new_B], at_B[new_B], seq_B[new_B]
        if not len(steps):
            return steps
        highest_K, lowest_K = last_K.copy(), np.full(len(last_K), np.iinfo(np.int64).max)
        np.maximum.at(highest_K, at_B, seq_B)
        np.minimum.at(lowest_K, at_B, seq_B)
        # (of a process that was not known, what it took before nobody has asked for)
        first_K = np.where([last is None for last in known], lowest_K, last_K + 1)
        came_K = highest_K > last_K
        self.steps += len(steps)
        self.missed += int((highest_K - first_K + 1)[came_K].sum()) - len(steps)
        for rank, seq in zip(ranks_K[came_K].tolist(), highest_K[came_K].tolist(), strict=True):
            self._last_seq[of[rank]] = seq
        return steps
