"""From YAML text to plain data with the place of every value, and nothing else.

The text may come from anywhere. It is looked at twice: first as a flat stream of events, which cannot recurse or
expand, then, once that stream is known to be small and without aliases, as a tree. No object is ever constructed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from sftriage.policy.fields import Location
from sftriage.policy.problems import PolicyError, Problem
from sftriage.policy.quantities import shown

MAX_DEPTH = 20
"""Deeper than any policy, shallower than Python's recursion limit."""
MAX_ITEMS = 1000
"""More than any list of a policy has; where one goes on, the text is read no further."""

_TAG = "tag:yaml.org,2002:"

SourcePosition = tuple[int, int]
"""Line and column, from 1."""


@dataclass(slots=True)
class Document:
    """Plain data, where each of its values and keys stands, and what is wrong with it so far."""

    data: Any = None
    values: dict[Location, SourcePosition] = field(default_factory=dict)
    keys: dict[Location, SourcePosition] = field(default_factory=dict)
    problems: dict[Location, list[Problem]] = field(default_factory=dict)

    def place(self, location: Location, *, of_key: bool = False) -> SourcePosition:
        """Where a value (or its key) stands; of one that is not there, where what should hold it stands."""
        if of_key and location in self.keys:
            return self.keys[location]
        while location and location not in self.values:
            location = location[:-1]
        return self.values.get(location, (1, 1))

    def refuse(self, location: Location, message: str, place: SourcePosition) -> None:
        """Note a problem."""
        self.problems.setdefault(location, []).append(Problem(*place, path=path_text(location), message=message))

    def leave_out(self, other: Callable[[Location], bool]) -> None:
        """Forget fields, down to the second level, that are somebody else's, and what is wrong with them."""
        for above, holder in [((), self.data), *(((name,), inner) for name, inner in self.data.items())]:
            for name in list(holder) if isinstance(holder, dict) else ():
                if other((*above, name)):
                    del holder[name]
        for location in [at for at in self.problems if at and other(at)]:
            del self.problems[location]


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


def read(text: str, source: str) -> Document:
    """The document of a YAML text.

    Raises:
        PolicyError: not YAML, or YAML that has no place in a policy: aliases, more than one document, nested beyond
            reason, empty, or not a mapping. Tags, anchors, repeated keys and fields without a value are noted in the
            document, so that they are reported with whatever else is wrong.
    """
    fatal, notes = _survey(text)
    if fatal:
        raise PolicyError(source, [*fatal, *notes])
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is None or node.tag == _TAG + "null":
        raise PolicyError(source, [*notes, Problem(0, 0, "", "the document is empty")])
    document = Document(problems={(): notes} if notes else {})
    if not isinstance(node, yaml.MappingNode):
        problem = Problem(*_place(node.start_mark), "", "expected a mapping with apiVersion, kind, metadata and spec")
        raise PolicyError(source, [*notes, problem])
    document.data = _plain(node, (), document)
    return document


def _survey(text: str) -> tuple[list[Problem], list[Problem]]:
    """What forbids composing the text, and what can be reported along with the rest."""
    fatal: list[Problem] = []
    notes: list[Problem] = []
    anchors: list[Problem] = []
    aliases: list[Problem] = []
    documents = 0
    # Of each collection that is open how many items it has so far; of a mapping, keys and values are not counted.
    open_items: list[float] = []
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            place = _place(event.start_mark)
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    fatal.append(Problem(*place, "", "a second document; a policy file holds one"))
                    break
            elif isinstance(event, yaml.AliasEvent):
                aliases.append(Problem(*place, "", f"alias *{event.anchor} refused: write the value out"))
            elif isinstance(event, yaml.NodeEvent):
                if event.anchor is not None:
                    anchors.append(Problem(*place, "", f"anchor &{event.anchor} refused: a policy has no aliases"))
                if (tag := getattr(event, "tag", None)) is not None:
                    notes.append(Problem(*place, "", f"tag {shown(tag)} refused: a policy is plain data"))
            if isinstance(event, yaml.NodeEvent) and open_items:
                open_items[-1] += 1
                if open_items[-1] > MAX_ITEMS:
                    fatal.append(Problem(*place, "", f"a list of more than {MAX_ITEMS} items; a policy has none"))
                    break
            if isinstance(event, yaml.CollectionStartEvent):
                open_items.append(0 if isinstance(event, yaml.SequenceStartEvent) else float("-inf"))
                if len(open_items) > MAX_DEPTH:
                    fatal.append(Problem(*place, "", f"nested more than {MAX_DEPTH} deep"))
                    break
            elif isinstance(event, yaml.CollectionEndEvent):
                open_items.pop()
    except yaml.YAMLError as error:
        fatal.append(_syntax(error, text))
    # A value that is said once and meant often is one mistake, however often it is meant.
    return fatal + _first(aliases), notes + ([] if aliases else _first(anchors))


def _first(problems: list[Problem]) -> list[Problem]:
    """The first of problems of one kind, which says how many more there are."""
    more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
    return [replace(one, message=one.message + more) for one in problems[:1]]


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


def _plain(node: yaml.Node, location: Location, document: Document) -> Any:
    """A node as dicts, lists and scalars. Fields without a value are left out and noted."""
    document.values[location] = _place(node.start_mark)
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, location, document)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*location, index), document) for index, item in enumerate(node.value)]
    return _scalar(node, location, document)


def _mapping(node: yaml.MappingNode, location: Location, document: Document) -> dict[str, Any]:
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


def _scalar(node: yaml.Node, location: Location, document: Document) -> Any:
    """Numbers and booleans as YAML reads them; all else, dates too, as text."""
    kind = node.tag.removeprefix(_TAG)
    if kind not in ("int", "float", "bool", "null"):
        return node.value
    try:
        return getattr(SafeConstructor(), f"construct_yaml_{kind}")(node)
    except (ValueError, KeyError):
        document.refuse(location, f"{shown(node.value)} cannot be read as {kind}", _place(node.start_mark))
        return node.value
