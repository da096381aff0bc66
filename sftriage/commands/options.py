"""Options that many subcommands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sftriage.runtime.catalogue_urls import FILE_VARIABLE, URL_VARIABLE

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
