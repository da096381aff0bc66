"""What every document of ours is made of that is read back from disk: bounded values, and what is newer is ignored."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""What would do something to a terminal."""


def text(max_length: int) -> object:
    """A string of bounded length without control characters: what is stored is printed on terminals one day."""
    return Field(max_length=max_length, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")


Word = Annotated[str, text(100)]
Sentence = Annotated[str, text(2000)]
# SQLite's integers, and everybody else's.
Count = Annotated[int, Field(ge=0, lt=2**63)]
Rank = Annotated[int, Field(ge=0, lt=2**31)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class DocumentModel(BaseModel):
    """A document that later versions may add to: what is not known is ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


def first_problem(error: ValidationError) -> str:
    """The first thing that is wrong, as one short piece of a message: the rest of a hostile file is noise."""
    first = error.errors(include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "document"
    return CONTROL.sub("?", f"{where[:100]}: {first['msg'][:200]}")
