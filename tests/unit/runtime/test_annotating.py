"""What becomes known of a stored capture, and is noted in its manifest."""

import pytest

from sftriage.model.captures import Trigger
from sftriage.model.counters import COUNTERS
from sftriage.model.events import CostMeasured
from sftriage.runs.directory import RunInfo, create
from sftriage.runtime.annotating import Annotations
from sftriage.verdicts.judging import reproduced
from sftriage.windows.counting import CountersLog
from sftriage.windows.steplog import StepLog
from tests.scenario import Fault, Job, every, info_of, steps_of
from tests.unit.reduce.heavy import document, recurring_events, write

WHY = Trigger(0, 49, "suspect", "rank", (1,), "data", 0.02, 0.3, 0.9, "default", "ab" * 32, "slow")


@pytest.fixture
def annotations(tmp_path):
    info = RunInfo("run-1", "job", "2026-01-01T00:00:00+00:00", ("x",), "default", "ab" * 32, str(tmp_path))
    return Annotations(create(tmp_path / "run", info, ""))


@pytest.fixture
def put(annotations, make_manifest, trace):
    """Store a capture of some steps."""

    def put(capture_id: str, first_step: int, attempt: int = 0, *, found=None, at=None, **about):
        about = {"first_step": first_step, "rule": "slow", "window": (0, 49), **about}
        annotations.store.put(capture_id, at or trace, lambda one: make_manifest(capture_id, one, **about))
        annotations.stored(capture_id, found, (), attempt)
        return annotations.store.manifest(capture_id)

    return put


def costs_of(annotations: Annotations) -> dict[str, tuple[float | None, int] | None]:
    listing = annotations.store.manifests()
    assert listing.problems == ()
    return {one.capture_id: one.cost and (one.cost.cost_s, one.cost.captures) for one in listing.manifests}


@pytest.mark.parametrize("stored_first", [True, False])
def test_what_a_capture_has_cost_the_job_is_in_its_manifest_whichever_is_known_first(annotations, put, stored_first):
    # GIVEN two captures in the same steps, one later on, and one in the same steps of another attempt
    def store() -> None:
        for capture_id, first_step, attempt in (("a", 100, 0), ("b", 102, 0), ("c", 300, 0), ("d", 100, 1)):
            put(capture_id, first_step, attempt)

    if stored_first:
        store()
    # WHEN it becomes known what was measured in the steps that the first two touched
    annotations.costed(CostMeasured(1.0, 0, 98, 108, 0.4, 0.05))
    if not stored_first:
        store()
    # THEN it is in the manifests of those two, and of no other
    costs = costs_of(annotations)
    assert {name: cost and cost[0] for name, cost in costs.items()} == {"a": 0.4, "b": 0.4, "c": None, "d": None}
    # AND that they share it
    assert costs["a"] == costs["b"] == (0.4, 2)


def test_what_filled_the_stage_is_looked_for_in_the_steps_that_have_the_fault(annotations, put, tmp_path):
    # GIVEN a capture of six steps, in two of which the suspect was late for what had led to it
    trace = write(tmp_path / "heavy.json", document(recurring_events(first=100), 1, 4))
    window = Job(n_ranks=4, n_steps=6).run(Fault("data", 1, 0.03, every(3, 1)), first_step=100)
    # WHEN it is stored, and it is known what the ring says of these steps
    manifest = put("a", 100, found=reproduced(window, WHY), at=trace, steps=6, rank=1)
    # THEN the manifest says which they are, and what was found is of them and not of all
    assert (manifest.reproduced.answer, manifest.reproduced.fault_steps) == ("partly", (101, 104))
    findings = manifest.findings
    assert (findings.suspect.steps, findings.of_steps, findings.control.steps) == (2, 6, 4)
    assert findings.shares[0].name == "aten::slow"
    assert (findings.suspect.stage_s, findings.control.stage_s) == pytest.approx((1200e-6, 300e-6))
    # AND why it was slow is told, once
    (told,) = annotations.causes(7.0)
    assert (told.time_s, told.capture_id, told.rank, told.code) == (7.0, "a", 1, "operator")
    assert (told.sentence, told.sure) == (findings.cause.sentence, findings.cause.sure)
    assert list(annotations.causes(8.0)) == []


def test_a_cost_that_cannot_be_told_is_noted_as_such(annotations, put):
    put("a", 10)
    annotations.costed(CostMeasured(1.0, 0, 9, 14, None, None))
    assert costs_of(annotations) == {"a": (None, 1)}


def test_a_capture_that_was_removed_meanwhile_is_no_obstacle(annotations, put, caplog):
    put("a", 10)
    annotations.store.remove("a")
    annotations.costed(CostMeasured(1.0, 0, 9, 14, 0.1, 0.05))
    annotations.stored("a", None)
    # (what it has cost, and what was found in it)
    assert caplog.text.count("what is known of capture a is not in its manifest") == 2


