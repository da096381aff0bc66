"""``sftriage kube controller``: what the operator starts for a job in a cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import time
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sftriage.commands.job_options import (
    LOOPBACK,
    TOKEN_VARIABLE,
    KeepingOptions,
    MetricsOptions,
    MetricsPortOption,
    finish,
    say_summary,
)
from sftriage.commands.options import NatsOption, TlsOption, option
from sftriage.commands.output import notices
from sftriage.errors import UsageError
from sftriage.fleet.hub import CA_FILE, PORT, HubAddress
from sftriage.runs.directory import RunDirectory, read_info
from sftriage.words.amounts import place

if TYPE_CHECKING:
    from sftriage.kube.mirroring import Mirror
    from sftriage.runtime.controlling import Beginning
    from sftriage.runtime.launcher import Notes
    from sftriage.sinks.metering import Metering
    from sftriage.sinks.terminal import Reporter

SHOWN_S = 10.0
"""How long the cluster may take to be shown the end."""
KEPT_RUNS = 3
"""Of so many runs of a job the steps are kept."""


def controller(
    job_id: Annotated[str, option("--job-id NAMESPACE/SYSTEM/NAME", "The job, as its pods are annotated.")],
    policies: Annotated[Path, option("DIR", "A folder with policies; what changes there takes effect.")],
    run: Annotated[Path, option("DIR", "For its runs, and what its hub keeps.")],
    creds: Annotated[
        Path, option("FILE", "USER:PASSWORD of its hub, or what --nats lets it in by, as of a controller.")
    ],
    nats: NatsOption = None,
    port: Annotated[int, option("N", "Where its hub listens.", min=1, max=65535)] = PORT,
    tls: TlsOption = None,
    metrics_port: MetricsPortOption = None,
    *,
    keep: KeepingOptions,
) -> None:
    """Watch a job whose pods sftriage was put into: its hub, its controller, and what the cluster is shown of it.

    The operator starts it, one for each job. Captures become TraceCaptures, and how the job stands its TriageReport;
    captures that people ask for by TraceCaptures are answered. When the job ends, the next one of its name is waited
    for, until SIGTERM. In its folder it goes on with a run that had not ended. With --nats its hub is a server that
    others use too. Metrics are served where $SFTRIAGE_METRICS_TOKEN says who may see them.
    """
    from sftriage.kube.client import ClusterObjects
    from sftriage.kube.mirrored import job_named
    from sftriage.kube.mirroring import Mirror
    from sftriage.runtime.controlling import Beginning
    from sftriage.runtime.hub_server import HubServer
    from sftriage.runtime.launcher import Notes
    from sftriage.sinks.terminal import Reporter

    try:
        job = job_named(job_id)
    except ValueError as error:
        raise UsageError(f"--job-id: {error}") from None
    # Jobs of two namespaces may share a name, and their stores.
    name = f"{job.namespace}/{job.name}"
    keeping = keep.of(name)
    logging.getLogger("sftriage.kube").setLevel(logging.INFO)
    mirror = Mirror(ClusterObjects.connect(), job)
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
    # (whoever ends this pod ends no job)
    notes = Notes()
    everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    shown = metrics_port if os.environ.get(TOKEN_VARIABLE) else None
    where = LOOPBACK if shown is None else everywhere
    with contextlib.ExitStack() as held:
        if nats is None:
            server = HubServer((everywhere, port), (run / "hub").absolute(), creds, tls)
            held.callback(server.close)
            server.keep()
        url = nats or f"{'nats' if tls is None else 'tls'}://127.0.0.1:{port}"
        address = HubAddress(url, creds, None if tls is None else tls / CA_FILE)
        mirror.begin()
        while notes.told is None:
            beginning, reporter = Beginning(name, [policies], keeping), Reporter(notices())
            # (each run of the job has metrics of its own)
            metering = MetricsOptions(metrics_port=shown, metrics_host=where).metering()
            _watch(run, job_id, address, beginning, mirror, reporter, metering, notes)
        mirror.finish(SHOWN_S)


def _watch(
    root: Path,
    job_id: str,
    address: HubAddress,
    beginning: Beginning,
    mirror: Mirror,
    reporter: Reporter,
    metering: Metering,
    notes: Notes,
) -> None:
    """Watch one run of the job to its end, or until this is told to end; the job goes on then."""
    from sftriage.runtime.controlling import JobController

    directory, goes_on = _directory(root)
    watched = JobController(
        directory,
        job_id,
        address,
        lambda info: [reporter, mirror, *metering.sinks(info.job, info.run_id, time.time())],
        None if goes_on else beginning,
        policies=beginning.policies,
    )
    mirror.follow(RunDirectory(watched.directory.path))
    names = ", ".join(one.policy.metadata.name for one in watched.files.current.loaded)
    reporter.say(f"{'took over' if goes_on else 'waiting for'} the job under policy {names}; {place(directory)}")
    with contextlib.closing(watched):
        if not watched.watch(reporter.say, lambda: notes.told):
            return
    say_summary(reporter, watched)
    finish(watched, reporter)


def _directory(root: Path) -> tuple[Path, bool]:
    """The directory of the run that has not ended, or of another one; and whether it is gone on with.

    Of runs before the last few, the steps are removed: a job that starts again and again would fill its volume.
    """
    from sftriage.runtime.hosting import free, numbered

    found = list(takewhile(Path.exists, numbered(root / "run")))
    for old in found[:-KEPT_RUNS]:
        shutil.rmtree(RunDirectory(old).steps, ignore_errors=True)
    if found and RunDirectory(found[-1]).hub.exists() and not read_info(RunDirectory(found[-1])).ended_at:
        return found[-1], True
    return free(root / "run"), False
