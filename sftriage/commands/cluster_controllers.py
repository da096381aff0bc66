"""``sftriage kube controller``: the controllers of the jobs of a namespace, each in a process, and their hub."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import logging
import os
import re
import select
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sftriage.base.files import Note
from sftriage.base.process import Forks
from sftriage.commands import options as shared
from sftriage.commands.options import option
from sftriage.commands.output import JobOutput
from sftriage.fleet.hub import PORT
from sftriage.runs.directory import RunDirectory, read_info

if TYPE_CHECKING:
    from sftriage.kube.jobs import JobRef

POLL_S, HUB_CHECK_S = 0.5, 5.0
CAPTURES_S, END_S = 60.0, 80.0
"""How long controllers may take to end, and the captures in progress of that; a pod has 90 s."""
SHOWN_S = 10.0
"""Time to write the final state into the cluster."""
KEPT_RUNS = 3
"""The runs of a job that keep their steps."""
FILE_BYTES = 10 << 40
"""Of the hub's streams: a job reserves 5 GiB, but uses only what is in transit."""
_HUB = "hub"
_SHARED = (
    *("kubernetes.client", "kubernetes.config", "kubernetes.watch"),
    *("nats.js.api", "nats.js.errors", "nats.js.kv", "nats.js.object_store", "stringprep", "encodings.idna"),
    *("sftriage.kube.mirror", "sftriage.runtime.controlling", "sftriage.runtime.copies"),
    *("sftriage.sinks.metering", "sftriage.sinks.metrics", "sftriage.sinks.terminal"),
)
"""What controllers import when they need it."""


@dataclass(frozen=True, slots=True)
class NamespaceSettings:
    """The hub, directories and options of a namespace's controllers."""

    namespace: str
    policies: Path
    runs: Path
    creds: Path
    nats: str
    tls: Path | None
    keep: shared.KeepingOptions
    metrics: Path | None
    """A directory for the metrics of each job, in a file; None: no metrics."""

    def of(self, job: JobRef) -> Path:
        return self.runs / job.object_name


def of_namespace(
    namespace: Annotated[str, option("NAME", "The namespace of the jobs.")],
    policies: Annotated[Path, option("DIR", "Directory of policies; changes take effect.")],
    runs: Annotated[Path, option("DIR", "Directory for the jobs' runs and the hub's files.")],
    creds: Annotated[
        Path, option("FILE", "USER:PASSWORD of the hub, or credentials for --nats, as for sftriage controller.")
    ],
    nats: shared.NatsOption = None,
    port: int = option("N", "Port of the hub.", min=1, max=65535, default=PORT),
    tls: shared.TlsOption = None,
    metrics_port: shared.MetricsPortOption = None,
    ready_file: Path | None = option("FILE", "Touch this file while the hub answers and controllers are looked after."),
    keep_runs: bool = option("--keep-runs", "Keep the runs of jobs that are over, as in a volume that lasts."),
    *,
    keep: shared.KeepingOptions,
) -> None:
    """Watch the jobs of a namespace of a cluster: run their hub and a controller for each, and show their state.

    The operator starts one for each namespace, and labels the TriageReports of the jobs to watch. A controller is a
    process; if one ends, the others continue, and it is restarted and resumes its run. Captures become TraceCaptures,
    the state of a job its TriageReport; TraceCaptures that people create are carried out. When a job ends, its
    controller waits for the next job of that name. Ends on SIGTERM. With --nats it uses that server in place of a hub
    of its own. Metrics are served only if $SFTRIAGE_METRICS_TOKEN is set.
    """
    from sftriage.kube.jobs import JobRef
    from sftriage.runtime.launcher import Notes

    notes = Notes()  # (a signal to this pod does not end the jobs)
    logging.getLogger("sftriage.kube").setLevel(logging.INFO)
    runs.mkdir(mode=0o700, parents=True, exist_ok=True)
    url = nats or f"{'nats' if tls is None else 'tls'}://127.0.0.1:{port}"
    shows = metrics_port is not None and os.environ.get(shared.TOKEN_VARIABLE)
    folder = Path(tempfile.mkdtemp(prefix="metrics-")) if shows else None
    place = NamespaceSettings(namespace, policies, runs.absolute(), creds, url, tls, keep, folder)
    noted, receiver = Note(runs / "jobs.json", list[str]), Receiver()
    services = partial(_serve, place, receiver.sending, port if nats is None else None, metrics_port)
    wanted = [JobRef.of_id(job_id) for job_id in noted.get() or ()]
    _import_all()
    forks = Forks(END_S)
    while notes.last_signal is None:
        forks.want({_HUB: services} | {job.job_id: partial(_watch, place, job) for job in wanted})
        forks.turn()
        for line in receiver.lines(POLL_S):
            if ready_file is not None:
                ready_file.touch()
            if line is not None:
                wanted = [JobRef.of_id(job_id) for job_id in line]
                # (a pod that starts while the API server is away continues with these)
                with contextlib.suppress(OSError):
                    noted.save(line)
        if not keep_runs:
            _forget(place, {JobRef.of_id(job_id) for job_id in forks.running - {_HUB}}.union(wanted))
    # (the hub ends last: controllers tell agents)
    forks.want({_HUB: services})
    forks.close()
    shutil.rmtree(folder or "", ignore_errors=True)


