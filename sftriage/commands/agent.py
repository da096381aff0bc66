"""``sftriage agent``: one host of a job on many, beside trainers that somebody else starts."""

from __future__ import annotations

import os
import signal
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from sftriage.commands.job_options import DropLocalOption, copies_of
from sftriage.commands.options import HubChoice, option
from sftriage.errors import UsageError

GRACE_S = 3.0
"""How long trainers that are told to end together with their agent may take to do so."""


def agent(
    *,
    hub: HubChoice,
    rings: Annotated[Path | None, option("DIR", "Where the trainers' rings are.", "$SFTRIAGE_RINGS")] = None,
    directory: Annotated[Path | None, option("DIR", "For what is this host's own.", "one under sftriage-runs")] = None,
    name: Annotated[
        str | None, option("NAME", "Of this host, among those of the job.", "its own, and $NODE_RANK")
    ] = None,
    job: Annotated[str | None, option("NAME", "Name of the job, for people.", "the --job-id")] = None,
    store: Annotated[
        str | None,
        option(
            "--store URL",
            "Upload this host's captures from here, to the --store of the job's controller. Credentials come from "
            "the environment.",
            "they go through the hub",
        ),
    ] = None,
    drop_local: DropLocalOption = False,
) -> None:
    """Watch one host of a job on many: ship its steps to the job's hub, and carry out the captures asked of its ranks.

    It ends once the host's trainers have come and gone for good, or by SIGTERM or Ctrl-C; the job itself notices
    nothing.
    """
    from sftriage.runtime.launcher import Notes

    # (what is sent to the job, as before it is preempted, this one is not to die of)
    notes = Notes()
    from sftriage.runtime.hosting import HURRY_S, LEAVE_S, AgentHost, Copies, host_directory, host_name, left_behind
    from sftriage.runtime.rings import tidy_rings

    options = hub.options()
    if rings is None and (said := os.environ.get("SFTRIAGE_RINGS")):
        rings = Path(said)
    if rings is None and directory is None:
        # Where `sftriage run` has ended before its job, it has left word of them.
        for found, left in islice(left_behind(options.job_id), 1):
            directory, rings, name, job = found, Path(left.rings), left.name, job or left.job
    if rings is None:
        raise UsageError("where are the rings? give --rings DIR, or set SFTRIAGE_RINGS as for the trainers")
    copies = Copies(copies_of(job or options.job_id, store, drop_local=drop_local), drop_local)
    options.wait_for_secret(over=lambda: notes.told is not None)
    if notes.told is not None:
        raise typer.Exit(128 + signal.SIGINT)
    name = name or host_name(os.environ)
    where = directory or host_directory(options.job_id, name, os.environ)
    about = job or options.job_id, options.job_id, options.address, name, copies
    host = AgentHost(rings, where.absolute(), *about)
    host.start()
    told = over = False
    try:
        told = not host.watch(lambda: notes.told is not None)
        # (whoever ends a job ends its trainers too, in the same moment)
        over = host.finish() if not told else host.left_within(GRACE_S) and host.finish(LEAVE_S + HURRY_S, says=False)
    finally:
        host.close()
        if over:
            tidy_rings(rings)
    if told and not over:
        raise typer.Exit(128 + signal.SIGINT)
