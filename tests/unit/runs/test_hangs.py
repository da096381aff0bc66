"""The table of a hang: where each rank is, and ranks in the same place in one row."""

from dataclasses import replace
from pathlib import Path

import pytest

from sftriage.errors import InputError
from sftriage.model.hangs import Call, GroupCalls, Hang, RankEvidence, SourceLine, ThreadEvidence
from sftriage.runs.hangs import MAX_ROWS, hang_rows, hang_rows_of, read_hang
from sftriage.traces.store import LocalStore
from tests.unit.conftest import keep
from tests.unit.hanging import EVIDENCE, RANKS, put_hang, with_hang

REDUCE = "all_reduce of 1 float, #126 of the default group"


def cells(*ranks, **about):
    return [row.cells for row in hang_rows(with_hang(ranks=ranks, hang=None, **about))]


def test_GIVEN_a_hang_THEN_the_rank_at_fault_is_first_and_the_others_are_one_row():
    assert [row.cells for row in hang_rows(EVIDENCE)] == [
        (
            "2",
            "node-2",
            "60",
            "validate (train.py:52)",
            REDUCE.replace("reduce of 1 float", "gather of 3 floats"),
            "in forward",
        ),
        ("0, 1 and 3", "2 hosts", "60", "train (train.py:91)", REDUCE, "in backward"),
    ]


@pytest.mark.parametrize(
    ("about", "state"),
    [
        ({"stage": None}, "between steps"),
        ({"alive": False, "exit_status": 3}, "dead (exit status 3)"),
        ({"alive": False, "exit_status": -9}, "dead (killed by SIGKILL)"),
        ({"closed": True}, "has stopped recording"),
        ({"answered": False, "state": "T"}, "stopped (SIGSTOP)"),
        ({"answered": False, "problem": "its host does not answer"}, "its host does not answer"),
        ({"answered": False}, "does not answer"),
    ],
)
def test_GIVEN_a_rank_in_a_state_THEN_the_table_has_it_in_words(about, state):
    assert cells(replace(RANKS[0], **about))[0][-1] == state


def test_GIVEN_little_evidence_THEN_unknown_cells_are_empty():
    assert cells(RankEvidence(0, "node-1", 7)) == [("0", "node-1", "", "", "", "does not answer")]


def test_GIVEN_calls_in_several_groups_THEN_each_is_named_and_a_lost_one_is_not_guessed():
    groups = GroupCalls("2", "tp", None, 1, (0,), (1, 2)), GroupCalls("0", "default_pg", None, 5, (-1,), (5,))
    main = ThreadEvidence("MainThread", main=True, frames=(SourceLine("wait", "/x/threading.py", 3),))
    rank = replace(RANKS[0], groups=groups, calls=(Call("barrier"),), threads=(main,))
    assert cells(rank)[0][3:5] == (
        "wait (threading.py:3)",
        "barrier, #1 of group 2; a collective, #5 of the default group",
    )


def test_GIVEN_many_ranks_in_different_places_THEN_the_last_row_counts_the_rest():
    rows = hang_rows(
        with_hang(ranks=tuple(replace(RANKS[0], rank=n, step=n) for n in range(100)), hang=Hang("unknown"))
    )
    assert len(rows) == MAX_ROWS
    assert (rows[-1].ranks, rows[-1].where) == (f"{MAX_ROWS - 1} to 99", "in other places")


def test_GIVEN_a_stored_capture_THEN_its_evidence_is_read_back(tmp_path: Path):
    manifest = put_hang(tmp_path)
    assert read_hang(LocalStore(tmp_path), manifest) == EVIDENCE
    assert hang_rows_of(LocalStore(tmp_path), manifest) == hang_rows(EVIDENCE)


def test_GIVEN_damaged_evidence_or_another_capture_THEN_there_is_no_table(tmp_path: Path):
    damaged, store = put_hang(tmp_path, damaged=True), LocalStore(tmp_path)
    with pytest.raises(InputError, match=r"c-9: hang\.json cannot be read"):
        read_hang(store, damaged)
    assert hang_rows_of(store, damaged) == hang_rows_of(store, keep(tmp_path, "c-1")) == []
