"""A read-only web page about one run: is the job healthy, since when not, which stage and rank, and what was done.

`journal`, `notes` and `steps` follow a run's files without reading anything twice; `outlook`, `timeline`, `lateness`,
`lanes` and `decisions` make of them what a page shows, pure; `source` holds them together for one run; `guard` keeps
out who has no business here; `answers` and `app` answer requests. Beside it is a page about a store that holds the
captures of many runs: `store_source`, `filters`, `store_pages` and `store_app`.

What follows a run needs nothing but what sftriage is installed with; what serves the page needs the extra ``ui``, and
is imported when it is first named.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sftriage.access import Access

if TYPE_CHECKING:
    from sftriage.ui.app import create_app as create_app
    from sftriage.ui.source import RunSource as RunSource
    from sftriage.ui.store_app import create_store_app as create_store_app
    from sftriage.ui.store_source import StoreSource as StoreSource

_HOMES = {
    "RunSource": "sftriage.ui.source",
    "StoreSource": "sftriage.ui.store_source",
    "create_app": "sftriage.ui.app",
    "create_store_app": "sftriage.ui.store_app",
}

__all__ = ["Access", "RunSource", "StoreSource", "create_app", "create_store_app"]


def __getattr__(name: str) -> Any:
    """Import a name from its module when it is first used (PEP 562)."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'sftriage.ui' has no attribute {name!r}")
