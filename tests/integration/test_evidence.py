"""Evidence from NVML: read in a process that may hang, from a driver that may say anything."""

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sftriage.agent import gpus as evidence
from sftriage.agent.gpus import EvidenceSampler, NvmlQuery, environment_of, evidence_of, gather, parse_reading
from sftriage.agent.nvml_child import CLOCK_REASONS, Device
from sftriage.base.process import start_ticks
from sftriage.model.windows import plain
from tests import needs
from tests.scenario import info_of as ring_info

DEADLINE_S = 60.0
HOST = {"host.driver": "550.54.15", "host.count": "2"}
FIRST = {
    "0.uuid": "GPU-aaaa",
    "0.name": "H100",
    "0.bus": "00000000:0A:00.0",
    "0.sm": "1125",
    "0.sm_max": "1980",
    "0.uncorrected": "2",
    "0.corrected": "0",
    "0.memory_used": "60000000000",
    "0.memory_total": "80000000000",
    "0.reasons": "0x4",
}
SECOND = {"1.uuid": "GPU-bbbb", "1.name": "H100", "1.sm": "1900"}


def compiled(directory: Path, *flags: str) -> Path:
    if not needs.GCC:
        pytest.skip(needs.gcc.kwargs["reason"])
    source = Path(__file__).with_name("nvml_stub.c")
    subprocess.run(["gcc", "-shared", "-fPIC", *flags, "-o", directory / "libnvidia-ml.so.1", source], check=True)
    return directory


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(tmp_path, monkeypatch, library):
    """A driver with the given answers; queries follow without pauses."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: sftriage[nvml]")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("NVML_STUB", str(tmp_path / "says"))

    def say(*facts):
        lines = [f"{key} {value}\n" for group in facts for key, value in group.items()]
        (tmp_path / "says").write_text("".join(lines))

    return say


def info_of(rank=0, pid=None, local_rank=None):
    pid = os.getpid() if pid is None else pid
    local_rank = rank if local_rank is None else local_rank
    return ring_info(rank, 8, local_rank=local_rank, pid=pid, pid_start_ticks=start_ticks(pid) or 0)


@pytest.fixture
def trainer():
    """Starts a process with an environment of its own that only waits."""
    started = []

    def start(**environment):
        code = "import sys; print('up', flush=True); sys.stdin.read()"
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout.readline() == b"up\n"
        return process.pid

    yield start
    for process in started:
        process.communicate()


def cut_off_at(ranks, line, times=1):
    """The evidence if the deadline is over just after the child has written a line this many times."""
    question = NvmlQuery(DEADLINE_S)
    give_up_s = time.monotonic() + DEADLINE_S
    while os.pread(question._file.fileno(), 1 << 20, 0).decode().count(line) < times:
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    question._end_s = time.monotonic()
    return evidence_of(ranks, answer_to(question), time.time())


def answer_to(question):
    give_up_s = time.monotonic() + DEADLINE_S
    while (reading := question.reading()) is None:
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    return reading


def test_what_the_driver_says_of_a_ranks_gpu_is_there_and_what_it_does_not_is_absent(driver, trainer):
    # GIVEN a driver with two GPUs, the second of which says little, and a rank on each
    driver(HOST, FIRST, SECOND)
    ranks = [info_of(6, trainer(), 0), info_of(7, trainer(), 1)]
    found = gather(ranks, deadline_s=DEADLINE_S)
    first, second = found.of(6), found.of(7)
    assert (found.problem, found.driver, first.uuid, second.uuid) == ("", "550.54.15", "GPU-aaaa", "GPU-bbbb")
    assert first.pci_bus_id == "00000000:0A:00.0"
    assert (first.sm_clock_mhz, first.sm_clock_max_mhz) == (1125, 1980)
    assert (first.ecc_uncorrected, first.ecc_corrected) == (2, 0)
    assert (first.memory_used_bytes, first.memory_total_bytes) == (60_000_000_000, 80_000_000_000)
    assert first.clock_reasons == {"sw_power_cap": 1.0}
    # AND nothing stands for what the other did not
    reported = {name for name, value in plain(second).items() if value not in (None, [], ())}
    assert reported == {"index", "uuid", "name", "sm_clock_mhz"}
    assert found.remarks == (
        "GPU 0 runs at 1,125 of 1,980 MHz, the others at 1,900: power cap",
        "GPU 0: ECC uncorrected errors: 2",
    )
    json.dumps(plain(found), allow_nan=False)


def test_a_gpu_that_hangs_is_named_and_the_others_are_not_lost(driver, trainer):
    # GIVEN a driver that never comes back from one question about GPU 1
    driver(HOST, FIRST, SECOND | {"1.reasons": "hang"})
    # WHEN its deadline is over while it is at that
    found = cut_off_at([info_of(0, trainer()), info_of(1, trainer())], '{"querying": 1}', times=2)
    # THEN earlier lines count, and the one that hangs is named
    assert found.problem == "NVML did not answer in time"
    assert found.of(0).sm_clock_mhz == 1125
    assert "GPU 1 does not answer: a query to it did not return" in found.remarks


def test_gpus_after_one_that_hangs_at_once_are_there_but_not_queried(driver):
    driver({**HOST, "0.handle": "hang"}, SECOND)
    found = cut_off_at([info_of(0)], '{"querying": 0}')
    assert [(gpu.uuid, gpu.problems) for gpu in found.gpus] == [("#0", ("NO_ANSWER",)), ("#1", ("NOT_ASKED",))]


@pytest.mark.parametrize(
    ("says", "problem", "remarks"),
    [
        ({**HOST, "0.handle": "error 15"} | SECOND, "", ("GPU 0 is lost: it has fallen off the bus",)),
        ({"host.init": "error 9"}, "the NVIDIA driver is not loaded", ()),
        ({"host.init": "error 18"}, "differ in version", ()),
        ({"host.init": "error 999"}, "NVML answers with an error: UNKNOWN", ()),
    ],
)
def test_a_gpu_or_a_driver_that_will_not_answer_gives_its_reason(driver, trainer, says, problem, remarks):
    driver(says)
    found = gather([info_of(0, trainer())], deadline_s=DEADLINE_S)
    assert (problem in found.problem, bool(found.problem)) == (True, bool(problem))
    assert found.remarks == remarks
    assert bool(found.gpus) or found.ranks[0].how == "no GPU was found"


def test_rights_that_are_missing_are_no_news_of_the_gpu(driver, trainer):
    driver(HOST, FIRST | {"0.uncorrected": "error 4"}, SECOND)
    first = gather([info_of(0, trainer())], deadline_s=DEADLINE_S).of(0)
    assert (first.ecc_uncorrected, first.problems) == (None, ())


def test_an_older_driver_names_its_reasons_too(driver, trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(compiled(tmp_path, "-DOLD_DRIVER")))
    driver(HOST, FIRST, SECOND)
    assert gather([info_of(0, trainer())], deadline_s=DEADLINE_S).of(0).clock_reasons == {"sw_power_cap": 1.0}


def test_the_gpu_that_a_ranks_process_is_on_is_its_gpu_and_ranks_that_share_one_are_remarked_on(driver, trainer):
    pid, other = trainer(), trainer(CUDA_VISIBLE_DEVICES="0")
    driver(HOST, FIRST | {"0.pid": str(pid), "0.pid2": str(os.getpid())}, SECOND)
    found = gather([info_of(2, pid), info_of(3, other)], deadline_s=DEADLINE_S)
    assert (found.ranks[0].gpu, found.ranks[0].how) == ("GPU-aaaa", "its process is on it")
    assert found.remarks[-1] == "ranks 2, 3 share one GPU: GPU-aaaa"


def test_a_host_without_a_driver_says_so(monkeypatch, tmp_path):
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed: sftriage[nvml]")
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        found = gather([info_of(0)], deadline_s=DEADLINE_S)
        assert found.problem == "this host has no NVIDIA driver: libnvidia-ml.so.1 is not found"
    else:
        pytest.skip("this host has an NVIDIA driver")


@pytest.mark.parametrize(
    ("module", "problem"),
    [("raise ImportError", "pip install 'sftriage[nvml]'"), ("import os; os.abort()", "NVML's process died")],
)
def test_a_module_that_is_not_there_or_kills_its_process_is_the_reason(monkeypatch, tmp_path, module, problem):
    (tmp_path / "pynvml.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert problem in gather([info_of(0)], deadline_s=DEADLINE_S).problem


@pytest.mark.parametrize(
    "output",
    [
        "",
        "\x00\xff",
        "[1]",
        "{",
        '{"gpu": true}',
        '{"gpu": {"index": 1e9, "uuid": "x"}}',
        '{"gpu": {"index": 0, "uuid": 7}}',
        '{"gpu": {"index": 0, "uuid": "x", "sm_clock_max_mhz": NaN}}',
        '{"driver": 3, "count": "x"}',
        "[" * 9999,
    ],
)
def test_invalid_lines_are_skipped(output):
    assert parse_reading(output, ended=False).gpus == ()


def test_samples_are_put_together():
    clocks_mhz, bits = iter((300, 1900, 1980)), iter((1, 0, 1 << CLOCK_REASONS.index("board_limit")))
    answers = {
        "nvmlDeviceGetClockInfo": lambda *_: next(clocks_mhz),
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _: next(bits),
    }
    device = Device(SimpleNamespace(NVMLError=OSError, NVML_CLOCK_SM=1, **answers), None, [])
    *_, last = (device.sample() for _ in range(3))
    assert last == {"sm_clock_mhz": 1900, "clock_reasons": {"gpu_idle": 1 / 3, "board_limit": 1 / 3}}


def test_only_what_is_about_gpus_leaves_a_ranks_environment(trainer):
    pid = trainer(CUDA_VISIBLE_DEVICES="2", SECRET="s3cret", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert environment_of(info_of(0, pid)) == {"CUDA_VISIBLE_DEVICES": "2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_a_pid_of_another_process_is_not_read(trainer):
    stale = dataclasses.replace(info_of(0, trainer(CUDA_VISIBLE_DEVICES="2")), pid_start_ticks=1)
    assert "is not running" in environment_of(stale)


def test_a_loop_that_does_not_wait_queries_now_and_then(driver, trainer, monkeypatch):
    driver(HOST, FIRST, SECOND)
    ranks = [info_of(0, trainer())]
    queries = []
    monkeypatch.setattr(evidence, "NvmlQuery", lambda _: queries.append(NvmlQuery(DEADLINE_S)) or queries[-1])
    sampler = EvidenceSampler()
    # WHEN it is polled, it does not wait
    assert sampler.poll(ranks, 100.0, {0}) is None
    answer_to(queries[0])
    # THEN one answer serves until the time is over, with remarks about the requested ranks
    assert sampler.poll(ranks, 101.0, {0}).remarks
    assert (sampler.poll(ranks, 159.0, ()).of(0).uuid, sampler.poll(ranks, 159.0, ()).remarks) == ("GPU-aaaa", ())
    assert len(queries) == 1
    assert sampler.poll(ranks, 160.0, {0}) is None
    assert len(queries) == 2
    sampler.close()
    assert queries[1]._process.wait(DEADLINE_S) is not None


def test_no_second_query_while_one_hangs_in_the_driver(monkeypatch):
    # GIVEN a query that was killed and is still there
    class Hanging:
        hangs = True

        def reading(self):
            return parse_reading('{"driver": "1", "count": 1}\n{"querying": 0}', ended=False)

    made = []
    monkeypatch.setattr(evidence, "NvmlQuery", lambda deadline_s: made.append(Hanging()) or made[-1])
    sampler = EvidenceSampler()
    # WHEN the next one is long due
    found = [sampler.poll([], now_s, ()) for now_s in (0.0, 100.0, 200.0)]
    # THEN there is no second query, and what is known stays
    assert len(made) == 1
    assert {one.problem for one in found} == {"NVML did not answer in time"}


def test_the_child_ends_itself_without_its_parent(driver):
    driver({**HOST, "0.handle": "hang"})
    child = Path(evidence.__file__).with_name("nvml_child.py")
    ended = subprocess.run([sys.executable, child, "0.5"], capture_output=True, timeout=DEADLINE_S, check=False)
    # THEN it is gone all the same, and its lines are there
    assert ended.returncode < 0
    assert b'"querying": 0' in ended.stdout


def test_no_module_beside_the_child_hides_one_of_the_standard_library():
    # The child is run by its path, so that this directory is the first place it looks for modules.
    beside = {path.stem for path in Path(evidence.__file__).parent.iterdir()}
    assert not beside & set(sys.stdlib_module_names)


@needs.gpu
def test_a_real_gpu_answers():
    started_s = time.time()
    found = gather([info_of(0)], deadline_s=DEADLINE_S)
    assert (found.problem, found.time_s >= started_s) == ("", True)
    gpu = found.of(0)
    assert gpu.uuid.startswith("GPU-")
    assert gpu.sm_clock_mhz <= gpu.sm_clock_max_mhz
