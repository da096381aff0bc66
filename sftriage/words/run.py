"""How a run stands, and what to do; what would help against a straggler; and what else is on record of it; in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from sftriage.model.captures import Parameter, ReasonCode
from sftriage.model.events import (
    CauseFound,
    DiskFailed,
    DiskRecovered,
    Event,
    JobPaused,
    JournalCompacted,
    RemedyChanged,
    RemedyReason,
    RingGivenUp,
)
from sftriage.model.windows import OTHER
from sftriage.words.decisions import RESOLUTIONS, SentenceFields, caused
from sftriage.words.verdicts import AFTER_GRADIENTS, RESOLVES, lasted, milliseconds, span

if TYPE_CHECKING:
    from sftriage.mitigate.advice import Remedy, Straggler


Face = Literal[
    "no_run", "warming_up", "healthy", "suspect", "captured", "held", "regressed", "throttled", "stalled", "unknown"
]
"""How a job stands, in a word."""

FACES: Mapping[Face, str] = {
    "no_run": "No run yet",
    "warming_up": "Warming up",
    "healthy": "Healthy",
    "suspect": "Slow",
    "captured": "Slow, and captured",
    "held": "Undecided: held",
    "regressed": "Slower than its own best",
    "throttled": "Slow, capture throttled",
    "stalled": "Stalled",
    "unknown": "Unknown",
}

LABEL_MEANINGS: Mapping[str, str] = {
    "healthy": "nothing in the window's steps is over its threshold",
    "needs_evidence": "the steps are slower, and nobody can be named from what was recorded; the reason is said",
    "suspect": "one rank, or host, is why: mending it would make the job quicker",
    "stalled": "the step in progress does not end",
}

OUTCOME_MEANINGS: Mapping[str, str] = {
    "capture": "a profiler was started on the ranks that are named",
    "hold": "nothing heavy was started, because nobody could be named, or a rule waits",
    "throttle": "a rule matched, and one of its limits kept the profiler from being started",
    "ignore": "there was nothing to capture",
}

QUESTIONS: Mapping[str, str] = {
    "healthy": "Is the job healthy?",
    "since": "Since when?",
    "who": "Who, and where?",
    "sure": "How sure is that?",
    "cost": "What did it cost so far?",
    "captured": "What was captured?",
}

HEALTH: Mapping[str, str] = {
    "healthy": "Yes",
    "held": "It is slower, and nobody can be named",
    "regressed": "It is slower than it has been, and nobody alone is why",
    "stalled": "No: it stands still",
    "unknown": "Unknown: nobody watches it any more",
    "off": "Unknown: triage is off",
}
"""The first answer, by the face; that of any other is `SLOW`."""

SLOW = "No: it is slow"


OUTCOMES: Mapping[str, str] = {
    "capture": "Captured",
    "hold": "Held, nothing heavy was started",
    "throttle": "Throttled, nothing heavy was started",
    "ignore": "Nothing was done",
}

REPRODUCED: Mapping[str, str] = {
    "yes": "the fault is in it",
    "partly": "the fault is in some of its steps",
    "no": "the fault is not in it",
}
"""Of a suspect's capture: whether it holds what it was made for."""

REPRODUCED_BESIDE: Mapping[str, str] = {
    "yes": "to compare with; the fault was in the suspect's steps meanwhile",
    "partly": "to compare with; the fault was in some of the suspect's steps meanwhile",
    "no": "to compare with; the fault was not in the suspect's steps meanwhile",
}
"""The same of the capture of a control rank, which has none."""


def reproduced_words(answer: str, role: str) -> str:
    """Whether the fault was there while a rank in this role was captured."""
    return (REPRODUCED_BESIDE if role == "control" else REPRODUCED)[answer]


LOOK_AT: Mapping[str | None, tuple[str, str]] = {
    "data": ("the data loader", "the storage it reads from, its worker processes, and the CPUs that they have"),
    "h2d": ("the copies to the device", "whether the host's memory is pinned, and the link of that GPU"),
    "forward": ("the forward pass", "its device's clocks and temperature, its CPUs, and what only this rank computes"),
    "backward": (
        "the backward pass",
        "its device's clocks and temperature, its CPUs, and what only this rank computes",
    ),
    "optimizer": ("the optimizer", "what this rank does there alone: logging, checkpoints, a hook"),
    OTHER: ("the code outside the named stages", "what this rank does there alone: logging, checkpoints, evaluation"),
    None: ("everything", "its device's clocks and temperature, its CPUs, and what else runs on its host"),
}
"""What to look at, by the stage that is slow; None is all local stages alike."""

