"""Which GPU a rank trains on, under everything CUDA_VISIBLE_DEVICES may hold."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sftriage.agent.gpus import Gpu, locate, visible_entries
from sftriage.recorder import RingInfo
from sftriage.records import StageSchema

A, B, C, D = "GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3", "GPU-dddd-4"
ALIKE = tuple(Gpu(index, uuid, name="H100") for index, uuid in enumerate((A, B, C, D)))


def located(environment, local_rank=0, gpus=ALIKE, container=None):
    info = RingInfo(0, 8, local_rank, 0, "job", "host", "", StageSchema.closed(("data",)), 1, 2, 500, 0)
    return locate(info, environment, gpus, container)


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
        pytest.param({A}, "2,3", 0, C, id="a GPU it cannot see: the pid is somebody else's"),
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
def test_a_container_and_an_order_count_and_what_cannot_be_told_is_not_guessed(environment, gpus, container, gpu, why):
    found = located(environment, 0, gpus, container)
    assert (found.gpu, why in found.how) == (gpu, True)


def test_an_environment_that_cannot_be_read_leaves_the_list_of_processes():
    assert located("it is another user's").how == "it is another user's"
    assert place("it is another user's", 0, [*ALIKE[:3], Gpu(3, D, pids=(500,))]) == D


@given(st.lists(st.sampled_from(["0", "1", " 2", "+3", "-1", "3x", "x", "", "GPU-a", "MIG-b", "GPU-c"]), max_size=5))
def test_the_variable_is_read_as_torch_reads_it(parts):
    # GIVEN any list somebody may write there
    value = ",".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", value)
        # THEN torch, which mirrors CUDA, finds the same in it
        assert list(visible_entries(value)) == torch.cuda._parse_visible_devices()
