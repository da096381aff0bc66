"""The journal: a line of JSON for everything that was decided, and for everything that became of it.

A line is written whole, or is cut short by a crash and passed over when read. There are three types: ``window`` (a
verdict and the decision taken on it), ``capture`` (a result) and ``policy`` (other policies were found while running,
and taken over or refused).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from sftriage.errors import InputError
from sftriage.records import Ask, CaptureResult, Decision, Verdict, plain

Entry: TypeAlias = dict[str, Any]


class Journal:
    """Appends to ``decisions.jsonl``; every line is on disk before the call returns."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        size_bytes = os.fstat(self._descriptor).st_size
        # A line that a crash cut short must not swallow the next one.
        if size_bytes and os.pread(self._descriptor, 1, size_bytes - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def window(self, verdict: Verdict, decision: Decision) -> None:
        """One window's verdict and decision."""
        self._append({"type": "window", "verdict": plain(verdict), "decision": plain(decision)})

    def ask(self, ask: Ask, decision: Decision) -> None:
        """What a person asked for, and what was decided about it."""
        self._append({"type": "ask", "ask": plain(ask), "decision": plain(decision)})

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
