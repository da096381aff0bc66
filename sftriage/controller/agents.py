"""The controller's dealings with a job's agents: windows and GPU evidence from them, capture orders to them.

`sftriage.runtime.triage` connects these to a `Fleet`. `resume_state` reads what an earlier controller left to do.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

import numpy as np

from sftriage.mitigate.switching import Setting, SwitchStatus
from sftriage.model import events
from sftriage.model.captures import ENDED, CaptureRequest, CaptureResult, Report, Trigger, WantedCapture
from sftriage.model.hangs import FACTS, RankEvidence
from sftriage.model.verdicts import Suspect, Verdict
from sftriage.model.windows import GpuFindings, JobStatus, LinkUse, ReadCounts, Window
from sftriage.policy.state import Losses
from sftriage.verdict.accounting import known_medians
from sftriage.verdict.differences import differences
from sftriage.windows.gather import Gatherer, Shape, StepTimes
from sftriage.windows.rings import Rows
from sftriage.words.differences import difference_lines
from sftriage.words.verdicts import subject

log = logging.getLogger("sftriage")


class Fleet(Protocol):
    """The agents of a job, on this host or over NATS. Times are ages, or nanoseconds since the epoch."""

    def rows(self) -> Sequence[Rows]: ...

    def statuses(self) -> JobStatus | None:
        """The current state of each rank of the newest generation; None before there is one."""

    def want(self, wanted: Sequence[WantedCapture]) -> None:
        """Set all wanted captures: agents start new ones, and cancel those no longer listed."""

    def switches(self) -> Sequence[SwitchStatus]:
        """The state of each group of ranks that can switch a remedy on."""

    def switch(self, wanted: Mapping[str, Setting]) -> None:
        """Set the remedy of each group, by its name; repeating it changes nothing."""

    def reports(self) -> Sequence[Report]:
        """Reports on captures since the last call."""

    def telemetry(self) -> ReadCounts: ...

    def gpus(self, ranks: Sequence[int]) -> GpuFindings | None:
        """The drivers' report on these ranks' GPUs; None while the query runs: call again."""

    def hang_evidence(self, token: str, detail: Sequence[int]) -> tuple[RankEvidence, ...] | None:
        """What is known of each rank, once each, with more stacks of those in ``detail``; None while it is gathered.

        A ``token`` is a capture's id. A new one begins anew; for one of `FACTS`, the ranks in ``detail`` have facts.
        """

    def settled(self, agent: str, position: int) -> None:
        """Acknowledge an agent's rows up to this position: their results are recorded."""

    def close(self) -> None:
        """Release the agents; unfinished captures are cancelled."""


HELD_BYTES = 64 << 20
"""Maximum size of the windows kept while a capture runs, whose steps are read once it is stored."""

Kept = Callable[[int, int, int], "Window | None"]
"""Reads steps no longer in memory: by generation, first and last step; None if they are not kept either."""


