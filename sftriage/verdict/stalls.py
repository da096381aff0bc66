"""Stalls: a step in progress that does not end, from what each rank is doing now and since when (docs/verdicts.md).

A job is still while no rank enters or leaves a stage or a step; that time, not the length of the step, is compared with
the thresholds. What is normal for a job (the length of its steps, how long it may be still) is learned from the ranks'
status and from windows. The controller calls `observe` about once a second.

What the ranks do outside stages is not known. There, a job may be still for long, unless the evidence of all ranks
proves a hang (`sftriage.verdict.proof`): `observe` says when to gather it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from sftriage.model.hangs import HangEvidence
from sftriage.model.verdicts import Suspect, Verdict
from sftriage.model.windows import OTHER, JobStatus, RankStatus
from sftriage.verdict.accounting import NO_RANKS, BoolArray, RankArray
from sftriage.verdict.proof import PauseSnapshot, before_timeout_s, snapshot_of


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

Wait = Literal["step", "local", "early", "outside", "start", "idle"]
"""Kinds of waits: for ranks in ordinary stages or in a sync stage; local, with all ranks in ordinary stages and none in
a sync stage; early, which is one of these before any pace is known; for a rank that may evaluate or save; for the job's
first two steps; or idle, with a rank between steps."""


@dataclass(frozen=True, slots=True)
class StepPause:
    """A time in which no rank moved, and which ended by itself, perhaps after it had been ``reported`` as a stall."""

    wait: Wait
    seconds: float
    ended_ns: int
    reported: bool = False

    @property
    def allows_s(self) -> float:
        """How long the next pause of the same kind may be."""
        if self.wait not in ("step", "local"):
            return OTHER_FACTOR * self.seconds
        return min(self.seconds, RECOVERED_S) if self.reported else STEADY_FACTOR * self.seconds

    def counts_for(self, wait: Wait) -> bool:
        # (the first steps compile: they show how long a later compilation may take)
        return self.wait == wait or (self.wait == "start" and wait in ("local", "outside"))


@dataclass(frozen=True, slots=True)
class Pace:
    """The normal times of a job.

    Attributes:
        periods_s: from the start of a step to that of the next; the latest ones, without the first step.
        pauses: those long enough to matter.
    """

    periods_s: tuple[float, ...] = ()
    pauses: tuple[StepPause, ...] = ()

    @property
    def typical_s(self) -> float:
        """The typical step; 0 if none is known."""
        return median_low(self.periods_s) if self.periods_s else 0.0

    def longest(self, now_ns: int, *waits: Wait) -> tuple[float, float]:
        """How long the pause lasted that allows the longest wait of these kinds, and what it allows, in seconds."""
        since_ns = now_ns - int(MEMORY_S / NS)
        pauses = [pause for pause in self.pauses if pause.ended_ns >= since_ns and any(map(pause.counts_for, waits))]
        longest = max(pauses, key=lambda pause: pause.allows_s, default=None)
        return (0.0, 0.0) if longest is None else (longest.seconds, longest.allows_s)

    def soonest_s(self, now_ns: int) -> float:
        """How long the job may be still at least, whatever its ranks wait for."""
        return max(FLOOR_S, STEADY_FACTOR * self.typical_s, self.longest(now_ns, "step", "local")[1])

    def with_steps(self, before: tuple[int, int], after: tuple[int, int]) -> Pace:
        """The pace with a rank's steps between two observations (`JobSince.begun`), but its first, which compiles."""
        starts, period_s = after[0] - before[0], (after[1] - before[1]) * NS
        if before[0] <= 1 or starts < 1 or period_s <= 0:
            return self
        return replace(self, periods_s=(*self.periods_s, period_s / starts)[-PERIODS_KEPT:])

    def with_pause(self, pause: StepPause) -> Pace:
        """The pace with a pause, unless it is too short to matter; without those that no longer do."""
        if pause.allows_s < FLOOR_S:
            return self
        fresh = [
            known
            for known in self.pauses
            if (pause.ended_ns - known.ended_ns) * NS <= MEMORY_S
            and (known.wait != pause.wait or known.allows_s > pause.allows_s)
        ]
        return replace(self, pauses=(*fresh, pause)[-PAUSES_KEPT:])


MAX_NAMED = 16
"""Maximum suspects that a verdict lists; ``missing_ranks`` is the number of all."""


