"""What a job's controller is in a cluster: its objects, made of the job and of the policies in force there. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from sftriage.fleet.hub import PORT
from sftriage.kube.jobs import HUB_KEY, JOB_LABEL, JobRef
from sftriage.kube.mirrored import metadata_of
from sftriage.kube.objects import API_VERSION, GROUP
from sftriage.kube.policies import Standing
from sftriage.kube.settings import InjectionSettings
from sftriage.policy.loading import find

COMPONENT_LABEL, CONTROLLER = "app.kubernetes.io/component", "controller"
"""The label that a job's controller has, and its pods, and no pod of the job itself."""
WANTED_ANNOTATION = f"{GROUP}/wanted"
"""On a job's Deployment, which is made last: of what all of its objects were made."""
ROLE = "sftriage-controller"
USER = 65532
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


@dataclass(frozen=True, slots=True)
class Made:
    """An object, and where a server has its kind."""

    plural: str
    body: Body

    @property
    def place(self) -> tuple[str, str, str, str]:
        """API version, plural, namespace and name."""
        about = self.body["metadata"]
        return self.body["apiVersion"], self.plural, about["namespace"], about["name"]


def wanted(
    job: JobRef, settings: ControllerSettings, policies: Mapping[str, str], owners: Sequence[Mapping[str, str]] = ()
) -> list[Made]:
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
    port = {"name": "hub", "port": PORT, "targetPort": "hub", "protocol": "TCP"}
    made = [
        Made("serviceaccounts", {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": about}),
        Made(
            "rolebindings",
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "RoleBinding",
                "metadata": about,
                "roleRef": role,
                "subjects": [subject],
            },
        ),
        Made("configmaps", {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": dict(policies)}),
        Made(
            "services",
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": about,
                # (no address of its own: a cluster has a few hundred of these, or thousands, and may have more jobs)
                "spec": {"clusterIP": "None", "selector": _selector(job), "ports": [port]},
            },
        ),
        # The hub is for the job's own pods; a namespace that lets nobody in lets these.
        Made(
            "networkpolicies",
            {
                "apiVersion": "networking.k8s.io/v1",
                "kind": "NetworkPolicy",
                "metadata": about,
                "spec": {
                    "podSelector": {"matchLabels": _selector(job)},
                    "policyTypes": ["Ingress"],
                    "ingress": [
                        {
                            "from": [{"podSelector": {"matchLabels": {JOB_LABEL: job.object_name}}}],
                            "ports": [{"port": PORT, "protocol": "TCP"}],
                        }
                    ],
                },
            },
        ),
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
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": about, "spec": spec}
    digest = hashlib.sha256(json.dumps([*(one.body for one in made), deployment]).encode()).hexdigest()[:16]
    annotations = {**about["annotations"], WANTED_ANNOTATION: digest}
    return [*made, Made("deployments", {**deployment, "metadata": {**about, "annotations": annotations}})]


def secret(job: JobRef, password: str) -> Made:
    """The credentials of a job's hub, made once. Nothing owns them: no job of that name that comes soon is without."""
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata_of(job), "type": "Opaque"}
    return Made("secrets", {**body, "stringData": {HUB_KEY: f"sftriage:{password}\n"}})


def removed(job: JobRef) -> list[tuple[str, str]]:
    """API version and plural of all objects of a job's controller, the one by which the others are found last."""
    return [
        ("networking.k8s.io/v1", "networkpolicies"),
        ("rbac.authorization.k8s.io/v1", "rolebindings"),
        *(("v1", plural) for plural in ("serviceaccounts", "secrets", "configmaps", "services")),
        ("apps/v1", "deployments"),
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
    """The pod's specification, as the strictest of the pod security standards has it."""
    command = ["sftriage", "kube", "controller", "--job-id", job.job_id, "--policies", "/policies"]
    command += ["--run", "/runs", "--creds", f"/hub/{HUB_KEY}", "--keep-steps", settings.keep_steps]
    said = settings.injection
    command += ["--store", said.store] if said.store else []
    volumes, mounts = _volumes(job, settings)
    probe = {"tcpSocket": {"port": "hub"}, "periodSeconds": 10}
    container = {
        "name": "controller",
        "image": said.image,
        "imagePullPolicy": said.pull_policy,
        "command": command,
        "env": [{"name": "HOME", "value": "/tmp"}],  # (a volume of its own)
        "ports": [{"name": "hub", "containerPort": PORT, "protocol": "TCP"}],
        "readinessProbe": probe,
        "livenessProbe": {**probe, "initialDelaySeconds": 30, "failureThreshold": 6},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
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


def _volumes(job: JobRef, settings: ControllerSettings) -> tuple[list[Body], list[Body]]:
    runs: Body = {"emptyDir": {"sizeLimit": settings.runs_bytes}}
    if settings.runs_claim:
        runs = {"persistentVolumeClaim": {"claimName": settings.runs_claim}}
    within = {"subPath": job.object_name} if settings.runs_claim else {}
    volumes = [
        {"name": "runs", **runs},
        {"name": "tmp", "emptyDir": dict(_SHORTEST)},
        {"name": "policies", "configMap": {"name": job.object_name}},
        {"name": "hub", "secret": {"secretName": job.object_name, "defaultMode": 0o440}},
    ]
    mounts: list[Body] = [{"name": "runs", "mountPath": "/runs", **within}]
    mounts += [{"name": "tmp", "mountPath": "/tmp"}]
    mounts += [{"name": name, "mountPath": f"/{name}", "readOnly": True} for name in ("policies", "hub")]
    return volumes, mounts
