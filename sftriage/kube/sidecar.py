"""The parts of an injected pod that are sftriage's, and their settings: volumes, containers, environment. Pure."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from sftriage.errors import InputError
from sftriage.fleet.hub import AGENTS_FILE, CA_FILE, PORT
from sftriage.kube.jobs import HUB_KEY, JobRef
from sftriage.kube.objects import ObjectModel
from sftriage.policy.parsing import path_text

Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")]


class Resources(ObjectModel):
    """What a container of ours asks for, and what it may take."""

    cpu: Quantity = "50m"
    memory: Quantity = "192Mi"
    cpu_limit: Quantity = "500m"
    memory_limit: Quantity = "1Gi"


class InjectionSettings(ObjectModel):
    """What goes into pods, and where it connects; docs/kubernetes.md says what each setting does."""

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


Made = dict[str, Any]
"""A part of a manifest."""

CARRY, AGENT = "sftriage-carry", "sftriage-agent"
CARRIED, RINGS, SPOOL, HUB = "sftriage", "sftriage-rings", "sftriage-spool", "sftriage-hub"
"""Volumes; each is mounted at its own name below the root."""
SITE = f"/{CARRIED}/sftriage/trainer/seams/site"
"""A folder that `sftriage kube carry` makes in its volume, for a PYTHONPATH."""
POD_UID = 65532
"""Our containers' user where the pod's own is root."""
NSYS = "sftriage-nsys"
"""A volume, and the init container that brings Nsight Systems into it."""
NSYS_TRACES, NSYS_SESSION = "cuda,nvtx,osrt", "sft-pod"


@functools.cache
def manifest(name: str) -> Any:
    """A manifest of this package, for `filled`."""
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def filled(template: Any, values: Mapping[str, Any]) -> Any:
    """A manifest with a value for each ``<name>``, which may be any part of one; a list extends the list it stands in.

    A part whose value is None, or that has an ``if`` without a value, is left out.
    """
    if isinstance(template, dict):
        if not filled(template.get("if", True), values):
            return None
        parts = {name: filled(part, values) for name, part in template.items() if name != "if"}
        return {name: part for name, part in parts.items() if part is not None}
    if isinstance(template, list):
        found: list[Any] = []
        for part in template:
            one = filled(part, values)
            found += one if isinstance(one, list) else [] if one is None else [one]
        return found
    name = re.fullmatch(r"<(\w+)>", template) if isinstance(template, str) else None
    return template if name is None else copy.deepcopy(values[name[1]])


def secret_of(job: JobRef, settings: InjectionSettings) -> str:
    """The Secret of a job's namespace with the credentials of agents and controller."""
    # (a Secret that was made without certificates is never written again)
    return settings.nats_secret if settings.nats else job.object_name + ("-tls" if settings.hub_tls else "")


def encrypted(settings: InjectionSettings) -> bool:
    """Whether that has the certificate of who signs the hub's."""
    return settings.nats_ca if settings.nats else settings.hub_tls


def pod_parts(
    job: JobRef,
    settings: InjectionSettings,
    *,
    user: object = None,
    guaranteed: bool = False,
    looks_in: bool = False,
    nsys: str = "",
) -> dict[str, list[Made]]:
    """What a pod of a job contains of sftriage, see ``pod.yaml``.

    Args:
        job: the job.
        settings: of injection.
        user: the pod's own.
        guaranteed: whether its containers keep cores to themselves, which takes limits that equal requests.
        looks_in: whether the agent may read the memory of its other processes, for stacks from outside.
        nsys: an image with Nsight Systems, if ranks start under it.
    """
    template, sizes = manifest("pod.yaml"), settings.resources
    limits = {"cpu": sizes.cpu_limit, "memory": sizes.memory_limit}
    requests = dict(limits) if guaranteed else {"cpu": sizes.cpu, "memory": sizes.memory}
    keys = [AGENTS_FILE if settings.nats else HUB_KEY, *([CA_FILE] if encrypted(settings) else [])]
    hub = ["--nats", settings.nats] if settings.nats else ["--hub", f"{job.object_name}.{job.namespace}.svc:{PORT}"]
    hub += ["--creds", f"/{HUB}/{keys[0]}", *(["--tls", f"/{HUB}"] if encrypted(settings) else [])]

    def restricted(*, root: bool) -> Made:
        return dict(filled(template["restricted"], {"user": settings.run_as_user or (POD_UID if root else None)}))

    # (nsys looks for its importer beside the directory that it is in)
    armed = ["--nsys", f"/{NSYS}/run/nsys", "--nsys-armed", f"/{SPOOL}/nsys/range"]
    values = {
        **dict(settings),
        "job_id": job.job_id,
        "secret": secret_of(job, settings),
        "keys": [{"key": key, "path": key} for key in keys],
        "resources": {"requests": requests, "limits": limits},
        "security": restricted(root=user == 0),
        "agent_security": filled(template["tracing"], {}) if looks_in else restricted(root=user == 0),
        # (most images with Nsight Systems are root's)
        "nsys_security": restricted(root=not user),
        "hub": hub,
        "store_options": ["--store", settings.store, "--drop-local"] if settings.store else None,
        "store_environment": store_environment(settings),
        "armed": armed if nsys else None,
        "nsys": nsys,
        "nsys_session": NSYS_SESSION,
        "nsys_traces": NSYS_TRACES,
    }
    return {name: filled(template[name], values) for name in ("volumes", "initContainers", "env", "volumeMounts")}


def store_environment(settings: InjectionSettings) -> list[Made] | None:
    """Where a container has the store's credentials from; None where there are none."""
    return [{"secretRef": {"name": settings.store_secret, "optional": True}}] if settings.store_secret else None
