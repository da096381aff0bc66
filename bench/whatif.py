"""What a what-if replay of a large trace takes, in time and memory, against reading the same file once.

A synthetic trace of a job of 4 stages, 8 data-parallel ranks and 32 microbatches, one worker of which is slow, in
Parquet. Each round runs `sftriage whatif --json` on it in a process of its own, and another that reads it and takes the
largest duration. The two are interleaved, so that a machine that slows down slows both; figures are medians, memory is
the largest resident size.

With ``--traces``, also how often each kind of stragglers is named that was planted in the published traces there:
``right`` if the kind and its workers are named and the kind is first (of two kinds: both), ``wrong`` if another is.
Seeds from 1000 on: the tests have others.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from bench.runner import interleaved, used
from sftriage.runs.operations import load_operations
from sftriage.stragglers.pipeline import COLUMNS
from tests.unit.stragglers.planted import PLANTED, Job, result_of

PLAIN_PASS = """
import sys
from pyarrow.parquet import ParquetFile
with ParquetFile(sys.argv[1]) as file:
    print(max(batch.column("duration").to_numpy().max() for batch in file.iter_batches(1 << 20, use_threads=False)))
"""
STEPS_AT_A_TIME = 50
QUICK = {"operations": 100_000, "rounds": 1}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--operations", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--traces", type=Path, help="a directory with the published traces (trace-*.parquet)")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--directory", help="where to write the trace (default: the system's temporary directory)")


def write_trace(path: Path, operations: int) -> int:
    """Write a trace of at least this many operations; returns how many it has."""
    job = Job(stages=4, dps=8, microbatches=32, steps=STEPS_AT_A_TIME)
    job.slow_worker()
    rows = job.rows()
    columns = {name: getattr(rows, field) for name, field in COLUMNS.items()}
    columns |= {name: columns[name].astype("float32") for name in ("start_ts", "duration")}
    optype = pyarrow.DictionaryArray.from_arrays(rows.optype_E, list(rows.optypes))
    written, writer = 0, None
    while written < operations:
        # The same steps again, with other numbers.
        columns["step"] = rows.step_E + 1000 * (written // len(rows.step_E))
        table = pyarrow.table(columns | {"optype": optype})
        writer = writer or parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
        written += len(table)
    if writer is not None:
        writer.close()
    return written


def scores(directory: Path, n_seeds: int) -> dict[str, dict[str, dict[str, int]]]:
    """By trace and planted kind: how many were slow enough to be attributed, how many right, how many wrong."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for path in sorted(directory.glob("trace-*.parquet")):
        operations = load_operations([path])
        for plant in PLANTED:
            results = [result_of(operations, plant, 1000 + seed) for seed in range(n_seeds)]
            attributed = [result for result in results if result is not None]
            right = [
                set(expected) <= set(kinds)
                and (len(expected) != 1 or kinds[0] == expected[0])
                and (workers is None or set(named) == workers)
                for kinds, named, expected, workers in attributed
            ]
            wrong = [bool(set(kinds) - set(expected)) for kinds, _, expected, _ in attributed]
            counts = {"attributed": len(attributed), "right": sum(right), "wrong": sum(wrong)}
            found.setdefault(path.stem, {})[plant] = counts
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        path = Path(scratch) / "trace.parquet"
        operations, file_mb = write_trace(path, options.operations), path.stat().st_size / 1e6
        commands = {"whatif": ("-m", "sftriage", "whatif", str(path), "--json"), "plain": ("-c", PLAIN_PASS, str(path))}
        took = interleaved({name: partial(used, *command) for name, command in commands.items()}, options.rounds)
    ratio = statistics.median(one.cpu_s / plain.cpu_s for one, plain in zip(*took.values(), strict=True))
    return {
        **({"kinds": scores(options.traces, options.seeds)} if options.traces else {}),
        "operations": operations,
        "file_mb": round(file_mb, 1),
        "rounds": options.rounds,
        "whatif_wall_s": round(statistics.median(one.wall_s for one in took["whatif"]), 1),
        "whatif_cpu_s": round(statistics.median(one.cpu_s for one in took["whatif"]), 1),
        "plain_cpu_s": round(statistics.median(one.cpu_s for one in took["plain"]), 2),
        "whatif_over_plain": round(ratio, 1),
        "peak_rss_mb": round(max(one.peak_mb for one in took["whatif"]), 0),
    }
