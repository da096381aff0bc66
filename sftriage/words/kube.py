"""Texts of the conditions of objects in a cluster, and the warnings of the injection webhook."""

from __future__ import annotations

from collections.abc import Mapping

POLICIES: Mapping[str, str] = {
    "valid": "The policy is valid.",
    "not_compared": "Not compared with other policies, because it is not valid.",
    "conflicts": "Not in force: an older policy of its namespace forbids it.",
    "in_force": "In force, with the other policies of its namespace.",
}
"""The state of a policy."""

REPORTS: Mapping[str, str] = {
    "watched": "sftriage judges the job's steps as they end.",
    "unwatched": "The job is no longer being watched.",
    "over": "No run is in progress.",
    "no_run": "Waiting for the job's first steps.",
    "controller_down": "The job is not judged, because its controller does not run. {why}",
    "not_connected": "Pod {name} runs, but its agent does not reach the hub: does a NetworkPolicy deny its port "
    "{port}? kubectl logs -n {namespace} {name} -c sftriage-agent",
    "old_pods": "The job's agents are from an earlier version, and their hub is gone. Restart the job.",
    "injected": "sftriage is injected into all its pods.",
    "not_injected": "{missing} of its {pods} pods are labelled but not injected, so their ranks are not recorded: "
    "{names}. Was the webhook down when they were created? Recreate the pods to have them injected.",
}
"""Whether a job is being watched."""

PODS: Mapping[str, str] = {
    "ImageMissing": "Correct the image in sftriage's settings or in the manifest, apply that, and recreate the pods. "
    "Pods labelled sftriage.dev/inject: disabled start without sftriage.",
    "NotStarted": "Create or correct what the message names.",
    "Crashes": "Read kubectl logs -n {namespace} {pod} -c {container} --previous",
    "OutOfMemory": "Raise the memory limit of container {container}. sftriage's own limits are in its settings.",
    "Evicted": "Make the room that the message names. A Job or a Deployment starts another pod.",
    "Unschedulable": "Make room in the cluster, or lower the requests of its pods.",
    "NodeLost": "Containers there keep running. Check the kubelet: kubectl describe node {node}",
    "Refused": "Raise the quota or limit that the message names, or lower `resources` in sftriage's settings.",
}
"""What to do about a pod that does not run as it should, by the reason."""

NEWS: Mapping[str, str] = {
    "stored": "{count} stored, including {capture_id} of rank {rank}.",
    "failed": "{count} failed, including {capture_id} of rank {rank}.",
    "expired": "{count} expired, including {capture_id} of rank {rank}.",
}
"""Texts of events on captures."""

CAPTURE_STATES: Mapping[str, str] = {
    "requested": "No controller has answered yet.",
    "accepted": "Accepted: the limits allow it; its rank has not started.",
    "armed": "The profiler is ready and waits for its steps.",
    "running": "Its steps are being recorded.",
    "stored": "Its trace is in the store.",
    "failed": "Failed.",
    "refused": "Refused.",
    "expired": "Expired before it ended.",
}
"""The progress of a capture."""

CAPTURES: Mapping[str, str] = {
    "lost": "The controller that ordered it is gone, and its record with it.",
    "no_job": "No job of that name runs in this namespace; waiting for one.",
}
"""Texts on a capture that no run knows of."""

REPRODUCED: Mapping[str, str] = {
    "": "There is no trace to check yet.",
    "never": "There is no trace to check.",
    "unjudged": "The trace has not been checked yet.",
}
"""Why it is not known whether a trace contains the fault."""

REMOVAL: Mapping[str, str] = {
    "nothing": "It has no trace.",
    "stored": "Its trace in {place} is being deleted.",
    "pinned": "Its trace in {place} is pinned and stays.",
    "gone": "Its trace is no longer in {place}.",
    "removed": "Its trace in {place} is deleted.",
    "again": "Its trace in {place} is deleted. It was new, so sftriage checks again that it stays away.",
    "running": "The capture has not ended: a trace stored later would stay. Waiting at most {wait_s:.0f} s.",
    "unfinished": "It never reported a stored trace.",
    "unreadable": "Its status does not show where its trace is: {problem}",
    "elsewhere": "Its trace is in {place}, which is not a store of this operator (--store), and is not deleted.",
    "unreachable": "Its trace in {place} cannot be deleted now: {problem}",
}
"""What happens to a trace whose object is being deleted."""


def removal_sentence(code: str, **values: object) -> str:
    """What happens to the trace of an object that is being deleted."""
    return REMOVAL[code].format(**values)


LEFT_ALONE: Mapping[str, str] = {
    "no_job": "its labels name no known training job; name one with the label sftriage.dev/job-name",
    "no_version": "the cluster's version is not known yet",
    "old": "Kubernetes {version} has no sidecars that end with their pod; use 1.29 or newer",
    "windows": "the pod is for Windows",
    "no_containers": "the pod has no containers",
    "not_there": "sftriage.dev/containers names {names}, but the pod has no such container",
    "valueFrom": "PYTHONPATH of {names} is set by valueFrom and cannot be extended",
    "taken": "{names} already exists and is not from sftriage",
    "failed": "{problem}",
}
"""Why sftriage injects nothing into a pod."""

INJECTED_BUT: Mapping[str, str] = {
    "valueFrom": "container {names}: PYTHONPATH is set by valueFrom and cannot be extended; not watched",
    "own": "container {names}: {variable} is already set; left unchanged",
    "dns": "with hostNetwork, the hub can be found only with dnsPolicy ClusterFirstWithHostNet",
    "not_shared": "shareProcessNamespace is already set; left unchanged",
}
"""What is wrong with an injected pod."""

MAX_CHARS = 256
"""API servers truncate longer warnings."""


def left_alone(code: str, **about: object) -> str:
    """The warning about a pod that is not injected."""
    return _short(f"sftriage: not injected: {LEFT_ALONE[code].format(**about)}")


def injected_but(code: str, **about: object) -> str:
    """A warning about a pod that is injected nevertheless."""
    return _short(f"sftriage: {INJECTED_BUT[code].format(**about)}")


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 1]}…"
