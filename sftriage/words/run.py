"""Sentences on the state of a run and what to do, on remedies against a straggler, and on the run's other events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from sftriage.model.events import (
    CauseFound,
    DifferencesFound,
    DiskFailed,
    DiskRecovered,
    Event,
    JobBroken,
    JobPaused,
    JournalCompacted,
    RemedyChanged,
    RemedyReason,
    RingGivenUp,
)
from sftriage.model.windows import LOADER_START, OTHER
from sftriage.words.decisions import caused
from sftriage.words.departures import broken_sentence
from sftriage.words.differences import differences_sentence
from sftriage.words.verdicts import capitalized, counted, lasted, milliseconds, span

if TYPE_CHECKING:
    from sftriage.mitigate.advice import Remedy, Straggler
    from sftriage.runs.promises import Mend
    from sftriage.runs.timetable import RowCode, TimeRow, TimeTable


Health = Literal[
    "no_run", "warming_up", "healthy", "suspect", "captured", "held", "regressed", "throttled", "stalled", "unknown"
]
"""The state of a job in a word."""

HEADLINES: Mapping[Health, str] = {
    "no_run": "No run yet",
    "warming_up": "Warming up",
    "healthy": "Healthy",
    "suspect": "Slow",
    "captured": "Slow, captured",
    "held": "Undecided: held",
    "regressed": "Slower than its own best",
    "throttled": "Slow, capture throttled",
    "stalled": "Stalled",
    "unknown": "Unknown",
}

LABEL_MEANINGS: Mapping[str, str] = {
    "healthy": "no measure of the window exceeds its threshold",
    "needs_evidence": "the steps are slower, but the recorded data does not show which rank; the reasons say why",
    "suspect": "one rank or host is the cause: fixing it would make the job faster",
    "stalled": "the step in progress does not end",
}

OUTCOME_MEANINGS: Mapping[str, str] = {
    "capture": "a profiler was started on the named ranks",
    "hold": "no profiler was started, because no rank could be named or a rule waits",
    "throttle": "a rule matched, but a limit prevented the capture",
    "ignore": "there was nothing to capture",
}

QUESTIONS: Mapping[str, str] = {
    "healthy": "Is the job healthy?",
    "since": "Since when?",
    "who": "Which rank, and where?",
    "sure": "How sure is that?",
    "cost": "What has it cost so far?",
    "captured": "What was captured?",
}

HEALTH_ANSWERS: Mapping[str, str] = {
    "healthy": "Yes",
    "held": "It is slower, but no rank can be named",
    "regressed": "It is slower than before, and no single rank is the cause",
    "stalled": "No: it is stalled",
    "unknown": "Unknown: it is no longer being watched",
    "off": "Unknown: triage is off",
}
"""The answer to the first question, by the job's state; `SLOW` for any other state."""

SLOW = "No: it is slow"


OUTCOMES: Mapping[str, str] = {
    "capture": "Captured",
    "hold": "Held, no profiler was started",
    "throttle": "Throttled, no profiler was started",
    "ignore": "Nothing was done",
}

REPRODUCED: Mapping[str, str] = {
    "yes": "the fault is in it",
    "partly": "the fault is in some of its steps",
    "no": "the fault is not in it",
}
"""Whether a suspect's capture contains the fault."""

REPRODUCED_BESIDE: Mapping[str, str] = {
    "yes": "for comparison; the fault was in the suspect's steps",
    "partly": "for comparison; the fault was in some of the suspect's steps",
    "no": "for comparison; the fault was not in the suspect's steps",
}
"""The same for the capture of a control rank, which has no fault."""


def below_headline(headline: str, text: str) -> str:
    """A sentence below its headline, without the headline's word at its beginning."""
    text = text.removeprefix(f"{headline}: ")
    return text[:1].upper() + text[1:]


def reproduced_words(answer: str, role: str) -> str:
    """Whether the fault was present while a rank in this role was captured."""
    return (REPRODUCED_BESIDE if role == "control" else REPRODUCED)[answer]


_COMPUTES = "its device's clocks and temperature, its CPUs, and what only this rank computes"
LOOK_AT: Mapping[str | None, tuple[str, str]] = {
    "data": ("the data loader", "the storage it reads from, its worker processes, and their CPUs"),
    "h2d": ("the copies to the device", "whether the host's memory is pinned, and the link of that GPU"),
    "forward": ("the forward pass", _COMPUTES),
    "backward": ("the backward pass", _COMPUTES),
    "optimizer": ("the optimizer", "what only this rank does there: logging, checkpoints, a hook"),
    OTHER: ("the code outside the named stages", "what only this rank does there: logging, checkpoints, evaluation"),
    None: ("everything", "its device's clocks and temperature, its CPUs, and what else runs on its host"),
}
"""What to look at, by the slow stage; None: all local stages are slow alike."""