AFTERWARDS: Mapping[str, str] = {
    "sync_ambiguous": "The time was lost inside a stage where ranks wait for each other, and there they all tie. For "
    "the next run, with DDP, monitor.watch(model) tells work from waiting there; under FSDP it cannot.",
    "one_off": "It has passed: `sftriage explain` says in which steps it was.",
    "descheduled": "See what else ran on its cores, or limited its CPU time.",
    "cgroup_throttled": "For the next run, raise the CPU limit of its cgroup.",
    "stopped": "See who sent its process SIGSTOP and SIGCONT.",
    "page_faults": "For the next run, give its host more memory.",
    "memory_pressure": "For the next run, give its cgroup more memory.",
    "pending": "For the next run, lower the rule's `for`.",
    "active": "For the next run, change active.cron.",
    "overhead_budget": "For the next run, raise limits.overhead_budget.",
    "captures_per_run": "For the next run, raise limits.captures_per_run.",
    "captures_per_hour": "For the next run, raise limits.captures_per_hour.",
    "captures_per_day": "For the next run, raise limits.captures_per_day.",
    "place_kept": "For the next run, raise limits.{place_of}.",
    "already_captured": "Look at the trace that there is.",
    "cooldown": "For the next run, shorten the rule's cooldown.",
    "after_failures": "`sftriage decisions` says why its captures failed.",
    "rank_busy": "For the next run, make captures shorter.",
    "concurrent_ranks": "For the next run, raise limits.concurrent_ranks.",
    "no_such_rank": "",
    "captures_left": "For the next run, raise limits.",
    "roaming": "A different rank led from step to step: look for what moves with the data or the clock (uneven "
    "batches, garbage collection, a shared filesystem).",
    "low_coverage": "Ranks or steps are missing: check that every rank runs the recorder.",
    "no_baseline": "Every rank was slower alike, or one of two, from the start: compare with a run that was quicker.",
    "intermittent": "Too few steps were slow to tell it from chance: for the next run, lower min_persistence if short "
    "bursts are what you are after.",
    "self_inflicted": "The last windows were slowed by a capture: look at those before it.",
    "not_arrived": "The other ranks waited for those that are named: look at what their stage reads from or calls; "
    "where their stacks were captured, these say where they hung.",
    "in_sync": "All ranks were inside the same sync stage: where their stacks were captured, these say which "
    "collective some did not enter.",
    "no_rank_waits": "No rank was in a sync stage: look at what those that got least far share with the others.",
    "outside_steps": "No rank was in a step: see whether the job evaluated, saved or loaded.",
    "unseen_ranks": "Some ranks of the job showed nothing: see whether they ran, and recorded.",
    "died": "The process of a named rank was gone, and the others waited for it: look for its last words, and in the "
    "kernel's log whether memory ran out.",
}
"""What to do about a hold-off or a reason once the run has ended, where that is not what would have resolved it."""


def decision_phrase(outcome: str, words: str) -> str:
    """What was done, and why."""
    return ": ".join(filter(None, (OUTCOMES.get(outcome, outcome), words)))


def since_words(first_step: int, last_step: int | None) -> str:
    """Since which step something is so, or between which ones that began."""
    between = f"a step between {first_step:,} and {last_step:,}"
    return f"step {first_step:,}" if last_step in (None, first_step) else between


def has_host(who_: str) -> bool:
    """Whether the words for a suspect name its host."""
    return who_.startswith("host ") or " on " in who_


def look_at(who_: str, stage: str | None, hosts: Iterable[str]) -> str:
    """Where to look, of whom and what is named."""
    there = list(dict.fromkeys(filter(None, hosts)))
    on = f" on host {there[0]}" if len(there) == 1 else f" on hosts {', '.join(there)}" if there else ""
    thing, what = LOOK_AT.get(stage, (stage or "", "what only it does there"))
    return f"Look at {thing} of {who_}{'' if has_host(who_) else on}: {what}."


