"""Makes the custom resource definitions of the models in sftriage/kube.

``python k8s/make_crds.py`` writes ``k8s/crds``, which ship with sftriage.

A server keeps of an object only what its schema names, and fills in what has a default. A default of ours is therefore
in the description, and nowhere else: filled in, the options of every profiler would be there, and a policy may not have
options of a profiler that it does not use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter

from sftriage.kube.objects import (
    CAPTURES,
    GROUP,
    KINDS,
    POLICIES,
    REPORTS,
    VERSION,
    Kind,
    TraceCaptureSpec,
    TraceCaptureStatus,
    TriagePolicyStatus,
    TriageReportSpec,
    TriageReportStatus,
)
from sftriage.policy.fields import Name
from sftriage.policy.schema import Spec

Schema = dict[str, Any]
_HEADER = "# Made of sftriage's own models (sftriage/kube): change these, and write it anew.\n"
_AS_THEY_ARE = frozenset(
    {"type", "description", "enum", "format", "pattern", "required", "minimum", "maximum", "minLength", "maxLength"}
    | {"minItems", "maxItems", "maxProperties", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"}
)
_NOT_SAID = frozenset({"title", "default", "$defs"})


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
class Definition:
    """The definition of a kind."""

    of: Kind
    short: str
    description: str
    spec: type[BaseModel]
    status: type[BaseModel]
    columns: tuple[Column, ...]
    named: bool = False
    """Its name is checked as a policy's is."""


def _condition(kind: str, what: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{what}'


_AGE = Column("Age", ".metadata.creationTimestamp", "date")

DEFINITIONS = (
    Definition(
        POLICIES,
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
    Definition(
        CAPTURES,
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
    Definition(
        REPORTS,
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
    about = next(one for one in DEFINITIONS if one.of == kind)
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [column.plain() for column in about.columns],
        "schema": {"openAPIV3Schema": _schema(about)},
    }
    names = {"kind": kind.kind, "listKind": f"{kind.kind}List", "plural": kind.plural, "singular": kind.kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": kind.crd},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {**names, "shortNames": [about.short], "categories": ["sftriage"]},
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


def _schema(about: Definition) -> Schema:
    name = TypeAdapter(Name).json_schema()
    metadata = {"type": "object", "properties": {"name": {**name, "description": "Its name."}}}
    return {
        "type": "object",
        "description": about.description,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "The version of this format."},
            "kind": {"type": "string", "description": f"{about.of.kind}."},
            "metadata": metadata if about.named else {"type": "object"},
            "spec": structural(about.spec),
            "status": structural(about.status, defaults=False),
        },
    }


def structural(model: type[BaseModel], *, defaults: bool = True) -> Schema:
    """The structural schema of a model: without ``$ref``, unions and null; its ``defaults`` are in the descriptions.

    Raises:
        ValueError: the model says something that no structural schema can; the message says where and what.
    """
    document = model.model_json_schema(by_alias=True)
    definitions: Mapping[str, Schema] = document.get("$defs", {})

    def converted(described: Schema, path: str) -> Schema:
        described = _whole(described, definitions, path)
        found: Schema = {"description": said} if (said := _description(described, defaults=defaults)) else {}
        for word, value in described.items():
            if word == "properties":
                found[word] = {name: converted(one, f"{path}.{name}") for name, one in value.items()}
            elif word in ("items", "additionalProperties") and isinstance(value, dict):
                found[word] = converted(value, f"{path}[]")
            else:
                found |= _keyword(word, value, path)
        return found

    return converted(document, model.__name__)


def _keyword(word: str, value: Any, path: str) -> Schema:
    """A keyword of JSON Schema as a structural schema has it."""
    if word == "description" or word in _NOT_SAID or (word, value) == ("additionalProperties", False):
        return {}
    if word == "type" and isinstance(value, list):
        # A number or a text: no schema has two types, but one without any takes both, and its bounds apply to each.
        return {"x-kubernetes-preserve-unknown-fields": True}
    if word == "const":
        return {"enum": [value]}
    if word in ("exclusiveMinimum", "exclusiveMaximum"):
        # A boolean beside the bound, as in JSON Schema's fourth draft.
        return {word.replace("exclusiveM", "m"): value, word: True}
    if word not in _AS_THEY_ARE:
        raise ValueError(f"{path}: {word} has no place in a structural schema")
    return {word: value}


def _whole(described: Schema, definitions: Mapping[str, Schema], path: str) -> Schema:
    """A schema with what it refers to, and of a value that may be null only what it is when it is there."""
    while "$ref" in described or "anyOf" in described:
        beside = {word: value for word, value in described.items() if word not in ("$ref", "anyOf")}
        if "$ref" in described:
            described = {**definitions[described["$ref"].rpartition("/")[2]], **beside}
        else:
            choices = [choice for choice in described["anyOf"] if choice != {"type": "null"}]
            if len(choices) != 1:
                raise ValueError(f"{path}: a union has no place in a structural schema")
            described = {**choices[0], **beside}
    return described


def _description(described: Schema, *, defaults: bool) -> str:
    """The first paragraph, for what follows in a docstring is about Python; and the default, where there is one."""
    said = " ".join(str(described.get("description", "")).partition("\n\n")[0].split())
    default = described.get("default") if defaults else None
    if default is None or isinstance(default, dict) or default in ([], ""):
        return said
    text = default if isinstance(default, str) else json.dumps(default)
    return f"{said} Default: `{text}`.".strip()


if __name__ == "__main__":
    for name, text in written().items():
        (Path(__file__).parent / "crds" / name).write_text(text, encoding="utf-8")
