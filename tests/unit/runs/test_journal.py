"""What was decided is on record, whatever happens to the one who decided."""

import os
from dataclasses import replace

import pytest

from sftriage.decisions import CaptureResult, Decision, Regression, Verdict
from sftriage.errors import InputError
from sftriage.events import CaptureChanged, DiskRecovered, WindowJudged
from sftriage.runs.journal import Journal, read_journal
from tests.disks import small_disk

VERDICT = Verdict(20, 69, "healthy", (), (), 0.05, {"data": 0.05}, {"data": 1}, {"coverage": 1.0})
DECISION = Decision(1.0, 20, 69, "healthy", "ignore", "healthy")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "decisions.jsonl"


def test_entries_come_back_in_order_with_every_number(path):
    journal, entries = Journal(path), [WindowJudged(VERDICT, DECISION)]
    entries.append(CaptureChanged(2.0, CaptureResult("w20-69-r1-x-1", 1, "failed", "the trainer ended")))
    for entry in entries:
        journal.append(entry)
    journal.close()
    assert list(read_journal(path)) == entries


def test_a_line_that_a_crash_cut_short_costs_only_itself(path):
    journal = Journal(path)
    journal.append(WindowJudged(VERDICT, DECISION))
    journal.append(WindowJudged(VERDICT, DECISION))
    journal.close()
    # GIVEN the crash came in the middle of the second line
    os.truncate(path, path.stat().st_size - 40)
    assert len(list(read_journal(path))) == 1
    # WHEN another controller goes on in the same journal
    journal = Journal(path)
    journal.append(WindowJudged(VERDICT, DECISION))
    journal.close()
    # THEN its lines are read, and the torn one is cut off
    damaged = []
    assert [type(entry) for entry in read_journal(path, damaged)] == [WindowJudged, WindowJudged]
    assert damaged == []


def test_the_journal_is_private_and_empty_at_first(path):
    assert list(read_journal(path)) == []
    Journal(path).close()
    assert path.stat().st_mode & 0o077 == 0


def test_a_journal_that_cannot_be_read_is_said(path):
    path.mkdir()
    with pytest.raises(InputError, match="decisions"):
        list(read_journal(path))


def test_a_verdict_says_since_when_the_job_is_slower_than_its_best(path):
    # GIVEN a verdict with a regression, and one as it was written before there were any
    found = Regression(640, 632, 655, 0.21, "all", ("backward",), 0.05)
    journal = Journal(path)
    journal.append(WindowJudged(replace(VERDICT, regression=found), DECISION))
    journal.append(WindowJudged(VERDICT, DECISION))
    journal.close()
    path.write_text(path.read_text(encoding="utf-8").replace(',"regression":null', ""), encoding="utf-8")
    assert path.read_text(encoding="utf-8").count("regression") == 1
    # THEN both are read
    assert [entry.verdict.regression for entry in read_journal(path)] == [found, None]


def test_a_line_that_lacks_only_its_end_is_kept(path):
    # GIVEN a crash just before the end of the line, and a line longer than what is looked at of the end at once
    journal = Journal(path)
    journal.append(CaptureChanged(2.0, CaptureResult("c-1", 1, "failed", "x" * 100_000)))
    journal.close()
    os.truncate(path, path.stat().st_size - 1)
    # WHEN another controller goes on THEN it is there, and so is the next one
    journal = Journal(path)
    journal.append(WindowJudged(VERDICT, DECISION))
    journal.close()
    assert [type(entry) for entry in read_journal(path)] == [CaptureChanged, WindowJudged]


def test_a_full_disk_leaves_no_half_line_behind(tmp_path):
    event = CaptureChanged(2.0, CaptureResult("c-1", 1, "failed", "x" * 6000))
    with small_disk(tmp_path / "disk") as disk:
        journal = Journal(disk.path / "decisions.jsonl")
        journal.append(event)
        # GIVEN a disk on which there is room for half of the next line
        disk.fill()
        disk.leave(4096)
        with pytest.raises(OSError, match="No space left"):
            journal.append(event)
        # WHEN there is room again THEN the next line is whole, and no other is damaged
        disk.empty()
        journal.append(WindowJudged(VERDICT, DECISION))
        damaged = []
        assert [type(entry) for entry in read_journal(disk.path / "decisions.jsonl", damaged)] == [
            CaptureChanged,
            WindowJudged,
        ]
        assert damaged == []
        journal.close()
        # AND nothing else is left on it
        assert [path.name for path in disk.path.iterdir()] == ["decisions.jsonl"]


def test_a_disk_that_stays_full_takes_a_last_word(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        journal = Journal(disk.path / "decisions.jsonl")
        disk.fill()
        told = DiskRecovered(time_s=20.0, since_s=10.0, problem="full", over=False, lost={"windows": 3})
        journal.last_word(told)
        assert list(read_journal(disk.path / "decisions.jsonl")) == [told]
        journal.close()
