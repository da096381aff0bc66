"""The Prometheus metrics of a run: `METRICS` declares them, `Metrics` moves them, `TextFile` writes them to a file.

`Metering` makes both; the web server exposes the same registry. The number of series is bounded however long a run is:
only the optional metrics have ranks as labels, and stages beyond the first `MAX_STAGE_LABELS` count as ``other``.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, write_to_textfile
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from sftriage import __version__
from sftriage.base.loops import Backoff, Loop
from sftriage.errors import UsageError
from sftriage.model import events
from sftriage.model.captures import ENDED, CaptureRequest, Decision, Profiler
from sftriage.model.verdicts import Clock, Label, Regression, SlowLink, Suspect
from sftriage.model.windows import OF_INTERPRETER, OTHER, InterpreterCode, ReadCounts, Window
from sftriage.sinks.stream import Sink, window_of
from sftriage.verdict.accounting import anchored, on_device
from sftriage.words.decisions import reasons_of

LabelT = TypeVar("LabelT")

WRITE_EVERY_S = 5.0
CLOSE_GRACE_S = 2.0
SUFFIX = ".prom"


class Exposition(Protocol):
    """Publishes a registry: over HTTP, or in a file."""

    def start(self) -> None:
        """Begin; threads may be started from here on."""

    def close(self) -> None:
        """Publish once more, and stop."""


class Exposed(Collector):
    """Collects metrics for an exposition, and adds ``labels`` to every series.

    It leaves out the ``_created`` samples, which would double the number of series. Hold the ``lock`` to change several
    metrics at once.
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


