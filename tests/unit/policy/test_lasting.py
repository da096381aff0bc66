"""`for`: how long the same suspect has to be there, in steps or in time."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.model.verdicts import Regression, SlowLink
from sftriage.policy.engine import decide
from sftriage.policy.state import State
from sftriage.words.decisions import reason_sentence, resolution

from .making import BEGUN, CAPTURING, NOW, OTHER, in_a_row, make_policy, make_verdict, played

LASTING = {**CAPTURING, "for": "70 steps"}
HELD = {"label": "needs_evidence", "reasons": ("self_inflicted",)}


def test_a_rule_waits_for_its_steps():
    # GIVEN windows of 50 steps, one every 10, and a rule that wants a suspect to last for 70
    decisions, _ = played(make_policy(LASTING), *in_a_row({}, {}, {}))
    # THEN each step counts once, however many windows hold it
    assert [(one.outcome, reason_sentence(one)[:52]) for one in decisions] == [
        ("hold", "rule a waits to see whether it lasts: 50 of 70 steps"),
        ("hold", "rule a waits to see whether it lasts: 60 of 70 steps"),
        ("capture", "rule a: fixing data of rank 2 would save 20 ms a step"[:52]),
    ]
    assert decisions[0].parameters == {"rule": "a", "lasted_steps": 50, "for_steps": 70}
    assert [one.numbers["lasted_steps"] for one in decisions] == [50, 60, 70]
    assert {one.numbers["for_steps"] for one in decisions} == {70}
    assert resolution(decisions[0]) == "See whether it lasts, or lower the rule's `for`."


def test_a_rule_waits_for_its_time_as_the_steps_took():
    # GIVEN steps of 70 ms, and a rule that wants a suspect to last for 4.5 s
    decisions, state = played(make_policy({**CAPTURING, "for": "4500ms"}), *in_a_row({}, {}, {}))
    assert [one.outcome for one in decisions] == ["hold", "hold", "capture"]
    assert reason_sentence(decisions[1]) == "rule a waits to see whether it lasts: 4.2 s of 4.5 s"
    assert state.streak is not None
    assert state.streak.lasted["a"].seconds == pytest.approx(70 * 0.07)


def test_steps_of_unknown_duration_count_no_time():
    unknown = [replace(one, exposed_s=math.nan) for one in in_a_row({}, {})]
    decisions, _ = played(make_policy({**CAPTURING, "for": "1s"}), *unknown)
    assert [reason_sentence(one) for one in decisions] == ["rule a waits to see whether it lasts: 0 s of 1 s"] * 2


@pytest.mark.parametrize(
    ("onset_step", "lasted"),
    [
        (None, [50, 60, 70]),
        # It began in the first window that names it
        (140, [10, 20, 30]),
        (149, [1, 11, 21]),
        # It began before, and no window showed it
        (60, [50, 60, 70]),
        # What cannot be is taken for the last step
        (150, [1, 11, 21]),
    ],
)
def test_a_suspect_lasts_from_its_onset_in_its_first_window(onset_step, lasted):
    windows = in_a_row(*[{"onset_step": onset_step}] * 3)
    decisions, _ = played(make_policy({**CAPTURING, "for": "100 steps"}), *windows)
    assert [one.parameters["lasted_steps"] for one in decisions] == lasted
    # AND another onset in a later window does not change the count
    windows[1:] = in_a_row({}, {"onset_step": 125}, {"onset_step": 105})[1:]
    decisions, _ = played(make_policy({**CAPTURING, "for": "100 steps"}), *windows)
    assert [one.parameters["lasted_steps"] for one in decisions] == lasted


@pytest.mark.parametrize(
    ("between", "outcome"),
    [
        ({"label": "healthy", "ranks": None}, "hold"),
        ({"label": "needs_evidence", "reasons": ("roaming",)}, "hold"),
        ({"label": "needs_evidence", "reasons": ("roaming", "self_inflicted")}, "hold"),
        ({"ranks": (3,)}, "hold"),
        ({"ranks": (2, 3)}, "hold"),
        ({"stage": "forward"}, "hold"),
        # (whether one stage has nearly all of it may change from window to window)
        ({"stage": None}, "capture"),
        ({"scope": "host"}, "hold"),
        ({"share": 0.01}, "hold"),
        ({"attempt": 1}, "hold"),
        # What says nothing of the suspect neither counts nor breaks
        (HELD, "capture"),
        ({"label": "stalled", "reasons": ("in_sync",), "ranks": None}, "capture"),
    ],
)
def test_only_consecutive_windows_with_the_same_suspect_count(between, outcome):
    """GIVEN a suspect, something in between and the suspect again THEN that is 70 steps only if nothing broke them."""
    decisions, _ = played(make_policy(LASTING), *in_a_row({}, between, {}))
    assert decisions[2].outcome == outcome


CONTENDED = {"contended_fraction": 0.6, "onset_step": 0}


@pytest.mark.parametrize(
    ("between", "captured_at"),
    [
        # 430 steps of 70 ms are 30 s
        (CONTENDED, 38),
        ({"label": "healthy", "ranks": None}, 41 + 18),
        ({**CONTENDED, "ranks": (3,)}, 41 + 18),
        (HELD, 38),
        # (a window that no rule captures names it all the same)
        ({**CONTENDED, "share": 0.01}, 38),
        # (nor does it end where one of the windows finds less of it, or does not know)
        ({"contended_fraction": 0.3}, 38),
        ({}, 38),
        # What comes back at regular steps is none
        ({"pattern": "recurring"}, 20),
    ],
)
def test_contention_lasts_while_consecutive_windows_name_its_suspect(between, captured_at):
    # GIVEN a rank that contention may have made slow long before the first of many windows named it
    windows = in_a_row(*[CONTENDED] * 20, between, *[CONTENDED] * 50)
    decisions, _ = played(make_policy(CAPTURING), *windows)
    # THEN nothing is captured, whenever it began, before windows that follow on one another named it for 30 s
    assert [one.outcome for one in decisions].index("capture") == captured_at
    assert {one.reason for one in decisions[:20]} == {"contended"}


def test_ended_contention_delays_a_capture_as_long_as_ongoing_contention():
    # GIVEN a rank that two windows find slowed by contention, and all that follow on them do not
    decisions, _ = played(make_policy(CAPTURING), *in_a_row(*[CONTENDED] * 2, *[{}] * 50))
    # THEN it is what the first steps named it for: it is captured once it has been named for 30 s
    assert [one.outcome for one in decisions].index("capture") == 38
    # AND one of which that was never found, at once
    decisions, _ = played(make_policy(CAPTURING), *in_a_row({}, {"contended_fraction": 0.3}))
    assert [one.outcome for one in decisions] == ["capture", "throttle"]


def test_each_rule_counts_its_own_steps_of_a_suspect():
    """GIVEN a rule whose threshold only the later windows reach THEN its steps count from there."""
    policy = make_policy({**LASTING, "match": {"gain": ">= 50%"}}, {**OTHER, "for": "60 steps", "capture": None})
    decisions, state = played(policy, *in_a_row(*({"share": share} for share in (0.1, 0.6, 0.6, 0.6))))
    assert [one.outcome for one in decisions] == ["ignore", "hold", "hold", "capture"]
    # AND once they are enough nothing is counted any more: what does not change is not written
    assert state.streak is not None
    assert {name: one.steps for name, one in state.streak.lasted.items()} == {"a": 70, "b": 60}


def test_a_streak_that_is_long_enough_changes_no_state():
    policy = make_policy({"name": "w", "match": {}, "for": "60 steps"})
    first, second, third = in_a_row({}, {}, {})
    _, state = played(policy, first, second)
    assert decide(third, policy, state, NOW + 2)[1] is state


def test_an_observing_rule_waits_as_well():
    policy = make_policy({"name": "w", "match": {}, "for": "60 steps"})
    decisions, _ = played(policy, *in_a_row({}, {}))
    assert [(one.outcome, reason_sentence(one)) for one in decisions] == [
        ("ignore", "rule w waits to see whether it lasts: 50 of 60 steps"),
        ("ignore", "observe-only: rule w matched"),
    ]


KINDS = [{}, {}, {}, HELD, {"ranks": (3,)}, {"label": "healthy", "ranks": None}]


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 60)), min_size=1, max_size=30), st.integers(1, 200))
def test_a_streak_is_the_steps_of_windows_since_another_suspect(windows, wanted):
    """GIVEN any windows, overlapping or apart THEN a capture comes with the first that makes the steps enough."""
    policy = make_policy({**CAPTURING, "for": f"{wanted} steps"}, captures_per_hour=1000)
    state, first_step, who, steps = BEGUN, 0, None, set()
    for change, stride in windows:
        first_step += stride
        verdict = make_verdict(first_step=first_step, **change)
        decision, state = decide(verdict, policy, state, NOW)
        if change is HELD:
            assert decision.outcome == "hold"
            continue
        named = verdict.suspects[0].ranks if verdict.label == "suspect" else None
        steps = (steps if named == who else set()) | set(range(first_step, first_step + 50))
        who = named
        if named is not None:
            assert (decision.reason == "pending") == (len(steps) < wanted)
            # (running captures end at once, so that nothing else keeps the rule from it)
            state = replace(state, running={}, fired_s={})


TELL = {"notify": [{"webhook": {"url_from_env": "A"}}], "cooldown": "10m"}
TELLING = {"name": "slower", "match": {"reason": "regressed"}, **TELL}
SLOWER = Regression(640, 632, 655, 0.21, "all", ("backward",), 0.05)


def regressed(found=SLOWER, label="needs_evidence", **about):
    reasons = ("regressed",) if label == "needs_evidence" else ()
    ranks = (2,) if label == "suspect" else None
    return replace(make_verdict(label, ranks=ranks, reasons=reasons, **about), regression=found)


def test_a_regression_notifies_once_per_cooldown_and_captures_nothing():
    policy = make_policy(TELLING, {"name": "any", "match": {}, "capture": {}})
    decision, state = decide(regressed(), policy, State(), NOW)
    # THEN it is held, under the rule that matched
    assert (decision.outcome, decision.reason, decision.rule) == ("hold", "undecided", "slower")
    assert (decision.notify, decision.requests) == (("slower",), ())
    # AND notified again after the cooldown, while it lasts
    assert decide(regressed(), policy, state, NOW + 599)[0].notify == ()
    assert decide(regressed(), policy, state, NOW + 600)[0].notify == ("slower",)


def test_a_slow_link_is_held_and_notifies_once_per_cooldown_if_it_costs_enough():
    # GIVEN a rule on slow links that cost 10 ms, and one that would capture any suspect
    match = {"reason": "slow_link", "gain": ">= 10ms"}
    policy = make_policy({**TELLING, "name": "link", "match": match}, {"name": "any", "match": {}, "capture": {}})
    link = SlowLink("node-b", "", "send", 2e8, 9e9, "peers", 0.02)
    slow = replace(make_verdict("needs_evidence", reasons=("slow_link",)), link=link)
    # WHEN a window has one THEN it is held for that, and notified once
    decision, state = decide(slow, policy, State(), NOW)
    assert (decision.outcome, decision.rule, decision.notify) == ("hold", "link", ("link",))
    assert decision.parameters["reasons"] == ("slow_link",)
    assert decide(slow, policy, state, NOW + 599)[0].notify == ()
    # AND not if it costs less
    assert decide(replace(slow, link=replace(link, cost_s=0.009)), policy, State(), NOW)[0].notify == ()


def test_the_end_of_a_regression_notifies_if_its_beginning_did():
    policy, over = make_policy(TELLING), replace(SLOWER, until_step=900)
    # GIVEN no message about the beginning THEN none about the end
    decision, state = decide(regressed(over, "healthy"), policy, State(), NOW)
    assert decision.notify == ()
    # WHEN there was one THEN the end has one too, within the cooldown, once
    _, state = decide(regressed(), policy, state, NOW)
    decision, state = decide(regressed(over, "healthy"), policy, state, NOW + 60)
    assert (decision.outcome, decision.notify) == ("ignore", ("slower",))
    assert decide(regressed(over, "healthy"), policy, state, NOW + 70)[0].notify == ()
    # AND one that recurred within the cooldown without a message ends without one
    decision, state = decide(regressed(), policy, state, NOW + 80)
    assert decision.notify == ()
    assert decide(regressed(over, "healthy"), policy, state, NOW + 90)[0].notify == ()
    # AND the state comes back as it was
    assert State.from_json(state.to_json()) == state


def test_a_regression_notifies_beside_a_suspects_capture():
    policy = make_policy(TELLING, {"name": "a", "match": {}, "capture": {}, **TELL})
    decision, _ = decide(regressed(label="suspect"), policy, State(), NOW)
    assert (decision.outcome, decision.rule) == ("capture", "a")
    assert decision.notify == ("slower", "a")


def test_a_regression_matches_by_slowdown_and_stage():
    def is_notified(**match):
        policy = make_policy({**TELLING, "match": {"reason": "regressed", **match}})
        return bool(decide(regressed(), policy, State(), NOW)[0].notify)

    # (21 % of 50 ms are 10.5 ms)
    assert is_notified(gain=">= 20% and >= 10ms")
    assert not is_notified(gain=">= 25%")
    assert not is_notified(gain=">= 11ms")
    assert is_notified(stage=["forward", "backward"])
    assert not is_notified(stage=["data"])


def test_a_regression_rule_matches_no_suspect():
    policy = make_policy(TELLING)
    decision, _ = decide(make_verdict(), policy, State(), NOW)
    assert (decision.outcome, decision.reason, decision.notify) == ("ignore", "no_rule_matched", ())
