"""Windows from the ranks' steps, in whatever order they come and however many at a time, and with device times."""

import tracemalloc
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.model.windows import COUNTERS, PLACE, StageSchema, StepRecord, Window
from sftriage.windows import gather as module
from sftriage.windows.gather import DEVICE_LAG_STEPS, MAX_GAP_STEPS, Gatherer, Shape, Span, StepTimes
from sftriage.windows.rings import Rows
from tests.scenario import batch

SCHEMA = StageSchema.closed(("data", "backward"), ("backward",))
MS = 1_000_000
SHRINKS = frozenset({"window_steps", "stride_steps", "warmup_steps"})


def step(rank: int, number: int, **more: object) -> StepRecord:
    """A step whose first duration tells which rank and step it is."""
    values = {
        "start_ns": 0,
        "between_ns": 7 * MS,
        "durations_ns": (number * MS + rank, 10 * MS, 3 * MS),
        "outside_ns": (2 * MS,),
        "complete": True,
        "capturing": False,
    }
    return StepRecord(rank=rank, step=number, **{**values, **more})


def gatherer(ranks: int = 2, window: int = 4, stride: int = 2, warmup: int = 0) -> Gatherer:
    return Gatherer(SCHEMA, ranks, Shape(window, stride, warmup))


def fed(target: Gatherer, steps: list[StepRecord]) -> list[tuple[int, int]]:
    """Give the steps one by one; first and last step of every window that came out."""
    found = []
    for record in steps:
        target.add(batch(record))
        found += [(window.first_step, window.last_step) for window in target.ready()]
    return found


FAR = MAX_GAP_STEPS * 1000


@pytest.mark.parametrize(
    ("numbers", "warmup", "found"),
    [
        (range(8), 0, [(0, 3), (2, 5), (4, 7)]),
        (range(7), 3, [(3, 6)]),
        # A job that goes on at a later step starts its windows there.
        (range(5000, 5004), 0, [(5000, 5003)]),
        # A window in a gap without steps is none; a longer gap starts the numbering over.
        ([*range(4), *range(100, 106)], 0, [(0, 3), (2, 5), (98, 101), (100, 103), (102, 105)]),
        ([*range(4), *range(FAR, FAR + 4)], 0, [(0, 3), (FAR, FAR + 3)]),
    ],
)
def test_windows_come_at_every_stride_once_every_rank_has_passed_their_end(numbers, warmup, found):
    # GIVEN two ranks, windows of 4 steps, one every 2
    assert fed(gatherer(warmup=warmup), [step(rank, n) for n in numbers for rank in (0, 1)]) == found


FOURS, FIFTIES = Shape(4, 2, 3), Shape(50, 10, 20, SHRINKS)


@pytest.mark.parametrize(
    ("shape", "due", "first_step", "found", "stride"),
    [
        # The next due step is where the steps that come begin, or after them, by less than the warm-up or by more.
        (FOURS, 13, 13, 13, 2),
        (FOURS, 13, 12, 13, 2),
        (FOURS, 13, 8, 11, 2),
        (FOURS, 13, 0, 3, 2),
        # Some of it never comes: windows go on with the next that is there whole.
        (FOURS, 13, 14, 15, 2),
        (FOURS, 13, 20, 21, 2),
        # Before anything was judged, what comes first is the warm-up.
        (FOURS, None, 8, 11, 2),
        # Long steps, of which windows and warm-up have fewer.
        (FIFTIES, 35, 0, 10, 5),
        (FIFTIES, 35, 26, 35, 5),
        (FIFTIES, 35, 34, 35, 5),
    ],
)
def test_windows_of_a_resumed_job_begin_where_they_would_have(shape, due, first_step, found, stride):
    target = Gatherer(SCHEMA, 1, shape, due=due)
    windows = fed(target, [step(0, n, durations_ns=(240 * MS, 0, 0)) for n in range(first_step, first_step + 80)])
    assert windows[0][0] == found
    assert {later[0] - before[0] for before, later in pairwise(windows)} == {stride}


