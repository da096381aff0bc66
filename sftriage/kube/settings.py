"""What a platform's owner says of injection: a YAML file, which is read anew when it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, ValidationError

from sftriage.errors import InputError
from sftriage.kube.fields import ObjectModel
from sftriage.policy.loading import path_text

Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")]


class Resources(ObjectModel):
    """What a container of ours asks for, and what it may take."""

    cpu: Quantity = "50m"
    memory: Quantity = "192Mi"
    cpu_limit: Quantity = "500m"
    memory_limit: Quantity = "1Gi"


class InjectionSettings(ObjectModel):
    """What goes into pods.

    Attributes:
        image: of the init container and of the agent; the same release as the webhook's.
        pull_policy: of that image.
        store: where agents put traces; they go through the hub where there is none.
        store_secret: a Secret of the pod's namespace; its keys are the environment of the agent, with the store's
            credentials. A namespace without it is none the worse.
        nats: URL of a NATS server that all jobs share; by default each job's controller has a hub.
        nats_secret: the Secret of a job's namespace with what lets its agents and controllers in there (``agents.nk``,
            ``controller.nk``).
        nats_ca: that Secret has the certificate of who signed the server's, too (``ca.pem``).
        hub_tls: what agents and the hub of their controller tell each other is encrypted.
        metrics_secret: the Secret of a job's namespace whose ``token`` lets Prometheus in to its controller's metrics;
            without one they are not served.
        rings: how large the volume of the rings may grow. Its memory is the trainer's.
        spool: how large the volume of traces may grow; a pod that outgrows it is evicted.
        run_as_user: the user of our containers, where the image's own will not do.
        resources: of our containers.
    """

    image: Annotated[str, Field(min_length=1, max_length=1024)] = "sftriage:latest"
    pull_policy: Annotated[str, Field(pattern="^(Always|IfNotPresent|Never)$")] = "IfNotPresent"
    store: Annotated[str, Field(max_length=4096)] = ""
    store_secret: Annotated[str, Field(max_length=253)] = ""
    nats: Annotated[str, Field(max_length=4096)] = ""
    nats_secret: Annotated[str, Field(min_length=1, max_length=253)] = "sftriage-nats"
    nats_ca: bool = False
    hub_tls: bool = False
    metrics_secret: Annotated[str, Field(max_length=253)] = ""
    rings: Quantity = "128Mi"
    spool: Quantity = "20Gi"
    run_as_user: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    resources: Resources = Resources()


def read_settings(path: Path) -> InjectionSettings:
    """The settings in a file.

    Raises:
        InputError: it cannot be read, or says what makes no sense.
    """
    try:
        return InjectionSettings.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except (OSError, ValueError, yaml.YAMLError) as error:
        if isinstance(error, ValidationError):
            one = error.errors(include_input=False)[0]
            raise InputError(f"{path}: {path_text(one['loc'])}: {one['msg']}") from None
        raise InputError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
