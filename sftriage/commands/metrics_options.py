"""Options for metrics and spans, of `sftriage run` and `sftriage attach`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sftriage.errors import UsageError

if TYPE_CHECKING:
    from sftriage.sinks.metering import Endpoint, Metering

LOOPBACK = "127.0.0.1"
TOKEN_VARIABLE = "SFTRIAGE_METRICS_TOKEN"
_PANEL = "Metrics and traces"

PortOption = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        metavar="PORT",
        min=0,
        max=65535,
        help="Serve Prometheus metrics on this port while the job runs; 0 is any that is free.",
        show_default="nothing listens",
        rich_help_panel=_PANEL,
    ),
]
HostOption = Annotated[
    str,
    typer.Option(
        "--metrics-host",
        metavar="ADDRESS",
        help="Address to serve them on. Any but this machine's own wants a token.",
        rich_help_panel=_PANEL,
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--metrics-token-file",
        metavar="FILE",
        help=f"File with the Bearer token that a scraper sends. ${TOKEN_VARIABLE} holds the token itself.",
        rich_help_panel=_PANEL,
    ),
]
FileOption = Annotated[
    Path | None,
    typer.Option(
        "--metrics-file",
        metavar="FILE.prom",
        help="Write the metrics into a file, for node_exporter's textfile collector.",
        rich_help_panel=_PANEL,
    ),
]
PerRankOption = Annotated[
    bool, typer.Option("--metrics-per-rank", help="Metrics of single ranks too.", rich_help_panel=_PANEL)
]
OtelOption = Annotated[
    bool,
    typer.Option(
        "--otel",
        help="Send OpenTelemetry spans of windows and captures, as the standard OTEL_* variables say.",
        rich_help_panel=_PANEL,
    ),
]
OtelStepsOption = Annotated[
    bool,
    typer.Option("--otel-steps", help="Spans of the steps of windows with a suspect too.", rich_help_panel=_PANEL),
]


def metering(
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
    from sftriage.sinks.metering import Metering, MeteringOptions

    def listen() -> Endpoint:
        from sftriage.web.access import Access, token_of
        from sftriage.web.metrics import MetricsEndpoint

        advice = f"give one with --metrics-token-file, or in {TOKEN_VARIABLE}"
        return MetricsEndpoint(host, port or 0, Access.to(host, token_of(token_file, TOKEN_VARIABLE), advice))

    return Metering(MeteringOptions(file, per_rank, otel, otel_steps), None if port is None else listen)
