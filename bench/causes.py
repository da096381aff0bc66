"""Does the first sentence name the cause? Real jobs with one rank made slow in many ways, and some that are not.

    python bench/causes.py [--more | --only CAUSE ...] [--json] [--keep DIR] [--rivals PYTHON]

Each row is a DDP job of three ranks over Gloo (`causes_jobs/`) under `sftriage run` with the default policy; on two
cores a row takes half a minute. A row is right where the cause that is told has the code that it should have, and,
where a line of the script is at fault, names its function; wrong where another cause is told as sure. What the verdict
itself says of what the system did to a rank counts: no profiler is started for that. Of two faults at once either will
do. A healthy rank that is captured by hand has no cause.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sftriage.counters import SystemCode
from sftriage.events import CauseFound, WindowJudged
from sftriage.runs.directory import RunDirectory
from sftriage.runs.journal import read_journal
from sftriage.traces.manifest import Manifest
from sftriage.traces.store import LocalStore
from sftriage.words.decisions import reason_sentence

JOBS = Path(__file__).with_name("causes_jobs")
RANK, FROM_STEP = 1, 100
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Expected:
    """What is right to say of a rank: codes, and what the function at fault ends with, "" where no line is."""

    codes: tuple[str, ...]
    function: str = ""
    rank: int = RANK


SIXTEEN = {
    "dataset_sleeps": Expected(("sleep",), "__getitem__"),
    "worker_sleeps": Expected(("dataloader_workers",), "__getitem__"),
    "decoding": Expected(("python",), "decode"),
    "gil_thread": Expected(("gil",)),
    "gc": Expected(("garbage_collection",), "log"),
    "neighbour": Expected(("descheduled",)),
    "sigstop": Expected(("stopped",)),
    "cpulimit": Expected(("stopped",)),
    "disk": Expected(("disk",), "read_slowly"),
    "http": Expected(("network",), "fetch"),
    "longer_sequences": Expected(("operator",)),
    "extra_operator": Expected(("operator",), "forward"),
    "callback": Expected(("disk", "sleep"), "log"),
    "checkpoint": Expected(("checkpoint",), "train"),
    "recompilation": Expected(("recompilation",), "train"),
    "page_faults": Expected(("page_faults",), "touch"),
}

MORE = {
    "cgroup": Expected(("cgroup_throttled",)),
    "regex": Expected(("python",), "parse_lines"),
    "backtracking": Expected(("python",), "is_valid"),
    "json": Expected(("python",), "load_records"),
    "zlib": Expected(("python",), "unpack"),
    "sha256": Expected(("python",), "checksum"),
    "numpy": Expected(("python",), "shuffle"),
    "subprocess": Expected(("subprocess",), "run_tool"),
    "sqlite": Expected(("database", "disk"), "note"),
    "sync": Expected(("disk",), "flush_all"),
    "held_lock": Expected(("lock",), "refresh"),
    "prefetch": Expected(("lock",), "prefetched"),
    "file_lock": Expected(("lock",), "wait_for_file"),
    "full_pipe": Expected(("output",), "report"),
    "deepcopy": Expected(("python", "operator"), "snapshot"),
    "save_shm": Expected(("checkpoint",), "save_quickly"),
    "growing": Expected(("operator",), "remember"),
    "clip": Expected(("operator",), "clip"),
    "validate": Expected(("operator",), "validate"),
    "reload": Expected(("python",), "reload_plugins"),
    "threads": Expected(("operator", "descheduled")),
    "allocate": Expected(("python", "page_faults"), "allocate"),
    "peer": Expected(("network",), "wait_for_peer"),
}

OF_TRAIN = {"none", "cgroup", *SIXTEEN}
"""What `causes_jobs/train.py` does; `more.py` does the others."""

TOGETHER = {
    "json+save_shm": (MORE["json"], MORE["save_shm"]),
    "numpy+validate": (MORE["numpy"], MORE["validate"]),
    "zlib+subprocess@2": (MORE["zlib"], Expected(("subprocess",), "run_tool", 2)),
}
"""Two at once: in two stages of the rank, or on two ranks."""

BY_HAND = {"none": RANK, "json": 2}
"""A healthy rank that is captured by hand: of a healthy job, and while another rank is slow."""


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


@contextmanager
def running(script: str, causes: list[str], out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job under `sftriage run`, until it has ended."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone"]
    job = [*launch, str(JOBS / script), "--rank", str(RANK), "--from-step", str(FROM_STEP)]
    job += [option for cause in causes for option in ("--cause", cause)]
    command = [sys.executable, "-m", "sftriage", "run", "--out", str(out), "--", *job]
    with out.with_suffix(".log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as started:
        try:
            yield started
            started.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            # What was told by then counts; its trainers go with it.
            started.terminate()


def onset_s(out: Path) -> float:
    """When the fault began."""
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
                capture.rank == one.rank and found.code in one.codes and function.endswith(one.function)
                for one in expected
            )
            after = capture.last_step - FROM_STEP, event.time_s - onset_s(out)
            return Row(cause, right, found.sure and not right, found.code, found.sure, found.sentence, *after)
    for one in (event.decision for event in events if isinstance(event, WindowJudged)):
        if one.reason in get_args(SystemCode):
            right = any(one.reason in each.codes and one.parameters["rank"] == each.rank for each in expected)
            after = one.last_step - FROM_STEP, one.time_s - onset_s(out)
            return Row(cause, right, not right, one.reason, True, reason_sentence(one), *after)
    return Row(cause, not expected, False)


def captured_by_hand(started: subprocess.Popen[bytes], out: Path, *ranks: int) -> list[Manifest]:
    """What is stored of ranks that a person captures in the same steps, some time after the fault began."""
    until_s = time.monotonic() + LIMIT_S
    while b"onset" not in out.with_suffix(".log").read_bytes():
        if started.poll() is not None or time.monotonic() > until_s:
            return []
        time.sleep(0.1)
    whom = [option for rank in ranks for option in ("--rank", str(rank))]
    ask = ["capture", "--run", str(out), *whom, "--reason", "to compare", "--json"]
    command = [sys.executable, "-m", "sftriage", *ask]
    subprocess.run(command, stdout=subprocess.DEVNULL, timeout=LIMIT_S, check=False)
    store = LocalStore(out)
    return [one for one in map(store.manifest, store.ids()) if one.trigger.label != "suspect"]


def by_hand(cause: str, rank: int, out: Path) -> Row:
    """What is told of a healthy rank that somebody captures: nothing is right."""
    with running("more.py", [] if cause == "none" else [cause], out) as started:
        asked = captured_by_hand(started, out, rank)
    causes = [one.findings.cause for one in asked if one.findings is not None and one.findings.cause is not None]
    invented = [one for one in causes if one.code != "unknown"]
    row = Row(f"rank {rank} by hand", bool(causes) and not invented, any(one.sure for one in invented))
    said = (invented or causes)[:1]
    return Row(row.cause, row.right, row.wrong, said[0].code, said[0].sure, said[0].sentence) if said else row


def rivals(cause: str, python: str, out: Path) -> object:
    """What other tools say of the slow rank's trace, and of another's in the same steps."""
    with running("train.py" if cause in OF_TRAIN else "more.py", [cause], out) as started:
        stored = captured_by_hand(started, out, RANK, RANK + 1)
        started.terminate()
    traces = {one.capture.rank: LocalStore(out).path(one.capture_id, one.artefacts[0].name) for one in stored}
    if len(traces) < 2:
        return "no two traces"
    command = [python, str(JOBS / "rivals.py"), *(str(traces[rank].resolve()) for rank in sorted(traces))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr[-500:]


def one_row(cause: str, out: Path) -> Row:
    """Run a job, and look at what was told of it."""
    if cause.startswith("by_hand:"):
        name = cause.partition(":")[2]
        return by_hand(name, BY_HAND[name], out)
    first = cause in OF_TRAIN
    with running("train.py" if first else "more.py", [cause] if first else cause.split("+"), out):
        pass
    expected = TOGETHER.get(cause) or (() if cause == "none" else ((SIXTEEN | MORE)[cause],))
    return named(cause, expected, out)


def main() -> None:
    sixteen, more = (*SIXTEEN, "none"), (*MORE, *TOGETHER, *(f"by_hand:{one}" for one in BY_HAND))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--more", action="store_true", help="the second set: other causes, two at once, and none")
    parser.add_argument("--only", nargs="+", choices=(*sixteen, *more))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path, help="where the runs are kept")
    parser.add_argument(
        "--rivals", metavar="PYTHON", help="what other tools say, which this Python has (HTA, TraceLens)"
    )
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="causes-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for cause in options.only or (more if options.more else sixteen):
            if options.rivals:
                print(json.dumps({cause: rivals(cause, options.rivals, folder / cause)}), flush=True)
                continue
            began_s = time.monotonic()
            row = one_row(cause, folder / cause.replace(":", "-"))
            rows.append(row)
            verdict = "right" if row.right else "WRONG" if row.wrong else "not named"
            onset = "" if row.after_s is None else f"{row.after_steps} steps, {row.after_s:.0f} s after onset"
            took_s = time.monotonic() - began_s
            print(f"{cause:18} {verdict:10} {row.code:20} {took_s:4.0f} s  {onset}", file=sys.stderr)
            print(f"    {'sure: ' if row.sure else ''}{row.sentence}", file=sys.stderr, flush=True)
    if options.rivals:
        return
    right, wrong = sum(row.right for row in rows), sum(row.wrong for row in rows)
    if options.json:
        about = {"machine": platform.processor(), "right": right, "of": len(rows), "wrong_and_sure": wrong}
        print(json.dumps({**about, "rows": [asdict(row) for row in rows]}))
    else:
        print(f"{right} of {len(rows)} right, {wrong} wrong ones stated as sure")


if __name__ == "__main__":
    main()
