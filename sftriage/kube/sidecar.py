"""What an injected pod has of ours: volumes, an init container, the agent, and what trainers get. Pure."""

from __future__ import annotations

from typing import Any

from sftriage.fleet.hub import AGENTS_FILE, CA_FILE, PORT
from sftriage.kube.jobs import HUB_KEY, JobRef
from sftriage.kube.settings import InjectionSettings

Made = dict[str, Any]
"""A part of a pod."""

CARRY, AGENT = "sftriage-carry", "sftriage-agent"
CARRIED, RINGS, SPOOL, HUB = "sftriage", "sftriage-rings", "sftriage-spool", "sftriage-hub"
"""Volumes; each is mounted at its own name below the root."""
SITE = f"/{CARRIED}/sftriage/seams/site"
"""What `sftriage kube carry` makes of the volume, and belongs on a PYTHONPATH."""
TRACES = f"/{SPOOL}/spool"
"""Where trainers leave traces: open to any user of the pod, which is the boundary."""
POD_UID = 65532
"""Our containers' user where the pod's own is root."""
NSYS = "sftriage-nsys"
"""A volume, and the init container that brings Nsight Systems into it."""
# (its importer is looked for beside the directory that it is in)
NSYS_PROGRAM, NSYS_TRACES = f"/{NSYS}/run/nsys", "cuda,nvtx,osrt"
NSYS_RANK, NSYS_ARMED, NSYS_SESSION = f"/{CARRIED}/nsys-rank", f"/{SPOOL}/nsys/range", "sft-pod"


def secret_of(job: JobRef, settings: InjectionSettings) -> str:
    """The Secret of a job's namespace with what agents and controller connect by."""
    # (one that was made without certificates is never written again)
    return settings.nats_secret if settings.nats else job.object_name + ("-tls" if settings.hub_tls else "")


def encrypted(settings: InjectionSettings) -> bool:
    """Whether that has the certificate of who signs the hub's."""
    return settings.nats_ca if settings.nats else settings.hub_tls


def volumes(job: JobRef, settings: InjectionSettings, *, nsys: bool = False) -> list[Made]:
    """The volumes of a pod of a job."""
    # (a pod starts without its Secret; kubelet puts it there once the operator has made it)
    keys = [AGENTS_FILE if settings.nats else HUB_KEY, *([CA_FILE] if encrypted(settings) else [])]
    secret = {"secretName": secret_of(job, settings), "items": [{"key": key, "path": key} for key in keys]}
    return [
        {"name": CARRIED, "emptyDir": {}},
        {"name": RINGS, "emptyDir": {"medium": "Memory", "sizeLimit": settings.rings}},
        {"name": SPOOL, "emptyDir": {"sizeLimit": settings.spool}},
        {"name": HUB, "secret": {**secret, "optional": True}},
        *([{"name": NSYS, "emptyDir": {}}] if nsys else []),
    ]


def mount(volume: str, *, read_only: bool = False) -> Made:
    """A volume where it belongs."""
    found: Made = {"name": volume, "mountPath": f"/{volume}"}
    return {**found, "readOnly": True} if read_only else found


def trainer_mounts(*, nsys: bool = False) -> list[Made]:
    """Which volumes a trainer sees."""
    found = [mount(CARRIED, read_only=True), mount(RINGS), mount(SPOOL)]
    return [*found, mount(NSYS, read_only=True)] if nsys else found


def trainer_environment(job: JobRef, *, nsys: bool = False) -> list[Made]:
    """What a trainer is told, PYTHONPATH aside."""
    armed = {
        "SFTRIAGE_NSYS": NSYS_PROGRAM,
        "SFTRIAGE_NSYS_SESSION": NSYS_SESSION,
        "SFTRIAGE_NSYS_TRACE": NSYS_TRACES,
        "SFTRIAGE_NSYS_TMP": NSYS_ARMED.rpartition("/")[0],
        "SFTRIAGE_NSYS_ARMED": NSYS_ARMED,
        "SFTRIAGE_NSYS_RANK": NSYS_RANK,
        # What torchrun starts in the place of Python; others name the script where they start a rank.
        "PYTHON_EXEC": NSYS_RANK,
    }
    return [
        {"name": "SFTRIAGE_RINGS", "value": f"/{RINGS}"},
        {"name": "SFTRIAGE_SPOOL", "value": TRACES},
        {"name": "SFTRIAGE_JOB", "value": job.job_id},
        # The agent's user is another one than the trainer's, and both may be any: nobody but the pod sees these files.
        {"name": "SFTRIAGE_FILE_MODE", "value": "0666"},
        _field("SFTRIAGE_HOST", "spec.nodeName"),
        *({"name": name, "value": value} for name, value in armed.items() if nsys),
    ]


