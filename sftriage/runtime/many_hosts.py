"""``sftriage run`` on one of several hosts: the job's part here, its agent, and on one host hub and controller."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from sftriage.base.files import refusing
from sftriage.base.process import LET_GO, Supervised, end, start_child, was_killed
from sftriage.controller.controller import shape_of
from sftriage.errors import SftriageError, UsageError
from sftriage.fleet.hub import LogLeader
from sftriage.model.ends import HostEnds
from sftriage.policy.schema import Detection
from sftriage.runs.directory import DEFAULT_ROOT, RunDirectory, new_run_id
from sftriage.runs.liveness import note_launcher
from sftriage.runtime import hosting
from sftriage.runtime.carrying import under_seams
from sftriage.runtime.copies import Keeping
from sftriage.runtime.ends import JobEnds
from sftriage.runtime.first_step import FirstStep, suppressed
from sftriage.runtime.hub_server import HubOptions, HubServer
from sftriage.runtime.launcher import Launcher, Triaged
from sftriage.runtime.nsys_launch import NsysLaunch, remove_place, wrapped
from sftriage.runtime.rings import make_rings_directory, note_steps, remove_rings_directory, variables_of
from sftriage.trainer.monitor import RUN_ENV
from sftriage.verdict.departures import broken_in
from sftriage.words.departures import broken_sentence

log = logging.getLogger("sftriage")

POLL_S = 0.1
AGAIN_S = 5.0
"""Pause before retrying a hub that cannot be started or reached."""
CREDS_S = 3.0
"""How long the file of --creds may be missing: the host of the hub creates it if there is none."""
SEE_OFF_S, LET_GO_S, END_S = 11.0, 2.0, 1.0
"""How long the controller may take after the job's end here, then to judge by what is known, and to end on SIGTERM."""


def check_one_per_host() -> None:
    """UsageError if SLURM has started several of these on this host."""
    if os.environ.get("SLURM_LOCALID", "0") != "0":
        raise UsageError(
            "start one `sftriage run` per host, with a launcher: use srun --ntasks-per-node=1; if srun starts"
            " the ranks, run `sftriage agent` beside them (see docs/slurm.md)"
        )