class WindowAssembly:
    """Assembles windows from agents' rows; a generation ends when the next one begins.

    ``kept`` reads steps no longer in memory. ``judged`` has the first and last step of the last window that an earlier
    controller has judged, by generation.
    """

    def __init__(
        self,
        shape: Shape,
        kept: Kept = lambda generation, first_step, last_step: None,
        judged: Mapping[int, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        self._shape, self._kept = shape, kept
        self._due = {
            generation: first + shape.stride_after(last - first + 1) for generation, (first, last) in judged.items()
        }
        self._gatherers: dict[int, Gatherer] = {}
        self._foreign: set[tuple[int, tuple[int, ...]]] = set()
        self._times = StepTimes(2 * shape.window_steps)
        self._links = LinkUses()
        self._held: deque[Window] = deque()
        # Of each agent's rows that later windows may need: generation and last step, and position.
        self._needed: defaultdict[str, deque[tuple[tuple[int, int], int]]] = defaultdict(deque)

    def add(self, sent: Sequence[Rows], *, ended: bool = False, hold: bool = False) -> list[Window]:
        """Take rows, and return the windows that they complete; with ``ended``, the job's last ones too.

        With ``hold``, recent windows stay in memory for `steps`; without, only steps that later windows need.
        """
        of_generation: dict[int, list[Rows]] = {}
        for rows in sent:
            of_generation.setdefault(rows.generation, []).append(rows)
            self._links.add(rows.links)
            if len(rows.steps):
                last_step = rows.generation, int(rows.steps.step_B.max())
                self._needed[rows.agent].append((last_step, rows.position))
        for _, some in sorted(of_generation.items()):
            self._take(some)
        windows = []
        for generation, gatherer in sorted(self._gatherers.items()):
            # A generation ends when a newer one begins.
            over = generation < max(self._gatherers)
            windows += gatherer.ready(ended=ended or over)
            if over:
                del self._gatherers[generation]
        windows = [replace(window, links=self._links.of(self.spans(window))) for window in windows]
        if not hold:
            self._held.clear()
            return windows
        self._held += windows
        while len(self._held) > 1 and sum(window.durations_NRS.nbytes for window in self._held) > HELD_BYTES:
            self._held.popleft()
        return windows

    def settled(self, window: Window) -> Mapping[str, int]:
        """Return the position up to which each agent's rows are no longer needed once ``window`` is recorded.

        A controller that takes over starts with the steps after these, without a warm-up.
        """
        stride = self._shape.stride_after(len(window.durations_NRS))
        next_step = (window.attempt, window.first_step + stride - self._shape.warmup_steps)
        positions: dict[str, int] = {}
        for agent, needed in self._needed.items():
            while needed and needed[0][0] < next_step:
                _, positions[agent] = needed.popleft()
        return positions

    def spans(self, window: Window) -> Mapping[int, events.Span]:
        """Start and end of each step of a window, by number, as far as known."""
        return self._times.of(window.attempt, window.first_step, window.last_step)

    def steps(self, generation: int, first_step: int, last_step: int) -> Window | None:
        """Some of the newest steps; None if they are not kept."""
        gatherer = self._gatherers.get(generation)
        held = None if gatherer is None else gatherer.cut(first_step, last_step)
        if held is not None:
            return held
        for window in reversed(self._held):
            if window.attempt == generation and window.first_step <= first_step <= last_step <= window.last_step:
                return window.steps(first_step, last_step)
        if gatherer is None or gatherer.on_device:
            return None
        return self._kept(generation, first_step, last_step)

    def _take(self, sent: Sequence[Rows]) -> None:
        """Take rows of one generation from all hosts at once, so that no window is dropped for steps that exist."""
        first = sent[0]
        if first.generation < max(self._gatherers, default=first.generation):
            return
        gatherer = self._gatherers.get(first.generation)
        if gatherer is None:
            due = self._due.get(first.generation)
            gatherer = Gatherer(first.schema, first.world_size, self._shape, attempt=first.generation, due=due)
            self._gatherers[first.generation] = gatherer
        sent = [rows for rows in sent if self._belongs(rows, gatherer)]
        if not sent:
            return
        steps = gatherer.take(sent)
        self._times.note(
            first.generation, steps, np.repeat([rows.wall_ns for rows in sent], [len(rows.steps) for rows in sent])
        )

    def _belongs(self, rows: Rows, gatherer: Gatherer) -> bool:
        """Whether rows have their generation's stages. Ranks with other stages count as missing."""
        if (rows.schema, rows.world_size) == (gatherer.schema, gatherer.world_size):
            return True
        subject = rows.generation, tuple(sorted(rows.ranks))
        if subject not in self._foreign:
            self._foreign.add(subject)
            log.warning("ranks %s record different stages than the others and count as missing", subject[1])
        return False


def peers_of(verdict: Verdict, window: Window | None, ranks: Iterable[int] = ()) -> tuple[int, ...]:
    """The other ranks of the first suspect's cohort: the most typical first, other suspects last.

    The policy decides whether another suspect counts as healthy (`policy.engine.HEALTHY_GAIN_FRACTION`). Without a
    window, the peers are ``ranks`` in order.
    """
    if not verdict.suspects:
        return ()
    suspected = {rank for suspect in verdict.suspects for rank in suspect.ranks}
    if window is None:
        return tuple(sorted(set(ranks) - suspected))
    # Each rank's median time for its own work in a step; NaN for a rank without steps.
    local = [at for at, stage in enumerate(window.schema.stages) if stage not in window.schema.sync]
    total_NR = window.durations_NRS[:, :, local].sum(axis=2)
    if window.ready_NR is not None:
        total_NR = total_NR + np.nan_to_num(window.ready_NR, nan=0.0)
    local_R = known_medians(total_NR.T)
    roles = window.cohorts or ("",) * len(local_R)
    wanted = {roles[rank] for rank in verdict.suspects[0].ranks if rank < len(roles)}
    able = [
        rank
        for rank, local_s in enumerate(local_R)
        if rank not in verdict.suspects[0].ranks and roles[rank] in wanted and not np.isnan(local_s)
    ]
    if not able:
        return ()
    healthy = [rank for rank in able if rank not in suspected] or able
    apart = np.abs(local_R[able] - np.median(local_R[healthy]))
    order = sorted(range(len(able)), key=lambda at: (able[at] in suspected, apart[at]))
    return tuple(able[at] for at in order)


LINKS_S, KEPT_LINKS = 10.0, 1 << 16
"""Links are read once a second or less: a short window also has readings from these seconds before its end."""


class LinkUses:
    """What the hosts sent each other of late, with the names of the hosts whose addresses they sent to."""

    def __init__(self) -> None:
        self._kept = deque[LinkUse](maxlen=KEPT_LINKS)
        self._hosts: dict[str, str] = {}
        self._last_ns: dict[tuple[str, str, str], int] = {}

    def add(self, sent: Sequence[LinkUse]) -> None:
        """Take readings; parts of a message repeat them."""
        for use in sent:
            link = use.host, use.address, use.peer
            if use.end_ns > self._last_ns.get(link, 0):
                self._last_ns[link], self._hosts[use.address] = use.end_ns, use.host
                self._kept.append(use)

    def of(self, spans: Mapping[int, events.Span]) -> tuple[LinkUse, ...]:
        """Those between hosts of the job in some steps, and in the seconds before."""
        if not self._kept or not spans:
            return ()
        end_ns = max(span.end_ns for span in spans.values())
        begin_ns = min(min(span.start_ns for span in spans.values()), end_ns - LINKS_S * 1e9)
        while self._kept and self._kept[0].end_ns <= begin_ns:
            self._kept.popleft()
        return tuple(
            replace(use, peer=self._hosts.get(use.peer, ""))
            for use in self._kept
            if use.begin_ns < end_ns and (not use.peer or use.peer in self._hosts)
        )


EXPIRES_S = 60.0
"""Maximum time from the decision to the start of a capture: later, the job may have changed."""


class DesiredCaptures:
    """The captures ordered from the agents.

    It cancels a control rank's capture once all captures of its suspects have failed, since it would cost the job and
    compare with nothing. A capture that is writing its trace is kept.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, WantedCapture] = {}
        self._expire_s: dict[str, float] = {}
        self._called_off: dict[str, tuple[WantedCapture, str]] = {}
        self._suspects: dict[str, set[str]] = {}

    def wanted(self, now_s: float) -> tuple[WantedCapture, ...]:
        """All captures wanted now, suspects first; ``now_s`` is monotonic."""
        return tuple(
            replace(order, expires_s=self._expire_s[capture_id] - now_s) if capture_id in self._expire_s else order
            for capture_id, order in self._wanted.items()
        )

    @property
    def unended(self) -> tuple[CaptureRequest, ...]:
        """Captures without a result yet, cancelled ones included."""
        cancelled = (order for order, _ in self._called_off.values())
        return tuple(order.request for order in (*self._wanted.values(), *cancelled))

    def add(
        self, requests: Sequence[CaptureRequest], triggers: Mapping[str, Trigger], generation: int, now_s: float
    ) -> None:
        """Order these captures together; each must begin within `EXPIRES_S` of ``now_s``."""
        suspects = {request.capture_id for request in requests if request.role == "suspect"}
        for request in requests:
            self._wanted[request.capture_id] = WantedCapture(request, triggers[request.capture_id], generation)
            self._expire_s[request.capture_id] = now_s + EXPIRES_S
            if suspects and request.role == "control":
                self._suspects[request.capture_id] = set(suspects)

    def resume(self, request: CaptureRequest, trigger: Trigger, generation: int) -> None:
        """Keep the order of a capture that an earlier process requested."""
        self._wanted[request.capture_id] = WantedCapture(request, trigger, generation, resumed=True)

    def ended(self, result: CaptureResult) -> tuple[WantedCapture | None, CaptureResult]:
        """End a capture: return its order and result, with the reason if it was cancelled.

        This cancels control captures that have no other suspect to compare with.
        """
        called_off = self._called_off.pop(result.capture_id, None)
        self._expire_s.pop(result.capture_id, None)
        wanted = self._wanted.pop(result.capture_id, called_off[0] if called_off else None)
        self._suspects.pop(result.capture_id, None)
        for control, suspects in list(self._suspects.items()):
            if result.capture_id not in suspects:
                continue
            suspects.discard(result.capture_id)
            if result.state == "stored" or not suspects:
                del self._suspects[control]
            if result.state != "stored" and not suspects:
                how = "was refused" if result.state == "refused" else "failed"
                reason = f"nothing to compare it with: the capture of rank {result.rank} {how}"
                self._called_off[control] = (self._wanted.pop(control), reason)
        if called_off is None or result.state == "stored":
            return wanted, result
        return wanted, replace(result, detail=f"{result.detail}: {called_off[1]}" if result.detail else called_off[1])


MAX_PEERS, TRIES = 16, 3
"""Peers with which a suspect is compared, and how often if too few of them answer."""


@dataclass(slots=True)
class Corroboration:
    """Queries the GPUs of suspects, and with the policy's ``nvml`` those of undecided windows. Never waits.

    It also compares each suspect with its peers, once in an attempt, by the facts of their processes.

    Attributes:
        remarks: the last remarks on each rank's GPU.
        slowed: fraction by which its clock was below the others', for slow ones.
        differing: what differs on each rank.
    """

    remarks: dict[int, tuple[str, ...]] = field(default_factory=dict)
    slowed: dict[int, float | None] = field(default_factory=dict)
    differing: dict[int, list[str]] = field(default_factory=dict)
    _wanted: Verdict | None = None
    _compared: tuple[Verdict, Suspect, tuple[int, ...]] | None = None
    _tries: Counter[tuple[int, Hashable]] = field(default_factory=Counter)

    def want(self, verdict: Verdict, window: Window, *, of_undecided: bool) -> None:
        """Request evidence for a verdict; a newer verdict replaces it."""
        if verdict.suspects and (verdict.label == "suspect" or (of_undecided and verdict.label == "needs_evidence")):
            self._wanted = verdict
        suspect, before = verdict.named, self._compared
        if suspect is None or suspect.pattern == "one-off" or (before and before[0].attempt == verdict.attempt):
            return
        if self._tries[verdict.attempt, suspect.identity] >= TRIES:
            return
        others = sorted({*range(window.durations_NRS.shape[1])}.difference(suspect.ranks))
        peers = others if suspect.scope == "cohort" else peers_of(verdict, window)
        self._compared = verdict, suspect, tuple(peers[:MAX_PEERS])

    def compare(self, fleet: Fleet, now_s: float) -> events.DifferencesFound | None:
        """What differs between a suspect and its peers; None while nothing is known to. The next suspect waits."""
        if self._compared is None:
            return None
        verdict, suspect, peers = self._compared
        ranks, token = suspect.ranks[: events.MAX_COMPARED], f"{FACTS}{verdict.attempt}-{verdict.first_step}"
        evidence = fleet.hang_evidence(token, (*ranks, *peers))
        if evidence is None:
            return None
        self._compared = None
        facts = {rank.rank: rank.facts for rank in evidence if rank.facts}
        n_peers, peers = len(peers), tuple(rank for rank in peers if rank in facts)
        enough = facts.keys() >= {*ranks} and 2 * len(peers) >= n_peers
        self._tries[verdict.attempt, suspect.identity] += TRIES if enough else 1
        found = differences(suspect, [facts[rank] for rank in ranks if rank in facts], [facts[rank] for rank in peers])
        if not found:
            return None
        about = verdict.attempt, subject(suspect), ranks, peers, found
        event = events.DifferencesFound(now_s, *about)
        self.differing |= {rank: difference_lines(event) for rank in ranks}
        return event

    def remarks_on(self, rank: int) -> tuple[str, ...]:
        """All remarks on a rank, as its captures have them."""
        return (*self.remarks.get(rank, ()), *self.differing.get(rank, ()))

    def look(self, fleet: Fleet) -> events.EvidenceGathered | None:
        """The GPUs' answer as an event to record; None while there is nothing to report."""
        verdict = self._wanted
        if verdict is None:
            return None
        found = fleet.gpus(verdict.suspects[0].ranks)
        if found is None:
            return None
        self._wanted = None
        for rank in verdict.suspects[0].ranks:
            self.remarks[rank] = found.remarks
            self.slowed[rank] = found.gpus.get(rank, {}).get("slowed_fraction")
        if not (found.remarks or found.gpus or found.problem):
            return None
        gpus = {"problem": found.problem, "of": {str(rank): dict(gpu) for rank, gpu in found.gpus.items()}}
        return events.EvidenceGathered(found.time_s, verdict.first_step, verdict.last_step, found.remarks, gpus)


@dataclass(slots=True)
class ResumeState:
    """What earlier controllers have finished and begun, by attempt, capture or request.

    ``judged`` has the first and last step of the last decided window, ``unended`` the captures without a result, with
    their triggers, and ``attempts`` the attempt of each capture.
    """

    unended: dict[str, tuple[CaptureRequest, Trigger]] = field(default_factory=dict)
    request_ids: set[str] = field(default_factory=set)
    attempts: dict[str, int] = field(default_factory=dict)
    judged: dict[int, tuple[int, int]] = field(default_factory=dict)
    losses: Losses = field(default_factory=Losses)
    remedies: list[events.RemedyChanged] = field(default_factory=list)
    n_windows: int = 0
    n_stored: int = 0


def resume_state(records: Iterable[events.Event]) -> ResumeState:
    """The state to resume from, by a run's records, in order."""
    left, stored = ResumeState(), set[str]()
    for event in records:
        if isinstance(event, events.CaptureChanged):
            if event.result.state in ENDED:
                left.unended.pop(event.result.capture_id, None)
            if event.result.state == "stored":
                stored.add(event.result.capture_id)
        elif isinstance(event, events.RemedyChanged):
            left.remedies.append(event)
        elif isinstance(event, events.JournalCompacted):
            left.losses, left.n_windows = Losses.of_values(event.losses), event.dropped
        elif isinstance(event, events.WindowJudged | events.ManualRequestDecided | events.FollowUpDecided):
            for request in event.decision.requests:
                left.attempts[request.capture_id] = event.decision.attempt
                if request.capture_id in event.triggers:
                    left.unended[request.capture_id] = request, event.triggers[request.capture_id]
        if isinstance(event, events.WindowJudged) and event.verdict.label != "stalled":
            left.n_windows += 1
            attempt, steps = event.verdict.attempt, (event.verdict.first_step, event.verdict.last_step)
            left.judged[attempt] = max(steps, left.judged.get(attempt, steps))
            left.losses = left.losses.after(event.verdict)
        elif isinstance(event, events.ManualRequestDecided):
            left.request_ids.add(event.request.request_id)
    left.n_stored = len(stored)
    return left
