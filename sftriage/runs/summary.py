"""The state of a run, computed once for all displays: its health, the first questions and answers, and what to do.

Terminal, page, reports, assistants and objects of a cluster render a `RunSummary`; `words` has the sentences. Windows
that a capture disturbed show nothing about the job: they neither begin a trouble nor end one. Pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import msgspec

from sftriage.mitigate import advice as remedies
from sftriage.model.events import CostMeasured, DifferencesFound, JobBroken, Pipeline, RemedyChanged
from sftriage.model.verdicts import is_informative
from sftriage.model.windows import plain
from sftriage.runs.decisions import (
    DISTURBED,
    CaptureStatus,
    DecisionGroup,
    Note,
    WindowRow,
    differences_in,
    groups_of,
    statuses,
)
from sftriage.runs.hangs import hang_found, requested_in
from sftriage.runs.source import TimeColumns, View
from sftriage.runs.stalls import Stall, stall_of
from sftriage.traces.manifest import CauseInfo, Manifest
from sftriage.words import run as words
from sftriage.words.decisions import afterwards, caused
from sftriage.words.differences import difference_lines
from sftriage.words.verdicts import explained, hours_of_ranks, lasted, milliseconds, span

Question = Literal["healthy", "since", "who", "sure", "cost", "captured"]

FRONTIER_WINDOWS, TREND_WINDOWS = 5, 120
"""Windows that the frontier is the mean of, and those of its trend."""
MAX_DECISIONS, MAX_CAPTURES, MAX_SHOWN = 20, 20, 4
"""The newest decisions and captures that are listed; captures and candidates that one answer names."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question of `words.run.QUESTIONS`: a few words, and lines with details."""

    question: Question
    text: str
    more: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NextStep:
    """A next step: a sentence, its command or "", and the capture that it concerns or ""."""

    text: str
    command: str = ""
    capture_id: str = ""

    @property
    def line(self) -> str:
        return f"{self.text} {self.command}".strip()


@dataclass(frozen=True, slots=True)
class Frontier:
    """Where the time of the last windows' steps went: the mean of exact accounts, which is exact too.

    ``advances_s``, by stage in the order of the step, sum to the ``exposed_s`` of a step. ``trend_s`` is the mean step
    time of each of more windows, oldest first.
    """

    first_step: int
    last_step: int
    windows: int
    exposed_s: float
    advances_s: Mapping[str, float]
    trend_s: tuple[float, ...]


