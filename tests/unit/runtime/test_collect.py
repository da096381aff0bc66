"""From a trace in the spool to a capture in the store, and what becomes known of it afterwards."""

from types import SimpleNamespace

import pytest

from sftriage.capture.executor import Product
from sftriage.controller.costs import Cost
from sftriage.frontier.reproducing import reproduced
from sftriage.records import CaptureRequest, CaptureResult, Trigger
from sftriage.runs.directory import RunInfo, create
from sftriage.runtime.collecting import Collector, Known
from tests.unit.frontier.windows import Fault, Job, every
from tests.unit.reduce.heavy import document, recurring_events, write

WHY = Trigger(0, 49, "suspect", "rank", (1,), "data", 0.02, 0.3, 0.9, "default", "ab" * 32, "slow")
CONTROLLER = SimpleNamespace(trigger_of=lambda _: WHY, reproduced=lambda *_: None)


class Captured:
    """A capture that has left a trace in the spool."""

    def __init__(self, trace, capture_id: str, rank: int = 1, role: str = "suspect") -> None:
        self.request = CaptureRequest(capture_id, rank, "torch", 5, 1, 60.0, 2**20, role=role)
        self._trace = trace

    def verify(self, result) -> None:
        assert self._trace.exists()

    def products(self) -> tuple[Product, ...]:
        return (Product(self._trace, "trace.json.gz", "application/gzip", compress=True),)

    def close(self) -> None:
        pass


@pytest.fixture
def run(tmp_path):
    info = RunInfo("run-1", "job", "2026-01-01T00:00:00+00:00", ("x",), "default", "ab" * 32, str(tmp_path))
    return create(tmp_path / "run", info, ""), info


@pytest.fixture
def collect(run, trace):
    """Collect a capture of some steps; the collector and what it stored."""
    collector = Collector(*run)

    def collect(capture_id: str, first_step: int, attempt: int = 0):
        result = CaptureResult(capture_id, 1, "done", first_step=first_step, last_step=first_step + 4)
        ranks = {1: SimpleNamespace(world_size=2, host="h", attempt=attempt)}
        return collector.collect(Captured(trace, capture_id), result, CONTROLLER, ranks)

    return collector, collect


def costs_of(collector: Collector) -> dict[str, tuple[float | None, int] | None]:
    listing = collector._store.manifests()
    assert listing.problems == ()
    return {one.capture_id: one.cost and (one.cost.cost_s, one.cost.captures) for one in listing.manifests}


@pytest.mark.parametrize("stored_first", [True, False])
def test_what_a_capture_has_cost_the_job_is_in_its_manifest_whichever_is_known_first(collect, stored_first):
    # GIVEN two captures in the same steps, one later on, and one in the same steps of another attempt
    collector, put = collect

    def store() -> None:
        for capture_id, first_step, attempt in (("a", 100, 0), ("b", 102, 0), ("c", 300, 0), ("d", 100, 1)):
            assert put(capture_id, first_step, attempt)[1] is not None

    if stored_first:
        store()
    # WHEN it becomes known what was measured in the steps that the first two touched
    collector.costed(Cost(98, 108, 0.4, 0.05), attempt=0)
    if not stored_first:
        store()
    # THEN it is in the manifests of those two, and of no other
    costs = costs_of(collector)
    assert {name: cost and cost[0] for name, cost in costs.items()} == {"a": 0.4, "b": 0.4, "c": None, "d": None}
    # AND that they share it
    assert costs["a"] == costs["b"] == (0.4, 2)


