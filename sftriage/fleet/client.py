"""The NATS client, made steady. It is imported where a hub is connected to, and not before: that takes a while."""

from __future__ import annotations

import logging
from typing import Any

from nats.aio.client import Client

log = logging.getLogger("sftriage")


class SteadyClient(Client):
    """One that goes on after a message that it cannot read.

    A subject or a header may be any bytes. Of some of them nats-py (2.16) ends its reading for good and says nothing,
    and from a stream they come again to whoever connects next.
    """

    _said = False

    async def _process_msg(self, *about: Any) -> None:
        try:
            await super()._process_msg(*about)
        except Exception as error:
            if not self._said:
                log.warning("a message that the hub has passed on cannot be read: %s", type(error).__name__)
            self._said = True