def decision_phrase(outcome: str, words: str) -> str:
    """What was done, and why."""
    return ": ".join(filter(None, (OUTCOMES.get(outcome, outcome), words)))


def since_words(first_step: int, last_step: int | None) -> str:
    """The step at which a state began, or the steps between which it began."""
    known = last_step in (None, first_step)
    return f"step {first_step:,}" if known else f"a step between {first_step:,} and {last_step:,}"


def has_host(subject: str) -> bool:
    """Whether the words for a suspect name its host."""
    return subject.startswith("host ") or " on " in subject


def look_at(subject: str, stage: str | None, hosts: Iterable[str]) -> str:
    """Where to look, by the suspect and its stage."""
    named = list(dict.fromkeys(filter(None, hosts)))
    on = f" on host {named[0]}" if len(named) == 1 else f" on hosts {', '.join(named)}" if named else ""
    thing, details = LOOK_AT.get(stage, (stage or "", "what only it does there"))
    return f"Look at {thing} of {subject}{'' if has_host(subject) else on}: {details}."


TITLES = {
    "take_out": "Take it out",
    "rebalance": "Give it less work",
    "stragglar": "All-reduce around it (StragglAR)",
    "pipeline": "Run stages further ahead (Adaptra)",
    "host_transfers": "Send activations from the host",
}
ASSUMPTIONS = {
    "take_out": "the others share its work evenly, the whole step scales with the work, and no spare replaces it",
    "rebalance": "the whole step scales with the work, and work can be divided unevenly",
    "stragglar": "all ranks take part in one ring all-reduce of that size a step, after the straggler's last gradient; "
    "every pair of ranks has an equal link of its own",
    "pipeline": "every microbatch takes its stage's median time, links only add delay, and activations fit in memory",
    "host_transfers": "transfers delay what the device computes next, which the recording does not show",
}
REMEDIES = {
    "take_out": "{saves} ({with_a_spare_s} with a spare in its place); {pays}.",
    "rebalance": "{saves} if it keeps {its_share:.0%} of its work and the others take the rest; pays off wherever "
    "possible.",
    "rebalance, unknown": "{saves}; pays off wherever possible.",
    "stragglar": "{saves}: {after_s} after the straggler arrives instead of {ring_s}; {pays}.",
    "stragglar, unknown": "Saves up to {most_of_ring:.0%} of an all-reduce; pays off if the straggler is late by "
    "more than {break_even_of_ring:.0%} of one. For seconds, give --gradients and --bandwidth.",
    "pipeline": "{saves} with stages {ahead} microbatches ahead: {adapted_s} ({ideal_s} without delays).",
    "host_transfers, unknown": "If transfers delay the next computation, a step still takes {held_up_s}; sent "
    "from the host, {not_held_up_s}.",
}
"""What a remedy saves, and when it pays off; "unknown": the saving is not known in seconds."""
SHOWN_S = 5e-5
"""Less than this is written as 0.0 ms."""
NOTHING = "No known remedy is worthwhile here."
NO_STRAGGLER = "No rank has been slow for long enough to need a remedy."


def straggler_sentence(straggler: Straggler) -> str:
    """The straggler that the advice is about."""
    late = f"{milliseconds(straggler.late_s)} of each {milliseconds(straggler.step_s)}"
    return f"{capitalized(straggler.who)} delays {straggler.n_ranks} ranks in {straggler.where} by {late} step."


def link_name(link: int) -> str:
    """A link of a pipeline, by the number of the stage before it."""
    return f"the link between stages {link} and {link + 1}"


def remedy_sentence(remedy: Remedy) -> str:
    """What a remedy saves, and when it pays off."""
    saves_s, pays_from_s = remedy.saves_s, remedy.pays_from_s
    saves = "Saves nothing"
    if saves_s is None:
        saves = "Saves an unknown amount"
    elif abs(saves_s) >= SHOWN_S:
        more = f"Costs {milliseconds(-saves_s)} more a step"
        saves = f"Saves {milliseconds(saves_s)} a step" if saves_s > 0 else more
    late = "" if pays_from_s is None else f"pays off if it is late by more than {milliseconds(pays_from_s)}"
    shown = {name: milliseconds(number) if name.endswith("_s") else number for name, number in remedy.numbers.items()}
    template = REMEDIES[remedy.code if saves_s is not None else f"{remedy.code}, unknown"]
    ahead = ", ".join(map(str, remedy.ahead))
    return template.format(saves=saves, pays=late or "never pays off here", ahead=ahead, **shown)


