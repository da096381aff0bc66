"""A read-only web page about one run: is the job healthy, since when not, which stage and rank, and what was done.

`journal` and `steps` follow a run's files without reading anything twice; `outlook`, `timeline`, `lateness`, `lanes`
and `decisions` make of them what a page shows, pure; `source` holds them together for one run; `guard` keeps out who
has no business here; `app` answers requests.
"""

from sftriage.ui.app import create_app
from sftriage.ui.guard import Access
from sftriage.ui.source import RunSource

__all__ = ["Access", "RunSource", "create_app"]
