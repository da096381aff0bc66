"""The captured steps of a rank, beside those of another in the same steps, from the logs of their run."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from sftriage.runs.lanes import Title, recorded_of
from sftriage.runs.lateness import HeatSource
from sftriage.traces.manifest import MAX_RECORDED_STEPS, Manifest, RecordedSteps
from sftriage.verdicts.system import system_counts
from sftriage.windows.logs import StepLogs, counted_steps

PEERS_LOOKED_AT = 128
"""Of so many ranks at most the one in the middle is looked for: those of a large job take seconds to read."""
STEPS_COUNTED, PEERS_COUNTED = 200, 32
"""At most so many steps up to the end of a capture, and of so many peers, are looked at for what the kernel counted."""


def peers_of(manifest: Manifest, ranks: Collection[int], number: int) -> list[int]:
    """So many ranks at most that neither were captured nor were suspects, spread evenly over the job."""
    peers = [rank for rank in ranks if rank not in (manifest.capture.rank, *manifest.trigger.ranks)]
    return peers[:: max(1, -(-len(peers) // number))]


def steps_beside(source: HeatSource, manifest: Manifest, attempt: int, control: int | None) -> RecordedSteps | None:
    """The captured steps of the rank that was captured, beside those of a control rank; None of what is not on record.

    Without a control, it is the rank that came nearest to the median in these steps, of some of a large job.
    """
    capture = manifest.capture
    n_steps = min(capture.steps, MAX_RECORDED_STEPS)
    source.logs.look()
    ranks = sorted(source.logs.attempts.get(attempt, ()))
    if not ranks:
        return None
    if control is None or control == capture.rank or not source.logs.of(attempt, [control]):
        peers = source.logs.of(attempt, peers_of(manifest, ranks, PEERS_LOOKED_AT))
        late = source.lateness(peers, capture.first_step, n_steps) if peers else {}
        control = min(late, key=lambda rank: (abs(late[rank]), rank), default=None)
    wanted: list[tuple[Title, int | None]] = [("captured", capture.rank), ("control", control)]
    files = source.logs.of(attempt, [rank for _, rank in wanted if rank is not None])
    return recorded_of(
        [
            (title, files[rank].info, files[rank].steps([(capture.first_step, n_steps)])[1].records())
            for title, rank in wanted
            if rank is not None and rank in files
        ]
    )


def counted_beside(source: HeatSource, manifest: Manifest, attempt: int) -> dict[str, float] | None:
    """What the kernel counted of the captured rank over its peers', a step; None where that is not known.

    A few captured steps are soon over, and counters are read a few times a second: the steps that led to the capture
    count with them.
    """
    capture, why = manifest.capture, manifest.trigger
    first = min(capture.first_step, why.window.first_step if why.label == "suspect" else capture.first_step)
    first = max(first, why.onset_step or 0, capture.last_step - STEPS_COUNTED + 1)
    source.logs.look()
    peers = peers_of(manifest, sorted(source.logs.attempts.get(attempt, ())), PEERS_COUNTED)
    files = source.logs.of(attempt, [capture.rank, *peers])
    if capture.rank not in files or len(files) == 1:
        return None
    ranks = [capture.rank, *(rank for rank in files if rank != capture.rank)]
    window = counted_steps(source.logs, attempt, ranks, min(first, capture.first_step), capture.last_step)
    found = None if window is None else system_counts(window, [0], np.ones(len(window.durations_NRS), dtype=np.bool_))
    return None if found is None else dict(found.over)


def captured_steps(logs: StepLogs, manifest: Manifest, attempt: int) -> dict[int, dict[str, float]]:
    """What each stage of each captured step took, in seconds, by the step's number; of those that are on record."""
    capture = manifest.capture
    logs.look()
    file = logs.of(attempt, [capture.rank]).get(capture.rank)
    if file is None:
        return {}
    stages = file.info.schema.stages
    records = file.steps([(capture.first_step, capture.steps)])[1].records()
    return {one.step: {name: ns * 1e-9 for name, ns in zip(stages, one.durations_ns, strict=True)} for one in records}


def control_of(manifest: Manifest) -> int | None:
    """The rank that what a trace shows was compared with; None where that was no other rank."""
    found = manifest.findings
    return found.control.rank if found is not None and found.control is not None and found.beside == "rank" else None