class RunSummary:
    """The state of a run, the answers in the order of their questions, and the next steps, the most useful first.

    Attributes:
        decisive: the window that determines the job's state (see `decisive_row`); None before any is judged.
        health: the job's state in one word; ``sentence`` is that of the newest informative verdict.
        since_step: the step at which that state began, or the earliest of those up to ``until_step``; first judged at
            ``since_s`` (seconds since the epoch).
        named: the suspect of a trouble and its stage; "" if none is named.
        done: what was done about the newest window and why; ``resolves``: what would resolve a hold-off.
        captures: those that the trouble has led to, newest first; ``disturbed``: one disturbed the newest window.
        lost_s: the time that the trouble has cost every rank; None if there is no trouble, or the cost is unknown.
        differences: what differs between the named suspect and its peers; ``differs`` has a line for each.
        cause: why the job is slow or hangs, if a capture shows it. The ``sentence`` of a hang is its cause.
        step_times: what each step took, if the caller has read that.
    """

    def __init__(self, view: View, step_times: TimeColumns | None = None) -> None:
        self.view, self.step_times = view, step_times
        self.decisive: WindowRow | None = None
        self.since_step: int | None = None
        self.until_step: int | None = None
        self.since_s: float | None = None
        self.named = self.done = self.resolves = ""
        self.captures: tuple[CaptureStatus, ...] = ()
        self.disturbed = False
        self.lost_s: float | None = None
        self.cause: CauseInfo | None = None
        self.differences: DifferencesFound | None = None
        self._of_stall: list[Manifest] = []
        self.answers: tuple[Answer, ...] = ()
        self.steps: tuple[NextStep, ...] = (_to_watch(view),) if view.unwatched else ()
        if view.rows:
            self._judge(decisive_row(view.rows))
        else:
            self.health, self.sentence = _unjudged(view)
        broken = next((note for note in reversed(view.notes) if isinstance(note, JobBroken)), None)
        if broken is not None and not (broken.restarted or view.going):
            before = f" Before that: {self.sentence}" if view.rows else ""
            self.sentence = f"{words.event_sentence(broken)}{before}"

    @property
    def state(self) -> Literal["waiting", "warming_up", "going", "ended"]:
        """The phase of the run: before it begins, before its first window is judged, after that, or ended."""
        if self.view.info is None:
            return "waiting"
        return "ended" if not self.view.going else "going" if self.view.rows else "warming_up"

    @property
    def headline(self) -> str:
        """The health in words; with the last judged step if the run is no longer watched."""
        since = f" since step {self.view.rows[-1].last_step:,}" if self.view.rows and self.view.unknown else ""
        return words.HEADLINES[self.health] + since

    @cached_property
    def frontier(self) -> Frontier | None:
        """The frontier of the newest windows of the newest attempt, as far as they have the same stages; None: none."""
        rows, recent = self.view.rows, list[WindowRow]()
        for row in reversed(rows):
            if row.attempt != rows[-1].attempt or len(recent) == TREND_WINDOWS:
                break
            # A step that hangs has no frontier yet.
            if row.advances_s and (not recent or [*row.advances_s] == [*recent[0].advances_s]):
                recent.append(row)
        if not recent:
            return None
        taken = recent[:FRONTIER_WINDOWS][::-1]
        advances_s = {stage: sum(row.advances_s[stage] for row in taken) / len(taken) for stage in recent[0].advances_s}
        trend_s = tuple(row.step_s for row in reversed(recent))
        steps = taken[0].first_step, taken[-1].last_step
        return Frontier(*steps, len(taken), sum(advances_s.values()), advances_s, trend_s)

    @property
    def why(self) -> str:
        """The cause in words; "" if there is none, or if it is the ``sentence``."""
        hangs = self.decisive is not None and self.decisive.label == "stalled"
        return "" if self.cause is None or hangs else caused(self.cause)

    @property
    def differs(self) -> list[str]:
        return [] if self.differences is None else difference_lines(self.differences)

    @cached_property
    def times(self) -> str:
        """Where the run's time went, in a sentence; "" if unknown."""
        return "" if self.view.times is None else words.time_sentence(self.view.times)

    @cached_property
    def mended(self) -> tuple[str, ...]:
        """The newest suspects that are gone, and whether that won what was promised, a sentence each."""
        return tuple(map(words.mend_sentence, self.view.mends[-MAX_SHOWN:]))

    @cached_property
    def stall(self) -> Stall | None:
        """Where in the step each rank is, if the job is stalled and a rank is in a step."""
        if self.decisive is None or self.health != "stalled":
            return None
        rows = [row for row in self.view.rows if row.attempt == self.decisive.attempt]
        return stall_of(rows, self.decisive, self.view.telemetry.world_size)

    @cached_property
    def decisions(self) -> tuple[DecisionGroup, ...]:
        """The newest decisions on windows, consecutive like ones as one, newest first."""
        return tuple(reversed(groups_of(self.view.rows, self.view.results)[-MAX_DECISIONS:]))

    @property
    def lost(self) -> tuple[CaptureStatus, ...]:
        """The captures of the present trouble that left no trace."""
        return tuple(capture for capture in self.captures if capture.lost)

    def _judge(self, decisive: WindowRow) -> None:
        view, newest = self.view, self.view.rows[-1]
        self.decisive, self.sentence, self.disturbed = decisive, decisive.sentence, newest is not decisive
        stretch = _stretch(view.rows, decisive)
        # Trouble before a suspect was named may have had another cause.
        of_named = [row for row in stretch if row.is_trouble_of(decisive)] or stretch
        self.since_s = of_named[0].time_s
        since, self.until_step = _began(of_named, decisive)
        self.since_step = since
        trouble: list[WindowRow] = []
        before = next((row for row in reversed(view.rows) if row.named), None)
        if decisive.label != "healthy":
            self.named, self.resolves = decisive.named, newest.resolves
            self.done = words.decision_phrase(newest.outcome, newest.words)
            requests = [request for row in reversed(stretch) for request in row.requests]
            for row in view.requests:
                if row.beside and any(request.capture_id == row.beside for request in requests):
                    requests = [*row.requests, *requests]
            self.captures = statuses(requests, view.results)
            before = next((row for row in reversed(stretch) if row.named), None) if not decisive.named else None
            trouble = [row for row in view.rows if row.attempt == decisive.attempt and row.last_step >= since]
            self.lost_s = self._lost_s(trouble, decisive, since)
        self.health = _health_of(decisive, self.captures)
        found = [manifest.cause for manifest in self._stored()]
        causes = [cause for cause in found if cause is not None and cause.code != "unknown"]
        self.cause = causes[0] if causes and self.named else None
        if self.named and decisive.label == "suspect":
            self.differences = differences_in(view.notes, decisive)
        if decisive.label == "stalled":
            self._judge_hang(decisive)
        self.answers = (
            self._healthy(),
            self._since(since, before),
            self._suspect(decisive, causes),
            self._sure(decisive, trouble),
            self._cost(decisive),
            self._captured(),
        )
        self.steps = (*self.steps, *self._to_do(decisive))
        if view.unknown:
            off = f"{words.triage_off(view.failing)} " if view.failing else ""
            self.health = "unknown"
            self.sentence = f"{off}At step {newest.last_step:,}, when it was last judged: {self.sentence}"

    def _judge_hang(self, decisive: WindowRow) -> None:
        """Take the cause that a capture of this very stall has found, and name a rank only if that does."""
        requested = requested_in(self.view.rows, decisive)
        stored = [manifest for manifest in self._stored() if manifest.capture.role == "suspect"]
        self._of_stall = [manifest for manifest in stored if manifest.capture_id in requested]
        found = hang_found(self.view.rows, self.view.notes, decisive)
        # (that its reason is not known is news, too)
        self.cause = None if found is None else CauseInfo.of(found)
        if found is not None:
            self.sentence = caused(found)
            suspects = [rank for suspect in decisive.suspects[:1] for rank in suspect.ranks]
            if found.code in ("all_inside", "unknown") or found.rank not in suspects:
                self.named = ""

    def _healthy(self) -> Answer:
        was = words.HEALTH_ANSWERS.get("suspect" if self.health == "held" and self.named else self.health, words.SLOW)
        if not self.view.unknown:
            return Answer("healthy", was)
        before = f"at step {self.view.rows[-1].last_step:,} it was: {was[0].lower()}{was[1:]}"
        return Answer("healthy", words.HEALTH_ANSWERS["unknown" if self.view.unwatched else "off"], (before,))

    def _since(self, step: int, before: WindowRow | None) -> Answer:
        more = ["no trouble so far"] if self.health == "healthy" else []
        if before is not None:
            more = [f"trouble before, up to step {before.last_step:,}: {before.named}"]
        since = words.since_words(step, self.until_step)
        if self.view.unknown:
            more.insert(0, f"before that, since {since}")
            since = f"unknown since step {self.view.rows[-1].last_step:,}"
        return Answer("since", since, tuple(more))

    def _suspect(self, decisive: WindowRow, causes: Sequence[CauseInfo]) -> Answer:
        if self.health == "healthy":
            return Answer("who", "none")
        if self.named:
            first, known = decisive.suspects[0], self.view.hosts
            hosts = dict.fromkeys(known[rank] for rank in first.ranks if rank in known)
            on = f"on {'host' if len(hosts) == 1 else 'hosts'} {', '.join(hosts)}"
            more = (on,) if hosts and not words.has_host(first.who) else ()
            # (the first is the summary's own)
            return Answer("who", self.named, (*more, *self.differs, *list(dict.fromkeys(map(caused, causes)))[1:]))
        if decisive.label == "stalled" and self.cause is not None:
            return Answer("who", self.sentence)
        named = ", ".join(f"{suspect.who} in {suspect.where}" for suspect in decisive.candidates[:MAX_SHOWN])
        return Answer("who", "no rank is named", (f"candidates, none certain enough: {named}",) if named else ())

    def _sure(self, decisive: WindowRow, trouble: Sequence[WindowRow]) -> Answer:
        clock = ["by the devices' clock"] if decisive.clock == "device" else []
        steps = f"steps {decisive.first_step:,} to {decisive.last_step:,}"
        if self.health == "healthy":
            return Answer("sure", f"nothing over the thresholds in {steps}", tuple(clock))
        if decisive.label == "stalled" or not self.named:
            sure = "observed from outside" if decisive.label == "stalled" else "not enough to name a rank"
            if decisive.label == "stalled" and self.cause is not None and self.cause.code != "unknown":
                sure = "by what the ranks report of their collectives and threads"
            return Answer("sure", sure, (*explained(decisive.reasons), *clock))
        judged = [row for row in trouble if row.label in ("suspect", "needs_evidence") and row.reasons != DISTURBED]
        naming = sum(row.is_trouble_of(decisive) for row in judged)
        more = [f"named in {naming:,} of {len(judged):,} windows that no capture disturbed"]
        again = next((manifest.reproduced for manifest in self._stored() if manifest.reproduced is not None), None)
        if again is not None:
            more.append(f"its trace shows it in {again.steps_with:,} of {again.steps:,} captured steps")
        return Answer("sure", f"present in {decisive.suspects[0].persistence:.0%} of {steps}", (*more, *clock))

    def _cost(self, decisive: WindowRow) -> Answer:
        view, more, devices = self.view, [], on_devices(self.view)
        stalled, lost_s = decisive.label == "stalled", self.lost_s
        if stalled:
            lost_s = decisive.exposed_s
        if lost_s is not None:
            if ranks := view.telemetry.world_size:
                more.append(f"{hours_of_ranks(lost_s * ranks, on_devices=devices)} ({ranks:,} ranks)")
            if decisive.suspects and not stalled:
                more.append(f"{milliseconds(decisive.suspects[0].gain_s)} of each slow step")
        if self.health == "healthy":
            text = "nothing now"
        elif lost_s is None:
            text = "unknown"
        else:
            so_far = f"about {lasted(lost_s)} up to step {view.rows[-1].last_step:,}"
            text = f"{lasted(lost_s)} so far without progress" if stalled else so_far
        return Answer("cost", text, (*more, *self.mended))

    def _lost_s(self, trouble: Sequence[WindowRow], decisive: WindowRow, since: int) -> float | None:
        """Time lost to the named suspect; else the excess over normal in windows that do not overlap, newest first.

        Such a window without an excess of its own counts with the mean of the others.
        """
        if self.named:
            # (a window that a capture disturbed adds to what was named before it)
            mine = [row.lost_s for row in trouble if row.is_trouble_of(decisive) or row.reasons == DISTURBED]
            return sum(mine) or None
        known = [row.excess_s for row in trouble if row.excess_s is not None]
        if not known:
            return None
        usual_s, lost_s, upto = sum(known) / len(known), 0.0, trouble[-1].last_step
        for row in reversed(trouble):
            if row.last_step <= upto and row.label != "stalled":
                per_s, first = row.excess_s, row.first_step
                if per_s is None:
                    per_s, first = usual_s, max(first, since)
                lost_s += (row.last_step - first + 1) * per_s
                upto = row.first_step - 1
        return lost_s

    def _stored(self) -> list[Manifest]:
        """The stored captures of the trouble, those of suspects first."""
        roles = {capture.capture_id: capture.role for capture in self.captures}
        stored = [found for found in self.view.captures if isinstance(found, Manifest) and found.capture_id in roles]
        return sorted(stored, key=lambda manifest: roles[manifest.capture_id] != "suspect")

    def _captured(self) -> Answer:
        stored, newest = self._stored(), self.view.rows[-1]
        captures = [captured_words(manifest) for manifest in stored[:MAX_SHOWN]]
        captures += [f"{capture.whose}: in progress" for capture in self.captures if capture.state == "running"]
        more = [f"{lost.whose}: {', '.join(filter(None, (lost.state, lost.detail)))}" for lost in self.lost]
        if self.health != "healthy" and newest.outcome != "capture":
            # (the reasons of a verdict are in how sure it is)
            why = "" if newest.reason in ("undecided", "standstill") else newest.words
            done = words.decision_phrase(newest.outcome, why)
            more.append(f"Then: {done}" if captures else done)
        if others := sum(isinstance(capture, Manifest) for capture in self.view.captures) - len(stored):
            more.append(f"captures before that: {others:,}")
        return Answer("captured", "; ".join(captures) or "nothing", tuple(more))

    def _to_do(self, decisive: WindowRow) -> Iterator[NextStep]:
        view = self.view
        if self.health == "healthy":
            yield from _lived_with(view)
            return
        run, newest = f"--run {shlex.quote(view.directory)}", view.rows[-1]
        watched = view.going and not view.unwatched
        window = f"{decisive.first_step}-{decisive.last_step}"
        stalled = decisive.label == "stalled"
        opened = next(iter(self._of_stall if stalled else self._stored()), None)
        if stalled and self.cause is not None:
            yield NextStep(self.cause.next_step)
        if opened is not None and opened.of_hang:
            command = f"sftriage traces show {opened.capture_id} {run}"
            yield NextStep("See where each rank is.", command, opened.capture_id)
        elif opened is not None:
            command = f"sftriage traces open {opened.capture_id} {run}"
            yield NextStep(f"Open the trace of rank {opened.capture.rank}.", command, opened.capture_id)
        if self.named and decisive.label == "suspect":
            first = decisive.suspects[0]
            if self.cause is not None:
                yield NextStep(self.cause.next_step)
            else:
                hosts = (view.hosts.get(rank, "") for rank in first.ranks)
                yield NextStep(words.look_at(first.who, first.stage, hosts))
            if opened is None and watched and all(capture.lost for capture in self.captures):
                # (nothing of the journal's texts goes into what is pasted into a shell)
                command = f"sftriage capture --rank {first.ranks[0]} --reason 'suspect of steps {window}' {run}"
                yield NextStep(f"Capture rank {first.ranks[0]} by hand.", command)
        advice = newest.resolves if watched else afterwards(newest.reason, newest.reasons, newest.parameters)
        # (where the trace holds the fault, no limit is worth raising for another)
        fault_in_trace = opened is not None and opened.holds_fault in ("yes", "partly") and newest.outcome == "throttle"
        if (
            advice
            and newest.outcome != "capture"
            and not (stalled and self.cause)
            and (not fault_in_trace or newest.reason == "already_captured")
        ):
            yield NextStep(advice)
        yield from _lived_with(view)
        yield NextStep("See the numbers behind the verdict.", f"sftriage explain {window} {run}")


