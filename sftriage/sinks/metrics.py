"""What a controller sees, as Prometheus metrics: judged windows, decisions, captures, what they cost, telemetry.

Nothing here listens or writes: `Metrics.registry` is what an exposition of prometheus-client takes.
No metric has a rank as a label unless that was asked for, and stages beyond the first `MAX_STAGE_LABELS` count as
``other``: however long a run is, the number of series is bounded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sftriage.controller.controller import Judged
from sftriage.controller.costs import Cost
from sftriage.records import (
    OTHER,
    CaptureRequest,
    CaptureResult,
    CaptureState,
    Decision,
    JobStatus,
    Label,
    Profiler,
    Suspect,
    Window,
)
from sftriage.sinks.exposition import Exposed
from sftriage.sinks.rank_metrics import PerRank
from sftriage.sinks.reason_words import reason_word
from sftriage.sinks.tally import Counted, StepTally
from sftriage.traces.manifest import Manifest

MAX_STAGE_LABELS = 64
"""Stages that get a series of their own: a step has 32 at most, and a job that starts again may have others."""

ALL_LOCAL = "(all local)"
"""The stage of a suspect that is slow in all of its local stages alike; no stage can be called so."""

STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)

_UNKNOWN = "unknown"
_PHASES = frozenset({"probe", "start", "run", "stop", "export"})


@dataclass(frozen=True, slots=True)
class Received:
    """What has come in from the ranks since the run began. ``unreadable`` is how many of their rings cannot be read."""

    steps: int = 0
    missed: int = 0
    torn: int = 0
    unreadable: int = 0


class Metrics:
    """The metrics of one run. Every method may be called while another thread exposes them.

    Args:
        job: the job's name, a label of every series.
        run: the run's id.
        version: of sftriage.
        started_s: when the run began, seconds since the epoch.
        per_rank: whether there are series of single ranks too.
        max_stages: see `MAX_STAGE_LABELS`.
    """

    def __init__(
        self,
        job: str,
        run: str,
        *,
        version: str,
        started_s: float,
        per_rank: bool = False,
        max_stages: int = MAX_STAGE_LABELS,
    ) -> None:
        self._lock = threading.Lock()
        self._max_stages = max_stages
        self._stages: set[str] = {OTHER}
        self._tally = StepTally()
        self._received = Received()
        self._profilers: dict[str, str] = {}
        inner = CollectorRegistry()
        self._about(inner, run, version, started_s)
        self._about_steps(inner)
        self._about_decisions(inner)
        self._about_captures(inner)
        self._about_telemetry(inner)
        self._per_rank = PerRank(inner) if per_rank else None
        self.registry = CollectorRegistry()
        self.registry.register(Exposed(inner, {"job_name": job}, self._lock))

    def _about(self, inner: CollectorRegistry, run: str, version: str, started_s: float) -> None:
        build = Gauge("sftriage_build_info", "The version of sftriage; always 1.", ["version"], registry=inner)
        build.labels(version).set(1)
        Gauge("sftriage_run_info", "The run's id; always 1.", ["run"], registry=inner).labels(run).set(1)
        self._running = Gauge("sftriage_run_active", "1 while the run goes on, 0 once it has ended.", registry=inner)
        self._running.set(1)
        started = Gauge("sftriage_run_start_timestamp_seconds", "When the run began, Unix time.", registry=inner)
        started.set(started_s)
        self._updated = Gauge(
            "sftriage_update_timestamp_seconds", "When sftriage last looked at the job, Unix time.", registry=inner
        )
        self._updated.set(started_s)

    def _about_steps(self, inner: CollectorRegistry) -> None:
        self._exposed = Counter(
            "sftriage_exposed_seconds",
            "Exposed time of all judged steps, by the stage that advanced the frontier: over the stages it is exactly "
            "the time that the steps took.",
            ["stage"],
            registry=inner,
        )
        self._steps = Counter("sftriage_steps", "Steps whose exposed time is known, each counted once.", registry=inner)
        self._incomplete = Counter(
            "sftriage_incomplete_steps",
            "Steps that some rank's record is missing of; their exposed time is not known.",
            registry=inner,
        )
        self._step_time = Histogram(
            "sftriage_step_exposed_seconds",
            "Exposed time of single steps. An exemplar names the capture that a slow step led to.",
            buckets=STEP_BUCKETS_S,
            registry=inner,
        )
        self._last_step = Gauge("sftriage_last_judged_step", "The number of the last step judged.", registry=inner)
        self._coverage = Gauge(
            "sftriage_coverage_ratio", "Fraction of the last window's steps and ranks that was there.", registry=inner
        )

    def _about_decisions(self, inner: CollectorRegistry) -> None:
        self._verdicts = Counter("sftriage_verdicts", "Verdicts, by their label.", ["label"], registry=inner)
        self._verdict = Gauge(
            "sftriage_verdict", "1 for the label of the newest verdict, 0 for the others.", ["label"], registry=inner
        )
        for label in get_args(Label):
            self._verdicts.labels(label)
            self._verdict.labels(label)
        self._stalled = Gauge("sftriage_stalled", "1 while the step in progress does not end.", registry=inner)
        self._suspects = Counter(
            "sftriage_suspect_verdicts",
            "Verdicts that name a suspect, by its stage and by who it is.",
            ["stage", "scope"],
            registry=inner,
        )
        self._gain = Gauge(
            "sftriage_suspect_gain_seconds",
            "What mending the newest verdict's suspect would save in each step, or in a stall how long it has been "
            "waited for. Absent while nobody is suspected.",
            ["stage", "scope"],
            registry=inner,
        )
        self._share = Gauge(
            "sftriage_suspect_share_ratio",
            "The same as a fraction of the step's exposed time.",
            ["stage", "scope"],
            registry=inner,
        )
        self._decisions = Counter(
            "sftriage_decisions", "Decisions, by their outcome and why.", ["outcome", "reason"], registry=inner
        )

    def _about_captures(self, inner: CollectorRegistry) -> None:
        self._captures = Counter(
            "sftriage_captures",
            "Captures that have ended, by profiler and how. An exemplar names the capture.",
            ["profiler", "state"],
            registry=inner,
        )
        # The first capture of a kind is an increase too, which Prometheus sees only from a known 0 on.
        for profiler in get_args(Profiler):
            for state in get_args(CaptureState):
                self._captures.labels(profiler, state)
        self._capturing = Gauge("sftriage_captures_running", "Captures that are under way.", registry=inner)
        self._reproduced = Counter(
            "sftriage_captures_reproduced",
            "Captures stored, by whether the fault was still there while they were made.",
            ["answer"],
            registry=inner,
        )
        self._stored = Counter("sftriage_captures_stored_bytes", "Size of all stored captures.", registry=inner)
        self._rank_cost = Counter(
            "sftriage_capture_rank_seconds",
            "Time that captures took on the ranks that were captured, by what was done in it.",
            ["profiler", "phase"],
            registry=inner,
        )
        self._group_cost = Counter(
            "sftriage_capture_cost_seconds",
            "By how much captures made the job's steps longer, measured against the steps before.",
            registry=inner,
        )
        self._unknown_cost = Counter(
            "sftriage_captures_unmeasured",
            "Captures whose cost to the job cannot be told: too few steps before them are known.",
            registry=inner,
        )
        self._allowed = Gauge(
            "sftriage_capture_budget_seconds", "What captures may have cost the job by now.", registry=inner
        )
        self._spent = Gauge(
            "sftriage_capture_budget_used_seconds", "What of the budget captures have used.", registry=inner
        )

    def _about_telemetry(self, inner: CollectorRegistry) -> None:
        self._read = Counter("sftriage_telemetry_steps", "Steps read, over all ranks.", registry=inner)
        self._missed = Counter(
            "sftriage_telemetry_missed_steps", "Steps that were overwritten before they were read.", registry=inner
        )
        self._torn = Counter(
            "sftriage_telemetry_torn_steps", "Steps that were damaged when they were read.", registry=inner
        )
        self._unreadable = Gauge(
            "sftriage_telemetry_unreadable_ranks", "Ranks whose records cannot be read.", registry=inner
        )
        self._lag = Gauge(
            "sftriage_telemetry_lag_seconds",
            "How long the last step of the newest window had ended when it was judged.",
            registry=inner,
        )
        self._lag_steps = Gauge(
            "sftriage_telemetry_lag_steps",
            "Steps between the last one judged and the one in progress; those of a window that fills count.",
            registry=inner,
        )
        self._ranks = Gauge("sftriage_ranks", "Ranks that the job says it has.", registry=inner)
        self._ranks_alive = Gauge("sftriage_ranks_alive", "Ranks on record whose process is there.", registry=inner)

    def learnt(self, window: Window) -> None:
        """A window has come that an earlier process has counted."""
        with self._lock:
            self._tally.take(window)

    def judged(self, judged: Judged, window: Window | None = None, lag_s: float | None = None) -> None:
        """A window has been decided, or the job stalls.

        Args:
            judged: the verdict and the decision.
            window: the window; a stall has none.
            lag_s: how long its last step had ended, if that is known.
        """
        with self._lock:
            verdict = judged.verdict
            stalled = verdict.label == "stalled"
            self._stalled.set(stalled)
            self._verdicts.labels(verdict.label).inc()
            for label in get_args(Label):
                self._verdict.labels(label).set(label == verdict.label)
            self._suspected(verdict.suspects if verdict.label in ("suspect", "stalled") else ())
            self._decided(judged.decision, verdict.reasons)
            self._charged(judged.costs)
            if window is None:
                return
            captures = [request.capture_id for request in judged.decision.requests]
            self._count(self._tally.take(window, verdict.clock), captures[0] if captures else None)
            self._coverage.set(_coverage(window))
            self._last_step.set(window.last_step)
            if lag_s is not None:
                self._lag.set(lag_s)

    def asked(self, decision: Decision) -> None:
        """It has been decided about a capture that a person asked for, or that another capture led to."""
        with self._lock:
            self._decided(decision)

    def requested(self, requests: Iterable[CaptureRequest]) -> None:
        """Captures are under way, whoever decided about them."""
        with self._lock:
            self._begun(requests)

    def captured(self, result: CaptureResult, manifest: Manifest | None = None) -> None:
        """A capture has ended; with a manifest, it is in the store."""
        with self._lock:
            profiler = self._profilers.pop(result.capture_id, manifest.capture.profiler if manifest else _UNKNOWN)
            self._capturing.set(len(self._profilers))
            self._captures.labels(profiler, result.state).inc(exemplar={"capture_id": result.capture_id})
            for phase in sorted(_PHASES & result.timings_s.keys()):
                self._rank_cost.labels(profiler, phase).inc(max(0.0, result.timings_s[phase]))
            if self._per_rank is not None:
                self._per_rank.captured(result)
            if manifest is not None:
                self._stored.inc(sum(one.size_bytes for one in manifest.artefacts))
                self._reproduced.labels(manifest.reproduced.answer if manifest.reproduced else _UNKNOWN).inc()

    def looked(
        self, received: Received, job: JobStatus | None, now_s: float, budget: tuple[float, float] | None = None
    ) -> None:
        """The job has been looked at.

        Args:
            received: what has come in by now.
            job: what the ranks are doing; None before there are any.
            now_s: seconds since the epoch.
            budget: what captures have used of their budget, and what it is by now, in seconds.
        """
        with self._lock:
            before, self._received = self._received, received
            self._read.inc(max(0, received.steps - before.steps))
            self._missed.inc(max(0, received.missed - before.missed))
            self._torn.inc(max(0, received.torn - before.torn))
            self._unreadable.set(received.unreadable)
            self._updated.set(now_s)
            if budget is not None:
                self._spent.set(budget[0])
                self._allowed.set(budget[1])
            if job is None:
                return
            self._ranks.set(job.world_size)
            self._ranks_alive.set(sum(one.alive for one in job.ranks))
            last_judged = self._tally.last_step(job.attempt)
            newest = max((one.step for one in job.ranks), default=0)
            self._lag_steps.set(max(0, newest - (last_judged if last_judged is not None else -1)))
            if self._per_rank is not None:
                self._per_rank.looked(job)

    def ended(self, now_s: float) -> None:
        """The run is over."""
        with self._lock:
            self._running.set(0)
            self._stalled.set(0)
            self._updated.set(now_s)

    def _decided(self, decision: Decision, reasons: tuple[str, ...] = ()) -> None:
        self._decisions.labels(decision.outcome, reason_word(decision, reasons)).inc()
        self._begun(decision.requests)

    def _begun(self, requests: Iterable[CaptureRequest]) -> None:
        self._profilers |= {request.capture_id: request.profiler for request in requests}
        self._capturing.set(len(self._profilers))

    def _charged(self, costs: Iterable[Cost]) -> None:
        for one in costs:
            if one.cost_s is None:
                self._unknown_cost.inc()
            else:
                self._group_cost.inc(max(0.0, one.cost_s))

    def _suspected(self, suspects: tuple[Suspect, ...]) -> None:
        """The first suspect is the one that was found; the others are who came after it."""
        self._gain.clear()
        self._share.clear()
        if suspects:
            first = suspects[0]
            where = (self._label_of(first.stage), first.scope)
            self._suspects.labels(*where).inc()
            self._gain.labels(*where).set(first.gain_s)
            self._share.labels(*where).set(first.share)
        if self._per_rank is not None:
            self._per_rank.suspected(suspects[:1], self._label_of)

    def _label_of(self, stage: str | None) -> str:
        """A stage's name as a label."""
        if stage is None:
            return ALL_LOCAL
        if stage not in self._stages:
            if len(self._stages) >= self._max_stages:
                return OTHER
            self._stages.add(stage)
        return stage

    def _count(self, counted: Counted | None, capture_id: str | None) -> None:
        if counted is None:
            return
        advances_NS = counted.advances_NS[counted.complete_N]
        self._steps.inc(len(advances_NS))
        self._incomplete.inc(len(counted.advances_NS) - len(advances_NS))
        for stage, advance_s in zip(counted.schema.stages, advances_NS.sum(axis=0).tolist(), strict=True):
            # (rounding may leave less than nothing of a stage that never led)
            self._exposed.labels(self._label_of(stage)).inc(max(0.0, advance_s))
        exposed_N = advances_NS.sum(axis=1).tolist()
        slowest = exposed_N.index(max(exposed_N)) if exposed_N and capture_id is not None else None
        for n, exposed_s in enumerate(exposed_N):
            self._step_time.observe(exposed_s, {"capture_id": str(capture_id)} if n == slowest else None)


def _coverage(window: Window) -> float:
    """The fraction of a window's vectors that are there."""
    there_NR = np.isfinite(window.durations_NRS[:, :, 0])
    return float(there_NR.mean()) if there_NR.size else 0.0
