"""``sftriage evidence``: what the GPUs of a running job's ranks on this host show, now."""

from __future__ import annotations

from typing import Annotated

from sftriage.agent.gpus import DEADLINE_S, gather
from sftriage.commands.options import RunOption, option
from sftriage.commands.output import print_json, results, say, write
from sftriage.reports.gpus import gpus_table
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
