"""The first glance at a run, as data: the questions that anybody has, their answers, and what to do next. Pure.

Whatever shows a run (the page, `sftriage watch`, a report) shows these answers; what they say is in `words`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sftriage.events import CostMeasured
from sftriage.runs.following import Note, WindowRow
from sftriage.runs.outlook import DISTURBED, CaptureStatus, Outlook, outlook, telling_row
from sftriage.runs.source import View
from sftriage.traces.manifest import CauseInfo, Manifest
from sftriage.words import (
    HEALTH,
    REPRODUCED,
    SLOW,
    afterwards,
    decision_phrase,
    explained,
    last_known,
    lasted,
    look_at,
    rank_hours,
    since_words,
)

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
    """

    outlook: Outlook
    answers: tuple[Answer, ...] = ()
    steps: tuple[NextStep, ...] = ()
    lost_s: float | None = None


def glance_of(view: View) -> Glance:
    """The first glance at a run, judged or not yet."""
    if not view.rows:
        stands = _unjudged(view)
        return Glance(stands, steps=tuple(_watching(view)) if view.unwatched else ())
    stands = outlook(view.rows, view.became, view.asks)
    telling = telling_row(view.rows)
    trouble = [row for row in view.rows if stands.face != "healthy" and _of_trouble(row, stands, telling)]
    lost_s = _lost_s(trouble, telling)
    answers = (
        _healthy(view, stands),
        _since(view, stands),
        _who(view, stands, telling),
        _sure(view, stands, telling, trouble),
        _cost(view, stands, telling, lost_s),
        _captured(view, stands),
    )
    steps = (*(_watching(view) if view.unwatched else ()), *_to_do(view, stands, telling))
    if view.unwatched:
        step = view.rows[-1].last_step
        stands = replace(stands, face="unknown", unknown_since=step, sentence=last_known(stands.sentence, step))
    return Glance(stands, answers, steps, lost_s)


def _unjudged(view: View) -> Outlook:
    if view.problem:
        return Outlook("no_run", view.problem)
    if view.info is None:
        return Outlook("no_run", "Start one with `sftriage run` or `sftriage demo`. This page will show it by itself.")
    if view.unwatched:
        return Outlook("unknown", "Nobody watches it any more, and no window had been judged.")
    if not view.going:
        return Outlook("no_run", "The run has ended before its first window was full.")
    return Outlook("warming_up", "No window has been judged yet: the job warms up, and fills its first one.")


def _of_trouble(row: WindowRow, stands: Outlook, telling: WindowRow) -> bool:
    return row.attempt == telling.attempt and stands.since_step is not None and row.last_step >= stands.since_step


def _healthy(view: View, stands: Outlook) -> Answer:
    was = HEALTH.get("suspect" if stands.face == "held" and stands.named else stands.face, SLOW)
    if view.unwatched:
        more = f"at step {view.rows[-1].last_step:,} it was: {was[0].lower()}{was[1:]}"
        return Answer("healthy", HEALTH["unknown"], (more,))
    return Answer("healthy", was)


def _since(view: View, stands: Outlook) -> Answer:
    before = stands.before
    more: tuple[str, ...] = ("no trouble so far",) if stands.face == "healthy" else ()
    if before is not None:
        more = (f"trouble before, up to step {before.last_step:,}: {before.named}",)
    since = "not known" if stands.since_step is None else since_words(stands.since_step, stands.until_step)
    if view.unwatched:
        return Answer(
            "since", f"unknown since step {view.rows[-1].last_step:,}", (f"before that, since {since}", *more)
        )
    return Answer("since", since, more)