@pytest.mark.parametrize(("rank", "number"), [(9, 1), (-1, 1), (0, -(2**62)), (0, 2**62)])
def test_ranks_beyond_the_world_size_and_impossible_step_numbers_are_ignored(rank, number):
    ignored = step(rank, number, durations_ns=(MS, MS, MS))
    assert fed(gatherer(ranks=1), [step(0, 0), ignored, *(step(0, n) for n in (1, 2, 3))]) == [(0, 3)]


@pytest.mark.parametrize(
    ("step_s", "shrinks", "found"),
    [
        (0.1, SHRINKS, [(20, 69), (30, 79)]),
        (0.24, SHRINKS, [(10, 34), (15, 39)]),
        (0.6, SHRINKS, [(4, 13), (6, 15)]),
        (1800.0, SHRINKS, [(4, 13), (6, 15)]),
        # A fixed number holds.
        (1800.0, SHRINKS - {"window_steps"}, [(4, 53), (14, 63)]),
        (1800.0, SHRINKS - {"warmup_steps", "stride_steps"}, [(20, 29), (30, 39)]),
        (1800.0, frozenset(), [(20, 69), (30, 79)]),
    ],
)
def test_with_long_steps_the_first_verdict_comes_after_fewer(step_s, shrinks, found):
    # GIVEN a job whose first step takes as long as a thousand others, WHEN the others take this long
    shape = Shape(50, 10, 20, shrinks)
    steps = [step(0, n, durations_ns=(int(step_s * (1000 if n == 0 else 1) * 1e9), 0, 0)) for n in range(90)]
    # THEN windows are cut accordingly
    windows = fed(Gatherer(SCHEMA, 1, shape), steps)
    assert windows[:2] == found
    # AND the step of the first one is known beforehand
    assert shape.first_verdict_step(0, step_s) == found[0][1]


@pytest.mark.parametrize(
    ("step_s", "shrinks", "from_step", "found"),
    [
        (0.0005, SHRINKS, 10**6, (1000, 1000)),
        (0.0001, SHRINKS, 10**6, (2000, 2000)),
        (0.005, SHRINKS, 10**6, (100, 100)),
        (0.01, SHRINKS, 10**6, (50, 10)),
        # A job that has just begun is judged after fewer.
        (0.0005, SHRINKS, 0, (50, 10)),
        (0.0005, SHRINKS, 200, (200, 200)),
        # A fixed number holds.
        (0.0005, SHRINKS - {"window_steps"}, 10**6, (50, 10)),
        (0.0005, SHRINKS - {"stride_steps"}, 10**6, (50, 10)),
    ],
)
def test_with_quick_steps_windows_have_more_of_them(step_s, shrinks, from_step, found):
    cut = Shape(50, 10, 20, shrinks).at(step_s, from_step)
    assert (cut.window_steps, cut.stride_steps, cut.warmup_steps) == (*found, 20)


