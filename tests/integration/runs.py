"""What a run's directory says, while its job goes on and afterwards."""

from pathlib import Path
from typing import Any

from sftriage.traces.manifest import Manifest
from sftriage.traces.store import LocalStore
from tests.scenario import entries, run_at
from tests.unit.conftest import keep


def run_with_capture(folder: Path) -> Path:
    """A run of which no more is known than its one capture, c-1."""
    run = run_at(folder / "run").directory.path
    keep(run, "c-1")
    return run


def captures(run: Path) -> tuple[Manifest, ...]:
    """The captures that are listed: whole ones, and none that is still being written."""
    return LocalStore(run).manifests().manifests


def on_record(run: Path, kind: str) -> list[dict[str, Any]]:
    return entries(run / "decisions.jsonl", kind)


def verdicts(run: Path) -> list[dict[str, Any]]:
    return [entry["verdict"] for entry in on_record(run, "window")]


def named(verdict: dict[str, Any]) -> tuple[int | None, str | None] | None:
    """Who is suspected: the rank, and its stage."""
    if verdict["label"] != "suspect":
        return None
    return verdict["suspects"][0]["rank"], verdict["suspects"][0]["stage"]