class HostRun:
    """A job's part on this host; on the host that leads, also its hub and its controller.

    Logs once if the hub cannot be started or reached, and retries while the job runs. ``out`` is the run directory
    where the controller is, ``controlling`` are further options of its command.
    """

    def __init__(
        self, job: str, options: HubOptions, controlling: Sequence[str], detection: Detection, keeping: Keeping
    ) -> None:
        check_one_per_host()
        self._job, self._options, self._keeping = job, options, keeping
        self._name, self._controlling, self._detection = hosting.host_name(os.environ), controlling, detection
        self._held = contextlib.ExitStack()
        self._host: hosting.AgentHost | None = None
        self._controller: Supervised | None = None
        self._server: HubServer | None = None
        self._problem = ""

    def triaged(
        self,
        command: tuple[str, ...],
        out: Path | None = None,
        *,
        nsys: Callable[[str, Path], NsysLaunch] | None = None,
        auto: bool = False,
        required: bool = False,
    ) -> Triaged:
        """The job to start here, and what watches it; UsageError if a ``required`` hub is not up in time."""
        options = self._options
        try:
            job_file = hosting.file_name(options.job_id)
            self._out = (out or hosting.free(Path(DEFAULT_ROOT) / job_file)).absolute()
            self._leads = options.leads
            self._rings = make_rings_directory(f"{job_file}-{hosting.file_name(self._name)}-{os.getpid()}")
            self._held.callback(remove_rings_directory, self._rings)
            directory = hosting.host_directory(options.job_id, self._name, os.environ, new=True).absolute()
            self._directory, self._log_leader = directory, LogLeader(directory.with_name(hosting.SPEAKER))
            with refusing(f"cannot create {directory}"):
                (directory / "spool").mkdir(mode=0o700, parents=True)
            note_steps(self._rings, directory / "steps")
            launch = None
            if nsys is not None:
                # In sessions that no other host or job uses.
                launch = nsys(new_run_id(datetime.now(timezone.utc)), directory)
                # (before the rings are removed: nsys ends with its ranks, or is killed)
                self._held.callback(RunDirectory(directory).nsys.unlink, missing_ok=True)
                self._held.callback(remove_place, launch.place)
            self._auto = self._held.enter_context(under_seams(directory, self._rings)) if auto else {}
            self._ends = JobEnds(self._rings)
            self._held.callback(self._ends.close)
            if required:
                options.check()
                self._lead()
                options.wait_for_secret()
        except BaseException:
            self._held.close()
            raise
        place = variables_of(self._rings, self._directory / "spool", self._job)
        if self._leads:
            place[RUN_ENV] = str(self._out)
        if launch is not None:
            place |= launch.environment(os.environ)
            command = wrapped(command, launch.script)
        self._environment = {**self._auto, **place}
        return Triaged(command, self._environment, self._watch, self._held.close)

    def _watch(self, launcher: Launcher) -> None:
        with self._held:
            note_launcher(self._rings, launcher.pid)
            while self._host is None and not launcher.ended.is_set():
                self._join(launcher.ended)
                launcher.ended.wait(hosting.POLL_S if self._host else AGAIN_S)
            # (one host logs what is the same on all)
            show = log.warning if self._leads else log.debug
            about = self._rings, self._environment, shape_of(self._detection), show
            first = FirstStep(*about, auto=bool(self._auto))
            while not launcher.ended.is_set() and time.monotonic() < (launcher.sigterm_s or math.inf) + hosting.LEAVE_S:
                with suppressed():
                    first.check(launcher.pid, time.monotonic())
                launcher.ended.wait(hosting.POLL_S)
            terminated = launcher.sigterm_s is not None
            if not launcher.ended.is_set():
                if self._leads:
                    still_runs = "the job did not end within %.0f s of SIGTERM; stopped watching it"
                    log.warning(still_runs, hosting.LEAVE_S)
                self._held.callback(remove_rings_directory, self._rings, even_written=True)
            elif launcher.status is not None:
                with suppressed():
                    first.end(launcher.status, launcher.last_signal)
            ends = HostEnds()
            with suppressed():
                ends = self._ends.of_host(launcher)
            if self._host is not None:
                self._host.finish(ends, launcher.left_s(hosting.HURRY_S), logs=not terminated)
            if self._controller is not None:
                self._see_off(self._controller, launcher, terminated=terminated)
            broken = self._broken(launcher)
            # (the controller logs it on its own host; one of those that share an output is enough)
            if broken and self._controller is None and self._log_leader.should_log():
                for sentence in broken:
                    log.warning("%s", sentence)
            for event in broken_in([ends], time.time()) if broken is None and launcher.status else ():
                # (on other hosts, ranks only followed)
                (log.warning if event.first else show)(broken_sentence(event, self._name))

    def _see_off(self, controller: Supervised, launcher: Launcher, *, terminated: bool) -> None:
        """Wait for the controller: it ends once all other hosts have, or judges by what is known."""
        if terminated:
            controller.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            controller.wait(launcher.left_s(SEE_OFF_S))
            return
        if not terminated and (self._host is None or self._host.broken is None):
            log.warning("the job has ended here; stopped its controller, which was waiting for other hosts or the hub")
            controller.terminate(LET_GO)
            with contextlib.suppress(subprocess.TimeoutExpired):
                controller.wait(LET_GO_S)

    def _broken(self, launcher: Launcher) -> Sequence[str] | None:
        """How the job broke, as its controller judges that; None if it does not in time."""
        broken = None
        while self._host is not None and launcher.status and launcher.signalled_s is None:
            broken = self._host.broken
            if broken is not None or not launcher.left_s(hosting.HURRY_S):
                break
            time.sleep(POLL_S)
        return broken

    def _join(self, ended: threading.Event) -> None:
        try:
            self._options.check()
            self._lead()
            mine = self._options.credentials
            if mine is not None and not mine.exists() and not ended.wait(CREDS_S) and not mine.exists():
                raise UsageError(f"--creds {mine}: no such file, and the host of --hub has not created it")
            self._options.wait_for_secret(over=ended.is_set)
            if ended.is_set():
                return
            host = hosting.AgentHost(
                *(self._rings, self._directory, self._job, self._options.job_id),
                *(self._options.address, self._name, self._keeping),
            )
        except SftriageError as error:
            self._report(str(error))
            return
        self._log_leader.release()
        host.start()
        self._held.callback(host.close)
        self._host = host

    def _report(self, problem: str) -> None:
        if problem != self._problem and self._log_leader.should_log():
            log.warning("the job runs unwatched until this is fixed: %s", problem)
        self._problem = problem

    def _lead(self) -> None:
        options, directory = self._options, self._out
        # (a name that did not resolve at first may be this host's own)
        self._leads = self._leads or options.leads
        if not self._leads:
            return
        if options.hub is not None and self._server is None:
            server = self._server = options.start(directory)
            self._held.callback(options.forget, server)
            server.keep()
        if self._controller is not None:
            return
        command = [sys.executable, "-m", "sftriage", "controller", "--job-id", options.job_id]
        command += [*options.arguments(), "--job", self._job, *self._controlling]

        # Ctrl-C ends the job, and the controller watches that to its end.
        # If we die, it stops at once (LET_GO), so that another can resume; the end of a job sends another signal.
        def start(again: bool) -> subprocess.Popen[bytes]:
            resumes = again and RunDirectory(directory).hub.exists()
            if again:
                log.warning("the controller was killed; restarting it")
            whole = [*command, "--run" if resumes else "--out", str(directory)]
            return start_child(whole, signum=LET_GO)

        self._controller = Supervised("controller", start, was_killed, END_S, "its output above")
        self._held.callback(self._controller.close)
        self._controller.keep()


def start_agents(options: HubOptions, store: str | None, *, drop_local: bool) -> contextlib.ExitStack:
    """Start agents for trainers of a job on this host that have none; closing the stack ends them."""
    held = contextlib.ExitStack()
    for directory, note in hosting.left_behind(options.job_id):
        command = [sys.executable, "-m", "sftriage", "agent", "--job-id", options.job_id, *options.arguments()]
        command += ["--rings", note.rings, "--directory", str(directory), "--name", note.name, "--job", note.job]
        command += [] if store is None else ["--store", store]
        command += ["--drop-local"] if drop_local else []
        held.callback(end, start_child(command), END_S)
    return held
