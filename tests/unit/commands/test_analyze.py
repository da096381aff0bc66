"""`sftriage analyze`, `whatif` and `advise`: JSON, text, and refusals of bad input."""

import gzip
import json
import re
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from sftriage.model.events import Pipeline, RemedyChanged
from sftriage.reports.texts import decisions_table, windows_table
from sftriage.runs.operations import operations_of
from sftriage.runs.summary import RunSummary
from sftriage.runs.whatif import whatif_of
from sftriage.stragglers.pipeline import COLUMNS
from sftriage.verdict.accounting import anchored
from sftriage.windows.npz import counted_of, load_npz
from sftriage.words.decisions import decision_values
from tests.scenario import Fault, Recorder, classify, decision, run_at, verdict
from tests.scenario import Job as FourRanks
from tests.unit.reduce.heavy import document, job_events, write
from tests.unit.stragglers.planted import Job

STAGES = ["data", "forward", "backward", "optimizer", "other"]


def recorded(path, slow_s=0.02, stage=0, rank=2, steps=60, first=0):
    """A calm job of 100 ms steps in which one rank becomes slow in one stage; the others wait for it in backward."""
    noise = np.random.default_rng(7).normal(1.0, 0.01, (steps, 4, len(STAGES)))
    durations = np.array([0.01, 0.03, 0.0, 0.01, 0.001]) * noise
    durations[first:, rank, stage] += slow_s
    arrival = durations[:, :, 0] + durations[:, :, 1]
    arrival[1:] += durations[:-1, :, 3] + durations[:-1, :, 4]
    durations[:, :, 2] = 0.05 + arrival.max(axis=1, keepdims=True) - arrival
    np.savez(path, durations_s=durations, stages=STAGES, sync=["backward"])
    return path


