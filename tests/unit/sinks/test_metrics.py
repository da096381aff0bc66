"""What is counted, under which names, that there are not too many of them, and that every step counts once."""

import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from sftriage.model import events
from sftriage.model.captures import CaptureRequest, CaptureResult, Decision, ManualRequest, Reproduced
from sftriage.model.verdicts import Regression, SlowLink, Suspect, Verdict
from sftriage.model.windows import JobStatus, RankStatus, ReadCounts, StageSchema, Window
from sftriage.sinks.metrics import ALL_LOCAL, MAX_SUSPECT_LABELS, METRICS, FromFiles, Metrics, StepTally
from sftriage.verdict.accounting import anchored
from sftriage.windows.npz import counted_of
from sftriage.windows.rings import status_of
from sftriage.words.verdicts import RESOLVES

from ..verdict.strategies import windows

SCHEMA = StageSchema(("data", "backward", "other"), ("backward",))
ID = "w20-39-r2-any-1"
LONGEST_ID = "w" * 100


def metrics(**options) -> Metrics:
    return Metrics("resnet", "run-1", 1000.0, times=lambda: {"useful": 1.0}, **options)


def window(first_step=0, n_steps=20, seed=0, schema=SCHEMA, attempt=0) -> Window:
    times_NRS = np.random.default_rng(seed).gamma(20.0, 0.001, (n_steps, 4, len(schema.stages)))
    collected_NR = np.tile([0.001, 0.002, 0.0, np.nan], (n_steps, 1))
    return Window(schema, first_step, times_NRS, attempt=attempt, counted_NRC=counted_of({"collected_s": collected_NR}))


def suspect(stage="data", scope="rank", ranks=(2,)) -> Suspect:
    return Suspect(scope, ranks, stage, 0.02, 0.25, 1.0, rank=ranks[0] if scope == "rank" else None)


def judged(label="healthy", suspects=(), requests=(), reasons=(), outcome=None, reason="healthy"):
    verdict = Verdict(0, 19, label, tuple(reasons), tuple(suspects), 0.1, {"data": 0.1}, {}, {})
    outcome = outcome or ("capture" if requests else "ignore")
    why = {"reasons": tuple(reasons)} if reasons else {}
    decision = Decision(1000.0, 0, 19, label, outcome, reason, parameters=why, requests=tuple(requests))
    return events.WindowJudged(verdict, decision)


def after(judged, window, lag_s=None) -> list[events.Event | events.Observation]:
    end_ns = round((judged.decision.time_s - (lag_s or 0.0)) * 1e9)
    spans = {} if lag_s is None else {window.last_step: events.Span(0, end_ns)}
    steps = {"first_step": window.first_step, "last_step": window.last_step, "attempt": window.attempt}
    verdict = replace(judged.verdict, **steps)
    return [events.WindowObserved(window, spans), events.WindowJudged(verdict, judged.decision)]


def tell(found: Metrics, *window: Any) -> None:
    for event in after(*window):
        found.take(event)


def ended(capture_id, state, rank=2) -> events.CaptureChanged:
    return events.CaptureChanged(1000.0, CaptureResult(capture_id, rank, state))


def cost(cost_s) -> events.CostMeasured:
    return events.CostMeasured(1000.0, 0, 1, 5, cost_s, 0.1)


def looked(received=None, job=None, time_s=1.0, spent_s=0.0, budget_s=0.0, lost=None) -> events.JobObserved:
    return events.JobObserved(time_s, received or ReadCounts(), job, spent_s, budget_s, lost or {})


def request(capture_id=ID, profiler="torch") -> CaptureRequest:
    return CaptureRequest(capture_id, 2, profiler, 5, 1, 60.0, 2**29)


def status(step=25) -> JobStatus:
    alive = (True, True, None, False)
    ranks = (RankStatus(r, "node-1", "data", 5, step, 5, step, closed=False, alive=one) for r, one in enumerate(alive))
    return status_of(SCHEMA, 4, tuple(ranks))


def value(found: Metrics, name: str, **labels) -> float | None:
    return found.registry.get_sample_value(name, {"job_name": "resnet", **labels})