FLOOR_S = 10.0
FLOORS_S = dict(zip(get_args(Wait), (FLOOR_S, FLOOR_S, 60.0, 300.0, 1800.0, 3600.0), strict=True))
"""How long a job may be still at least in each kind of wait, unless a hang is proved or the policy sets
``stalled_after``: the first evaluation and the first checkpoint of one rank take minutes, large models compile and load
for many, and a full evaluation on all ranks takes up to an hour."""

STEADY_FACTOR, OTHER_FACTOR = 10.0, 3.0
"""A stall lasts at least this many times the job's typical step and its longest pause in ordinary stages (they vary by
batch, but not tenfold), or its longest other pause of the kind (the next evaluation may find a busier file system)."""

RECOVERED_S = 60.0
"""A reported stall in ordinary stages that ends may be a pause that this job makes: the next is reported only once it
is longer. One that lasts longer than this has more likely been ended by hand."""

MEMORY_S = 7200.0
"""How far back that goes: evaluations and checkpoints come back within two hours, and one long pause must not hide
stalls for the rest of the job."""

WATCHDOG_S = 600.0
"""The timeout of collectives if it is unknown: NCCL's default, which is shorter than Gloo's."""
BEFORE_WATCHDOG_S = before_timeout_s(WATCHDOG_S)

MAX_GAP_S = 10.0
"""After a longer gap between two observations, time starts anew: they come once a second, so the agent or the whole
machine was stopped."""

