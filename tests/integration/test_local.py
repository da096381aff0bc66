"""What happens to captures that do not go well, on a local run."""

import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest

from sftriage.commands.decisions import decisions_of
from sftriage.policy.loading import parse
from sftriage.records import Ask
from sftriage.runs import asks
from sftriage.runs.directory import RunDirectory
from sftriage.runs.journal import read_journal
from sftriage.runtime import local, triage

STUCK = Path(__file__).parent / "jobs" / "stuck.py"
HANG = Path(__file__).parent / "jobs" / "hang_in_capture.py"
OWN_PROFILER = Path(__file__).parent / "jobs" / "own_profiler.py"
POLICY = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: hasty}
spec:
  detection: {window_steps: 40, stride_steps: 40, warmup_steps: 40}
  rules: [{name: any, match: {gain: ">= 5%"}, capture: {steps: 3, max_seconds: 1}, cooldown: 0s}]
"""


class Ending:
    """Lets the job end once a capture has."""

    def __init__(self, end: Path) -> None:
        self.end = end
        self.results = []

    def judged(self, judged):
        pass

    def captured(self, result, manifest):
        self.results.append((result, manifest))
        self.end.touch()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of a job that takes no step once its captures are asked for."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    watcher = Ending(tmp_path / "end")
    command = (sys.executable, str(STUCK), str(watcher.end))
    keeping = local.Keeping(out=tmp_path / "run")
    started = local.LocalRun(command, "stuck", parse(POLICY, "hasty.yaml"), [POLICY], watcher, keeping=keeping)
    return started, watcher


def test_a_rank_that_never_answers_costs_a_capture_its_time_box_and_no_more(run, monkeypatch):
    # GIVEN a rank that takes no further step, so that it never sees the request
    monkeypatch.setattr(triage, "CANCEL_GRACE_S", 0.2)
    monkeypatch.setattr(triage, "ANSWER_GRACE_S", 0.5)
    started, watcher = run
    # WHEN the job is watched to its end
    assert started.execute() == 0
    # THEN the capture was given up after its time-box, with that reason, and nothing is in the store
    result, manifest = watcher.results[0]
    assert (result.state, result.rank, manifest) == ("failed", 1, None)
    assert "past its time-box" in result.detail
    assert not list((started.directory.path / "captures").glob("w*"))
    # AND both the decision and what became of it are on record
    kinds = [entry["type"] for entry in read_journal(started.directory.decisions)]
    assert "capture" in kinds
    decision, *_ = decisions_of(started.directory)
    assert [(made["state"], made["rank"]) for made in decision["results"]] == [("failed", 1)]
    # AND what it left in the spool is gone
    assert list(started.directory.spool.iterdir()) == []


class Releasing(Ending):
    """Lets a rank go that hangs once its stacks are there, has it captured once it goes on, and lets the job end."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.ask = None

    def judged(self, judged):
        if len(self.results) == 2 and self.ask is not None:
            self.ask()
            self.ask = None

    def captured(self, result, manifest):
        self.results.append((result, manifest))
        if len(self.results) == 2:
            (self.end / "release").touch()
        elif len(self.results) > 2:
            (self.end / "end").touch()


