"""What the demo does on its own: it finds its slow rank, captures it, and tells of it."""

import json
import re

import msgspec
import pytest

from sftriage.model.events import WindowJudged
from sftriage.model.verdicts import Verdict
from sftriage.runs.journal import read_journal
from sftriage.runs.timetable import Charges
from tests.integration.linked import check_linked
from tests.integration.processes import DEADLINE_S
from tests.integration.runs import captures


def test_the_demo_finds_its_slow_rank_and_captures_it(demonstrated, sftriage):
    # GIVEN a demo in which rank 2 becomes slow in data THEN it was captured, linked to the window that led to it
    run = demonstrated.run
    decisions = sftriage("decisions", "--run", run, "--json").json
    (manifest,) = [one for one in captures(run) if (one.capture.rank, one.trigger.stage) == (2, "data")]
    check_linked(run, manifest, decisions, 4)
    assert manifest.trigger.window.last_step >= demonstrated.fault_step
    # AND it can be listed, shown and fetched
    rows = sftriage("traces", "list", "--run", run, "--json").json
    assert manifest.capture_id in [row["capture_id"] for row in rows]
    shown = sftriage("traces", "show", manifest.capture_id, "--run", run, "--json").json
    why = {"cause": shown["findings"]["cause"]}
    assert shown == {**json.loads(manifest.to_json()), **why, "state": "whole", "problem": None, "upload": None}


def test_what_the_slow_rank_has_cost_is_the_same_while_it_runs_and_afterwards(demonstrated, sftriage):
    # GIVEN what the run's own journal sums to
    journal = read_journal(demonstrated.run / "decisions.jsonl")
    verdicts = [entry.verdict for entry in journal if isinstance(entry, WindowJudged)]
    live = Charges.of_judged((verdict, ()) for verdict in verdicts).losses
    slow = live.largest[0]
    assert (slow.who, slow.where) == ("rank 2", "data")
    # THEN so does its recording, judged again, and each step counts once
    lines = sftriage("analyze", demonstrated.run, "--json").out.splitlines()
    again = Charges.of_judged((msgspec.json.decode(line, type=Verdict), ()) for line in lines).losses
    assert again.by_suspect == live.by_suspect
    # (the steps since it may have begun: the rank may have been last by chance just before it was slowed)
    named = [one.suspects[0] for one in verdicts if one.label == "suspect" and one.suspects[0].rank == 2]
    began = min(one.onset_range[0] for one in named)
    assert 0 < slow.steps <= demonstrated.steps - began
    # AND the run is told of by it, and the verdict by what a step would take without
    said = sftriage("watch", "--once", "--json", "--run", demonstrated.run).out
    assert json.loads(said)["losses"][0]["rank_s"] == slow.rank_s
    # AND the time table has the same among rows that add up to the wall clock
    times = json.loads(said)["times"]
    assert sum(row["seconds"] for row in times["rows"]) == pytest.approx(times["wall_s"])
    (row,) = [row for row in times["rows"] if (row["code"], row["subject"]) == ("suspect", "rank 2")]
    assert row["seconds"] == pytest.approx(slow.lost_s, rel=0.1)
    report = sftriage("report", demonstrated.run).out
    assert "| rank 2 in data |" in report
    assert "without it" in sftriage("explain", str(slow.last_step), "--run", demonstrated.run).out
    # AND mending the rank saves as much in whatever is asked what would help
    gain_s = next(one for one in reversed(verdicts) if one.reasons != ("self_inflicted",)).suspects[0].gain_s
    said = sftriage("whatif", demonstrated.run, "--json").json
    assert (said["kinds"][0]["workers"], said["kinds"][0]["saves_s"]) == ([{"dp": 2, "pp": 0}], gain_s)
    said = sftriage("advise", demonstrated.run, "--json").json
    assert said["straggler"]["late_s"] == gain_s


def test_a_person_is_told_what_happened(demonstrated, start, tmp_path):
    for said in ("is slow in data", "Frontier", "advance", "leader", "Captured", "Because of", "sftriage traces get"):
        assert said in demonstrated.said
    # AND it ends with the line of code at which the rank was slow, and knows that this is what it had hidden
    *_, why, judged = demonstrated.said.splitlines()
    assert "in pause_for (train.py:" in why
    assert "time.sleep(fault.delay_s)), which sleeps" in why
    assert judged.startswith("Result      correct ")
    # AND the command that it names works as it was printed
    line = next(line for line in demonstrated.said.splitlines() if "sftriage traces get" in line)
    fetched = start(*line.split("sftriage ")[1].split(), cwd=tmp_path)
    assert fetched.communicate(timeout=60)[1] == ""
    assert list(tmp_path.glob("*.json.gz"))


HANGS = {
    # the cause and its rank: how many ranks, and why it hangs
    "hang-collective:2": (
        3,
        r"Rank 2 called all_gather of 1 float in validate .* where ranks 0 and 1 called all_reduce .*",
    ),
    "hang-lock:1": (
        2,
        r"Rank 1 has not reached .*: it waits for the lock .* in look_up .*, held by thread refresh_index .*",
    ),
    "hang-worker:1": (
        2,
        r"Rank 1 has not reached .*: it waits .* for DataLoader worker \d+, which is in read_shard .*",
    ),
}


@pytest.mark.parametrize("cause", HANGS)
def test_a_demo_that_hangs_ends_once_it_is_known_why_and_checks_that(cause, start, tmp_path):
    # GIVEN a demo of which a rank hangs
    ranks, reason = HANGS[cause]
    # WHEN it is known why THEN the demo ends its job, and has compared rank and line
    demo = start("demo", "--cause", cause, "--ranks", ranks, "--steps", 60, "--out", tmp_path / "run")
    out, log = demo.communicate(timeout=DEADLINE_S)
    *_, injected, why, result = out.splitlines()
    assert (demo.returncode, result) == (0, "Result      correct (rank, cause and line)"), out + log
    assert injected.startswith(f"Injected    {cause} ")
    assert re.fullmatch(f"Why         {reason}", why), why
    # AND the command that shows all ranks works as it was printed
    line = next(line for line in out.splitlines() if line.startswith("Show it"))
    shown = start(*line.split("sftriage ")[1].split(), "--json", cwd=tmp_path)
    assert json.loads(shown.communicate(timeout=60)[0])["cause"]["sentence"] in why
