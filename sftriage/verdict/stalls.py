"""Stalls: a step in progress that does not end, from what each rank is doing now and since when (docs/verdicts.md).

A job is still while no rank enters or leaves a stage or a step; that time, not the length of the step, is compared with
the thresholds. What is normal for a job (the length of its steps, how long it may be still) is learned from the ranks'
status and from windows. The controller calls `observe` about once a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sftriage.model.verdicts import Suspect, Verdict
from sftriage.model.windows import OTHER, JobStatus, RankStatus, Window
from sftriage.verdict.accounting import NO_RANKS, BoolArray, RankArray


@dataclass(frozen=True, slots=True, eq=False)
class JobSince:
    """A `JobStatus` with ages converted to times on the observer's clock, in nanoseconds."""

    status: JobStatus
    since_ns_R: NDArray[np.int64]
    step_since_ns_R: NDArray[np.int64]

    def begun(self, at: int) -> tuple[int, int]:
        """How many steps a rank has begun, and when it began the last of them."""
        in_step = bool(self.status.stage_R[at] >= 0)
        return int(self.status.published_R[at]) + in_step, int(self.step_since_ns_R[at])


SAME_NS = 50_000_000
"""Ages take time to travel: two times within this of each other are the same event."""


def on_clock(job: JobStatus, before: JobSince | None, now_ns: int) -> JobSince:
    """What the ranks are doing, on the observer's clock; times known from ``before`` are kept."""
    since = JobSince(job, now_ns - job.stage_age_ns_R, now_ns - job.step_age_ns_R)
    if before is None or (before.status.attempt, before.status.schema) != (job.attempt, job.schema):
        return since
    earlier = before.status
    _, here_K, there_K = np.intersect1d(job.rank_R, earlier.rank_R, assume_unique=True, return_indices=True)
    same_K = job.stage_R[here_K] == earlier.stage_R[there_K]
    same_K &= job.step_R[here_K] == earlier.step_R[there_K]
    same_K &= job.published_R[here_K] == earlier.published_R[there_K]
    here_K, there_K = here_K[same_K], there_K[same_K]
    for now_R, then_R in ((since.since_ns_R, before.since_ns_R), (since.step_since_ns_R, before.step_since_ns_R)):
        then_K = then_R[there_K]
        now_R[here_K] = np.where(np.abs(now_R[here_K] - then_K) < SAME_NS, then_K, now_R[here_K])
    return since


NS = 1e-9
PERIODS_KEPT = 63
"""The last steps, whose median is the typical one: enough that a checkpoint among them does not count."""
PAUSES_KEPT = 256
KINDS_KEPT = 32
"""Bounds the memory of a job that keeps inventing kinds of steps."""

Wait = Literal["step", "outside", "start", "idle"]
"""Kinds of waits: for a rank in an ordinary stage or a sync stage; for one outside of these, as in an evaluation or a
checkpoint; for the job's first steps; or idle, with no rank in a step."""


@dataclass(frozen=True, slots=True)
class StepPause:
    """A time in which no rank moved, and which ended by itself."""

    wait: Wait
    seconds: float
    ended_ns: int


