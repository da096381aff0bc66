"""The whole path on real jobs: hidden slow ranks are found, captured and linked; what cannot be decided is held.

What is asked of a live job is what happens, with delays that no busy machine makes up for. That nobody is accused who
is not slow is asked of recordings (`test_policy_replay`), and of long runs on a quiet machine (`make soak`).
"""

import gzip
import hashlib
import json
import sys
from pathlib import Path

import pytest

from sftriage.traces.manifest import Manifest
from tests.integration.processes import DEADLINE_S, wait_until
from tests.integration.runs import captures, named, verdicts

IN_TURN = Path(__file__).parent / "jobs" / "in_turn.py"
FOUND = {"data:2": (2, "data"), "forward:0": (0, "forward"), "optimizer:3": (3, "optimizer"), "other:1": (1, "other")}
HELD = {"backward:1": "sync_ambiguous", "data:2+forward:1": "co_critical"}
POLICY = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: in-turn}
spec:
  detection: {window_steps: 16, stride_steps: 8, warmup_steps: 8}
  rules: [{name: slow-rank, match: {scope: [rank], gain: ">= 50%"}, capture: {steps: 3}, cooldown: 0s}]
  limits: {overhead_budget: 100%, captures_per_hour: 100, captures_per_run: 100}
"""


def kineto(run: Path, manifest: Manifest) -> dict:
    """The stored trace of a capture, whole and unharmed."""
    (artefact,) = manifest.artefacts
    content = (run / "captures" / manifest.capture_id / artefact.name).read_bytes()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (artefact.size_bytes, artefact.sha256)
    return json.loads(gzip.decompress(content))


def check_linked(run: Path, manifest: Manifest, decisions: list[dict], world_size: int) -> None:
    """A capture was decided on by the window that it names, and its trace has the steps after that it promises."""
    trigger, capture = manifest.trigger, manifest.capture
    (decision,) = [d for d in decisions if manifest.capture_id in [one["capture_id"] for one in d["requests"]]]
    assert (decision["outcome"], decision["label"]) == ("capture", "suspect")
    assert (decision["first_step"], decision["last_step"]) == (trigger.window.first_step, trigger.window.last_step)
    assert [request["rank"] for request in decision["requests"]] == [capture.rank]
    trace = kineto(run, manifest)
    marks = [e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
    assert capture.first_step > trigger.window.last_step
    assert capture.last_step - capture.first_step + 1 == capture.steps
    assert {f"ProfilerStep#{n}" for n in range(capture.first_step, capture.last_step + 1)} <= set(marks)
    assert (trace["distributedInfo"]["rank"], trace["distributedInfo"]["world_size"]) == (capture.rank, world_size)


def test_each_slow_rank_is_found_captured_and_linked_and_what_cannot_be_decided_is_held(start, tmp_path):
    # GIVEN a real job of four ranks, in which one after the other becomes slow, in one stage after the other
    run = tmp_path / "run"
    (tmp_path / "policy.yaml").write_text(POLICY, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4]
    job = start(
        *("run", "--policy", tmp_path / "policy.yaml", "--out", run, "--"),
        *(*launcher, IN_TURN, tmp_path, *FOUND, *HELD),
    )
    wait_until(lambda: (run / "decisions.jsonl").exists() and verdicts(run))
    made: dict[str, Manifest] = {}
    for turn, fault in enumerate((*FOUND, *HELD)):
        (tmp_path / f"next-{turn}").touch()
        if fault in FOUND:
            # THEN it is named and captured while it is slow
            of_it = wait_until(
                lambda fault=fault: [
                    one for one in captures(run) if (one.capture.rank, one.trigger.stage) == FOUND[fault]
                ],
            )
            made[fault] = of_it[0]
        else:
            # AND where the coarse signal cannot tell who it is, the window is held with the reason
            wait_until(lambda fault=fault: [HELD[fault]] in [one["reasons"] for one in verdicts(run)])
    (tmp_path / f"next-{len(FOUND) + len(HELD)}").touch()
    _, err = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, err
    # AND every capture is linked to the window that led to it
    decisions = json.loads(start("decisions", "--run", run, "--json").communicate(timeout=60)[0])
    for manifest in made.values():
        check_linked(run, manifest, decisions, 4)
        assert named(next(one for one in verdicts(run) if one["last_step"] == manifest.trigger.window.last_step)) == (
            manifest.capture.rank,
            manifest.trigger.stage,
        )
    # AND no window is both held and captured, and what is held says what would resolve it
    held = [d for d in decisions if d["outcome"] == "hold"]
    assert all(d["resolves"] and not d["requests"] for d in held)
    assert {reason for reason in HELD.values() if any(reason in d["reason"] for d in held)} == set(HELD.values())
    # AND the spool is empty: nothing was left lying about
    assert list((run / "spool").iterdir()) == []


@pytest.mark.xdist_group("demo")
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
    assert shown == {**json.loads(manifest.to_json()), "state": "whole", "problem": None, "upload": None}


@pytest.mark.xdist_group("demo")
def test_a_person_is_told_what_happened(demonstrated, start, tmp_path):
    for said in ("is slow in data", "Frontier", "advance", "leader", "Captured", "Because of", "sftriage traces get"):
        assert said in demonstrated.said
    # AND the command it ends with works as it was printed
    line = next(line for line in demonstrated.said.splitlines() if "sftriage traces get" in line)
    fetched = start(*line.split("sftriage ")[1].split(), cwd=tmp_path)
    assert fetched.communicate(timeout=60)[1] == ""
    assert list(tmp_path.glob("*.json.gz"))
