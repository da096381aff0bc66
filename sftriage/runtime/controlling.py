"""The controller of a job on many hosts: begins or resumes triage over the hub, and logs the steps of all hosts."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import numpy as np

from sftriage.agent.reading import RankLog
from sftriage.base.files import Note, write_atomically
from sftriage.errors import UsageError
from sftriage.fleet.hosts import Generations, Known, RollCall
from sftriage.fleet.hub import CONTROLLER_FILE, Hub, Leader, Lease, LogLeader, Subjects, make_places, remove_places
from sftriage.fleet.over_nats import NatsFleet
from sftriage.fleet.transfers import Fetching
from sftriage.fleet.wire import RunName
from sftriage.model.events import JobBroken
from sftriage.policy.in_force import PolicyFiles, files_of
from sftriage.runs.directory import RunDirectory, create, new_run_id, read_info, remember
from sftriage.runs.liveness import UNHEARD, holding, note_problem
from sftriage.runtime.copies import KEEP_ALL, Keeping
from sftriage.runtime.hosting import SOON_S, SPEAKER, host_directory
from sftriage.runtime.hub_server import HubOptions
from sftriage.runtime.local import MakeSinks, WatchedRun, kept_of
from sftriage.runtime.reducing import quick
from sftriage.runtime.rings import make_rings_directory, own, remove_rings_directory
from sftriage.runtime.triage import POLL_S, SHOW_S
from sftriage.traces.disk import Counted, Disk, at_once, check_room
from sftriage.traces.store import LocalStore
from sftriage.trainer.layout import RingInfo
from sftriage.verdict.departures import broken_in
from sftriage.windows.decoding import StepArrays, together
from sftriage.windows.log_files import find_segments
from sftriage.windows.logs import LOG_KIND
from sftriage.windows.rings import Rows
from sftriage.windows.steplog import KeptSteps, blocks_of
from sftriage.words.departures import broken_sentence

LOGS_PER_SECOND = 256
"""Maximum logs written per second."""
MAX_QUEUES = 128
"""With more queues on the disk, writes that are not urgent wait."""
MAX_HELD_BYTES = 32 << 20
"""Maximum bytes that wait; beyond it, logs are written sooner."""


class KeptRows:
    """Logs the steps of all ranks for `sftriage.fleet.over_nats.NatsFleet`; nothing else writes to their directory."""

    def __init__(
        self, steps: Path, kept: KeptSteps | None, disk: Disk, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._steps, self._kept, self._disk, self._clock = steps, kept, disk, clock
        # Rows to write, by generation and agent, the oldest first.
        self._held: OrderedDict[tuple[int, str], list[Rows]] = OrderedDict()
        self._held_bytes = 0
        self._allowance, self._turn_s = float(LOGS_PER_SECOND), clock()
        self._blocks: defaultdict[int, set[int]] = defaultdict(set)
        # Used by the disk thread: the open logs, all logs ever opened, and those that an earlier controller left.
        self._logs: dict[tuple[int, int, str], RankLog] = {}
        self._made: set[tuple[int, int, str]] = set()
        self._newest = 0
        self._left: dict[tuple[int, int], dict[str, list[Path]]] | None = None
        self._lock = threading.Lock()
        disk.holds_back(self._write_all)

    @property
    def position(self) -> int | None:
        """The stream position of the first waiting steps; None if none wait."""
        first = next(iter(self._held.values()), None)
        return None if first is None else first[0].position

    def take(self, rows: Rows) -> None:
        """Take steps, and any device times, of ranks of one agent and generation."""
        at = rows.generation, rows.agent
        with self._lock:
            if at in self._held and self._held[at][0].ranks != rows.ranks:
                self._have_written([self._pop(at)])
            # (logs of steps have no counters)
            rows = replace(rows, steps=replace(rows.steps, counted_BC=None))
            self._held.setdefault(at, []).append(rows)
            self._held_bytes += _size_bytes([rows])
            if rows.steps.capturing_B.any():
                self._blocks[rows.generation] |= blocks_of(rows.steps)
                # (write these soon: they are analysed once the capture is stored)
                self._have_written([self._pop(at)], last=False)

    def turn(self) -> None:
        now_s = self._clock()
        self._allowance = min(LOGS_PER_SECOND, self._allowance + (now_s - self._turn_s) * LOGS_PER_SECOND)
        self._turn_s = now_s
        self._allowance -= self._write(self._allowance if self._disk.queues < MAX_QUEUES else 0)

    def _write_all(self) -> None:
        self._write(float("inf"))

    def _write(self, n_logs: float) -> int:
        with self._lock:
            some: list[list[Rows]] = []
            number = 0
            while self._held and (number < n_logs or self._held_bytes > MAX_HELD_BYTES):
                some.append(self._pop(next(iter(self._held))))
                number += len(some[-1][0].ranks)
            self._have_written(some)
            return number

    def _pop(self, at: tuple[int, str]) -> list[Rows]:
        held = self._held.pop(at)
        self._held_bytes -= _size_bytes(held)
        return held

    def _have_written(self, some: Sequence[list[Rows]], *, last: bool = True) -> None:
        for held in some:
            counted = Counted("steps", sum(map(len, _parts(held))), _size_bytes(held))
            blocks = frozenset(self._blocks[held[0].generation])
            queue = f"steps of {held[0].agent} in {held[0].generation}"
            self._disk.do(partial(self._append, held, blocks), queue, counted, waits=False, last=last)

    def _append(self, held: list[Rows], blocks: frozenset[int]) -> None:
        """Write steps, in the disk thread. A retry skips those that are already in a log."""
        generation, infos = held[0].generation, held[0].ranks
        if generation > self._newest:
            self._newest = generation
            for old in [at for at in self._logs if at[0] < self._newest - 1]:
                self._logs.pop(old).close()
        device = [rows.device_steps for rows in held if rows.device_steps is not None]
        for kind, parts in (("steps", [rows.steps for rows in held]), (LOG_KIND, device)):
            if not parts:
                continue
            steps = together(parts)
            steps = steps[np.argsort(steps.rank_B, kind="stable")]
            ranks = list(infos)
            begin_K, end_K = (np.searchsorted(steps.rank_B, ranks, side) for side in ("left", "right"))
            for rank, begin, end in zip(ranks, begin_K.tolist(), end_K.tolist(), strict=True):
                log = self._log(generation, infos[rank], kind)
                log.take(steps[begin:end], blocks, infos[rank].cohort)
                log.rest()

    def _log(self, generation: int, info: RingInfo, kind: str) -> RankLog:
        at = generation, info.rank, kind
        if at not in self._logs:
            if self._left is None:
                self._left = defaultdict(dict)
                for name, path in find_segments(self._steps):
                    self._left[name.attempt, name.rank].setdefault(name.kind, []).append(path)
            # (a log that this process has opened before has new files by now)
            there = None if at in self._made else self._left.get((generation, info.rank), {})
            self._made.add(at)
            self._logs[at] = RankLog(self._steps, info, kind, self._kept, at_once, lambda _: None, there)
        return self._logs[at]


def _parts(held: list[Rows]) -> list[StepArrays]:
    return [part for rows in held for part in (rows.steps, rows.device_steps) if part is not None]


def _size_bytes(held: list[Rows]) -> int:
    return sum(part.slots_BW.nbytes for part in _parts(held))


log = logging.getLogger("sftriage")

CONNECT_S = 20.0
COLLECTED = 10_000, 20, 100
"""Thresholds of the garbage collector: a controller creates almost no cycles. By default, in a large job, collection
runs every few seconds for half a second, in which no window is judged."""
HELD_S = 20.0
"""How long to wait for a run directory that its previous controller may still hold."""
OVER_S = 3.0
"""How long all hosts must have left before the job counts as over: others may still report."""


@dataclass(frozen=True, slots=True)
class HubNote:
    """What a controller needs to resume a run on its hub; ``job_id`` is the job's name there."""

    job_id: str


