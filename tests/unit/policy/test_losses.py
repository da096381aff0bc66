"""What stragglers have cost: each step once, whatever the windows are, and whoever counts."""

from dataclasses import replace
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.model.verdicts import Lost
from sftriage.policy.engine import decide
from sftriage.policy.state import MOST_SUSPECTS, OTHERS, Losses

from .making import BEGUN, NOW, make_policy, make_verdict

RANKS = 4


def losses_of(verdicts):
    return reduce(Losses.after, verdicts, Losses())


def window(first_step, lost_first=None, step_s=(), **about):
    """A verdict on 50 steps, which says what its suspect cost in some of them."""
    of = make_verdict(first_step=first_step, **about)
    return replace(of, lost=Lost(first_step if lost_first is None else lost_first, tuple(step_s), RANKS))


def test_losses_of_windows_add_up_by_suspect():
    # GIVEN a rank that is named for 60 steps, 20 ms each, and another one for 10
    verdicts = [
        window(100, step_s=[0.02] * 50),
        window(110, 150, [0.02] * 10),
        window(120, 160, [0.05] * 10, ranks=(1,)),
    ]
    found = losses_of(verdicts)
    first, second = found.largest
    assert (first.who, first.where, first.steps, first.last_step) == ("rank 2", "data", 60, 159)
    assert first.lost_s == pytest.approx(1.2)
    assert first.rank_s == pytest.approx(1.2 * RANKS)
    assert first.rank_hours == pytest.approx(4.8 / 3600)
    assert (second.who, second.rank_s) == ("rank 1", pytest.approx(2.0))
    assert found.rank_s == pytest.approx(6.8)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=12), st.integers(1, 50))
def test_a_step_counts_once_however_windows_overlap(firsts, from_step):
    # GIVEN windows in order of which each tells of all its steps, as those of a controller that has just taken over do
    firsts = sorted(firsts)
    whole = [window(first, first, [(first + n) * 1e-3 for n in range(50)]) for first in firsts]
    expected = sorted({step for first in firsts for step in range(first, first + 50)})
    # THEN every step that one of them tells of counts once
    assert losses_of(whole).lost_s == pytest.approx(sum(expected) * 1e-3)
    # AND a takeover with the summed losses makes no difference
    half = len(whole) // 2
    again = losses_of(whole[:half])
    for verdict in whole[half:]:
        again = again.after(verdict)
    assert again == losses_of(whole)


def test_an_attempt_counts_its_own_steps():
    # GIVEN a job that has started again, from step 100 on
    found = losses_of([window(100, step_s=[0.02] * 50), window(100, step_s=[0.02] * 50, attempt=1)])
    assert found.largest[0].steps == 100
    assert found.counted == {0: 149, 1: 149}


def test_a_disturbed_window_adds_to_the_suspect_it_names():
    named = make_verdict().suspects[0]
    disturbed = replace(make_verdict("needs_evidence", ranks=None), lost=Lost(100, (0.02,) * 45, RANKS, named))
    assert losses_of([disturbed]).of(named).steps == 45
    # AND a window without a suspect charges none
    assert losses_of([replace(disturbed, lost=None), replace(disturbed, lost=Lost(100, (1.0,), RANKS))]) == Losses()


def test_a_suspect_is_the_same_with_a_stage_and_without():
    found = losses_of([window(100, step_s=[0.02] * 50), window(150, step_s=[0.02] * 50, stage=None)])
    assert len(found.by_suspect) == 1
    assert found.of(make_verdict(stage=None).suspects[0]).steps == 100


def test_a_slow_host_is_the_same_in_any_stage_and_so_is_a_rank_of_it():
    host = {"scope": "host", "ranks": (2, 3)}
    found = losses_of(
        window(first, step_s=[0.02] * 50, **of)
        for first, of in (
            (100, {**host}),
            (150, {**host, "stage": "forward"}),
            (200, {**host, "stage": None}),
            (250, {}),
        )
    )
    (one,) = found.largest
    assert (one.where, one.steps) == ("all its local stages", 200)
    # AND a rank of another host is not
    assert len(found.after(window(300, step_s=[0.02], ranks=(4,))).by_suspect) == 2


def test_suspects_beyond_the_maximum_are_counted_together():
    found = losses_of(window(100, step_s=[0.01], ranks=(rank,), attempt=rank) for rank in range(MOST_SUSPECTS + 5))
    assert len(found.by_suspect) == MOST_SUSPECTS + 1
    assert found.by_suspect[OTHERS].steps == 5
    assert found.lost_s == pytest.approx(0.01 * (MOST_SUSPECTS + 5))


RULE = {"name": "dear", "match": {"cost": ">= 0.01 GPU-hours"}, "capture": {}}


def test_a_rule_on_cost_waits_until_the_suspect_has_cost_as_much():
    # GIVEN a rule on 36 rank-seconds
    policy, verdict = make_policy(RULE), make_verdict()
    dear, cheap = (losses_of([window(100, step_s=[step_s] * 50)]) for step_s in (0.181, 0.17))
    # THEN it captures a suspect that has cost that, and of another it says what is missing
    captured, _ = decide(verdict, policy, BEGUN, NOW, losses=dear)
    assert (captured.outcome, captured.numbers["cost_hours"]) == ("capture", pytest.approx(36.2 / 3600))
    waiting, _ = decide(verdict, policy, BEGUN, NOW, losses=cheap)
    assert (waiting.outcome, waiting.reason) == ("ignore", "no_rule_matched")
    assert waiting.parameters["cost_hours"] == pytest.approx(34 / 3600)
    assert waiting.parameters["min_cost_hours"] == 0.01
    # AND what others have cost is nothing to it
    assert decide(make_verdict(ranks=(1,)), policy, BEGUN, NOW, losses=dear)[0].outcome == "ignore"


def test_a_rule_without_cost_before_it_decides_as_usual():
    policy = make_policy(RULE, {"name": "any", "match": {"gain": ">= 5%"}, "capture": {}})
    decision, _ = decide(make_verdict(), policy, BEGUN, NOW, losses=Losses())
    assert (decision.outcome, decision.rule) == ("capture", "any")
