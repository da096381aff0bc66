"""A real job that only takes its time, then hangs in one stage after the other, and is captured as a whole."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from sftriage.model.events import CaptureChanged, CauseFound
from sftriage.model.hangs import HANG_NAME, HangEvidence
from sftriage.runs.journal import read_journal
from sftriage.traces.manifest import Manifest
from tests.integration.conftest import own_environment
from tests.integration.policies import policy
from tests.integration.processes import DEADLINE_S, FORKED, ended, sftriage_process, wait_until
from tests.integration.runs import captures, verdicts

HANG = Path(__file__).parent / "jobs" / "hang.py"
RULE = """name: stuck, match: {label: stalled},
  capture: {profiler: stacks, max_seconds: 30}"""
POLICY = policy(RULE, detection="window_steps: 20", limits="captures_per_run: 2")
PAUSE_S = 12.0
"""Longer than what is a stall inside a stage."""
IN_FORWARD, IN_BACKWARD, STOPPED = 120, 130, 140


class Stood(NamedTuple):
    run: Path
    pid: int
    stalls: list[dict[str, Any]]
    evidence: list[HangEvidence]
    manifests: list[Manifest]
    status: int
    out: str
    err: str


def stalls(run: Path) -> list[dict[str, Any]]:
    return [one for one in verdicts(run) if one["label"] == "stalled"]


@pytest.fixture(scope="module")
def stood(tmp_path_factory) -> Stood:
    directory = tmp_path_factory.mktemp("stalled")
    run = directory / "run"
    (directory / "policy.yaml").write_text(POLICY, encoding="utf-8")
    command = ["run", "--policy", directory / "policy.yaml", "--out", run, "--", *FORKED, 3, HANG, directory, PAUSE_S]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    job = sftriage_process(*command, env=own_environment(directory), **pipes)

    def hung(step: int) -> int:
        """The pid of the rank that hangs, once it does."""
        wait_until((directory / f"hung-{step}").exists)
        return int((directory / f"hung-{step}").read_text(encoding="ascii"))

    with ended(job):
        # WHEN a rank hangs in a function of the job's own, its stall is seen, and all ranks are captured meanwhile
        pid = hung(IN_FORWARD)
        wait_until(lambda: stalls(run))
        wait_until(lambda: captures(run))
        (directory / f"release-{IN_FORWARD}").touch()
        # WHEN it hangs where all of them wait for each other
        hung(IN_BACKWARD)
        wait_until(lambda: len(stalls(run)) > 1)
        wait_until(lambda: len(captures(run)) > 1)
        (directory / f"release-{IN_BACKWARD}").touch()
        # WHEN it is stopped in forward, where nothing else holds it
        os.kill(hung(STOPPED), signal.SIGSTOP)
        (directory / f"release-{STOPPED}").touch()
        wait_until(lambda: len(stalls(run)) > 2)
        os.kill(pid, signal.SIGCONT)
        out, err = job.communicate(timeout=DEADLINE_S)
    manifests = sorted(captures(run), key=lambda one: one.capture.first_step)
    files = [run / "captures" / one.capture_id / HANG_NAME for one in manifests]
    evidence = [msgspec.json.decode(file.read_bytes(), type=HangEvidence) for file in files]
    return Stood(run, pid, stalls(run), evidence, manifests, job.returncode, out, err)


def test_a_rank_that_hangs_is_named_with_its_stage_and_pauses_that_a_job_makes_are_no_stalls(stood):
    # THEN compiling, evaluating and saving were no stalls, and each hang was one
    first, second, third = stood.stalls
    # AND it names the rank and the stage in the step in progress
    (suspect,) = first["suspects"]
    assert (suspect["scope"], suspect["rank"], suspect["stage"]) == ("rank", 1, "forward")
    assert (first["first_step"], first["reasons"]) == (IN_FORWARD, ["not_arrived"])
    assert first["exposed_s"] >= 10.0
    # AND with all ranks inside the sync stage nobody
    assert (second["first_step"], second["reasons"], second["suspects"]) == (IN_BACKWARD, ["in_sync"], [])
    # AND who was stopped from outside is found
    assert (third["first_step"], [(one["rank"], one["stage"]) for one in third["suspects"]]) == (
        STOPPED,
        [(1, "forward")],
    )
    # AND training ended as it would have
    assert (stood.status, stood.out) == (0, "trained\n"), stood.err


def test_who_watches_is_told_of_each_stall_in_a_line_and_it_is_among_the_decisions(stood, sftriage):
    said = [line for line in stood.err.splitlines() if "Stalled" in line]
    assert len(said) == 3
    assert f"in step {IN_FORWARD}" in said[0]
    assert "rank 1 in forward" in said[0]
    decided = sftriage("decisions", "--run", stood.run, "--json").json
    outcomes = [(one["outcome"], one["rule"]) for one in decided if one["label"] == "stalled"]
    assert outcomes[:2] == [("capture", "stuck")] * 2
    assert "capture" not in [outcome for outcome, _ in outcomes[2:]]
    assert "stalled" in sftriage("decisions", "--run", stood.run).out


def test_a_stall_ends_in_one_capture_of_all_ranks_that_says_where_the_rank_hangs(stood):
    for manifest, evidence, step in zip(stood.manifests, stood.evidence, (IN_FORWARD, IN_BACKWARD), strict=True):
        # THEN it holds what all ranks report of that step
        assert (evidence.step, evidence.world_size, [one.rank for one in evidence.ranks]) == (step, 3, [0, 1, 2])
        assert evidence.ranks[1].pid == stood.pid
        # AND the rank and its line follow from it, also where all ranks are inside the sync stage
        hang = evidence.hang
        assert (hang.kind, hang.ranks, hang.blocked[0].place.function) == ("absent", (1,), "hang")
        # AND the manifest has the same, and links it to the stall
        assert (manifest.cause.code, manifest.cause.place.function) == ("absent", "hang")
        assert (manifest.capture.profiler, manifest.capture.first_step, manifest.trigger.label) == (
            *("stacks", step, "stalled"),
        )
        assert [one.name for one in manifest.artefacts] == [HANG_NAME]
        assert "function names" in manifest.may_contain
    assert list((stood.run / "spool").iterdir()) == []
    # AND each cause is on record before its capture is stored, and shown
    found = [
        event for event in read_journal(stood.run / "decisions.jsonl") if isinstance(event, CauseFound | CaptureChanged)
    ]
    assert [type(event) for event in found] == [CauseFound, CaptureChanged] * 2
    for event in found[::2]:
        assert (event.rank, event.sure) == (1, True)
        assert event.sentence in stood.err