def test_suspects_costs_follow_the_run_and_never_fall():
    found, name = metrics(), "sftriage_straggler_cost_rank_seconds_total"
    # GIVEN a run of which an earlier process has counted some already
    for rank_s in (7.0, 9.5, 9.0):
        found.take(looked(lost={("rank 2", "data"): rank_s}))
    assert value(found, name, suspect="rank 2", stage="data") == 9.5
    # AND of very many suspects those beyond the first are one series, also at the next look
    many = {(f"rank {rank}", "data"): 2.0 for rank in range(MAX_SUSPECT_LABELS + 9)}
    for _ in range(2):
        found.take(looked(lost=many))
    families = {family.name: family for family in found.registry.collect()}
    series = [one for one in families[name.removesuffix("_total")].samples if one.name == name]
    assert len(series) == MAX_SUSPECT_LABELS + 1
    assert value(found, name, suspect="(others)", stage="") == 18.0


def everything() -> Iterator[events.Event | events.Observation]:
    yield from after(judged(), window(), lag_s=0.2)
    yield from (cost(cost_s) for cost_s in (0.4, None, 0.0))
    yield events.CauseFound(1000.0, ID, 2, "sleep", sure=True, sentence="It sleeps.")
    about = {"time_s": 1000.0, "attempt": 0, "step": 9, "remedy": "pipeline", "rank": 1, "who": "a link", "where": "it"}
    for group, saves_s in (("one", 0.1), ("two", 0.25), ("three", 0.5)):
        yield events.RemedyChanged(**about, switch=group, state="trying", reason="worthwhile")
        yield events.RemedyChanged(**about, switch=group, state="kept", reason="helps", numbers={"saves_s": saves_s})
    yield events.RemedyChanged(**about, switch="three", state="undone", reason="gone", numbers={"saves_s": 0.5})
    yield events.RemedyChanged(**about, switch="four", state="advised", reason="no_room")
    yield from after(judged("suspect", [suspect()], [request()], reason="rule_matched"), window(10, seed=1))
    yield judged("stalled", [suspect("backward")], outcome="hold", reason="standstill", reasons=["not_arrived"])
    yield from after(
        judged("needs_evidence", reason="undecided", reasons=["roaming"], outcome="hold"), window(20, seed=2)
    )
    decision = Decision(1.0, 5, 5, "asked", "capture", "asked", requests=(request("asked-1", "nsys"),))
    yield events.ManualRequestDecided(ManualRequest("asked", (1,), "me", "why"), decision)
    result = CaptureResult(ID, 2, "stored", size_bytes=5, timings_s={"start": 0.1, "stop": 0.2, "odd": 9.0})
    yield from (ended(ID, state) for state in ("accepted", "armed", "running"))
    yield events.CaptureChanged(1000.0, result, Reproduced("yes", 5, 5, 0.02, 0.02), stored_bytes=7)
    yield ended("asked-1", "failed", rank=1)
    yield looked(ReadCounts(100, 2, 1, {"rank-1": "torn"}), status(), 1234.5, 0.4, 2.0, {("rank 2", "data"): 29.0})
    yield events.DiskFailed(8.0, "full")
    yield events.DiskRecovered(time_s=9.0, since_s=1.0, problem="full", lost={"windows": 12})


def after_everything(**options) -> Metrics:
    found = metrics(**options)
    for event in everything():
        found.take(event)
    return found


def samples(found: Metrics) -> dict[str, dict]:
    return {
        family.name.removeprefix("sftriage_"): {
            (sample.name, *sorted(sample.labels.items())): repr(sample.value) for sample in family.samples
        }
        for family in found.registry.collect()
    }


def test_each_event_moves_the_metrics_declared_for_it_and_no_others():
    decided_later = events.FollowUpDecided("x", judged(requests=[request("follow-up")]).decision)
    later = [*after(judged(), replace(with_a_gap(), first_step=40)), looked(job=status(80)), compared(0.2)]
    later.append(linked(SLOW_LINK))
    found, moved = metrics(per_rank=True), defaultdict(set)
    for event in [*everything(), decided_later, events.Resumed([request("before")]), *later]:
        before = samples(found)
        found.take(event)
        moved[type(event).__name__] |= {name for name, values in samples(found).items() if values != before[name]}
    declared = defaultdict(set, {"WindowObserved": set()})
    for movers, keys in METRICS.items():
        for event in filter(None, movers.split(", ")):
            declared[event] |= {re.findall(r"\w+", key)[1] for key in keys}
    assert moved == declared


