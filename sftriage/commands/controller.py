"""``sftriage controller``: the one that watches a job on many hosts."""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sftriage.commands.job_options import (
    KeepingOptions,
    MetricsOptions,
    OutOption,
    PoliciesOption,
    finish,
    say_begun,
    say_summary,
)
from sftriage.commands.options import CatalogueOption, HubChoice, option
from sftriage.commands.output import notices
from sftriage.errors import UsageError
from sftriage.runs.directory import DEFAULT_ROOT, RunDirectory, read_info
from sftriage.words.amounts import place

if TYPE_CHECKING:
    from sftriage.runtime.controlling import JobController
    from sftriage.runtime.hub_server import HubServer
    from sftriage.runtime.launcher import Notes
    from sftriage.runtime.many_hosts import HubOptions
    from sftriage.sinks.terminal import Reporter

WAITS = "waiting until the job's last controller is gone"


def controller(
    *,
    hub: HubChoice,
    run: Annotated[
        Path | None, option("--run DIR", "Go on with this run, whose controller has ended before its job.")
    ] = None,
    out: OutOption = None,
    job: Annotated[str | None, option("NAME", "Name of the job, for people.", "the --job-id")] = None,
    policy: PoliciesOption = None,
    keep: KeepingOptions,
    catalogue: CatalogueOption = None,
    metrics: MetricsOptions,
    nsys: Annotated[
        bool, option("--nsys", "The ranks run under Nsight Systems: sftriage run --nsys started them.")
    ] = False,
) -> None:
    """Watch a job on many hosts: judge what its agents ship to the hub, and ask them for captures.

    One a job; `sftriage run --hub` starts it by itself. What it finds is in its run directory, as of a job on one host.
    """
    from sftriage.base.children import LET_GO
    from sftriage.runtime.launcher import Notes

    # (what is sent to the job, as before it is preempted, this one is not to die of)
    notes = Notes((signal.SIGINT, signal.SIGTERM, LET_GO))
    from sftriage.policy.loading import find
    from sftriage.recorder.layout import bounded_text
    from sftriage.runtime.controlling import Beginning, JobController, job_of
    from sftriage.runtime.hosting import file_name, free
    from sftriage.runtime.indexing import checked_catalogue
    from sftriage.runtime.many_hosts import forget_hub
    from sftriage.sinks.terminal import Reporter

    options = hub.options(job_of(run) if run is not None and hub.job_id is None else None)
    directory = run or out or Path(DEFAULT_ROOT) / file_name(options.job_id)
    if not (run or out):
        directory = free(directory)
    reporter, held = Reporter(notices()), ExitStack()
    atexit.register(held.close)
    server = None
    if options.leads_hub:
        server = hub_of(options, directory, held, goes_on=run is not None)
    elif hub.hub is not None and options.leads and not options.secret.exists():
        raise UsageError(
            f"the hub at {options.address.url} is not this job's: give this one a port of its own, by --hub HOST:PORT"
        )
    options.wait_for_secret(0.0)
    metering = metrics.metering()
    beginning = None
    if run is None:
        name = bounded_text(job or options.job_id)
        beginning = Beginning(name, [find(one) for one in policy or ["default"]], keep.of(name), nsys)
    waits = contextlib.nullcontext() if run is None else notices().status(WAITS)
    with waits:
        watched = JobController(
            directory,
            options.job_id,
            options.address,
            lambda info: [reporter, *metering.sinks(info.job, info.run_id, time.time())],
            beginning,
            checked_catalogue(catalogue),
        )
    say_begun(reporter, "watching" if run is None else "took over the job, watching", watched, metering)
    watch(watched, reporter, options, server, notes)
    if server is not None:
        # (whoever started the job would have, and is gone)
        held.close()
        forget_hub(options, server)


def hub_of(options: HubOptions, directory: Path, held: ExitStack, *, goes_on: bool) -> HubServer:
    """Start the job's hub on this host; where a run is gone on with, whose host may have gone too, also its agents."""
    from sftriage.runtime.hosting import Copies
    from sftriage.runtime.many_hosts import start_agents, start_hub

    server = start_hub(options, directory)
    held.callback(server.close)
    server.keep()
    if goes_on:
        info = read_info(RunDirectory(directory))
        held.enter_context(start_agents(options, Copies(info.store, info.drop_local)))
    return server


def watch(
    watched: JobController, reporter: Reporter, options: HubOptions, server: HubServer | None, notes: Notes
) -> None:
    """Watch the job until it ends, or until somebody ends this; ``server`` is its hub, where that is ours.

    Raises:
        typer.Exit: by Ctrl-C, and the job goes on.
    """
    from sftriage.runtime.many_hosts import forget_hub

    with contextlib.closing(watched):
        if not watched.watch(reporter.say, lambda: notes.told):
            if server is not None and "SLURM_JOB_ID" in os.environ:
                # (the job is over, though not all of its hosts have said so)
                atexit.register(forget_hub, options, server)
            again = shlex.join(["--run", place(watched.directory.path), *options.arguments()])
            reporter.say(f"let go of the job, which goes on; take it over again by: sftriage controller {again}")
            raise typer.Exit(128 + signal.SIGINT)
    say_summary(reporter, watched)
    finish(watched, reporter)
