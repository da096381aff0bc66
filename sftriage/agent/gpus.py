"""A host's GPUs at one instant, read through `nvml_child`, and the GPU on which each rank trains. The agent calls it.

A value that a GPU, its driver or this user's rights do not report is None: never zero, and never a remark.

``CUDA_VISIBLE_DEVICES`` is read as CUDA and torch read it (a test compares with ``torch.cuda._parse_visible_devices``):
the first invalid entry ends the list, and a repeated entry empties it. An index counts in CUDA's order of the GPUs,
which is NVML's order only if all GPUs are of one model or ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec

from sftriage.base.process import BoundedProgram, start_ticks
from sftriage.errors import CaptureError
from sftriage.model.hangs import Fact
from sftriage.trainer.layout import RingInfo

VISIBLE, ORDER, CONTAINER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES"

_LEADING_NUMBER = re.compile(r"[+-]?[0-9]+")
_Index = Annotated[int, msgspec.Meta(ge=0, lt=64)]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of the host. None: not reported.

    Attributes:
        index: NVML's index, in PCI bus order.
        uuid: its UUID, or ``#`` and the index if it reports none.
        clock_reasons: why its clocks were limited, each with the fraction of samples that show it.
        sm_clock_mhz: the median of the samples.
        ecc_uncorrected, ecc_corrected: errors since the driver was loaded.
        pids: processes with a CUDA context; in a container the driver may show those of another namespace.
        problems: NVML error names, such as GPU_IS_LOST; ``NO_ANSWER`` if a call did not return, and ``NOT_ASKED`` if
            another GPU's hanging call came first.
    """

    index: _Index
    uuid: str
    name: str | None = None
    pci_bus_id: str | None = None
    clock_reasons: Mapping[str, float] | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    power_limit_mw: float | None = None
    ecc_uncorrected: int | None = None
    ecc_corrected: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    pids: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """The output of one run of `nvml_child`. ``problem`` names what cut it short, if anything."""

    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


class _Line(msgspec.Struct, frozen=True):
    driver: str | None = None
    count: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    querying: _Index | None = None
    gpu: Gpu | None = None
    error: str = ""
    done: bool = False


def parse_reading(output: str, *, ended: bool) -> Reading:
    """Parse the output of `nvml_child`, which may break off anywhere; skips invalid lines.

    ``ended`` is false for a child that was killed at its deadline.
    """
    driver, problem, done, current, count = None, "", False, None, 0
    gpus: dict[int, Gpu] = {}
    for text in output.splitlines():
        try:
            line = msgspec.json.decode(text, type=_Line)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
        driver, count = line.driver or driver, line.count or count
        problem, done = line.error or problem, done or line.done
        current = current if line.querying is None else line.querying
        if line.gpu is not None:
            gpus[line.gpu.index] = line.gpu
    if not (done or problem):
        problem = "DIED" if ended else "NO_ANSWER"
        for index in range(count):
            gpus.setdefault(index, Gpu(index, f"#{index}", problems=() if index == current else ("NOT_ASKED",)))
        if current is not None and current in gpus:
            gpus[current] = replace(gpus[current], problems=(*gpus[current].problems, problem))
    return Reading(driver, tuple(gpu for _, gpu in sorted(gpus.items())), problem)


@dataclass(frozen=True, slots=True)
class RankGpu:
    """The UUID of a rank's GPU; ``how`` says how it was found, or why it is unknown."""

    rank: int
    pid: int
    gpu: str | None
    how: str


class _AmbiguousError(Exception):
    """The environment does not identify the GPU; the message says why."""


