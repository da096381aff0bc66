"""What happens to a job, as Prometheus metrics: judged windows, decisions, captures, what they cost, telemetry.

`Metrics.registry` is what an exposition of prometheus-client takes. However long a run is, the number of series is
bounded: no metric has a rank as a label unless that was asked for, and stages beyond the first `MAX_STAGE_LABELS` count
as ``other``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sftriage import __version__
from sftriage.decisions import (
    ENDED,
    CaptureRequest,
    CaptureResult,
    Clock,
    Decision,
    Label,
    Profiler,
    Regression,
    Suspect,
)
from sftriage.events import (
    CaptureChanged,
    CauseFound,
    CostMeasured,
    DiskFailed,
    DiskRecovered,
    Event,
    FollowUpDecided,
    JobSeen,
    ManualRequestDecided,
    Received,
    RemedyChanged,
    Resumed,
    Sight,
    WindowJudged,
    WindowSeen,
)
from sftriage.frontier.accounting import by_step
from sftriage.records import OTHER, JobStatus, Window
from sftriage.sinks.exposition import Exposed, Exposition
from sftriage.sinks.stream import Sink, window_of
from sftriage.words.decisions import reasons_of


class StepTally:
    """Takes windows in order, and tells of each the steps that are new; an attempt that is over is forgotten.

    A step counts as the first window that had it saw it.
    """

    def __init__(self) -> None:
        self._attempt = -1
        self._last: Window | None = None
        self._clock: Clock = "host"

    def last_step(self, attempt: int) -> int | None:
        """The last step of an attempt that has been counted; None where there is none."""
        return self._last.last_step if self._last is not None and attempt == self._attempt else None

    def take(self, window: Window, clock: Clock = "host") -> tuple[NDArray[np.float64], NDArray[np.bool_]] | None:
        """What `by_step` says of the last steps of a window, which none before it had; None where there are none.

        ``clock`` is the one that it was judged on.
        """
        if window.attempt < self._attempt:
            return None
        if window.attempt > self._attempt:
            self._attempt, self._last = window.attempt, None
        window = on_clock(window, clock)
        before = self._last
        next_step = window.first_step if before is None else max(window.first_step, before.last_step + 1)
        if next_step > window.last_step:
            return None
        same_clock, self._clock = clock == self._clock, clock
        self._last = window.steps(window.last_step, window.last_step)
        whole = window
        if before is not None and before.last_step + 1 == window.first_step and same_clock and _alike(before, whole):
            whole = Window.joined((before, whole))
        elif next_step > window.first_step:
            # The step before the first new one is in the window.
            whole = window.steps(next_step - 1, window.last_step)
        advances_NS, complete_N = by_step(whole)
        new = next_step - whole.first_step
        return advances_NS[new:], complete_N[new:]


def on_clock(window: Window, clock: Clock) -> Window:
    """A window's times on a clock, as far as the accounting reads them.

    The last ready gradient is left out: it splits a stage, and the parts are credited to that stage all the same.
    """
    if clock == "device" and window.device_NRS is not None:
        times = (window.device_NRS, window.device_outside_NRG, window.device_between_NR)
    else:
        times = (window.durations_NRS, window.outside_NRG, window.between_NR)
    return Window(window.schema, window.first_step, *times, attempt=window.attempt)


def _alike(before: Window, after: Window) -> bool:
    def kind(one: Window) -> tuple[object, ...]:
        return one.schema, one.durations_NRS.shape[1:], one.outside_NRG is None, one.between_NR is None

    return kind(before) == kind(after)


Counters: TypeAlias = "partial[Counter]"
Gauges: TypeAlias = "partial[Gauge]"
"""Make a family of metrics of a name, a help text and the names of its labels."""


class PerRank:
    """Series of single ranks: as many as the job has ranks, and those of its suspects' stages. They are asked for."""

    def __init__(self, counter: Counters, gauge: Gauges) -> None:
        self._suspected = counter(
            "sftriage_rank_suspect_verdicts", "Verdicts whose suspect is this rank, or holds it.", ["rank", "stage"]
        )
        self._gain = gauge(
            "sftriage_rank_suspect_gain_seconds",
            "What mending the newest verdict's suspect would save in each step, for each rank of it. Absent while "
            "nobody is suspected.",
            ["rank", "stage"],
        )
        self._captures = counter("sftriage_rank_captures", "Captures of a rank that have ended.", ["rank"])
        self._step = gauge("sftriage_rank_step", "The number of the step that a rank is in.", ["rank"])
        self._alive = gauge(
            "sftriage_rank_alive", "1 while a rank's process is there, NaN where that cannot be told.", ["rank"]
        )

    def suspected(self, named: Suspect | None, label_of: Callable[[str | None], str]) -> None:
        """This one is suspected now, or nobody."""
        self._gain.clear()
        if named is None:
            return
        for rank in named.ranks:
            self._suspected.labels(str(rank), label_of(named.stage)).inc()
            self._gain.labels(str(rank), label_of(named.stage)).set(named.gain_s)

    def captured(self, result: CaptureResult) -> None:
        """A capture has ended."""
        self._captures.labels(str(result.rank)).inc()

    def looked(self, job: JobStatus) -> None:
        """What the ranks are doing."""
        for one in job.ranks:
            self._step.labels(str(one.rank)).set(one.step)
            self._alive.labels(str(one.rank)).set(math.nan if one.alive is None else one.alive)


