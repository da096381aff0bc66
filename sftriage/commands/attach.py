"""``sftriage attach``: take over the triage of a job that goes on without it."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from sftriage.commands import metering
from sftriage.commands.catalogues import CatalogueOption
from sftriage.commands.decisions import RunOption
from sftriage.commands.indexing import checked_catalogue, indexing_of
from sftriage.commands.nsys import place_in, remove_place
from sftriage.commands.rings import launcher_alive, own, remove_rings_directory
from sftriage.commands.run import Reporter
from sftriage.commands.runs import find_run
from sftriage.commands.triage import POLL_S, Triage
from sftriage.commands.uploads import uploads_of
from sftriage.commands.words import place
from sftriage.controller import PolicyFiles, left_in, read_journal
from sftriage.errors import UsageError
from sftriage.policy import find
from sftriage.traces.rundir import RunDirectory, read_info

RESTART_S = 60.0
"""Where nobody knows what started the trainers: how long none of them may be there before the job counts as over."""


def attach(
    run: RunOption = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="A policy file, or the name of one that ships with sftriage. Repeatable.",
            show_default="those that the run started with",
        ),
    ] = None,
    catalogue: CatalogueOption = None,
    metrics_port: metering.PortOption = None,
    metrics_host: metering.HostOption = "127.0.0.1",
    metrics_token_file: metering.TokenFileOption = None,
    metrics_file: metering.FileOption = None,
    metrics_per_rank: metering.PerRankOption = False,
    otel: metering.OtelOption = False,
    otel_steps: metering.OtelStepsOption = False,
) -> None:
    """Take over a running job whose `sftriage run` has ended before it, and watch it to its end.

    Nothing is lost by the change: steps are read on where they were left, captures that were under way are collected,
    cooldowns and limits go on. The job itself notices nothing. Ctrl-C lets go of it again.
    """
    directory = find_run(run)
    info = read_info(directory)
    rings = Path(info.rings)
    if not rings.is_dir():
        raise UsageError(f"{directory.path}: the job has ended; its steps and captures are there to be looked at")
    files = PolicyFiles([find(name) for name in policy] if policy else _its_own(directory))
    reporter = Reporter()
    uploads = uploads_of(directory, info)
    indexing = indexing_of(directory.path, checked_catalogue(catalogue))
    meter = metering.meter_of(
        metering.Wanted(
            metrics_port, metrics_host, metrics_token_file, metrics_file, metrics_per_rank, otel, otel_steps
        )
    )
    left = left_in(read_journal(directory.decisions))
    launched = place_in(directory)
    triage = Triage(directory, info, files, reporter, launched, left, meter=meter, uploads=uploads)
    own(rings)
    names = ", ".join(one.policy.metadata.name for one in files.current.loaded)
    reporter.say(f"took over {place(directory.path)} under policy {names}")
    if meter.url is not None:
        reporter.say(f"metrics are at {meter.url}")
    # Whoever ends this ends this, and not the job.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        triage.start()
        indexing.start()
        _wait(rings, triage)
        triage.finish()
    except KeyboardInterrupt:
        reporter.say("let go of the job, which goes on; `sftriage attach` takes it over again")
        raise typer.Exit(128 + signal.SIGINT) from None
    finally:
        triage.close()
        remove_rings_directory(rings)
        if launched is not None and not rings.exists():
            remove_place(launched)
    reporter.summary(directory)
    uploads.finish(reporter.say)
    indexing.finish(reporter.say)


def _its_own(directory: RunDirectory) -> list[Path]:
    """The policies that the run started with, as they were then."""
    return [directory.policy_file, *sorted(directory.path.glob("policy-*.yaml"))]


def _wait(rings: Path, triage: Triage) -> None:
    """Wait for the job to end: for what started its trainers, or else for the trainers themselves."""
    known = launcher_alive(rings)
    seen_s = time.monotonic()
    while True:
        time.sleep(POLL_S)
        if known and not launcher_alive(rings):
            return
        if triage.trainers_alive:
            seen_s = time.monotonic()
        elif not known and time.monotonic() - seen_s > RESTART_S:
            return
