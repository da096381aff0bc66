"""What a verdict and its suspects are in words. The same ones everywhere: on a terminal, in a manifest, on a page."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from sftriage.records import Suspect, Verdict

REASONS: Mapping[str, str] = {
    "co_critical": "several ranks are late together, so mending one alone would save little",
    "sync_ambiguous": "the excess is inside a sync stage, where all ranks look alike",
    "roaming": "the rank that comes last changes from step to step",
    "low_coverage": "steps of some ranks are missing",
    "no_baseline": "all ranks became slower alike, before the job's normal step was known",
    "intermittent": "the suspect is there, but in few steps of the window, and in no order",
    "mixed_roles": "the ranks do different work, and no cohorts are declared",
    "clock_limited": "the ranks run on devices, and on the host's clock a wait for a device shows in any stage",
    "self_inflicted": "a capture was running",
}

CLOCKS: Mapping[str, str] = {"host": "", "device": "by the devices' clock"}
"""Which clock a verdict stands on, where that has to be said."""

STALLS: Mapping[str, str] = {
    "not_arrived": "the others wait for ranks that have not arrived",
    "died": "the others wait for ranks whose process has ended",
    "left_early": "the others wait for ranks that have stopped recording",
    "in_sync": "every rank is inside the same sync stage, where all of them look alike",
    "no_rank_waits": "no rank waits in a sync stage, and these have got least far",
    "outside_steps": "no rank is in a step",
    "unseen_ranks": "some ranks show nothing",
}
"""Why a job stands still; where ranks are named, they follow."""


def who(suspect: Suspect) -> str:
    """A suspect's scope."""
    if suspect.scope == "rank":
        return f"rank {suspect.ranks[0]}"
    if suspect.scope == "host":
        return f"host {suspect.host} ({len(suspect.ranks)} ranks)"
    return f"cohort {suspect.cohort} ({len(suspect.ranks)} ranks)" if suspect.scope == "cohort" else "every rank"


def when(suspect: Suspect) -> str:
    """Since when a suspect has been there, and whether it comes back."""
    since = "" if suspect.onset_step is None else f" since step {suspect.onset_step}"
    if suspect.pattern == "recurring":
        return f"recurring {every(suspect.period_steps) if suspect.period_steps else 'again and again'}{since}"
    if suspect.pattern == "one-off":
        return f"one-off{since.replace('since', 'from')}, and has passed"
    return f"chronic{since}"


def every(period_steps: int) -> str:
    """How often something comes back."""
    return "every second step" if period_steps == 2 else f"every {period_steps} steps"


def where(suspect: Suspect) -> str:
    """A suspect's stage."""
    return suspect.stage or "all its local stages"


CONTROL_PART = "healthy, captured in the same steps to compare the suspect with"
"""What the capture of a control is."""


def stage_suspected(label: str, stage: str | None) -> str:
    """The stage that led to a capture, by what triggered it; "" where a person asked, and nothing was suspected."""
    return stage or ("" if label == "asked" else "all local stages")


def verdict_sentence(verdict: Verdict) -> str:
    """The verdict in one sentence, with its clock where that is not the host's."""
    sentence, clock = _sentence(verdict), CLOCKS[verdict.clock]
    return f"{sentence[:-1]}, {clock}." if clock else sentence


def _sentence(verdict: Verdict) -> str:
    steps = f"steps {verdict.first_step} to {verdict.last_step}"
    if verdict.label == "healthy":
        return f"Healthy: nothing stands out in {steps} ({milliseconds(verdict.exposed_s)} a step)."
    if verdict.label == "suspect":
        suspect = verdict.suspects[0]
        if suspect.pattern == "recurring" and suspect.period_steps:
            return (
                f"{who(suspect).capitalize()} is slow in {where(suspect)} {every(suspect.period_steps)} since "
                f"step {suspect.onset_step}: it costs the job {milliseconds(suspect.gain_s)} ({suspect.share:.0%}) "
                f"of such a step; {steps}."
            )
        # The gain is that of the steps it fills, and they are longer than the window's others.
        step_s = suspect.gain_s / suspect.share if suspect.share > 0.0 else verdict.exposed_s
        return (
            f"{who(suspect).capitalize()} is slow in {where(suspect)}: it costs the job {milliseconds(suspect.gain_s)} "
            f"of each {milliseconds(step_s)} step ({suspect.share:.0%}), "
            f"in {suspect.persistence:.0%} of {steps}; {when(suspect)}."
        )
    if verdict.label == "stalled":
        return stall_sentence(verdict)
    reasons = "; ".join(REASONS.get(reason, reason) for reason in verdict.reasons)
    return f"Held: {', '.join(verdict.reasons)} in {steps}: {reasons}."


def stall_sentence(verdict: Verdict) -> str:
    """A stall in one sentence: since when, and who has not arrived, or why nobody is named."""
    still_s = verdict.numbers.get("still_s", verdict.exposed_s)
    step = "between steps" if "outside_steps" in verdict.reasons else f"in step {verdict.first_step}"
    typical_s = verdict.numbers.get("typical_step_s", 0.0)
    usual = f" (a step takes {milliseconds(typical_s)})" if typical_s else ""
    why = "; ".join(STALLS.get(reason, reason) for reason in verdict.reasons)
    who_where = ", ".join(f"{_missing(suspect)} in {where(suspect)}" for suspect in verdict.suspects)
    more = verdict.numbers.get("missing_ranks", 0.0) - sum(len(suspect.ranks) for suspect in verdict.suspects)
    if more > 0:
        who_where += f" and {more:.0f} more"
    return f"Stalled: no rank has moved for {still_s:.0f} s {step}{usual}; {why}{who_where and ': '}{who_where}."


def _missing(suspect: Suspect) -> str:
    ranks = ", ".join(map(str, suspect.ranks))
    if suspect.scope == "host":
        return f"host {suspect.host} (ranks {ranks})"
    return f"rank {ranks}" if suspect.scope == "rank" else "every rank"


def milliseconds(seconds: float) -> str:
    """A duration as people say it here."""
    return f"{seconds * 1e3:.1f} ms"


def size(size_bytes: float) -> str:
    """A file's size, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"


def place(path: Path) -> str:
    """A path as one would type it here: relative where that is shorter."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def moment(time_s: float) -> datetime:
    """Seconds since the epoch as a date, in UTC."""
    try:
        return datetime.fromtimestamp(time_s, timezone.utc)
    except (OverflowError, OSError, ValueError):
        return datetime.fromtimestamp(0, timezone.utc)


def clock_time(time_s: float) -> str:
    """The date and time of day, in UTC."""
    return f"{moment(time_s):%Y-%m-%d %H:%M:%S}"


def ago(time_s: float, now_s: float) -> str:
    """How long ago something was."""
    passed = max(0.0, now_s - time_s)
    for unit, seconds in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if passed >= 2 * seconds:
            return f"{passed / seconds:.0f} {unit} ago"
    return f"{passed:.0f} s ago"
