"""What is out of the ordinary about a GPU: a truth table."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.agent.gpu_remarks import remarks
from sftriage.agent.gpus import Gpu, GpuProcess, MigInstance

BUSY = Gpu(
    index=0,
    uuid="GPU-0",
    name="H100",
    clock_reasons={"sw_power_cap": 1.0},
    sm_clock_mhz=1900.0,
    sm_clock_max_mhz=1980.0,
    power_w=690.0,
    power_limit_w=700.0,
    power_limit_default_w=700.0,
    temperature_c=62.0,
    slowdown_c=90.0,
    ecc_uncorrected=0,
    ecc_corrected=1,
    pcie_replays=3,
    pcie_gen=5,
    pcie_gen_max=5,
    pcie_width=16,
    pcie_width_max=16,
    nvlink_links=18,
    nvlink_links_up=18,
    nvlink_errors={"replay": 2, "recovery": 0},
    utilisation_percent=98.0,
    processes=(GpuProcess(100, "python"),),
)
OTHERS = [replace(BUSY, index=index, uuid=f"GPU-{index}") for index in range(3)]


def slice_of(uuid, pid, name):
    return MigInstance(uuid, 1, 0, (GpuProcess(pid, name),))


def said_of(change, others=OTHERS):
    suspect = replace(BUSY, index=3, uuid="GPU-3", **change)
    return list(remarks([*others, suspect], {"GPU-3"}, {100}))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param({}, [], id="like the others, all of them at the power cap"),
        pytest.param(
            {"sm_clock_mhz": 1125.0},
            ["GPU 3 runs at 1,125 of 1,980 MHz, the others at 1,900: power cap"],
            id="slower than the others",
        ),
        pytest.param(
            {"sm_clock_mhz": 1125.0, "clock_reasons": {}},
            ["GPU 3 runs at 1,125 of 1,980 MHz, the others at 1,900: it gives no reason"],
            id="slower, and it does not say why",
        ),
        pytest.param(
            {"sm_clock_mhz": 1125.0, "clock_reasons": None, "sm_clock_max_mhz": None},
            ["GPU 3 runs at 1,125 MHz, the others at 1,900: it gives no reason"],
            id="slower, and it cannot say why",
        ),
        pytest.param(
            {"clock_reasons": {"hw_slowdown": 0.2, "hw_thermal_slowdown": 0.2}},
            ["GPU 3 runs at 1,900 of 1,980 MHz: the hardware is too hot"],
            id="slowed down by the hardware for an instant",
        ),
        pytest.param(
            {"clock_reasons": {"hw_slowdown": 1.0}, "sm_clock_mhz": None},
            ["GPU 3 is slowed down: slowed down by the hardware"],
            id="slowed down, the clock unknown",
        ),
        pytest.param({"sm_clock_mhz": 210.0, "clock_reasons": {"gpu_idle": 1.0}}, [], id="clocks of an idle GPU"),
        pytest.param({"sm_clock_mhz": 1750.0}, [], id="a few percent are the draw of the silicon"),
        pytest.param({"power_limit_w": 300.0}, ["GPU 3: power limit set to 300 of 700 W"], id="a lowered power limit"),
        pytest.param({"temperature_c": 80.0}, ["GPU 3 is at 80 °C, the others at 62 °C"], id="hotter than the others"),
        pytest.param(
            {"temperature_c": 89.0}, ["GPU 3 is at 89 °C; it slows itself down at 90 °C"], id="about to slow down"
        ),
        pytest.param({"ecc_uncorrected": 2}, ["GPU 3: ECC uncorrected errors: 2"], id="uncorrected errors"),
        pytest.param({"ecc_corrected": 11}, ["GPU 3: ECC corrected errors: 11, the others 1"], id="corrected, many"),
        pytest.param({"ecc_corrected": 10}, [], id="corrected, a few"),
        pytest.param({"pcie_width": 8}, ["GPU 3: PCIe link x8 of x16"], id="a narrow link"),
        pytest.param({"pcie_gen": 1}, ["GPU 3: PCIe link of generation 1 of 5"], id="a slow link"),
        pytest.param({"pcie_gen": 1, "clock_reasons": {"gpu_idle": 1.0}}, [], id="a link that sleeps, as its GPU does"),
        pytest.param({"pcie_replays": 101}, ["GPU 3: PCIe replays: 101, the others 3"], id="replays"),
        pytest.param({"pcie_replays": 100}, [], id="a few replays"),
        pytest.param({"nvlink_links_up": 17}, ["GPU 3: 17 NVLinks are up, 18 on another GPU"], id="a link is down"),
        pytest.param(
            {"nvlink_errors": {"replay": 20, "recovery": 1}},
            ["GPU 3: NVLink errors: 21, the others 2"],
            id="errors on links",
        ),
        pytest.param(
            {"utilisation_percent": 12.0}, ["GPU 3 is in use 12 % of the time, the others 98 %"], id="it waits"
        ),
        pytest.param({"problems": ("GPU_IS_LOST",)}, ["GPU 3 is lost: it has fallen off the bus"], id="lost"),
        pytest.param({"problems": ("UNKNOWN",)}, ["GPU 3 answers with an error: UNKNOWN"], id="some other error"),
        pytest.param({"problems": ("NOT_ASKED",)}, [], id="it was not its fault"),
        pytest.param(
            {"processes": (GpuProcess(100, "python"), GpuProcess(7, "miner"))},
            ["GPU 3 is also used by process 7 (miner)"],
            id="somebody else's process",
        ),
        pytest.param({"processes": (GpuProcess(7, "miner"),)}, [], id="pids of another namespace, perhaps"),
        pytest.param(
            {"mig": (slice_of("MIG-1", 100, "python"), slice_of("MIG-2", 9, ""))},
            ["GPU 3 is also used by process 9 (of unknown name)"],
            id="a neighbour on another slice",
        ),
    ],
)
def test_remarks(change, expected):
    assert said_of(change) == expected


def test_what_all_gpus_of_the_host_share_is_measured_against_their_own_limits():
    # GIVEN a host whose GPUs are all slow, hot and half connected
    change = {"sm_clock_mhz": 900.0, "temperature_c": 80.0, "pcie_width": 8}
    # THEN only what is amiss by itself is said
    assert said_of(change, [replace(other, **change) for other in OTHERS]) == ["GPU 3: PCIe link x8 of x16"]


def test_another_model_is_no_measure():
    assert said_of({"sm_clock_mhz": 1125.0}, [replace(other, name="T4") for other in OTHERS]) == []


def test_only_those_asked_about_are_remarked_on():
    lost = replace(BUSY, uuid="GPU-9", problems=("GPU_IS_LOST",))
    assert remarks([BUSY, lost], {BUSY.uuid}) == ()


@given(
    st.sets(st.sampled_from([name for name in Gpu.__dataclass_fields__ if name not in ("index", "uuid", "problems")]))
)
def test_what_a_gpu_does_not_say_is_never_remarked_on(unsaid):
    # GIVEN a GPU with everything amiss, some of which it does not say
    amiss = {
        "sm_clock_mhz": 900.0,
        "power_limit_w": 100.0,
        "temperature_c": 95.0,
        "ecc_uncorrected": 2,
        "pcie_width": 1,
        "nvlink_links_up": 0,
    }
    whole = said_of(amiss)
    # THEN no remark comes of an absence: there are fewer, or they are worded with less
    assert len(said_of(amiss | dict.fromkeys(unsaid))) <= len(whole)
    assert said_of(dict.fromkeys(unsaid)) == []
