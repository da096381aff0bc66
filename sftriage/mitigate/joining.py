"""How the ranks of a group come to share the files that a remedy is switched on by. Runs in the trainer."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from sftriage import __version__
from sftriage.base.process import BOOT_ID
from sftriage.errors import RingError
from sftriage.log import warn
from sftriage.mitigate.switching import MultiHostSwitch, Switch, make_switch
from sftriage.recorder.monitor import RINGS_ENV

T = TypeVar("T")


def joined(
    as_before: str,
    wants: str,
    group: dist.ProcessGroup | None,
    *,
    fits: bool,
    microbatches: int = 0,
    multi_host: bool = False,
) -> Switch | None:
    """This rank's end of a new file of the group; None where sftriage does not watch the job. On all ranks at once.

    Each host of the group has a file of its own, of the ranks there; those share it that have one directory of rings.
    None on all ranks, with a warning that says what is ``as_before`` and what the remedy ``wants``, where a rank does
    not fit (``fits``), ranks are on several hosts and it does not work across these, a host has no file, or releases of
    sftriage differ.
    """
    group = group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    place = ranks.index(dist.get_rank())
    rings = Path(os.environ[RINGS_ENV]) if os.environ.get(RINGS_ENV) else None
    mine = _unless_refused(partial(_identity, rings)) if rings is not None and fits else None
    # (so that a group that has begun anew is another one on all of its hosts, with another name)
    everything = _gathered((__version__, rings is not None, mine, secrets.token_hex(8)), group)
    release_R, watched_R, host_R, token_R = zip(*everything, strict=True)
    switch, is_multi_host = None, len(set(host_R)) > 1
    if len(set(release_R)) > 1:
        wants = f"their ranks have releases of sftriage that do not go together: {', '.join(sorted(set(release_R)))}"
    elif rings is not None and None not in host_R and (multi_host or not is_multi_host):
        here = [at for at, host in enumerate(host_R) if host == mine]
        parts: dict[str, Any] = {"group": f"ranks-{ranks[0]}.{token_R[0]}", "here": here} if is_multi_host else {}
        make = partial(make_switch, rings, ranks, microbatches, **parts)
        name = _gathered(made.name if place == here[0] and (made := _unless_refused(make)) else "", group)[here[0]]
        kind = MultiHostSwitch if is_multi_host else Switch
        switch = _unless_refused(partial(kind, rings / name, place)) if name else None
    if not all(_gathered(switch is not None, group)):
        if True in watched_R and place == watched_R.index(True):
            warn("%s: %s", as_before, wants)
        return None
    return switch


def _gathered(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    said_R: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said_R, mine, group=group)
    return said_R


def _identity(rings: Path) -> tuple[str, int, int]:
    found = rings.stat()
    boot_id = BOOT_ID.read_text(encoding="ascii") if BOOT_ID.exists() else socket.gethostname()
    return boot_id, found.st_dev, found.st_ino


def _unless_refused(what: Callable[[], T]) -> T | None:
    try:
        return what()
    except (OSError, RingError) as error:
        warn("no straggler can be named from outside: %s", error)
        return None
