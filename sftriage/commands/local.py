"""A job on this host, watched: the launcher beside an agent and a controller in one process. Nothing listens anywhere.

All work of agent and controller happens in the scheduler's single thread, so none of it needs a lock; the main thread
waits for the launcher.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Protocol

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler

from sftriage.agent import Agent, Shape
from sftriage.commands.asks import taken
from sftriage.commands.collect import Collector, Known
from sftriage.commands.corroboration import Corroboration
from sftriage.commands.launcher import Launcher
from sftriage.commands.nsys import NsysLaunch
from sftriage.commands.rings import make_rings_directory, remove_rings_directory
from sftriage.commands.runs import DEFAULT_ROOT, new_run_id, remember
from sftriage.controller import Controller, Journal, Judged, Notifier, Origin, PolicyFiles, in_force
from sftriage.errors import UsageError
from sftriage.policy import LoadedPolicy, PolicySet
from sftriage.records import CaptureRequest, CaptureResult, Window
from sftriage.traces import Manifest
from sftriage.traces.retention import Retention
from sftriage.traces.rundir import RunInfo, create, write_atomically

log = logging.getLogger("sftriage")

POLL_S = 0.25
CANCEL_GRACE_S = 15.0
"""Past its time-box, how long a rank has to end a capture by itself, at a step boundary, and keep what it has."""
ANSWER_GRACE_S = 60.0
"""Past its time-box, how long a rank has to export and answer before its capture is given up."""
NSYS_ANSWER_GRACE_S = 300.0
"""The same where nsys makes the report: beside the job, which goes on meanwhile."""
LAST_ANSWER_S = 15.0
"""How long after the launcher's end a capture may still need to be written out by trainers that are leaving."""
TIDY_S = 3600.0
"""How often it is looked for captures that are kept no longer, beside after each capture."""
NOTIFY_GRACE_S = 10.0
"""How long after the end of a run it may take to tell who is still to be told."""


class Watcher(Protocol):
    """Who is told what happens. Called in the scheduler's thread, and once more from the main thread at the end."""

    def judged(self, judged: Judged) -> None:
        """A window has been decided, or the step in progress has stalled."""

    def captured(self, result: CaptureResult, manifest: Manifest | None) -> None:
        """A capture has ended; with a manifest, it is in the store."""


