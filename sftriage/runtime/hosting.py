"""One host of a job on many: its agent, with what belongs to it, and the end of the hub that it talks to."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

from sftriage.agent.agent import Agent
from sftriage.errors import UsageError
from sftriage.fleet.hub import Hub, HubAddress, Places
from sftriage.fleet.shipping import HostEnd
from sftriage.recorder.spool import SPOOL
from sftriage.runs.directory import DEFAULT_ROOT
from sftriage.runs.liveness import trainers_alive, trainers_left
from sftriage.traces.disk import Disk
from sftriage.traces.manifest import MANIFEST_NAME
from sftriage.traces.store import LocalStore
from sftriage.windows.steplog import KeptSteps

KEPT = KeptSteps(256 << 20, 86400.0)
"""What a host keeps of its own steps; all of them are kept where the controller is."""
FLUSH_S = 60.0
"""How long what is left may take to be sent."""
LEAVE_S, HURRY_S, SOON_S = 8.0, 8.0, 13.0
"""Where all are told to end, and SLURM kills them after 30 s: how long a launcher may take, then what is left to be
sent, and both on all hosts before the controller waits no longer."""
RESTART_S, LEFT_S = 60.0, 5.0
"""How long after its trainers a host is over: they may be started again; and where all have taken their leave."""
NODE_VARIABLES = ("SLURM_NODEID", "NODE_RANK", "GROUP_RANK", "OMPI_COMM_WORLD_NODE_RANK", "PMI_NODE_RANK")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_number(environment: Mapping[str, str]) -> int | None:
    """Which of the job's hosts this is, counted from 0, where a launcher says so."""
    said = (environment[name] for name in NODE_VARIABLES if environment.get(name, "").isdecimal())
    return next((int(number) for number in said), None)


def host_name(environment: Mapping[str, str]) -> str:
    """What this host is called among those of its job."""
    number = node_number(environment)
    return socket.gethostname() + ("" if number is None else f"-{number}")


def host_directory(job_id: str, name: str, environment: Mapping[str, str], *, new: bool = False) -> Path:
    """Where a host keeps what is its own, without a word from anybody: in the newest there is, or in a ``new`` one.

    A job may be run again under its name, and its captures are called the same then. SLURM counts how often it has.
    """
    again = environment.get("SLURM_RESTART_COUNT", "")
    restart = f"-{int(again) + 1}" if again.isdecimal() and int(again) else ""
    # (several hosts may share it, and the run's directory beside it)
    found = numbered(Path(DEFAULT_ROOT) / f"{file_name(job_id)}{restart}.hosts" / file_name(name))
    path = before = next(found)
    while path.exists():
        before, path = path, next(found)
    return path if new else before


def free(wanted: Path) -> Path:
    """A directory of that name, or of one like it where there is one: a job may be queued again under its name."""
    return next(path for path in numbered(wanted) if not path.exists())


def numbered(wanted: Path) -> Iterator[Path]:
    """A name, and the others that are taken one after another where there is one like it."""
    yield wanted
    for number in count(2):
        yield wanted.with_name(f"{wanted.name}-{number}")


def file_name(name: str) -> str:
    """A name as that of a file."""
    return Places.of(name).run


class Host:
    """This host's part of a job. A hub that cannot be reached is waited for; the job goes on meanwhile.

    Args:
        rings: directory of the trainers' rings.
        directory: for what is this host's own; see `host_directory`.
        job: the job's name for people.
        job_id: its name on the hub.
        address: of the hub.
        name: of this host.

    Raises:
        UsageError: the directory cannot be used.
    """

    def __init__(self, rings: Path, directory: Path, job: str, job_id: str, address: HubAddress, name: str) -> None:
        self._rings = rings
        self.spool = directory / "spool"
        store = LocalStore(directory)
        try:
            for path in (rings, directory, directory / "steps", self.spool):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if rings.stat().st_uid not in (0, os.getuid()):
                raise UsageError(f"{rings} is another user's: give the trainers' rings a directory of your own")
            _link(rings / SPOOL, self.spool)
            boot_id = BOOT_ID.read_text(encoding="ascii").strip()
        except OSError as error:
            raise UsageError(f"{directory} cannot be used: {error.strerror}") from error
        self._disk = Disk()
        steps = directory / "steps"
        agent = Agent(rings, steps, self.spool, store, job=job, run=job_id, kept=KEPT, do=self._disk.do)
        hub = Hub(address, f"sftriage agent {name}")

        def stored(capture_id: str) -> tuple[bytes, dict[str, Path]]:
            manifest = store.manifest(capture_id)
            files = {one.name: store.path(capture_id, one.name) for one in manifest.artefacts}
            return (directory / "captures" / capture_id / MANIFEST_NAME).read_bytes(), files

        self._end = HostEnd(agent, hub, Places.of(job_id), name, boot_id, directory / "begun", stored)

    def start(self) -> None:
        """Begin."""
        self._end.start()

    @property
    def trains(self) -> bool:
        """Whether any of its trainers is there."""
        return trainers_alive(self._rings)

    def watch(self) -> None:
        """Wait until the host's trainers have been there, and are gone for good."""
        seen_s = None
        while seen_s is None or time.monotonic() < seen_s + RESTART_S:
            time.sleep(1.0)
            if self.trains:
                seen_s = time.monotonic()
            elif seen_s is not None and time.monotonic() > seen_s + LEFT_S and trainers_left(self._rings):
                return

    def left_within(self, patience_s: float) -> bool:
        """Whether its trainers are gone, by then."""
        deadline_s = time.monotonic() + patience_s
        while self.trains and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return not self.trains

    def finish(self, patience_s: float = FLUSH_S) -> bool:
        """The job is over here: send what is left; whether that was done."""
        return self._end.finish(patience_s)

    def close(self) -> None:
        """Let go of everything."""
        self._end.close()
        self._disk.drain(1.0)
        self._disk.close()


def _link(path: Path, target: Path) -> None:
    """Have a link lead to a directory, unless there is something else of that name."""
    if path.is_symlink():
        path.unlink()
    with contextlib.suppress(FileExistsError):
        path.symlink_to(target)
