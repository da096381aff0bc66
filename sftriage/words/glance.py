"""The first glance at a run in words: how it stands, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sftriage.model.captures import Parameter, ReasonCode
from sftriage.model.windows import OTHER
from sftriage.words.decisions import RESOLUTIONS, SentenceFields
from sftriage.words.verdicts import AFTER_GRADIENTS, RESOLVES

FACES: Mapping[str, str] = {
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

GLANCE: Mapping[str, str] = {
    "was": "at step {step:,} it was: {was}",
    "unknown_since": "unknown since step {step:,}",
    "before": "before that, since {since}",
    "no_trouble": "no trouble so far",
    "trouble_before": "trouble before, up to step {step:,}: {named}",
    "not_known": "not known",
    "nobody": "nobody",
    "unnamed": "nobody is named",
    "on_host": "on host {hosts}",
    "on_hosts": "on hosts {hosts}",
    "candidates": "candidates, none of them sure enough: {named}",
    "devices": "by the devices' clock",
    "under_thresholds": "nothing over its thresholds in steps {first:,} to {last:,}",
    "from_outside": "seen from outside",
    "not_sure": "not enough to name anybody",
    "there_in": "there in {share:.0%} of steps {first:,} to {last:,}",
    "named_in": "named in {naming:,} of {windows:,} windows that no capture disturbed",
    "reproduced_in": "its trace shows it in {steps_with:,} of {steps:,} captured steps",
    "nothing_now": "nothing now",
    "stood_still": "{lost} so far, in which nothing was done",
    "lost": "about {lost} up to step {step:,}",
    "of_slow_step": "{gain} of each slow step",
    "since_began": "since the run began, suspects have cost {cost}: {whose}",
    "one_since_began": "since the run began, {who} has cost {cost}",
    "for_captures": "and {lost} for captures",
    "for_pauses": "pauses of all ranks have taken {lost}",
    "nothing": "nothing",
    "trace": "rank {rank}, {steps}",
    "under_way": "rank {rank}: under way",
    "no_trace": "rank {rank}: {state}",
    "then": "Then: {done}",
    "captures_before": "captures before that: {count:,}",
    "nobody_ever": "Nobody watches it any more, and no window had been judged.",
    "take_over": "The job goes on: take it over.",
    "judge_rings": "Its ranks are gone too: judge the last steps that they recorded.",
    "judge_steps": "Its ranks are gone too: judge the steps that are on record.",
    "open": "Open the trace of rank {rank}.",
    "capture": "Capture rank {rank} by hand.",
    "advise": "It is there to stay: see what would help without mending it.",
    "explain": "See the numbers that decided.",
}
"""What the answers to the first questions are made of, and what is to do next."""


def said(code: str, **given: object) -> str:
    """A part of an answer, with what it is said with."""
    return GLANCE[code].format(**given)


def face_words(face: str, unknown_since: int | None = None) -> str:
    """How a job stands, in a word or two."""
    return FACES[face] + ("" if unknown_since is None else f" since step {unknown_since:,}")


def last_known(sentence: str, step: int) -> str:
    """How a job stood that nobody has watched since."""
    return f"At step {step:,}, when it was last judged: {sentence}"


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
