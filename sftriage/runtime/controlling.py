"""The controller of a job on many hosts: triage over the hub, started anew or gone on with."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import msgspec

from sftriage.agent.keeping import RankLog
from sftriage.controller.policies import PolicyFiles
from sftriage.errors import InputError, UsageError
from sftriage.fleet.fetching import taker
from sftriage.fleet.generations import Generations, Known
from sftriage.fleet.hub import Hub, HubAddress, Places
from sftriage.fleet.leading import Leader, Lease, make_places, remove_places
from sftriage.fleet.over_nats import NatsFleet
from sftriage.recorder import RingInfo
from sftriage.runs.directory import RunDirectory, RunInfo, create, new_run_id, read_info, remember, write_info
from sftriage.runtime.indexing import SharedIndexing
from sftriage.runtime.local import Keeping, MakeSinks
from sftriage.runtime.rings import make_rings_directory, own
from sftriage.runtime.triage import POLL_S, Triage
from sftriage.runtime.uploads import RunUploads
from sftriage.sinks.stream import Sink
from sftriage.traces.disk import Disk, Do
from sftriage.traces.files import write_atomically
from sftriage.traces.store import LocalStore
from sftriage.windows.decoding import StepArrays
from sftriage.windows.logs import LOG_KIND
from sftriage.windows.steplog import KeptSteps, blocks_of

CONNECT_S = 20.0
OVER_S = 3.0
"""For how long all hosts have to have left before the job counts as over: others may be yet to be heard of."""


class HubNote(msgspec.Struct, frozen=True):
    """What a controller that goes on with a run has to know of its hub; ``job_id`` is the job's name there."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Beginning:
    """What is new: a job's name for people, and its policies."""

    job: str
    policies: Sequence[Path]
    keeping: Keeping


