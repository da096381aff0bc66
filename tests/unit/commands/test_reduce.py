"""`sftriage reduce`: JSON, text, and whether a trace agrees with its run."""

import json
from typing import Any

import pytest

from sftriage.errors import InputError
from sftriage.model.windows import StageSchema, StepRecord
from sftriage.reduce.stages import Names, outside_ns
from sftriage.reduce.together import read_all
from sftriage.runtime.reducing import load_signal
from sftriage.traces.manifest import ReproducedInfo
from sftriage.traces.store import LocalStore
from sftriage.trainer.layout import RingInfo
from sftriage.windows.logs import LogReader
from sftriage.windows.steplog import StepLog
from tests.scenario import of_rank
from tests.unit.conftest import run_in
from tests.unit.reduce.heavy import document, event, job_events, mark, recurring_events, reduced, write

SCHEMA = StageSchema.closed(("data", "forward", "backward", "optimizer"), ("backward",))
STEPS = range(100, 108)


def traces(tmp_path, slow=None, **about):
    """The traces of four ranks."""
    return [write(tmp_path / f"r{rank}.json", document(job_events(rank, slow), rank, 4, **about)) for rank in range(4)]


@pytest.fixture
def run(tmp_path):
    """The recording of the same steps, and one more before and after, in which rank 2 was late in data."""
    made = run_in(tmp_path / "run")
    made.policy_file.unlink()
    for rank in range(4):
        trace = reduced(tmp_path / "trace.json", job_events(rank, 2, first=99, steps=10), rank=rank, world_size=4)
        log = StepLog(made.steps, RingInfo(rank, 4, rank, 0, "resnet", "h", "", SCHEMA, 1, 2, 1, 1))
        outside = tuple(outside_ns(trace.steps, trace.spans, trace.schema)[0].tolist())
        measured = zip(trace.steps.number_N.tolist(), trace.durations_ns_NS.tolist(), strict=True)
        steps = [StepRecord(rank, number, 0, 50_000, tuple(each), outside, True, False) for number, each in measured]
        log.append(of_rank(1, *steps, schema=SCHEMA))
        log.close()
    return made


OURS = {"sftriage.job": "resnet", "sftriage.capture_id": "c-1"}


@pytest.fixture
def captured(run, tmp_path, make_manifest):
    """The capture of rank 2 in that run; its manifest says data is the suspect's stage."""
    path = write(tmp_path / "exported.json", document(job_events(2, 2), 2, 4, **OURS))
    LocalStore(run.path).put("c-1", path, lambda artefact: make_manifest("c-1", artefact, first_step=100))
    return run.path / "captures" / "c-1" / "trace.json.gz"


def test_all_ranks_are_accounted_and_what_filled_the_suspect_stage_is_listed(sftriage, tmp_path):
    # GIVEN the traces of all ranks, one of which is late in data
    found: dict[str, Any] = sftriage("reduce", *traces(tmp_path, slow=2), "--json").json
    # THEN each is reduced to stages that sum to its steps
    assert [trace["rank"] for trace in found["traces"]] == [0, 1, 2, 3]
    for trace in found["traces"]:
        assert [sum(durations) for durations in trace["durations_ns"]] == trace["step_ns"]
        assert (trace["steps"], trace["sync"], trace["origin"]) == (list(STEPS), ["backward"], "sftriage")
    # AND the accounting names rank and stage
    (suspect,) = found["verdict"]["suspects"][:1]
    assert (found["verdict"]["label"], suspect["ranks"], suspect["stage"]) == ("suspect", [2], "data")
    # AND its contents are compared with a healthy rank
    assert (found["findings"]["stage"], found["findings"]["suspect"]["rank"]) == ("data", 2)
    assert found["findings"]["control"]["rank"] != 2
    assert (found["refused"], found["agreement"], found["no_verdict"]) == ([], None, None)


@pytest.mark.parametrize(
    ("kept", "why"),
    [(0, "no collective in these traces"), (3, "no stage of these traces ends with a collective in most steps")],
)
def test_without_collectives_there_is_no_verdict_and_never_health(sftriage, tmp_path, kept, why):
    # GIVEN the traces of all ranks, one of which is late in data, with collectives in no step or in few
    files = []
    for rank in range(4):
        events, left = [], kept
        for one in job_events(rank, 2):
            collective = one["name"].startswith("gloo:")
            left -= collective
            if not collective or left >= 0:
                events.append(one)
        files.append(write(tmp_path / f"r{rank}.json", document(events, rank, 4)))
    # WHEN they are reduced THEN there is no verdict, with the reason
    found = sftriage("reduce", *files, "--json").json
    assert (found["verdict"]["label"], found["verdict"]["reasons"]) == ("needs_evidence", ["no_sync"])
    assert found["verdict"]["suspects"] == []
    assert found["no_verdict"].startswith(why)
    text = sftriage("reduce", *files).out
    assert f"No verdict: {why}" in text
    assert "Healthy" not in text
    # AND if a map names the sync stage, the rank is named
    names = tmp_path / "map.yaml"
    names.write_text("stages: {data: ['sftriage:data'], rest: ['sftriage:*']}\nsync: [rest]\n")
    assert "Rank 2 is slow in data" in sftriage("reduce", *files, "--map", names).out


