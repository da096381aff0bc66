"""`sftriage doctor` and `evidence`: what works here, what some steps of a job come to, what the GPUs of a job show."""

import json
import os
import sys
import textwrap

import pytest

from sftriage.agent.gpus import Gpu, GpuEvidence, RankGpu
from sftriage.commands import doctor as command
from sftriage.runtime import doctor
from sftriage.runtime.doctor import found_of
from sftriage.runtime.first_step import flags_of, hides
from sftriage.trainer import moments
from sftriage.trainer.monitor import Monitor
from tests.golden.said import MISSING, NOTHING, ranks, report
from tests.unit.conftest import run_going_on


def test_a_job_with_all_its_stages_detected_lacks_nothing():
    found = MISSING["all is seen"]
    assert found.missing == ()
    assert (found.ranks, found.steps, found.sync, found.models) == (2, 2, ("backward",), ("DistributedDataParallel",))
    assert found.stages == {"data": 0.1, "forward": 0.2, "backward": 0.6, "optimizer": 0.05, "other": 0.05}
    assert {one.name: (one.fired, one.share) for one in found.seams}["backward"] == (20, 0.6)
    assert {one.profiler: one.works for one in found.captures}["torch"]
    assert not any(one.works for one in found_of(NOTHING).captures if one.profiler in ("torch", "stacks"))


def test_collectives_are_listed_by_stage_and_a_stage_without_any_is_no_sync_stage():
    none, one = MISSING["no exchange"], MISSING["an exchange"]
    assert (none.sync, none.collectives) == ((), {"all_reduce (async) in backward": 8})
    assert (one.sync, one.missing) == (("exchange",), ())


@pytest.mark.parametrize("found", MISSING.values(), ids=MISSING)
def test_lines_that_a_script_lacks_are_python(found):
    for one in found.missing:
        compile(textwrap.dedent("\n".join(one.lines)), "lines", "exec")


def test_a_script_with_a_monitor_is_known_by_it():
    assert MISSING["a good Monitor"].by_hand
    assert not found_of(ranks(report())).by_hand


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["python", "train.py", "-I"], ""),
        (["/usr/bin/python3.12", "-I", "train.py"], "I"),
        (["python", "-uE", "-m", "train", "-S"], "uE"),
        (["python", "-X", "importtime", "-W", "ignore", "-S", "train.py"], "S"),
        (["python", "-Wignore", "-Xdev", "train.py"], ""),
        (["python", "-Ic", "-S"], "I"),
        (["torchrun", "-I"], ""),
        ([], ""),
    ],
)
def test_flags_of_python_are_not_those_of_a_script(words, flags):
    assert flags_of(words) == set(flags)


def test_what_a_trainer_lacks_of_its_environment():
    given = {"SFTRIAGE_RINGS": "/rings", "PYTHONPATH": "/ours:/before"}
    whole = {"SFTRIAGE_RINGS": "/rings", "PYTHONPATH": "/wrapper:/ours:/before"}
    assert hides(whole, ["python", "train.py"], given) == set()
    assert hides(whole | {"PYTHONPATH": "/wrapper"}, ["python", "train.py"], given) == {"PYTHONPATH"}
    assert hides(whole | {"SFTRIAGE_SEAMS": "off"}, ["python", "-I", "train.py"], given) == {"SFTRIAGE_SEAMS", "-I"}
    assert hides({}, ["python", "train.py"], given) == {"SFTRIAGE_RINGS", "PYTHONPATH"}
    # AND with --no-auto, PYTHONPATH is the job's own
    assert hides({"SFTRIAGE_RINGS": "/rings"}, ["python"], {"SFTRIAGE_RINGS": "/rings"}) == set()


CLOCKS = {"sm_clock_mhz": 1125.0, "sm_clock_max_mhz": 1980.0, "clock_reasons": {"sw_power_cap": 1.0}}
MEMORY = {"ecc_uncorrected": 3, "memory_used_bytes": 40 << 30, "memory_total_bytes": 80 << 30}
GPUS = Gpu(0, "GPU-0", "H100", **CLOCKS, **MEMORY), Gpu(1, "GPU-1")


@pytest.fixture
def run(tmp_path):
    return run_going_on(tmp_path / "run")


@pytest.fixture
def job(run):
    """One rank that records, in this process."""
    with Monitor(rings=run.path.with_name("rings"), rank=0, world_size=2, local_rank=0) as monitor:
        yield monitor


