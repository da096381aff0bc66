"""The summary of a run, and the list of decisions. (`tests.golden.states` has the texts of each state.)"""

from dataclasses import replace

import pytest

from sftriage.model.captures import CaptureResult
from sftriage.model.events import CostMeasured, NamedPolicy, PolicyChanged
from sftriage.runs.decisions import DecisionGroup, captures_in, log_of, row_of
from sftriage.runs.source import View
from sftriage.runs.summary import RunSummary, captures_cost_s
from tests.scenario import decision, held, request_of, row


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
