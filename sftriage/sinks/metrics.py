"""What happens to a job, as Prometheus metrics: judged windows, decisions, captures, what they cost, telemetry.

However long a run is, the number of series is
bounded: no metric has a rank as a label unless that was asked for, and stages beyond the first `MAX_STAGE_LABELS` count
as ``other``.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, write_to_textfile
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sftriage import __version__
from sftriage.base.loops import Backoff, Loop
from sftriage.errors import UsageError
from sftriage.model import events
from sftriage.model.captures import ENDED, CaptureRequest, Decision, Profiler
from sftriage.model.verdicts import Clock, Label, Regression, Suspect
from sftriage.model.windows import OTHER, ReadCounts, Window
from sftriage.sinks.stream import Sink, window_of
from sftriage.verdict.accounting import anchored, on_device
from sftriage.words.decisions import reasons_of

Kept = TypeVar("Kept")

WRITE_EVERY_S = 5.0
CLOSE_GRACE_S = 2.0
SUFFIX = ".prom"


class Exposition(Protocol):
    """A way on which metrics go out."""

    def start(self) -> None:
        """Begin; threads may be started from here on."""

    def close(self) -> None:
        """Let them go out once more, and end."""


class Exposed(Collector):
    """What an exposition collects, in place of the metrics themselves: with labels that every series bears.

    When a series began is left out: as text it would be as many series again. Whoever changes several metrics that
    belong together holds the ``lock``.
    """

    def __init__(self, inner: CollectorRegistry, labels: Mapping[str, str], lock: threading.Lock) -> None:
        self._inner, self._labels, self._lock = inner, dict(labels), lock

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            found = list(self._inner.collect())
        for metric in found:
            kept = (sample for sample in metric.samples if not sample.name.endswith("_created"))
            metric.samples = [sample._replace(labels={**self._labels, **sample.labels}) for sample in kept]
            yield metric


class TextFile:
    """Writes metrics into a file for node_exporter's textfile collector, every few seconds, in a thread.

    A disk that hangs holds up nothing else.

    Raises:
        UsageError: no file can be made there, or not one that is read.
    """

    def __init__(self, path: Path, registry: CollectorRegistry) -> None:
        if path.suffix != SUFFIX:
            raise UsageError(f"{path}: node_exporter reads files that end in {SUFFIX}")
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
            raise UsageError(f"{path}: cannot write to its directory; see --metrics-file")
        if path.is_dir():
            raise UsageError(f"{path}: is a directory")
        self._loop = Loop(
            *("metrics-file", partial(write_to_textfile, str(path), registry), WRITE_EVERY_S),
            failing=f"metrics: {path} cannot be written",
            expected=(OSError,),
            backoff=Backoff(WRITE_EVERY_S, WRITE_EVERY_S),
        )

    def start(self) -> None:
        self._loop.start()

    def close(self) -> None:
        self._loop.stop(CLOSE_GRACE_S, last_turn=True)


class StepTally:
    """Takes windows in order, and returns the new steps of each; forgets an attempt that is over.

    A step counts as it was in the first window that had it.
    """

    def __init__(self) -> None:
        self._attempt = -1
        self._last: Window | None = None
        self._clock: Clock = "host"

    def last_step(self, attempt: int) -> int | None:
        return self._last.last_step if self._last is not None and attempt == self._attempt else None

    def take(self, window: Window, clock: Clock = "host") -> tuple[NDArray[np.float64], NDArray[np.bool_]] | None:
        """The advances of the last steps of a window, which none before it had, and which are complete; None of none.

        ``clock`` is the one that it was judged on.
        """
        if window.attempt < self._attempt:
            return None
        if window.attempt > self._attempt:
            self._attempt, self._last = window.attempt, None
        if clock == "device" and window.device_NRS is not None:
            window = on_device(window)
        before = self._last
        next_step = window.first_step if before is None else max(window.first_step, before.last_step + 1)
        if next_step > window.last_step:
            return None
        same_clock, self._clock = clock == self._clock, clock
        self._last = window.steps(window.last_step, window.last_step)
        whole = window
        if before is not None and same_clock:
            with suppress(ValueError):
                whole = Window.joined((before, window))
        if whole is window and next_step > window.first_step:
            # The step before the first new one is in the window.
            whole = window.steps(next_step - 1, window.last_step)
        found, new = anchored(whole), next_step - whole.first_step
        return found.advances_NS[new:], found.complete_N[new:]


MAX_STAGE_LABELS = 64
"""Stages that get a series of their own: a step has 32 at most, and a job that starts again may have others."""

ALL_LOCAL = "(all local)"
"""The stage of a suspect that is slow in all of its local stages alike; no stage can be called so."""

MAX_SUSPECT_LABELS = 50
"""Suspects that get a series of their own; what others cost counts as ``(others)``."""

_UNKNOWN = "unknown"
_OTHERS = ("(others)", "")
_PHASES = frozenset({"import", "prepare", "probe", "start", "run", "stop", "export"})

STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
METRICS: Mapping[str, str] = {
    "gauge build_info{version}": "The version of sftriage; always 1.",
    "gauge run_info{run}": "The run's id; always 1.",
    "gauge run_active": "1 while the run is active, 0 once it has ended.",
    "gauge run_start_timestamp_seconds": "When the run began, Unix time.",
    "gauge update_timestamp_seconds": "When sftriage last checked the job, Unix time.",
    "counter exposed_seconds{stage}": "Exposed time of all judged steps, by the stage that advanced the frontier: "
    "the sum over stages is exactly the time that the steps took.",
    "counter steps": "Steps whose exposed time is known, each counted once.",
    "counter incomplete_steps": "Steps without a record of some rank; their exposed time is not known.",
    "histogram step_exposed_seconds": "Exposed time of single steps. An exemplar names the capture that a slow step "
    "led to.",
    "gauge last_judged_step": "The number of the last step judged.",
    "gauge coverage_ratio": "Fraction of the last window's (step, rank) pairs that were recorded.",
    "counter verdicts{label}": "Verdicts, by their label.",
    "gauge verdict{label}": "1 for the label of the newest verdict, 0 for the others.",
    "gauge stalled": "1 while the job is stalled, 0 otherwise.",
    "counter suspect_verdicts{stage, scope}": "Verdicts that name a suspect, by the suspect's stage and scope.",
    "gauge suspect_gain_seconds{stage, scope}": "What each step would save without the newest verdict's "
    "suspect, or in a stall how long it has lasted. Absent while there is no suspect.",
    "gauge suspect_share_ratio{stage, scope}": "The same as a fraction of the step's exposed time.",
    "counter straggler_cost_rank_seconds{suspect, stage}": "Time that a suspect has cost since the run began, summed "
    "over all ranks; divided by 3600, GPU-hours of ranks on GPUs.",
    "gauge regression_ratio{scope}": "How much longer a step takes than at the job's best, as a "
    "fraction of that, on all ranks or on some. Absent while it is not slower.",
    "counter regressions{scope}": "How often the job has become slower than its own best.",
    "counter decisions{outcome, reason}": "Decisions, by outcome and reason.",
    "counter captures{profiler, state}": "Captures that have ended, by profiler and end state. An exemplar names the "
    "capture.",
    "gauge captures_running": "Captures in progress.",
    "counter captures_reproduced{answer}": "Captures stored, by whether the fault was there while they were made.",
    "counter captures_stored_bytes": "Size of all stored captures.",
    "counter capture_rank_seconds{profiler, phase}": "Time that captures took on the captured ranks, by phase.",
    "counter capture_cost_seconds": "How much longer captures made the job's steps, measured against the steps before.",
    "counter causes{code, sure}": "Causes that captures found, by code, and whether sure.",
    "counter captures_unmeasured": "Captures whose cost to the job could not be measured: too few steps before them "
    "are known.",
    "gauge capture_budget_seconds": "How much time captures may have cost the job by now.",
    "gauge capture_budget_used_seconds": "How much of the capture budget is used.",
    "counter remedies{remedy, state, reason}": "Remedies against stragglers, by the state they reached and why.",
    "gauge remedy_active{remedy}": "Groups of ranks on which the remedy is on trial or kept.",
    "gauge remedy_saving_seconds{remedy}": "Time a step that the remedy saves where it is kept, as measured on trial; "
    "0 while it is not.",
    "counter telemetry_steps": "Steps read, over all ranks.",
    "counter telemetry_missed_steps": "Steps that were overwritten before they were read.",
    "counter telemetry_torn_steps": "Steps that were damaged when they were read.",
    "gauge telemetry_unreadable_ranks": "Ranks whose records cannot be read.",
    "gauge telemetry_lag_seconds": "Time from the end of the newest window's last step until the window was judged.",
    "gauge telemetry_lag_steps": "Steps between the last judged and the one in progress; those of a window that "
    "fills count.",
    "gauge disk_outage_active": "1 while the run directory cannot be written, 0 otherwise.",
    "counter disk_lost{kind}": "Records lost because the run directory could not be written, by kind.",
    "gauge ranks": "World size of the job.",
    "gauge ranks_alive": "Ranks on record whose process is running.",
    "counter rank_suspect_verdicts{rank, stage}": "Verdicts whose suspect is this rank, or includes it.",
    "gauge rank_suspect_gain_seconds{rank, stage}": "What each step would save without the newest verdict's "
    "suspect, for each of its ranks. Absent while there is no suspect.",
    "counter rank_captures{rank}": "Captures of a rank that have ended.",
    "gauge rank_step{rank}": "The step that a rank is in.",
    "gauge rank_alive{rank}": "1 while a rank's process is running, NaN where that is not known.",
}
"""Help by type, name without ``sftriage_``, and labels. Metrics of single ranks, ``rank_...``, are optional."""
_TYPES: Mapping[str, Any] = {
    "counter": Counter,
    "gauge": Gauge,
    "histogram": partial(Histogram, buckets=STEP_BUCKETS_S),
}


class Metrics(Sink):
    """The metrics of a run that began at ``started_s`` (since the epoch); all series have the job's name as a label.

    They are in the ``registry``, and go out by ``ways``, which may read them from other threads.
    """

    name = "metrics"

    def __init__(
        self,
        job: str,
        run: str,
        started_s: float,
        ways: Sequence[Exposition] = (),
        per_rank: bool = False,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._lock, self._ways, self._per_rank = threading.Lock(), ways, per_rank
        self._stages: set[str] = {OTHER}
        self._tally = StepTally()
        self._seen: events.WindowObserved | None = None
        self._received = ReadCounts()
        self._profilers: dict[str, str] = {}
        self._lost_rank_s: dict[tuple[str, str], float] = {}
        self._suspect_labels: set[tuple[str, str]] = set()
        self._regression: tuple[int, str, int] | None = None
        self._of_groups: dict[str, events.RemedyChanged] = {}
        inner = CollectorRegistry()
        self._families: dict[str, Any] = {}
        for key, about in METRICS.items():
            kind, name, *labels = re.findall(r"\w+", key)
            if per_rank or not name.startswith("rank_"):
                self._families[name] = _TYPES[kind](f"sftriage_{name}", about, labels, registry=inner)
        self._of("build_info", __version__).set(1)
        self._of("run_info", run).set(1)
        self._of("run_active").set(1)
        for name in ("run_start_timestamp_seconds", "update_timestamp_seconds"):
            self._of(name).set(started_s)
        # The first of a kind is an increase too, which Prometheus sees only from a known 0 on.
        for label in get_args(Label):
            self._of("verdicts", label)
            self._of("verdict", label)
        for scope in ("all", "some"):
            self._of("regressions", scope)
        for profiler in get_args(Profiler):
            for state in sorted(ENDED):
                self._of("captures", profiler, state)
        self.registry = registry or CollectorRegistry()
        self.registry.register(Exposed(inner, {"job_name": job}, self._lock))

    def _of(self, name: str, *labels: str) -> Any:
        return self._families[name].labels(*labels) if labels else self._families[name]

    def start(self) -> None:
        for way in self._ways:
            way.start()

    def take(self, event: events.Event | events.Observation) -> None:
        # What one event changes is exposed as a whole.
        with self._lock:
            match event:
                case events.WindowObserved(learnt=True):
                    # An earlier process has counted it.
                    self._tally.take(event.window)
                case events.WindowObserved():
                    self._seen = event
                case events.WindowJudged():
                    self._judged(event)
                case events.ManualRequestDecided() | events.FollowUpDecided():
                    self._decided(event.decision)
                case events.CaptureChanged() if event.result.state in ENDED:
                    self._captured(event)
                case events.CauseFound():
                    self._of("causes", event.code, str(event.sure).lower()).inc()
                case events.RemedyChanged():
                    self._remedied(event)
                case events.CostMeasured(cost_s=None):
                    self._of("captures_unmeasured").inc()
                case events.CostMeasured(cost_s=float(cost_s)):
                    self._of("capture_cost_seconds").inc(cost_s)
                case events.JobObserved():
                    self._looked(event)
                case events.Resumed():
                    self._begun(event.requests)
                case events.DiskFailed():
                    self._of("disk_outage_active").set(1)
                case events.DiskRecovered():
                    self._of("disk_outage_active").set(not event.over)
                    for kind, number in event.lost.items():
                        self._of("disk_lost", kind).inc(number)

    def close(self) -> None:
        with self._lock:
            self._of("run_active").set(0)
            self._of("stalled").set(0)
        for way in self._ways:
            way.close()

    def _judged(self, judged: events.WindowJudged) -> None:
        verdict, decision = judged.verdict, judged.decision
        self._of("stalled").set(verdict.label == "stalled")
        self._of("verdicts", verdict.label).inc()
        for label in get_args(Label):
            self._of("verdict", label).set(label == verdict.label)
        self._suspected(verdict.named)
        if verdict.label != "stalled":
            self._compared(verdict.regression, verdict.attempt)
        self._decided(decision)
        if (seen := window_of(self._seen, verdict)) is None:
            return
        self._count(seen.window, verdict.clock, decision.requests[0].capture_id if decision.requests else None)
        # Of a step whose vector is not there, the times are no numbers.
        self._of("coverage_ratio").set(np.isfinite(seen.window.durations_NRS[:, :, 0]).mean())
        self._of("last_judged_step").set(verdict.last_step)
        if (last := seen.spans.get(verdict.last_step)) is not None:
            self._of("telemetry_lag_seconds").set(decision.time_s - last.end_ns / 1e9)

    def _remedied(self, changed: events.RemedyChanged) -> None:
        self._of("remedies", changed.remedy, changed.state, changed.reason).inc()
        self._of_groups[changed.switch] = changed
        of_kind = [one for one in self._of_groups.values() if one.remedy == changed.remedy]
        self._of("remedy_active", changed.remedy).set(sum(one.state in ("trying", "kept") for one in of_kind))
        saves_s = sum(one.numbers.get("saves_s", 0.0) for one in of_kind if one.state == "kept")
        self._of("remedy_saving_seconds", changed.remedy).set(saves_s)

    def _captured(self, ended: events.CaptureChanged) -> None:
        result = ended.result
        profiler = self._profilers.pop(result.capture_id, _UNKNOWN)
        self._of("captures_running").set(len(self._profilers))
        self._of("captures", profiler, result.state).inc(exemplar={"capture_id": result.capture_id})
        for phase in sorted(_PHASES & result.timings_s.keys()):
            self._of("capture_rank_seconds", profiler, phase).inc(max(0.0, result.timings_s[phase]))
        if self._per_rank:
            self._of("rank_captures", str(result.rank)).inc()
        if result.state == "stored":
            self._of("captures_stored_bytes").inc(ended.stored_bytes)
            self._of("captures_reproduced", ended.reproduced.answer if ended.reproduced else _UNKNOWN).inc()

    def _looked(self, seen: events.JobObserved) -> None:
        before, self._received = self._received, seen.received
        self._of("telemetry_steps").inc(max(0, seen.received.steps - before.steps))
        self._of("telemetry_missed_steps").inc(max(0, seen.received.missed - before.missed))
        self._of("telemetry_torn_steps").inc(max(0, seen.received.torn - before.torn))
        self._of("telemetry_unreadable_ranks").set(len(seen.received.problems))
        self._of("update_timestamp_seconds").set(seen.time_s)
        self._of("capture_budget_used_seconds").set(seen.spent_s)
        self._of("capture_budget_seconds").set(seen.budget_s)
        self._cost(seen.lost_rank_s)
        if (job := seen.job) is None:
            return
        self._of("ranks").set(job.world_size)
        self._of("ranks_alive").set(int((job.alive_R == 1).sum()))
        last_judged = self._tally.last_step(job.attempt)
        newest = int(job.step_R.max(initial=0))
        self._of("telemetry_lag_steps").set(max(0, newest - (last_judged if last_judged is not None else -1)))
        for one in job.ranks if self._per_rank else ():
            self._of("rank_step", str(one.rank)).set(one.step)
            self._of("rank_alive", str(one.rank)).set(math.nan if one.alive is None else one.alive)

    def _decided(self, decision: Decision) -> None:
        reason: str = decision.reason
        if reason in ("undecided", "standstill"):
            # The first reason of a verdict that names no rank.
            reason = next(iter(reasons_of(decision)), "other")
        self._of("decisions", decision.outcome, reason).inc()
        self._begun(decision.requests)

    def _begun(self, requests: Iterable[CaptureRequest]) -> None:
        self._profilers |= {request.capture_id: request.profiler for request in requests}
        self._of("captures_running").set(len(self._profilers))

    def _suspected(self, named: Suspect | None) -> None:
        of_ranks = ["rank_suspect_gain_seconds"] if self._per_rank else []
        for name in ("suspect_gain_seconds", "suspect_share_ratio", *of_ranks):
            self._of(name).clear()
        if named is None:
            return
        stage = self._label_of(named.stage)
        self._of("suspect_verdicts", stage, named.scope).inc()
        self._of("suspect_gain_seconds", stage, named.scope).set(named.gain_s)
        self._of("suspect_share_ratio", stage, named.scope).set(named.share)
        for rank in named.ranks if self._per_rank else ():
            self._of("rank_suspect_verdicts", str(rank), stage).inc()
            self._of("rank_suspect_gain_seconds", str(rank), stage).set(named.gain_s)

    def _cost(self, lost_rank_s: Mapping[tuple[str, str], float]) -> None:
        for named, rank_s in lost_rank_s.items():
            label = _bounded(self._suspect_labels, MAX_SUSPECT_LABELS, named, _OTHERS)
            before_s = self._lost_rank_s.get(named, 0.0)
            self._of("straggler_cost_rank_seconds", *label).inc(max(0.0, rank_s - before_s))
            self._lost_rank_s[named] = max(before_s, rank_s)

    def _compared(self, found: Regression | None, attempt: int) -> None:
        self._of("regression_ratio").clear()
        if found is None or found.until_step is not None:
            return
        self._of("regression_ratio", found.scope).set(found.fraction)
        begun = (attempt, found.kind, found.since_step)
        if begun != self._regression:
            self._of("regressions", found.scope).inc()
        self._regression = begun

    def _label_of(self, stage: str | None) -> str:
        return ALL_LOCAL if stage is None else _bounded(self._stages, MAX_STAGE_LABELS, stage, OTHER)

    def _count(self, window: Window, clock: Clock, capture_id: str | None) -> None:
        if (new := self._tally.take(window, clock)) is None:
            return
        all_NS, complete_N = new
        advances_NS = all_NS[complete_N]
        self._of("steps").inc(len(advances_NS))
        self._of("incomplete_steps").inc(len(all_NS) - len(advances_NS))
        for stage, advance_s in zip(window.schema.stages, advances_NS.sum(axis=0).tolist(), strict=True):
            # (rounding may leave less than nothing of a stage that never led)
            self._of("exposed_seconds", self._label_of(stage)).inc(max(0.0, advance_s))
        exposed_N = advances_NS.sum(axis=1).tolist()
        slowest = exposed_N.index(max(exposed_N)) if exposed_N and capture_id is not None else None
        for n, exposed_s in enumerate(exposed_N):
            self._of("step_exposed_seconds").observe(
                exposed_s, {"capture_id": str(capture_id)} if n == slowest else None
            )


def _bounded(known: set[Kept], most: int, label: Kept, other: Kept) -> Kept:
    """A label that is among the first ``most``, or the one of all others."""
    if len(known) < most:
        known.add(label)
    return label if label in known else other
