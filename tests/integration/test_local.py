"""What happens to captures that do not go well, on a local run."""

import sys
from pathlib import Path

import pytest

from sftriage.agent import agent
from sftriage.model.captures import ENDED, ManualRequest
from sftriage.model.events import CaptureChanged, WindowJudged
from sftriage.runs import requests
from sftriage.runs.decisions import decisions_of
from sftriage.runtime import local
from sftriage.sinks.stream import Sink
from sftriage.traces.store import LocalStore
from tests.integration.policies import policy
from tests.integration.processes import FORKED, SLOW_DATA, STUCK
from tests.scenario import entries


def hasty(capture="profiler: torch, steps: 3, max_seconds: 1", limits=""):
    rule = f'name: any, match: {{gain: ">= 5%"}}, capture: {{{capture}}}, cooldown: 0s'
    return policy(rule, steps=(40, 40, 0), limits=limits)


class Ending(Sink):
    """Lets the job end once so many captures have; with none, as soon as one is decided."""

    name = "ending"

    def __init__(self, end: Path, after: int = 1) -> None:
        self.end, self.after = end, after
        self.results = []

    def take(self, seen):
        if isinstance(seen, CaptureChanged) and seen.result.state in ENDED:
            self.results.append(seen.result)
            self.ended()
        elif not self.after and isinstance(seen, WindowJudged) and seen.decision.requests:
            self.end.touch()

    def ended(self):
        if len(self.results) >= self.after:
            self.end.touch()


@pytest.fixture
def watch(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def watch(watcher, *command, policy=None):
        file = tmp_path / "hasty.yaml"
        file.write_text(policy or hasty(), encoding="utf-8")
        command = (sys.executable, *map(str, command))
        return local.LocalRun(command, "job", [file], lambda *_: [watcher], out=tmp_path / "run")

    return watch


@pytest.fixture
def impatient(monkeypatch):
    """A capture that is past its time-box is soon given up."""
    monkeypatch.setattr(agent, "CANCEL_GRACE_S", 0.2)
    monkeypatch.setattr(agent, "ANSWER_GRACE_S", {"torch": 0.5, "stacks": 60.0})


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_never_answers_costs_a_capture_its_time_box_and_no_more(watch, tmp_path):
    # GIVEN a rank that takes no further step, so that it never sees the request
    watcher = Ending(tmp_path / "end")
    started = watch(watcher, STUCK, watcher.end)
    # WHEN the job is watched to its end
    assert started.execute() == 0
    # THEN the capture was given up after its time-box, with that reason, and nothing is in the store
    result = watcher.results[0]
    assert (result.state, result.rank) == ("expired", 1)
    assert "long after its time-box" in result.detail
    assert not list((started.directory.path / "captures").glob("w*"))
    # AND both the decision and what became of it are on record
    assert entries(started.directory.decisions, "capture")[0]["result"]["state"] == "expired"
    decision, *_ = [one for one in decisions_of(started.directory) if one.get("results")]
    assert [(made["state"], made["rank"]) for made in decision["results"]] == [("expired", 1)]
    # AND what it left in the spool is gone
    assert list(started.directory.spool.iterdir()) == []


class Releasing(Ending):
    """Lets a rank go that hangs once its stacks are there, has it captured once it goes on, and lets the job end."""

    ask = None

    def take(self, seen):
        super().take(seen)
        if isinstance(seen, WindowJudged) and len(self.results) == 2 and self.ask is not None:
            self.ask()
            self.ask = None

    def ended(self):
        if len(self.results) == 2:
            self.end.with_name("go-on").touch()
        elif len(self.results) > 2:
            self.end.touch()


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_hangs_inside_its_capture_has_its_stacks_taken_from_outside(watch, tmp_path):
    # GIVEN a rank that hangs in forward as soon as it is profiled
    pytest.importorskip("torch")
    limited = hasty("profiler: torch, steps: 3, max_seconds: 5", "overhead_budget: 100%")
    watcher = Releasing(tmp_path / "end")
    started = watch(watcher, *FORKED[1:], 2, SLOW_DATA, watcher.end, 0.02, "hangs", policy=limited)
    # AND a person who asks for a capture of it once it goes on: a rule waits after a capture that failed
    again = ManualRequest("again", (1,), "me", "it goes on", steps=3)
    watcher.ask = lambda: requests.leave(started.directory, again)
    # WHEN the job is watched to its end
    assert started.execute() == 0
    # THEN the capture was given up, with that reason
    given_up, stacks, *later = watcher.results
    assert (given_up.state, given_up.rank) == ("expired", 1)
    manifest = LocalStore(started.directory.path).manifest(stacks.capture_id)
    # AND the stacks of that rank say where it hangs, and the record what led to them
    assert (stacks.state, manifest.capture.profiler, manifest.capture.rank) == ("stored", "stacks", 1)
    assert f"rank 1 hangs inside capture {given_up.capture_id}" in manifest.trigger.why
    taken = started.directory.path / "captures" / manifest.capture_id / manifest.artefacts[0].name
    assert "hang_here" in taken.read_text(encoding="utf-8")
    assert len(entries(started.directory.decisions, "follow_up")) == 1
    # AND once the rank goes on, the next capture works
    assert (later[-1].state, later[-1].rank) == ("stored", 1)
    assert list(started.directory.spool.iterdir()) == []


def test_a_control_is_called_off_where_its_suspect_refuses(watch, tmp_path):
    # GIVEN a slow rank that profiles itself, and a rule that captures a healthy peer beside the suspect, for a while
    pytest.importorskip("torch")
    limited = hasty("profiler: torch, control_ranks: 1, steps: 400, max_seconds: 60", "overhead_budget: 100%")
    watcher = Ending(tmp_path / "end", after=2)
    started = watch(watcher, *FORKED[1:], 3, SLOW_DATA, watcher.end, 0.02, "profiles", policy=limited)
    # WHEN the job is watched to its end
    assert started.execute() == 0
    # THEN the suspect was refused, and the control ended with that reason, long before its steps were over
    suspect, control = watcher.results[:2]
    assert (suspect.rank, suspect.state) == (2, "refused")
    assert control.rank != 2
    assert "cancelled: nothing to compare it with: the capture of rank 2 was refused" in control.detail
    # AND it is on record so, and nothing is stored
    decision = next(one for one in decisions_of(started.directory) if one["outcome"] == "capture")
    assert [one["detail"] for one in decision["results"]] == [suspect.detail, control.detail]
    assert not list((started.directory.path / "captures").glob("w*"))


def test_a_trainer_that_ends_before_it_answers_is_a_failed_capture(watch, tmp_path):
    # GIVEN the job ends as soon as the capture is asked for
    watcher = Ending(tmp_path / "end", after=0)
    started = watch(watcher, STUCK, watcher.end)
    assert started.execute() == 0
    result = watcher.results[0]
    # THEN that is what the record says; the rank may still have refused in words as it left
    assert result.state in ("failed", "refused")
    assert "ended" in result.detail
    assert not list((started.directory.path / "captures").glob("w*"))