def test_the_text_has_stages_frontier_verdict_and_findings(sftriage, tmp_path):
    out = sftriage("reduce", *traces(tmp_path, slow=2)).out
    for text in ("Stages of rank 0", "Frontier, steps 100 to 107", "Rank 2 is slow in data", "What filled data of"):
        assert text in out


def test_a_capture_agrees_with_its_run(sftriage, run, captured):
    # GIVEN a captured trace and its run
    for against in (run.path, captured.parent / "manifest.json"):
        found = sftriage("reduce", captured, "--against", against, "--json").json
        # THEN they agree on the same steps, in the stage that was suspected
        agreement = found["agreement"]
        (of_rank,) = agreement["ranks"]
        assert (agreement["agrees"], of_rank["agrees"], of_rank["stage"]) == ("yes", "yes", "data")
        assert (of_rank["rank"], of_rank["first_step"], of_rank["last_step"], of_rank["steps"]) == (2, 100, 107, 8)
        assert {one["stage"] for one in of_rank["stages"]} == set(SCHEMA.stages)
        assert found["findings"]["stage"] == "data"
    assert "agrees: yes (rank 2: yes, data 25" in sftriage("reduce", captured, "--against", run.path).out


@pytest.mark.parametrize("on_devices", [False, True])
def test_all_ranks_agree_with_the_run_and_so_do_the_verdicts(sftriage, tmp_path, run, on_devices):
    # GIVEN a run whose ranks recorded the same times on their devices, or have none
    for log in list(run.steps.glob("*.steps")) if on_devices else ():
        host = LogReader(log)
        device = StepLog(run.steps, host.info, kind="device-steps")
        device.append(host.read())
        device.close()
    # WHEN the traces of all ranks are compared with it THEN both have the same verdict on these steps
    found = sftriage("reduce", *traces(tmp_path, 2, **OURS), "--against", run.path, "--json").json
    assert (found["agreement"]["agrees"], found["agreement"]["verdicts_agree"]) == ("yes", True)
    assert [one["agrees"] for one in found["agreement"]["ranks"]] == ["yes"] * 4


def test_a_trace_without_the_fault_does_not_agree(sftriage, tmp_path, run):
    # GIVEN traces of the same steps without a late rank
    found = sftriage("reduce", *traces(tmp_path, None, **OURS), "--against", run.path, "--json").json
    # THEN the suspect does not agree, nor do the verdicts
    agreement = found["agreement"]
    assert agreement["agrees"] in ("no", "partly")
    assert (agreement["ranks"][2]["agrees"], agreement["verdicts_agree"]) == ("no", False)


@pytest.mark.parametrize(
    ("about", "first", "refusal"),
    [
        ({"sftriage.job": "other", "sftriage.capture_id": "c-1"}, 100, "of job 'other', but the run is of 'resnet'"),
        (OURS, 5000, "no recording of steps 5000 to 5007"),
    ],
)
def test_traces_of_other_jobs_and_steps_are_refused(sftriage, tmp_path, run, about, first, refusal):
    path = write(tmp_path / "t.json", document(job_events(2, 2, first=first), 2, 4, **about))
    outcome = sftriage("reduce", path, "--against", run.path)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert refusal in outcome.err


def test_findings_are_saved_in_the_manifest_and_shown(sftriage, run, captured, tmp_path):
    # GIVEN a capture, and a healthy rank's trace of the same steps
    control = write(tmp_path / "r1.json", document([*job_events(1, 2), event("aten::more", 1500, 500)], 1, 4))
    # WHEN it is reduced against its run, and the findings saved
    outcome = sftriage("reduce", captured, "--against", run.path, "--control", control, "--save", "--json")
    assert outcome.code == 0, outcome.err
    # THEN they are in the manifest, which only its owner can read, and `show` prints them
    path = captured.parent / "manifest.json"
    assert json.loads(path.read_bytes())["findings"] == json.loads(outcome.out)["findings"]
    assert path.stat().st_mode & 0o077 == 0
    assert sorted(each.name for each in captured.parent.iterdir()) == ["manifest.json", "trace.json.gz"]
    shown = sftriage("traces", "show", "c-1", "--run", run.path).out
    assert "found       data took 25.0" in shown
    assert "20.0 ms more than rank 1" in shown