@pytest.mark.parametrize("first", ["suspect", "control"])
def test_a_suspect_is_looked_into_beside_its_control_whichever_is_stored_first(annotations, put, tmp_path, first):
    # GIVEN a pair captured in the same steps, of which every third step of rank 1 has the fault; and another window's
    window = Job(n_ranks=4, n_steps=6).run(Fault("data", 1, 0.03, every(3, 1)), first_step=100)

    def collect(capture_id, rank, role):
        events = recurring_events(first=100) if role == "suspect" else recurring_events(first=100, slow=())
        trace = write(tmp_path / f"{capture_id}.json", document(events, rank, 4))
        put(capture_id, 100, found=reproduced(window, WHY), at=trace, steps=6, rank=rank, role=role)

    # WHEN they are stored, one after the other
    pair = [("w0-49-r1-slow-1", 1, "suspect"), ("w0-49-r0-slow-2", 0, "control")]
    for one in (("w50-99-r0-slow-9", 0, "control"), *sorted(pair, key=lambda one: one[2] != first)):
        collect(*one)
    # THEN the suspect's manifest has what filled the stage in its faulty steps beside the same steps of the control
    found = {one.capture_id: one for one in annotations.store.manifests().manifests}
    findings = found["w0-49-r1-slow-1"].findings
    assert (findings.beside, findings.suspect.steps, findings.control.steps) == ("rank", 2, 2)
    assert findings.suspect.stage_s > 2 * findings.control.stage_s
    # AND the control's says what it is, and accuses nobody
    control = found["w0-49-r0-slow-2"]
    assert (control.capture.role, control.findings) == ("control", None)


def test_what_a_gpu_says_of_itself_is_in_the_manifest(annotations, put):
    put("a", 10)
    annotations.stored("a", None, ("the GPU of rank 1 is throttled",))
    assert annotations.store.manifest("a").evidence == ("the GPU of rank 1 is throttled",)


def ranks_of(manifest) -> list[tuple[str, int, list[int]]]:
    return [(one.title, one.rank, [step.step for step in one.steps]) for one in manifest.recorded.ranks]


def test_the_recorded_steps_are_noted_and_again_once_all_of_them_are_there(annotations, put, tmp_path):
    logs = [StepLog(tmp_path / "run" / "steps", info_of(rank, 3)) for rank in range(3)]

    def record(some):
        for rank, log in enumerate(logs):
            took = {"data": 30.0 if rank == 1 else 10.0}
            log.append(steps_of(info_of(rank, 3), range(100, 110), lambda _, took=took: took)[some])

    # GIVEN a capture that is stored before the last of its steps has been logged
    record(slice(3))
    manifest = put("w0-49-r1-slow-1", 100, steps=5, rank=1)
    # THEN its manifest has what there is, beside the rank that is most as the others are
    assert ranks_of(manifest) == [("captured", 1, [100, 101, 102]), ("control", 0, [100, 101, 102])]
    # WHEN its control is stored too, and what they cost is known
    record(slice(3, None))
    put("w0-49-r2-slow-2", 100, steps=5, rank=2, role="control")
    annotations.costed(CostMeasured(1.0, 0, 98, 108, 0.4, 0.05))
    # THEN all of them are there, beside those of the control
    manifest = annotations.store.manifest("w0-49-r1-slow-1")
    whole = [100, 101, 102, 103, 104]
    assert ranks_of(manifest) == [("captured", 1, whole), ("control", 2, whole)]
    for log in logs:
        log.close()


def test_a_capture_of_which_no_step_was_recorded_has_none(put):
    assert put("a", 10).recorded is None


def test_what_the_kernel_counted_of_the_captured_rank_beside_its_peers_is_in_the_findings(annotations, put, tmp_path):
    # GIVEN a run of three ranks, of which the second is kept from running by its cgroup for half of the time
    steps = tmp_path / "run" / "steps"
    infos = [info_of(rank, 3) for rank in range(3)]
    for info in infos:
        recorded = steps_of(info, range(100, 110), lambda _, slow=info.rank == 1: {"data": 90.0 if slow else 10.0})
        StepLog(steps, info).append(recorded)
        log, began_ns = CountersLog(steps, info), int(recorded.start_ns_B[0] - recorded.between_ns_B[0])
        for number in range(-1, 40):
            words = dict.fromkeys(COUNTERS, -1) | {"run_s": number + 2, "throttled_s": 50_000_000 * (number + 2)}
            words |= {} if info.rank == 1 else {"throttled_s": 0}
            log.add((began_ns + number * 100_000_000, *words.values()))
        log.close()
    # WHEN a capture of it is stored
    trace = write(tmp_path / "heavy.json", document(recurring_events(first=100), 1, 4))
    manifest = put("a", 100, at=trace, steps=6, rank=1)
    # THEN its manifest says what was counted more for it, and nothing of what is not known
    assert set(manifest.findings.counted) == {"run_s", "throttled_s"}
    assert manifest.findings.counted["throttled_s"] > 0.02
    # AND that is why
    assert manifest.findings.cause.code == "cgroup_throttled"
    # AND of one whose GPU was slow, how much that is of what the device did in the stage
    annotations.stored("a", None, gpu_slowed=0.4)
    found = annotations.store.manifest("a").findings
    assert found.counted["gpu_s"] == pytest.approx(0.4 * found.suspect.device_s)
