"""The summary of a run, and the list of decisions. (`tests.golden.states` has the texts of each state.)"""

from dataclasses import replace

import pytest

from sftriage.model.captures import CaptureResult
from sftriage.model.events import CauseFound, CostMeasured, NamedPolicy, PolicyChanged
from sftriage.runs.decisions import DecisionGroup, captures_in, log_of, row_of
from sftriage.runs.source import View
from sftriage.runs.summary import RunSummary, captures_cost_s
from tests.scenario import decision, held, request_of, row, verdict
from tests.unit.conftest import manifest_of
from tests.unit.hanging import FOUND, NEXT_STEP, SENTENCE, WHOLE_JOB, put_hang


def view(*rows, **about):
    return View("1", **{"info": object(), "rows": rows, "going": True, **about})


def test_what_was_lost_is_what_windows_add_to_the_sum_of_who_is_named():
    # GIVEN two windows of a suspect, and one between that a capture disturbed
    disturbed = replace(row(80, "needs_evidence", "hold", reasons=("self_inflicted",)), lost_s=0.5)
    rows = (row(0), row(30, "suspect", onset=40), disturbed, row(130, "suspect", onset=40))
    assert RunSummary(view(*rows)).lost_s == pytest.approx(2 * 50 * 0.018 + 0.5)


def test_a_command_is_one_to_paste():
    # GIVEN a directory whose name a shell would take for more than a name
    steps = RunSummary(view(row(30, "suspect", "throttle"), directory="my runs/$(x)")).steps
    assert steps[-1].command.endswith(" --run 'my runs/$(x)'")


def test_captures_never_give_time_back():
    costs = [CostMeasured(1.0, 0, 1, 2, cost_s, 0.1) for cost_s in (0.5, -2.0, None, 0.25)]
    assert captures_cost_s(costs) == 0.75


def test_like_decisions_in_a_row_are_one_entry_and_captures_and_notes_are_entries_of_their_own():
    # GIVEN a quiet night, windows with another candidate each, a fault, two captures, and the fault of another rank
    quiet = [row(first) for first in range(20, 420, 10)]
    undecided = [row_of(of, decision(of, "hold", "co_critical")) for of in map(held, range(420, 520, 10))]
    slow = [row(520, "suspect", "hold"), row(530, "suspect", "hold")]
    captured = [row(first, "suspect", "capture", requests=(request_of(f"c-{first}"),)) for first in (540, 550)]
    rows = [*quiet, *undecided, *slow, *captured, row(560, "suspect", "hold", rank=3)]
    notes = [
        CostMeasured(slow[0].time_s + 1.0, 0, 1, 2, 1.0, 0.1),
        PolicyChanged(rows[-1].time_s, "changed", (NamedPolicy("x"),)),
    ]
    # WHEN they are listed
    page = log_of(rows, notes, {})
    # THEN the newest is first, and alike ones are one whoever the candidates are
    listed = [(one.first_step, one.windows) if isinstance(one, DecisionGroup) else one.kind for one in page.entries]
    assert listed == ["policy", (560, 1), (550, 1), (540, 1), (520, 2), "cost", (420, 10), (20, 40)]
    assert [(one.capture_id, one.state) for one in page.entries[2].captures] == [("c-550", "running")]
    assert page.counts == {"ignore": 40, "hold": 13, "capture": 2, "cost": 1, "policy": 1}
    # AND a filter shows that outcome and counts all
    held_back = log_of(rows, notes, {}, "hold")
    assert [entry.row.first_step for entry in held_back.entries] == [560, 530, 510]
    assert held_back.counts == page.counts
    assert log_of(rows, notes, {}, "throttle").entries == ()


def test_pages_hold_every_entry_once():
    # GIVEN more entries than a page has room for
    rows = [row(first, "suspect", "hold", rank=first % 7) for first in range(20, 1020, 10)]
    # WHEN all pages are read THEN every entry was there once, the newest first
    read = [log_of(rows, (), {}, number=number, size=9) for number in range(1, log_of(rows, (), {}, size=9).pages + 1)]
    assert [entry.first_step for page in read for entry in page.entries] == [row.first_step for row in reversed(rows)]
    # AND a page that is not there is the last one, or the first
    assert [log_of(rows, (), {}, number=number, size=9).number for number in (99, -1)] == [len(read), 1]


@pytest.mark.parametrize(
    ("first", "last", "attempt", "found"),
    [(159, 165, 0, True), (100, 160, 0, True), (164, 170, 0, True), (165, 170, 0, False), (159, 165, 1, False)],
)
def test_a_cost_is_of_the_captures_that_measured_its_steps(first, last, attempt, found):
    of = CostMeasured(0.0, attempt, first, last, 1.0, 0.1)
    stored = CaptureResult("c-1", 2, "stored", first_step=160, last_step=164)
    results = [stored, CaptureResult("c-2", 2, "failed")]
    assert list(captures_in(of, {"c-1": 0, "c-2": 0}, results)) == ([stored] if found else [])


