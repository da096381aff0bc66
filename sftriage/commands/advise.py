"""``sftriage advise``: what would help against a straggler that stays."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sftriage.commands.options import JsonOption, argument, meant, option
from sftriage.commands.output import print_json, write
from sftriage.errors import InputError, UsageError
from sftriage.mitigate.advice import Link, Messages, pipeline_of
from sftriage.policy.quantities import size_bytes
from sftriage.runs.directory import find_run
from sftriage.runs.glance import advice_lines, advice_of_run, advice_values
from sftriage.runs.source import RunSource
from sftriage.runtime.whatif_inputs import load_operations


def advise(
    run: Annotated[Path | None, argument("RUN", "Run directory.", "the newest run started here")] = None,
    gradients: Annotated[str | None, option("SIZE", "What ranks all-reduce in a step: 500Mi.", False)] = None,
    bandwidth: Annotated[float, option("GB/S", "Of a rank's link, each way.", min=1e-6, max=1e6)] = 25.0,
    latency: Annotated[float, option("US", "Of a message, in microseconds.", min=0.0, max=1e9)] = 10.0,
    pipeline: Annotated[
        Path | None, option("TRACE.parquet", "The operations of its pipeline (as for whatif).", False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what would help against a straggler that stays, and by how much: by models, with what they take for granted.

    Take it out, give it less to do, all-reduce around it (StragglAR, arXiv 2505.23523); of a pipeline with slow links,
    run stages further ahead (Adaptra, arXiv 2504.19232). Nothing is done to the job.
    """
    messages = None
    if gradients is not None:
        reduced_bytes = meant("--gradients", size_bytes, gradients)
        if reduced_bytes <= 0:
            raise UsageError(f"--gradients {gradients}: nothing to reduce")
        messages = Messages(reduced_bytes, Link(latency * 1e-6, 1e-9 / bandwidth))
    directory = find_run(run)
    view = RunSource(lambda: directory).view()
    if view.problem:
        raise InputError(view.problem)
    recorded = None if pipeline is None else pipeline_of(load_operations([pipeline]))
    advice = advice_of_run(view, messages, recorded)
    if as_json:
        print_json(advice_values(advice))
        return
    write(*advice_lines(advice))