def test_what_filled_the_stage_is_looked_for_in_the_steps_that_have_the_fault(run, tmp_path):
    # GIVEN a capture of six steps, in two of which the suspect was late for what had led to it
    trace = write(tmp_path / "heavy.json", document(recurring_events(first=100), 1, 4))
    window = Job(n_ranks=4, n_steps=6).run(Fault("data", 1, 0.03, every(3, 1)), first_step=100)
    controller = SimpleNamespace(trigger_of=lambda _: WHY, reproduced=lambda _, steps: reproduced(steps, WHY))
    # WHEN it is collected, with what the ring says of these steps
    result = CaptureResult("a", 1, "done", first_step=100, last_step=105)
    ranks = {1: SimpleNamespace(world_size=4, host="h", attempt=0)}
    _, manifest = Collector(*run).collect(Captured(trace, "a"), result, controller, ranks, Known(steps=window))
    # THEN the manifest says which they are, and what was found is of them and not of all
    assert (manifest.reproduced.answer, manifest.reproduced.fault_steps) == ("partly", (101, 104))
    findings = manifest.findings
    assert (findings.suspect.steps, findings.of_steps, findings.control.steps) == (2, 6, 4)
    assert findings.shares[0].name == "aten::slow"
    assert (findings.suspect.stage_s, findings.control.stage_s) == pytest.approx((1200e-6, 300e-6))


def test_a_cost_that_cannot_be_told_is_noted_as_such(collect):
    collector, put = collect
    put("a", 10)
    collector.costed(Cost(9, 14, None, None), attempt=0)
    assert costs_of(collector) == {"a": (None, 1)}


def test_a_capture_that_was_removed_meanwhile_is_no_obstacle(collect, caplog):
    collector, put = collect
    put("a", 10)
    collector._store.remove("a")
    collector.costed(Cost(9, 14, 0.1, 0.05), attempt=0)
    assert "what capture a has cost is not in its manifest" in caplog.text


def test_what_is_in_the_store_already_is_not_stored_again(run, trace, collect):
    # GIVEN a capture that was stored by somebody who was killed before saying so
    _, put = collect
    _, first = put("a", 10)
    # WHEN it is collected again, by the next one
    result = CaptureResult("a", 1, "done", first_step=10, last_step=14)
    again = Collector(*run).collect(Captured(trace, "a"), result, CONTROLLER, {})
    # THEN it is the capture that is there
    assert again == (result, first)


@pytest.mark.parametrize("first", ["suspect", "control"])
def test_a_suspect_is_looked_into_beside_its_control_whichever_is_stored_first(run, tmp_path, first):
    # GIVEN a pair captured in the same steps, of which every third step of rank 1 has the fault; and another window's
    ranks = {rank: SimpleNamespace(world_size=4, host="h", attempt=0) for rank in (0, 1)}
    window = Job(n_ranks=4, n_steps=6).run(Fault("data", 1, 0.03, every(3, 1)), first_step=100)
    controller = SimpleNamespace(trigger_of=lambda _: WHY, reproduced=lambda _, steps: reproduced(steps, WHY))
    collector = Collector(*run)

    def collect(capture_id, rank, role):
        events = recurring_events(first=100) if role == "suspect" else recurring_events(first=100, slow=())
        trace = write(tmp_path / f"{capture_id}.json", document(events, rank, 4))
        captured = Captured(trace, capture_id, rank, role)
        result = CaptureResult(capture_id, rank, "done", first_step=100, last_step=105)
        collector.collect(captured, result, controller, ranks, Known(steps=window))

    # WHEN they are collected, one after the other
    pair = [("w0-49-r1-slow-1", 1, "suspect"), ("w0-49-r0-slow-2", 0, "control")]
    for one in (("w50-99-r0-slow-9", 0, "control"), *sorted(pair, key=lambda one: one[2] != first)):
        collect(*one)
    # THEN the suspect's manifest has what filled the stage in its faulty steps beside the same steps of the control
    found = {one.capture_id: one for one in collector._store.manifests().manifests}
    findings = found["w0-49-r1-slow-1"].findings
    assert (findings.beside, findings.suspect.steps, findings.control.steps) == ("rank", 2, 2)
    assert findings.suspect.stage_s > 2 * findings.control.stage_s
    # AND the control's says what it is, and accuses nobody
    control = found["w0-49-r0-slow-2"]
    assert (control.capture.role, control.findings) == ("control", None)
