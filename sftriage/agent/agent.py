"""The agent of one host: reads its rings, carries out captures on its ranks, and stores the traces.

In a job on one host the controller's `Triage` calls it directly; over the hub, `sftriage.fleet.shipping` does.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING

from sftriage.agent.executor import Executor, StatusReader, TrainerCapture
from sftriage.agent.gpus import EvidenceSampler, gpu_facts, slowed_fraction
from sftriage.agent.hangs import HangSampler
from sftriage.agent.nsys import AbandonedNsys, NsysCapture, NsysPlace
from sftriage.agent.reading import RankRings
from sftriage.agent.stacks import StacksCapture
from sftriage.errors import CaptureError, RingError, SftriageError
from sftriage.model.captures import CaptureRequest, CaptureResult, CaptureState, Profiler, Report, WantedCapture
from sftriage.model.hangs import FACTS, RankEvidence
from sftriage.model.windows import GpuFindings, plain
from sftriage.traces.disk import Do, at_once
from sftriage.traces.manifest import Artefact, CaptureInfo, Manifest, TriggerInfo, contents_of
from sftriage.traces.store import LocalStore
from sftriage.trainer.layout import RingInfo
from sftriage.windows.steplog import KeptSteps

if TYPE_CHECKING:
    from sftriage.mitigate.switching import Setting, SwitchFile, SwitchStatus

log = logging.getLogger("sftriage")


class Switches:
    """The switch files of groups of ranks, in a directory of rings.

    ``writes`` says whether a process, by its id and start time, writes a ring there. A process of another container has
    no meaningful id here, but it locks its ring.
    """

    def __init__(self, rings: Path, writes: Callable[[int, int], bool]) -> None:
        self._rings, self._writes = rings, writes
        self._files: dict[Path, SwitchFile] = {}

    def statuses(self) -> list[SwitchStatus]:
        """The state of each group whose first rank on this host is alive."""
        if not (self._files or any(self._rings.glob("*.switch"))):
            return []
        # (imported here, because most jobs have no groups)
        from sftriage.mitigate.switching import SwitchFile, find_switches, newest_of_each

        for path in self._files.keys() - (there := find_switches(self._rings)):
            self._files.pop(path).close()
        for path in there:
            try:
                file = self._files[path] = self._files.get(path) or SwitchFile(path)
                if not (file.maker_alive or self._writes(*file.maker)):
                    # (another process may have made this file by the next call)
                    self._files.pop(path).close()
            except RingError as error:
                log.debug("%s", error)
        found = []
        for file in newest_of_each(self._files.values()):
            try:
                found.append(file.status())
            except RingError as error:
                log.debug("%s", error)
        return found

    def want(self, wanted: Mapping[str, Setting]) -> None:
        """Switch groups to their settings through their files; repeating it changes nothing."""
        for file in self._files.values():
            try:
                setting = wanted.get(file.name)
                if setting is not None and (request := file.status().next_request(setting.value)):
                    file.write_request(request, setting.ahead_S)
            except RingError as error:
                log.warning("cannot switch a remedy: %s", error)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def executor_for(
    request: CaptureRequest, info: RingInfo, rings: Path, spool: Path, nsys: NsysPlace | None, status: StatusReader
) -> Executor:
    """The executor of a request, not yet started; raises CaptureError if the request cannot be carried out."""
    if not request.takes_steps:
        return StacksCapture(request, info, rings, spool, status)
    mailbox = rings / info.file_name("mailbox")
    if request.profiler != "nsys":
        return TrainerCapture(request, mailbox, spool)
    if nsys is None:
        raise CaptureError("the job was not launched under nsys: sftriage run --nsys")
    return NsysCapture(request, nsys, mailbox, spool, status)


def _adopted(request: CaptureRequest, mailbox: Path, spool: Path, nsys: NsysPlace | None) -> Executor:
    """The executor of a request that an earlier agent began, and did not end.

    A capture in the trainer continues by itself, and its answer waits in the mailbox. Profilers from outside are ended.
    """
    if not request.takes_steps:
        for leftover in spool.glob(f"*{request.capture_id}.*"):
            leftover.unlink(missing_ok=True)
        raise CaptureError("stacks are taken from outside")
    if request.profiler == "nsys":
        if nsys is None:
            raise CaptureError("the file that says how nsys launched its rank is gone")
        return AbandonedNsys(request, nsys, mailbox, spool, lambda: None)
    capture = TrainerCapture(request, mailbox, spool)
    if capture.handed_over:
        return capture
    capture.cancel()
    capture.close()
    raise CaptureError("its rank never got the request")


def overlap(request: CaptureRequest, running: Iterable[CaptureRequest]) -> str | None:
    """Why a request cannot begin while others run, or None.

    A trainer runs one capture at a time. Stacks from outside exclude only other stacks.
    """
    for other in running:
        if other.rank == request.rank and other.takes_steps == request.takes_steps:
            return f"capture {other.capture_id} ({other.profiler}) of rank {request.rank} is under way"
    return None


CANCEL_GRACE_S = 15.0
"""After its time-box, how long a rank has to end a capture at a step boundary and keep its trace."""

ANSWER_GRACE_S: Mapping[Profiler, float] = {"torch": 60.0, "stacks": 60.0, "nsys": 300.0}
"""After its time-box, how long a rank has to export its trace and answer before the agent gives its capture up.

