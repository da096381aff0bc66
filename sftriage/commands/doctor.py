"""``sftriage doctor``: what works here, and what is missing for the rest."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from sftriage.commands.output import print_json, results
from sftriage.runtime.doctor import examine

_STYLES = {"ok": "green", "limited": "yellow", "missing": "red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="A list of findings on stdout.")] = False,
) -> None:
    """Look at this machine: which form of the recorder runs, where rings go, which profilers are there.

    Run it with the Python that trains. It ends with 1 where nothing can be recorded.
    """
    findings = examine()
    if as_json:
        print_json(findings)
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for one in findings:
            table.add_row(one.what, f"[{_STYLES[one.state]}]{one.state}[/]", one.detail)
        results().print(table)
    if any(one.what == "rings" and one.state == "missing" for one in findings):
        raise typer.Exit(1)
