"""Options that many subcommands take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from sftriage.errors import UsageError
from sftriage.runtime.catalogue_urls import FILE_VARIABLE, URL_VARIABLE

if TYPE_CHECKING:
    from sftriage.runtime.many_hosts import HubOptions


def option(spec: str, text: str, shown: str | bool = True, **limits: Any) -> Any:
    """An option of a command.

    Args:
        spec: its names and what it takes, as its help shows them: ``--namespace -n NAME``; by default the parameter's.
        text: what its help says.
        shown: its default as its help shows it.
        limits: ``min`` and ``max``.
    """
    names, metavar = _names(spec)
    return typer.Option(*names, metavar=metavar, help=text, show_default=shown, **limits)


def argument(spec: str, text: str, shown: str | bool = True, **more: Any) -> Any:
    """An argument of a command, as `option` has it."""
    return typer.Argument(metavar=spec, help=text, show_default=shown, **more)


def _names(spec: str) -> tuple[list[str], str | None]:
    words = spec.split(" ")
    names = [word for word in words if word.startswith("-")]
    return names, " ".join(words[len(names) :]) or None


RunOption = Annotated[Path | None, option("--run DIR", "Run directory.", "the newest run started here")]
CatalogueOption = Annotated[
    str | None,
    option(
        "--catalogue URL",
        "A catalogue that many jobs share: postgresql+psycopg://USER@HOST/DATABASE. With a password in it, it "
        f"belongs into ${URL_VARIABLE}, or into the file that ${FILE_VARIABLE} names.",
        "that of the run or store",
    ),
]
JsonOption = Annotated[bool, option("--json", "JSON on stdout.")]
TlsOption = Annotated[
    Path | None,
    option(
        "--tls DIR",
        "Encrypt what the hosts tell each other: ca.pem is there, and on the host of --hub cert.pem and key.pem.",
        False,
    ),
]
NatsOption = Annotated[
    str | None, option("--nats URL", "A NATS server with JetStream that is there already: nats:// or tls://.", False)
]


@dataclass(frozen=True, slots=True)
class CapturesChoice:
    """Whose captures are meant: a run's, a store's, or all that a catalogue knows."""

    run: RunOption = None
    store: Annotated[
        str | None,
        option(
            "--store URL",
            "Captures of a store rather than of a run on this machine: s3://, gs:// or az:// with bucket and "
            "prefix, or a directory. Credentials come from the environment.",
            False,
        ),
    ] = None
    catalogue: CatalogueOption = None


@dataclass(frozen=True, slots=True)
class HubChoice:
    """Where the hub of a job on many hosts is."""

    job_id: Annotated[
        str | None,
        option(
            "--job-id ID",
            "A name that no other job on the same hub has, and all hosts of this one: $SLURM_JOB_ID.",
            False,
        ),
    ] = None
    hub: Annotated[
        str | None,
        option(
            "--hub HEAD[:PORT]",
            "The host that the others connect to: it starts a NATS server, on port 7422, and the controller.",
            False,
        ),
    ] = None
    nats: NatsOption = None
    creds: Annotated[
        Path | None,
        option(
            "--creds FILE",
            "Credentials: USER:PASSWORD, a token, the seed of an nkey, a .creds file of nsc, or a directory of such "
            "files. By default the host of --hub makes a password, in a file under sftriage-runs.",
            False,
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
