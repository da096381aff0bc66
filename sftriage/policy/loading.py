"""Policies from files: found, read, checked, and every mistake in them said at once with its place."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import stat
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from sftriage.errors import UsageError
from sftriage.policy import document as documents
from sftriage.policy.contradictions import contradictions
from sftriage.policy.document import Document, PolicyError, Problem, SourcePosition
from sftriage.policy.fields import Location
from sftriage.policy.quantities import shown
from sftriage.policy.schema import TriagePolicy

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

_PACKAGE = Path(__file__).resolve().parent.parent


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
        at = location
        while at and at not in self.places:
            at = at[:-1]
        line, column = self.places.get(at, (0, 0))
        return Problem(line, column, documents.path_text(location), message, self.source)


def load(path: str | os.PathLike[str]) -> LoadedPolicy:
    """The policy of a file.

    Raises:
        PolicyError: the file cannot be read, or is not a policy; with every problem in it.
    """
    source = os.fspath(path)
    return parse(read(source), source)


def parse(raw: bytes | str, name: str) -> LoadedPolicy:
    """The policy of a text; ``name`` stands for the file in messages.

    Raises:
        PolicyError: the text is not a policy; with every problem in it.
    """
    raw = raw.encode() if isinstance(raw, str) else raw
    if len(raw) > MAX_FILE_BYTES:
        raise PolicyError(name, [_whole(f"larger than {MAX_FILE_BYTES // 1024} KiB")])
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        raise PolicyError(name, [Problem(line, column, "", "not UTF-8")]) from None
    document = documents.read(text, name)
    document.leave_out(_of_the_server)
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


def find(name_or_path: str | os.PathLike[str]) -> Path:
    """The file meant by a path, or by the name of a policy that ships with sftriage.

    Raises:
        UsageError: neither; the message lists the names there are.
    """
    path = Path(name_or_path)
    if path.exists() and not path.is_dir():
        return path
    policies = shipped()
    name = os.fspath(name_or_path)
    if name in policies:
        return policies[name]
    raise UsageError(f"no policy {name!r}: not a file, nor one of those shipped: {', '.join(policies) or 'none'}")


def shipped(name: str = "policies", source: str = "policies") -> dict[str, Path]:
    """The files in a folder that ships with sftriage (its policies), by name; ``source`` is that of a checkout."""
    directory = _PACKAGE / name
    checkout = _PACKAGE.parent
    # In a checkout they lie beside the package. In site-packages, a neighbour of that name would be somebody else's.
    if not directory.is_dir() and (checkout / "pyproject.toml").is_file():
        directory = checkout / source
    return {path.stem: path for path in sorted(directory.glob("*.yaml"))}


def read(source: str) -> bytes:
    """The bytes of a policy file, no more of them than tell that it is too large.

    Raises:
        PolicyError: it cannot be read, or is no regular file.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for somebody to write into it.
        number = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise PolicyError(source, [_whole("not a regular file")])
            with open(number, "rb", closefd=False) as file:
                return file.read(MAX_FILE_BYTES + 1)
        finally:
            os.close(number)
    except OSError as error:
        raise PolicyError(source, [_whole(f"cannot be read: {error.strerror}")]) from None


def _of_the_server(location: Location) -> bool:
    return location[0] == "status" or (location[0] == "metadata" and len(location) > 1 and location[1] in OBJECT_META)


def _whole(message: str) -> Problem:
    return Problem(0, 0, "", message)


def _add(document: Document, found: Iterable[tuple[Location, Any]]) -> None:
    """Note what is wrong, but at most one thing about a field: a second would follow from the first."""
    taken = set(document.problems)
    for location, what in found:
        if location in taken:
            continue
        taken.add(location)
        message = what if isinstance(what, str) else _message(what)
        unknown = not isinstance(what, str) and what["type"] == "extra_forbidden"
        document.refuse(location, message, document.place(location, of_key=unknown))


def _message(found: Any) -> str:
    kind, location, value = found["type"], found["loc"], found["input"]
    if kind == "missing":
        return "required, but not there"
    if kind == "extra_forbidden":
        fields = [
            field.alias or name
            for model in _models(_annotation(location[:-1]))
            for name, field in model.model_fields.items()
        ]
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


def _annotation(location: Location) -> Any:
    kind: Any = TriagePolicy
    for part in location:
        models = list(_models(kind))
        if isinstance(part, int) or not models:
            continue
        named = {field.alias or name: field for name, field in models[0].model_fields.items()}
        kind = named[part].annotation if part in named else None
    return kind


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    # In Python 3.10, tuple[int, ...] still passes for a class.
    if typing.get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for inner in typing.get_args(kind):
        yield from _models(inner)
