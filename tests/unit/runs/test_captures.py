"""The captures of a run that a page shows, read again only when they change; and what `--step` and `--since` mean."""

from datetime import datetime, timedelta, timezone

import pytest

from sftriage.errors import UsageError
from sftriage.runs.captures import since_of, steps_of
from sftriage.runs.source import CaptureShelf, Damaged
from sftriage.traces.manifest import Manifest
from sftriage.traces.store import LocalStore


@pytest.fixture
def shelf(tmp_path, trace, make_manifest):
    store = LocalStore(tmp_path)
    for name in ("c-1", "c-2"):
        store.put(name, trace, lambda artefact, it=name: make_manifest(it, artefact))
    return CaptureShelf(tmp_path)


@pytest.mark.parametrize(
    ("happens", "message"),
    [
        (lambda path: path.unlink(), "gz: missing"),
        (lambda path: path.write_bytes(b"short"), "5 bytes; expected"),
    ],
    ids=["gone", "shrunk"],
)
def test_a_trace_that_is_damaged_after_it_was_shown_is_no_longer_shown_as_whole(shelf, tmp_path, happens, message):
    # GIVEN captures that were shown
    assert all(isinstance(one, Manifest) for one in shelf.all())
    before, trace = shelf.signature(), tmp_path / "captures" / "c-1" / "trace.json.gz"
    whole = trace.read_bytes()
    # WHEN something becomes of one THEN the page changes, and says what
    happens(trace)
    assert shelf.signature() != before
    (other, damaged) = shelf.all()
    assert isinstance(other, Manifest)
    assert isinstance(damaged, Damaged)
    assert message in damaged.problem
    # AND once it is mended it is there again
    trace.write_bytes(whole)
    assert all(isinstance(one, Manifest) for one in shelf.all())


def test_what_has_not_changed_is_not_read_again(shelf, monkeypatch):
    first = shelf.all()
    monkeypatch.setattr(LocalStore, "look", lambda *_: pytest.fail("it was read again"))
    assert shelf.all() == first


NOW = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
LAST = 2**63 - 1


NO_STEPS = ("", "x", "-1", "1..", "..1", "1-2", "1.5", "1..2..3", "\u0663", "1\n", str(2**63), "5..4")


def test_steps():
    for text, steps in (("0", (0, 0)), ("1042", (1042, 1042)), ("7..7", (7, 7)), (f"0..{LAST}", (0, LAST))):
        assert steps_of(text) == steps
    for text in NO_STEPS:
        why = "comes before the first" if text == "5..4" else "expected a step such as 1042, or steps such as 1000.."
        with pytest.raises(UsageError, match=why) as caught:
            steps_of(text)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2h", NOW - timedelta(hours=2)),
        ("3d", NOW - timedelta(days=3)),
        ("1h30m", NOW - timedelta(minutes=90)),
        ("2026-11-20", datetime(2026, 11, 20, tzinfo=timezone.utc)),
        ("2026-11-20T08:30:00Z", datetime(2026, 11, 20, 8, 30, tzinfo=timezone.utc)),
        ("2026-11-20T08:30:00.25+01:00", datetime(2026, 11, 20, 7, 30, 0, 250_000, tzinfo=timezone.utc)),
        # As the table of captures writes it: in UTC.
        ("2026-11-20 08:30:00", datetime(2026, 11, 20, 8, 30, tzinfo=timezone.utc)),
        ("2026-11-20T08:30", datetime(2026, 11, 20, 8, 30, tzinfo=timezone.utc)),
    ],
)
def test_since(text, moment):
    assert since_of(text, NOW) == moment
    assert since_of(text, NOW).utcoffset() == timedelta(0)


@pytest.mark.parametrize(
    "text",
    [
        *("", "yesterday", "2", "-2h", "2026", "2026-13-01", "2026-11-31", "1763722800", "2026-11-20T25:00Z", "nan"),
        *("20261120", "99999999999d", "0001-01-01T00:00:00+14:00", "2026-11-20T08:30:00 Europe/Berlin", "2026-11-20\n"),
    ],
)
def test_what_is_no_moment(text):
    with pytest.raises(UsageError, match="expected how long ago, such as 2h or 3d, a day such as") as caught:
        since_of(text, NOW)
    assert "\n" not in str(caught.value)
