"""What a run directory keeps, and what became of it while it could not be written, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sftriage.words.amounts import lasted, span

if TYPE_CHECKING:
    from sftriage.model.events import DiskRecovered, JobPaused, RingGivenUp


def thinning(whole_from_step: int, first_step: int, block_steps: int, period_steps: int) -> str:
    """What is no longer there of a run's steps: those before one are thinned, and those before another have gone."""
    gone = f" Of those before {first_step:,} none are." if first_step else ""
    of = f"the first {block_steps} of every {period_steps:,}"
    return f"Of the steps before {whole_from_step:,}, {of} are kept, and those around captures.{gone}"


def triage_off(problem: str) -> str:
    """That nothing is judged or captured now, and why."""
    return f"Triage is off: {problem}. It is tried again; training goes on. See failures.log in the run directory."


def pause_sentence(event: JobPaused) -> str:
    """That the job paused, for how long, when and where."""
    steps = span(event.first_step, event.last_step)
    return f"The job paused for {lasted(event.lasted_s)} in {steps} (all ranks, in {event.stage})."


def compacted_sentence(windows: int, last_step: int) -> str:
    """Which windows went from a journal that has reached its bound."""
    return f"The journal is bounded: {windows:,} windows up to step {last_step:,} that led to no capture are gone."


def ring_sentence(event: RingGivenUp) -> str:
    """Which rank counts as missing, and why."""
    return f"Rank {event.rank} counts as missing: what it records cannot be read ({event.reason})."


def disk_now(problem: str) -> str:
    """That the run directory takes nothing now."""
    return (
        f"The run directory cannot be written ({problem}). What is judged meanwhile waits in memory, and is on record "
        "once it can."
    )


def disk_failed_sentence(problem: str) -> str:
    """That the run directory takes nothing any more."""
    return f"{disk_now(problem)} Training goes on."


def disk_sentence(seen: DiskRecovered) -> str:
    """That the run directory takes what it is given again, or has not done so to the end, and what that has cost."""
    lasted = f"{max(0.0, seen.time_s - seen.since_s):.0f} s"
    begin = f"can be written again after {lasted}" if seen.over else f"could not be written in the run's last {lasted}"
    late = f" Written late: {_amounts(seen.late, None)}." if seen.late else ""
    lost = f"Lost: {_amounts(seen.lost, seen.lost_steps)}." if seen.lost else "Nothing is lost."
    return f"The run directory {begin} ({seen.problem}).{late} {lost}"


def _amounts(amounts: Mapping[str, int], steps: tuple[int, int] | None) -> str:
    of = {"windows": f" (of steps {steps[0]} to {steps[1]})"} if steps is not None else {}
    named = {kind: kind if n != 1 else kind.removesuffix("s") for kind, n in amounts.items()}
    return ", ".join(f"{amounts[kind]:,} {name}{of.get(kind, '')}" for kind, name in sorted(named.items()))