def locate(
    rank: RingInfo, environment: Mapping[str, str] | str, gpus: Sequence[Gpu], container: str | None = None
) -> RankGpu:
    """Find the GPU of one rank. ``environment`` is its process's, or why that is unknown.

    The driver's process list decides if it shows the rank's process on exactly one GPU that the environment allows: a
    script may choose another GPU than its local rank. ``container`` is this process's ``NVIDIA_VISIBLE_DEVICES``:
    processes with the same value see the same GPUs.
    """

    def at(gpu: str | None, how: str) -> RankGpu:
        return RankGpu(rank.rank, rank.pid, gpu, how)

    running = [gpu.uuid for gpu in gpus if rank.pid in gpu.pids]
    try:
        if isinstance(environment, str):
            raise _AmbiguousError(environment)
        visible = _visible(environment, gpus, container)
    except _AmbiguousError as error:
        return at(running[0], f"its process is on it ({error})") if len(running) == 1 else at(None, str(error))
    if len(running) == 1 and running[0] in visible:
        return at(running[0], "its process is on it")
    if not visible:
        return at(None, f"{VISIBLE} hides all GPUs from it")
    # Schedulers and device plugins often give each process one device, whatever its local rank.
    index = 0 if len(visible) == 1 else rank.local_rank
    if index >= len(visible):
        return at(None, f"local rank {rank.local_rank} has no GPU: {len(visible)} are visible to it")
    under = f" under {VISIBLE}" if VISIBLE in environment else ""
    return at(visible[index], f"local rank {rank.local_rank}{under}")


def visible_entries(value: str) -> tuple[str | int, ...]:
    """Parse ``CUDA_VISIBLE_DEVICES`` as CUDA does: indices, or prefixes of UUIDs."""
    prefix = next((prefix for prefix in ("GPU-", "MIG-") if value.startswith(prefix)), "")
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
    """The GPUs that a process with this environment sees, in CUDA's order."""
    value, theirs = environment.get(VISIBLE), environment.get(CONTAINER)
    entries = None if value is None else visible_entries(value)
    if entries is not None and (not entries or isinstance(entries[0], str)):
        return _by_uuid(entries, gpus)
    # The rank's container may have other GPUs than this one.
    if theirs not in (None, "", "all", "void", "none", own):
        in_container = visible_entries(str(theirs))
        if not in_container or not isinstance(in_container[0], str):
            raise _AmbiguousError(f"{CONTAINER}={theirs} counts the GPUs of another container's host")
        uuids = _by_uuid(in_container, gpus)
        gpus = [gpu for gpu in gpus if gpu.uuid in uuids]
    if len({gpu.name for gpu in gpus if gpu.name is not None}) > 1 and environment.get(ORDER) != "PCI_BUS_ID":
        raise _AmbiguousError(f"GPUs of several models, and {ORDER} is not PCI_BUS_ID: an index may be any of them")
    indices = range(len(gpus)) if entries is None else map(int, entries)
    return [gpus[index].uuid for index in takewhile(lambda index: index < len(gpus), indices)]


def _by_uuid(entries: Sequence[str | int], gpus: Sequence[Gpu]) -> list[str]:
    """GPUs by prefixes of their UUIDs; the first entry that matches none, or several, ends the list."""
    found: list[str] = []
    for entry in map(str, entries):
        if entry.startswith("MIG-"):
            raise _AmbiguousError(f"{entry} is a MIG instance")
        fitting = [gpu.uuid for gpu in gpus if gpu.uuid.startswith(entry)]
        if not fitting and any(gpu.uuid.startswith("#") for gpu in gpus):
            raise _AmbiguousError(f"{entry} may be a GPU that does not answer")
        if len(fitting) != 1:
            break
        if fitting[0] in found:
            return []
        found += fitting
    return found


DEADLINE_S = 10.0
"""NVML's first call takes seconds if no driver daemon keeps the GPUs awake."""

EVERY_S = 60.0
_POLL_S = 0.02
_MAX_OUTPUT_BYTES = 1 << 22

SLOW_FRACTION = 0.9
"""A GPU below this fraction of the others' clock is slow: the clocks of one host's GPUs drift by a few percent."""

