"""``sftriage attach``: take over the triage of a job that goes on without it."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sftriage.commands import metrics_options
from sftriage.commands.options import CatalogueOption, RunOption
from sftriage.commands.output import notices
from sftriage.commands.run import finish, say_begun, say_summary
from sftriage.errors import UsageError
from sftriage.runs.directory import find_run, read_info
from sftriage.runs.liveness import launcher_of

if TYPE_CHECKING:
    from sftriage.runtime.triage import Triage

RESTART_S = 60.0
"""Where nobody knows what started the trainers: how long none of them may be there before the job counts as over."""


def attach(
    run: RunOption = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY",
            help="A policy file, or the name of one that ships with sftriage. Repeatable.",
            show_default="those that the run started with",
        ),
    ] = None,
    catalogue: CatalogueOption = None,
    metrics_port: metrics_options.PortOption = None,
    metrics_host: metrics_options.HostOption = "127.0.0.1",
    metrics_token_file: metrics_options.TokenFileOption = None,
    metrics_file: metrics_options.FileOption = None,
    metrics_per_rank: metrics_options.PerRankOption = False,
    otel: metrics_options.OtelOption = False,
    otel_steps: metrics_options.OtelStepsOption = False,
) -> None:
    """Take over a running job whose `sftriage run` has ended before it, and watch it to its end.

    Nothing is lost by the change: steps are read on where they were left, captures that were under way are collected,
    cooldowns and limits go on. The job itself notices nothing. Ctrl-C lets go of it again.
    """
    from sftriage.controller.policies import PolicyFiles
    from sftriage.controller.resuming import resume_state
    from sftriage.policy.loading import find
    from sftriage.runs.journal import read_journal
    from sftriage.runtime.indexing import checked_catalogue, indexing_of
    from sftriage.runtime.nsys_launch import place_in, remove_place
    from sftriage.runtime.rings import own, remove_rings_directory
    from sftriage.runtime.triage import Triage
    from sftriage.runtime.uploads import uploads_of
    from sftriage.sinks.terminal import Reporter

    directory = find_run(run)
    info = read_info(directory)
    rings = Path(info.rings)
    if not rings.is_dir():
        raise UsageError(f"{directory.path}: the job has ended; its steps and captures are there to be looked at")
    files = PolicyFiles([find(name) for name in policy] if policy else directory.policy_files())
    uploads = uploads_of(directory, info)
    indexing = indexing_of(directory.path, checked_catalogue(catalogue))
    metering = metrics_options.metering(
        metrics_port, metrics_host, metrics_token_file, metrics_file, metrics_per_rank, otel, otel_steps
    )
    reporter = Reporter(notices())
    kept = [sink for sink in (uploads, indexing) if sink is not None]
    sinks = [reporter, *metering.sinks(info.job, info.run_id, time.time()), *kept]
    left = resume_state(read_journal(directory.decisions))
    nsys = place_in(directory)
    triage = Triage(directory, info, files, sinks, nsys, left)
    own(rings)
    say_begun(reporter, "took over the job", directory, files.current, metering)
    try:
        _watch(triage, rings)
    except KeyboardInterrupt:
        reporter.say("let go of the job, which goes on; `sftriage attach` takes it over again")
        raise typer.Exit(128 + signal.SIGINT) from None
    finally:
        triage.close()
        remove_rings_directory(rings)
        if nsys is not None and not rings.exists():
            remove_place(nsys)
    say_summary(reporter, directory)
    finish(uploads, indexing, reporter)


def _watch(triage: Triage, rings: Path) -> None:
    """Triage a job to its end. Whoever ends this process ends this, and not the job.

    Raises:
        KeyboardInterrupt: somebody did.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    triage.start()
    _wait(rings, triage)
    triage.finish()


def _wait(rings: Path, triage: Triage) -> None:
    """Wait for the job to end: for what started its trainers, or else for the trainers themselves."""
    from sftriage.runtime.triage import POLL_S

    known = launcher_of(rings) is not None
    seen_s = time.monotonic()
    while True:
        time.sleep(POLL_S)
        if known and launcher_of(rings) is None:
            return
        if triage.trainers_alive:
            seen_s = time.monotonic()
        elif not known and time.monotonic() - seen_s > RESTART_S:
            return
