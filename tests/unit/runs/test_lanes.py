import copy
import json
from dataclasses import replace

import pytest

from sftriage.errors import InputError
from sftriage.model.windows import StageSchema, StepRecord
from sftriage.runs.lateness import WIDTH, lanes_of, peers_of, recorded_of
from sftriage.traces.manifest import MAX_RECORDED_STEPS, Manifest
from tests.scenario import info_of
from tests.unit.conftest import manifest_of

MS = 1_000_000


def record(step=0, start_ms=0, data=10, forward=30, backward=60, other=0, outside=0):
    durations = tuple(ms * MS for ms in (data, forward, backward, other))
    return StepRecord(2, step, start_ms * MS, 0, durations, (outside * MS,), True, False)


def drawn(ranks):
    return lanes_of(recorded_of(ranks))


def test_two_ranks_on_one_clock_are_drawn_where_they_were():
    # GIVEN a rank that is slow in data, and another that starts 5 ms later and waits for it
    slow = [record(start_ms=1000, data=50)]
    other = [record(start_ms=1005, data=5, backward=100)]
    lanes = drawn([("captured", info_of(2), slow), ("control", info_of(0), other)])
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
    lanes = drawn([("captured", info_of(2), slow), ("control", info_of(0, host="node-2"), other)])
    # THEN the first sync stage ends at one place
    ends = [[block.x + block.width for block in lane.blocks if block.stage == "backward"] for lane in lanes.lanes]
    assert not lanes.one_clock
    assert ends[0] == pytest.approx(ends[1], abs=0.05)


def test_time_outside_the_stages_is_where_it_was():
    # GIVEN 8 ms outside every stage, of which 6 before the sync
    (lane,) = drawn([("captured", info_of(2), [record(other=8, outside=6)])]).lanes
    assert [(block.stage, round(block.duration_s * 1e3)) for block in lane.blocks] == [
        ("data", 10),
        ("forward", 30),
        ("other", 6),
        ("backward", 60),
        ("other", 2),
    ]


def test_a_long_capture_is_shown_in_part():
    lanes = drawn([("captured", info_of(2), [record(step, step * 100) for step in range(50)])])
    assert (lanes.first_step, lanes.last_step) == (0, MAX_RECORDED_STEPS - 1)


def test_a_schema_without_sync_is_drawn_too():
    schema = StageSchema(("data", "forward", "backward", "other"))
    ranks = [info_of(0, schema=schema), info_of(1, schema=schema, host="node-2")]
    steps = [replace(record(start_ms=start_ms), outside_ns=()) for start_ms in (5, 900)]
    lanes = drawn([("captured", ranks[0], steps[:1]), ("control", ranks[1], steps[1:])])
    assert [lane.blocks[0].x for lane in lanes.lanes] == [0, 0]


def test_nothing_recorded_is_no_drawing():
    assert drawn([("captured", info_of(2), [])]) is None
    assert drawn([]) is None


def test_what_is_not_as_it_should_be_is_no_drawing():
    assert drawn([("captured", info_of(2), [replace(record(), start_ns=-1)])]) is None
    assert drawn([("captured", info_of(2), [replace(record(), outside_ns=())])]) is None


def test_a_manifest_that_claims_otherwise_is_refused(make_manifest):
    # GIVEN steps as a manifest keeps them
    recorded = recorded_of([("captured", info_of(2), [record()]), ("control", info_of(0), [record()])])
    whole = json.loads(make_manifest("c-1").model_copy(update={"recorded": recorded}).to_json())
    assert Manifest.from_json(json.dumps(whole).encode(), "x").recorded == recorded
    # WHEN somebody has changed them THEN they are refused before they are drawn
    for path, value in (
        (("stages",), ["data"]),
        (("stages",), ["<script>", "forward", "backward", "other"]),
        (("sync",), ["nowhere"]),
        (("ranks",), []),
        (("ranks", 0, "steps", 0, "durations_ns"), [1, 2, 3]),
        (("ranks", 0, "steps", 0, "durations_ns"), [1, 2, 3, -4]),
        (("ranks", 0, "steps"), whole["recorded"]["ranks"][0]["steps"] * 9),
        (("ranks", 1, "title"), "culprit"),
    ):
        changed = copy.deepcopy(whole)
        at = changed["recorded"]
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        with pytest.raises(InputError, match="recorded"):
            Manifest.from_json(json.dumps(changed).encode(), "x")


@pytest.mark.parametrize(
    ("n_ranks", "number", "expected"),
    [(1, 4, []), (3, 4, [0, 1]), (5, 4, [0, 1, 3, 4]), (6, 4, [0, 3, 5]), (8192, 2, [0, 4097])],
)
def test_the_peers_of_a_captured_rank_are_some_from_all_over_the_job(n_ranks, number, expected):
    # GIVEN rank 2, which is the suspect and was captured
    assert peers_of(manifest_of("a", rank=2), range(2, 3) if n_ranks == 1 else range(n_ranks), number) == expected


def test_however_large_a_job_is_few_ranks_of_it_are_read():
    assert len(peers_of(manifest_of("a"), range(100_000), 128)) <= 128
