"""The custom resource definitions: ``k8s/crds/*.yaml`` are these, written out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter

from sftriage.kube.objects import (
    GROUP,
    VERSION,
    TraceCaptureSpec,
    TraceCaptureStatus,
    TriagePolicyStatus,
    TriageReportSpec,
    TriageReportStatus,
)
from sftriage.kube.structural import Schema, structural
from sftriage.policy.fields import Name
from sftriage.policy.schema import Spec

_HEADER = "# Made of sftriage's own models (sftriage/kube): change these, and write it anew.\n"


@dataclass(frozen=True, slots=True)
class Column:
    """What ``kubectl get`` shows of an object; with ``wide``, only ``kubectl get -o wide`` does."""

    name: str
    path: str
    type: str = "string"
    description: str = ""
    wide: bool = False

    def plain(self) -> dict[str, Any]:
        """As a definition has it."""
        column = {"name": self.name, "type": self.type, "jsonPath": self.path, "description": self.description}
        return {**{word: value for word, value in column.items() if value}, **({"priority": 1} if self.wide else {})}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object."""

    kind: str
    plural: str
    short: str
    description: str
    spec: type[BaseModel]
    status: type[BaseModel]
    columns: tuple[Column, ...]
    named: bool = False
    """Its name is ours too, and written as we have it."""

    @property
    def crd(self) -> str:
        """The name of its definition."""
        return f"{self.plural}.{GROUP}"


def _condition(kind: str, what: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{what}'


_AGE = Column("Age", ".metadata.creationTimestamp", "date")

KINDS = (
    Kind(
        "TriagePolicy",
        "triagepolicies",
        "tpol",
        "Which suspects lead to a capture, and how much capturing a job has to bear: the file of `sftriage run "
        "--policy`, as it is. Its names and units are said by `kubectl explain triagepolicy.spec --recursive`.",
        Spec,
        TriagePolicyStatus,
        (
            Column("Accepted", _condition("Accepted", "status"), description="Whether it is valid."),
            Column("Conflicted", _condition("Conflicted", "status"), description="Whether an older one forbids it."),
            Column("Rules", ".status.rules", "integer"),
            Column("Why", _condition("Accepted", "message"), wide=True),
            _AGE,
        ),
        named=True,
    ),
    Kind(
        "TraceCapture",
        "tracecaptures",
        "tcap",
        "One capture of one rank of a training job: asked for by a policy that fired, or by a person. Nothing owns it: "
        "the end of a job deletes no trace. Deleting it deletes its trace, unless that is pinned in its store.",
        TraceCaptureSpec,
        TraceCaptureStatus,
        (
            Column("Job", ".spec.job"),
            Column("Rank", ".spec.rank", "integer"),
            Column("Stage", ".spec.trigger.stage", description="The stage that its suspect is slow in."),
            Column("Step", ".status.first_step", "integer", description="The first captured step."),
            Column("Profiler", ".status.profiler"),
            Column("State", ".status.state"),
            Column("Reproduced", ".status.reproduced", description="Whether the fault is in it."),
            Column("Cause", ".status.cause", description="Why the rank is slow.", wide=True),
            _AGE,
        ),
    ),
    Kind(
        "TriageReport",
        "triagereports",
        "trep",
        "How one training job stands: its health, the last verdict, why nothing was captured where nothing was, its "
        "captures, and what stragglers have cost it. Written by sftriage.",
        TriageReportSpec,
        TriageReportStatus,
        (
            Column("Job", ".spec.job"),
            Column("Health", ".status.health"),
            Column("Suspect", ".status.suspect", description="Who is named, and where."),
            Column("Since", ".status.since_step", "integer", description="Since which step, about."),
            Column("Lost-s", ".status.cost.stragglers_s", "number", description="What stragglers cost, in seconds."),
            Column("Captures", ".status.captures_total", "integer"),
            Column("Summary", ".status.summary", wide=True),
            _AGE,
        ),
    ),
)


def definition(kind: Kind) -> dict[str, Any]:
    """The CustomResourceDefinition of a kind."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [column.plain() for column in kind.columns],
        "schema": {"openAPIV3Schema": _schema(kind)},
    }
    names = {"kind": kind.kind, "listKind": f"{kind.kind}List", "plural": kind.plural, "singular": kind.kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": kind.crd},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {**names, "shortNames": [kind.short], "categories": ["sftriage"]},
            "versions": [version],
        },
    }


def written() -> Mapping[str, str]:
    """Every definition as YAML, by the name of its file."""
    return {
        f"{kind.plural}.yaml": _HEADER
        + yaml.safe_dump(json.loads(json.dumps(definition(kind))), sort_keys=False, width=120, allow_unicode=True)
        for kind in KINDS
    }


def _schema(kind: Kind) -> Schema:
    name = TypeAdapter(Name).json_schema()
    metadata = {"type": "object", "properties": {"name": {**name, "description": "Its name."}}}
    return {
        "type": "object",
        "description": kind.description,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "The version of this format."},
            "kind": {"type": "string", "description": f"{kind.kind}."},
            "metadata": metadata if kind.named else {"type": "object"},
            "spec": structural(kind.spec),
            "status": structural(kind.status, defaults=False),
        },
    }
