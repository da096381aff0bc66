"""Options that many subcommands take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from sftriage.errors import UsageError
from sftriage.runtime.catalogue_urls import FILE_VARIABLE, URL_VARIABLE

if TYPE_CHECKING:
    from sftriage.runtime.many_hosts import HubOptions

RunOption = Annotated[
    Path | None, typer.Option("--run", metavar="DIR", help="Run directory.", show_default="the newest run started here")
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
_HOSTS_PANEL = "Many hosts"
TlsOption = Annotated[
    Path | None,
    typer.Option(
        "--tls",
        metavar="DIR",
        help="Encrypt what the hosts tell each other: ca.pem is there, and on the host of --hub cert.pem and key.pem.",
        show_default=False,
        rich_help_panel=_HOSTS_PANEL,
    ),
]
NatsOption = Annotated[
    str | None,
    typer.Option(
        "--nats",
        metavar="URL",
        help="A NATS server with JetStream that is there already: nats:// or tls://.",
        show_default=False,
        rich_help_panel=_HOSTS_PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class CapturesChoice:
    """Whose captures are meant: a run's, a store's, or all that a catalogue knows."""

    run: RunOption = None
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="URL",
            help="Captures of a store rather than of a run on this machine: s3://, gs:// or az:// with bucket and "
            "prefix, or a directory. Credentials come from the environment.",
            show_default=False,
        ),
    ] = None
    catalogue: CatalogueOption = None


@dataclass(frozen=True, slots=True)
class HubChoice:
    """Where the hub of a job on many hosts is."""

    job_id: Annotated[
        str | None,
        typer.Option(
            "--job-id",
            metavar="ID",
            help="A name that no other job on the same hub has, and all hosts of this one: $SLURM_JOB_ID.",
            show_default=False,
            rich_help_panel=_HOSTS_PANEL,
        ),
    ] = None
    hub: Annotated[
        str | None,
        typer.Option(
            "--hub",
            metavar="HEAD[:PORT]",
            help="The host that the others connect to: it starts a NATS server, on port 7422, and the controller.",
            show_default=False,
            rich_help_panel=_HOSTS_PANEL,
        ),
    ] = None
    nats: NatsOption = None
    creds: Annotated[
        Path | None,
        typer.Option(
            "--creds",
            metavar="FILE",
            help="What lets us in there: USER:PASSWORD, a token, the seed of an nkey, or what nsc or sftriage hub "
            "account makes. By default the host of --hub makes a password, in a file under sftriage-runs.",
            show_default=False,
            rich_help_panel=_HOSTS_PANEL,
        ),
    ] = None
    tls: TlsOption = None

    def options(self, job_id: str | None = None) -> HubOptions:
        """What was asked for; UsageError where it makes no sense."""
        from sftriage.runtime.many_hosts import HubOptions

        return HubOptions.of(job_id or self.job_id, self.hub, self.nats, self.creds, self.tls)


_Value = TypeVar("_Value")


def meant(option: str, read: Callable[[str], _Value], text: str) -> _Value:
    """What an option's text means; UsageError where it means nothing."""
    try:
        return read(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
