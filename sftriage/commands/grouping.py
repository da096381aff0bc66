"""Options that several commands take together: a dataclass of them is one parameter of a command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """A command as typer takes it: where it takes a dataclass of options, it has these options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: of for name, of in hints.items() if is_dataclass(of)}
    if not groups:
        return command
    parameters = []
    for one in inspect.signature(command).parameters.values():
        of = groups.get(one.name)
        if of is None:
            parameters.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[one.name]))
        else:
            types = get_type_hints(of, include_extras=True)
            parameters += [_parameter(its.name, its.default, types[its.name]) for its in fields(of)]

    @functools.wraps(command)
    def called(**given: Any) -> None:
        made = {name: of(**{its.name: given.pop(its.name) for its in fields(of)}) for name, of in groups.items()}
        command(**given, **made)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    return called


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def arguments(options: Any) -> dict[str, object]:
    """What of some options is not as it is by default, by the option that says it."""
    given = {its: getattr(options, its.name) for its in fields(options)}
    return {f"--{its.name.replace('_', '-')}": value for its, value in given.items() if value != its.default}
