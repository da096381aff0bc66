"""Triage of one run: a controller and its fleet of agents, in one thread."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import islice
from pathlib import Path
from time import monotonic_ns

import msgspec

from sftriage.agent.agent import STORING_S
from sftriage.base.files import refusing
from sftriage.base.loops import LogOnce, Loop
from sftriage.controller.agents import Corroboration, DesiredCaptures, Fleet, ResumeState, WindowAssembly, resume_state
from sftriage.controller.controller import Controller, shape_of
from sftriage.controller.hang_capture import HangCaptures, HangFound
from sftriage.errors import SftriageError
from sftriage.model.captures import ENDED, CaptureResult, Decision, ManualRequest, Report, Reproduced
from sftriage.model.events import DiskRecovered, JobBroken, JobObserved, Resumed, RingGivenUp, TakenOver
from sftriage.model.windows import JobStatus, Window
from sftriage.policy.captures import in_the_same_steps
from sftriage.policy.in_force import PolicyFiles, PolicySet
from sftriage.runs.directory import RunDirectory, RunInfo
from sftriage.runs.journal import Journal
from sftriage.runs.liveness import DISK, FAILING, holding, note_problem
from sftriage.runs.recordings import load_recording
from sftriage.runtime.reducing import Annotations
from sftriage.sinks.stream import Sink, Stream
from sftriage.sinks.webhooks import Webhooks
from sftriage.traces.disk import Disk, Do, at_once
from sftriage.traces.retention import RetentionLimits
from sftriage.windows.logs import StepLogs, kept_steps

log = logging.getLogger("sftriage")

COUNTED_STEPS = 45
"""Steps before a capture whose counters are compared with those of other ranks."""
POLL_S = 0.25
SHOW_S = 1.0
"""How often sinks get the state of the ranks."""
CHECK_SHARE, CHECK_S = 0.1, 5.0
"""Checks for a stall take at most this share of the time in a very large job, but run at least this often."""
TIDY_S = 3600.0
"""How often to apply retention, in addition to after each capture."""
ENDING_S, ENDING_SHARE = 12.0, 2 / 3
"""How long all remaining work may take after the end of the job, and each part's share of the time that is left then:
captures that trainers still write, writes that wait for the disk, and events that sinks have not taken yet."""
USUAL_STEP_S = 0.05
"""The assumed time of a step before the first window."""
LEARNT_WINDOWS = 64
"""How many of a run's first windows a controller that takes over reads, to learn what is normal."""


