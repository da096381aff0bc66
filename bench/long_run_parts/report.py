"""What was counted, as JSON has it and as a person reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from bench.long_run_parts.counting import Detected, Healthy, per_million, quantile
from bench.long_run_parts.faults import SCOPES
from bench.long_run_parts.rules import OURS, RIVALS, shipped_settings, variants
from bench.long_run_parts.simulating import Result, Task

BAR = 0.05
"""Faults from this size on are to be found."""
COST_BARS, COSTS = (0.01, 0.02, 0.05), ("under 1 %", "1 to 2 %", "2 to 5 %", "from 5 %")
"""What a fault costs the job, of its steps' time from the onset on."""
RULES = (OURS, *RIVALS)

Row = dict[str, Any]


def document(results: Sequence[Result], about: Row, recordings: Sequence[Row]) -> Row:
    """Everything, of results in any order."""
    plain = sorted(results, key=lambda result: result.task.job)
    return {
        **about,
        "recordings": [{**one, "ours": healthy_row(one["ours"], captures=True)} for one in recordings],
        "healthy": {
            "as_recorded": _as_recorded([one["ours"] for one in recordings]),
            "total": _healthy(plain, lambda task: {}),
            "by_load_and_ranks": _healthy(plain, lambda task: {"load": task.cell.load, "ranks": task.n_ranks}),
            "by_load": _healthy(plain, lambda task: {"load": task.cell.load}),
            "by_job": _healthy(plain, lambda task: {"job": task.cell.job}),
            # One host is as it was recorded; several were not busy at the same time, and one of them was the slowest.
            "by_hosts": _healthy(plain, lambda task: {"hosts": task.n_ranks // task.cell.n_ranks}),
        },
        "faults": {
            "from_5_percent": _faults(plain, lambda task: {"scope": _scope(task)}, least=BAR),
            "by_cost": _by_cost(plain),
            "by_size": _faults(plain, lambda task: {"scope": _scope(task), "size": _size(task)}),
            "by_course": _faults(plain, lambda task: {"scope": _scope(task), "course": _course(task)}, least=BAR),
            "by_size_and_course": _faults(
                plain, lambda task: {"scope": _scope(task), "size": _size(task), "course": _course(task)}
            ),
            "by_place": _faults(plain, lambda task: {"place": _place(task)}, least=BAR, scope="rank"),
            "by_load": _faults(plain, lambda task: {"load": task.cell.load}, least=BAR, scope="rank"),
            "by_ranks": _faults(plain, lambda task: {"ranks": task.n_ranks}, least=BAR, scope="rank"),
        },
        "trade_off": _trade_off(plain),
    }


Key = Callable[[Task], Row]


def _as_recorded(found: Sequence[Healthy]) -> list[Row]:
    """Ours on the recordings themselves: what is resampled should come out like it, within its interval."""
    return [{"rule": OURS, **healthy_row(sum(found, Healthy()), captures=True)}] if found else []


def _scope(task: Task) -> str:
    return "" if task.fault is None else task.fault.scope


def _size(task: Task) -> float:
    return 0.0 if task.fault is None else task.fault.size


def _course(task: Task) -> str:
    return "" if task.fault is None else task.fault.course


def _place(task: Task) -> str:
    return "" if task.fault is None else task.fault.place


def _healthy(results: Iterable[Result], key: Key) -> list[Row]:
    """For each rule and each value of the key what was counted in healthy steps."""
    sums: defaultdict[tuple[str, Hashable], Healthy] = defaultdict(Healthy)
    keys: dict[tuple[str, Hashable], Row] = {}
    for result in results:
        for rule in set(result.healthy) & set(RULES):
            found, fields = result.healthy[rule], key(result.task)
            at = rule, tuple(fields.values())
            sums[at] = sums[at] + found
            keys[at] = {"rule": rule, **fields}
    ordered = sorted(keys, key=lambda at: (RULES.index(at[0]), at[1]))
    return [{**keys[at], **healthy_row(sums[at], captures=at[0] == OURS)} for at in ordered]


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


def _faults(results: Iterable[Result], key: Key, least: float = 0.0, scope: str | None = None) -> list[Row]:
    """For each rule and each value of the key how faults of a least size were found."""
    found: defaultdict[tuple[str, Hashable], list[Detected]] = defaultdict(list)
    keys: dict[tuple[str, Hashable], Row] = {}
    for result in results:
        if result.task.fault is None or _size(result.task) < least or scope not in (None, _scope(result.task)):
            continue
        for rule in set(result.detected) & set(RULES):
            fields = key(result.task)
            at = rule, tuple(fields.values())
            found[at].append(result.detected[rule])
            keys[at] = {"rule": rule, **fields}
    ordered = sorted(keys, key=lambda at: (RULES.index(at[0]), at[1]))
    return [{**keys[at], **faults_row(found[at], captures=at[0] == OURS)} for at in ordered]


def _by_cost(results: Iterable[Result]) -> list[Row]:
    """Ours, by what a fault of any size costs the job: less than is worth a name, or more."""
    found: defaultdict[tuple[str, str], list[Detected]] = defaultdict(list)
    for result in results:
        if OURS in result.detected:
            one = result.detected[OURS]
            found[_scope(result.task), COSTS[sum(one.cost_fraction >= least for least in COST_BARS)]].append(one)
    keys = [(scope, cost) for scope in SCOPES for cost in COSTS if (scope, cost) in found]
    return [{"rule": OURS, "scope": at[0], "cost": at[1], **faults_row(found[at], captures=True)} for at in keys]


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


def _trade_off(results: Sequence[Result]) -> list[Row]:
    """Each of our sensitivities on the same jobs."""
    settings = {OURS: shipped_settings(), **variants()}
    points = []
    for name, one in settings.items():
        healthy = [result.healthy[name] for result in results if set(settings) <= set(result.healthy)]
        faulty = [
            result.detected[name]
            for result in results
            if set(settings) <= set(result.detected) and _scope(result.task) == "rank" and _size(result.task) >= BAR
        ]
        if not faulty or not healthy:
            continue
        points.append(
            {
                "variant": name,
                "min_gain_fraction": one.min_gain_fraction,
                "healthy": healthy_row(sum(healthy, Healthy()), captures=name == OURS),
                "rank_faults_from_5_percent": faults_row(faulty, captures=name == OURS),
            }
        )
    return points


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
    lines += ["", "sensitivities of ours, all on the same jobs"]
    for point in found["trade_off"]:
        named = _cell(point["healthy"]["false_names_per_million"])
        share, steps = (point["rank_faults_from_5_percent"][one] for one in ("found_fraction", "steps_to_name"))
        lines.append(f"  {point['variant']:16} {named} false names, found {share:.0%} after {_cell(steps)} steps")
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
