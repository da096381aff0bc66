"""Options that subcommands share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from sftriage.errors import UsageError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from sftriage.runtime.copies import Keeping
    from sftriage.runtime.hub_server import HubOptions
    from sftriage.sinks.metering import Metering
    from sftriage.web.serving import BackgroundServer


def option(spec: str, text: str, shown: str | bool = True, default: Any = ..., **limits: Any) -> Any:
    """An option of a command: its help ``text``, its default as ``shown``, and its limits (``min``, ``max``).

    ``spec`` has its names and metavar, as its help shows them: ``--namespace -n NAME``; the default name is the
    parameter's. As the default of a parameter or a field, an option that is not set is ``default``, or else None
    (False for a flag).
    """
    words = spec.split(" ")
    names = [word for word in words if word.startswith("-")]
    metavar = " ".join(words[len(names) :]) or None
    return typer.Option(default, *names, metavar=metavar, help=text, show_default=shown, **limits)


def argument(spec: str, text: str, shown: str | bool = True, default: Any = ..., **more: Any) -> Any:
    """An argument of a command; see `option`."""
    return typer.Argument(default, metavar=spec, help=text, show_default=shown, **more)


RunOption = Annotated[Path | None, option("--run DIR", "Run directory.", "the newest run started here")]
CatalogueOption = Annotated[
    str | None,
    option(
        "--catalogue URL",
        "A catalogue that many jobs share: postgresql+psycopg://USER@HOST/DATABASE. If it contains a password, set "
        "$SFTRIAGE_CATALOGUE instead, or put it into a file and set $SFTRIAGE_CATALOGUE_FILE.",
        "that of the run or store",
    ),
]
JsonOption = Annotated[bool, option("--json", "Print JSON.")]
TlsOption = Annotated[
    Path | None,
    option(
        "--tls DIR",
        "Encrypt traffic between the hosts. DIR has ca.pem, and on the host of --hub cert.pem and key.pem.",
        False,
    ),
]
NatsOption = Annotated[
    str | None, option("--nats URL", "Use a NATS server with JetStream that runs already: nats:// or tls://.", False)
]


@dataclass(frozen=True, slots=True)
class CapturesChoice:
    """Which captures to use: those of a run, of a store, or all in a catalogue."""

    run: RunOption = None
    store: str | None = option(
        "--store URL",
        "Use the captures of a store instead of a run on this machine: s3://, gs:// or az:// with bucket and "
        "prefix, or a directory. Credentials come from the environment.",
        False,
    )
    catalogue: CatalogueOption = None


NamespaceOption = Annotated[str | None, option("--namespace -n NAME", "The namespace.", "the context's")]
ContextOption = Annotated[str | None, option("NAME", "Context of the kubeconfig.", "the current one")]


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """Whether to use the captures of a Kubernetes cluster, and how to reach it."""

    cluster: bool = option("--cluster", "Use the captures of jobs in a Kubernetes cluster (TraceCaptures).")
    namespace: str | None = option("--namespace -n NAME", "With --cluster: the namespace.", "the context's")
    context: str | None = option("NAME", "With --cluster: the context of the kubeconfig.", "the current one")

    def __post_init__(self) -> None:
        if not self.cluster and (self.namespace is not None or self.context is not None):
            raise UsageError("--namespace and --context need --cluster")

    def exclude(self, **options: object) -> None:
        """UsageError for options that do not apply to the captures of a cluster."""
        named = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
        if self.cluster and named:
            raise UsageError(f"{', '.join(named)}: not with --cluster")


@dataclass(frozen=True, slots=True)
class ClusterCapture(ClusterChoice):
    """Which capture of a cluster to use, if not by name: the most informative one of a job."""

    job: str | None = option("JOB", "With --cluster: this job's most informative trace, instead of CAPTURE.")
    step: int | None = option("N", "With --job: only captures of this step, or made because of it.", min=0)
    rank: int | None = option("N", "With --job: only captures of this rank.", min=0)

    def __post_init__(self) -> None:
        ClusterChoice.__post_init__(self)
        if self.job is not None and not self.cluster:
            raise UsageError("--job needs --cluster")
        if self.job is None and (self.step is not None or self.rank is not None):
            raise UsageError("--step and --rank need --job")


@dataclass(frozen=True, slots=True)
class HubChoice:
    """Where the hub of a job on many hosts is."""

    job_id: str | None = option(
        "--job-id ID", "Unique name of the job, the same on all its hosts, such as $SLURM_JOB_ID.", False
    )
    hub: str | None = option(
        "--hub HEAD[:PORT]",
        "Host that the others connect to: it starts a NATS server (default port 7422) and the controller.",
        False,
    )
    nats: NatsOption = None
    creds: Path | None = option(
        "--creds FILE",
        "Credentials: USER:PASSWORD, a token, the seed of an nkey, a .creds file of nsc, or a directory of such "
        "files. By default the host of --hub creates a password in a file under sftriage-runs.",
        False,
    )
    tls: TlsOption = None

    def options(self, job_id: str | None = None) -> HubOptions:
        """The checked options; UsageError if they contradict each other."""
        from sftriage.runtime.hub_server import HubOptions

        return HubOptions(job_id or self.job_id or "", self.hub, self.nats, self.creds, self.tls)


_Value = TypeVar("_Value")


def parsed(option: str, read: Callable[[str], _Value], text: str) -> _Value:
    """The value of an option's text; UsageError if it is invalid."""
    try:
        return read(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


LOOPBACK = "127.0.0.1"
TOKEN_VARIABLE = "SFTRIAGE_METRICS_TOKEN"
MIN_KEPT_BYTES, MIN_KEPT_S = 1 << 20, 60.0

PoliciesOption = Annotated[
    list[str] | None,
    option(
        "--policy POLICY",
        "A policy file, or the name of a shipped policy (`sftriage policy list`). Repeatable: all rules are tried "
        "in order, under the strictest limits. Changes to a file take effect while the job runs.",
        "default",
    ),
]
OutOption = Annotated[Path | None, option("--out DIR", "Run directory to create.", "a new one under sftriage-runs")]
DropLocalOption = Annotated[
    bool, option("--drop-local", "Remove local traces once their copy in the store is verified.")
]
MetricsPortOption = Annotated[
    int | None,
    option(
        "--metrics-port PORT",
        "Serve Prometheus metrics on this port while the job runs; 0 chooses a free port.",
        "no metrics server",
        min=0,
        max=65535,
    ),
]


@dataclass(frozen=True, slots=True)
class KeepingOptions:
    """What is kept of a job, and where."""

    store: str | None = option(
        "URL",
        "Copy captures to s3://, gs:// or az:// with bucket and prefix, or to a directory, while the job runs. "
        "Credentials come from the environment.",
        "captures stay in the run directory",
    )
    drop_local: DropLocalOption = False
    keep_steps: str = option(
        "--keep-steps SIZE",
        "Disk space for the recorded steps of all ranks together. Beyond it, the oldest steps are thinned to "
        "one in eight, and then removed.",
        default="16Gi",
    )
    keep_steps_for: str = option("--keep-steps-for DURATION", "Remove steps that are older than this.", default="30d")

    def of(self, job: str) -> Keeping:
        """The checked options, for a job of this name; UsageError if a value is invalid."""
        from sftriage.policy import fields
        from sftriage.runtime.copies import Keeping
        from sftriage.windows.steplog import KeptSteps

        store = copies_of(job, self.store, drop_local=self.drop_local)
        max_bytes = parsed("--keep-steps", fields.size_bytes, self.keep_steps)
        age_s = parsed("--keep-steps-for", fields.seconds, self.keep_steps_for)
        if max_bytes < MIN_KEPT_BYTES or age_s < MIN_KEPT_S:
            raise UsageError("--keep-steps must be at least 1Mi, and --keep-steps-for at least 1m")
        return Keeping(store, self.drop_local, KeptSteps(max_bytes, age_s))


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Where the metrics and spans of a job go."""

    metrics_port: MetricsPortOption = None
    metrics_host: str = option(
        "--metrics-host ADDRESS",
        "Address to serve metrics on. Any non-loopback address requires a token.",
        default=LOOPBACK,
    )
    metrics_token_file: Path | None = option(
        "--metrics-token-file FILE",
        f"File with the Bearer token for scrapers. Or set ${TOKEN_VARIABLE} to the token itself.",
    )
    metrics_file: Path | None = option(
        "--metrics-file FILE.prom", "Write the metrics into a file, for node_exporter's textfile collector."
    )
    metrics_per_rank: bool = option("--metrics-per-rank", "Add metrics of single ranks.")
    otel: bool = option(
        "--otel", "Send OpenTelemetry spans of windows and captures, configured by the standard OTEL_* variables."
    )

    def metering(self) -> Metering:
        """The sinks of these metrics and spans; UsageError if the options contradict each other."""
        host, port, token_file = self.metrics_host, self.metrics_port, self.metrics_token_file
        if port is None and (token_file is not None or host != LOOPBACK):
            raise UsageError("--metrics-host and --metrics-token-file need --metrics-port")
        if self.metrics_per_rank and port is None and self.metrics_file is None:
            raise UsageError("--metrics-per-rank needs --metrics-port or --metrics-file")
        from sftriage.sinks.metering import Metering

        listen = None if port is None else partial(metrics_endpoint, host, port, token_file)
        return Metering(listen, self.metrics_file, self.metrics_per_rank, self.otel)


def metrics_endpoint(
    host: str, port: int, token_file: Path | None, registry: CollectorRegistry
) -> tuple[BackgroundServer, str]:
    """The server of metrics, and its URL; UsageError for an address that others can reach, without a token."""
    from sftriage.web.serving import Access, metrics_server, token_of

    advice = f"give one with --metrics-token-file, or in {TOKEN_VARIABLE}"
    access = Access.to(host, token_of(token_file, TOKEN_VARIABLE), advice)
    return metrics_server(registry, host, port, access)


def copies_of(job: str, store: str | None, *, drop_local: bool) -> str | None:
    """The URL of the store for copies of a job's captures, if any; UsageError if it cannot be used."""
    from sftriage.traces.remote import RemoteStore, checked_url

    if store is None:
        if drop_local:
            raise UsageError("--drop-local needs --store")
        return None
    RemoteStore.open(store, job=job, run="run", create=True)
    return checked_url(store)
