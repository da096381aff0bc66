"""Looking into a pod as a client wrote it: any part of it may be missing, null, or of another type. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Pod = Mapping[str, Any]
"""A pod, or a pod template: ``metadata`` and ``spec``."""


def mapping(holder: Any, *path: str) -> Mapping[str, Any]:
    """The mapping at a path; an empty one where there is none."""
    for name in path:
        holder = holder.get(name) if isinstance(holder, Mapping) else None
    return holder if isinstance(holder, Mapping) else {}


def items(holder: Any, name: str) -> Iterator[Mapping[str, Any]]:
    """The mappings in a list of that name."""
    found = holder.get(name) if isinstance(holder, Mapping) else None
    if isinstance(found, Sequence) and not isinstance(found, str):
        yield from (one for one in found if isinstance(one, Mapping))


def text(holder: Any, name: str) -> str:
    """The text of that name; "" where there is none."""
    found = holder.get(name) if isinstance(holder, Mapping) else None
    return found if isinstance(found, str) else ""


def labels_of(pod: Pod) -> Mapping[str, str]:
    """The labels of a pod."""
    return _texts(mapping(pod, "metadata", "labels"))


def annotations_of(pod: Pod) -> Mapping[str, str]:
    """The annotations of a pod."""
    return _texts(mapping(pod, "metadata", "annotations"))


def environment_of(pod: Pod) -> Mapping[str, str]:
    """The variables whose values its containers' lists name; of one that several name, the first container's."""
    found: dict[str, str] = {}
    for container in items(mapping(pod, "spec"), "containers"):
        for variable in items(container, "env"):
            name, value = variable.get("name"), variable.get("value")
            if isinstance(name, str) and isinstance(value, str):
                found.setdefault(name, value)
    return found


def _texts(found: Mapping[str, Any]) -> Mapping[str, str]:
    return {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, str)}