class Triage:
    """Triage of a job while it runs, and just after. It closes ``fleet`` and ``disk``.

    ``policy`` may be files that are watched for changes. With ``resume`` it continues an earlier triage of this
    run. ``reads_s`` is the longest time between two readings of steps. ``trainers_alive`` says whether any
    trainer that was found was still there in the last turn.
    """

    def __init__(
        self,
        directory: RunDirectory,
        info: RunInfo,
        policy: PolicySet | PolicyFiles,
        fleet: Fleet,
        sinks: Sequence[Sink] = (),
        *,
        resume: bool = False,
        reads_s: float = SHOW_S,
        disk: Disk | None = None,
    ) -> None:
        self.directory, self._fleet = directory, fleet
        self._disk, self._rings = disk or Disk(), Path(info.rings)
        with refusing(f"{directory.path} cannot be written"), contextlib.ExitStack() as held:
            held.enter_context(holding(directory))
            self._shape = shape_of(policy.current.detection)
            self._annotations = Annotations(directory, self._disk.do)
            logs = StepLogs(directory.steps)
            self._journal = Journal(directory.decisions, self._disk.do)
            held.callback(self._journal.close)
            # (read once no other process writes to it)
            self._left = resume_state(self._journal.events()) if resume else None
            judged = {} if self._left is None else self._left.judged

            def kept(generation: int, first_step: int, last_step: int) -> Window | None:
                self._disk.settle()
                return kept_steps(logs, generation, first_step, last_step) if self._disk.well else None

            self._assembly = WindowAssembly(self._shape, kept, judged)
            self._stream = Stream(sinks)
            parts = policy, self._journal, directory.state, self._stream.publish, self._left
            controller = self._controller = Controller(*parts, nsys=directory.nsys.exists())
            about = info.job, info.run_id
            self._stream.add(Webhooks(*about, lambda: {rule.name: rule for rule in controller.policies.rules}))
            self._captures, self._hangs, self._about = DesiredCaptures(), HangCaptures(), (info.job, info.run_id)
            self._evidence = Corroboration()
            self._held = held.pop_all()
        self._annotate = partial(self._disk.do, queue="annotations", patience_s=STORING_S)
        # The time of a step in the newest window.
        self._attempt, self._step_s = 0, USUAL_STEP_S
        self._shown_s = self._tidied_s = self._checked_s = self._mitigated_s = -TIDY_S
        self._check_took_s = 0.0
        self._failures = FailedTurns(directory.failures, self._rings, self._disk.do)
        self._manual = ManualRequests(directory, partial(self._disk.do, queue="requests"))
        self._log_once = LogOnce(log, logging.ERROR)
        self._reports: list[Report] = []
        # The last stored capture of each rank.
        self._stored: dict[int, str] = {}
        self._reads, self._read_s, self._reads_s = True, -TIDY_S, reads_s
        # The last state of the ranks.
        self._job: JobStatus | None = None
        self.trainers_alive = self._ended = self._draining = False
        self._drained = threading.Event()
        # Which rank went first in attempts that were restarted, each once.
        self.restarts: Callable[[], Iterable[JobBroken]] = tuple
        self._loop = Loop("triage", self._turn_in_time, POLL_S, failing="a turn of triage failed")
        self._ending_s: float | None = None

    def start(self) -> None:
        """Start the thread; it begins with what an earlier triage has left."""
        note_problem(self._rings / DISK, None)
        note_problem(self._rings / FAILING, None)
        self._stream.start()
        self._loop.start()

    def finish(self, broken: Callable[[], Iterable[JobBroken]] = tuple) -> None:
        """The job is over: take its last steps, and captures that its trainers still write.

        ``broken`` finds out which rank went first, if the job ended early.
        """
        if not self._halt():
            return
        self._ended = True
        self.turn()
        self.judge_ends(broken)
        deadline_s = time.monotonic() + self._share_s()
        while (*self._captures.unended, *self._hangs.unended) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            self.turn()
        for wanted in (*self._captures.unended, *self._hangs.unended):
            late = CaptureResult(wanted.capture_id, wanted.rank, "expired", "no answer by the end of the job")
            self._take_report(Report(late))
        self._failures.report()

    def drain(self, patience_s: float) -> bool:
        """Order no more captures: no triage that knows them may follow. Return whether those in progress have ended."""
        self._draining = True
        return self._drained.wait(patience_s)

    def judge_ends(self, broken: Callable[[], Iterable[JobBroken]]) -> None:
        """Record which rank went first; no turn follows but those of `finish`."""
        if self._halt():
            self._failures.run("finding out which rank went first", lambda: [*map(self._controller.record, broken())])

    def close(self) -> None:
        """Release everything; cancels captures in progress, and drops writes that the disk does not take in time."""
        if self._halt():
            self._fleet.close()
        self._disk.drain(self._share_s())
        self._publish_disk()
        self._disk.close()
        for event in self._disk.news():
            self._stream.publish(event)
            if isinstance(event, DiskRecovered) and not self._disk.hangs:
                self._journal.append_from_reserve(event)
        self._stream.close(self._share_s())
        if not self._disk.hangs:
            # (closing a file may wait for a disk that hangs; the end of the process closes them too)
            self._held.close()

    @property
    def recorded_steps(self) -> int:
        return self._fleet.telemetry().steps

    def _now_s(self) -> float:
        return monotonic_ns() / 1e9

    def _turn_in_time(self) -> float:
        began_s = time.monotonic()
        if self._left is not None:
            left, self._left = self._left, None
            self._failures.run("taking over", partial(self._take_over, left))
        # Read steps at least once per window.
        due_s = self._read_s + min(self._shape.stride_steps * self._step_s, self._reads_s) - POLL_S / 2
        self.turn(reads=began_s >= due_s)
        return max(0.0, began_s + POLL_S - time.monotonic())

    def _halt(self) -> bool:
        """Wait for the turn in progress, which is the last; return whether it ended."""
        ended = self._loop.stop(self._share_s())
        if not ended:
            self._log_once("triage hangs; exiting without it")
        return ended

    def _share_s(self) -> float:
        """How long the next part of the remaining work may take."""
        now_s = time.monotonic()
        self._ending_s = self._ending_s or now_s + ENDING_S
        return ENDING_SHARE * max(0.0, self._ending_s - now_s)

    def _take_over(self, left: ResumeState) -> None:
        """Learn what an earlier triage knew, and resume the captures that it had begun."""
        try:
            for window in islice(load_recording(self.directory.path).windows(self._shape), LEARNT_WINDOWS):
                if self._controller.decided(window):
                    self._controller.learn(window)
        except SftriageError as error:
            log.warning("could not learn again what was normal in this run: %s", error)
        counts = left.n_windows, left.n_stored
        self._controller.record(TakenOver(time.time(), socket.gethostname(), os.getpid(), *counts))
        self._stream.publish(Resumed(tuple(request for request, _ in left.unended.values())))
        stored = self._annotations.store.ids()
        for capture_id, (request, trigger) in left.unended.items():
            attempt = left.attempts[capture_id]
            if not request.of_whole_job:
                self._captures.resume(request, trigger, attempt)
                continue
            self._hangs.add(request, attempt, trigger.first_step, self._now_s(), None, resumed=True)
            if capture_id in stored:
                self._take_report(self._annotations.store.manifest(capture_id).report)

    def turn(self, *, reads: bool = True) -> None:
        """One turn: judge new windows, start captures, note those that have ended.

        Without ``reads``, it reads steps only if a capture is in progress or has just ended. A failing part does not
        end the turn (see `FailedTurns`).
        """
        self._reads = reads
        # Take the reports of captures before reading the rings, which then have all of the captured steps.
        for part, act in (
            ("reading reports of captures", self._take_reports),
            ("reading and judging steps", self._judge),
            ("looking for a stall", self._check_stall),
            ("gathering evidence", self._gather),
            ("gathering the evidence of a hang", self._gather_hangs),
            ("taking manual requests", self._take_requests),
            ("starting and noting captures", self._update_captures),
            ("mitigation", self._mitigate),
            ("publishing the state of the job", self._publish_state),
        ):
            self._failures.run(part, act)
        if self._draining and not (*self._captures.unended, *self._hangs.unended):
            self._drained.set()

    def _take_reports(self) -> None:
        self._reports += self._fleet.reports()

    def _judge(self) -> bool:
        if not (self._reads or self._reports or self._captures.unended):
            return False
        self._read_s = time.monotonic()
        hold = bool(self._reports or self._captures.unended)
        windows = self._assembly.add(self._fleet.rows(), ended=self._ended, hold=hold)
        for window in () if self._draining else windows:
            # A window that cannot be judged must not stop the others.
            self._failures.run("judging a window", partial(self._take, window))
        return True

    def _take(self, window: Window) -> None:
        spans = self._assembly.spans(window)
        if self._controller.decided(window):
            self._controller.learn(window, spans)
            return
        judged = self._controller.take(window, time.time(), spans)
        if self._disk.well:
            for agent, position in self._assembly.settled(window).items():
                self._fleet.settled(agent, position)
        for cost in self._controller.costs:
            self._annotate(partial(self._annotations.costed, cost))
        self._evidence.want(judged.verdict, window, of_undecided="nvml" in self._controller.policies.gathers)
        if window.attempt >= self._attempt:
            self._attempt, self._step_s = window.attempt, judged.verdict.step_s
        self._order(judged.decision)

    def _check_stall(self) -> bool:
        now_s = self._now_s()
        every_s = max(SHOW_S, min(self._check_took_s / CHECK_SHARE, CHECK_S))
        if self._draining or (not self._ended and self._checked_s <= now_s < self._checked_s + every_s):
            return False
        began_s = time.thread_time()
        self._checked_s, self._job = now_s, None
        job = self._job = None if self._ended else self._fleet.statuses()
        self.trainers_alive = job is not None and bool((job.alive_R != 0).any())
        stall = None if job is None else self._controller.look(job, monotonic_ns(), time.time())
        self._check_took_s = time.thread_time() - began_s
        if stall is not None:
            self._order(stall.decision)
        return True

    def _gather(self) -> None:
        if self._ended:
            return
        if (found := self._evidence.look(self._fleet)) is not None:
            self._controller.record(found)
        # (a capture would record how its rank reads its facts; and agents gather one evidence at a time)
        hangs = self._hangs.checking_ns or not all(each.gathered for each in self._hangs.under_way.values())
        if hangs or self._captures.unended or (differ := self._evidence.compare(self._fleet, time.time())) is None:
            return
        self._controller.record(differ)
        for rank in self._stored.keys() & set(differ.ranks):
            remarks = self._evidence.remarks_on(rank)
            self._annotate(partial(self._annotations.remark, self._stored[rank], remarks))

    def _gather_hangs(self) -> bool:
        due, checked = self._controller.evidence_due and not self._ended, None
        if due or self._hangs.checking_ns:
            checked = self._hangs.check(self._fleet, self._job, due, monotonic_ns())
        if checked is not None:
            self._controller.consider(*checked, monotonic_ns())
        found = [*self._hangs.poll(self._fleet, self._now_s(), time.time())] if self._hangs.under_way else []
        for each in found:
            if isinstance(each, HangFound):
                # (known before anything is written, should the disk be what hangs)
                self._controller.explained(each.event(time.time()))
                trigger = self._controller.trigger_of(each.request.capture_id)
                self._annotate(partial(self._annotations.keep, each, trigger, *self._about, self._reports.append))
            else:
                self._reports.append(Report(each))
        return bool(found or checked)

    def _take_requests(self) -> None:
        if self._draining:
            return
        for request, job in self._manual.due(self._fleet.statuses, self._now_s(), ended=self._ended):
            if not self._controller.answered(request):
                self._order(self._controller.decide_request(request, job, time.time()))

    def _mitigate(self) -> bool:
        now_s = self._now_s()
        if self._ended or now_s < self._mitigated_s + SHOW_S:
            return False
        self._mitigated_s = now_s
        self._fleet.switch(self._controller.mitigate(self._fleet.switches(), time.time()))
        return True

    def _order(self, decision: Decision) -> None:
        requests = decision.requests
        if self._ended:
            for request in requests:
                about = request.capture_id, request.rank
                gone = CaptureResult(*about, "failed", "the job ended before the capture began")
                self._controller.changed(gone, time.time())
            return
        for request in requests:
            if request.of_whole_job:
                self._hangs.add(request, decision.attempt, decision.first_step, self._now_s(), self._job)
        requests = tuple(request for request in requests if not request.of_whole_job)
        if len(requests) > 1 and (job := self._fleet.statuses()) is not None:
            requests = in_the_same_steps(requests, int(job.step_R.max()), self._step_s)
        triggers = {request.capture_id: self._controller.trigger_of(request.capture_id) for request in requests}
        self._captures.add(requests, triggers, decision.attempt, self._now_s())

    def _update_captures(self) -> None:
        self._fleet.want(self._captures.wanted(self._now_s()))
        self._take_reports()
        while self._reports:
            self._take_report(self._reports.pop(0))
        self._publish_causes()

    def _publish_causes(self) -> None:
        for found in self._annotations.causes(time.time()):
            self._controller.explained(found)

    def _take_report(self, report: Report) -> None:
        if report.result.state not in ENDED:
            self._controller.changed(report.result, time.time())
            return
        wanted, result = self._captures.ended(report.result)
        generation = self._hangs.ended(result.capture_id) if wanted is None else wanted.generation
        found = None
        if result.state == "stored":
            attempt = self._attempt if generation is None else generation
            found = self._reproduced(result, attempt)
            remarks, self._stored[result.rank] = self._evidence.remarks_on(result.rank), result.capture_id
            about = remarks, attempt, self._evidence.slowed.get(result.rank), self._steps_to(result, attempt)
            self._annotate(partial(self._annotations.stored, result.capture_id, found, *about))
            # (before the capture is recorded as ended: if this process dies here, the next one analyses it again)
            self._publish_causes()
        self._controller.changed(result, time.time(), found, report.stored_bytes)
        if result.state == "stored":
            self._tidy()
        if report.hangs and wanted is not None:
            decision = self._controller.follow_up(wanted.request, self._fleet.statuses(), time.time())
            if decision is not None:
                self._order(decision)

    def _reproduced(self, result: CaptureResult, attempt: int) -> Reproduced | None:
        """Whether the fault was there; a failure to find out does not lose the capture."""
        if result.first_step is None or result.last_step is None:
            return None
        try:
            steps = self._assembly.steps(attempt, result.first_step, result.last_step)
            return self._controller.reproduced(result.capture_id, steps)
        except Exception as error:
            self._log_once(f"cannot tell whether capture {result.capture_id} reproduced its fault: {error}")
            log.debug("cannot tell whether a capture reproduced its fault", exc_info=True)
            return None

    def _steps_to(self, result: CaptureResult, attempt: int) -> Window | None:
        """The captured steps and some before, since counters are read a few times a second."""
        if result.first_step is None or result.last_step is None:
            return None
        first = max(0, result.first_step - COUNTED_STEPS)
        with contextlib.suppress(Exception):
            return self._assembly.steps(attempt, first, result.last_step) or self._assembly.steps(
                attempt, result.first_step, result.last_step
            )
        return None

    def _publish_state(self) -> bool:
        now_s = self._now_s()
        self._publish_disk()
        if now_s >= self._tidied_s + TIDY_S:
            self._tidy()
        if now_s < self._shown_s + SHOW_S and not self._ended:
            return False
        self._shown_s = now_s
        received = deepcopy(self._fleet.telemetry())  # it continues to count while sinks read
        wall_s = time.time()
        for where, reason in received.problems.items():
            ring = re.search(r"rank-(\d+)\.\d+\.ring$", where)
            if ring is not None and self._log_once.is_new(where):
                self._controller.record(RingGivenUp(wall_s, int(ring[1]), reason))
        for broken in () if self._ended else self.restarts():
            self._controller.record(broken)
        lost_rank_s = self._controller.losses.by_name
        self._stream.publish(JobObserved(wall_s, received, self._job, *self._controller.budget(wall_s), lost_rank_s))
        return True

    def _tidy(self) -> None:
        self._tidied_s = self._now_s()
        policies = self._controller.policies
        if (policies.retention_s, policies.retention_bytes) != (None, None):
            limits = RetentionLimits(policies.retention_s, policies.retention_bytes)
            self._annotate(partial(self._annotations.tidy, limits, time.time()))

    def _publish_disk(self) -> None:
        for event in self._disk.news():
            if isinstance(event, DiskRecovered):
                note_problem(self._rings / DISK, None)
                self._controller.record(event)
            else:
                note_problem(self._rings / DISK, event.problem)
                self._stream.publish(event)


