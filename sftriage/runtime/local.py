"""A job on this host, watched by triage in the same process: started with it, or taken over while it runs."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from sftriage.agent.agent import Agent
from sftriage.agent.nsys import NsysPlace
from sftriage.controller.agents import Fleet
from sftriage.controller.controller import shape_of
from sftriage.errors import SftriageError, UsageError
from sftriage.mitigate.switching import SwitchStatus, whole_groups
from sftriage.model.events import JobBroken
from sftriage.policy.in_force import PolicyFiles
from sftriage.runs.directory import (
    DEFAULT_ROOT,
    RunDirectory,
    RunInfo,
    create,
    new_run_id,
    read_info,
    remember,
    write_info,
)
from sftriage.runs.liveness import launcher_of, note_launcher
from sftriage.runtime.carrying import FOLDER, under_seams
from sftriage.runtime.copies import KEEP_ALL, Keeping
from sftriage.runtime.ends import JobEnds
from sftriage.runtime.first_step import FirstStep
from sftriage.runtime.launcher import Launcher, Triaged, supervise
from sftriage.runtime.nsys_launch import ELASTIC_MODULES, NsysLaunch, place_in, remove_place, wrapped
from sftriage.runtime.rings import make_rings_directory, note_steps, own, remove_rings_directory, sweep, variables_of
from sftriage.runtime.triage import POLL_S, SHOW_S, Triage
from sftriage.sinks.stream import Sink
from sftriage.sinks.webhooks import need_posting
from sftriage.traces.disk import Disk, Do, at_once
from sftriage.traces.store import LocalStore
from sftriage.trainer.layout import bounded_text
from sftriage.trainer.monitor import RUN_ENV
from sftriage.windows.steplog import KeptSteps

log = logging.getLogger("sftriage")

RESTART_S = 60.0
"""If the launcher is unknown: how long there may be no trainer before the job counts as over."""

MakeSinks = Callable[[RunDirectory, RunInfo], Sequence[Sink]]
"""Makes the subscribers to the events of a run."""


class ThisHost(Agent):
    """The fleet of a job on this host: its only agent, in this process. Opens no port."""

    def __init__(self, directory: RunDirectory, info: RunInfo, nsys: NsysPlace | None = None, do: Do = at_once) -> None:
        rings, path, kept = Path(info.rings), directory.path, kept_of(info)
        super().__init__(rings, path, LocalStore(path), job=info.job, run=info.run_id, nsys=nsys, kept=kept, do=do)

    def switches(self) -> list[SwitchStatus]:
        """See `controller.agents.Fleet`: a group that extends to other hosts is not switched here."""
        return whole_groups(found) if (found := super().switches()) else []

    def settled(self, agent: str, position: int) -> None:
        """Nothing to do: this host never sends twice."""


def kept_of(info: RunInfo) -> KeptSteps | None:
    """The limits on a run's recorded steps; a run of an earlier version has none."""
    if info.steps_bytes is None or info.steps_age_s is None:
        return None
    return KeptSteps(info.steps_bytes, info.steps_age_s)


class WatchedRun:
    """The triage of a run; ``nsys`` says how ranks of this host were launched under nsys, if they were.

    A subclass calls `_watch` or `_watch_here`, starts ``_triage``, and ends with `_finish` and `close`.
    """

    def __init__(
        self,
        directory: RunDirectory,
        info: RunInfo,
        files: PolicyFiles,
        sinks: MakeSinks,
        nsys: NsysPlace | None = None,
    ) -> None:
        self.directory, self.files, self._info, self._nsys = directory, files, info, nsys
        self._rings, self._disk = Path(info.rings), Disk(root=directory.path)
        # (policy files may be on another disk)
        files.do = Disk().do
        self._sinks = sinks(directory, info)
        self._began, self._began_s, self._ended_at = datetime.now(timezone.utc), time.monotonic(), ""
        self._ends = JobEnds(self._rings)

    def _watch(self, fleet: Fleet, *, resume: bool, reads_s: float = SHOW_S) -> None:
        about = self.directory, self._info, self.files, fleet, self._sinks
        self._triage = Triage(*about, resume=resume, reads_s=reads_s, disk=self._disk)

    def _watch_here(self, *, resume: bool) -> None:
        note_steps(self._rings, self.directory.steps)
        self._watch(ThisHost(self.directory, self._info, self._nsys, self._disk.do), resume=resume)

    def _finish(self, broken: Callable[[], list[JobBroken]]) -> None:
        self._triage.finish(broken)
        # (on a clock that setting the time does not change)
        ended = self._began + timedelta(seconds=time.monotonic() - self._began_s)
        self._ended_at = ended.isoformat(timespec="milliseconds")
        self._disk.do(self._note_end, "run.json")

    def _note_end(self) -> None:
        if self._ended_at:
            self._note(ended_at=self._ended_at)
            self._ended_at = ""

    def _note(self, **changed: Any) -> None:
        write_info(self.directory, replace(read_info(self.directory), **changed))

    def close(self) -> None:
        self._triage.close()
        self._ends.close()
        if not self._disk.hangs:
            # (there may be room for it now)
            with contextlib.suppress(SftriageError):
                self._note_end()
        remove_rings_directory(self._rings)
        if self._nsys is not None and not self._rings.exists():
            remove_place(self._nsys)


