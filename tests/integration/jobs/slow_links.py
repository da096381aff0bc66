"""Links on which a message takes as long as it is said to: it really goes over Gloo, held back for so long."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from sftriage.mitigate import stragglar


def hold_back(latency_s: float, s_per_byte: float) -> None:
    """Have every exchange of StragglAR's, and of the ring below, take what its message takes on such a link."""

    def transfer(self, sent, received):  # type: ignore[no-untyped-def]
        works = [dist.irecv(chunk, peer, self._group) for peer, chunk in received]
        for peer, chunk in sent:
            time.sleep(latency_s + s_per_byte * chunk.numel() * chunk.element_size())
            works.append(dist.isend(chunk, peer, self._group))
        for work in works:
            work.wait()

    stragglar._Exchange._transfer = transfer  # type: ignore[method-assign]


class Ring(stragglar._Exchange):
    """An all-reduce in a ring: each rank's sums go once around, and then the whole sums."""

    def __init__(self, gradient: torch.Tensor, ranks: list[int], group: dist.ProcessGroup) -> None:
        super().__init__(gradient, ranks, group)
        self._chunks = gradient.tensor_split(len(ranks))
        self._received = torch.empty_like(self._chunks[0])

    def run(self) -> None:
        n, me = len(self._ranks), self._me
        after, before = self._ranks[(me + 1) % n], self._ranks[(me - 1) % n]
        for number in range(2 * (n - 1)):
            sent, own = self._chunks[(me - number) % n], self._chunks[(me - number - 1) % n]
            received = self._received[: own.numel()]
            self._transfer([(after, sent)], [(before, received)])
            if number < n - 1:
                own.add_(received)
            else:
                own.copy_(received)
