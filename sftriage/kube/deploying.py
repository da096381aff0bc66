"""What a job's controller is in a cluster: its objects, made of the job and of the policies in force there. Pure."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from sftriage.fleet.hub import CA_FILE, CERTIFICATE_FILE, KEY_FILE, PORT
from sftriage.kube.certificates import issued, service_names
from sftriage.kube.jobs import HUB_KEY, JOB_LABEL, JobRef
from sftriage.kube.mirrored import metadata_of
from sftriage.kube.objects import API_VERSION, GROUP
from sftriage.kube.policies import Standing
from sftriage.kube.settings import InjectionSettings
from sftriage.kube.sidecar import encrypted, secret_of
from sftriage.policy.loading import find

COMPONENT_LABEL, CONTROLLER = "app.kubernetes.io/component", "controller"
"""The label that a job's controller has, and its pods, and no pod of the job itself."""
WANTED_ANNOTATION = f"{GROUP}/wanted"
"""On a job's Deployment, which is made last: of what all of its objects were made."""
ROLE = "sftriage-controller"
USER, USER_NAME = 65532, "sftriage"
METRICS_PORT, TOKEN_VARIABLE = 9400, "SFTRIAGE_METRICS_TOKEN"
HUB_VALID_DAYS = 3650
_SHORTEST, _TERMINATION_S = {"sizeLimit": "256Mi"}, 60

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """How controllers run.

    Attributes:
        injection: what the platform's owner says of agents, whose image and store controllers share.
        runs_claim: a PersistentVolumeClaim of the job's namespace that its runs are kept in; by default they go with
            the pod, and where there is no store the traces with them.
        keep_steps: how much is kept of a job's steps.
        runs_bytes: how much the pod's own volume may hold, where that is what runs are kept in.
    """

    injection: InjectionSettings
    runs_claim: str = ""
    keep_steps: str = "2Gi"
    runs_bytes: str = "20Gi"