def bringing_nsys(image: str, settings: InjectionSettings, *, user: object, guaranteed: bool) -> Made:
    """The init container that copies Nsight Systems out of an image that has it. Where it cannot, ranks run without."""
    # (most such images are root's)
    return {
        "name": NSYS,
        "image": image,
        "command": ["sh", "-c", _BRING_NSYS, f"/{NSYS}"],
        "resources": _resources(settings, guaranteed=guaranteed),
        "securityContext": _restricted(settings, root=not user),
        "volumeMounts": [mount(NSYS)],
    }


_BRING_NSYS = """\
found=$(readlink -f "$(command -v nsys)") && folder=$(dirname "$found") &&
cp -a "$(dirname "$folder")/." "$0" && mkdir -p "$0/run" &&
printf '#!/bin/sh\\nexec %s/%s/nsys "$@"\\n' "$0" "$(basename "$folder")" > "$0/run/nsys" &&
chmod 755 "$0/run/nsys" || echo "sftriage: no Nsight Systems in this image" >&2
"""


def carrying(settings: InjectionSettings, *, root: bool, guaranteed: bool, nsys: bool = False) -> Made:
    """The init container that copies what trainers need, and ends."""
    armed = ["--nsys", NSYS_PROGRAM, "--nsys-armed", NSYS_ARMED] if nsys else []
    return {
        "name": CARRY,
        **_image(settings),
        "command": ["sftriage", "kube", "carry", f"/{CARRIED}", "--spool", TRACES, *armed],
        "resources": _resources(settings, guaranteed=guaranteed),
        "securityContext": _restricted(settings, root=root),
        "volumeMounts": [mount(CARRIED), mount(SPOOL)],
    }


def agent(
    job: JobRef,
    settings: InjectionSettings,
    *,
    root: bool,
    guaranteed: bool,
    looks_in: bool = False,
    nsys: bool = False,
) -> Made:
    """The agent: an init container that goes on beside the trainers, and ends after them.

    With ``looks_in`` it may read the memory of the pod's other processes, for stacks from outside.
    """
    hub = ["--nats", settings.nats] if settings.nats else ["--hub", f"{job.object_name}.{job.namespace}.svc:{PORT}"]
    hub += ["--creds", f"/{HUB}/{AGENTS_FILE if settings.nats else HUB_KEY}"]
    hub += ["--tls", f"/{HUB}"] if encrypted(settings) else []
    store = ["--store", settings.store, "--drop-local"] if settings.store else []
    made: Made = {
        "name": AGENT,
        **_image(settings),
        "restartPolicy": "Always",
        "command": [
            *("sftriage", "agent", "--job-id", job.job_id, *hub),
            *("--rings", f"/{RINGS}", "--directory", f"/{SPOOL}", "--name", "$(SFTRIAGE_POD)", *store),
        ],
        "env": [
            _field("SFTRIAGE_POD", "metadata.name"),
            *({"name": name, "value": f"/{SPOOL}"} for name in ("TMPDIR", "HOME")),
        ],
        "resources": _resources(settings, guaranteed=guaranteed),
        "securityContext": _ptrace() if looks_in else _restricted(settings, root=root),
        "volumeMounts": [
            *(mount(RINGS), mount(SPOOL), mount(HUB, read_only=True)),
            *([mount(NSYS, read_only=True)] if nsys else []),
        ],
    }
    if settings.store_secret:
        made["envFrom"] = [{"secretRef": {"name": settings.store_secret, "optional": True}}]
    return made


def _image(settings: InjectionSettings) -> Made:
    return {"image": settings.image, "imagePullPolicy": settings.pull_policy}


def _field(name: str, path: str) -> Made:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def _resources(settings: InjectionSettings, *, guaranteed: bool) -> Made:
    said = settings.resources
    limits = {"cpu": said.cpu_limit, "memory": said.memory_limit}
    # A pod that has its cores to itself keeps them only if all of its containers ask for as much as they may take.
    return {"requests": dict(limits) if guaranteed else {"cpu": said.cpu, "memory": said.memory}, "limits": limits}


def _restricted(settings: InjectionSettings, *, root: bool) -> Made:
    user = settings.run_as_user or (POD_UID if root else None)
    return {
        **({} if user is None else {"runAsUser": user}),
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _ptrace() -> Made:
    # (a capability that is added is of use to root alone)
    return {
        "runAsUser": 0,
        "runAsNonRoot": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["SYS_PTRACE"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
