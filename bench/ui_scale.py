"""What a page about a large run takes to make, and how many bytes it is.

A run directory is made up (not timed): a journal of windows, and a step log for each rank, of `stride` steps a window;
one rank is slow in `data` from the middle on. Then the application answers requests, without a network in between: the
first time, when it has read nothing yet, again, and after one more window, as a page that is open while the job goes on
does. Logs take about 1.4 kB a rank and ten steps of disk.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from sftriage.decisions import Decision, Suspect, Verdict
from sftriage.events import WindowJudged, encode
from sftriage.recorder.layout import LOG_MAGIC, RingInfo, encode_header
from sftriage.records import StageSchema
from sftriage.runs.directory import RunDirectory, RunInfo, create
from sftriage.runs.journal import Journal
from sftriage.runs.source import RunSource
from sftriage.web.access import Access
from sftriage.web.run_page import RunPage
from sftriage.windows.slots import DURATIONS, READY, SEQ, START, STEP
from tests.unit.web.asking import ask

SCHEMA = StageSchema(("data", "h2d", "forward", "backward", "optimizer", "other"), ("backward",))
STAGES_MS = (5.0, 1.0, 30.0, 60.0, 8.0, 0.5)
SLOW_MS = 40.0
KINDS = 8
"""Ranks that jitter alike: their slots are made once."""
WINDOW_STEPS = 50
HEALTHY_RUN = 40
"""Windows between two hiccups, so that the list of decisions is as long as in an uneasy job."""


QUICK = {"windows": 200, "ranks": 16}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--windows", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=1, help="steps between two windows")


class Size:
    """The size of the made-up run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.windows, self.ranks, self.stride = options.windows, options.ranks, options.stride
        self.steps = WINDOW_STEPS + (self.windows + 1) * self.stride
        self.fault_step, self.slow_rank = self.steps // 2, self.ranks * 2 // 3


def make_run(size: Size, path: Path) -> RunDirectory:
    info = RunInfo("bench", "bench", "2027-01-01T00:00:00+00:00", ("train",), "default", "0" * 64, str(path / "rings"))
    run = create(path, info, "")
    slots = [slots_of(size, kind, slow=False) for kind in range(min(KINDS, size.ranks))]
    for rank in range(size.ranks):
        about = RingInfo(rank, size.ranks, rank % 8, 0, "bench", f"node-{rank // 8}", "", SCHEMA, 0, 0, 1, 0)
        content = slots_of(size, rank, slow=True) if rank == size.slow_rank else slots[rank % len(slots)]
        (run.steps / about.file_name("steps")).write_bytes(encode_header(LOG_MAGIC, about) + content)
    return run


def slots_of(size: Size, seed: int, *, slow: bool) -> bytes:
    rng = np.random.default_rng(seed)
    n_steps, n_stages = size.steps, len(SCHEMA.stages)
    words = np.zeros((n_steps, DURATIONS + n_stages + len(SCHEMA.sync) + 1), dtype=np.int64)
    words[:, SEQ] = np.arange(1, n_steps + 1)
    words[:, STEP] = np.arange(n_steps)
    words[:, READY] = -1
    durations = np.array(STAGES_MS) * 1e6 * rng.uniform(0.95, 1.05, (n_steps, n_stages))
    if slow:
        durations[size.fault_step :, 0] += SLOW_MS * 1e6
    words[:, DURATIONS : DURATIONS + n_stages] = durations
    words[:, START] = np.cumsum(durations.sum(axis=1))
    for row in words:
        row[-1] = crc32(row[:-1].tobytes())
    return words.tobytes()


def window_of(size: Size, number: int) -> tuple[Verdict, Decision]:
    first = number * size.stride
    last = first + WINDOW_STEPS - 1
    slow = last >= size.fault_step
    hiccup = number % HEALTHY_RUN == 0
    advances = {
        stage: ms * 1e-3 * random.uniform(0.95, 1.05) for stage, ms in zip(SCHEMA.stages, STAGES_MS, strict=True)
    }
    if slow:
        advances["data"] += SLOW_MS * 1e-3
    exposed_s = sum(advances.values())
    suspect = Suspect("rank", (size.slow_rank,), "data", SLOW_MS * 1e-3, 0.3, 1.0, size.slow_rank)
    label = "needs_evidence" if hiccup else "suspect" if slow else "healthy"
    outcome = "hold" if hiccup else "throttle" if slow else "ignore"
    reasons = ("roaming",) if hiccup else ()
    verdict = Verdict(
        first,
        last,
        label,  # type: ignore[arg-type]
        reasons,
        (suspect,) if label == "suspect" else (),
        exposed_s,
        advances,
        dict.fromkeys(SCHEMA.stages, 0),
        {f"number_{n}": float(n) for n in range(25)},
        SCHEMA.sync,
    )
    reason = "cooldown" if outcome == "throttle" else "undecided" if hiccup else "healthy"
    return verdict, Decision(1.8e9 + first * 0.1, first, last, label, outcome, reason)  # type: ignore[arg-type]


def write_journal(size: Size, run: RunDirectory) -> None:
    # In one go: the journal itself waits for the disk after every line.
    windows = (WindowJudged(*window_of(size, number)) for number in range(size.windows))
    run.decisions.write_bytes(b"".join(encode(one) + b"\n" for one in windows))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    size = Size(options)
    with tempfile.TemporaryDirectory() as directory:
        run = make_run(size, Path(directory) / "run")
        # In one go: the journal itself syncs the disk after every line.
        windows = (WindowJudged(*window_of(size, number)) for number in range(size.windows))
        run.decisions.write_bytes(b"".join(encode(one) + b"\n" for one in windows))
        app = RunPage(RunSource(lambda: run), Access.to("127.0.0.1", None, "")).app

        def get(target: str) -> tuple[float, int]:
            began = time.perf_counter()
            answer = ask(app, target)
            assert answer.status == 200, (target, answer.status)
            return time.perf_counter() - began, len(answer.body)

        def best(target: str, rounds: int = 5) -> float:
            return min(get(target)[0] for _ in range(rounds))

        first_s, _ = get("/")
        # (it answers once the map is there)
        map_s, _ = get("/heat.bin")
        page_bytes, again_s = get("/")[1], best("/")
        journal = Journal(run.decisions)
        journal.append(WindowJudged(*window_of(size, size.windows)))
        journal.close()
        after_window_s, _ = get("/")
        return {
            "windows": size.windows,
            "ranks": size.ranks,
            "steps": size.steps,
            "journal_bytes": run.decisions.stat().st_size,
            "step_logs_bytes": sum(path.stat().st_size for path in run.steps.iterdir()),
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