def test_events_are_counted():
    found = after_everything()
    for name, labels, count in [
        ("captures_total", {"profiler": "nsys", "state": "failed"}, 1),
        # a kind of capture without captures is 0, so that Prometheus sees the first increase
        ("captures_total", {"profiler": "stacks", "state": "stored"}, 0),
        ("captures_running", {}, 0),
        # costs are what is known of them, and never less than nothing
        ("capture_cost_seconds_total", {}, 0.4),
        ("remedy_active", {"remedy": "pipeline"}, 2),
        ("remedy_saving_seconds", {"remedy": "pipeline"}, 0.35),
        ("captures_unmeasured_total", {}, 1),
        ("ranks", {}, 4),
        ("ranks_alive", {}, 2),
        ("telemetry_lag_steps", {}, 0),
        ("telemetry_lag_seconds", {}, 0.2),
        ("update_timestamp_seconds", {}, 1234.5),
    ]:
        assert value(found, f"sftriage_{name}", **labels) == pytest.approx(count), (name, labels)
    # AND a capture counts when it ends, once
    states = {s.labels["state"] for f in found.registry.collect() if f.name == "sftriage_captures" for s in f.samples}
    assert states == {"stored", "failed", "refused", "expired"}


def compared(fraction, until_step=None) -> events.WindowJudged:
    found = Regression(640, 632, 655, fraction, "all", ("backward",), 0.05, until_step=until_step)
    one = judged("needs_evidence", reasons=["regressed"])
    return events.WindowJudged(replace(one.verdict, regression=found), one.decision)


def with_a_gap() -> Window:
    some = window()
    some.durations_NRS[5:10, 1] = np.nan
    return some


def recovered(*, over) -> events.DiskRecovered:
    return events.DiskRecovered(time_s=9.0, since_s=1.0, problem="full", over=over, lost={"windows": 12})


def linked(link) -> events.WindowJudged:
    one = judged("needs_evidence", reasons=["slow_link"])
    return events.WindowJudged(replace(one.verdict, link=link), one.decision)


SLOW_LINK, LINK = SlowLink("node-b", "", "send", 2e8, 9e9, "peers", 0.02), "link_bits_per_second host=node-b peer="
STALLED, ALL_BEST = judged("stalled", outcome="hold"), "regressions_total scope=all"
SUSPECTED = judged("suspect", [suspect()], outcome="ignore")
EVERYWHERE = judged("suspect", [suspect(None, "host", (2, 3))], outcome="ignore")
GAIN = "suspect_gain_seconds scope=rank stage=data"
AS_IT_GOES = {
    # What happens, and what the series say then; what happens after that, and so on.
    "a disk that takes nothing, again, and never again": [
        *(
            [],
            {"disk_outage_active": 0},
            [events.DiskFailed(1.0, "No space left on device")],
            {"disk_outage_active": 1},
        ),
        *([recovered(over=True)], {"disk_outage_active": 0, "disk_lost_total kind=windows": 12}),
        *([recovered(over=False)], {"disk_outage_active": 1, "disk_lost_total kind=windows": 24}),
    ],
    "captures that were under way before are known by their profiler": [
        *([events.Resumed([request("a", "nsys"), request("b")])], {"captures_running": 2}),
        *([ended("a", "expired")], {"captures_running": 1, "captures_total profiler=nsys state=expired": 1}),
    ],
    "a window that was lost on its way is judged and not counted": [
        [events.WindowObserved(window(first_step=20)), judged()],
        {"verdicts_total label=healthy": 1, "steps_total": 0},
    ],
    "steps that an earlier process has counted": [
        [*(events.WindowObserved(window(first), learnt=True) for first in (0, 10, 20)), *after(judged(), window(30))],
        {"steps_total": 10},
    ],
    "totals that repeat": [[looked(ReadCounts(n)) for n in (10, 10, 25)], {"telemetry_steps_total": 25}],
    "a suspect is shown as long as there is one": [
        *(after(SUSPECTED, window()), {GAIN: 0.02, "verdict label=suspect": 1}),
        # slow in all it does, which is no stage's name
        *(after(EVERYWHERE, window(20)), {f"suspect_gain_seconds scope=host stage={ALL_LOCAL}": 0.02, GAIN: None}),
        after(judged(), window(40)),
        {
            f"suspect_share_ratio scope=host stage={ALL_LOCAL}": None,
            "verdict label=suspect": 0,
            "verdict label=healthy": 1,
        },
    ],
    "a candidate of a window that is held is no suspect": [
        after(judged("needs_evidence", (suspect(),), reasons=("co_critical",)), window()),
        {
            GAIN: None,
            "suspect_share_ratio scope=rank stage=data": None,
            "suspect_verdicts_total scope=rank stage=data": None,
            "rank_suspect_verdicts_total rank=2 stage=data": None,
        },
    ],
    "a stall is over with the next window": [
        *([], {"stalled": 0}, [STALLED], {"stalled": 1}, after(judged(), window()), {"stalled": 0}),
    ],
    "steps that are not there lower the coverage": [
        after(judged(), with_a_gap()),
        {"coverage_ratio": 1 - 5 / 80, "steps_total": 15, "incomplete_steps_total": 5},
    ],
    "a link is slow, and no longer": [
        *([linked(SLOW_LINK)], {LINK: 2e8, "link_cost_seconds host=node-b peer=": 0.02}),
        *([judged()], {LINK: None}),
    ],
    "a job is slower than its own best, once, stays so over a stall, and is as good again": [
        *([], {ALL_BEST: 0}, [compared(0.21), compared(0.25)], {ALL_BEST: 1}),
        *([judged("stalled", [suspect("backward")], reasons=["not_arrived"])], {"regression_ratio scope=all": 0.25}),
        *([compared(0.25, until_step=700)], {"regression_ratio scope=all": None, ALL_BEST: 1}),
    ],
}


