"""What the long run counted: as JSON has it and as a person reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.estimates import quantile
from bench.judging import OURS, RIVALS, Detected, Healthy, Result, Task, per_million

BAR = 0.05
"""Faults from this size on are to be found."""
COST_BARS, COSTS = (0.01, 0.02, 0.05), ("under 1 %", "1 to 2 %", "2 to 5 %", "from 5 %")
"""What a fault costs the job, of its steps' time from the onset on."""
RULES = (OURS, *RIVALS)

Row = dict[str, Any]
Key = Callable[[Task, Detected | Healthy], Row]


def document(results: Sequence[Result], about: Row, recordings: Sequence[Row]) -> Row:
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
            # One host is as it was recorded; several were not busy at the same time, and one of them was the slowest.
            "by_hosts": healthy(lambda task, _: {"hosts": task.n_ranks // task.cell.n_ranks}),
        },
        "faults": {
            "from_5_percent": faults(_of_fault("scope"), least=BAR),
            "by_cost": [row for row in faults(cost) if row["rule"] == OURS],
            "by_size": faults(_of_fault("scope", "size")),
            "by_course": faults(_of_fault("scope", "course"), least=BAR),
            "by_size_and_course": faults(_of_fault("scope", "size", "course")),
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
    lines = [" ".join(f"{name} {value}" for name, value in found.items() if not isinstance(value, (dict, list))), ""]
    lines += ["false names and captures per million healthy steps (95 % interval), every job judged in windows of 50"]
    lines += ["", "as recorded, not resampled", *_table(found["healthy"]["as_recorded"], _HEALTHY), "", "resampled"]
    for name in ("total", "by_load", "by_load_and_ranks", "by_hosts"):
        rows = found["healthy"][name]
        # Of the others what is told by load is enough.
        lines += ["", *_table(rows if name in ("total", "by_load") else _of(rows, OURS), _HEALTHY)]
    lines += ["", "faults: found, steps from onset to name and to capture (median, 95 %), jobs with a wrong name"]
    for name in ("from_5_percent", "by_cost", "by_size", "by_course", "by_load", "by_ranks"):
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
