"""`sftriage advise`: what a person reads, what a program reads, and what bad input gets."""

from contextlib import closing

import pytest

from sftriage.assistants.answers import Answers, RunLookup
from sftriage.model.events import PipelineFigures, RemedyChanged
from sftriage.runs.glance import glance_of
from tests.scenario import Recorder, decision, run_at, verdict
from tests.unit.whatif.planted import Job

LATE_S, STEP_S = 0.02, 0.13


@pytest.fixture
def slow(tmp_path):
    """A run in whose last windows rank 2 of 4 is slow in data: 20 ms of steps of 130 ms or so."""
    made = run_at(tmp_path / "run")
    made.record(4, range(300), lambda rank, step: {"data": 30.0 if rank == 2 else 10.0, "forward": 30, "backward": 60})
    for first in range(0, 250, 50):
        made.decide(verdict(first, "suspect", onset=10), "throttle", "overhead_budget")
    return made.directory.path


def test_a_program_reads_the_same_in_seconds(sftriage, slow):
    told = sftriage("advise", slow, "--gradients", "100MB", "--bandwidth", "1", "--json").json
    assert told["straggler"]["ranks"] == [2]
    assert told["best"] == "rebalance"
    stragglar = next(one for one in told["remedies"] if one["code"] == "stragglar")
    # 4 ranks, 100 MB at 1 GB/s: 4/3 of 100 ms and what 20 ms leave of 2/3 of them, where a ring takes 6/4
    assert stragglar["saves_s"] == pytest.approx(0.15 - (0.2 / 3 - 0.02 + 0.4 / 3), abs=1e-3)
    assert stragglar["pays_from_s"] == pytest.approx(0.05, abs=1e-3)
    assert all(one["says"] and one["taken_for_granted"] for one in told["remedies"])


ABOUT = {"time_s": 1e9, "attempt": 0, "step": 240, "where": "it"}


def noted(run, **remedy):
    with closing(Recorder(run / "decisions.jsonl")) as journal:
        journal.append(RemedyChanged(**ABOUT, **remedy))


def test_a_slow_link_that_the_job_has_measured_is_named_with_nobody_elses_figures(sftriage, tmp_path):
    # GIVEN a run that is healthy by its own standards, with a pipeline that has measured a slow link
    made = run_at(tmp_path / "run")
    for first in range(0, 250, 50):
        made.decide(verdict(first, "healthy"))
    delays = (0.001, 0.02, 0.001)
    figures = PipelineFigures((0.01,) * 4, (0.02,) * 4, delays, microbatches=8, most_S=(8,) * 4)
    link = {"remedy": "pipeline", "rank": 1, "who": "the link between ranks 1 and 2"}
    noted(
        made.directory.path, **link, state="advised", reason="not_allowed", numbers={"delay_s": 0.02}, pipeline=figures
    )
    # THEN advice names it, and what to do about it, in words, as values and at a glance
    said = sftriage("advise", made.directory.path).out.splitlines()
    assert said[0] == "The link between stages 1 and 2 delays a microbatch by 20.0 ms."
    assert said[1].startswith("Run stages further ahead (Adaptra). Saves ")
    told = sftriage("advise", made.directory.path, "--json").json
    assert told["slow_link"] == {"link": 1, "delay_s": 0.02}
    assert any("advise" in one.command for one in glance_of(made.source.view()).steps)
    # AND no more once it has healed
    noted(made.directory.path, **link, state="undone", reason="gone", pipeline=figures)
    assert sftriage("advise", made.directory.path).out.splitlines() == [
        "Nobody has been slow for long enough to be lived with.",
        "Run stages further ahead (Adaptra), the link between ranks 1 and 2 in it: undone, for there is no straggler "
        "any more.",
    ]


def test_what_an_exchange_takes_is_taken_from_the_record(sftriage, slow):
    # GIVEN the same run, whose ranks have measured what an all-reduce takes them
    numbers = {"ring_s": 0.15, "ring_ranks": 4.0, "ring_bytes": 1e8}
    who = {"remedy": "stragglar", "rank": 2, "who": "rank 2"}
    noted(slow, **who, state="advised", reason="not_allowed", numbers=numbers)
    # THEN StragglAR is told in seconds with nobody's figures: as those of the same messages
    told, named = (
        sftriage("advise", slow, *more, "--json").json
        for more in ((), ("--gradients", "100MB", "--bandwidth", "1", "--latency", "0"))
    )
    found, expected = (
        next(one for one in of["remedies"] if one["code"] == "stragglar")["saves_s"] for of in (told, named)
    )
    assert found == pytest.approx(expected)


