"""What the commands that watch a job have in common: their options, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sftriage.commands.options import meant, option
from sftriage.commands.output import uploading
from sftriage.errors import UsageError
from sftriage.words.amounts import counted, place

if TYPE_CHECKING:
    from sftriage.runtime.controlling import JobController
    from sftriage.runtime.local import Keeping, LocalRun, TakeOver
    from sftriage.sinks.metering import Metering
    from sftriage.sinks.terminal import Reporter
    from sftriage.web.serving import MetricsEndpoint

    TriagedJob = LocalRun | TakeOver | JobController

LOOPBACK = "127.0.0.1"
TOKEN_VARIABLE = "SFTRIAGE_METRICS_TOKEN"
MIN_KEPT_BYTES, MIN_KEPT_S = 1 << 20, 60.0

PoliciesOption = Annotated[
    list[str] | None,
    option(
        "--policy POLICY",
        "A policy file, or the name of one that ships with sftriage. Repeatable: the rules of all are tried, "
        "in order, under the strictest limits. A file that changes while the job runs takes effect.",
        "default",
    ),
]
OutOption = Annotated[Path | None, option("--out DIR", "Run directory to make.", "a new one under sftriage-runs")]
AutoOption = Annotated[
    bool,
    option(
        "--auto",
        "Find the stages of a training script that does not use sftriage.Monitor, from what torch says of them.",
    ),
]
CopiesOption = Annotated[
    str | None,
    option(
        "--store URL",
        "Keep copies of the captures in s3://, gs:// or az:// with bucket and prefix, or in a directory. They "
        "are uploaded while the job runs. Credentials come from the environment.",
        "captures stay in the run directory",
    ),
]
DropLocalOption = Annotated[
    bool, option("--drop-local", "Remove traces here once their copy in the store is verified.")
]
MetricsPortOption = Annotated[
    int | None,
    option(
        "--metrics-port PORT",
        "Serve Prometheus metrics on this port while the job runs; 0 is any that is free.",
        "nothing listens",
        min=0,
        max=65535,
    ),
]


@dataclass(frozen=True, slots=True)
class KeepingOptions:
    """What is kept of a job, and where."""

    store: CopiesOption = None
    drop_local: DropLocalOption = False
    keep_steps: Annotated[
        str,
        option(
            "--keep-steps SIZE",
            "How much is kept of the steps of all ranks together. What is older than the newest that find room "
            "is thinned, one step in eight, and then removed.",
        ),
    ] = "16Gi"
    keep_steps_for: Annotated[
        str, option("--keep-steps-for DURATION", "Steps so much older than the newest are removed.")
    ] = "30d"

    def of(self, job: str, directory: Path | None = None) -> Keeping:
        """What was asked for, for a job of this name.

        Raises:
            UsageError: the store cannot be used, or nothing would be kept, or the options are no size and no duration.
        """
        from sftriage.policy import quantities
        from sftriage.runtime.local import Keeping
        from sftriage.windows.steplog import KeptSteps

        store = copies_of(job, self.store, drop_local=self.drop_local)
        max_bytes = meant("--keep-steps", quantities.size_bytes, self.keep_steps)
        age_s = meant("--keep-steps-for", quantities.seconds, self.keep_steps_for)
        if max_bytes < MIN_KEPT_BYTES or age_s < MIN_KEPT_S:
            raise UsageError("--keep-steps is 1Mi at least, and --keep-steps-for 1m")
        return Keeping(directory, store, self.drop_local, steps=KeptSteps(max_bytes, age_s))


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Which metrics and spans of a job go where."""

    metrics_port: MetricsPortOption = None
    metrics_host: Annotated[
        str, option("--metrics-host ADDRESS", "Address to serve them on. Any but this machine's own wants a token.")
    ] = LOOPBACK
    metrics_token_file: Annotated[
        Path | None,
        option(
            "--metrics-token-file FILE",
            f"File with the Bearer token that a scraper sends. ${TOKEN_VARIABLE} holds the token itself.",
        ),
    ] = None
    metrics_file: Annotated[
        Path | None,
        option("--metrics-file FILE.prom", "Write the metrics into a file, for node_exporter's textfile collector."),
    ] = None
    metrics_per_rank: Annotated[bool, option("--metrics-per-rank", "Metrics of single ranks too.")] = False
    otel: Annotated[
        bool,
        option("--otel", "Send OpenTelemetry spans of windows and captures, as the standard OTEL_* variables say."),
    ] = False

    def metering(self) -> Metering:
        """What was asked for, made ready; nothing where nothing was.

        Raises:
            UsageError: it cannot be, or makes no sense.
        """
        host, port, token_file = self.metrics_host, self.metrics_port, self.metrics_token_file
        if port is None and (token_file is not None or host != LOOPBACK):
            raise UsageError("nothing is served without --metrics-port")
        if self.metrics_per_rank and port is None and self.metrics_file is None:
            raise UsageError("--metrics-per-rank is about metrics: give --metrics-port or --metrics-file")
        from sftriage.sinks.metering import Metering

        def listen() -> MetricsEndpoint:
            from sftriage.web.serving import Access, MetricsEndpoint, token_of

            advice = f"give one with --metrics-token-file, or in {TOKEN_VARIABLE}"
            access = Access.to(host, token_of(token_file, TOKEN_VARIABLE), advice)
            return MetricsEndpoint(host, port or 0, access)

        made = None if port is None else listen
        return Metering(made, self.metrics_file, self.metrics_per_rank, self.otel)


def copies_of(job: str, store: str | None, *, drop_local: bool) -> str | None:
    """Where copies of a job's captures are kept, made ready; None for nowhere.

    Raises:
        UsageError: it cannot be used, or traces were to be dropped that are nowhere else.
    """
    from sftriage.runtime.uploads import checked_store

    if drop_local and store is None:
        raise UsageError("--drop-local needs a --store that has the traces then")
    return None if store is None else checked_store(store, job)


def finish(watched: TriagedJob, reporter: Reporter, left_s: Callable[[], float] = lambda: float("inf")) -> None:
    """Wait for what is still on its way to a store or a catalogue, and say what is left.

    ``left_s`` says how long that may take from now on; by default as long as something moves.
    """
    if watched.uploads is not None:
        with uploading() as show:
            watched.uploads.finish(reporter.say, show, left_s)
    if watched.indexing is not None:
        watched.indexing.finish(reporter.say, left_s)


def say_begun(reporter: Reporter, how: str, watched: TriagedJob, metering: Metering) -> None:
    """Say under which policies a job is watched, where that goes on record, and where its metrics are."""
    names = ", ".join(one.policy.metadata.name for one in watched.files.current.loaded)
    reporter.say(f"{how} under policy {names}; run directory {place(watched.directory.path)}")
    if metering.url is not None:
        reporter.say(f"metrics are at {metering.url}")


def say_summary(reporter: Reporter, watched: TriagedJob) -> None:
    """Say what came of it."""
    reporter.finish()
    reporter.say(
        f"{counted(reporter.windows, 'window')} judged, {counted(reporter.captures, 'capture')} stored; "
        f"why: sftriage decisions --run {place(watched.directory.path)}"
    )
