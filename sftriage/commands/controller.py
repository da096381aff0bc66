"""``sftriage controller``: watch a job on many hosts."""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sftriage.commands import options as shared
from sftriage.commands.options import option
from sftriage.commands.output import JobOutput, notices
from sftriage.errors import UsageError
from sftriage.runs.directory import DEFAULT_ROOT, RunDirectory, read_info
from sftriage.words.verdicts import place

if TYPE_CHECKING:
    from sftriage.runtime.controlling import JobController
    from sftriage.runtime.hub_server import HubOptions, HubServer
    from sftriage.runtime.launcher import Notes

WAITS = "waiting for the job's previous controller to exit"


def controller(
    *,
    hub: shared.HubChoice,
    run: Path | None = option("--run DIR", "Resume this run, whose controller ended before its job."),
    out: shared.OutOption = None,
    job: str | None = option("NAME", "Display name of the job.", "the --job-id"),
    policy: shared.PoliciesOption = None,
    keep: shared.KeepingOptions,
    catalogue: shared.CatalogueOption = None,
    metrics: shared.MetricsOptions,
    nsys: bool = option("--nsys", "The ranks run under Nsight Systems, started by sftriage run --nsys."),
) -> None:
    """Watch a job on many hosts: judge the steps that its agents send to the hub, and order captures.

    Each job has one; `sftriage run --hub` starts it. Its findings are in a run directory, as for a job on one host.
    """
    from sftriage.base.process import LET_GO
    from sftriage.runtime.launcher import Notes

    # (signals to the job, such as before a preemption, do not end this process)
    notes = Notes((signal.SIGINT, signal.SIGTERM, LET_GO))
    from sftriage.policy.in_force import find
    from sftriage.runtime.controlling import JobController, job_of
    from sftriage.runtime.copies import checked_catalogue
    from sftriage.runtime.hosting import file_name, free
    from sftriage.runtime.many_hosts import start_agents
    from sftriage.trainer.layout import bounded_text

    options = hub.options(job_of(run) if run is not None and hub.job_id is None else None)
    directory = run or out or free(Path(DEFAULT_ROOT) / file_name(options.job_id))
    held, server = ExitStack(), None
    atexit.register(held.close)
    if options.leads_hub:
        server = options.start(directory)
        held.callback(server.close)
        server.keep()
        if run is not None:
            # (if the whole host of the run's controller failed, its agents failed too)
            info = read_info(RunDirectory(directory))
            held.enter_context(start_agents(options, info.store, drop_local=info.drop_local))
    elif hub.hub is not None and options.leads and not options.secret.exists():
        raise UsageError(
            f"the hub at {options.address.url} belongs to another job; choose another port with --hub HOST:PORT"
        )
    options.wait_for_secret(0.0)
    output = JobOutput(metrics.metering(), catalogue=checked_catalogue(catalogue))
    begin: dict[str, Any] = {}
    if run is None:
        name = bounded_text(job or options.job_id)
        paths = [find(file) for file in policy or ["default"]]
        begin = {"job": name, "policies": paths, "keeping": keep.of(name), "nsys": nsys}
    about = directory, options, output.sinks
    with contextlib.nullcontext() if run is None else notices().status(WAITS):
        watched = JobController(*about, **begin)
    output.say_begun("watching" if run is None else "took over the job, watching", watched)
    _watch(watched, output, options, server, notes)
    if server is not None:
        # (the process that started the job would do this, but it has ended)
        held.close()
        options.forget(server)


def _watch(
    watched: JobController, output: JobOutput, options: HubOptions, server: HubServer | None, notes: Notes
) -> None:
    with contextlib.closing(watched):
        to_its_end = watched.watch(output.say, lambda: notes.last_signal)
        if not to_its_end:
            if server is not None and "SLURM_JOB_ID" in os.environ:
                # (the job has ended, but not all hosts have reported it)
                atexit.register(options.forget, server)
            again = shlex.join(["--run", place(watched.directory.path), *options.arguments()])
            output.say(f"stopped watching, the job continues; resume with: sftriage controller {again}")
    if not to_its_end:
        output.end()
        raise typer.Exit(128 + signal.SIGINT)
    output.finish(watched)
