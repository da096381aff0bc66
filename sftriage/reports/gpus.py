"""The GPUs of a job, as a table."""

from __future__ import annotations

from rich.table import Table

from sftriage.agent.gpus import Gpu, GpuEvidence, in_use_fraction


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
