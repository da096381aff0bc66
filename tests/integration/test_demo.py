"""The whole path on a real job: a hidden slow rank is found, captured and linked; what cannot be decided is held."""

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from sftriage.demo.faults import parse_fault

STEPS = 300
FAULT_STEP = 120
DEMO_DEADLINE_S = 580


@pytest.fixture
def demo(start, tmp_path):
    """Run the demo to its end; what it printed, as a program reads it."""

    def demo(*arguments: object, steps: int = STEPS) -> dict[str, Any]:
        process = start("demo", "--json", "--steps", steps, "--out", tmp_path / "run", *arguments)
        out, err = process.communicate(timeout=DEMO_DEADLINE_S)
        assert process.returncode == 0, err
        return json.loads(out.splitlines()[-1])

    return demo


def kineto(run: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """The stored trace of a capture, whole and unharmed."""
    (artefact,) = manifest["artefacts"]
    path = Path(run) / "captures" / manifest["capture_id"] / artefact["name"]
    content = path.read_bytes()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (artefact["size_bytes"], artefact["sha256"])
    return json.loads(gzip.decompress(content))


@pytest.mark.parametrize("fault", ["data:2:40", "forward:0:40", "optimizer:3:40", "other:1:40"])
def test_a_slow_rank_is_found_captured_and_linked(demo, start, fault):
    injected = parse_fault(fault)
    # GIVEN a real job of four ranks, one of which becomes slow in one stage
    # WHEN it has run to its end
    outcome = demo("--fault", fault)
    # THEN every suspect that was named after the fault began is that rank and stage, and none was before
    suspects = [w for w in outcome["windows"] if w["label"] == "suspect"]
    assert suspects
    for window in suspects:
        named = window["suspects"][0]
        assert (named["scope"], named["rank"], named["stage"]) == ("rank", injected.rank, injected.stage)
        assert window["last_step"] >= FAULT_STEP
    # AND just that rank was captured, once, linked to the window that led to it
    (manifest,) = outcome["captures"]
    trigger, capture = manifest["trigger"], manifest["capture"]
    assert (capture["rank"], capture["world_size"], trigger["stage"]) == (injected.rank, 4, injected.stage)
    (decision,) = [d for d in outcome["decisions"] if d["outcome"] == "capture"]
    assert (decision["first_step"], decision["last_step"]) == tuple(trigger["window"].values())
    assert [request["rank"] for request in decision["requests"]] == [injected.rank]
    # AND the trace holds the promised steps, taken in the fault, with rank and world size in it
    trace = kineto(outcome["run_dir"], manifest)
    steps = {
        e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation" and "ProfilerStep#" in e["name"]
    }
    promised = range(capture["first_step"], capture["last_step"] + 1)
    assert len(promised) == 5
    assert promised[0] > trigger["window"]["last_step"] >= FAULT_STEP
    assert {f"ProfilerStep#{n}" for n in promised} <= steps
    assert (trace["distributedInfo"]["rank"], trace["distributedInfo"]["world_size"]) == (injected.rank, 4)
    # AND it can be listed, shown and fetched
    run = outcome["run_dir"]
    (row,) = json.loads(start("traces", "list", "--run", run, "--json").communicate(timeout=60)[0])
    shown = json.loads(start("traces", "show", row["capture_id"], "--run", run, "--json").communicate(timeout=60)[0])
    assert shown == {**manifest, "state": "whole", "problem": None, "upload": None}
    got = start("traces", "get", row["capture_id"], "--run", run, "--out", Path(run) / "mine.json.gz", "--json")
    assert json.loads(got.communicate(timeout=60)[0])["sha256"] == manifest["artefacts"][0]["sha256"]
    # AND the job's pace is told for every part of the run; by how much it changed is the machine's business
    times = outcome["step_time_s"]
    assert set(times) == {"before_fault", "in_fault", "in_capture", "after_capture"}
    assert all(seconds > 0 for seconds in times.values())
    # AND the spool is empty: nothing was left lying about
    assert list((Path(run) / "spool").iterdir()) == []


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (["backward:1:40"], "sync_ambiguous"),
        (["data:2:60", "forward:1:60"], "co_critical"),
    ],
)
def test_what_the_coarse_signal_cannot_decide_is_held_and_says_why(demo, faults, reason):
    # GIVEN a fault inside the sync stage, or two stragglers alike
    outcome = demo(*(word for fault in faults for word in ("--fault", fault)))
    # THEN nothing was captured, and nobody was named
    assert outcome["captures"] == []
    assert [w for w in outcome["windows"] if w["label"] == "suspect"] == []
    # AND the windows that lie in the fault were held, with the reason and what would resolve it
    held = [d for d in outcome["decisions"] if d["outcome"] == "hold" and reason in d["reason"]]
    within = [d for d in outcome["decisions"] if d["first_step"] >= FAULT_STEP]
    assert len([d for d in held if d in within]) >= 0.8 * len(within)
    assert all(d["resolves"] for d in held)


@pytest.mark.timeout(600)
def test_a_healthy_run_of_two_thousand_steps_captures_nothing(demo):
    outcome = demo("--fault", "none", steps=2000)
    assert (outcome["captures"], outcome["faults"]) == ([], [])
    assert [d for d in outcome["decisions"] if d["outcome"] == "capture"] == []
    assert len(outcome["windows"]) == len(outcome["decisions"]) == (2000 - 20 - 50) // 10 + 1


def test_a_person_is_told_what_happened(start, tmp_path):
    process = start("demo", "--out", tmp_path / "run")
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    for said in ("is slow in data", "Frontier", "advance", "leader", "Captured", "Because of", "sftriage traces get"):
        assert said in out
    # AND the command it ends with works as it was printed
    command = next(line for line in out.splitlines() if "sftriage traces get" in line).split("sftriage ")[1].split()
    fetched = start(*command, cwd=tmp_path)
    assert fetched.communicate(timeout=60)[1] == ""
    assert list(tmp_path.glob("*.json.gz"))