def test_what_was_tried_is_said_beside_what_would_help(sftriage, slow):
    # GIVEN the same run, in which a remedy was tried on two groups of ranks, and is kept on one of them
    who = {"remedy": "stragglar", "rank": 2, "who": "rank 2"}
    measured = {"on_s": 0.15, "off_s": 0.13, "error_s": 0.001, "saves_s": -0.02}
    for switch, state, reason in (
        ("one", "trying", "worthwhile"),
        ("two", "trying", "worthwhile"),
        ("one", "undone", "no_help"),
        ("two", "kept", "helps"),
        ("three", "advised", "not_allowed"),
    ):
        noted(slow, **who, switch=switch, state=state, reason=reason, numbers=measured)
    # THEN advice says what came of it, before what its model promises
    said = sftriage("advise", slow).out.splitlines()
    assert [line.partition(": ")[2].partition(";")[0] for line in said[1:3]] == [
        "undone, for it does not help",
        "kept, for it helps",
    ]
    told = sftriage("advise", slow, "--json").json["tried"]
    assert [(one["switch"], one["state"], one["numbers"]) for one in told] == [
        ("one", "undone", measured),
        ("two", "kept", measured),
    ]


def test_windows_that_lack_ranks_do_not_hide_who_is_slow(sftriage, slow):
    # GIVEN the same run, nothing of whose straggler is heard any more for as many windows as count
    with closing(Recorder(slow / "decisions.jsonl")) as journal:
        for first in range(250, 1250, 50):
            one = verdict(first, "needs_evidence", reasons=("low_coverage",))
            journal.window(one, decision(one, "hold", "low_coverage"))
    # THEN the last that is known stands
    assert sftriage("advise", slow).out.startswith("Rank 2 holds up 4 ranks in data")


def test_a_pipeline_is_advised_on_with_nobody_slow(sftriage, tmp_path):
    pytest.importorskip("pyarrow", reason="no reader of Parquet here: pip install 'sftriage[whatif]'")
    import pyarrow
    from pyarrow import parquet

    from sftriage.whatif.pipeline import COLUMNS

    made = run_at(tmp_path / "run")
    rows = Job(stages=3, dps=2, steps=3).rows()
    columns = {name: getattr(rows, field) for name, field in COLUMNS.items()}
    columns["optype"] = [rows.optypes[index] for index in rows.optype_E]
    parquet.write_table(pyarrow.table(columns), tmp_path / "trace.parquet")
    outcome = sftriage("advise", made.directory.path, "--pipeline", tmp_path / "trace.parquet")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("Nobody has been slow for long enough to be lived with.\n")
    assert "Run stages further ahead (Adaptra). " in outcome.out


def test_who_is_there_to_stay_is_said_at_a_glance_and_to_an_assistant(sftriage, slow):
    # GIVEN such a run WHEN it is glanced at THEN the command is among what to do next
    places = RunLookup(slow.parent)
    steps = [one.command for one in glance_of(places.view(places.run("run"))).steps]
    assert f"sftriage advise {slow}" in steps
    # AND an assistant is told, with what it stands on
    told = Answers(places).advise("run")
    assert told["best"] == "rebalance"
    assert told["cites"]["ranks"] == [2]
    assert told["says"][0].startswith("Rank 2 holds up 4 ranks")


def test_who_is_slow_for_a_few_windows_is_not_there_to_stay(sftriage, tmp_path):
    # GIVEN a run of which 3 of the last 10 windows name a rank
    made = run_at(tmp_path / "run")
    for first in range(0, 500, 50):
        made.decide(verdict(first, "suspect" if first >= 350 else "healthy"))
    outcome = sftriage("advise", made.directory.path)
    # THEN there is nothing to live with
    assert outcome.out == "Nobody has been slow for long enough to be lived with.\n"
    assert not any("advise" in one.command for one in glance_of(made.source.view()).steps)
