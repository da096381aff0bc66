"""The page about what a run would take without its stragglers."""

import json

import pytest

from sftriage.policy.loading import find
from tests.unit.recorded import verdict
from tests.unit.web.reading import text_of


@pytest.fixture
def slow(run):
    """A run whose rank 2 is slow in data."""
    run.directory.policy_file.write_text(find("default").read_text())
    late, in_time = {"data": 50.0, "forward": 30, "backward": 60}, {"data": 10.0, "forward": 30, "backward": 100}
    run.record(4, range(200), lambda rank, step: late if rank == 2 else in_time)
    run.decide(verdict(100, "suspect"))
    return run


def test_the_page_has_the_heat_map_and_a_step_as_measured_and_without(slow):
    # GIVEN the page, to which the overview leads
    assert 'href="/whatif"' in slow.get("/").text
    page = slow.get("/whatif")
    assert page.status == 200
    told = text_of(page)
    assert "The verdict on these steps: mending rank 2 in data would save 20.0 ms" in told
    assert "One slow worker: rank 2 (data-parallel rank 2, stage 0), most of all in data" in told
    # THEN the slow worker is the reddest on the heat map, and no other is red
    cells = [line for line in page.text.split("<td") if "more-" in line.partition(">")[0]]
    assert len(cells) == 1
    # AND the step of each of the four workers is drawn twice
    assert page.text.count('class="step"') == 8
    assert "rank 3 (data-parallel rank 3, stage 0)" in told


def test_the_same_is_there_for_perfetto(slow):
    answer = slow.get("/whatif.json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    events = json.loads(answer.body)["traceEvents"]
    ends = {
        pid: max(one["ts"] + one["dur"] for one in events if one["ph"] == "X" and one["pid"] == pid) for pid in (1, 2)
    }
    # (durations of a straggler are in the mean of all)
    assert ends[1] > ends[2] > 0.0
    waits = {one["tid"] for one in events if one["name"].startswith("waits") and one["pid"] == 1}
    assert waits == {0, 1, 3}


def test_a_run_that_cannot_be_replayed_yet_says_why(run):
    run.directory.policy_file.write_text(find("default").read_text())
    assert 'href="/whatif"' not in run.get("/").text
    for address in ("/whatif", "/whatif.json"):
        answer = run.get(address)
        assert answer.status == 422
        assert "no steps yet" in answer.text