OUT_OF_LINE = 10
"""Remark on a counter above this multiple of the others': counters that only grow mean little by themselves."""

FULL_FRACTION, ROOMY_FRACTION = 0.98, 0.9
"""Remark on a GPU with this fraction of memory in use, if the others have less than the second."""

_MOSTLY = 0.5

_CHILD = Path(__file__).with_name("nvml_child.py")

_PROBLEMS = {
    "NO_PYNVML": "the Python module of NVML is missing: pip install 'sftriage[nvml]'",
    "LIBRARY_NOT_FOUND": "this host has no NVIDIA driver: libnvidia-ml.so.1 is not found",
    "DRIVER_NOT_LOADED": "the NVIDIA driver is not loaded",
    "LIB_RM_VERSION_MISMATCH": "the NVIDIA driver and its library differ in version: restart after the upgrade",
    "NO_PERMISSION": "this user may not query the NVIDIA driver",
    "NO_ANSWER": "NVML did not answer in time",
    "DIED": "NVML's process died",
}

_HARD = {
    "hw_thermal_slowdown": "the hardware is too hot",
    "hw_power_brake_slowdown": "power brake: the power supply demands less",
    "sw_thermal_slowdown": "too hot",
    "reliability": "voltage at its limit",
    "board_limit": "board's limit",
    "hw_slowdown": "slowed down by the hardware",
}
"""Reasons that are a problem on any GPU at any time; the last one only says that there is another."""

_SOFT = {
    "sw_power_cap": "power cap",
    "applications_clocks_setting": "clocks set by hand",
    "sync_boost": "clocks tied to another GPU's",
    "display_clock_setting": "clocks set for a display",
}

_WORDS = {
    "GPU_IS_LOST": "is lost: it has fallen off the bus",
    "RESET_REQUIRED": "must be reset",
    "NO_ANSWER": "does not answer: a query to it did not return",
    "DIED": "could not be queried: the process that queried it died",
    "NOT_ASKED": "",
}


@dataclass(frozen=True, slots=True)
class GpuEvidence:
    """The state of a host's GPUs and of its ranks on them; ``time_s`` is in seconds since the epoch.

    ``gpus`` are all of the host: remarks compare a suspect's with the others. ``problem`` says why the evidence is
    missing or incomplete, if it is.
    """

    time_s: float
    ranks: tuple[RankGpu, ...]
    gpus: tuple[Gpu, ...] = ()
    remarks: tuple[str, ...] = ()
    driver: str | None = None
    problem: str = ""

    def of(self, rank: int) -> Gpu | None:
        uuid = next((place.gpu for place in self.ranks if place.rank == rank), None)
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)


def gather(ranks: Sequence[RingInfo], *, deadline_s: float = DEADLINE_S) -> GpuEvidence:
    """Query NVML about a host's ranks, until the deadline at most. A failing GPU raises nothing."""
    time_s, query = time.time(), NvmlQuery(deadline_s)
    while (reading := query.reading()) is None:
        time.sleep(_POLL_S)
    return evidence_of(ranks, reading, time_s)


def evidence_of(
    ranks: Sequence[RingInfo], reading: Reading, time_s: float, about: Collection[int] | None = None
) -> GpuEvidence:
    """The evidence in a reading on these ranks, whose environments are in /proc; remarks are ``about`` some or all."""
    own = os.environ.get(CONTAINER)
    places = tuple(locate(info, environment_of(info), reading.gpus, own) for info in ranks) if reading.gpus else ()
    about = {info.rank for info in ranks} if about is None else set(about)
    theirs = list(dict.fromkeys(place.gpu for place in places if place.gpu is not None and place.rank in about))
    return GpuEvidence(
        time_s=time_s,
        ranks=places or tuple(RankGpu(info.rank, info.pid, None, "no GPU was found") for info in ranks),
        gpus=reading.gpus,
        remarks=remarks(reading.gpus, theirs) + tuple(words for uuid in theirs for words in _shared(uuid, places)),
        driver=reading.driver,
        problem=_PROBLEMS.get(reading.problem, reading.problem and f"NVML answers with an error: {reading.problem}"),
    )


