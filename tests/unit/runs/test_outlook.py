import pytest

from sftriage.model.captures import ENDED, CaptureResult
from sftriage.model.verdicts import Regression
from sftriage.runs.decisions import groups_of, log_of
from sftriage.runs.following import row_of
from sftriage.runs.glance import outlook
from tests.scenario import decision, held, request_of, row

DISTURBED = {"label": "needs_evidence", "outcome": "hold", "reasons": ("self_inflicted",)}
SLOWER = Regression(640, 632, 655, 0.21, "all", ("backward",), 0.05)
REGRESSED = {"label": "needs_evidence", "outcome": "hold", "reasons": ("regressed",), "regression": SLOWER}
ASKED = (request_of("c-1"),)


@pytest.mark.parametrize(
    ("rows", "face"),
    [
        ([row(20)], "healthy"),
        ([row(20), row(30, "suspect")], "suspect"),
        ([row(20), row(30, "suspect", "hold")], "held"),
        ([row(20), row(30, "suspect", "throttle")], "throttled"),
        ([row(20), row(30, "suspect", "capture", requests=ASKED)], "captured"),
        ([row(20), row(30, "suspect", "capture", requests=ASKED), row(40, "suspect", "throttle")], "captured"),
        ([row(20), row(30, "needs_evidence", "hold", reasons=("co_critical",))], "held"),
        ([row(20), row(30, **REGRESSED)], "regressed"),
        ([row(20), row(30, "stalled", "hold", reasons=("in_sync",))], "stalled"),
        ([row(30, "suspect", "throttle"), row(40)], "healthy"),
        # A window that a capture disturbed says nothing: what was so before is so still.
        ([row(20), row(30, **DISTURBED)], "healthy"),
        ([row(30, "suspect", "capture", requests=ASKED), row(40, **DISTURBED)], "captured"),
        ([row(40, **DISTURBED)], "held"),
        # What was captured in an earlier trouble has nothing to do with this one.
        ([row(20, "suspect", "capture", requests=ASKED), row(30), row(40, "suspect", "throttle")], "throttled"),
        # A job that starts again begins anew.
        ([row(20, "suspect", "capture", requests=ASKED), row(0, "suspect", "throttle", attempt=1)], "throttled"),
    ],
)
def test_every_state_has_a_face(rows, face):
    assert outlook(rows, {}).face == face


def test_a_trouble_is_told_from_its_beginning():
    # GIVEN a job that became undecided, then slow, was captured, and is throttled now
    rows = [
        row(20),
        row(30, "needs_evidence", "hold", reasons=("sync_ambiguous",)),
        row(100, "suspect", "capture", "rule slow-rank", ASKED, onset=120),
        row(110, **DISTURBED),
        row(160, "suspect", "throttle", "too early", onset=125),
    ]
    # WHEN it is told THEN since when, who, and what was done, are those of the one who is named; the step is
    # that of the newest verdict, whose sentence stands beside it
    seen = outlook(rows, {"c-1": CaptureResult("c-1", 2, "stored")})
    assert (seen.since_step, seen.since_s, seen.named) == (125, rows[2].time_s, "rank 2 in data")
    assert seen.done == "Throttled, nothing heavy was started: too early"
    assert [(one.capture_id, one.state) for one in seen.captures] == [("c-1", "stored")]
    assert not seen.disturbed


@pytest.mark.parametrize("state", sorted(ENDED - {"stored"}))
def test_a_capture_that_came_to_nothing_is_no_capture(state):
    # GIVEN a slow job whose capture failed
    rows = [row(30, "suspect", "capture", "rule slow-rank", ASKED)]
    seen = outlook(rows, {"c-1": CaptureResult("c-1", 2, state, "the disk is full")})
    # THEN the page does not say that it is captured, and says what was lost
    assert seen.face == "suspect"
    assert [one.result.detail for one in seen.lost] == ["the disk is full"]