@given(st.integers(100, 3000), st.lists(st.integers(1, 900), max_size=6))
def test_quick_steps_make_the_same_windows_however_they_are_split(n_steps, pieces):
    steps = batch(*[step(0, n, durations_ns=(MS // 2, 0, 0)) for n in range(n_steps)])

    def windows(ends: list[int]) -> list[tuple[int, int]]:
        target, found = Gatherer(SCHEMA, 1, Shape(50, 10, 20, SHRINKS)), []
        for first, end in pairwise([0, *ends, n_steps]):
            target.add(steps[first:end])
            # (the last ones come as the job ends)
            found += target.ready(ended=end == n_steps)
        return [(window.first_step, window.last_step) for window in found]

    ends = sorted({min(sum(pieces[: n + 1]), n_steps - 1) for n in range(len(pieces))})
    assert windows(ends) == windows([]) == windows(list(range(1, n_steps, 50)))


def test_resumed_quick_steps_begin_where_the_last_window_ended():
    shape = Shape(50, 10, 20, SHRINKS)
    took = (MS // 2, 0, 0)
    steps = [step(0, n, durations_ns=took) for n in range(6000)]
    before = fed(Gatherer(SCHEMA, 1, shape), steps[:4000])
    first, last = before[-1]
    due = first + shape.stride_after(last - first + 1)
    assert due == last + 1
    # WHEN another controller sees the steps from a while before that on THEN its windows go on there
    assert fed(Gatherer(SCHEMA, 1, shape, due=due), steps[due - 700 :])[0][0] == due


def test_an_impossible_step_of_one_rank_ends_no_other_ranks_windows():
    # GIVEN three ranks, and a step of one of them whose number is far ahead of all others
    target = gatherer(ranks=3)
    target.add(batch(*[step(rank, n) for n in range(6) for rank in range(3)]))
    target.ready()
    target.add(batch(*[step(rank, 6) for rank in range(3)], step(1, 2**50, durations_ns=(MS, MS, MS))))
    target.ready()
    # WHEN the job goes on THEN so do its windows
    found = []
    for n in range(7, 17):
        target.add(batch(*[step(rank, n) for rank in range(3)]))
        found += [window for window in target.ready() if window.first_step < 100]
    assert found[-1].last_step >= 15
    assert np.isfinite(found[-1].durations_NRS).all()


def test_a_job_that_becomes_quicker_gets_longer_windows():
    steps = [step(0, n, durations_ns=(6 * 10**8 if n < 30 else 10**7, 0, 0)) for n in range(120)]
    windows = fed(Gatherer(SCHEMA, 1, Shape(50, 10, 20, SHRINKS)), steps)
    lengths = [last - first + 1 for first, last in windows]
    assert (lengths[0], lengths[-1]) == (10, 50)
    assert sorted(lengths) == lengths


def test_the_newest_steps_can_be_cut_before_their_window():
    # GIVEN two ranks that have recorded 9 steps and 8; the windows up to 4-7 are out, so that steps 6 on are held
    target = gatherer()
    assert target.cut(0, 1) is None
    fed(target, [step(rank, n) for n in range(8) for rank in (0, 1)] + [step(0, 8)])
    # WHEN some of those are cut THEN they are as received, with missing steps missing
    found = target.cut(6, 8)
    np.testing.assert_allclose(
        found.durations_NRS[:, :, 0], [[0.006, 0.006], [0.007, 0.007], [0.008, np.nan]], atol=1e-5
    )
    assert (found.first_step, found.last_step) == (6, 8)
    # AND steps no longer or not yet in the store, or an empty range, give none
    assert [target.cut(*steps) for steps in ((5, 7), (9, 10), (7, 6), (6, 10_000))] == [None] * 4


def test_a_returned_window_does_not_change():
    target = gatherer(stride=1)
    fed(target, [step(0, n) for n in range(7)])
    # GIVEN a window that went out without rank 1's steps
    target.add(batch(step(0, 7)))
    (window,) = target.ready()
    before = [np.copy(values) for values in (window.durations_NRS, window.between_NR, window.capturing_N)]
    # WHEN they come while later windows still hold the same steps, and the job goes on
    fed(target, [step(1, n, capturing=True) for n in range(8)])
    fed(target, [step(rank, n) for n in range(8, 40) for rank in (0, 1)])
    # THEN the window is as it was
    for kept, values in zip(before, (window.durations_NRS, window.between_NR, window.capturing_N), strict=True):
        np.testing.assert_array_equal(kept, values)


def test_the_ranks_of_a_stage_lie_side_by_side():
    target = gatherer(ranks=3)
    target.add(batch(*[step(rank, n) for n in range(4) for rank in range(3)]))
    (window,) = target.ready()
    for s in range(3):
        assert window.durations_NRS[:, :, s].flags.c_contiguous


def test_the_store_does_not_grow_with_the_distance_between_steps():
    # GIVEN a window of 4 steps of 200 ranks
    tracemalloc.start()
    target = gatherer(ranks=200)
    size_bytes = 4 * 200 * (3 + 1 + 1) * 8
    # WHEN the job's numbering leaves out ten thousand steps, twice
    for far in range(0, 3 * MAX_GAP_STEPS, MAX_GAP_STEPS):
        target.add(batch(*[step(rank, n) for n in (far, far + 1) for rank in range(200)]))
        target.ready()
    # THEN there are never more than a few windows in memory
    assert tracemalloc.get_traced_memory()[1] < 20 * size_bytes
    tracemalloc.stop()


def test_ranks_that_keep_together_take_no_rows_for_a_second_window():
    # GIVEN windows of 60 steps of 40 ranks, of which 2 are new in each
    took = []
    for lag in (0, 50):
        target = gatherer(ranks=40, window=60, stride=2)
        tracemalloc.start()
        # WHEN the ranks take their steps together, or one is 50 steps behind the others
        for n in range(130):
            ranks = [(rank, n) for rank in range(39)] + [(39, n - lag)] * (n >= lag)
            target.add(batch(*[step(rank, number) for rank, number in ranks]))
            target.ready()
        took.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    # THEN only for those that lie apart there are as many rows again
    assert took[1] - took[0] > 50 * 40 * 5 * 8


@pytest.mark.parametrize(
    ("noted", "kinds"),
    [
        ({}, None),
        ({(0, 2): "a", (1, 2): "b"}, ("", "", "a", "")),
        ({(0, 0): "eval", (1, 0): "eval", (1, 3): "checkpoint"}, ("eval", "", "", "")),
        ({(0, 1): "sixteen bytes !!", (1, 1): "sixteen bytes !!"}, ("", "sixteen bytes !!", "", "")),
        ({(1, 0): "eval", (1, 3): "checkpoint", (0, 2): "eval"}, None),
    ],
)
def test_a_step_has_a_kind_if_the_ranks_agree_and_otherwise_some_ranks_note_it(noted, kinds):
    records = [step(rank, n, kind=noted.get((rank, n), "")) for n in range(4) for rank in (1, 0)]
    for together in (records, records[::-1]):
        target = gatherer()
        target.add(batch(*together))
        (window,) = target.ready()
        assert window.kinds == kinds
        # AND what only one of them notes is its own
        agreed = set() if kinds is None else {n for n in range(4) if kinds[n]}
        alone = {(rank, n): kind for (rank, n), kind in noted.items() if n not in agreed}
        noted_NR = np.full((4, 2), "") if window.noted_NR is None else window.noted_NR
        assert {(rank, n): noted_NR[n, rank] for n, rank in np.argwhere(noted_NR != "").tolist()} == alone
    # AND one by one it is the same
    target = gatherer()
    for record in records:
        target.add(batch(record))
    assert target.ready()[0].kinds == kinds


@pytest.mark.parametrize(
    ("places", "hosts", "cohorts"),
    [
        ([], None, None),
        ([(1, "b", "")], ("", "b"), None),
        ([(0, "a", ""), (1, "a", "")], ("a", "a"), None),
        ([(0, "a", "pp0"), (1, "b", ""), (0, "c", "pp1")], ("c", "b"), ("pp1", "")),
        ([(9, "z", "z"), (-1, "z", "z")], None, None),
    ],
)
def test_windows_have_each_ranks_host_and_cohort(places, hosts, cohorts):
    target = gatherer()
    for rank, host, cohort in places:
        target.take([Rows(0, SCHEMA, 2, {rank: SimpleNamespace(host=host, cohort=cohort)}, batch(schema=SCHEMA))])
    target.add(batch(*[step(rank, n) for n in range(4) for rank in (0, 1)]))
    (window,) = target.ready()
    assert (window.hosts, window.cohorts) == (hosts, cohorts)


def same(one: Window, other: Window) -> None:
    assert (one.first_step, one.kinds) == (other.first_step, other.kinds)
    for name in ("durations_NRS", "outside_NRG", "between_NR", "ready_NR", "work_NR", "capturing_N"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


RANKS = 3


@st.composite
def jobs(draw: st.DrawFn, max_gap_steps: int) -> list[StepRecord]:
    """Steps of three ranks in the order of their numbers: some are missing, half-way or of a kind, and numbers jump."""
    number, records = draw(st.integers(-3, 10**6)), []
    for _ in range(draw(st.integers(1, 14))):
        records += [
            step(
                rank,
                number,
                complete=draw(st.integers(0, 9)) > 0,
                capturing=draw(st.integers(0, 9)) == 0,
                kind=draw(st.sampled_from(("", "", "", "eval", "save"))),
                work=draw(st.sampled_from((0, 0, 7))),
                ready_ns=draw(st.sampled_from((None, None, 5 * MS))),
            )
            for rank in draw(st.sets(st.integers(0, RANKS - 1)))
        ]
        number += draw(st.one_of(st.just(1), st.integers(1, max_gap_steps)))
    return records


def one_at_a_time(records: list[StepRecord], shape: Shape) -> list[Window]:
    target, windows = Gatherer(SCHEMA, RANKS, shape), []
    for record in records:
        target.add(batch(record))
        windows += target.ready()
    return windows + target.ready(ended=True)


shapes = st.builds(Shape, st.integers(1, 5), st.integers(1, 7), st.integers(0, 3)) | st.builds(
    # (the steps of `jobs` take as many milliseconds as their number)
    Shape,
    st.integers(10, 14),
    st.integers(1, 7),
    st.integers(0, 6),
    st.sampled_from((SHRINKS, frozenset({"warmup_steps"}))),
)


@given(jobs(3 * MAX_GAP_STEPS), shapes)
def test_windows_hold_exactly_the_recorded_values(records, shape):
    recorded = {(one.step, one.rank): one for one in records}
    for window in one_at_a_time(records, shape):
        for n, number in enumerate(range(window.first_step, window.last_step + 1)):
            of_step = [recorded.get((number, rank)) for rank in range(RANKS)]
            for rank, one in enumerate(of_step):
                # THEN what is missing, or was left half-way, is NaN
                there = one is not None and one.complete
                missing = step(rank, number, durations_ns=(np.nan,) * 3, outside_ns=(np.nan,), between_ns=np.nan)
                wanted = one if there else missing
                np.testing.assert_allclose(window.durations_NRS[n, rank], np.multiply(wanted.durations_ns, 1e-9))
                np.testing.assert_allclose(window.outside_NRG[n, rank], np.multiply(wanted.outside_ns, 1e-9))
                np.testing.assert_allclose(window.between_NR[n, rank], wanted.between_ns * 1e-9)
                ready_s = np.nan if window.ready_NR is None else window.ready_NR[n, rank]
                assert (ready_s == 0.005) == (there and one.ready_ns is not None)
                assert (0 if window.work_NR is None else window.work_NR[n, rank]) == (one.work if there else 0)
            assert window.capturing_N[n] == any(one is not None and one.capturing for one in of_step)
            if not any(one is not None and one.kind for one in of_step):
                assert window.kinds is None or not window.kinds[n]
                assert window.noted_NR is None or not window.noted_NR[n].any()


@given(jobs(3 * MAX_GAP_STEPS), shapes, st.randoms())
def test_all_steps_at_once_in_any_order_make_the_windows_that_they_make_one_at_a_time(records, shape, random):
    expected = one_at_a_time(records, shape)
    # WHEN the steps come in one batch, in whatever order
    target = Gatherer(SCHEMA, RANKS, shape)
    target.add(batch(*random.sample(records, len(records))))
    # THEN the windows are the same, gaps and jumps included
    for one, other in zip(target.ready(ended=True), expected, strict=True):
        same(one, other)


@given(jobs(2), shapes, st.lists(st.integers(0, 4), min_size=RANKS, max_size=RANKS), st.data())
def test_any_split_into_batches_makes_the_windows_that_steps_make_one_at_a_time(records, shape, lags, data):
    expected = one_at_a_time(records, shape)
    # GIVEN ranks that are behind each other by less than a window, each with its steps in order
    lag_of = [lag % shape.window_steps for lag in lags]
    arriving = sorted(records, key=lambda record: record.step + lag_of[record.rank])
    # WHEN their steps arrive in batches, split anywhere, and windows are taken after each
    target, windows = Gatherer(SCHEMA, RANKS, shape), []
    ends = data.draw(st.lists(st.integers(0, len(records)), max_size=5))
    for first, last in zip([0, *sorted(ends)], [*sorted(ends), len(records)], strict=True):
        part = arriving[first:last]
        target.add(batch(*data.draw(st.permutations(part))))
        windows += target.ready()
    # THEN the windows are the same
    for one, other in zip(windows + target.ready(ended=True), expected, strict=True):
        same(one, other)


def test_waits_for_a_cpu_are_in_the_windows_of_their_steps_and_unknown_without_readings():
    # GIVEN steps of two ranks, one of which has readings from its third step on
    target = gatherer()
    first, later = batch(*(step(0, n) for n in range(2))), batch(*(step(0, n) for n in range(2, 6)))
    counted_BC = np.full((4, len(COUNTERS)), np.nan)
    counted_BC[:, PLACE["queued_s"]], counted_BC[:, PLACE["preempted"]] = np.arange(2, 6) / 1000, np.arange(2, 6)
    waited = replace(later, counted_BC=counted_BC)
    for steps in (first, waited, batch(*(step(1, n) for n in range(6)))):
        target.add(steps)
    # THEN each window has what is known, and no zeros for what is not
    early, late = target.ready()
    np.testing.assert_allclose(early.counted("queued_s")[:, 0], [np.nan, np.nan, 0.002, 0.003])
    np.testing.assert_allclose(late.counted("queued_s")[:, 0], [0.002, 0.003, 0.004, 0.005])
    np.testing.assert_allclose(late.counted("preempted")[:, 0], [2, 3, 4, 5])
    assert np.isnan(late.counted("queued_s")[:, 1]).all()
    # AND a window without readings has none
    for n in range(6, 12):
        target.add(batch(step(0, n), step(1, n)))
    assert [window.counted_NRC is None for window in target.ready()] == [False, True, True]


def on_clock(rank, number, factor=1):
    """A step with the host's times, or with the device's, which are as many times longer."""
    durations_ns = (factor * MS, factor * 10 * MS, factor * number * MS)
    return step(rank, number, between_ns=factor * 7 * MS, durations_ns=durations_ns, outside_ns=(factor * 2 * MS,))


def host(target, numbers, ranks):
    target.add(batch(*(on_clock(rank, number) for number in numbers for rank in ranks)))


def device(target, numbers, ranks):
    target.add_device(batch(*(on_clock(rank, number, factor=5) for number in numbers for rank in ranks)))


def end(target, numbers, ranks):
    """Nothing more comes."""


BOTH = (0, 1)
TURNS = {
    "what is missing at the end stays missing": (
        *(4, 2),
        [(host, range(6), [0], []), (host, range(5), [1], [(0, [0, 0], None)]), (end, (), (), [(2, [0, 1], None)])],
    ),
    "a jump ends what was under way, and what comes for it after all is in no window": (
        *(4, 4),
        [
            *((host, range(4), [0], []), (host, range(3), [1], [])),
            *((host, [10**9], [0], [(0, [0, 1], None)]), (host, [3], [1], [])),
        ],
    ),
    "a window that went out without a rank is never filled in nor comes again": (
        *(4, 4),
        [
            *((host, range(11), [0], [(0, [0, 4], None)]), (host, [11, 12], [0], [(4, [0, 4], None)])),
            *((host, [*range(8), *range(8)], [1], []), (host, range(8, 12), BOTH, [(8, [0, 0], None)])),
        ],
    ),
    "what came before the job was whole is kept": (
        *(4, 4),
        [
            *((host, [0, 1], [0], []), (device, [0, 1], [0], []), (host, [0, 1], [1], [])),
            *((host, [2, 3], BOTH, []), (device, [2, 3], [0], [(0, [0, 0], [0, 4])])),
        ],
    ),
    "device times too late, of no rank or of a far future are dropped": (
        *(4, 4),
        [
            *((host, range(4), BOTH, [(0, [0, 0], None)]), (device, [1], BOTH, []), (device, [5], [9, -1], [])),
            *((device, [10**6], BOTH, []), (host, range(4, 8), BOTH, [(4, [0, 0], None)])),
        ],
    ),
    **{
        f"a window of {n} steps waits for device times that stop for {waits} steps": (
            *(n, n),
            [
                *((host, [0], BOTH, []), (device, [0], BOTH, []), (host, range(1, n + waits - 1), BOTH, [])),
                (host, [n + waits - 1], BOTH, [(0, [0, 0], [n - 1, n - 1])]),
            ],
        )
        for n, waits in ((4, 4), (3 * DEVICE_LAG_STEPS, DEVICE_LAG_STEPS))
    },
}


@pytest.mark.parametrize(("window", "stride", "turns"), TURNS.values(), ids=TURNS)
def test_windows_are_returned_once_with_the_steps_received_by_then(window, stride, turns):
    target = gatherer(window=window, stride=stride)
    for come, numbers, ranks, found in turns:
        # WHEN steps arrive THEN windows miss these numbers of steps of each rank, on the host and on the device
        come(target, numbers, ranks)
        for one, (first_step, *missing) in zip(target.ready(ended=come is end), found, strict=True):
            assert one.first_step == first_step
            for values_NRS, missing_R in zip((one.durations_NRS, one.device_NRS), missing, strict=True):
                assert (None if values_NRS is None else np.isnan(values_NRS[:, :, 0]).sum(axis=0).tolist()) == missing_R


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 3), st.sampled_from([1, 2, 4]))
def test_however_many_steps_come_at_once_windows_have_both_times(sizes, lag, stride):
    # GIVEN a job whose device times lag behind the host's, read now and then
    target = Gatherer(SCHEMA, 2, Shape(4, stride, 0))
    windows, first, given_to = [], 0, 0
    for size in sizes:
        until = max(given_to, first + size - lag)
        host_steps = [on_clock(rank, number) for rank in (0, 1) for number in range(first, first + size)]
        device_steps = [on_clock(rank, number, factor=5) for rank in (1, 0) for number in range(given_to, until)]
        # WHEN what has come is added together
        host_and_device = batch(*host_steps, schema=SCHEMA), batch(*device_steps, schema=SCHEMA)
        target.take([Rows(0, SCHEMA, 2, {}, *host_and_device)])
        windows += target.ready()
        first, given_to = first + size, until
    # THEN every window that went out has all of both
    for window in windows:
        np.testing.assert_allclose(window.device_NRS, 5 * window.durations_NRS)
        np.testing.assert_allclose(window.device_outside_NRG, 5 * window.outside_NRG)
        np.testing.assert_allclose(window.device_between_NR, 5 * window.between_NR)
    assert [window.first_step for window in windows] == list(range(0, max(0, given_to - 3), stride))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1), st.integers(0, 40)), max_size=150))