MAX_STAGE_LABELS = 64
"""Stages that get a series of their own: a step has 32 at most, and a job that starts again may have others."""

ALL_LOCAL = "(all local)"
"""The stage of a suspect that is slow in all of its local stages alike; no stage can be called so."""

MAX_SUSPECT_LABELS = 50
"""Suspects that get a series of their own; what others cost counts as ``(others)``."""

STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)

_UNKNOWN = "unknown"
_OTHERS = ("(others)", "")
_PHASES = frozenset({"import", "prepare", "probe", "start", "run", "stop", "export"})


class Metrics(Sink):
    """The metrics of one run. Other threads may expose them meanwhile.

    Args:
        job: the job's name, a label of every series.
        run: the run's id.
        started_s: when the run began, seconds since the epoch.
        ways: where they go out.
        per_rank: whether there are series of single ranks too.
    """

    name = "metrics"

    def __init__(
        self, job: str, run: str, started_s: float, ways: Sequence[Exposition] = (), per_rank: bool = False
    ) -> None:
        self._lock = threading.Lock()
        self._ways = ways
        self._stages: set[str] = {OTHER}
        self._tally = StepTally()
        self._seen: WindowSeen | None = None
        self._received = Received()
        self._profilers: dict[str, str] = {}
        inner = CollectorRegistry()
        counter, gauge = partial(Counter, registry=inner), partial(Gauge, registry=inner)
        gauge("sftriage_build_info", "The version of sftriage; always 1.", ["version"]).labels(__version__).set(1)
        gauge("sftriage_run_info", "The run's id; always 1.", ["run"]).labels(run).set(1)
        self._running = gauge("sftriage_run_active", "1 while the run goes on, 0 once it has ended.")
        self._running.set(1)
        gauge("sftriage_run_start_timestamp_seconds", "When the run began, Unix time.").set(started_s)
        self._updated = gauge("sftriage_update_timestamp_seconds", "When sftriage last looked at the job, Unix time.")
        self._updated.set(started_s)
        self._about_steps(inner, counter, gauge)
        self._about_decisions(counter, gauge)
        self._about_captures(counter, gauge)
        self._about_remedies(counter, gauge)
        self._about_telemetry(counter, gauge)
        self._per_rank = PerRank(counter, gauge) if per_rank else None
        self.registry = CollectorRegistry()
        self.registry.register(Exposed(inner, {"job_name": job}, self._lock))

    def _about_steps(self, inner: CollectorRegistry, counter: Counters, gauge: Gauges) -> None:
        self._exposed = counter(
            "sftriage_exposed_seconds",
            "Exposed time of all judged steps, by the stage that advanced the frontier: over the stages it is exactly "
            "the time that the steps took.",
            ["stage"],
        )
        self._steps = counter("sftriage_steps", "Steps whose exposed time is known, each counted once.")
        self._incomplete = counter(
            "sftriage_incomplete_steps", "Steps that some rank's record is missing of; their exposed time is not known."
        )
        self._step_time = Histogram(
            "sftriage_step_exposed_seconds",
            "Exposed time of single steps. An exemplar names the capture that a slow step led to.",
            buckets=STEP_BUCKETS_S,
            registry=inner,
        )
        self._last_step = gauge("sftriage_last_judged_step", "The number of the last step judged.")
        self._coverage = gauge(
            "sftriage_coverage_ratio", "Fraction of the last window's steps and ranks that was there."
        )

    def _about_decisions(self, counter: Counters, gauge: Gauges) -> None:
        self._verdicts = counter("sftriage_verdicts", "Verdicts, by their label.", ["label"])
        self._verdict = gauge("sftriage_verdict", "1 for the label of the newest verdict, 0 for the others.", ["label"])
        for label in get_args(Label):
            self._verdicts.labels(label)
            self._verdict.labels(label)
        self._stalled = gauge("sftriage_stalled", "1 while the step in progress does not end.")
        self._suspects = counter(
            "sftriage_suspect_verdicts",
            "Verdicts that name a suspect, by its stage and by who it is.",
            ["stage", "scope"],
        )
        self._gain = gauge(
            "sftriage_suspect_gain_seconds",
            "What mending the newest verdict's suspect would save in each step, or in a stall how long it has been "
            "waited for. Absent while nobody is suspected.",
            ["stage", "scope"],
        )
        self._share = gauge(
            "sftriage_suspect_share_ratio", "The same as a fraction of the step's exposed time.", ["stage", "scope"]
        )
        self._straggler_cost = counter(
            "sftriage_straggler_cost_rank_seconds",
            "What a suspect has cost since the run began, of every rank's time; by 3600, GPU-hours of ranks on GPUs.",
            ["suspect", "stage"],
        )
        self._lost_rank_s: dict[tuple[str, str], float] = {}
        self._suspect_labels: set[tuple[str, str]] = set()
        self._slower = gauge(
            "sftriage_regression_ratio",
            "By how much a step takes longer than the best that the job has shown, as a fraction of that, on all ranks "
            "or on some. Absent while it does not.",
            ["scope"],
        )
        self._regressions = counter(
            "sftriage_regressions", "Times that the job has become slower than its own best.", ["scope"]
        )
        for scope in ("all", "some"):
            self._regressions.labels(scope)
        self._regression: tuple[int, str, int] | None = None
        self._decisions = counter("sftriage_decisions", "Decisions, by their outcome and why.", ["outcome", "reason"])

    def _about_captures(self, counter: Counters, gauge: Gauges) -> None:
        self._captures = counter(
            "sftriage_captures",
            "Captures that have ended, by profiler and how. An exemplar names the capture.",
            ["profiler", "state"],
        )
        # The first capture of a kind is an increase too, which Prometheus sees only from a known 0 on.
        for profiler in get_args(Profiler):
            for state in sorted(ENDED):
                self._captures.labels(profiler, state)
        self._capturing = gauge("sftriage_captures_running", "Captures that are under way.")
        self._reproduced = counter(
            "sftriage_captures_reproduced",
            "Captures stored, by whether the fault was still there while they were made.",
            ["answer"],
        )
        self._stored = counter("sftriage_captures_stored_bytes", "Size of all stored captures.")
        self._rank_cost = counter(
            "sftriage_capture_rank_seconds",
            "Time that captures took on the ranks that were captured, by what was done in it.",
            ["profiler", "phase"],
        )
        self._group_cost = counter(
            "sftriage_capture_cost_seconds",
            "By how much captures made the job's steps longer, measured against the steps before.",
        )
        self._causes = counter(
            "sftriage_causes", "Causes that captures ended in, by code, and whether sure.", ("code", "sure")
        )
        self._unknown_cost = counter(
            "sftriage_captures_unmeasured",
            "Captures whose cost to the job cannot be told: too few steps before them are known.",
        )
        self._allowed = gauge("sftriage_capture_budget_seconds", "What captures may have cost the job by now.")
        self._spent = gauge("sftriage_capture_budget_used_seconds", "What of the budget captures have used.")

    def _about_remedies(self, counter: Counters, gauge: Gauges) -> None:
        self._of_groups: dict[str, RemedyChanged] = {}
        self._remedies = counter(
            "sftriage_remedies",
            "States that remedies against stragglers came to, and why.",
            ("remedy", "state", "reason"),
        )
        self._remedy = gauge("sftriage_remedy_active", "Groups of ranks it is tried on, or kept.", ("remedy",))
        self._remedy_saves = gauge(
            "sftriage_remedy_saving_seconds",
            "What it saves of a step where it is kept, as measured when it came to be; 0 while it is not.",
            ("remedy",),
        )

    def _about_telemetry(self, counter: Counters, gauge: Gauges) -> None:
        self._read = counter("sftriage_telemetry_steps", "Steps read, over all ranks.")
        self._missed = counter("sftriage_telemetry_missed_steps", "Steps that were overwritten before they were read.")
        self._torn = counter("sftriage_telemetry_torn_steps", "Steps that were damaged when they were read.")
        self._unreadable = gauge("sftriage_telemetry_unreadable_ranks", "Ranks whose records cannot be read.")
        self._lag = gauge(
            "sftriage_telemetry_lag_seconds",
            "How long the last step of the newest window had ended when it was judged.",
        )
        self._lag_steps = gauge(
            "sftriage_telemetry_lag_steps",
            "Steps between the last one judged and the one in progress; those of a window that fills count.",
        )
        self._failing = gauge(
            "sftriage_disk_outage_active", "1 while the run directory cannot be written, 0 otherwise."
        )
        self._lost = counter(
            "sftriage_disk_lost", "What was to be written to the run directory and is lost, by kind.", ["kind"]
        )
        self._ranks = gauge("sftriage_ranks", "Ranks that the job says it has.")
        self._ranks_alive = gauge("sftriage_ranks_alive", "Ranks on record whose process is there.")

    def start(self) -> None:
        """Let the metrics go out."""
        for way in self._ways:
            way.serve(self.registry)

    def take(self, seen: Event | Sight) -> None:
        """Count what has happened."""
        # What one event changes is exposed as a whole.
        with self._lock:
            match seen:
                case WindowSeen(learnt=True):
                    # An earlier process has counted it.
                    self._tally.take(seen.window)
                case WindowSeen():
                    self._seen = seen
                case WindowJudged():
                    self._judged(seen)
                case ManualRequestDecided() | FollowUpDecided():
                    self._decided(seen.decision)
                case CaptureChanged() if seen.result.state in ENDED:
                    self._captured(seen)
                case CauseFound():
                    self._causes.labels(seen.code, str(seen.sure).lower()).inc()
                case RemedyChanged():
                    self._remedied(seen)
                case CostMeasured(cost_s=None):
                    self._unknown_cost.inc()
                case CostMeasured(cost_s=float(cost_s)):
                    self._group_cost.inc(cost_s)
                case JobSeen():
                    self._looked(seen)
                case Resumed():
                    self._begun(seen.requests)
                case DiskFailed():
                    self._failing.set(1)
                case DiskRecovered():
                    self._failing.set(not seen.over)
                    for kind, number in seen.lost.items():
                        self._lost.labels(kind).inc(number)

    def close(self) -> None:
        """The run is over: the last values go out."""
        with self._lock:
            self._running.set(0)
            self._stalled.set(0)
        for way in self._ways:
            way.close()

    def _judged(self, judged: WindowJudged) -> None:
        verdict, decision = judged.verdict, judged.decision
        self._stalled.set(verdict.label == "stalled")
        self._verdicts.labels(verdict.label).inc()
        for label in get_args(Label):
            self._verdict.labels(label).set(label == verdict.label)
        self._suspected(verdict.named)
        if verdict.label != "stalled":
            self._compared(verdict.regression, verdict.attempt)
        self._decided(decision)
        if (seen := window_of(self._seen, verdict)) is None:
            return
        self._count(seen.window, verdict.clock, decision.requests[0].capture_id if decision.requests else None)
        # Of a step whose vector is not there, the times are no numbers.
        self._coverage.set(np.isfinite(seen.window.durations_NRS[:, :, 0]).mean())
        self._last_step.set(verdict.last_step)
        if (last := seen.spans.get(verdict.last_step)) is not None:
            self._lag.set(decision.time_s - last.end_ns / 1e9)

    def _remedied(self, told: RemedyChanged) -> None:
        self._remedies.labels(told.remedy, told.state, told.reason).inc()
        self._of_groups[told.switch] = told
        of_kind = [one for one in self._of_groups.values() if one.remedy == told.remedy]
        self._remedy.labels(told.remedy).set(sum(one.state in ("trying", "kept") for one in of_kind))
        saves_s = sum(one.numbers.get("saves_s", 0.0) for one in of_kind if one.state == "kept")
        self._remedy_saves.labels(told.remedy).set(saves_s)

    def _captured(self, ended: CaptureChanged) -> None:
        result = ended.result
        profiler = self._profilers.pop(result.capture_id, _UNKNOWN)
        self._capturing.set(len(self._profilers))
        self._captures.labels(profiler, result.state).inc(exemplar={"capture_id": result.capture_id})
        for phase in sorted(_PHASES & result.timings_s.keys()):
            self._rank_cost.labels(profiler, phase).inc(max(0.0, result.timings_s[phase]))
        if self._per_rank is not None:
            self._per_rank.captured(result)
        if result.state == "stored":
            self._stored.inc(ended.stored_bytes)
            self._reproduced.labels(ended.reproduced.answer if ended.reproduced else _UNKNOWN).inc()

    def _looked(self, seen: JobSeen) -> None:
        before, self._received = self._received, seen.received
        self._read.inc(max(0, seen.received.steps - before.steps))
        self._missed.inc(max(0, seen.received.missed - before.missed))
        self._torn.inc(max(0, seen.received.torn - before.torn))
        self._unreadable.set(seen.received.unreadable)
        self._updated.set(seen.time_s)
        self._spent.set(seen.spent_s)
        self._allowed.set(seen.budget_s)
        self._cost(seen.lost_rank_s)
        if (job := seen.job) is None:
            return
        self._ranks.set(job.world_size)
        self._ranks_alive.set(int((job.alive_R == 1).sum()))
        last_judged = self._tally.last_step(job.attempt)
        newest = int(job.step_R.max(initial=0))
        self._lag_steps.set(max(0, newest - (last_judged if last_judged is not None else -1)))
        if self._per_rank is not None:
            self._per_rank.looked(job)

    def _decided(self, decision: Decision) -> None:
        self._decisions.labels(decision.outcome, _reason_label(decision)).inc()
        self._begun(decision.requests)

    def _begun(self, requests: Iterable[CaptureRequest]) -> None:
        self._profilers |= {request.capture_id: request.profiler for request in requests}
        self._capturing.set(len(self._profilers))

    def _suspected(self, named: Suspect | None) -> None:
        self._gain.clear()
        self._share.clear()
        if named is not None:
            where = (self._label_of(named.stage), named.scope)
            self._suspects.labels(*where).inc()
            self._gain.labels(*where).set(named.gain_s)
            self._share.labels(*where).set(named.share)
        if self._per_rank is not None:
            self._per_rank.suspected(named, self._label_of)

    def _cost(self, lost_rank_s: Mapping[tuple[str, str], float]) -> None:
        """What suspects have cost, by the records of the run: earlier processes are counted."""
        for named, rank_s in lost_rank_s.items():
            if len(self._suspect_labels) < MAX_SUSPECT_LABELS:
                self._suspect_labels.add(named)
            label = named if named in self._suspect_labels else _OTHERS
            before_s = self._lost_rank_s.get(named, 0.0)
            self._straggler_cost.labels(*label).inc(max(0.0, rank_s - before_s))
            self._lost_rank_s[named] = max(before_s, rank_s)

    def _compared(self, found: Regression | None, attempt: int) -> None:
        self._slower.clear()
        if found is None or found.until_step is not None:
            return
        self._slower.labels(found.scope).set(found.fraction)
        begun = (attempt, found.kind, found.since_step)
        if begun != self._regression:
            self._regressions.labels(found.scope).inc()
        self._regression = begun

    def _label_of(self, stage: str | None) -> str:
        if stage is None:
            return ALL_LOCAL
        if stage not in self._stages:
            if len(self._stages) >= MAX_STAGE_LABELS:
                return OTHER
            self._stages.add(stage)
        return stage

    def _count(self, window: Window, clock: Clock, capture_id: str | None) -> None:
        if (new := self._tally.take(window, clock)) is None:
            return
        all_NS, complete_N = new
        advances_NS = all_NS[complete_N]
        self._steps.inc(len(advances_NS))
        self._incomplete.inc(len(all_NS) - len(advances_NS))
        for stage, advance_s in zip(window.schema.stages, advances_NS.sum(axis=0).tolist(), strict=True):
            # (rounding may leave less than nothing of a stage that never led)
            self._exposed.labels(self._label_of(stage)).inc(max(0.0, advance_s))
        exposed_N = advances_NS.sum(axis=1).tolist()
        slowest = exposed_N.index(max(exposed_N)) if exposed_N and capture_id is not None else None
        for n, exposed_s in enumerate(exposed_N):
            self._step_time.observe(exposed_s, {"capture_id": str(capture_id)} if n == slowest else None)


def _reason_label(decision: Decision) -> str:
    """The code of a decision's reason, or the first reason of a verdict that names nobody."""
    if decision.reason not in ("undecided", "standstill"):
        return decision.reason
    return next(iter(reasons_of(decision)), "other")
