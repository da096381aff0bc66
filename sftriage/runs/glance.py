"""The first glance at a run, as data: the questions that anybody has, their answers, and what to do next. Pure.

Whatever shows a run (the page, `sftriage watch`, a report) shows these answers; what they say is in `words`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sftriage.model.events import CostMeasured, JobPaused
from sftriage.policy.losses import Losses, SuspectLoss
from sftriage.runs.advice import pipeline_of_run, straggler_of, tried_in
from sftriage.runs.following import Note, WindowRow
from sftriage.runs.outlook import DISTURBED, CaptureStatus, Outlook, outlook, telling_row
from sftriage.runs.source import View
from sftriage.traces.manifest import CauseInfo, Manifest
from sftriage.words.advice import remedy_told
from sftriage.words.amounts import hours_of_ranks, lasted, milliseconds, rank_hours, span
from sftriage.words.captures import caused
from sftriage.words.glance import (
    HEALTH,
    SLOW,
    afterwards,
    decision_phrase,
    has_host,
    last_known,
    look_at,
    reproduced_words,
    said,
    since_words,
)
from sftriage.words.keeping import triage_off
from sftriage.words.verdicts import explained

Question = Literal["healthy", "since", "who", "sure", "cost", "captured"]

MAX_SHOWN = 4
"""Captures, and candidates, that are named one by one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question (`words.QUESTIONS` has it): a few words, and lines that say more."""

    question: Question
    text: str
    more: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NextStep:
    """Something to do: in words, the command that does it, or "", and the capture that it is about, or ""."""

    text: str
    command: str = ""
    capture_id: str = ""


@dataclass(frozen=True, slots=True)
class Glance:
    """How a run stands, the answers in the order in which they are asked, and what to do next, the most useful first.

    ``lost_s`` is what the present trouble has cost of every rank's time; None where there is none, or nobody can tell.
    ``cause`` is why it is slow, where a capture of who is named has shown that.
    """

    outlook: Outlook
    answers: tuple[Answer, ...] = ()
    steps: tuple[NextStep, ...] = ()
    lost_s: float | None = None
    cause: CauseInfo | None = None


def glance_of(view: View) -> Glance:
    """The first glance at a run, judged or not yet."""
    if not view.rows:
        stands = _unjudged(view)
        return Glance(stands, steps=tuple(_watching(view)) if view.unwatched else ())
    stands = outlook(view.rows, view.became, view.asks)
    telling = telling_row(view.rows)
    since, rows = stands.since_step, view.rows if stands.face != "healthy" else ()
    trouble = [row for row in rows if row.attempt == telling.attempt and since is not None and row.last_step >= since]
    lost_s = _lost_s(trouble, stands, telling)
    answers = (
        _healthy(view, stands),
        _since(view, stands),
        _who(view, stands, telling),
        _sure(view, stands, telling, trouble),
        _cost(view, stands, telling, lost_s),
        _captured(view, stands),
    )
    cause = next(_causes(view, stands), None) if stands.named else None
    steps = (*(_watching(view) if view.unwatched else ()), *_to_do(view, stands, telling, cause))
    if view.unknown:
        step, before = view.rows[-1].last_step, f"{triage_off(view.failing)} " if view.failing else ""
        sentence = before + last_known(stands.sentence, step)
        stands = replace(stands, face="unknown", unknown_since=step, sentence=sentence)
    return Glance(stands, answers, steps, lost_s, cause)


def _unjudged(view: View) -> Outlook:
    if view.problem:
        return Outlook("no_run", view.problem)
    if view.info is None:
        return Outlook("no_run", "Start one with `sftriage run` or `sftriage demo`. This page will show it by itself.")
    if view.unwatched:
        return Outlook("unknown", said("nobody_ever"))
    if view.failing:
        return Outlook("unknown", triage_off(view.failing))
    if not view.going:
        return Outlook("no_run", "The run has ended before its first window was full.")
    return Outlook("warming_up", "No window has been judged yet: the job warms up, and fills its first one.")


def _healthy(view: View, stands: Outlook) -> Answer:
    was = HEALTH.get("suspect" if stands.face == "held" and stands.named else stands.face, SLOW)
    if view.unknown:
        step = view.rows[-1].last_step
        why = HEALTH["unknown" if view.unwatched else "off"]
        return Answer("healthy", why, (said("was", step=step, was=was[0].lower() + was[1:]),))
    return Answer("healthy", was)


def _since(view: View, stands: Outlook) -> Answer:
    before, more = stands.before, [said("no_trouble")] if stands.face == "healthy" else []
    if before is not None:
        more = [said("trouble_before", step=before.last_step, named=before.named)]
    since = said("not_known") if stands.since_step is None else since_words(stands.since_step, stands.until_step)
    if view.unknown:
        more.insert(0, said("before", since=since))
        since = said("unknown_since", step=view.rows[-1].last_step)
    return Answer("since", since, tuple(more))


def _who(view: View, stands: Outlook, telling: WindowRow) -> Answer:
    if stands.face == "healthy":
        return Answer("who", said("nobody"))
    if stands.named:
        first = telling.suspects[0]
        hosts = dict.fromkeys(view.hosts[rank] for rank in first.ranks if rank in view.hosts)
        on = said("on_host" if len(hosts) == 1 else "on_hosts", hosts=", ".join(hosts))
        more = (on,) if hosts and not has_host(first.who) else ()
        # (the first is the glance's own)
        causes = tuple(dict.fromkeys(caused(one) for one in _causes(view, stands)))
        return Answer("who", stands.named, (*more, *causes[1:]))
    named = ", ".join(f"{one.who} in {one.where}" for one in telling.candidates[:MAX_SHOWN])
    return Answer("who", said("unnamed"), (said("candidates", named=named),) if named else ())


def _sure(view: View, stands: Outlook, telling: WindowRow, trouble: Sequence[WindowRow]) -> Answer:
    clock = [said("devices")] if telling.clock == "device" else []
    steps = {"first": telling.first_step, "last": telling.last_step}
    if stands.face == "healthy":
        return Answer("sure", said("under_thresholds", **steps), tuple(clock))
    if telling.label == "stalled" or not stands.named:
        sure = said("from_outside" if telling.label == "stalled" else "not_sure")
        return Answer("sure", sure, (*explained(telling.reasons), *clock))
    judged = [row for row in trouble if row.label in ("suspect", "needs_evidence") and row.reasons != DISTURBED]
    more = [said("named_in", naming=sum(row.is_trouble_of(telling) for row in judged), windows=len(judged))]
    again = next((one.reproduced for one in _stored(view, stands) if one.reproduced is not None), None)
    if again is not None:
        more.append(said("reproduced_in", steps_with=again.steps_with, steps=again.steps))
    return Answer("sure", said("there_in", share=telling.suspects[0].persistence, **steps), (*more, *clock))


def _cost(view: View, stands: Outlook, telling: WindowRow, lost_s: float | None) -> Answer:
    captures_s, more = captures_cost_s(view.notes), []
    if telling.label == "stalled":
        lost_s = telling.exposed_s
    if stands.face != "healthy" and lost_s is not None:
        if ranks := view.telemetry.world_size:
            more.append(rank_hours(lost_s, ranks, on_devices=on_devices(view)))
        if telling.suspects and telling.label != "stalled":
            more.append(said("of_slow_step", gain=milliseconds(telling.suspects[0].gain_s)))
    if view.losses.by_suspect:
        more.append(losses_words(view.losses, on_devices=on_devices(view)))
    if paused_s := sum(one.lasted_s for one in view.notes if isinstance(one, JobPaused)):
        more.append(said("for_pauses", lost=lasted(paused_s)))
    if captures_s:
        more.append(said("for_captures", lost=lasted(captures_s)))
    if stands.face == "healthy":
        text = said("nothing_now")
    elif lost_s is None:
        text = said("not_known")
    else:
        code = "stood_still" if telling.label == "stalled" else "lost"
        text = said(code, lost=lasted(lost_s), step=view.rows[-1].last_step)
    return Answer("cost", text, tuple(more))


def on_devices(view: View) -> bool:
    """Whether its ranks run on devices, as far as its windows say."""
    return any(row.clock == "device" or "clock_limited" in row.reasons for row in view.rows)


def losses_words(losses: Losses, *, on_devices: bool) -> str:
    """What suspects have cost since a run began, and who most of it."""
    largest = losses.largest
    named = [f"{_who_where(one)} {hours_of_ranks(one.rank_s, on_devices=on_devices)}" for one in largest[:MAX_SHOWN]]
    if (more := len(largest) - MAX_SHOWN) > 0:
        named.append(f"{more:,} more")
    cost = hours_of_ranks(losses.rank_s, on_devices=on_devices)
    if len(largest) == 1:
        return said("one_since_began", cost=cost, who=_who_where(largest[0]))
    return said("since_began", cost=cost, whose=", ".join(named))


def _who_where(one: SuspectLoss) -> str:
    return f"{one.who} in {one.where}" if one.where else one.who


def captures_cost_s(notes: Sequence[Note]) -> float:
    """What captures have cost the job so far, as far as that could be measured; none gives time back."""
    return sum(max(0.0, one.cost_s) for one in notes if isinstance(one, CostMeasured) and one.cost_s is not None)


def _lost_s(trouble: Sequence[WindowRow], stands: Outlook, telling: WindowRow) -> float | None:
    """What was lost to who is named; else in windows that do not overlap, the newest first, over what is normal.

    Of the latter, one that says nothing is as the others.
    """
    if stands.named:
        # (a window that a capture disturbed adds to what was named before it)
        mine = [row.lost_s for row in trouble if row.is_trouble_of(telling) or row.reasons == DISTURBED]
        return sum(mine) or None
    known = [row.excess_s for row in trouble if row.excess_s is not None]
    if not known or stands.since_step is None:
        return None
    usual_s, lost_s, upto = sum(known) / len(known), 0.0, trouble[-1].last_step
    for row in reversed(trouble):
        if row.last_step <= upto and row.label != "stalled":
            per_s, first = row.excess_s, row.first_step
            if per_s is None:
                per_s, first = usual_s, max(first, stands.since_step)
            lost_s += (row.last_step - first + 1) * per_s
            upto = row.first_step - 1
    return lost_s


def _stored(view: View, stands: Outlook) -> Iterator[Manifest]:
    wanted = {one.capture_id: one for one in stands.captures}
    stored = [one for one in view.captures if isinstance(one, Manifest) and one.capture_id in wanted]
    yield from sorted(stored, key=lambda one: wanted[one.capture_id].role != "suspect")


def _causes(view: View, stands: Outlook) -> Iterator[CauseInfo]:
    for one in _stored(view, stands):
        if one.cause is not None and one.cause.code != "unknown":
            yield one.cause


def _captured(view: View, stands: Outlook) -> Answer:
    stored, newest = list(_stored(view, stands)), view.rows[-1]
    told = [captured_words(one) for one in stored[:MAX_SHOWN]]
    told += [said("under_way", rank=one.rank) for one in stands.captures if one.result is None]
    more = [said("no_trace", rank=one.rank, state=_ended(one)) for one in stands.lost]
    if stands.face != "healthy" and newest.outcome != "capture":
        # (the reasons of a verdict are in how sure it is)
        done = decision_phrase(newest.outcome, "" if newest.reason in ("undecided", "standstill") else newest.words)
        more.append(said("then", done=done) if told else done)
    if others := sum(isinstance(one, Manifest) for one in view.captures) - len(stored):
        more.append(said("captures_before", count=others))
    return Answer("captured", "; ".join(told) or said("nothing"), tuple(more))


def captured_words(manifest: Manifest) -> str:
    """What a stored capture is of, and whether the fault is in it."""
    capture, again = manifest.capture, manifest.reproduced
    of = said("trace", rank=capture.rank, steps=span(capture.first_step, capture.last_step))
    return of if again is None else f"{of}: {reproduced_words(again.answer, capture.role)}"


def _ended(one: CaptureStatus) -> str:
    return ", ".join(filter(None, (one.state, one.result.detail if one.result is not None else "")))


def _watching(view: View) -> Iterator[NextStep]:
    directory = shlex.quote(view.directory)
    if view.watcher.state == "unwatched" or (view.watcher.state == "left" and view.rings_there):
        text = said("take_over" if view.watcher.state == "unwatched" else "judge_rings")
        yield NextStep(text, f"sftriage attach --run {directory}")
    else:
        yield NextStep(said("judge_steps"), f"sftriage analyze {directory}")


def _to_do(view: View, stands: Outlook, telling: WindowRow, cause: CauseInfo | None) -> Iterator[NextStep]:
    if stands.face == "healthy":
        yield from _lived_with(view)
        return
    run, newest = f"--run {shlex.quote(view.directory)}", view.rows[-1]
    watched = view.going and not view.unwatched
    window = f"{telling.first_step}-{telling.last_step}"
    opened = next(_stored(view, stands), None)
    if opened is not None:
        text = said("open", rank=opened.capture.rank)
        yield NextStep(text, f"sftriage traces open {opened.capture_id} {run}", opened.capture_id)
    if stands.named and telling.label == "suspect":
        first = telling.suspects[0]
        if cause is not None:
            yield NextStep(cause.next_step)
        else:
            yield NextStep(look_at(first.who, first.stage, (view.hosts.get(rank, "") for rank in first.ranks)))
        if opened is None and watched and all(one.lost for one in stands.captures):
            # (nothing of the journal's texts goes into what is pasted into a shell)
            command = f"sftriage capture --rank {first.ranks[0]} --reason 'suspect of steps {window}' {run}"
            yield NextStep(said("capture", rank=first.ranks[0]), command)
    advice = newest.resolves if watched else afterwards(newest.reason, newest.reasons, newest.parameters)
    # (where the trace holds the fault, no limit is worth raising for another)
    there = opened is not None and opened.holds_fault in ("yes", "partly") and newest.outcome == "throttle"
    if advice and newest.outcome != "capture" and (not there or newest.reason == "already_captured"):
        yield NextStep(advice)
    yield from _lived_with(view)
    yield NextStep(said("explain"), f"sftriage explain {window} {run}")


def _lived_with(view: View) -> Iterator[NextStep]:
    """What there is about a straggler that stays: a link that was slow from the start is part of what is normal."""
    if straggler_of(view) is not None or pipeline_of_run(view) is not None:
        for told in tried_in(view):
            if told.state in ("trying", "kept"):
                yield NextStep(remedy_told(told))
        yield NextStep(said("advise"), f"sftriage advise {shlex.quote(view.directory)}")
