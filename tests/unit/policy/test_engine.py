from dataclasses import replace
from typing import get_args

import pytest

from sftriage.errors import InputError
from sftriage.model.windows import SystemCode
from sftriage.policy.captures import trigger
from sftriage.policy.engine import decide
from sftriage.policy.state import GRACE_S, Running, State, finished
from sftriage.words.decisions import advice, reason_sentence, resolution
from sftriage.words.verdicts import RESOLVES

from .making import BEGUN, CAPTURING, NOW, make_policy, make_verdict, of

DATA_ONLY = {"name": "in", "match": {"stage": ["data", "h2d"], "gain": ">= 5% and >= 10ms"}, "capture": {}}
WITH_NSYS = {"name": "deep", "match": {"gain": ">= 5%"}, "capture": {"profiler": "nsys"}}
OBSERVING = {"name": "watch", "match": {"gain": ">= 1%"}}
ON_STALLS = {"name": "stalls", "match": {"label": "stalled"}}
ON_STALLED_DATA = {"name": "late", "match": {"label": "stalled", "stage": ["data"], "scope": ["rank"]}}
RUNNING_2 = {"w1-50-r2-x-1": Running(2, NOW + 60)}
RUNNING_7 = {"w1-50-r7-x-1": Running(7, NOW + 60)}
RUNNING_7_8 = {**RUNNING_7, "w1-50-r8-x-2": Running(8, NOW + 60)}


def case(said, *rules, state=None, **verdict):
    """What is said of a verdict, under some rules (of a slow rank, if none) and in a state: OUTCOME: REASON."""
    return verdict, rules or (CAPTURING,), state or {}, *said.split(": ", 1)


