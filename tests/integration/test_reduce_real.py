"""Traces of real jobs that nobody here made, where they are; and one of a job of our own, against what was recorded."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from sftriage.model.verdicts import Settings
from sftriage.reduce.inside import find
from sftriage.reduce.reading import read_traces
from sftriage.reduce.stages import Names, reduce_trace
from sftriage.reduce.together import read_all, together
from sftriage.runtime.reducing import account
from tests import needs
from tests.integration.runs import captures

DATA = Path(os.environ.get("SFTRIAGE_TEST_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
ENDINGS, NO_TRACES = (".json", ".json.gz", ".tar.gz", ".sqlite"), ("ms-", "mw-", "result-")


def real(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(needs.NO_REAL_TRACES)
    return path


def reduced(name: str, names: Names | None = None):
    return [reduce_trace(trace, names) for trace in read_traces(real(name))]


ALL = sorted(
    path
    for path in DATA.rglob("*")
    if path.name.endswith(ENDINGS) and not path.name.startswith(NO_TRACES) and path.is_file()
)


@pytest.mark.parametrize("path", ALL or [None], ids=[str(path.relative_to(DATA)) for path in ALL] or ["none"])
def test_every_real_trace_is_reduced_to_whole_steps_or_refused_with_its_reason(path):
    if path is None:
        pytest.skip(needs.NO_REAL_TRACES)
    found = read_all([path], Names(), {})
    assert found.reductions or found.refused
    for one in found.reductions:
        # AND its stages are its steps, in nanoseconds
        lasts_N = one.steps.end_N - one.steps.start_N
        assert (np.abs(one.durations_ns_NS.sum(axis=1) - lasts_N) < 1000).all()
        assert (one.durations_ns_NS >= 0).all()
        # AND every stage can be looked into, and is accounted for whole
        if one.trace.blocks:
            for stage in one.schema.stages:
                profile = find(one, stage).suspect
                whole_s = profile.working_s + profile.waiting_s + profile.unseen_s
                assert whole_s == pytest.approx(profile.stage_s) == pytest.approx(one.mean_s[stage])
    for refusal in found.refused:
        assert refusal.reason
        assert "\n" not in refusal.reason


def test_all_ranks_of_a_real_job_are_accounted_together():
    # GIVEN one DLRM step of eight ranks, whose files lie about the step and are in no order
    path = real("param-dlrm/dlrm_kineto.tar.gz")
    found = read_all([path], Names(), {})
    by_rank = {one.trace.rank: one for one in found.reductions}
    assert sorted(by_rank) == list(range(8))
    # THEN steps are those the trace marks, as long as it says
    lasts_us = [int((by_rank[r].steps.end_N - by_rank[r].steps.start_N)[0]) // 1000 for r in range(8)]
    assert lasts_us == [14455, 19901, 13017, 19313, 17979, 17797, 13091, 12509]
    assert {int(one.steps.number_N[0]) for one in found.reductions} == {10}
    # AND the accounting's advances are the exposed time; the ranks' late starts are in it, led by the last to start
    accounted = account(found.reductions, Settings())
    assert accounted.verdict is not None, accounted.why_not
    assert sum(accounted.verdict.advances_s.values()) == pytest.approx(accounted.verdict.exposed_s, rel=1e-12)
    assert together(found.reductions).between_NR[0].max() == pytest.approx(7.513e-3, abs=1e-6)
    assert accounted.verdict.leaders["other"] == 7


def test_a_job_that_waited_for_its_data_beside_its_repaired_twin():
    # GIVEN a ResNet that loads data in the training process, and the same one with worker processes
    (slow,) = reduced("kineto-tb-samples/resnet50_num_workers_0/worker0.1623143089861.pt.trace.json.gz")
    (mended,) = reduced("kineto-tb-samples/resnet50_num_workers_4/worker0.1623212756351.pt.trace.json.gz")
    data_ms = slow.durations_ns_NS[:, slow.schema.stages.index("data")] / 1e6
    # THEN data takes what the loader's mark says, 40 % of the step, and all else is told apart too
    assert data_ms.min() > 62.6
    assert data_ms.max() < 73.5
    assert slow.mean_s["other"] < 0.01 * sum(slow.mean_s.values())
    findings = find(slow, "data", mended)
    assert findings.control is not None
    assert findings.suspect.stage_s - findings.control.stage_s > 0.06
    assert "SingleProcessDataLoaderIter" in findings.shares[0].name


def test_a_real_trace_without_steps_can_be_cut_by_what_repeats():
    # GIVEN five iterations that only their optimiser marks
    (one,) = reduced("tracelens/mi300_train_resnet18.json.gz", Names(step_end="Optimizer.step#*"))
    assert (len(one.steps.number_N), one.schema.stages[-1]) == (4, "other")
    findings = find(one, "backward")
    assert findings.suspect.stage_s > 0.7 * findings.suspect.step_s
    assert "hipFree" in findings.summary


def test_a_captured_trace_agrees_with_what_was_recorded(sftriage, demonstrated, tmp_path):
    # GIVEN a real job of four ranks in which one becomes slow, and the capture of it
    shutil.copytree(demonstrated.run, tmp_path / "run")
    manifest = next(one for one in captures(tmp_path / "run") if one.capture.rank == 2)
    trace = tmp_path / "run" / "captures" / manifest.capture_id / "trace.json.gz"
    found = sftriage("reduce", trace, "--against", tmp_path / "run", "--save", "--json").json
    # THEN it agrees with the coarse signal in the stage in question, over the captured steps
    # (of a stage of milliseconds, a busy machine can take a tenth between a mark of the one and of the other)
    (of_rank,) = found["agreement"]["ranks"]
    assert [one["agrees"] for one in of_rank["stages"] if one["stage"] == "data"] == [True]
    assert found["agreement"]["agrees"] != "no"
    capture = manifest.capture
    assert (of_rank["first_step"], of_rank["last_step"]) == (capture.first_step, capture.last_step)
    assert (of_rank["rank"], of_rank["stage"]) == (2, "data")
    # AND the findings say what the trace cannot see: the loader slept
    assert found["findings"]["suspect"]["unseen_s"] > 0.15
    assert "found       data took" in sftriage("traces", "show", manifest.capture_id, "--run", tmp_path / "run").out