@dataclass(frozen=True, slots=True)
class Pace:
    """The normal times of a job.

    Attributes:
        periods_s: from the start of a step to that of the next; the latest ones, without the first step.
        pauses: those long enough to matter.
        kinds_s: the longest step of each kind but the ordinary one.
        unused: stages that most steps do not enter, such as one for checkpoints.
    """

    periods_s: tuple[float, ...] = ()
    pauses: tuple[StepPause, ...] = ()
    kinds_s: Mapping[str, float] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()

    @property
    def typical_s(self) -> float:
        """The typical step; 0 if none is known."""
        return median_low(self.periods_s) if self.periods_s else 0.0

    def longest_s(self, wait: Wait, since_ns: int) -> float:
        """The longest pause of a kind since ``since_ns``, or the longest step with a kind if that is more."""
        pauses = (pause.seconds for pause in self.pauses if pause.wait == wait and pause.ended_ns >= since_ns)
        return max((*pauses, *self.kinds_s.values()), default=0.0)

    def with_steps(self, before: tuple[int, int], after: tuple[int, int]) -> Pace:
        """The pace with a rank's steps between two observations (`JobSince.begun`), but its first, which compiles."""
        starts, period_s = after[0] - before[0], (after[1] - before[1]) * NS
        if before[0] <= 1 or starts < 1 or period_s <= 0:
            return self
        return replace(self, periods_s=(*self.periods_s, period_s / starts)[-PERIODS_KEPT:])

    def with_pause(self, pause: StepPause, min_s: float) -> Pace:
        """The pace with a pause, unless it is under ``min_s``; those older than `MEMORY_S` are dropped."""
        if pause.seconds < min_s:
            return self
        fresh = [known for known in self.pauses if (pause.ended_ns - known.ended_ns) * NS <= MEMORY_S]
        return replace(self, pauses=(*fresh, pause)[-PAUSES_KEPT:])

    def with_window(self, window: Window) -> Pace:
        """The pace with a window: the longest step of each kind, and the stages that steps enter."""
        durations_NRS = window.durations_NRS
        if not durations_NRS.size:
            return self
        unused_S = (durations_NRS == 0.0).mean(axis=(0, 1)) > 0.5
        unused = frozenset(stage for stage, idle in zip(window.schema.stages, unused_S, strict=True) if idle)
        kinds_s = dict(self.kinds_s)
        some_noted = window.kinds is not None or window.noted_NR is not None
        for row, kind in ((n, kind) for n in range(len(durations_NRS) * some_noted) for kind in window.noted(n)):
            if kind in kinds_s or len(kinds_s) < KINDS_KEPT:
                # fmax ignores missing ranks; a step that no rank has takes no time.
                lengths_R = durations_NRS[row].sum(axis=1)
                kinds_s[kind] = float(np.fmax.reduce(lengths_R, initial=kinds_s.get(kind, 0.0)))
        return replace(self, unused=unused, kinds_s=kinds_s)


MAX_NAMED = 16
"""Maximum suspects that a verdict lists; ``missing_ranks`` is the number of all."""


OUTSIDE_FACTOR, OUTSIDE_FLOOR_S = 5.0, 300.0
"""The floor where the missing ranks are outside the ordinary stages (between steps, in ``other``, in a stage that most
steps do not enter, in a step with a kind), or where no rank waits: for evaluations and checkpoints of one rank, or a
compilation on all. It is this multiple of the policy's, up to half of NCCL's timeout."""

START_FLOOR_S, IDLE_FLOOR_S = 1800.0, 3600.0
"""The floor until a second step has shown the job's pace (large models compile and load for many minutes), and where no
rank is in a step (a full evaluation)."""

TYPICAL_FACTOR, LONGEST_FACTOR = 10.0, 3.0
"""A stall lasts at least this many times the job's typical step (steps vary by batch, but not tenfold), and this many
times its longest pause of the same kind (the next evaluation may find a busier file system)."""

MEMORY_S = 7200.0
"""How far back that goes: evaluations and checkpoints come back within two hours, and one long pause must not hide
stalls for the rest of the job."""

MAX_GAP_S = 10.0
"""After a longer gap between two observations, time starts anew: they come once a second, so the agent or the whole
machine was stopped."""


def floor_of(wait: Wait, floor_s: float) -> float:
    """How long a job may be still in a kind of wait, given the policy's limit for ordinary ones (``floor_s``)."""
    outside_s = min(OUTSIDE_FLOOR_S, OUTSIDE_FACTOR * floor_s)
    return max(floor_s, {"outside": outside_s, "start": START_FLOOR_S, "idle": IDLE_FLOOR_S}.get(wait, 0.0))


