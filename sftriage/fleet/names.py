"""An event loop that nobody has to wait for: names are looked up in threads that end with their process.

asyncio's own look them up in a pool whose threads the interpreter joins as it ends, so that a name server that does not
answer holds up whoever is to end by as long as the resolver is patient.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any


class HubLoop(asyncio.SelectorEventLoop):
    """The loop of a connection."""

    async def getaddrinfo(self, host: Any, port: Any, **how: Any) -> Any:
        """What `socket.getaddrinfo` says."""
        answer: asyncio.Future[Any] = self.create_future()

        def tell(what: Callable[[Any], None], found: Any) -> None:
            if not answer.done():
                what(found)

        def look() -> None:
            told: tuple[Callable[[Any], None], Any]
            try:
                told = answer.set_result, socket.getaddrinfo(host, port, **how)
            except Exception as error:
                told = answer.set_exception, error
            with contextlib.suppress(RuntimeError):  # (the loop is closed)
                self.call_soon_threadsafe(tell, *told)

        threading.Thread(target=look, name="sftriage-name", daemon=True).start()
        return await answer
