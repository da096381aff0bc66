"""The picture of a stall: where in the step each rank stands."""

from dataclasses import replace

import pytest

from sftriage.model.verdicts import Suspect
from sftriage.runs.decisions import row_of
from sftriage.runs.stalls import stall_of
from tests.scenario import decision, row, verdict

HOST = Suspect("host", (2, 3), None, 61.0, 1.0, 1.0, host="vm")
MARKS = {"passed": "=", "ahead": " ", "missing": "X", "waiting": "|", "unknown": "."}


def rank(number, stage="forward"):
    return Suspect("rank", (number,), stage, 61.0, 1.0, 1.0, number)


def stalled(*suspects, reasons=("not_arrived",), sync=("backward",), **ranks):
    numbers = {"still_s": 61.0, **{f"{name}_ranks": float(number) for name, number in ranks.items()}}
    of = replace(verdict(80, "stalled", reasons=reasons), suspects=suspects, numbers=numbers, sync=sync)
    return row_of(of, decision(of))


@pytest.mark.parametrize(
    ("of", "world_size", "expected"),
    [
        # In a small job every rank has a row.
        (
            stalled(rank(1), missing=1, waiting=2),
            3,
            ["rank 0 in a sync stage ==| ", "rank 1 not with the others =X  ", "rank 2 in a sync stage ==| "],
        ),
        # In a large one, or where not all are known, those that stand alike have one.
        (
            stalled(rank(1), rank(7, "data"), missing=12, waiting=100),
            112,
            [
                "rank 1 not with the others =X  ",
                "rank 7 not with the others X   ",
                "10 more not with the others ....",
                "100 other ranks in a sync stage ==| ",
            ],
        ),
        (
            stalled(rank(1), missing=1, waiting=1, unseen=1),
            4,
            [
                "rank 1 not with the others =X  ",
                "1 other rank in a sync stage ==| ",
                "1 other rank further on ....",
                "1 other rank not recording ....",
            ],
        ),
        # A missing rank may be in a sync stage, too: of an earlier step.
        (
            stalled(rank(1, "backward"), missing=1, waiting=3),
            3,
            ["rank 0 in a sync stage ==| ", "rank 1 not with the others ==X ", "rank 2 in a sync stage ==| "],
        ),
        (
            stalled(rank(1), missing=1, waiting=3),
            0,
            ["rank 1 not with the others =X  ", "3 other ranks in a sync stage ==| "],
        ),
        # Ranks of a host may be in different stages, and those that wait may be in any of several sync stages.
        (
            stalled(HOST, missing=2, waiting=2, sync=("forward", "backward")),
            4,
            [
                "rank 0 in a sync stage =|| ",
                "rank 1 in a sync stage =|| ",
                "rank 2 not with the others ....",
                "rank 3 not with the others ....",
            ],
        ),
        # Why they are missing is said, where all are for one reason.
        (
            stalled(rank(1), reasons=("died",), missing=1, waiting=1),
            2,
            ["rank 0 in a sync stage ==| ", "rank 1 ended =X  "],
        ),
        (
            stalled(rank(1), reasons=("died", "not_arrived"), missing=1, waiting=1),
            2,
            ["rank 0 in a sync stage ==| ", "rank 1 not with the others =X  "],
        ),
        (
            stalled(rank(1, "other"), reasons=("left_early",), missing=1, waiting=1),
            2,
            ["rank 0 in a sync stage ==| ", "rank 1 stopped recording ===X"],
        ),
        (
            stalled(rank(1), reasons=("no_rank_waits",), missing=1),
            2,
            ["rank 0 further on ....", "rank 1 least far =X  "],
        ),
        # Where all are in one exchange, all wait.
        (stalled(reasons=("in_sync",), waiting=2), 2, ["rank 0 in a sync stage ==| ", "rank 1 in a sync stage ==| "]),
    ],
)
def test_a_rank_is_drawn_where_it_stands(of, world_size, expected):
    stall = stall_of([row(20), of], of, world_size)
    assert (stall.step, stall.still_s, stall.stages) == (80, 61.0, ("data", "forward", "backward", "other"))
    assert [f"{one.name} {one.text} {''.join(map(MARKS.get, one.cells))}" for one in stall.rows] == expected


def test_a_job_that_stalls_in_its_first_steps_has_the_stages_that_are_known():
    of = stalled(rank(1), missing=1, waiting=1)
    assert stall_of([of], of, 2).stages == ("forward", "backward")


@pytest.mark.parametrize("of", [row(20), stalled(reasons=("outside_steps",), waiting=0), stalled()])
def test_without_a_rank_in_a_step_there_is_nothing_to_draw(of):
    assert stall_of([of], of, 0) is None
