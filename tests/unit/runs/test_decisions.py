from sftriage.runs.decisions import log_of
from tests.unit.recorded import request_of, row


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
    assert [entry.captures[0].asked.capture_id for entry in log_of(rows, (), {}).entries] == ["c-30", "c-20"]


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
