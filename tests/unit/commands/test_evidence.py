"""`sftriage evidence`: what the GPUs of a running job show."""

import os

import pytest

from sftriage.agent.gpus import Gpu, GpuEvidence, RankGpu
from sftriage.commands import evidence as command
from sftriage.recorder import Monitor
from tests.unit.conftest import run_going_on

GPUS = (
    Gpu(
        0,
        "GPU-0",
        "H100",
        sm_clock_mhz=1125.0,
        sm_clock_max_mhz=1980.0,
        clock_reasons={"sw_power_cap": 1.0},
        ecc_uncorrected=3,
        memory_used_bytes=40 << 30,
        memory_total_bytes=80 << 30,
    ),
    Gpu(1, "GPU-1"),
)


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
    """Has the driver answer so."""

    def say(**about):
        asked = []

        def gather(ranks, *, deadline_s):
            asked.extend(info.rank for info in ranks)
            return GpuEvidence(**{"time_s": 5.0, "ranks": (RankGpu(0, os.getpid(), "GPU-0", "told"),)} | about)

        monkeypatch.setattr(command, "gather", gather)
        return asked

    return say


def test_it_shows_each_gpu_with_its_ranks_and_what_is_amiss(sftriage, run, job, answer):
    asked = answer(gpus=GPUS, remarks=("GPU 0 runs at 1,125 of 1,980 MHz: power cap",), driver="550.1")
    said = sftriage("evidence", "--run", run.path)
    assert (said.code, asked) == (0, [0])
    assert "1,125 of 1,980 MHz" in said.out
    assert "50% of 80 GiB" in said.out
    assert "- GPU 0 runs at 1,125 of 1,980 MHz: power cap" in said.out


def test_as_json_it_is_one_object(sftriage, run, job, answer):
    answer(gpus=GPUS)
    found = sftriage("evidence", "--run", run.path, "--json").json
    assert found["gpus"][0]["clock_reasons"] == {"sw_power_cap": 1.0}
    assert found["gpus"][1]["sm_clock_mhz"] is None


def test_a_host_without_gpus_says_so(sftriage, run, job, answer):
    answer(problem="this host has no NVIDIA driver")
    said = sftriage("evidence", "--run", run.path)
    assert (said.code, said.out) == (0, "")
    assert "no NVIDIA driver" in said.err


def test_a_rank_whose_gpu_is_not_known_says_why(sftriage, run, job, answer):
    answer(gpus=GPUS, ranks=(RankGpu(0, 1, None, "no idea"),))
    said = sftriage("evidence", "--run", run.path)
    assert "no idea" in said.out
    assert "Nothing out of the ordinary" in said.out


def test_a_run_that_is_over_is_refused(sftriage, run):
    said = sftriage("evidence", "--run", run.path)
    assert said.code == 2
    assert "no rank of" in said.err
