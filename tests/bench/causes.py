"""Does the first sentence name the cause? Real jobs with one rank made slow in sixteen ways, and one that is not.

    python tests/bench/causes.py [--only CAUSE ...] [--json] [--keep DIR]

Each row is a DDP job of three ranks over Gloo (`causes_jobs/train.py`) under `sftriage run` with the default policy; on
two cores a row takes half a minute. A row is right where the cause that is told has the code that it should have, and,
where a line of the script is at fault, names its function; wrong where another cause is told as sure. What the verdict
itself says of a rank that waits for a core counts: no profiler is started for that.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sftriage.runs.decisions import decisions_of
from sftriage.runs.directory import RunDirectory
from sftriage.traces.store import LocalStore

JOB = Path(__file__).with_name("causes_jobs") / "train.py"
RANK, FROM_STEP = 1, 100
LIMIT_S = 90.0

EXPECTED: dict[str, tuple[tuple[str, ...], str]] = {
    "dataset_sleeps": (("sleep",), "__getitem__"),
    "worker_sleeps": (("dataloader_workers",), "batches"),
    "decoding": (("python",), "decode"),
    "gil_thread": (("gil",), ""),
    "gc": (("garbage_collection",), "log"),
    "neighbour": (("descheduled",), ""),
    "sigstop": (("stopped",), ""),
    "cpulimit": (("stopped",), ""),
    "disk": (("disk",), "read_slowly"),
    "http": (("network",), "fetch"),
    "longer_sequences": (("operator",), ""),
    "extra_operator": (("operator",), "forward"),
    "callback": (("disk", "sleep"), "log"),
    "checkpoint": (("checkpoint",), "train"),
    "recompilation": (("recompilation",), "train"),
    "page_faults": (("python",), "touch"),
}
"""The codes that are right, and what the name of the function at fault ends with, "" where no line is."""


@dataclass(frozen=True, slots=True)
class Row:
    """One job: what was told of it first, and when.

    ``told_step`` is the last step of the window that led there, so many after `FROM_STEP`.
    """

    cause: str
    right: bool
    wrong: bool
    code: str
    sure: bool
    sentence: str
    told_step: int | None


def run(cause: str, out: Path) -> RunDirectory:
    """Run one job."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone"]
    job = [*launch, str(JOB), "--cause", cause, "--rank", str(RANK), "--from-step", str(FROM_STEP)]
    command = [sys.executable, "-m", "sftriage", "run", "--out", str(out), "--", *job]
    with out.with_suffix(".log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as running:
        try:
            running.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            # What was told by then counts; its trainers go with it.
            running.terminate()
    return RunDirectory(out)


def told(cause: str, directory: RunDirectory) -> Row:
    """The first cause that was told of a run, by a capture or by a verdict."""
    store = LocalStore(directory.path)
    manifests = sorted((store.manifest(one) for one in store.ids()), key=lambda one: one.capture.first_step)
    codes, function = EXPECTED.get(cause, ((), ""))
    for manifest in manifests:
        found = None if manifest.findings is None else manifest.findings.cause
        if found is None or manifest.capture.role != "suspect":
            continue
        whose = manifest.capture.rank == RANK
        named = not function or (found.place is not None and found.place.function.endswith(function))
        right = whose and found.code in codes and named
        wrong = found.sure and not right
        return Row(cause, right, wrong, found.code, found.sure, found.sentence, manifest.trigger.window.last_step)
    for one in decisions_of(directory):
        if one["reason"] == "descheduled":
            right = "descheduled" in codes and one["parameters"]["rank"] == RANK
            return Row(cause, right, not right, "descheduled", True, one["words"], one["last_step"])
    nothing = cause == "none"
    return Row(cause, nothing, False, "", False, "nothing was told", None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*EXPECTED, "none"), default=(*EXPECTED, "none"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="causes-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for cause in options.only:
            began_s = time.monotonic()
            rows.append(told(cause, run(cause, folder / cause)))
            row, took_s = rows[-1], time.monotonic() - began_s
            verdict = "right" if row.right else "WRONG" if row.wrong else "not named"
            print(f"{cause:18} {verdict:10} {row.code:20} {took_s:4.0f} s  {row.sentence}", file=sys.stderr, flush=True)
    named = sum(row.right for row in rows if row.cause != "none")
    wrong = sum(row.wrong for row in rows)
    summary = {"named": named, "of": sum(row.cause != "none" for row in rows), "wrong_and_sure": wrong}
    if options.json:
        print(json.dumps({"machine": platform.processor(), **summary, "rows": [asdict(row) for row in rows]}))
    else:
        print(f"{named} of {summary['of']} named, {wrong} wrong ones stated as sure")


if __name__ == "__main__":
    main()