@pytest.mark.parametrize(
    ("verdict", "rules", "state", "outcome", "reason"),
    [
        case("ignore: healthy", label="healthy", ranks=None),
        case("ignore: healthy", label="healthy"),
        case("hold: co_critical, roaming", label="needs_evidence", reasons=("co_critical", "roaming")),
        case("hold: no reason given", label="needs_evidence", ranks=None),
        case("hold: suspect, but no rank is named", ranks=None),
        case("hold: suspect, but no rank is named", ranks=()),
        case("ignore: rule a does not match: its gain of 3.1% is under 5%", share=0.031),
        case("ignore: rule in does not match: its gain of 2 ms is under 10 ms", DATA_ONLY, gain_s=0.002),
        case("ignore: rule in does not match: its stage forward is not one of data, h2d", DATA_ONLY, stage="forward"),
        case(
            "ignore: rule a does not match: its scope all is not one of rank",
            {**CAPTURING, "match": {"scope": ["rank"]}},
            ranks=(0, 1, 2, 3),
        ),
        case("ignore: rule in does not match: a whole rank is not one of data, h2d", DATA_ONLY, stage=None),
        case(
            "ignore: rule a does not match: its gain of 2% is under 5%", DATA_ONLY, CAPTURING, share=0.02, stage="h2d"
        ),
        case("ignore: observe-only: rule watch matched", OBSERVING),
        case(
            "hold: waiting for a CPU: that is 83% of its lateness, and no trace of its own would show it",
            OBSERVING,
            CAPTURING,
            descheduled_fraction=0.83,
        ),
        case("capture: rule deep: ", CAPTURING, WITH_NSYS, descheduled_fraction=0.83),
        case(
            "hold: standing still, stopped as a whole (SIGSTOP): that is 90% of the lateness of rank 2, and no trace",
            descheduled_fraction=0.83,
            system=("stopped", 0.9),
        ),
        case("capture: rule deep: ", CAPTURING, WITH_NSYS, system=("cgroup_throttled", 0.6)),
        case("ignore: observe-only: rule watch matched", OBSERVING, system=("cgroup_throttled", 0.6)),
        # (a slow host is captured, on one of its ranks)
        case("capture: rule a: ", scope="host", ranks=(2, 3), system=("cgroup_throttled", 1.0)),
        case("capture: rule a: ", scope="host", ranks=(2, 3), descheduled_fraction=0.83),
        case("capture: rule a: ", host="node-b", system=("cgroup_throttled", 1.0)),
        case("hold: contention for CPUs, ", scope="host", ranks=(2, 3), contended_fraction=0.6),
        # (windows of 50 steps of 70 ms)
        case(
            "hold: contention for CPUs, which may pass: it may explain 60% of the lateness of rank 2, so far for 3.5 s "
            "of 30 s",
            contended_fraction=0.6,
        ),
        case("hold: contention for CPUs, which may pass", contended_fraction=0.6, first_step=5000, onset_step=122),
        case("capture: rule a: ", contended_fraction=0.4),
        case("capture: rule a: ", contended_fraction=0.6, pattern="recurring"),
        case("hold: contention for CPUs, which may pass: ", CAPTURING, WITH_NSYS, contended_fraction=0.6),
        case("hold: contention for CPUs, which may pass: ", OBSERVING, CAPTURING, contended_fraction=0.6),
        case("ignore: observe-only: rule watch matched", OBSERVING, contended_fraction=0.6),
        case("ignore: rule a does not match: its gain", contended_fraction=0.6, share=0.031),
        case("hold: waiting for a CPU: that is 83% of its", descheduled_fraction=0.83, contended_fraction=1.0),
        # A window that is held names nobody; what was counted of its candidate is so all the same.
        case(
            "hold: standing still, stopped as a whole (SIGSTOP): that is 90% of the lateness of rank 2, and no trace",
            CAPTURING,
            WITH_NSYS,
            label="needs_evidence",
            reasons=("intermittent",),
            system=("stopped", 0.9),
        ),
        case("hold: intermittent", label="needs_evidence", reasons=("intermittent",), descheduled_fraction=0.9),
        case("hold: self_inflicted", label="needs_evidence", reasons=("self_inflicted",), system=("stopped", 0.9)),
        case("ignore: observe-only: rule watch matched", OBSERVING, descheduled_fraction=0.83),
        case("capture: rule a: ", descheduled_fraction=0.4),
        case("hold: waiting for a CPU: that is 40% of its", descheduled_fraction=0.4, share=0.08),
        case(
            "throttle: cooldown of rule a until 2027-01-15T08:00:01Z", state={"fired_s": {"a rank 2 data": NOW - 599}}
        ),
        case("throttle: captures_per_hour: 4 of 4 captures asked for", state={"asked_s": (NOW,) * 4}),
        case("throttle: captures_per_day: 12 of 12 captures asked", state={"asked_s": (NOW - 9000,) * 12}),
        case("capture: rule a: ", state={"captures": 1000}),
        case("throttle: rank 2 is being captured already (w1-50-r2-x-1)", state={"running": RUNNING_2}),
        case(
            "throttle: concurrent_ranks: 2 of at most 2 ranks are being captured, and 1 more asked for",
            state={"running": RUNNING_7_8},
        ),
        case(
            "throttle: concurrent_ranks: 1 of at most 2 ranks are being captured, and 2 more asked for",
            {**CAPTURING, "capture": {"sample": 2}},
            state={"running": RUNNING_7},
            ranks=(2, 3),
        ),
        case("capture: rule a: ", state={"running": RUNNING_7}),
        case("capture: rule a: mending data of rank 2 would save 20 ms a step (30%), in 90% of the steps"),
        case(
            "capture: rule a: mending all local stages of 4 ranks would save 20 ms a step (30%), in 90% of the steps",
            stage=None,
            ranks=(0, 1, 2, 3),
        ),
        case("capture: rule a: ", share=0.05),
        # (whether it is one stage or all of them may change from window to window)
        case("throttle: cooldown of rule a until", state={"fired_s": {"a rank 2 *": NOW}}),
        case(
            "throttle: cooldown of rule a until",
            state={"fired_s": {"a rank 2 data": NOW, "a rank 21 data": NOW}},
            stage=None,
        ),
        case("capture: rule a: ", state={"fired_s": {"a rank 21 data": NOW}}, stage=None),
        # (and so may the stage of a host, and which of its ranks stands out)
        case("throttle: cooldown of rule a", state={"fired_s": {"a host 2-3 *": NOW}}, stage="forward"),
        case("capture: rule a: ", state={"fired_s": {"a host 3-4 *": NOW}}),
        case("throttle: cooldown of rule a", state={"fired_s": {"a host 2-3 *": NOW}}, scope="host", ranks=(2, 3)),
        case("capture: rule a: ", state={"fired_s": {"a rank 2 h2d": NOW}}),
        case("capture: rule a: ", state={"fired_s": {"a rank 2 data": NOW - 600}}),
        case("capture: rule a: ", state={"fired_s": {"a rank 3 data": NOW}}),
        case("capture: rule a: ", state={"fired_s": {"other rank 2 data": NOW}}),
        case("capture: rule in: ", DATA_ONLY, CAPTURING),
        case("capture: rule a: ", DATA_ONLY, CAPTURING, stage="forward"),
        case("capture: rule a: ", OBSERVING, CAPTURING),
    ],
)
def test_truth_table(verdict, rules, state, outcome, reason):
    decision, _ = decide(make_verdict(**verdict), make_policy(*rules), State(**state), NOW)
    assert (decision.outcome, reason_sentence(decision)[: len(reason)]) == (outcome, reason)
    assert bool(decision.requests) == (outcome == "capture")
    held = decision.reason in ("contended", *get_args(SystemCode))
    advised = outcome == "throttle" or held or bool(verdict.get("reasons"))
    assert bool(resolution(decision)) == advised


