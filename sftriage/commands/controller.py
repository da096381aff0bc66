"""``sftriage controller`` and ``kube controller``: watch a job on many hosts."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shlex
import shutil
import signal
import socket
from contextlib import ExitStack
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sftriage.commands import options as shared
from sftriage.commands.options import option
from sftriage.commands.output import JobOutput, notices
from sftriage.errors import UsageError
from sftriage.fleet.hub import PORT
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


SHOWN_S = 10.0
"""Time to write the final state into the cluster."""
KEPT_RUNS = 3
"""The runs of a job that keep their steps."""


def of_cluster(
    job_id: Annotated[str, option("--job-id NAMESPACE/SYSTEM/NAME", "The job, as in the annotation of its pods.")],
    policies: Annotated[Path, option("DIR", "Directory of policies; changes take effect.")],
    run: Annotated[Path, option("DIR", "Directory for the job's runs and its hub's files.")],
    creds: Annotated[
        Path, option("FILE", "USER:PASSWORD of its hub, or credentials for --nats, as for sftriage controller.")
    ],
    nats: shared.NatsOption = None,
    port: int = option("N", "Port of the job's hub.", min=1, max=65535, default=PORT),
    tls: shared.TlsOption = None,
    metrics_port: shared.MetricsPortOption = None,
    *,
    keep: shared.KeepingOptions,
) -> None:
    """Watch one job of a cluster: run its hub and its controller, and show its state in the cluster.

    The operator starts one for each job. Captures become TraceCaptures, the state of the job its TriageReport;
    TraceCaptures that people create are carried out. When the job ends, this waits for the next job of that name,
    until SIGTERM. It resumes a run in --run that had not ended. With --nats it uses that server in place of a hub of
    its own. Metrics are served only if $SFTRIAGE_METRICS_TOKEN is set.
    """
    from sftriage.kube.client import ClusterObjects
    from sftriage.kube.jobs import JobRef
    from sftriage.kube.mirror import Mirror
    from sftriage.runtime.controlling import JobController
    from sftriage.runtime.hub_server import HubOptions, HubServer
    from sftriage.runtime.launcher import Notes
    from sftriage.sinks.metering import Metering

    job = shared.parsed("--job-id", JobRef.of_id, job_id)
    name = f"{job.namespace}/{job.name}"  # (two namespaces may have jobs of the same name, and share a store)
    keeping = keep.of(name)
    logging.getLogger("sftriage.kube").setLevel(logging.INFO)
    mirror = Mirror(ClusterObjects.connect(), job)
    notes = Notes()  # (a signal to this pod does not end the job)
    everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    shown = metrics_port if os.environ.get(shared.TOKEN_VARIABLE) else None
    listen = None if shown is None else partial(shared.metrics_endpoint, everywhere, shown, None)
    with ExitStack() as held:
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        if nats is None:
            server = HubServer((everywhere, port), (run / "hub").absolute(), creds, tls)
            server.keep()
            held.callback(server.close)
            nats = f"{'nats' if tls is None else 'tls'}://127.0.0.1:{port}"
        options = HubOptions(job_id, nats=nats, credentials=creds, tls=tls)
        mirror.begin()
        while notes.last_signal is None:
            # (each run of the job has metrics of its own)
            output = JobOutput(Metering(listen), mirror, why=job.fetch_command)
            directory, resumes = _directory(run)
            job_name = None if resumes else name
            watched = JobController(directory, options, output.sinks, job_name, policies=[policies], keeping=keeping)
            mirror.follow(watched.directory)
            output.say_begun("took over the job" if resumes else "waiting for the job", watched)
            with contextlib.closing(watched):
                if not watched.watch(output.say, lambda: notes.last_signal):
                    break
            output.finish(watched)
        mirror.finish(SHOWN_S)


def _directory(root: Path) -> tuple[Path, bool]:
    """The directory of the run that has not ended, or of a new one; and whether to resume it.

    Removes the steps of all but the last few runs, so that a job that restarts often does not fill its volume.
    """
    from sftriage.runtime.hosting import free, numbered

    found = list(takewhile(Path.exists, numbered(root / "run")))
    for old in found[:-KEPT_RUNS]:
        shutil.rmtree(RunDirectory(old).steps, ignore_errors=True)
    if found and RunDirectory(found[-1]).hub.exists() and not read_info(RunDirectory(found[-1])).ended_at:
        return found[-1], True
    return free(root / "run"), False
