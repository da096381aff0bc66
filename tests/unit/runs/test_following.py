import json
import os

import pytest

from sftriage.model.captures import CaptureResult
from sftriage.model.events import VERSION, CostMeasured, WindowJudged, encode
from sftriage.runs.following import JournalTail
from tests.scenario import Recorder, decision, request_of, verdict


def line_of(first: int = 20, **about) -> bytes:
    of = verdict(first, **about)
    return encode(WindowJudged(of, decision(of))) + b"\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "decisions.jsonl"


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
    (row,) = tail.rows
    assert (row.first_step, row.last_step, row.label, row.outcome) == (100, 149, "suspect", "capture")
    assert (row.named, row.onset_step, row.rule) == ("rank 2 in data", 120, "slow-rank")
    assert [(one.capture_id, one.rank, one.role) for one in row.asked] == [("c-1", 2, "suspect")]
    assert sum(row.advances_s) == pytest.approx(row.exposed_s)
    assert (tail.results["c-1"].state, tail.skipped) == ("failed", 0)
    # AND nothing is read twice
    assert not tail.follow()
    journal.window(verdict(110), decision(verdict(110)))
    assert tail.follow()
    assert [row.first_step for row in tail.rows] == [100, 110]
    journal.close()


def test_a_line_that_is_not_whole_yet_is_waited_for(path, tail):
    # GIVEN a line of which half is written
    whole = line_of(20)
    path.write_bytes(whole[:100])
    tail.follow()
    assert tail.rows == []
    # WHEN the rest comes
    with path.open("ab") as file:
        file.write(whole[100:])
    # THEN it is one window
    tail.follow()
    assert [row.first_step for row in tail.rows] == [20]


def test_a_line_that_is_cut_off_again_hides_no_other(path, tail):
    # GIVEN a line of which a full disk took half, and which was read so far
    path.write_bytes(line_of(10) + line_of(20)[:100])
    tail.follow()
    # WHEN it is cut off, and others are written
    with path.open("r+b") as file:
        file.truncate(len(line_of(10)))
        file.seek(0, os.SEEK_END)
        file.write(line_of(30) + line_of(40))
    # THEN these are all there is beside the first
    tail.follow()
    assert ([row.first_step for row in tail.rows], tail.skipped) == ([10, 30, 40], 0)


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
    assert ([row.first_step for row in tail.rows], tail.skipped) == ([20, 30], 1)


def test_another_journal_in_its_place_is_read_anew(path, tail):
    # GIVEN a journal that has been read
    path.write_bytes(line_of(20) + line_of(30))
    tail.follow()
    # WHEN a shorter one takes its place
    path.write_bytes(line_of(500))
    tail.follow()
    # THEN nothing is left of the old one
    assert [row.first_step for row in tail.rows] == [500]


@pytest.mark.parametrize("kind", ["nothing", "a directory"])
def test_what_is_no_journal_is_an_empty_one(path, tail, kind):
    # GIVEN something that is no journal of ours
    if kind == "a directory":
        path.mkdir()
    # WHEN it is followed THEN it has no windows
    assert not tail.follow()
    assert tail.rows == []
