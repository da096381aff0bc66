"""From a text to a checked policy; every mistake is reported at once, with its place.

The text may come from anywhere: it is read no further where it nests or goes on beyond reason, no alias expands, and no
object is constructed.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from yaml.constructor import SafeConstructor

from sftriage.errors import InputError
from sftriage.policy.fields import Location, contradictions, shown
from sftriage.policy.schema import MAX_ITEMS, TriagePolicy

MAX_SHOWN = 50
"""A document can hold tens of thousands of mistakes; nobody reads past the first screens of them."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One mistake. ``line`` and ``column`` count from 1; a line of 0 means the document as a whole.

    ``source`` is the file it is in, where several are looked at together.
    """

    line: int
    column: int
    path: str
    message: str
    source: str = ""

    def said(self, source: str) -> str:
        """The problem as one line: ``FILE:LINE:COLUMN: field: message``."""
        source = self.source or source
        place = f"{source}:{self.line}:{self.column}" if self.line else source
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"


class PolicyError(InputError):
    """A policy that cannot be used. ``str(error)`` is one line for each problem, in the order of the document."""

    is_located = True

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = tuple(sorted(problems, key=lambda problem: (problem.source, problem)))
        lines = [problem.said(source) for problem in self.problems[:MAX_SHOWN]]
        if len(self.problems) > MAX_SHOWN:
            lines.append(f"{source}: and {len(self.problems) - MAX_SHOWN} more")
        super().__init__("\n".join(lines))


MAX_DEPTH = 20
"""Deeper than any policy, shallower than Python's recursion limit."""

_TAG = "tag:yaml.org,2002:"

SourcePosition = tuple[int, int]
"""Line and column, from 1."""


def _place_of(location: Location, places: Mapping[Location, SourcePosition]) -> SourcePosition | None:
    """Where a value stands; of one that is not there, where what should hold it stands."""
    while location and location not in places:
        location = location[:-1]
    return places.get(location)


@dataclass(slots=True)
class _Document:
    """Plain data, where each of its values and keys stands, and what is wrong with it so far."""

    data: Any = None
    values: dict[Location, SourcePosition] = field(default_factory=dict)
    keys: dict[Location, SourcePosition] = field(default_factory=dict)
    problems: dict[Location, list[Problem]] = field(default_factory=dict)

    def refuse(self, location: Location, message: str, place: SourcePosition) -> None:
        self.problems.setdefault(location, []).append(Problem(*place, path=path_text(location), message=message))


