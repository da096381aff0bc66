"""What the status of a TriageReport says of a run."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.kube.objects import MAX_CAPTURES, MAX_HOLDS
from sftriage.kube.statuses import outdated, report_status
from sftriage.model.captures import CaptureResult
from sftriage.model.events import CostMeasured, RemedyChanged
from sftriage.policy.losses import Losses, SuspectLoss
from sftriage.runs.directory import RunInfo
from sftriage.runs.following import row_of
from sftriage.runs.liveness import RankCoverage
from sftriage.runs.source import View
from sftriage.traces.manifest import ReproducedInfo
from sftriage.words.amounts import clock
from tests.scenario import decision, held, row
from tests.unit.conftest import manifest_of
from tests.unit.kube.objects import NOW_S, made, refused

INFO = RunInfo("run-1", "resnet", "2026-03-01T00:00:00+00:00", ("true",), "default", "0" * 64, "/nowhere")
LARGEST_BYTES = 64 * 1024


def view(*rows, **about) -> View:
    known = {"info": INFO, "telemetry": RankCoverage(4, 4), "going": True, "directory": "runs/r"}
    return View("1", **{**known, "rows": rows, **about})


def status_of(seen: View, before=None):
    status = report_status(made("TriageReport", "resnet", {"job": "resnet"}, before), seen, NOW_S)
    plain = status.plain()
    assert refused("TriageReport", "status", plain) == ""
    return status, plain


def held_row(first, *reasons):
    of = held(first, reasons=reasons)
    return row_of(of, decision(of, "hold", ", ".join(reasons)))


HEALTHY, SLOW = row(0), row(50, "suspect", "throttle", "overhead_budget", onset=60)
STANDS = {
    "no run yet": (View("none", problem="waits"), "no_run", "Unknown NoRun", "False NoRun"),
    "nothing judged": (view(), "warming_up", "Unknown WarmingUp", "True Watched"),
    "healthy": (view(HEALTHY), "healthy", "True Healthy", "True Watched"),
    "slow": (view(HEALTHY, SLOW), "throttled", "False Throttled", "True Watched"),
    "nobody named": (view(HEALTHY, held_row(50, "co_critical")), "held", "False Held", "True Watched"),
    "it has ended": (view(HEALTHY, going=False), "healthy", "True Healthy", "False Ended"),
    "nobody watches": (view(SLOW, unwatched=True), "unknown", "Unknown Unknown", "False Unwatched"),
}


@pytest.mark.parametrize("case", STANDS.values(), ids=STANDS)
def test_how_a_job_stands(case):
    seen, health, *expected = case
    status, _ = status_of(seen)
    assert status.health == health
    assert [f"{one.type} {one.status} {one.reason}" for one in status.conditions] == [
        f"Healthy {expected[0]}",
        f"Watched {expected[1]}",
    ]
    assert all(one.message.strip() for one in status.conditions)


def test_a_slow_job_is_reported_whole():
    # GIVEN a rank that is slow in data, a capture of it, two hold-offs before that, and what a capture cost
    rows = (HEALTHY, held_row(10, "co_critical"), held_row(20, "co_critical"), SLOW)
    found = ReproducedInfo(answer="yes", steps=5, steps_with=5, over_s=0.02, expected_s=0.02)
    manifest = manifest_of("c1").model_copy(update={"reproduced": found})
    states = {"c0": CaptureResult("c0", 1, "failed", "why"), "c1": CaptureResult("c1", 2, "stored")}
    cost = CostMeasured(1.0, 0, 60, 65, 1.5, 0.1)
    losses = Losses({"rank 2 in data": SuspectLoss("rank 2", "data", lost_s=0.8999999999999999, rank_s=3.6)})
    status, plain = status_of(view(*rows, states=states, captures=(manifest,), notes=(cost,), losses=losses))
    assert (status.run, status.suspect, status.since_step) == ("run-1", "rank 2 in data", 60)
    assert (status.windows, status.windows_held) == (4, 3)
    assert (status.verdict.label, status.verdict.first_step, status.verdict.outcome) == ("suspect", 50, "throttle")
    assert [(one.outcome, one.reason, one.reasons, one.windows, one.last_step) for one in status.holds] == [
        ("throttle", "overhead_budget", (), 1, 99),
        ("hold", "undecided", ("co_critical",), 2, 69),
    ]
    assert status.holds[1].words.startswith("several ranks are late together")
    assert [(one.capture_id, one.rank, one.state, one.reproduced) for one in status.captures] == [
        ("c1", 2, "stored", "yes"),
        ("c0", 1, "failed", None),
    ]
    assert plain["cost"] == {
        "stragglers_s": 0.9,
        "stragglers_rank_hours": 0.001,
        "captures_s": 1.5,
    }


def test_a_straggler_that_stays_is_reported_with_what_would_help_and_what_was_done():
    # GIVEN a rank that is named in one window after the other, and a remedy that was kept
    slow = [row(50 + 10 * n, "suspect", "throttle", "overhead_budget", onset=60) for n in range(6)]
    saved = {"on_s": 0.28, "off_s": 0.33, "saves_s": 0.05, "error_s": 0.002}
    kept = RemedyChanged(1.0, 0, 90, "stragglar", "kept", "helps", 2, "rank 2", "data", numbers=saved)
    # (and of another group of ranks, no more than advice)
    advised = msgspec.structs.replace(kept, switch="other", state="advised", reason="not_allowed", rank=1, numbers={})
    status, plain = status_of(view(*slow, notes=(kept, advised)))
    # THEN both are there, in numbers and in words
    assert (status.advice.straggler, status.advice.remedy) == ("rank 2 in data", "rebalance")
    assert status.advice.saves_s > 0
    assert status.advice.words.startswith("Give it less to do. Saves ")
    assert (plain["remedy"]["state"], plain["remedy"]["rank"], plain["remedy"]["saves_s"]) == ("kept", 2, 0.05)
    # AND neither is where nobody stays slow
    assert {"advice", "remedy"}.isdisjoint(status_of(view(HEALTHY))[1])


def test_a_report_is_bounded_however_long_its_run():
    # GIVEN thousands of windows held for ever other reasons, in long sentences, and thousands of captures
    rows = [replace(held_row(10 * n, f"reason-{n % 500}"), words="é" * 5000, resolves="é" * 5000) for n in range(3000)]
    states = {f"c{n}": CaptureResult(f"c{n}", n, "failed") for n in range(3000)}
    status, plain = status_of(view(*rows, states=states))
    assert (len(status.holds), len(status.captures)) == (MAX_HOLDS, MAX_CAPTURES)
    assert (status.windows, status.windows_held, status.captures_total) == (3000, 3000, 3000)
    assert status.captures[0].capture_id == "c2999"
    assert len(json.dumps(plain, ensure_ascii=False).encode()) < LARGEST_BYTES


text = st.text(max_size=600) | st.just("\ud800")


@given(
    words=text,
    sentence=text,
    named=text,
    gain_s=st.floats(),
    exposed_s=st.floats(),
    reasons=st.lists(text, max_size=20),
)
def test_whatever_is_on_record_the_status_is_one_that_the_server_takes(
    words, sentence, named, gain_s, exposed_s, reasons
):
    suspects = tuple(replace(one, gain_s=gain_s) for one in SLOW.suspects)
    about = {"words": words, "sentence": sentence, "resolves": words, "exposed_s": exposed_s, "suspects": suspects}
    slow = replace(SLOW, **about, named=named or "x", reasons=tuple(reasons))
    _, plain = status_of(view(HEALTHY, slow))
    assert json.dumps(plain, allow_nan=False).encode()


DAY_S = 86_400.0
OLD = {
    "nothing new for long": ((8, 9), [], True),
    "news lately": ((8, 6), [], False),
    "made lately, and nothing said": ((6,), [], False),
    "made long ago, and nothing said": ((8,), [], True),
    "goes with its job": ((8, 9), [{"kind": "Job"}], False),
}


@pytest.mark.parametrize(("days", "owners", "old"), OLD.values(), ids=OLD)
def test_which_reports_are_removed(days, owners, old):
    """GIVEN a report that was made, and changed, so many days ago THEN after a week without news and owner it is old"""
    made_at, *changed = (clock(NOW_S - one * DAY_S) for one in days)
    said = {"type": "Watched", "status": "False", "reason": "Ended", "message": "over"}
    body = {
        "metadata": {"creationTimestamp": made_at, "ownerReferences": owners},
        "status": {"conditions": [{**said, "lastTransitionTime": one} for one in changed]},
    }
    assert outdated(body, NOW_S, 7 * DAY_S) is old
