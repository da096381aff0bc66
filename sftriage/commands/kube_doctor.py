"""``sftriage kube doctor``: why nothing happens in a cluster, and what to do about it."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from sftriage.commands.kube_options import ContextOption, NamespaceOption, connected
from sftriage.commands.options import JsonOption, option
from sftriage.commands.output import print_json, results
from sftriage.kube.diagnosis import diagnose
from sftriage.kube.snapshot import gather
from sftriage.reports.watch_lines import clean

_STYLES = {"ok": "green", "wrong": "red", "unknown": "yellow"}


def doctor(
    namespace: NamespaceOption = None,
    operator_namespace: Annotated[
        str | None,
        option("NAME", "The namespace that sftriage is installed in.", "looked for in all that you may look at"),
    ] = None,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find out why nothing happens to the jobs of a namespace, and say what to do about it.

    It looks at labels and pods, the webhook and its certificate, the operator, the controllers of jobs, rights, quota
    and stores, and changes nothing. What the person may not look at, it says so. It ends with 1 where something is
    wrong.
    """
    objects, namespace = connected(namespace, context)
    findings = diagnose(gather(objects, namespace, time.time(), operator_namespace))
    if as_json:
        print_json(findings)
    else:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for one in findings:
            do = ("\n", ("do:", "bold"), f" {clean(one.do)}") if one.do else ()
            table.add_row(one.code, Text(one.state, _STYLES[one.state]), Text.assemble(clean(one.says), *do))
        results().print(table)
    if any(one.state == "wrong" for one in findings):
        raise typer.Exit(1)