@pytest.mark.parametrize("case", AS_IT_GOES)
def test_series_follow_the_events(case):
    found = metrics(per_rank=True)
    for happened, values in zip(*(AS_IT_GOES[case][part::2] for part in (0, 1)), strict=True):
        for one in happened:
            found.take(one)
        for series, expected in values.items():
            name, *labels = re.split(r" (?=\w+=)", series)
            is_ = value(found, f"sftriage_{name}", **dict(label.split("=") for label in labels))
            assert is_ == (None if expected is None else pytest.approx(expected)), series


def test_a_stall_ends_with_the_run():
    found = metrics()
    found.take(STALLED)
    found.close()
    assert (value(found, "sftriage_stalled"), value(found, "sftriage_run_active")) == (0, 0)


@pytest.mark.parametrize(
    ("reason", "reasons", "label"),
    [
        *(("undecided", (one, "roaming"), one) for one in sorted(RESOLVES)),
        ("standstill", ("in_sync",), "in_sync"),
        ("undecided", (), "other"),
        ("cooldown", (), "cooldown"),
    ],
)
def test_a_hold_counts_under_its_first_reason_and_others_under_their_code(reason, reasons, label):
    found = metrics()
    found.take(judged("needs_evidence", reason=reason, reasons=reasons, outcome="hold"))
    assert value(found, "sftriage_decisions_total", outcome="hold", reason=label) == 1


def test_series_are_bounded_however_many_stages_and_no_time_is_lost(monkeypatch):
    # GIVEN attempts of a job that each call their stages otherwise
    monkeypatch.setattr("sftriage.sinks.metrics.MAX_STAGE_LABELS", 5)
    found = metrics()
    for attempt in range(10):
        some = window(schema=StageSchema((f"a{attempt}", f"b{attempt}", "other")), seed=attempt, attempt=attempt)
        tell(found, judged(), some)
        tell(found, judged("suspect", [suspect(f"b{attempt}")], outcome="ignore"), window(20, attempt=attempt))
    families = {family.name: family for family in found.registry.collect()}
    stages = {
        sample.labels["stage"]
        for name in ("sftriage_exposed_seconds", "sftriage_suspect_verdicts")
        for sample in families[name].samples
    }
    # THEN there are no more of them than are allowed
    assert len(stages) == 5
    assert "other" in stages
    assert "b9" not in stages
    exposed_s = sum(sample.value for sample in families["sftriage_exposed_seconds"].samples)
    assert exposed_s == pytest.approx(value(found, "sftriage_step_exposed_seconds_sum"), rel=1e-9)


