"""Triage of one run: an agent and a controller in one process, turned by one scheduler. Nothing listens anywhere.

All of it happens in the scheduler's single thread, so none of it needs a lock; the main thread waits for the job.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from itertools import islice
from pathlib import Path
from typing import Protocol

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler

from sftriage.agent.agent import Agent
from sftriage.capture import Executor, NsysPlace
from sftriage.controller.controller import Controller, Judged, in_force
from sftriage.controller.policies import PolicyFiles
from sftriage.controller.resuming import Left
from sftriage.errors import SftriageError, UsageError
from sftriage.policy.loading import LoadedPolicy
from sftriage.policy.policy_set import PolicySet
from sftriage.policy.together import in_the_same_steps
from sftriage.records import CaptureRequest, CaptureResult, Decision, Window
from sftriage.runs.asks import taken
from sftriage.runs.directory import RunDirectory, RunInfo
from sftriage.runs.journal import Journal
from sftriage.runs.recordings import load_recording
from sftriage.runtime.collecting import Collector, Known
from sftriage.runtime.controls import Controls
from sftriage.runtime.corroboration import Corroboration
from sftriage.runtime.uploads import Uploads
from sftriage.sinks.metering import Meter
from sftriage.sinks.webhooks import Origin, Webhooks
from sftriage.traces.manifest import Manifest
from sftriage.traces.retention import Retention
from sftriage.windows.gather import Shape

log = logging.getLogger("sftriage")

POLL_S = 0.25
CANCEL_GRACE_S = 15.0
"""Past its time-box, how long a rank has to end a capture by itself, at a step boundary, and keep what it has."""
ANSWER_GRACE_S = 60.0
"""Past its time-box, how long a rank has to export and answer before its capture is given up."""
NSYS_ANSWER_GRACE_S = 300.0
"""The same where nsys makes the report: beside the job, which goes on meanwhile."""
LAST_ANSWER_S = 15.0
"""How long after the job's end a capture may still need to be written out by trainers that are leaving."""
TIDY_S = 3600.0
"""How often it is looked for captures that are kept no longer, beside after each capture."""
NOTIFY_GRACE_S = 10.0
"""How long after the end of a run it may take to tell who is still to be told."""
USUAL_STEP_S = 0.05
"""What a step is taken to take before a window says so."""
LEARNT_WINDOWS = 64
"""From how many of a run's first windows a controller that takes over learns what was normal."""


class Watcher(Protocol):
    """Who is told what happens. Called in the scheduler's thread, and once more from the main thread at the end."""

    def judged(self, judged: Judged) -> None:
        """A window has been decided, or the step in progress has stalled."""

    def captured(self, result: CaptureResult, manifest: Manifest | None) -> None:
        """A capture has ended; with a manifest, it is in the store."""


