"""Which run is meant: the one named with ``--run``, or the newest that was started on this machine."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from sftriage.errors import UsageError
from sftriage.runs.directory import RunDirectory

DEFAULT_ROOT = "sftriage-runs"


def new_run_id(now: datetime) -> str:
    """A run's name: when it began, and enough chance that two which begin together differ."""
    return f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def find_run(run: Path | None) -> RunDirectory:
    """The run directory to look at.

    Raises:
        UsageError: there is none, or the one named is not one.
    """
    if run is not None:
        if not run.is_dir():
            raise UsageError(f"{run}: no such directory")
        found = RunDirectory(run)
        if not found.info_file.is_file():
            raise UsageError(f"{run} is not a run directory: it has no run.json")
        return found
    for path in _remembered():
        if (newest := RunDirectory(path)).info_file.is_file():
            return newest
    raise UsageError("no run was started yet; start one with `sftriage demo` or `sftriage run`, or name one with --run")


def run_so_far(run: Path | None) -> RunDirectory | None:
    """The run directory to look at, or None as long as none was started. One that is named may come to be one yet."""
    if run is not None:
        return RunDirectory(run)
    try:
        return find_run(None)
    except UsageError:
        return None


def remember(run: RunDirectory) -> None:
    """Note that a run was started, so that later commands find it. A home that cannot be written is no obstacle."""
    line = json.dumps({"path": str(run.path)}) + "\n"
    try:
        notes = _notes()
        notes.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with notes.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError:
        return


def _remembered() -> Iterator[Path]:
    """Directories of the runs that were started, newest first."""
    try:
        lines = _notes().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in reversed(lines):
        try:
            yield Path(json.loads(line)["path"])
        except (ValueError, KeyError, TypeError):
            continue


def _notes() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "sftriage" / "runs.jsonl"
