"""``sftriage evidence``: what the GPUs of a running job's ranks on this host show, now."""

from __future__ import annotations

from typing import Annotated

from rich.table import Table

from sftriage.agent.gpus import DEADLINE_S, Gpu, GpuEvidence, gather, in_use_fraction
from sftriage.commands.options import RunOption, option
from sftriage.commands.output import print_json, results, say, write
from sftriage.runs.directory import find_run
from sftriage.runs.liveness import running_ranks


def evidence(
    run: RunOption = None,
    as_json: Annotated[bool, option("--json", "One object on stdout.")] = False,
    deadline_s: Annotated[float, option("--deadline SECONDS", "Seconds to wait for NVML.", min=0.1)] = DEADLINE_S,
) -> None:
    """Ask the NVIDIA driver about the GPUs of a job's ranks: clocks and what limits them, errors, memory.

    It corroborates; it never decides.
    """
    found = gather(running_ranks(find_run(run)), deadline_s=deadline_s)
    if as_json:
        print_json(found)
        return
    if found.problem:
        say(found.problem)
    if found.gpus:
        results().print(gpus_table(found))
    for remark in found.remarks:
        write(f"- {remark}")
    if found.gpus and not found.remarks:
        results().print("Nothing out of the ordinary.")


def gpus_table(found: GpuEvidence) -> Table:
    """A line a GPU; a dash is what it does not say."""
    table = Table(title=f"GPUs, driver {found.driver or '?'}", title_justify="left")
    for column in ("GPU", "ranks", "model", "SM clock", "limited by", "memory", "ECC errors"):
        table.add_column(column, justify="left" if column in ("model", "limited by") else "right")
    for gpu in found.gpus:
        ranks = [str(place.rank) for place in found.ranks if place.gpu == gpu.uuid]
        table.add_row(str(gpu.index), ", ".join(ranks) or "-", gpu.name or "-", *_cells(gpu))
    for place in found.ranks:
        if place.gpu is None:
            table.add_row("?", str(place.rank), place.how)
    return table


def _cells(gpu: Gpu) -> tuple[str, ...]:
    reasons = [name for name, share in (gpu.clock_reasons or {}).items() if share]
    clock, limit, used = gpu.sm_clock_mhz, gpu.sm_clock_max_mhz, in_use_fraction(gpu)
    return (
        "-" if clock is None else f"{clock:,.0f} MHz" if limit is None else f"{clock:,.0f} of {limit:,.0f} MHz",
        ", ".join(reasons) or "-",
        "-" if used is None else f"{used:.0%} of {(gpu.memory_total_bytes or 0) / 2**30:,.0f} GiB",
        "-" if gpu.ecc_uncorrected is None else f"{gpu.ecc_uncorrected:,}",
    )