@dataclass(frozen=True, slots=True, eq=False)
class WaitState:
    """Which ranks wait for which others, at one observation.

    Attributes:
        wait: the kind of wait, which decides how long it may take.
        missing_M: the positions of the ranks that the others wait for; empty if all ranks look alike.
        reasons: why these are missing.
        waiting: how many ranks wait in a sync stage.
        step: the step in progress, or the last one.
        lasts_since_ns: when that step began, or the last one ended.
        moved_ns: when a rank last entered or left a stage or a step.
    """

    wait: Wait
    missing_M: RankArray
    reasons: tuple[str, ...]
    waiting: int
    step: int
    lasts_since_ns: int
    moved_ns: int

    def still_s(self, now_ns: int, watched_since_ns: int) -> float:
        """For how many seconds no rank has moved, counted from when the job is watched."""
        return (now_ns - max(self.moved_ns, watched_since_ns)) * NS


def stall_verdict(
    wait_state: WaitState | None,
    job: JobSince,
    pace: Pace,
    policy_floor_s: float,
    now_ns: int,
    watched_since_ns: int,
    capturing: Collection[int],
) -> Verdict | None:
    """The verdict on the step in progress, if it is a stall; time before ``watched_since_ns`` does not count.

    A profiler may delay the ranks that are ``capturing``, for as long as its time-box lasts.
    """
    if wait_state is None or np.isin(job.status.rank_R[wait_state.missing_M], list(capturing)).any():
        return None
    still_s = wait_state.still_s(now_ns, watched_since_ns)
    floor_s = floor_of(wait_state.wait, policy_floor_s)
    typical_s = pace.typical_s
    longest_s = pace.longest_s(wait_state.wait, now_ns - int(MEMORY_S / NS))
    threshold_s = max(floor_s, TYPICAL_FACTOR * typical_s, LONGEST_FACTOR * longest_s)
    if still_s < threshold_s:
        return None
    lasted_s = max(still_s, (now_ns - wait_state.lasts_since_ns) * NS)
    numbers = {
        "still_s": still_s,
        "threshold_s": threshold_s,
        "floor_s": floor_s,
        "typical_step_s": typical_s,
        "longest_still_s": longest_s,
        "waiting_ranks": float(wait_state.waiting),
        "missing_ranks": float(len(wait_state.missing_M)),
        "unseen_ranks": float(max(0, job.status.world_size - len(job.since_ns_R))),
    }
    return Verdict(
        first_step=wait_state.step,
        last_step=wait_state.step,
        label="stalled",
        reasons=wait_state.reasons,
        suspects=_suspects(wait_state, job, still_s, lasted_s),
        exposed_s=lasted_s,
        advances_s={},
        leaders={},
        numbers=numbers,
        sync=job.status.schema.sync_in_order,
        attempt=job.status.attempt,
    )


def wait_state_of(job: JobSince, pace: Pace, now_ns: int) -> WaitState | None:
    """The wait state of a job at one observation; None if the job has ended, or is about to."""
    status, since_ns_R = job.status, job.since_ns_R
    # A time in the future is damage, and is ignored.
    observed_R = since_ns_R <= now_ns
    live_R = observed_R & (status.alive_R != 0) & (status.closed_R == 0)
    stepping_R = live_R & (status.stage_R >= 0)
    if not live_R.any() or (not stepping_R.any() and live_R.sum() < observed_R.sum()):
        return None
    moved_ns = int(since_ns_R[live_R].max())
    if not stepping_R.any():
        last = int(status.step_R[live_R].max())
        return WaitState("idle", NO_RANKS, ("outside_steps",), 0, last, moved_ns, moved_ns)
    waiting_R = stepping_R & _in_stages(status, status.schema.sync)
    if waiting_R.any():
        missing_M, reasons = _missing(status, observed_R, waiting_R)
    else:
        missing_M, reasons = _furthest_behind(status, live_R), ("no_rank_waits",)
    step = int(status.step_R[stepping_R].min())
    return WaitState(
        wait=_wait(status, live_R, missing_M, reasons, pace),
        missing_M=missing_M,
        reasons=reasons,
        waiting=int(waiting_R.sum()),
        step=step,
        lasts_since_ns=int(job.step_since_ns_R[stepping_R & (status.step_R == step)].min()),
        moved_ns=moved_ns,
    )


def _in_stages(job: JobStatus, names: Collection[str]) -> BoolArray:
    return np.isin(job.stage_R, [index for index, stage in enumerate(job.schema.stages) if stage in names])


