"""``sftriage run`` and ``attach``: a job of one's own, watched; and one taken over that goes on without it."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sftriage.commands.options import (
    CatalogueOption,
    MetricsFileOption,
    MetricsHostOption,
    MetricsPerRankOption,
    MetricsPortOption,
    MetricsTokenFileOption,
    OtelOption,
    OtelStepsOption,
    RunOption,
    metering_of,
)
from sftriage.commands.output import notices, uploading
from sftriage.errors import UsageError
from sftriage.runs.directory import find_run
from sftriage.words import place

if TYPE_CHECKING:
    from sftriage.runtime.local import LocalRun, TakeOver
    from sftriage.sinks.metering import Metering
    from sftriage.sinks.terminal import Reporter

DEFAULT_TRACE = "cuda,nvtx,osrt"


def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="The launcher and its arguments, after --.", show_default=False),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY",
            help="A policy file, or the name of one that ships with sftriage. Repeatable: the rules of all are tried, "
            "in order, under the strictest limits. A file that changes while the job runs takes effect.",
            show_default="default",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run directory to make.", show_default="a new one under sftriage-runs"),
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the job.", show_default="the script's")
    ] = None,
    nsys: Annotated[
        bool, typer.Option("--nsys", help="Start every rank under Nsight Systems, for policies that capture with it.")
    ] = False,
    nsys_armed: Annotated[
        bool,
        typer.Option(
            "--nsys-armed",
            help="As --nsys, for ranks whose session cannot be reached from here, as in another container: nsys waits "
            "for a range that the trainer opens. The run directory has to be theirs too.",
            rich_help_panel="Nsight Systems",
        ),
    ] = False,
    nsys_trace: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="What nsys traces; it has to be known at the start.", rich_help_panel="Nsight Systems"
        ),
    ] = DEFAULT_TRACE,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="URL",
            help="Keep copies of the captures in s3://, gs:// or az:// with bucket and prefix, or in a directory. They "
            "are uploaded while the job runs. Credentials come from the environment.",
            show_default="captures stay in the run directory",
        ),
    ] = None,
    drop_local: Annotated[
        bool, typer.Option("--drop-local", help="Remove traces here once their copy in the store is verified.")
    ] = False,
    catalogue: CatalogueOption = None,
    metrics_port: MetricsPortOption = None,
    metrics_host: MetricsHostOption = "127.0.0.1",
    metrics_token_file: MetricsTokenFileOption = None,
    metrics_file: MetricsFileOption = None,
    metrics_per_rank: MetricsPerRankOption = False,
    otel: OtelOption = False,
    otel_steps: OtelStepsOption = False,
) -> None:
    """Run a training job and watch it.

    The trainers have to use sftriage.Monitor. Their exit status becomes that of this command.
    """
    # What watches a job takes a second to import: not for a help text, nor while a shell completes a line.
    from sftriage.policy.loading import find
    from sftriage.runtime.indexing import checked_catalogue
    from sftriage.runtime.local import Keeping, LocalRun, UnderNsys, job_name
    from sftriage.runtime.uploads import checked_store
    from sftriage.sinks.terminal import Reporter

    if not command:
        raise UsageError("nothing to run; give the launcher after --, as in: sftriage run -- torchrun train.py")
    paths = [find(name) for name in policy or ["default"]]
    name = job_name(job, command)
    if drop_local and store is None:
        raise UsageError("--drop-local needs a --store that has the traces then")
    if store is not None:
        store = checked_store(store, name)
    metering = metering_of(
        metrics_port, metrics_host, metrics_token_file, metrics_file, metrics_per_rank, otel, otel_steps
    )
    reporter = Reporter(notices())
    local = LocalRun(
        tuple(command),
        name,
        paths,
        lambda info: [reporter, *metering.sinks(info.job, info.run_id, time.time())],
        keeping=Keeping(out, store, drop_local, checked_catalogue(catalogue)),
        nsys=UnderNsys(nsys_trace, nsys_armed) if nsys or nsys_armed else None,
    )
    _say_begun(reporter, "watching", local, metering)
    status = local.execute()
    if local.steps_seen:
        _say_summary(reporter, local)
    else:
        failed = f"the job failed (exit status {status}), and " if status else ""
        reporter.say(f"{failed}no trainer recorded a step: does the script use sftriage.Monitor?")
    _finish(local, reporter)
    raise typer.Exit(status)


def attach(
    run: RunOption = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY",
            help="A policy file, or the name of one that ships with sftriage. Repeatable.",
            show_default="those that the run started with",
        ),
    ] = None,
    catalogue: CatalogueOption = None,
    metrics_port: MetricsPortOption = None,
    metrics_host: MetricsHostOption = "127.0.0.1",
    metrics_token_file: MetricsTokenFileOption = None,
    metrics_file: MetricsFileOption = None,
    metrics_per_rank: MetricsPerRankOption = False,
    otel: OtelOption = False,
    otel_steps: OtelStepsOption = False,
) -> None:
    """Take over a running job whose `sftriage run` has ended before it, and watch it to its end.

    Nothing is lost by the change: steps are read on where they were left, captures that were under way are collected,
    cooldowns and limits go on. The job itself notices nothing. Ctrl-C lets go of it again.
    """
    from sftriage.policy.loading import find
    from sftriage.runtime.indexing import checked_catalogue
    from sftriage.runtime.local import TakeOver
    from sftriage.sinks.terminal import Reporter

    metering = metering_of(
        metrics_port, metrics_host, metrics_token_file, metrics_file, metrics_per_rank, otel, otel_steps
    )
    reporter = Reporter(notices())
    taken = TakeOver(
        find_run(run),
        [find(name) for name in policy or ()],
        lambda info: [reporter, *metering.sinks(info.job, info.run_id, time.time())],
        checked_catalogue(catalogue),
    )
    _say_begun(reporter, "took over the job", taken, metering)
    with contextlib.closing(taken):
        try:
            # Whoever ends this process ends this, and not the job.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            taken.watch()
        except KeyboardInterrupt:
            reporter.say("let go of the job, which goes on; `sftriage attach` takes it over again")
            raise typer.Exit(128 + signal.SIGINT) from None
    _say_summary(reporter, taken)
    _finish(taken, reporter)


def _finish(watched: LocalRun | TakeOver, reporter: Reporter) -> None:
    """Wait for what is still on its way to a store or a catalogue, and say what is left."""
    if watched.uploads is not None:
        with uploading() as show:
            watched.uploads.finish(reporter.say, show)
    if watched.indexing is not None:
        watched.indexing.finish(reporter.say)


def _say_begun(reporter: Reporter, how: str, watched: LocalRun | TakeOver, metering: Metering) -> None:
    names = ", ".join(one.policy.metadata.name for one in watched.files.current.loaded)
    reporter.say(f"{how} under policy {names}; run directory {place(watched.directory.path)}")
    if metering.url is not None:
        reporter.say(f"metrics are at {metering.url}")


def _say_summary(reporter: Reporter, watched: LocalRun | TakeOver) -> None:
    reporter.say(
        f"{reporter.windows} windows decided, {reporter.captures} captured; "
        f"why: sftriage decisions --run {place(watched.directory.path)}"
    )