def _who(view: View, stands: Outlook, telling: WindowRow) -> Answer:
    if stands.face == "healthy":
        return Answer("who", "nobody")
    if stands.named:
        first = telling.suspects[0]
        hosts = dict.fromkeys(view.hosts[rank] for rank in first.ranks if rank in view.hosts)
        on = f"on {'host' if len(hosts) == 1 else 'hosts'} {', '.join(hosts)}"
        more = (on,) if hosts and not first.who.startswith("host ") else ()
        return Answer("who", stands.named, (*more, *(one.sentence for one in _causes(view, stands))))
    named = [f"{one.who} in {one.where}" for one in telling.candidates[:MAX_SHOWN]]
    more = (f"candidates, none of them sure enough: {', '.join(named)}",) if named else ()
    return Answer("who", "nobody is named", more)


def _sure(view: View, stands: Outlook, telling: WindowRow, trouble: Sequence[WindowRow]) -> Answer:
    clock = ("by the devices' clock",) if telling.clock == "device" else ()
    steps = f"steps {telling.first_step:,} to {telling.last_step:,}"
    if stands.face == "healthy":
        return Answer("sure", f"nothing over its thresholds in {steps}", clock)
    if telling.label == "stalled" or not stands.named:
        sure = "seen from outside" if telling.label == "stalled" else "not enough to name anybody"
        return Answer("sure", sure, (*explained(telling.reasons), *clock))
    judged = [row for row in trouble if row.label in ("suspect", "needs_evidence") and row.reasons != DISTURBED]
    naming = sum(row.named == stands.named for row in judged)
    more = [f"named in {naming:,} of {len(judged):,} windows that no capture disturbed"]
    for one in _stored(view, stands):
        if (again := one.reproduced) is not None:
            more.append(f"its trace shows it in {again.steps_with} of {again.steps} captured steps")
            break
    return Answer("sure", f"there in {telling.suspects[0].persistence:.0%} of {steps}", (*more, *clock))


def _cost(view: View, stands: Outlook, telling: WindowRow, lost_s: float | None) -> Answer:
    captures_s = captures_cost_s(view.notes)
    more = (f"and {lasted(captures_s)} for captures",) if captures_s else ()
    if stands.face == "healthy":
        return Answer("cost", "nothing now", more)
    ranks = view.telemetry.world_size
    if telling.label == "stalled":
        seconds, text = telling.exposed_s, f"{lasted(telling.exposed_s)} so far, in which nothing was done"
    elif lost_s is None:
        return Answer("cost", "not known", more)
    else:
        seconds, text = lost_s, f"about {lasted(lost_s)} up to step {view.rows[-1].last_step:,}"
    on_devices = any(row.clock == "device" or "clock_limited" in row.reasons for row in view.rows)
    hours = (rank_hours(seconds, ranks, on_devices=on_devices),) if ranks else ()
    if telling.suspects and telling.label != "stalled":
        hours = (*hours, f"{telling.suspects[0].gain_s * 1e3:.1f} ms of each slow step")
    return Answer("cost", text, (*hours, *more))


def captures_cost_s(notes: Sequence[Note]) -> float:
    """What captures have cost the job so far, as far as that could be measured; none gives time back."""
    return sum(max(0.0, one.cost_s) for one in notes if isinstance(one, CostMeasured) and one.cost_s is not None)


def _lost_s(trouble: Sequence[WindowRow], telling: WindowRow) -> float | None:
    """What was lost in windows that do not overlap, the newest first; one that a capture disturbed is as the others."""
    known = [per_s for row in trouble if (per_s := _lost_a_step_s(row, telling)) is not None]
    if not known:
        return None
    usual_s, lost_s, upto = sum(known) / len(known), 0.0, trouble[-1].last_step
    for row in reversed(trouble):
        if row.last_step <= upto and row.label != "stalled":
            per_s = _lost_a_step_s(row, telling)
            lost_s += (row.last_step - row.first_step + 1) * (usual_s if per_s is None else per_s)
            upto = row.first_step - 1
    return lost_s


def _lost_a_step_s(row: WindowRow, telling: WindowRow) -> float | None:
    """Seconds that a mean step of a window lost: to who is named, or to whatever makes it slower than it was."""
    if telling.named:
        return row.suspects[0].gain_s * row.suspects[0].persistence if row.named == telling.named else None
    return row.excess_s