def decisive_row(rows: Sequence[WindowRow]) -> WindowRow:
    """The newest window that no capture disturbed, or, of this attempt of the job, the oldest."""
    at = len(rows) - 1
    while at > 0 and rows[at].reasons == DISTURBED and rows[at - 1].attempt == rows[-1].attempt:
        at -= 1
    return rows[at]


def _stretch(rows: Sequence[WindowRow], decisive: WindowRow) -> Sequence[WindowRow]:
    """The newest windows of this attempt: since it is healthy, or since it is not."""
    start = len(rows)
    while start > 0 and rows[start - 1].attempt == decisive.attempt:
        row = rows[start - 1]
        if row.reasons != DISTURBED and (row.label == "healthy") != (decisive.label == "healthy"):
            break
        start -= 1
    first = next((n for n in range(start, len(rows)) if rows[n].reasons != DISTURBED), start)
    return rows[first:]


def _began(stretch: Sequence[WindowRow], decisive: WindowRow) -> tuple[int, int]:
    """The range of steps in which the present state began; the same step twice if it is known.

    A named suspect's state began at its onset, a slowdown at its change point, any other state in its first window.
    """
    first = stretch[0]
    if decisive.label == "healthy":
        return first.first_step, first.first_step
    # The newest knows best, and its sentence says it.
    newest = [decisive.onset_step] if decisive.named and decisive.onset_step is not None else []
    onsets = newest or [row.onset_step for row in stretch if decisive.named and row.onset_step is not None]
    if not onsets and decisive.regression is not None and "regressed" in decisive.reasons:
        onsets = [decisive.regression.since_step]
    return (min(onsets), min(onsets)) if onsets else (first.first_step, first.last_step)