def _shared(uuid: str, places: Sequence[RankGpu]) -> tuple[str, ...]:
    ranks = [str(place.rank) for place in places if place.gpu == uuid]
    return () if len(ranks) < 2 else (f"ranks {', '.join(ranks)} share one GPU: {uuid}",)


def remarks(gpus: Sequence[Gpu], about: Collection[str]) -> tuple[str, ...]:
    """What is unusual about the GPUs of these UUIDs, by their own limits and compared with the host's other GPUs."""
    found: list[str] = []
    for gpu in gpus:
        if gpu.uuid in about:
            others = [other for other in gpus if other is not gpu and other.name == gpu.name]
            texts = [" " + _WORDS.get(name, f"answers with an error: {name}") for name in gpu.problems]
            texts += (words for remarks_on in (_clocks, _ecc, _memory) for words in remarks_on(gpu, others))
            found += (f"GPU {gpu.index}{words}" for words in texts if words != " ")
    return tuple(found)


def _clocks(gpu: Gpu, others: Sequence[Gpu]) -> list[str]:
    """A remark on a GPU that is slowed down for a reason that always counts, or far below the other busy GPUs."""
    reasons = gpu.clock_reasons or {}
    hard = [words for name, words in _HARD.items() if reasons.get(name)]
    if len(hard) > 1:
        hard = [words for words in hard if words != _HARD["hw_slowdown"]]
    clock, usual = gpu.sm_clock_mhz, _usual_clock(others)
    slow = _is_slow(gpu, usual)
    if not (hard or slow):
        return []
    why = hard + [words for name, words in _SOFT.items() if reasons.get(name, 0) >= _MOSTLY]
    text = " is slowed down" if clock is None else f" runs at {clock:,.0f}"
    if clock is not None:
        text += f" of {gpu.sm_clock_max_mhz:,.0f} MHz" if gpu.sm_clock_max_mhz else " MHz"
    if slow and usual is not None:
        text += f", the others at {usual:,.0f}"
    return [f"{text}: {', '.join(why) if why else 'it gives no reason'}"]


def slowed_fraction(gpu: Gpu, gpus: Sequence[Gpu]) -> float | None:
    """How far a GPU's clock is below the median of the host's other busy GPUs, as a fraction; None if it is not slow.

    With no other GPU to compare with, a clock that the hardware limits is compared with its own maximum.
    """
    usual = _usual_clock([other for other in gpus if other is not gpu and other.name == gpu.name])
    hard = any((gpu.clock_reasons or {}).get(name) for name in _HARD)
    reference = gpu.sm_clock_max_mhz if usual is None and hard else usual
    if reference is None or gpu.sm_clock_mhz is None or not _is_slow(gpu, reference):
        return None
    return 1.0 - gpu.sm_clock_mhz / reference


def _usual_clock(others: Sequence[Gpu]) -> float | None:
    return _usual([other.sm_clock_mhz for other in others if not _idle(other)])


def _is_slow(gpu: Gpu, usual: float | None) -> bool:
    clock = gpu.sm_clock_mhz
    return clock is not None and usual is not None and not _idle(gpu) and clock < SLOW_FRACTION * usual


def _ecc(gpu: Gpu, others: Sequence[Gpu]) -> list[str]:
    found = [f": ECC uncorrected errors: {gpu.ecc_uncorrected:,}"] if gpu.ecc_uncorrected else []
    corrected, usual = gpu.ecc_corrected, _usual([other.ecc_corrected for other in others])
    if corrected is not None and usual is not None and corrected > OUT_OF_LINE * usual:
        found.append(f": ECC corrected errors: {corrected:,}, the others {usual:,.0f}")
    return found


