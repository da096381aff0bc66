"""The list of decisions, and of what else is on record: like ones in a row are one entry."""

import pytest

from sftriage.model.captures import CaptureResult
from sftriage.model.events import CostMeasured, NamedPolicy, PolicyChanged
from sftriage.runs.decisions import DecisionGroup, captures_in, log_of
from sftriage.runs.following import row_of
from tests.scenario import decision, held, request_of, row


def test_like_decisions_in_a_row_are_one_entry():
    # GIVEN a quiet night, windows with another candidate each, a fault, a capture, and the fault after it
    quiet = [row(first) for first in range(20, 420, 10)]
    undecided = [row_of(of, decision(of, "hold", "co_critical")) for of in map(held, range(420, 520, 10))]
    slow = [row(520, "suspect", "hold"), row(530, "suspect", "hold")]
    captured = row(540, "suspect", "capture", requests=(request_of("c"),))
    # WHEN they are listed
    page = log_of([*quiet, *undecided, *slow, captured, row(550, "suspect", "hold", rank=3)], (), {})
    # THEN the newest is first, alike ones are one whoever the candidates are, and another suspect is another entry
    listed = [(one.first_step, one.windows) for one in page.entries]
    assert listed == [(550, 1), (540, 1), (520, 2), (420, 10), (20, 40)]
    assert page.entries[1].captures[0].state == "running"
    assert page.counts == {"ignore": 40, "hold": 13, "capture": 1}


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


def test_notes_stand_between_windows_by_their_time():
    rows = [row(20), row(30), row(200, "suspect")]
    notes = [
        CostMeasured(rows[1].time_s + 1.0, 0, 1, 2, 1.0, 0.1),
        PolicyChanged(rows[2].time_s, "changed", (NamedPolicy("x"),)),
    ]
    page = log_of(rows, notes, {})
    kinds = [one.row.first_step if isinstance(one, DecisionGroup) else one.kind for one in page.entries]
    assert kinds == ["policy", 200, "cost", 30]
    assert page.counts == {"ignore": 3, "cost": 1, "policy": 1}


@pytest.mark.parametrize(
    ("first", "last", "attempt", "found"),
    [(159, 165, 0, True), (100, 160, 0, True), (164, 170, 0, True), (165, 170, 0, False), (159, 165, 1, False)],
)
def test_a_cost_is_of_the_captures_that_measured_its_steps(first, last, attempt, found):
    of = CostMeasured(0.0, attempt, first, last, 1.0, 0.1)
    stored = CaptureResult("c-1", 2, "stored", first_step=160, last_step=164)
    results = [stored, CaptureResult("c-2", 2, "failed")]
    assert list(captures_in(of, {"c-1": 0, "c-2": 0}, results)) == ([stored] if found else [])
