"""``sftriage run`` and ``attach``: a job of one's own, watched; and one taken over that goes on without it."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sftriage.commands.options import CatalogueOption, RunOption
from sftriage.commands.output import notices, uploading
from sftriage.errors import UsageError
from sftriage.runs.directory import find_run
from sftriage.words import counted, place

if TYPE_CHECKING:
    from sftriage.runtime.local import LocalRun, TakeOver
    from sftriage.sinks.metering import Endpoint, Metering
    from sftriage.sinks.terminal import Reporter
    from sftriage.windows.steplog import KeptSteps

DEFAULT_TRACE = "cuda,nvtx,osrt"
LOOPBACK = "127.0.0.1"
TOKEN_VARIABLE = "SFTRIAGE_METRICS_TOKEN"
_METRICS_PANEL = "Metrics and traces"
_STEPS_PANEL = "Recorded steps"
KEEP_STEPS, KEEP_STEPS_FOR = "16Gi", "30d"
MIN_KEPT_BYTES, MIN_KEPT_S = 1 << 20, 60.0

MetricsPortOption = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        metavar="PORT",
        min=0,
        max=65535,
        help="Serve Prometheus metrics on this port while the job runs; 0 is any that is free.",
        show_default="nothing listens",
        rich_help_panel=_METRICS_PANEL,
    ),
]
MetricsHostOption = Annotated[
    str,
    typer.Option(
        "--metrics-host",
        metavar="ADDRESS",
        help="Address to serve them on. Any but this machine's own wants a token.",
        rich_help_panel=_METRICS_PANEL,
    ),
]
MetricsTokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--metrics-token-file",
        metavar="FILE",
        help=f"File with the Bearer token that a scraper sends. ${TOKEN_VARIABLE} holds the token itself.",
        rich_help_panel=_METRICS_PANEL,
    ),
]
MetricsFileOption = Annotated[
    Path | None,
    typer.Option(
        "--metrics-file",
        metavar="FILE.prom",
        help="Write the metrics into a file, for node_exporter's textfile collector.",
        rich_help_panel=_METRICS_PANEL,
    ),
]
MetricsPerRankOption = Annotated[
    bool, typer.Option("--metrics-per-rank", help="Metrics of single ranks too.", rich_help_panel=_METRICS_PANEL)
]
OtelOption = Annotated[
    bool,
    typer.Option(
        "--otel",
        help="Send OpenTelemetry spans of windows and captures, as the standard OTEL_* variables say.",
        rich_help_panel=_METRICS_PANEL,
    ),
]
OtelStepsOption = Annotated[
    bool,
    typer.Option(
        "--otel-steps", help="Spans of the steps of windows with a suspect too.", rich_help_panel=_METRICS_PANEL
    ),
]


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
    keep_steps: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="How much is kept of the steps of all ranks together. What is older than the newest that find room "
            "is thinned, one step in eight, and then removed.",
            rich_help_panel=_STEPS_PANEL,
        ),
    ] = KEEP_STEPS,
    keep_steps_for: Annotated[
        str,
        typer.Option(
            metavar="DURATION", help="Steps so much older than the newest are removed.", rich_help_panel=_STEPS_PANEL
        ),
    ] = KEEP_STEPS_FOR,
    metrics_port: MetricsPortOption = None,
    metrics_host: MetricsHostOption = LOOPBACK,
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
    kept = _kept_steps(keep_steps, keep_steps_for)
    metering = metering_of(
        metrics_port, metrics_host, metrics_token_file, metrics_file, metrics_per_rank, otel, otel_steps
    )
    reporter = Reporter(notices())
    local = LocalRun(
        tuple(command),
        name,
        paths,
        lambda info: [reporter, *metering.sinks(info.job, info.run_id, time.time())],
        keeping=Keeping(out, store, drop_local, checked_catalogue(catalogue), kept),
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
    metrics_host: MetricsHostOption = LOOPBACK,
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


def metering_of(
    port: int | None,
    host: str,
    token_file: Path | None,
    file: Path | None,
    per_rank: bool,
    otel: bool,
    otel_steps: bool,
) -> Metering:
    """What was asked for by these options, made ready; nothing where nothing was.

    Raises:
        UsageError: it cannot be, or makes no sense.
    """
    if port is None and (token_file is not None or host != LOOPBACK):
        raise UsageError("nothing is served without --metrics-port")
    if per_rank and port is None and file is None:
        raise UsageError("--metrics-per-rank is about metrics: give --metrics-port or --metrics-file")
    if otel_steps and not otel:
        raise UsageError("--otel-steps is about spans: give --otel")
    from sftriage.sinks.metering import Metering

    def listen() -> Endpoint:
        from sftriage.web.access import Access, token_of
        from sftriage.web.metrics import MetricsEndpoint

        advice = f"give one with --metrics-token-file, or in {TOKEN_VARIABLE}"
        return MetricsEndpoint(host, port or 0, Access.to(host, token_of(token_file, TOKEN_VARIABLE), advice))

    return Metering(None if port is None else listen, file, per_rank, otel, otel_steps)


def _kept_steps(size: str, age: str) -> KeptSteps:
    """How much is kept of steps, by the options.

    Raises:
        UsageError: they are no size and no duration, or too little.
    """
    from sftriage.policy import quantities
    from sftriage.windows.steplog import KeptSteps

    option = "--keep-steps"
    try:
        max_bytes = quantities.size_bytes(size)
        option = "--keep-steps-for"
        age_s = quantities.seconds(age)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if max_bytes < MIN_KEPT_BYTES or age_s < MIN_KEPT_S:
        raise UsageError("--keep-steps is 1Mi at least, and --keep-steps-for 1m")
    return KeptSteps(max_bytes, age_s)


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
    reporter.finish()
    reporter.say(
        f"{counted(reporter.windows, 'window')} judged, {counted(reporter.captures, 'capture')} stored; "
        f"why: sftriage decisions --run {place(watched.directory.path)}"
    )
