"""What Kubernetes takes for the schema of a custom resource: a linter for those who have no server at hand. Pure.

No tool was found that knows these rules but the server itself, against which this one is held
(`tests.integration.test_kube_crds`): of each rule `BREAKS` has a schema that both refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jsonschema import Draft4Validator

Schema = Mapping[str, Any]

_VALIDATES = frozenset(
    {"maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum", "maxLength", "minLength", "pattern", "maxItems"}
    | {"minItems", "uniqueItems", "multipleOf", "enum", "maxProperties", "minProperties", "required", "format"}
)
_DESCRIBES = frozenset({"type", "description", "title", "default", "nullable", "externalDocs", "example"})
_UNIONS = ("allOf", "oneOf", "anyOf")
_EXTENSIONS = frozenset(
    f"x-kubernetes-{name}"
    for name in ("preserve-unknown-fields", "embedded-resource", "int-or-string", "list-type", "list-map-keys")
) | {"x-kubernetes-map-type"}
_KNOWN = _VALIDATES | _DESCRIBES | {*_UNIONS, "not", "items", "properties", "additionalProperties"} | _EXTENSIONS
_TYPES = frozenset({"array", "boolean", "integer", "number", "object", "string"})
_NO_RE2 = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]|\(\?P=")
"""Looking around, and back at what matched, which Go's expressions do not."""


class Finding(NamedTuple):
    """What is wrong, and where."""

    path: str
    rule: str
    why: str


def findings(schema: Schema, path: str = "schema") -> Iterator[Finding]:
    """What a server would refuse of a schema, in its order."""
    if path == "schema" and schema.get("type") != "object":
        yield Finding(path, "root", "an object's schema is of type object")
    yield from _keywords(schema, path)
    yield from _type(schema, path)
    yield from _bounds(schema, path)
    yield from _list(schema, path)
    if schema.get("properties") and "additionalProperties" in schema:
        yield Finding(path, "additional", "properties or additionalProperties, not both: what is not named is dropped")
    for union in _UNIONS:
        for number, inner in enumerate(schema.get(union, ())):
            yield from _junction(inner, f"{path}.{union}[{number}]")
    if "not" in schema:
        yield from _junction(schema["not"], f"{path}.not")
    yield from _default(schema, path)
    for where, inner in _inside(schema, path):
        yield from findings(inner, where)


def _keywords(schema: Schema, path: str) -> Iterator[Finding]:
    for word in schema:
        if word == "$ref":
            yield Finding(path, "ref", "a schema refers to nothing: write it out")
        elif word not in _KNOWN:
            yield Finding(path, "keyword", f"{word} is no word of theirs; at best it is dropped")
    if schema.get("uniqueItems"):
        yield Finding(path, "unique", "uniqueItems would cost quadratic time; say x-kubernetes-list-type: set")
    if schema.get("x-kubernetes-preserve-unknown-fields") is False:
        yield Finding(path, "preserve", "x-kubernetes-preserve-unknown-fields is true or not there")


def _type(schema: Schema, path: str) -> Iterator[Finding]:
    kind = schema.get("type")
    if isinstance(kind, list):
        yield Finding(path, "types", "one type each; a value of several has none, and preserves unknown fields")
    elif kind is None:
        if not (schema.get("x-kubernetes-int-or-string") or schema.get("x-kubernetes-preserve-unknown-fields")):
            yield Finding(path, "type", "every field has a type, also beside anyOf and the like")
    elif kind not in _TYPES:
        yield Finding(path, "null", f"{kind} is no type; what may be null is nullable")
    if kind == "array" and not isinstance(schema.get("items"), Mapping):
        yield Finding(path, "items", "an array says of one schema what all its items are")


def _bounds(schema: Schema, path: str) -> Iterator[Finding]:
    for word in ("exclusiveMinimum", "exclusiveMaximum"):
        if word in schema and not isinstance(schema[word], bool):
            yield Finding(path, "exclusive", f"{word} is true or false, and the bound stands beside it")
    pattern = schema.get("pattern", "")
    try:
        re.compile(pattern)
        if _NO_RE2.search(pattern):
            yield Finding(path, "pattern", "Go's expressions neither look around nor back")
    except re.error as error:
        yield Finding(path, "pattern", f"no expression: {error}")


def _list(schema: Schema, path: str) -> Iterator[Finding]:
    if schema.get("x-kubernetes-list-type") != "map":
        return
    keys, item = schema.get("x-kubernetes-list-map-keys", ()), schema.get("items", {})
    if not keys:
        yield Finding(path, "map", "a list that is a map says by which keys")
    for key in keys:
        if key not in item.get("properties", {}):
            yield Finding(path, "map", f"{key} is no property of its items")
        elif key not in item.get("required", ()) and "default" not in item["properties"][key]:
            yield Finding(path, "map", f"{key} is required, or has a default")


