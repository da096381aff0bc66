import math
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.model.captures import CaptureResult
from sftriage.model.verdicts import Regression
from sftriage.runs.decisions import row_of
from sftriage.runs.lateness import HeatMap
from sftriage.traces.manifest import Findings, StageProfile
from sftriage.web.charts import (
    HEIGHT,
    MAX_COLUMNS,
    WIDTH,
    Axis,
    StepRange,
    Stretch,
    axis_of,
    bars_of,
    columns_of,
    judged_steps,
    newest_steps,
    ticks_of,
    timeline,
)
from sftriage.web.page import LABEL_WORDS
from sftriage.web.run_page import map_steps
from tests.scenario import decision, request_of, verdict

STAGES = ("data", "forward", "backward", "other")


def row(first, label="healthy", requests=(), **about):
    of = verdict(first, label, **about)
    return row_of(of, decision(of, requests=requests))


def drawn(rows, max_columns=MAX_COLUMNS):
    return timeline(rows, axis_of(rows, 0, 10**9, max_columns))


advances = st.fixed_dictionaries({stage: st.floats(0.0, 10.0) for stage in STAGES})


@given(st.lists(advances, min_size=1, max_size=40), st.integers(1, 12))
def test_the_stack_is_the_step_time(windows, max_columns):
    # GIVEN windows of any times
    rows = [row(20 + 10 * n, advances=one) for n, one in enumerate(windows)]
    # WHEN they are drawn in fewer columns than there are windows
    chart = drawn(rows, max_columns)
    # THEN the columns are few enough
    assert chart.axis.columns <= max_columns
    # AND each stack is as high as the mean step time of its windows, exactly, and none is higher than the chart
    for column in chart.columns:
        of_column = [
            row
            for row, (first, last) in zip(rows, newest_steps(rows), strict=True)
            if first <= column.last_step and column.first_step <= last
        ]
        assert len(of_column) == column.windows
        assert column.exposed_s == pytest.approx(sum(r.exposed_s for r in of_column) / len(of_column), rel=1e-12)
        assert sum(column.advances_s) == pytest.approx(column.exposed_s, rel=1e-12)
        assert column.exposed_s <= chart.top_s * (1 + 1e-9)
    assert sum(one.share for one in chart.series) == pytest.approx(
        1.0 if any(c.exposed_s for c in chart.columns) else 0.0
    )


def test_an_area_is_drawn_where_its_numbers_are():
    # GIVEN one window of 100 ms, of which the first stage takes 10
    chart = drawn([row(20)])
    # THEN the first area is a tenth as high as the last one's upper edge, over the whole width
    ends = [[float(number) for number in re.findall(r"[0-9.]+", one.path)] for one in chart.series]
    scale = HEIGHT / chart.top_s
    assert ends[0] == pytest.approx([0, HEIGHT - 0.01 * scale, WIDTH, HEIGHT, 0], abs=0.06)
    assert ends[2][1] == pytest.approx(HEIGHT - 0.1 * scale, abs=0.06)


def test_a_column_has_the_gravest_label_of_its_windows():
    rows = [row(0), row(10, "suspect"), row(14, "needs_evidence"), row(64), row(70), row(78)]
    chart = drawn(rows, 2)
    assert [(one.label, one.named) for one in chart.columns] == [("suspect", "rank 2 in data"), ("healthy", "")]
    assert [(band.label, band.x, band.width) for band in chart.bands] == [("suspect", 0, 500), ("healthy", 500, 500)]


def map_of(first, last, each, seconds, **about):
    """A map whose columns took some seconds in data, NaN where that is not known, and nothing in other stages."""
    advances_CS = np.array([[one, *[0.0 * one] * 3] for one in seconds], np.float32)
    levels_GC = np.zeros((1, len(seconds)), np.uint8)
    return HeatMap(first, last, each, each, 1, 2, levels_GC, 0.1, (), None, STAGES, advances_CS, **about)


def test_a_fault_is_drawn_at_its_steps_and_not_as_the_slope_of_its_windows():
    # GIVEN windows of 50 steps, ten apart, and what each of their steps took: more from step 75 on
    rows = [row(20 + 10 * n) for n in range(6)]
    axis = axis_of(rows, 0, 10**9)
    chart = timeline(rows, axis, maps=[map_of(20, 119, 1, [0.1] * 55 + [0.3] * 45)])
    # THEN there is a column a step, and an edge between two of them
    assert [(one.first_step, one.last_step) for one in chart.columns] == [(step, step) for step in range(20, 120)]
    assert [one.exposed_s > 0.2 for one in chart.columns] == [step >= 75 for step in range(20, 120)]
    assert (chart.stepwise, chart.cut) == (True, False)


