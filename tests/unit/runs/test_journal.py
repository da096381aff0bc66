"""What was decided is on record, whatever happens to the one who decided; and is followed line by line."""

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.controller.agents import resume_state
from sftriage.errors import InputError, UsageError
from sftriage.model.captures import CaptureRequest, CaptureResult, Decision
from sftriage.model.events import (
    VERSION,
    CaptureChanged,
    CostMeasured,
    DiskRecovered,
    JournalCompacted,
    WindowJudged,
    encode,
)
from sftriage.model.verdicts import Lost, Suspect, Verdict
from sftriage.runs.decisions import JournalTail, window_of
from sftriage.runs.journal import Journal, read_journal
from tests.disks import small_disk
from tests.scenario import Recorder, decision, request_of, verdict
from tests.unit.conftest import run_going_on

VERDICT = Verdict(20, 69, "healthy", (), (), 0.05, {"data": 0.05}, {"data": 1}, {"coverage": 1.0})
DECISION = Decision(1.0, 20, 69, "healthy", "ignore", "healthy")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "decisions.jsonl"


@pytest.mark.parametrize("lacks", [1, 2, 40, 90_000])
def test_a_line_that_a_crash_cut_short_costs_only_itself_and_one_that_lacks_only_its_end_is_kept(path, lacks):
    # GIVEN a crash in the middle of a line longer than one read of the end, or just before its end
    entries = [WindowJudged(VERDICT, DECISION), CaptureChanged(2.0, CaptureResult("c-1", 1, "failed", "x" * 100_000))]
    journal = Journal(path)
    for entry in entries:
        journal.append(entry)
    journal.close()
    os.truncate(path, path.stat().st_size - lacks)
    kept = entries if lacks == 1 else entries[:1]
    assert list(read_journal(path)) == kept
    # WHEN another controller continues the journal
    journal = Journal(path)
    journal.append(entries[0])
    journal.close()
    # THEN its lines are read, and a torn one is cut off
    damaged = []
    assert (list(read_journal(path, damaged)), damaged) == ([*kept, entries[0]], [])


def test_the_journal_is_private_and_empty_at_first(path):
    assert list(read_journal(path)) == []
    Journal(path).close()
    assert path.stat().st_mode & 0o077 == 0


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


