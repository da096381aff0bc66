"""The pure parts of the overhead bench: what is made of the blocks, and what the intervals are said to mean."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import overhead_figures
from bench.estimates import Estimate, added, median_of, plain, ratio
from bench.overhead import counted
from bench.overhead_figures import added_us, around_captures, reading

TIMES = st.lists(st.floats(1e3, 1e9), min_size=1, max_size=12)
STEP_NS = 50_000_000


def blocks(**times_ns):
    return {name: [{"wall_ns": ns, "cpu_ns": ns} for ns in times] for name, times in times_ns.items()}


def captured(*, after_ns=STEP_NS, stall_ns=10_000_000):
    """The steps around one capture, of three steps."""
    step = [STEP_NS, STEP_NS]
    return {
        "before": [step] * 50,
        "during": [step, [STEP_NS + stall_ns, STEP_NS], step, step],
        "states": ["idle", "armed", "recording", "idle"],
        "after": [[after_ns, STEP_NS]] * 20,
    }


def found(*, on_ns=1_000.0, none_ns=0.0, after_ns=STEP_NS):
    """What the job writes, on a machine without noise."""
    off, on = [float(STEP_NS)] * 6, [STEP_NS + on_ns] * 6
    small = blocks(off=off, control=off, on=on)
    return {
        "small": small,
        "cold": blocks(off=off, none=[STEP_NS + none_ns] * 6, on=on),
        "real": blocks(off=off, on=on),
        "steady": [{"seconds": 4.0, "threads_share": 0.001, "processes_share": 0.02}],
        "small_after": small,
        "calls": {"on": [int(on_ns) + 500] * 6, "none": [500] * 6},
        "captures": [captured(after_ns=after_ns)] * 4,
        "capture_phases": [dict.fromkeys(overhead_figures.PHASES, taken_s) for taken_s in (0.05, 0.002, 0.002, 0.002)],
    }


def figures(**times_ns):
    return overhead_figures.figures(overhead_figures.pooled([found(**times_ns)]), 0.05)


class TestMedian:
    @given(TIMES)
    def test_lies_in_its_interval(self, values):
        estimate = median_of(values)
        assert min(values) <= estimate.low <= estimate.value <= estimate.high <= max(values)
        assert estimate.pairs == len(values)
        assert median_of(values) == estimate

    def test_of_nothing_is_refused(self):
        with pytest.raises(ValueError, match="no pairs"):
            median_of([])

    def test_more_pairs_say_more(self):
        # GIVEN the same noise
        rng = random.Random(0)
        noise = [rng.gauss(1.0, 0.1) for _ in range(400)]
        # WHEN there are more pairs
        few, many = median_of(noise[:20]), median_of(noise)
        # THEN the interval is narrower
        assert many.high - many.low < few.high - few.low


class TestPairs:
    @given(TIMES)
    def test_nothing_against_itself(self, times):
        assert ratio(times, times) == Estimate(1.0, 1.0, 1.0, len(times))
        assert added(times, times) == Estimate(0.0, 0.0, 0.0, len(times))

    def test_a_drift_of_the_machine_is_not_in_them(self):
        # GIVEN a machine that becomes three times as slow
        base = [100.0 * (1 + 2 * index / 19) for index in range(20)]
        # WHEN a mode takes a tenth more
        estimate = ratio([1.1 * one for one in base], base)
        # THEN just that is seen
        assert (estimate.low, estimate.high) == pytest.approx((1.1, 1.1))

    def test_of_different_lengths_are_no_pairs(self):
        with pytest.raises(ValueError, match="zip"):
            ratio([1.0, 2.0], [1.0])

    def test_added_microseconds_leave_the_base_out(self):
        found_us = added_us(blocks(off=[10_000.0] * 3, on=[15_000.0] * 3), "cpu")
        assert found_us == {"on": Estimate(5.0, 5.0, 5.0, 3)}


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [
        (0.9999, 1.0001, "met"),
        (0.9999, 1.0002, "met"),
        (0.99, 1.01, "not resolved"),
        (1.0002, 1.01, "not resolved"),
        (1.0003, 1.01, "missed"),
    ],
)
def test_an_interval_says_no_more_than_it_can(low, high, says):
    assert reading(Estimate((low + high) / 2, low, high, 9), 1.0002) == says


class TestCaptures:
    def test_costs_what_its_steps_took_longer(self):
        # GIVEN four captures whose stop stalls a step for 10 ms, and nothing after them
        one = around_captures([captured()] * 4, 0)
        # THEN the steps from arming on are counted, and after them all is as before
        assert one["during_steps"] == 2
        assert one["extra_ms"].value == pytest.approx(10.0)
        assert one["after"].value == one["null"].value == 1.0
        assert one["positions_above"] == 0

    def test_slower_steps_after_it_count_on_the_clock_that_shows_them(self):
        # GIVEN steps after a capture that take 2% longer without more work
        rounds = [captured(after_ns=int(1.02 * STEP_NS))] * 4
        one = around_captures(rounds, 0)
        # THEN each of them is above on the wall clock, and none before it or on the other clock
        assert one["after"].low == pytest.approx(1.02)
        assert one["positions_above"] == one["positions"] == 20
        assert one["null"].value == around_captures(rounds, 1)["after"].value == 1.0

    def test_one_bad_step_is_found_at_its_place(self):
        # GIVEN captures after which the third step is slow
        slow = captured()
        slow["after"] = [[STEP_NS * (3 if at == 2 else 1), STEP_NS] for at in range(20)]
        one = around_captures([slow] * 4, 0)
        # THEN the median of the twenty hides it, and the worst does not
        assert one["after"].value == 1.0
        assert (one["worst_position"], one["worst"].value) == (3, 3.0)


class TestReport:
    @pytest.mark.parametrize(("on_ns", "says"), [(1_500.0, "met"), (2_500.0, "missed")])
    def test_the_target_is_2_us_in_50_ms(self, on_ns, says):
        # GIVEN a recorder that takes this long, without noise, THEN every estimator agrees
        read = overhead_figures.targets(figures(on_ns=on_ns))
        assert {word for target, word in read.items() if target.startswith("on/off")} == {says}

    def test_cold_steps_are_held_against_calls_that_do_nothing(self):
        # GIVEN a recorder that takes 5 us, and calls that do nothing and take 4 of them
        mine = figures(on_ns=5_000.0, none_ns=4_000.0)
        # THEN what it takes beyond them is what the target is about
        assert (mine["cold_us"]["on"].value, mine["cold_us"]["on over none"].value) == (5.0, 1.0)
        assert overhead_figures.targets(mine)["on/off <= 1.00004: own work, cold"] == "met"

    def test_instructions_that_could_not_be_counted_come_with_their_reason(self):
        # GIVEN a machine without valgrind
        report = {"step_s": 0.05, **figures(), "instructions": {"not_run": "there is no valgrind"}}
        report["targets"] = overhead_figures.targets(report)
        # WHEN it is written for people, THEN the reason is in it
        assert "instructions: not run: there is no valgrind" in "\n".join(overhead_figures.lines(report))

    def test_json_holds_every_interval(self):
        written = plain({"a": {"b": Estimate(1.00004, 1.0, 1.1, 3)}, "n": 1, "s": "text"})
        assert written == {"a": {"b": {"value": 1.00004, "low": 1.0, "high": 1.1, "pairs": 3}}, "n": 1, "s": "text"}


def test_instructions_are_read_from_what_valgrind_says():
    # GIVEN its last line
    assert counted("==7== \n==7== I   refs:      1,665,761,950\n") == 1_665_761_950
    # WHEN it said something else, THEN that is passed on
    with pytest.raises(ValueError, match="cannot execute"):
        counted("valgrind: cannot execute")
