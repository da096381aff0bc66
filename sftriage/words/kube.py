"""What the conditions of objects in a cluster say, and the warnings of the injection webhook."""

from __future__ import annotations

from collections.abc import Mapping

POLICIES: Mapping[str, str] = {
    "valid": "It is valid.",
    "not_compared": "What is not valid is held against no other.",
    "conflicts": "Not in force: an older policy of its namespace forbids it.",
    "in_force": "It is in force, with the others of its namespace.",
}
"""How a policy stands."""

REPORTS: Mapping[str, str] = {
    "watched": "The job's steps are judged as they end.",
    "unwatched": "Nobody watches the job any more.",
    "over": "No run goes on.",
    "injected": "sftriage is in all of its pods.",
    "not_injected": "{missing} of its {pods} pods are labelled, and sftriage is in none of these, so that their ranks "
    "are not seen: {names}. Was the webhook away when they were created? Pods that are created anew are injected.",
}
"""Whether somebody watches a job."""

NEWS: Mapping[str, str] = {
    "stored": "{count} stored, among them {capture_id} of rank {rank}.",
    "failed": "{count} failed, among them {capture_id} of rank {rank}.",
    "expired": "{count} expired, among them {capture_id} of rank {rank}.",
}
"""What an event says of captures."""

CAPTURE_STATES: Mapping[str, str] = {
    "requested": "Nobody has answered yet.",
    "accepted": "The limits allow it; its rank has not begun.",
    "armed": "Its profiler is ready, and waits for its steps.",
    "running": "Its steps are being recorded.",
    "stored": "Its trace is in the store.",
    "failed": "It came to nothing.",
    "refused": "It was refused.",
    "expired": "Its time was over before it had ended.",
}
"""How far a capture is."""

CAPTURES: Mapping[str, str] = {
    "lost": "The controller that asked for it is gone, and its record with it.",
    "no_job": "No job of that name runs in this namespace; it is waited for.",
}
"""What there is to say of a capture that no run knows of."""

REPRODUCED: Mapping[str, str] = {
    "": "There is no trace yet to look for it in.",
    "never": "There is no trace to look for it in.",
    "unjudged": "Nobody has looked for it in the trace yet.",
}
"""Why it is not known whether the fault is in a trace."""

REMOVAL: Mapping[str, str] = {
    "nothing": "It has no trace.",
    "stored": "Its trace is in {place}, and is deleted there.",
    "pinned": "Its trace is pinned in {place}, and stays.",
    "gone": "Its trace is not in {place} any more.",
    "removed": "Its trace in {place} is deleted.",
    "running": "It has not ended: what it stores yet would stay. Waiting for {wait_s:.0f} s at most.",
    "unfinished": "It never said that it stored a trace.",
    "unreadable": "Where its trace is cannot be read from its status: {problem}",
    "elsewhere": "Its trace is in {place}, which is no store of this operator (--store): it is not deleted there.",
    "unreachable": "Its trace in {place} cannot be deleted now: {problem}",
}
"""What becomes of a trace whose object is being deleted."""


def removal_sentence(code: str, **given: object) -> str:
    """What becomes of the trace of an object that is being deleted."""
    return REMOVAL[code].format(**given)


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
