"""Who finds the hidden rank: ours and other rules on real jobs with faults drawn from a seed, side by side.

    python bench/hidden_rank.py [--rows 50] [--ranks 4] [--json] [--keep DIR] [--from DIR]

Each row is one DDP job over Gloo, a process a rank, recorded by the real recorder; 50 rows of 4 ranks take about a
quarter of an hour on two cores. Of 50 rows about 30 have one fault in a local stage, 4 one in the backward with the
split of the last ready gradient, 3 a rank slowed from outside, 2 a slow host, 6 are to be held, and 5 are healthy
(`hidden_rank_matrix/drawing.py`). Kept rows are run directories: `--from` judges them again, and `sftriage analyze`
reads them too.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.hidden_rank_matrix import report
from bench.hidden_rank_matrix.drawing import SHARES, draw
from bench.hidden_rank_matrix.recorded import kept_rows, read_row
from bench.hidden_rank_matrix.rows import STRIDE_STEPS, WARMUP_STEPS, WINDOW_STEPS
from bench.hidden_rank_matrix.running import Runner
from bench.hidden_rank_matrix.scoring import Scored, score
from sftriage.verdicts import Settings
from sftriage.windows.gather import Shape


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def run_rows(options: argparse.Namespace, out: Path) -> Iterator[Path]:
    """Run the rows one at a time; where each is kept."""
    rows = draw(options.rows, options.ranks, options.seed, options.steps, options.sorts)
    runner = Runner(options.ranks, out)
    try:
        for row in rows:
            say(f"row {row.number + 1} of {len(rows)}: {row.words}")
            began_s = time.monotonic()
            path = runner.run(row)
            say(f"  {time.monotonic() - began_s:.1f} s")
            yield path
    finally:
        runner.close()


def score_rows(options: argparse.Namespace) -> list[Scored]:
    """Every row run, or read, and judged by every rule."""
    shape = Shape(options.window, options.stride, WARMUP_STEPS)
    settings = Settings()
    if options.from_ is not None:
        return [score(read_row(path, shape), settings) for path in kept_rows(options.from_)]
    with tempfile.TemporaryDirectory(prefix="hidden-rank-") as temporary:
        out = options.keep or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        return [score(read_row(path, shape), settings) for path in run_rows(options, out)]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50, help="jobs to run")
    parser.add_argument("--ranks", type=int, default=4, help="processes of each job, from 2")
    parser.add_argument("--seed", type=int, default=0, help="what the rows are drawn from")
    parser.add_argument("--steps", type=int, default=180, help="steps of each job, from 120")
    parser.add_argument("--window", type=int, default=WINDOW_STEPS, help="steps in a window")
    parser.add_argument("--stride", type=int, default=STRIDE_STEPS, help="steps between windows")
    parser.add_argument("--sorts", type=lambda text: text.split(","), default=list(SHARES), help=",".join(SHARES))
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the recordings in a new directory")
    parser.add_argument("--from", dest="from_", type=Path, metavar="DIR", help="judge kept recordings, run nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.ranks < 2 or options.rows < 1 or options.steps < 120 or not set(options.sorts) <= set(SHARES):
        parser.error("from 2 ranks, 1 row and 120 steps on, and sorts of " + ", ".join(SHARES))
    if options.keep is not None and options.keep.is_dir() and any(options.keep.iterdir()):
        parser.error(f"{options.keep} is not empty")
    if options.from_ is not None and not kept_rows(options.from_):
        parser.error(f"{options.from_} holds no rows")
    return options


def main() -> None:
    options = parsed()
    scored = score_rows(options)
    machines = [one.recorded.outcome.machine for one in scored if one.recorded.outcome.machine]
    about = {
        "rows": len(scored),
        "ranks": "/".join(map(str, sorted({one.row.n_ranks for one in scored}))),
        "seed": None if options.from_ else options.seed,
        "from": str(options.from_) if options.from_ else None,
        "window": options.window,
        "stride": options.stride,
        "cores": machines[0]["cores"] if machines else None,
        "machine": machines[0]["machine"] if machines else platform.machine(),
    }
    print(json.dumps(report.document(scored, about)) if options.json else report.text(scored, about))


if __name__ == "__main__":
    main()