def test_a_healthy_job_remembers_its_last_trouble():
    rows = [row(30, "suspect", "throttle"), row(40), row(50)]
    seen = outlook(rows, {})
    assert (seen.face, seen.since_step, seen.before) == ("healthy", 40, rows[0])
    assert seen.captures == ()


def test_a_job_slower_than_its_own_best_is_so_since_its_onset_and_not_since_that_was_known():
    seen = outlook([row(20), row(660, **REGRESSED), row(670, **REGRESSED)], {})
    assert (seen.headline, seen.since_step, seen.named) == ("Slower than its own best", 640, "")
    assert "by 21% since about step 640 (632 to 655), in backward, on all ranks" in seen.sentence


def test_who_is_only_a_candidate_is_not_named_and_moves_nothing():
    # GIVEN a job that is held, with another candidate in every window
    rows = [row(20), *(row_of(of, decision(of, "hold", "co_critical")) for of in map(held_by, range(4)))]
    seen = outlook(rows, {})
    # THEN nobody is named, and it began when it was first seen: somewhere in the first window that was not healthy
    assert (seen.face, seen.named) == ("held", "")
    assert (seen.since_step, seen.until_step) == (30, 79)
    # AND like decisions are one entry, whoever the candidates are
    assert len(groups_of(rows[1:], {})) == 1
    assert [one.candidates[0].who for one in rows[1:]] == [f"rank {rank}" for rank in range(4)]
    assert not any(one.suspects for one in rows)


def held_by(rank):
    return held(30 + 10 * rank, rank=rank)


def test_who_was_named_before_is_not_named_now():
    rows = [
        row(20),
        row(30, "suspect", "throttle", onset=35),
        row_of(held(40), decision(held(40), "hold", "co_critical")),
    ]
    seen = outlook(rows, {})
    assert (seen.face, seen.named, seen.before) == ("held", "", rows[1])


def test_like_decisions_in_a_row_are_one_entry():
    # GIVEN a quiet night, a fault, a capture, and the fault after it
    quiet = [row(first) for first in range(20, 520, 10)]
    slow = [
        row(520, "suspect", "hold"),
        row(530, "suspect", "hold"),
        row(540, "suspect", "capture", requests=(request_of("c"),)),
    ]
    other = [row(550, "suspect", "hold", rank=3)]
    # WHEN they are listed
    page = log_of([*quiet, *slow, *other], (), {})
    # THEN the newest is first, alike ones are one, and another suspect is another entry
    assert [(one.first_step, one.windows) for one in page.entries] == [(550, 1), (540, 1), (520, 2), (20, 50)]
    assert page.entries[1].captures[0].state == "running"
    assert page.counts == {"ignore": 50, "hold": 3, "capture": 1}


def test_captures_are_never_put_together():
    rows = [row(first, "suspect", "capture", requests=(request_of(f"c-{first}"),)) for first in (20, 30)]
    assert [entry.captures[0].capture_id for entry in log_of(rows, (), {}).entries] == ["c-30", "c-20"]


def test_pages_hold_every_entry_once():
    # GIVEN more entries than a page has room for
    rows = [row(first, "suspect", "hold", rank=first % 7) for first in range(20, 1020, 10)]
    # WHEN all pages are read
    pages = log_of(rows, (), {}, size=9).pages
    read = [log_of(rows, (), {}, number=number, size=9) for number in range(1, pages + 1)]
    # THEN every entry was there once, the newest first
    assert [entry.first_step for page in read for entry in page.entries] == [row.first_step for row in reversed(rows)]
    # AND a page that is not there is the last one, or the first
    assert log_of(rows, (), {}, number=99, size=9).number == pages
    assert log_of(rows, (), {}, number=-1, size=9).number == 1


def test_a_filter_shows_that_outcome_and_counts_all():
    rows = [row(20), row(30, "suspect", "hold"), row(40)]
    page = log_of(rows, (), {}, "hold")
    assert [entry.row.outcome for entry in page.entries] == ["hold"]
    assert page.counts == {"ignore": 2, "hold": 1}
    assert log_of(rows, (), {}, "throttle").entries == ()