def test_steps_that_are_not_known_are_drawn_by_their_windows():
    rows = [row(20 + 10 * n) for n in range(6)]
    axis = axis_of(rows, 0, 10**9)
    known = timeline(rows, axis, maps=[map_of(20, 119, 1, [math.nan] * 50 + [0.3] * 50)])
    assert [one.exposed_s for one in known.columns] == pytest.approx([0.1] * 50 + [0.3] * 50)
    # AND so is all of a job that is judged on another clock
    on_device = [replace(one, clock="device") for one in rows]
    assert timeline(on_device, axis, maps=[map_of(20, 119, 1, [0.3] * 100)]) == timeline(on_device, axis)


def test_one_long_step_leaves_the_others_their_height():
    rows = [row(20 + 10 * n) for n in range(6)]
    chart = timeline(rows, axis_of(rows, 0, 10**9), maps=[map_of(20, 119, 1, [0.1] * 40 + [60.0] + [0.1] * 59)])
    assert chart.cut
    assert 0.29 < chart.top_s <= 0.4
    heights = [float(number) for one in chart.series for number in re.findall(r"[MVH ]?(-?[0-9.]+)", one.path)]
    assert min(heights) >= 0.0


def test_a_stall_is_in_the_label_and_not_in_the_stack():
    # GIVEN a step that has hung for 75 s among steps of 100 ms
    assert timeline([], None) is drawn([row(9, "stalled")]) is None
    chart = drawn([row(20), row(30, "stalled")], 1)
    # THEN the stack is that of the steps that ended
    (column,) = chart.columns
    assert (column.label, column.exposed_s) == ("stalled", pytest.approx(0.1))


def test_captures_are_marked_at_their_steps_and_restarts_where_they_are():
    # GIVEN a window of steps 30 to 79 that led to a capture, another one that is under way, and a job that starts again
    requests = request_of("c-1"), request_of("c-2")
    rows = [row(20), row(30, "suspect", requests), row(90), row(0, attempt=1), row(20, attempt=1)]
    became = {"c-1": CaptureResult("c-1", 2, "stored", first_step=120, last_step=124)}
    chart = timeline(rows, axis_of(rows, 0, 10**9), became)
    # THEN the capture is drawn at its steps, and the other at the window that requested it
    assert chart.axis.columns == 120 + 70
    middle = (120 - 20 + 2.5) * WIDTH / chart.axis.columns
    assert [(one.capture_id, one.first_step) for one in chart.markers] == [("c-1", 120), ("c-2", 79)]
    assert chart.markers[0].x == pytest.approx(middle, abs=0.01)
    # AND the attempt begins where its first step is
    assert chart.restarts == (round(120 * WIDTH / 190, 2),)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=8))
def test_ticks_keep_their_distance(found):
    axis = Axis.of([Stretch(n, first, first + more) for n, (first, more) in enumerate(found)])
    ticks = ticks_of(axis)
    assert (ticks[0].at, ticks[0].step) == (0.0, found[0][0])
    assert len(ticks) <= 5
    assert all(after.at - one.at > 0.19 for one, after in pairwise(ticks))


def test_the_map_is_of_steps_that_are_over():
    # GIVEN a step that hangs after the last window
    rows = [row(20), row(75, "stalled")]
    assert map_steps(axis_of(rows, 0, 10**9), rows) == [(0, 20, 69, 1, "host")]
    assert map_steps(axis_of(rows[1:], 0, 10**9), rows[1:]) == []


def test_stages_that_changed_over_a_restart_are_all_drawn():
    rows = [row(20, advances={"load": 0.1}), row(0, attempt=1)]
    assert [one.stage for one in drawn(rows).series] == [*STAGES, "load"]


@pytest.mark.parametrize(
    ("query", "first_steps", "heat"),
    [
        ({}, [20, 30, 40, 50, 0, 10], (1, 0, 59)),
        ({"last": "15"}, [0, 10], (1, 45, 59)),
        ({"from": "85", "to": "95"}, [40, 50], (0, 85, 95)),
        ({"from": "90"}, [50], (0, 90, 99)),
        ({"to": "5"}, [0], (1, 0, 5)),
        ({"from": "x", "to": "-1", "last": "1e9"}, [20, 30, 40, 50, 0, 10], (1, 0, 59)),
        ({"last": "9" * 400}, [20, 30, 40, 50, 0, 10], (1, 0, 59)),
        ({"last": "0", "from": "85"}, [40, 50], (0, 85, 99)),
        ({"last": " ", "from": "", "to": " 5 "}, [0], (1, 0, 5)),
        ({"from": "5000"}, [], None),
    ],
)
def test_a_span_selects_windows_and_steps(query, first_steps, heat):
    rows = [row(first) for first in (20, 30, 40, 50)] + [row(first, attempt=1) for first in (0, 10)]
    span = StepRange.of(query)
    selected = span.select(rows)
    assert [one.first_step for one in selected] == first_steps
    axis = span.axis(selected)
    newest = axis and axis.stretches[-1]
    assert (newest and (newest.attempt, newest.first_step, newest.last_step)) == heat


