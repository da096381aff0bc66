"""What the ranks are doing now, told on the clock of who looks: agents tell it in ages, for their clocks differ."""

from __future__ import annotations

from dataclasses import dataclass

from sftriage.records import JobStatus, StageSchema


@dataclass(frozen=True, slots=True)
class RankSince:
    """A `RankStatus` with its times on the clock of who looks: since when, in nanoseconds."""

    rank: int
    host: str
    stage: str | None
    since_ns: int
    step: int
    step_since_ns: int
    published: int
    closed: bool
    alive: bool | None
    special: bool = False


@dataclass(frozen=True, slots=True)
class JobSince:
    """A `JobStatus` with its times on the clock of who looks."""

    schema: StageSchema
    world_size: int
    ranks: tuple[RankSince, ...]
    attempt: int = 0


SAME_NS = 50_000_000
"""Ages travel: what began this much earlier or later than it seemed to, by the look before, began then."""


def on_clock(job: JobStatus, before: JobSince | None, now_ns: int) -> JobSince:
    """What the ranks are doing, with ages told on our own clock.

    Args:
        job: what they are doing.
        before: the same, as of the look before.
        now_ns: now.
    """
    known = {one.rank: one for one in before.ranks} if before is not None and before.attempt == job.attempt else {}
    ranks = []
    for one in job.ranks:
        was = known.get(one.rank)
        since_ns, step_since_ns = now_ns - one.stage_age_ns, now_ns - one.step_age_ns
        if was is not None and (was.stage, was.step, was.published) == (one.stage, one.step, one.published):
            since_ns = was.since_ns if abs(since_ns - was.since_ns) < SAME_NS else since_ns
            step_since_ns = was.step_since_ns if abs(step_since_ns - was.step_since_ns) < SAME_NS else step_since_ns
        ranks.append(
            RankSince(
                rank=one.rank,
                host=one.host,
                stage=one.stage,
                since_ns=since_ns,
                step=one.step,
                step_since_ns=step_since_ns,
                published=one.published,
                closed=one.closed,
                alive=one.alive,
                special=one.special,
            )
        )
    return JobSince(job.schema, job.world_size, tuple(ranks), job.attempt)
