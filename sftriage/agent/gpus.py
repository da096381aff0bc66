"""A host's GPUs at one instant, as `nvml_child` tells of them, and which of them a rank trains on.

What a GPU, its driver or this user's rights do not tell is None: never zero, and never a remark.

``CUDA_VISIBLE_DEVICES`` is read as torch and CUDA read it (``torch.cuda._parse_visible_devices`` is what the tests
compare with): the first entry that makes no sense ends the list, and an entry named twice empties it. An index counts
in CUDA's order of the GPUs, which is NVML's only where all are alike or ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from statistics import median
from typing import Annotated

import msgspec

from sftriage.recorder import RingInfo

VISIBLE, ORDER, CONTAINER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES"

_LEADING_NUMBER = re.compile(r"[+-]?[0-9]+")
_Index = Annotated[int, msgspec.Meta(ge=0, lt=64)]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of the host. Each None is something it did not say.

    Attributes:
        index: NVML's number of it, in the order of the PCI bus.
        uuid: its UUID, or ``#`` and the index where it did not even say that.
        name: its model.
        pci_bus_id: what the kernel's log calls it, in Xid messages for one.
        clock_reasons: why its clocks were limited, with the fraction of the samples in which that was so.
        sm_clock_mhz: the median of the samples.
        ecc_uncorrected, ecc_corrected: errors since the driver was loaded.
        pids: processes with a CUDA context; in a container the driver may show those of another namespace.
        problems: errors by NVML's own names, such as GPU_IS_LOST; ``NO_ANSWER`` where a call did not come back, and
            ``NOT_ASKED`` where that kept this one from being asked.
    """

    index: _Index
    uuid: str
    name: str | None = None
    pci_bus_id: str | None = None
    clock_reasons: Mapping[str, float] | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    ecc_uncorrected: int | None = None
    ecc_corrected: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    pids: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """What one run of `nvml_child` has said. ``problem`` says in a word why there is nothing, or no more."""

    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


class _Line(msgspec.Struct, frozen=True):
    driver: str | None = None
    count: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    asking: _Index | None = None
    gpu: Gpu | None = None
    sample: _Index | None = None
    sm_clock_mhz: float | None = None
    clock_reasons: tuple[str, ...] | None = None
    problems: tuple[str, ...] = ()
    error: str = ""
    done: bool = False


def parse_reading(said: str, *, ended: bool) -> Reading:
    """What the lines of `nvml_child` come to. A line that is none is left out.

    Args:
        said: its standard output, which may break off anywhere.
        ended: it ended of itself; otherwise it was killed at its deadline.
    """
    driver, problem, done, asking, count = None, "", False, None, 0
    gpus: dict[int, Gpu] = {}
    samples: dict[int, list[_Line]] = {}
    for text in said.splitlines():
        try:
            line = msgspec.json.decode(text, type=_Line)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
        driver, count = line.driver or driver, line.count or count
        problem, done = line.error or problem, done or line.done
        asking = asking if line.asking is None else line.asking
        if line.gpu is not None:
            gpus[line.gpu.index] = line.gpu
        if line.sample is not None:
            samples.setdefault(line.sample, []).append(line)
    if not (done or problem):
        problem = "DIED" if ended else "NO_ANSWER"
        for index in range(count):
            gpus.setdefault(index, Gpu(index, f"#{index}", problems=() if index == asking else ("NOT_ASKED",)))
        if asking is not None:
            samples.setdefault(asking, []).append(_Line(problems=(problem,)))
    return Reading(driver, tuple(_sampled(gpu, samples.get(index, [])) for index, gpu in sorted(gpus.items())), problem)


def _sampled(gpu: Gpu, samples: Sequence[_Line]) -> Gpu:
    clocks = [one.sm_clock_mhz for one in samples if one.sm_clock_mhz is not None]
    said = [one.clock_reasons for one in samples if one.clock_reasons is not None]
    every = dict.fromkeys(name for reasons in said for name in reasons)
    return replace(
        gpu,
        sm_clock_mhz=median(clocks) if clocks else None,
        clock_reasons={name: sum(name in one for one in said) / len(said) for name in every} if said else None,
        problems=tuple(dict.fromkeys([*gpu.problems, *(name for one in samples for name in one.problems)])),
    )


@dataclass(frozen=True, slots=True)
class RankGpu:
    """Where a rank trains: its GPU, by UUID; ``how`` says what shows it, or why that is not known."""

    rank: int
    pid: int
    gpu: str | None
    how: str