NAMES = ("step_s", "stage_s", "working_s", "waiting_s", "unseen_s", "device_s", "collective_s", "launch_s")


def side(rank: int | None = 2, **about: float) -> StageProfile:
    numbers = {**dict.fromkeys(NAMES, 0.01), **about}
    counts = {"first_step": 160, "last_step": 164, "steps": 5, "kernels": 0.0, "launches": 0.0}
    return StageProfile(source="trace", rank=rank, **counts, **numbers)


def findings(suspect: StageProfile | None = None, control: StageProfile | None = None) -> Findings:
    suspect = suspect or side(stage_s=0.05, working_s=0.01, waiting_s=0.03, unseen_s=0.01)
    return Findings(
        stage="data", suspect=suspect, control=control or side(0, waiting_s=0.0), shares=(), summary="It slept."
    )


def test_both_ranks_are_drawn_on_one_scale():
    # GIVEN a suspect whose stage took 50 ms, and a control's of 20 ms
    captured, control = bars_of(findings())
    # THEN the longer one fills the drawing, and the parts of each follow one another
    assert [(part.x, part.width) for part in captured.parts] == [(0, 200), (200, 600), (800, 200)]
    assert sum(part.width for part in control.parts) == pytest.approx(400)
    assert (captured.title, captured.rank, control.title, control.rank) == ("captured", 2, "control", 0)


def test_other_steps_of_the_captured_rank_are_not_called_its_control():
    found = findings(control=side(2)).model_copy(update={"of_steps": 12, "beside": "steps"})
    assert [(bar.title, bar.rank) for bar in bars_of(found)] == [("captured", 2), ("its other steps", 2)]


ANY = st.floats(allow_nan=False, allow_infinity=False)


@given(*[ANY] * 6)
def test_any_numbers_of_a_manifest_fit_the_drawing(a, b, c, d, e, f):
    sides = side(working_s=a, waiting_s=b, unseen_s=c), side(0, working_s=d, waiting_s=e, unseen_s=f)
    for bar in bars_of(findings(*sides)):
        assert all(0 <= part.x <= WIDTH + 0.1 and 0 <= part.width <= WIDTH for part in bar.parts)


stretches = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)), min_size=1, max_size=20).map(
    lambda found: [Stretch(n, first, first + more) for n, (first, more) in enumerate(found)]
)


@given(stretches)
def test_every_step_is_in_one_column_and_later_ones_are_never_before(stretches):
    axis = Axis.of(stretches)
    # GIVEN any attempts of a job THEN the columns are few enough, each a power of two of steps
    assert axis.columns <= MAX_COLUMNS
    assert axis.column_steps & (axis.column_steps - 1) == 0
    # AND the attempts follow one another, each from its first step to its last one, without a gap
    expected = 0
    for one in axis.stretches:
        assert axis.column(one.attempt, one.first_step) == expected
        expected = axis.column(one.attempt, one.last_step) + 1
        assert axis.column(one.attempt, one.first_step - 1) is axis.column(one.attempt, one.last_step + 1) is None
    assert expected == axis.columns


def test_a_window_is_drawn_at_the_steps_that_no_window_before_it_had():
    # GIVEN windows of 50 steps, ten apart; a stall; and a job that starts again
    rows = [row(20), row(30), row(40, "suspect"), row(95, "stalled"), row(50), row(0, attempt=1), row(10, attempt=1)]
    # THEN the first one is drawn at all of its steps, the others at their newest, and the stall where it is
    assert newest_steps(rows) == [(20, 69), (70, 79), (80, 89), (95, 144), (90, 99), (0, 49), (50, 59)]


