"""How often somebody is named who is not slow, and how soon who is: the operating characteristics of the verdicts.

    python bench/long_run.py [--json] [--plot DIR] [--keep DIR | --from DIR] [--healthy-steps 1e7] [--quick]

Healthy jobs of several processes over Gloo are recorded by the real recorder, alone and beside busy processes, for
about a quarter of an hour (`long_run_parts/jobs.py`). What they recorded is resampled in blocks to long jobs of 2 to
1,024 ranks (`resampling.py`), into which faults are put as a synchronous job would show them (`synchronous.py`,
`faults.py`). Ours and other rules judge the same jobs. Counts of false names and captures are per million healthy steps
with exact 95 % Poisson intervals. With ``--from``, kept recordings are used again and nothing is run; ``--quick`` is
for trying out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.long_run_parts import plotting, report
from bench.long_run_parts.jobs import USUAL_S, cells
from bench.long_run_parts.plan import SHARE_OF_RANKS, Amount, tasks_of
from bench.long_run_parts.recording import kept, record
from bench.long_run_parts.simulating import Result, as_recorded, recordings, run

SAY_EVERY_S = 15.0


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def simulate(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Everything that is judged, of the recordings in a directory."""
    recorded = recordings(directory)
    amount = Amount(int(options.healthy_steps), options.faults, tuple(options.ranks), options.seed)
    tasks = tasks_of(amount, list(recorded))
    n_steps = sum(task.n_steps for task in tasks if task.fault is None)
    say(f"{len(tasks)} jobs to judge, {n_steps:,} healthy steps of {sum(map(len, recorded.values()))} recordings")
    results: list[Result] = []
    began_s = said_s = time.monotonic()
    for result in run(tasks, directory, options.processes):
        results.append(result)
        if time.monotonic() - said_s > SAY_EVERY_S:
            said_s = time.monotonic()
            say(f"  {len(results)} of {len(tasks)} jobs after {said_s - began_s:.0f} s")
    about = {
        "seed": options.seed,
        "healthy_steps": n_steps,
        "judging_s": round(time.monotonic() - began_s, 1),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    every = [recording for alike in recorded.values() for recording in alike]
    told = [
        {**one.about, "steps": len(one.own), "step_ms": round(1e3 * one.step_s, 2), "ours": as_recorded(one)}
        for one in every
    ]
    return report.document(results, about, told)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw pictures (SVG) into a directory")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the recordings in a new directory")
    parser.add_argument("--from", dest="from_", type=Path, metavar="DIR", help="judge kept recordings, record nothing")
    parser.add_argument("--record-only", action="store_true", help="record, and judge nothing")
    parser.add_argument("--record-s", type=float, help="seconds of each recorded job (15; 6 with --quick)")
    parser.add_argument("--healthy-steps", type=float, help="healthy steps over all (1e7; 1e5 with --quick)")
    parser.add_argument("--faults", type=int, help="faults of each size, course and scope (15; 1 with --quick)")
    parser.add_argument("--ranks", type=lambda text: [int(one) for one in text.split(",")], help="of what is resampled")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that judge")
    parser.add_argument("--quick", action="store_true", help="a few jobs, some two minutes: for trying out")
    options = parser.parse_args()
    usual = (6.0, 1e5, 1, [4, 8, 64]) if options.quick else (USUAL_S, 1e7, 15, list(SHARE_OF_RANKS))
    for name, value in zip(("record_s", "healthy_steps", "faults", "ranks"), usual, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not set(options.ranks) <= set(SHARE_OF_RANKS):
        parser.error(f"jobs are of {', '.join(map(str, SHARE_OF_RANKS))} ranks")
    if options.keep is not None and options.keep.is_dir() and any(options.keep.iterdir()):
        parser.error(f"{options.keep} is not empty")
    if options.from_ is not None and not kept(options.from_):
        parser.error(f"{options.from_} holds no recordings")
    if options.record_only and options.keep is None:
        parser.error("--record-only is for --keep")
    return options


def main() -> None:
    options = parsed()
    with tempfile.TemporaryDirectory(prefix="long-run-") as temporary:
        directory = options.from_ or options.keep or Path(temporary)
        if options.from_ is None:
            directory.mkdir(parents=True, exist_ok=True)
            record(cells(quick=options.quick), options.record_s, options.seed, directory, say)
        if options.record_only:
            return
        found = simulate(options, directory)
    if options.plot is not None:
        options.plot.mkdir(parents=True, exist_ok=True)
        for name, picture in plotting.pictures(found).items():
            (options.plot / name).write_text(picture, encoding="utf-8")
    print(json.dumps(found) if options.json else report.text(found))


if __name__ == "__main__":
    main()
