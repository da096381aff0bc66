"""``sftriage kube`` and ``sftriage operator``: policies and captures as objects of a Kubernetes cluster."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from sftriage.commands.kube_options import ContextOption, EverywhereOption, NamespaceOption, connected, within
from sftriage.commands.options import JsonOption
from sftriage.commands.output import lists, print_json, say
from sftriage.errors import UsageError
from sftriage.kube.client import ClusterObjects
from sftriage.kube.conditions import condition
from sftriage.kube.crds import KINDS, written
from sftriage.traces.objects import checked_url


def policies(
    namespace: NamespaceOption = None,
    everywhere: EverywhereOption = False,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the policies of a cluster: whether each is valid and in force, and why not.

    The cluster is the one that kubectl would ask, by KUBECONFIG or ~/.kube/config.
    """
    objects, namespace = connected(namespace, context, everywhere=everywhere)
    bodies = objects.list(KINDS[0], namespace or None)
    rows = [_row(body) for body in bodies]
    if as_json:
        print_json(rows)
        return
    if not rows:
        say(f"no policy {within(namespace)}")
        return
    table = Table("namespace", "policy", "rules", "in force", "why")
    for row in rows:
        accepted, conflicted = row["accepted"], row["conflicted"]
        force = {"True": "no" if conflicted["status"] == "True" else "yes", "False": "no"}
        told = conflicted if accepted["status"] == "True" else accepted
        rules = "" if row["rules"] is None else str(row["rules"])
        known = force.get(accepted["status"], "not known")
        table.add_row(*map(Text, (row["namespace"], row["policy"], rules, known, told["message"])))
    lists().print(table)
    if any(row["accepted"]["status"] == "Unknown" for row in rows):
        say("nobody has looked at some of them as they are now: `sftriage operator` does")


def _row(body: dict[str, Any]) -> dict[str, Any]:
    metadata, status = body["metadata"], body.get("status", {})
    row = {"namespace": metadata["namespace"], "policy": metadata["name"], "rules": status.get("rules")}
    for kind in ("Accepted", "Conflicted"):
        found = condition(body, kind)
        answered = found is not None and found.observedGeneration == metadata.get("generation")
        told = {} if found is None or not answered else found.plain()
        row[kind.lower()] = {word: told.get(word, none) for word, none in _UNANSWERED.items()}
    return row


_UNANSWERED = {"status": "Unknown", "reason": "NotLookedAt", "message": "Nobody has looked at it as it is now."}


def definitions() -> None:
    """Print the custom resource definitions, for `kubectl apply`."""
    sys.stdout.write("---\n".join(written().values()))


def operate(
    store: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A store in which traces of deleted captures may be deleted. Repeatable."),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option("--namespace", "-n", metavar="NAME", help="Only this namespace. Repeatable.", show_default="all"),
    ] = None,
    watch_seconds: Annotated[
        int, typer.Option(metavar="N", min=1, max=3600, help="How long a watch lasts before it is begun again.")
    ] = 300,
) -> None:
    """Run the operator: it says which policies of a cluster are in force, and deletes traces of deleted captures.

    It needs the rights of k8s/rbac/operator.yaml, and no more. It asks the cluster that kubectl would, or inside a pod
    its own. One is enough: of two, both would do the same. Ctrl-C or SIGTERM ends it, and nothing is lost meanwhile.
    """
    stores = frozenset(map(checked_url, store or ()))
    objects = ClusterObjects.connect()
    try:
        from sftriage.kube import operator
    except ImportError:
        raise UsageError("the operator needs kopf; install sftriage[k8s]") from None
    logging.getLogger("sftriage.kube").setLevel(logging.INFO)
    # What kopf and asyncio say of a cluster that refuses is a page of their insides; the line above it says why.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_in_a_line)
    operator.run(objects, stores, namespace or (), watch_seconds)


def _in_a_line(record: logging.LogRecord) -> bool:
    if record.name.partition(".")[0] == "kopf":
        record.exc_info = record.exc_text = None
    return True