def test_json_is_one_object_a_window_with_the_documented_fields(sftriage, tmp_path):
    # GIVEN 60 steps in which rank 2 is 20 ms late in data
    path = recorded(tmp_path / "job.npz")
    # WHEN they are analysed in windows of 30, one every 15
    outcome = sftriage("analyze", path, "--window", 30, "--stride", 15, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    windows = [json.loads(line) for line in outcome.out.splitlines()]
    # THEN every window names rank and stage
    assert [(w["first_step"], w["last_step"]) for w in windows] == [(0, 29), (15, 44), (30, 59)]
    for window in windows:
        assert (window["label"], window["reasons"]) == ("suspect", [])
        suspect = window["suspects"][0]
        assert {"scope", "ranks", "rank", "host", "stage", "gain_s", "share", "persistence"} <= suspect.keys()
        assert (suspect["scope"], suspect["ranks"], suspect["rank"], suspect["host"]) == ("rank", [2], 2, None)
        assert suspect["stage"] == "data"
        assert suspect["gain_s"] == pytest.approx(0.02, abs=0.002)
        assert suspect["share"] == pytest.approx(suspect["gain_s"] / window["exposed_s"])
        # AND the advances are the exposed time, exactly
        assert set(window["advances_s"]) == set(window["leaders"]) == set(STAGES)
        assert sum(window["advances_s"].values()) == pytest.approx(window["exposed_s"], rel=1e-12)
        assert window["leaders"]["data"] == 2
    # AND the last one has where the time of all steps went
    times = windows[-1].pop("times")
    assert not any("times" in window for window in windows)
    assert sum(row["seconds"] for row in times["rows"]) == pytest.approx(times["wall_s"])
    slow = next(row for row in times["rows"] if row["code"] == "suspect")
    assert (slow["subject"], slow["stage"]) == ("rank 2", "data")
    assert slow["rank_hours"] == pytest.approx(slow["seconds"] * 4 / 3600)
    # AND it writes nothing
    assert list(tmp_path.rglob("*")) == [path]


def test_a_pause_has_its_own_line_beside_the_step_time(sftriage, tmp_path):
    # GIVEN a job whose ranks all paused in backward once, for 55 s
    path = recorded(tmp_path / "job.npz", slow_s=0.0)
    arrays = dict(np.load(path))
    arrays["durations_s"][30, :, 2] += 55.0
    np.savez(path, **arrays)
    # WHEN analysed THEN the step time excludes the pause, which has its own line
    outcome = sftriage("analyze", path)
    assert "Healthy" in outcome.out
    assert "The job paused for 55.0 s in step 30 (all ranks, in backward)." in outcome.out
    assert all("ms" in line and " 101." in line for line in outcome.out.splitlines() if " to " in line and "│" in line)


def test_a_verdict_names_the_devices_clock(sftriage, tmp_path):
    # GIVEN ranks on devices: hosts that see no difference, and a slow kernel on rank 1
    device = np.load(recorded(tmp_path / "device.npz", stage=1, rank=1))["durations_s"]
    host = np.broadcast_to(device.sum(axis=2, keepdims=True) / len(STAGES), device.shape)
    np.savez(tmp_path / "job.npz", durations_s=host, device_s=device, stages=STAGES, sync=["backward"])
    # WHEN analysed, THEN the verdict uses the device's clock, in text and JSON
    outcome = sftriage("analyze", tmp_path / "job.npz")
    assert "Rank 1 is slow in forward" in outcome.out
    assert "by the devices' clock." in outcome.out
    assert "device clock" in outcome.out
    windows = sftriage("analyze", tmp_path / "job.npz", "--json").out.splitlines()
    assert {json.loads(line)["clock"] for line in windows} == {"device"}


def test_devices_with_only_host_times_are_held(sftriage, tmp_path):
    # GIVEN only host times of ranks on devices, one of which is slow in forward
    host = np.load(recorded(tmp_path / "host.npz", stage=1, rank=1))["durations_s"]
    np.savez(tmp_path / "job.npz", durations_s=host, on_device=True, stages=STAGES, sync=["backward"])
    # WHEN analysed, THEN the window is held for its clock, with the likely suspect
    last = json.loads(sftriage("analyze", tmp_path / "job.npz", "--json").out.splitlines()[-1])
    assert (last["label"], last["reasons"], last["clock"]) == ("needs_evidence", ["clock_limited"], "host")
    assert (last["suspects"][0]["rank"], last["suspects"][0]["stage"]) == (1, "forward")
    assert "Held: clock_limited" in sftriage("analyze", tmp_path / "job.npz").out


def printed(table):
    console = Console(width=160, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return [line.replace("┃", "│").split("│")[1:-1] for line in captured.get().splitlines()]


@pytest.mark.parametrize("table", [windows_table, lambda some: decisions_table(list(map(decided, some)))])
def test_rows_have_the_attempt_if_there_are_several(table):
    def steps_and_attempts(judged):
        titles, *rows = [[cell.strip() for cell in line] for line in printed(table(judged)) if line]
        return [tuple(row[titles.index(title)] for title in ("attempt", "steps") if title in titles) for row in rows]

    assert steps_and_attempts([verdict(20), verdict(20, attempt=1)]) == [("1", "20 to 69"), ("2", "20 to 69")]
    assert steps_and_attempts([verdict(20), verdict(30)]) == [("20 to 69",), ("30 to 79",)]


def decided(judged):
    return decision_values(decision(judged)) | {"results": []}


@pytest.fixture
def traced(tmp_path):
    """Write a job's operations as Parquet; returns the path."""
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
    # THEN one process is the replayed step, the other the ideal one, each with all workers
    found = json.loads(outcome.out)
    ends_s = [
        max(one["ts"] + one["dur"] for one in events if one.get("pid") == pid and "ts" in one) / 1e6 for pid in (1, 2)
    ]
    step = min(found["steps"], key=lambda one: abs(one["replayed_s"] - found["step_s"]))
    assert ends_s == pytest.approx([step["replayed_s"], found["ideal_step_s"]])
    assert len({(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}) == 2 * 12
    # AND no worker does two computations at once
    for worker in range(12):
        spans = sorted(
            (one["ts"], one["dur"])
            for one in events
            if one.get("tid") == worker and "compute" in one["name"] and one["pid"] == 1 and "ts" in one
        )
        assert spans
        assert all(at + took <= after + 1e-3 for (at, took), (after, _) in pairwise(spans))


def test_json_is_one_object_with_the_documented_fields(sftriage, traced):
    # GIVEN the trace of a job in which one worker is slow
    job = Job(stages=3, dps=4, steps=5)
    dp, pp = job.slow_worker()
    # WHEN it is replayed
    outcome = sftriage("whatif", traced(job), "--json")
    assert (outcome.code, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    # THEN S is the mean step time over that without stragglers, and each step has its own slowdown
    assert found["S"] == pytest.approx(found["step_s"] / found["ideal_step_s"])
    assert [one["step"] for one in found["steps"]] == [7, 10, 13, 16, 19]
    assert np.mean([one["replayed_s"] for one in found["steps"]]) == pytest.approx(found["step_s"])
    assert np.mean([one["slowdown"] for one in found["steps"]]) == pytest.approx(found["S"])
    # AND every worker has a slowdown, the slow one the largest
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
    # AND its remedy wins all that is lost, and what remains of the step is what is left
    assert kind["share"] + found["remaining_jitter"] == pytest.approx(1.0)
    assert kind["share"] > 0.9
    assert found["step_s"] - kind["saves_s"] == pytest.approx(found["remedied_step_s"])
    assert f"rank {pp * 4 + dp} (data-parallel rank {dp}, stage {pp})" in kind["says"]
    assert kind["remedy"]


def test_the_text_begins_with_the_sentence_and_has_a_heat_map(sftriage, traced):
    # GIVEN the trace of a job whose last stage has more to compute
    job = Job(stages=3, dps=2)
    job.last_stage()
    # WHEN it is replayed
    outcome = sftriage("whatif", traced(job, encoded=False))
    # THEN the text has the time without stragglers, then the cause and the remedy, then the workers
    lines = outcome.out.splitlines()
    assert lines[0].startswith("Without stragglers a step would take ")
    assert re.match(r"Last stage: it computes 1.\d\d times as long .* wins 6\d.\d ms a step \(9\d% ", lines[1])
    assert "fewer layers" in lines[2]
    assert "Slowdown by worker" in outcome.out
    assert "dp 1" in outcome.out
    assert "backward-compute" in outcome.out


def test_a_healthy_job_has_one_line(sftriage, traced):
    # GIVEN a job without stragglers, WHEN it is replayed, THEN one line says so, without a table
    outcome = sftriage("whatif", traced(Job(stages=2, dps=2)))
    assert outcome.out.startswith("Stragglers cost next to nothing: ")
    assert len(outcome.out.splitlines()) == 1
    found = sftriage("whatif", traced(Job(stages=2, dps=2)), "--json").json
    assert (found["M_W"], found["M_S"], found["kinds"], found["stages"]) == (None, None, [], [])


def test_figures_that_cannot_be_trusted_are_not_given(sftriage, traced):
    # GIVEN the trace of a job with a slow worker, with clocks of its stages apart by several steps
    job = Job(stages=3, dps=4, steps=5)
    job.slow_worker()
    rows = job.rows()
    path = traced(job, start_ts=rows.start_E + 2.0 * rows.pp_E)
    # WHEN it is replayed, THEN the only line and the exit status say so
    outcome = sftriage("whatif", path)
    assert (outcome.code, len(outcome.out.splitlines())) == (1, 1)
    assert outcome.out.startswith("No figure of this recording can be trusted: 5 of 5 steps do not replay as they ran")
    outcome_json = sftriage("whatif", path, "--json")
    found = json.loads(outcome_json.out)
    assert outcome_json.code == 1
    assert (found["trusted"], found["S"], found["ideal_step_s"]) == (False, None, None)
    assert found["why_not"] == outcome.out.strip()


def test_a_step_that_is_not_replayed_as_it_ran_is_left_out(sftriage, traced):
    # GIVEN the trace of a job, and one computation of one of its steps that was recorded half a second late
    job = Job(stages=3, dps=4, steps=20)
    job.slow_worker()
    rows = job.rows()
    late = np.flatnonzero((rows.step_E == 10) & (rows.optype_E == 0))[7]
    path = traced(job, start_ts=rows.start_E + 0.5 * (np.arange(len(rows.start_E)) == late))
    # WHEN it is replayed, THEN that step is left out
    outcome = sftriage("whatif", path, "--json")
    assert outcome.code == 0
    assert "1 of 20 steps do not replay as they ran" in outcome.err
    assert 10 not in [one["step"] for one in outcome.json["steps"]]


@pytest.mark.parametrize(
    ("stages", "dps", "shown"), [(1, 64, ""), (4, 16, ""), (8, 8, ""), (2, 120, ", the slowest 16 of 240")]
)
def test_a_map_of_many_workers_is_readable_in_a_terminal_and_whole_as_a_drawing(
    sftriage, traced, tmp_path, stages, dps, shown
):
    # GIVEN a job of many workers, one of them slow
    job = Job(stages=stages, dps=dps, steps=3, microbatches=4)
    dp, pp = job.slow_worker()
    # WHEN it is replayed
    outcome = sftriage("whatif", traced(job), "--svg", tmp_path / "map.svg")
    # THEN 80 columns show all workers of 64, of more the slowest
    table = outcome.out[outcome.out.index("Slowdown by worker") : outcome.out.index("Slowdown by operation")]
    assert table.split("\n")[0].strip() == f"Slowdown by worker{shown}"
    cells = re.findall(r" (\d\.\d\d) ", table)
    assert len(cells) == (16 if shown else stages * dps)
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= 80
    # AND the drawing shows all, the slow one the reddest
    drawn = ElementTree.parse(tmp_path / "map.svg").getroot().findall("{*}rect")
    assert len(drawn) == stages * dps
    reddest = min(drawn, key=lambda rect: int(rect.get("fill").split(",")[1]))
    assert reddest.find("{*}title").text == f"dp {dp}, pp {pp}: {max(cells)}"


def test_a_question_of_ones_own_is_answered_in_one_line(sftriage, traced):
    # GIVEN the trace of a job in which one worker takes 1.6 times as long
    job = Job(stages=2, dps=4, steps=6)
    dp, pp = job.slow_worker()
    path, rank = traced(job), pp * 4 + dp
    whole = sftriage("whatif", path, "--json").json
    # WHEN it is replayed without that worker, THEN the line and JSON have the step that the remedy leaves
    outcome = sftriage("whatif", path, "--without", f"rank {rank}")
    assert re.fullmatch(rf"A step without rank {rank} would take .* ms \(\d+% of the step\)\.\n", outcome.out)
    answer = sftriage("whatif", path, "--without", f"rank {rank}", "--json").json["answer"]
    assert answer["step_s"] == pytest.approx(whole["remedied_step_s"], rel=0.01)
    # AND so it is without the kind, and with more changes it is shorter still
    assert sftriage("whatif", path, "--without", "slow_worker", "--json").json["answer"] == {
        **answer,
        "question": "without slow_worker",
        "step_s": pytest.approx(answer["step_s"], rel=0.01),
        "wins_s": pytest.approx(answer["wins_s"], rel=0.01),
    }
    more = ("--without", f"rank {rank}", "--set", "dp-comm=0", "--set", "backward-compute=0.5x", "--steps", "10:16")
    combined = sftriage("whatif", path, *more, "--json").json
    assert combined["answer"]["step_s"] < 0.9 * answer["step_s"]
    assert [one["step"] for one in combined["steps"]] == [10, 13, 16]
    # AND each step is split by data-parallel rank, stage and operation
    split = combined["steps"][0]
    assert max(split["by_dp"], key=split["by_dp"].get) == str(dp)
    assert max(split["by_stage"], key=split["by_stage"].get) == str(pp)
    assert "backward-compute" in split["by_operation"]


def test_layers_of_ones_own_scale_their_stages(sftriage, traced):
    # GIVEN the trace of a job whose last stage computes half as long again
    job = Job(stages=2, dps=2)
    job.last_stage(1.5)
    path = traced(job)
    # WHEN its layers, half as many again, are shared out, THEN a step is as short as with equal work
    moved = sftriage("whatif", path, "--layers", "20,30:25,25", "--json").json
    assert moved["answer"]["step_s"] == pytest.approx(moved["remedied_step_s"], rel=0.01)
    # AND equal layers, as there are if nothing else is given, change nothing
    assert sftriage("whatif", path, "--layers", "25,25", "--json").json["answer"]["wins_s"] == 0.0
    # AND the best whole layers are found: what a stage computes besides its layers stays there
    best = sftriage("whatif", path, "--layers", "20,30:", "--json").json["answer"]
    assert best == moved["answer"]
    loss = sftriage("whatif", path, "--layers", "12,12:", "--json").json["answer"]
    assert loss["question"] == "with layers 12,12:15,9"
    others = (sftriage("whatif", path, "--layers", f"12,12:{n},{24 - n}", "--json").json["answer"] for n in (14, 16))
    assert all(loss["wins_s"] > other["wins_s"] > 0.0 for other in others)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--set", "network=0"), "--set network: no such operations; there are backward-compute, "),
        (("--set", "comm=fast"), "--set comm=fast: expected comm=SECONDS, comm=0.5x or comm=ideal"),
        (("--layers", "3"), "--layers 3: expected the layers of 2 stages"),
        (("--without", "rank 9"), "no such worker or kind; there are rank 0, 1, 2, 3, dp 0 to 1"),
        (("--steps", "7"), "--steps: expected FIRST:LAST"),
        (("--layers", "a,b:"), "--layers a,b:: expected the layers of 2 stages"),
        (("--steps", "50:"), "no such steps; there are 7 to 22"),
    ],
)
def test_a_question_with_an_unknown_name_lists_the_names(sftriage, traced, options, message):
    job = Job(stages=2, dps=2)
    job.last_stage()
    outcome = sftriage("whatif", traced(job), *options)
    assert outcome.code == 2
    assert message in outcome.err


def test_a_slow_worker_that_stays_gets_less_work_or_is_dropped(sftriage, traced):
    # GIVEN a job of eight data-parallel ranks, one of which has a worker that takes 1.6 times as long
    def job():
        return Job(stages=2, dps=8, steps=6)

    slow = job()
    dp, _ = slow.slow_worker()
    whole = sftriage("whatif", traced(slow), "--json").json
    (kind,) = whole["kinds"]
    # WHEN the same job runs with that rank's work shared out, THEN it wins what the replay promises
    for less, work in zip(kind["without_replacement"], (1 / 1.6, 0.0), strict=True):
        assert less["work"] == pytest.approx(work, rel=0.02)
        mended = job()
        mended.slow_worker()
        load = np.ones(8)
        load[dp] = less["work"]
        computed = np.concatenate([mended.ops("forward"), mended.ops("backward")])
        mended.work[computed] *= load / load.mean()
        left_s = sftriage("whatif", traced(mended), "--json").json["step_s"]
        assert whole["step_s"] - less["wins_s"] == pytest.approx(left_s, rel=1e-6)
    # AND the text has the best of both
    out = sftriage("whatif", traced(slow)).out
    assert " Without a replacement, giving 62% of the others' work to that data-parallel rank wins " in out


def test_steps_and_lengths_are_counted(sftriage, traced):
    # GIVEN a job of long and short sequences
    job = Job(stages=2, dps=4, steps=12, seed=1)
    job.sequence_lengths()
    # WHEN it is replayed, THEN JSON has histograms of the steps' slowdowns and the microbatches' lengths
    found = sftriage("whatif", traced(job), "--json").json
    slowdowns = [step["slowdown"] for step in found["steps"]]
    steps, lengths = found["step_slowdowns"], found["kinds"][0]["lengths"]
    assert (sum(steps["counts"]), sum(lengths["counts"])) == (12, 12 * 8 * 4)
    assert (steps["edges"][0], steps["edges"][-1]) == pytest.approx((min(slowdowns), max(slowdowns)))
    assert lengths["edges"][0] < 1.0 < lengths["edges"][-1]
    # AND the text has their quantiles
    out = sftriage("whatif", traced(job)).out
    assert f"Slowdown of the steps: median {np.median(slowdowns):.2f}, a tenth over " in out
    assert f", the slowest {max(slowdowns):.2f}." in out


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
def test_the_suspect_of_a_verdict_saves_its_gain(split):
    # GIVEN four ranks, one of which is 20 ms late in data, and the verdict on these steps
    window = FourRanks(n_ranks=4).run(Fault("data", 2, 0.02), split=split)
    verdict = classify(window)
    shown = whatif_of(operations_of(window, verdict))
    # THEN its gain is the first sentence, and it is the only kind: the network is not blamed
    first, (kind,) = verdict.suspects[0], shown.values()["kinds"]
    gain_s, of_rank_2 = first.gain_s, [{"dp": 2, "pp": 0}]
    assert first.ranks == (2,)
    assert (kind["kind"], kind["workers"], kind["operation"]) == ("slow_worker", of_rank_2, "data")
    assert kind["saves_s"] == gain_s
    assert next(shown.lines()).startswith(
        f"The verdict on these steps: fixing rank 2 in data would save {1000 * gain_s:.1f} ms"
    )
    # AND the replay comes to the same by itself
    assert shown.found.m_w.share * shown.found.lost_s == pytest.approx(gain_s, rel=0.1)
    assert shown.found.ideal_s == pytest.approx(verdict.numbers["without_s"], rel=0.1)


@pytest.mark.parametrize(
    ("split", "queued_s", "code"), [(True, 0.0, "communication"), (True, 0.3, "in_sync"), (False, 0.0, "in_sync")]
)
def test_the_network_is_blamed_only_where_the_last_gradient_and_the_counters_say_so(split, queued_s, code):
    # GIVEN four ranks; every fifth step takes 200 ms longer after all have reached the sync stage
    job = FourRanks(n_ranks=4)
    window = job.run(split=split)
    window.durations_NRS[::5, :, 2] += 0.2
    # AND one rank may have been waiting for a CPU then
    waits_NR = np.zeros((50, 4))
    waits_NR[::5, 1] = queued_s
    window = replace(window, counted_NRC=counted_of({"queued_s": waits_NR}))
    assert [one.code for one in whatif_of(operations_of(window)).kinds] == [code]


def test_cohorts_are_the_stages_of_a_pipeline(sftriage, tmp_path):
    # GIVEN four ranks of two roles, the second with more work
    path = recorded(tmp_path / "job.npz", slow_s=0.0)
    arrays = dict(np.load(path))
    durations = arrays["durations_s"]
    durations[:, 2:, 1] += 0.04
    durations[:, :2, 2] += 0.04
    np.savez(path, **{**arrays, "durations_s": durations, "cohorts": ["encoder", "encoder", "decoder", "decoder"]})
    # WHEN analysed, THEN it is the last stage
    found = sftriage("whatif", path, "--json").json
    ranks = {(one["dp"], one["pp"]): one["rank"] for one in found["workers"]}
    assert ranks == {(0, 0): 0, (1, 0): 1, (0, 1): 2, (1, 1): 3}
    assert [one["kind"] for one in found["kinds"]] == ["last_stage"]


def test_steps_of_another_kind_and_those_without_all_ranks_are_left_out(sftriage, tmp_path):
    # GIVEN a recording with a long evaluation, and a step that one rank did not record
    path = recorded(tmp_path / "job.npz")
    arrays = dict(np.load(path))
    arrays["durations_s"][20] *= 50.0
    arrays["durations_s"][40, 1] = np.nan
    np.savez(path, **arrays, kinds=["evaluation" if step == 20 else "" for step in range(60)])
    # WHEN analysed, THEN these steps and the next ones, which begin with their tails, are left out
    outcome = sftriage("whatif", path, "--json")
    found = json.loads(outcome.out)
    assert not {20, 21, 40, 41} & {one["step"] for one in found["steps"]}
    assert len(found["steps"]) == 55
    assert outcome.err == f"sftriage: {path}: 4 of 59 steps left out: incomplete, or of another kind\n"
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


@pytest.mark.parametrize("bound", ["MAX_OPERATIONS", "MAX_UNPACKED_BYTES"])
def test_more_than_fits_in_memory_is_refused_with_its_size_and_the_bound(sftriage, traced, monkeypatch, bound):
    # GIVEN a trace that says it holds more than is read
    path = traced(Job(stages=2, dps=2, steps=1))
    monkeypatch.setattr(f"sftriage.stragglers.pipeline.{bound}", 7)
    err = sftriage("whatif", path).refusal
    assert re.fullmatch(rf"sftriage: {path}: [0-9,]+ operations, [0-9,]+ bytes unpacked; the limits are .*7.*\n", err)


@pytest.fixture
def slow(tmp_path):
    """A run in whose last windows rank 2 of 4 is slow in data: 20 ms of steps of 130 ms or so."""
    made = run_at(tmp_path / "run")
    made.record(4, range(300), lambda rank, step: {"data": 30.0 if rank == 2 else 10.0, "forward": 30, "backward": 60})
    for first in range(0, 250, 50):
        made.decide(verdict(first, "suspect", onset=10), "throttle", "overhead_budget")
    return made.directory.path


ABOUT = {"time_s": 1e9, "attempt": 0, "step": 240, "where": "it"}


def noted(run, **remedy):
    with closing(Recorder(run / "decisions.jsonl")) as journal:
        journal.append(RemedyChanged(**ABOUT, **remedy))


def test_a_slow_link_that_the_job_has_measured_is_named_with_its_own_figures(sftriage, tmp_path):
    # GIVEN a run that is healthy by its own standards, with a pipeline that has measured a slow link
    made = run_at(tmp_path / "run")
    for first in range(0, 250, 50):
        made.decide(verdict(first, "healthy"))
    delays = (0.001, 0.02, 0.001)
    figures = Pipeline((0.01,) * 4, (0.02,) * 4, delays, microbatches=8, most_S=(8,) * 4)
    link = {"remedy": "pipeline", "rank": 1, "who": "the link between ranks 1 and 2"}
    noted(
        made.directory.path, **link, state="advised", reason="not_allowed", numbers={"delay_s": 0.02}, pipeline=figures
    )
    # THEN advice names it and the remedy, in text, in JSON and in the summary
    lines = sftriage("advise", made.directory.path).out.splitlines()
    assert lines[0] == "The link between stages 1 and 2 delays a microbatch by 20.0 ms."
    assert lines[1].startswith("Run stages further ahead (Adaptra). Saves ")
    assert sftriage("advise", made.directory.path, "--json").json["slow_link"] == {"link": 1, "delay_s": 0.02}
    assert any("advise" in one.command for one in RunSummary(made.source.view()).steps)
    # AND no longer once it has recovered
    noted(made.directory.path, **link, state="undone", reason="gone", pipeline=figures)
    assert sftriage("advise", made.directory.path).out.splitlines() == [
        "No rank has been slow for long enough to need a remedy.",
        "Run stages further ahead (Adaptra), the link between ranks 1 and 2 in it: undone, because there is no "
        "longer a straggler.",
    ]


def test_advice_uses_the_recorded_time_of_an_exchange(sftriage, slow):
    # GIVEN the same run, whose ranks have measured an all-reduce
    numbers = {"ring_s": 0.15, "ring_ranks": 4.0, "ring_bytes": 1e8}
    who = {"remedy": "stragglar", "rank": 2, "who": "rank 2"}
    noted(slow, **who, state="advised", reason="not_allowed", numbers=numbers)
    # THEN StragglAR saves as many seconds as with the options of the same messages
    measured, named = (
        sftriage("advise", slow, *more, "--json").json
        for more in ((), ("--gradients", "100MB", "--bandwidth", "1", "--latency", "0"))
    )
    found, expected = (
        next(one for one in of["remedies"] if one["code"] == "stragglar")["saves_s"] for of in (measured, named)
    )
    assert found == pytest.approx(expected)


def test_advice_lists_the_remedies_that_were_tried(sftriage, slow):
    # GIVEN the same run, in which a remedy was tried on two groups of ranks, and kept on one
    who = {"remedy": "stragglar", "rank": 2, "who": "rank 2"}
    measured = {"on_s": 0.15, "off_s": 0.13, "error_s": 0.001, "saves_s": -0.02}
    for switch, state, reason in (
        ("one", "trying", "worthwhile"),
        ("two", "trying", "worthwhile"),
        ("one", "undone", "no_help"),
        ("two", "kept", "helps"),
        ("three", "advised", "not_allowed"),
    ):
        noted(slow, **who, switch=switch, state=state, reason=reason, numbers=measured)
    # THEN advice has their results before the estimates of models
    lines = sftriage("advise", slow).out.splitlines()
    assert [line.partition(": ")[2].partition(";")[0] for line in lines[1:3]] == [
        "undone, because it does not help",
        "kept, because it helps",
    ]
    tried = sftriage("advise", slow, "--json").json["tried"]
    assert [(remedy["switch"], remedy["state"], remedy["numbers"]) for remedy in tried] == [
        ("one", "undone", measured),
        ("two", "kept", measured),
    ]


def test_windows_that_lack_ranks_do_not_hide_a_straggler(sftriage, slow):
    # GIVEN the same run, followed by as many windows without the straggler as advice considers
    with closing(Recorder(slow / "decisions.jsonl")) as journal:
        for first in range(250, 1250, 50):
            one = verdict(first, "needs_evidence", reasons=("low_coverage",))
            journal.window(one, decision(one, "hold", "low_coverage"))
    # THEN advice uses the last known straggler
    assert sftriage("advise", slow).out.startswith("Rank 2 delays 4 ranks in data")


def test_a_pipeline_gets_advice_without_a_straggler(sftriage, traced, tmp_path):
    made = run_at(tmp_path / "run")
    pipeline = traced(Job(stages=3, dps=2, steps=3), encoded=False)
    outcome = sftriage("advise", made.directory.path, "--pipeline", pipeline)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("No rank has been slow for long enough to need a remedy.\n")
    assert "Run stages further ahead (Adaptra). " in outcome.out


def test_a_rank_that_is_slow_in_a_few_windows_needs_no_remedy(sftriage, tmp_path):
    # GIVEN a run in which 3 of the last 10 windows name a rank
    made = run_at(tmp_path / "run")
    for first in range(0, 500, 50):
        made.decide(verdict(first, "suspect" if first >= 350 else "healthy"))
    outcome = sftriage("advise", made.directory.path)
    # THEN there is no advice
    assert outcome.out == "No rank has been slow for long enough to need a remedy.\n"
    assert not any("advise" in one.command for one in RunSummary(made.source.view()).steps)