def stall(said, *rules, rule=None, **verdict):
    """The same of a step that stands still, and by which rule."""
    return verdict, rules or (CAPTURING,), *said.split(": ", 1), rule


@pytest.mark.parametrize(
    ("verdict", "rules", "outcome", "reason", "rule"),
    [
        stall("hold: not_arrived: rank 2 in data", reasons=("not_arrived",)),
        stall("hold: not_arrived: rank 2 in data", CAPTURING, OBSERVING, reasons=("not_arrived",)),
        stall(
            "ignore: observe-only: rule stalls matched, not_arrived: rank 2 in data",
            CAPTURING,
            ON_STALLS,
            rule="stalls",
            reasons=("not_arrived",),
        ),
        stall(
            "ignore: observe-only: rule late matched, died: rank 2 in data",
            ON_STALLED_DATA,
            ON_STALLS,
            rule="late",
            reasons=("died",),
        ),
        stall("hold: not_arrived: rank 2 in forward", ON_STALLED_DATA, reasons=("not_arrived",), stage="forward"),
        stall("hold: not_arrived: 2 ranks in all local stages", reasons=("not_arrived",), ranks=(4, 5), stage=None),
        # Nobody is named, and a rule that asks for somebody is about something else
        stall("hold: in_sync", reasons=("in_sync",), ranks=None),
        stall("hold: in_sync", ON_STALLED_DATA, reasons=("in_sync",), ranks=None),
        stall(
            "ignore: observe-only: rule stalls matched, in_sync",
            ON_STALLED_DATA,
            ON_STALLS,
            rule="stalls",
            reasons=("in_sync",),
            ranks=None,
        ),
    ],
)
def test_a_stall_is_held_or_observed_with_advice_and_never_captured(verdict, rules, outcome, reason, rule):
    decision, state = decide(make_verdict("stalled", **verdict), make_policy(*rules), BEGUN, NOW)
    assert (decision.outcome, reason_sentence(decision), decision.rule) == (outcome, reason, rule)
    assert (decision.label, decision.requests, state) == ("stalled", (), BEGUN)
    assert resolution(decision) == advice(verdict["reasons"])


def test_a_stall_with_many_suspects_names_the_first_and_counts_the_others():
    verdict = make_verdict("stalled", reasons=("not_arrived",))
    others = (replace(verdict.suspects[0], ranks=(3,)), replace(verdict.suspects[0], ranks=(4, 5)))
    decision, _ = decide(replace(verdict, suspects=verdict.suspects + others), make_policy(CAPTURING), State(), NOW)
    assert reason_sentence(decision) == "not_arrived: rank 2 in data and 3 more"


