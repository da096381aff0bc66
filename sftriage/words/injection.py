"""Why a pod is left alone, or a part of it: what kubectl shows as a warning. Each at most 256 characters."""

from __future__ import annotations

from collections.abc import Mapping

LEFT_ALONE: Mapping[str, str] = {
    "no_job": "no training job is known by its labels; name one with the label sftriage.dev/job-name",
    "no_version": "the cluster's version is not known yet",
    "old": "Kubernetes {version} has no sidecars that end with their pod; 1.29 has",
    "windows": "it is for Windows",
    "no_containers": "it has no containers",
    "not_there": "sftriage.dev/containers names {names}, and there is no such container",
    "valueFrom": "PYTHONPATH of {names} comes from elsewhere, and cannot be added to",
    "taken": "{names} is there already, and not ours",
    "failed": "{problem}",
}
"""Why nothing is injected into a pod."""

INJECTED_BUT: Mapping[str, str] = {
    "valueFrom": "container {names}: PYTHONPATH comes from elsewhere, and cannot be added to; not watched",
    "own": "container {names}: {variable} is set already, and stays",
    "dns": "with hostNetwork the hub is found only with dnsPolicy ClusterFirstWithHostNet",
    "not_shared": "shareProcessNamespace is set already, and stays",
}
"""What is wrong with a pod that something is injected into."""

MAX_CHARS = 256
"""Longer ones a server cuts off, and says less."""


def left_alone(code: str, **about: object) -> str:
    """The warning of a pod that nothing is injected into."""
    return _short(f"sftriage: not injected: {LEFT_ALONE[code].format(**about)}")


def injected_but(code: str, **about: object) -> str:
    """A warning of a pod that is injected all the same."""
    return _short(f"sftriage: {INJECTED_BUT[code].format(**about)}")


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 1]}…"
