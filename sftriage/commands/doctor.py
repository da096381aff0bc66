"""``sftriage doctor`` and ``evidence``: what works on this machine or with a script, and the GPUs of a job."""

from __future__ import annotations

import typer

from sftriage.agent.gpus import DEADLINE_S, Gpu, gather, in_use_fraction
from sftriage.commands.options import JsonOption, RunOption, argument, option
from sftriage.commands.output import bare_table, print_findings, print_json, results, say, table, write
from sftriage.runs.directory import find_run
from sftriage.runs.liveness import running_ranks
from sftriage.runtime.doctor import JobFound, examine, try_job
from sftriage.words.verdicts import counted


def doctor(
    command: list[str] | None = argument(
        "COMMAND",
        "A launcher and its arguments, after --: run some steps of it, as `sftriage run` would.",
        False,
    ),
    as_json: bool = option("--json", "Print the findings as JSON."),
    steps: int = option("N", "Steps that each rank of COMMAND takes.", min=1, default=20),
    seconds: float = option("S", "End COMMAND after this time in any case.", min=1, default=180.0),
) -> None:
    """Check this machine: the form of the recorder (C or Python), the place of the rings, and the profilers.

    Run it with the Python that trains. It exits with 1 if nothing can be recorded. With a COMMAND it checks that job
    instead: which stages of its steps it detects without a change to the script, and which lines to add for the
    others. It ends the command after a few steps; checkpoints and logs that the command writes until then remain.
    """
    if command:
        found = try_job(command, steps, seconds)
        if as_json:
            print_json(found)
        else:
            _show(found)
        if not found.steps:
            raise typer.Exit(1)
        return
    findings = examine()
    if as_json:
        print_json(findings)
    else:
        print_findings((row.what, row.state, row.detail, row.do) for row in findings)
    if any(row.what == "rings" and row.state == "missing" for row in findings):
        raise typer.Exit(1)


def _show(found: JobFound) -> None:
    seams = [(seam.name, f"{seam.fired}", "" if seam.share is None else f"{seam.share:.0%}") for seam in found.seams]
    results().print(table(("seam", "calls", "share"), seams, ("calls", "share"), box=None, padding=(0, 2, 0, 0)))
    known = {seam.name for seam in found.seams}
    others = [f"{name} {share:.0%}" for name, share in found.stages.items() if name not in known]
    lines = {
        "steps": f"{counted(found.steps, 'step')} of {counted(found.ranks, 'rank')}",
        "by hand": "the script creates a Monitor, which is used" if found.by_hand else "",
        "other stages": ", ".join(others),
        "models": ", ".join(found.models),
        "sync stages": ", ".join(found.sync) or "none",
        "collectives": ", ".join(f"{name} ({calls})" for name, calls in found.collectives.items()),
        "cohorts": ", ".join(f"{name or 'all alike'}: {ranks}" for name, ranks in found.cohorts.items()),
        "writer": found.writer and f"in {found.writer}",
    }
    for capture in found.captures:
        lines[f"capture: {capture.profiler}"] = "works" if capture.works else f"does not work: {capture.why_not}"
    results().print("", bare_table((title, text) for title, text in lines.items() if text))
    for gap in found.missing:
        write("", f"missing: {gap.what}", *(f"    {line}" for line in gap.lines))


def evidence(
    run: RunOption = None,
    as_json: JsonOption = False,
    deadline_s: float = option("--deadline SECONDS", "Seconds to wait for NVML.", min=0.1, default=DEADLINE_S),
) -> None:
    """Show the state of the GPUs of a job's ranks, from the NVIDIA driver: clocks and their limits, errors, memory.

    Run it on the host of the ranks. It supports a verdict, but never decides one.
    """
    found = gather(running_ranks(find_run(run)), deadline_s=deadline_s)
    if as_json:
        print_json(found)
        return
    if found.problem:
        say(found.problem)
    if found.gpus:
        titles = ("GPU", "ranks", "model", "SM clock", "limited by", "memory", "ECC errors")
        numbers = tuple(title for title in titles if title not in ("model", "limited by"))
        rows = [_cells(gpu, [str(place.rank) for place in found.ranks if place.gpu == gpu.uuid]) for gpu in found.gpus]
        rows += [("?", str(place.rank), place.how) for place in found.ranks if place.gpu is None]
        results().print(table(titles, rows, numbers, title=f"GPUs, driver {found.driver or '?'}", title_justify="left"))
    write(*(f"- {remark}" for remark in found.remarks))
    if found.gpus and not found.remarks:
        results().print("Nothing unusual.")


def _cells(gpu: Gpu, ranks: list[str]) -> tuple[str, ...]:
    reasons = [name for name, share in (gpu.clock_reasons or {}).items() if share]
    clock, limit, used = gpu.sm_clock_mhz, gpu.sm_clock_max_mhz, in_use_fraction(gpu)
    return (
        str(gpu.index),
        ", ".join(ranks) or "-",
        gpu.name or "-",
        "-" if clock is None else f"{clock:,.0f} MHz" if limit is None else f"{clock:,.0f} of {limit:,.0f} MHz",
        ", ".join(reasons) or "-",
        "-" if used is None else f"{used:.0%} of {(gpu.memory_total_bytes or 0) / 2**30:,.0f} GiB",
        "-" if gpu.ecc_uncorrected is None else f"{gpu.ecc_uncorrected:,}",
    )
