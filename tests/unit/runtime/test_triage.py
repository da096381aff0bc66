"""The turns of triage, the requests that it takes, and what it notes in the manifests of captures."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sftriage.agent import agent
from sftriage.model.captures import ManualRequest
from sftriage.model.events import CostMeasured, RingGivenUp
from sftriage.model.windows import COUNTERS, JobStatus, RankStatus, StageSchema
from sftriage.policy.in_force import load_set
from sftriage.runs.directory import RunDirectory, RunInfo, create, read_info
from sftriage.runs.journal import read_journal
from sftriage.runs.requests import leave
from sftriage.runs.source import RunSource
from sftriage.runs.summary import RunSummary
from sftriage.runtime import triage
from sftriage.runtime.local import ThisHost
from sftriage.runtime.reducing import Annotations
from sftriage.runtime.triage import CHECK_S, MAX_LOG_BYTES, STARTING_S, FailedTurns, ManualRequests, Triage, requests_in
from sftriage.traces.disk import at_once
from sftriage.verdict.judging import reproduced
from sftriage.windows.rings import status_of
from sftriage.windows.steplog import CountersLog, StepLog
from tests.scenario import Fault, Job, every, info_of, steps_of
from tests.unit.agent.test_agent import WHY
from tests.unit.conftest import run_going_on
from tests.unit.controller.test_controller import window
from tests.unit.reduce.heavy import document, recurring_events, write


@pytest.fixture
def triage_of_run(tmp_path):
    """Triage of a run that goes on, of which nothing is read yet."""
    directory = run_going_on(tmp_path / "run")
    info = read_info(directory)
    made = Triage(directory, info, load_set(["default"]), ThisHost(directory, info))
    yield made
    made.close()


def test_what_has_ended_is_noted_before_the_rings_are_read(triage_of_run, monkeypatch):
    # GIVEN triage of a run
    triage = triage_of_run
    observed: list[str] = []
    for name in ("reports", "rows"):
        original = getattr(triage._fleet, name)

        def noted(*arguments, name=name, original=original, **options):
            observed.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(triage._fleet, name, noted)
    # WHEN it takes a turn THEN a capture that it finds to have ended has all of its steps in what is read after that
    triage.turn()
    assert observed[:2] == ["reports", "rows"]


def test_a_window_that_cannot_be_judged_costs_no_other_and_is_counted(triage_of_run, monkeypatch, caplog):
    # GIVEN three windows that are ready at once, of which one cannot be judged
    triage, directory = triage_of_run, triage_of_run.directory
    windows = [window(first) for first in (0, 20, 40)]
    monkeypatch.setattr(triage._assembly, "add", lambda rows, ended, hold: windows if not ended else [])
    original = triage._controller.take

    def take(window, *arguments):
        if window.first_step == 20:
            raise ValueError("no such number")
        return original(window, *arguments)

    monkeypatch.setattr(triage._controller, "take", take)
    # WHEN they are judged twice THEN the others are recorded, with one message, without a traceback
    triage.turn()
    triage.turn()
    judged = [event.verdict.first_step for event in read_journal(directory.decisions)]
    assert judged == [0, 40, 0, 40]
    off, on, *more = [record.getMessage() for record in caplog.records]
    assert off.startswith("triage is off: judging a window failed: ValueError: no such number (traceback in ")
    assert (on, more) == ("triage works again", [])
    assert "Traceback" not in caplog.text
    # AND the traceback is in the run directory, once, and the number at the end
    triage.finish()
    assert caplog.records[-1].getMessage().startswith("triage failed 2 times in this run")
    triage.close()
    assert directory.failures.read_text().count("Traceback") == 1


@pytest.mark.parametrize("part", ["reports", "rows", "statuses", "switches", "want", "telemetry"])
def test_while_a_part_of_a_turn_fails_the_job_is_not_shown_as_healthy(tmp_path, monkeypatch, part):
    # GIVEN a job that is healthy so far
    directory = run_going_on(tmp_path / "run")
    info = read_info(directory)
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr("sftriage.runtime.triage.monotonic_ns", lambda: int(clock.now_s * 1e9))
    triage = Triage(directory, info, load_set(["default"]), ThisHost(directory, info))
    triage._controller.take(window(0), time.time())
    source = RunSource(lambda: directory)

    def face() -> str:
        clock.now_s += CHECK_S
        triage.turn()
        return RunSummary(source.view()).health

    assert face() == "healthy"
    # WHEN what it needs of its agents raises, turn after turn
    original = getattr(triage._fleet, part)

    def raises(*_: object) -> None:
        raise OverflowError("int too big to convert")

    monkeypatch.setattr(triage._fleet, part, raises)
    # THEN the run is not known to be well, with the reason
    assert [face() for _ in range(3)] == ["unknown"] * 3
    stands = RunSummary(source.view())
    assert "Triage is off" in stands.sentence
    assert "OverflowError: int too big to convert" in stands.sentence
    assert "OverflowError" in directory.failures.read_text()
    # AND WHEN it works again THEN it is
    monkeypatch.setattr(triage._fleet, part, original)
    assert face() == "healthy"
    triage.close()


def test_tracebacks_take_a_bounded_part_of_the_disk(tmp_path):
    failures = FailedTurns(tmp_path / "failures.log", tmp_path)

    def fails() -> None:
        raise ValueError("x" * 10_000)

    for number in range(100):
        failures.run(f"part {number}", fails)
    assert (failures.count, failures._path.stat().st_size <= MAX_LOG_BYTES) == (100, True)


def test_a_ring_that_was_given_up_is_on_record_once(triage_of_run):
    triage, directory = triage_of_run, triage_of_run.directory
    Path(read_info(directory).rings, "rank-1.0.ring").write_bytes(b"no ring at all")
    for _ in range(3):
        triage._reads = triage._ended = True
        triage._judge()
        triage._publish_state()
    (event,) = [one for one in read_journal(directory.decisions) if isinstance(one, RingGivenUp)]
    assert (event.rank, "not a ring of sftriage" in event.reason) == (1, True)


SCHEMA = StageSchema(("data", "backward"), sync=("backward",))


def job(*ranks: int) -> JobStatus | None:
    """A job of four, of which these show something."""
    statuses = tuple(RankStatus(rank, "a", None, 0, 5, 0, 5, False, True) for rank in ranks)
    return status_of(SCHEMA, 4, statuses) if statuses else None


@pytest.fixture
def manual(tmp_path):
    return ManualRequests(RunDirectory(tmp_path), at_once)


def leave_one(directory, number, *ranks):
    leave(directory, ManualRequest(f"a-{number}", ranks, "ann", "why not"))


@pytest.mark.parametrize(
    ("ranks", "there", "ended", "waits"),
    [
        ((1,), (0, 1, 2, 3), False, False),
        # One that the job has, but that shows nothing yet: it has just started, or again
        ((1,), (0,), False, True),
        ((0, 1), (0,), False, True),
        ((1,), (), False, True),
        # No rank of this job, whoever is there
        ((4,), (0, 1, 2, 3), False, False),
        ((1, 4), (0,), False, False),
        # No rank starts any more
        ((1,), (0,), True, False),
        ((1,), (), True, False),
    ],
)
def test_a_request_waits_for_ranks_that_may_start(tmp_path, manual, ranks, there, ended, waits):
    # GIVEN a request, and a job some of whose ranks are there
    leave_one(RunDirectory(tmp_path), 1, *ranks)
    # WHEN it is looked for THEN it is to be decided, or waits
    due = list(manual.due(lambda: job(*there), 100.0, ended=ended))
    assert [request.ranks for request, _ in due] == ([] if waits else [ranks])
    # AND its file stays as long as it does
    assert len(requests_in(RunDirectory(tmp_path))) == waits


def test_a_rank_that_never_comes_delays_its_request_for_a_while_and_no_other(tmp_path, manual):
    # GIVEN a request for a rank that is not there, and one for a rank that is
    leave_one(RunDirectory(tmp_path), 1, 1)
    leave_one(RunDirectory(tmp_path), 2, 0)

    def due(now_s):
        due = manual.due(lambda: job(0), now_s, ended=False)
        return [(request.request_id, status.rank_R.tolist()) for request, status in due]

    # THEN the latter is decided at once, and the former with what is there once it has waited
    assert due(100.0) == [("a-2", [0])]
    assert due(100.0 + 0.9 * STARTING_S) == []
    assert due(100.0 + STARTING_S) == [("a-1", [0])]
    assert due(200.0) == []


POLICIES = (Path(__file__).parents[3] / "docs" / "policies.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "message",
    [
        f"| {agent.CANCEL_GRACE_S:.0f} | the capture is called off",
        "| {torch:.0f} (`nsys`: {nsys:.0f}, to make its report) | a rank".format(**agent.ANSWER_GRACE_S),
        f"its trainers are given {triage.ENDING_SHARE * triage.ENDING_S:.0f} s",
        f"sftriage waits {triage.STARTING_S:.0f} s for it",
    ],
)
def test_the_times_past_a_time_box_are_documented(message):
    assert message in POLICIES


@pytest.fixture
def annotations(tmp_path):
    info = RunInfo("run-1", "job", "2026-01-01T00:00:00+00:00", ("x",), "default", "ab" * 32, str(tmp_path))
    return Annotations(create(tmp_path / "run", info, ""))


@pytest.fixture
def put(annotations, make_manifest, trace):
    def put(capture_id: str, first_step: int, attempt: int = 0, *, found=None, at=None, **about):
        about = {"first_step": first_step, "rule": "slow", "window": (0, 49), **about}
        annotations.store.put(capture_id, at or trace, lambda one: make_manifest(capture_id, one, **about))
        annotations.stored(capture_id, found, (), attempt)
        return annotations.store.manifest(capture_id)

    return put


def costs_of(annotations: Annotations) -> dict[str, tuple[float | None, int] | None]:
    listing = annotations.store.manifests()
    assert not listing.unfit
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
    # AND the cause is published once
    (found,) = annotations.causes(7.0)
    assert (found.time_s, found.capture_id, found.rank, found.code) == (7.0, "a", 1, "operator")
    assert (found.sentence, found.sure) == (findings.cause.sentence, findings.cause.sure)
    assert list(annotations.causes(8.0)) == []


def test_an_unknown_cost_is_noted_as_unknown(annotations, put):
    put("a", 10)
    annotations.costed(CostMeasured(1.0, 0, 9, 14, None, None))
    assert costs_of(annotations) == {"a": (None, 1)}


def test_a_capture_that_was_removed_meanwhile_is_no_obstacle(annotations, put, caplog):
    put("a", 10)
    annotations.store.remove("a")
    annotations.costed(CostMeasured(1.0, 0, 9, 14, 0.1, 0.05))
    annotations.stored("a", None)
    # (what it has cost, and what was found in it)
    assert caplog.text.count("could not update the manifest of capture a") == 2


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
    # AND the control's manifest says what it is, without a suspect
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
