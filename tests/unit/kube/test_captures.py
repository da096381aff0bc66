"""What the status of a TraceCapture says, and what becomes of its trace when it is deleted."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.kube.objects import capture_of
from sftriage.kube.statuses import STORING_S, KnownCapture, capture_status, removal
from sftriage.model.captures import CaptureResult, CaptureState
from sftriage.traces.manifest import CauseInfo, CostInfo, ReproducedInfo
from tests.unit.conftest import manifest_of
from tests.unit.kube.objects import NOW_S, made, refused

ASKED = {"job": "resnet", "rank": 2, "reason": "why is the loader slow?"}
FIRED = {
    **ASKED,
    "profiler": "stacks",
    "trigger": {"policy": "default", "rule": "slow-rank", "stage": "data", "first_step": 100, "last_step": 149},
}
STORE = "s3://traces/team"


def capture(spec=ASKED, status=None, **metadata):
    return made("TraceCapture", "c", spec, status, **metadata)


def result(state: CaptureState, detail: str = "", **about) -> CaptureResult:
    return CaptureResult("w100-149-r2-slow-rank-1", 2, state, detail, **about)


def stored(reproduced: str | None = None, **about) -> KnownCapture:
    manifest = manifest_of("w100-149-r2-slow-rank-1")
    found = (
        None
        if reproduced is None
        else ReproducedInfo(answer=reproduced, steps=5, steps_with=3, over_s=0.02, expected_s=0.02)
    )
    manifest = manifest.model_copy(update={"reproduced": found, **about})
    took = result("stored", first_step=160, last_step=164)
    return KnownCapture(took, manifest, STORE, f"resnet/run-1/{manifest.capture_id}")


def control(reproduced: str) -> KnownCapture:
    of = stored(reproduced)
    beside = of.manifest.capture.model_copy(update={"role": "control"})
    return replace(of, manifest=of.manifest.model_copy(update={"capture": beside}))


def told(status):
    return {one.type: f"{one.status} {one.reason}" for one in status.conditions}


STATES = {
    "nobody has answered": (KnownCapture(), "requested", "Unknown Requested", "Unknown Requested", "Unknown NotYet"),
    "accepted": (KnownCapture(result("accepted")), "accepted", "True Accepted", "Unknown Accepted", "Unknown NotYet"),
    "armed": (KnownCapture(result("armed")), "armed", "True Accepted", "Unknown Armed", "Unknown NotYet"),
    "running": (KnownCapture(result("running")), "running", "True Accepted", "Unknown Running", "Unknown NotYet"),
    "failed": (
        KnownCapture(result("failed", "no kernels")),
        "failed",
        "True Accepted",
        "False Failed",
        "Unknown NoTrace",
    ),
    "refused": (
        KnownCapture(result("refused", "busy")),
        "refused",
        "False Refused",
        "False Refused",
        "Unknown NoTrace",
    ),
    "expired": (KnownCapture(result("expired")), "expired", "True Accepted", "False Expired", "Unknown NoTrace"),
    "stored, its manifest not seen yet": (
        *(KnownCapture(result("stored")), "stored", "True Accepted", "True Stored", "Unknown NotYet"),
    ),
    "stored": (stored(), "stored", "True Accepted", "True Stored", "Unknown NotJudged"),
    "with the fault": (stored("yes"), "stored", "True Accepted", "True Stored", "True Reproduced"),
    "with some of it": (stored("partly"), "stored", "True Accepted", "True Stored", "True PartlyReproduced"),
    "without it": (stored("no"), "stored", "True Accepted", "True Stored", "False NotReproduced"),
    "of a control": (control("yes"), "stored", "True Accepted", "True Stored", "Unknown Control"),
}


def test_every_state_is_in_the_table():
    assert {case[1] for case in STATES.values()} == {"requested", *get_args(CaptureState)}


@pytest.mark.parametrize("case", STATES.values(), ids=STATES)
def test_how_far_a_capture_is(case):
    seen, state, *expected = case
    status = capture_status(capture(), seen, NOW_S)
    assert status.state == state
    assert status.reproduced is None or expected[-1] != "Unknown Control"
    assert told(status) == dict(zip(("Accepted", "Stored", "Reproduced"), expected, strict=True))
    assert refused("TraceCapture", "status", status.plain()) == ""
    if seen.result is not None and seen.result.detail:
        assert all(seen.result.detail in one.message for one in status.conditions if one.status == "False")


def test_a_stored_capture_says_what_it_shows():
    sleeps = CauseInfo(code="sleep", sure=True, sentence="Rank 2 sleeps.", next_step="Look.")
    cost = CostInfo(first_step=158, last_step=165, cost_s=0.5, before_s=0.1)
    seen = stored("yes", cost=cost)
    seen = replace(seen, manifest=seen.manifest.model_copy(update={"findings": FakeFindings(sleeps)}))
    status = capture_status(capture(FIRED), seen, NOW_S).plain()
    assert status.pop("conditions")
    assert status == {
        "observedGeneration": 1,
        "state": "stored",
        "profiler": "torch",
        "host": "node-1",
        "first_step": 160,
        "last_step": 164,
        "reproduced": "yes",
        "cause": "Rank 2 sleeps.",
        "cost_s": 0.5,
        "stored": {
            "store": STORE,
            "reference": "resnet/run-1/w100-149-r2-slow-rank-1",
            "size_bytes": 7,
            "artefacts": [{"name": "trace.json.gz", "size_bytes": 7, "sha256": "ab" * 32}],
        },
    }


class FakeFindings:
    """As much of a capture's findings as a status asks for."""

    def __init__(self, cause: CauseInfo) -> None:
        self.cause = cause