def wanted(
    job: JobRef, settings: ControllerSettings, policies: Mapping[str, str], owners: Sequence[Mapping[str, str]] = ()
) -> list[Body]:
    """All objects of a job's controller but its secret, in the order in which they are made.

    Args:
        job: the job.
        settings: how its controller runs.
        policies: the texts of the policies in force, by file name, see `policy_files`.
        owners: the object that the job is, if it is one: with it, these go.
    """
    about = metadata_of(job, labels={COMPONENT_LABEL: CONTROLLER}, ownerReferences=list(owners))
    subject = {"kind": "ServiceAccount", "name": job.object_name, "namespace": job.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": ROLE}
    made = [
        _made("v1", "ServiceAccount", about),
        _made("rbac.authorization.k8s.io/v1", "RoleBinding", about, roleRef=role, subjects=[subject]),
        _made("v1", "ConfigMap", about, data=dict(policies)),
        *_reached(job, settings.injection, about),
    ]
    spec = {
        "replicas": 1,
        # (one at a time has the job's runs)
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": _selector(job)},
        "template": {
            "metadata": {"labels": {**_selector(job), "app.kubernetes.io/name": "sftriage"}},
            "spec": _pod(job, settings),
        },
    }
    deployment = _made("apps/v1", "Deployment", about, spec=spec)
    digest = hashlib.sha256(json.dumps([*made, deployment]).encode()).hexdigest()[:16]
    annotations = {**about["annotations"], WANTED_ANNOTATION: digest}
    return [*made, {**deployment, "metadata": {**about, "annotations": annotations}}]


def _made(version: str, kind: str, about: Body, **rest: Any) -> Body:
    return {"apiVersion": version, "kind": kind, "metadata": about, **rest}


def _reached(job: JobRef, said: InjectionSettings, about: Body) -> list[Body]:
    port = {"name": "hub", "port": PORT, "targetPort": "hub", "protocol": "TCP"}
    # (no address of its own: a cluster has a few hundred of these, or thousands, and may have more jobs)
    service = _made("v1", "Service", about, spec={"clusterIP": "None", "selector": _selector(job), "ports": [port]})
    pods = [{"podSelector": {"matchLabels": {JOB_LABEL: job.object_name}}}]
    ingress: list[Body] = [] if said.nats else [{"from": pods, "ports": [{"port": PORT, "protocol": "TCP"}]}]
    if said.metrics_secret:
        ingress.append({"ports": [{"port": METRICS_PORT, "protocol": "TCP"}]})
    # A namespace that lets nobody in lets these.
    spec = {"podSelector": {"matchLabels": _selector(job)}, "policyTypes": ["Ingress"], "ingress": ingress}
    policy = _made("networking.k8s.io/v1", "NetworkPolicy", about, spec=spec)
    return [policy] if said.nats else [service, policy]


def secret(job: JobRef, settings: InjectionSettings, password: str, now: datetime.datetime) -> Body:
    """What lets a job's pods in to its hub, made once. Nothing owns it: no job of that name that comes soon is without.

    Where the hub is encrypted, its certificate is in it too, for as long as any job lasts.
    """
    data = {HUB_KEY: f"{USER_NAME}:{password}\n"}
    if settings.hub_tls:
        names = (*service_names(job.object_name, job.namespace), "127.0.0.1")
        one = issued(names, now, HUB_VALID_DAYS)
        data |= {
            CA_FILE: one.authority.decode(),
            CERTIFICATE_FILE: one.certificate.decode(),
            KEY_FILE: one.key.decode(),
        }
    about = {**metadata_of(job), "name": secret_of(job, settings)}
    return _made("v1", "Secret", about, type="Opaque", stringData=data)


def removed(job: JobRef) -> list[tuple[str, str, str]]:
    """API version, plural and name of all objects that a controller may have, that by which it is found last."""
    name = job.object_name
    return [
        ("networking.k8s.io/v1", "networkpolicies", name),
        ("rbac.authorization.k8s.io/v1", "rolebindings", name),
        *(("v1", plural, name) for plural in ("serviceaccounts", "secrets", "configmaps", "services")),
        ("v1", "secrets", secret_of(job, InjectionSettings(hub_tls=True))),
        ("apps/v1", "deployments", name),
    ]


def policy_files(found: Iterable[Standing]) -> dict[str, str]:
    """The policies in force as files, in their order; of none, the one that ships as default."""
    in_force = [one.body for one in found if one.in_force]
    if not in_force:
        return {"default.yaml": find("default").read_text(encoding="utf-8")}
    return {f"{n:03}-{one['metadata']['name']}.yaml": _text(one) for n, one in enumerate(in_force)}


def _text(body: Mapping[str, Any]) -> str:
    about = {"name": body["metadata"]["name"]}
    said = {"apiVersion": API_VERSION, "kind": "TriagePolicy", "metadata": about, "spec": body["spec"]}
    # (through JSON, for what is there twice is not to be written as an alias, which no policy has)
    return yaml.safe_dump(json.loads(json.dumps(said)), allow_unicode=True, sort_keys=False)


def _selector(job: JobRef) -> dict[str, str]:
    return {JOB_LABEL: job.object_name, COMPONENT_LABEL: CONTROLLER}


def _pod(job: JobRef, settings: ControllerSettings) -> Body:
    """The pod, as the standard *restricted* demands."""
    said = settings.injection
    volumes, mounts = _volumes(job, settings)
    container: Body = {
        "name": "controller",
        "image": said.image,
        "imagePullPolicy": said.pull_policy,
        "command": _command(job, settings),
        "env": [{"name": "HOME", "value": "/tmp"}],  # (a volume of its own)
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    if not said.nats:
        probe = {"tcpSocket": {"port": "hub"}, "periodSeconds": 10}
        container |= {
            "ports": [{"name": "hub", "containerPort": PORT, "protocol": "TCP"}],
            "readinessProbe": probe,
            "livenessProbe": {**probe, "initialDelaySeconds": 30, "failureThreshold": 6},
        }
    if said.metrics_secret:
        token = {"name": said.metrics_secret, "key": "token", "optional": True}
        container["env"].append({"name": TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": token}})
        metrics = {"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"}
        container["ports"] = [*container.get("ports", []), metrics]
    if said.store_secret:
        container["envFrom"] = [{"secretRef": {"name": said.store_secret, "optional": True}}]
    ids = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), said.run_as_user or USER)
    return {
        "serviceAccountName": job.object_name,
        "terminationGracePeriodSeconds": _TERMINATION_S,
        "securityContext": {"runAsNonRoot": True, **ids, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": volumes,
    }


def _command(job: JobRef, settings: ControllerSettings) -> list[str]:
    said = settings.injection
    command = ["sftriage", "kube", "controller", "--job-id", job.job_id, "--policies", "/policies"]
    command += ["--run", "/runs", "--keep-steps", settings.keep_steps]
    command += ["--nats", said.nats, "--creds", "/hub"] if said.nats else ["--creds", f"/hub/{HUB_KEY}"]
    command += ["--tls", "/hub"] if encrypted(said) else []
    command += ["--metrics-port", str(METRICS_PORT)] if said.metrics_secret else []
    return command + (["--store", said.store] if said.store else [])


def _volumes(job: JobRef, settings: ControllerSettings) -> tuple[list[Body], list[Body]]:
    runs: Body = {"emptyDir": {"sizeLimit": settings.runs_bytes}}
    if settings.runs_claim:
        runs = {"persistentVolumeClaim": {"claimName": settings.runs_claim}}
    within = {"subPath": job.object_name} if settings.runs_claim else {}
    volumes = [
        {"name": "runs", **runs},
        {"name": "tmp", "emptyDir": dict(_SHORTEST)},
        {"name": "policies", "configMap": {"name": job.object_name}},
        {"name": "hub", "secret": {"secretName": secret_of(job, settings.injection), "defaultMode": 0o440}},
    ]
    mounts: list[Body] = [{"name": "runs", "mountPath": "/runs", **within}]
    mounts += [{"name": "tmp", "mountPath": "/tmp"}]
    mounts += [{"name": name, "mountPath": f"/{name}", "readOnly": True} for name in ("policies", "hub")]
    return volumes, mounts
