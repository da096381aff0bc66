"""What an earlier controller of a run has left, as the journal has it: the next one goes on, and repeats nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sftriage.records import CaptureRequest, Trigger
from sftriage.runs.journal import Entry


@dataclass(frozen=True, slots=True)
class Left:
    """What a journal says was done, and what was begun.

    Attributes:
        decided: for each attempt, the last step of the last window that was decided.
        unended: captures that were asked for and have not ended, with why they exist, by id.
        asks: the asks of people that were decided.
    """

    decided: Mapping[int, int] = field(default_factory=dict)
    unended: Mapping[str, tuple[CaptureRequest, Trigger]] = field(default_factory=dict)
    asks: frozenset[str] = frozenset()


def left_in(journal: Iterable[Entry]) -> Left:
    """What a run's journal has left. An entry that is not what it should be counts as not written.

    Args:
        journal: its entries, in order.
    """
    decided: dict[int, int] = {}
    unended: dict[str, tuple[CaptureRequest, Trigger]] = {}
    asks: set[str] = set()
    for entry in journal:
        try:
            if entry["type"] == "capture":
                unended.pop(entry["result"]["capture_id"], None)
            elif entry["type"] in ("window", "ask", "beside"):
                unended |= _begun(entry)
            if entry["type"] == "window" and entry["verdict"]["label"] != "stalled":
                attempt, last_step = int(entry["verdict"]["attempt"]), int(entry["verdict"]["last_step"])
                decided[attempt] = max(last_step, decided.get(attempt, last_step))
            elif entry["type"] == "ask":
                asks.add(str(entry["ask"]["ask_id"]))
        except (KeyError, TypeError, ValueError, msgspec.ValidationError):
            continue
    return Left(decided, unended, frozenset(asks))


def _begun(entry: Entry) -> dict[str, tuple[CaptureRequest, Trigger]]:
    """The captures that an entry asked for."""
    triggers: Mapping[str, Any] = entry.get("triggers", {})
    requests = [msgspec.convert(values, CaptureRequest) for values in entry["decision"]["requests"]]
    return {one.capture_id: (one, msgspec.convert(triggers[one.capture_id], Trigger)) for one in requests}
