"""``sftriage kube`` and ``sftriage operator``: policies and captures as objects of a Kubernetes cluster."""

from __future__ import annotations

import logging
import secrets
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from rich.text import Text

from sftriage.commands.kube_options import ContextOption, EverywhereOption, NamespaceOption, connected, within
from sftriage.commands.options import JsonOption, option
from sftriage.commands.output import lists, print_json, say
from sftriage.errors import UsageError
from sftriage.kube.client import ClusterObjects
from sftriage.kube.fields import condition
from sftriage.kube.objects import KINDS, POLICIES
from sftriage.kube.settings import read_settings
from sftriage.policy.loading import shipped
from sftriage.traces.remote import checked_url

DAY_S = 86_400.0


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
    bodies = objects.list(POLICIES, namespace or None)
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
    files = shipped("crds", "k8s/crds")
    sys.stdout.write("---\n".join(files[kind.plural].read_text(encoding="utf-8") for kind in KINDS))


@dataclass(frozen=True, slots=True)
class ControllersOptions:
    """How controllers of jobs run.

    Raises:
        UsageError: where none are started, something of them is said.
    """

    settings: Annotated[
        Path | None,
        option(
            "FILE",
            "Start a controller for each job whose pods sftriage is in, with the image and the store of these "
            "settings, which are the webhook's. In that store traces of deleted captures are deleted, too.",
            "none are started",
        ),
    ] = None
    runs_claim: Annotated[
        str | None,
        option(
            "NAME", "A PersistentVolumeClaim in jobs' namespaces, in which their runs are kept.", "they go with the pod"
        ),
    ] = None
    grace_seconds: Annotated[float, option("N", "How long a controller outlives its job's pods.", min=0)] = 300.0
    report_days: Annotated[
        float,
        option(
            "N",
            "How long the report of a job of plain pods, which goes with no object, stays after its last news.",
            min=0,
        ),
    ] = 7.0

    def __post_init__(self) -> None:
        """Say so before a cluster is asked."""
        if self.settings is None and self.runs_claim is not None:
            raise UsageError("--runs-claim is of controllers: give --settings too")


def operate(
    store: Annotated[
        list[str] | None, option("URL", "A store in which traces of deleted captures may be deleted. Repeatable.")
    ] = None,
    namespace: Annotated[
        list[str] | None, option("--namespace -n NAME", "Only this namespace. Repeatable.", "all")
    ] = None,
    *,
    of_jobs: ControllersOptions,
    lease: Annotated[
        str | None,
        option(
            "NAMESPACE/NAME", "Work only while this Lease is held: of several operators one works.", "no other is asked"
        ),
    ] = None,
    watch_seconds: Annotated[
        int, option("N", "How long a watch lasts before it is begun again.", min=1, max=3600)
    ] = 300,
) -> None:
    """Run the operator: it says which policies of a cluster are in force, and deletes traces of deleted captures.

    With --settings it starts a controller for each job, too. It needs the rights of k8s/rbac/operator.yaml, no more. It
    asks the cluster that kubectl would, or inside a pod its own. Ctrl-C or SIGTERM ends it; nothing is lost meanwhile.
    """
    said = None if of_jobs.settings is None else read_settings(of_jobs.settings)
    stores = frozenset(map(checked_url, [*(store or ()), *([said.store] if said is not None and said.store else ())]))
    held, slash, name = (lease or "").partition("/")
    if lease is not None and not (held and slash and name):
        raise UsageError("--lease: NAMESPACE/NAME")
    objects = ClusterObjects.connect()
    try:
        from sftriage.kube import operator
    except ImportError:
        raise UsageError("the operator needs kopf; install sftriage[k8s]") from None
    from sftriage.kube.deploying import ControllerSettings
    from sftriage.kube.lease import LeaderElection

    logging.getLogger("sftriage.kube").setLevel(logging.INFO)
    # What kopf and asyncio say of a cluster that refuses is a page of their insides; the line above it says why.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_in_a_line)
    controllers = None if said is None else ControllerSettings(said, of_jobs.runs_claim or "")
    leader = None
    if lease is not None:
        leader = LeaderElection(objects, held, name, f"{socket.gethostname()}-{secrets.token_hex(4)}")
    keep_s = of_jobs.report_days * DAY_S
    after = operator.Looked(stores, namespace or (), watch_seconds, controllers, of_jobs.grace_seconds, keep_s)
    operator.run(objects, after, leader)


def _in_a_line(record: logging.LogRecord) -> bool:
    if record.name.partition(".")[0] == "kopf":
        record.exc_info = record.exc_text = None
    return True