class JobController:
    """The controller of a job; to be closed.

    Args:
        directory: of the run; with ``beginning`` it is made, and without it is gone on with.
        job_id: the job's name on the hub, which it has to itself.
        address: of the hub.
        sinks: makes the subscribers to what happens.
        beginning: what is new.

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
    ) -> None:
        resume = beginning is None
        self.directory = RunDirectory(directory.absolute())
        if beginning is None:
            run_id, policies = read_info(self.directory).run_id, list(self.directory.policy_files())
        else:
            run_id, policies = new_run_id(datetime.now(timezone.utc)), list(beginning.policies)
            if self.directory.info_file.exists():
                raise UsageError(f"{directory} already holds a run; go on with it by --run, or name another with --out")
        self.files, self._disk = PolicyFiles(policies), Disk()
        self.files.do = Disk().do
        self._places, self._ended = Places.of(job_id), False
        with contextlib.ExitStack() as held:
            hub = self._hub = Hub(address, f"sftriage controller of {self._places.run}")
            held.callback(hub.close)
            hub.call(hub.connect(), CONNECT_S)
            lease = Lease(hub, self._places, Leader(run_id, socket.gethostname(), os.getpid()))
            held.callback(lease.let_go)
            hub.call(make_places(hub, self._places, run_id), CONNECT_S)
            # Nothing is left behind by one who does not lead.
            info = read_info(self.directory) if beginning is None else self._begin(run_id, beginning)
            self._rings = Path(info.rings)
            held.callback(shutil.rmtree, self._rings, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._rings.mkdir(mode=0o700, parents=True, exist_ok=True)
            own(self._rings)
            write_atomically(self.directory.hub, msgspec.json.encode(HubNote(job_id)).decode())
            self.uploads = RunUploads(self.directory, info) if info.store is not None else None
            self.indexing = SharedIndexing(self.directory.path, catalogue) if catalogue is not None else None
            self._fleet = self._made(hub, lease, info)
            kept: list[Sink] = [sink for sink in (self.uploads, self.indexing) if sink is not None]
            self._triage = Triage(
                self.directory, info, self.files, self._fleet, [*sinks(info), *kept], resume=resume, disk=self._disk
            )
            held.pop_all()

    def watch(self) -> None:
        """Triage the job to its end on all of its hosts.

        Raises:
            UsageError: another controller leads it by now.
        """
        remember(self.directory)
        self._triage.start()
        over_since_s = None
        while over_since_s is None or time.monotonic() < over_since_s + OVER_S:
            time.sleep(POLL_S)
            if self._fleet.lost:
                raise UsageError(f"let go of the job: {self._fleet.lost}")
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

    def close(self) -> None:
        """End the triage; of a job that has ended, nothing stays on the hub."""
        if self._ended:
            self._fleet.end()
            with contextlib.suppress(Exception):
                self._hub.call(remove_places(self._hub, self._places, lease=False), CONNECT_S)
        self._triage.close()
        shutil.rmtree(self._rings, ignore_errors=True)

    def _begin(self, run_id: str, beginning: Beginning) -> RunInfo:
        """Make the run directory, and one in memory, which says for how long the job is watched."""
        now, keeping = datetime.now(timezone.utc), beginning.keeping
        rings = make_rings_directory(run_id)
        info = RunInfo(
            run_id=run_id,
            job=beginning.job,
            created_at=now.isoformat(timespec="seconds"),
            command=(),
            policy=", ".join(one.policy.metadata.name for one in self.files.current.loaded),
            policy_sha256=self.files.current.loaded[0].sha256,
            rings=str(rings),
            store=keeping.store,
            drop_local=keeping.drop_local,
            steps_bytes=None if keeping.steps is None else keeping.steps.max_bytes,
            steps_age_s=None if keeping.steps is None else keeping.steps.age_s,
            ended_at="",
        )
        try:
            texts = [path.read_text(encoding="utf-8") for path in beginning.policies]
            create(self.directory.path, info, *texts)
        except BaseException:
            shutil.rmtree(rings, ignore_errors=True)
            raise
        return info

    def _made(self, hub: Hub, lease: Lease, info: RunInfo) -> NatsFleet:
        path = self.directory.generations
        kept = None
        if info.steps_bytes is not None and info.steps_age_s is not None:
            kept = KeptSteps(info.steps_bytes, info.steps_age_s)
        try:
            known = msgspec.json.decode(path.read_bytes(), type=Known) if path.exists() else Known()
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: {error}") from error

        def note(generations: Generations) -> None:
            text = msgspec.json.encode(generations.known).decode()
            # (a disk that takes nothing now keeps no steps from being told)
            self._disk.do(partial(write_atomically, path, text), path.name, latest=True)

        return NatsFleet(
            hub,
            self._places,
            lease,
            Generations(known),
            note,
            KeptRows(self.directory.steps, kept, self._disk.do),
            taker(LocalStore(self.directory.path), info.run_id),
            self.directory.spool,
        )


class KeptRows:
    """Keeps the steps of all hosts in the run directory, as one host's are kept there."""

    def __init__(
        self, steps: Path, kept: KeptSteps | None, do: Do, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._log = partial(RankLog, steps, kept=kept, do=do, say=say)
        self._logs: dict[tuple[int, int, str], RankLog] = {}
        self._blocks: dict[int, set[int]] = {}

    def __call__(self, info: RingInfo, steps: StepArrays, device: StepArrays | None) -> None:
        """Keep steps of one rank; see `sftriage.fleet.over_nats.Keep`."""
        if steps.capturing_B.any():
            self._blocks.setdefault(info.attempt, set()).update(blocks_of(steps))
        for kind, some in (("steps", steps), (LOG_KIND, device)):
            if some is None:
                continue
            at = (info.attempt, info.rank, kind)
            if at not in self._logs:
                for old in [one for one in self._logs if one[0] < info.attempt - 1]:
                    self._logs.pop(old).close()
                self._logs[at] = self._log(info=info, kind=kind)
            self._logs[at].take(some, self._blocks.get(info.attempt, set()), info.cohort)


def job_of(directory: Path) -> str:
    """The name on its hub of the job whose run is in a directory.

    Raises:
        UsageError: it is no run of many hosts.
    """
    try:
        return msgspec.json.decode(RunDirectory(directory).hub.read_bytes(), type=HubNote).job_id
    except (OSError, ValueError) as error:
        raise UsageError(f"{directory} holds no run of a job on many hosts that could be gone on with") from error
