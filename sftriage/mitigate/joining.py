"""How the ranks of a group come to share the file that a remedy is switched on by. Runs in the trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sftriage.errors import RingError
from sftriage.mitigate.switching import Switch, make_switch
from sftriage.recorder.log import warn
from sftriage.recorder.monitor import RINGS_ENV


def joined(refusal: str, group: dist.ProcessGroup | None, *, fits: bool, microbatches: int = 0) -> Switch | None:
    """This rank's end of a new file of the group; None where sftriage does not watch the job. On all ranks at once.

    None, and ``refusal`` a warning, where the remedy ``fits`` a rank not, or ranks are on several hosts.
    """
    group = group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    place = ranks.index(dist.get_rank())
    directory = os.environ.get(RINGS_ENV)
    made: list[Any] = [_made(directory, ranks, microbatches) if directory and fits and place == 0 else None]
    dist.broadcast_object_list(made, ranks[0], group=group)
    switch = _opened(directory, made[0], place) if made[0] is not None and fits else None
    has_R: list[Any] = [None] * len(ranks)
    dist.all_gather_object(has_R, switch is not None, group=group)
    if switch is None or not all(has_R):
        if directory and place == 0:
            warn(refusal)
        return None
    return switch


def _made(directory: str, ranks: list[int], microbatches: int) -> str | None:
    try:
        return make_switch(Path(directory), ranks, microbatches).name
    except (OSError, RingError) as error:
        warn("no straggler can be named from outside: %s", error)
        return None


def _opened(directory: str | None, name: str, place: int) -> Switch | None:
    try:
        return Switch(Path(directory) / name, place) if directory else None
    except (OSError, RingError):
        return None
