"""From pydantic models to the structural schemas of Kubernetes. Pure.

A server keeps of an object only what its schema names, and fills in what has a default. A default of ours is therefore
said in the description, and nowhere else: filled in, the options of every profiler would be there, and a policy says no
options of a profiler that it does not use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_AS_THEY_ARE = frozenset(
    {"type", "description", "enum", "format", "pattern", "required", "minimum", "maximum", "minLength", "maxLength"}
    | {"minItems", "maxItems", "maxProperties", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"}
)
_NOT_SAID = frozenset({"title", "default", "$defs"})


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
