"""``sftriage webhook``, ``kube inject`` and ``kube carry``: have training pods watched."""

from __future__ import annotations

import logging
import re
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
from sftriage.kube.injecting import SIDECARS_SINCE, injected
from sftriage.kube.webhook import KeptSettings, WebhookServer, version_of_cluster, wait_for_certificate
from sftriage.kube.webhook import serve as answer_until_stopped

ServerVersionOption = Annotated[str | None, option("MAJOR.MINOR", "The cluster's version.", "the one that it tells")]
SettingsOption = Annotated[
    Path | None,
    option("FILE", "What goes into pods: image, store, sizes. A file that changes takes effect.", "defaults"),
]


def serve(
    cert: Annotated[Path, option("DIR", "Directory with tls.crt and tls.key; new ones are taken up as they come.")],
    port: int = option("PORT", "Where to listen.", min=1, max=65535, default=8443),
    host: str = option("ADDRESS", "On which address.", default="0.0.0.0"),
    settings: SettingsOption = None,
    server_version: ServerVersionOption = None,
    cert_seconds: float = option("N", "How long the certificate may be in coming.", min=0, default=300.0),
) -> None:
    """Answer an API server's reviews: pods of training jobs get what has them watched, captures who asked for them.

    No answer ever refuses anything. It stores nothing, so that any number may run. It asks the cluster that kubectl
    would, or inside a pod its own, for its version.
    """
    logging.getLogger("sftriage.kube").setLevel(logging.INFO)
    kept, told = KeptSettings(settings), _version(server_version)
    objects = ClusterObjects.connect()
    wait_for_certificate(cert, cert_seconds)
    webhook = WebhookServer(kept, lambda: version_of_cluster(objects) if told is None else told)
    answer_until_stopped(webhook, host, port, cert)


def _version(said: str | None) -> tuple[int, int] | None:
    if said is None:
        return None
    found = re.fullmatch(r"v?(\d+)\.(\d+)(\..*)?", said)
    if found is None:
        raise UsageError(f"--server-version {said}: as in 1.31")
    return int(found[1]), int(found[2])


def certificates(
    namespace: str = option("--namespace -n NAME", "Where the webhook is.", default="sftriage-system"),
    secret: str = option(
        "NAME",
        "The Secret that the webhook's certificate goes into; it has to be there.",
        default="sftriage-webhook-tls",
    ),
    service: str = option("NAME", "The webhook's Service.", default="sftriage-webhook"),
    configuration: str = option("NAME", "The MutatingWebhookConfiguration that is to trust it.", default="sftriage"),
) -> None:
    """Make the webhook's certificate, and have the API server trust it; where both are so already, do nothing.

    For clusters without cert-manager. Run it again from time to time: a certificate is good for a year, and 60 days
    before its end there is another. It needs the rights of k8s/certificates, on these two objects and no others.
    """
    from sftriage.kube.webhook import certify, service_names

    objects = ClusterObjects.connect()
    try:
        import cryptography  # noqa: F401  # said once, in words, and not from within
    except ImportError:
        raise UsageError("certificates take cryptography; install sftriage[k8s]") from None
    path = path_of("v1", "secrets", namespace, secret)
    say(certify(objects, path, service_names(service, namespace), configuration, datetime.now(timezone.utc)))


def inject(
    file: Annotated[list[str], option("--filename -f FILE", "A file with objects; - is stdin. Repeatable.")],
    namespace: str = option(
        "--namespace -n NAME", "Where objects go that do not say so themselves.", default="default"
    ),
    settings: SettingsOption = None,
    server_version: ServerVersionOption = None,
) -> None:
    """Print jobs as the webhook would change their pods, for `kubectl apply`, where there is no webhook.

    Objects that are no training job come out as they are. The cluster is not asked: it has to be of 1.29 or newer.
    Warnings go to stderr.
    """
    server = _version(server_version) or SIDECARS_SINCE
    kept = KeptSettings(settings)()
    bodies = [one for name in file for one in _objects(name)]
    found = [injected(body, namespace, kept, server) for body in bodies]
    if not any(one.templates or one.warnings for one in found):
        say("nothing is injected: no object has the pods of a training job that are not injected already")
    for warning in dict.fromkeys(line for one in found for line in one.warnings):
        say(warning)
    yaml.safe_dump_all([one.body for one in found], sys.stdout, sort_keys=False, allow_unicode=True)


def _objects(name: str) -> Iterator[dict[str, Any]]:
    try:
        words = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        for body in yaml.safe_load_all(words):
            if body is None:
                continue
            if not isinstance(body, dict):
                raise InputError(f"{name}: not an object of Kubernetes")
            yield from body.get("items") or () if body.get("kind") == "List" else (body,)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{name} cannot be read: {' '.join(str(error).split())}") from error


def carry(
    folder: Annotated[Path, argument("DIR", "Where it goes.")],
    spool: Path | None = option("DIR", "A directory for traces to make, open to any user of the pod."),
    nsys: Path | None = option("FILE", "The nsys of the pod: ranks start armed under it, by DIR/nsys-rank."),
    nsys_armed: Path | None = option("PATH", "What the reports of armed ranks are called, up to their rank."),
) -> None:
    """Copy what a trainer needs into a directory: what an injected pod's first container does.

    The trainers' PYTHONPATH begins with DIR/sftriage/trainer/seams/site then.
    """
    if (nsys is None) != (nsys_armed is None) or (nsys is not None and spool is None):
        raise UsageError("--nsys, --nsys-armed and --spool go together")
    from sftriage.runtime.carrying import carry as copy

    copy(folder)
    if spool is not None:
        with refusing(f"{spool} cannot be made"):
            spool.mkdir(parents=True, exist_ok=True)
            # (the trainers' user is another one than ours, and the pod is the boundary)
            spool.chmod(0o777)
    if spool is not None and nsys is not None and nsys_armed is not None:
        from sftriage.kube.injecting import NSYS_SESSION, NSYS_TRACES
        from sftriage.runtime.nsys_launch import arm_elsewhere

        # (what the agent keeps is beside its spool)
        traces = tuple(NSYS_TRACES.split(","))
        arm_elsewhere(spool.parent, nsys, traces, nsys_armed, NSYS_SESSION, folder / "nsys-rank")