REMEDY_REASONS: Mapping[RemedyReason, str] = {
    "worthwhile": "its model predicts a worthwhile saving",
    "helps": "it helps",
    "no_help": "it does not help",
    "moved": "another rank is the straggler now",
    "gone": "there is no longer a straggler",
    "not_allowed": "the policy does not allow it",
    "no_room": "stages have no room for more activations",
    "not_switched": "not all ranks switched",
    "restarted": "the ranks restarted",
    "interrupted": "its trial was interrupted",
}


def event_sentence(event: Event | DiskFailed) -> str:
    """An event other than windows, captures and policies, in a sentence; "" if it has none."""
    match event:
        case CauseFound(code=code) if code != "unknown":
            return caused(event)
        case RemedyChanged():
            return _remedy_changed(event)
        case JobBroken():
            return broken_sentence(event)
        case DifferencesFound():
            return differences_sentence(event)
        case JobPaused():
            steps = span(event.first_step, event.last_step)
            return f"The job paused for {lasted(event.lasted_s)} in {steps} (all ranks, in {event.stage})."
        case JournalCompacted():
            windows = f"{event.dropped:,} windows up to step {event.dropped_step:,}"
            return f"The journal reached its size limit: {windows} that led to no capture were dropped."
        case RingGivenUp():
            return f"Rank {event.rank} counts as missing: its records cannot be read ({event.reason})."
        case DiskFailed():
            return f"{disk_now(event.problem)} Training continues."
        case DiskRecovered():
            return _disk_recovered(event)
    return ""


def _remedy_changed(change: RemedyChanged) -> str:
    numbers = {name: milliseconds(number) for name, number in change.numbers.items() if name.endswith("_s")}
    late = f", late by {numbers['delay_s']} a microbatch" if "delay_s" in numbers else ""
    subject, why = f"{TITLES[change.remedy]}, {change.who} in {change.where}{late}", REMEDY_REASONS[change.reason]
    if change.state == "advised" and change.reason != "not_allowed":
        return f"{subject}: not tried, because {why}."
    if change.state in ("advised", "trying"):
        done = "on trial" if change.state == "trying" else f"not tried, because {why}"
        return f"{subject}: {done}; predicted saving: {numbers.get('expected_s', 'unknown')} a step."
    measured = ""
    if "on_s" in numbers:
        measured = "; a step takes {on_s} with it and {off_s} without (± {error_s})".format_map(numbers)
    return f"{subject}: {change.state}, because {why}{measured}."


TIME_ROWS: Mapping[RowCode, str] = {
    "useful": "useful steps",
    "suspect": "",
    "alone": "{subject} alone",
    "shared": "all ranks",
    "pause": "pauses",
    "stall": "stalls",
    "capture": "captures",
    "start": "start, until the first step",
    "warm_up": "slow first steps",
    "restart": "restarts, until the next step",
    "end": "after the last step",
    "unaccounted": "not accounted for",
}
"""Where a run's time went, in words; a suspect's name is its own."""
KINDS_OF_WORK: Mapping[str, str] = {LOADER_START: "the loader's workers start anew"}
"""What ranks note of a step, in words, as far as that is no word of its own."""


def time_row_name(row: TimeRow) -> str:
    """What a row of the time table is about."""
    where = KINDS_OF_WORK.get(row.kind, row.kind) or (f"in {row.stage}" if row.stage else "")
    named = TIME_ROWS[row.code].format(subject=row.subject or "one rank") or row.subject
    named = f"{named} of {row.subject}" if row.code == "pause" and row.subject else named
    return f"{named}: {where}" if row.kind else f"{named} {where}".strip()


def time_row_detail(row: TimeRow) -> str:
    """How often, and how long each time; "" if it was once."""
    if row.code == "useful":
        each_s = row.seconds / max(1, row.steps)
        return f"{counted(row.steps, 'step')}, {milliseconds(each_s) if each_s < 1.0 else lasted(each_s)} each"
    if row.steps < 2:
        return ""
    advice = "; persistent_workers keeps them" if row.kind == LOADER_START else ""
    often = f"every {row.period_steps:,} steps" if row.period_steps else f"in {row.steps:,} steps"
    often = f"{row.steps:,} times" if row.code == "restart" else often
    return f"{often}, {lasted(row.seconds / row.steps)} each{advice}"