def test_findings_are_of_the_steps_with_the_fault(sftriage, tmp_path, make_manifest, run):
    # GIVEN a capture of six steps, whose manifest names the two with the fault
    found = ReproducedInfo(answer="partly", steps=6, steps_with=2, over_s=0.01, expected_s=0.02, fault_steps=(101, 104))
    path = write(tmp_path / "exported.json", document(recurring_events(first=100), 2, 4, **OURS))
    LocalStore(run.path).put(
        "c-1", path, lambda artefact: make_manifest("c-1", artefact).model_copy(update={"reproduced": found})
    )
    capture = run.path / "captures" / "c-1"
    # WHEN its trace is reduced, with the run, with a control rank, or in its place
    control = write(tmp_path / "r1.json", document(recurring_events(first=100), 1, 4))
    for more, beside, control_steps in (
        (("--against", run.path), "steps", 4),
        (("--against", run.path, "--control", control), "rank", 2),
        ((), "steps", 4),
    ):
        found = sftriage("reduce", capture / "trace.json.gz", *more, "--json").json["findings"]
        # THEN the findings are of those two
        assert (found["suspect"]["steps"], found["of_steps"], found["beside"]) == (2, 6, beside)
        assert found["control"]["steps"] == control_steps
    # AND the text says so
    text = sftriage("reduce", capture / "trace.json.gz").out
    assert "in the 2 of 6 captured steps that have the fault" in text
    assert "other steps" in text


def test_ranks_that_are_missing_are_named(sftriage, tmp_path):
    found = sftriage("reduce", *traces(tmp_path)[:2], "--json").json
    assert (found["verdict"], found["findings"]) == (None, None)
    assert found["no_verdict"] == "2 ranks have no trace here (2, 3)"


def test_rank_names_the_rank_of_a_trace_that_lacks_it(sftriage, tmp_path):
    path = write(tmp_path / "worker7.json", document([mark("ProfilerStep#1", 0, 50)]))
    assert sftriage("reduce", path, "--json").json["traces"][0]["rank"] is None
    assert sftriage("reduce", path, "--rank", "worker7.json=3", "--json").json["traces"][0]["rank"] == 3


def test_a_bad_trace_is_refused_and_the_others_are_reduced(sftriage, tmp_path):
    good = write(tmp_path / "good.json", document([mark("ProfilerStep#1", 0, 50)]))
    bad = write(tmp_path / "bad.json", b'{"traceEvents": [')
    outcome = sftriage("reduce", good, bad, "--json")
    found = json.loads(outcome.out)
    assert (outcome.code, len(found["traces"])) == (0, 1)
    assert "cut short" in found["refused"][0]["reason"]


def test_a_trace_that_changes_while_it_is_read_is_refused(tmp_path):
    # GIVEN the traces of several ranks, already reduced to stages
    paths = traces(tmp_path, slow=2)
    found = read_all(paths, Names(), {})
    assert found.whole(2, Names(), {}).trace.blocks
    # WHEN one of them is replaced before it is read again
    paths[2].write_bytes(paths[1].read_bytes())
    # THEN it is refused
    with pytest.raises(InputError, match="changed while being read"):
        found.whole(2, Names(), {})


@pytest.mark.parametrize(
    ("first", "last", "there"),
    [(100, 100, 1), (99, 108, 10), (104, 108, 5), (99, 101, 3), (107, 110, 2), (50, 99, 1), (200, 201, 0)],
)
def test_the_steps_of_a_run_are_found_at_its_start_end_and_beyond(run, first, last, there):
    # GIVEN a run of steps 99 to 108
    # WHEN some are read, at its start, its end or beyond
    found = load_signal(run.path).steps(first, last)
    # THEN the recorded ones are found, each with its own durations
    assert sorted(found) == [number for number in range(first, last + 1) if 99 <= number <= 108]
    assert len(found) == there
    for number, window in found.items():
        assert (window.first_step, window.durations_NRS.shape) == (number, (1, 4, 5))
        late_s = window.durations_NRS[0, 2, 0] - window.durations_NRS[0, 1, 0]
        assert late_s == pytest.approx(0.02, abs=2e-4)
