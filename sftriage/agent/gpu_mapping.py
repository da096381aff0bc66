"""Which GPU a rank trains on: from its process's environment, as CUDA itself reads it.

``CUDA_VISIBLE_DEVICES`` is read as torch and CUDA read it (``torch.cuda._parse_visible_devices`` is what the tests
compare with): the first entry that makes no sense ends the list, and an entry named twice empties it. An index counts
in CUDA's order of the GPUs, which is NVML's only where all are alike or ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sftriage.agent.gpus import Gpu, GpuProcess

VISIBLE, ORDER, CONTAINER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES"

_LEADING_NUMBER = re.compile(r"[+-]?[0-9]+")


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank as the mapping needs it: its process, its number on the host, and its environment or why there is none."""

    rank: int
    pid: int
    local_rank: int
    environment: Mapping[str, str] | None = None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class RankGpu:
    """Where a rank trains: its GPU and, on a slice of one, the MIG instance, by UUID; ``how`` says what shows it."""

    rank: int
    pid: int
    gpu: str | None
    mig: str | None
    how: str


_Device = tuple[str, str | None]


class _UntoldError(Exception):
    """The environment does not say; the message says why."""


def locate(rank: RankProcess, gpus: Sequence[Gpu], container: str | None = None) -> RankGpu:
    """The GPU of one rank.

    The driver's list of processes settles it where it has the rank's own on exactly one device that the environment
    allows: a script may choose another device than its local rank.

    Args:
        rank: the rank.
        gpus: all GPUs of the host.
        container: this process's own ``NVIDIA_VISIBLE_DEVICES``: whoever has the same sees the same GPUs.
    """
    running = _running_on(rank.pid, gpus)
    try:
        devices = _visible(rank, gpus, container)
    except _UntoldError as untold:
        if len(running) == 1:
            return RankGpu(rank.rank, rank.pid, *running[0], f"its process is on it ({untold})")
        return RankGpu(rank.rank, rank.pid, None, None, str(untold))
    if len(running) == 1 and any(running[0][0] == gpu for gpu, _ in devices):
        return RankGpu(rank.rank, rank.pid, *running[0], "its process is on it")
    # One device a process, whatever its local rank: what schedulers and device plugins give.
    at = 0 if len(devices) == 1 else rank.local_rank
    if not devices:
        return RankGpu(rank.rank, rank.pid, None, None, f"{VISIBLE} leaves it no GPU")
    if at >= len(devices):
        how = f"local rank {rank.local_rank} has no GPU: {len(devices)} are visible to it"
        return RankGpu(rank.rank, rank.pid, None, None, how)
    given = VISIBLE in (rank.environment or {})
    how = f"local rank {rank.local_rank}" + (f" under {VISIBLE}" if given else "")
    gpu, mig = devices[at]
    return RankGpu(rank.rank, rank.pid, gpu, mig, how)


def visible_entries(value: str) -> tuple[str, ...] | tuple[int, ...]:
    """``CUDA_VISIBLE_DEVICES`` as CUDA reads it: indices, or the beginnings of UUIDs."""
    for prefix in ("GPU-", "MIG-"):
        if value.startswith(prefix):
            return _prefixed(value, prefix)
    indices: list[int] = []
    for entry in value.split(","):
        number = _LEADING_NUMBER.match(entry.strip())
        index = int(number[0]) if number else -1
        if index in indices:
            return ()
        if index < 0:
            break
        indices.append(index)
    return tuple(indices)


def _prefixed(value: str, prefix: str) -> tuple[str, ...]:
    entries: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry in entries:
            return ()
        if not entry.startswith(prefix):
            break
        entries.append(entry)
    return tuple(entries)