class LocalRun(WatchedRun):
    """One run of a job on this host. It watches its policy files for changes; with ``auto`` seams find the stages.

    With ``nsys`` every rank starts under Nsight Systems. ``out`` is the run directory to make, by default a new one
    under ``sftriage-runs`` here. Raises PolicyError if a policy cannot be used, and UsageError if there is no nsys, or
    the run directory cannot be made. No rings are left behind.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        job: str,
        policies: Sequence[Path],
        sinks: MakeSinks,
        *,
        out: Path | None = None,
        keeping: Keeping = KEEP_ALL,
        nsys: Callable[[str, Path], NsysLaunch] | None = None,
        auto: bool = False,
    ) -> None:
        files = PolicyFiles(policies)
        need_posting(files.current.rules)
        run_id = new_run_id(datetime.now(timezone.utc))
        rings = make_rings_directory(run_id)
        info = keeping.info(run_id, job, command, files, rings)
        launch = None
        self._held = contextlib.ExitStack()
        try:
            texts = [path.read_text(encoding="utf-8") for path in policies]
            directory = create(out or Path(DEFAULT_ROOT) / run_id, info, *texts)
            launch = nsys(run_id, directory.path) if nsys is not None else None
            self._job, self._launch = job, launch
            self._auto = self._held.enter_context(under_seams(directory.path, rings)) if auto else {}
            self._command = command if launch is None else wrapped(command, launch.script)
            super().__init__(directory, info, files, sinks, launch.place if launch else None)
            self._watch_here(resume=False)
        except BaseException:
            self._held.close()
            remove_rings_directory(rings)
            if launch is not None:
                remove_place(launch.place)
            raise

    def triaged(
        self, environment: Mapping[str, str] | None = None, say: Callable[[str], None] = lambda _: None
    ) -> Triaged:
        """The job to start, with ``environment`` added to the trainers'; ``say`` prints advice."""
        place = variables_of(self._rings, self.directory.spool, self._job) | {RUN_ENV: str(self.directory.path)}
        if self._launch is not None:
            place |= self._launch.environment({**os.environ, **(environment or {})})
        self._environment = {**(environment or {}), **self._auto, **place}
        return Triaged(self._command, self._environment, partial(self._follow, say), self.close)

    def execute(self, environment: Mapping[str, str] | None = None, output: int | None = None) -> int:
        """Run the job to its end; return its exit status.

        ``environment`` is added to the trainers'; ``output`` is a descriptor for the job's standard output and error.
        """
        with contextlib.closing(Launcher()) as launcher:
            return supervise(launcher, self._command, lambda: self.triaged(environment), output=output)

    def _follow(self, say: Callable[[str], None], launcher: Launcher) -> None:
        def note(reason: str) -> None:
            self._disk.do(partial(self._note, not_recorded=reason), "run.json", waits=False)

        try:
            remember(self.directory)
            note_launcher(self._rings, launcher.pid)
            self._triage.start()
            about = self._rings, self._environment, shape_of(self.files.current.detection), say, note
            FirstStep(*about, auto=bool(self._auto)).follow(launcher)
            self._finish(partial(self._ends.broken, launcher))
        finally:
            # (if triage could not begin, the trainers' rings stay as long as they run)
            launcher.ended.wait()
            self.close()

    def close(self) -> None:
        super().close()
        self._held.close()

    @property
    def recorded_steps(self) -> int:
        return self._triage.recorded_steps


class TakeOver(WatchedRun):
    """The triage of a job whose `sftriage run` has ended, resumed; to be closed.

    ``policies`` are files to watch, by default those that the run started with. UsageError if the job has ended.
    """

    def __init__(self, directory: RunDirectory, policies: Sequence[Path], sinks: MakeSinks) -> None:
        info = read_info(directory)
        if not Path(info.rings).is_dir():
            raise UsageError(f"{directory.path}: the job has ended; its steps and captures can still be read")
        files = PolicyFiles(policies or directory.policy_files())
        super().__init__(directory, info, files, sinks, place_in(directory))
        self._watch_here(resume=True)
        own(self._rings)
        sweep(self._rings.parent)

    def watch(self, let_go: Callable[[], bool] = lambda: False) -> bool:
        """Triage the job to the end of its launcher, or else its trainers; False if ``let_go`` comes first."""
        self._triage.start()
        known = launcher_of(self._rings) is not None
        alive_s = time.monotonic()
        while not let_go():
            time.sleep(POLL_S)
            if self._triage.trainers_alive:
                alive_s = time.monotonic()
            over = launcher_of(self._rings) is None if known else time.monotonic() - alive_s > RESTART_S
            if over:
                self._finish(self._ends.broken)
                shutil.rmtree(self.directory.path / FOLDER, ignore_errors=True)
                return True
        return False


def job_name(job: str | None, command: list[str]) -> str:
    """The job's name: ``job``, or that of its command's script or module, or else of the launcher."""
    if job is None:
        modules = {word for flag, word in pairwise(command) if flag == "-m"}.difference(ELASTIC_MODULES)
        script = next((word for word in command if word.endswith(".py") or word in modules), None)
        name = Path(script or command[0]).name
        return bounded_text(name.removesuffix(".py").rpartition(".")[2] if script else name)
    if not (job.strip() and job.isprintable()):
        raise UsageError(f"--job {job!r}: expected printable characters")
    return job
