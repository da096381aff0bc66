"""Who has which rank: no agent tells of a process that is another's, or of a rank that another one has just now."""

from __future__ import annotations

from sftriage.fleet.messages import Incarnation, Shipment

FRESH_S = 3.0
"""For how long it counts what a host has said of its ranks. No job starts again elsewhere within that."""
MAX_PROCESSES = 1 << 20


class Claims:
    """The processes that agents tell of, and the ranks that they say are alive, by the hub's clock."""

    def __init__(self) -> None:
        self._whose: dict[Incarnation, str] = {}
        self._alive: dict[str, tuple[float, frozenset[int]]] = {}

    def refused(self, shipment: Shipment, sent_s: float) -> str:
        """Why a message cannot be so, that was sent at ``sent_s``; "" where it can, and is taken note of."""
        agent = shipment.agent
        status, blocks = shipment.status, shipment.blocks
        newest = max((one.rows.generation for one in blocks), default=0) if status is None else status.attempt
        # (what was a rank before its host's newest start may be another host's by now)
        infos = [info for one in blocks if one.rows.generation >= newest for info in one.infos.values()]
        ones = [Incarnation.of(shipment.boot_id, info) for info in infos]
        new = [one for one in ones if self._whose.get(one) != agent]
        ranks = frozenset(one.rank for one in new)
        for other, (said_s, alive) in self._alive.items() if ranks else ():
            if other != agent and abs(sent_s - said_s) < FRESH_S and alive & ranks:
                return f"it tells of rank {min(alive & ranks)}, which host {other} has"
        if len(self._whose) > MAX_PROCESSES:
            self._whose.clear()
        self._whose.update(dict.fromkeys(new, agent))
        if status is not None:
            alive_R = (status.alive_R == 1) & (status.closed_R == 0)
            self._alive[agent] = sent_s, frozenset(status.rank_R[alive_R].tolist())
        return ""
