"""Steps of a running job that are held no longer, from the logs that they were kept in."""

from __future__ import annotations

from collections.abc import Mapping

from sftriage.errors import RingError
from sftriage.recorder import RingInfo, StepLog
from sftriage.records import Window
from sftriage.windows.decoding import decode, together
from sftriage.windows.gather import Gatherer, Shape

MAX_STEPS_BACK = 20_000
"""Steps that are further back than this are not looked for: by then they are of no capture that has just ended."""


def kept_steps(info: RingInfo, logs: Mapping[int, StepLog], first_step: int, last_step: int) -> Window | None:
    """Some steps of a job's ranks on this host, by the host's clock; None where no log has any of them.

    Args:
        info: the ring of any of the ranks.
        logs: the log of each rank.
        first_step: the first of the steps.
        last_step: the last one.
    """
    found = []
    for rank, log in logs.items():
        try:
            newest = decode([(rank, log.last(1))], info.schema)
            back = int(newest.step_B[-1]) - first_step + 1 if len(newest) else 0
            if not 0 < back <= MAX_STEPS_BACK:
                continue
            steps = decode([(rank, log.last(back))], info.schema)
        except RingError:
            continue
        found.append(steps[(steps.step_B >= first_step) & (steps.step_B <= last_step)])
    if not any(map(len, found)):
        return None
    n_steps = last_step - first_step + 1
    gatherer = Gatherer(info.schema, info.world_size, Shape(n_steps, n_steps, 0), attempt=info.attempt)
    gatherer.add(together(found))
    return next(iter(gatherer.ready(ended=True)), None)
