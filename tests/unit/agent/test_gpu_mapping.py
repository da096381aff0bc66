"""Which GPU a rank trains on, under everything CUDA_VISIBLE_DEVICES may hold."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sftriage.agent.gpu_mapping import RankProcess, locate, visible_entries
from sftriage.agent.gpus import Gpu, GpuProcess, MigInstance

A, B, C, D = "GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3", "GPU-dddd-4"
ALIKE = tuple(Gpu(index, uuid, name="H100") for index, uuid in enumerate((A, B, C, D)))
SLICES = (MigInstance("MIG-1111", 3, 0), MigInstance("MIG-2222", 11, 0))
SLICED = (Gpu(0, A, name="A100", mig=SLICES), Gpu(1, B, name="A100", mig=(MigInstance("MIG-3333", 1, 0),)))


def place(environment, local_rank=0, gpus=ALIKE, container=None, pid=500):
    found = locate(RankProcess(0, pid, local_rank, environment), gpus, container)
    return found.gpu, found.mig


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
    ],
)
def test_a_rank_has_the_gpu_that_cuda_would_give_it(visible, local_rank, expected):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert place(environment, local_rank) == (expected, None)


@pytest.mark.parametrize(
    ("visible", "local_rank", "expected"),
    [
        pytest.param("MIG-2222", 0, (A, "MIG-2222"), id="an instance by its UUID"),
        pytest.param("MIG-3333,MIG-1111", 1, (A, "MIG-1111"), id="two of them"),
        pytest.param(f"MIG-{A}/3/0", 0, (A, "MIG-1111"), id="as drivers before R470 named it"),
        pytest.param(f"MIG-{A}/1", 0, (None, None), id="the old form is not a beginning"),
        pytest.param("1", 0, (B, "MIG-3333"), id="by the index of a GPU that has one"),
        pytest.param("0", 0, (A, None), id="by the index of a GPU that has several: only the GPU is known"),
    ],
)
def test_a_slice_is_known_with_the_gpu_it_is_of(visible, local_rank, expected):
    assert place({"CUDA_VISIBLE_DEVICES": visible}, local_rank, SLICED) == expected


@pytest.mark.parametrize(
    ("running", "visible", "local_rank", "expected"),
    [
        pytest.param({A}, None, 2, A, id="the script chose another than its local rank"),
        pytest.param({A}, "2,3", 0, C, id="a GPU it cannot see: the pid is somebody else's"),
        pytest.param({A, C}, None, 2, C, id="a context on several says nothing"),
    ],
)
def test_the_drivers_list_of_processes_goes_before_the_local_rank(running, visible, local_rank, expected):
    gpus = [Gpu(g.index, g.uuid, g.name, processes=(GpuProcess(500, "p"),) if g.uuid in running else ()) for g in ALIKE]
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert place(environment, local_rank, gpus) == (expected, None)


def test_a_process_on_a_slice_is_on_that_slice():
    slices = (SLICES[0], MigInstance("MIG-2222", 11, 0, (GpuProcess(500, "p"),)))
    assert place({}, gpus=[Gpu(0, A, mig=slices), SLICED[1]]) == (A, "MIG-2222")


MIXED = (Gpu(0, A, name="T4"), Gpu(1, B, name="H100"))


@pytest.mark.parametrize(
    ("environment", "gpus", "container", "why"),
    [
        pytest.param({}, MIXED, None, "several models", id="CUDA puts the fastest first"),
        pytest.param(
            {"NVIDIA_VISIBLE_DEVICES": "2,3"}, ALIKE, "all", "another container", id="indices of another host"
        ),
        pytest.param(
            {"CUDA_VISIBLE_DEVICES": C},
            (ALIKE[0], Gpu(1, "#1")),
            None,
            "does not answer",
            id="it may be the silent one",
        ),
    ],
)
def test_what_cannot_be_told_is_not_guessed(environment, gpus, container, why):
    found = locate(RankProcess(0, 500, 0, environment), gpus, container)
    assert found.gpu is None
    assert why in found.how


@pytest.mark.parametrize(
    ("environment", "gpus", "container", "expected"),
    [
        pytest.param({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, MIXED, None, A, id="the bus's order is NVML's"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": f"{C},{B}"}, ALIKE, "all", B, id="indices count within the container"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "2,3"}, ALIKE, "2,3", A, id="the same container: the same view"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "all"}, ALIKE, None, A, id="all of them"),
    ],
)
def test_a_container_and_an_order_count(environment, gpus, container, expected):
    assert place(environment, 0, gpus, container) == (expected, None)


def test_an_environment_that_cannot_be_read_leaves_the_list_of_processes():
    silent = RankProcess(0, 500, 0, None, "it is another user's")
    assert locate(silent, ALIKE).how == "it is another user's"
    seen = [*ALIKE[:3], Gpu(3, D, processes=(GpuProcess(500, "p"),))]
    assert locate(silent, seen).gpu == D


@given(st.lists(st.sampled_from(["0", "1", " 2", "+3", "-1", "3x", "x", "", "GPU-a", "MIG-b", "GPU-c"]), max_size=5))
def test_the_variable_is_read_as_torch_reads_it(parts):
    # GIVEN any list somebody may write there
    value = ",".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", value)
        # THEN torch, which mirrors CUDA, finds the same in it
        assert list(visible_entries(value)) == torch.cuda._parse_visible_devices()
