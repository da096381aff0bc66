"""From what is known of a store of many jobs to HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from sftriage.errors import InputError
from sftriage.traces.keys import Place
from sftriage.traces.manifest import Manifest
from sftriage.traces.rows import CaptureRow
from sftriage.web.bars import bars_of
from sftriage.web.filters import ANSWERS, PROFILERS, Filter
from sftriage.web.rendering import Templates
from sftriage.web.store_source import StoreView

PAGE_SIZE = 50
MAX_OFFERED = 200
"""Jobs, runs and stages that a field offers."""

MAX_BESIDE = 12
"""Other captures of a run that its captures' pages lead to."""


class StorePages:
    """Makes the pages about a store.

    Args:
        static: see `Templates`.
        place: where the store is.
        now_s: see `Templates`.
    """

    def __init__(self, static: Mapping[str, str], place: str, now_s: Callable[[], float]) -> None:
        self._templates, self._place = Templates(static, now_s), place

    def captures(self, view: StoreView, asked: Filter, rows: Sequence[CaptureRow], number: int) -> str:
        """A page of the captures that are asked for; a number past the end is the last page."""
        pages = max(1, -(-len(rows) // PAGE_SIZE))
        number = min(max(number, 1), pages)
        shown = rows[(number - 1) * PAGE_SIZE : number * PAGE_SIZE]
        return self._made(
            "store.html",
            view,
            asked=asked,
            rows=[(_link(row), row) for row in shown],
            found=len(rows),
            number=number,
            pages=pages,
            jobs=view.names("job")[:MAX_OFFERED],
            runs=view.names("run")[:MAX_OFFERED],
            stages=view.names("stage")[:MAX_OFFERED],
            answers=ANSWERS,
            profilers=PROFILERS,
        )

    def capture(self, view: StoreView, manifest: Manifest, store: str, of_run: Sequence[CaptureRow]) -> str:
        """One capture; ``store`` is where it lies, and ``of_run`` the captures of its run."""
        others = [(_link(row), row) for row in of_run if row.capture_id != manifest.capture_id]
        return self._made(
            "capture.html",
            view,
            layout="store_base.html",
            address=address_of(Place.of(manifest)),
            manifest=manifest,
            bars=bars_of(manifest.findings),
            asked=None,
            lanes=None,
            cost=manifest.cost,
            upload=None,
            store=store,
            beside=others[:MAX_BESIDE],
        )

    def refused(self, status: int, detail: str) -> str:
        """A request that is not answered."""
        view = StoreView(self._place)
        return self._made("refused.html", view, layout="store_base.html", title=f"{status}", detail=detail)

    def _made(self, template: str, view: StoreView, **values: Any) -> str:
        return self._templates.made(template, view=view, **values)


def address_of(place: Place) -> str:
    """Where the page of a capture is: its key, whose own escapes are escaped once more."""
    return f"/captures/{quote(place.key)}"


def _link(row: CaptureRow) -> str:
    try:
        return address_of(Place(row.job, row.run, row.capture_id))
    except InputError:
        return "/"
