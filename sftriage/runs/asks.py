"""Captures that people ask for: files in the run directory, which whoever runs the job takes up."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sftriage.base.files import write_atomically
from sftriage.decisions import ManualRequest, ProfilerChoice
from sftriage.errors import UsageError
from sftriage.records import plain
from sftriage.runs.directory import RunDirectory

log = logging.getLogger("sftriage")

_MAX_TEXT = 500
_Text = Annotated[str, Field(min_length=1, max_length=_MAX_TEXT, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]

_TEXTS = {"reason": "the reason", "who": "the name of who asks"}
_WRONG_TEXT = {
    "string_pattern_mismatch": "has control characters; one line of text, please",
    "string_too_long": f"is too long; {_MAX_TEXT} characters at most",
    "string_too_short": "is empty; one line of text, please",
    "string_unicode": "is not text in UTF-8",
}


class _RequestFile(BaseModel):
    """A manual request as a person may make it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    request_id: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]
    ranks: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(min_length=1, max_length=1024)]
    who: _Text
    reason: _Text
    profiler: ProfilerChoice
    steps: Annotated[int, Field(ge=1, le=1000)]
    warmup_steps: Annotated[int, Field(ge=0, le=100)]
    max_seconds: Annotated[float, Field(gt=0, le=3600)]
    max_bytes: Annotated[int, Field(ge=2**20, le=2**36)]
    samples_per_second: Annotated[int, Field(ge=1, le=1000)] = 200
    options: dict[Literal["torch", "nsys", "stacks"], dict[str, Any]] = {}

    @model_validator(mode="after")
    def _as_in_a_policy(self) -> _RequestFile:
        from sftriage.policy.schema import Capture  # not above: asking alone needs nothing of policies

        Capture.model_validate({"profiler": self.profiler, **self.options})
        return self


def leave(directory: RunDirectory, request: ManualRequest) -> None:
    """Leave a request where the run takes it up.

    Raises:
        UsageError: it is none, as the message says, or the run directory cannot be written.
    """
    try:
        _RequestFile.model_validate(plain(request))
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        of = _TEXTS.get(str(first["loc"][0]))
        if of is not None and first["type"] in _WRONG_TEXT:
            raise UsageError(f"{of} {_WRONG_TEXT[first['type']]}") from None
        raise UsageError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    try:
        directory.asks.mkdir(mode=0o700, exist_ok=True)
        write_atomically(_path(directory, request), json.dumps(plain(request)))
    except OSError as error:
        raise UsageError(f"{directory.asks} cannot be written: {error.strerror}") from error


def withdraw(directory: RunDirectory, request: ManualRequest) -> None:
    """Take back a request that was left, where the run has not taken it up."""
    _path(directory, request).unlink(missing_ok=True)


def _path(directory: RunDirectory, request: ManualRequest) -> Path:
    return directory.asks / f"{request.request_id}.json"


def left(directory: RunDirectory) -> list[tuple[Path, ManualRequest]]:
    """The requests that were left, oldest first, each with its file, which whoever takes up the request removes.

    Files that hold no request are removed with a warning.

    Raises:
        OSError: such a file cannot be removed.
    """
    try:
        files = (path for path in directory.asks.glob("*.json") if not path.is_dir())
        paths = sorted(files, key=lambda path: path.lstat().st_mtime_ns)
    except OSError:
        return []
    found = []
    for path in paths:
        try:
            found.append((path, msgspec.json.decode(path.read_bytes(), type=ManualRequest)))
        except (OSError, ValueError) as error:
            path.unlink(missing_ok=True)
            log.warning("%s is no capture that could be asked for: %s", path.name, error)
    return found
