"""What the status of each object says, of policies, captures and reports, and the events of a report."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import jsonschema
import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sftriage.kube import statuses
from sftriage.kube.jobs import JobRef
from sftriage.kube.objects import MAX_CAPTURES, MAX_HOLDS, capture_of, condition
from sftriage.kube.statuses import KnownCapture, capture_status, controller_down, pod_trouble, report_status
from sftriage.model.captures import CaptureResult, CaptureState
from sftriage.model.events import CostMeasured, Difference, DifferencesFound, RemedyChanged
from sftriage.policy.in_force import find, shipped
from sftriage.policy.parsing import PolicyError, parse
from sftriage.policy.schema import TriagePolicy
from sftriage.policy.state import Losses, SuspectLoss
from sftriage.runs.decisions import row_of
from sftriage.runs.directory import RunInfo
from sftriage.runs.liveness import RankCoverage
from sftriage.runs.source import View
from sftriage.traces.manifest import CauseInfo, CostInfo, ReproducedInfo
from sftriage.words.run import Health
from sftriage.words.verdicts import clock
from tests.scenario import decision, held, row, verdict
from tests.unit.conftest import cases, manifest_of
from tests.unit.hanging import FOUND, NEXT_STEP, SENTENCE, WHOLE_JOB, put_hang
from tests.unit.kube.objects import NOW_S, made, refused

HERE = Path(__file__).parent
RULE = {"name": "slow", "match": {}, "capture": {}}


def body(name="p", *rules, created="2027-01-15T07:00:00Z", generation=1, status=None, **spec):
    managed = [{"manager": "kubectl", "fieldsV1": {"f:spec": {".": {}, "f:rules": {}}}, "operation": "Update"}]
    metadata = {"name": name, "namespace": "ml", "uid": "7d", "resourceVersion": "5", "generation": generation}
    metadata |= {"creationTimestamp": created, "managedFields": managed, "labels": {"team": "ml"}, "selfLink": ""}
    made = {"apiVersion": "sftriage.dev/v1alpha1", "kind": "TriagePolicy", "metadata": metadata}
    return {**made, "spec": {"rules": list(rules or (RULE,)), **spec}, **({"status": status} if status else {})}


def standing_of(found):
    """Each policy's conditions, as (Accepted, Conflicted)."""
    return {
        one.body["metadata"]["name"]: tuple(f"{each.status} {each.reason}" for each in one.status.conditions)
        for one in found
    }


@pytest.mark.parametrize("name", sorted(shipped()))
def test_a_served_policy_equals_the_policy_of_its_file(name):
    """GIVEN a shipped policy as a server has it, status and all THEN it is the policy of the file."""
    file = yaml.safe_load(find(name).read_text())
    served = {**body(name), "spec": file["spec"], "status": {"conditions": [{"type": "Accepted"}]}}
    assert statuses.loaded(served).policy == parse(find(name).read_bytes(), name).policy
    # AND so is what `kubectl get -o yaml` writes
    assert parse(yaml.safe_dump(served), "x.yaml").policy == statuses.loaded(served).policy


def test_fields_that_kubectl_adds_are_accepted():
    text = "apiVersion: sftriage.dev/v1alpha1\nkind: TriagePolicy\nmetadata:\n  name: p\n  creationTimestamp: null\n"
    assert parse(f"{text}spec: {{rules: [{{name: r, match: {{}}}}]}}\nstatus: {{}}\n", "p.yaml").places
    # BUT what is nobody's is still a mistake
    with pytest.raises(PolicyError, match=r"metadata\.nmae: unknown field"):
        parse(text.replace("creationTimestamp: null", "nmae: p") + "spec: {}\n", "p.yaml")


def test_the_json_schema_accepts_metadata_of_a_cluster():
    policy = {**body(), "metadata": {"name": "p", "namespace": "ml", "labels": {"a": "b"}, "annotations": {"c": "d"}}}
    validator = jsonschema.Draft202012Validator(TriagePolicy.model_json_schema(by_alias=True))
    assert list(validator.iter_errors(policy)) == []
    policy["metadata"]["nmae"] = "p"
    assert [one.json_path for one in validator.iter_errors(policy)] == ["$.metadata"]


