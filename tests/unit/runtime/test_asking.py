"""When a request that a person left is decided: once its ranks are there, or cannot be expected any more."""

import pytest

from sftriage.decisions import ManualRequest
from sftriage.records import JobStatus, RankStatus, StageSchema
from sftriage.runs.directory import RunDirectory
from sftriage.runs.requests import leave, left
from sftriage.runtime.triage import STARTING_S, ManualRequests
from sftriage.traces.disk import at_once
from sftriage.windows.statuses import status_of

SCHEMA = StageSchema(("data", "backward"), sync=("backward",))


def job(*ranks: int) -> JobStatus | None:
    """A job of four, of which these show something."""
    told = tuple(RankStatus(rank, "a", None, 0, 5, 0, 5, False, True) for rank in ranks)
    return status_of(SCHEMA, 4, told) if told else None


@pytest.fixture
def asks(tmp_path):
    return ManualRequests(RunDirectory(tmp_path), at_once)


def leave_one(directory, number, *ranks):
    leave(directory, ManualRequest(f"a-{number}", ranks, "ann", "why not"))


@pytest.mark.parametrize(
    ("asked", "there", "ended", "waits"),
    [
        ((1,), (0, 1, 2, 3), False, False),
        # One that the job has, but that shows nothing yet: it has just started, or again
        ((1,), (0,), False, True),
        ((0, 1), (0,), False, True),
        ((1,), (), False, True),
        # No rank of this job, whoever is there
        ((4,), (0, 1, 2, 3), False, False),
        ((1, 4), (0,), False, False),
        # Nobody starts any more
        ((1,), (0,), True, False),
        ((1,), (), True, False),
    ],
)
def test_a_request_waits_for_ranks_that_may_start(tmp_path, asks, asked, there, ended, waits):
    # GIVEN a request, and a job some of whose ranks are there
    leave_one(RunDirectory(tmp_path), 1, *asked)
    # WHEN it is looked for THEN it is to be decided, or waits
    due = list(asks.due(lambda: job(*there), 100.0, ended=ended))
    assert [ask.ranks for ask, _ in due] == ([] if waits else [asked])
    # AND its file stays as long as it does
    assert len(left(RunDirectory(tmp_path))) == waits


def test_a_rank_that_never_comes_is_not_waited_for_for_ever_and_keeps_nobody_up(tmp_path, asks):
    # GIVEN a request for a rank that is not there, and one for a rank that is
    leave_one(RunDirectory(tmp_path), 1, 1)
    leave_one(RunDirectory(tmp_path), 2, 0)

    def due(now_s):
        return [
            (ask.request_id, status.rank_R.tolist()) for ask, status in asks.due(lambda: job(0), now_s, ended=False)
        ]

    # THEN the latter is decided at once, and the former with what is there once it has waited
    assert due(100.0) == [("a-2", [0])]
    assert due(100.0 + 0.9 * STARTING_S) == []
    assert due(100.0 + STARTING_S) == [("a-1", [0])]
    assert due(200.0) == []
