"""The definitions of the custom resources, as far as nobody needs a server for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from k8s.make_crds import DEFINITIONS, definition, structural, written
from sftriage.kube.objects import KINDS
from tests.structural_rules import BREAKS, KEEPS, findings

CRDS = Path(__file__).parents[3] / "k8s" / "crds"


def test_the_files_are_what_the_models_say():
    """GIVEN the models THEN `k8s/crds` has what `python k8s/make_crds.py` makes of them, and nothing else."""
    assert {path.name: path.read_text() for path in CRDS.glob("*.yaml")} == dict(written())


def object_schema(kind):
    return definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_a_definition_keeps_to_the_rules_of_structural_schemas(kind):
    assert list(findings(object_schema(kind))) == []


@pytest.mark.parametrize(("rule", "what", "schema"), BREAKS, ids=[what for _, what, _ in BREAKS])
def test_the_linter_finds_what_breaks_a_rule_and_says_where(rule, what, schema):
    found = list(findings({"type": "object", "properties": {"x": schema}}))
    assert found
    assert {(one.path.startswith("schema.x"), one.rule, bool(one.why)) for one in found} >= {(True, rule, True)}


@pytest.mark.parametrize(("what", "schema"), KEEPS, ids=[what for what, _ in KEEPS])
def test_the_linter_finds_nothing_in_what_keeps_to_the_rules(what, schema):
    assert list(findings({"type": "object", "properties": {"x": schema}})) == []


def test_the_linter_wants_an_object():
    assert [one.rule for one in findings({"type": "string"})] == ["root"]


def every(schema, path=""):
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from every(inner, f"{path}.{name}")
    if "items" in schema:
        yield from every(schema["items"], f"{path}[]")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_every_field_is_described_and_has_no_default(kind):
    """GIVEN a definition THEN `kubectl explain` says something of each field, and the server fills in none."""
    fields = [
        (path, one)
        for path, one in every(object_schema(kind))
        if not path.startswith(".metadata") and not path.endswith("[]")
    ]
    assert len(fields) > 25
    assert [path for path, one in fields if not one.get("description")] == []
    assert [path for path, one in fields if "default" in one] == []


def test_a_default_is_said_in_words():
    detection = structural(DEFINITIONS[0].spec)["properties"]["detection"]["properties"]
    assert detection["window_steps"]["description"] == (
        "Steps in a window; not said, fewer where steps are long, down to 10. Default: `50`."
    )
    assert detection["min_coverage"]["description"].endswith("must be present. Default: `0.95`.")
    assert "Default" not in object_schema(KINDS[1])["properties"]["status"]["properties"]["state"]["description"]


COLUMNS = {
    "TriagePolicy": ["Accepted", "Conflicted", "Rules", "Age"],
    "TraceCapture": ["Job", "Rank", "Stage", "Step", "Profiler", "State", "Reproduced", "Age"],
    "TriageReport": ["Job", "Health", "Suspect", "Since", "Lost-s", "Captures", "Age"],
}


@pytest.mark.parametrize("about", DEFINITIONS, ids=lambda about: about.of.kind)
def test_columns_show_fields_that_there_are(about):
    """GIVEN a column THEN its path leads to a field of its type, or to a condition."""
    assert [column.name for column in about.columns if not column.wide] == COLUMNS[about.of.kind]
    fields = {path: one.get("type") for path, one in every(object_schema(about.of))}
    for column in about.columns:
        if column.path.startswith(".status.conditions[?"):
            assert ".status.conditions[].type" in fields
        elif column.path != ".metadata.creationTimestamp":
            assert fields[column.path] == column.type


def test_names_are_those_of_kubernetes():
    for kind in KINDS:
        spec = definition(kind)["spec"]
        assert definition(kind)["metadata"]["name"] == f"{spec['names']['plural']}.{spec['group']}"
        assert spec["names"]["categories"] == ["sftriage"]
        assert spec["versions"][0]["subresources"] == {"status": {}}
    short = [name for kind in KINDS for name in definition(kind)["spec"]["names"]["shortNames"]]
    assert len(set(short)) == len(KINDS)


class Inner(BaseModel):
    """A part.

    Raises:
        nobody reads this in a terminal.
    """

    x: int = 3


class Every(BaseModel):
    inner: Inner
    named: dict[str, Inner] = {}
    maybe: Annotated[int, Field(ge=0, lt=10)] | None = None
    one: Literal["a"] = "a"
    several: tuple[Inner, ...] = ()


def test_what_models_say_becomes_what_kubernetes_says():
    inner = {"type": "object", "description": "A part."}
    x = {"properties": {"x": {"description": "Default: `3`.", "type": "integer"}}}
    found = structural(Every)
    assert found["required"] == ["inner"]
    assert found["properties"] == {
        "inner": {**inner, **x},
        "named": {"additionalProperties": {**inner, **x}, "type": "object"},
        "maybe": {"type": "integer", "minimum": 0, "maximum": 10, "exclusiveMaximum": True},
        "one": {"description": "Default: `a`.", "enum": ["a"], "type": "string"},
        "several": {"items": {**inner, **x}, "type": "array"},
    }
    assert list(findings(found)) == []


class Either(BaseModel):
    x: int | str = 1


class Closed(BaseModel):
    x: set[str] = set()


@pytest.mark.parametrize(
    ("model", "said"), [(Either, "Either.x: a union has no place"), (Closed, "Closed.x: uniqueItems has no place")]
)
def test_what_kubernetes_cannot_say_is_an_error_and_not_left_out(model, said):
    with pytest.raises(ValueError, match=said):
        structural(model)