STARTING_S = 10.0
"""How long a request waits for a rank of the job that has not recorded yet: it may be starting."""


class ManualRequests:
    """The capture requests in a run directory; ``do`` reads and writes there."""

    def __init__(self, directory: RunDirectory, do: Do) -> None:
        self._directory, self._do = directory, do
        self._found: deque[tuple[Path, ManualRequest]] = deque()
        # Since when requests wait for ranks that are not there yet, by id.
        self._waits_s: dict[str, float] = {}

    def due(
        self, statuses: Callable[[], JobStatus | None], now_s: float, *, ended: bool
    ) -> Iterator[tuple[ManualRequest, JobStatus | None]]:
        """Requests to decide now, oldest first, with the state of the ranks. Removes each request.

        ``statuses`` is called only where there are requests; once the job has ``ended``, none waits for a rank to
        start.
        """

        def find() -> None:
            if not self._found:
                self._found += requests_in(self._directory)

        self._do(find, latest=True)
        while self._found:
            path, request = self._found.popleft()
            job = statuses()
            since_s = self._waits_s.setdefault(request.request_id, now_s)
            missing = set() if job is None else set(request.ranks).difference(job.rank_R.tolist())
            # (the job may have a rank that has recorded nothing yet)
            may_start = job is None or (missing and max(missing) < job.world_size)
            if not ended and may_start and now_s < since_s + STARTING_S:
                continue  # (its file stays, and is found again)
            yield request, job
            self._waits_s.pop(request.request_id)
            # In the same queue as the search for requests, so that none is found twice.
            self._do(partial(path.unlink, missing_ok=True))


