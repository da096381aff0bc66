"""A cluster as it is seen at one moment, by whoever asks why nothing happens there. Data alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Body = Mapping[str, Any]
"""An object as the API server has it."""

SYSTEM = "sftriage-system"
"""The namespace that `k8s/` installs sftriage in. A chart is installed anywhere."""
PART_LABEL = "app.kubernetes.io/name"
"""By which sftriage's own deployments are known: ``sftriage-operator``, ``sftriage-webhook``."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the webhook shows to the API server: until when it is good, and whether a configured CA has signed it."""

    secret: str
    not_before_s: float
    not_after_s: float
    trusted: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is there of a namespace, and of sftriage. What cannot be read is empty, and ``unread`` says why.

    Attributes:
        now_s: seconds since the epoch.
        namespace: whose jobs are meant.
        version: the server's, major and minor; None where it is not told.
        about: the namespace's own object.
        webhooks: the MutatingWebhookConfigurations that are ours.
        system: the namespace that sftriage is installed in, as far as that is known.
        account: the user that the operator is.
        deployments: those of sftriage itself; ``controllers``: those of the namespace's jobs.
        serving: addresses at which somebody answers for the webhook's service; None where that is not known.
        certificate: what the webhook serves with; None where that is not known.
        may: what the person may do, by verb and resource; ``operator_may``: what the operator may.
        stores: why a store that captures name cannot be reached from here, by URL; "" where it can.
        unread: the parts that could not be read, by their names here, each with the reason; ``elsewhere`` is any
            namespace but ``system`` that sftriage might be installed in.
    """

    now_s: float
    namespace: str
    version: tuple[int, int] | None = None
    about: Body = field(default_factory=dict)
    definitions: Sequence[Body] = ()
    pods: Sequence[Body] = ()
    events: Sequence[Body] = ()
    quotas: Sequence[Body] = ()
    policies: Sequence[Body] = ()
    captures: Sequence[Body] = ()
    reports: Sequence[Body] = ()
    controllers: Sequence[Body] = ()
    system: str = SYSTEM
    account: str = f"system:serviceaccount:{SYSTEM}:sftriage-operator"
    deployments: Sequence[Body] = ()
    webhooks: Sequence[Body] = ()
    serving: int | None = None
    certificate: Certificate | None = None
    may: Mapping[str, bool] = field(default_factory=dict)
    operator_may: Mapping[str, bool] = field(default_factory=dict)
    stores: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
