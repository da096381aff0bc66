"""The pictures of a run of the bench: false names by load, what is found and how soon by size, and the trade-off."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from bench.long_run_parts.charts import Axis, Chart, Point, Series
from bench.long_run_parts.faults import COURSES, SIZES
from bench.long_run_parts.jobs import LOADS
from bench.long_run_parts.report import RULES
from bench.long_run_parts.rules import OURS

LEAST_RATE = 0.05
"""What a logarithmic axis of rates begins with: none at all is drawn there, and its interval tells how sure that is."""
TARGET = 0.1
"""At most one false capture in ten million steps."""
SIZE_NAMES = tuple(f"{size:.0%}" for size in SIZES)

Row = dict[str, Any]


def pictures(found: Row) -> dict[str, str]:
    """All pictures by file name; those that there is nothing to show of are left out."""
    drawn = {
        "false-names.svg": _by_load(found, "false_names_per_million", "False names in healthy jobs"),
        "false-captures.svg": _by_load(found, "false_captures_per_million", "False captures in healthy jobs"),
        "found.svg": _by_size(found, "found_fraction", "One slow rank: share found", RULES),
        "delay.svg": _delays(found),
        "trade-off.svg": _trade_off(found["trade_off"]),
    }
    return {name: chart.svg() for name, chart in drawn.items() if any(series.points for series in chart.series)}


def _rate_axis(rates: Iterable[Sequence[float]]) -> Axis:
    most = max((rate[2] for rate in rates), default=10.0)
    high = 10.0 ** math.ceil(math.log10(max(10.0, most)))
    return Axis("per million healthy steps (0 is at the left end), 95 % interval", LEAST_RATE, high, log=True)


def _by_load(found: Row, what: str, title: str) -> Chart:
    rows = [row for row in found["healthy"]["by_load"] if row.get(what)]
    series = []
    rules = [rule for rule in RULES if any(row["rule"] == rule for row in rows)]
    for at, rule in enumerate(rules):
        points = [
            # Those of a load side by side, the first rule on top.
            Point(row[what][0], LOADS.index(row["load"]) + 0.3 - 0.6 * (at + 0.5) / len(rules), *row[what][1:])
            for row in rows
            if row["rule"] == rule
        ]
        series.append(Series(rule, points))
    y = Axis("what else ran on the machine", -0.5, len(LOADS) - 0.5, names=LOADS)
    x = _rate_axis(row[what] for row in rows)
    marks = [("x", TARGET, "goal")] if what == "false_captures_per_million" else []
    return Chart(title, x, y, series, whiskers="x", marks=marks, left=110)


def _by_size(found: Row, what: str, title: str, rules: Sequence[str]) -> Chart:
    rows = [row for row in found["faults"]["by_size"] if row["scope"] == "rank"]
    series = [
        Series(rule, [Point(SIZES.index(row["size"]), row[what]) for row in rows if row["rule"] == rule], joined=True)
        for rule in rules
    ]
    y = Axis("share of the faults", 0.0, 1.0, percent=True)
    return Chart(title, _sizes(), y, series)


def _delays(found: Row) -> Chart:
    rows = [
        row
        for row in found["faults"]["by_size_and_course"]
        if row["rule"] == OURS and row["scope"] == "rank" and row["found"]
    ]
    series = []
    for at, course in enumerate(COURSES):
        points = [
            # Beside one another: whiskers end where 95 % of those that are found have their name.
            Point(SIZES.index(row["size"]) + 0.08 * (at - 1.5), row["steps_to_name"][0], *row["steps_to_name"])
            for row in rows
            if row["course"] == course
        ]
        series.append(Series(course, points, joined=True))
    y = Axis("steps from onset to name (median to 95 %)", 1.0, 1000.0, log=True)
    return Chart("One slow rank: how soon it is named", _sizes(), y, series, marks=[("y", 100.0, "100 steps")])


def _sizes() -> Axis:
    return Axis("delay, in percent of the step", -0.4, len(SIZES) - 0.6, names=SIZE_NAMES)


def _trade_off(points: Sequence[Row]) -> Chart:
    rates = [point["healthy"]["false_names_per_million"] for point in points]
    series = []
    for point, rate in zip(points, rates, strict=True):
        faults = point["rank_faults_from_5_percent"]
        note = f"{faults['found_fraction']:.0%} found"
        if faults["steps_to_name"][0] is not None:
            at = Point(rate[0], faults["steps_to_name"][0], rate[1], rate[2], note)
            series.append(Series(point["variant"], [at]))
    most = max((one.points[0].y for one in series), default=100.0)
    y = Axis("median steps from onset to name", 0.0, 50.0 * math.ceil(1.2 * most / 50.0))
    title = "Sensitivity: false names against delay, faults from 5 % on"
    return Chart(title, _rate_axis(rates), y, series, whiskers="x")
