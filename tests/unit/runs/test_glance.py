"""The first glance: seven questions, whatever state a run is in."""

from dataclasses import replace

import pytest

from sftriage.model.captures import CaptureResult
from sftriage.model.events import CostMeasured, JobPaused
from sftriage.policy.losses import losses_of
from sftriage.runs.following import row_of
from sftriage.runs.glance import captured_words, captures_cost_s, glance_of
from sftriage.runs.liveness import RankCoverage, Watcher
from sftriage.runs.source import View
from sftriage.traces.manifest import Manifest, ReproducedInfo
from sftriage.words.run import QUESTIONS
from tests.scenario import decision, held, request_of, row, verdict

RECORDED = RankCoverage(4, 4)


def view(*rows, going=True, **about):
    known = {"info": object(), "telemetry": RECORDED, "directory": "runs/r", "hosts": {2: "vm"}}
    return View("1", **{**known, "rows": rows, "going": going, **about})


def told(of):
    """What is answered, and what is to be done, as one reads it."""
    glance = glance_of(of)
    answers = {one.question: " | ".join((one.text, *one.more)) for one in glance.answers}
    steps = [" $ ".join(filter(None, (one.text, one.command))) for one in glance.steps]
    return glance.outlook.headline, answers, steps


def held_row(first=30, reasons=("co_critical",)):
    of = held(first, reasons=reasons)
    return row_of(of, decision(of, "hold", ", ".join(reasons)))


def test_a_slow_job_is_answered_for():
    # GIVEN a rank that is slow in data since step 40, on record by two windows of 50 steps that do not overlap
    slow = [row(first, "suspect", "throttle", "overhead_budget", onset=40) for first in (30, 80)]
    headline, answers, steps = told(view(row(0), *slow, notes=(CostMeasured(1.0, 0, 60, 65, 1.5, 0.1),)))
    assert headline == "Slow, capture throttled"
    assert list(answers) == list(QUESTIONS)
    assert answers["healthy"] == "No: it is slow"
    assert answers["since"] == "step 40"
    assert answers["who"] == "rank 2 in data | on host vm"
    assert answers["sure"].startswith("there in 90% of steps 80 to 129 | named in 2 of 2 windows that")
    # (20 ms of each slow step, in 90 % of 100 steps; times four ranks)
    assert answers["cost"].startswith("about 1.8 s up to step 129 | 0.002 rank-hours (4 ranks) | 20.0 ms of each slow")
    assert answers["cost"].endswith("and 1.5 s for captures")
    assert answers["captured"].startswith("nothing | Throttled, nothing heavy was started: ")
    # AND it is said what to do, with the commands to copy
    assert steps[0].startswith("Look at the data loader of rank 2 on host vm: the storage it reads from")
    assert (
        steps[1]
        == "Capture rank 2 by hand. $ sftriage capture --rank 2 --reason 'suspect of steps 80-129' --run runs/r"
    )
    assert steps[-1] == "See the numbers that decided. $ sftriage explain 80-129 --run runs/r"


def test_what_was_lost_is_what_windows_add_to_the_sum_of_who_is_named():
    # GIVEN two windows of a suspect, and one between that a capture disturbed
    disturbed = replace(row(80, "needs_evidence", "hold", reasons=("self_inflicted",)), lost_s=0.5)
    rows = (row(0), row(30, "suspect", onset=40), disturbed, row(130, "suspect", onset=40))
    assert glance_of(view(*rows)).lost_s == pytest.approx(2 * 50 * 0.018 + 0.5)


def test_a_slow_host_is_one_trouble_whichever_stage_and_rank_of_it_stands_out():
    # GIVEN windows that name a host in one stage, in another, as a whole, and twice one of its ranks
    of = [
        verdict(first, "suspect", onset=20, stage=stage)
        for first, stage in ((20, "data"), (70, "forward"), (120, None))
    ]
    host = [
        replace(one, suspects=(replace(one.suspects[0], scope="host", ranks=(2, 3), rank=None, host="vm"),))
        for one in of
    ]
    ranks = [verdict(170, "suspect", onset=20, rank=3), verdict(220, "suspect", onset=20, stage="forward")]
    rows = [
        replace(row_of(one, decision(one)), lost_s=0.9)
        for one in (*host, *ranks, replace(host[0], first_step=270, last_step=319))
    ]
    _, answers, _ = told(view(row(0), *rows))
    # THEN all of them count
    assert "named in 6 of 6 windows" in answers["sure"]
    assert answers["cost"].startswith("about 5.4 s")
    # AND another rank is another trouble
    other = replace(row(320, "suspect", rank=1, onset=320), lost_s=0.9)
    assert "named in 1 of 1 windows" in told(view(row(0), *rows, other))[1]["sure"]


