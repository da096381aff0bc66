"""What a cluster is told of as events: little, and bounded."""

from __future__ import annotations

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from sftriage.kube.jobs import JobRef
from sftriage.kube.statuses import event_body, event_name, news
from sftriage.model.captures import CaptureState
from sftriage.words.run import Face
from tests.unit.kube.objects import NOW_S, made

JOB = JobRef("jobset", "pretraining", "ml")


def status(health, *captures):
    found = [{"capture_id": name, "rank": 2, "state": state} for name, state in captures]
    return {"health": health, "summary": "It stands so.", "captures": found}


def told(before, now):
    return [(one.reason, one.kind) for one in news(before, now)]


def test_how_a_job_stands_is_told_when_that_changes():
    assert told({}, status("warming_up")) == []
    assert told(status("warming_up"), status("healthy")) == []
    assert told(status("healthy"), status("suspect")) == [("Suspect", "Warning")]
    assert told(status("suspect"), status("suspect")) == []
    assert told(status("captured"), status("healthy")) == [("Healthy", "Normal")]


def test_captures_are_told_together_when_they_end():
    before, now = (
        status("suspect", ("a", "running")),
        status("suspect", ("a", "stored"), ("b", "stored"), ("c", "failed")),
    )
    found = list(news(before, now))
    assert [one.reason for one in found] == ["CaptureStored", "CaptureFailed"]
    assert found[0].message == "2 stored, among them a of rank 2."
    assert told(now, now) == []


def test_a_remedy_is_told_in_each_state_that_it_comes_to():
    # GIVEN a remedy that is tried, and then kept THEN each of that is told once, in the report's own words
    trying, kept = (
        status("suspect") | {"remedy": {"remedy": "pipeline", "state": state, "rank": 1, "words": f"It is {state}."}}
        for state in ("trying", "kept")
    )
    assert told(status("suspect"), trying) == [("RemedyTrying", "Normal")]
    assert told(trying, trying) == []
    assert [(one.reason, one.message) for one in news(trying, kept)] == [("RemedyKept", "It is kept.")]


FACES = st.sampled_from(get_args(Face))
STATES = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(get_args(CaptureState))), unique_by=lambda one: one[0]
)


@given(st.lists(st.builds(lambda face, captures: status(face, *captures), FACES, STATES), max_size=40))
def test_however_long_a_job_it_has_few_events(course):
    """GIVEN any course of a job THEN its events have a dozen names at most, and each counts how often it was so."""
    served, count = {}, 0
    report = made("TriageReport", JOB.object_name, {"job": "pretraining"})
    for before, now in zip([{}, *course], course, strict=False):
        for one in news(before, now):
            name = event_name(JOB, one.reason)
            served[name] = event_body(JOB, report, one, served.get(name, {}), 1, NOW_S)
            count += 1
    assert len(served) <= len(get_args(Face)) + 2
    assert sum(one["count"] for one in served.values()) == count
    assert all(0 < len(one["message"]) <= 1024 for one in served.values())
