"""A report as one file of HTML: pictures inside, readable without a script, and without anything from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from types import MappingProxyType

import numpy as np

from sftriage.runs.lateness import UNKNOWN, HeatMap, Lanes
from sftriage.runs.report import RunReport
from sftriage.traces.manifest import Manifest
from sftriage.traces.stores import Store, beside
from sftriage.web.charts import Timeline, bars_of
from sftriage.web.flames import FlameGraph, StackDownloads
from sftriage.web.page import templates

SHADES = 8
"""So many shades of lateness are told apart in the picture; the first is in time, and not drawn."""


def shades_of(heat: HeatMap) -> tuple[str, ...]:
    """The heat map as outlines, a unit a cell: of each shade but the first, and last of what is not known.

    Cells in a row of one shade are one rectangle.
    """
    levels_GC = heat.levels_GC.astype(np.int64)
    shade_GC = np.where(levels_GC == UNKNOWN, SHADES, levels_GC * SHADES // UNKNOWN)
    outlines: list[list[str]] = [[] for _ in range(SHADES + 1)]
    for row, shade_C in enumerate(shade_GC):
        ends = [*(np.flatnonzero(np.diff(shade_C)) + 1).tolist(), len(shade_C)]
        start = 0
        for end in ends:
            outlines[shade_C[start]].append(f"M{start} {row}h{end - start}v1h{start - end}z")
            start = end
    return tuple("".join(one) for one in outlines[1:])


def flames_of(store: Store, captures: Sequence[Manifest]) -> dict[str, FlameGraph]:
    """The flame graph of the first of some captures that has one: a few tens of kilobytes."""
    for manifest in captures:
        reference = store.reference(manifest)
        others = ((one, store) for _, one in beside(store, reference, manifest))
        graph = StackDownloads().drawn(manifest, store, others, {})
        if isinstance(graph, FlameGraph):
            return {manifest.capture_id: graph}
    return {}


def html(
    report: RunReport,
    made: str,
    now_s: Callable[[], float],
    chart: Timeline | None = None,
    heat: HeatMap | None = None,
    lanes: Lanes | None = None,
    flames: Mapping[str, FlameGraph] = MappingProxyType({}),
) -> str:
    """The whole file.

    Args:
        report: what is said.
        made: by what, and when.
        now_s: seconds since the epoch.
        chart: where the time of the run's steps went.
        heat: who was late, and when.
        lanes: the captured steps, of a report of one capture.
        flames: by capture, where its time went function by function.
    """
    static = files("sftriage.web").joinpath("static")
    style = static.joinpath("page.css").read_text(encoding="utf-8")
    template = templates({}, now_s).get_template("report.html")
    return template.render(
        report=report,
        made=made,
        style=style,
        chart=chart,
        heat=heat,
        shades=() if heat is None else shades_of(heat),
        lanes=lanes,
        flames=flames,
        bars={one.capture_id: bars_of(one.manifest.findings) for one in report.captures},
    )
