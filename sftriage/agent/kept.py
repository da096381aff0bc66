"""Steps of a running job that are held no longer, from the logs that they were kept in."""

from __future__ import annotations

from collections.abc import Mapping

from sftriage.errors import RingError
from sftriage.recorder import RingInfo, StepLog
from sftriage.recorder.layout import STEP
from sftriage.records import Window
from sftriage.windows.gather import Gatherer, Shape
from sftriage.windows.rows import slots_of, together

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
            newest_BW = slots_of(log.last(1), info)
            back = int(newest_BW[-1, STEP]) - first_step + 1 if len(newest_BW) else 0
            if not 0 < back <= MAX_STEPS_BACK:
                continue
            slots_BW = slots_of(log.last(back), info)
        except RingError:
            continue
        wanted_B = (slots_BW[:, STEP] >= first_step) & (slots_BW[:, STEP] <= last_step)
        found.append((rank, slots_BW[wanted_B]))
    rows = together(found) if any(len(slots_BW) for _, slots_BW in found) else None
    if rows is None:
        return None
    n_steps = last_step - first_step + 1
    gatherer = Gatherer(info.schema, info.world_size, Shape(n_steps, n_steps, 0), attempt=info.attempt)
    gatherer.add(*rows)
    return next(iter(gatherer.ready(ended=True)), None)
