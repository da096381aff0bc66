"""``sftriage run`` on one of several hosts: the job's part here, its agent, and on one hub and controller."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from ipaddress import ip_address
from pathlib import Path

from sftriage.base.children import LET_GO, Supervised, end, start_child, was_killed
from sftriage.base.files import refusing
from sftriage.controller.controller import shape_of
from sftriage.errors import SftriageError, UsageError
from sftriage.fleet.hub import CA_FILE, PORT, HubAddress, LogLeader, hosts_of
from sftriage.policy.schema import Detection
from sftriage.runs.directory import DEFAULT_ROOT, RunDirectory, new_run_id
from sftriage.runs.liveness import note_launcher
from sftriage.runtime import hosting
from sftriage.runtime.carrying import under_seams
from sftriage.runtime.copies import Keeping
from sftriage.runtime.first_step import FirstStep, suppressed
from sftriage.runtime.hub_server import HubServer, is_here, listens_on, make_secret
from sftriage.runtime.launcher import Launcher, Triaged
from sftriage.runtime.nsys_launch import NsysLaunch, remove_place, wrapped
from sftriage.runtime.rings import make_rings_directory, note_steps, remove_rings_directory
from sftriage.trainer.monitor import RUN_ENV

log = logging.getLogger("sftriage")

SECRET_S, HINT_S, UP_S = 600.0, 10.0, 20.0
"""How long the hub's host may take to make its password; after how long a person is told that it is waited for; and how
long that file may take to be seen here once the hub is up."""
ANSWER_S = 1.0
AGAIN_S = 5.0
"""How often a hub is tried that cannot be started or reached."""
CREDS_S = 3.0
"""How long credentials that are named may be missing: the host of the hub makes them where there are none."""
SEE_OFF_S, END_S = 11.0, 1.0
"""How long after the job's end here its controller may take, and then to end when it is told to."""


