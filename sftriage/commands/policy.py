"""``sftriage policy``: check policies before they are used."""

from __future__ import annotations

from typing import Annotated

import typer

from sftriage.commands.output import notices, results
from sftriage.policy import PolicyError, find, load, shipped

policies = typer.Typer(help="Check policies, and list those that ship with sftriage.", no_args_is_help=True)


@policies.command("validate")
def validate(
    files: Annotated[list[str], typer.Argument(help="Policy files, or names of shipped policies.")],
) -> None:
    """Check policies; every mistake is shown with its file, line, column and field."""
    mistaken = False
    for name in files:
        try:
            load(find(name))
        except PolicyError as error:
            mistaken = True
            notices().print(str(error), soft_wrap=True, markup=False)
    if mistaken:
        raise typer.Exit(2)
    results().print(f"{len(files)} valid", markup=False)


@policies.command("list")
def list_policies() -> None:
    """List the policies that ship with sftriage."""
    for name, path in shipped().items():
        results().print(f"{name:20} {path}", soft_wrap=True, markup=False)
