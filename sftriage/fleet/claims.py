"""Who has which rank: no agent tells of a process that is another's, or of a rank that another one has just now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from sftriage.fleet.messages import Incarnation, Shipment
from sftriage.recorder.layout import RingInfo

FRESH_S = 3.0
"""For how long it counts what a host has said of its ranks. No job starts again elsewhere within that."""
MAX_PROCESSES = 1 << 20
_NOTHING: tuple[float, frozenset[int]] = -FRESH_S, frozenset()


class Claims:
    """The processes that agents tell of, and the ranks that they say are alive, by the hub's clock."""

    def __init__(self) -> None:
        self._whose: dict[Incarnation, str] = {}
        # Of each agent, the rings that it told of last: the same object, for as long as they stay the same.
        self._rings: dict[str, tuple[str, Mapping[int, RingInfo]]] = {}
        # Of each agent, what it has said is alive, and when; and the same by rank.
        self._alive: dict[str, tuple[float, frozenset[int]]] = {}
        self._having: defaultdict[int, tuple[str, ...]] = defaultdict(tuple)

    def refused(self, shipment: Shipment, sent_s: float) -> str:
        """Why a message cannot be so, that was sent at ``sent_s``; "" where it can, and is taken note of."""
        agent = shipment.agent
        status, blocks = shipment.status, shipment.blocks
        newest = max((one.rows.generation for one in blocks), default=0) if status is None else status.attempt
        # (what was a rank before its host's newest start may be another host's by now)
        boot_id, rings = self._rings.get(agent, ("", None))
        told = [one.infos for one in blocks if one.rows.generation >= newest]
        told = [infos for infos in told if infos is not rings or shipment.boot_id != boot_id]
        ones = [Incarnation.of(shipment.boot_id, info) for infos in told for info in infos.values()]
        new = [one for one in ones if self._whose.get(one) != agent]
        for rank in sorted({one.rank for one in new}):
            for other in self._having.get(rank, ()):
                if other != agent and abs(sent_s - self._alive[other][0]) < FRESH_S:
                    return f"it tells of rank {rank}, which host {other} has"
        if len(self._whose) > MAX_PROCESSES:
            self._whose.clear()
            self._rings.clear()
        self._whose.update(dict.fromkeys(new, agent))
        if told:
            self._rings[agent] = shipment.boot_id, told[-1]
        if status is not None:
            alive_R = (status.alive_R == 1) & (status.closed_R == 0)
            self._note(agent, sent_s, status.rank_R[alive_R].tolist())
        return ""

    def _note(self, agent: str, sent_s: float, ranks: Iterable[int]) -> None:
        _, before = self._alive.get(agent, _NOTHING)
        alive = frozenset(ranks)
        self._alive[agent] = sent_s, alive
        for rank in before ^ alive:
            others = tuple(other for other in self._having[rank] if other != agent)
            self._having[rank] = (*others, agent) if rank in alive else others