def test_a_rank_that_hangs_inside_its_capture_has_its_stacks_taken_from_outside(tmp_path, monkeypatch):
    # GIVEN a rank that hangs in forward as soon as it is profiled
    pytest.importorskip("torch")
    for name, value in (("XDG_STATE_HOME", str(tmp_path / "state")), ("GLOO_SOCKET_IFNAME", "lo")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(triage, "CANCEL_GRACE_S", 0.2)
    monkeypatch.setattr(triage, "ANSWER_GRACE_S", 0.5)
    policy = POLICY.replace("max_seconds: 1", "max_seconds: 5") + "  limits: {overhead_budget: 100%}\n"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    watcher = Releasing(tmp_path)
    started = local.LocalRun(
        (*launcher, str(HANG), str(tmp_path)),
        "hangs",
        parse(policy, "hasty.yaml"),
        [policy],
        watcher,
        keeping=local.Keeping(out=tmp_path / "run"),
    )
    # AND a person who asks for a capture of it once it goes on: a rule waits after a capture that failed
    again = Ask("again", (1,), "me", "it goes on", steps=3)
    watcher.ask = lambda: asks.leave(started.directory, again)
    # WHEN the job is watched to its end
    assert started.execute() == 0
    # THEN the capture was given up, with that reason
    (given_up, nothing), (stacks, manifest), *later = watcher.results
    assert (given_up.state, given_up.rank, nothing) == ("failed", 1, None)
    # AND the stacks of that rank say where it hangs, and the record what led to them
    assert (stacks.state, manifest.capture.profiler, manifest.capture.rank) == ("done", "stacks", 1)
    assert f"rank 1 hangs inside capture {given_up.capture_id}" in manifest.trigger.why
    taken = started.directory.path / "captures" / manifest.capture_id / manifest.artefacts[0].name
    assert "hang_here" in taken.read_text(encoding="utf-8")
    assert any(entry["type"] == "beside" for entry in read_journal(started.directory.decisions))
    # AND once the rank goes on, the next capture works
    assert (later[-1][0].state, later[-1][1].capture.rank) == ("done", 1)
    assert list(started.directory.spool.iterdir()) == []


class Both(Ending):
    """Lets the job end once two captures have."""

    def captured(self, result, manifest):
        self.results.append((result, manifest))
        if len(self.results) == 2:
            self.end.touch()


def test_a_control_is_called_off_where_its_suspect_refuses(tmp_path, monkeypatch):
    # GIVEN a slow rank that profiles itself, and a rule that captures a healthy peer beside the suspect, for a while
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    beside = "capture: {control_ranks: 1, steps: 400, max_seconds: 60}"
    policy = POLICY.replace("capture: {steps: 3, max_seconds: 1}", beside) + "  limits: {overhead_budget: 100%}\n"
    watcher = Both(tmp_path / "end")
    command = (sys.executable, str(OWN_PROFILER), str(watcher.end))
    keeping = local.Keeping(out=tmp_path / "run")
    started = local.LocalRun(command, "own", parse(policy, "own.yaml"), [policy], watcher, keeping=keeping)
    # WHEN the job is watched to its end
    assert started.execute() == 0
    # THEN the suspect was refused, and the control ended with that reason, long before its steps were over
    (suspect, _), (control, _) = watcher.results[:2]
    assert (suspect.rank, suspect.state) == (1, "refused")
    assert control.rank != 1
    assert "cancelled: nothing to compare it with, the capture of rank 1 was refused" in control.detail
    # AND it is on record so, and nothing is stored
    decision = next(one for one in decisions_of(started.directory) if one["outcome"] == "capture")
    assert [one["detail"] for one in decision["results"]] == [suspect.detail, control.detail]
    assert not list((started.directory.path / "captures").glob("w*"))


def test_a_trainer_that_ends_before_it_answers_is_a_failed_capture(run, monkeypatch):
    # GIVEN the job ends as soon as the capture is asked for
    started, watcher = run
    monkeypatch.setattr(watcher, "judged", lambda judged: judged.decision.requests and watcher.end.touch())
    assert started.execute() == 0
    result, manifest = watcher.results[0]
    # THEN that is what the record says; the rank may still have refused in words as it left
    assert (result.state in ("failed", "refused"), manifest) == (True, None)
    assert "ended" in result.detail


def test_a_job_goes_on_where_triage_cannot_begin(run, monkeypatch, caplog):
    # GIVEN something that triage needs when the job has just been started, and that fails
    started, watcher = run
    watcher.end.touch()

    def failing(directory):
        raise OSError("no room")

    monkeypatch.setattr(local, "remember", failing)
    # THEN the job runs to its end, and it is said
    assert started.execute() == 0
    assert "the job goes on without triage" in caplog.text


class Busy(Ending):
    """Judges the window that leads to a capture until the job is over and its triage is being ended."""

    scheduler = None

    def judged(self, judged):
        if judged.decision.requests:
            self.end.touch()
            deadline_s = time.monotonic() + 60
            while self.scheduler.running and time.monotonic() < deadline_s:
                time.sleep(0.01)


def execute_busy(directory: Path) -> None:
    os.environ["XDG_STATE_HOME"] = str(directory / "state")
    watcher = Busy(directory / "end")
    keeping = local.Keeping(out=directory / "run")
    command = (sys.executable, str(STUCK), str(watcher.end))
    started = local.LocalRun(command, "busy", parse(POLICY, "hasty.yaml"), [POLICY], watcher, keeping=keeping)
    watcher.scheduler = started._triage._scheduler
    sys.exit(started.execute())


def test_a_job_that_ends_while_a_capture_is_being_asked_for_is_ended_all_the_same(tmp_path):
    # GIVEN a turn of triage that asks for a capture, and plans its end, when the job is already over
    run = multiprocessing.get_context("spawn").Process(target=execute_busy, args=(tmp_path,))
    run.start()
    # WHEN triage waits for that turn
    run.join(120)
    try:
        # THEN it does not wait for ever, and the record says what became of the capture
        assert run.exitcode == 0
    finally:
        run.kill()
        run.join()
    decision, *_ = decisions_of(RunDirectory(tmp_path / "run"))
    assert [made["rank"] for made in decision["results"]] == [1]