nsys writes its report while the job continues.
"""


@dataclass(slots=True)
class _Running:
    """A capture in progress. ``cancel_s`` and ``give_up_s`` are on the agent's monotonic clock."""

    wanted: WantedCapture
    info: RingInfo
    executor: Executor
    cancel_s: float
    give_up_s: float
    state: CaptureState = "accepted"
    cancelled: bool = False


class Captures:
    """Carries out the captures that the controller wants of one host. No method blocks.

    The store keeps their traces, with manifests that name the job and the run. ``nsys`` says how the ranks were
    launched, if they run under nsys.
    """

    def __init__(
        self, ranks: RankRings, rings: Path, spool: Path, nsys: NsysPlace | None, store: LocalStore, job: str, run: str
    ) -> None:
        self._rings, self._directory, self._spool, self._nsys, self._store = ranks, rings, spool, nsys, store
        self._job, self._run = job, run
        self._running: dict[str, _Running] = {}
        self._given_up: list[tuple[RingInfo, Executor]] = []
        self._known: set[str] = set()
        self._listed: set[str] = set()
        self._reports: deque[Report] = deque()

    def want(self, wanted: Sequence[WantedCapture], now_s: float) -> None:
        """Begin new captures, and cancel those no longer listed. ``now_s`` is on a monotonic clock, in seconds."""
        for capture in wanted:
            capture_id = capture.request.capture_id
            if capture_id not in self._known:
                self._known.add(capture_id)
                self._begin(capture, now_s)
            elif capture_id not in self._listed and capture_id not in self._running:
                self._answer_again(capture.request)
        self._listed = listed = {capture.request.capture_id for capture in wanted}
        for capture_id, running in self._running.items():
            if capture_id not in listed and not running.cancelled:
                running.cancelled = True
                running.executor.cancel()

    def reports(self) -> list[Report]:
        """The reports since the last call. Another thread may advance the captures meanwhile."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def advance(self, now_s: float) -> None:
        """Take every capture a turn further."""
        for info, capture in list(self._given_up):
            if capture.poll() is not None or not self._rings.alive(info):
                capture.close()
                self._given_up.remove((info, capture))
        for capture_id, running in list(self._running.items()):
            executor = running.executor
            result = executor.poll()
            if result is None and executor.needs_trainer and not self._rings.alive(running.info):
                # Its answer may have come in between.
                result = executor.poll() or executor.failed("the trainer ended during the capture")
            if result is not None:
                del self._running[capture_id]
                self._reports.append(self._ended(running, result))
                continue
            if now_s >= running.give_up_s:
                self._give_up(running)
                continue
            if now_s >= running.cancel_s and not running.cancelled:
                running.cancelled = True
                executor.cancel()
            if executor.state != running.state:
                running.state = executor.state
                self._report(running.wanted.request, running.state)

    def _give_up(self, running: _Running) -> None:
        """End a capture whose rank does not answer. A later answer is still awaited, to remove its files."""
        executor = running.executor
        del self._running[executor.request.capture_id]
        alive = self._rings.alive(running.info)
        if executor.needs_trainer and alive:
            executor.cancel()
            self._given_up.append((running.info, executor))
        else:
            executor.close()
        result = replace(executor.failed("no answer long after its time-box"), state="expired")
        self._reports.append(Report(result, hangs=alive))

    def close(self) -> None:
        given_up = [executor for _, executor in self._given_up]
        for executor in (*(running.executor for running in self._running.values()), *given_up):
            executor.cancel()
            executor.close()
        self._running.clear()
        self._given_up.clear()

    def _begin(self, wanted: WantedCapture, now_s: float) -> None:
        request = wanted.request
        try:
            info, executor = self._executor(wanted)
        except _NotBegunError as refused:
            self._answer_again(request, refused)
            return
        cancel_s = now_s + request.max_seconds + CANCEL_GRACE_S
        give_up_s = now_s + request.max_seconds + ANSWER_GRACE_S[request.profiler]
        self._running[request.capture_id] = _Running(wanted, info, executor, cancel_s, give_up_s)
        self._report(request, "accepted")

    def _answer_again(self, request: CaptureRequest, refused: _NotBegunError | None = None) -> None:
        """Answer an order of a capture that has ended: a controller whose run is lost orders it again."""
        if request.capture_id in self._store.ids():
            self._reports.append(self._store.manifest(request.capture_id).report)
        else:
            refused = refused or _NotBegunError("refused", "an earlier controller ordered it, and it left no trace")
            self._report(request, refused.state, str(refused))

    def _executor(self, wanted: WantedCapture) -> tuple[RingInfo, Executor]:
        request = wanted.request
        info = self._rings.ranks.get(request.rank)
        if wanted.resumed:
            if wanted.generation is not None:
                at = request.rank, wanted.generation
                info = next((info for info in self._rings.infos if (info.rank, info.attempt) == at), None)
            try:
                if info is None:
                    raise CaptureError("its rank no longer has a ring here")
                return info, _adopted(request, self._directory / info.file_name("mailbox"), self._spool, self._nsys)
            except CaptureError as error:
                raise _NotBegunError("failed", f"sftriage ended during the capture: {error}") from error
        if wanted.expires_s is not None and wanted.expires_s <= 0.0:
            raise _NotBegunError("expired", "its time to begin passed before its host got the order")
        if info is None:
            raise _NotBegunError("failed", f"rank {request.rank} has no ring here")
        if wanted.generation is not None and info.attempt != wanted.generation:
            raise _NotBegunError("refused", f"rank {request.rank} has restarted since")
        reason = overlap(request, [info_of.wanted.request for info_of in self._running.values()])
        if reason is not None:
            raise _NotBegunError("refused", reason)
        try:
            status = partial(self._rings.status, info)
            executor = executor_for(request, info, self._directory, self._spool, self._nsys, status)
        except CaptureError as error:
            raise _NotBegunError("refused", str(error)) from error
        try:
            executor.start()
        except CaptureError as error:
            executor.close()
            raise _NotBegunError("failed", str(error)) from error
        return info, executor

    def _report(self, request: CaptureRequest, state: CaptureState, detail: str = "") -> None:
        self._reports.append(Report(CaptureResult(request.capture_id, request.rank, state, detail)))

    def _ended(self, running: _Running, result: CaptureResult) -> Report:
        """Store a capture that has ended; it fails if it cannot be stored, or contradicts the trainer's result."""
        executor = running.executor
        try:
            if result.capture_id in self._store.ids():
                # An earlier agent stored it, but ended before it could report it.
                return self._store.manifest(result.capture_id).report
            if result.state != "stored":
                return Report(result)
            result = executor.verify(result)
            manifest = self._store.put_files(
                result.capture_id,
                executor.products(),
                lambda artefacts: self._manifest(running, result, artefacts),
            )
            return Report(result, stored_bytes=sum(artefact.size_bytes for artefact in manifest.artefacts))
        except (SftriageError, OSError) as error:
            return Report(replace(result, state="failed", detail=str(error)))
        finally:
            executor.close()

    def _manifest(self, running: _Running, result: CaptureResult, artefacts: tuple[Artefact, ...]) -> Manifest:
        wanted, ring = running.wanted, running.info
        return Manifest(
            capture_id=wanted.request.capture_id,
            job=self._job,
            run=self._run,
            created_at=datetime.now(timezone.utc),
            trigger=TriggerInfo.of(wanted.trigger),
            capture=CaptureInfo.of(wanted.request, result, world_size=ring.world_size, host=ring.host),
            artefacts=artefacts,
            may_contain=contents_of(wanted.request.profiler, wanted.request.options),
        )