def path_text(location: Location) -> str:
    """A location as people write it: ``spec.rules[0].capture``. A key that is no plain word is quoted."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            word = part if part.isascii() and part.isidentifier() and len(part) <= 64 else shown(part)
            text += f".{word}" if text else word
    return text


def _document(text: str, source: str) -> _Document:
    """The document of a YAML text.

    Raises PolicyError where it is not YAML, or YAML that has no place in a policy: aliases, more than one document,
    nested beyond reason, empty, or not a mapping. Tags, anchors, repeated keys and fields without a value are noted in
    the document, so that they are reported with whatever else is wrong.
    """
    try:
        reader: Any = _Reader(text, source)
        node = reader.get_node() if reader.check_node() else None
        if reader.check_node():
            raise PolicyError(source, [_problem(reader.peek_event(), "a second document; a policy file holds one")])
    except yaml.YAMLError as error:
        raise PolicyError(source, [_syntax(error, text)]) from None
    document = _Document(problems={(): reader.notes} if reader.notes else {})
    if isinstance(node, yaml.MappingNode):
        document.data = _plain(node, (), document)
        return document
    if node is None or node.tag == _TAG + "null":
        problem = Problem(0, 0, "", "the document is empty")
    else:
        problem = _problem(node, "expected a mapping with apiVersion, kind, metadata and spec")
    raise PolicyError(source, [*reader.notes, problem])


class _Reader(yaml.SafeLoader):
    """Composes nodes. Beyond what no policy has it reads no further; tags and anchors it notes."""

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text)
        self.notes: list[Problem] = []
        self._source, self._depth = source, 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(index, int) and index >= MAX_ITEMS:
            raise self._refused(event, f"a list of more than {MAX_ITEMS} items; a policy has none")
        if isinstance(event, yaml.CollectionStartEvent) and self._depth == MAX_DEPTH:
            raise self._refused(event, f"nested more than {MAX_DEPTH} deep")
        if isinstance(event, yaml.AliasEvent):
            raise self._refused(event, f"alias *{event.anchor} refused: write the value out")
        if event.anchor is not None:
            self.notes.append(_problem(event, f"anchor &{event.anchor} refused: a policy has no aliases"))
            event.anchor = None
        if event.tag is not None:
            self.notes.append(_problem(event, f"tag {shown(event.tag)} refused: a policy is plain data"))
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def _refused(self, event: yaml.Event, message: str) -> PolicyError:
        return PolicyError(self._source, [_problem(event, message)])


def _problem(at: Any, message: str) -> Problem:
    return Problem(*_place(at.start_mark), "", message)


def _syntax(error: yaml.YAMLError, text: str) -> Problem:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        message = ", ".join(part for part in (error.context, error.problem) if part)
        if "'\\t'" in message:
            message = "a tab where YAML wants spaces"
        return Problem(*(_place(mark) if mark else (0, 0)), "", f"not valid YAML: {message}")
    before = text[: getattr(error, "position", 0)]
    place = before.count("\n") + 1, len(before) - before.rfind("\n")
    return Problem(*place, "", f"not valid YAML: character {shown(text[len(before) :][:1])} is not allowed")


def _place(mark: Any) -> SourcePosition:
    return mark.line + 1, mark.column + 1


def _plain(node: yaml.Node, location: Location, document: _Document) -> Any:
    """A node as dicts, lists and scalars. Fields without a value are left out and noted."""
    document.values[location] = _place(node.start_mark)
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, location, document)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*location, index), document) for index, item in enumerate(node.value)]
    return _scalar(node, location, document)


def _mapping(node: yaml.MappingNode, location: Location, document: _Document) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in node.value:
        place = _place(key.start_mark)
        if not isinstance(key, yaml.ScalarNode):
            document.refuse((*location, "?"), "expected a field name, got a list or a mapping", place)
            continue
        at: Location = (*location, key.value)
        if at in document.keys:
            first, column = document.keys[at]
            document.refuse(at, f"said twice: here and on line {first}, column {column}", place)
            continue
        document.keys[at] = place
        if value.tag == _TAG + "null":
            document.refuse(at, "has no value; give it one, or leave the field out", place)
            continue
        plain[key.value] = _plain(value, at, document)
    return plain


def _scalar(node: yaml.Node, location: Location, document: _Document) -> Any:
    """Numbers and booleans as YAML reads them; all else, dates too, as text."""
    kind = node.tag.removeprefix(_TAG)
    if kind not in ("int", "float", "bool", "null"):
        return node.value
    try:
        return getattr(SafeConstructor(), f"construct_yaml_{kind}")(node)
    except (ValueError, KeyError):
        document.refuse(location, f"{shown(node.value)} cannot be read as {kind}", _place(node.start_mark))
        return node.value


MAX_FILE_BYTES = 256 * 1024
"""A thousand rules fit; a document beyond this is not a policy."""

_LISTS = {
    "scope": "[rank, host]",
    "pattern": "[chronic, recurring]",
    "ranks": "[0, 8]",
    "trace": "[cuda, nvtx]",
    "gather": "[next_windows]",
    "remedies": "[stragglar]",
    "notify": "[{webhook: {url_from_env: NAME}}]",
    "rules": "[{name: slow-rank, match: {}}]",
}
"""What a list of each field looks like."""

OBJECT_META = frozenset(
    {"annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers"}
    | {"generateName", "generation", "labels", "managedFields", "namespace", "ownerReferences", "resourceVersion"}
    | {"selfLink", "uid"}
)
"""What Kubernetes has beside a name in an object's metadata."""


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A checked policy, the sha256 of the bytes it was read from, and where they were.

    ``places`` says where in the text each of its values stands, so that what is wrong only beside another policy can be
    said as well as what is wrong by itself.
    """

    policy: TriagePolicy
    sha256: str
    source: str
    places: Mapping[Location, SourcePosition] = field(default_factory=dict, repr=False, compare=False)

    def problem(self, location: Location, message: str) -> Problem:
        """What there is to say about a value, where it stands, or where it would stand."""
        line, column = _place_of(location, self.places) or (0, 0)
        return Problem(line, column, path_text(location), message, self.source)


def parse(raw: bytes | str, name: str) -> LoadedPolicy:
    """The policy of a text, whose file messages call ``name``; raises PolicyError with every problem in it."""
    raw = raw.encode() if isinstance(raw, str) else raw
    if len(raw) > MAX_FILE_BYTES:
        raise PolicyError(name, [Problem(0, 0, "", f"larger than {MAX_FILE_BYTES // 1024} KiB")])
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        raise PolicyError(name, [Problem(line, column, "", "not UTF-8")]) from None
    document = _document(text, name)
    # A Kubernetes API server adds fields of its own.
    for holder, names in ((document.data, {"status"}), (document.data.get("metadata"), OBJECT_META)):
        for added in names & holder.keys() if isinstance(holder, dict) else ():
            del holder[added]
    for at in list(document.problems):
        if at[:1] == ("status",) or (at[:1] == ("metadata",) and at[1:2] and at[1] in OBJECT_META):
            del document.problems[at]
    policy = None
    try:
        policy = TriagePolicy.model_validate(document.data)
    except ValidationError as error:
        # Between fields first: where both speak of one field, the other message knows less.
        _add(document, contradictions(document.data))
        _add(document, ((found["loc"], found) for found in error.errors()))
    if document.problems or policy is None:
        raise PolicyError(name, [problem for group in document.problems.values() for problem in group])
    return LoadedPolicy(policy, hashlib.sha256(raw).hexdigest(), name, document.values)


def _add(document: _Document, found: Iterable[tuple[Location, Any]]) -> None:
    """Note what is wrong, but at most one thing about a field: a second would follow from the first."""
    taken = set(document.problems)
    for location, what in found:
        if location in taken:
            continue
        taken.add(location)
        message = what if isinstance(what, str) else _message(what)
        unknown = not isinstance(what, str) and what["type"] == "extra_forbidden"
        key = document.keys.get(location) if unknown else None
        document.refuse(location, message, key or _place_of(location, document.values) or (1, 1))


def _message(found: Any) -> str:
    kind, location, value = found["type"], found["loc"], found["input"]
    if kind == "missing":
        return "required, but not there"
    if kind == "extra_forbidden":
        fields = list(_fields(location[:-1]))
        return "unknown field" + (_near(str(location[-1]), fields) or f"; there are: {', '.join(fields)}")
    if kind == "literal_error":
        choices = re.findall("'([^']*)'", found["ctx"]["expected"])
        return f"expected {' or '.join(choices)}, got {shown(value)}" + _near(str(value), choices)
    if kind == "value_error":
        return str(found["ctx"]["error"])
    said = {
        "tuple_type": "must be a list such as " + _LISTS.get(str(location[-1]), "[data, h2d]"),
        "model_type": "must be a mapping of fields",
        "string_type": "must be text (quote it if it looks like something else)",
        "string_pattern_mismatch": "must be lower-case letters, digits and -, with no - at either end",
    }.get(kind, found["msg"].replace("Input should", "must"))
    return f"{said}, got {shown(value)}"


def _near(word: str, choices: list[str]) -> str:
    close = difflib.get_close_matches(word, choices, n=1)
    return f'; did you mean "{close[0]}"?' if close else ""


def _fields(location: Location) -> dict[str, Any]:
    """The types of the fields at a place, by name."""
    kind: Any = TriagePolicy
    for part in location:
        kind = _fields_of(kind)[part] if isinstance(part, str) else kind
    return _fields_of(kind)


def _fields_of(kind: Any) -> dict[str, Any]:
    models = _models(kind)
    return {field.alias or name: field.annotation for model in models for name, field in model.model_fields.items()}


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    # In Python 3.10, tuple[int, ...] still passes for a class.
    if typing.get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for inner in typing.get_args(kind):
        yield from _models(inner)
