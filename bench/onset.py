"""Since when a rank is slow, and what that costs: how often the verdicts are right, over made-up jobs.

    python bench/onset.py [--json] [--jobs 600]

The jobs are those of `tests/simulated/made_up.py`. The first and the last verdict that name the slow rank count:
whether the range of the onset holds the truth, how wide it is, and whether the gain is within 15 % of what the fault
costs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.simulated.made_up import COURSES, made_up, namings


def measured(number: int) -> tuple[str, list[dict[str, float]]]:
    """The course of a job's fault, and of the first and the last verdict: ``held``, ``width`` and ``gain``."""
    one = made_up(number)
    named = namings(one, number)
    found = []
    for verdict in named[:1] + named[-1:]:
        earliest, latest = verdict.suspect.onset_range or (0, -1)
        held = float(earliest <= one.onset <= latest)
        found.append({"held": held, "width": latest - earliest, "gain": verdict.suspect.gain_s / verdict.cost_s})
    return one.course, found


def summed(rows: list[list[dict[str, float]]], at: int) -> dict[str, float]:
    """Figures of one of the two verdicts, over jobs."""
    named = [row[at] for row in rows if row]
    width, gain = ([one[name] for one in named] for name in ("width", "gain"))
    return {
        "range_holds_truth": round(float(np.mean([one["held"] for one in named])), 4),
        "width_median": float(np.median(width)),
        "width_95": float(np.quantile(width, 0.95)),
        "gain_within_15_percent": round(float(np.mean(np.abs(np.asarray(gain) - 1.0) < 0.15)), 4),
        "gain_median": round(float(np.median(gain)), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--jobs", type=int, default=600)
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        rows = pool.map(measured, range(options.jobs), chunksize=5)
    found = {}
    for course in ("all", *COURSES):
        of_course = [row for name, row in rows if course in ("all", name)]
        found[course] = {"jobs": len(of_course), "named": sum(map(bool, of_course))}
        found[course] |= {name: summed(of_course, at) for name, at in (("first", 0), ("last", -1))}
    if options.json:
        print(json.dumps(found))
        return
    print(f"{'fault':14}{'named':>10}  {'range holds truth':>18}{'width (95 %)':>16}{'gain within 15 %':>18}")
    for course, of in found.items():
        for which in ("first", "last"):
            one = of[which]
            width = f"{one['width_median']:.0f} ({one['width_95']:.0f})"
            counts = f"{of['named']} of {of['jobs']}"
            print(
                f"{course + ', ' + which:22}{counts:>12}{one['range_holds_truth']:>12.1%}{width:>14}"
                f"{one['gain_within_15_percent']:>12.1%}"
            )


if __name__ == "__main__":
    main()