def test_in_any_order_device_times_belong_to_their_own_step(events):
    # GIVEN host and device times of two ranks in any order, again and again
    target = gatherer(stride=4)
    windows = []
    for of_device, rank, number in events:
        (device if of_device else host)(target, [number], [rank])
        windows += target.ready()
    windows += target.ready(ended=True)
    # THEN where there is a device time, it is that step's
    for window in windows:
        if window.device_NRS is not None:
            numbers_N1 = np.arange(window.first_step, window.last_step + 1)[:, None]
            there_NR = np.isfinite(window.device_NRS[:, :, 2])
            expected_NR = np.broadcast_to(numbers_N1 * 5e-3, there_NR.shape)
            np.testing.assert_allclose(window.device_NRS[:, :, 2][there_NR], expected_NR[there_NR])


def record(rank: int, number: int, start_ns: int, *durations_ns: int) -> StepRecord:
    return step(rank, number, start_ns=start_ns, durations_ns=durations_ns, outside_ns=())


def test_a_step_is_from_the_first_start_to_the_last_end():
    times = StepTimes(0)
    times.note(0, batch(record(0, 5, 100, 10, 20), record(0, 6, 140, 10, 20)))
    times.note(0, batch(record(1, 5, 90, 10, 20), record(1, 6, 145, 10, 20)))
    # AND what is not known is not made up
    assert times.of(0, 4, 7) == {5: Span(90, 130), 6: Span(140, 175)}


def test_only_the_newest_steps_are_kept_however_long_the_job_is(monkeypatch):
    monkeypatch.setattr(module, "KEPT_STEPS", 2)
    times = StepTimes(kept_steps=3)
    for step in range(100):
        for rank in range(2):
            times.note(0, batch(record(rank, step, step * 10, 5)))
    assert list(times.of(0, 0, 99)) == [97, 98, 99]


def test_another_attempt_has_times_of_its_own():
    times = StepTimes(0)
    times.note(0, batch(record(0, 5, 100, 10)))
    times.note(1, batch(record(0, 5, 900, 10)))
    assert times.of(0, 5, 5) == {}
    # AND what still comes of the one before is passed over
    times.note(0, batch(record(1, 5, 100, 10)))
    assert times.of(1, 5, 5) == {5: Span(900, 910)}