def afterwards(reason: ReasonCode, reasons: Iterable[str], parameters: Mapping[str, Parameter]) -> str:
    """What to do about a decision not to capture, or a stall, once the run has ended and nothing is waited for."""
    codes = (reason,) if reason in RESOLUTIONS else tuple(reasons)
    known = {**RESOLVES, **AFTERWARDS, **({"sync_ambiguous": AFTER_GRADIENTS} if parameters.get("split") else {})}
    said = (known.get(code, "") for code in codes)
    return " ".join(filter(None, said)).format_map(
        SentenceFields({name: str(value) for name, value in parameters.items()})
    )


TITLES = {
    "take_out": "Take it out",
    "rebalance": "Give it less to do",
    "stragglar": "All-reduce around it (StragglAR)",
    "pipeline": "Run stages further ahead (Adaptra)",
    "host_transfers": "Send activations from the host",
}
ASSUMPTIONS = {
    "take_out": "the others share its work evenly, all of a step grows with the work, and no spare takes its place",
    "rebalance": "all of a step grows with the work, and work can be shared out unevenly",
    "stragglar": "every rank is in one all-reduce of that size a step, as a ring, after the straggler's last gradient; "
    "any two ranks have the same link to themselves",
    "pipeline": "every microbatch takes its stage's median, links delay and do not limit, and activations fit",
    "host_transfers": "transfers hold up what the device computes next, which the recording does not show",
}
REMEDIES = {
    "take_out": "{saves}, with a spare in its place {with_a_spare_s}; {pays}.",
    "rebalance": "{saves} with {its_share:.0%} of its work for it, and more for the others; pays wherever it can be "
    "done.",
    "rebalance, unknown": "{saves}; pays wherever it can be done.",
    "stragglar": "{saves}: {after_s} once it is there, and not {ring_s}; {pays}.",
    "stragglar, unknown": "Saves up to {most_of_ring:.0%} of an all-reduce, and pays where the straggler is late by "
    "more than {break_even_of_ring:.0%} of one. Name --gradients and --bandwidth to have it in seconds.",
    "pipeline": "{saves} with stages {ahead} microbatches ahead: {adapted_s}, and {ideal_s} without delays.",
    "host_transfers, unknown": "Where transfers hold up what is computed next, a step is {held_up_s} even so; sent "
    "from the host, {not_held_up_s}.",
}
"""What a remedy saves, and from where on; "unknown" where what it saves is not known in seconds."""
SHOWN_S = 5e-5
"""Less than this is written as 0.0 ms."""
NOTHING = "Nothing that is known here is worth the trouble."
NOBODY = "Nobody has been slow for long enough to be lived with."


def straggler_sentence(one: Straggler) -> str:
    """Who the advice is about."""
    who, late = f"{one.who[:1].upper()}{one.who[1:]}", f"{milliseconds(one.late_s)} of the {milliseconds(one.step_s)}"
    return f"{who} holds up {one.n_ranks} ranks in {one.where}, by {late} of a step."


def link_name(link: int) -> str:
    """A link of a pipeline, by the number of the stage before it."""
    return f"the link between stages {link} and {link + 1}"


def remedy_sentence(remedy: Remedy) -> str:
    """What a remedy saves, and from where on."""
    saves_s, pays_from_s = remedy.saves_s, remedy.pays_from_s
    saves = "Saves nothing"
    if saves_s is None:
        saves = "Saves what cannot be said from here"
    elif abs(saves_s) >= SHOWN_S:
        more = f"Costs {milliseconds(-saves_s)} a step more"
        saves = f"Saves {milliseconds(saves_s)} a step" if saves_s > 0 else more
    late = "" if pays_from_s is None else f"pays where it is late by more than {milliseconds(pays_from_s)}"
    shown = {name: milliseconds(one) if name.endswith("_s") else one for name, one in remedy.numbers.items()}
    template = REMEDIES[remedy.code if saves_s is not None else f"{remedy.code}, unknown"]
    ahead = ", ".join(map(str, remedy.ahead))
    return template.format(saves=saves, pays=late or "never pays here", ahead=ahead, **shown)


