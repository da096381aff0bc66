"""Evidence from the GPUs of suspect ranks: clocks and what limits them, power, temperature, errors, links, neighbours.

It corroborates a verdict and never makes one. NVML is asked in a process of its own with a deadline, for a call to a
broken GPU may not come back; nothing of this runs in a trainer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from sftriage.agent.gpu_mapping import CONTAINER, ORDER, VISIBLE, RankGpu, RankProcess, locate
from sftriage.agent.gpu_remarks import remarks
from sftriage.agent.gpus import Gpu, Reading, parse_reading
from sftriage.recorder import RingInfo
from sftriage.recorder.files import start_ticks

DEADLINE_S = 10.0
"""NVML's first call takes seconds where no driver daemon keeps the GPUs awake."""

EVERY_S = 60.0
_KILL_S = 1.0
_MAX_SAID_BYTES = 1 << 22
_MAX_ENVIRONMENT_BYTES = 1 << 21

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


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a host's GPUs show of its ranks at one instant.

    Attributes:
        time_s: when, in seconds since the epoch.
        ranks: the ranks asked about, each with its GPU or why that is not known.
        gpus: all GPUs of the host: a suspect's is read against the others.
        remarks: what is out of the ordinary about the GPUs of these ranks, in plain sentences.
        driver: the driver's version.
        problem: why there is nothing here, or not all; empty where there is nothing amiss.
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


def gather(
    ranks: Sequence[RingInfo], *, about: Collection[int] | None = None, deadline_s: float = DEADLINE_S
) -> Evidence:
    """Ask now, and wait for the answer, at most until the deadline. Never raises for what a GPU does.

    Args:
        ranks: the job's ranks on this host.
        about: those to remark on; by default all.
        deadline_s: when to go without an answer.
    """
    time_s = time.time()
    return evidence_of(ranks, NvmlQuestion(deadline_s).wait(), time_s, about)


def evidence_of(
    ranks: Sequence[RingInfo], reading: Reading, time_s: float, about: Collection[int] | None = None
) -> Evidence:
    """What a reading says of these ranks; their environments are looked up in /proc."""
    own = os.environ.get(CONTAINER)
    places = tuple(locate(rank_process(info), reading.gpus, own) for info in ranks) if reading.gpus else ()
    about = {info.rank for info in ranks} if about is None else set(about)
    theirs = [place for place in places if place.gpu is not None and place.rank in about]
    return Evidence(
        time_s=time_s,
        ranks=places or tuple(RankGpu(info.rank, info.pid, None, None, "no GPU was seen") for info in ranks),
        gpus=reading.gpus,
        remarks=(
            *remarks(reading.gpus, {str(place.gpu) for place in theirs}, {info.pid for info in ranks}),
            *(
                said
                for gpu in dict.fromkeys((place.gpu, place.mig) for place in theirs)
                for said in _shared(gpu, places)
            ),
        ),
        driver=reading.driver,
        problem=_PROBLEMS.get(reading.problem, reading.problem and f"NVML answers with an error: {reading.problem}"),
    )


def _shared(device: tuple[str | None, str | None], places: Sequence[RankGpu]) -> tuple[str, ...]:
    """A device that several ranks use: wanted by some jobs, a slip in others."""
    ranks = [str(place.rank) for place in places if (place.gpu, place.mig) == device]
    return () if len(ranks) < 2 else (f"ranks {', '.join(ranks)} share one device: {device[1] or device[0]}",)


def rank_process(info: RingInfo) -> RankProcess:
    """A rank with what its process's environment says of GPUs.

    That is the environment it was started with: what a script puts into ``os.environ`` later does not show.
    """

    def untold(why: str) -> RankProcess:
        return RankProcess(info.rank, info.pid, info.local_rank, None, why)

    if start_ticks(info.pid) != info.pid_start_ticks:
        return untold(f"process {info.pid} is not running, or not in this container")
    try:
        with Path(f"/proc/{info.pid}/environ").open("rb") as file:
            raw = file.read(_MAX_ENVIRONMENT_BYTES)
    except OSError as error:
        return untold(f"the environment of process {info.pid} cannot be read: {error.strerror}")
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0"))
    # Only these leave this function: the rest of an environment is full of secrets.
    wanted = {name.encode(): name for name in (VISIBLE, ORDER, CONTAINER)}
    environment = {wanted[name]: value.decode("utf-8", "replace") for name, _, value in pairs if name in wanted}
    return RankProcess(info.rank, info.pid, info.local_rank, environment)


class NvmlQuestion:
    """One run of `nvml_child`, which may hang: killed at its deadline, and left behind where even that does not help.

    Args:
        deadline_s: how long it may take.
    """

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
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
                self._reading = parse_reading(self._read(), ended=not self._killed)
                self._said.close()
        return self._reading

    @property
    def hangs(self) -> bool:
        """Whether it was killed and is still there: it waits in the driver, where no signal reaches."""
        return self._killed and self._child.poll() is None

    def wait(self) -> Reading:
        """What it said, or what it had said by its deadline."""
        while (found := self.reading()) is None:
            left_s = self._until_s + (_KILL_S if self._killed else 0.0) - time.monotonic()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(max(0.0, left_s))
        return found

    def give_up(self) -> None:
        """End it, without an answer."""
        if self._child.poll() is None:
            self._killed = True
            self._child.kill()
        self._said.close()

    def _read(self) -> str:
        self._said.seek(0)
        return self._said.read(_MAX_SAID_BYTES).decode("utf-8", "replace")


@dataclass(slots=True)
class EvidenceSampler:
    """Evidence for a loop that does not wait: `ask`, and look in again. NVML is asked once in so many seconds at most.

    Attributes:
        every_s: a reading serves this long; ranks asked about meanwhile are looked up in it.
        deadline_s: how long NVML may take.
    """

    every_s: float = EVERY_S
    deadline_s: float = DEADLINE_S
    _question: NvmlQuestion | None = field(default=None, init=False)
    _asked_s: float = field(default=0.0, init=False)
    _wall_s: float = field(default=0.0, init=False)

    def ask(self, ranks: Sequence[RingInfo], now_s: float, about: Collection[int] | None = None) -> Evidence | None:
        """Evidence about these ranks, or None as long as NVML is being asked: call again.

        Args:
            ranks: the job's ranks on this host.
            now_s: the time on a clock that only goes on, in seconds.
            about: those to remark on; by default all.
        """
        # As long as one question hangs in the driver, another would too.
        if self._question is None or (now_s - self._asked_s >= self.every_s and not self._question.hangs):
            self._question = NvmlQuestion(self.deadline_s)
            self._asked_s, self._wall_s = now_s, time.time()
        reading = self._question.reading()
        return None if reading is None else evidence_of(ranks, reading, self._wall_s, about)

    def close(self) -> None:
        """End a question that is under way."""
        if self._question is not None:
            self._question.give_up()
            self._question = None
