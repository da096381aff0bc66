"""What filled the suspect stage, beside the same stage of a control rank, as bars of one scale. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sftriage.traces.findings import Findings, StageProfile

WIDTH = 1000.0
PARTS = (("working", "working_s"), ("waiting", "waiting_s"), ("not seen by the profiler", "unseen_s"))


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar. ``x`` and ``width`` are of the drawing."""

    name: str
    number: int
    x: float
    width: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Bar:
    """A rank's stage: what it was captured as, and what filled it."""

    title: str
    rank: int | None
    stage_s: float
    parts: tuple[Part, ...]


def bars_of(findings: Findings | None) -> tuple[Bar, ...]:
    """The bars of a capture's findings, that of the captured rank first; none of none."""
    if findings is None:
        return ()
    beside = "control" if findings.beside == "rank" else "its other steps"
    sides = [("captured", findings.suspect), *([(beside, findings.control)] if findings.control else [])]
    top_s = max(sum(_seconds(side)) for _, side in sides)
    return tuple(Bar(title, side.rank, side.stage_s, _parts(side, top_s)) for title, side in sides)


def _parts(side: StageProfile, top_s: float) -> tuple[Part, ...]:
    parts, x = [], 0.0
    for number, ((name, _), seconds) in enumerate(zip(PARTS, _seconds(side), strict=True)):
        width = seconds / top_s * WIDTH if top_s > 0.0 else 0.0
        parts.append(Part(name, number, round(x, 2), round(width, 2), seconds))
        x += width
    return tuple(parts)


def _seconds(side: StageProfile) -> list[float]:
    """How long each part took; a manifest may say anything, and a width is not below nothing, nor without end."""
    return [min(max(float(getattr(side, field)), 0.0), 1e9) for _, field in PARTS]