def test_what_suspects_have_cost_since_the_run_began_is_said_of_a_healthy_job_too():
    verdicts = [verdict(20, "suspect"), verdict(80, "suspect", rank=1, stage=None)]
    _, answers, _ = told(view(row(200), losses=losses_of([*verdicts, verdict(140, "suspect")])))
    assert answers["cost"] == (
        "nothing now | since the run began, suspects have cost 0.003 rank-hours: rank 2 in data 0.002 rank-hours, "
        "rank 1 in all its local stages 0.001 rank-hours"
    )


def test_a_command_is_one_to_paste():
    # GIVEN a directory whose name a shell would take for more than a name
    steps = glance_of(view(row(30, "suspect", "throttle"), directory="my runs/$(x)")).steps
    assert steps[-1].command.endswith(" --run 'my runs/$(x)'")


def test_a_held_job_names_nobody_and_says_why_in_words():
    headline, answers, steps = told(view(row(0), held_row(30, ("sync_ambiguous",))))
    assert headline == "Undecided: held"
    assert answers["since"] == "a step between 30 and 79"
    assert answers["who"] == "nobody is named | candidates, none of them sure enough: rank 3 in forward"
    assert answers["sure"].endswith("ranks wait for each other and all look alike (sync_ambiguous)")
    assert answers["cost"].startswith("about 500 ms up to step 79")
    assert answers["captured"] == "nothing | Held, nothing heavy was started"
    assert "monitor.watch(model)" in steps[0]


def test_where_the_last_gradient_is_on_record_nobody_is_sent_to_record_it():
    of = held(30, reasons=("sync_ambiguous",))
    row_ = row_of(
        of, replace(decision(of, "hold", "sync_ambiguous"), parameters={"reasons": of.reasons, "split": True})
    )
    for going in (True, False):
        first = told(view(row(0), row_, going=going))[2][0]
        assert "monitor.watch" not in first
        assert "after the last gradient" in first


def test_a_trace_is_opened_first(captured):
    # GIVEN a run in which a suspect was captured, and the trace is stored
    headline, answers, steps = told(captured.source.view())
    assert headline == "Slow, and captured"
    assert answers["captured"].startswith("rank 2, steps ")
    assert steps[0] == f"Open the trace of rank 2. $ sftriage traces open c-1 --run {captured.directory.path}"
    assert glance_of(captured.source.view()).steps[0].capture_id == "c-1"
    assert not any("by hand" in step for step in steps)
    # AND where its rank runs is known from what was recorded
    assert answers["who"] == "rank 2 in data | on host node-1"


def test_a_capture_that_came_to_nothing_can_be_made_by_hand():
    slow = row(30, "suspect", "capture", "rule", (request_of("c-1"),), onset=40)
    became = {"c-1": CaptureResult("c-1", 2, "failed", "the disk is full")}
    _, answers, steps = told(view(slow, became=became))
    assert answers["captured"] == "nothing | rank 2: failed, the disk is full"
    assert any(step.startswith("Capture rank 2 by hand.") for step in steps)
    # AND nobody can do so any more once the run has ended
    assert not any("by hand" in step for step in told(view(slow, became=became, going=False))[2])


def test_a_stalled_job_has_cost_what_it_has_stood_still():
    of = replace(verdict(80, "stalled", reasons=("not_arrived",)), suspects=verdict(80, "suspect").suspects)
    _, answers, _ = told(view(row(20), row_of(of, decision(of, "hold", "not_arrived"))))
    assert answers["healthy"] == "No: it stands still"
    assert answers["who"] == "rank 2 in data | on host vm"
    assert "have not arrived (not_arrived)" in answers["sure"]
    assert answers["cost"].startswith("75.0 s so far, in which nothing was done | 0.083 rank-hours")


