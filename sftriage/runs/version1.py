"""Entries of a journal of version 1, whose decisions were sentences, as entries of version 2: codes with parameters.

A healthy window, and one whose reasons are the verdict's, have their codes. Any other sentence is kept as it is, and as
what would resolve it: the reason ``recorded``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sftriage.decisions import Cause, Parameter, ReasonCode


def upgraded(entry: dict[str, Any]) -> dict[str, Any] | None:
    """A decoded entry of version 1 as the values of an event of version 2; None where it is of a type unknown here.

    Raises:
        ValueError: it is no entry.
    """
    try:
        make = _EVENTS.get(entry["type"])
        return None if make is None else {"type": entry["type"], **make(entry), "version": 2}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no entry of a journal: {error}") from error


def _decided(entry: dict[str, Any]) -> dict[str, Any]:
    kept = dict(entry["decision"])
    resolves, label, outcome = kept.pop("resolves", ""), kept.get("label", "suspect"), kept.get("outcome", "")
    code, parameters = translated(kept["reason"], label=label, outcome=outcome, resolves=resolves)
    kept |= {"reason": code, "parameters": dict(parameters)}
    return {"decision": kept, "triggers": entry.get("triggers", {})}


def _evidence(entry: dict[str, Any]) -> dict[str, Any]:
    known = entry["evidence"]
    gpus = known.get("gpus") or {}
    first_step = known.get("first_step", 0)
    return {
        "time_s": gpus.get("time_s", known.get("time_s", 0.0)),
        "first_step": first_step,
        "last_step": known.get("last_step", first_step),
        "remarks": gpus.get("remarks", []),
        "gpus": {name: value for name, value in gpus.items() if name not in ("time_s", "remarks")} or None,
        "ready_fraction": known.get("bucket_ready"),
    }


def _result(entry: dict[str, Any]) -> dict[str, Any]:
    result = entry["result"]
    # What is stored now was done then.
    return {"time_s": 0.0, "result": {**result, "state": {"done": "stored"}.get(result["state"], result["state"])}}


_EVENTS: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "window": lambda entry: {"verdict": entry["verdict"], **_decided(entry)},
    "ask": lambda entry: {
        "type": "manual_request",
        "request": {"request_id" if name == "ask_id" else name: value for name, value in entry["ask"].items()},
        **_decided(entry),
    },
    "beside": lambda entry: {"type": "follow_up", "capture_id": entry["capture_id"], **_decided(entry)},
    "capture": _result,
    "policy": lambda entry: dict(entry["change"]),
    "cost": lambda entry: dict(entry["cost"]),
    "evidence": _evidence,
}


def translated(
    sentence: str, *, label: Cause, outcome: str, resolves: str = ""
) -> tuple[ReasonCode, Mapping[str, Parameter]]:
    """The code and the parameters of which `words.reason_sentence` makes a sentence of version 1."""
    if sentence == "healthy":
        return "healthy", {}
    if outcome == "hold" and label == "needs_evidence" and sentence:
        return "undecided", {"reasons": tuple(sentence.split(", "))}
    return "recorded", {"text": sentence, "resolves": resolves}
