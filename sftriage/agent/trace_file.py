"""The file of a trace as torch has left it, read piece by piece, and made valid JSON where it is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from sftriage.base.files import private
from sftriage.errors import InputError
from sftriage.traces.jsonstream import Damage, TraceReader
from sftriage.traces.stores import CHUNK_BYTES

_DISTRIBUTED = "distributedInfo"
_STEP = re.compile(r"ProfilerStep#(\d+)")


class _Mark(msgspec.Struct, gc=False):
    cat: Any = None
    name: Any = None


_MARKS = msgspec.json.Decoder(list[_Mark])


class TraceFile:
    """A trace, read piece by piece, whose marked ``steps`` are noted, and a copy with its damage mended."""

    def __init__(self, trace: Path) -> None:
        self._trace, self._copy = trace, trace.with_suffix(".mended")
        self._target: BinaryIO | None = None
        self._values: dict[str, Any] = {_DISTRIBUTED: None}
        self.steps: set[int] = set()

    @property
    def rank(self) -> Any:
        """The rank that it says it is of; None where it says none."""
        about = self._values[_DISTRIBUTED]
        return about.get("rank") if isinstance(about, dict) else None

    def read(self) -> Damage:
        """Read it all; raises InputError where it is no trace, or is cut short."""
        with self._trace.open("rb") as source, self._trace.open("rb") as self._source:
            # A trace as torch writes it begins with a space.
            if not source.peek(64).lstrip().startswith(b"{"):
                raise InputError(f"{self._trace}: no JSON object")
            reader = TraceReader(source, self._trace.name, self._take, lambda _: False, self._values, self._edit)
            reader.read()
            if self._target is not None:
                self._copy_until(None)
        return reader.damage

    def replace(self) -> None:
        if self._target is not None:
            self._target.close()
            self._copy.replace(self._trace)

    def close(self) -> None:
        if self._target is not None:
            self._target.close()
            self._copy.unlink(missing_ok=True)

    def _take(self, piece: bytes) -> None:
        # (the decoder does not look into strings that are not wanted)
        piece.decode()
        for event in _MARKS.decode(piece):
            if event.cat == "user_annotation" and isinstance(event.name, str):
                step = _STEP.fullmatch(event.name)
                if step is not None:
                    self.steps.add(int(step[1]))

    def _edit(self, start: int, end: int, instead: bytes) -> None:
        if self._target is None:
            self._target = private(self._copy)
        self._copy_until(start)
        self._target.write(instead)
        self._source.seek(end)

    def _copy_until(self, end: int | None) -> None:
        assert self._target is not None, "there is a copy"
        while piece := self._source.read(CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - self._source.tell())):
            self._target.write(piece)
