"""How long imports and short commands take, from the start of Python to its end, interleaved with an empty program."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.runner import interleaved

LIMIT_S = 0.15
QUICK = {"rounds": 3}
COMMAND = "import sys; sys.argv[0] = 'sftriage'; from sftriage.commands import main; main()"
PROGRAMS = {
    "nothing": ("pass",),
    "import sftriage": ("import sftriage",),
    "import sftriage.trainer": ("import sftriage.trainer",),
    "sftriage --version": (COMMAND, "--version"),
    "sftriage --help": (COMMAND, "--help"),
    "sftriage traces list": (COMMAND, "traces", "list"),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15, help="runs of each program")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        taken = interleaved({name: partial(run_s, words, folder) for name, words in PROGRAMS.items()}, options.rounds)
    median_s = {name: statistics.median(wall_s for wall_s, _ in times) for name, times in taken.items()}
    return {
        "rounds": options.rounds,
        "limit_s": LIMIT_S,
        "programs": {
            name: {
                "median_s": round(median_s[name], 3),
                "least_s": round(min(wall_s for wall_s, _ in times), 3),
                "cpu_s": round(statistics.median(cpu_s for _, cpu_s in times), 3),
                "over_nothing": round(median_s[name] / median_s["nothing"], 2),
            }
            for name, times in taken.items()
        },
    }


def run_s(words: tuple[str, ...], folder: str) -> tuple[float, float]:
    """Seconds of a program in an empty folder, and of its CPU time."""
    before, began_s = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-c", *words], cwd=folder, capture_output=True, check=False)
    took_s, after = time.perf_counter() - began_s, os.times()
    return took_s, after.children_user + after.children_system - before.children_user - before.children_system


def show(found: dict[str, Any]) -> Iterator[str]:
    yield f"from the start of Python to its end, {found['rounds']} runs each; {found['limit_s']} s is the limit"
    for name, one in found["programs"].items():
        times = f"{one['median_s']:.3f} s (least {one['least_s']:.3f}, CPU {one['cpu_s']:.3f})"
        yield f"  {name:<24} {times}, {one['over_nothing']:.2f} of an empty program"
