"""A package's public names, each imported from its module when it is first used (PEP 562).

Whoever asks for one name does not wait for all the others: a command that lists captures needs no numpy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def from_modules(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package.

    Args:
        package: its ``__name__``.
        names: its public names, by the module of the package that has them.
    """
    homes = {name: f"{package}.{module}" for module, of_module in names.items() for name in of_module}

    def found(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return found
