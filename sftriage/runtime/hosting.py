"""One host of a job on many: its agent, with what belongs to it, and the end of the hub that it talks to."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path

from sftriage.agent.agent import Agent
from sftriage.errors import UsageError
from sftriage.fleet.hub import Hub, HubAddress, Places, token
from sftriage.fleet.permissions import AGENTS_FILE, agent_file
from sftriage.fleet.shipping import HostEnd
from sftriage.recorder.layout import bounded_text
from sftriage.runs.directory import DEFAULT_ROOT
from sftriage.runs.liveness import trainers_alive
from sftriage.traces.disk import Disk
from sftriage.traces.manifest import MANIFEST_NAME
from sftriage.traces.store import LocalStore
from sftriage.windows.steplog import KeptSteps

KEPT = KeptSteps(256 << 20, 86400.0)
"""What a host keeps of its own steps; all of them are kept where the controller is."""
FLUSH_S = 60.0
RESTART_S = 60.0
NODE_VARIABLES = ("SLURM_NODEID", "NODE_RANK", "GROUP_RANK", "OMPI_COMM_WORLD_NODE_RANK", "PMI_NODE_RANK")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_number(environment: Mapping[str, str]) -> int | None:
    """Which of the job's hosts this is, counted from 0, where a launcher says so."""
    said = (environment[name] for name in NODE_VARIABLES if environment.get(name, "").isdecimal())
    return next((int(number) for number in said), None)


def host_name(environment: Mapping[str, str]) -> str:
    """What this host is called among those of its job."""
    number = node_number(environment)
    return bounded_text(socket.gethostname()) + ("" if number is None else f"-{number}")


def host_directory(job_id: str, name: str) -> Path:
    """Where a host keeps what is its own, without a word from anybody."""
    # (several hosts may share it, and the run's directory beside it)
    return Path(DEFAULT_ROOT) / f"{file_name(job_id)}.hosts" / file_name(name)


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
            boot_id = BOOT_ID.read_text(encoding="ascii").strip()
        except OSError as error:
            raise UsageError(f"{directory} cannot be used: {error.strerror}") from error
        self._disk = Disk()
        steps = directory / "steps"
        # (names that are a launcher's or a person's are no part of what a server reads)
        name, job, run = bounded_text(name), bounded_text(job), bounded_text(job_id)
        agent = Agent(rings, steps, self.spool, store, job=job, run=run, kept=KEPT, do=self._disk.do)
        places, agent_token = Places.of(job_id), token(name)
        mine = address.of(agent_file(agent_token), AGENTS_FILE)
        hub = Hub(mine, f"sftriage agent {agent_token}", places.inbox(agent_token))

        def stored(capture_id: str) -> tuple[bytes, dict[str, Path]]:
            manifest = store.manifest(capture_id)
            files = {one.name: store.path(capture_id, one.name) for one in manifest.artefacts}
            return (directory / "captures" / capture_id / MANIFEST_NAME).read_bytes(), files

        self._end = HostEnd(agent, hub, places, name, boot_id, directory / "begun", stored)

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

    def finish(self) -> bool:
        """The job is over here: send what is left; whether that was done."""
        return self._end.finish(FLUSH_S)

    def close(self) -> None:
        """Let go of everything."""
        self._end.close()
        self._disk.drain(1.0)
        self._disk.close()
