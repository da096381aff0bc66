"""What the long run counted: as JSON has it, as a person reads it, and as pictures."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.charts import Axis, Chart, Point, Series
from bench.crew import LOADS
from bench.estimates import quantile
from bench.judging import OURS, RIVALS, Detected, Healthy, Result, Task, per_million
from bench.resampled import COURSES, SIZES

BAR = 0.05
"""Faults from this size on are to be found."""
COST_BARS, COSTS = (0.01, 0.02, 0.05), ("under 1 %", "1 to 2 %", "2 to 5 %", "from 5 %")
"""What a fault costs the job, of its steps' time from the onset on."""
RULES = (OURS, *RIVALS)
LEAST_RATE = 0.05
"""The low end of a logarithmic axis of rates: 0 is drawn there."""
TARGET = 0.1
"""At most one false capture in ten million steps."""

Row = dict[str, Any]
Key = Callable[[Task, Detected | Healthy], Row]


def document(results: Sequence[Result], about: Row, recordings: Sequence[Row]) -> Row:
    """Everything, of results in any order."""
    plain = sorted(results, key=lambda result: result.task.job)
    as_recorded = sum((one["ours"] for one in recordings), Healthy())

    def healthy(key: Key) -> list[Row]:
        return _grouped(plain, "healthy", key, lambda found, ours: healthy_row(sum(found, Healthy()), captures=ours))

    def faults(key: Key, least: float = 0.0, scope: str | None = None) -> list[Row]:
        some = [
            one
            for one in plain
            if one.task.fault is not None and one.task.fault.size >= least and scope in (None, one.task.fault.scope)
        ]
        return _grouped(some, "detected", key, lambda found, ours: faults_row(found, captures=ours))

    def cost(task: Task, found: Any) -> Row:
        return {"scope": task.fault.scope, "cost": COSTS[sum(found.cost_fraction >= least for least in COST_BARS)]}

    return {
        **about,
        "recordings": [{**one, "ours": healthy_row(one["ours"], captures=True)} for one in recordings],
        "healthy": {
            # What is resampled should come out like the recordings themselves, within its interval.
            "as_recorded": [{"rule": OURS, **healthy_row(as_recorded, captures=True)}] if recordings else [],
            "total": healthy(lambda task, _: {}),
            "by_load_and_ranks": healthy(lambda task, _: {"load": task.cell.load, "ranks": task.n_ranks}),
            "by_load": healthy(lambda task, _: {"load": task.cell.load}),
            "by_job": healthy(lambda task, _: {"job": task.cell.job}),
            # One host is as it was recorded; several were not busy at the same time, and one of them was the slowest.
            "by_hosts": healthy(lambda task, _: {"hosts": task.n_ranks // task.cell.n_ranks}),
        },
        "faults": {
            "from_5_percent": faults(_of_fault("scope"), least=BAR),
            "by_cost": [row for row in faults(cost) if row["rule"] == OURS],
            "by_size": faults(_of_fault("scope", "size")),
            "by_course": faults(_of_fault("scope", "course"), least=BAR),
            "by_size_and_course": faults(_of_fault("scope", "size", "course")),
            "by_place": faults(_of_fault("place"), least=BAR, scope="rank"),
            "by_load": faults(lambda task, _: {"load": task.cell.load}, least=BAR, scope="rank"),
            "by_ranks": faults(lambda task, _: {"ranks": task.n_ranks}, least=BAR, scope="rank"),
        },
    }


def _of_fault(*names: str) -> Key:
    return lambda task, _: {name: getattr(task.fault, name) for name in names}


def _grouped(results: Iterable[Result], what: str, key: Key, row: Callable[[list[Any], bool], Row]) -> list[Row]:
    """For each rule and each value of the key a row of what was counted."""
    found: defaultdict[tuple[Any, ...], list[Any]] = defaultdict(list)
    keys: dict[tuple[Any, ...], Row] = {}
    for result in results:
        for rule, one in getattr(result, what).items():
            if rule in RULES:
                fields = key(result.task, one)
                at = (RULES.index(rule), *fields.values())
                found[at].append(one)
                keys[at] = {"rule": rule, **fields}
    return [{**keys[at], **row(found[at], keys[at]["rule"] == OURS)} for at in sorted(keys)]


def healthy_row(found: Healthy, *, captures: bool) -> Row:
    """Rates come with their 95 % interval: [rate, low, high] per million steps."""
    row: Row = {
        "steps": found.steps,
        "hours": round(found.seconds / 3600, 2),
        "windows": found.windows,
        "false_names": found.names,
        "false_names_per_million": _rounded(per_million(found.names, found.steps)),
        "windows_with_name": found.windows_with_name,
    }
    if captures:
        row |= {
            "false_names_descheduled": found.descheduled,
            "false_rank_names": found.whom["rank"],
            "false_rank_names_per_million": _rounded(per_million(found.whom["rank"], found.steps)),
            "false_captures": found.captures,
            "false_captures_per_million": _rounded(per_million(found.captures, found.steps)),
            "labels": dict(sorted(found.labels.items(), key=lambda one: -one[1])),
            "named_scopes": dict(sorted(found.whom.items())),
        }
    return row


def _rounded(values: tuple[float, ...] | None) -> list[float] | None:
    return None if values is None else [float(f"{value:.3g}") for value in values]


def faults_row(found: Sequence[Detected], *, captures: bool) -> Row:
    """Delays are in steps from the onset: [median, 95 %] of those that were found."""
    named = [one.named_after for one in found if one.named_after is not None]
    captured = [one.captured_after for one in found if one.captured_after is not None]
    row: Row = {
        "faults": len(found),
        "found": len(named),
        "found_fraction": round(len(named) / len(found), 3),
        "steps_to_name": [quantile(named, 0.5), quantile(named, 0.95)],
        "stage_right": sum(one.stage_right for one in found),
        "named_in_part": sum(bool(one.in_part) for one in found),
        "with_wrong_name": sum(bool(one.wrong_names) for one in found),
        # Jobs in which each of those named was really held up, by what kept the machine busy while it was recorded.
        "wrong_but_held_up_by_load": sum(0 < one.wrong_names == one.held_up_by_load for one in found),
        "with_early_name": sum(bool(one.early_names) for one in found),
    }
    if captures:
        row |= {
            "captured": len(captured),
            "steps_to_capture": [quantile(captured, 0.5), quantile(captured, 0.95)],
            "with_wrong_capture": sum(bool(one.wrong_captures) for one in found),
        }
    return row


def text(found: Row) -> str:
    """The report in tables."""
    lines = [" ".join(f"{name} {value}" for name, value in found.items() if not isinstance(value, (dict, list))), ""]
    lines += ["false names and captures per million healthy steps (95 % interval), every job judged in windows of 50"]
    lines += ["", "as recorded, not resampled", *_table(found["healthy"]["as_recorded"], _HEALTHY), "", "resampled"]
    for name in ("total", "by_load", "by_load_and_ranks", "by_job", "by_hosts"):
        rows = found["healthy"][name]
        # Of the others what is told by load is enough.
        lines += ["", *_table(rows if name in ("total", "by_load") else _of(rows, OURS), _HEALTHY)]
    lines += ["", "faults: found, steps from onset to name and to capture (median, 95 %), jobs with a wrong name"]
    for name in ("from_5_percent", "by_cost", "by_size", "by_course", "by_place", "by_load", "by_ranks"):
        rows = found["faults"][name]
        lines += ["", *_table(rows if name == "from_5_percent" else _of(rows, OURS), _FAULTS)]
    return "\n".join(lines)


_HEALTHY = {
    "steps": "steps",
    "false_names": "names",
    "false_names_per_million": "a million",
    "false_names_descheduled": "descheduled",
    "false_rank_names": "of ranks",
    "false_rank_names_per_million": "a million",
    "false_captures": "captures",
    "false_captures_per_million": "a million",
}
_FAULTS = {
    "faults": "faults",
    "found": "found",
    "steps_to_name": "to name",
    "captured": "captured",
    "steps_to_capture": "to capture",
    "stage_right": "stage right",
    "named_in_part": "in part",
    "with_wrong_name": "wrong name",
    "wrong_but_held_up_by_load": "of these by load",
    "with_wrong_capture": "wrong capture",
}


def _of(rows: Iterable[Row], rule: str) -> list[Row]:
    return [row for row in rows if row["rule"] == rule]


def _table(rows: Sequence[Row], columns: dict[str, str]) -> list[str]:
    """Rows of one grouping, their keys first."""
    if not rows:
        return []
    keys = [
        name
        for name in rows[0]
        if name in ("rule", "load", "ranks", "job", "hosts", "scope", "cost", "size", "course", "place")
    ]
    cells = [[*keys, *columns.values()]]
    cells += [[_cell(row.get(name)) for name in (*keys, *columns)] for row in rows]
    wide = [max(len(line[at]) for line in cells) for at in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, wide, strict=True)).rstrip() for line in cells]


