"""What is logged of a run's journal; trackers themselves are tried in tests/frameworks."""

import logging
import subprocess
import sys
import threading

import pytest

from sftriage.errors import UsageError
from sftriage.integrations import log_verdicts, verdicts
from sftriage.integrations.trackers import EntrySink
from sftriage.integrations.verdicts import Lead, VerdictLog
from sftriage.runs.journal import read_journal
from sftriage.trainer.monitor import RINGS_ENV, RUN_ENV
from tests.scenario import Recorder, decision, verdict


class Kept:
    """A tracker that keeps its entries; ``fails``: it raises instead."""

    def __init__(self, fails=False):
        self.fails, self.entries, self.closed, self.called = fails, [], False, threading.Event()

    def numbers(self, step, values):
        self._take((step, values))

    def text(self, step, name, text):
        self._take((step, name, text))

    def settle(self):
        pass

    def close(self):
        self.closed = True

    def _take(self, what):
        self.called.set()
        if self.fails:
            raise OSError("the disk is full")
        self.entries.append(what)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """All that is logged was written before the end: no need to wait for more."""
    monkeypatch.setattr(verdicts, "POLL_S", 0.01)
    monkeypatch.setattr(verdicts, "QUIET_S", 0.05)


@pytest.fixture
def journal(tmp_path):
    journal = Recorder(tmp_path / "decisions.jsonl")
    yield journal
    journal.close()


def logged(*trackers, of, to):
    log = VerdictLog(trackers, to)
    journal = Recorder(to / "decisions.jsonl")
    for judged in of:
        journal.window(judged, decision(judged))
    journal.close()
    for tracker in trackers:
        assert tracker.called.wait(60)
    log.close()


def test_each_window_is_logged_at_its_last_step_and_texts_only_if_new(journal, tmp_path):
    # GIVEN a window of what was trained before, and others of a job that becomes slow in one rank's data
    before = verdict(0, "suspect")
    journal.window(before, decision(before))
    found = ((20, "healthy"), (30, "healthy"), (40, "suspect"), (50, "suspect"))
    # WHEN they are logged
    tracker = Kept()
    logged(tracker, of=[verdict(first, label) for first, label in found], to=tmp_path)
    # THEN
    numbers = {step: values[0] for step, *values in tracker.entries if not isinstance(values[0], str)}
    assert {step: values["sftriage/suspect_rank"] for step, values in numbers.items()} == {69: -1, 79: -1, 89: 2, 99: 2}
    assert numbers[99]["sftriage/step_time_s"] == pytest.approx(0.1)
    stages = {name: value for name, value in numbers[99].items() if "exposed_s/" in name}
    assert sum(stages.values()) == pytest.approx(numbers[99]["sftriage/step_time_s"])
    assert numbers[99]["sftriage/suspect_gain_s"] == pytest.approx(0.02)
    words = [(step, name) for step, name, *text in tracker.entries if text]
    assert words == [(69, "sftriage/verdict"), (89, "sftriage/verdict")]
    assert tracker.closed


def test_a_tracker_that_raises_is_dropped_and_the_others_continue(tmp_path, caplog):
    broken, sound = Kept(fails=True), Kept()
    logged(broken, sound, of=[verdict(20)], to=tmp_path)
    assert sound.entries
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "sftriage: stopped logging verdicts to Kept: OSError('the disk is full')"
    ]


def test_a_stall_has_a_text_and_no_numbers(journal):
    stalled = verdict(60, "stalled")
    journal.window(stalled, decision(stalled))
    (event,) = read_journal(journal._path)
    _, numbers, name, text = EntrySink().entry(event)
    assert (numbers, name) == ({}, "sftriage/verdict")
    assert "Stalled" in text


def test_without_a_run_nothing_is_logged_and_an_unknown_tracker_is_refused(monkeypatch):
    monkeypatch.delenv(RUN_ENV, raising=False)
    before = threading.active_count()
    log_verdicts(None).close()
    assert threading.active_count() == before
    with pytest.raises(UsageError, match="a SummaryWriter of TensorBoard"):
        log_verdicts("runs/1")


def test_a_lead_does_nothing_without_a_run(monkeypatch):
    monkeypatch.delenv(RINGS_ENV, raising=False)
    lead = Lead()
    lead.begin()
    lead.ended(1)
    lead.note("evaluation")
    lead.stop()


def test_logging_imports_nothing_heavy():
    code = (
        "import sys, sftriage.integrations.trackers, sftriage.runs.journal;"
        "print({'numpy', 'pydantic', 'rich', 'torch'} & sys.modules.keys())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
