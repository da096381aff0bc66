"""``sftriage webhook``: what an API server asks when a pod or a capture is made."""

from __future__ import annotations

import logging
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

from sftriage.commands.options import option
from sftriage.commands.output import say
from sftriage.errors import UsageError
from sftriage.kube.client import ClusterObjects
from sftriage.kube.serving import KeptSettings, WebhookServer, version_of_cluster, wait_for_certificate
from sftriage.kube.serving import serve as answer_until_stopped

ServerVersionOption = Annotated[str | None, option("MAJOR.MINOR", "The cluster's version.", "the one that it tells")]
SettingsOption = Annotated[
    Path | None,
    option("FILE", "What goes into pods: image, store, sizes. A file that changes takes effect.", "defaults"),
]


def serve(
    cert: Annotated[Path, option("DIR", "Directory with tls.crt and tls.key; new ones are taken up as they come.")],
    port: Annotated[int, option("PORT", "Where to listen.", min=1, max=65535)] = 8443,
    host: Annotated[str, option("ADDRESS", "On which address.")] = "0.0.0.0",
    settings: SettingsOption = None,
    server_version: ServerVersionOption = None,
    cert_seconds: Annotated[float, option("N", "How long the certificate may be in coming.", min=0)] = 300.0,
) -> None:
    """Answer an API server's reviews: pods of training jobs get what has them watched, captures who asked for them.

    No answer ever refuses anything. It stores nothing, so that any number may run. It asks the cluster that kubectl
    would, or inside a pod its own, for its version.
    """
    logging.getLogger("sftriage.kube").setLevel(logging.INFO)
    kept, told = KeptSettings(settings), version_option(server_version)
    objects = ClusterObjects.connect()
    wait_for_certificate(cert, cert_seconds)
    webhook = WebhookServer(kept, lambda: version_of_cluster(objects) if told is None else told)
    answer_until_stopped(webhook, host, port, cert)


def version_option(said: str | None) -> tuple[int, int] | None:
    """The version that a person says.

    Raises:
        UsageError: it is none.
    """
    if said is None:
        return None
    found = re.fullmatch(r"v?(\d+)\.(\d+)(\..*)?", said)
    if found is None:
        raise UsageError(f"--server-version {said}: as in 1.31")
    return int(found[1]), int(found[2])


def certificates(
    namespace: Annotated[str, option("--namespace -n NAME", "Where the webhook is.")] = "sftriage-system",
    secret: Annotated[
        str, option("NAME", "The Secret that the webhook's certificate goes into; it has to be there.")
    ] = "sftriage-webhook-tls",
    service: Annotated[str, option("NAME", "The webhook's Service.")] = "sftriage-webhook",
    configuration: Annotated[str, option("NAME", "The MutatingWebhookConfiguration that is to trust it.")] = "sftriage",
) -> None:
    """Make the webhook's certificate, and have the API server trust it; where both are so already, do nothing.

    For clusters without cert-manager. Run it again from time to time: a certificate is good for a year, and 60 days
    before its end there is another. It needs the rights of k8s/certificates, on these two objects and no others.
    """
    from sftriage.kube.certificates import Certifier

    objects = ClusterObjects.connect()
    try:
        import cryptography  # noqa: F401  # said once, in words, and not from within
    except ImportError:
        raise UsageError("certificates take cryptography; install sftriage[k8s]") from None
    certifier = Certifier(objects, namespace, secret, service, configuration)
    say(certifier.certify(datetime.now(timezone.utc)))