class Triage:
    """What is done about a job while it runs, and just after.

    Args:
        directory: the run.
        info: what is run.
        policy: the policy, several that are in force together, or files that are watched for other ones.
        watcher: who is told what happens.
        nsys: how the ranks were launched under nsys, if they were.
        left: what an earlier triage of this run has left, which this one takes over.
        meter: who makes metrics of it; by default nobody.
        uploads: what becomes of its captures elsewhere; by default nothing. Whoever made them finishes them.

    Raises:
        UsageError: another process does it already.
    """

    def __init__(
        self,
        directory: RunDirectory,
        info: RunInfo,
        policy: LoadedPolicy | PolicySet | PolicyFiles,
        watcher: Watcher,
        nsys: NsysPlace | None = None,
        left: Left | None = None,
        meter: Meter | None = None,
        uploads: Uploads | None = None,
    ) -> None:
        self.directory, self._watcher, self._left = directory, watcher, left
        self._info, self._meter = info, meter or Meter()
        self._uploads = uploads or Uploads()
        with contextlib.ExitStack() as held:
            held.enter_context(_alone(directory))
            detection = in_force(policy).detection
            self._shape = Shape(detection.window_steps, detection.stride_steps, detection.warmup_steps)
            self._agent = Agent(Path(info.rings), directory.steps, directory.spool, self._shape, nsys=nsys)
            self._journal = Journal(directory.decisions)
            self._webhooks = Webhooks(Origin(info.job, info.run_id))
            self._controller = Controller(policy, self._journal, directory.state, self._webhooks, left)
            self._evidence = Corroboration()
            self._collector = Collector(directory, info)
            self._controls = Controls()
            self._results: deque[tuple[Executor, CaptureResult]] = deque()
            self._held = held.pop_all()
        # What a step takes, by the newest window.
        self._attempt, self._step_s = 0, USUAL_STEP_S
        self._turns = ThreadPoolExecutor(1)
        self._scheduler = BackgroundScheduler(
            executors={"default": self._turns},
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
            timezone=timezone.utc,
        )

    def start(self) -> None:
        """Begin, in a thread of its own; where an earlier triage has left something, with that."""
        self._scheduler.start()
        self._uploads.start()
        self._meter.start(self._info, self._agent, self._controller, self._left)
        if self._left is not None:
            self._scheduler.add_job(self._take_over, "date", args=[self._left])
        self._scheduler.add_job(self._look, "interval", seconds=POLL_S)
        self._scheduler.add_job(self._tidy, "interval", seconds=TIDY_S)

    def finish(self) -> None:
        """The job is over: take its last steps, and the captures that its trainers still write out."""
        self._halt()
        self._look(ended=True)
        deadline_s = time.monotonic() + LAST_ANSWER_S
        while self._agent.running and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            self._look(ended=True)
        for capture_id in self._agent.running:
            self._abandon(capture_id)

    def _halt(self) -> None:
        """Wait for the turn that is under way to end; there is no other after it."""
        if self._scheduler.running:
            # Were the scheduler to wait, it would with its lock held, which a turn needs that plans a later one.
            self._scheduler.shutdown(wait=False)
        self._turns.shutdown(wait=True)

    def close(self) -> None:
        """Let go of everything; what has not ended is called off."""
        self._halt()
        self._meter.close()
        self._evidence.close()
        self._agent.close()
        self._journal.close()
        self._webhooks.close(NOTIFY_GRACE_S)
        self._held.close()

    @property
    def steps_seen(self) -> int:
        """Steps read so far, over all ranks."""
        return self._agent.telemetry.steps

    @property
    def trainers_alive(self) -> bool:
        """Whether any trainer that was found is still there."""
        return self._agent.writers_alive()

    def _take_over(self, left: Left) -> None:
        """Learn what an earlier triage knew, and go on with the captures that it had begun."""
        try:
            for window in islice(load_recording(self.directory.path).windows(self._shape), LEARNT_WINDOWS):
                if self._controller.decided(window):
                    self._controller.learn(window)
        except SftriageError as error:
            log.warning("what the run was like before could not be learnt again: %s", error)
        for request, _ in left.unended.values():
            try:
                ended = self._agent.adopt(request)
                if ended is None:
                    self._bound(request)
                else:
                    self._ended(ended, None)
            except Exception:
                log.exception("capture %s could not be taken over; the others are", request.capture_id)

    def _look(self, *, ended: bool = False) -> None:
        """One turn: what has come in is judged, what is asked for is started, what has ended is collected.

        Triage must not end because a part of one turn failed (a full disk, a broken file): it is said, the other parts
        go on, and the next turn tries again.
        """
        # Captures that have ended are noted before the rings are read: these have all of their steps then.
        for act in (self._note, self._judge, self._see_stall, self._gather, self._take_asks, self._collect):
            try:
                act(ended=ended)
            except Exception:
                log.exception("a turn of the triage loop failed; it goes on")
        self._meter.looked(ended=ended)

    def _note(self, *, ended: bool) -> None:
        self._results.extend(self._agent.results())

    def _judge(self, *, ended: bool) -> None:
        for window in self._agent.poll(ended=ended):
            if self._controller.decided(window):
                self._controller.learn(window)
                self._meter.learnt(window)
                continue
            judged = self._controller.take(window, time.time())
            self._watcher.judged(judged)
            self._meter.judged(judged, window)
            for cost in judged.costs:
                self._collector.costed(cost, window.attempt)
            self._evidence.want(judged.verdict, of_undecided="nvml" in self._controller.policies.gathers)
            if window.attempt >= self._attempt:
                self._attempt, self._step_s = window.attempt, judged.verdict.exposed_s
            self._start_all(judged.decision, ended=ended)

    def _gather(self, *, ended: bool) -> None:
        found = None if ended else self._evidence.look(self._agent.ranks, time.monotonic())
        if found is not None:
            self._controller.corroborated(found)

    def _take_asks(self, *, ended: bool) -> None:
        for ask in taken(self.directory):
            if self._controller.answered(ask):
                continue
            decision = self._controller.ask(ask, self._agent.statuses(), time.time())
            self._meter.asked(decision)
            self._start_all(decision, ended=ended)

    def _collect(self, *, ended: bool) -> None:
        while self._results:
            capture, result = self._results.popleft()
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
            self._meter.judged(stall)
            self._start_all(stall.decision, ended=False)

    def _start_all(self, decision: Decision, *, ended: bool) -> None:
        """Start what was decided, all of it in the same steps."""
        requests = decision.requests
        job = self._agent.statuses() if len(requests) > 1 and not ended else None
        if job is not None:
            requests = in_the_same_steps(requests, max(one.step for one in job.ranks), self._step_s)
        self._controls.asked(requests)
        for request in requests:
            self._start(request, ended=ended)

    def _start(self, request: CaptureRequest, *, ended: bool) -> None:
        if ended:
            gone = CaptureResult(request.capture_id, request.rank, "failed", "the job ended before the capture began")
            self._ended(gone, None)
            return
        if self._controls.is_off(request.capture_id):
            self._ended(CaptureResult(request.capture_id, request.rank, "refused", "not begun"), None)
            return
        failed = self._agent.capture(request)
        if failed is not None:
            self._ended(failed, None)
            return
        self._bound(request)

    def _bound(self, request: CaptureRequest) -> None:
        """End a capture in time, whatever its rank does."""
        now = datetime.now(timezone.utc)
        answer_s = NSYS_ANSWER_GRACE_S if request.profiler == "nsys" else ANSWER_GRACE_S
        for act, grace_s in ((self._agent.cancel, CANCEL_GRACE_S), (self._abandon, answer_s)):
            due = now + timedelta(seconds=request.max_seconds + grace_s)
            self._scheduler.add_job(act, "date", run_date=due, args=[request.capture_id])

    def _abandon(self, capture_id: str) -> None:
        for hung, result in self._agent.abandon(capture_id, "no answer long past its time-box"):
            self._ended(result, None)
            decision = self._controller.beside(hung, self._agent.statuses(), time.time())
            if decision is not None:
                self._meter.asked(decision)
                self._start_all(decision, ended=False)

    def _ended(self, result: CaptureResult, manifest: Manifest | None) -> None:
        result = self._controls.told(result)
        for control in self._controls.ended(result):
            self._agent.cancel(control)
        self._controller.ended(result, time.time())
        self._watcher.captured(result, manifest)
        self._meter.captured(result, manifest)
        if manifest is not None:
            self._uploads.release(manifest.capture_id)
            self._tidy()

    def _tidy(self) -> None:
        """Remove the captures that the policy keeps no longer."""
        policies = self._controller.policies
        self._collector.tidy(Retention(policies.retention_s, policies.retention_bytes), time.time())


@contextlib.contextmanager
def _alone(directory: RunDirectory) -> Iterator[None]:
    """Hold a run. The kernel lets it go when a process dies, however it does.

    Raises:
        UsageError: another process holds it.
    """
    with os.fdopen(os.open(directory.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = file.read(20).strip()
            raise UsageError(f"{directory.path} is watched already, by process {who or 'unknown'}") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