class FromFiles(Collector):
    """Collects what several `TextFile` have written into a directory; of two equal series, the first one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        known = set[tuple[str, frozenset[tuple[str, str]]]]()
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            with suppress(OSError, ValueError):
                for metric in text_string_to_metric_families(path.read_text(encoding="utf-8")):
                    new = [each for each in metric.samples if (each.name, frozenset(each.labels.items())) not in known]
                    known.update((each.name, frozenset(each.labels.items())) for each in new)
                    kept = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                    kept.samples += new
        yield from found.values()


class TextFile:
    """Writes metrics to a file for node_exporter's textfile collector every `WRITE_EVERY_S`, in its own thread.

    Raises:
        UsageError: the file cannot be created, or its name does not end in `SUFFIX`.
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
    """Takes overlapping windows in order, and returns the new steps of each: a step counts in its first window.

    It ignores windows of earlier attempts.
    """

    def __init__(self) -> None:
        self._attempt = -1
        self._last: Window | None = None
        self._clock: Clock = "host"

    def last_step(self, attempt: int) -> int | None:
        return self._last.last_step if self._last is not None and attempt == self._attempt else None

    def take(self, window: Window, clock: Clock = "host") -> tuple[NDArray[np.float64], NDArray[np.bool_]] | None:
        """The advances of the window's new steps, and which of them are complete; None if there are no new steps.

        ``clock`` is the clock that the window was judged on.
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
"""Maximum stages with series of their own: a step has at most 32, and a restarted job may have others."""

ALL_LOCAL = "(all local)"
"""Stage label of a suspect that is slow in all local stages; no stage can have this name."""

MAX_SUSPECT_LABELS = 50
"""Maximum suspects with series of their own; the cost of others counts as ``(others)``."""

_UNKNOWN = "unknown"
_OTHERS = ("(others)", "")
_PHASES = frozenset({"import", "prepare", "probe", "start", "run", "stop", "export"})

STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
METRICS: Mapping[str, Mapping[str, str]] = {
    "": {
        "gauge build_info{version}": "The version of sftriage; always 1.",
        "gauge run_info{run}": "The run's id; always 1.",
        "gauge run_active": "1 while the run is active, 0 once it has ended.",
        "gauge run_start_timestamp_seconds": "When the run began, Unix time.",
    },
    "WindowJudged": {
        "counter exposed_seconds{stage}": "Exposed time of all judged steps, by the stage that advanced the "
        "frontier: the sum over stages is exactly the time that the steps took.",
        "counter steps": "Steps whose exposed time is known, each counted once.",
        "counter incomplete_steps": "Steps without a record of some rank; their exposed time is not known.",
        "counter interpreter_seconds{work}": "Time of these steps that trainers spent collecting garbage, or compiling "
        "with torch.compile, summed over all ranks.",
        "counter rank_interpreter_seconds{rank, work}": "The same of each rank.",
        "histogram step_exposed_seconds": "Exposed time of single steps; exemplars name captures of slow steps.",
        "gauge last_judged_step": "The number of the last step judged.",
        "gauge coverage_ratio": "Fraction of the last window's (step, rank) pairs that were recorded.",
        "counter verdicts{label}": "Verdicts, by their label.",
        "gauge verdict{label}": "1 for the label of the newest verdict, 0 for the others.",
        "gauge stalled": "1 while the job is stalled, 0 otherwise.",
        "counter suspect_verdicts{stage, scope}": "Verdicts that name a suspect, by the suspect's stage and scope.",
        "gauge suspect_gain_seconds{stage, scope}": "What each step would save without the newest verdict's suspect, "
        "or in a stall how long it has lasted. Absent while there is no suspect.",
        "gauge suspect_share_ratio{stage, scope}": "The same as a fraction of the step's exposed time.",
        "gauge regression_ratio{scope}": "How much longer a step takes than at the job's best, as a fraction of "
        "that, on all ranks or on some. Absent while it is not slower.",
        "counter regressions{scope}": "How often the job has become slower than its own best.",
        "gauge link_bits_per_second{host, peer}": "Rate of the slow link that the newest verdict names: of a host, or "
        "to a peer. Absent while none is slow.",
        "gauge link_cost_seconds{host, peer}": "What each step would save if that link were as fast as others.",
        "gauge time_seconds{part}": "Where the run's time went so far, by part; the sum is its wall clock.",
        "gauge telemetry_lag_seconds": "Time from the end of the newest window's last step to its verdict.",
        "counter rank_suspect_verdicts{rank, stage}": "Verdicts whose suspect is this rank, or includes it.",
        "gauge rank_suspect_gain_seconds{rank, stage}": "What each step would save without the newest verdict's "
        "suspect, for each of its ranks. Absent while there is no suspect.",
    },
    "WindowJudged, ManualRequestDecided, FollowUpDecided": {
        "counter decisions{outcome, reason}": "Decisions, by outcome and reason.",
    },
    "WindowJudged, ManualRequestDecided, FollowUpDecided, CaptureChanged, Resumed": {
        "gauge captures_running": "Captures in progress.",
    },
    "CaptureChanged": {
        "counter captures{profiler, state}": "Ended captures, by profiler and end state; exemplars name them.",
        "counter captures_reproduced{answer}": "Captures stored, by whether the fault was there while they were made.",
        "counter captures_stored_bytes": "Size of all stored captures.",
        "counter capture_rank_seconds{profiler, phase}": "Time that captures took on the captured ranks, by phase.",
        "counter rank_captures{rank}": "Captures of a rank that have ended.",
    },
    "CauseFound": {"counter causes{code, sure}": "Causes that captures found, by code, and whether sure."},
    "CostMeasured": {
        "counter capture_cost_seconds": "How much longer captures made the job's steps.",
        "counter captures_unmeasured": "Captures of unknown cost: too few steps before them are known.",
    },
    "RemedyChanged": {
        "counter remedies{remedy, state, reason}": "Remedies against stragglers, by the state they reached and why.",
        "gauge remedy_active{remedy}": "Groups of ranks on which the remedy is on trial or kept.",
        "gauge remedy_saving_seconds{remedy}": "Saving per step of a kept remedy, as measured on trial, else 0.",
    },
    "JobObserved": {
        "gauge update_timestamp_seconds": "When sftriage last checked the job, Unix time.",
        "counter straggler_cost_rank_seconds{suspect, stage}": "Time that a suspect has cost since the run began, "
        "summed over all ranks; divided by 3600, GPU-hours of ranks on GPUs.",
        "gauge capture_budget_seconds": "How much time captures may have cost the job by now.",
        "gauge capture_budget_used_seconds": "How much of the capture budget is used.",
        "counter telemetry_steps": "Steps read, over all ranks.",
        "counter telemetry_missed_steps": "Steps that were overwritten before they were read.",
        "counter telemetry_torn_steps": "Steps that were damaged when they were read.",
        "gauge telemetry_unreadable_ranks": "Ranks whose records cannot be read.",
        "gauge telemetry_lag_steps": "Steps from the last judged one to the one in progress.",
        "gauge ranks": "World size of the job.",
        "gauge ranks_alive": "Ranks on record whose process is running.",
        "gauge rank_step{rank}": "The step that a rank is in.",
        "gauge rank_alive{rank}": "1 while a rank's process is running, NaN where that is not known.",
    },
    "DiskFailed, DiskRecovered": {"gauge disk_outage_active": "1 while the run directory cannot be written, else 0."},
    "DiskRecovered": {"counter disk_lost{kind}": "Records lost while the run directory could not be written."},
}
"""All metrics, by the events that move them: kind, name without ``sftriage_``, labels, and help.

