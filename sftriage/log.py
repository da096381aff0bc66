"""How the recorder speaks up in somebody else's process: seldom, through the logger ``sftriage``, never raising."""

from __future__ import annotations

import logging
from contextlib import suppress

_LOG = logging.getLogger("sftriage")


def warn(message: str, *arguments: object) -> None:
    """Log one warning. What the job's own handlers and filters raise, or an argument's ``repr``, goes no further."""
    with suppress(Exception):
        _LOG.warning(f"sftriage: {message}", *arguments)
