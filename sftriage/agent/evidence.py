"""Evidence from the GPUs of suspect ranks: clocks and what limits them, errors, memory, and which GPU a rank has.

It corroborates a verdict and never makes one. NVML is asked in a process of its own with a deadline, for a call to a
broken GPU may not come back. What all GPUs of a busy host share (large models run at the power cap) is no remark.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO

from sftriage.agent.gpus import CONTAINER, ORDER, VISIBLE, Gpu, RankGpu, Reading, locate, parse_reading
from sftriage.base.process import start_ticks
from sftriage.capture import stacks
from sftriage.recorder import RingInfo

DEADLINE_S = 10.0
"""NVML's first call takes seconds where no driver daemon keeps the GPUs awake."""

EVERY_S = 60.0
_KILL_S, _LOOK_S = 1.0, 0.02
_MAX_SAID_BYTES = 1 << 22

SLOW_FRACTION = 0.9
"""Of the others' clock: GPUs of one host drift by a few percent as it is."""

OUT_OF_LINE = 10
"""A counter's multiple of the others' that is remarkable: counters that only ever grow say little by themselves."""

FULL_FRACTION, ROOMY_FRACTION = 0.98, 0.9
"""Of its memory in use, and of the others'."""

_MOSTLY = 0.5

_CHILD = Path(__file__).with_name("nvml_child.py")

_PROBLEMS = {
    "NO_PYNVML": "the Python module of NVML is missing: install sftriage[nvml]",
    "LIBRARY_NOT_FOUND": "this host has no NVIDIA driver: libnvidia-ml.so.1 is not found",
    "DRIVER_NOT_LOADED": "the NVIDIA driver is not loaded",
    "LIB_RM_VERSION_MISMATCH": "the NVIDIA driver and its library differ in version: restart after the upgrade",
    "NO_PERMISSION": "this user may not ask the NVIDIA driver",
    "NO_ANSWER": "NVML did not answer in time",
    "DIED": "NVML's process died",
}

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
    "NOT_ASKED": "",
}


@dataclass(frozen=True, slots=True)
class GpuEvidence:
    """What a host's GPUs show of its ranks at one instant, in seconds since the epoch.

    ``gpus`` are all of the host: a suspect's is read against the others. ``problem`` says why there is nothing here, or
    not all; it is empty where nothing is amiss.
    """

    time_s: float
    ranks: tuple[RankGpu, ...]
    gpus: tuple[Gpu, ...] = ()
    remarks: tuple[str, ...] = ()
    driver: str | None = None
    problem: str = ""

    def of(self, rank: int) -> Gpu | None:
        """The GPU of one rank, if it is known."""
        uuid = next((place.gpu for place in self.ranks if place.rank == rank), None)
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)


def gather(ranks: Sequence[RingInfo], *, deadline_s: float = DEADLINE_S) -> GpuEvidence:
    """Ask about a host's ranks now, and wait at most until the deadline. Never raises for what a GPU does."""
    time_s, question = time.time(), NvmlQuestion(deadline_s)
    while (reading := question.reading()) is None:
        time.sleep(_LOOK_S)
    return evidence_of(ranks, reading, time_s)


def evidence_of(
    ranks: Sequence[RingInfo], reading: Reading, time_s: float, about: Collection[int] | None = None
) -> GpuEvidence:
    """What a reading says of these ranks, with remarks ``about`` some, or all, of them.

    Their environments are looked up in /proc.
    """
    own = os.environ.get(CONTAINER)
    places = tuple(locate(info, environment_of(info), reading.gpus, own) for info in ranks) if reading.gpus else ()
    about = {info.rank for info in ranks} if about is None else set(about)
    theirs = list(dict.fromkeys(place.gpu for place in places if place.gpu is not None and place.rank in about))
    return GpuEvidence(
        time_s=time_s,
        ranks=places or tuple(RankGpu(info.rank, info.pid, None, "no GPU was seen") for info in ranks),
        gpus=reading.gpus,
        remarks=remarks(reading.gpus, theirs) + tuple(said for uuid in theirs for said in _shared(uuid, places)),
        driver=reading.driver,
        problem=_PROBLEMS.get(reading.problem, reading.problem and f"NVML answers with an error: {reading.problem}"),
    )


def _shared(uuid: str, places: Sequence[RankGpu]) -> tuple[str, ...]:
    """A GPU that several ranks use: wanted by some jobs, a slip in others."""
    ranks = [str(place.rank) for place in places if place.gpu == uuid]
    return () if len(ranks) < 2 else (f"ranks {', '.join(ranks)} share one GPU: {uuid}",)


def remarks(gpus: Sequence[Gpu], about: Collection[str]) -> tuple[str, ...]:
    """What is out of the ordinary about the GPUs of these UUIDs, by their own limits and the host's others."""
    found: list[str] = []
    for gpu in gpus:
        if gpu.uuid in about:
            others = [other for other in gpus if other is not gpu and other.name == gpu.name]
            said = [" " + _WORDS.get(name, f"answers with an error: {name}") for name in gpu.problems]
            said += (words for look in (_clocks, _ecc, _memory) for words in look(gpu, others))
            found += (f"GPU {gpu.index}{words}" for words in said if words != " ")
    return tuple(found)