def _health_of(row: WindowRow, captures: Sequence[CaptureStatus]) -> words.Health:
    if row.label in ("healthy", "stalled"):
        return "healthy" if row.label == "healthy" else "stalled"
    if row.label == "needs_evidence":
        return "regressed" if "regressed" in row.reasons else "held"
    if any(not capture.lost for capture in captures):
        return "captured"
    return "throttled" if row.outcome == "throttle" else "held" if row.outcome == "hold" else "suspect"


def _unjudged(view: View) -> tuple[words.Health, str]:
    """The health and sentence of a run before its first judged window."""
    if view.problem:
        return "no_run", view.problem
    if view.info is None:
        return "no_run", "Start one with `sftriage run` or `sftriage demo`. This page updates by itself."
    if view.unwatched:
        return "unknown", "The run is no longer being watched, and no window was judged."
    if view.failing:
        return "unknown", words.triage_off(view.failing)
    if not view.going:
        return "no_run", "The run ended before its first window was complete."
    return "warming_up", "No window has been judged yet: the job is warming up or in its first window."


def on_devices(view: View) -> bool:
    """Whether its ranks run on devices, as far as its windows say."""
    return any(row.clock == "device" or "clock_limited" in row.reasons for row in view.rows)


def captures_cost_s(notes: Sequence[Note]) -> float:
    """The measured cost of captures to the job so far; a negative one counts as 0."""
    return sum(max(0.0, note.cost_s) for note in notes if isinstance(note, CostMeasured) and note.cost_s is not None)