def _missing(job: JobStatus, observed_R: BoolArray, waiting_R: BoolArray) -> tuple[RankArray, tuple[str, ...]]:
    """The ranks that have not arrived where the others wait, and why these.

    No rank leaves a blocking exchange before all have entered it: a rank that is not inside has not arrived, wherever
    its stage is in the order, as stages may repeat within a step.
    """
    here_R = observed_R & (job.closed_R == 0)
    died_M = np.flatnonzero(here_R & (job.alive_R == 0))
    local_M = np.flatnonzero(here_R & (job.alive_R != 0) & ~_in_stages(job, job.schema.sync))
    if len(died_M) or len(local_M):
        reasons = (("died",) if len(died_M) else ()) + (("not_arrived",) if len(local_M) else ())
        return np.concatenate([died_M, local_M]), reasons
    behind_M = _furthest_behind(job, waiting_R)
    if len(behind_M) < waiting_R.sum():
        return behind_M, ("not_arrived",)
    # All are inside: a rank may be missing that has ended for good, or that never recorded anything.
    left_M = np.flatnonzero(observed_R & (job.closed_R != 0))
    if len(left_M):
        return left_M, ("left_early",)
    return NO_RANKS, ("in_sync", "unseen_ranks") if observed_R.sum() < job.world_size else ("in_sync",)


def _furthest_behind(job: JobStatus, some_R: BoolArray) -> RankArray:
    """The ranks furthest behind, by step and then by stage; between two steps counts as before the next one."""
    step_R = job.step_R + (job.stage_R < 0)
    some_R = some_R & (step_R == step_R[some_R].min())
    return np.flatnonzero(some_R & (job.stage_R == job.stage_R[some_R].min()))


def _wait(job: JobStatus, live_R: BoolArray, missing_M: RankArray, reasons: tuple[str, ...], pace: Pace) -> Wait:
    if "died" in reasons or reasons == ("left_early",):
        return "step"  # a rank that is dead or has stopped recording will not arrive, not even in a first step
    if not pace.periods_s or (job.published_R[live_R] == 0).any():
        return "start"
    missing = job.only(missing_M)
    between_M = missing.stage_R < 0
    if reasons == ("no_rank_waits",):
        return "idle" if between_M.any() else "outside"
    outside_M = (missing.special_R != 0) | between_M | _in_stages(missing, {OTHER, *pace.unused})
    return "outside" if outside_M.any() else "step"


def _suspects(wait_state: WaitState, job: JobSince, still_s: float, lasted_s: float) -> tuple[Suspect, ...]:
    """The missing ranks as suspects: all ranks, whole hosts, or single ranks; dead ones first, then the stillest."""

    def suspect(ranks: Sequence[RankStatus], host: str | None = None) -> Suspect:
        stages = {rank.stage or OTHER for rank in ranks}
        alone = len(ranks) == 1 and host is None
        return Suspect(
            scope="host" if host is not None else "rank" if alone else "all",
            ranks=tuple(sorted(rank.rank for rank in ranks)),
            stage=stages.pop() if len(stages) == 1 else None,
            gain_s=still_s,
            share=min(1.0, still_s / lasted_s) if lasted_s else 1.0,
            persistence=1.0,
            rank=ranks[0].rank if alone else None,
            host=host,
            on_host=ranks[0].host or None if alone and len(size) > 1 else None,
            onset_step=wait_state.step,
        )

    size = Counter(job.status.hosts[host] for host in job.status.host_R.tolist())
    missing = job.status.only(wait_state.missing_M).ranks
    if len(missing) == len(job.since_ns_R) > 1:
        return (suspect(missing),)
    since_ns_M = job.since_ns_R[wait_state.missing_M].tolist()
    stillest = zip(missing, since_ns_M, strict=True)
    of_host: dict[str, list[RankStatus]] = {}
    for rank, _ in sorted(stillest, key=lambda both: (both[0].alive is not False, both[1], both[0].rank)):
        of_host.setdefault(rank.host, []).append(rank)
    suspects: list[Suspect] = []
    for host, ranks in of_host.items():
        whole = host and 1 < len(ranks) == size[host]
        suspects += [suspect(ranks, host)] if whole else [suspect([rank]) for rank in ranks]
    return tuple(suspects[:MAX_NAMED])


