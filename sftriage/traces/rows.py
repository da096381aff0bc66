"""A capture as a line of the catalogue: what can be asked of it, and how that is asked of a database."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from sqlalchemy import BigInteger, Column, ColumnElement, Double, MetaData, String, Table, Text, and_, false, func, or_
from sqlalchemy.types import TypeEngine

from sftriage.model.captures import CAPTURE_ID
from sftriage.traces.documents import CONTROL
from sftriage.traces.findings import CauseInfo
from sftriage.traces.manifest import Manifest

# Compared byte by byte, as SQLite does and Python: another order than that of the database's language.
TEXT = Text().with_variant(Text(collation="C"), "postgresql")


CONTROL_LABEL = "control"
"""In place of what led to a capture, where the rank was captured to compare with."""
FOLLOW_UP_LABEL = "follow-up"
"""The same, where an earlier capture of the suspect left it open why it is slow; its manifest names that."""


@dataclass(frozen=True, slots=True)
class CaptureRow:
    """A capture in the catalogue; the size and sha256 are those of the trace, ``created_at`` is in UTC.

    An id is unique in its run. ``label`` is what led to the capture, or `CONTROL_LABEL`, or `FOLLOW_UP_LABEL`.
    ``cause`` is why its rank was slow, as JSON, where known. ``reference`` is its name in its ``store``.
    """

    capture_id: str
    job: str
    run: str
    rank: int
    stage: str | None
    label: str
    scope: str
    window_first_step: int
    window_last_step: int
    first_step: int
    last_step: int
    gain_s: float
    size_bytes: int
    sha256: str
    profiler: str
    rule: str
    policy: str
    why: str
    created_at: str
    host: str
    reproduced: str | None
    store: str
    reference: str
    onset_step: int | None = None
    cause: str | None = None

    @property
    def why_slow(self) -> CauseInfo | None:
        """Why its rank was slow; None where that is not known, or another sftriage wrote it."""
        try:
            return None if self.cause is None else CauseInfo.model_validate_json(self.cause)
        except ValueError:
            return None

    @property
    def role(self) -> str:
        """Whether the rank was suspected, or captured to compare with."""
        return "control" if self.label == CONTROL_LABEL else "suspect"

    @property
    def follows_up(self) -> bool:
        """Whether an earlier capture of the suspect led to it."""
        return self.label == FOLLOW_UP_LABEL

    def distance_from(self, step: int) -> int:
        """How many steps the capture is from a step; 0 where it recorded it, or its window holds it."""
        spans = ((self.first_step, self.last_step), (self.window_first_step, self.window_last_step))
        return min(max(first - step, step - last, 0) for first, last in spans)

    @classmethod
    def of(cls, manifest: Manifest, store: str, reference: str) -> CaptureRow:
        """The row of a manifest that a store has under a reference."""
        window, reproduced = manifest.trigger.window, manifest.reproduced
        # A field that is not given here is called as in the part of the manifest that has it.
        values = {
            **dict(manifest.artefacts[0]),
            **dict(manifest.trigger),
            **dict(manifest.capture),
            **dict(manifest),
            "label": _label(manifest),
            "window_first_step": window.first_step,
            "window_last_step": window.last_step,
            "created_at": written(manifest.created_at),
            "reproduced": None if reproduced is None else reproduced.answer,
            "cause": None if manifest.cause is None else manifest.cause.model_dump_json(),
            "store": store,
            "reference": reference,
        }
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})

    @classmethod
    def read(cls, values: Sequence[Any]) -> CaptureRow | None:
        """A row as a database has it, or None where no manifest gave it: others may write there, and it is printed."""
        safe: list[Any] = [CONTROL.sub("?", value) if isinstance(value, str) else value for value in values]
        row = cls(*safe)
        return row if CAPTURE_ID.fullmatch(row.capture_id) and math.isfinite(row.gain_s) else None


def _label(manifest: Manifest) -> str:
    if manifest.capture.role == "control":
        return CONTROL_LABEL
    return FOLLOW_UP_LABEL if manifest.trigger.follows else manifest.trigger.label


@dataclass(frozen=True, slots=True)
class CaptureQuery:
    """Selects captures that meet every condition given, mostly the value of the row's field of that name.

    ``prefix`` is how the id begins, ``since`` the earliest time of capture. ``steps`` (first and last): captures that
    measured one of them, or whose triggering window holds one.
    """

    job: str | None = None
    run: str | None = None
    rank: int | None = None
    stage: str | None = None
    label: str | None = None
    rule: str | None = None
    profiler: str | None = None
    host: str | None = None
    reproduced: str | None = None
    prefix: str | None = None
    steps: tuple[int, int] | None = None
    since: datetime | None = None


METADATA = MetaData()

# One list of fields, that of the row: a column is named and typed as its field.
_TYPES: Mapping[str, TypeEngine[Any]] = {"str": TEXT, "int": BigInteger(), "float": Double()}
captures = Table(
    "sftriage_captures",
    METADATA,
    Column("key", TEXT, primary_key=True),
    *(
        Column(
            field.name,
            _TYPES[str(field.type).removesuffix(" | None")],
            nullable=str(field.type).endswith("None"),
            index=field.name == "created_at",
        )
        for field in dataclasses.fields(CaptureRow)
    ),
)
# The stores whose captures are all here. Forgetting one has it indexed again.
stores = Table(
    "sftriage_stores", METADATA, Column("key", TEXT, primary_key=True), Column("store", TEXT, nullable=False)
)

VERSION = "0001"
"""Version of these tables; raise it with every change to them."""
schema = Table("sftriage_schema", METADATA, Column("version_num", String(32), primary_key=True))

_EQUAL = ("job", "run", "rank", "stage", "label", "rule", "profiler", "host", "reproduced")


def conditions(wanted: CaptureQuery, store: str | None) -> Iterator[ColumnElement[bool]]:
    """What is asked for, of one store or of all, as a database is asked: all of it has to be true."""
    if store is not None:
        yield captures.c.store == store
    for name in _EQUAL:
        if (value := getattr(wanted, name)) is not None:
            yield captures.c[name] == value if _storable(value) else false()
    if wanted.prefix is not None:
        prefix = wanted.prefix
        yield func.substr(captures.c.capture_id, 1, len(prefix)) == prefix if _storable(prefix) else false()
    if wanted.steps is not None:
        spans = (("first_step", "last_step"), ("window_first_step", "window_last_step"))
        begin, end = wanted.steps
        yield or_(*(and_(captures.c[first] <= end, captures.c[last] >= begin) for first, last in spans))
    if wanted.since is not None:
        yield captures.c.created_at >= written(wanted.since)


def _storable(value: str | int) -> bool:
    """Whether a database can be asked for it: what is no text (of another encoding), or too large, is nowhere."""
    if isinstance(value, int):
        return abs(value) < 2**63
    return "\0" not in value and value == value.encode(errors="replace").decode()


def written(moment: datetime) -> str:
    """A moment as rows have it: of one width, so that the order of the text is the order of time."""
    # Not by strftime: it writes the year 999 with three digits.
    return moment.astimezone(timezone.utc).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def key_of(store: str, reference: str = "") -> str:
    """What one row of a table is known by; a digest, since names may be too long for a database's index."""
    return hashlib.sha256(f"{store}\0{reference}".encode()).hexdigest()