MISTAKES = {
    "a misspelt field": (body("p", {**RULE, "capture": {"stepz": 5}}), "spec.rules[0].capture.stepz: unknown field"),
    "null": (body("p", retention=None), "spec.retention: the field has no value; set one, or remove the field"),
    "no spec": ({**body("p"), "spec": None}, "spec: the field has no value; set one, or remove the field"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_an_invalid_policy_has_the_messages_of_policy_validate(mistake):
    served, said = mistake
    (found,) = statuses.policy_states([served], NOW_S)
    assert standing_of([found]) == {served["metadata"]["name"]: ("False Invalid", "Unknown Invalid")}
    message = found.status.conditions[0].message
    assert said in message
    # AND `sftriage policy validate` says the same of the file, with the place besides
    file = {**served, "metadata": {"name": served["metadata"]["name"]}}
    with pytest.raises(PolicyError) as refused:
        parse(yaml.safe_dump(file, sort_keys=False), "p.yaml")
    assert message == "\n".join(f"{one.path}: {one.message}" for one in refused.value.problems)
    assert not found.in_force


OLD, NEW = "2027-01-15T07:00:00Z", "2027-01-15T08:00:00Z"
FINE, INVALID = ("True Valid", "False InForce"), ("False Invalid", "Unknown Invalid")
CONFLICT = ("True Valid", "True Conflicts")
OTHER = {**RULE, "name": "other"}
TOGETHER = {
    "one": ([body("a")], {"a": FINE}),
    "two that have nothing in common": ([body("a"), body("b", OTHER)], {"a": FINE, "b": FINE}),
    "a rule of one name": ([body("a", created=NEW), body("b", created=OLD)], {"b": FINE, "a": CONFLICT}),
    "at the same time": ([body("b"), body("a")], {"a": FINE, "b": CONFLICT}),
    "other windows": (
        [body("a", created=OLD), body("b", OTHER, created=NEW, detection={"window_steps": 100})],
        {"a": FINE, "b": CONFLICT},
    ),
    "what is not valid forbids nothing": ([body("a", RULE, RULE), body("b", created=NEW)], {"a": INVALID, "b": FINE}),
    "what is not in force forbids nothing": (
        [body("a", created=OLD), body("b", RULE, OTHER, created=NEW), body("c", OTHER, created="2027-02-01T00:00:00Z")],
        {"a": FINE, "b": CONFLICT, "c": FINE},
    ),
    "none": ([], {}),
}


@pytest.mark.parametrize("case", TOGETHER.values(), ids=TOGETHER)
def test_the_oldest_policies_are_in_force(case):
    bodies, expected = case
    found = statuses.policy_states(bodies, NOW_S)
    assert standing_of(found) == expected
    assert [one.in_force for one in found] == [conditions == FINE for conditions in expected.values()]


def test_a_conflict_names_the_other_policy():
    _, newer = statuses.policy_states([body("a", created=OLD), body("b", created=NEW)], NOW_S)
    assert newer.status.conditions[1].message == (
        "Not in force: an older policy of its namespace forbids it.\n"
        "spec.rules[0].name: a second rule named 'slow'; the first is spec.rules[0] of a"
    )


def test_a_status_is_written_once_with_the_time_of_its_change():
    # GIVEN a policy whose status is as it should be
    (first,) = statuses.policy_states([body()], NOW_S)
    assert first.changed
    served = body(status=first.status.plain())
    # THEN nothing is written an hour later
    (again,) = statuses.policy_states([served], NOW_S + 3600)
    assert not again.changed
    # AND where it is not valid any more, that is so since then, and of that generation
    broken = {**served, "spec": {"rules": []}, "metadata": {**served["metadata"], "generation": 2}}
    (later,) = statuses.policy_states([broken], NOW_S + 3600)
    assert later.changed
    assert [one.lastTransitionTime for one in later.status.conditions] == ["2027-01-15T09:00:00Z"] * 2
    assert later.status.observedGeneration == 2
    assert {one.observedGeneration for one in later.status.conditions} == {2}


@pytest.mark.parametrize("status", [5, [], {"conditions": 5}, {"conditions": [5, {"type": "Accepted"}]}])
def test_an_unreadable_status_is_replaced(status):
    served = {**body(), "status": status}
    (found,) = statuses.policy_states([served], NOW_S)
    assert found.changed
    assert condition(served, "Accepted") is None


def test_thousands_of_mistakes_fit_into_a_condition():
    rules = [{"name": f"r{number}", "match": {f"x{'y' * 900}": 1}} for number in range(999)]
    (found,) = statuses.policy_states([body("p", *rules)], NOW_S)
    message = found.status.conditions[0].message
    assert len(message) <= 32_768
    assert refused("TriagePolicy", "status", found.status.plain()) == ""


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(spec=plain, rule=plain)
def test_the_status_of_any_policy_is_valid(spec, rule):
    bodies = [{**body("a"), "spec": spec}, {**body("b"), "spec": {"rules": [rule]}}, body("c")]
    before = copy.deepcopy(bodies)
    for one in statuses.policy_states(bodies, NOW_S):
        assert refused("TriagePolicy", "status", one.status.plain()) == ""
    assert bodies == before


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
    if reproduced is not None:
        about["reproduced"] = ReproducedInfo(answer=reproduced, steps=5, steps_with=3, over_s=0.02, expected_s=0.02)
    manifest = manifest.model_copy(update=about)
    took = result("stored", first_step=160, last_step=164)
    return KnownCapture(took, manifest, STORE, f"resnet/run-1/{manifest.capture_id}")


def seen_of(state: str = "", detail: str = "", reproduced: str | None = None, role: str = "", trace: bool = False):
    """What is known of a capture: how far it is, and, once it is stored, its manifest."""
    if not (trace or reproduced):
        return KnownCapture(result(state, detail)) if state else KnownCapture()
    of = stored(reproduced)
    about = of.manifest.capture.model_copy(update={"role": role} if role else {})
    return replace(of, manifest=of.manifest.model_copy(update={"capture": about}))


CAPTURES = cases(HERE / "captures.txt")


def test_the_table_has_every_state():
    assert {said.split(";")[0] for _, said in CAPTURES} == {"requested", *get_args(CaptureState)}


@pytest.mark.parametrize(("given", "expected"), CAPTURES)
def test_the_conditions_of_a_capture(given, expected):
    about = yaml.safe_load(f"{{{given}}}")
    status = capture_status(capture(about.pop("spec", ASKED)), seen_of(**about), NOW_S)
    found = [f"{one.type} {one.status} {one.reason}: {one.message}" for one in status.conditions]
    found += [f"its steps have it: {status.reproduced}"] if status.reproduced else []
    assert "; ".join([status.state, *found]).replace("\n", " / ") == expected
    assert refused("TraceCapture", "status", status.plain()) == ""


def test_the_status_of_a_stored_capture_is_complete():
    sleeps = CauseInfo(code="sleep", sure=True, sentence="Rank 2 sleeps.", next_step="Look.")
    cost = CostInfo(first_step=158, last_step=165, cost_s=0.5, before_s=0.1)
    seen = stored("yes", cost=cost)
    seen = replace(seen, manifest=seen.manifest.model_copy(update={"findings": SimpleNamespace(cause=sleeps)}))
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


def test_captures_of_people_and_policies_are_valid():
    for spec in (ASKED, FIRED, {**ASKED, "profiler": "torch", "steps": 8, "torch": {"record_shapes": True}}):
        found, wrong = capture_of({"spec": spec})
        assert (found is not None, wrong) == (True, "")
        assert refused("TraceCapture", "spec", spec) == ""


@pytest.mark.parametrize(("given", "expected"), cases(HERE / "removals.txt"))
def test_the_removal_of_the_trace_of_a_deleted_capture(given, expected):
    about = yaml.safe_load(f"{{{given}}}")
    deleted = capture(status=about.get("status"), deletionTimestamp="2027-01-15T08:00:00Z")
    found = statuses.removal(deleted, NOW_S + about.get("later_s", 0))
    action = "remove" if found.stored is not None else "wait" if found.wait_s > 0 else "release"
    assert f"{action}: {found.words}" == expected


text = st.text(max_size=3000)


@given(
    detail=text,
    host=text,
    steps=st.tuples(st.integers(0, 2**53), st.integers(0, 2**53)),
    cost=st.floats() | st.none(),
    state=st.sampled_from(get_args(CaptureState)),
    reproduced=st.sampled_from(["yes", "no", "partly", None]),
)
def test_the_status_of_any_capture_is_valid(detail, host, steps, cost, state, reproduced):
    seen = stored(reproduced, cost=CostInfo.model_construct(cost_s=cost))
    about = seen.manifest.capture.model_copy(update={"host": host})
    took = result(state, detail, first_step=steps[0], last_step=steps[1])
    seen = replace(seen, manifest=seen.manifest.model_copy(update={"capture": about}), result=took)
    status = capture_status(capture(), seen, NOW_S)
    assert refused("TraceCapture", "status", status.plain()) == ""


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


def test_GIVEN_a_hang_THEN_the_report_has_its_reason_and_the_next_step(tmp_path):
    of = replace(verdict(60, "stalled", reasons=("in_sync",)), last_step=60)
    stall = row_of(of, decision(of, "capture", "rule_matched", requests=(WHOLE_JOB,)))
    stored = {"captures": (put_hang(tmp_path),), "states": {"c-9": CaptureResult("c-9", 2, "stored")}}
    status, plain = status_of(view(HEALTHY, stall, notes=(FOUND,), **stored))
    assert (status.health, status.summary) == ("stalled", f"{SENTENCE} {NEXT_STEP}")
    assert status.captures[0].cause == SENTENCE
    healthy = condition({"status": plain}, "Healthy")
    assert (healthy.status, healthy.message) == ("False", f"Stalled. {SENTENCE}")


def test_GIVEN_a_suspect_that_differs_THEN_the_report_says_in_what():
    differing = DifferencesFound(NOW_S, 0, "rank 2", (2,), (0, 1), (Difference("num_workers", 1, 4, 2),))
    (status, _), (other, _) = (status_of(view(HEALTHY, SLOW, notes=(each,))) for each in (differing, FOUND))
    assert status.summary == f"{other.summary} What differs on rank 2: 1 loader worker, the other ranks have 4."


@pytest.mark.parametrize("case", STANDS.values(), ids=STANDS)
def test_the_conditions_of_a_report(case):
    seen, health, *expected = case
    status, _ = status_of(seen)
    assert status.health == health
    assert [f"{one.type} {one.status} {one.reason}" for one in status.conditions] == [
        f"Healthy {expected[0]}",
        f"Watched {expected[1]}",
    ]
    assert all(one.message.strip() for one in status.conditions)


def test_the_report_of_a_slow_job_is_complete():
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
    assert plain["cost"] == {"stragglers_s": 0.9, "stragglers_rank_hours": 0.001, "captures_s": 1.5}


def test_a_chronic_straggler_is_reported_with_advice_and_remedy():
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
    assert status.advice.words.startswith("Give it less work. Saves ")
    assert (plain["remedy"]["state"], plain["remedy"]["rank"], plain["remedy"]["saves_s"]) == ("kept", 2, 0.05)
    # AND neither is where nobody stays slow
    assert {"advice", "remedy"}.isdisjoint(status_of(view(HEALTHY))[1])


def test_a_report_is_bounded():
    # GIVEN thousands of windows held for ever other reasons, in long sentences, and thousands of captures
    rows = [replace(held_row(10 * n, f"reason-{n % 500}"), words="é" * 5000, resolves="é" * 5000) for n in range(3000)]
    states = {f"c{n}": CaptureResult(f"c{n}", n, "failed") for n in range(3000)}
    status, plain = status_of(view(*rows, states=states))
    assert (len(status.holds), len(status.captures)) == (MAX_HOLDS, MAX_CAPTURES)
    assert (status.windows, status.windows_held, status.captures_total) == (3000, 3000, 3000)
    assert status.captures[0].capture_id == "c2999"
    assert len(json.dumps(plain, ensure_ascii=False).encode()) < LARGEST_BYTES


any_text = st.text(max_size=600) | st.just("\ud800")


@given(
    words=any_text,
    sentence=any_text,
    named=any_text,
    gain_s=st.floats(),
    exposed_s=st.floats(),
    reasons=st.lists(any_text, max_size=20),
)
def test_the_status_of_any_report_is_valid(words, sentence, named, gain_s, exposed_s, reasons):
    suspects = tuple(replace(one, gain_s=gain_s) for one in SLOW.suspects)
    about = {"words": words, "sentence": sentence, "resolves": words, "exposed_s": exposed_s, "suspects": suspects}
    slow = replace(SLOW, **about, named=named or "x", reasons=tuple(reasons))
    _, plain = status_of(view(HEALTHY, slow))
    assert json.dumps(plain, allow_nan=False).encode()


DAY_S = 86_400.0
OUTDATED = [
    # (when it was made, and changed; its owners; whether it is removed)
    ((8, 9), [], True),
    ((8, 6), [], False),
    ((6,), [], False),
    ((8,), [], True),
    ((8, 9), [{"kind": "Job"}], False),
]


@pytest.mark.parametrize(("days", "owners", "old"), OUTDATED)
def test_old_reports_without_an_owner_are_removed(days, owners, old):
    """GIVEN a report that was made, and changed, so many days ago THEN after a week without news and owner it is old"""
    made_at, *changed = (clock(NOW_S - one * DAY_S) for one in days)
    said = {"type": "Watched", "status": "False", "reason": "Ended", "message": "over"}
    body = {
        "metadata": {"creationTimestamp": made_at, "ownerReferences": owners},
        "status": {"conditions": [{**said, "lastTransitionTime": one} for one in changed]},
    }
    assert statuses.outdated(body, NOW_S, 7 * DAY_S) is old


JOB = JobRef("jobset", "pretraining", "ml")


def status(health="suspect", remedy=None, **captures):
    found = [{"capture_id": name, "rank": 2, "state": state} for name, state in captures.items()]
    of = {"remedy": "pipeline", "state": remedy, "rank": 1, "words": f"It is {remedy}."}
    return {"health": health, "summary": "It stands so.", "captures": found, **({"remedy": of} if remedy else {})}


@pytest.mark.parametrize(("given", "expected"), cases(HERE / "news.txt"))
def test_a_change_is_reported_once(given, expected):
    before, now = yaml.safe_load(f"[{given}]")
    found = statuses.news(status(**before) if before else {}, status(**now), JOB)
    assert ("; ".join(f"{one.kind} {one.reason}: {one.message}" for one in found) or "nothing") == expected


HEALTHS = st.sampled_from(get_args(Health))
OF_EACH = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(get_args(CaptureState)))


@given(st.lists(st.builds(lambda health, captures: status(health, **captures), HEALTHS, OF_EACH), max_size=40))
def test_a_job_has_few_events(course):
    """GIVEN any course of a job THEN its events have a dozen names at most, and each counts how often it was so."""
    served, count = {}, 0
    report = made("TriageReport", JOB.object_name, {"job": "pretraining"})
    for before, now in zip([{}, *course], course, strict=False):
        for one in statuses.news(before, now, JOB):
            name = statuses.event_name(JOB, one.reason)
            served[name] = statuses.event_body(JOB, report, one, served.get(name, {}), 1, NOW_S)
            count += 1
    assert len(served) <= len(get_args(Health)) + 2
    assert sum(one["count"] for one in served.values()) == count
    assert all(0 < len(one["message"]) <= 1024 for one in served.values())


def pod(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", "namespace": "n"}, "spec": {"nodeName": "gpu-1"}, "status": status}


def container(name: str, restarts: int = 0, **states: Any) -> dict[str, Any]:
    return {"name": name, "restartCount": restarts, "state": {}, **states}


def is_ready(pod: str, containers: str) -> list[dict[str, str]]:
    return [{"type": "Ready", "status": pod}, {"type": "ContainersReady", "status": containers}]


PULLS = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}}
KILLED = {"lastState": {"terminated": {"reason": "OOMKilled"}}}
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no nodes"}


