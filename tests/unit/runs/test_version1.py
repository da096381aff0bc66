"""A journal of version 1, whose reasons are sentences, is read as if they had been codes all along."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.decisions import Decision
from sftriage.events import VERSION, encode
from sftriage.runs.following import JournalTail
from sftriage.runs.journal import event_of, read_journal
from sftriage.runs.version1 import translated, upgraded
from sftriage.words.decisions import reason_sentence, resolution

RECORDED = Path(__file__).parent / "fixtures" / "journal-v1.jsonl"
ENTRIES = [json.loads(line) for line in RECORDED.read_text(encoding="utf-8").splitlines()]
DECIDED = [entry for entry in ENTRIES if "decision" in entry]


@pytest.mark.parametrize("entry", DECIDED, ids=lambda entry: entry["decision"]["reason"][:40])
def test_a_recorded_decision_says_what_it_said(entry):
    # WHEN it is read THEN the same words are made of it, and all else is as it was
    decision = event_of(json.dumps(entry).encode()).decision
    before = entry["decision"]
    assert reason_sentence(decision) == before["reason"]
    # (on a verdict's reasons, the advice is that of now)
    assert decision.reason == "undecided" or resolution(decision) == before["resolves"]
    assert decision.numbers == before["numbers"]
    assert [one.capture_id for one in decision.requests] == [one["capture_id"] for one in before["requests"]]


def test_a_recorded_journal_is_read_whole():
    tail = JournalTail(RECORDED)
    assert tail.follow()
    assert tail.skipped == 0
    types = [entry["type"] for entry in ENTRIES]
    assert (len(tail.rows), len(tail.results)) == (types.count("window"), types.count("capture"))
    assert [row.words for row in tail.rows] == [e["decision"]["reason"] for e in DECIDED if e["type"] == "window"]
    assert [row.words for row in tail.asks] == [e["decision"]["reason"] for e in DECIDED if e["type"] != "window"]
    events = list(read_journal(RECORDED))
    assert (len(events), {event.version for event in events}) == (len(ENTRIES), {VERSION})
    # AND the states of captures have their names of now
    assert {one.state for one in tail.results.values()} == {"stored", "failed", "refused"}


def as_then(values, then):
    """Values without what could not be said when ``then`` was written, which nobody knows of it."""
    if isinstance(then, dict):
        assert [values[name] for name in values.keys() - then.keys() if values[name] not in (None, "")] == []
        return {name: as_then(values[name], one) for name, one in then.items()}
    return [as_then(*pair) for pair in zip(values, then, strict=True)] if isinstance(then, list) else values


def test_all_else_of_a_recorded_entry_is_as_it_was():
    renamed = {"ask": "manual_request", "beside": "follow_up"}
    for entry, event in zip(ENTRIES, read_journal(RECORDED), strict=True):
        values = json.loads(encode(event))
        assert values["type"] == renamed.get(entry["type"], entry["type"])
        for name in entry.keys() & {"verdict", "triggers", "capture_id"}:
            assert as_then(values[name], entry[name]) == entry[name]
        if entry["type"] in ("cost", "policy"):
            inner = entry["cost"] if entry["type"] == "cost" else entry["change"]
            assert {name: values[name] for name in inner if name != "policies"} == {
                name: value for name, value in inner.items() if name != "policies"
            }
        if entry["type"] == "evidence" and entry["evidence"].get("gpus"):
            assert values["remarks"] == entry["evidence"]["gpus"]["remarks"]


@pytest.mark.parametrize(
    ("sentence", "label", "outcome", "code", "parameters"),
    [
        ("healthy", "healthy", "ignore", "healthy", {}),
        ("roaming, low_coverage", "needs_evidence", "hold", "undecided", {"reasons": ("roaming", "low_coverage")}),
        ("cooldown of rule a", "suspect", "throttle", "recorded", {"text": "cooldown of rule a", "resolves": "Wait."}),
        # A name may read as another sentence does.
        ("healthy asked for it: x", "asked", "capture", "recorded", {"text": "healthy asked for it: x"}),
    ],
)
def test_what_has_a_code_and_what_is_kept_as_it_is(sentence, label, outcome, code, parameters):
    found, given_ = translated(sentence, label=label, outcome=outcome, resolves="Wait.")
    assert found == code
    assert parameters.items() <= dict(given_).items()


TEXTS = st.one_of(st.text(), st.sampled_from([entry["decision"]["reason"] for entry in DECIDED]))


@given(
    st.tuples(TEXTS, st.sampled_from(["", ": ", " of rule ", "9"]), TEXTS).map("".join),
    st.sampled_from(["healthy", "suspect", "stalled", "needs_evidence", "asked"]),
    st.sampled_from(["capture", "hold", "throttle", "ignore"]),
)
def test_whatever_was_said_is_said_again(sentence, label, outcome):
    code, parameters = translated(sentence, label=label, outcome=outcome, resolves="Wait.")
    decision = Decision(0.0, 0, 0, label, outcome, code, None, parameters)
    assert reason_sentence(decision) == sentence
    if code == "recorded":
        assert resolution(decision) == "Wait."


@pytest.mark.parametrize(
    "entry",
    [
        {"type": "window", "decision": None},
        {"type": "window", "decision": {"reason": 5}},
        {"type": "window", "decision": {"reason": "odd", "label": [], "outcome": {}, "resolves": 7}},
        {"type": "capture", "result": {"state": []}},
    ],
)
def test_an_entry_that_is_none_is_not_made_one(entry):
    with pytest.raises(ValueError):  # noqa: PT011 (msgspec and ours are both of it)
        event_of(json.dumps(entry).encode())


def test_an_entry_of_a_type_that_nobody_knows_is_passed_over():
    assert upgraded({"type": "what"}) is None
    assert event_of(b'{"type": "what", "version": 2}') is None
    assert event_of(b'{"type": "window", "version": 99}') is None
