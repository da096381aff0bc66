"""A stall in one sentence, and when it is said."""

import pytest
from rich.console import Console

from sftriage.decisions import Decision, Suspect, Verdict
from sftriage.events import WindowJudged
from sftriage.sinks.terminal import Reporter
from sftriage.words.verdicts import verdict_sentence


def verdict(*suspects, reasons=("not_arrived",), missing=None, typical_s=0.02):
    numbers = {
        "still_s": 61.3,
        "typical_step_s": typical_s,
        "missing_ranks": float(sum(len(suspect.ranks) for suspect in suspects) if missing is None else missing),
    }
    return Verdict(41, 41, "stalled", reasons, suspects, 62.0, {}, {}, numbers)


def rank(number, stage):
    return Suspect("rank", (number,), stage, 61.3, 0.99, 1.0, rank=number)


@pytest.mark.parametrize(
    ("found", "end"),
    [
        (verdict(rank(1, "forward")), "the others wait for ranks that have not arrived: rank 1 in forward."),
        (
            verdict(rank(1, "forward"), rank(2, "data"), missing=9),
            "not arrived: rank 1 in forward, rank 2 in data and 7 more.",
        ),
        (
            verdict(Suspect("host", (4, 5), "data", 61.3, 0.99, 1.0, host="node-2")),
            "not arrived: host node-2 (ranks 4 and 5) in data.",
        ),
        (
            verdict(Suspect("all", (0, 1), "data", 61.3, 0.99, 1.0), reasons=("no_rank_waits",)),
            "and these have got least far: every rank in data.",
        ),
        (verdict(reasons=("in_sync",)), "every rank is inside the same sync stage, where all of them look alike."),
    ],
)
def test_it_says_for_how_long_where_and_who(found, end):
    sentence = verdict_sentence(found)
    assert sentence.startswith("Stalled: no rank has moved for 61 s in step 41 (a step takes 20.0 ms); ")
    assert sentence.endswith(end)


def test_what_is_not_known_is_not_said():
    sentence = verdict_sentence(verdict(reasons=("outside_steps",), typical_s=0.0))
    assert sentence == "Stalled: no rank has moved for 61 s between steps; no rank is in a step."


def test_a_stall_is_always_said_and_is_no_window(capsys):
    reporter = Reporter(Console(stderr=True, width=200))
    stall = WindowJudged(verdict(rank(1, "forward")), Decision(1.0, 41, 41, "stalled", "hold", "standstill"))
    for _ in range(2):
        reporter.take(stall)
    assert capsys.readouterr().err.count("rank 1 in forward") == 2
    assert reporter.windows == 0