def captured_words(manifest: Manifest) -> str:
    """The rank and steps of a stored capture, and whether the fault is in it."""
    capture, again = manifest.capture, manifest.reproduced
    whose = "every rank" if manifest.of_hang else f"rank {capture.rank}"
    of = f"{whose}, {span(capture.first_step, capture.last_step)}"
    return of if again is None else f"{of}: {words.reproduced_words(again.answer, capture.role)}"


def _to_watch(view: View) -> NextStep:
    """What to do about a run that is not watched."""
    directory, state = shlex.quote(view.directory), view.watcher.state
    if state == "unwatched" or (state == "left" and view.rings_there):
        ended = "Its ranks have ended too: judge the last steps that they recorded."
        text = "The job is still running: take it over." if state == "unwatched" else ended
        return NextStep(text, f"sftriage attach --run {directory}")
    return NextStep("Its ranks have ended too: judge the recorded steps.", f"sftriage analyze {directory}")


def _lived_with(view: View) -> Iterator[NextStep]:
    """Next steps for a straggler that stays. A link that was slow from the start counts as normal."""
    if _straggler_of(view) is not None or _pipeline_of(view) is not None:
        for remedy in tried_in(view):
            if remedy.state in ("trying", "kept"):
                yield NextStep(words.event_sentence(remedy))
        text = "The straggler stays: see what would help without fixing it."
        yield NextStep(text, f"sftriage advise {shlex.quote(view.directory)}")