REMEDY_REASONS: Mapping[RemedyReason, str] = {
    "worthwhile": "it is worth the trouble by its model",
    "helps": "it helps",
    "no_help": "it does not help",
    "moved": "another one is the straggler now",
    "gone": "there is no straggler any more",
    "not_allowed": "the policy does not allow it",
    "no_room": "stages have no room for more activations",
    "not_switched": "not all ranks switched",
    "restarted": "the ranks began anew",
    "interrupted": "its trial was cut off",
}


def event_sentence(event: Event | DiskFailed) -> str:
    """What is on record beside windows, captures and policies, in a sentence; "" of what has none."""
    match event:
        case CauseFound(code=code) if code != "unknown":
            return caused(event)
        case RemedyChanged():
            return _remedy_changed(event)
        case JobPaused():
            steps = span(event.first_step, event.last_step)
            return f"The job paused for {lasted(event.lasted_s)} in {steps} (all ranks, in {event.stage})."
        case JournalCompacted():
            windows = f"{event.dropped:,} windows up to step {event.dropped_step:,}"
            return f"The journal is bounded: {windows} that led to no capture are gone."
        case RingGivenUp():
            return f"Rank {event.rank} counts as missing: what it records cannot be read ({event.reason})."
        case DiskFailed():
            return f"{disk_now(event.problem)} Training goes on."
        case DiskRecovered():
            return _disk_recovered(event)
    return ""


def _remedy_changed(seen: RemedyChanged) -> str:
    numbers = {name: milliseconds(number) for name, number in seen.numbers.items() if name.endswith("_s")}
    late = f", late by {numbers['delay_s']} a microbatch" if "delay_s" in numbers else ""
    what, why = f"{TITLES[seen.remedy]}, {seen.who} in {seen.where}{late}", REMEDY_REASONS[seen.reason]
    if seen.state == "advised" and seen.reason != "not_allowed":
        return f"{what}: not tried, for {why}."
    if seen.state in ("advised", "trying"):
        done = "is tried" if seen.state == "trying" else f"not tried, for {why}"
        return f"{what}: {done}; it would save {numbers.get('expected_s', 'something')} a step by its model."
    measured = ""
    if "on_s" in numbers:
        measured = "; a step is {on_s} with it, and {off_s} without, give or take {error_s}".format_map(numbers)
    return f"{what}: {seen.state}, for {why}{measured}."


def thinning(whole_from_step: int, first_step: int, block_steps: int, period_steps: int) -> str:
    """What is no longer there of a run's steps: those before one are thinned, and those before another have gone."""
    gone = f" Of those before {first_step:,} none are." if first_step else ""
    of = f"the first {block_steps} of every {period_steps:,}"
    return f"Of the steps before {whole_from_step:,}, {of} are kept, and those around captures.{gone}"


def triage_off(problem: str) -> str:
    """That nothing is judged or captured now, and why."""
    return f"Triage is off: {problem}. It is tried again; training goes on. See failures.log in the run directory."


def disk_now(problem: str) -> str:
    """That the run directory takes nothing now."""
    return (
        f"The run directory cannot be written ({problem}). What is judged meanwhile waits in memory, and is on record "
        "once it can."
    )


def _disk_recovered(seen: DiskRecovered) -> str:
    lasted = f"{max(0.0, seen.time_s - seen.since_s):.0f} s"
    begin = f"can be written again after {lasted}" if seen.over else f"could not be written in the run's last {lasted}"
    late = f" Written late: {_amounts(seen.late, None)}." if seen.late else ""
    lost = f"Lost: {_amounts(seen.lost, seen.lost_steps)}." if seen.lost else "Nothing is lost."
    return f"The run directory {begin} ({seen.problem}).{late} {lost}"


def _amounts(amounts: Mapping[str, int], steps: tuple[int, int] | None) -> str:
    of = {"windows": f" (of steps {steps[0]} to {steps[1]})"} if steps is not None else {}
    named = {kind: kind if n != 1 else kind.removesuffix("s") for kind, n in amounts.items()}
    return ", ".join(f"{amounts[kind]:,} {name}{of.get(kind, '')}" for kind, name in sorted(named.items()))