def _visible(rank: RankProcess, gpus: Sequence[Gpu], container: str | None) -> list[_Device]:
    """The devices a rank's process sees, in CUDA's order.

    Raises:
        _UntoldError: that cannot be told from outside.
    """
    if rank.environment is None:
        raise _UntoldError(rank.why_not)
    value = rank.environment.get(VISIBLE)
    entries = None if value is None else visible_entries(value)
    if entries is not None and all(isinstance(entry, str) for entry in entries):
        return _by_uuid([str(entry) for entry in entries], gpus)
    seen = _in_container(rank.environment.get(CONTAINER), gpus, container)
    alike = len({gpu.name for gpu in seen if gpu.name is not None}) <= 1
    if not alike and rank.environment.get(ORDER) != "PCI_BUS_ID":
        raise _UntoldError(f"GPUs of several models, and {ORDER} is not PCI_BUS_ID: an index may be any of them")
    chosen: list[_Device] = []
    for index in range(len(seen)) if entries is None else entries:
        if not isinstance(index, int) or index >= len(seen):
            break
        chosen.append(_whole(seen[index]))
    return chosen


def _whole(gpu: Gpu) -> _Device:
    """A GPU named by its index: in MIG mode that is one of its instances, and known only where there is but one."""
    if gpu.mig is None or len(gpu.mig) != 1:
        return gpu.uuid, None
    return gpu.uuid, gpu.mig[0].uuid


def _in_container(value: str | None, gpus: Sequence[Gpu], own: str | None) -> list[Gpu]:
    """The GPUs that the rank's container has; an agent in another container may have others.

    Raises:
        _UntoldError: they are given by indices that count elsewhere.
    """
    if value in (None, "", "all", "void", "none") or value == own:
        return list(gpus)
    entries = visible_entries(str(value))
    if not entries or not all(isinstance(entry, str) for entry in entries):
        raise _UntoldError(f"{CONTAINER}={value} counts the GPUs of another container's host")
    wanted = {gpu for gpu, _ in _by_uuid([str(entry) for entry in entries], gpus)}
    return [gpu for gpu in gpus if gpu.uuid in wanted]


def _by_uuid(entries: Sequence[str], gpus: Sequence[Gpu]) -> list[_Device]:
    """Devices by the beginnings of their UUIDs; the first one that fits none, or several, ends the list.

    Raises:
        _UntoldError: it fits none of those that answer.
    """
    found: list[_Device] = []
    for entry in entries:
        fitting = [device for device, names in _names(gpus) if any(_fits(entry, name) for name in names)]
        if not fitting and any(gpu.uuid.startswith("#") for gpu in gpus):
            raise _UntoldError(f"{entry} may be a GPU that does not answer")
        if len(fitting) != 1:
            break
        if fitting[0] in found:
            return []
        found.append(fitting[0])
    return found


def _fits(entry: str, name: str) -> bool:
    # In the old form "…/1" is not the beginning of "…/11".
    return name == entry if "/" in name else name.startswith(entry)


def _names(gpus: Sequence[Gpu]) -> list[tuple[_Device, tuple[str, ...]]]:
    """Every device with the UUIDs it goes by; MIG instances had another form until driver R470."""
    named: list[tuple[_Device, tuple[str, ...]]] = []
    for gpu in gpus:
        named.append(((gpu.uuid, None), (gpu.uuid,)))
        for instance in gpu.mig or ():
            old = f"MIG-{gpu.uuid}/{instance.gpu_instance}/{instance.compute_instance}"
            named.append(((gpu.uuid, instance.uuid), (instance.uuid, old)))
    return named


def _running_on(pid: int, gpus: Sequence[Gpu]) -> list[_Device]:
    """The devices on which the driver shows a process; the instance's list says more than its GPU's."""
    found: list[_Device] = []
    for gpu in gpus:
        slices: list[_Device] = [(gpu.uuid, one.uuid) for one in gpu.mig or () if _has(pid, one.processes)]
        found += slices or ([(gpu.uuid, None)] if _has(pid, gpu.processes or ()) else [])
    return found


def _has(pid: int, processes: Sequence[GpuProcess]) -> bool:
    return any(process.pid == pid for process in processes)
