"""What commands of a cluster have in common: which one is asked, and which namespaces of it."""

from __future__ import annotations

from typing import Annotated

from sftriage.commands.options import option
from sftriage.errors import UsageError
from sftriage.kube.client import ClusterObjects

NamespaceOption = Annotated[str | None, option("--namespace -n NAME", "The namespace.", "the context's")]
EverywhereOption = Annotated[bool, option("--all-namespaces -A", "Those of all namespaces.")]
ContextOption = Annotated[str | None, option("NAME", "A context of the kubeconfig.", "the current one")]


def connected(namespace: str | None, context: str | None, *, everywhere: bool = False) -> tuple[ClusterObjects, str]:
    """The cluster that is meant, and the namespace: "" for all of them.

    Raises:
        UsageError: there is no cluster to ask, or the options contradict one another.
    """
    if everywhere and namespace is not None:
        raise UsageError("--namespace is one, and --all-namespaces all of them: give one of the two")
    objects = ClusterObjects.connect(context)
    return objects, "" if everywhere else namespace or objects.namespace


def within(namespace: str) -> str:
    """Where was looked, as the end of a sentence."""
    return f"in namespace {namespace}" if namespace else "in any namespace"
