"""Captures of a whole job that hangs: the evidence of all ranks, gathered from their hosts, and the cause it shows.

No profiler runs, and no agent is ordered to start one. `sftriage.runtime.triage` polls `HangCaptures` in each turn,
records the cause at once, and only then has the evidence stored, as the one file of a capture. Before that, evidence
may prove that the job hangs: none of it is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from sftriage.base.bounds import printable
from sftriage.base.files import private
from sftriage.controller.agents import Fleet
from sftriage.errors import CaptureError
from sftriage.model.captures import CaptureRequest, CaptureResult, Report, Trigger
from sftriage.model.events import CauseFound, Place
from sftriage.model.hangs import HANG_NAME, Hang, HangEvidence, RankEvidence, SourceLine
from sftriage.model.windows import JobStatus
from sftriage.traces.manifest import CaptureInfo, CauseInfo, Manifest, PlaceInfo, TriggerInfo, contents_of
from sftriage.traces.store import FileToStore, LocalStore
from sftriage.verdict.hangs import hang_of
from sftriage.words.hangs import hang_next_step, hang_sentence
from sftriage.words.verdicts import some_ranks

log = logging.getLogger("sftriage")


_UNREADABLE = Hang("unknown", reason="its evidence could not be read")


@dataclass(frozen=True, slots=True)
class HangFound:
    """The evidence of a capture, which took ``took_s`` to gather, and the cause that it shows."""

    request: CaptureRequest
    evidence: HangEvidence
    cause: CauseInfo
    took_s: float

    @classmethod
    def of(
        cls, request: CaptureRequest, evidence: HangEvidence, took_s: float, alive: Collection[int] = ()
    ) -> HangFound:
        """The cause by the evidence; unknown if that cannot be read, or if ranks died that were ``alive`` in the stall.

        These are not its cause: perhaps somebody ends the job because it hangs.
        """
        try:
            hang = hang_of(evidence)
            if hang.kind == "dead" and (later := sorted(set(hang.ranks).intersection(alive))):
                hang = Hang("unknown", reason=f"{some_ranks(later)} ended only after it had stalled")
            cause = cause_of(hang)
        except Exception as error:
            log.error(
                "capture %s has its evidence, but no cause: %s: %s", request.capture_id, type(error).__name__, error
            )
            log.debug("the evidence of a hang could not be read", exc_info=True)
            hang = _UNREADABLE
            cause = cause_of(hang)
        return cls(request, replace(evidence, hang=hang), cause, took_s)

    def event(self, now_s: float) -> CauseFound:
        """The cause to record, of the first rank at fault."""
        hang, cause, at = self.evidence.hang, self.cause, self.cause.place
        rank = hang.ranks[0] if hang is not None and hang.ranks else self.request.rank
        place = None if at is None else Place(at.function, at.file, at.line)
        about = self.request.capture_id, rank, cause.code, cause.sure, cause.sentence
        return CauseFound(now_s, *about, place, next_step=cause.next_step)

    @property
    def result(self) -> CaptureResult:
        ranks, step = self.evidence.ranks, self.evidence.step
        answered = sum(rank.answered for rank in ranks)
        return CaptureResult(
            self.request.capture_id,
            self.request.rank,
            "stored",
            f"{answered} of {self.evidence.world_size} ranks answered",
            first_step=step,
            last_step=step,
            timings_s={"run": self.took_s},
        )

    def put(self, store: LocalStore, spool: Path, trigger: Trigger, job: str, run: str) -> Report:
        """Store the evidence, by way of the ``spool``; raises CaptureError if it is too large or cannot be stored."""
        request, content = self.request, msgspec.json.encode(self.evidence)
        if request.capture_id in store.ids():
            return store.manifest(request.capture_id).report
        if len(content) > request.max_bytes:
            raise CaptureError(f"the evidence has {len(content)} bytes, more than {request.max_bytes}")
        path = spool / f"{request.capture_id}.{HANG_NAME}"
        path.unlink(missing_ok=True)
        try:
            with private(path) as file:
                file.write(content)
            world_size, ranks = self.evidence.world_size, self.evidence.ranks
            host = next((printable(rank.host)[:255] for rank in ranks if rank.rank == request.rank), "")
            made = store.put_files(
                request.capture_id,
                [FileToStore(path, HANG_NAME, "application/json", compress=False)],
                lambda artefacts: Manifest(
                    capture_id=request.capture_id,
                    job=job,
                    run=run,
                    created_at=datetime.now(timezone.utc),
                    trigger=TriggerInfo.of(trigger),
                    capture=CaptureInfo.of(request, self.result, world_size=world_size, host=host),
                    artefacts=artefacts,
                    may_contain=contents_of(request.profiler, request.options),
                    hang=self.cause,
                ),
            )
        finally:
            path.unlink(missing_ok=True)
        return made.report


def cause_of(hang: Hang) -> CauseInfo:
    """A hang as the cause of a capture, within the bounds of a manifest."""
    at = _place(hang)
    place = None
    if at is not None:
        file, source = printable(at.file), printable(at.source)
        place = PlaceInfo(function=printable(at.function)[:100], file=file, line=at.line, source=source)
    return CauseInfo(
        code=hang.kind,
        sure=hang.kind != "unknown",
        sentence=printable(hang_sentence(hang)),
        next_step=printable(hang_next_step(hang)),
        place=place,
    )


def _place(hang: Hang) -> SourceLine | None:
    """The line of the ranks at fault: where they wait or work, or else the call by which they differ."""
    blocked = (each.place for each in hang.blocked)
    called = (call.frames[0] for call in (hang.call,) if call is not None and call.frames)
    of_absent = hang.kind in ("elsewhere", "absent", "dead")
    found = (*blocked, *called) if of_absent else (*called, *blocked)
    return None if hang.kind == "unknown" else next(filter(None, found), None)


def _evidence_of(
    ranks: Sequence[RankEvidence], job: JobStatus | None, attempt: int, step: int, wall_s: float
) -> HangEvidence:
    world_size = max(0 if job is None else job.world_size, *(rank.rank + 1 for rank in ranks), 0)
    return HangEvidence(wall_s, attempt, step, world_size, tuple(sorted(ranks, key=lambda each: each.rank)))


@dataclass(slots=True)
class _UnderWay:
    """A capture to gather since ``since_s``, in a ``step`` of an ``attempt``.

    The ranks ``alive`` had a process then. ``resumed``: an earlier process began it. ``gathered``: it waits to be
    stored, or has failed.
    """

    request: CaptureRequest
    attempt: int
    step: int
    since_s: float
    alive: Collection[int] = ()
    resumed: bool = False
    gathered: bool = False

    def still_hangs(self, job: JobStatus) -> bool:
        """Whether no rank has gone on to another step since."""
        live_R = (job.alive_R != 0) & (job.closed_R == 0)
        return job.attempt == self.attempt and bool((job.step_R[live_R] <= self.step).any())

    def poll(self, fleet: Fleet, now_s: float, wall_s: float) -> HangFound | CaptureResult | None:
        if now_s >= self.since_s + self.request.max_seconds:
            return self._failed(f"its hosts did not report within {self.request.max_seconds:.0f} s")
        if self.resumed:
            if (job := fleet.statuses()) is None:
                return None
            if not self.still_hangs(job):
                return self._failed("sftriage ended during the capture, and the job no longer hangs there")
        ranks = fleet.hang_evidence(self.request.capture_id, self.request.detail_ranks)
        if ranks is None:
            return None
        if not ranks:
            return self._failed("no host of the job has a rank of it any more")
        now = fleet.statuses()
        if now is not None and now.attempt != self.attempt:
            return self._failed("the job started again before its ranks had answered")
        evidence = _evidence_of(ranks, now, self.attempt, self.step, wall_s)
        return HangFound.of(self.request, evidence, now_s - self.since_s, self.alive)

    def _failed(self, why: str) -> CaptureResult:
        return CaptureResult(self.request.capture_id, self.request.rank, "failed", why)


class HangCaptures:
    """The captures of a whole job ``under_way``, until they are stored or have failed. ``now_s`` is monotonic.

    `check` gathers evidence of which nothing is kept, since ``checking_ns`` if that is not 0.
    """

    def __init__(self) -> None:
        self.under_way: dict[str, _UnderWay] = {}
        self.checking_ns = 0

    @property
    def unended(self) -> tuple[CaptureRequest, ...]:
        return tuple(each.request for each in self.under_way.values())

    def add(
        self,
        request: CaptureRequest,
        attempt: int,
        step: int,
        now_s: float,
        job: JobStatus | None,
        *,
        resumed: bool = False,
    ) -> None:
        """Gather the evidence of a ``job`` that hangs in a step; one that is ``resumed`` only if it still does."""
        alive = () if job is None else frozenset(job.rank_R[job.alive_R == 1].tolist())
        self.under_way[request.capture_id] = _UnderWay(request, attempt, step, now_s, alive, resumed)

    def poll(self, fleet: Fleet, now_s: float, wall_s: float) -> Iterator[HangFound | CaptureResult]:
        """What has been found since the last call, and the results of captures that have failed."""
        for each in [each for each in self.under_way.values() if not each.gathered]:
            found = each.poll(fleet, now_s, wall_s)
            if found is not None:
                each.gathered = True
                yield found

    def check(self, fleet: Fleet, job: JobStatus | None, due: bool, now_ns: int) -> tuple[HangEvidence, int] | None:
        """The evidence of a ``job``, with its hang, and when gathering it began, once it is there.

        A capture goes first: agents gather for one of them at a time. It ends where none is ``due``.
        """
        if not due or job is None or not all(each.gathered for each in self.under_way.values()):
            self.checking_ns = 0
            return None
        self.checking_ns = self.checking_ns or now_ns
        # (without details: py-spy would stop a rank that gives no answer)
        ranks = fleet.hang_evidence(f"check-{self.checking_ns}", ())
        if ranks is None:
            return None
        evidence = _evidence_of(ranks, job, job.attempt, int(job.step_R.max(initial=0)), 0.0)
        try:
            hang = hang_of(evidence)
        except Exception:
            log.debug("the evidence of a pause could not be read", exc_info=True)
            hang = _UNREADABLE
        began_ns, self.checking_ns = self.checking_ns, 0
        return replace(evidence, hang=hang), began_ns

    def ended(self, capture_id: str) -> int | None:
        """End a capture; return the attempt that it is of, or None for a capture of another kind."""
        under_way = self.under_way.pop(capture_id, None)
        return None if under_way is None else under_way.attempt