SHOWN_TIME_ROWS = 5


def time_sentence(times: TimeTable) -> str:
    """The time table in a sentence: the useful part, and the largest others."""
    useful, *others = times.rows
    text = f"Of {lasted(times.wall_s)}, {times.share(useful):.0%} went to useful steps"
    named = [f"{time_row_name(row)} {times.share(row):.1%}" for row in others[:SHOWN_TIME_ROWS]]
    if more_s := sum(row.seconds for row in others[SHOWN_TIME_ROWS:]):
        named.append(f"others {more_s / times.wall_s:.1%}")
    return f"{text}; {', '.join(named)}." if named else f"{text}."


MENDED = {
    "by_itself": "{who} mended by step {step:,}",
    "restart": "{who} mended since step {step:,} (restart)",
    "run": "{who} mended since run {run}",
    "remedy": "{who} mended since step {step:,} (remedy)",
}
"""Who is mended since when, by how that came about."""
DIFFERENCES = {
    "ranks": "{before} ranks before, {now} now",
    "stages": "the stages are others",
    "clock": "by the {before}'s clock before, by the {now}'s now",
    "work": "{before} of work a step before, {now} now",
    "slow": "{now} became slow meanwhile",
}
"""What else has changed, so that steps before and after a mend do not compare."""
JUDGEMENTS = {
    "kept": "{gained}, {promised} promised.",
    "less": "{gained}, less than the {promised} promised.",
    "more": "{gained}, more than the {promised} promised.",
    "not_comparable": "{promised} a step promised, not comparable ({difference}).",
}


def mend_sentence(mend: Mend) -> str:
    """Who is mended, what that won, and what was promised."""
    who = f"{capitalized(' and '.join(mend.who) or 'the slowdown of the job')} {'are' if len(mend.who) > 1 else 'is'}"
    promised = " to ".join(dict.fromkeys(milliseconds(each_s) for each_s in (mend.least_s, mend.promised_s)))
    gained = difference = ""
    if mend.measured_s is not None and mend.error_s is not None:
        less = "less" if mend.measured_s >= 0.0 else "more"
        gained = f"{milliseconds(abs(mend.measured_s))} a step {less} (± {milliseconds(mend.error_s)})"
    if mend.difference is not None:
        difference = DIFFERENCES[mend.difference.what].format(before=mend.difference.before, now=mend.difference.now)
    since = MENDED[mend.by].format(who=who, step=mend.since_step, run=mend.run)
    return f"{since}: {JUDGEMENTS[mend.judgement].format(gained=gained, promised=promised, difference=difference)}"


def thinning(whole_from_step: int, first_step: int, block_steps: int, period_steps: int) -> str:
    """Which of a run's older steps are thinned or removed."""
    gone = f" Steps before {first_step:,} are removed." if first_step else ""
    of = f"the first {block_steps} of every {period_steps:,}"
    return f"Of the steps before {whole_from_step:,}, {of} are kept, plus those around captures.{gone}"


def triage_off(problem: str) -> str:
    """The sentence that nothing is judged or captured now, and why."""
    return f"Triage is off: {problem}. sftriage retries; training continues. See failures.log in the run directory."


def disk_now(problem: str) -> str:
    """The sentence that the run directory cannot be written now."""
    return (
        f"The run directory cannot be written ({problem}). New records wait in memory and are written "
        "as soon as possible."
    )


def _disk_recovered(event: DiskRecovered) -> str:
    lasted = f"{max(0.0, event.time_s - event.since_s):.0f} s"
    begin = (
        f"can be written again after {lasted}" if event.over else f"could not be written for the run's last {lasted}"
    )
    late = f" Written late: {_amounts(event.late, None)}." if event.late else ""
    lost = f"Lost: {_amounts(event.lost, event.lost_steps)}." if event.lost else "Nothing is lost."
    return f"The run directory {begin} ({event.problem}).{late} {lost}"


def _amounts(amounts: Mapping[str, int], steps: tuple[int, int] | None) -> str:
    of = {"windows": f" (of steps {steps[0]} to {steps[1]})"} if steps is not None else {}
    named = {kind: kind if n != 1 else kind.removesuffix("s") for kind, n in amounts.items()}
    return ", ".join(f"{amounts[kind]:,} {name}{of.get(kind, '')}" for kind, name in sorted(named.items()))
