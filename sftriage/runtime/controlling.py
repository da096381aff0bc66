"""The controller of a job on many hosts: triage over the hub, started anew or gone on with."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from sftriage.base.files import write_atomically
from sftriage.base.notes import Note
from sftriage.controller.policies import PolicyFiles, files_of
from sftriage.errors import UsageError
from sftriage.fleet.generations import Generations, Known
from sftriage.fleet.hosts import RollCall
from sftriage.fleet.hub import CONTROLLER_FILE, Hub, HubAddress, LogLeader, Subjects
from sftriage.fleet.lease import Leader, Lease, make_places, remove_places
from sftriage.fleet.over_nats import NatsFleet
from sftriage.fleet.transfers import Fetching
from sftriage.fleet.wire import RunName
from sftriage.runs.directory import RunDirectory, RunInfo, create, new_run_id, read_info, remember, write_info
from sftriage.runs.liveness import holding
from sftriage.runtime.annotating import quick
from sftriage.runtime.hosting import SOON_S, SPEAKER, host_directory
from sftriage.runtime.indexing import SharedIndexing
from sftriage.runtime.kept_rows import KeptRows
from sftriage.runtime.local import Keeping, MakeSinks, kept_of
from sftriage.runtime.rings import make_rings_directory, own, remove_rings_directory
from sftriage.runtime.triage import POLL_S, SEEN_S, Triage
from sftriage.runtime.uploads import RunUploads
from sftriage.sinks.stream import Sink
from sftriage.traces.disk import Disk
from sftriage.traces.store import LocalStore

log = logging.getLogger("sftriage")

CONNECT_S = 20.0
COLLECTED = 10_000, 20, 100
"""Next to nothing that a controller makes is in cycles. By default garbage is looked for among all that is there every
few seconds in a large job, for half of one, in which no window is judged."""
HELD_S = 20.0
"""How long a run directory is waited for that its last controller may hold still."""
OVER_S = 3.0
"""For how long all hosts have to have left before the job counts as over: others may be yet to be heard of."""


@dataclass(frozen=True, slots=True)
class HubNote:
    """What a controller that goes on with a run has to know of its hub; ``job_id`` is the job's name there."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Beginning:
    """What is new: a job's name for people, its policies, and whether its ranks run under Nsight Systems."""

    job: str
    policies: Sequence[Path]
    keeping: Keeping
    nsys: bool = False


