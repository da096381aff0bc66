import pytest

from sftriage.records import StageSchema, StepRecord
from sftriage.runs.lanes import MAX_STEPS, WIDTH, lanes_of
from tests.unit.recorded import info_of

MS = 1_000_000


def record(step=0, start_ms=0, data=10, forward=30, backward=60, other=0, outside=0):
    durations = tuple(ms * MS for ms in (data, forward, backward, other))
    return StepRecord(2, step, start_ms * MS, 0, durations, (outside * MS,), True, False)


def test_two_ranks_on_one_clock_are_drawn_where_they_were():
    # GIVEN a rank that is slow in data, and another that starts 5 ms later and waits for it
    slow = [record(start_ms=1000, data=50)]
    other = [record(start_ms=1005, data=5, backward=100)]
    lanes = lanes_of([("captured", info_of(2), slow), ("control", info_of(0), other)])
    # THEN both lie on one scale of 140 ms, each block as wide as it lasted
    assert (lanes.one_clock, lanes.span_s) == (True, pytest.approx(0.14))
    first, second = lanes.lanes
    assert [(block.stage, block.x, block.width) for block in first.blocks] == [
        ("data", 0, pytest.approx(50 / 140 * WIDTH, abs=0.01)),
        ("forward", pytest.approx(50 / 140 * WIDTH, abs=0.01), pytest.approx(30 / 140 * WIDTH, abs=0.01)),
        ("backward", pytest.approx(80 / 140 * WIDTH, abs=0.01), pytest.approx(60 / 140 * WIDTH, abs=0.01)),
    ]
    assert second.blocks[0].x == pytest.approx(5 / 140 * WIDTH, abs=0.01)
    assert (first.means_s["data"], second.means_s["data"]) == (pytest.approx(0.05), pytest.approx(0.005))


def test_ranks_of_other_hosts_are_laid_together_where_they_meet():
    # GIVEN clocks that have nothing to do with each other
    slow, other = [record(start_ms=9_000_000, data=50)], [record(start_ms=7, data=10, backward=100)]
    lanes = lanes_of([("captured", info_of(2), slow), ("control", info_of(0, host="node-2"), other)])
    # THEN the first sync stage ends at one place
    ends = [[block.x + block.width for block in lane.blocks if block.stage == "backward"] for lane in lanes.lanes]
    assert not lanes.one_clock
    assert ends[0] == pytest.approx(ends[1], abs=0.05)


def test_time_outside_the_stages_is_where_it_was():
    # GIVEN 8 ms outside every stage, of which 6 before the sync
    (lane,) = lanes_of([("captured", info_of(2), [record(other=8, outside=6)])]).lanes
    assert [(block.stage, round(block.duration_s * 1e3)) for block in lane.blocks] == [
        ("data", 10),
        ("forward", 30),
        ("other", 6),
        ("backward", 60),
        ("other", 2),
    ]


def test_a_long_capture_is_shown_in_part():
    lanes = lanes_of([("captured", info_of(2), [record(step, step * 100) for step in range(50)])])
    assert (lanes.first_step, lanes.last_step) == (0, MAX_STEPS - 1)


def test_a_schema_without_sync_is_drawn_too():
    schema = StageSchema(("data", "forward", "backward", "other"))
    ranks = [info_of(0, schema=schema), info_of(1, schema=schema, host="node-2")]
    lanes = lanes_of([("captured", ranks[0], [record(start_ms=5)]), ("control", ranks[1], [record(start_ms=900)])])
    assert [lane.blocks[0].x for lane in lanes.lanes] == [0, 0]


def test_nothing_recorded_is_no_drawing():
    assert lanes_of([("captured", info_of(2), [])]) is None
    assert lanes_of([]) is None