def _junction(schema: Schema, path: str) -> Iterator[Finding]:
    """What stands in a union only restricts: it says nothing that makes a value what it is."""
    if any(inner.get("type") == "null" for inner in (schema,)):
        yield Finding(path, "null", "what may be null is nullable, and no union")
    for word in sorted(set(schema) & (_DESCRIBES | _EXTENSIONS | {"additionalProperties"})):
        yield Finding(path, "junction", f"{word} has no place in a union, which only restricts")
    for where, inner in _inside(schema, path):
        yield from _junction(inner, where)


def _default(schema: Schema, path: str) -> Iterator[Finding]:
    if schema.get("default") is None:
        return  # one of null is no default
    plain = {word: value for word, value in schema.items() if word in _KNOWN and not isinstance(value, type(None))}
    if any(Draft4Validator(plain).iter_errors(schema["default"])):
        yield Finding(path, "default", "the default is none that the schema itself takes")


def _inside(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}.{name}", inner
    for word, where in (("items", f"{path}[]"), ("additionalProperties", f"{path}.*")):
        if isinstance(schema.get(word), Mapping):
            yield where, schema[word]


_TEXT = {"type": "string"}
_THING = {"type": "object", "properties": {"a": _TEXT}}
BREAKS: tuple[tuple[str, str, Schema], ...] = (
    ("ref", "a reference", {"$ref": "#/definitions/x"}),
    ("null", "a union with null", {"anyOf": [_TEXT, {"type": "null"}]}),
    ("null", "of type null", {"type": "null"}),
    ("types", "of two types", {"type": ["string", "number"]}),
    ("type", "of no type", {"description": "anything"}),
    ("junction", "a type in a union", {**_TEXT, "anyOf": [{"type": "string"}]}),
    ("junction", "a description in a union", {**_TEXT, "allOf": [{"description": "x"}]}),
    ("junction", "a default below a union", {**_THING, "oneOf": [{"properties": {"a": {"default": "x"}}}]}),
    ("additional", "closed, beside what it has", {**_THING, "additionalProperties": False}),
    ("additional", "open, beside what it has", {**_THING, "additionalProperties": _TEXT}),
    ("unique", "a set", {"type": "array", "items": _TEXT, "uniqueItems": True}),
    ("keyword", "a constant", {**_TEXT, "const": "a"}),
    ("keyword", "a tagged union", {"type": "object", "discriminator": {"propertyName": "kind"}}),
    ("keyword", "a tuple", {"type": "array", "items": _TEXT, "prefixItems": [_TEXT]}),
    ("keyword", "definitions of its own", {"type": "object", "$defs": {"a": _TEXT}}),
    ("keyword", "definitions, as they were called", {"type": "object", "definitions": {"a": _TEXT}}),
    ("keyword", "fields by pattern", {"type": "object", "patternProperties": {"a": _TEXT}}),
    ("exclusive", "a bound that excludes itself", {"type": "integer", "exclusiveMinimum": 0}),
    ("items", "an array of anything", {"type": "array"}),
    ("items", "an array of one each", {"type": "array", "items": [_TEXT]}),
    ("default", "a default of another type", {**_TEXT, "default": 5}),
    ("default", "a default that is no choice", {**_TEXT, "enum": ["a"], "default": "b"}),
    ("default", "null inside a default", {**_THING, "default": {"a": None}}),
    ("pattern", "a pattern that looks ahead", {**_TEXT, "pattern": "^(?=a)"}),
    ("pattern", "a pattern that is none", {**_TEXT, "pattern": "("}),
    ("preserve", "preserving nothing", {"type": "object", "x-kubernetes-preserve-unknown-fields": False}),
    ("map", "a map without keys", {"type": "array", "items": _THING, "x-kubernetes-list-type": "map"}),
    *(
        (
            "map",
            f"a map by {what}",
            {
                "type": "array",
                "items": _THING,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": [key],
            },
        )
        for key, what in (("a", "what may not be there"), ("b", "what is never there"))
    ),
)
"""Of each rule a property that breaks it: the rule, what it is, and its schema."""

KEEPS: tuple[tuple[str, Schema], ...] = (
    ("a text", {**_TEXT, "title": "x", "enum": ["a"], "default": "a", "pattern": "^a$", "nullable": True}),
    ("a number or a text", {"x-kubernetes-preserve-unknown-fields": True, "maximum": 1, "pattern": "^[0-9]+%$"}),
    ("an integer or a text", {"x-kubernetes-int-or-string": True, "anyOf": [{"minimum": 1}, {"pattern": "a"}]}),
    ("a bound that excludes itself", {"type": "integer", "minimum": 0, "exclusiveMinimum": True}),
    ("one of two", {**_THING, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}),
    ("any names", {"type": "object", "additionalProperties": _TEXT}),
    ("anything", {"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
    (
        "a map",
        {
            "type": "array",
            "items": {**_THING, "required": ["a"]},
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["a"],
        },
    ),
)
"""What keeps to the rules, however close it comes to breaking one."""
