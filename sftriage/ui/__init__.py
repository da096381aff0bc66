"""A read-only web page about one run: is the job healthy, since when not, which stage and rank, and what was done.

`journal`, `notes` and `steps` follow a run's files without reading anything twice; `outlook`, `timeline`, `lateness`,
`lanes` and `decisions` make of them what a page shows, pure; `source` holds them together for one run; `guard` keeps
out who has no business here; `answers` and `app` answer requests. Beside it is a page about a store that holds the
captures of many runs: `store_source`, `filters`, `store_pages` and `store_app`.

What follows a run needs nothing but what sftriage is installed with; what serves the page needs the extra ``ui``, and
is imported when it is first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sftriage.access import Access
from sftriage.lazily import from_modules

if TYPE_CHECKING:
    from sftriage.ui.app import create_app
    from sftriage.ui.source import RunSource
    from sftriage.ui.store_app import create_store_app
    from sftriage.ui.store_source import StoreSource
else:
    __getattr__ = from_modules(
        __name__,
        {
            "app": ("create_app",),
            "source": ("RunSource",),
            "store_app": ("create_store_app",),
            "store_source": ("StoreSource",),
        },
    )

__all__ = ["Access", "RunSource", "StoreSource", "create_app", "create_store_app"]