def test_the_interpreters_time_counts_once_for_each_step():
    found = metrics(per_rank=True)
    for first_step in (0, 10):
        tell(found, judged(), window(first_step))
    works = {"garbage_collection": 30 * 0.003, "recompilation": 0.0}
    assert {work: value(found, "sftriage_interpreter_seconds_total", work=work) for work in works} == pytest.approx(
        works
    )
    name, work = "sftriage_rank_interpreter_seconds_total", "garbage_collection"
    assert value(found, name, rank="1", work=work) == pytest.approx(30 * 0.002)
    assert value(found, name, rank="3", work=work) is None


def test_ranks_are_labels_only_if_requested():
    labels = {key for family in after_everything().registry.collect() for s in family.samples for key in s.labels}
    assert "rank" not in labels
    found = after_everything(per_rank=True)
    assert value(found, "sftriage_rank_suspect_verdicts_total", rank="2", stage="data") == 1
    assert value(found, "sftriage_rank_captures_total", rank="2") == 1
    assert (value(found, "sftriage_rank_step", rank="0"), value(found, "sftriage_rank_alive", rank="3")) == (25, 0)
    assert np.isnan(value(found, "sftriage_rank_alive", rank="2"))


def test_exemplars_name_the_capture():
    found = after_everything()
    families = {family.name: family for family in parse_openmetrics(generate_openmetrics(found.registry).decode())}
    # THEN the capture that has ended is on the counter
    named = {
        sample.labels["profiler"]: sample.exemplar.labels["capture_id"]
        for sample in families["sftriage_captures"].samples
        if sample.exemplar
    }
    assert named == {"torch": ID, "nsys": "asked-1"}
    # AND the slowest new step of the window that led to it is in the histogram, with it
    (exemplar,) = [s.exemplar for s in families["sftriage_step_exposed_seconds"].samples if s.exemplar]
    assert exemplar.labels == {"capture_id": ID}
    run = window(10, seed=1)
    advances_NS = anchored(replace(run, durations_NRS=run.durations_NRS[9:])).advances_NS
    assert exemplar.value == pytest.approx(advances_NS[1:].sum(axis=1).max())


def test_the_longest_capture_id_is_still_an_exemplar():
    found = metrics()
    tell(found, judged("suspect", [suspect()], [request(LONGEST_ID)], reason="rule_matched"), window())
    found.take(ended(LONGEST_ID, "stored"))
    assert LONGEST_ID in generate_openmetrics(found.registry).decode()


def test_any_job_name_yields_valid_text():
    found = Metrics('a"b\\c\nd', "run", 0.0)
    families = {one.name: one for one in parse_text(generate_latest(found.registry).decode())}
    assert families["sftriage_run_active"].samples[0].labels == {"job_name": 'a"b\\c\nd'}


def test_a_scrape_never_shows_a_partial_update():
    """A scrape between two stages of one window would show a step that is shorter than it was."""
    found = metrics()
    run = window(n_steps=4000, seed=3)
    stop = threading.Event()
    apart = []

    def scrape() -> None:
        while not stop.is_set():
            values = {(s.name, s.labels.get("stage")): s.value for f in found.registry.collect() for s in f.samples}
            stages_s = sum(v for (name, _), v in values.items() if name == "sftriage_exposed_seconds_total")
            whole_s = values[("sftriage_step_exposed_seconds_sum", None)]
            if abs(stages_s - whole_s) > 1e-9 * max(1.0, whole_s):
                apart.append((stages_s, whole_s))

    thread = threading.Thread(target=scrape)
    thread.start()
    for start in range(0, 4000, 20):
        tell(found, judged(), replace(run, first_step=start, durations_NRS=run.durations_NRS[start : start + 20]))
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert apart == []


FOUR = StageSchema(("data", "backward", "optimizer", "other"), ("backward",))


def part(window: Window, start: int, stop: int) -> Window:
    return window.steps(window.first_step + start, window.first_step + stop - 1)


