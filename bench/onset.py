"""Since when a rank is slow, and what that costs: how often the verdicts are right, over made-up jobs.

The jobs are those of `tests/simulated/made_up.py`. The first and the last verdict that name the slow rank count:
whether the range of the onset holds the truth, how wide it is, and whether the gain is within 15 % of what the fault
costs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.simulated.made_up import COURSES, made_up, namings

QUICK = {"jobs": 20}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=600)


def judged(number: int) -> tuple[str, list[dict[str, float]]]:
    job = made_up(number)
    named = namings(job, number)
    found = []
    for verdict in named[:1] + named[-1:]:
        earliest, latest = verdict.suspect.onset_range or (0, -1)
        held = float(earliest <= job.onset <= latest)
        found.append({"held": held, "width": latest - earliest, "gain": verdict.suspect.gain_s / verdict.cost_s})
    return job.course, found


def summed(rows: list[list[dict[str, float]]], at: int) -> dict[str, float]:
    held, width, gain = (np.array([row[at][name] for row in rows if row]) for name in ("held", "width", "gain"))
    return {
        "range_holds_truth": round(float(held.mean()), 4),
        "width_median": float(np.median(width)),
        "width_95": float(np.quantile(width, 0.95)),
        "gain_within_15_percent": round(float((np.abs(gain - 1.0) < 0.15).mean()), 4),
        "gain_median": round(float(np.median(gain)), 3),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        rows = pool.map(judged, range(options.jobs), chunksize=5)
    found: dict[str, Any] = {}
    for course in ("all", *COURSES):
        of_course = [row for name, row in rows if course in ("all", name)]
        found[course] = {"jobs": len(of_course), "named": sum(map(bool, of_course))}
        if any(of_course):
            found[course] |= {name: summed(of_course, at) for name, at in (("first", 0), ("last", -1))}
    return found


def show(found: dict[str, Any]) -> Iterator[str]:
    yield f"{'fault':14}{'named':>10}  {'range holds truth':>18}{'width (95 %)':>16}{'gain within 15 %':>18}"
    for course in ("all", *COURSES):
        for which in ("first", "last") if "first" in found[course] else ():
            figures = found[course][which]
            width = f"{figures['width_median']:.0f} ({figures['width_95']:.0f})"
            counts = f"{found[course]['named']} of {found[course]['jobs']}"
            yield (
                f"{course + ', ' + which:22}{counts:>12}{figures['range_holds_truth']:>12.1%}{width:>14}"
                f"{figures['gain_within_15_percent']:>12.1%}"
            )
