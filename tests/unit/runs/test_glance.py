"""The first glance: what its figures and names are made of. (`tests.golden.states` has what is said in each state.)"""

from dataclasses import replace

import pytest

from sftriage.model.captures import ENDED, CaptureResult
from sftriage.model.events import CostMeasured, FollowUpDecided
from sftriage.runs.following import request_row, row_of
from sftriage.runs.glance import captured_words, captures_cost_s, glance_of, outlook
from sftriage.runs.source import View
from sftriage.traces.manifest import Manifest, ReproducedInfo
from tests.scenario import decision, request_of, row, verdict


def view(*rows, **about):
    return View("1", **{"info": object(), "rows": rows, "going": True, **about})


def answers(of):
    return {one.question: " | ".join((one.text, *one.more)) for one in glance_of(of).answers}


def test_a_trouble_is_told_from_its_beginning():
    # GIVEN a job that became undecided, then slow, was captured, and is throttled now
    rows = [
        row(20),
        row(30, "needs_evidence", "hold", reasons=("sync_ambiguous",)),
        row(100, "suspect", "capture", "rule slow-rank", (request_of("c-1"),), onset=120),
        row(110, "needs_evidence", "hold", reasons=("self_inflicted",)),
        row(160, "suspect", "throttle", "too early", onset=125),
    ]
    # WHEN it is told THEN since when, who, and what was done, are those of the one who is named; the step is
    # that of the newest verdict, whose sentence stands beside it
    found = outlook(rows, {"c-1": CaptureResult("c-1", 2, "stored")})
    assert (found.since_step, found.since_s, found.named) == (125, rows[2].time_s, "rank 2 in data")
    assert found.done == "Throttled, nothing heavy was started: too early"
    assert [(one.capture_id, one.state) for one in found.captures] == [("c-1", "stored")]
    assert not found.disturbed


@pytest.mark.parametrize("state", sorted(ENDED - {"stored"}))
def test_a_capture_that_came_to_nothing_is_no_capture(state):
    rows = [row(30, "suspect", "capture", "rule slow-rank", (request_of("c-1"),))]
    found = outlook(rows, {"c-1": CaptureResult("c-1", 2, state, "the disk is full")})
    assert (found.face, [one.result.detail for one in found.lost]) == ("suspect", ["the disk is full"])


def test_what_followed_an_earlier_trouble_does_not_belong_to_this_one():
    rows = [row(20, "stalled", "capture", requests=(request_of("c-1"),)), row(30), row(40, "suspect", "throttle")]
    hung = decision(verdict(20, "stalled"), "capture", "it hangs", requests=(request_of("c-2"),))
    assert outlook(rows, {}, [request_row(FollowUpDecided("c-1", hung))]).captures == ()


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
    # THEN all of them count
    found = answers(view(row(0), *rows))
    assert "named in 6 of 6 windows" in found["sure"]
    assert found["cost"].startswith("about 5.4 s")
    # AND another rank is another trouble
    other = replace(row(320, "suspect", rank=1, onset=320), lost_s=0.9)
    assert "named in 1 of 1 windows" in answers(view(row(0), *rows, other))["sure"]


def test_a_command_is_one_to_paste():
    # GIVEN a directory whose name a shell would take for more than a name
    steps = glance_of(view(row(30, "suspect", "throttle"), directory="my runs/$(x)")).steps
    assert steps[-1].command.endswith(" --run 'my runs/$(x)'")


def test_captures_never_give_time_back():
    costs = [CostMeasured(1.0, 0, 1, 2, cost_s, 0.1) for cost_s in (0.5, -2.0, None, 0.25)]
    assert captures_cost_s(costs) == 0.75


@pytest.mark.parametrize("answer", ["yes", "partly", "no"])
def test_a_control_is_there_to_compare_with_and_has_no_fault(captured, answer):
    # GIVEN a stored capture, of which it is known whether the fault was there meanwhile
    again = ReproducedInfo(answer=answer, steps=5, steps_with=2, over_s=0.04, expected_s=0.02)
    manifest = next(one for one in captured.source.view().captures if isinstance(one, Manifest))
    manifest = manifest.model_copy(update={"reproduced": again})
    # WHEN it is of the suspect THEN the fault is in it, or not
    assert "the fault is" in captured_words(manifest)
    # WHEN it is of a control rank THEN it is the suspect's that was there, or not
    control = manifest.model_copy(update={"capture": manifest.capture.model_copy(update={"role": "control"})})
    assert "to compare with; the fault was" in captured_words(control)
    assert "suspect" in captured_words(control)
