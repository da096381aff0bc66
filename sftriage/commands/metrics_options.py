"""Options for metrics and spans, of `sftriage run` and `sftriage attach`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sftriage.sinks.metering import TOKEN_VARIABLE

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