def _cell(value: Any) -> str:
    if isinstance(value, list):
        first, *rest = ("-" if one is None else f"{one:g}" for one in value)
        return f"{first} ({' to '.join(rest)})"
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def pictures(found: Row) -> dict[str, str]:
    """All pictures by file name; those that there is nothing to show of are left out."""
    drawn = {
        "false-names.svg": _by_load(found, "false_names_per_million", "False names in healthy jobs"),
        "false-captures.svg": _by_load(found, "false_captures_per_million", "False captures in healthy jobs"),
        "found.svg": _by_size(found),
        "delay.svg": _delays(found),
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
    return Chart(title, x, y, series, whiskers="x", mark=TARGET if "captures" in what else None)


def _by_size(found: Row) -> Chart:
    rows = [row for row in found["faults"]["by_size"] if row["scope"] == "rank"]

    def points(rule: str) -> list[Point]:
        return [Point(SIZES.index(row["size"]), row["found_fraction"]) for row in rows if row["rule"] == rule]

    y = Axis("share of the faults", 0.0, 1.0, percent=True)
    series = [Series(rule, points(rule), joined=True) for rule in RULES]
    return Chart("One slow rank: share found", _sizes(), y, series)


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
    return Chart("One slow rank: how soon it is named", _sizes(), y, series, mark=100.0)


def _sizes() -> Axis:
    return Axis("delay, in percent of the step", -0.4, len(SIZES) - 0.6, names=tuple(f"{size:.0%}" for size in SIZES))
