"""What stragglers have cost by the live sum, against the same job without its straggler.

    python bench/straggler_cost.py [--pairs 5] [--steps 600] [--slow-ms 20] [--json]

A pair is a job of 4 ranks over Gloo with a rank that is slow in data, and the same job without, each under `sftriage
run`. Both run at the same time, so that what else the machine does slows both; ranks hardly need a CPU. What the
straggler has cost in reality is the difference of the two mean steps, by the job's own clock from the first step that
is judged on, times the steps and the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.straggler_cost_parts.train import FROM
from sftriage.events import WindowJudged
from sftriage.policy.losses import losses_of
from sftriage.runs.directory import RunDirectory
from sftriage.runs.journal import read_journal

ROOT = Path(__file__).resolve().parents[1]
TRAIN, LAUNCH = ROOT / "bench/straggler_cost_parts/train.py", ROOT / "tests/integration/jobs/launch.py"


def begin(options: argparse.Namespace, slow_ms: float, directory: Path) -> subprocess.Popen[str]:
    directory.mkdir()
    job = [sys.executable, LAUNCH, options.ranks, TRAIN, options.steps, slow_ms, directory / "step"]
    command = [sys.executable, "-m", "sftriage", "run", "--out", directory / "run", "--", *job]
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "XDG_STATE_HOME": str(directory / "state")}
    environment = {**os.environ, **own, "PYTHONPATH": str(ROOT)}
    with (directory / "said").open("w") as said:
        return subprocess.Popen([*map(str, command)], env=environment, stdout=said, stderr=said, text=True)


def found(directory: Path) -> tuple[float, float, int]:
    """The mean step of a job in seconds, by its own clock; what stragglers cost by the sum, in rank-seconds, and in
    how many steps.
    """
    events = read_journal(RunDirectory(directory / "run").decisions)
    losses = losses_of(event.verdict for event in events if isinstance(event, WindowJudged))
    return float((directory / "step").read_text()), losses.rank_s, sum(one.steps for one in losses.largest)


def pair(options: argparse.Namespace, directory: Path) -> dict[str, float]:
    slow_ms = {directory / "with": options.slow_ms, directory / "without": 0.0}
    jobs = {where: begin(options, slow, where) for where, slow in slow_ms.items()}
    try:
        for where, job in jobs.items():
            if job.wait(60 + 0.5 * options.steps):
                sys.exit((where / "said").read_text())
    finally:
        for job in jobs.values():
            job.kill()
            job.wait()
    (with_s, sum_s, steps), (without_s, false_s, _) = map(found, slow_ms)
    real_s = (with_s - without_s) * (options.steps - FROM) * options.ranks
    steps_ms = {"with_ms": 1e3 * with_s, "without_ms": 1e3 * without_s}
    sums = {"real_rank_s": real_s, "sum_rank_s": sum_s, "summed_steps": steps, "false_rank_s": false_s}
    return {**steps_ms, **sums, "ratio": sum_s / real_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600, help="steps of each job, from 100")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--slow-ms", type=float, default=20.0, help="how much longer the straggler takes in data")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    pairs = []
    for number in range(options.pairs):
        with tempfile.TemporaryDirectory(prefix=f"straggler-cost-{number}-") as directory:
            pairs.append(pair(options, Path(directory)))
        if not options.json:
            print("  ".join(f"{name} {value:.3f}" for name, value in pairs[-1].items()), flush=True)
    values: dict[str, Any] = {name: getattr(options, name) for name in ("steps", "ranks", "slow_ms")}
    values |= {"cores": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()[0], "pairs": pairs}
    values["ratio"] = statistics.median(one["ratio"] for one in pairs)
    print(json.dumps(values) if options.json else f"the sum is {values['ratio']:.3f} of the real cost, in the median")


if __name__ == "__main__":
    main()
