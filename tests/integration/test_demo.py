"""What the demo does on its own: it finds its slow rank, captures it, and tells of it."""

import json

from tests.integration.linked import check_linked
from tests.integration.runs import captures


def test_the_demo_finds_its_slow_rank_and_captures_it(demonstrated, start):
    # GIVEN a demo in which rank 2 becomes slow in data THEN it was captured, linked to the window that led to it
    run = demonstrated.run
    decisions = json.loads(start("decisions", "--run", run, "--json").communicate(timeout=60)[0])
    (manifest,) = [one for one in captures(run) if (one.capture.rank, one.trigger.stage) == (2, "data")]
    check_linked(run, manifest, decisions, 4)
    assert manifest.trigger.window.last_step >= demonstrated.fault_step
    # AND it can be listed, shown and fetched
    rows = json.loads(start("traces", "list", "--run", run, "--json").communicate(timeout=60)[0])
    assert manifest.capture_id in [row["capture_id"] for row in rows]
    shown = json.loads(start("traces", "show", manifest.capture_id, "--run", run, "--json").communicate(timeout=60)[0])
    why = {"cause": shown["findings"]["cause"]}
    assert shown == {**json.loads(manifest.to_json()), **why, "state": "whole", "problem": None, "upload": None}


def test_a_person_is_told_what_happened(demonstrated, start, tmp_path):
    for said in ("is slow in data", "Frontier", "advance", "leader", "Captured", "Because of", "sftriage traces get"):
        assert said in demonstrated.said
    # AND it ends with the line of code at which the rank was slow, and knows that this is what it had hidden
    *_, why, judged = demonstrated.said.splitlines()
    assert "in pause_for (train.py:" in why
    assert "time.sleep(fault.delay_s)), which sleeps" in why
    assert judged.startswith("That is     right: ")
    # AND the command that it names works as it was printed
    line = next(line for line in demonstrated.said.splitlines() if "sftriage traces get" in line)
    fetched = start(*line.split("sftriage ")[1].split(), cwd=tmp_path)
    assert fetched.communicate(timeout=60)[1] == ""
    assert list(tmp_path.glob("*.json.gz"))
