"""What is known of a host's GPUs at one instant, and how it is read from what `nvml_child` says.

What a GPU, its driver or this user's rights do not tell is None: never zero, and never a remark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

MAX_GPUS = 64


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a context on a GPU. In a container the driver may show pids that are not this container's."""

    pid: int
    name: str
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MigInstance:
    """One MIG device: a compute instance of a GPU instance. Clocks, power and errors are its GPU's."""

    uuid: str
    gpu_instance: int | None = None
    compute_instance: int | None = None
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of the host. Each None is something it did not say.

    Attributes:
        index: NVML's number of it, in the order of the PCI bus.
        uuid: its UUID, or ``#`` and the index where it did not even say that.
        clock_reasons: why its clocks were limited, with the fraction of the samples in which that was so.
        sm_clock_mhz, power_w: the median of the samples.
        temperature_c, pcie_gen: the highest of them.
        utilisation_percent, memory_utilisation_percent: their mean.
        slowdown_c, shutdown_c: temperatures from which the hardware slows itself down and switches itself off.
        ecc_uncorrected, ecc_corrected: errors since the driver was loaded.
        pcie_replays: since the GPU was last reset.
        nvlink_errors: by kind, over all links, since they were last cleared.
        mig: its MIG instances; None where it is not in MIG mode.
        problems: errors by NVML's own names, such as GPU_IS_LOST; ``NO_ANSWER`` where a call did not come back, and
            ``NOT_ASKED`` where that kept this one from being asked.
    """

    index: int
    uuid: str
    name: str | None = None
    pci_bus_id: str | None = None
    clock_reasons: Mapping[str, float] | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    memory_clock_max_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    power_limit_default_w: float | None = None
    temperature_c: float | None = None
    slowdown_c: float | None = None
    shutdown_c: float | None = None
    ecc_uncorrected: int | None = None
    ecc_corrected: int | None = None
    pcie_replays: int | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlink_links: int | None = None
    nvlink_links_up: int | None = None
    nvlink_errors: Mapping[str, int] | None = None
    utilisation_percent: float | None = None
    memory_utilisation_percent: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    mig: tuple[MigInstance, ...] | None = None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """What one run of `nvml_child` has said. ``problem`` says in a word why there is nothing, or no more."""

    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


_NUMBERS = {field.name for field in fields(Gpu) if field.type in ("float | None", "int | None")}
_TEXTS = ("name", "pci_bus_id")
_MIDDLE = ("sm_clock_mhz", "power_w")
_HIGHEST = ("temperature_c", "pcie_gen")
_MEAN = ("utilisation_percent", "memory_utilisation_percent")
_MAX_TEXT = 200


def parse_reading(said: str, *, ended: bool) -> Reading:
    """What the lines of `nvml_child` come to. Whatever is not what it should be is left out.

    Args:
        said: its standard output, which may break off anywhere.
        ended: it ended of itself; otherwise it was killed at its deadline.
    """
    driver: str | None = None
    problem, done = "", False
    asking, count = -1, 0
    standing: dict[int, dict[str, Any]] = {}
    samples: dict[int, list[dict[str, Any]]] = {}
    for line in said.splitlines():
        try:
            word = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(word, dict):
            continue
        if isinstance(word.get("driver"), str):
            driver, count = word["driver"][:_MAX_TEXT], _index(word.get("count"), 0)
        if isinstance(word.get("error"), str):
            problem = word["error"][:_MAX_TEXT]
        done = done or word.get("done") is True
        asking = _index(word.get("asking"), asking)
        gpu, sample = _index(word.get("gpu")), _index(word.get("sample"))
        if gpu >= 0:
            standing[gpu] = word
        elif sample >= 0:
            samples.setdefault(sample, []).append(word)
    if not (done or problem):
        problem = "DIED" if ended else "NO_ANSWER"
        if asking >= 0:
            samples.setdefault(asking, []).append({"problems": [problem]})
        for index in range(count):
            standing.setdefault(index, {} if index == asking else {"problems": ["NOT_ASKED"]})
    gpus = tuple(_gpu(index, word, samples.get(index, [])) for index, word in sorted(standing.items()))
    return Reading(driver, gpus, problem)


def _gpu(index: int, standing: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> Gpu:
    facts = _mapping(standing.get("facts"))
    found: dict[str, Any] = {name: facts[name] for name in _NUMBERS if _is_number(facts.get(name))}
    found |= {name: facts[name][:_MAX_TEXT] for name in _TEXTS if isinstance(facts.get(name), str)}
    found |= _sampled([_mapping(sample.get("facts")) for sample in samples])
    links = _mapping(facts.get("nvlink_errors"))
    if links:
        found["nvlink_errors"] = {str(name): count for name, count in links.items() if _is_number(count)}
    mig = standing.get("mig")
    if isinstance(mig, list):
        found["mig"] = tuple(_instance(word) for word in mig if isinstance(word, dict))
    if isinstance(facts.get("processes"), list):
        found["processes"] = _processes(facts["processes"])
    problems = [standing.get("problems"), *(sample.get("problems") for sample in samples)]
    named = [str(name)[:_MAX_TEXT] for names in problems if isinstance(names, list) for name in names]
    uuid = facts.get("uuid")
    return Gpu(
        index, uuid[:_MAX_TEXT] if isinstance(uuid, str) else f"#{index}", **found, problems=tuple(dict.fromkeys(named))
    )


def _sampled(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for names, of_all in ((_MIDDLE, median), (_HIGHEST, max), (_MEAN, _mean)):
        for name in names:
            values = [sample[name] for sample in samples if _is_number(sample.get(name))]
            if values:
                found[name] = of_all(values)
    said = [sample["clock_reasons"] for sample in samples if isinstance(sample.get("clock_reasons"), list)]
    if said:
        every = dict.fromkeys(str(name)[:_MAX_TEXT] for reasons in said for name in reasons)
        found["clock_reasons"] = {name: sum(name in reasons for reasons in said) / len(said) for name in every}
    return found


def _instance(word: Mapping[str, Any]) -> MigInstance:
    return MigInstance(
        uuid=str(word.get("uuid") or "")[:_MAX_TEXT],
        gpu_instance=word["gpu_instance"] if _is_number(word.get("gpu_instance")) else None,
        compute_instance=word["compute_instance"] if _is_number(word.get("compute_instance")) else None,
        processes=_processes(word.get("processes")),
    )


def _processes(words: Any) -> tuple[GpuProcess, ...]:
    return tuple(
        GpuProcess(
            pid=word["pid"],
            name=str(word.get("name") or "")[:_MAX_TEXT],
            memory_bytes=word["memory_bytes"] if _is_number(word.get("memory_bytes")) else None,
        )
        for word in (words if isinstance(words, list) else ())
        if isinstance(word, dict) and type(word.get("pid")) is int
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _index(value: Any, otherwise: int = -1) -> int:
    return value if type(value) is int and 0 <= value < MAX_GPUS else otherwise


def _is_number(value: Any) -> bool:
    # JSON's true is an int too, and its NaN and Infinity no numbers anybody could compare.
    return type(value) in (int, float) and 0 <= value < 1e18


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