MEANINGLESS = {
    "no rank": ({"job": "resnet", "reason": "x"}, "spec.rank: "),
    "a size that is none": ({**ASKED, "max_bytes": "1Ki"}, "spec.max_bytes: "),
    "options of another profiler": (
        {**ASKED, "profiler": "nsys", "torch": {}},
        "spec.torch: options of torch do nothing",
    ),
    "steps of a stall": (
        {**FIRED, "trigger": {**FIRED["trigger"], "label": "stalled"}, "steps": 5},
        "spec.steps: stacks of a rank that stands still are taken once",
    ),
    "a window that ends before it begins": (
        {**FIRED, "trigger": {**FIRED["trigger"], "first_step": 200}},
        "spec.trigger.last_step: comes before first_step",
    ),
    "nothing": (None, "spec: "),
}


@pytest.mark.parametrize(("spec", "said"), MEANINGLESS.values(), ids=MEANINGLESS)
def test_what_makes_no_sense_is_refused_with_why(spec, said):
    status = capture_status(capture(spec), KnownCapture(), NOW_S)
    assert status.state == "refused"
    assert told(status) == {"Accepted": "False Invalid", "Stored": "False Invalid", "Reproduced": "Unknown NoTrace"}
    assert said in status.conditions[0].message
    assert refused("TraceCapture", "status", status.plain()) == ""


def test_what_a_person_or_a_policy_asks_for_is_understood():
    for spec in (ASKED, FIRED, {**ASKED, "profiler": "torch", "steps": 8, "torch": {"record_shapes": True}}):
        found, wrong = capture_of({"spec": spec})
        assert (found is not None, wrong) == (True, "")
        assert refused("TraceCapture", "spec", spec) == ""


def test_conditions_say_since_when():
    first = capture_status(capture(), KnownCapture(result("running")), NOW_S)
    later = capture_status(capture(status=first.plain()), KnownCapture(result("stored")), NOW_S + 60)
    since = {one.type: one.lastTransitionTime for one in later.conditions}
    assert since == {
        "Accepted": "2027-01-15T08:00:00Z",
        "Stored": "2027-01-15T08:01:00Z",
        "Reproduced": "2027-01-15T08:00:00Z",
    }


WHERE = {"store": STORE, "reference": "resnet/run-1/w1", "size_bytes": 7, "artefacts": []}
DELETED = {"deletionTimestamp": "2027-01-15T08:00:00Z"}
LONGEST_S = 60 + STORING_S
REMOVALS = {
    "never answered": (None, 0, "release", "It has no trace."),
    "asked for": ({"state": "requested"}, 0, "release", "It has no trace."),
    "refused": ({"state": "refused"}, 0, "release", "It has no trace."),
    "failed": ({"state": "failed"}, 0, "release", "It has no trace."),
    "expired": ({"state": "expired"}, 0, "release", "It has no trace."),
    "stored": ({"state": "stored", "stored": WHERE}, 0, "remove", f"Its trace is in {STORE}, and is deleted there."),
    "stored, whatever else it says": ({"state": "running", "stored": WHERE}, 0, "remove", "Its trace is in "),
    "running": ({"state": "running"}, 0, "wait", f"Waiting for {LONGEST_S:.0f} s at most."),
    "armed": ({"state": "armed"}, 600, "wait", "Waiting for 60 s at most."),
    "running for longer than it can": ({"state": "running"}, LONGEST_S, "release", "It never said that it stored"),
    "stored somewhere": ({"state": "stored", "stored": {"store": STORE}}, 0, "wait", "cannot be read from its status"),
    "of a state that nobody knows": ({"state": "dreaming"}, 0, "release", "It has no trace."),
    "a status that is none": ("x", 0, "release", "It has no trace."),
}


@pytest.mark.parametrize("case", REMOVALS.values(), ids=REMOVALS)
def test_what_becomes_of_the_trace_of_a_deleted_capture(case):
    status, later_s, action, said = case
    found = removal(capture(status=status, **DELETED), NOW_S + later_s)
    assert found.action == action
    assert said in found.words
    assert (found.stored is not None) == (action == "remove")
    assert (found.wait_s > 0) == (action == "wait")


text = st.text(max_size=3000)


@given(
    detail=text,
    host=text,
    steps=st.tuples(st.integers(0, 2**53), st.integers(0, 2**53)),
    cost=st.floats() | st.none(),
    state=st.sampled_from(get_args(CaptureState)),
    reproduced=st.sampled_from(["yes", "no", "partly", None]),
)
def test_whatever_is_known_of_a_capture_its_status_is_one_that_the_server_takes(
    detail, host, steps, cost, state, reproduced
):
    seen = stored(reproduced, cost=CostInfo.model_construct(cost_s=cost))
    about = seen.manifest.capture.model_copy(update={"host": host})
    took = result(state, detail, first_step=steps[0], last_step=steps[1])
    seen = replace(seen, manifest=seen.manifest.model_copy(update={"capture": about}), result=took)
    status = capture_status(capture(), seen, NOW_S)
    assert refused("TraceCapture", "status", status.plain()) == ""
