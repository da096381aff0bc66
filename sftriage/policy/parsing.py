"""Parses and checks a policy; reports every mistake, in a field or between fields, at once and with its place.

The text may come from anywhere: reading stops at excessive nesting or length, no alias expands, and no object is
constructed.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from sftriage.errors import InputError
from sftriage.policy.fields import shown
from sftriage.policy.schema import MAX_ITEMS, Capture, Detection, Limits, TriagePolicy, idle_fields

MAX_SHOWN = 50
"""Maximum problems shown: a document can have tens of thousands, and people read only the first screens."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One mistake. ``line`` and ``column`` count from 1; a line of 0 means the document as a whole.

    ``source`` is its file, if several are checked together.
    """

    line: int
    column: int
    path: str
    message: str
    source: str = ""

    def line_text(self, source: str) -> str:
        """The problem as one line: ``FILE:LINE:COLUMN: field: message``."""
        source = self.source or source
        place = f"{source}:{self.line}:{self.column}" if self.line else source
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"


class PolicyError(InputError):
    """An invalid policy. ``str(error)`` has one line for each problem, in the order of the document."""

    is_located = True

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = tuple(sorted(problems, key=lambda problem: (problem.source, problem)))
        lines = [problem.line_text(source) for problem in self.problems[:MAX_SHOWN]]
        if len(self.problems) > MAX_SHOWN:
            lines.append(f"{source}: and {len(self.problems) - MAX_SHOWN} more")
        super().__init__("\n".join(lines))


MAX_DEPTH = 20
"""Deeper than any policy, shallower than Python's recursion limit."""

_TAG = "tag:yaml.org,2002:"

Location = tuple[int | str, ...]
"""The way to a value of a document: field names and list indices."""

SourcePosition = tuple[int, int]
"""Line and column, from 1."""


def _place_of(location: Location, places: Mapping[Location, SourcePosition]) -> SourcePosition | None:
    """The position of a value, or if it is missing, of its nearest parent."""
    while location and location not in places:
        location = location[:-1]
    return places.get(location)


