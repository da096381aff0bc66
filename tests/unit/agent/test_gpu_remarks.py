"""What is out of the ordinary about a GPU: a truth table."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.agent.gpus import Gpu, remarks, slowed_fraction

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


def said_of(change, others=OTHERS):
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
    assert said_of(change) == ([] if expected is None else [f"GPU 3{expected}"])


def test_what_all_gpus_of_the_host_share_is_measured_against_their_own_limits():
    # GIVEN a host whose GPUs are all slow and full, with corrected errors, and some reasons
    change = {"sm_clock_mhz": 900.0, "memory_used_bytes": 80 << 30, "ecc_corrected": 500, "ecc_uncorrected": 1}
    # THEN only what is amiss by itself is said
    assert said_of(change, [replace(other, **change) for other in OTHERS]) == ["GPU 3: ECC uncorrected errors: 1"]


def test_another_model_is_no_measure():
    assert said_of({"sm_clock_mhz": 1125.0}, [replace(other, name="T4") for other in OTHERS]) == []


def test_only_those_asked_about_are_remarked_on():
    lost = replace(BUSY, uuid="GPU-9", problems=("GPU_IS_LOST",))
    assert remarks([BUSY, lost], {BUSY.uuid}) == ()


@given(st.sets(st.sampled_from([name for name, field in Gpu.__dataclass_fields__.items() if field.default is None])))
def test_what_a_gpu_does_not_say_is_never_remarked_on(unsaid):
    # GIVEN a GPU with everything amiss, some of which it does not say
    amiss = {"sm_clock_mhz": 900.0, "ecc_uncorrected": 2, "ecc_corrected": 500, "memory_used_bytes": 80 << 30}
    whole = said_of(amiss)
    # THEN no remark comes of an absence: there are fewer, or they are worded with less
    assert len(said_of(amiss | dict.fromkeys(unsaid))) <= len(whole)
    assert said_of(dict.fromkeys(unsaid)) == []


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
