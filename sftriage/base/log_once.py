"""Messages that are true at every turn, logged once."""

from __future__ import annotations

import logging
from collections.abc import Hashable


class LogOnce:
    """Logs each message once, or one for each ``key``."""

    def __init__(self, logger: logging.Logger, level: int = logging.WARNING) -> None:
        self._logger, self._level = logger, level
        self._known: set[Hashable] = set()

    def __call__(self, message: str, *arguments: object, key: Hashable = None) -> None:
        """Log a message with its arguments, unless it was logged already."""
        if self.is_new(key or (message % arguments if arguments else message)):
            self._logger.log(self._level, message, *arguments)

    def is_new(self, key: Hashable) -> bool:
        """Whether a key comes for the first time."""
        known = key in self._known
        self._known.add(key)
        return not known