def test_a_disk_that_stays_full_takes_one_last_event(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        journal = Journal(disk.path / "decisions.jsonl")
        disk.fill()
        event = DiskRecovered(time_s=20.0, since_s=10.0, problem="full", over=False, lost={"windows": 3})
        journal.append_from_reserve(event)
        assert list(read_journal(disk.path / "decisions.jsonl")) == [event]
        journal.close()


def judged(first: int, *, attempt: int = 0, captures: bool = False, lost_s: float = 0.0) -> WindowJudged:
    """A window of ten steps: healthy, or one that led to a capture, or a suspect that cost this much in each step."""
    verdict = replace(VERDICT, first_step=first, last_step=first + 9, attempt=attempt)
    decision = replace(DECISION, time_s=float(first), first_step=first, last_step=first + 9, attempt=attempt)
    if captures:
        decision = replace(decision, requests=(CaptureRequest(f"c-{first}", 1, "torch", 5, 1, 30.0, 10**6),))
    if lost_s:
        suspect = Suspect("rank", (1,), "data", lost_s, 0.5, 1.0, rank=1)
        verdict = replace(verdict, label="suspect", suspects=(suspect,), lost=Lost(first, (lost_s,) * 10, 4))
    return WindowJudged(verdict, decision)


def contents(path) -> tuple[list[tuple[int, int]], float]:
    """The windows in a journal by attempt and first step, and what suspects have cost."""
    events = list(read_journal(path))
    windows = [(one.verdict.attempt, one.verdict.first_step) for one in events if isinstance(one, WindowJudged)]
    return windows, resume_state(events).losses.lost_s


def test_a_journal_has_a_bound_and_keeps_what_readers_need(path):
    # GIVEN a run of two attempts that is judged for ever, with a capture now and then, and a suspect throughout
    journal, bound = Journal(path, max_bytes=160_000), 160_000
    for attempt, n in ((0, 30), (1, 900)):
        for step in range(0, 10 * n, 10):
            journal.append(judged(step, attempt=attempt, captures=step % 500 == 200, lost_s=0.001))
            assert path.stat().st_size < bound + 2000
    journal.append(CaptureChanged(9e4, CaptureResult("c-200", 1, "stored", "")))
    journal.close()
    windows, lost_s = contents(path)
    # THEN the newest windows are there, every one that led to a capture, and the last one of the first attempt
    assert windows[-1] == (1, 8990)
    assert [step for attempt, step in windows if attempt and step % 500 == 200] == list(range(200, 9000, 500))
    assert (0, 290) in windows
    # AND nothing of what suspects have cost
    assert lost_s == pytest.approx(0.001 * 10 * 930)
    # AND a search for another one explains why it is gone
    events = list(read_journal(path))
    (compacted,) = [one for one in events if isinstance(one, JournalCompacted)]
    assert events[0] is compacted
    assert compacted.dropped + len(windows) == 930


def test_who_follows_a_journal_gets_each_line_once_also_where_it_is_replaced(path):
    # GIVEN somebody who follows a journal, and one who looks at it rarely
    journal = Journal(path, max_bytes=30_000)
    often, seldom, once = JournalTail(path), JournalTail(path), []
    for step in range(0, 4000, 10):
        journal.append(judged(step, captures=step % 500 == 200, lost_s=0.001))
        if step % 30 == 0:
            often.follow()
            assert [row.first_step for row in often.record.rows] == list(range(0, step + 1, 10))
        if step % 1500 == 0:
            seldom.follow()
            once.append((seldom.record.rows[-1].first_step, seldom.record.losses.lost_s))
    journal.close()
    # THEN the former has all of it, and the latter what is there, with the same sums
    often.follow()
    seldom.follow()
    assert len(often.record.rows) == 400
    assert [step for step, _ in once] == [0, 1500, 3000]
    for tail in (often, seldom):
        assert tail.record.losses.lost_s == pytest.approx(0.001 * 4000)
        assert (len(tail.record.rows) + tail.record.dropped, tail.record.skipped) == (400, 0)


def test_a_journal_that_cannot_be_replaced_goes_on_growing(path, monkeypatch):
    journal = Journal(path, max_bytes=20_000)

    def refuses(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfileobj", refuses)
        for step in range(0, 400, 10):
            journal.append(judged(step))
    # WHEN it can be THEN it is
    for step in range(400, 500, 10):
        journal.append(judged(step))
    journal.close()
    assert contents(path)[0][-1] == (0, 490)
    assert path.stat().st_size < 20_000


@pytest.mark.parametrize("at", ["copyfileobj", "fsync", "replace", "after"])
def test_a_crash_while_a_journal_is_replaced_leaves_a_whole_one(path, at):
    # GIVEN a process that dies at some moment of it
    script = f"""
import os, shutil, sys
from pathlib import Path
from tests.unit.runs.test_journal import judged
from sftriage.runs.journal import Journal
journal = Journal(Path({str(path)!r}), max_bytes=20_000)
def dies(*_, **__):
    os._exit(9)
for step in range(0, 10_000, 10):
    if os.path.getsize({str(path)!r}) > 19_000:
        at = {at!r}
        if at == "copyfileobj": shutil.copyfileobj = dies
        if at == "replace": Path.replace = dies
        if at == "fsync":
            fsync, seen = os.fsync, []
            os.fsync = lambda fd: (seen.append(fd), len(seen) > 1 and dies(), fsync(fd))
        if at == "after": os.close = dies
    journal.append(judged(step))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[3], timeout=60, check=False)
    assert done.returncode == 9
    # THEN another one continues it, and each line is whole
    damaged: list[bytes] = []
    before = [one for one in read_journal(path, damaged) if isinstance(one, WindowJudged)]
    journal = Journal(path, max_bytes=20_000)
    for n in range(30):
        journal.append(judged(before[-1].verdict.last_step + 1 + 10 * n))
    journal.close()
    windows, _ = contents(path)
    assert (damaged, windows[-1][1]) == ([], before[-1].verdict.last_step + 291)


def test_who_asks_for_a_window_that_is_gone_is_told_so(tmp_path):
    run = run_going_on(tmp_path / "run")
    journal = Journal(run.decisions, max_bytes=20_000)
    for step in range(0, 1000, 10):
        journal.append(judged(step))
    journal.close()
    with pytest.raises(UsageError, match=r"The journal reached its size limit: [0-9]+ windows up to step"):
        window_of(run, "15")
    assert window_of(run, "995").verdict.first_step == 990


def line_of(first: int = 20, **about) -> bytes:
    of = verdict(first, **about)
    return encode(WindowJudged(of, decision(of))) + b"\n"


@pytest.fixture
def tail(path) -> JournalTail:
    return JournalTail(path)


def test_what_the_controller_writes_is_followed(path, tail):
    # GIVEN a journal with a window, a capture's end and a cost
    journal = Recorder(path)
    of = verdict(100, "suspect", onset=120)
    journal.window(of, decision(of, "capture", "rule slow-rank", rule="slow-rank", requests=(request_of("c-1"),)))
    journal.capture(CaptureResult("c-1", 2, "failed", "the disk is full"))
    journal.append(CostMeasured(time_s=1.0, attempt=0, first_step=100, last_step=105, cost_s=1.0, before_s=0.1))
    # WHEN it is followed
    assert tail.follow()
    # THEN the window and the result are there, and nothing was held to be damage
    (row,) = tail.record.rows
    assert (row.first_step, row.last_step, row.label, row.outcome) == (100, 149, "suspect", "capture")
    assert (row.named, row.onset_step, row.rule) == ("rank 2 in data", 120, "slow-rank")
    assert [(one.capture_id, one.rank, one.role) for one in row.requests] == [("c-1", 2, "suspect")]
    assert sum(row.advances_s.values()) == pytest.approx(row.exposed_s)
    assert (tail.record.results["c-1"].state, tail.record.skipped) == ("failed", 0)
    # AND nothing is read twice
    assert not tail.follow()
    journal.window(verdict(110), decision(verdict(110)))
    assert tail.follow()
    assert [row.first_step for row in tail.record.rows] == [100, 110]
    journal.close()


@given(st.lists(st.integers(1, 700), min_size=1, max_size=12), st.sets(st.integers(0, 11)))
def test_each_whole_line_is_followed_once_however_it_is_written(tmp_path_factory, pieces, cut):
    # GIVEN a journal that is written in pieces, some of which a full disk takes in part, and which are cut off again
    path = tmp_path_factory.mktemp("journal") / "decisions.jsonl"
    tail, lines, whole = JournalTail(path), [], b""
    for n, piece in enumerate(pieces):
        line = line_of(10 * n)
        path.write_bytes(whole + line[:piece])
        tail.follow()
        # THEN a line that is not whole is no window yet
        assert [row.first_step for row in tail.record.rows] == [*lines, *([10 * n] if piece >= len(line) else [])]
        if n not in cut or piece >= len(line):
            whole, lines = whole + line, [*lines, 10 * n]
            path.write_bytes(whole)
    tail.follow()
    assert ([row.first_step for row in tail.record.rows], tail.record.skipped) == (lines, 0)
    # AND of another one in its place all is read, and nothing is left of the old one
    path.with_name("other").write_bytes(line_of(500))
    path.with_name("other").replace(path)
    tail.follow()
    assert [row.first_step for row in tail.record.rows] == [500]


@pytest.mark.parametrize(
    "damage",
    [
        b"nonsense\n",
        b'{"type": "window"}\n',
        b'{"type": "window", "verdict": {}, "decision": {}}\n',
        b"[1, 2]\n",
        b"\xff\xfe\x00\n",
        b"[" * 5000 + b"\n",
        line_of().replace(b'"label":"healthy"', b'"label":"<script>"'),
        *(
            json.dumps({**event, "version": VERSION}).encode() + b"\n"
            for event in (
                {"type": "cost"},
                {"type": "policy", "time_s": 1.0, "kind": "<script>", "policies": [], "problems": [], "later": []},
                {"type": "evidence", "time_s": "now", "first_step": 1, "last_step": 2},
                {"type": "follow_up", "capture_id": 7, "decision": {}},
                {"type": "manual_request", "request": {}, "decision": {}},
            )
        ),
    ],
)
def test_damage_is_passed_over_and_counted(path, tail, damage):
    # GIVEN a line that is no entry between two that are
    path.write_bytes(line_of(20) + damage + line_of(30))
    # WHEN the journal is followed
    tail.follow()
    # THEN the sound ones are there
    assert ([row.first_step for row in tail.record.rows], tail.record.skipped) == ([20, 30], 1)


def test_what_is_no_journal_is_an_empty_one_to_who_follows_it_and_cannot_be_read(path, tail):
    assert not tail.follow()
    path.mkdir()
    assert not tail.follow()
    assert tail.record.rows == []
    with pytest.raises(InputError, match="decisions"):
        list(read_journal(path))
