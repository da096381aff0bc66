"""Where the time of a run went: whose each second is, and that the rows add up to the wall clock."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.model.events import CostMeasured, JobPaused
from sftriage.model.windows import LOADER_START, StepRecord
from sftriage.policy.state import AddedLoss, Losses, SuspectLoss
from sftriage.reports import texts
from sftriage.runs.source import PRICE_ENV, rank_hour_price
from sftriage.runs.step_times import (
    ALL_RANKS,
    LONG,
    NO_RANK,
    AttemptTimes,
    TimesReader,
    attempt_of,
)
from sftriage.runs.timetable import MAX_ROWS_OF_CODE, Charges, TimeRow, recurring, time_table
from sftriage.windows.logs import StepLogs
from sftriage.windows.steplog import StepLog
from tests.scenario import STEP_S, Fault, Job, at, every, from_step, info_of, judged, of_rank, steps_of_rank

SECONDS = st.floats(0.0, 1e4)
STEPS = st.integers(0, 300)


def table_of(window, pauses=()):
    charges = Charges.of_judged((verdict, ()) for verdict, _ in judged(window, stride=10, first=20))
    attempt = attempt_of(window)
    return time_table(0.0, attempt.end_s, [attempt], replace(charges, pauses=pauses))


def rows_of(table, code):
    return [row for row in table.rows if row.code == code]


def noted(window, rank, kind, steps):
    """The window in which a rank notes a kind for some steps; all ranks do for a rank of None."""
    on_N = steps(len(window.durations_NRS))
    if rank is None:
        return replace(window, kinds=tuple(kind if on else "" for on in on_N))
    noted_NR = np.full(window.durations_NRS.shape[:2], "", dtype="U16")
    noted_NR[on_N, rank] = kind
    return replace(window, noted_NR=noted_NR)


@pytest.mark.parametrize(
    ("fault", "kind", "code", "subject", "seconds", "period"),
    [
        (Fault("other", 0, 1.5, every(40, 39)), "evaluation", "alone", "rank 0", 7 * 1.5, 40),
        (Fault("other", 3, 1.5, every(40, 39)), "", "alone", "rank 3", 4 * 1.5, 40),
        (Fault("data", None, 0.4, every(50, 50)), "", "shared", "", 6 * 0.4, 50),
        (Fault("forward", None, 4.0, at(120)), "compilation", "shared", "", 4.0, None),
        (Fault("data", None, 0.5, at(77, 120, 131)), "", "unaccounted", "", 1.5, None),
        (Fault("data", 2, 0.05, from_step(100)), "", "suspect", "rank 2", 200 * 0.05, None),
    ],
)
def test_what_was_planted_is_what_the_table_shows(fault, kind, code, subject, seconds, period):
    # GIVEN a calm job with one fault, marked or not
    window = Job(n_steps=300).run(fault)
    if kind:
        window = noted(window, fault.rank, kind, fault.steps)
    table = table_of(window)
    # THEN the fault's row has what it cost, and useful steps the rest
    largest = max(table.rows[1:], key=lambda found: found.seconds)
    assert (largest.code, largest.subject, largest.kind) == (code, subject, kind)
    assert largest.seconds == pytest.approx(seconds, rel=0.15)
    assert largest.period_steps == period
    assert table.rows[0].seconds == pytest.approx(300 * STEP_S, rel=0.05)
    assert sum(found.seconds for found in table.rows) == pytest.approx(table.wall_s)


def test_a_pause_is_a_pause_wherever_each_rank_was():
    # GIVEN ranks that are stopped for ten seconds: one while it loads, the others while they compute
    faults = Fault("data", 1, 10.0, at(120)), Fault("forward", (0, 2, 3), 10.0, at(120))
    (pause,) = rows_of(table_of(Job(n_steps=200).run(*faults)), "pause")
    assert pause.seconds == pytest.approx(10.0, rel=0.02)


def test_a_pause_that_recurs_is_what_recurs():
    # GIVEN an epoch whose first step takes as long as a pause, and the journal's pauses
    window = Job(n_steps=300).run(Fault("data", None, 2.0, every(50, 50)))
    pauses = [JobPaused(0.0, 0, step, step, 2.0, "data", "in_own_work") for step in range(50, 300, 50)]
    table = table_of(window, pauses)
    assert not rows_of(table, "pause")
    assert rows_of(table, "shared")[0].seconds == pytest.approx(12.0, rel=0.05)


def test_a_rank_that_recurs_is_a_suspect_from_when_it_is_named():
    # GIVEN a rank that is late every 40 steps and notes nothing, named after the first four times
    table = table_of(Job(n_steps=300).run(Fault("other", 3, 1.5, every(40, 39))))
    of_rank = [(row.code, row.steps, pytest.approx(row.seconds, rel=0.02)) for row in table.rows if row.subject]
    assert of_rank == [("alone", 4, 4 * 1.5), ("suspect", 3, 3 * 1.5)]


def attempt(number, begin_s, n_steps, long=(), *, gone=0, removed=0):
    long_E = np.array([(step, over_s, rank, "data", kind, 0.0, False) for step, over_s, rank, kind in long], LONG)
    steps_s = n_steps * STEP_S + float(long_E["over_s"].sum())
    end_s = begin_s + steps_s + gone * STEP_S
    return AttemptTimes(number, 4, begin_s, end_s, 0, n_steps + gone - 1, n_steps, steps_s, long_E, removed)


def test_attempts_begin_and_end_with_what_no_step_explains():
    # GIVEN two attempts, the second after the first stalled for 30 s, and what the journal charges to them
    first, second = attempt(0, 20.0, 100, [(5, 3.0, ALL_RANKS, "")]), attempt(1, 100.0, 50)
    charges = Charges(stalls={(0, 100): 30.0}, judged_from={0: 20, 1: 20})
    table = time_table(10.0, 120.0, [first, second], charges)
    # THEN each second is in one row
    found = {row.code: (row.seconds, row.steps) for row in table.rows}
    assert found == {
        "useful": (pytest.approx(15.0), 150),
        "restart": (pytest.approx(100.0 - 33.0 - 30.0), 1),
        "stall": (pytest.approx(30.0), 1),
        "end": (pytest.approx(15.0), 1),
        "start": (pytest.approx(10.0), 1),
        "warm_up": (pytest.approx(3.0), 1),
    }
    assert table.wall_s == 110.0


def test_a_stall_of_a_run_that_goes_on_reaches_as_far_as_it_was_seen():
    table = time_table(0.0, None, [attempt(0, 5.0, 100)], Charges(stalls={(0, 100): 60.0}))
    assert (table.wall_s, rows_of(table, "stall")[0].seconds) == (pytest.approx(75.0), 60.0)


def test_captures_take_what_they_cost_and_leave_the_fault_to_its_suspect():
    # GIVEN a capture that cost 2 s of the 5 s by which its steps were longer, and one whose cost lies in ordinary steps
    times = attempt(0, 0.0, 200, [(50, 3.0, 2, ""), (51, 2.0, 2, "")])
    costs = [CostMeasured(0.0, 0, 49, 55, 2.0, 0.1), CostMeasured(0.0, 0, 100, 105, 0.5, 0.1)]
    table = time_table(0.0, times.end_s, [times], Charges(costs=costs, judged_from={0: 0}))
    assert rows_of(table, "capture")[0].seconds == pytest.approx(2.5)
    assert [(row.subject, row.seconds) for row in rows_of(table, "pause")] == [("rank 2", pytest.approx(3.0))]


def test_a_suspect_that_notes_its_work_counts_once():
    # GIVEN a suspect charged with 1.5 s every 40 steps, all of which it noted as evaluations
    long = [(step, 1.5, 0, "evaluation") for step in range(40, 200, 40)]
    step_s = [1.4 if step % 40 == 0 else 0.0 for step in range(40, 161)]
    added = AddedLoss(0, 40, step_s, 4, "rank 0", SuspectLoss("rank 0", "other"))
    charges = Charges(Losses().plus(added), [added], judged_from={0: 0})
    times = attempt(0, 0.0, 200, long)
    table = time_table(0.0, times.end_s, [times], charges)
    assert [(row.code, row.seconds) for row in table.rows] == [("useful", pytest.approx(20.0)), ("alone", 6.0)]


def test_steps_that_are_no_longer_kept_count_as_the_others():
    times = attempt(0, 30.0, 100, gone=400, removed=200)
    table = time_table(0.0, times.end_s, [times], Charges())
    assert table.rows == (
        TimeRow("useful", pytest.approx(70.0), 700, rank_hours=pytest.approx(70.0 * 4 / 3600)),
        TimeRow("start", pytest.approx(10.0), 1, rank_hours=pytest.approx(10.0 * 4 / 3600)),
    )


def test_many_suspects_are_a_few_rows_and_the_others():
    losses = Losses({f"s{n}": SuspectLoss(f"rank {n}", "data", 0.1 * (n + 1), 0.4, 3) for n in range(20)})
    table = time_table(0.0, None, [attempt(0, 0.0, 1000)], Charges(losses))
    suspects = rows_of(table, "suspect")
    assert [row.subject for row in suspects[-2:]] == ["rank 14", "others"]
    assert len(suspects) == MAX_ROWS_OF_CODE + 1
    assert sum(row.seconds for row in suspects) == pytest.approx(21.0)


@pytest.mark.parametrize(
    ("steps", "period"),
    [
        ([40, 80, 120], 40),
        ([40, 80, 97, 120, 160], 40),
        ([40, 120, 160, 200, 240], 40),
        ([40, 80], None),
        ([3, 50, 61, 200], None),
        ([10, 11, 12, 13], None),
    ],
)
def test_what_recurs_has_a_period(steps, period):
    found = recurring(np.array(steps))
    assert (None if found is None else found[0]) == period


@st.composite
def attempts(draw):
    made, at_s = [], draw(SECONDS)
    for number in range(draw(st.integers(1, 3))):
        n_steps = draw(st.integers(1, 300))
        steps = sorted(draw(st.sets(st.integers(0, n_steps - 1), max_size=20)))
        ranks, kinds = st.sampled_from([ALL_RANKS, NO_RANK, 0, 2]), st.sampled_from(["", "evaluation"])
        long = [(step, draw(st.floats(0.05, 50.0)), draw(ranks), draw(kinds)) for step in steps]
        made.append(attempt(number, at_s, n_steps, long, gone=draw(STEPS), removed=draw(STEPS)))
        # (clocks of hosts differ: an attempt may begin before the one before it has ended)
        at_s = made[-1].end_s + draw(st.floats(-5.0, 100.0))
    return made


@st.composite
def charged(draw):
    losses, added = Losses(), []
    for key in draw(st.lists(st.sampled_from("abc"), max_size=4)):
        step_s = draw(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=50))
        added.append(AddedLoss(draw(st.integers(0, 2)), draw(STEPS), step_s, 4, key, SuspectLoss(key, "data")))
        losses = losses.plus(added[-1])
    spans = st.tuples(st.integers(0, 2), STEPS, st.integers(0, 20))
    pauses = [
        JobPaused(0.0, of, first, first + n, draw(SECONDS), "data", "in_sync")
        for of, first, n in draw(st.lists(spans, max_size=3))
    ]
    costs = [
        CostMeasured(0.0, of, first, first + n, draw(st.none() | st.floats(-5.0, 1e3)), 0.1)
        for of, first, n in draw(st.lists(spans, max_size=3))
    ]
    stalls = draw(st.dictionaries(st.tuples(st.integers(0, 2), STEPS), SECONDS, max_size=3))
    return Charges(losses, added, pauses, costs, stalls, draw(st.dictionaries(st.integers(0, 2), STEPS, max_size=3)))


@settings(max_examples=50, deadline=None)
@given(attempts(), charged(), SECONDS, SECONDS, st.booleans())
def test_the_rows_add_up_to_the_wall_clock_whatever_the_journal_says(times, charges, before_s, after_s, ended):
    begin_s, end_s = times[0].begin_s - before_s, times[-1].end_s + after_s if ended else None
    table = time_table(begin_s, end_s, times, charges)
    assert sum(row.seconds for row in table.rows) == pytest.approx(table.wall_s)
    assert min(row.seconds for row in table.rows) >= 0.0
    assert table.wall_s >= max(of.end_s for of in times) - begin_s - 1e-6


def test_a_rank_that_is_stopped_is_named_for_its_pause():
    # GIVEN a rank that is stopped twice, at no regular distance
    (pause,) = rows_of(table_of(Job(n_steps=200).run(Fault("forward", 3, 5.0, at(60, 141)))), "pause")
    assert (pause.subject, pause.steps, pause.seconds) == ("rank 3", 2, pytest.approx(10.0, rel=0.02))


def test_attempts_of_fewer_ranks_cost_fewer_rank_hours():
    # GIVEN a job of 4 ranks that goes on with 3
    second = replace(attempt(1, 36.0, 360, [(9, 36.0, ALL_RANKS, "")]), ranks=3)
    charges = Charges(judged_from={0: 0, 1: 0})
    table = time_table(0.0, second.end_s, [attempt(0, 0.0, 360), second], charges, price="2 €")
    found = {row.code: round(3600 * row.rank_hours, 6) for row in table.rows}
    assert found == {"useful": 36.0 * 4 + 36.0 * 3, "unaccounted": 36.0 * 3}
    # AND with a price, money
    (row,) = rows_of(table, "unaccounted")
    assert (table.money(row.rank_hours), table.money(1000.0)) == ("0.06 €", "2,000.00 €")
    assert table.values()["rows"][1]["cost"] == pytest.approx(0.06)


def uneven(rank, step):
    return {"data": 400.0 if step % 90 == 60 else 10.0, "forward": 30.0, "backward": 60.0}


def test_a_run_that_grows_is_read_as_one_that_has_ended(run):
    # GIVEN logs that grow by uneven numbers of steps
    growing = TimesReader(StepLogs(run.directory.steps))
    logs = [StepLog(run.directory.steps, info_of(rank, 2)) for rank in range(2)]
    seen = []
    for first, end in ((0, 30), (30, 700), (700, 1600), (1600, 1610)):
        for rank, log in enumerate(logs):
            log.append(steps_of_rank(rank, 2, range(1610), uneven)[first:end])
        (found,) = growing.read(ended=False)
        seen.append((found.last_step, found.n_steps))
    for log in logs:
        log.close()
    # THEN they are what reading them at once gives
    assert seen == [(29, 30), (699, 700), (1599, 1600), (1609, 1610)]
    (at_once,) = TimesReader(StepLogs(run.directory.steps)).read(ended=True)
    assert found.steps_s == pytest.approx(at_once.steps_s)
    assert found.long_E.tolist() == at_once.long_E.tolist()
    assert at_once.long_E["step"].tolist() == list(range(60, 1610, 90))
    assert set(at_once.long_E["stage"]) == {"data"}


def record(directory, ranks, n_steps, own_ms, kind=lambda rank, step: ""):
    """The logs of ranks that wait for the last of them in ``backward``; ``own_ms`` by rank and step."""
    own_NR = np.array([[own_ms(rank, step) for rank in range(ranks)] for step in range(n_steps)]) * 1_000_000
    waits_NR = own_NR.max(axis=1, keepdims=True) - own_NR + 60_000_000
    ends_N = np.cumsum((own_NR + waits_NR)[:, 0])
    for rank in range(ranks):
        info, spent = info_of(rank, ranks), zip(own_NR[:, rank].tolist(), waits_NR[:, rank].tolist(), strict=True)
        records = [
            StepRecord(rank, step, int(ends_N[step]), 0, (*took, 0), (0,), True, False, kind=kind(rank, step))
            for step, took in enumerate((own - 20_000_000, 20_000_000, waits) for own, waits in spent)
        ]
        log = StepLog(directory, info)
        log.append(of_rank(1, *records, schema=info.schema))
        log.close()


@pytest.mark.parametrize("ranks", [16, 64])
def test_ranks_outside_the_sample_are_found_by_their_long_steps(run, ranks):
    # GIVEN a job of which four ranks are read: rank 7 evaluates alone, rank 11 stops twice, and all load an epoch
    def own_ms(rank, step):
        stops = 5000 if rank == 11 and step in (95, 333) else 0
        evaluates = 1500 if rank == 7 and step % 40 == 20 else 0
        return 40 + stops + evaluates + (400 if step % 50 == 7 else 0)

    record(run.directory.steps, ranks, 600, own_ms, lambda rank, step: "evaluation" * (rank == 7 and step % 40 == 20))
    (times,) = TimesReader(StepLogs(run.directory.steps)).read(ended=True)
    table = time_table(times.begin_s, times.end_s, [times], Charges(judged_from={0: 0}))
    found = {(row.code, row.subject, row.kind): (row.steps, round(row.seconds, 1)) for row in table.rows[1:]}
    assert found == {
        ("alone", "rank 7", "evaluation"): (15, 22.5),
        ("pause", "rank 11", ""): (2, 10.0),
        ("shared", "", ""): (12, 4.8),
    }


@pytest.mark.parametrize("ranks", [4, 16])
def test_a_step_of_two_causes_is_in_two_rows(run, ranks):
    # GIVEN epochs at whose end one rank evaluates, and which all ranks begin with a slow batch
    def own_ms(rank, step):
        first = step % 50 == 20
        return 40 + 600 * first + 900 * (rank == 3 and first)

    record(run.directory.steps, ranks, 500, own_ms, lambda rank, step: "evaluation" * (rank == 3 and step % 50 == 20))
    (times,) = TimesReader(StepLogs(run.directory.steps)).read(ended=True)
    found = time_table(times.begin_s, times.end_s, [times], Charges(judged_from={0: 0})).rows[1:]
    assert [(row.code, row.subject, row.kind, round(row.seconds, 1)) for row in found] == [
        ("alone", "rank 3", "evaluation", 9.0),
        ("shared", "", "", 6.0),
    ]


@pytest.mark.parametrize(("price", "shown", "warnings"), [("$2.50", "$0.06", 0), ("", None, 0), ("cheap", None, 1)])
def test_a_price_of_a_rank_hour_is_shown_beside_it(run, monkeypatch, caplog, price, shown, warnings):
    record(run.directory.steps, 8, 100, lambda rank, step: 40)
    monkeypatch.setenv(PRICE_ENV, price)
    rank_hour_price.cache_clear()
    table = run.source.view().times
    rank_hour_price.cache_clear()
    (useful,) = rows_of(table, "useful")
    # (100 steps of 0.1 s on 8 ranks)
    assert (table.money(useful.rank_hours) or None) == shown
    assert [column.header for column in texts.time_table(table).columns][4:] == ["rank-hours", *["cost"] * bool(shown)]
    assert len(caplog.records) == warnings


@pytest.mark.parametrize(
    ("stage", "noted", "kind"), [("data", True, LOADER_START), ("other", True, ""), ("data", False, "")]
)
def test_workers_that_start_anew_are_named_where_the_data_are_late(stage, noted, kind):
    # GIVEN epochs whose first step is long, and loaders that may start their workers anew there
    window = Job(n_steps=300).run(Fault(stage, None, 0.4, every(50, 50)))
    if noted:
        window = replace(window, loaders_N=np.arange(300) % 50 == 0)
    (shared,) = rows_of(table_of(window), "shared")
    assert (shared.kind, shared.period_steps, shared.seconds) == (kind, 50, pytest.approx(2.4, rel=0.1))
