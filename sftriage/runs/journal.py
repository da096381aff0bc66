"""The journal: a line of JSON for everything that was decided, and for everything that became of it.

A line is written whole, or is cut short by a crash and passed over when read. Its ``type`` is ``window`` (a verdict and
the decision taken on it), ``ask`` (a person's, and the decision), ``beside`` (a capture that another one led to),
``capture`` (a result), ``policy`` (other policies were found while running, and taken over or refused), ``cost`` or
``evidence``. Where captures are asked for, ``triggers`` says why each exists: what a later controller needs to go on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from sftriage.errors import InputError
from sftriage.records import Ask, CaptureResult, Decision, Trigger, Verdict, plain

Entry: TypeAlias = dict[str, Any]
Triggers: TypeAlias = Mapping[str, Trigger]


class Journal:
    """Appends to ``decisions.jsonl``; every line is on disk before the call returns."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        size_bytes = os.fstat(self._descriptor).st_size
        # A line that a crash cut short must not swallow the next one.
        if size_bytes and os.pread(self._descriptor, 1, size_bytes - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def window(self, verdict: Verdict, decision: Decision, triggers: Triggers | None = None) -> None:
        """One window's verdict and decision, and why each capture exists that it asks for."""
        self._append({"type": "window", "verdict": plain(verdict), **_decided(decision, triggers)})

    def ask(self, ask: Ask, decision: Decision, triggers: Triggers | None = None) -> None:
        """What a person asked for, and what was decided about it."""
        self._append({"type": "ask", "ask": plain(ask), **_decided(decision, triggers)})

    def beside(self, capture_id: str, decision: Decision, triggers: Triggers) -> None:
        """What is captured because of how another capture went."""
        self._append({"type": "beside", "capture_id": capture_id, **_decided(decision, triggers)})

    def capture(self, result: CaptureResult) -> None:
        """What became of a capture."""
        self._append({"type": "capture", "result": plain(result)})

    def policy(self, change: Mapping[str, Any]) -> None:
        """Policies that were taken over or refused."""
        self._append({"type": "policy", "change": plain(change)})

    def cost(self, cost: Mapping[str, Any]) -> None:
        """What captures cost the job."""
        self._append({"type": "cost", "cost": plain(cost)})

    def evidence(self, evidence: Mapping[str, Any]) -> None:
        """What was gathered beside a verdict."""
        self._append({"type": "evidence", "evidence": plain(evidence)})

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _append(self, entry: Entry) -> None:
        os.write(self._descriptor, json.dumps(entry, allow_nan=False).encode() + b"\n")
        os.fsync(self._descriptor)


def _decided(decision: Decision, triggers: Triggers | None) -> Entry:
    return {"decision": plain(decision), **({"triggers": plain(triggers)} if triggers else {})}


def read_journal(path: Path) -> Iterator[Entry]:
    """The journal's entries in order. Lines that are no entries are passed over; no journal is an empty one.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                if isinstance(entry, dict) and isinstance(entry.get("type"), str):
                    yield entry
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
