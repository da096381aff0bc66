"""What connections may take, before anybody is asked for a token: so many at a time, so many a peer, so long to speak.

uvicorn bounds the size of a request's head and the pause between two requests, and nothing else: a head may come byte
by byte and never end, an answer may never be taken, and once ``limit_concurrency`` connections are open everybody else
is answered 503. Here every connection that owes something, the head of a request or the reading of an answer, is let go
of when it has owed it for too long. When there are too many, the one that has owed the longest goes, of the peer that
has the most: whoever asks and reads is served, however many others only hold on.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 10.0
"""How long a peer may take to say what it wants: from when it connects, or has been answered."""

ANSWER_S = 60.0
"""How long a peer may take to read what the server holds for it (the most is 64 KiB, and 16 KiB stay)."""

SPARED_S = 2.0
"""A peer that reads loses its connection to nobody else before it has kept the server waiting for so long."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many connections may be open at a time: in all, and of one peer."""

    connections: int
    per_peer: int

    @classmethod
    def of(cls, connections: int) -> Bounds:
        """So many in all; half of them for any one peer."""
        return cls(connections, max(1, connections // 2))


class Held(Protocol):
    """A connection."""

    @property
    def peer(self) -> str:
        """Who is at the other end."""

    @property
    def owes_since_s(self) -> float | None:
        """Since when it has owed a request or the reading of an answer; None while it owes nothing."""

    @property
    def reads(self) -> bool:
        """Whether something is held that it is to read."""


def one_too_many(newest: Held, held: Collection[Held], bounds: Bounds, now_s: float) -> Held | None:
    """The connection to let go of now that ``newest`` of those that are ``held`` has come; None while there is room."""
    counts = Counter(one.peer for one in held)
    if counts[newest.peer] > bounds.per_peer:
        held = [one for one in held if one.peer == newest.peer]
    elif len(held) <= bounds.connections:
        return None
    owing = [
        (-counts[one.peer], one.owes_since_s, number, one)
        for number, one in enumerate(held)
        if one is not newest and one.owes_since_s is not None
        if not one.reads or now_s - one.owes_since_s >= SPARED_S
    ]
    return min(owing)[-1] if owing else newest


def peer_of(address: str) -> str:
    """Who is behind an address: of IPv6, all of a network of 64 bits is one's own."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if ip.version == 6 and (mapped := ip.ipv4_mapped) is not None:
        return str(mapped)
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False))


class BoundedProtocol(H11Protocol):
    """uvicorn's own for HTTP/1.1, within bounds. Of a server all connections have to be such.

    Attributes:
        peer: who is at the other end.
        owes_since_s: since when it has owed a request or the reading of an answer, on the loop's clock.
    """

    def __init__(self, *args: Any, bounds: Bounds, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bounds = bounds
        self._timer: asyncio.TimerHandle | None = None
        self.peer = ""
        self.owes_since_s: float | None = None

    @property
    def reads(self) -> bool:
        """Whether something is held that it is to read."""
        return self.transport.get_write_buffer_size() > 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Somebody has connected."""
        super().connection_made(transport)
        self.peer = peer_of(self.client[0] if self.client else "")
        self._owe()
        leaving = one_too_many(self, self.connections, self._bounds, self.loop.time())  # type: ignore[arg-type]  # ours
        if isinstance(leaving, BoundedProtocol):
            leaving._drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """More of what it says has come."""
        super().handle_events()
        self._settle()

    def on_response_complete(self) -> None:
        """It has been answered, and may ask for more."""
        self._owe()
        if self.conn.trailing_data[0]:
            # No browser asks for more before it has been answered; hundreds of requests at a time keep others waiting.
            self.transport.close()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """It does not read as fast as it is answered."""
        super().pause_writing()
        self._owe()

    def resume_writing(self) -> None:
        """It has read most of what was held for it."""
        super().resume_writing()
        self._owe()
        self._settle()

    def _owe(self) -> None:
        if self not in self.connections:
            return
        self.owes_since_s = self.loop.time()
        if self._timer is None:
            self._timer = self.loop.call_later(REQUEST_S, self._look)

    def _settle(self) -> None:
        """A request that is being answered owes nothing, as long as the answer is read."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and not self.flow.write_paused:
            self.owes_since_s = None

    def _look(self) -> None:
        self._timer = None
        if self.owes_since_s is None:
            return
        left_s = self.owes_since_s + (ANSWER_S if self.reads else REQUEST_S) - self.loop.time()
        if left_s > 0:
            self._timer = self.loop.call_later(left_s, self._look)
        else:
            self._drop()

    def _drop(self) -> None:
        # At once: to close would be to wait until all that is held has been read.
        self.connections.discard(self)
        self.transport.abort()