Those in the first group are set when the run starts and ends. `STEP_BUCKETS_S` are the histogram's buckets. Metrics of
single ranks, ``rank_...``, are optional.
"""
_KINDS: Mapping[str, Any] = {
    "counter": Counter,
    "gauge": Gauge,
    "histogram": partial(Histogram, buckets=STEP_BUCKETS_S),
}


class Metrics(Sink):
    """Moves the metrics of a run that began at ``started_s`` (since the epoch). All series have the label ``job_name``.

    ``times`` reads where the run's time went, in seconds by part. The metrics are in the ``registry``, which
    ``expositions`` may read from other threads.
    """

    name = "metrics"

    def __init__(
        self,
        job: str,
        run: str,
        started_s: float,
        expositions: Sequence[Exposition] = (),
        per_rank: bool = False,
        registry: CollectorRegistry | None = None,
        times: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._times, self._times_due_s = times, float("-inf")
        self._lock, self._expositions, self._per_rank = threading.Lock(), expositions, per_rank
        self._stages: set[str] = {OTHER}
        self._tally = StepTally()
        self._window: events.WindowObserved | None = None
        self._received = ReadCounts()
        self._profilers: dict[str, str] = {}
        self._lost_rank_s: dict[tuple[str, str], float] = {}
        self._parts: set[str] = set()
        self._suspect_labels: set[tuple[str, str]] = set()
        self._regression: tuple[int, str, int] | None = None
        self._remedies: dict[str, events.RemedyChanged] = {}
        inner = CollectorRegistry()
        self._families: dict[str, Any] = {}
        for key, about in chain.from_iterable(group.items() for group in METRICS.values()):
            kind, name, *labels = re.findall(r"\w+", key)
            if per_rank or not name.startswith("rank_"):
                self._families[name] = _KINDS[kind](f"sftriage_{name}", about, labels, registry=inner)
        self._metric("build_info", __version__).set(1)
        self._metric("run_info", run).set(1)
        self._metric("run_active").set(1)
        for name in ("run_start_timestamp_seconds", "update_timestamp_seconds"):
            self._metric(name).set(started_s)
        # Prometheus sees the first increase only if the series was 0 before.
        for label in get_args(Label):
            self._metric("verdicts", label)
            self._metric("verdict", label)
        for scope in ("all", "some"):
            self._metric("regressions", scope)
        for profiler in get_args(Profiler):
            for state in sorted(ENDED):
                self._metric("captures", profiler, state)
        self.registry = registry or CollectorRegistry()
        self.registry.register(Exposed(inner, {"job_name": job}, self._lock))

    def _metric(self, name: str, *labels: str) -> Any:
        return self._families[name].labels(*labels) if labels else self._families[name]

    def start(self) -> None:
        for exposition in self._expositions:
            exposition.start()

    def take(self, event: events.Event | events.Observation) -> None:
        if isinstance(event, events.WindowJudged) and time.monotonic() >= self._times_due_s:
            self._take_times()
        # A scrape sees all changes of an event, or none.
        with self._lock:
            match event:
                case events.WindowObserved(learnt=True):
                    # An earlier process has counted it.
                    self._tally.take(event.window)
                case events.WindowObserved():
                    self._window = event
                case events.WindowJudged():
                    self._judged(event)
                case events.ManualRequestDecided() | events.FollowUpDecided():
                    self._decided(event.decision)
                case events.CaptureChanged() if event.result.state in ENDED:
                    self._captured(event)
                case events.CauseFound():
                    self._metric("causes", event.code, str(event.sure).lower()).inc()
                case events.RemedyChanged():
                    self._remedied(event)
                case events.CostMeasured(cost_s=None):
                    self._metric("captures_unmeasured").inc()
                case events.CostMeasured(cost_s=float(cost_s)):
                    self._metric("capture_cost_seconds").inc(cost_s)
                case events.JobObserved():
                    self._observed(event)
                case events.Resumed():
                    self._requested(event.requests)
                case events.DiskFailed():
                    self._metric("disk_outage_active").set(1)
                case events.DiskRecovered():
                    self._metric("disk_outage_active").set(not event.over)
                    for kind, number in event.lost.items():
                        self._metric("disk_lost", kind).inc(number)

    def close(self) -> None:
        self._take_times()
        with self._lock:
            self._metric("run_active").set(0)
            self._metric("stalled").set(0)
        for exposition in self._expositions:
            exposition.close()

    def _take_times(self) -> None:
        """Read where the time went; outside the lock, since it reads files."""
        found = self._times()
        with self._lock:
            self._parts.update(found)
            for part in self._parts:
                self._metric("time_seconds", part).set(found.get(part, 0.0))
        self._times_due_s = time.monotonic() + WRITE_EVERY_S

    def _judged(self, judged: events.WindowJudged) -> None:
        verdict, decision = judged.verdict, judged.decision
        self._metric("stalled").set(verdict.label == "stalled")
        self._metric("verdicts", verdict.label).inc()
        for label in get_args(Label):
            self._metric("verdict", label).set(label == verdict.label)
        self._suspected(verdict.named)
        self._linked(verdict.link)
        if verdict.label != "stalled":
            self._compared(verdict.regression, verdict.attempt)
        self._decided(decision)
        if (observed := window_of(self._window, verdict)) is None:
            return
        self._count(observed.window, verdict.clock, decision.requests[0].capture_id if decision.requests else None)
        # A missing vector is NaN in every stage.
        self._metric("coverage_ratio").set(np.isfinite(observed.window.durations_NRS[:, :, 0]).mean())
        self._metric("last_judged_step").set(verdict.last_step)
        if (last := observed.spans.get(verdict.last_step)) is not None:
            self._metric("telemetry_lag_seconds").set(decision.time_s - last.end_ns / 1e9)

    def _suspected(self, suspect: Suspect | None) -> None:
        of_ranks = ["rank_suspect_gain_seconds"] if self._per_rank else []
        for name in ("suspect_gain_seconds", "suspect_share_ratio", *of_ranks):
            self._metric(name).clear()
        if suspect is None:
            return
        stage = self._stage_label(suspect.stage)
        self._metric("suspect_verdicts", stage, suspect.scope).inc()
        self._metric("suspect_gain_seconds", stage, suspect.scope).set(suspect.gain_s)
        self._metric("suspect_share_ratio", stage, suspect.scope).set(suspect.share)
        for rank in suspect.ranks if self._per_rank else ():
            self._metric("rank_suspect_verdicts", str(rank), stage).inc()
            self._metric("rank_suspect_gain_seconds", str(rank), stage).set(suspect.gain_s)

    def _linked(self, link: SlowLink | None) -> None:
        for name in ("link_bits_per_second", "link_cost_seconds"):
            self._metric(name).clear()
        if link is not None:
            self._metric("link_bits_per_second", link.host, link.peer).set(link.bits_per_s)
            self._metric("link_cost_seconds", link.host, link.peer).set(link.cost_s)

    def _compared(self, found: Regression | None, attempt: int) -> None:
        self._metric("regression_ratio").clear()
        if found is None or found.until_step is not None:
            return
        self._metric("regression_ratio", found.scope).set(found.fraction)
        begun = (attempt, found.kind, found.since_step)
        if begun != self._regression:
            self._metric("regressions", found.scope).inc()
        self._regression = begun

    def _count(self, window: Window, clock: Clock, capture_id: str | None) -> None:
        if (new := self._tally.take(window, clock)) is None:
            return
        all_NS, complete_N = new
        advances_NS = all_NS[complete_N]
        self._metric("steps").inc(len(advances_NS))
        self._metric("incomplete_steps").inc(len(all_NS) - len(advances_NS))
        for stage, advance_s in zip(window.schema.stages, advances_NS.sum(axis=0).tolist(), strict=True):
            # (rounding may make the advance of a stage that never led negative)
            self._metric("exposed_seconds", self._stage_label(stage)).inc(max(0.0, advance_s))
        for work, name in zip(get_args(InterpreterCode), OF_INTERPRETER, strict=True):
            spent_NR = window.counted(name)
            if spent_NR is not None:
                spent_R = np.nan_to_num(spent_NR[-len(all_NS) :]).sum(axis=0)
                self._metric("interpreter_seconds", work).inc(float(spent_R.sum()))
                for rank in np.flatnonzero(spent_R).tolist() if self._per_rank else ():
                    self._metric("rank_interpreter_seconds", str(rank), work).inc(float(spent_R[rank]))
        exposed_N = advances_NS.sum(axis=1).tolist()
        slowest = exposed_N.index(max(exposed_N)) if exposed_N and capture_id is not None else None
        for n, exposed_s in enumerate(exposed_N):
            exemplar = {"capture_id": str(capture_id)} if n == slowest else None
            self._metric("step_exposed_seconds").observe(exposed_s, exemplar)

    def _decided(self, decision: Decision) -> None:
        reason: str = decision.reason
        if reason in ("undecided", "standstill"):
            # The first reason of a verdict that names no rank.
            reason = next(iter(reasons_of(decision)), "other")
        self._metric("decisions", decision.outcome, reason).inc()
        self._requested(decision.requests)

    def _requested(self, requests: Iterable[CaptureRequest]) -> None:
        self._profilers |= {request.capture_id: request.profiler for request in requests}
        self._metric("captures_running").set(len(self._profilers))

    def _captured(self, ended: events.CaptureChanged) -> None:
        result = ended.result
        profiler = self._profilers.pop(result.capture_id, _UNKNOWN)
        self._metric("captures_running").set(len(self._profilers))
        self._metric("captures", profiler, result.state).inc(exemplar={"capture_id": result.capture_id})
        for phase in sorted(_PHASES & result.timings_s.keys()):
            self._metric("capture_rank_seconds", profiler, phase).inc(max(0.0, result.timings_s[phase]))
        if self._per_rank:
            self._metric("rank_captures", str(result.rank)).inc()
        if result.state == "stored":
            self._metric("captures_stored_bytes").inc(ended.stored_bytes)
            self._metric("captures_reproduced", ended.reproduced.answer if ended.reproduced else _UNKNOWN).inc()

    def _remedied(self, changed: events.RemedyChanged) -> None:
        self._metric("remedies", changed.remedy, changed.state, changed.reason).inc()
        self._remedies[changed.switch] = changed
        same = [other for other in self._remedies.values() if other.remedy == changed.remedy]
        self._metric("remedy_active", changed.remedy).set(sum(other.state in ("trying", "kept") for other in same))
        saves_s = sum(other.numbers.get("saves_s", 0.0) for other in same if other.state == "kept")
        self._metric("remedy_saving_seconds", changed.remedy).set(saves_s)

    def _observed(self, event: events.JobObserved) -> None:
        before, self._received = self._received, event.received
        self._metric("telemetry_steps").inc(max(0, event.received.steps - before.steps))
        self._metric("telemetry_missed_steps").inc(max(0, event.received.missed - before.missed))
        self._metric("telemetry_torn_steps").inc(max(0, event.received.torn - before.torn))
        self._metric("telemetry_unreadable_ranks").set(len(event.received.problems))
        self._metric("update_timestamp_seconds").set(event.time_s)
        self._metric("capture_budget_used_seconds").set(event.spent_s)
        self._metric("capture_budget_seconds").set(event.budget_s)
        for suspect, rank_s in event.lost_rank_s.items():
            label = _bounded(self._suspect_labels, MAX_SUSPECT_LABELS, suspect, _OTHERS)
            before_s = self._lost_rank_s.get(suspect, 0.0)
            self._metric("straggler_cost_rank_seconds", *label).inc(max(0.0, rank_s - before_s))
            self._lost_rank_s[suspect] = max(before_s, rank_s)
        if (job := event.job) is None:
            return
        self._metric("ranks").set(job.world_size)
        self._metric("ranks_alive").set(int((job.alive_R == 1).sum()))
        last_judged = self._tally.last_step(job.attempt)
        newest = int(job.step_R.max(initial=0))
        self._metric("telemetry_lag_steps").set(max(0, newest - (last_judged if last_judged is not None else -1)))
        for rank in job.ranks if self._per_rank else ():
            self._metric("rank_step", str(rank.rank)).set(rank.step)
            self._metric("rank_alive", str(rank.rank)).set(math.nan if rank.alive is None else rank.alive)

    def _stage_label(self, stage: str | None) -> str:
        return ALL_LOCAL if stage is None else _bounded(self._stages, MAX_STAGE_LABELS, stage, OTHER)


def _bounded(known: set[LabelT], limit: int, label: LabelT, other: LabelT) -> LabelT:
    """``label`` if it is among the first ``limit`` labels, else ``other``."""
    if len(known) < limit:
        known.add(label)
    return label if label in known else other
