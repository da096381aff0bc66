"""What the engine remembers between decisions. Small, serialisable, and never changed in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError

from sftriage.errors import InputError


@dataclass(frozen=True, slots=True)
class Running:
    """A capture that was asked for and is not known to have ended. After ``deadline_s`` it is taken for lost."""

    rank: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class State:
    """What a run has done so far. Times are seconds of the clock that `decide` is given.

    Attributes:
        captures: captures asked for in this run, whatever became of them.
        fired_s: for each rule, when it last asked for a capture.
        running: captures under way, by capture id.
    """

    # A file read back is checked as strictly as one from a stranger.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")

    captures: NonNegativeInt = 0
    fired_s: Mapping[str, float] = field(default_factory=dict)
    running: Mapping[str, Running] = field(default_factory=dict)
    version: Literal[1] = 1

    def to_json(self) -> str:
        """The state as one line of JSON."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> State:
        """The state that `to_json` wrote.

        Raises:
            InputError: it is not such a state.
        """
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InputError(f"not the state of a policy engine: {where or 'document'}: {first['msg']}") from None


_ADAPTER = TypeAdapter(State)