def test_a_capture_carries_the_bounds_of_its_rule_and_is_remembered():
    capture = {"steps": 7, "warmup_steps": 2, "max_seconds": 30, "max_bytes": "2Mi", "profiler": "torch"}
    capture["torch"] = {"record_shapes": True}
    policy = make_policy({"name": "a", "match": {"gain": ">= 5%"}, "capture": capture, "cooldown": "90s"})
    decision, state = decide(make_verdict(attempt=1), policy, replace(BEGUN, captures=1, asked=1), NOW)
    (request,) = decision.requests
    assert request.capture_id == "w100-149-r2-a-a1-2"
    assert (request.rank, request.profiler, request.steps, request.warmup_steps) == (2, "torch", 7, 2)
    assert (request.max_seconds, request.max_bytes) == (30.0, 2 * 2**20)
    assert request.options == {
        "sample_stacks": True,
        "samples_per_second": 200,
        "record_shapes": True,
        "with_stack": False,
        "profile_memory": False,
    }
    assert (decision.rule, decision.time_s, decision.attempt) == ("a", NOW, 1)
    assert decision.numbers == {
        "exposed_s": 0.07,
        "gain_s": 0.02,
        "share": 0.3,
        "persistence": 0.9,
        "min_share": 0.05,
        "min_gain_s": 0.0,
        "cooldown_s": 90.0,
        "sample": 1,
        "control_ranks": 0,
        "captures": 1,
        "captures_last_hour": 0,
        "captures_per_hour": 4,
        "captures_last_day": 0,
        "captures_per_day": 12,
        "largest_gain_s": 0.0,
        "running_ranks": 0,
        "concurrent_ranks": 2,
        "spent_s": 0.0,
        "budget_s": 5.0,
        "overhead_budget": 0.005,
    }
    assert state == State(
        captures=2,
        asked=2,
        asked_s=(NOW,),
        running={
            request.capture_id: Running(
                2, NOW + 30 + GRACE_S, "a", NOW, suspect="rank 2 data", gain_s=0.02, attempt=1, profiler="torch"
            )
        },
        largest_gain_s=0.02,
        started_s=NOW - 1000,
    )


def test_capture_ids_stay_file_names_and_stay_apart():
    """GIVEN the longest names and numbers there can be THEN ids are valid, and one window twice gives two."""
    rule = {"name": "r" * 63, "match": {}, "capture": {}, "cooldown": "0s"}
    policy = make_policy(rule, captures_per_run=10_000)
    verdict = make_verdict(ranks=(2**31 - 1,), first_step=2**63 - 50, attempt=2**31)
    first, state = decide(verdict, policy, State(captures=9998), NOW)
    state = finished(state, of(first.requests[0].capture_id, "stored"), NOW)
    second, _ = decide(verdict, policy, state, NOW)
    ids = {first.requests[0].capture_id, second.requests[0].capture_id}
    assert len(ids) == 2
    assert max(map(len, ids)) <= 100


def test_a_trigger_links_window_suspect_rule_and_policy():
    loaded = make_policy(CAPTURING)
    decision, _ = decide(make_verdict(), loaded, BEGUN, NOW)
    found = trigger(make_verdict(), loaded, decision, decision.requests[0])
    assert (found.first_step, found.last_step, found.label, found.scope) == (100, 149, "suspect", "rank")
    assert (found.ranks, found.stage, found.gain_s, found.share, found.persistence) == ((2,), "data", 0.02, 0.3, 0.9)
    assert (found.policy, found.policy_sha256, found.rule) == ("p", "ab" * 32, "a")


def test_what_would_resolve_a_reason_that_is_not_known_is_said_to_be_unknown():
    assert advice(("roaming", "new_reason")) == f"{RESOLVES['roaming']} There is no advice on 'new_reason' yet."


@pytest.mark.parametrize("text", ["", '{"captures": "1"}', '{"running": {"x": {"rank": 1}}}', '{"version": 2}'])
def test_what_is_no_state_is_refused(text):
    with pytest.raises(InputError, match="not the state of a policy engine"):
        State.from_json(text)


def test_deciding_changes_neither_verdict_nor_state():
    state = State(captures=1, fired_s={"a rank 5 data": NOW - 700}, running=RUNNING_2)
    before = replace(state, fired_s=dict(state.fired_s), running=dict(state.running))
    decide(make_verdict(ranks=(5,)), make_policy(CAPTURING), state, NOW)
    assert state == before