class _UntoldError(Exception):
    """The environment does not say; the message says why."""


def locate(
    rank: RingInfo, environment: Mapping[str, str] | str, gpus: Sequence[Gpu], container: str | None = None
) -> RankGpu:
    """The GPU of one rank.

    The driver's list of processes settles it where it has the rank's own on exactly one GPU that the environment
    allows: a script may choose another than its local rank.

    Args:
        rank: the rank.
        environment: its process's, or why that is not known.
        gpus: all GPUs of the host.
        container: this process's own ``NVIDIA_VISIBLE_DEVICES``: whoever has the same sees the same GPUs.
    """

    def at(gpu: str | None, how: str) -> RankGpu:
        return RankGpu(rank.rank, rank.pid, gpu, how)

    running = [gpu.uuid for gpu in gpus if rank.pid in gpu.pids]
    try:
        if isinstance(environment, str):
            raise _UntoldError(environment)
        visible = _visible(environment, gpus, container)
    except _UntoldError as untold:
        return at(running[0], f"its process is on it ({untold})") if len(running) == 1 else at(None, str(untold))
    if len(running) == 1 and running[0] in visible:
        return at(running[0], "its process is on it")
    if not visible:
        return at(None, f"{VISIBLE} leaves it no GPU")
    # One device a process, whatever its local rank: what schedulers and device plugins give.
    index = 0 if len(visible) == 1 else rank.local_rank
    if index >= len(visible):
        return at(None, f"local rank {rank.local_rank} has no GPU: {len(visible)} are visible to it")
    given = f" under {VISIBLE}" if VISIBLE in environment else ""
    return at(visible[index], f"local rank {rank.local_rank}{given}")


def visible_entries(value: str) -> tuple[str | int, ...]:
    """``CUDA_VISIBLE_DEVICES`` as CUDA reads it: indices, or the beginnings of UUIDs."""
    prefix = next((one for one in ("GPU-", "MIG-") if value.startswith(one)), "")
    entries: list[str | int] = []
    for part in (part.strip() for part in value.split(",")):
        number = _LEADING_NUMBER.match(part)
        entry = part if prefix else int(number[0]) if number else -1
        if entry in entries:
            return ()
        if entry < 0 if isinstance(entry, int) else not entry.startswith(prefix):
            break
        entries.append(entry)
    return tuple(entries)


def _visible(environment: Mapping[str, str], gpus: Sequence[Gpu], own: str | None) -> list[str]:
    """The GPUs that a process with this environment sees, in CUDA's order.

    Raises:
        _UntoldError: that cannot be told from outside.
    """
    value, given = environment.get(VISIBLE), environment.get(CONTAINER)
    entries = None if value is None else visible_entries(value)
    if entries is not None and (not entries or isinstance(entries[0], str)):
        return _by_uuid(entries, gpus)
    # The rank's container may have others than that of whoever asks.
    if given not in (None, "", "all", "void", "none", own):
        wanted = visible_entries(str(given))
        if not wanted or not isinstance(wanted[0], str):
            raise _UntoldError(f"{CONTAINER}={given} counts the GPUs of another container's host")
        uuids = _by_uuid(wanted, gpus)
        gpus = [gpu for gpu in gpus if gpu.uuid in uuids]
    if len({gpu.name for gpu in gpus if gpu.name is not None}) > 1 and environment.get(ORDER) != "PCI_BUS_ID":
        raise _UntoldError(f"GPUs of several models, and {ORDER} is not PCI_BUS_ID: an index may be any of them")
    indices = range(len(gpus)) if entries is None else entries
    return [gpus[int(one)].uuid for one in takewhile(lambda one: int(one) < len(gpus), indices)]


def _by_uuid(entries: Sequence[str | int], gpus: Sequence[Gpu]) -> list[str]:
    """GPUs by the beginnings of their UUIDs; the first one that fits none, or several, ends the list.

    Raises:
        _UntoldError: it fits none of those that answer, or is a part of a GPU.
    """
    found: list[str] = []
    for entry in map(str, entries):
        if entry.startswith("MIG-"):
            raise _UntoldError(f"{entry} is a MIG instance")
        fitting = [gpu.uuid for gpu in gpus if gpu.uuid.startswith(entry)]
        if not fitting and any(gpu.uuid.startswith("#") for gpu in gpus):
            raise _UntoldError(f"{entry} may be a GPU that does not answer")
        if len(fitting) != 1:
            break
        if fitting[0] in found:
            return []
        found += fitting
    return found
