"""Is the gain that a verdict promises the one that mending wins? Live jobs with a planted fault, and really mended.

Each case is a DDP job of four ranks over Gloo (`jobs/promises.py`, whose work sleeps) under `sftriage run`, with its
fault and then, as another run, without. ``promised`` is what the summary of the mended run says was promised,
``measured`` what it says was won; ``replayed`` is what `sftriage whatif --without` says of the run with the fault.
``real`` is what mending wins by the job's own clock, in blocks of steps with the fault and without it in turn. Seconds
a step; a case that no verdict names has no promise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.runner import HERE, JOBS, run, say
from sftriage.errors import SftriageError
from sftriage.runs.directory import RunDirectory
from sftriage.runs.operations import load_operations
from sftriage.runs.source import RunSource
from sftriage.stragglers.questions import Question, answered
from sftriage.words.run import mend_sentence

RANKS, WARM_UP, LIMIT_S = 4, 20, 240.0
QUICK = {"only": ["data"], "rounds": 1}


@dataclass(frozen=True, slots=True)
class Case:
    """The faults before and after a mend, what is to be replayed as mended, and the steps of a job."""

    faults: tuple[str, ...]
    left: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    steps: int = 250
    recurs: bool = False


CASES = {
    "data": Case(("data",), without=("rank 1",)),
    "forward": Case(("forward",), without=("rank 2",)),
    "backward": Case(("backward",), without=("rank 2",)),
    "host": Case(("host",), without=("rank 2", "rank 3")),
    "stall": Case(("stall",), without=("rank 3",), steps=500, recurs=True),
    "gc": Case(("gc",), without=("rank 1",), recurs=True),
    "evaluation": Case(("evaluation",), ("shared",), steps=400, recurs=True),
    "lengths": Case(("lengths",), without=("sequence_lengths",)),
    "first of two": Case(("data", "forward"), ("forward",), without=("rank 1",)),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="where to keep the runs")


def run_job(faults: tuple[str, ...], out: Path, *options: object) -> None:
    job = [HERE / "jobs" / "promises.py", *options, *(option for fault in faults for option in ("--fault", fault))]
    watch = ["-m", "sftriage", "run", "--job", "promises", "--policy", "observe-only", "--out", out, "--"]
    run(*watch, sys.executable, JOBS / "launch.py", RANKS, *job, timeout_s=LIMIT_S)


def real_s(times: Path) -> float:
    """By how much a mean step without the fault is shorter than in the block before: the median of all blocks."""
    blocks = [statistics.fmean(block) for block in json.loads(times.read_text())]
    return statistics.median(slow - mended for slow, mended in zip(blocks[::2], blocks[1::2], strict=True))


def replayed_s(case: Case, out: Path) -> float | None:
    if not case.without:
        return None
    try:
        return answered(load_operations([out]), Question(without=case.without)).wins_s
    except SftriageError as error:
        say(f"    not replayed: {error}")
        return None


def round_of(case: Case, folder: Path) -> dict[str, float | None]:
    """One job with the fault and one without it: promised, replayed, measured and real gain."""
    folder.mkdir(parents=True)
    times, block = folder / "times.json", ("--block-steps", 100, "--blocks", 6) if case.recurs else ()
    blocks = "--times", times, *block, *(option for fault in case.left for option in ("--left", fault))
    run_job(case.faults, folder / "fault", "--steps", case.steps, *blocks)
    run_job(case.left, folder / "mended", "--steps", 200)
    mends = RunSource(lambda: RunDirectory(folder / "mended")).view().mends
    say("\n".join(f"    {mend_sentence(mend)}" for mend in mends))
    mend = mends[-1] if mends else None
    promised_s, least_s, measured_s = (mend.promised_s, mend.least_s, mend.measured_s) if mend else (None,) * 3
    found = {"promised": promised_s, "least": least_s, "measured": measured_s}
    return {**found, "replayed": replayed_s(case, folder / "fault"), "real": real_s(times)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, float | None]]] = {name: [] for name in options.only}
    with tempfile.TemporaryDirectory(prefix="promises-") as scratch:
        for number in range(options.rounds):
            for name in options.only:
                say(f"{name}, round {number + 1}")
                rounds[name].append(round_of(CASES[name], (options.keep or Path(scratch)) / f"{name}-{number}"))
    found = {}
    for name, taken in rounds.items():
        figures = {}
        for figure in taken[0]:
            known = [each[figure] for each in taken]
            figures[figure] = None if None in known else statistics.median(known)  # type: ignore[type-var]
        found[name] = figures
    return {"rounds": options.rounds, "cases": found}


def show(found: dict[str, Any]) -> Iterator[str]:
    yield f"{'':14}{'real':>10}{'promised':>18}{'replayed':>18}{'measured':>18}"
    for name, figures in found["cases"].items():
        line = f"{name:14}{1e3 * figures['real']:>7.1f} ms"
        for figure in ("promised", "replayed", "measured"):
            known = figures[figure]
            shown = "" if known is None else f"{1e3 * known:.1f} ms ({known / figures['real']:.2f})"
            line += f"{shown:>18}"
        yield line
