"""Where commands write: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

from sftriage.records import plain


def results() -> Console:
    """The console for results."""
    return Console(highlight=False)


def notices() -> Console:
    """The console for progress and notices."""
    return Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """One JSON value on one line of stdout."""
    sys.stdout.write(json.dumps(plain(value), allow_nan=False) + "\n")