def path_text(location: Location) -> str:
    """A location as text: ``spec.rules[0].capture``. Keys that are no plain words are quoted."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            word = part if part.isascii() and part.isidentifier() and len(part) <= 64 else shown(part)
            text += f".{word}" if text else word
    return text


class _Document(yaml.SafeLoader):
    """The document of a YAML text as plain data, with the positions of its values and keys, and its problems.

    It collects tags, anchors, repeated keys and fields without a value, to report them together with all other
    problems. Raises PolicyError if the text is not YAML, is empty or no mapping, has several documents, uses aliases,
    or nests too deep.
    """

    def __init__(self, text: str, source: str) -> None:
        self.values: dict[Location, SourcePosition] = {}
        self.keys: dict[Location, SourcePosition] = {}
        self.problems: dict[Location, list[Problem]] = {}
        self._source, self._depth = source, 0
        try:
            super().__init__(text)
            loader: Any = self
            node = loader.get_node() if loader.check_node() else None
            if loader.check_node():
                raise self._refused(loader.peek_event(), "a second document; a policy file has one")
        except yaml.YAMLError as error:
            raise PolicyError(source, [_syntax(error, text)]) from None
        if node is None or node.tag == _TAG + "null":
            raise PolicyError(source, [*self._notes, Problem(0, 0, "", "the document is empty")])
        if not isinstance(node, yaml.MappingNode):
            refused = self._refused(node, "expected a mapping with apiVersion, kind, metadata and spec")
            raise PolicyError(source, [*self._notes, *refused.problems])
        self.data: Any = self._plain(node, ())

    @property
    def _notes(self) -> list[Problem]:
        return self.problems.get((), [])

    def refuse(self, location: Location, message: str, place: SourcePosition) -> None:
        """Record a problem."""
        self.problems.setdefault(location, []).append(Problem(*place, path=path_text(location), message=message))

    def add(self, found: Iterable[tuple[Location, Any]]) -> None:
        """Record problems, at most one for each field: a second would follow from the first."""
        taken = set(self.problems)
        for location, mistake in found:
            if location in taken:
                continue
            taken.add(location)
            message = mistake if isinstance(mistake, str) else _message(mistake)
            unknown = not isinstance(mistake, str) and mistake["type"] == "extra_forbidden"
            key = self.keys.get(location) if unknown else None
            self.refuse(location, message, key or _place_of(location, self.values) or (1, 1))

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]  # PyYAML leaves it untyped
        if isinstance(index, int) and index >= MAX_ITEMS:
            raise self._refused(event, f"the list has more than {MAX_ITEMS} items")
        if isinstance(event, yaml.CollectionStartEvent) and self._depth == MAX_DEPTH:
            raise self._refused(event, f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            raise self._refused(event, f"alias *{event.anchor} is not allowed; write the value out")
        if event.anchor is not None:
            self.refuse((), f"anchor &{event.anchor} is not allowed in a policy", _place(event))
            event.anchor = None
        if event.tag is not None:
            self.refuse((), f"tag {shown(event.tag)} is not allowed in a policy", _place(event))
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def _refused(self, at: Any, message: str) -> PolicyError:
        return PolicyError(self._source, [Problem(*_place(at), "", message)])

    def _plain(self, node: yaml.Node, location: Location) -> Any:
        """A node as dicts, lists and scalars; numbers and booleans as YAML reads them, all else, dates too, as text."""
        self.values[location] = _place(node)
        if isinstance(node, yaml.MappingNode):
            return dict(self._items(node, location))
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, (*location, index)) for index, item in enumerate(node.value)]
        kind = node.tag.removeprefix(_TAG)
        if kind not in ("int", "float", "bool", "null"):
            return node.value
        try:
            return getattr(self, f"construct_yaml_{kind}")(node)
        except (ValueError, KeyError):
            self.refuse(location, f"cannot read {shown(node.value)} as {kind}", _place(node))
            return node.value

    def _items(self, node: yaml.MappingNode, location: Location) -> Iterator[tuple[str, Any]]:
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.refuse((*location, "?"), "expected a field name, got a list or a mapping", _place(key))
                continue
            at: Location = (*location, key.value)
            if at in self.keys:
                first, column = self.keys[at]
                self.refuse(at, f"the field is set twice: here and on line {first}, column {column}", _place(key))
                continue
            self.keys[at] = _place(key)
            if value.tag == _TAG + "null":
                self.refuse(at, "the field has no value; set one, or remove the field", self.keys[at])
            else:
                yield key.value, self._plain(value, at)


def _syntax(error: yaml.YAMLError, text: str) -> Problem:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        message = ", ".join(part for part in (error.context, error.problem) if part)
        if "'\\t'" in message:
            message = "a tab where YAML requires spaces"
        place = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        return Problem(*place, "", f"not valid YAML: {message}")
    before = text[: getattr(error, "position", 0)]
    place = before.count("\n") + 1, len(before) - before.rfind("\n")
    return Problem(*place, "", f"not valid YAML: character {shown(text[len(before) :][:1])} is not allowed")


def _place(at: Any) -> SourcePosition:
    """Where an event or a node begins."""
    return at.start_mark.line + 1, at.start_mark.column + 1


MAX_FILE_BYTES = 256 * 1024
"""Maximum size of a policy file, enough for a thousand rules."""

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
"""An example of the list in each field."""

OBJECT_META = frozenset(
    {"annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers"}
    | {"generateName", "generation", "labels", "managedFields", "namespace", "ownerReferences", "resourceVersion"}
    | {"selfLink", "uid"}
)
"""Fields of an object's metadata that Kubernetes adds."""


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A checked policy, the sha256 of the bytes it was read from, and where they were.

    ``places`` has the position of each value in the text, so that conflicts with another policy are reported with their
    place too.
    """

    policy: TriagePolicy
    sha256: str
    source: str
    places: Mapping[Location, SourcePosition] = field(default_factory=dict, repr=False, compare=False)

    def problem(self, location: Location, message: str) -> Problem:
        """A problem with a value, at its position, or where it would be."""
        line, column = _place_of(location, self.places) or (0, 0)
        return Problem(line, column, path_text(location), message, self.source)


def parse(raw: bytes | str, name: str) -> LoadedPolicy:
    """Parse a policy; messages call its file ``name``. Raises PolicyError with every problem."""
    raw = raw.encode() if isinstance(raw, str) else raw
    if len(raw) > MAX_FILE_BYTES:
        raise PolicyError(name, [Problem(0, 0, "", f"larger than {MAX_FILE_BYTES // 1024} KiB")])
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        raise PolicyError(name, [Problem(line, column, "", "not UTF-8")]) from None
    document = _Document(text, name)
    # A Kubernetes API server adds fields of its own.
    for holder, names in ((document.data, {"status"}), (document.data.get("metadata"), OBJECT_META)):
        for added in names & holder.keys() if isinstance(holder, dict) else ():
            del holder[added]
    for at in list(document.problems):
        if at[:1] == ("status",) or (at[:1] == ("metadata",) and at[1:2] and at[1] in OBJECT_META):
            del document.problems[at]
    policy, mistaken = None, []
    try:
        policy = TriagePolicy.model_validate(document.data)
    except ValidationError as error:
        mistaken = [(found["loc"], found) for found in error.errors()]
    # Between fields first: if both report one field, that message is the better one.
    document.add(contradictions(document.data))
    document.add(mistaken)
    if document.problems or policy is None:
        raise PolicyError(name, [problem for group in document.problems.values() for problem in group])
    return LoadedPolicy(policy, hashlib.sha256(raw).hexdigest(), name, document.values)


def _message(found: Any) -> str:
    kind, location, value = found["type"], found["loc"], found["input"]
    if kind == "missing":
        return "required, but missing"
    if kind == "extra_forbidden":
        fields = list(_fields(location[:-1]))
        return "unknown field" + (_near(str(location[-1]), fields) or f"; fields here: {', '.join(fields)}")
    if kind == "literal_error":
        choices = re.findall("'([^']*)'", found["ctx"]["expected"])
        return f"expected {' or '.join(choices)}, got {shown(value)}" + _near(str(value), choices)
    if kind == "value_error":
        return str(found["ctx"]["error"])
    problem = {
        "tuple_type": "must be a list such as " + _LISTS.get(str(location[-1]), "[data, h2d]"),
        "model_type": "must be a mapping of fields",
        "string_type": "must be text (quote it if it looks like something else)",
        "string_pattern_mismatch": "must be lower-case letters, digits and -, and not start or end with -",
    }.get(kind, found["msg"].replace("Input should", "must"))
    return f"{problem}, got {shown(value)}"


def _near(word: str, choices: list[str]) -> str:
    close = difflib.get_close_matches(word, choices, n=1)
    return f'; did you mean "{close[0]}"?' if close else ""


def _fields(location: Location) -> dict[str, Any]:
    """The types of the fields at a location, by name."""
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


_COUNTED = ("captures_per_hour", "captures_per_day", "captures_per_run", "concurrent_ranks")
"""Limits that count captures. One without a default never conflicts if it is not set."""

NO_WAIT = (None, "1 step", "1 steps", "1 window", "1 windows")
"""``for`` of a rule that does not wait."""

_OBSERVE = "to only observe, write rules without a capture"

Mistakes = Iterator[tuple[Location, str]]
"""Locations of mistakes in a document, with messages."""


def contradictions(document: Any) -> Mistakes:
    """Conflicts between fields that are each valid.

    Works on plain data of any shape, without defaults, so that conflicts are reported together with mistakes inside the
    fields.
    """
    spec = _mapping(document, "spec")
    detection = _mapping(spec, "detection")
    window, stride = (
        detection.get(name, Detection.model_fields[name].default) for name in ("window_steps", "stride_steps")
    )
    if isinstance(window, int) and isinstance(stride, int) and stride > window:
        at = "stride_steps" if "stride_steps" in detection else "window_steps"
        gaps = f"a stride of {stride} steps leaves gaps between windows of {window} steps"
        yield ("spec", "detection", at), gaps
    limits = _mapping(spec, "limits")
    for name, none in (*((name, 0) for name in _COUNTED), ("overhead_budget", "0%")):
        if limits.get(name) == none and not isinstance(limits[name], bool):
            yield ("spec", "limits", name), f"{none} would never allow a capture; {_OBSERVE}"
    if spec.get("retention") == {}:
        yield ("spec", "retention"), "set age or bytes, or remove retention to keep traces forever"
    if _mapping(spec, "mitigate").get("remedies") in ([], ()):
        yield ("spec", "mitigate", "remedies"), "no remedy listed; to only get advice, remove mitigate"
    if spec.get("rules") in ([], ()):
        yield ("spec", "rules"), "no rules; to only observe, write rules without a capture"
    known: dict[str, int] = {}
    for index, rule in enumerate(_list(spec, "rules")):
        if not isinstance(rule, dict):
            continue
        where: Location = ("spec", "rules", index)
        own = rule.get("name")
        if isinstance(own, str) and known.setdefault(own, index) != index:
            yield (*where, "name"), f"a second rule named {own!r}; the first is spec.rules[{known[own]}]"
        yield from _under(where, _in_rule(rule, limits))


def in_capture(capture: dict[str, Any], *, stalled: bool) -> Mistakes:
    """Conflicts between the fields of a capture; ``stalled``: in a rule on stalls."""
    for name, why in idle_fields(capture, stalled=stalled).items():
        if name in capture:
            yield (name,), why
    if ranks := _list(capture, "ranks"):
        twice = sorted({rank for rank in ranks if isinstance(rank, int) and ranks.count(rank) > 1})
        if twice:
            yield ("ranks",), f"listed twice: {', '.join(map(str, twice))}"
        if "sample" in capture:
            yield ("sample",), "all listed ranks are captured; set either sample or ranks"


def _under(where: Location, found: Mistakes) -> Mistakes:
    return (((*where, *at), message) for at, message in found)


def _in_rule(rule: dict[str, Any], limits: dict[str, Any]) -> Mistakes:
    match, capture = _mapping(rule, "match"), _mapping(rule, "capture")
    label, pattern, captures = match.get("label"), match.get("pattern"), rule.get("capture") is not None
    if label in ("healthy", "needs_evidence"):
        yield ("match", "label"), _idle_label(label, captures, bool(rule.get("notify")))
    if match.get("reason") in ("regressed", "slow_link"):
        yield from _in_reason(rule, match, str(match["reason"]))
    elif label == "stalled":
        profiler = capture.get("profiler", "auto")
        if captures and profiler in ("torch", "nsys"):
            yield (
                ("match", "label"),
                f"no {profiler} capture on stalled, because it starts at a rank's next step, which a stalled rank does "
                "not reach; use stacks or auto, or remove capture to only observe",
            )
        if pattern:
            yield ("match", "pattern"), "no pattern on stalled: a single step that has not ended has none"
        if match.get("cost"):
            yield ("match", "cost"), "no cost on stalled: the step has not ended, so its cost still grows"
        if rule.get("for") not in NO_WAIT:
            once = "a stall is reported once; set its minimum duration in detection.stalled_after"
            yield ("for",), f"no `for` on stalled: {once}"
    elif captures and pattern and set(map(str, pattern)) == {"one-off"}:
        passed = "because the fault has passed, and a capture would show healthy steps"
        yield ("match", "pattern"), f"no capture on one-off alone, {passed}"
    yield from _under(("capture",), in_capture(capture, stalled=label == "stalled"))
    if captures and label != "stalled":
        yield from _under(("capture",), _under_limits(capture, limits))
    for index, notification in enumerate(_list(rule, "notify")):
        webhook = notification.get("webhook") if isinstance(notification, dict) else None
        if not isinstance(webhook, dict):
            continue
        where = ("notify", index, "webhook")
        if "url" in webhook:
            secret = "the address is a secret and must not be in the policy; use url_from_env or url_from_file"
            yield (*where, "url"), secret
        elif len({"url_from_env", "url_from_file"} & set(webhook)) != 1:
            yield where, "set either url_from_env or url_from_file"


def _in_reason(rule: dict[str, Any], match: dict[str, Any], reason: str) -> Mistakes:
    if rule.get("capture") is not None:
        yield ("capture",), f"no capture on {reason}, because no single rank makes the job slower"
    if "label" in match:
        yield ("match", "label"), f"no label beside {reason}, which matches whatever the label is"
    for name in ("scope", "pattern", "cost"):
        if match.get(name):
            yield ("match", name), f"no {name} on {reason}: it describes the job, not a suspect"
    if rule.get("for") not in NO_WAIT:
        yield ("for",), f"no `for` on {reason}: it is reported once enough steps are slower, see docs/verdicts.md"


def _idle_label(label: str, captures: bool, notifies: bool) -> str:
    if captures:
        why = "nothing is slow" if label == "healthy" else "it is undecided which rank to capture"
        return f"no capture on {label}, because {why}; only suspect may capture"
    if notifies:
        return f"no message on {label}, because such windows are frequent; they are recorded without a rule"
    return f"a rule on {label} would do nothing; such windows are recorded without a rule"


def _under_limits(capture: dict[str, Any], limits: dict[str, Any]) -> Mistakes:
    """A limit that never allows the rule as many captures as it requests."""
    ranks, sample = capture.get("ranks", ()), capture.get("sample", Capture.model_fields["sample"].default)
    if not (isinstance(ranks, list | tuple) and type(sample) is int):
        return
    # Control ranks do not count: they are captured only if the limits leave room.
    at, wanted = ("ranks", len(ranks)) if ranks else ("sample", sample)
    for name in _COUNTED:
        most = limits.get(name, Limits.model_fields[name].default)
        if type(most) is int and 0 < most < wanted:
            yield (at,), f"{wanted} captures at once ({at}: {wanted}), but limits.{name} is {most}"
            return


def _mapping(holder: Any, name: str) -> dict[str, Any]:
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, dict) else {}


def _list(holder: dict[str, Any], name: str) -> Sequence[Any]:
    value = holder.get(name)
    return value if isinstance(value, list | tuple) else ()
