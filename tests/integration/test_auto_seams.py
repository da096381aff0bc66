"""`sftriage run` on training scripts that know nothing of it, a rank slowed from outside or hanging."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from sftriage.agent.stacks import find_py_spy
from sftriage.model.hangs import HANG_NAME, HangEvidence
from sftriage.runs.recordings import load_recording
from sftriage.trainer import moments
from tests.integration.forked import forked_output
from tests.integration.policies import policy
from tests.integration.processes import FORKED, LAUNCH, UNEDITED, ended, slowed, wait_until
from tests.integration.runs import captures, named, verdicts

TORCHRUN = (Path(sys.executable).parent / "torchrun", "--standalone", "--nproc-per-node", 2)
THREE_FORKED = (*FORKED, 3)
RULE = """name: slow-rank, match: {scope: [rank], stage: [data, other], gain: ">= 5% and >= 10ms"},
  capture: {profiler: stacks, steps: 2, max_seconds: 20}"""
POLICY = policy(RULE, steps=(30, 5, 10), name="seams")
_EVALUATED = {40: "evaluation", 80: "evaluation"}
_EVALUATED_AND_SAVED = {40: "eval+checkpoint", 80: "eval+checkpoint"}
SLOWED = {
    # script: its launcher, samples a step, the stage in which they are taken, sync stages, kinds of its steps by rank
    "ddp": (TORCHRUN, 8, "data", ("backward",), _EVALUATED_AND_SAVED, _EVALUATED),
    "fsdp2": ((*FORKED, 2), 8, "data", ("forward", "backward", "optimizer"), {31: "checkpoint"}, {31: "checkpoint"}),
    "gpt": (
        THREE_FORKED,
        8,
        "other",
        ("backward",),
        {30: "eval+checkpoint", 60: "eval+checkpoint", 90: "eval+checkpoint"},
        {},
    ),
}
SLOW_FROM = 40


def steps_of(run: Path, rank: int):
    """The kept steps of a rank, and how its stages are declared."""
    (ranks,) = load_recording(run).ranks.values()
    return [record for steps in ranks[rank].steps(4096) for record in steps.records()], ranks[rank].info.schema


@pytest.fixture
def train(start, environment, tmp_path):
    """Run a script, under `sftriage run` with a rank that becomes slow, and without; it trains the same bit for bit."""
    (tmp_path / "policy.yaml").write_text(POLICY)

    def train(command, slow, plainly, *, saves=True):
        options = ("--policy", tmp_path / "policy.yaml", "--out", tmp_path / "run")
        job = start("run", *options, "--", *command, env=environment | slow)
        output, log = job.communicate(timeout=240)
        assert job.returncode == 0, log
        trained = torch.load(tmp_path / "trained.pt") if saves else []
        assert forked_output(*plainly, env=environment) == output
        for alone, watched in zip(torch.load(tmp_path / "trained.pt") if saves else [], trained, strict=True):
            assert torch.equal(alone.view(torch.int32), watched.view(torch.int32))
        return log

    return train


@pytest.mark.parametrize("script", SLOWED)
def test_a_rank_that_is_slowed_from_outside_is_named_with_its_stage_and_trains_as_without_us(train, tmp_path, script):
    # GIVEN an unedited script, and a data set that becomes slow on rank 1
    launcher, a_step, stage, sync, *kinds = SLOWED[script]
    trains = (UNEDITED / f"{script}.py", tmp_path)
    log = train((*launcher, *trains), slowed(1, a_step, SLOW_FROM), (LAUNCH, launcher[-1], *trains))
    # THEN that rank is suspected of that stage, and was captured
    assert (1, stage) in [named(verdict) for verdict in verdicts(tmp_path / "run")], log
    assert [manifest.capture.rank for manifest in captures(tmp_path / "run")] == [1], log
    # AND each rank's steps are the script's, from the third one on; those that do more than others are of a kind
    for rank, expected in enumerate(kinds):
        records, schema = steps_of(tmp_path / "run", rank)
        assert schema.stages[:5] == ("data", "forward", "backward", "exchange", "optimizer")
        assert schema.sync == (*sync, "exchange")
        assert [record.step for record in records] == list(range(2, 2 + len(records)))
        assert {record.step: record.kind for record in records if record.kind} == expected
        # (whatever waits inside it, under DDP it is known when a rank's own last gradient was ready)
        assert all((record.ready_ns is None) == (script == "fsdp2") for record in records[10:])
    # AND the folder is gone
    assert not (tmp_path / "run" / "auto").exists()


EXCHANGING = ("data", "forward", "backward", "exchange", "optimizer", "other")
HYBRID = {
    # which rank is slow: the script, its ranks, samples a step, stages, sync stages, and each rank's cohort
    "a rank of a sharded stage": ("pipeline", 2, 16, EXCHANGING, EXCHANGING[1:4], ("pp0", "pp1", "pp0", "pp1")),
    "the only rank of a stage": ("pipeline", 1, 16, EXCHANGING, ("exchange",), ("pp0", "pp1")),
    "one of a pair with a tensor": ("hybrid", 2, 8, EXCHANGING, EXCHANGING[1:4], ("", "", "", "")),
}


@pytest.mark.parametrize("which", HYBRID)
def test_the_slow_rank_of_a_hybrid_job_is_named_and_trains_as_without_us(train, tmp_path, which):
    # GIVEN a script that knows nothing of sftriage, and a data set that becomes slow on one rank
    script, slow, a_step, stages, sync, cohorts = HYBRID[which]
    command = (*FORKED, len(cohorts), UNEDITED / f"{script}.py", tmp_path)
    log = train(command, slowed(slow, a_step, 2 * SLOW_FROM), command[1:])
    # THEN that rank is suspected of that stage
    assert (slow, "data") in [named(verdict) for verdict in verdicts(tmp_path / "run")], log
    # AND each rank has its cohort, and its stages
    (ranks,) = load_recording(tmp_path / "run").ranks.values()
    for rank, cohort in enumerate(cohorts):
        info = ranks[rank].info
        assert (info.cohort, info.schema.stages, set(info.schema.sync)) == (cohort, stages, set(sync))


@pytest.mark.parametrize("way", ["averaged", "hooks", "sharded", "local", "ring"])
def test_a_rank_whose_peers_wait_in_the_scripts_own_exchanges_is_named(train, tmp_path, way):
    # GIVEN a script that exchanges in its own way WHEN the data of one rank becomes slow
    command = (*FORKED, 3, UNEDITED / "exchanged.py", way)
    log = train(command, slowed(1, 8, 2 * SLOW_FROM), command[1:], saves=False)
    # THEN that rank is suspected, no other and no stage in which it is waited for
    judged = verdicts(tmp_path / "run")
    suspects = {named(verdict) for verdict in judged if verdict["label"] == "suspect"}
    assert (1, "data") in suspects, log
    assert not {found[1] for found in suspects if found is not None} & {"optimizer", "backward", "exchange"}, log
    # AND where no wrapper says more, all ranks are known to train the same, and to wait in exchanges
    if way == "averaged":
        (ranks,) = load_recording(tmp_path / "run").ranks.values()
        found = {(reader.info.cohort, reader.info.schema.stages, reader.info.schema.sync) for reader in ranks.values()}
        assert found == {("Sequential-19416", EXCHANGING, ("exchange",))}


def test_doctor_reports_the_seams_of_a_few_steps(start, tmp_path):
    job = start("doctor", "--json", "--steps", 5, "--", *TORCHRUN, UNEDITED / "gpt.py", tmp_path)
    output, log = job.communicate(timeout=240)
    assert job.returncode == 0, log
    found = json.loads(output)
    fired = {seam["name"]: seam["fired"] for seam in found["seams"]}
    assert all(fired[name] for name in ("forward", "backward", "optimizer", "ready")), log
    assert not fired["data"]
    assert sum(found["stages"].values()) == pytest.approx(1)
    assert (found["sync"], found["cohorts"], found["ranks"]) == (["backward"], {"": 2}, 2)
    assert found["writer"] == moments.FORM.name
    assert {profiler["profiler"]: profiler["works"] for profiler in found["captures"]}["torch"]
    (missing,) = found["missing"]
    assert missing["lines"][1] == 'with sftriage.stage("data"):'
    # AND nothing of the job is left, nor does its launcher complain of being ended
    assert not (tmp_path / "trained.pt").exists()
    assert "Traceback" not in log


# how a script that does everything wrong is recorded: the gaps that doctor reports
WRONG = {
    "seams": (
        "no batch came from a torch DataLoader",
        "no call of the trained model was detected (`model(...)`, not `model.forward(...)`)",
        "no call of backward() was detected (`torch.autograd.grad` is not one)",
    ),
    "monitor": (
        "invalid calls of the recorder",
        "the stage data was declared but never entered",
        "the stage h2d was declared but never entered",
        "of the steps is outside all stages (other)",
        "no stage is declared to wait for the other ranks",
    ),
}


@pytest.mark.parametrize("how", WRONG)
def test_doctors_lines_mend_a_script_that_does_everything_wrong(start, how):
    script = UNEDITED.parent / "wrong.py"
    output, log = start("doctor", "--json", "--", *THREE_FORKED, script, how, "wrong").communicate(timeout=240)
    # THEN doctor reports all gaps, and nothing else
    missing = [gap["what"] for gap in json.loads(output)["missing"]]
    assert len(missing) == len(WRONG[how]), log
    assert all(expected in what for expected, what in zip(WRONG[how], missing, strict=True)), missing
    # AND where its lines were written into the script, nothing is missing any more, and all that waits is known
    output, log = start("doctor", "--json", "--", *THREE_FORKED, script, how, "mended").communicate(timeout=240)
    found = json.loads(output)
    assert found["missing"] == [], log
    assert found["sync"] == (["exchange"] if how == "seams" else ["backward"])
    assert all(found["stages"][name] > 0 for name in ("data", "forward", "backward", "optimizer"))


def test_doctor_reports_a_failed_script(start, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\nprint('words of its own')\nraise SystemExit(3)\n")
    output, log = start("doctor", "--json", "--", sys.executable, script).communicate(timeout=240)
    # THEN that comes first
    assert json.loads(output)["missing"][0]["what"].startswith(
        "the job exited with status 3 before any step was recorded"
    ), log
    assert "words of its own" in log


STUCK = "name: stuck, match: {label: stalled}, capture: {profiler: stacks, max_seconds: 30}"
STALL_POLICY = policy(STUCK, detection="window_steps: 20")
WITHOUT_PTRACE = ("setpriv", "--inh-caps=-sys_ptrace", "--bounding-set=-sys_ptrace", "--ambient-caps=-sys_ptrace")


@pytest.mark.skipif(not shutil.which("setpriv") or os.geteuid() != 0, reason="setpriv, as root: to give up ptrace")
def test_a_hanging_rank_reports_its_own_stacks_if_ptrace_is_denied(tmp_path, environment):
    # GIVEN an unedited script, in processes that may not be looked into, of a user without CAP_SYS_PTRACE
    find_py_spy()
    (tmp_path / "policy.yaml").write_text(STALL_POLICY)
    run = tmp_path / "run"
    options = ("--auto", "--policy", tmp_path / "policy.yaml", "--out", run)
    triage = (sys.executable, "-m", "sftriage", "run", *options)
    command = (*WITHOUT_PTRACE, *triage, "--", *FORKED, 2, UNEDITED / "hangs.py", tmp_path)
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen([*map(str, command)], env=environment, stdout=log, stderr=log, text=True)
    with ended(job):
        # WHEN rank 1 waits for a lock for ever
        (manifest,) = wait_until(lambda: captures(run))
    # THEN the rank is named with its stage, and its own stacks show where it waits, and how they were taken
    (stall,) = [verdict for verdict in verdicts(run) if verdict["label"] == "stalled"][:1]
    assert (stall["suspects"][0]["rank"], stall["suspects"][0]["stage"]) == (1, "data")
    assert manifest.capture.rank == 1
    content = (run / "captures" / manifest.capture_id / HANG_NAME).read_bytes()
    evidence = msgspec.json.decode(content, type=HangEvidence)
    stuck = evidence.ranks[1]
    assert (stuck.answered, stuck.pid) == (True, int((tmp_path / "hangs").read_text()))
    (main,) = [thread for thread in stuck.threads if thread.main]
    assert (main.frames[0].function, Path(main.frames[0].file).name) == ("__getitem__", "hangs.py")