DISTURBED = {"label": "needs_evidence", "reasons": ("self_inflicted",)}
SLOWER = Regression(64, 60, 70, 0.2, "all", (), 0.05)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # A fault that began before the newest steps of its window goes back into those of the windows before...
        ([row(0), row(50), row(60, "suspect", onset=95)], "healthy 0-94, suspect 95-109"),
        (
            [row(0), row(10, "needs_evidence"), row(20, "suspect", onset=55)],
            "healthy 0-49, undecided 50-54, suspect 55-69",
        ),
        # ... also into those that a capture disturbed, and those before a window of the same suspect, ...
        (
            [row(0), row(10, "suspect", onset=55), row(20, **DISTURBED), row(40, "suspect", onset=52)],
            "healthy 0-51, suspect 52-89",
        ),
        # ... but neither into a window that began after it and was healthy, nor past another suspect, nor a stall.
        ([row(0), row(10), row(60), row(70, "suspect", onset=52)], "healthy 0-109, suspect 110-119"),
        ([row(0, "suspect", rank=1), row(50, "suspect", onset=20)], "suspect 0-99"),
        ([row(0), row(49, "stalled"), row(10, "suspect", onset=30)], "healthy 0-49, stalled 49-98, suspect 50-59"),
        # One that began amid the newest steps leaves the first of these to the window before.
        ([row(0), row(50, "suspect", onset=80)], "healthy 0-79, suspect 80-99"),
        ([row(0, "needs_evidence"), row(10, "suspect", onset=55)], "undecided 0-54, suspect 55-59"),
        ([row(0, "suspect", onset=30)], "healthy 0-29, suspect 30-49"),
        # A job that is slower than its best has a first step as well.
        (
            [row(0), row(50), row(60, "needs_evidence", reasons=("regressed",), regression=SLOWER)],
            "healthy 0-63, undecided 64-109",
        ),
        # Steps without a window stay without, and an attempt has no fault of the one before.
        ([row(0), row(100), row(150, "suspect", onset=20)], "healthy 0-49, healthy 100-149, suspect 150-199"),
        ([row(0), row(0, "suspect", attempt=1, onset=30)], "healthy 0-49, healthy 0-29, suspect 30-49"),
    ],
)
def test_a_verdict_begins_where_its_fault_began(rows, expected):
    found = [(LABEL_WORDS[span.label], span.first_step, span.last_step) for span in judged_steps(rows)]
    merged = [found[0]]
    for label, first, last in found[1:]:
        before = merged[-1]
        if (before[0], before[2] + 1) == (label, first):
            merged[-1] = label, before[1], last
        else:
            merged.append((label, first, last))
    assert ", ".join(f"{label} {first}-{last}" for label, first, last in merged) == expected


def test_every_attempt_is_drawn_by_its_steps():
    # GIVEN a job that started again, and the steps of both attempts
    rows = [row(0), row(0, attempt=1)]
    maps = [map_of(0, 49, 1, [seconds] * 50, attempt=attempt) for attempt, seconds in enumerate((0.2, 0.3))]
    axis = axis_of(rows, 0, 10**9)
    chart = timeline(rows, axis, maps=maps)
    # THEN the chart has the times of each, and so has its table
    assert chart.stepwise
    assert [column.exposed_s for column in chart.columns] == pytest.approx([0.2] * 50 + [0.3] * 50)
    assert [row.exposed_s for row in chart.table] == pytest.approx([0.2] * 13 + [0.3] * 13)
    # AND of one whose steps are not kept, those of its windows
    partly = timeline(rows, axis, maps=maps[1:])
    assert not partly.stepwise
    assert [column.exposed_s for column in partly.columns] == pytest.approx([0.1] * 50 + [0.3] * 50)


def test_steps_without_a_window_are_a_gap():
    # GIVEN a job that was not watched from step 70 to 199
    rows = [row(20), row(200)]
    axis = axis_of(rows, 0, 10**9)
    columns = columns_of(rows, ("data", "forward", "backward", "other"), axis)
    # THEN the axis goes on over it, and nothing is drawn there
    assert (axis.columns, [(one.at, one.width) for one in columns]) == (230, [(0, 50), (180, 50)])


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(1, 40))
def test_however_wide_a_column_is_no_window_is_left_out(strides, max_columns):
    firsts = [20]
    for stride in strides:
        firsts.append(firsts[-1] + stride)
    rows = [row(first) for first in firsts]
    axis = axis_of(rows, 0, 10**9, max_columns)
    columns = columns_of(rows, ("data", "forward", "backward", "other"), axis)
    # THEN every window is in some column, each column in one place, and the last one ends where the axis does
    assert min(one.first_step for one in columns) == 20
    assert columns[-1].last_step == rows[-1].last_step
    assert all(one.at + one.width <= after.at for one, after in pairwise(columns))
    assert columns[-1].at + columns[-1].width == axis.columns
    assert sum(one.windows for one in columns) >= len(rows)