MAX_LOG_BYTES = 64 << 10
"""Maximum size of the file of tracebacks."""


class FailedTurns:
    """Runs the parts of a turn, and reports triage as off while one of them fails. The next turn tries again.

    ``path`` gets the traceback of each new failure, up to `MAX_LOG_BYTES`; ``rings`` is where pages and `sftriage
    watch` learn that triage is off.
    """

    def __init__(self, path: Path, rings: Path, do: Do = at_once) -> None:
        self._path, self._rings, self._do = path, rings, do
        self.count = self._size_bytes = 0
        self._failing: dict[str, str] = {}
        self._log_once, self._off = LogOnce(log), False

    def run(self, part: str, act: Callable[[], object]) -> None:
        """Run a part of a turn; an exception counts as a failure. A part without work returns False."""
        try:
            if act() is False:
                return
        except Exception as error:
            self._fails(part, error)
            return
        if self._failing.pop(part, None) is not None and not self._failing:
            note_problem(self._rings / FAILING, None)
            if self._off:
                log.error("triage works again")
            self._off = False

    def _fails(self, part: str, error: Exception) -> None:
        reason = f"{part} failed: {type(error).__name__}: {error}"
        self.count += 1
        self._failing[part] = reason
        note_problem(self._rings / FAILING, reason)
        place = traceback.extract_tb(error.__traceback__)[-1]
        if not self._log_once.is_new((part, type(error), place.filename, place.lineno)):
            return
        self._off = True
        log.error("triage is off: %s (traceback in %s); retrying", reason, self._path)
        text = f"{reason}\n{''.join(traceback.format_exception(error))}\n".encode("utf-8", "replace")
        if self._size_bytes + len(text) <= MAX_LOG_BYTES:
            self._size_bytes += len(text)

            def append() -> None:
                with self._path.open("ab") as file:
                    file.write(text)

            self._do(append, "failures", waits=False)

    def report(self) -> None:
        if self.count:
            log.error("triage failed %d times in this run; the tracebacks are in %s", self.count, self._path)


def requests_in(directory: RunDirectory) -> list[tuple[Path, ManualRequest]]:
    """The capture requests, oldest first, each with its file, to be removed once it is decided.

    Files that hold no request are removed with a warning. Raises OSError if such a file cannot be removed.
    """
    found = []
    try:
        files = (path for path in directory.requests.glob("*.json") if not path.is_dir())
        paths = sorted(files, key=lambda path: path.lstat().st_mtime_ns)
    except OSError:
        return []
    for path in paths:
        try:
            found.append((path, msgspec.json.decode(path.read_bytes(), type=ManualRequest)))
        except (OSError, ValueError) as error:
            path.unlink(missing_ok=True)
            log.warning("removed the invalid capture request %s: %s", path.name, error)
    return found
