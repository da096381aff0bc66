"""``sftriage evidence``: what the GPUs of a running job's ranks on this host show, now."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from sftriage.agent.evidence import DEADLINE_S, GpuEvidence, gather, in_use_fraction
from sftriage.agent.gpus import Gpu
from sftriage.commands.options import RunOption
from sftriage.commands.output import notices, print_json, results
from sftriage.errors import RingError, UsageError
from sftriage.recorder import RingInfo, RingReader, find_rings
from sftriage.runs.directory import RunDirectory, find_run, read_info


def evidence(
    run: RunOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object on stdout.")] = False,
    deadline_s: Annotated[
        float, typer.Option("--deadline", metavar="SECONDS", help="Seconds to wait for NVML.", min=0.1)
    ] = DEADLINE_S,
) -> None:
    """Ask the NVIDIA driver about the GPUs of a job's ranks: clocks and what limits them, errors, memory.

    It corroborates; it never decides.
    """
    found = gather(running_ranks(find_run(run)), deadline_s=deadline_s)
    if as_json:
        print_json(found)
        return
    if found.problem:
        notices().print(f"sftriage: {found.problem}", soft_wrap=True, markup=False)
    if found.gpus:
        results().print(gpus_table(found))
    for remark in found.remarks:
        results().print(f"- {remark}", soft_wrap=True, markup=False)
    if found.gpus and not found.remarks:
        results().print("Nothing out of the ordinary.")


def running_ranks(run: RunDirectory) -> list[RingInfo]:
    """The ranks of a run's newest attempt that run on this host.

    Raises:
        UsageError: there are none.
    """
    ranks: list[RingInfo] = []
    for path in find_rings(Path(read_info(run).rings)):
        try:
            with RingReader(path) as reader:
                if reader.writer_alive:
                    ranks.append(reader.info)
        except RingError:
            continue
    if not ranks:
        raise UsageError(f"no rank of {run.path} is running on this host: GPUs are asked while the job runs")
    attempt = max(info.attempt for info in ranks)
    return sorted((info for info in ranks if info.attempt == attempt), key=lambda info: info.rank)


def gpus_table(found: GpuEvidence) -> Table:
    """A line a GPU; a dash is what it does not say."""
    table = Table(title=f"GPUs, driver {escape(found.driver or '?')}", title_justify="left")
    for column in ("GPU", "ranks", "model", "SM clock", "limited by", "memory", "ECC errors"):
        table.add_column(column, justify="left" if column in ("model", "limited by") else "right")
    for gpu in found.gpus:
        ranks = [str(place.rank) for place in found.ranks if place.gpu == gpu.uuid]
        table.add_row(str(gpu.index), ", ".join(ranks) or "-", escape(gpu.name or "-"), *_cells(gpu))
    for place in found.ranks:
        if place.gpu is None:
            table.add_row("?", str(place.rank), escape(place.how))
    return table


def _cells(gpu: Gpu) -> tuple[str, ...]:
    reasons = [name for name, share in (gpu.clock_reasons or {}).items() if share]
    clock, limit, used = gpu.sm_clock_mhz, gpu.sm_clock_max_mhz, in_use_fraction(gpu)
    return (
        "-" if clock is None else f"{clock:,.0f} MHz" if limit is None else f"{clock:,.0f} of {limit:,.0f} MHz",
        escape(", ".join(reasons) or "-"),
        "-" if used is None else f"{used:.0%} of {(gpu.memory_total_bytes or 0) / 2**30:,.0f} GiB",
        "-" if gpu.ecc_uncorrected is None else f"{gpu.ecc_uncorrected:,}",
    )
