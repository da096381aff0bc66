"""What differs between a suspect's processes and those of its peers, by the facts that each reports. Pure.

A fact differs if nearly all peers (`NEARLY_ALL` of them) have one value, and nearly all ranks of the suspect another
one. It may only be the reason of a slow rank: it decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import ceil

from sftriage.model.events import Difference
from sftriage.model.hangs import Fact
from sftriage.model.verdicts import Suspect

Facts = Mapping[str, Fact]

MAX_DIFFERENCES, MAX_VALUE = 4, 80
NEARLY_ALL = 0.75
MEASURED = frozenset({"gpu_clock_mhz"})
MEASURED_FRACTION = 0.1
"""Facts that vary by themselves, and by how much they do."""

_WORK = ("num_workers", "batch_size", "prefetch_factor", "persistent_workers", "pin_memory")
_TYPES = ("parameter_types", "default_type", "matmul_precision", "deterministic", "cudnn_benchmark", "detect_anomaly")
_CPUS = ("cpu_limit", "cores", "nice", "scheduling", "memory_limit_bytes")
_THREADS = ("torch_threads", "interop_threads", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_GPUS = ("gpu", "gpu_clock_mhz", "gpu_limited_by", "gpu_power_limit_watts")
_PYTHON = ("traced_by", "gc")

_OF_DATA = (*_WORK, *_CPUS, *_THREADS, *_PYTHON, *_TYPES, *_GPUS, "torch")
_OF_COMPUTE = (*_TYPES, "batch_size", *_GPUS, *_THREADS, *_CPUS, *_PYTHON, "torch", "cuda")
_OF_STARVED = (*_CPUS, *_THREADS, *_WORK, *_PYTHON)
"""Facts by how likely they explain a slow ``data``, a slow other stage, and a rank that waits for CPUs or memory."""

_NEED_NOT_BE = frozenset({"cpu_limit", "memory_limit_bytes", "traced_by", "gpu_limited_by"})
"""Facts that are missing where there is nothing; of others, a missing one is unknown."""


def differences(suspect: Suspect, its: Sequence[Facts], peers: Sequence[Facts]) -> tuple[Difference, ...]:
    """The facts that differ, the likeliest reason first: `MAX_DIFFERENCES` at most.

    ``its`` are the facts of the suspect's ranks, and ``peers`` those of ranks that do the same work; only those of
    ranks that answered.
    """
    names = {name for facts in (*its, *peers) for name in facts}
    if suspect.scope == "cohort":
        # (its peers do other work)
        names -= {*_WORK, *_TYPES}
    found = [each for name in names if (each := _difference(name, its, peers)) is not None]
    order: tuple[str, ...] = _OF_DATA if suspect.stage == "data" else _OF_COMPUTE
    order = _OF_STARVED if suspect.by_system is not None else order
    order = (*_PYTHON * (suspect.interpreter is not None), *order, *sorted(names.difference(order)))
    return tuple(sorted(found, key=lambda each: order.index(each.name))[:MAX_DIFFERENCES])


def _difference(name: str, its: Sequence[Facts], peers: Sequence[Facts]) -> Difference | None:
    mine, theirs = _values(name, its), _values(name, peers)
    if not mine or not theirs:
        return None
    usual, alike = _commonest(name, theirs)
    unlike = [value for value in mine if not _same(name, value, usual)]
    if alike < ceil(NEARLY_ALL * len(theirs)) or not unlike or len(unlike) < ceil(NEARLY_ALL * len(mine)):
        return None
    return Difference(name, _short(_commonest(name, unlike)[0]), _short(usual), alike)


def _values(name: str, ranks: Sequence[Facts]) -> list[Fact | None]:
    optional = name in _NEED_NOT_BE or name.isupper()
    return [facts.get(name) for facts in ranks if facts and (optional or name in facts)]


def _commonest(name: str, values: Sequence[Fact | None]) -> tuple[Fact | None, int]:
    """The value that the most others are like, and how many are."""
    counts = [sum(_same(name, value, other) for other in values) for value in values]
    return max(zip(values, counts, strict=True), key=lambda pair: pair[1])


def _same(name: str, one: Fact | None, other: Fact | None) -> bool:
    if name in MEASURED and isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) <= MEASURED_FRACTION * max(abs(one), abs(other))
    if isinstance(one, str) and isinstance(other, str) and "/" in one:
        # (the path of a rank's own file: only its numbers differ)
        return re.sub(r"\d+", "0", one) == re.sub(r"\d+", "0", other)
    return one == other


def _short(value: Fact | None) -> Fact | None:
    return f"{value[: MAX_VALUE - 3]}..." if isinstance(value, str) and len(value) > MAX_VALUE else value
