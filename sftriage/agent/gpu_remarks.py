"""What is out of the ordinary about a GPU, in plain sentences: against its own limits and the host's other GPUs.

What all GPUs of a busy host have in common (large models run at the power cap) is no remark. Nothing here is a verdict:
a remark stands beside one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from statistics import median

from sftriage.agent.gpus import Gpu

SLOW_FRACTION = 0.9
"""Of the others' clock: GPUs of one host drift by a few percent as it is."""

UNUSED_FRACTION = 0.5
"""Of the others' utilisation."""

HOTTER_C = 15
NEAR_SLOWDOWN_C = 2
OUT_OF_LINE = 10
"""A counter's multiple of the others' that is remarkable: counters that only ever grow say little by themselves."""

FEW_REPLAYS = 100
"""PCIe replays that any link may have had."""

_MOSTLY = 0.5

_HARD = {
    "hw_thermal_slowdown": "the hardware is too hot",
    "hw_power_brake_slowdown": "power brake: the power supply asked for less",
    "sw_thermal_slowdown": "too hot",
    "reliability": "voltage at its limit",
    "board_limit": "board's limit",
    "hw_slowdown": "slowed down by the hardware",
}
"""Reasons that are out of the ordinary on any GPU and at any instant; the last one says only that there is another."""

_SOFT = {
    "sw_power_cap": "power cap",
    "applications_clocks_setting": "clocks set by hand",
    "sync_boost": "clocks tied to another GPU's",
    "display_clock_setting": "clocks set for a display",
}

_WORDS = {
    "GPU_IS_LOST": "is lost: it has fallen off the bus",
    "RESET_REQUIRED": "has to be reset",
    "NO_ANSWER": "does not answer: a question to it did not come back",
    "DIED": "could not be asked: whoever asked it died",
}


def remarks(gpus: Sequence[Gpu], about: Collection[str], ranks_pids: Collection[int] = ()) -> tuple[str, ...]:
    """What is out of the ordinary.

    Args:
        gpus: all GPUs of the host, to compare with.
        about: UUIDs of those to remark on.
        ranks_pids: the processes of the job's ranks on this host; any other on their GPUs is a stranger.
    """
    found: list[str] = []
    for gpu in gpus:
        if gpu.uuid in about:
            others = [other for other in gpus if other is not gpu and other.name == gpu.name]
            for look in _LOOKS:
                found += look(gpu, others)
            found += _strangers(gpu, ranks_pids)
    return tuple(found)


def _problems(gpu: Gpu, others: Sequence[Gpu]) -> list[str]:
    said = [name for name in gpu.problems if name != "NOT_ASKED"]
    return [f"GPU {gpu.index} " + _WORDS.get(name, f"answers with an error: {name}") for name in said]


def _clocks(gpu: Gpu, others: Sequence[Gpu]) -> list[str]:
    """Slowed down: for a reason that always counts, or far below the others that are at work."""
    reasons = gpu.clock_reasons or {}
    hard = [words for name, words in _HARD.items() if reasons.get(name)]
    if len(hard) > 1:
        hard = [words for words in hard if words != _HARD["hw_slowdown"]]
    usual = _usual([other.sm_clock_mhz for other in others if not _idle(other)])
    clock = gpu.sm_clock_mhz
    slow = clock is not None and usual is not None and not _idle(gpu) and clock < SLOW_FRACTION * usual
    if not (hard or slow):
        return []
    why = hard + [words for name, words in _SOFT.items() if reasons.get(name, 0) >= _MOSTLY]
    said = f"GPU {gpu.index} is slowed down" if clock is None else f"GPU {gpu.index} runs at {clock:,.0f}"
    if clock is not None:
        said += f" of {gpu.sm_clock_max_mhz:,.0f} MHz" if gpu.sm_clock_max_mhz else " MHz"
    if slow and usual is not None:
        said += f", the others at {usual:,.0f}"
    return [f"{said}: {', '.join(why) if why else 'it gives no reason'}"]


def _power(gpu: Gpu, others: Sequence[Gpu]) -> list[str]:
    limit, default = gpu.power_limit_w, gpu.power_limit_default_w
    if limit is None or default is None or limit >= default:
        return []
    return [f"GPU {gpu.index}: power limit set to {limit:,.0f} of {default:,.0f} W"]