@dataclass(frozen=True, slots=True)
class HubOptions:
    """Where a job's hub is; UsageError where the options contradict one another, or something is missing.

    ``job_id`` is the job's name there, the same on all of its hosts. ``hub`` names the host that starts it (HOST or
    HOST:PORT), ``nats`` the URL of a server that runs already. ``credentials`` and ``tls`` are as in
    `sftriage.fleet.hub.HubAddress`; by default the host that starts the hub makes credentials.
    """

    job_id: str
    hub: str | None = None
    nats: str | None = None
    credentials: Path | None = None
    tls: Path | None = None

    def __post_init__(self) -> None:
        if self.hub is None and self.nats is None:
            raise UsageError("where is the job's hub? give --hub HEAD, or --nats URL")
        if self.hub == "":
            raise UsageError("--hub is empty: it is the name of the job's first host")
        if self.hub is not None and self.nats is not None:
            raise UsageError("--hub starts a NATS server, and --nats uses another one: give one of them")
        if not self.job_id:
            raise UsageError("--job-id is missing: a name for this job alone, as $SLURM_JOB_ID, alike on all its hosts")
        # (reports what is no address)
        _ = self.hosts

    @property
    def server(self) -> tuple[str, int]:
        """Host and port of the hub that is started."""
        host, colon, port = (self.hub or "").rpartition(":")
        if not colon or (":" in host and not host.startswith("[")):
            return (self.hub or "").strip("[]"), PORT
        if not (port.isdecimal() and 0 < int(port) < 65536):
            raise UsageError(f"--hub {self.hub}: there is no port {port!r}")
        return host.strip("[]"), int(port)

    @property
    def secret(self) -> Path:
        """The file with the credentials of the hub to start; by default one for this job and port."""
        port = self.server[1]
        name = f"{hosting.file_name(self.job_id)}.hub" + (f"-{port}" if port != PORT else "")
        return self.credentials or Path(DEFAULT_ROOT) / name

    @property
    def address(self) -> HubAddress:
        ca = None if self.tls is None else self.tls / CA_FILE
        if self.nats is not None:
            return HubAddress(self.nats, self.credentials, ca)
        host, port = self.server
        scheme = "nats" if self.tls is None else "tls"
        return HubAddress(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", self.secret, ca)

    @property
    def hosts(self) -> list[tuple[str, str, int]]:
        """The hosts that the options name, each with its option, and their ports."""
        if self.nats is None:
            return [(f"--hub {self.hub}", *self.server)]
        return [(f"--nats {self.nats}", host, port) for host, port in hosts_of(self.nats)]

    @property
    def leads(self) -> bool:
        """Whether this host has the controller: the one with the hub, or else the first of the job's."""
        if self.hub is not None:
            return is_here(self.server[0])
        number = hosting.node_number(os.environ)
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

    def wait_for_secret(self, patience_s: float = SECRET_S, over: Callable[[], bool] = lambda: False) -> None:
        """Wait for the file of `secret` where a host starts the hub, until ``over``; UsageError if none will come."""
        host, port = self.server
        began_s, up_s, hinted = time.monotonic(), float("inf"), False
        while not (self.hub is None or self.secret.is_file() or over()):
            now_s = time.monotonic()
            if now_s >= min(began_s + patience_s, up_s + UP_S):
                raise UsageError(
                    f"{self.secret} is not there: {host} makes it, in a directory that all hosts share; where they"
                    " share none, put the same USER:PASSWORD into a file on each, and name that with --creds"
                )
            if up_s > now_s and is_up(host, port):
                up_s = now_s
            elif up_s > now_s and now_s > began_s + HINT_S and not hinted:
                hinted = True
                _check_slurm_host(host)
                log.warning("%s waits for %s, which is to start the hub", socket.gethostname(), host)
            # (to look into the directory has a file server asked again, which to look for a name may not)
            with contextlib.suppress(OSError), os.scandir(self.secret.parent) as entries:
                next(entries, None)
            time.sleep(hosting.LOOK_S)

    def arguments(self) -> list[str]:
        found = ["--nats", self.nats or ""] if self.hub is None else ["--hub", self.hub]
        found += [] if self.credentials is None else ["--creds", str(self.credentials)]
        return found + ([] if self.tls is None else ["--tls", str(self.tls)])


class HostRun:
    """A job's part on this host; and on the one that leads, its hub and its controller.

    Logs once that a hub cannot be started or reached, and tries again while the job runs. ``out`` is the run directory
    where the controller is, ``controlling`` are further options of its command; UsageError where the hub is
    ``required`` and not there before the job starts.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        job: str,
        options: HubOptions,
        controlling: Sequence[str],
        *,
        out: Path | None = None,
        detection: Detection,
        keeping: Keeping,
        nsys_trace: str | None = None,
        nsys_armed: bool = False,
        auto: bool = False,
        required: bool = False,
    ) -> None:
        if os.environ.get("SLURM_LOCALID", "0") != "0":
            raise UsageError(
                "one `sftriage run` a host, which starts a launcher: give srun --ntasks-per-node=1; where srun starts"
                " the ranks, `sftriage agent` goes beside them, as docs/slurm.md has it"
            )
        self._command, self._job, self._options, self._keeping = command, job, options, keeping
        self._name, self._controlling, self._detection = hosting.host_name(os.environ), controlling, detection
        self._held = contextlib.ExitStack()
        self._host: hosting.AgentHost | None = None
        self._controller: Supervised | None = None
        self._server: HubServer | None = None
        self._said = ""
        try:
            job_file = hosting.file_name(options.job_id)
            self._out = (out or hosting.free(Path(DEFAULT_ROOT) / job_file)).absolute()
            self._leads = options.leads
            self._rings = make_rings_directory(f"{job_file}-{hosting.file_name(self._name)}-{os.getpid()}")
            self._held.callback(remove_rings_directory, self._rings)
            directory = hosting.host_directory(options.job_id, self._name, os.environ, new=True).absolute()
            self._directory, self._log_leader = directory, LogLeader(directory.with_name(hosting.SPEAKER))
            with refusing(f"{directory} cannot be made"):
                (directory / "spool").mkdir(mode=0o700, parents=True)
            note_steps(self._rings, directory / "steps")
            self._launch = None
            if nsys_trace is not None:
                # In sessions that are no other host's or job's.
                run_id = new_run_id(datetime.now(timezone.utc))
                self._launch = NsysLaunch(run_id, nsys_trace, directory, armed=nsys_armed)
                # (before the rings go: nsys ends with its ranks, or is ended)
                self._held.callback(RunDirectory(directory).nsys.unlink, missing_ok=True)
                self._held.callback(remove_place, self._launch.place)
            self._auto = self._held.enter_context(under_seams(directory, self._rings)) if auto else {}
            if required:
                _check_hub(options)
                self._lead()
                options.wait_for_secret()
        except BaseException:
            self._held.close()
            raise

    def triaged(self) -> Triaged:
        """What is to be started here, and what watches it."""
        place = {
            "SFTRIAGE_RINGS": str(self._rings),
            "SFTRIAGE_SPOOL": str(self._directory / "spool"),
            "SFTRIAGE_JOB": self._job,
        }
        if self._leads:
            place[RUN_ENV] = str(self._out)
        command = self._command
        if self._launch is not None:
            place |= self._launch.environment(os.environ)
            command = wrapped(command, self._launch.script)
        self._given = {**self._auto, **place}
        return Triaged(command, self._given, self._watch, self._held.close)

    def _watch(self, launcher: Launcher) -> None:
        with self._held:
            note_launcher(self._rings, launcher.pid)
            while self._host is None and not launcher.ended.is_set():
                self._join(launcher.ended)
                launcher.ended.wait(hosting.LOOK_S if self._host else AGAIN_S)
            # (what is so on all hosts, one of them says)
            say = log.warning if self._leads else log.debug
            about = self._rings, self._given, shape_of(self._detection), say
            first = FirstStep(*about, auto=bool(self._auto))
            while not launcher.ended.is_set() and time.monotonic() < (launcher.told_s or math.inf) + hosting.LEAVE_S:
                with suppressed():
                    first.look(launcher.pid, time.monotonic())
                launcher.ended.wait(hosting.LOOK_S)
            told = launcher.told_s is not None
            if not launcher.ended.is_set():
                if self._leads:
                    goes_on = "the job was told to end, and has not within %.0f s: it is watched no longer"
                    log.warning(goes_on, hosting.LEAVE_S)
                self._held.callback(remove_rings_directory, self._rings, whoever_writes=True)
            elif launcher.status is not None:
                with suppressed():
                    first.end(launcher.status, launcher.told)
            if self._host is not None:
                self._host.finish(launcher.left_s(hosting.HURRY_S), says=not told)
            if self._controller is not None:
                self._see_off(self._controller, launcher, told=told)

    def _join(self, ended: threading.Event) -> None:
        try:
            _check_hub(self._options)
            self._lead()
            mine = self._options.credentials
            if mine is not None and not mine.exists() and not ended.wait(CREDS_S) and not mine.exists():
                raise UsageError(f"--creds {mine}: there is no such file, and the host of --hub has made none here")
            self._options.wait_for_secret(over=ended.is_set)
            if ended.is_set():
                return
            host = hosting.AgentHost(
                *(self._rings, self._directory, self._job, self._options.job_id),
                *(self._options.address, self._name, self._keeping),
            )
        except SftriageError as error:
            self._say(str(error))
            return
        self._log_leader.release()
        host.start()
        self._held.callback(host.close)
        self._host = host

    def _say(self, problem: str) -> None:
        if problem != self._said and self._log_leader.should_log():
            log.warning("the job runs unwatched, until this is mended: %s", problem)
        self._said = problem

    def _see_off(self, controller: Supervised, launcher: Launcher, *, told: bool) -> None:
        """Wait for the controller, which ends once all other hosts have; not for longer than this host may wait."""
        if told:
            controller.terminate()
        try:
            controller.wait(launcher.left_s(SEE_OFF_S))
        except subprocess.TimeoutExpired:
            if not told:
                log.warning(
                    "the job has ended here; its controller, which was waiting for other hosts or the hub, is stopped"
                )

    def _lead(self) -> None:
        options, directory = self._options, self._out
        # (a name that was not known at first may be this host's own)
        self._leads = self._leads or options.leads
        if not self._leads:
            return
        if options.hub is not None and self._server is None:
            server = self._server = start_hub(options, directory)
            self._held.callback(forget_hub, options, server)
            server.keep()
        if self._controller is not None:
            return
        command = [sys.executable, "-m", "sftriage", "controller", "--job-id", options.job_id]
        command += [*options.arguments(), "--job", self._job, *self._controlling]

        # Ctrl-C is the job's, which ends by it; what watches it sees that to its end.
        # Without us it lets go at once, for whoever goes on; who ends the job tells it by another signal.
        def start(again: bool) -> subprocess.Popen[bytes]:
            goes_on = again and RunDirectory(directory).hub.exists()
            if again:
                log.warning("the controller was killed, and is started again")
            whole = [*command, "--run" if goes_on else "--out", str(directory)]
            return start_child(whole, signum=LET_GO)

        self._controller = Supervised("controller", start, was_killed, END_S, "what it said here")
        self._held.callback(self._controller.close)
        self._controller.keep()


def _check_hub(options: HubOptions) -> None:
    """Check that the hub's name is known here, and that a server which others start answers."""
    for option, host, _ in options.hosts:
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:
            if options.nats is None:
                _check_slurm_host(host)
            raise UsageError(f"{option}: the name {host} is not known here ({error})") from error
    if options.nats is None:
        return
    if options.credentials is not None and not options.credentials.exists():
        raise UsageError(f"--creds {options.credentials}: there is no such file")
    problem: OSError | None = None
    for _, host, port in options.hosts:
        try:
            with socket.create_connection((host, port), ANSWER_S):
                return
        except OSError as error:
            problem = error
    raise UsageError(f"--nats {options.nats}: no server answers there ({problem})") from problem


def start_agents(options: HubOptions, store: str | None, *, drop_local: bool) -> contextlib.ExitStack:
    """Start an agent for trainers of a job on this host that are without one; closing the stack ends them."""
    held = contextlib.ExitStack()
    for directory, note in hosting.left_behind(options.job_id):
        command = [sys.executable, "-m", "sftriage", "agent", "--job-id", options.job_id, *options.arguments()]
        command += ["--rings", note.rings, "--directory", str(directory), "--name", note.name, "--job", note.job]
        command += [] if store is None else ["--store", store]
        command += ["--drop-local"] if drop_local else []
        held.callback(end, start_child(command), END_S)
    return held


def start_hub(options: HubOptions, directory: Path) -> HubServer:
    """Start a job's hub on this host; what it keeps lies beside the run directory."""
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


def is_up(host: str, port: int) -> bool:
    """Whether a NATS server listens there."""
    try:
        with socket.create_connection((host, port), ANSWER_S) as server:
            return server.recv(5) == b"INFO "
    except OSError:
        return False


def _check_slurm_host(host: str) -> None:
    hosts = slurm_hosts()
    with contextlib.suppress(ValueError):
        ip_address(host)
        return
    if hosts and host.partition(".")[0] not in hosts:
        some = f"{', '.join(hosts[:3])}{', ...' if len(hosts) > 3 else ''}"
        raise UsageError(f"--hub {host} is none of this job's hosts, which are {some}: give it the first of them")


def slurm_hosts() -> list[str]:
    """The hosts of this step or job of SLURM; none where they are not known."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    if not nodes or shutil.which("scontrol") is None:
        return []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = ["scontrol", "show", "hostnames", nodes]
        return subprocess.run(shown, capture_output=True, text=True, timeout=10.0, check=True).stdout.split()
    return []
