"""The captured steps of a rank, beside those of another in the same steps, from the logs of their run."""

from __future__ import annotations

from sftriage.runs.lanes import Title, recorded_of
from sftriage.runs.lateness import HeatSource
from sftriage.traces.manifest import MAX_RECORDED_STEPS, Manifest, RecordedSteps


def steps_beside(source: HeatSource, manifest: Manifest, attempt: int, control: int | None) -> RecordedSteps | None:
    """The captured steps of the rank that was captured, beside those of a control rank; None of what is not on record.

    Without a control, it is the rank that came nearest to the median in these steps.
    """
    capture = manifest.capture
    n_steps = min(capture.steps, MAX_RECORDED_STEPS)
    source.logs.look()
    ranks = source.logs.of(attempt)
    if not ranks:
        return None
    if control is None or control not in ranks or control == capture.rank:
        late = source.lateness(ranks, capture.first_step, n_steps)
        others = late.keys() - {capture.rank, *manifest.trigger.ranks}
        control = min(others, key=lambda rank: (abs(late[rank]), rank), default=None)
    wanted: list[tuple[Title, int | None]] = [("captured", capture.rank), ("control", control)]
    return recorded_of(
        [
            (title, ranks[rank].info, ranks[rank].steps([(capture.first_step, n_steps)])[1].records())
            for title, rank in wanted
            if rank is not None and rank in ranks
        ]
    )


def control_of(manifest: Manifest) -> int | None:
    """The rank that what a trace shows was compared with; None where that was no other rank."""
    found = manifest.findings
    return found.control.rank if found is not None and found.control is not None and found.beside == "rank" else None
