"""Does the first sentence name the cause? Real jobs with one rank made slow in many ways, and some that are not.

Each row is a DDP job of three ranks over Gloo (`jobs/causes.py`) under `sftriage run` with the default policy; on two
cores a row takes half a minute. A row is right where the reported cause has the code that it should have, and, where a
line of the script is at fault, names its function; wrong where another cause is reported as sure. What the verdict
itself says of what the system did to a rank counts: no profiler is started for that.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from bench.runner import HERE, say
from sftriage.model.events import CauseFound, WindowJudged
from sftriage.model.windows import SystemCode
from sftriage.runs.directory import RunDirectory
from sftriage.runs.journal import read_journal
from sftriage.traces.store import LocalStore
from sftriage.words.decisions import reason_sentence

RANK, FROM_STEP = 1, 100
LIMIT_S = 120.0
QUICK = {"only": ["dataset_sleeps"]}


@dataclass(frozen=True, slots=True)
class Expected:
    """What is right to say: codes, and what the function at fault ends with, "" where no line is."""

    codes: tuple[str, ...]
    function: str = ""


CAUSES = {
    "dataset_sleeps": Expected(("sleep",), "__getitem__"),
    "worker_sleeps": Expected(("dataloader_workers",), "__getitem__"),
    "decoding": Expected(("python",), "decode"),
    "gil_thread": Expected(("gil",)),
    "gc": Expected(("garbage_collection",), "collect_garbage"),
    "neighbour": Expected(("descheduled",)),
    "sigstop": Expected(("stopped",)),
    "cpulimit": Expected(("stopped",)),
    "disk": Expected(("disk",), "read_slowly"),
    "http": Expected(("network",), "fetch"),
    "longer_sequences": Expected(("operator",)),
    "extra_operator": Expected(("operator",), "forward"),
    "callback": Expected(("disk", "sleep"), "log_metrics"),
    "checkpoint": Expected(("checkpoint",), "save_checkpoint"),
    "recompilation": Expected(("recompilation",), "recompile"),
    "page_faults": Expected(("page_faults",), "touch"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One job: what was told of it first, and when.

    ``after_steps`` and ``after_s`` are from the fault's first step to the last that was captured, and to the sentence.
    """

    cause: str
    right: bool
    wrong: bool
    code: str = ""
    sure: bool = False
    sentence: str = "nothing was told"
    after_steps: int | None = None
    after_s: float | None = None


def run_job(causes: list[str], out: Path) -> None:
    """Run a job under `sftriage run`, until it has ended."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone"]
    job = [*launch, str(HERE / "jobs" / "causes.py"), "--rank", str(RANK), "--from-step", str(FROM_STEP)]
    job += [option for cause in causes for option in ("--cause", cause)]
    command = [sys.executable, "-m", "sftriage", "run", "--out", str(out), "--", *job]
    with out.with_suffix(".log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as started:
        try:
            started.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            # What was reported by then counts; its trainers end with it.
            started.terminate()


def onset_s(out: Path) -> float:
    found = re.search(rb"onset ([\d.]+)", out.with_suffix(".log").read_bytes())
    return float(found[1]) if found else float("nan")


def named(cause: str, expected: tuple[Expected, ...], out: Path) -> Row:
    """The first cause that was told of a run, by a capture, or else by a verdict."""
    store, events = LocalStore(out), list(read_journal(RunDirectory(out).decisions))
    for event in events:
        if not isinstance(event, CauseFound) or (manifest := store.manifest(event.capture_id)).findings is None:
            continue
        found, capture = manifest.findings.cause, manifest.capture
        if found is not None and capture.role == "suspect":
            function = found.place.function if found.place is not None else ""
            right = any(
                capture.rank == RANK and found.code in one.codes and function.endswith(one.function) for one in expected
            )
            after = capture.last_step - FROM_STEP, event.time_s - onset_s(out)
            return Row(cause, right, found.sure and not right, found.code, found.sure, found.sentence, *after)
    for one in (event.decision for event in events if isinstance(event, WindowJudged)):
        if one.reason in get_args(SystemCode):
            right = any(one.reason in each.codes and one.parameters["rank"] == RANK for each in expected)
            after = one.last_step - FROM_STEP, one.time_s - onset_s(out)
            return Row(cause, right, not right, one.reason, True, reason_sentence(one), *after)
    return Row(cause, not expected, False)


def one_row(cause: str, out: Path) -> Row:
    """Run a job, and compare what was reported of it with what is expected."""
    run_job([] if cause == "none" else [cause], out)
    return named(cause, (CAUSES[cause],) if cause in CAUSES else (), out)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=(*CAUSES, "none"), default=(*CAUSES, "none"))
    parser.add_argument("--keep", type=Path, help="where to keep the runs")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="causes-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for cause in options.only:
            began_s = time.monotonic()
            row = one_row(cause, folder / cause)
            rows.append(row)
            verdict = "right" if row.right else "WRONG" if row.wrong else "not named"
            onset = "" if row.after_s is None else f"{row.after_steps} steps, {row.after_s:.0f} s after onset"
            say(f"{cause:18} {verdict:10} {row.code:20} {time.monotonic() - began_s:4.0f} s  {onset}")
            say(f"    {'sure: ' if row.sure else ''}{row.sentence}")
    right, wrong = sum(row.right for row in rows), sum(row.wrong for row in rows)
    return {"right": right, "of": len(rows), "wrong_and_sure": wrong, "rows": [asdict(row) for row in rows]}