def _clocks(gpu: Gpu, others: Sequence[Gpu]) -> list[str]:
    """Slowed down: for a reason that always counts, or far below the others that are at work."""
    reasons = gpu.clock_reasons or {}
    hard = [words for name, words in _HARD.items() if reasons.get(name)]
    if len(hard) > 1:
        hard = [words for words in hard if words != _HARD["hw_slowdown"]]
    clock, usual = gpu.sm_clock_mhz, _usual_clock(others)
    slow = _is_slow(gpu, usual)
    if not (hard or slow):
        return []
    why = hard + [words for name, words in _SOFT.items() if reasons.get(name, 0) >= _MOSTLY]
    said = " is slowed down" if clock is None else f" runs at {clock:,.0f}"
    if clock is not None:
        said += f" of {gpu.sm_clock_max_mhz:,.0f} MHz" if gpu.sm_clock_max_mhz else " MHz"
    if slow and usual is not None:
        said += f", the others at {usual:,.0f}"
    return [f"{said}: {', '.join(why) if why else 'it gives no reason'}"]


def slowed_fraction(gpu: Gpu, gpus: Sequence[Gpu]) -> float | None:
    """By how much lower a GPU's clock is than that of the host's others which are at work; None where it is not slow.

    Where there is none to compare with, and the hardware limits it, it is held against its own maximum.
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
    """Full where the others are not: its allocator frees and asks again, which takes time."""
    full, usual = in_use_fraction(gpu), _usual([in_use_fraction(other) for other in others])
    if full is None or usual is None or full < FULL_FRACTION or usual > ROOMY_FRACTION:
        return []
    return [f": its memory is {full:.0%} full, the others' {usual:.0%}"]


def in_use_fraction(gpu: Gpu) -> float | None:
    """How much of its memory is in use."""
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    return None if used is None or not total else used / total


def _idle(gpu: Gpu) -> bool:
    return (gpu.clock_reasons or {}).get("gpu_idle", 0) >= _MOSTLY


def _usual(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def environment_of(info: RingInfo) -> dict[str, str] | str:
    """What a rank's process's environment says of GPUs, or why that is not known.

    That is the environment it was started with: what a script puts into ``os.environ`` later does not show.
    """
    if start_ticks(info.pid) != info.pid_start_ticks:
        return f"process {info.pid} is not running, or not in this container"
    try:
        found = stacks.environment_of(info.pid)
    except OSError as error:
        return f"the environment of process {info.pid} cannot be read: {error.strerror}"
    # Only these leave this function: the rest of an environment is full of secrets.
    told = {name: found[name] for name in (VISIBLE, ORDER, CONTAINER) if name in found}
    return {name: value.encode("utf-8", "replace").decode("utf-8") for name, value in told.items()}


class NvmlQuestion:
    """One run of `nvml_child`, which may hang: killed at its deadline, and left behind where that does not help."""

    def __init__(self, deadline_s: float) -> None:
        self._until_s = time.monotonic() + deadline_s
        # A file, not a pipe: a child that nobody reads from must not wait for it.
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the child runs
        self._child = subprocess.Popen(
            # One second more: should this process be gone by then, the child ends itself.
            [sys.executable, str(_CHILD), f"{deadline_s + _KILL_S:.1f}"],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._killed = False
        self._reading: Reading | None = None

    def reading(self) -> Reading | None:
        """What it said, or None as long as it is at it. Does not wait, but kills at the deadline."""
        if self._reading is None:
            late_s = time.monotonic() - self._until_s
            if late_s >= 0 and self._child.poll() is None:
                self._killed = True
                self._child.kill()
            if self._child.poll() is not None or late_s >= _KILL_S:
                self._said.seek(0)
                said = self._said.read(_MAX_SAID_BYTES).decode("utf-8", "replace")
                self._reading = parse_reading(said, ended=not self._killed)
                self._said.close()
        return self._reading

    @property
    def hangs(self) -> bool:
        """Whether it was killed and is still there: it waits in the driver, where no signal reaches."""
        return self._killed and self._child.poll() is None

    def give_up(self) -> None:
        """End it, without an answer."""
        if self._child.poll() is None:
            self._killed = True
            self._child.kill()
        self._said.close()


class EvidenceSampler:
    """Evidence for a loop that does not wait: `ask`, and look in again.

    A reading serves for `EVERY_S`; ranks asked about meanwhile are looked up in it.
    """

    def __init__(self) -> None:
        self._question: NvmlQuestion | None = None
        self._asked_s = self._wall_s = 0.0

    def ask(self, ranks: Sequence[RingInfo], now_s: float, about: Collection[int]) -> GpuEvidence | None:
        """See `evidence_of`; ``now_s`` is of a clock that only goes on. None as long as NVML is asked: call again."""
        # As long as one question hangs in the driver, another would too.
        if self._question is None or (now_s - self._asked_s >= EVERY_S and not self._question.hangs):
            self._question = NvmlQuestion(DEADLINE_S)
            self._asked_s, self._wall_s = now_s, time.time()
        reading = self._question.reading()
        return None if reading is None else evidence_of(ranks, reading, self._wall_s, about)

    def close(self) -> None:
        """End a question that is under way."""
        if self._question is not None:
            self._question.give_up()
            self._question = None