@pytest.mark.parametrize(
    ("body", "reason", "words"),
    [
        (pod(phase="Running", conditions=is_ready("True", "True")), None, ""),
        (pod(phase="Pending", containerStatuses=[container("a", state={"waiting": {"reason": "Creating"}})]), None, ""),
        (pod(phase="Pending", initContainerStatuses=[container("a", **PULLS)]), "ImageMissing", "p, container a: Back"),
        (pod(phase="Running", containerStatuses=[container("a", 2, **KILLED)]), "OutOfMemory", "2 restarts"),
        (
            pod(phase="Failed", reason="Evicted", message="over its limit."),
            "Evicted",
            "p: Evicted: over its limit. Make",
        ),
        (pod(phase="Pending", conditions=[UNSCHEDULABLE]), "Unschedulable", "no nodes"),
        (pod(phase="Running", conditions=is_ready("False", "True")), "NodeLost", "kubectl describe node gpu-1"),
        (pod(phase="Running", conditions=is_ready("False", "False")), None, ""),
    ],
)
def test_a_pod_that_does_not_run_has_a_reason_and_a_remedy(body, reason, words):
    found = pod_trouble(body)
    assert (None if found is None else found.reason) == reason
    assert found is None or words in found.words


def test_a_controller_is_down_if_its_pod_shows_why():
    """GIVEN a Deployment without a pod that is available THEN a report says why, unless its node is only silent"""
    deployment = {"metadata": {"name": "c", "namespace": "n"}, "status": {}}
    pulls = pod(phase="Pending", containerStatuses=[container("controller", **PULLS)])
    down = controller_down(deployment, [pulls])
    assert down is not None
    assert down[:3] == ("Watched", "False", "ControllerDown")
    assert controller_down(deployment, [pod(phase="Running", conditions=is_ready("False", "True"))]) is None
    assert controller_down({**deployment, "status": {"availableReplicas": 1}}, [pulls]) is None
    refused = {"conditions": [{"type": "ReplicaFailure", "message": "exceeded quota: small"}]}
    down = controller_down({**deployment, "status": refused}, [])
    assert down is not None
    assert "exceeded quota: small. Raise the quota" in down.message