WENT_ON_S = 1.0
"""Ranks that have begun to wait within this time of a missing rank's last movement, or within `STEADY_FACTOR` typical
steps, have not paused where it has."""


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
        waits_since_ns: when the first rank in a sync stage entered it; ``moved_ns`` if none is in one.
    """

    wait: Wait
    missing_M: RankArray
    reasons: tuple[str, ...]
    waiting: int
    step: int
    lasts_since_ns: int
    moved_ns: int
    waits_since_ns: int

    def still_s(self, now_ns: int, watched_since_ns: int) -> float:
        """For how many seconds no rank has moved, counted from when the job is watched."""
        return (now_ns - max(self.moved_ns, watched_since_ns)) * NS


def thresholds(
    wait_state: WaitState,
    pace: Pace,
    stalled_after_s: float | None,
    now_ns: int,
    still_s: float,
    snapshot: PauseSnapshot | None = None,
) -> dict[str, float]:
    """How long no rank may move (``threshold_s``), and the numbers that it follows from, with 0 where there is none.

    It is ``stalled_after_s`` as given (``policy_s``). Without it, it is ``floor_s``, or more where the job's steps or
    pauses are long; a proved hang has the lowest floor. But a stall is reported before the timeout of a collective ends
    the job, unless the job has paused as long before; ``watchdog_s`` is that timeout where it decides. It belongs to a
    call that was pending when it was time to report it. Without ``stalled_after_s``, an unknown one is assumed to be
    the default.
    """
    proved = snapshot is not None and snapshot.proved
    longest_s, allows_s = pace.longest(now_ns, *(("step", "local") if proved else (wait_state.wait,)))
    floor_s = 0.0 if stalled_after_s is not None else FLOOR_S if proved else FLOORS_S[wait_state.wait]
    threshold_s = stalled_after_s or max(floor_s, STEADY_FACTOR * pace.typical_s, allows_s)
    watchdog_s, due_s = _watchdog(wait_state, stalled_after_s, now_ns, still_s, snapshot)
    decides = watchdog_s > 0 and due_s < threshold_s
    decides = decides and max(pace.typical_s, longest_s) < before_timeout_s(watchdog_s)
    return {
        "threshold_s": due_s if decides else threshold_s,
        "policy_s": stalled_after_s or 0.0,
        "floor_s": floor_s,
        "typical_step_s": pace.typical_s,
        "longest_still_s": longest_s,
        "watchdog_s": watchdog_s if decides else 0.0,
    }


def _watchdog(
    wait_state: WaitState, stalled_after_s: float | None, now_ns: int, still_s: float, snapshot: PauseSnapshot | None
) -> tuple[float, float]:
    """A timeout that may end the job, or 0, and how long the job may be still before it, in seconds."""
    if snapshot is not None and snapshot.timeout is not None:
        timeout_s, report_ns = snapshot.timeout
        # (of an earlier snapshot, the call may have ended)
        return (timeout_s if snapshot.began_ns >= report_ns else 0.0), still_s - (now_ns - report_ns) * NS
    moved_late_s = (now_ns - wait_state.waits_since_ns) * NS - still_s
    guessed = wait_state.waiting > 0 and stalled_after_s is None
    return (WATCHDOG_S if guessed else 0.0), max(FLOOR_S, BEFORE_WATCHDOG_S - moved_late_s)


Action = Literal["wait", "gather", "report"]


def next_action(
    still_s: float, threshold_s: float, soonest_s: float, snapshot: PauseSnapshot | None, now_ns: int
) -> Action:
    """What to do about a job in which no rank has moved for ``still_s``: ``gather`` the evidence of all ranks, or not.

    It is reported from ``threshold_s`` on, which the last ``snapshot`` of this pause may have lowered, and evidence is
    gathered from ``soonest_s`` on.
    """
    if still_s >= threshold_s:
        return "report"
    due = still_s >= soonest_s and (snapshot is None or now_ns >= snapshot.again_ns)
    return "gather" if due else "wait"


def stall_verdict(
    wait_state: WaitState | None,
    job: JobSince,
    pace: Pace,
    stalled_after_s: float | None,
    now_ns: int,
    watched_since_ns: int,
    capturing: Collection[int],
    snapshot: PauseSnapshot | None = None,
) -> Verdict | Action:
    """The verdict on the step in progress if it is a stall; time before ``watched_since_ns`` does not count.

    Otherwise, it is what to do now. A profiler may delay the ranks that are ``capturing``, for as long as its time-box
    lasts.
    """
    if wait_state is None or np.isin(job.status.rank_R[wait_state.missing_M], list(capturing)).any():
        return "wait"
    still_s = wait_state.still_s(now_ns, watched_since_ns)
    known = thresholds(wait_state, pace, stalled_after_s, now_ns, still_s, snapshot)
    action = next_action(still_s, known["threshold_s"], pace.soonest_s(now_ns), snapshot, now_ns)
    if action != "report":
        return action
    lasted_s = max(still_s, (now_ns - wait_state.lasts_since_ns) * NS)
    numbers = {
        "still_s": still_s,
        **known,
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
        return WaitState("idle", NO_RANKS, ("outside_steps",), 0, last, moved_ns, moved_ns, moved_ns)
    waiting_R = stepping_R & _in_stages(status, status.schema.sync)
    if waiting_R.any():
        missing_M, reasons = _missing(status, observed_R, waiting_R)
    else:
        missing_M, reasons = _furthest_behind(status, live_R), ("no_rank_waits",)
    step = int(status.step_R[stepping_R].min())
    return WaitState(
        wait=_wait(job, live_R, waiting_R, missing_M, reasons, pace),
        missing_M=missing_M,
        reasons=reasons,
        waiting=int(waiting_R.sum()),
        step=step,
        lasts_since_ns=int(job.step_since_ns_R[stepping_R & (status.step_R == step)].min()),
        moved_ns=moved_ns,
        waits_since_ns=int(since_ns_R[waiting_R].min(initial=moved_ns)),
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


def _wait(
    job: JobSince, live_R: BoolArray, waiting_R: BoolArray, missing_M: RankArray, reasons: tuple[str, ...], pace: Pace
) -> Wait:
    if "died" in reasons or reasons == ("left_early",):
        return "step"  # a rank that is dead or has stopped recording will not arrive, not even in a first step
    waits = bool(waiting_R.any())
    if (job.status.published_R[live_R] < 2).any():
        return "outside" if waits else "start"
    steady: Wait = "early" if not pace.periods_s else "step" if waits else "local"
    missing = job.status.only(missing_M)
    between_M, special_M = missing.stage_R < 0, missing.special_R != 0
    outside_M = between_M | _in_stages(missing, {OTHER})
    if not waits:
        return "idle" if between_M.any() else "outside" if (outside_M | special_M).any() else steady
    if special_M.any() or not outside_M.any():
        return "outside" if special_M.any() else steady
    # One rank that evaluates or saves for others is the first of the job or of its host. If all ranks do so, those that
    # wait have begun to wait late.
    _, first_H = np.unique(job.status.host_R, return_index=True)
    firsts = first_H if len(first_H) < len(job.since_ns_R) else (0,)
    late_s = (job.since_ns_R[waiting_R].min() - job.since_ns_R[missing_M[outside_M]].min()) * NS
    went_on = late_s < max(WENT_ON_S, STEADY_FACTOR * pace.typical_s)
    return steady if went_on and not np.isin(missing_M[outside_M], firsts).any() else "outside"


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
        snapshot: the last evidence of this pause.
        evidence_due: whether to gather the next one now.
    """

    pace: Pace = Pace()  # frozen
    job: JobSince | None = None
    wait_state: WaitState | None = None
    observed_ns: int = 0
    since_ns: int = 0
    reported: tuple[Verdict, Wait] | None = None
    reported_ns: int = 0
    snapshot: PauseSnapshot | None = None
    evidence_due: bool = False

    def with_evidence(self, evidence: HangEvidence, began_ns: int, ended_ns: int) -> Watch:
        """The state with evidence that was due, gathered meanwhile."""
        if not self.evidence_due:
            return self
        snapshot = snapshot_of(evidence, began_ns, ended_ns, self.snapshot)
        return replace(self, snapshot=snapshot, evidence_due=False)