def _memory(gpu: Gpu, others: Sequence[Gpu]) -> list[str]:
    """A remark on memory that is full while the others' is not: its allocator frees and retries, which takes time."""
    full, usual = in_use_fraction(gpu), _usual([in_use_fraction(other) for other in others])
    if full is None or usual is None or full < FULL_FRACTION or usual > ROOMY_FRACTION:
        return []
    return [f": its memory is {full:.0%} full, the others' {usual:.0%}"]


def gpu_facts(gpu: Gpu) -> dict[str, Fact]:
    """What a rank's GPU adds to its facts (`sftriage.trainer.facts`); the clock of an idle one means nothing."""
    limits = [words for name, words in (_HARD | _SOFT).items() if (gpu.clock_reasons or {}).get(name, 0) >= _MOSTLY]
    found = {
        "gpu": gpu.name,
        "gpu_clock_mhz": None if _idle(gpu) else gpu.sm_clock_mhz,
        "gpu_power_limit_watts": None if gpu.power_limit_mw is None else gpu.power_limit_mw / 1e3,
        "gpu_limited_by": ", ".join(limits) or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def in_use_fraction(gpu: Gpu) -> float | None:
    """The fraction of its memory that is in use."""
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    return None if used is None or not total else used / total


def _idle(gpu: Gpu) -> bool:
    return (gpu.clock_reasons or {}).get("gpu_idle", 0) >= _MOSTLY


def _usual(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def environment_of(info: RingInfo) -> dict[str, str] | str:
    """The GPU variables in the environment that a rank's process was started with, or why they are unknown."""
    if start_ticks(info.pid) != info.pid_start_ticks:
        return f"process {info.pid} is not running, or not in this container"
    try:
        entries = Path(f"/proc/{info.pid}/environ").read_bytes().split(b"\0")
    except OSError as error:
        return f"the environment of process {info.pid} cannot be read: {error.strerror}"
    variables = dict(entry.decode("utf-8", "replace").split("=", 1) for entry in entries if b"=" in entry)
    # Return only these: the rest of an environment is full of secrets.
    return {name: variables[name] for name in (VISIBLE, ORDER, CONTAINER) if name in variables}


class NvmlQuery(BoundedProgram):
    """One run of `nvml_child`, which may hang: it is killed at its deadline, and abandoned if even that hangs."""

    def __init__(self, deadline_s: float) -> None:
        # The child ends itself a second later, in case this process is gone by then.
        command = [sys.executable, str(_CHILD), f"{deadline_s + 1.0:.1f}"]
        super().__init__(command, deadline_s, max_output_bytes=_MAX_OUTPUT_BYTES)
        self._reading: Reading | None = None

    def reading(self) -> Reading | None:
        if self._reading is None:
            try:
                if self.poll() is not None:
                    self._reading = parse_reading(self.output, ended=True)
            except CaptureError:
                self._reading = parse_reading(self.output, ended=False)
        return self._reading


class EvidenceSampler:
    """Evidence for a loop that must not block. One reading serves all queries for `EVERY_S`."""

    def __init__(self) -> None:
        self._query: NvmlQuery | None = None
        self._begun_s = self._wall_s = 0.0

    def poll(self, ranks: Sequence[RingInfo], now_s: float, about: Collection[int]) -> GpuEvidence | None:
        """See `evidence_of`; ``now_s`` is of a monotonic clock. None while a query runs: call again."""
        # While one query hangs in the driver, another would hang too.
        if self._query is None or (now_s - self._begun_s >= EVERY_S and not self._query.hangs):
            self._query = NvmlQuery(DEADLINE_S)
            self._begun_s, self._wall_s = now_s, time.time()
        reading = self._query.reading()
        return None if reading is None else evidence_of(ranks, reading, self._wall_s, about)

    def close(self) -> None:
        if self._query is not None:
            self._query.kill()
            self._query = None
