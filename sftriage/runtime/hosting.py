"""One host of a job on many hosts: its agent, its files, and its connection to the hub."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from sftriage.agent.agent import Agent
from sftriage.base.files import Note, refusing
from sftriage.base.process import BOOT_ID
from sftriage.errors import UsageError
from sftriage.fleet.hub import AGENTS_FILE, Hub, HubAddress, LogLeader, Subjects, agent_file, token
from sftriage.fleet.shipping import HostEnd
from sftriage.fleet.transfers import HostCaptures
from sftriage.model.ends import HostEnds
from sftriage.runs.directory import DEFAULT_ROOT, RunDirectory
from sftriage.runs.liveness import holding, launcher_of, trainers_alive
from sftriage.runtime.copies import Keeping
from sftriage.runtime.ends import left_in_order, newest_attempt
from sftriage.runtime.nsys_launch import place_in
from sftriage.traces.disk import Disk
from sftriage.trainer.layout import bounded_text, find_rings
from sftriage.trainer.session import SPOOL
from sftriage.windows.steplog import KeptSteps

log = logging.getLogger("sftriage")

KEPT = KeptSteps(256 << 20, 86400.0)
"""Steps that a host keeps itself; the controller keeps all of them."""
FLUSH_S = 60.0
"""How long sending what is left may take."""
LEAVE_S, HURRY_S, SOON_S = 8.0, 8.0, 13.0
"""Time limits after a SIGTERM to all processes, which SLURM kills after 30 s: for the launcher to end; for sending what
is left; and, on the controller, for both on all hosts."""
RESTART_S, LEFT_S = 60.0, 5.0
"""How long after the last trainer a host counts as over: they may restart; and if all of them ended in order."""
POLL_S = 0.5
NODE_VARIABLES = ("SLURM_NODEID", "NODE_RANK", "GROUP_RANK", "OMPI_COMM_WORLD_NODE_RANK", "PMI_NODE_RANK")
NOTE = "host.json"
"""In a host's directory: a `HostNote`."""
SPEAKER = "speaker"
"""Lock beside the directories of a job's hosts: its holder logs what all hosts notice."""


def node_number(environment: Mapping[str, str]) -> int | None:
    """The number of this host in the job, from 0, if a launcher sets it."""
    numbers = (environment[name] for name in NODE_VARIABLES if environment.get(name, "").isdecimal())
    return next((int(number) for number in numbers), None)


def host_name(environment: Mapping[str, str]) -> str:
    """The name of this host's agent within its job."""
    number = node_number(environment)
    return bounded_text(socket.gethostname()) + ("" if number is None else f"-{number}")


def host_directory(job_id: str, name: str, environment: Mapping[str, str], *, new: bool = False) -> Path:
    """Where a host keeps its own files: in its newest directory, or in a ``new`` one.

    A job may run again under its name, with the same capture names. SLURM counts these restarts.
    """
    again = environment.get("SLURM_RESTART_COUNT", "")
    restart = f"-{int(again) + 1}" if again.isdecimal() and int(again) else ""
    # (several hosts may share it, and the run's directory beside it)
    found = numbered(Path(DEFAULT_ROOT) / f"{file_name(job_id)}{restart}.hosts" / file_name(name))
    path = before = next(found)
    while path.exists():
        before, path = path, next(found)
    return path if new else before


def free(name: Path) -> Path:
    """A new directory of that name, numbered if it exists: a job may be queued again under its name."""
    return next(path for path in numbered(name) if not path.exists())


def numbered(path: Path) -> Iterator[Path]:
    """A name, and numbered alternatives to it."""
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}-{number}")


def file_name(name: str) -> str:
    """A name as a recognisable file name, with a digest if it is long, unusual, or could name a neighbour."""
    if _FILE_NAME.fullmatch(name) and not name.endswith((".hosts", ".hub", ".keys")):
        return name
    kept = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip(".-")[:40]
    return f"{kept}{'-' * bool(kept)}{hashlib.blake2s(name.encode('utf-8', 'replace'), digest_size=4).hexdigest()}"


_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class HostNote:
    """What a new agent needs to replace one that has ended: the host's name, its rings, and the job's name."""

    name: str
    rings: str
    job: str
    boot_id: str


def left_behind(job_id: str) -> Iterator[tuple[Path, HostNote]]:
    """The directories of a job on this host whose trainers run without an agent."""
    boot_id = BOOT_ID.read_text(encoding="ascii").strip()
    for path in sorted(host_directory(job_id, "", os.environ).parent.glob(f"*/{NOTE}")):
        with contextlib.suppress(OSError, UsageError):
            note = Note(path, HostNote).get()
            # (several hosts may keep theirs side by side)
            if note is not None and note.boot_id == boot_id and trainers_alive(Path(note.rings)):
                with holding(RunDirectory(path.parent)):
                    pass
                yield path.parent, note