def _stored(view: View, stands: Outlook) -> Iterator[Manifest]:
    """The captures of the present trouble that are stored, suspects before those to compare with."""
    wanted = {one.asked.capture_id: one for one in stands.captures}
    stored = [one for one in view.captures if isinstance(one, Manifest) and one.capture_id in wanted]
    yield from sorted(stored, key=lambda one: wanted[one.capture_id].asked.role != "suspect")


def _causes(view: View, stands: Outlook) -> Iterator[CauseInfo]:
    """Why it is slow, as far as the traces of the present trouble say."""
    for one in _stored(view, stands):
        if one.findings is not None and one.findings.cause is not None and one.findings.cause.code != "unknown":
            yield one.findings.cause


def _captured(view: View, stands: Outlook) -> Answer:
    told = [_stored_words(one) for one in _stored(view, stands)][:MAX_SHOWN]
    told += [f"rank {one.asked.rank}: under way" for one in stands.captures if one.result is None]
    more = [f"rank {one.asked.rank}: {one.state}{_detail(one)}" for one in stands.lost]
    newest = view.rows[-1]
    if stands.face != "healthy" and newest.outcome != "capture":
        why = "" if newest.reason in ("undecided", "standstill") else newest.words
        more.append(f"{'Then: ' if told else ''}{decision_phrase(newest.outcome, why)}")
    others = sum(isinstance(one, Manifest) for one in view.captures) - len(list(_stored(view, stands)))
    if others > 0:
        more.append(f"{others:,} {'capture' if others == 1 else 'captures'} before that")
    return Answer("captured", "; ".join(told) or "nothing", tuple(more))


def _stored_words(manifest: Manifest) -> str:
    capture = manifest.capture
    of = f"rank {capture.rank}, steps {capture.first_step:,} to {capture.last_step:,}"
    return of + ("" if manifest.reproduced is None else f": {REPRODUCED[manifest.reproduced.answer]}")


def _detail(one: CaptureStatus) -> str:
    return f", {one.result.detail}" if one.result is not None and one.result.detail else ""


def _watching(view: View) -> Iterator[NextStep]:
    """How a run that nobody watches is watched again, or judged at least."""
    run = f"--run {view.directory}"
    if view.watcher.state == "unwatched":
        yield NextStep("The job goes on: take it over.", f"sftriage attach {run}")
    elif view.watcher.state == "left" and view.rings_there:
        yield NextStep("Its ranks are gone too: judge the last steps that they recorded.", f"sftriage attach {run}")
    else:
        text = "Its ranks are gone too: judge the steps that are on record."
        yield NextStep(text, f"sftriage analyze {view.directory}")


def _to_do(view: View, stands: Outlook, telling: WindowRow) -> Iterator[NextStep]:
    if stands.face == "healthy":
        return
    run, newest = f"--run {view.directory}", view.rows[-1]
    watched = view.going and not view.unwatched
    opened = next(_stored(view, stands), None)
    if opened is not None:
        command = f"sftriage traces open {opened.capture_id} {run}"
        yield NextStep(f"Open the trace of rank {opened.capture.rank}.", command, opened.capture_id)
    if stands.named and telling.label == "suspect":
        first = telling.suspects[0]
        cause = next(_causes(view, stands), None)
        if cause is not None:
            yield NextStep(cause.next_step)
        else:
            yield NextStep(look_at(first.who, first.stage, (view.hosts.get(rank, "") for rank in first.ranks)))
        if opened is None and watched and all(one.lost for one in stands.captures):
            command = f"sftriage capture --rank {first.ranks[0]} --reason 'slow in {first.where}' {run}"
            yield NextStep(f"Capture rank {first.ranks[0]} by hand.", command)
    advice = newest.resolves if watched else afterwards(newest.reason, newest.reasons, newest.parameters)
    if advice and newest.outcome != "capture":
        yield NextStep(advice)
    yield NextStep("See the numbers that decided.", f"sftriage explain {telling.first_step}-{telling.last_step} {run}")