@given(run=windows(), window_steps=st.integers(1, 6), stride=st.integers(1, 6))
def test_over_overlapping_windows_the_advances_sum_to_the_runs_exposed_time(run, window_steps, stride):
    # GIVEN a run of any steps, cut into windows that overlap or touch
    stride, n_steps = min(stride, window_steps), len(run.durations_NRS)
    starts = range(0, n_steps - window_steps + 1, stride)
    tally = StepTally()
    # WHEN they are counted in order
    counted = [tally.take(part(run, start, start + window_steps)) for start in starts]
    # THEN every step was new exactly once
    covered = starts[-1] + window_steps if starts else 0
    assert sum(len(complete_N) for _, complete_N in counted) == covered
    assert tally.last_step(run.attempt) == (run.first_step + covered - 1 if starts else None)
    # AND, stage by stage, what was counted is what one window of all of them says
    if not covered:
        return
    whole = anchored(replace(part(run, 0, covered), ready_NR=None))
    advances_S = np.sum([advances_NS.sum(axis=0) for advances_NS, _ in counted], axis=0)
    np.testing.assert_allclose(advances_S, whole.advances_S, rtol=1e-9, atol=1e-9 * whole.exposed_s)
    assert advances_S.sum() == pytest.approx(whole.exposed_s, rel=1e-9)
    assert sum(complete_N.sum() for _, complete_N in counted) == whole.n_steps


@given(window=windows())
def test_the_steps_of_a_window_sum_to_the_window(window):
    whole = anchored(window)
    advances_NS, complete_N = whole.advances_NS, whole.complete_N
    np.testing.assert_allclose(advances_NS.sum(axis=0), whole.advances_S, rtol=1e-9, atol=1e-9 * whole.exposed_s)
    assert complete_N.sum() == whole.n_steps
    # AND a step that is not complete has no time
    assert not advances_NS[~complete_N].any()
    assert (advances_NS >= 0.0).all()


def steps(first_step: int, n_steps: int, attempt: int = 0) -> Window:
    return Window(FOUR, first_step, np.full((n_steps, 2, 4), 0.1), attempt=attempt)


COUNTED = {
    "a window that was counted brings nothing new": ([(10, 4), (10, 4), (8, 3)], [4, 0, 0], [13]),
    "after a gap the count continues with the steps there are": ([(0, 4), (100, 4)], [4, 4], [103]),
    "another attempt counts anew, the old one no more": ([(0, 4), (0, 4, 1), (4, 4, 0)], [4, 4, 0], [None, 3]),
}


@pytest.mark.parametrize("case", COUNTED)
def test_steps_are_new_once(case):
    windows, new, last_steps = COUNTED[case]
    tally = StepTally()
    counted = [tally.take(steps(*one)) for one in windows]
    assert [0 if one is None else len(one[0]) for one in counted] == new
    assert [tally.last_step(attempt) for attempt in range(len(last_steps))] == last_steps


def test_times_are_on_the_verdicts_clock():
    # GIVEN windows whose device takes twice as long as the host says
    tally, host_s, device_s = StepTally(), 0.0, 0.0
    for number, clock in enumerate(("host", "device", "device", "host")):
        some = steps(4 * number, 4)
        some = replace(some, device_NRS=2 * some.durations_NRS)
        advances_NS, complete_N = tally.take(some, clock)
        assert complete_N.all()
        took_s = advances_NS.sum()
        host_s, device_s = (host_s + took_s, device_s) if clock == "host" else (host_s, device_s + took_s)
    # THEN each counts as it was judged
    assert host_s == pytest.approx(anchored(steps(0, 4)).exposed_s * 2)
    assert device_s == pytest.approx(2 * anchored(steps(0, 8)).exposed_s)


def test_metrics_of_several_jobs_become_one_answer(tmp_path):
    """GIVEN files of two jobs, and half a file THEN each metric is declared once, with the series of both"""
    help_ = "# HELP steps_total Steps.\n# TYPE steps_total counter\n"
    for name in ("a", "b"):
        (tmp_path / f"{name}.prom").write_text(f'{help_}steps_total{{job_name="{name}"}} 2.0\n')
    (tmp_path / "c.prom").write_text(f'{help_}steps_total{{job_name="a"}} 3.0\nsteps_total{{job_na')
    registry = CollectorRegistry()
    registry.register(FromFiles(tmp_path))
    text = generate_latest(registry).decode()
    assert text == f'{help_}steps_total{{job_name="a"}} 2.0\nsteps_total{{job_name="b"}} 2.0\n'
