"""`sftriage whatif`: what a program reads, what a person reads, and what bad input gets."""

import gzip
import json
import re
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from sftriage.frontier.accounting import anchored
from sftriage.runs.whatif import operations_of, whatif_of
from sftriage.verdicts import Settings, judge
from sftriage.whatif.pipeline import COLUMNS
from sftriage.windows.counting import counted_of
from sftriage.windows.npz import load_npz
from tests.scenario import Fault, run_at, verdict
from tests.scenario import Job as FourRanks
from tests.unit.commands.test_analyze import STAGES, recorded
from tests.unit.reduce.heavy import document, job_events, write
from tests.unit.whatif.planted import Job


@pytest.fixture
def traced(tmp_path):
    """Write a job's operations as Parquet, and say where."""
    arrow = pytest.importorskip("pyarrow", reason="no reader of Parquet here: pip install 'sftriage[whatif]'")
    from pyarrow import parquet

    def write(job, *, encoded=True, rows_in_a_group=1000, **changed):
        rows = job.rows()
        columns = {name: getattr(rows, field) for name, field in COLUMNS.items()}
        optypes = arrow.array([rows.optypes[index] for index in rows.optype_E])
        columns |= {"optype": optypes.dictionary_encode() if encoded else optypes, "rank": rows.rank_E} | changed
        path = tmp_path / "trace.parquet"
        table = arrow.table({name: values for name, values in columns.items() if values is not None})
        parquet.write_table(table, path, row_group_size=rows_in_a_group)
        return path

    return write


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_a_step_is_written_for_perfetto_as_measured_and_without_stragglers(sftriage, traced, tmp_path, name):
    # GIVEN the trace of a pipeline in which one worker is slow
    job = Job(stages=3, dps=4, steps=5)
    job.slow_worker()
    outcome = sftriage("whatif", traced(job), "--json", "--timeline", tmp_path / name)
    assert (outcome.code, outcome.err) == (0, "")
    written = (tmp_path / name).read_bytes()
    events = json.loads(gzip.decompress(written) if name.endswith("gz") else written)["traceEvents"]
    # THEN one process is a step as it was replayed, the other the ideal one, each with all workers
    found = json.loads(outcome.out)
    ends_s = [
        max(one["ts"] + one["dur"] for one in events if one.get("pid") == pid and "ts" in one) / 1e6 for pid in (1, 2)
    ]
    step = min(found["steps"], key=lambda one: abs(one["replayed_s"] - found["step_s"]))
    assert ends_s == pytest.approx([step["replayed_s"], found["ideal_step_s"]])
    assert len({(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}) == 2 * 12
    # AND no worker does two computations at once
    for lane in range(12):
        spans = sorted(
            (one["ts"], one["dur"])
            for one in events
            if one.get("tid") == lane and "compute" in one["name"] and one["pid"] == 1 and "ts" in one
        )
        assert spans
        assert all(at + took <= after + 1e-3 for (at, took), (after, _) in pairwise(spans))


def test_a_timeline_that_cannot_be_written_is_said(sftriage, traced, tmp_path):
    assert (
        "No such file or directory"
        in sftriage(
            "whatif", traced(Job(stages=2, dps=2, steps=3)), "--timeline", tmp_path / "missing" / "x.json"
        ).refusal
    )


def test_json_is_one_object_with_the_documented_fields(sftriage, traced):
    # GIVEN the trace of a job in which one worker is slow
    job = Job(stages=3, dps=4, steps=5)
    dp, pp = job.slow_worker()
    # WHEN it is asked what it would run at without
    outcome = sftriage("whatif", traced(job), "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    # THEN S is its mean step over one without stragglers, and each step's is its own
    assert found["S"] == pytest.approx(found["step_s"] / found["ideal_step_s"])
    assert [one["step"] for one in found["steps"]] == [7, 10, 13, 16, 19]
    assert np.mean([one["replayed_s"] for one in found["steps"]]) == pytest.approx(found["step_s"])
    assert np.mean([one["slowdown"] for one in found["steps"]]) == pytest.approx(found["S"])
    # AND every worker has its slowdown, the slow one the most
    assert {(one["dp"], one["pp"], one["rank"]) for one in found["workers"]} == {
        (dp, pp, pp * 4 + dp) for dp in range(4) for pp in range(3)
    }
    slowest = max(found["workers"], key=lambda one: one["slowdown"])
    assert (slowest["dp"], slowest["pp"]) == (dp, pp)
    assert [one["pp"] for one in found["stages"]] == [0, 1, 2]
    # AND the kind is there, with what to do about it
    (kind,) = found["kinds"]
    assert (kind["kind"], kind["workers"]) == ("slow_worker", [{"dp": dp, "pp": pp}])
    assert kind["operation"] == "backward-compute"
    assert kind["share"] == found["M_W"] > 0.5
    assert f"rank {pp * 4 + dp} (data-parallel rank {dp}, stage {pp})" in kind["says"]
    assert kind["remedy"]


def test_a_person_gets_the_sentence_first_and_a_heat_map(sftriage, traced):
    # GIVEN the trace of a job whose last stage has more to compute
    job = Job(stages=3, dps=2)
    job.last_stage()
    # WHEN a person asks
    outcome = sftriage("whatif", traced(job, encoded=False))
    # THEN first comes what it would run at, then why and what to do, then who
    lines = outcome.out.splitlines()
    assert lines[0].startswith("Without stragglers a step would take ")
    assert lines[1].startswith("Last stage: all its workers take longer than the others'.")
    assert "fewer layers" in lines[2]
    assert "Slowdown by worker" in outcome.out
    assert "dp 1" in outcome.out
    assert "backward-compute" in outcome.out


def test_a_healthy_job_is_said_to_be_one(sftriage, traced):
    # GIVEN a job that nothing slows down, WHEN a person asks, THEN one line says so, and nobody is shown
    outcome = sftriage("whatif", traced(Job(stages=2, dps=2)))
    assert outcome.out.startswith("Stragglers cost next to nothing: ")
    assert len(outcome.out.splitlines()) == 1
    found = sftriage("whatif", traced(Job(stages=2, dps=2)), "--json").json
    assert (found["M_W"], found["M_S"], found["kinds"], found["stages"]) == (None, None, [], [])


def test_a_wide_job_shows_its_slowest_part(sftriage, traced):
    # GIVEN a job of 40 data-parallel ranks, WHEN a person asks, THEN the map has the slowest, and says of how many
    job = Job(stages=2, dps=40, steps=3, microbatches=4)
    dp, _ = job.slow_worker()
    out = sftriage("whatif", traced(job)).out
    assert "Slowdown by worker, the slowest 24 of 80" in out
    assert f"dp {dp} " in out


def test_stages_of_a_recording_are_operations_and_its_ranks_workers(sftriage, tmp_path):
    # GIVEN four ranks, one of which is 20 ms late in data
    path = recorded(tmp_path / "job.npz")
    found = sftriage("whatif", path, "--json").json
    # THEN it is the worker, and data is where
    assert [(one["kind"], one["workers"], one["operation"]) for one in found["kinds"]] == [
        ("slow_worker", [{"dp": 2, "pp": 0}], "data")
    ]
    # AND what the steps took is what the accounting exposes, less the ends of the recording: the first step up
    # to its sync, and what came after the last one's
    window = load_npz(path)
    ends_s = window.durations_NRS[0, :, :3].sum(axis=1).max() + window.durations_NRS[-1, :, 3:].sum(axis=1).max()
    measured_s = operations_of(window).measured_N.sum()
    assert measured_s == pytest.approx(anchored(window).exposed_s - ends_s, rel=1e-12)
    assert found["step_s"] == pytest.approx(measured_s / 59, rel=1e-9)


@pytest.mark.parametrize("split", [False, True])
def test_whom_a_verdict_names_saves_what_the_verdict_says(split):
    # GIVEN four ranks, one of which is 20 ms late in data, and the verdict on these steps
    window = FourRanks(n_ranks=4).run(Fault("data", 2, 0.02), split=split)
    verdict, _ = judge(window, None, Settings())
    shown = whatif_of(operations_of(window, verdict))
    # THEN that is the first thing said, and the first kind, and nobody looks at the network
    (first, *_), gain_s = verdict.suspects, verdict.suspects[0].gain_s
    values = shown.values()
    (kind,) = values["kinds"]
    assert (first.ranks, kind["kind"], kind["workers"], kind["operation"]) == (
        (2,),
        "slow_worker",
        [{"dp": 2, "pp": 0}],
        "data",
    )
    assert kind["saves_s"] == gain_s
    assert next(shown.lines()).startswith(
        f"The verdict on these steps: mending rank 2 in data would save {1000 * gain_s:.1f} ms"
    )
    # AND the replay comes to the same by itself
    assert shown.found.m_w.share * shown.found.lost_s == pytest.approx(gain_s, rel=0.1)
    assert shown.found.ideal_s == pytest.approx(verdict.numbers["without_s"], rel=0.1)


@pytest.mark.parametrize(
    ("split", "queued_s", "code"), [(True, 0.0, "communication"), (True, 0.3, "in_sync"), (False, 0.0, "in_sync")]
)
def test_the_network_is_blamed_only_where_the_last_gradient_and_the_counters_say_so(split, queued_s, code):
    # GIVEN four ranks of which every fifth step takes 200 ms more once all have come to the sync stage
    job = FourRanks(n_ranks=4)
    window = job.run(split=split)
    window.durations_NRS[::5, :, 2] += 0.2
    # AND one of them may have waited for a CPU meanwhile
    waits_NR = np.zeros((50, 4))
    waits_NR[::5, 1] = queued_s
    window = replace(window, counted_NRC=counted_of({"queued_s": waits_NR}))
    assert [one.code for one in whatif_of(operations_of(window)).kinds] == [code]


def test_cohorts_are_the_stages_of_a_pipeline(sftriage, tmp_path):
    # GIVEN four ranks of two roles, of which the second has more to do
    path = recorded(tmp_path / "job.npz", slow_s=0.0)
    arrays = dict(np.load(path))
    durations = arrays["durations_s"]
    durations[:, 2:, 1] += 0.04
    durations[:, :2, 2] += 0.04
    np.savez(path, **{**arrays, "durations_s": durations, "cohorts": ["encoder", "encoder", "decoder", "decoder"]})
    # WHEN analysed, THEN it is the last stage
    found = sftriage("whatif", path, "--json").json
    assert {(one["dp"], one["pp"]): one["rank"] for one in found["workers"]} == {
        (0, 0): 0,
        (1, 0): 1,
        (0, 1): 2,
        (1, 1): 3,
    }
    assert [one["kind"] for one in found["kinds"]] == ["last_stage"]


def test_steps_of_another_kind_and_those_without_all_ranks_are_left_out(sftriage, tmp_path):
    # GIVEN a recording with a long evaluation, and a step that one rank did not record
    path = recorded(tmp_path / "job.npz")
    arrays = dict(np.load(path))
    arrays["durations_s"][20] *= 50.0
    arrays["durations_s"][40, 1] = np.nan
    np.savez(path, **arrays, kinds=["evaluation" if step == 20 else "" for step in range(60)])
    # WHEN analysed, THEN neither these nor the steps after them, which begin with what came after theirs, are in it
    outcome = sftriage("whatif", path, "--json")
    found = json.loads(outcome.out)
    assert not {20, 21, 40, 41} & {one["step"] for one in found["steps"]}
    assert len(found["steps"]) == 55
    assert outcome.err == f"sftriage: {path}: 4 of 59 steps left out: not complete, or of another kind\n"
    assert found["S"] == pytest.approx(1.2, abs=0.01)


def test_a_run_directory_is_read_as_it_was_recorded(sftriage, tmp_path):
    # GIVEN a run in whose data stage rank 2 is late; the others wait for it in backward
    def took(rank, step):
        return {"data": 50.0 if rank == 2 else 10.0, "forward": 30.0, "backward": 60.0 if rank == 2 else 100.0}

    run = run_at(tmp_path / "run")
    run.directory.policy_file.unlink()
    run.record(4, range(229), took)
    # WHEN analysed
    found = sftriage("whatif", run.directory.path, "--json").json
    # THEN a step takes 140 ms, and 100 with data as the late rank's peers have it
    assert found["step_s"] == pytest.approx(0.140, rel=0.01)
    assert found["ideal_step_s"] == pytest.approx(0.100, rel=0.01)
    assert [one["kind"] for one in found["kinds"]] == ["slow_worker"]
    # AND its warm-up is left out, as it is in verdicts, and what makes no whole window of 50 steps at its end
    assert [one["step"] for one in found["steps"]] == list(range(21, 220))
    assert {one["type"] for one in found["operations"]} == {"data", "forward", "backward (together)", "other"}
    # AND once a verdict names the rank, its steps are replayed, since the onset, and its gain is what is saved
    for first, label, onset in ((22, "healthy", None), (153, "suspect", 160)):
        run.decide(verdict(first, label, onset=onset))
    found = sftriage("whatif", run.directory.path, "--json").json
    assert (found["steps"][0]["step"], found["steps"][-1]["step"]) == (161, 202)
    assert (found["kinds"][0]["kind"], found["kinds"][0]["saves_s"]) == ("slow_worker", 0.02)


def test_heavy_traces_of_all_ranks_are_replayed_by_their_stages(sftriage, tmp_path):
    # GIVEN the traces of four ranks, one of which is 20 ms late in data
    traces = [
        write(tmp_path / f"r{rank}.json", document(job_events(rank, 2), rank, 4, **{"sftriage.job": "resnet"}))
        for rank in range(4)
    ]
    # WHEN they are replayed together, THEN it is that rank's, in data
    found = sftriage("whatif", *traces, "--json").json
    assert [(one["kind"], one["workers"], one["operation"]) for one in found["kinds"]] == [
        ("slow_worker", [{"dp": 2, "pp": 0}], "data")
    ]
    # AND one of them alone is not enough, and none of a recording's goes beside them
    alone = sftriage("whatif", traces[0])
    assert (alone.code, alone.err) == (
        2,
        f"sftriage: {traces[0]}: one rank's trace: a replay takes those of all ranks\n",
    )
    beside = sftriage("whatif", traces[0], recorded(tmp_path / "job.npz"))
    assert (beside.code, beside.err) == (
        2,
        f"sftriage: {tmp_path / 'job.npz'} is a recording of all ranks: it goes alone\n",
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a Parquet file"),
        (b"durations", "not a Parquet file"),
        (b"PAR1 and nothing else", "not a readable Parquet file"),
    ],
)
def test_a_damaged_file_is_refused_by_name(sftriage, tmp_path, content, said):
    # GIVEN something that is no such file
    pytest.importorskip("pyarrow", reason="no reader of Parquet here: pip install 'sftriage[whatif]'")
    path = tmp_path / "trace.parquet"
    path.write_bytes(content)
    # WHEN analysed, THEN one line says which and what, and the exit code that it is the person's to mend
    err = sftriage("whatif", path).refusal
    assert err.startswith(f"sftriage: {path}: {said}")
    assert len(err.splitlines()) == 1


def test_a_column_that_is_missing_is_named(sftriage, traced):
    path = traced(Job(stages=2, dps=2, steps=1), seq_id=None)
    outcome = sftriage("whatif", path)
    assert outcome.code == 2
    assert outcome.err.startswith(f"sftriage: {path}: column seq_id missing (columns there: dp_rank, stage, step")


@pytest.mark.parametrize(
    ("column", "of_rows", "said"),
    [
        ("start_ts", lambda n: ["soon"] * n, "start_ts: object, and not seconds"),
        ("step", lambda n: [1.5] * n, "step: float64, and not whole numbers"),
        ("duration", lambda n: [None, *[0.1] * (n - 1)], "duration: 1 values missing"),
        ("optype", lambda n: ["mine"] * n, "optype mine: not one of forward-compute"),
    ],
)
def test_a_column_of_another_sort_is_named(sftriage, traced, column, of_rows, said):
    # GIVEN a trace in which one column is not what it has to be
    job = Job(stages=2, dps=2, steps=1)
    path = traced(job, **{column: of_rows(len(job.rows().step_E))})
    # WHEN analysed, THEN it says which column, and what is in it
    assert sftriage("whatif", path).refusal.startswith(f"sftriage: {path}: {said}")


@pytest.mark.parametrize("bound", ["MAX_OPERATIONS", "MAX_UNPACKED_BYTES"])
def test_more_than_fits_in_memory_is_refused_with_its_size_and_the_bound(sftriage, traced, monkeypatch, bound):
    # GIVEN a trace that says it holds more than is read
    path = traced(Job(stages=2, dps=2, steps=1))
    monkeypatch.setattr(f"sftriage.runtime.reducing.{bound}", 7)
    err = sftriage("whatif", path).refusal
    assert re.fullmatch(rf"sftriage: {path}: [0-9,]+ operations, [0-9,]+ bytes unpacked; at most .*7.* are read\n", err)


def test_without_a_reader_of_parquet_it_says_how_to_get_one(sftriage, traced, tmp_path, monkeypatch):
    # GIVEN an installation without the extra
    path = traced(Job(stages=2, dps=2, steps=1))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    # WHEN a trace in Parquet is to be read, THEN it says what to install, and everything else goes on working
    assert sftriage("whatif", path).refusal == (
        f"sftriage: {path}: a trace in Parquet needs pyarrow: pip install 'sftriage[whatif]'\n"
    )
    assert sftriage("whatif", recorded(tmp_path / "job.npz")).code == 0


def test_a_recording_of_no_time_is_refused(sftriage, tmp_path):
    path = tmp_path / "job.npz"
    np.savez(path, durations_s=np.zeros((9, 2, len(STAGES))), stages=STAGES, sync=["backward"])
    outcome = sftriage("whatif", path)
    assert (outcome.code, outcome.err) == (2, f"sftriage: {path}: the operations take no time\n")


def test_a_recording_too_short_to_have_a_step_is_refused(sftriage, tmp_path):
    path = tmp_path / "job.npz"
    np.savez(path, durations_s=np.ones((1, 2, len(STAGES))), stages=STAGES, sync=["backward"])
    outcome = sftriage("whatif", path)
    assert (outcome.code, outcome.err) == (2, f"sftriage: {path}: no two complete, ordinary steps in a row\n")