def stall(*ranks, step=60, stage="forward", requests=(WHOLE_JOB,), **about):
    suspects = tuple(verdict(step, "suspect", rank=rank, stage=stage).suspects[0] for rank in ranks)
    of = replace(verdict(step, "stalled", reasons=("not_arrived",) if ranks else ("in_sync",)), last_step=step)
    of = replace(of, suspects=suspects, **about)
    return row_of(of, decision(of, "capture" if requests else "hold", "rule_matched", requests=requests))


def answers(summary):
    return {answer.question: answer.text for answer in summary.answers}


def test_GIVEN_a_stall_WHEN_its_evidence_is_there_THEN_its_reason_is_the_headline(tmp_path):
    # GIVEN a stall of which nothing but the stages is known
    before = RunSummary(view(row(0), stall(2)))
    assert (before.health, before.cause, before.named) == ("stalled", None, "rank 2 in forward")
    assert before.sentence.startswith("Stalled: no rank has moved for 75 s in step 60")
    assert answers(before)["captured"] == "every rank: in progress"
    # WHEN the cause is found THEN it is the sentence, once, and what to do about it is the first step
    stored = {"captures": (put_hang(tmp_path),), "results": {"c-9": CaptureResult("c-9", 2, "stored")}}
    found = RunSummary(view(row(0), stall(2), notes=(FOUND,), directory="runs/r", **stored))
    assert (found.sentence, found.why, found.cause.code) == (SENTENCE, "", "different_collective")
    assert (found.cause.place.line, found.named) == (52, "rank 2 in forward")
    assert [step.line for step in found.steps[:2]] == [
        NEXT_STEP,
        "See where each rank is. sftriage traces show c-9 --run runs/r",
    ]
    assert not any("py-spy" in step.line for step in found.steps)
    assert answers(found)["captured"] == "every rank, step 60"
    assert answers(found)["sure"] == "by what the ranks report of their collectives and threads"
    # AND so it is as long as the stall lasts, though other ranks are missing now, and of a run that has ended
    later = (row(0), stall(2), stall(1, requests=()))
    assert RunSummary(view(*later, notes=(FOUND,))).sentence == SENTENCE
    assert SENTENCE in RunSummary(view(*later, notes=(FOUND,), unwatched=True)).sentence
    # AND a later capture that does not show it takes nothing back
    unknown = CauseFound(9.0, "c-9", 2, "unknown", False, "It is not known.")
    assert RunSummary(view(*later, notes=(FOUND, unknown))).sentence == SENTENCE
    assert RunSummary(view(*later, notes=(unknown, FOUND))).sentence == SENTENCE


@pytest.mark.parametrize(
    ("ranks", "code", "named"),
    [
        ((2,), "absent", "rank 2 in forward"),
        ((0, 2), "absent", ""),
        ((), "absent", ""),
        ((2,), "all_inside", ""),
        ((2,), "unknown", ""),
    ],
)
def test_GIVEN_a_reason_THEN_a_rank_that_only_the_stages_suspect_is_not_named(ranks, code, named):
    found = CauseFound(5.0, "c-9", 2, code, True, "It hangs.", next_step="Do.")
    summary = RunSummary(view(row(0), stall(*ranks), notes=(found,)))
    assert (summary.sentence, summary.named) == ("It hangs.", named)
    assert answers(summary)["who"] == (named or "It hangs.")


@pytest.mark.parametrize(
    "rows",
    [
        (row(0), row(10, "suspect", "capture", requests=(WHOLE_JOB,)), stall(2, requests=())),
        (row(0), stall(2, step=59), stall(2, requests=())),
        (row(0), stall(2), stall(2, requests=(), attempt=1)),
    ],
)
def test_GIVEN_a_reason_of_something_else_THEN_the_stall_has_none(rows):
    summary = RunSummary(view(*rows, notes=(FOUND,)))
    assert (summary.cause, summary.sentence) == (None, rows[-1].sentence)


def test_GIVEN_a_stall_whose_capture_failed_THEN_no_step_opens_the_trace_of_another_rank():
    # GIVEN a slow rank that was captured, then a stall whose own capture failed, but not that of its control
    slow = row(10, "suspect", "capture", requests=(request_of("c-1", 0),))
    own = request_of("c-2", 2), request_of("c-3", 1, "control")
    stored = (manifest_of("c-1", rank=0), manifest_of("c-3", rank=1, role="control"))
    failed = {"c-2": CaptureResult("c-2", 2, "failed", "the rank does not answer")}
    summary = RunSummary(view(row(0), slow, stall(2, requests=own), captures=stored, results=failed))
    assert not any("Open the trace" in step.line for step in summary.steps)