def observe(
    job: JobSince,
    watch: Watch,
    stalled_after_s: float | None,
    now_ns: int,
    capturing: Collection[int] = (),
) -> tuple[Verdict | None, Watch]:
    """The verdict if a stall has begun or its suspects have changed, and the state for the next observation.

    A stall lasts until any rank ends a step. Without ``stalled_after_s``, the job's own pace and evidence decide.
    """
    if watch.job is not None and watch.job.status.attempt != job.status.attempt:
        watch = Watch()
    if watch.job is None or (now_ns - watch.observed_ns) * NS > MAX_GAP_S:
        watch = replace(watch, since_ns=now_ns)
    pace = _learned(job, watch)
    statuses = [some.status for some in (job, watch.job or job)]
    gone, gone_before = (int((some.closed_R != 0).sum() + (some.alive_R == 0).sum()) for some in statuses)
    if gone > gone_before:
        # A rank that closes its recording or dies is a movement: the others may be about to.
        watch = replace(watch, since_ns=now_ns)
    wait_state, snapshot = wait_state_of(job, pace, now_ns), watch.snapshot
    if wait_state is None or (snapshot is not None and snapshot.began_ns < max(wait_state.moved_ns, watch.since_ns)):
        snapshot = None
    reported = watch.reported
    ended, before = (int(some.published_R.sum()) for some in statuses)
    if ended > before:
        reported = None
    verdict = stall_verdict(wait_state, job, pace, stalled_after_s, now_ns, watch.since_ns, capturing, snapshot)
    due = verdict == "gather" and reported is None
    watch = Watch(pace, job, wait_state, now_ns, watch.since_ns, reported, watch.reported_ns, snapshot, due)
    if not isinstance(verdict, Verdict) or wait_state is None:
        return None, watch
    if reported is not None and _identity(verdict) == _identity(reported[0]):
        return None, watch
    return verdict, replace(watch, reported=(verdict, wait_state.wait), reported_ns=now_ns)


STILL_S = 5.0
"""A rank whose step lasts this long, and far longer than usual, does not finish it."""


def still_ranks(job: JobStatus, typical_s: float) -> frozenset[int]:
    """The ranks that take no steps now, so that a capture of their next steps would never begin.

    ``typical_s`` is a typical step of the job; 0 if unknown.
    """
    longest_ns = max(STILL_S, STEADY_FACTOR * typical_s) / NS
    in_step_R = np.where(job.stage_R < 0, job.stage_age_ns_R, job.step_age_ns_R)
    return frozenset(job.rank_R[in_step_R > longest_ns].tolist())


def _learned(job: JobSince, watch: Watch) -> Pace:
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
    seconds = earlier.still_s(watch.observed_ns, watch.since_ns)
    return pace.with_pause(StepPause(earlier.wait, seconds, watch.observed_ns, watch.reported is not None))


def _identity(verdict: Verdict) -> tuple[object, ...]:
    return verdict.reasons, tuple((suspect.scope, suspect.ranks, suspect.stage) for suspect in verdict.suspects)
