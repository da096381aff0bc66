"""Manual requests on disk: what one process leaves, another takes up."""

from __future__ import annotations

from pathlib import Path

from sftriage.decisions import ManualRequest
from sftriage.runs.directory import RunDirectory
from sftriage.runs.requests import leave, left

REQUEST = ManualRequest("a1", (0, 2), "alice", "it is slow", steps=3)


def test_a_request_that_is_left_is_taken_up_once(tmp_path: Path) -> None:
    # GIVEN a request that a person left in a run's directory
    directory = RunDirectory(tmp_path)
    leave(directory, REQUEST)
    # WHEN the run takes it up THEN it is what was left, and it is gone once its file is removed
    ((path, request),) = left(directory)
    assert request == REQUEST
    path.unlink()
    assert left(directory) == []


def test_what_is_no_file_keeps_no_request_up(tmp_path: Path) -> None:
    # GIVEN a directory where requests are left
    directory = RunDirectory(tmp_path)
    (directory.asks / "a0.json").mkdir(parents=True)
    leave(directory, REQUEST)
    # THEN it is left alone, and requests are taken up
    assert [request for _, request in left(directory)] == [REQUEST]
