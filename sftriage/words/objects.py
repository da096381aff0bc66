"""What the conditions of an object in a cluster say."""

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


def capture_sentence(state: str, detail: str) -> str:
    """How far a capture is, and what there is to say of it."""
    return f"{CAPTURE_STATES[state]} {detail}".strip()


def removal_sentence(code: str, **given: object) -> str:
    """What becomes of the trace of an object that is being deleted."""
    return REMOVAL[code].format(**given)