class JobController:
    """The controller of a job; to be closed.

    With ``beginning`` it makes the run directory, without it it resumes the run there, under other ``policies`` if some
    are given. ``catalogue`` is the URL of a shared one.

    Raises:
        UsageError: another controller leads the job, or something of this cannot be used.
        HubError: the hub cannot be reached.
    """

    def __init__(
        self,
        directory: Path,
        job_id: str,
        address: HubAddress,
        sinks: MakeSinks,
        beginning: Beginning | None = None,
        catalogue: str | None = None,
        *,
        policies: Sequence[Path] = (),
    ) -> None:
        resume = beginning is None
        self.directory = RunDirectory(directory.absolute())
        if beginning is None:
            run_id = read_info(self.directory).run_id
            policies = policies or self.directory.policy_files()
        else:
            run_id, policies = new_run_id(datetime.now(timezone.utc)), beginning.policies
            if self.directory.info_file.exists():
                raise UsageError(f"{directory} already holds a run; go on with it by --run, or name another with --out")
        self.files = PolicyFiles(policies)
        self.files.do = Disk().do
        self._places, self._ended = Subjects.of(job_id), False
        self._deadline_s = float("inf")
        with contextlib.ExitStack() as held:
            mine = address.of(CONTROLLER_FILE)
            hub = self._hub = Hub(mine, f"sftriage controller of {self._places.run}", self._places.lead)
            held.callback(hub.close)
            leader = Leader(run_id, socket.gethostname(), os.getpid())
            hub.call(hub.connect(), CONNECT_S)
            lease = Lease(hub, self._places, leader)
            held.callback(lease.let_go)
            if resume:
                # (a killed controller may take a moment to go)
                with holding(self.directory, HELD_S):
                    pass
            hub.call(make_places(hub, self._places, run_id), CONNECT_S)
            # Nothing is left behind by one who does not lead.
            info = read_info(self.directory) if beginning is None else self._begin(run_id, beginning)
            self._disk = Disk(root=self.directory.path)
            self._rings = Path(info.rings)
            held.callback(remove_rings_directory, self._rings)
            with contextlib.suppress(OSError):
                self._rings.parent.mkdir(mode=0o700, exist_ok=True)
                self._rings.mkdir(mode=0o700, exist_ok=True)
            own(self._rings)
            Note(self.directory.hub, HubNote).save(HubNote(job_id))
            self.uploads = RunUploads(self.directory, info) if info.store is not None else None
            self.indexing = SharedIndexing(self.directory.path, catalogue) if catalogue is not None else None
            self._fleet = self._made(hub, lease, info)
            kept: list[Sink] = [sink for sink in (self.uploads, self.indexing) if sink is not None]
            self._triage = Triage(
                *(self.directory, info, self.files, self._fleet, [*sinks(info), *kept]),
                resume=resume,
                # (they are here by then, and take no reading)
                reads_s=POLL_S,
                disk=self._disk,
            )
            held.pop_all()

    def watch(self, say: Callable[[str], None], told: Callable[[], int | None] = lambda: None) -> bool:
        """Triage the job to its end on all of its hosts; whether it was watched to its end.

        ``say`` prints a line about the hosts, ``told`` returns the signal that ends this process. SIGTERM also ends the
        hosts, so their end is awaited for a while.

        Raises:
            UsageError: another controller leads it by now.
        """
        gc.set_threshold(*COLLECTED)
        remember(self.directory)
        self._triage.start()
        over_since_s, looked_s, roll_call = None, 0.0, RollCall()
        log_leader = LogLeader(host_directory(job_of(self.directory.path), SPEAKER, os.environ))
        while over_since_s is None or time.monotonic() < min(over_since_s + OVER_S, self._deadline_s):
            time.sleep(POLL_S)
            if (signum := told()) is not None:
                self._deadline_s = min(self._deadline_s, time.monotonic() + SOON_S)
            if not self._fleet.over and (time.monotonic() > self._deadline_s or signum not in (None, signal.SIGTERM)):
                return False
            if self._fleet.lost:
                raise UsageError(f"let go of the job: {self._fleet.lost}")
            if time.monotonic() > looked_s + SEEN_S:
                looked_s = time.monotonic()
                away = "" if self._hub.connected_s is not None else self._hub.unreachable()
                if away:
                    # (no host need say it too)
                    log_leader.should_log()
                else:
                    log_leader.release()
                for line in roll_call.look(self._fleet.hosts, away, looked_s):
                    say(line)
            if not self._fleet.over:
                over_since_s = None
            elif over_since_s is None:
                over_since_s = time.monotonic()
        self._triage.finish()
        self._ended = True
        ended_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._disk.do(
            lambda: write_info(self.directory, replace(read_info(self.directory), ended_at=ended_at)), "run.json"
        )
        return True

    def close(self) -> None:
        """End the triage; of a job that has ended, nothing stays on the hub."""
        if self._ended:
            self._fleet.end()
            with contextlib.suppress(Exception):
                self._hub.call(remove_places(self._hub, self._places, lease=False), CONNECT_S)
        self._triage.close()
        remove_rings_directory(self._rings)

    def _begin(self, run_id: str, beginning: Beginning) -> RunInfo:
        rings = make_rings_directory(run_id)
        info = beginning.keeping.info(run_id, beginning.job, (), self.files, rings)
        try:
            texts = [path.read_text(encoding="utf-8") for one in beginning.policies for path in files_of(one)]
            create(self.directory.path, info, *texts)
            if beginning.nsys:
                # (how, each host knows of its own)
                write_atomically(self.directory.nsys, "{}\n")
        except BaseException:
            remove_rings_directory(rings)
            raise
        return info

    def _made(self, hub: Hub, lease: Lease, info: RunInfo) -> NatsFleet:
        name = RunName(info.job, info.run_id, info.store or "")
        noted = Note(self.directory.generations, Known)

        def note(generations: Generations) -> None:
            # (a disk that takes nothing now keeps no steps from being told)
            self._disk.do(partial(noted.save, generations.known), noted.path.name, latest=True)

        fetching = Fetching(LocalStore(self.directory.path), self.directory.spool, name, quick)
        fetching.sweep()
        kept = KeptRows(self.directory.steps, kept_of(info), self._disk)
        return NatsFleet(hub, self._places, lease, Generations(noted.load() or Known()), note, kept, fetching)


def job_of(directory: Path) -> str:
    """The name on its hub of the job whose run is in a directory.

    Raises:
        UsageError: it is no run of many hosts.
    """
    noted = Note(RunDirectory(directory).hub, HubNote).get()
    if noted is None:
        raise UsageError(f"{directory} holds no run of a job on many hosts that could be gone on with")
    return noted.job_id