def _temperature(gpu: Gpu, others: Sequence[Gpu]) -> list[str]:
    now = gpu.temperature_c
    if now is None:
        return []
    if gpu.slowdown_c is not None and now >= gpu.slowdown_c - NEAR_SLOWDOWN_C:
        return [f"GPU {gpu.index} is at {now:.0f} °C; it slows itself down at {gpu.slowdown_c:.0f} °C"]
    usual = _usual([other.temperature_c for other in others if not _idle(other)])
    if usual is not None and now >= usual + HOTTER_C:
        return [f"GPU {gpu.index} is at {now:.0f} °C, the others at {usual:.0f} °C"]
    return []


def _ecc(gpu: Gpu, others: Sequence[Gpu]) -> list[str]:
    found = []
    if gpu.ecc_uncorrected:
        found.append(f"GPU {gpu.index}: ECC uncorrected errors: {gpu.ecc_uncorrected:,}")
    found += _counter(gpu, others, lambda one: one.ecc_corrected, 0, "ECC corrected errors")
    return found


def _pcie(gpu: Gpu, others: Sequence[Gpu]) -> list[str]:
    found = []
    width, width_max = gpu.pcie_width, gpu.pcie_width_max
    if width and width_max and width < width_max:
        found.append(f"GPU {gpu.index}: PCIe link x{width} of x{width_max}")
    # An idle link goes down to a lower generation to save power.
    gen, gen_max = gpu.pcie_gen, gpu.pcie_gen_max
    if gen and gen_max and gen < gen_max and not _idle(gpu):
        found.append(f"GPU {gpu.index}: PCIe link of generation {gen} of {gen_max}")
    return found + _counter(gpu, others, lambda one: one.pcie_replays, FEW_REPLAYS, "PCIe replays")


def _nvlink(gpu: Gpu, others: Sequence[Gpu]) -> list[str]:
    found = []
    up = gpu.nvlink_links_up
    most = max((other.nvlink_links_up for other in others if other.nvlink_links_up is not None), default=0)
    if up is not None and up < most:
        found.append(f"GPU {gpu.index}: {up} NVLinks are up, {most} on another GPU")
    return found + _counter(gpu, others, _nvlink_errors, 0, "NVLink errors")


def _utilisation(gpu: Gpu, others: Sequence[Gpu]) -> list[str]:
    """A GPU that waits for its host stands out: those that wait for each other spin, and count as in use."""
    now = gpu.utilisation_percent
    usual = _usual([other.utilisation_percent for other in others])
    if now is None or usual is None or now >= UNUSED_FRACTION * usual:
        return []
    return [f"GPU {gpu.index} is in use {now:.0f} % of the time, the others {usual:.0f} %"]


def _strangers(gpu: Gpu, ranks_pids: Collection[int]) -> list[str]:
    """Processes that are no ranks; only where a rank is seen too, or the pids may be those of another namespace."""
    slices = [instance.processes for instance in gpu.mig or ()]
    everyone = {process.pid: process for group in (gpu.processes or (), *slices) for process in group}
    strangers = [process for pid, process in sorted(everyone.items()) if pid not in ranks_pids]
    if len(strangers) == len(everyone):
        return []
    return [
        f"GPU {gpu.index} is also used by process {process.pid} ({process.name or 'of unknown name'})"
        for process in strangers
    ]


def _counter(gpu: Gpu, others: Sequence[Gpu], of: Callable[[Gpu], int | None], ordinary: int, what: str) -> list[str]:
    """A counter that is far above the others'; with nobody to compare with, there is nothing to say."""
    now = of(gpu)
    usual = _usual([of(other) for other in others])
    if now is None or usual is None or now <= max(ordinary, OUT_OF_LINE * usual):
        return []
    return [f"GPU {gpu.index}: {what}: {now:,}, the others {usual:,.0f}"]


def _nvlink_errors(gpu: Gpu) -> int | None:
    return None if gpu.nvlink_errors is None else sum(gpu.nvlink_errors.values())


def _idle(gpu: Gpu) -> bool:
    return gpu.utilisation_percent == 0 or (gpu.clock_reasons or {}).get("gpu_idle", 0) >= _MOSTLY


def _usual(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


_LOOKS = (_problems, _clocks, _power, _temperature, _ecc, _pcie, _nvlink, _utilisation)
