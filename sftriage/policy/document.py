"""From YAML text to plain data with the place of every value, and nothing else.

The text may come from anywhere: it is read no further where it nests or goes on beyond reason, no alias expands, and no
object is constructed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from sftriage.errors import InputError
from sftriage.policy.fields import Location
from sftriage.policy.quantities import shown

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
    try:
        reader: Any = _Reader(text, source)
        node = reader.get_node() if reader.check_node() else None
        if reader.check_node():
            raise PolicyError(source, [_problem(reader.peek_event(), "a second document; a policy file holds one")])
    except yaml.YAMLError as error:
        raise PolicyError(source, [_syntax(error, text)]) from None
    document = Document(problems={(): reader.notes} if reader.notes else {})
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