class _NotBegunError(Exception):
    """A capture that cannot begin. ``state`` is its final state."""

    def __init__(self, state: CaptureState, reason: str) -> None:
        super().__init__(reason)
        self.state = state


STORING_S = 60.0
"""How long to wait for a trace to be checked and stored before other work continues."""


class Agent(RankRings):
    """One host, for its controller. No method blocks; the owner calls them again and again.

    ``rings`` has the trainers' rings and mailboxes, ``directory`` the logs of their ``steps``, and the ``spool`` in
    which they leave traces. ``do`` runs the writes to these and to the store.
    """

    def __init__(
        self,
        rings: Path,
        directory: Path,
        store: LocalStore,
        *,
        job: str,
        run: str,
        nsys: NsysPlace | None = None,
        kept: KeptSteps | None = None,
        do: Do = at_once,
    ) -> None:
        super().__init__(rings, directory / "steps", kept, do)
        self._switches = Switches(rings, self.writes)
        self._captures = Captures(self, rings, directory / "spool", nsys, store, job, run)
        self._do = partial(do, queue="captures", latest=True, patience_s=STORING_S)
        self._gpus, self._hangs = EvidenceSampler(), HangSampler(self, rings)
        self._has_gpus = True

    def want(self, wanted: Sequence[WantedCapture]) -> None:
        """Set all captures to be made on the host now; repeating it changes nothing."""
        self.refresh()
        self._do(partial(self._captures.want, wanted, monotonic()))

    def switches(self) -> list[SwitchStatus]:
        return self._switches.statuses()

    def switch(self, wanted: Mapping[str, Setting]) -> None:
        self._switches.want(wanted)

    def reports(self) -> list[Report]:
        self._do(partial(self._captures.advance, monotonic()))
        return self._captures.reports()

    def gpus(self, ranks: Sequence[int]) -> GpuFindings | None:
        """What the driver reports of the GPUs of those ranks that are on this host; None while the query runs.

        If no GPU answers, the findings say so once, and later calls query nothing.
        """
        here = self.ranks
        about = sorted(set(ranks) & set(here))
        if not (about and self._has_gpus):
            return GpuFindings(time())
        found = self._gpus.poll(list(here.values()), monotonic(), about)
        if found is None:
            return None
        self._has_gpus = bool(found.gpus)
        of = {
            rank: plain(gpu) | {"slowed_fraction": slowed_fraction(gpu, found.gpus)}
            for rank in about
            if (gpu := found.of(rank)) is not None
        }
        return GpuFindings(found.time_s, found.remarks, of, found.problem)

    def hang_evidence(self, token: str, detail: Sequence[int]) -> tuple[RankEvidence, ...] | None:
        """What is known of each rank of the newest generation on this host; None while it is gathered: call again.

        The evidence of the ranks in ``detail`` has more of their stacks. A new ``token`` begins anew; for one of
        `FACTS`, it is the facts of these ranks and their GPUs.
        """
        found = self._hangs.poll(token, detail)
        if not (found and self._has_gpus and token.startswith(FACTS)):
            return found
        gpus = self._gpus.poll(list(self.ranks.values()), monotonic(), detail)
        if gpus is None:
            return None
        self._has_gpus = bool(gpus.gpus)
        of = {rank.rank: gpu_facts(gpu) for rank in found if (gpu := gpus.of(rank.rank)) is not None}
        return tuple(replace(rank, facts={**rank.facts, **of.get(rank.rank, {})}) for rank in found)

    def close(self) -> None:
        self._gpus.close()
        self._hangs.close()
        self._do(self._captures.close)
        self._switches.close()
        super().close()