class LocalRun:
    """One run of a job on this host.

    Args:
        command: the launcher and its arguments.
        job: the job's name.
        policy: the policy, several that are in force together, or files that are watched for other ones.
        policy_text: the policy as it was read, or the first of several.
        out: the run directory to make; by default a new one under ``sftriage-runs`` here.
        watcher: who is told what happens.
        more_texts: of several policies, the others as they were read.
        nsys: what Nsight Systems traces of every rank, which then starts under it; by default none does.

    Raises:
        UsageError: there is no such launcher or no nsys, or the run directory cannot be made. No rings are left behind.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        job: str,
        policy: LoadedPolicy | PolicySet | PolicyFiles,
        policy_text: str,
        out: Path | None,
        watcher: Watcher,
        more_texts: Sequence[str] = (),
        nsys: str | None = None,
    ) -> None:
        if command and shutil.which(command[0]) is None:
            raise UsageError(f"cannot start {command[0]}: no such program")
        now = datetime.now(timezone.utc)
        run_id = new_run_id(now)
        self._command, self._job, self._watcher = command, job, watcher
        self._rings = make_rings_directory(run_id)
        policies = in_force(policy)
        info = RunInfo(
            run_id=run_id,
            job=job,
            created_at=now.isoformat(timespec="seconds"),
            command=command,
            policy=", ".join(one.policy.metadata.name for one in policies.loaded),
            policy_sha256=policies.loaded[0].sha256,
            rings=str(self._rings),
        )
        try:
            self.directory = create(out or Path(DEFAULT_ROOT) / run_id, info, policy_text)
            for number, text in enumerate(more_texts, start=2):
                write_atomically(self.directory.path / f"policy-{number}.yaml", text)
            self._nsys = None if nsys is None else NsysLaunch(run_id, nsys, self.directory.path)
            if self._nsys is not None:
                self._command = self._nsys.command(command)
        except BaseException:
            remove_rings_directory(self._rings)
            raise
        detection = policies.detection
        shape = Shape(detection.window_steps, detection.stride_steps, detection.warmup_steps)
        place = self._nsys.place if self._nsys else None
        self._agent = Agent(self._rings, self.directory.steps, self.directory.spool, shape, nsys=place)
        self._journal = Journal(self.directory.decisions)
        self._notifier = Notifier()
        self._controller = Controller(
            policy, self._journal, self.directory.state, self._notifier, Origin(job, info.run_id)
        )
        self._evidence = Corroboration()
        self._collector = Collector(self.directory, info)
        self._scheduler = BackgroundScheduler(
            executors={"default": ThreadPoolExecutor(1)},
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
            timezone=timezone.utc,
        )

    def execute(self, environment: Mapping[str, str] | None = None, output: int | None = None) -> int:
        """Run the job to its end; its exit status.

        Args:
            environment: added to the trainers' environment.
            output: descriptor for the job's standard output and error, if they are not to go where ours do.

        Raises:
            UsageError: the launcher cannot be started.
        """
        place = {
            "SFTRIAGE_RINGS": str(self._rings),
            "SFTRIAGE_SPOOL": str(self.directory.spool),
            "SFTRIAGE_JOB": self._job,
        }
        if self._nsys is not None:
            place |= self._nsys.environment({**os.environ, **(environment or {})})
        try:
            # Before any thread is started: the child is forked from here.
            launcher = Launcher(self._command, {**(environment or {}), **place}, output)
            remember(self.directory)
            self._scheduler.start()
            self._scheduler.add_job(self._look, "interval", seconds=POLL_S)
            self._scheduler.add_job(self._tidy, "interval", seconds=TIDY_S)
            status = launcher.wait()
            self._scheduler.shutdown(wait=True)
            self._finish()
            return status
        finally:
            self._evidence.close()
            self._agent.close()
            self._journal.close()
            remove_rings_directory(self._rings)
            if self._nsys is not None and not self._rings.exists():
                self._nsys.close()
            self._notifier.close(NOTIFY_GRACE_S)

    @property
    def telemetry_problems(self) -> tuple[str, ...]:
        """Rings that could not be read, and why."""
        return tuple(self._agent.telemetry.problems.values())

    @property
    def steps_seen(self) -> int:
        """Steps read so far, over all ranks."""
        return self._agent.telemetry.steps

    def _look(self, *, ended: bool = False) -> None:
        """One turn: what has come in is judged, what is asked for is started, what has ended is collected.

        Triage must not end because a part of one turn failed (a full disk, a broken file): it is said, the other parts
        go on, and the next turn tries again.
        """
        for act in (self._judge, self._see_stall, self._gather, self._take_asks, self._collect):
            try:
                act(ended=ended)
            except Exception:
                log.exception("a turn of the triage loop failed; it goes on")

    def _judge(self, *, ended: bool) -> None:
        for window in self._agent.poll(ended=ended):
            judged = self._controller.take(window, time.time())
            self._watcher.judged(judged)
            self._evidence.want(judged.verdict, of_undecided="nvml" in self._controller.policies.gathers)
            for request in judged.decision.requests:
                self._start(request, ended=ended)

    def _gather(self, *, ended: bool) -> None:
        found = None if ended else self._evidence.look(self._agent.ranks, time.monotonic())
        if found is not None:
            self._controller.corroborated(found)

    def _take_asks(self, *, ended: bool) -> None:
        for ask in taken(self.directory):
            for request in self._controller.ask(ask, self._agent.statuses(), time.time()).requests:
                self._start(request, ended=ended)

    def _collect(self, *, ended: bool) -> None:
        for capture, result in self._agent.results():
            known = Known(self._captured_steps(result), self._evidence.remarks.get(result.rank, ()))
            self._ended(*self._collector.collect(capture, result, self._controller, self._agent.ranks, known))

    def _captured_steps(self, result: CaptureResult) -> Window | None:
        """The steps inside a capture, of all ranks, where they are still held."""
        if result.first_step is None or result.last_step is None:
            return None
        return self._agent.steps(result.rank, result.first_step, result.last_step)

    def _see_stall(self, *, ended: bool) -> None:
        job = None if ended else self._agent.statuses()
        stall = None if job is None else self._controller.look(job, time.monotonic_ns(), time.time())
        if stall is not None:
            self._watcher.judged(stall)
            for request in stall.decision.requests:
                self._start(request, ended=False)

    def _start(self, request: CaptureRequest, *, ended: bool) -> None:
        if ended:
            gone = CaptureResult(request.capture_id, request.rank, "failed", "the job ended before the capture began")
            self._ended(gone, None)
            return
        failed = self._agent.capture(request)
        if failed is not None:
            self._ended(failed, None)
            return
        now = datetime.now(timezone.utc)
        answer_s = NSYS_ANSWER_GRACE_S if request.profiler == "nsys" else ANSWER_GRACE_S
        for act, grace_s in ((self._agent.cancel, CANCEL_GRACE_S), (self._abandon, answer_s)):
            due = now + timedelta(seconds=request.max_seconds + grace_s)
            self._scheduler.add_job(act, "date", run_date=due, args=[request.capture_id])

    def _abandon(self, capture_id: str) -> None:
        for capture, result in self._agent.abandon(capture_id, "no answer long past its time-box"):
            capture.close()
            self._ended(result, None)

    def _ended(self, result: CaptureResult, manifest: Manifest | None) -> None:
        self._controller.ended(result, time.time())
        self._watcher.captured(result, manifest)
        if manifest is not None:
            self._tidy()

    def _tidy(self) -> None:
        """Remove the captures that the policy keeps no longer."""
        policies = self._controller.policies
        self._collector.tidy(Retention(policies.retention_s, policies.retention_bytes), time.time())

    def _finish(self) -> None:
        """Take what the trainers left behind: their last steps, and captures they are still writing out."""
        self._look(ended=True)
        deadline_s = time.monotonic() + LAST_ANSWER_S
        while self._agent.running and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            self._look(ended=True)
        for capture_id in self._agent.running:
            self._abandon(capture_id)
