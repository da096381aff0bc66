"""Bounds on records of another process: printable texts of a limited length, and finite numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

MAX_TEXT = 2000
MAX_NUMBER = 1 << 62
_Of = TypeVar("_Of")


def printable(text: str) -> str:
    """A text fit for a terminal, of at most `MAX_TEXT`."""
    if text.isprintable() and len(text) <= MAX_TEXT:
        return text
    return "".join(char if char.isprintable() else "?" for char in text[:MAX_TEXT])


def bounded(record: _Of) -> _Of:
    """A record of other records, tuples and dicts with printable texts; raises ValueError for an invalid number."""
    value: Any = record
    if isinstance(value, str):
        value = printable(value)
    elif isinstance(value, int | float):
        _check(value)
    elif isinstance(value, tuple) and value and type(value[0]) is int:
        # (such a tuple may have thousands of numbers)
        _check(min(value))
        _check(max(value))
    elif isinstance(value, tuple):
        items = tuple(map(bounded, value))
        value = value if all(new is old for new, old in zip(items, value, strict=True)) else items
    elif (names := getattr(type(value), "__dataclass_fields__", None)) is not None:
        fields = {name: bounded(getattr(value, name)) for name in names}
        changed = {name: new for name, new in fields.items() if new is not getattr(value, name)}
        value = replace(value, **changed) if changed else value
    elif isinstance(value, dict):
        value = {bounded(name): bounded(item) for name, item in value.items()}
    elif (names := getattr(type(value), "__struct_fields__", None)) is not None:
        value = type(value)(*(bounded(getattr(value, name)) for name in names))
    found: _Of = value
    return found


def _check(number: float) -> None:
    if not abs(number) < MAX_NUMBER:
        raise ValueError("an invalid number")
