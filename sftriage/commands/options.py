"""Options that many subcommands take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sftriage.errors import UsageError
from sftriage.runtime.catalogue_urls import FILE_VARIABLE, URL_VARIABLE

if TYPE_CHECKING:
    from sftriage.sinks.metering import Endpoint, Metering

LOOPBACK = "127.0.0.1"
TOKEN_VARIABLE = "SFTRIAGE_METRICS_TOKEN"
_METRICS_PANEL = "Metrics and traces"

RunOption = Annotated[
    Path | None, typer.Option("--run", metavar="DIR", help="Run directory.", show_default="the newest run")
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="Captures of a store rather than of a run on this machine: s3://, gs:// or az:// with bucket and prefix, "
        "or a directory. Credentials come from the environment.",
        show_default=False,
    ),
]
CatalogueOption = Annotated[
    str | None,
    typer.Option(
        "--catalogue",
        metavar="URL",
        help="A catalogue that many jobs share: postgresql+psycopg://USER@HOST/DATABASE. With a password in it, it "
        f"belongs into ${URL_VARIABLE}, or into the file that ${FILE_VARIABLE} names.",
        show_default="that of the run or store",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]

JobOption = Annotated[str | None, typer.Option("--job", metavar="NAME", help="Only captures of this job.")]
RunIdOption = Annotated[str | None, typer.Option("--run-id", metavar="ID", help="Only captures of the run of this id.")]
RankOption = Annotated[int | None, typer.Option("--rank", metavar="N", min=0, help="Only captures of this rank.")]
StageOption = Annotated[
    str | None, typer.Option("--stage", metavar="NAME", help="Only captures whose suspect was in this stage.")
]
StepOption = Annotated[
    str | None,
    typer.Option(
        "--step",
        metavar="N or A..B",
        help="Only captures that recorded one of these steps, or were made because of one.",
    ),
]
SinceOption = Annotated[
    str | None,
    typer.Option(
        "--since", metavar="WHEN", help="Only captures made since: 2h, 3d, 2026-11-20, or 2026-11-20T08:30:00Z. UTC."
    ),
]
ReproducedOption = Annotated[
    Literal["yes", "no", "partly"] | None,
    typer.Option("--reproduced", help="Only captures in which the fault was still there, was not, or partly."),
]
HostOption = Annotated[str | None, typer.Option("--host", metavar="NAME", help="Only captures on this host.")]
ProfilerOption = Annotated[
    Literal["torch", "nsys", "stacks"] | None, typer.Option("--profiler", help="Only captures of this profiler.")
]

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
