"""Readings of a rank's counters: laid over its steps, kept in a file, and read again."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.errors import RingError
from sftriage.model.windows import COUNTERS, PLACE, StageSchema, StepRecord
from sftriage.trainer.layout import HEADER_BYTES
from sftriage.windows.decoding import UNKNOWN, StepArrays, together
from sftriage.windows.logs import MAX_APART_NS, KeptReadings, laid_over, none_taken, of_ranks_laid_over, spread
from sftriage.windows.steplog import CountersLog
from tests.scenario import batch, info_of, kept_of

MS = 1_000_000
READING_BYTES = 8 * (2 + len(COUNTERS))
SCHEMA = StageSchema.closed(("data", "backward"), ("backward",))
INFO = info_of(0, schema=SCHEMA)


ROWS = tuple((1000 + 250 * n, 10 * n + 1, 100 * n, n) for n in range(40))


def readings(*rows: tuple[float, float, float, int]) -> np.ndarray:
    """Readings by when they were taken, how long the thread had run and been queued (ms), and its preemptions."""
    rest = [UNKNOWN] * (len(COUNTERS) - 3)
    values = [(at * MS, run * MS, queued * MS, times, *rest) for at, run, queued, times in rows]
    return np.array(values, dtype=np.int64).reshape(-1, 1 + len(COUNTERS))


def waits(steps: StepArrays) -> np.ndarray | None:
    """What the thread was queued in each step, and how often preempted (B x 2)."""
    return None if steps.counted_BC is None else steps.counted_BC[:, [PLACE["queued_s"], PLACE["preempted"]]]


def step(number: int, start_ms: float, *took_ms: float, between_ms: float = 0.0) -> StepRecord:
    took_ns = tuple(int(one * MS) for one in (*took_ms, *(0.0,) * (3 - len(took_ms))))
    return StepRecord(0, number, int(start_ms * MS), int(between_ms * MS), took_ns, (0,), True, False)


def over(found: np.ndarray, *steps: StepRecord) -> list[list[float]] | None:
    waits_B2 = waits(laid_over(found, batch(*steps, schema=SCHEMA)))
    return None if waits_B2 is None else (waits_B2 * [1000.0, 1.0]).tolist()


def test_differences_between_readings_are_spread_by_the_length_of_the_steps():
    # GIVEN 90 ms in the run queue and 9 preemptions between two readings 300 ms apart
    found = readings((1000, 50, 10, 100), (1300, 200, 100, 109))
    # WHEN a step of 100 ms and one of 200 ms lie between them THEN each has its part
    assert over(found, step(0, 1000, 100), step(1, 1100, 150, 50)) == [
        pytest.approx([30.0, 3.0]),
        pytest.approx([60.0, 6.0]),
    ]
    # AND a step that begins before a reading and ends after it has of both sides
    found = readings((1000, 0, 0, 0), (1100, 50, 50, 5), (1300, 250, 50, 5))
    assert over(found, step(0, 1050, 100)) == [pytest.approx([25.0, 2.5])]
    # AND the time before a step is the step's too
    assert over(found, step(0, 1050, 50, between_ms=50)) == [pytest.approx([50.0, 5.0])]


@pytest.mark.parametrize(
    ("situation", "found"),
    [
        ("no readings", readings()),
        ("no reading before", readings((1060, 0, 0, 0), (1100, 50, 50, 5))),
        ("no reading after", readings((1000, 0, 0, 0), (1090, 50, 50, 5))),
        ("only once", readings((1000, 0, 0, 0))),
        ("too long ago", readings((900 - MAX_APART_NS // MS, 0, 0, 0), (1100, 50, 50, 5))),
        ("the thread did not run, so that it is not the one that trains", readings((1000, 7, 0, 0), (1100, 7, 0, 0))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_missing_readings_are_unknown_and_never_zero(situation, found):
    assert over(found, step(0, 1050, 50)) is None, situation


def test_a_step_longer_than_the_time_between_readings_is_known():
    # GIVEN a step of a minute, and no reading in between
    found = readings((1000, 0, 0, 0), (61_200, 50_000, 10_000, 7))
    assert over(found, step(0, 1100, 60_000)) == [pytest.approx([10_000 * 60_000 / 60_200, 7 * 60_000 / 60_200])]


def test_steps_without_readings_beside_known_ones_stay_unknown():
    (first, second) = over(readings((1000, 0, 0, 0), (1100, 50, 50, 5)), step(0, 950, 50), step(1, 1000, 100))
    assert (np.isnan(first).all(), second) == (True, pytest.approx([50.0, 5.0]))


@given(
    gaps_ms=st.lists(st.integers(1, 500), min_size=2, max_size=9),
    run_ms=st.lists(st.integers(1, 100), min_size=9, max_size=9),
    queued_ms=st.lists(st.integers(0, 100), min_size=9, max_size=9),
    cuts=st.sets(st.integers(0, 1000), min_size=2, max_size=9),
)
def test_over_consecutive_steps_nothing_is_lost_or_invented(gaps_ms, run_ms, queued_ms, cuts):
    # GIVEN readings on a machine that has been up for a year, and steps that follow one another between them
    n = len(gaps_ms)
    at_ms = 365 * 86_400_000 + np.cumsum([0, *gaps_ms])
    columns = [at_ms, np.cumsum([5, *run_ms[:n]]), np.cumsum([9, *queued_ms[:n]]), np.arange(n + 1)]
    found = readings(*zip(*columns, strict=True))
    ends_ns = np.array([found[0, 0] + cut * (found[-1, 0] - found[0, 0]) // 1000 for cut in sorted(cuts)])
    values_B2 = spread(found, ends_ns[:-1], ends_ns[1:])[:, 1:3]
    # THEN none has less than nothing
    assert (values_B2 >= 0.0).all()
    # AND together they have what one step over all of them has
    whole_B2 = spread(found, ends_ns[:1], ends_ns[-1:])[:, 1:3]
    np.testing.assert_allclose(values_B2.sum(axis=0), whole_B2[0], atol=1e-9)
    # AND readings before and after those around a step make no difference
    for begin_ns, end_ns, values in zip(ends_ns[:-1], ends_ns[1:], values_B2, strict=True):
        before = int(np.searchsorted(found[:, 0], begin_ns, side="right")) - 1
        after = int(np.searchsorted(found[:, 0], end_ns, side="left"))
        near = spread(found[before : after + 1], np.array([begin_ns]), np.array([end_ns]))
        np.testing.assert_allclose(near[0, 1:3], values, atol=1e-9)


def test_steps_of_several_ranks_at_once_get_the_same_counts():
    # GIVEN ranks that were read at different rates and times
    found = [readings(*((at + n, run, n * queued, n) for at, run, queued, n in ROWS[m:15])) for m in (0, 7, 13, 14)]
    steps = batch(*(replace(step(n, 1000 + 40 * n, 35, between_ms=5), rank=n % 4) for n in range(90)), schema=SCHEMA)
    # WHEN all of their steps are laid over at once
    padded_RTK = np.stack([np.concatenate([none_taken(15 - len(one)), one]) for one in found])
    together_B2 = waits(of_ranks_laid_over(padded_RTK, steps.rank_B, steps))
    # THEN each rank's have what they would have by themselves
    for rank, one in enumerate(found):
        alone_B2 = waits(laid_over(one, steps[steps.rank_B == rank]))
        its_B2 = together_B2[steps.rank_B == rank]
        assert (alone_B2 is None) == np.isnan(its_B2).all() == (rank == 3)
        if alone_B2 is not None:
            np.testing.assert_allclose(its_B2, alone_B2, atol=1e-12)


def test_steps_keep_their_counters_in_every_container():
    # GIVEN steps of one rank that are known, and of another that are not
    known = laid_over(readings((1000, 0, 0, 0), (1100, 50, 50, 5)), batch(step(1, 1050, 50), step(0, 1000, 50)))
    unknown = batch(replace(step(0, 1000, 50), rank=1))
    # WHEN they are put together, put in order, and some are taken
    steps = together([unknown, known])
    assert np.isnan(steps.counted_BC[0]).all()
    ordered = steps[steps.rank_B == 0].in_order()
    # THEN each has its own
    np.testing.assert_allclose(waits(ordered), [[0.025, 2.5], [0.025, 2.5]])
    assert together([unknown, unknown]).counted_BC is None


def written(folder, *rows, info=INFO):
    log = CountersLog(folder, info)
    for row in readings(*rows):
        log.add(tuple(row.tolist()))
    log.close()
    return log.path


def test_kept_readings_give_steps_the_counters_that_they_had_live(tmp_path):
    written(tmp_path, *ROWS)
    kept = kept_of(tmp_path, INFO)
    for first in (1000, 1100, 4000, 10_400):
        steps = batch(*(step(n, first + 60 * n, 60) for n in range(5)), schema=SCHEMA)
        then_B2, now_B2 = waits(laid_over(readings(*ROWS), steps)), waits(kept.laid_over(steps))
        np.testing.assert_allclose(now_B2, then_B2, rtol=1e-9)
    # AND of steps before the first and after the last nothing is known
    for at in (10, 900, 99_000):
        assert kept.laid_over(batch(step(0, at, 60), schema=SCHEMA)).counted_BC is None
    assert len(kept.laid_over(batch(schema=SCHEMA))) == 0


def test_a_damaged_reading_is_skipped(tmp_path):
    path = written(tmp_path, *ROWS)
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES + 5 * READING_BYTES + 17] ^= 1
    path.write_bytes(raw)
    steps = batch(*(step(n, 1000 + 250 * n, 250) for n in range(39)), schema=SCHEMA)
    waits_s = waits(kept_of(tmp_path, INFO).laid_over(steps))[:, 0]
    # (the readings around it say what has passed between them)
    np.testing.assert_allclose(waits_s, 0.1)


@pytest.mark.parametrize("content", [b"", b"nonsense" * 1000, None])
def test_a_run_without_readings_goes_without(tmp_path, content):
    if content is not None:
        (tmp_path / INFO.file_name("counters")).write_bytes(content)
    assert kept_of(tmp_path, INFO) is None


def test_readings_of_another_process_do_not_count(tmp_path):
    path = written(tmp_path, *ROWS)
    other = replace(INFO, pid=INFO.pid + 1)
    # GIVEN another process of the same rank THEN it neither writes to them nor has them
    with pytest.raises(RingError, match="another run"):
        CountersLog(tmp_path, other)
    assert kept_of(tmp_path, other) is None
    # AND a file that goes away is an error that says so
    kept = KeptReadings([path])
    path.unlink()
    with pytest.raises(RingError):
        kept.laid_over(batch(step(0, 1100, 60), schema=SCHEMA))
