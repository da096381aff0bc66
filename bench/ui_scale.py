"""What a page about a large run takes to make, and how many bytes it is.

A run directory is made up (not timed): a journal of windows, and a step log for each rank, of `stride` steps a window;
one rank is slow in `data` from the middle on. Then the application answers requests, without a network in between: the
first time, when it has read nothing yet, again, and after one more window, as a page that is open while the job goes on
does. Logs take about 1.4 kB a rank and ten steps of disk.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from sftriage.model.events import WindowJudged, encode
from sftriage.trainer.layout import LOG_MAGIC, encode_header
from tests.scenario import Run, decision, info_of, run_at, slots, verdict

STEP_MS = {"data": 5.0, "forward": 30.0, "backward": 60.0, "other": 0.5}
SLOW_MS = {**STEP_MS, "data": 45.0}
WINDOW_STEPS = 50
HEALTHY_RUN = 40
"""Windows between two hiccups, so that the list of decisions is as long as in an uneasy job."""
QUICK = {"windows": 200, "ranks": 16}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--windows", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=1, help="steps between two windows")


def make_run(options: argparse.Namespace, path: Path) -> Run:
    run, steps = run_at(path), steps_of(options)

    @cache
    def content(slow: bool) -> bytes:
        fault_step = steps // 2 if slow else steps
        return slots(info_of(0), range(steps), lambda step: STEP_MS if step < fault_step else SLOW_MS)

    for rank in range(options.ranks):
        info = info_of(rank, options.ranks, host=f"node-{rank // 8}")
        whole = encode_header(LOG_MAGIC, info) + content(rank == slow_rank(options))
        (run.directory.steps / info.file_name("steps")).write_bytes(whole)
    # In one go: the journal itself syncs the disk after every line.
    lines = [encode(window(options, number)) + b"\n" for number in range(options.windows)]
    run.directory.decisions.write_bytes(b"".join(lines))
    return run


def steps_of(options: argparse.Namespace) -> int:
    return WINDOW_STEPS + (options.windows + 1) * options.stride


def slow_rank(options: argparse.Namespace) -> int:
    return options.ranks * 2 // 3


def window(options: argparse.Namespace, number: int) -> WindowJudged:
    first, onset = number * options.stride, steps_of(options) // 2
    if number % HEALTHY_RUN == 0:
        of, decided = verdict(first, "needs_evidence", reasons=("roaming",)), ("hold", "roaming")
    elif first + WINDOW_STEPS > onset:
        of, decided = verdict(first, "suspect", rank=slow_rank(options), onset=onset), ("throttle", "cooldown")
    else:
        of, decided = verdict(first), ("ignore", "healthy")
    return WindowJudged(of, decision(of, *decided))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        run = make_run(options, Path(directory) / "run")

        def get(target: str) -> tuple[float, int]:
            began = time.perf_counter()
            answer = run.get(target)
            assert answer.status == 200, (target, answer.status)
            return time.perf_counter() - began, len(answer.body)

        def best(target: str, rounds: int = 5) -> float:
            return min(get(target)[0] for _ in range(rounds))

        first_s, _ = get("/")
        # (it answers once the map is there)
        map_s, _ = get("/heat.bin")
        page_bytes, again_s = get("/")[1], best("/")
        more = window(options, options.windows)
        with run.directory.decisions.open("ab") as journal:
            journal.write(encode(more) + b"\n")
        after_window_s, _ = get("/")
        return {
            "windows": options.windows,
            "ranks": options.ranks,
            "steps": steps_of(options),
            "journal_bytes": run.directory.decisions.stat().st_size,
            "step_logs_bytes": sum(path.stat().st_size for path in run.directory.steps.iterdir()),
            "overview_first_s": first_s,
            "heat_map_first_s": first_s + map_s,
            "overview_again_s": again_s,
            "overview_after_one_more_window_s": after_window_s,
            "overview_last_1000_first_s": get("/?last=1000")[0],
            "overview_bytes": page_bytes,
            "heat_levels_s": best("/heat.bin"),
            "heat_levels_bytes": get("/heat.bin")[1],
            "decisions_s": best("/decisions"),
            "decisions_bytes": get("/decisions")[1],
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