def _straggler_of(view: View) -> remedies.Straggler | None:
    """The rank that stays slow: the chronic first suspect of most recent windows; None if there is none."""
    informative = (row for row in reversed(view.rows) if is_informative(row.label, row.reasons))
    chronic = [
        remedies.Straggler(first.who, first.where, first.ranks, 0, first.gain_s, row.step_s)
        if (first := next(iter(row.suspects), None)) is not None and first.pattern == "chronic"
        else None
        for row in islice(informative, remedies.RECENT_WINDOWS)
    ]
    return remedies.straggler_in(chronic[::-1], view.telemetry.world_size or 0)


def _pipeline_of(view: View) -> Pipeline | None:
    """The pipeline with a slow link, as its ranks measured it last; None if there is none, or no longer."""
    newest = next((note for note in reversed(view.notes) if isinstance(note, RemedyChanged) and note.pipeline), None)
    return None if newest is None or newest.reason in ("gone", "restarted") else newest.pipeline


def advice_of_run(
    view: View, messages: remedies.Messages | None = None, pipeline: Pipeline | None = None
) -> remedies.Advice:
    """What would help the run, by its own figures as far as no others are named."""
    straggler = _straggler_of(view)
    advice = remedies.advice_of(straggler, messages, pipeline or _pipeline_of(view), _exchange(view, straggler))
    return replace(advice, tried=tuple(tried_in(view)))