class AgentHost:
    """This host's part of a job. It waits for an unreachable hub, while the job continues.

    ``directory`` is this host's own (see `host_directory`), ``job`` the job's name for people, ``job_id`` its name on
    the hub, ``keeping`` where this host puts copies of its captures.
    """

    def __init__(
        self, rings: Path, directory: Path, job: str, job_id: str, address: HubAddress, name: str, keeping: Keeping
    ) -> None:
        self._rings = rings
        self.spool = directory / "spool"
        self._held = contextlib.ExitStack()
        with refusing(f"cannot use {directory}"):
            for path in (rings, directory, directory / "steps", self.spool):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if rings.stat().st_uid not in (0, os.getuid()):
                raise UsageError(f"{rings} belongs to another user; use a directory of your own for the rings")
            if (rings / SPOOL).is_symlink():
                (rings / SPOOL).unlink()
            with contextlib.suppress(FileExistsError):
                (rings / SPOOL).symlink_to(self.spool)
            boot_id, rings_id = BOOT_ID.read_text(encoding="ascii").strip(), f"{rings.stat().st_ino:x}"
            self._held.enter_context(holding(RunDirectory(directory)))
            Note(directory / NOTE, HostNote).save(HostNote(name, str(rings.absolute()), job, boot_id))
        store = HostCaptures(directory, keeping.store, drop_local=keeping.drop_local)
        self._disk = Disk(root=directory)
        self._log_leader = LogLeader(directory.with_name(SPEAKER))
        nsys = place_in(RunDirectory(directory))
        # (names from launchers and people must not reach the server unchecked)
        name, job, run = bounded_text(name), bounded_text(job), bounded_text(job_id)
        agent = Agent(rings, directory, store.local, job=job, run=run, nsys=nsys, kept=KEPT, do=self._disk.do)
        places, agent_token = Subjects.of(job_id), token(name)
        mine = address.of(agent_file(agent_token), AGENTS_FILE)
        hub = self._hub = Hub(mine, f"sftriage agent {agent_token}", places.inbox(agent_token))
        self._end = HostEnd(agent, hub, places, name, boot_id, rings_id, store, self._log_leader)

    def start(self) -> None:
        self._end.start()

    def watch(self, ends: Callable[[], HostEnds], let_go: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the trainers, or their launcher, have gone for good; False if ``let_go`` comes first.

        Each time they have restarted, it sends how they had ended (``ends``).
        """
        attempt, ended = newest_attempt(self._rings), HostEnds()
        known = launcher_of(self._rings) is not None
        # (the last of them may have gone before a restarted agent begins)
        alive_s = time.monotonic() if next(iter(find_rings(self._rings)), None) is not None else None
        while alive_s is None or time.monotonic() < alive_s + RESTART_S:
            if let_go():
                return False
            time.sleep(POLL_S)
            if trainers_alive(self._rings):
                alive_s, before, attempt = time.monotonic(), attempt, newest_attempt(self._rings)
                if attempt > before >= 0:
                    new = (end for end in ends().ranks if end.attempt > before)
                    self._end.restarted(replace(ended, ranks=(*ended.ranks, *new)))
                continue
            # (now: in a container that restarts, the same process ids, and so the same files, are used again)
            ended = ends()
            left = alive_s is not None and time.monotonic() > alive_s + LEFT_S and left_in_order(self._rings)
            if left or (known and launcher_of(self._rings) is None):
                break
        return True

    def left_within(self, patience_s: float) -> bool:
        deadline_s = time.monotonic() + patience_s
        while (there := trainers_alive(self._rings)) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return not there

    @property
    def broken(self) -> tuple[str, ...] | None:
        """See `HostEnd`."""
        return self._end.broken

    def finish(self, ends: HostEnds, patience_s: float = FLUSH_S, *, logs: bool = True) -> bool:
        """The job is over here: send what is left, and return whether all was sent; ``logs`` if not."""
        # (a hub that was never reached will not appear within the grace period of a pod)
        done = self._end.finish(patience_s if logs or self._hub.was_connected else 0.0, ends)
        if not done and logs and self._log_leader.should_log():
            log.warning("the hub does not answer; the last recordings of the job stay on their hosts")
        return done

    def close(self) -> None:
        self._end.close()
        self._disk.drain(1.0)
        self._disk.close()
        self._held.close()
