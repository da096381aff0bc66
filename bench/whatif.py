"""What a what-if replay of a large trace takes, in time and memory, against reading the same file once.

    python bench/whatif.py [--operations N] [--rounds N] [--directory DIR] [--json]

A synthetic trace of a job of 4 stages, 8 data-parallel ranks and 32 microbatches, one worker of which is slow, of as
many steps as make up so many operations, in Parquet. Each round runs `sftriage whatif --json` on it in a process of its
own, and in another one reads it and takes the largest duration. The two are interleaved, so that a machine that slows
down slows both; figures are medians, memory is the largest resident size.
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
import time
from pathlib import Path
from typing import NamedTuple

import pyarrow
from pyarrow import parquet

from sftriage.whatif.arranging import COLUMNS
from tests.unit.whatif.planted import Job

PLAIN_PASS = """
import sys
from pyarrow.parquet import ParquetFile
with ParquetFile(sys.argv[1]) as file:
    print(max(batch.column("duration").to_numpy().max() for batch in file.iter_batches(1 << 20, use_threads=False)))
"""
STEPS_AT_A_TIME = 50


class Used(NamedTuple):
    wall_s: float
    cpu_s: float
    peak_mb: float


def write_trace(path: Path, operations: int) -> int:
    """Write a trace of at least so many operations, and say how many."""
    job = Job(stages=4, dps=8, microbatches=32, steps=STEPS_AT_A_TIME)
    job.slow_worker()
    rows = job.rows()
    columns = {name: getattr(rows, field) for name, field in COLUMNS.items()}
    columns |= {name: columns[name].astype("float32") for name in ("start_ts", "duration")}
    optype = pyarrow.DictionaryArray.from_arrays(rows.optype_E, list(rows.optypes))
    written, writer = 0, None
    while written < operations:
        # The same steps again, under other numbers.
        columns["step"] = rows.step_E + 1000 * (written // len(rows.step_E))
        table = pyarrow.table(columns | {"optype": optype})
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
        written += len(table)
    if writer is not None:
        writer.close()
    return written


def run(command: list[str]) -> Used:
    began_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[:4]} ended with {process.returncode}")
    return Used(wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6)


def measure(options: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        path = Path(scratch) / "trace.parquet"
        operations = write_trace(path, options.operations)
        commands = {
            "whatif": [sys.executable, "-m", "sftriage", "whatif", str(path), "--json"],
            "plain": [sys.executable, "-c", PLAIN_PASS, str(path)],
        }
        used: dict[str, list[Used]] = {name: [] for name in commands}
        for _ in range(options.rounds):
            for name, command in commands.items():
                used[name].append(run(command))
        file_mb = path.stat().st_size / 1e6
    ratio = statistics.median(one.cpu_s / plain.cpu_s for one, plain in zip(*used.values(), strict=True))
    return {
        "operations": operations,
        "file_mb": round(file_mb, 1),
        "rounds": options.rounds,
        "python": platform.python_version(),
        "whatif_wall_s": round(statistics.median(one.wall_s for one in used["whatif"]), 1),
        "whatif_cpu_s": round(statistics.median(one.cpu_s for one in used["whatif"]), 1),
        "plain_cpu_s": round(statistics.median(one.cpu_s for one in used["plain"]), 2),
        "whatif_over_plain": round(ratio, 1),
        "peak_rss_mb": round(max(one.peak_mb for one in used["whatif"]), 0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--operations", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", help="where to write the trace (default: the system's temporary directory)")
    options = parser.parse_args()
    found = measure(options)
    if options.json:
        print(json.dumps(found))
        return
    print(f"{found['operations']:,} operations, {found['file_mb']} MB of Parquet")
    print(
        f"  replayed    {found['whatif_wall_s']:>8} s, {found['whatif_cpu_s']} s of a core, {found['peak_rss_mb']} MB"
    )
    print(
        f"  read once   {found['plain_cpu_s']:>8} s of a core; the replay takes {found['whatif_over_plain']} times that"
    )


if __name__ == "__main__":
    main()