def tried_in(view: View) -> list[RemedyChanged]:
    """The results of tried remedies, the last of each group of ranks."""
    tried = [note for note in view.notes if isinstance(note, RemedyChanged) and note.state != "advised"]
    return list({remedy.switch: remedy for remedy in tried}.values())


def _exchange(view: View, straggler: remedies.Straggler | None) -> remedies.UnderStraggler | None:
    """The time of gradients around a straggler, as its group measured last; None if it is not on record."""
    for remedy in reversed(view.notes):
        if isinstance(remedy, RemedyChanged) and straggler is not None and (remedy.rank,) == straggler.ranks:
            n, ring_s = int(remedy.numbers.get("ring_ranks", 0)), remedy.numbers.get("ring_s", 0.0)
            if n >= 3 and ring_s > 0.0:
                return remedies.as_measured(n, ring_s)
    return None


def advice_lines(advice: remedies.Advice) -> list[str]:
    """The advice in words, the most useful remedy first."""
    lines = [] if advice.straggler is None else [words.straggler_sentence(advice.straggler)]
    if (slow := advice.slow_link) is not None:
        lines.append(f"{words.link_name(slow.link).capitalize()} delays a microbatch by {milliseconds(slow.delay_s)}.")
    lines = lines or [words.NO_STRAGGLER]
    lines += map(words.event_sentence, advice.tried)
    if advice.remedies and advice.best is None:
        lines.append(words.NOTHING)
    for remedy in advice.remedies:
        lines += [remedy_line(remedy), f"  Assumes: {words.ASSUMPTIONS[remedy.code]}."]
    return lines


def remedy_line(remedy: remedies.Remedy) -> str:
    """A remedy in words: what it is, what it saves, and when it pays off."""
    return f"{words.TITLES[remedy.code]}. {words.remedy_sentence(remedy)}"


def advice_values(advice: remedies.Advice) -> dict[str, Any]:
    """All figures as JSON values; seconds are of a step."""
    return {
        "straggler": None if advice.straggler is None else plain(advice.straggler),
        "slow_link": None if advice.slow_link is None else advice.slow_link._asdict(),
        "step_s": advice.step_s,
        "tried": [msgspec.to_builtins(remedy) for remedy in advice.tried],
        "best": None if advice.best is None else advice.best.code,
        "remedies": [
            plain(remedy) | {"says": words.remedy_sentence(remedy), "taken_for_granted": words.ASSUMPTIONS[remedy.code]}
            for remedy in advice.remedies
        ],
    }
