"""Warnings of the recorder in the trainer's process: rare, through the logger ``sftriage``, never raising."""

from __future__ import annotations

import logging
from contextlib import suppress

_LOG = logging.getLogger("sftriage")


def warn(message: str, *arguments: object) -> None:
    """Log a warning. Exceptions in the job's handlers and filters, or in an argument's ``repr``, are dropped."""
    with suppress(Exception):
        _LOG.warning(f"sftriage: {message}", *arguments)