@dataclass(frozen=True, slots=True)
class Watch:
    """The state between two observations of a job.

    Attributes:
        pace: what is normal for the job.
        job, wait_state: the last observation, at ``observed_ns``.
        since_ns: since when there has been no gap between two observations.
        reported: the stall that was last reported, at ``reported_ns``, while it lasts, and its kind of wait.
    """

    pace: Pace = Pace()  # frozen
    job: JobSince | None = None
    wait_state: WaitState | None = None
    observed_ns: int = 0
    since_ns: int = 0
    reported: tuple[Verdict, Wait] | None = None
    reported_ns: int = 0

    def with_window(self, window: Window) -> Watch:
        if self.job is not None and self.job.status.attempt != window.attempt:
            return self
        return replace(self, pace=self.pace.with_window(window))


def observe(
    job: JobSince, watch: Watch, floor_s: float, now_ns: int, capturing: Collection[int] = ()
) -> tuple[Verdict | None, Watch]:
    """The verdict if a stall has begun or its suspects have changed, and the state for the next observation.

    A stall lasts until any rank ends a step.
    """
    if watch.job is not None and watch.job.status.attempt != job.status.attempt:
        watch = Watch()
    if watch.job is None or (now_ns - watch.observed_ns) * NS > MAX_GAP_S:
        watch = replace(watch, since_ns=now_ns)
    pace = _learned(job, watch, floor_s)
    wait_state = wait_state_of(job, pace, now_ns)
    reported = watch.reported
    ended, before = (int(some.status.published_R.sum()) for some in (job, watch.job or job))
    if ended > before:
        reported = None
    verdict = stall_verdict(wait_state, job, pace, floor_s, now_ns, watch.since_ns, capturing)
    if verdict is None or wait_state is None or (reported is not None and _identity(verdict) == _identity(reported[0])):
        return None, Watch(pace, job, wait_state, now_ns, watch.since_ns, reported, watch.reported_ns)
    return verdict, Watch(pace, job, wait_state, now_ns, watch.since_ns, (verdict, wait_state.wait), now_ns)


STILL_S = 5.0
"""A rank whose step lasts this long, and far longer than usual, does not finish it."""


def still_ranks(job: JobStatus, typical_s: float) -> frozenset[int]:
    """The ranks that take no steps now, so that a capture of their next steps would never begin.

    ``typical_s`` is a typical step of the job; 0 if unknown.
    """
    longest_ns = max(STILL_S, TYPICAL_FACTOR * typical_s) / NS
    in_step_R = np.where(job.stage_R < 0, job.stage_age_ns_R, job.step_age_ns_R)
    return frozenset(job.rank_R[in_step_R > longest_ns].tolist())


def _learned(job: JobSince, watch: Watch, floor_s: float) -> Pace:
    """The pace with the steps that have ended since the last observation, and with a pause that is over."""
    pace, earlier = watch.pace, watch.wait_state
    if watch.job is None:
        return pace
    # Ranks keep in step, so that one of them shows the pace; a step that stalled does not count.
    known, here_K, there_K = np.intersect1d(job.status.rank_R, watch.job.status.rank_R, return_indices=True)
    if len(known) and watch.job.step_since_ns_R[there_K[0]] >= watch.reported_ns:
        pace = pace.with_steps(watch.job.begun(there_K[0]), job.begun(here_K[0]))
    if earlier is None or (job.since_ns_R <= earlier.moved_ns).all():
        return pace
    # A stall that has ended is not normal either; an evaluation that was reported as one is.
    if watch.reported is not None and watch.reported[1] == "step":
        return pace
    pause = StepPause(earlier.wait, earlier.still_s(watch.observed_ns, watch.since_ns), watch.observed_ns)
    return pace.with_pause(pause, floor_of(earlier.wait, floor_s) / LONGEST_FACTOR)


def _identity(verdict: Verdict) -> tuple[object, ...]:
    return verdict.reasons, tuple((suspect.scope, suspect.ranks, suspect.stage) for suspect in verdict.suspects)
