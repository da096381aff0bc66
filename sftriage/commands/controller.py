"""``sftriage controller``: the one that watches a job on many hosts."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from sftriage.commands.job_options import (
    KEEP_STEPS,
    KEEP_STEPS_FOR,
    LOOPBACK,
    CopiesOption,
    DropLocalOption,
    KeepStepsForOption,
    KeepStepsOption,
    MetricsFileOption,
    MetricsHostOption,
    MetricsPerRankOption,
    MetricsPortOption,
    MetricsTokenFileOption,
    OtelOption,
    OtelStepsOption,
    OutOption,
    PoliciesOption,
    copies_of,
    finish,
    kept_steps,
    metering_of,
    say_begun,
    say_summary,
)
from sftriage.commands.options import (
    CatalogueOption,
    CredentialsOption,
    HubOption,
    JobIdOption,
    NatsOption,
    TlsOption,
)
from sftriage.commands.output import notices
from sftriage.errors import UsageError
from sftriage.words.amounts import place


def controller(
    job_id: JobIdOption = None,
    hub: HubOption = None,
    nats: NatsOption = None,
    creds: CredentialsOption = None,
    tls: TlsOption = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="Go on with this run, whose controller has ended before its job."),
    ] = None,
    out: OutOption = None,
    job: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the job, for people.", show_default="the --job-id")
    ] = None,
    policy: PoliciesOption = None,
    store: CopiesOption = None,
    drop_local: DropLocalOption = False,
    catalogue: CatalogueOption = None,
    keep_steps: KeepStepsOption = KEEP_STEPS,
    keep_steps_for: KeepStepsForOption = KEEP_STEPS_FOR,
    metrics_port: MetricsPortOption = None,
    metrics_host: MetricsHostOption = LOOPBACK,
    metrics_token_file: MetricsTokenFileOption = None,
    metrics_file: MetricsFileOption = None,
    metrics_per_rank: MetricsPerRankOption = False,
    otel: OtelOption = False,
    otel_steps: OtelStepsOption = False,
) -> None:
    """Watch a job on many hosts: judge what its agents ship to the hub, and ask them for captures.

    One a job; `sftriage run --hub` starts it by itself. What it finds is in its run directory, as of a job on one host.
    """
    from sftriage.policy.loading import find
    from sftriage.runs.directory import DEFAULT_ROOT
    from sftriage.runtime.controlling import Beginning, JobController, job_of
    from sftriage.runtime.hosting import file_name, free
    from sftriage.runtime.indexing import checked_catalogue
    from sftriage.runtime.local import Keeping
    from sftriage.runtime.many_hosts import HubOptions, start_hub, tidy_hub
    from sftriage.sinks.terminal import Reporter

    options = HubOptions.of(job_of(run) if run is not None and job_id is None else job_id, hub, nats, creds, tls)
    directory = run or out or free(Path(DEFAULT_ROOT) / file_name(options.job_id))
    server = None
    if options.leads_hub:
        # (of a run that is gone on with, the host that it was on may have gone too)
        server = start_hub(options, directory)
        atexit.register(server.close)
        server.keep()
    elif hub is not None and options.leads and not options.secret.exists():
        raise UsageError(
            f"the hub at {options.address.url} is not this job's: give this one a port of its own, by --hub HOST:PORT"
        )
    options.wait_for_secret(0.0)
    metering = metering_of(
        metrics_port, metrics_host, metrics_token_file, metrics_file, metrics_per_rank, otel, otel_steps
    )
    reporter = Reporter(notices())
    beginning = None
    if run is None:
        name = job or options.job_id
        where = copies_of(name, store, drop_local=drop_local)
        keeping = Keeping(None, where, drop_local, None, kept_steps(keep_steps, keep_steps_for))
        beginning = Beginning(name, [find(one) for one in policy or ["default"]], keeping)
    watched = JobController(
        directory,
        options.job_id,
        options.address,
        lambda info: [reporter, *metering.sinks(info.job, info.run_id, time.time())],
        beginning,
        checked_catalogue(catalogue),
    )
    say_begun(reporter, "watching", watched, metering)
    with contextlib.closing(watched):
        try:
            # (whoever ends a job ends its hosts too, in the same moment)
            signal.signal(signal.SIGTERM, lambda *_: watched.end_soon())
            watched.watch()
        except KeyboardInterrupt:
            if server is not None and "SLURM_JOB_ID" in os.environ:
                # (the job is over, though not all of its hosts have said so)
                atexit.register(tidy_hub, options, server)
            reporter.say(f"let go of the job; go on with: sftriage controller --run {place(watched.directory.path)}")
            raise typer.Exit(128 + signal.SIGINT) from None
    if server is not None:
        tidy_hub(options, server)
    say_summary(reporter, watched)
    finish(watched, reporter)