@pytest.fixture
def answer(monkeypatch):
    """Make the driver answer with this evidence; the result lists its calls."""

    def fake(**about):
        calls = []

        def gather(ranks, *, deadline_s):
            calls.append((deadline_s, [info.rank for info in ranks]))
            return GpuEvidence(**{"time_s": 5.0, "ranks": (RankGpu(0, os.getpid(), "GPU-0", "told"),)} | about)

        monkeypatch.setattr(command, "gather", gather)
        return calls

    return fake


SHOWN = {
    "each GPU with what is amiss": (
        {"gpus": GPUS, "remarks": ("GPU 0 runs at 1,125 of 1,980 MHz: power cap",), "driver": "550.1"},
        ("1,125 of 1,980 MHz", "50% of 80 GiB", "- GPU 0 runs at 1,125 of 1,980 MHz: power cap"),
    ),
    "an unknown GPU": ({"gpus": GPUS, "ranks": (RankGpu(0, 1, None, "no idea"),)}, ("no idea", "Nothing unusual")),
    "a host without GPUs": ({"problem": "this host has no NVIDIA driver"}, ("no NVIDIA driver",)),
}


@pytest.mark.parametrize(("about", "shown"), SHOWN.values(), ids=SHOWN)
def test_it_shows_each_gpu_with_its_ranks_and_what_is_amiss(sftriage, run, job, answer, about, shown):
    calls = answer(**about)
    outcome = sftriage("evidence", "--run", run.path, "--deadline", 2.5)
    assert (outcome.code, calls, bool(outcome.out)) == (0, [(2.5, [0])], "problem" not in about)
    assert all(text in outcome.out + outcome.err for text in shown)


def test_as_json_it_is_one_object(sftriage, run, job, answer):
    answer(gpus=GPUS)
    found = sftriage("evidence", "--run", run.path, "--json").json
    assert found["gpus"][0]["clock_reasons"] == {"sw_power_cap": 1.0}
    assert found["gpus"][1]["sm_clock_mhz"] is None


def test_on_a_complete_machine_it_names_the_form_of_the_recorder(tmp_path, sftriage):
    # GIVEN this machine WHEN it is examined THEN a rank is recorded and read, and no file remains
    found = {one.what: one for one in doctor.examine(tmp_path)}
    assert (found["rings"].state, str(tmp_path) in found["rings"].detail) == ("ok", True)
    assert found["recorder"].detail.startswith(f"in {moments.FORM.name}")
    assert list(tmp_path.iterdir()) == []
    # AND a program gets the same
    assert {one["what"] for one in sftriage("doctor", "--json").json} >= {"python", "recorder", "rings", "nsys"}


def test_a_command_is_ended_when_its_time_is_up(sftriage):
    outcome = sftriage("doctor", "--seconds", 1, "--", sys.executable, "-c", "import time; time.sleep(600)")
    assert (outcome.code, "no step within 1 s" in outcome.out) == (1, True)


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def refused(*_: object) -> None:
    raise OSError(37, "No locks available")


WITHOUT = {
    # what this machine lacks, what replaces it, and the resulting states and exit code
    "the form in C": ("sftriage.trainer.moments.FORM", moments.PYTHON, {"recorder": "limited", "rings": "ok"}, 0),
    "room for rings": ("os.posix_fallocate", full, {"rings": "missing"}, 1),
    "locks": ("fcntl.lockf", refused, {"rings": "ok", "locks": "limited"}, 0),
    "profilers": ("shutil.which", lambda name, path=None: None, {"nsys": "missing", "py-spy": "missing"}, 0),
}


@pytest.mark.parametrize(("name", "instead", "states", "code"), WITHOUT.values(), ids=WITHOUT)
def test_it_reports_what_is_missing_and_fails_if_nothing_can_be_recorded(
    monkeypatch, sftriage, name, instead, states, code
):
    monkeypatch.setattr(name, instead)
    monkeypatch.setattr(moments, "WHY_NOT_C", "it was lost")
    outcome = sftriage("doctor", "--json")
    found = {one["what"]: one for one in json.loads(outcome.out)}
    assert (outcome.code, {what: found[what]["state"] for what in states}) == (code, states)
    # AND the text has the states too, with the reason or the exact command to install
    text = sftriage("doctor").out
    assert all(state in text for state in states.values())
    assert ("it was lost" in text) == (instead is moments.PYTHON)
    assert ("pip install 'sftriage[stacks]'" in text) == ("nsys" in states)
