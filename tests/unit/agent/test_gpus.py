"""Which GPU a rank trains on, under everything CUDA_VISIBLE_DEVICES may hold."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sftriage.agent.gpus import Gpu, locate, remarks, slowed_fraction, visible_entries
from tests.scenario import info_of

A, B, C, D = "GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3", "GPU-dddd-4"
ALIKE = tuple(Gpu(index, uuid, name="H100") for index, uuid in enumerate((A, B, C, D)))


def located(environment, local_rank=0, gpus=ALIKE, container=None):
    return locate(info_of(0, local_rank=local_rank, pid=500), environment, gpus, container)


def place(*arguments):
    return located(*arguments).gpu


@pytest.mark.parametrize(
    ("visible", "local_rank", "expected"),
    [
        pytest.param(None, 2, C, id="unset: every GPU in order"),
        pytest.param("3,1", 0, D, id="indices in the order given"),
        pytest.param("3,1", 1, B, id="the second of them"),
        pytest.param("2", 3, C, id="one device a process, whatever its local rank"),
        pytest.param("3,1", 2, None, id="more ranks than devices"),
        pytest.param("", 0, None, id="empty: none"),
        pytest.param("-1", 0, None, id="the usual way to say none"),
        pytest.param("1,-1,2", 1, B, id="what comes after nonsense is not visible, so one is left"),
        pytest.param("1,1", 0, None, id="named twice: none"),
        pytest.param("9", 0, None, id="no such index"),
        pytest.param(f"{C},{A}", 1, A, id="UUIDs"),
        pytest.param("GPU-cc", 0, C, id="the beginning of a UUID"),
        pytest.param("GPU-aa", 0, None, id="the beginning of two UUIDs"),
        pytest.param("GPU-zz", 0, None, id="the UUID of no GPU"),
        pytest.param(f"{A},{A}", 0, None, id="a UUID twice"),
        pytest.param("MIG-1111", 0, None, id="a part of a GPU"),
    ],
)
def test_a_rank_has_the_gpu_that_cuda_would_give_it(visible, local_rank, expected):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert place(environment, local_rank) == expected


@pytest.mark.parametrize(
    ("running", "visible", "local_rank", "expected"),
    [
        pytest.param({A}, None, 2, A, id="the script chose another than its local rank"),
        pytest.param({A}, "2,3", 0, C, id="a GPU it cannot see: the pid is of another process"),
        pytest.param({A, C}, None, 2, C, id="a context on several says nothing"),
    ],
)
def test_the_drivers_list_of_processes_goes_before_the_local_rank(running, visible, local_rank, expected):
    gpus = [replace(gpu, pids=(500,) if gpu.uuid in running else ()) for gpu in ALIKE]
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert place(environment, local_rank, gpus) == expected


MIXED = (Gpu(0, A, name="T4"), Gpu(1, B, name="H100"))


SILENT = (ALIKE[0], Gpu(1, "#1"))


@pytest.mark.parametrize(
    ("environment", "gpus", "container", "gpu", "why"),
    [
        # CUDA puts the fastest first, unless its order is the bus's, as NVML's is.
        ({}, MIXED, None, None, "several models"),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, MIXED, None, A, "local rank 0"),
        # Indices of another container's host mean nothing here; UUIDs, or those of the same container, do.
        ({"NVIDIA_VISIBLE_DEVICES": "2,3"}, ALIKE, "all", None, "another container"),
        ({"NVIDIA_VISIBLE_DEVICES": f"{C},{B}"}, ALIKE, "all", B, "local rank 0"),
        ({"NVIDIA_VISIBLE_DEVICES": "2,3"}, ALIKE, "2,3", A, "local rank 0"),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, ALIKE, None, A, "local rank 0"),
        # It may be the GPU that does not answer.
        ({"CUDA_VISIBLE_DEVICES": C}, SILENT, None, None, "does not answer"),
    ],
)
def test_container_and_device_order_count_and_nothing_is_guessed(environment, gpus, container, gpu, why):
    found = located(environment, 0, gpus, container)
    assert (found.gpu, why in found.how) == (gpu, True)


def test_an_environment_that_cannot_be_read_leaves_the_list_of_processes():
    assert located("it is another user's").how == "it is another user's"
    assert place("it is another user's", 0, [*ALIKE[:3], Gpu(3, D, pids=(500,))]) == D


@given(st.lists(st.sampled_from(["0", "1", " 2", "+3", "-1", "3x", "x", "", "GPU-a", "MIG-b", "GPU-c"]), max_size=5))
def test_the_variable_is_read_as_torch_reads_it(parts):
    value = ",".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert list(visible_entries(value)) == torch.cuda._parse_visible_devices()


BUSY = Gpu(
    index=0,
    uuid="GPU-0",
    name="H100",
    clock_reasons={"sw_power_cap": 1.0},
    sm_clock_mhz=1900.0,
    sm_clock_max_mhz=1980.0,
    ecc_uncorrected=0,
    ecc_corrected=1,
    memory_used_bytes=60 << 30,
    memory_total_bytes=80 << 30,
    pids=(100,),
)
OTHERS = [replace(BUSY, index=index, uuid=f"GPU-{index}") for index in range(3)]


def remarks_of(change, others=OTHERS):
    suspect = replace(BUSY, index=3, uuid="GPU-3", **change)
    return list(remarks([*others, suspect], {"GPU-3"}))


FAST, SLOW = {"sm_clock_mhz": 1900.0}, {"sm_clock_mhz": 1125.0}
REMARKS = {
    "like the others, all of them at the power cap": ({}, None),
    "slower than the others": (SLOW, " runs at 1,125 of 1,980 MHz, the others at 1,900: power cap"),
    "slower, and it does not say why": (
        SLOW | {"clock_reasons": {}},
        " runs at 1,125 of 1,980 MHz, the others at 1,900: it gives no reason",
    ),
    "slower, and it cannot say why": (
        SLOW | {"clock_reasons": None, "sm_clock_max_mhz": None},
        " runs at 1,125 MHz, the others at 1,900: it gives no reason",
    ),
    "slowed down by the hardware for an instant": (
        FAST | {"clock_reasons": {"hw_slowdown": 0.2, "hw_thermal_slowdown": 0.2}},
        " runs at 1,900 of 1,980 MHz: the hardware is too hot",
    ),
    "slowed down, the clock unknown": (
        {"clock_reasons": {"hw_slowdown": 1.0}, "sm_clock_mhz": None},
        " is slowed down: slowed down by the hardware",
    ),
    "clocks of an idle GPU": ({"sm_clock_mhz": 210.0, "clock_reasons": {"gpu_idle": 1.0}}, None),
    "a few percent are the draw of the silicon": ({"sm_clock_mhz": 1750.0}, None),
    "uncorrected errors": ({"ecc_uncorrected": 2}, ": ECC uncorrected errors: 2"),
    "corrected, many": ({"ecc_corrected": 11}, ": ECC corrected errors: 11, the others 1"),
    "corrected, a few": ({"ecc_corrected": 10}, None),
    "its memory is full": ({"memory_used_bytes": 79 << 30}, ": its memory is 99% full, the others' 75%"),
    "lost": ({"problems": ("GPU_IS_LOST",)}, " is lost: it has fallen off the bus"),
    "some other error": ({"problems": ("UNKNOWN",)}, " answers with an error: UNKNOWN"),
    "it was not its fault": ({"problems": ("NOT_ASKED",)}, None),
}


@pytest.mark.parametrize("case", REMARKS)
def test_remarks(case):
    change, expected = REMARKS[case]
    assert remarks_of(change) == ([] if expected is None else [f"GPU 3{expected}"])


def test_what_all_gpus_of_the_host_share_is_measured_against_their_own_limits():
    # GIVEN a host whose GPUs are all slow and full, with corrected errors, and some reasons
    change = {"sm_clock_mhz": 900.0, "memory_used_bytes": 80 << 30, "ecc_corrected": 500, "ecc_uncorrected": 1}
    assert remarks_of(change, [replace(other, **change) for other in OTHERS]) == ["GPU 3: ECC uncorrected errors: 1"]


def test_another_model_is_no_measure():
    assert remarks_of({"sm_clock_mhz": 1125.0}, [replace(other, name="T4") for other in OTHERS]) == []


def test_remarks_are_only_about_the_requested_gpus():
    lost = replace(BUSY, uuid="GPU-9", problems=("GPU_IS_LOST",))
    assert remarks([BUSY, lost], {BUSY.uuid}) == ()


@given(st.sets(st.sampled_from([name for name, field in Gpu.__dataclass_fields__.items() if field.default is None])))
def test_what_a_gpu_does_not_say_is_never_remarked_on(unsaid):
    # GIVEN a GPU with everything amiss, some of which it does not say
    amiss = {"sm_clock_mhz": 900.0, "ecc_uncorrected": 2, "ecc_corrected": 500, "memory_used_bytes": 80 << 30}
    whole = remarks_of(amiss)
    # THEN no remark comes of an absence: there are fewer, or they are worded with less
    assert len(remarks_of(amiss | dict.fromkeys(unsaid))) <= len(whole)
    assert remarks_of(dict.fromkeys(unsaid)) == []


HOT = {"clock_reasons": {"hw_thermal_slowdown": 1.0}, "sm_clock_mhz": 990.0}


@pytest.mark.parametrize(
    ("change", "others", "slowed"),
    [
        (SLOW, OTHERS, 1 - 1125 / 1900),
        (FAST, OTHERS, None),
        ({"sm_clock_mhz": 210.0, "clock_reasons": {"gpu_idle": 1.0}}, OTHERS, None),
        ({"sm_clock_mhz": None}, OTHERS, None),
        # Alone on its host it is held against its own maximum, if the hardware limits it: a power cap is usual.
        (HOT, [], 0.5),
        (SLOW, [], None),
        (HOT, [replace(one, name="L4") for one in OTHERS], 0.5),
    ],
)
def test_how_much_slower_a_gpu_is(change, others, slowed):
    suspect = replace(BUSY, index=3, uuid="GPU-3", **change)
    assert slowed_fraction(suspect, [*others, suspect]) == (slowed and pytest.approx(slowed))
