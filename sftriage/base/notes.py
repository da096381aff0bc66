"""Notes: small dataclasses in JSON files that one process leaves for another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from sftriage.base.files import regular, write_atomically
from sftriage.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True)
class Note(Generic[T]):
    """A file that holds one value of a type that msgspec makes JSON of, in which paths may be; or is missing."""

    path: Path
    type: type[T]

    def save(self, value: T) -> None:
        """Replace what the file holds.

        Raises:
            OSError: the file cannot be written.
        """
        import msgspec  # not above: a trainer need not have it

        write_atomically(self.path, msgspec.json.encode(value, enc_hook=str) + b"\n")

    def load(self) -> T | None:
        """What was saved; None where nothing was.

        Raises:
            InputError: the file cannot be read, or holds something else.
        """
        import msgspec

        if not self.path.exists():
            return None
        with regular(self.path, InputError) as file:
            try:
                return msgspec.json.decode(file.read(), type=self.type, dec_hook=lambda kind, text: kind(text))
            except (OSError, ValueError) as error:
                raise InputError(f"{self.path}: {error}") from error

    def get(self) -> T | None:
        """What was saved; None where nothing was that can be read."""
        try:
            return self.load()
        except InputError:
            return None
