"""What step logs show of ranks: how late each was at every step, and captured steps side by side."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest

from sftriage.errors import InputError
from sftriage.model.windows import StageSchema, StepRecord, Window
from sftriage.runs.lateness import (
    MAX_ROWS,
    UNKNOWN,
    WIDTH,
    HeatSource,
    heat_map,
    lateness_of,
    peers_of,
    recorded_of,
    tracks_of,
)
from sftriage.traces.manifest import MAX_RECORDED_STEPS, Manifest
from sftriage.windows.logs import LOG_KIND, StepLogs
from sftriage.windows.steplog import StepLog
from tests.scenario import SCHEMA, info_of, steps_of_rank
from tests.unit.conftest import manifest_of


def window(durations_NRS, schema=SCHEMA, **about) -> Window:
    return Window(schema, 0, np.asarray(durations_NRS, dtype=float), **about)


def steps(n_steps=4, n_ranks=5):
    """Every rank alike: 10 ms, 30 ms, 60 ms."""
    return np.tile([0.01, 0.03, 0.06, 0.0], (n_steps, n_ranks, 1))


UNSYNCED = StageSchema(("data", "forward", "backward", "other"))


@pytest.mark.parametrize(
    ("where", "more_s", "late", "about"),
    [
        # In a local stage of one step, it is late there.
        ((2, 3, 0), 0.02, (2, 3), {}),
        # After the last sync, it is late in the next step.
        ((1, 3, 3), 0.02, (2, 3), {}),
        # Time inside the sync is no lateness, and without a sync stage it is the end of the step.
        ((slice(None), 3, 2), -0.02, None, {}),
        ((1, 3, 2), 0.02, (1, 3), {"schema": UNSYNCED}),
        # A missing step is unknown, as is where it would have begun the next one, and hides no other rank.
        ((1, 0), np.nan, (slice(1, 3), 0), {}),
        # Ranks are compared with their own cohort.
        ((slice(None), slice(3, 5), 0), 0.5, None, {"cohorts": ("a", "a", "a", "b", "b")}),
    ],
)
def test_a_rank_is_late_by_what_it_took_more_before_the_sync(where, more_s, late, about):
    # GIVEN rank 1, which is late in step 3, and something else
    durations_NRS, expected_NR = steps(), np.zeros((4, 5))
    durations_NRS[where] += more_s
    durations_NRS[3, 1, 0] += 0.03
    if late is not None:
        expected_NR[late] = more_s
    expected_NR[3, 1] = 0.03
    np.testing.assert_allclose(lateness_of(window(durations_NRS, **about)), expected_NR, atol=1e-12)


def infos(n_ranks):
    return [info_of(rank, n_ranks) for rank in range(n_ranks)]


@pytest.mark.parametrize("n_ranks", [2, 4, 127, 128, 129, 1024, 5000])
def test_a_map_has_a_bounded_number_of_rows_and_loses_no_late_rank(n_ranks):
    # GIVEN many ranks, the last of which is late
    late_CR = np.zeros((3, n_ranks), dtype=np.float32)
    late_CR[:, -1] = 0.05
    map_ = heat_map(late_CR, [0, 1, 2], 1, 1, 2, infos(n_ranks))
    # THEN its row shows it
    assert map_.levels_GC.shape[0] <= MAX_ROWS
    assert map_.levels_GC.shape[0] * map_.row_ranks >= n_ranks
    assert (map_.levels_GC[-1] == 254).all()
    assert (map_.latest[0].rank, map_.latest[0].mean_s) == (n_ranks - 1, pytest.approx(0.05))


@pytest.mark.parametrize("late_columns", [4, 200, 400])
def test_one_late_rank_stands_out_among_many_that_jitter(late_columns):
    # GIVEN a thousand ranks that jitter by a millisecond, and one that is 20 ms late, if only in the last columns
    late_CR = np.random.default_rng(7).normal(0.0, 0.001, (400, 1000)).astype(np.float32)
    late_CR[-late_columns:, 700] = 0.02
    map_ = heat_map(late_CR, list(range(400)), 1, 1, 399, infos(1000))
    # THEN its cells are the darkest, and those of the others are faint
    levels_GC = map_.levels_GC.astype(int)
    row = 700 // map_.row_ranks
    assert levels_GC[row, -late_columns:].min() == 254
    others_GC = np.delete(levels_GC, row, axis=0)
    assert np.quantile(others_GC, 0.99) < 254 / 2


def test_unknown_cells_have_a_colour_of_their_own():
    late_CR = np.array([[0.0, np.nan], [0.0, 0.01]], dtype=np.float32)
    map_ = heat_map(late_CR, [0, 1], 1, 1, 1, infos(2))
    assert map_.levels_GC.tolist() == [[0, 0], [UNKNOWN, 254]]
    assert [one.rank for one in map_.latest] == [1, 0]
    # AND without any data all cells are unknown
    map_ = heat_map(np.full((2, 3), np.nan, dtype=np.float32), [0, 1], 1, 1, 1, infos(3))
    assert ((map_.levels_GC == UNKNOWN).all(), map_.latest) == (True, ())


def slow_from(step, rank):
    return lambda r, s: {"data": 10.0 + (20.0 if r == rank and s >= step else 0.0), "forward": 30.0, "backward": 60.0}


def test_the_map_shows_who_was_late_from_when_on(run):
    # GIVEN a recorded run in which rank 2 is 20 ms late from step 60 on
    run.record(4, range(100), slow_from(60, 2))
    heat = HeatSource(StepLogs(run.directory.steps)).map(0, 20, 99, 1)
    # THEN the map has a column a step, and shows just that
    assert (heat.first_step, heat.last_step, heat.column_steps, heat.levels_GC.shape) == (20, 99, 1, (4, 80))
    assert (heat.levels_GC[2] > 200).tolist() == [step >= 60 for step in range(20, 100)]
    assert (heat.levels_GC[[0, 1, 3]] == 0).all()
    assert (heat.latest[0].rank, heat.scale_s) == (2, pytest.approx(0.02, rel=1e-3))


def test_the_map_has_where_the_time_of_each_column_went(run):
    # GIVEN the same, and a map of a column a step, and one of more steps in a column
    run.record(4, range(100), slow_from(60, 2))
    for each in (1, 8):
        heat = HeatSource(StepLogs(run.directory.steps)).map(0, 16, 99, each)
        # THEN the late rank moves the frontier in data by what it is late, from the very step on
        data_C = heat.advances_CS[:, heat.stages.index("data")]
        for start, data_s in zip(range(16, 100, each), data_C, strict=True):
            steps_there = range(start, min(100, start + each))
            slow = sum(step >= 60 for step in steps_there) / len(steps_there)
            assert data_s == pytest.approx(0.010 + 0.020 * slow, rel=1e-3)


def test_a_map_of_device_times_grows_as_they_come(run):
    # GIVEN the device times of some steps: those of a step come later than its host's
    directory, steps = run.directory.steps, [steps_of_rank(rank, 2, range(40), slow_from(10, 1)) for rank in (0, 1)]
    logs = [StepLog(directory, info_of(rank, 2), kind=LOG_KIND) for rank in (0, 1)]
    for log, of_rank in zip(logs, steps, strict=True):
        log.append(of_rank[:20])
    source = HeatSource(StepLogs(directory, LOG_KIND))
    early = source.map(0, 8, 39, 1)
    # THEN the map is by the devices' clock, and what is not there yet is unknown
    assert (early.clock, early.levels_GC[1].tolist()) == ("device", [0] * 2 + [254] * 10 + [UNKNOWN] * 20)
    # AND WHEN the others come THEN it has them
    for log, of_rank in zip(logs, steps, strict=True):
        log.append(of_rank[20:])
        log.close()
    assert source.map(0, 8, 39, 1).levels_GC[1].tolist() == [0] * 2 + [254] * 30


def test_no_step_is_read_again_as_the_run_goes_on(run, monkeypatch):
    # GIVEN a map of a run so far
    monkeypatch.setattr("sftriage.runs.lateness.MAX_COLUMNS", 64)
    run.record(2, range(2000), slow_from(600, 1))
    source = HeatSource(StepLogs(run.directory.steps))
    source.map(0, 0, 999, 16)
    before = source.read
    # WHEN it is requested again THEN hardly anything is read
    source.map(0, 0, 999, 16)
    again = source.read - before
    assert again < before / 20
    # AND WHEN the run is twice as long, with columns twice as wide, THEN the first half is not read again
    before = source.read
    longer = source.map(0, 0, 1999, 32)
    assert source.read - before < 1.2 * 2 * 1050
    # AND it is what it would have been without anything known
    fresh = HeatSource(StepLogs(run.directory.steps)).map(0, 0, 1999, 32)
    np.testing.assert_array_equal(longer.levels_GC, fresh.levels_GC)


def test_of_a_long_run_a_sample_is_read(run, monkeypatch):
    monkeypatch.setattr("sftriage.runs.lateness.MAX_COLUMNS", 32)
    monkeypatch.setattr("sftriage.runs.lateness.MAX_READ", 1)
    run.record(2, range(2000), slow_from(1024, 1))
    source = HeatSource(StepLogs(run.directory.steps))
    heat = source.map(0, 0, 1999, 64)
    assert (heat.column_steps, heat.sampled_steps) == (64, 4)
    assert source.read <= 32 * 5 * 2
    assert [level == 254 for level in heat.levels_GC[1]] == [start >= 1024 for start in range(0, 2000, 64)]


def test_what_is_remembered_is_bounded(run, monkeypatch):
    monkeypatch.setattr("sftriage.runs.lateness.MAX_CACHED", 10)
    run.record(2, range(100), slow_from(50, 1))
    source = HeatSource(StepLogs(run.directory.steps))
    heat = source.map(0, 0, 99, 1)
    assert len(source._columns) <= 10
    assert (heat.levels_GC[1] == 254).sum() == 50


MS = 1_000_000


def record(step=0, start_ms=0, data=10, forward=30, backward=60, other=0, outside=0):
    durations = tuple(ms * MS for ms in (data, forward, backward, other))
    return StepRecord(2, step, start_ms * MS, 0, durations, (outside * MS,), True, False)


def drawn(ranks):
    return tracks_of(recorded_of(ranks))


def test_two_ranks_on_one_clock_are_drawn_where_they_were():
    # GIVEN a rank that is slow in data, and another that starts 5 ms later and waits for it
    slow = [record(start_ms=1000, data=50)]
    other = [record(start_ms=1005, data=5, backward=100)]
    tracks = drawn([("captured", info_of(2), slow), ("control", info_of(0), other)])
    # THEN both lie on one scale of 140 ms, each block as wide as it lasted
    assert (tracks.one_clock, tracks.span_s) == (True, pytest.approx(0.14))
    first, second = tracks.ranks
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
    tracks = drawn([("captured", info_of(2), slow), ("control", info_of(0, host="node-2"), other)])
    # THEN the first sync stage ends at one place
    ends = [[block.x + block.width for block in track.blocks if block.stage == "backward"] for track in tracks.ranks]
    assert not tracks.one_clock
    assert ends[0] == pytest.approx(ends[1], abs=0.05)


def test_time_outside_the_stages_is_where_it_was():
    # GIVEN 8 ms outside every stage, of which 6 before the sync
    (track,) = drawn([("captured", info_of(2), [record(other=8, outside=6)])]).ranks
    assert [(block.stage, round(block.duration_s * 1e3)) for block in track.blocks] == [
        ("data", 10),
        ("forward", 30),
        ("other", 6),
        ("backward", 60),
        ("other", 2),
    ]


def test_a_long_capture_is_shown_in_part():
    tracks = drawn([("captured", info_of(2), [record(step, step * 100) for step in range(50)])])
    assert (tracks.first_step, tracks.last_step) == (0, MAX_RECORDED_STEPS - 1)


def test_a_schema_without_sync_is_drawn_too():
    schema = StageSchema(("data", "forward", "backward", "other"))
    ranks = [info_of(0, schema=schema), info_of(1, schema=schema, host="node-2")]
    steps = [replace(record(start_ms=start_ms), outside_ns=()) for start_ms in (5, 900)]
    tracks = drawn([("captured", ranks[0], steps[:1]), ("control", ranks[1], steps[1:])])
    assert [track.blocks[0].x for track in tracks.ranks] == [0, 0]


def test_nothing_recorded_is_no_drawing():
    assert drawn([("captured", info_of(2), [])]) is None
    assert drawn([]) is None


def test_a_manifest_that_claims_otherwise_is_refused(make_manifest):
    # GIVEN steps as a manifest keeps them
    recorded = recorded_of([("captured", info_of(2), [record()]), ("control", info_of(0), [record()])])
    whole = json.loads(make_manifest("c-1").model_copy(update={"recorded": recorded}).to_json())
    assert Manifest.from_json(json.dumps(whole).encode(), "x").recorded == recorded
    # WHEN they were tampered with THEN they are refused before they are drawn
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
    [(3, 4, [0, 1]), (5, 4, [0, 1, 3, 4]), (6, 4, [0, 3, 5]), (8192, 2, [0, 4097])],
)
def test_the_peers_of_a_captured_rank_are_some_from_all_over_the_job(n_ranks, number, expected):
    # GIVEN rank 2, which is the suspect and was captured
    assert peers_of(manifest_of("a", rank=2), range(n_ranks), number) == expected