class JobController(WatchedRun):
    """The controller of a job on many hosts; to be closed. HubError if the hub cannot be reached.

    With the name of a new ``job`` it makes the run directory, without one it resumes the run there, under other
    ``policies`` if there are some. ``nsys`` says that the ranks of a new job run under Nsight Systems.
    """

    def __init__(
        self,
        directory: Path,
        options: HubOptions,
        sinks: MakeSinks,
        job: str | None = None,
        *,
        policies: Sequence[Path] = (),
        keeping: Keeping = KEEP_ALL,
        nsys: bool = False,
    ) -> None:
        run = RunDirectory(directory.absolute())
        if job is None:
            run_id, policies = read_info(run).run_id, policies or run.policy_files()
        else:
            run_id = new_run_id(datetime.now(timezone.utc))
            if run.info_file.exists():
                raise UsageError(f"{directory} already has a run; resume it with --run, or choose another with --out")
        files = PolicyFiles(policies)
        self._places, self._ended = Subjects.of(options.job_id), False
        self._deadline_s = float("inf")
        self._broken: list[JobBroken] = []
        self._unheard = ""
        self._judged = -1
        with contextlib.ExitStack() as held:
            hub = self._hub = Hub(
                options.address.of(CONTROLLER_FILE), f"sftriage controller of {self._places.run}", self._places.lead
            )
            held.callback(hub.close)
            leader = Leader(run_id, socket.gethostname(), os.getpid())
            hub.call(hub.connect(), CONNECT_S)
            self._lease = Lease(hub, self._places, leader)
            held.callback(self._lease.let_go)
            if job is None:
                # (a killed controller may take a moment to go)
                with holding(run, HELD_S):
                    pass
            hub.call(make_places(hub, self._places, run_id), CONNECT_S)
            # A controller that does not lead must leave nothing behind.
            begins = None if job is None else keeping.info(run_id, job, (), files, make_rings_directory(run_id))
            info = begins or read_info(run)
            rings = Path(info.rings)
            held.callback(remove_rings_directory, rings)
            if begins is not None:
                create(run.path, begins, *(path.read_text("utf-8") for policy in policies for path in files_of(policy)))
                if nsys:
                    # (each host knows its own launch)
                    write_atomically(run.nsys, "{}\n")
            with contextlib.suppress(OSError):
                rings.parent.mkdir(mode=0o700, exist_ok=True)
                rings.mkdir(mode=0o700, exist_ok=True)
            own(rings)
            Note(run.hub, HubNote).save(HubNote(options.job_id))
            super().__init__(run, info, files, sinks)
            self._fleet = self._made()
            # (steps arrive by themselves, so reading them is cheap)
            self._watch(self._fleet, resume=job is None, reads_s=POLL_S)
            self._triage.restarts = self._restarts
            held.pop_all()

    def watch(
        self,
        show: Callable[[str], None],
        ending_signal: Callable[[], int | None] = lambda: None,
        drain_s: float | None = None,
    ) -> bool:
        """Triage the job to its end on all of its hosts; whether it was watched to its end.

        ``show`` prints a line about the hosts, ``ending_signal`` returns the signal that ends this process. SIGTERM
        also ends the hosts, so this waits for them for a while; with ``drain_s`` it ends this process alone, which
        waits at most that long for captures in progress. UsageError if another controller has taken over.
        """
        gc.set_threshold(*COLLECTED)
        remember(self.directory)
        self._triage.start()
        over_since_s, checked_s, roll_call = None, 0.0, RollCall()
        log_leader = LogLeader(host_directory(job_of(self.directory.path), SPEAKER, os.environ))
        while over_since_s is None or time.monotonic() < min(over_since_s + OVER_S, self._deadline_s):
            time.sleep(POLL_S)
            if (signum := ending_signal()) is not None:
                until_s = time.monotonic() + (drain_s or 0.0)
                while time.monotonic() < until_s and not (self._triage.drain(POLL_S) or self._fleet.over):
                    pass
                self._deadline_s = min(self._deadline_s, time.monotonic() + (SOON_S if drain_s is None else 0.0))
            if not self._fleet.over and (time.monotonic() > self._deadline_s or signum not in (None, signal.SIGTERM)):
                if any(host.ends is not None for host in self._fleet.hosts.values()):
                    # (by what is known: no controller may follow, as where a host of the job has died)
                    self._triage.judge_ends(self._judge_ends)
                    self._announce()
                return False
            if self._lease.lost:
                raise UsageError(f"stopped watching the job: {self._lease.lost}")
            if time.monotonic() > checked_s + SHOW_S:
                checked_s = time.monotonic()
                away = "" if self._hub.connected_s is not None else self._hub.unreachable()
                if away:
                    # (so that no host logs it too)
                    log_leader.should_log()
                else:
                    log_leader.release()
                for line in roll_call.update(self._fleet.hosts, away, checked_s):
                    show(line)
                self._note_unheard(away or roll_call.unheard)
                # (on a full disk the hub stores nothing: then no steps arrive, and nothing else is written)
                self._disk.do(partial(check_room, self.directory.path), "room", latest=True, waits=False)
            if not self._fleet.over:
                over_since_s = None
            elif over_since_s is None:
                over_since_s = time.monotonic()
        self._finish(self._judge_ends)
        self._announce()
        self._ended = True
        return True

    def _note_unheard(self, problem: str) -> None:
        if problem != self._unheard:
            self._unheard = problem
            note_problem(self._rings / UNHEARD, problem or None)

    def _judge_ends(self) -> list[JobBroken]:
        self._broken = broken_in(self._fleet.ends(), time.time())
        return [event for event in self._broken if event.attempt > self._judged]

    def _restarts(self) -> list[JobBroken]:
        """Which rank went first in attempts that all hosts have reported and restarted since, each once."""
        if any(host.ends is None for host in self._fleet.hosts.values()):
            return []
        ends = self._fleet.ends()
        begun = min((max((end.attempt for end in host.ranks), default=0) for host in ends), default=0)
        broken = [event for event in broken_in(ends, time.time()) if self._judged < event.attempt < begun]
        self._judged = max(self._judged, begun - 1)
        return broken

    def _announce(self) -> None:
        self._fleet.announce([broken_sentence(event) for event in self._broken])

    def close(self) -> None:
        """End the triage; for a job that has ended, remove everything from the hub."""
        if self._ended:
            self._fleet.end()
            with contextlib.suppress(Exception):
                self._hub.call(remove_places(self._hub, self._places, lease=False), CONNECT_S)
        super().close()

    def _made(self) -> NatsFleet:
        info = self._info
        name = RunName(info.job, info.run_id, info.store or "")
        noted = Note(self.directory.generations, Known)

        def note(generations: Generations) -> None:
            # (a disk that refuses writes must not hold up steps)
            self._disk.do(partial(noted.save, generations.known), noted.path.name, latest=True)

        fetching = Fetching(LocalStore(self.directory.path), self.directory.spool, name, quick)
        fetching.sweep()
        kept = KeptRows(self.directory.steps, kept_of(info), self._disk)
        return NatsFleet(self._lease, Generations(noted.load() or Known()), note, kept, fetching)


def job_of(directory: Path) -> str:
    """The name, on its hub, of the job of a run directory."""
    noted = Note(RunDirectory(directory).hub, HubNote).get()
    if noted is None:
        raise UsageError(f"{directory} has no run of a job on many hosts to resume")
    return noted.job_id