def test_a_healthy_job_has_nothing_to_be_done():
    headline, answers, steps = told(view(row(20), row(30)))
    assert (headline, steps) == ("Healthy", [])
    assert answers["healthy"] == "Yes"
    assert answers["since"] == "step 20 | no trouble so far"
    assert (answers["who"], answers["cost"], answers["captured"]) == ("nobody", "nothing now", "nothing")
    # AND it remembers
    assert (
        told(view(row(30, "suspect"), row(80)))[1]["since"] == "step 80 | trouble before, up to step 79: rank 2 in data"
    )


def test_of_devices_the_cost_is_in_gpu_hours():
    of = replace(verdict(30, "suspect", onset=30), clock="device")
    _, answers, _ = told(view(replace(row_of(of, decision(of)), lost_s=0.9)))
    assert "GPU-hours (4 ranks)" in answers["cost"]
    assert answers["sure"].endswith("by the devices' clock")


@pytest.mark.parametrize(
    ("watcher", "rings_there", "step"),
    [
        ("unwatched", True, "The job goes on: take it over. $ sftriage attach --run runs/r"),
        (
            "left",
            True,
            "Its ranks are gone too: judge the last steps that they recorded. $ sftriage attach --run runs/r",
        ),
        ("left", False, "Its ranks are gone too: judge the steps that are on record. $ sftriage analyze runs/r"),
    ],
)
@pytest.mark.parametrize("rows", [(), (row(20),), (row(20), held_row())])
def test_what_nobody_watches_is_unknown(watcher, rings_there, step, rows):
    of = view(*rows, going=watcher == "unwatched", unwatched=True, watcher=Watcher(watcher), rings_there=rings_there)
    headline, answers, steps = told(of)
    assert headline == f"Unknown since step {rows[-1].last_step}" if rows else "Unknown"
    assert steps[0] == step
    if rows:
        assert answers["healthy"].startswith("Unknown: nobody watches it any more | at step ")
        assert answers["since"].startswith(f"unknown since step {rows[-1].last_step} | before that, since ")


@pytest.mark.parametrize("reason", ["cooldown", "overhead_budget", "captures_per_hour", "pending"])
def test_nothing_is_waited_for_once_a_run_has_ended(reason):
    slow = row(30, "suspect", "throttle", reason, onset=40)
    going, ended = (told(view(slow, going=going))[2] for going in (True, False))
    assert any("Wait" in step or "See whether it lasts" in step for step in going)
    assert not any("wait" in step.lower() or "it lasts" in step for step in ended)


def test_captures_never_give_time_back():
    costs = [CostMeasured(1.0, 0, 1, 2, cost_s, 0.1) for cost_s in (0.5, -2.0, None, 0.25)]
    assert captures_cost_s(costs) == 0.75


def test_pauses_are_in_the_costs_of_a_run():
    pauses = tuple(JobPaused(1.0, 0, step, step, 30.0, "backward", "in_sync") for step in (10, 60))
    _, answers, _ = told(view(row(0), notes=pauses))
    assert answers["cost"].endswith("pauses of all ranks have taken 60.0 s")


@pytest.mark.parametrize("answer", ["yes", "partly", "no"])
def test_a_control_is_there_to_compare_with_and_has_no_fault(captured, answer):
    # GIVEN a stored capture, of which it is known whether the fault was there meanwhile
    told = ReproducedInfo(answer=answer, steps=5, steps_with=2, over_s=0.04, expected_s=0.02)
    manifest = next(one for one in captured.source.view().captures if isinstance(one, Manifest))
    manifest = manifest.model_copy(update={"reproduced": told})
    # WHEN it is of the suspect THEN the fault is in it, or not
    assert "the fault is" in captured_words(manifest)
    # WHEN it is of a control rank THEN it is the suspect's that was there, or not
    control = manifest.model_copy(update={"capture": manifest.capture.model_copy(update={"role": "control"})})
    assert "to compare with; the fault was" in captured_words(control)
    assert "suspect" in captured_words(control)
