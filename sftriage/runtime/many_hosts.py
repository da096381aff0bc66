"""``sftriage run`` on one of several hosts: the job's part here, its agent, and on one hub and controller."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from sftriage.errors import UsageError
from sftriage.fleet.hub import CA_FILE, PORT, HubAddress
from sftriage.recorder.monitor import RUN_ENV
from sftriage.runs.directory import DEFAULT_ROOT, RunDirectory, new_run_id
from sftriage.runs.liveness import note_launcher
from sftriage.runtime.carrying import CARRIED_IN, carried
from sftriage.runtime.hosting import (
    FLUSH_S,
    HURRY_S,
    LEAVE_S,
    NO_COPIES,
    SOON_S,
    Copies,
    Host,
    file_name,
    free,
    host_directory,
    host_name,
    left_behind,
    node_number,
)
from sftriage.runtime.hub_server import HubServer, is_here, listens_on, make_secret
from sftriage.runtime.hub_waiting import SECRET_S, wait_for_secret
from sftriage.runtime.kept_child import KeptChild, die_with_parent, end, was_killed
from sftriage.runtime.launcher import Launcher
from sftriage.runtime.local import UnderNsys
from sftriage.runtime.nsys_launch import NsysLaunch, remove_place, wrapped
from sftriage.runtime.rings import make_rings_directory, note_steps, remove_rings_directory

log = logging.getLogger("sftriage")

SAY_AFTER_S = 20.0
"""For how long a person is not told that other hosts, or uploads, are waited for."""
END_S = 30.0


@dataclass(frozen=True, slots=True)
class HubOptions:
    """How a person says where a job's hub is.

    Attributes:
        job_id: the job's name there, the same on all of its hosts.
        hub: the name or address of the host that starts it, with a port after a colon or without one.
        nats: URL of a NATS server that is there already.
        credentials: a file with what lets us in, or a directory of such files, of the controller and of agents (see
            `sftriage.fleet.permissions`); by default a file that the host that starts the hub makes.
        tls: a directory with ``ca.pem``, and on the host that starts the hub ``cert.pem`` and ``key.pem``.
    """

    job_id: str
    hub: str | None = None
    nats: str | None = None
    credentials: Path | None = None
    tls: Path | None = None

    @classmethod
    def of(
        cls, job_id: str | None, hub: str | None, nats: str | None, credentials: Path | None, tls: Path | None
    ) -> HubOptions:
        """What was asked for.

        Raises:
            UsageError: it makes no sense.
        """
        if hub is None and nats is None:
            raise UsageError("where is the job's hub? give --hub HEAD, or --nats URL")
        if hub == "":
            raise UsageError("--hub is empty: it is the name of the job's first host")
        if hub is not None and nats is not None:
            raise UsageError("--hub starts a NATS server, and --nats uses another one: give one of them")
        if not job_id:
            raise UsageError("--job-id is missing: a name for this job alone, as $SLURM_JOB_ID, alike on all its hosts")
        return cls(job_id, hub, nats, credentials, tls)

    @property
    def server(self) -> tuple[str, int]:
        """Host and port of the hub that is started.

        Raises:
            UsageError: there is no such port.
        """
        host, colon, port = (self.hub or "").rpartition(":")
        if not colon or (":" in host and not host.startswith("[")):
            return (self.hub or "").strip("[]"), PORT
        if not (port.isdecimal() and 0 < int(port) < 65536):
            raise UsageError(f"--hub {self.hub}: there is no port {port!r}")
        return host.strip("[]"), int(port)

    @property
    def secret(self) -> Path:
        """The file with what lets us in to the hub that is started; by default one of this job and port alone.

        Raises:
            UsageError: there is no such port.
        """
        port = self.server[1]
        name = f"{file_name(self.job_id)}.hub" + (f"-{port}" if port != PORT else "")
        return self.credentials or Path(DEFAULT_ROOT) / name

    @property
    def address(self) -> HubAddress:
        """Where to connect to."""
        ca = None if self.tls is None else self.tls / CA_FILE
        if self.nats is not None:
            return HubAddress(self.nats, self.credentials, ca)
        host, port = self.server
        scheme = "nats" if self.tls is None else "tls"
        return HubAddress(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", self.secret, ca)

    @property
    def leads(self) -> bool:
        """Whether this host is the one with the hub, or else the first of the job's, and has the controller.

        Raises:
            UsageError: nobody says which one it is.
        """
        if self.hub is not None:
            return is_here(self.server[0])
        number = node_number(os.environ)
        if number is None:
            raise UsageError(
                "which host has the controller? --hub HEAD or NODE_RANK says so; or start `sftriage controller`"
                " on one, and `sftriage agent` on each"
            )
        return number == 0

    @property
    def leads_hub(self) -> bool:
        """Whether this host is the one with the hub, and that is not there."""
        if self.hub is None or not is_here(self.server[0]):
            return False
        try:
            with socket.create_connection(self.server, 1.0):
                return False
        except OSError:
            return True

    def wait_for_secret(self, patience_s: float = SECRET_S) -> None:
        """Wait until there is what lets us in.

        Raises:
            UsageError: there is not.
        """
        if self.hub is not None:
            wait_for_secret(self.secret, *self.server, patience_s, os.environ)

    def arguments(self) -> list[str]:
        """Where the hub is, as options of a command."""
        found = ["--nats", self.nats or ""] if self.hub is None else ["--hub", self.hub]
        found += [] if self.credentials is None else ["--creds", str(self.credentials)]
        return found + ([] if self.tls is None else ["--tls", str(self.tls)])


class HostRun:
    """A job's part on this host; and on the one that leads, its hub and its controller.

    Args:
        command: the launcher and its arguments.
        job: the job's name for people.
        options: where the hub is.
        out: the run directory, where the controller is.
        controlling: what the controller is told beside that, as options of its command.
        copies: where this host puts copies of its captures.
        nsys: how its ranks start under Nsight Systems; by default they do not.
        auto: the stages of the trainers' steps are found from what torch says of them.

    Raises:
        UsageError: something of this cannot be used, or there is no such launcher.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        job: str,
        options: HubOptions,
        out: Path | None,
        controlling: Sequence[str],
        copies: Copies = NO_COPIES,
        nsys: UnderNsys | None = None,
        *,
        auto: bool = False,
    ) -> None:
        if os.environ.get("SLURM_LOCALID", "0") != "0":
            raise UsageError(
                "one `sftriage run` a host, which starts a launcher: give srun --ntasks-per-node=1; where srun starts"
                " the ranks, `sftriage agent` goes beside them, as docs/slurm.md has it"
            )
        if shutil.which(command[0]) is None:
            raise UsageError(f"cannot start {command[0]}: no such program")
        self._command, self._job, self._options = command, job, options
        self._name = host_name(os.environ)
        self.leads = options.leads
        self._held = contextlib.ExitStack()
        self._controller: KeptChild | None = None
        self._server: HubServer | None = None
        self._run: Path | None = None
        try:
            if self.leads:
                self._lead(out, controlling)
            options.wait_for_secret()
            self._rings = make_rings_directory(f"{file_name(options.job_id)}-{file_name(self._name)}-{os.getpid()}")
            self._held.callback(remove_rings_directory, self._rings)
            directory = host_directory(options.job_id, self._name, os.environ, new=True).absolute()
            note_steps(self._rings, directory / "steps")
            RunDirectory(directory).nsys.unlink(missing_ok=True)
            self._launch = None if nsys is None else self._under(nsys, directory)
            self._host = Host(self._rings, directory, job, options.job_id, options.address, self._name, copies)
            self._auto = self._held.enter_context(carried(directory / CARRIED_IN)) if auto else {}
        except BaseException:
            self._held.close()
            raise

    def execute(self) -> int:
        """Run the job's part here to its end; its exit status."""
        place = {
            "SFTRIAGE_RINGS": str(self._rings),
            "SFTRIAGE_SPOOL": str(self._host.spool.absolute()),
            "SFTRIAGE_JOB": self._job,
        }
        if self._run is not None:
            place[RUN_ENV] = str(self._run)
        command = self._command
        if self._launch is not None:
            place |= self._launch.environment(os.environ)
            command = wrapped(command, self._launch.script)
        with self._held:
            launcher = Launcher(command, {**self._auto, **place})
            note_launcher(self._rings, launcher.pid)
            self._host.start()
            self._held.callback(self._host.close)
            if self._server is not None:
                self._server.keep()
            if self._controller is not None:
                self._controller.keep()
            status, told = launcher.wait(LEAVE_S), launcher.told
            if status is None:
                if self.leads:
                    log.warning("the job was told to end, and has not within %.0f s: it is watched no longer", LEAVE_S)
                self._held.callback(remove_rings_directory, self._rings, whoever_writes=True)
            elif told:
                # (SLURM says it twice where time is up)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._host.finish(HURRY_S if told else FLUSH_S)
            if self._controller is not None:
                self._see_off(self._controller, told)
        return launcher.wait() if status is None else status

    def _see_off(self, controller: KeptChild, told: bool) -> None:
        """Wait for the controller, which ends once all other hosts have; not for long where it is told to."""
        if told:
            controller.terminate()
        try:
            controller.wait(SOON_S + 1.0 if told else SAY_AFTER_S)
        except subprocess.TimeoutExpired:
            if not told:
                log.warning("the job has ended here; its other hosts are waited for, until Ctrl-C")
                controller.wait()

    def _under(self, nsys: UnderNsys, directory: Path) -> NsysLaunch:
        """Have the ranks of this host start under nsys, in sessions that are no other host's or job's."""
        with contextlib.suppress(OSError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        launch = NsysLaunch(new_run_id(datetime.now(timezone.utc)), nsys.traces, directory, armed=nsys.armed)
        # (before the rings go: nsys ends with its ranks, or is ended)
        self._held.callback(RunDirectory(directory).nsys.unlink, missing_ok=True)
        self._held.callback(remove_place, launch.place)
        return launch

    def _lead(self, out: Path | None, controlling: Sequence[str]) -> None:
        options = self._options
        directory = self._run = (out or free(Path(DEFAULT_ROOT) / file_name(options.job_id))).absolute()
        if options.hub is not None:
            server = self._server = start_hub(options, directory)
            self._held.callback(forget_hub, options, server)
        command = [sys.executable, "-m", "sftriage", "controller", "--job-id", options.job_id]
        command += [*options.arguments(), "--job", self._job, *controlling]
        # Ctrl-C is the job's, which ends by it; what watches it sees that to its end.
        # Without us it lets go at once, for whoever goes on; who ends the job tells it by another signal.
        alone = partial(die_with_parent, signal.SIGUSR1)

        def start(again: bool) -> subprocess.Popen[bytes]:
            goes_on = again and RunDirectory(directory).hub.exists()
            if again:
                log.warning("the controller was killed, and is started again")
            whole = [*command, "--run" if goes_on else "--out", str(directory)]
            return subprocess.Popen(whole, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=alone)

        self._controller = KeptChild("controller", start, was_killed, END_S, "what it said here")
        self._held.callback(self._controller.close)


def start_agents(options: HubOptions, copies: Copies) -> contextlib.ExitStack:
    """Start an agent for those trainers of a job on this host that go on without one; their ends are the stack's."""
    held = contextlib.ExitStack()
    for directory, note in left_behind(options.job_id):
        command = [sys.executable, "-m", "sftriage", "agent", "--job-id", options.job_id, *options.arguments()]
        command += ["--rings", note.rings, "--directory", str(directory), "--name", note.name, "--job", note.job]
        command += [] if copies.store is None else ["--store", copies.store]
        command += ["--drop-local"] if copies.drop_local else []
        agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent)
        held.callback(end, agent, END_S)
    return held


def start_hub(options: HubOptions, directory: Path) -> HubServer:
    """Start a job's hub on this host; what it keeps lies beside the run directory.

    Raises:
        UsageError: it cannot be started.
    """
    store = directory.with_name(f"{directory.name}.nats").absolute()
    host, port = options.server
    is_new = not store.exists()
    # (others wait for the password, and connect once it is there)
    there = options.secret.exists() or options.credentials is not None
    secret = options.secret if there else options.secret.with_name(f"{options.secret.name}.pending")
    make_secret(secret)
    try:
        server = HubServer((listens_on(host), port), store, secret, options.tls)
    except UsageError:
        if not there:
            secret.unlink()
        if is_new:
            shutil.rmtree(store, ignore_errors=True)
        raise
    secret.rename(options.secret)
    return server


def forget_hub(options: HubOptions, server: HubServer) -> None:
    """End a hub for good: nothing of it stays."""
    server.close()
    shutil.rmtree(server.store, ignore_errors=True)
    if options.credentials is None:
        options.secret.unlink(missing_ok=True)
