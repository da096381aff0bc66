"""What a verdict, a decision or a capture is in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sftriage.records import Suspect, Verdict

REASONS: Mapping[str, str] = {
    "co_critical": "several ranks are late together, so mending one alone would save little",
    "sync_ambiguous": "the excess is inside a sync stage, where all ranks look alike",
    "roaming": "the rank that comes last changes from step to step",
    "low_coverage": "steps of some ranks are missing",
    "no_baseline": "all ranks became slower alike, before the job's normal step was known",
    "intermittent": "the suspect is there, but not yet in most steps of the window",
    "self_inflicted": "a capture was running",
}


def who(suspect: Suspect) -> str:
    """A suspect's scope."""
    return f"rank {suspect.rank}" if suspect.scope == "rank" else "every rank"


def where(suspect: Suspect) -> str:
    """A suspect's stage."""
    return suspect.stage or "all its local stages"


def verdict_sentence(verdict: Verdict) -> str:
    """The verdict in one sentence."""
    steps = f"steps {verdict.first_step} to {verdict.last_step}"
    if verdict.label == "healthy":
        return f"Healthy: nothing stands out in {steps} ({milliseconds(verdict.exposed_s)} a step)."
    if verdict.label == "suspect":
        suspect = verdict.suspects[0]
        return (
            f"{who(suspect).capitalize()} is slow in {where(suspect)}: it costs the job {milliseconds(suspect.gain_s)} "
            f"of each {milliseconds(verdict.exposed_s)} step ({suspect.share:.0%}), "
            f"in {suspect.persistence:.0%} of {steps}."
        )
    reasons = "; ".join(REASONS.get(reason, reason) for reason in verdict.reasons)
    return f"Held: {', '.join(verdict.reasons)} in {steps}: {reasons}."


def milliseconds(seconds: float) -> str:
    """A duration as people say it here."""
    return f"{seconds * 1e3:.1f} ms"


def place(path: Path) -> str:
    """A path as one would type it here: relative where that is shorter."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def size(size_bytes: float) -> str:
    """A file's size, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"
