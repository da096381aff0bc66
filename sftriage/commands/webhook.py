"""``sftriage webhook``, ``kube inject`` and ``kube carry``: inject sftriage into training pods."""

from __future__ import annotations

import logging
import re
import signal
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import yaml

from sftriage.base.files import refusing
from sftriage.commands.options import argument, option
from sftriage.commands.output import say
from sftriage.errors import InputError, UsageError
from sftriage.kube.client import ClusterObjects, path_of
from sftriage.kube.injecting import SIDECARS_SINCE, InjectionSettings, injected, read_settings

ServerVersionOption = Annotated[str | None, option("MAJOR.MINOR", "The cluster's version.", "as it reports")]
SettingsOption = Annotated[
    Path | None, option("FILE", "What to inject into pods: image, store, sizes. Changes take effect.", "defaults")
]


def serve(
    cert: Annotated[Path, option("DIR", "Directory with tls.crt and tls.key; renewed files take effect.")],
    port: int = option("PORT", "Port to listen on.", min=1, max=65535, default=8443),
    host: str = option("ADDRESS", "Address to listen on.", default="0.0.0.0"),
    settings: SettingsOption = None,
    server_version: ServerVersionOption = None,
    cert_seconds: float = option("N", "How long to wait for the certificate.", min=0, default=300.0),
) -> None:
    """Serve admission reviews: inject sftriage into pods of training jobs, and note who requested a capture.

    The webhook never rejects an object. It stores nothing, so any number of replicas may run. It reads the version of
    the cluster in kubectl's configuration, or inside a pod of its own.
    """
    logging.getLogger("sftriage.kube").setLevel(logging.INFO)
    version, objects = _version(server_version), ClusterObjects.connect()
    from sftriage.kube import webhook

    kept = webhook.kept_settings(settings)
    webhook.wait_for_certificate(cert, cert_seconds)
    server = webhook.WebhookServer(kept, lambda: webhook.version_of_cluster(objects) if version is None else version)
    webhook.serve(server, host, port, cert)


def _version(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"v?(\d+)\.(\d+)(\..*)?", text)
    if found is None:
        raise UsageError(f"--server-version {text}: expected MAJOR.MINOR, such as 1.31")
    return int(found[1]), int(found[2])


_STOP = (signal.SIGINT, signal.SIGTERM)


def certificates(
    namespace: str = option("--namespace -n NAME", "Namespace of the webhook.", default="sftriage-system"),
    secret: str = option("NAME", "Existing Secret for the webhook's certificate.", default="sftriage-webhook-tls"),
    service: str = option("NAME", "The webhook's Service.", default="sftriage-webhook"),
    configuration: str = option("NAME", "The MutatingWebhookConfiguration that must trust it.", default="sftriage"),
    repeat_hours: float | None = option("N", "Run until SIGTERM, and check again every N hours.", "once", min=0.001),
) -> None:
    """Make the webhook's certificate, and have the API server trust it; do nothing if both are done.

    For clusters without cert-manager. A certificate is valid for a year, and is renewed in its last 60 days: run this
    regularly, or with --repeat-hours. It needs only the rights in k8s/certificates, on these two objects.
    """
    objects = ClusterObjects.connect()
    import cryptography  # noqa: F401  # (now, rather than once the cluster has answered)

    from sftriage.kube.webhook import certify, service_names

    path = path_of("v1", "secrets", namespace, secret)
    # (blocked, so that a container's first process ends by SIGTERM too)
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP)
    while True:
        say(certify(objects, path, service_names(service, namespace), configuration, datetime.now(timezone.utc)))
        if repeat_hours is None or signal.sigtimedwait(_STOP, repeat_hours * 3600) is not None:
            return


def inject(
    file: Annotated[list[str], option("--filename -f FILE", "A YAML file with objects; - is stdin. Repeatable.")],
    namespace: str = option("--namespace -n NAME", "Namespace of objects that do not name one.", default="default"),
    settings: SettingsOption = None,
    server_version: ServerVersionOption = None,
) -> None:
    """Print jobs with sftriage injected into their pods, for `kubectl apply` in a cluster without the webhook.

    Other objects are printed unchanged. The cluster is not contacted, and must be 1.29 or newer. Warnings go to
    stderr.
    """
    server = _version(server_version) or SIDECARS_SINCE
    kept = InjectionSettings() if settings is None else read_settings(settings)
    results = [injected(body, namespace, kept, server) for name in file for body in _objects(name)]
    if not any(result.templates or result.warnings for result in results):
        say("nothing injected: no object has training pods without sftriage")
    say(*dict.fromkeys(line for result in results for line in result.warnings))
    yaml.safe_dump_all([result.body for result in results], sys.stdout, sort_keys=False, allow_unicode=True)


def _objects(name: str) -> Iterator[dict[str, Any]]:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        for body in yaml.safe_load_all(text):
            if body is None:
                continue
            if not isinstance(body, dict):
                raise InputError(f"{name}: not a Kubernetes object")
            yield from body.get("items") or () if body.get("kind") == "List" else (body,)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"cannot read {name}: {' '.join(str(error).split())}") from error


def carry(
    folder: Annotated[Path, argument("DIR", "Directory to copy to.")],
    spool: Path | None = option("DIR", "Directory to create for traces, writable by any user of the pod."),
    nsys: Path | None = option("FILE", "The pod's nsys, under which DIR/nsys-rank starts ranks armed."),
    nsys_armed: Path | None = option("PATH", "Path of the armed ranks' reports, up to the rank."),
) -> None:
    """Copy what trainers need into a directory; the first container of an injected pod runs this.

    The trainers' PYTHONPATH must then begin with DIR/sftriage/trainer/seams/site.
    """
    if (nsys is None) != (nsys_armed is None) or (nsys is not None and spool is None):
        raise UsageError("--nsys, --nsys-armed and --spool go together")
    from sftriage.runtime.carrying import carry as copy

    copy(folder)
    if spool is not None:
        with refusing(f"cannot create {spool}"):
            spool.mkdir(parents=True, exist_ok=True)
            # (trainers may run as another user, and nothing outside the pod sees it)
            spool.chmod(0o777)
    if spool is not None and nsys is not None and nsys_armed is not None:
        from sftriage.kube.injecting import NSYS_SESSION, NSYS_TRACES
        from sftriage.runtime.nsys_launch import arm_elsewhere

        # (the agent's files are beside its spool)
        traces = tuple(NSYS_TRACES.split(","))
        arm_elsewhere(spool.parent, nsys, traces, nsys_armed, NSYS_SESSION, folder / "nsys-rank")