class Receiver:
    """Receives the ids of the jobs to watch from the child that watches reports; None if they have not changed."""

    def __init__(self) -> None:
        self._receiving, self.sending = os.pipe()
        self._rest = b""

    def lines(self, patience_s: float) -> Iterator[list[str] | None]:
        if not select.select([self._receiving], [], [], patience_s)[0]:
            return
        *lines, self._rest = (self._rest + os.read(self._receiving, 1 << 20)).split(b"\n")
        for line in lines:
            # (a child that is killed may leave half a line)
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def _import_all() -> None:
    """Import what controllers need before they are forked, so that they share its memory."""
    for name in _SHARED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _forget(place: NamespaceSettings, known: Sequence[JobRef] | set[JobRef]) -> None:
    """Remove the directories and metrics of jobs that are over."""
    kept = {job.object_name for job in known}
    for path in place.runs.glob("sftriage-*-*"):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)
            if place.metrics is not None:
                (place.metrics / f"{path.name}.prom").unlink(missing_ok=True)


def _serve(place: NamespaceSettings, sending: int, hub_port: int | None, metrics_port: int | None) -> None:
    """Run the hub, if it has a port, serve metrics, and send which jobs to watch, until SIGTERM."""
    from sftriage.kube.client import ClusterObjects, ObjectWatch, path_of
    from sftriage.kube.controllers import WATCH_LABEL, YES, job_id_of
    from sftriage.kube.objects import API_VERSION, REPORTS
    from sftriage.runtime.hub_server import HubServer, is_up
    from sftriage.runtime.launcher import Notes

    notes, everywhere = Notes(), "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    with ExitStack() as held:
        if hub_port is not None:
            store = place.runs / "hub"
            server = HubServer((everywhere, hub_port), store, place.creds, place.tls, file_bytes=FILE_BYTES)
            server.keep()
            held.callback(server.close)
        if place.metrics is not None and metrics_port is not None:
            from prometheus_client import CollectorRegistry

            from sftriage.sinks.metrics import FromFiles

            registry = CollectorRegistry()
            registry.register(FromFiles(place.metrics))
            exposition, _ = shared.metrics_endpoint(everywhere, metrics_port, None, registry)
            exposition.start()
            held.callback(exposition.close)
        reports = path_of(API_VERSION, REPORTS.plural, place.namespace)
        query = {"labelSelector": f"{WATCH_LABEL}={YES}"}
        watch = ObjectWatch(ClusterObjects.connect(), reports, job_id_of, lambda *_: None, query=query)
        watch.start()
        sent, checked_s = None, 0.0
        while notes.last_signal is None:
            if time.monotonic() > checked_s + HUB_CHECK_S and (hub_port is None or is_up("127.0.0.1", hub_port)):
                checked_s = time.monotonic()
                os.write(sending, b"null\n")
            found = sorted(filter(None, watch.kept()))
            if watch.listed.is_set() and found != sent:
                sent = found
                os.write(sending, json.dumps(found).encode() + b"\n")
            time.sleep(POLL_S)


def _watch(place: NamespaceSettings, job: JobRef) -> None:
    """Watch one run of a job after the other, until SIGTERM."""
    from sftriage.kube.client import ClusterObjects
    from sftriage.kube.mirror import Mirror
    from sftriage.runtime.controlling import JobController
    from sftriage.runtime.hub_server import HubOptions
    from sftriage.runtime.launcher import Notes
    from sftriage.sinks.metering import Metering

    notes, name = Notes(), f"{job.namespace}/{job.name}"  # (two namespaces may share a store)
    sys.stderr = JobLines(sys.stderr, job.job_id)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    mirror, root = Mirror(ClusterObjects.connect(), job), place.of(job)
    root.mkdir(mode=0o700, exist_ok=True)
    options = HubOptions(job.job_id, nats=place.nats, credentials=place.creds, tls=place.tls)
    keeping, exposed = place.keep.of(name), place.metrics and place.metrics / f"{job.object_name}.prom"
    mirror.begin()
    while notes.last_signal is None:
        # (each run of the job has metrics of its own)
        output = JobOutput(Metering(file=exposed), mirror, why=job.fetch_command)
        directory, resumes = _directory(root)
        begun: Any = {"policies": [place.policies], "keeping": keeping}
        watched = JobController(directory, options, output.sinks, None if resumes else name, **begun)
        mirror.follow(watched.directory)
        output.say_begun("took over the job" if resumes else "waiting for the job", watched)
        with contextlib.closing(watched):
            if not watched.watch(output.say, lambda: notes.last_signal, CAPTURES_S):
                break
        output.finish(watched)
    mirror.finish(SHOWN_S)


class JobLines(io.TextIOBase):
    """Standard error of a job's controller, with the job's name in each line."""

    def __init__(self, output: Any, job_id: str) -> None:
        self._output, self._named = output, f"sftriage: {job_id}: "

    def write(self, text: str) -> int:
        self._output.write(re.sub(r"(?m)^sftriage: ", self._named, text))
        return len(text)

    def flush(self) -> None:
        self._output.flush()


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
