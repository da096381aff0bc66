"""Verdicts, decisions and captures in words. The same ones everywhere: on a terminal, in a manifest, on a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sftriage.records import (
    OTHER,
    CaptureRequest,
    CaptureResult,
    CaptureState,
    Decision,
    Parameter,
    Profiler,
    ReasonCode,
    Regression,
    Suspect,
    Verdict,
    plain,
)

if TYPE_CHECKING:
    from sftriage.events import DiskRecovered

REASONS: Mapping[str, str] = {
    "co_critical": "several ranks are late together, so mending one alone would save little",
    "sync_ambiguous": "the time is lost inside a sync stage, where ranks wait for each other and all look alike",
    "roaming": "the rank that comes last changes from step to step",
    "low_coverage": "steps of some ranks are missing",
    "no_baseline": "all ranks became slower alike, before the job's normal step was known",
    "intermittent": "one rank causes most of the delay, but not often enough yet to tell that from chance",
    "mixed_roles": "the ranks do different work, and which of them do the same (cohorts) is not declared",
    "clock_limited": "the ranks run on devices, and on the host's clock a wait for a device shows in any stage",
    "self_inflicted": "a capture was running, and it slows the job itself",
    "regressed": "the job is slower than its own best, and nobody alone is why",
}

CLOCKS: Mapping[str, str] = {"host": "", "device": "by the devices' clock"}
"""Which clock a verdict stands on, where that has to be said."""

STALLS: Mapping[str, str] = {
    "not_arrived": "the others wait for ranks that have not arrived",
    "died": "the others wait for ranks whose process has ended",
    "left_early": "the others wait for ranks that have stopped recording",
    "in_sync": "every rank is inside the same sync stage, where all of them look alike",
    "no_rank_waits": "no rank waits in a sync stage, and these have got least far",
    "outside_steps": "no rank is in a step",
    "unseen_ranks": "some ranks show nothing",
}
"""Why a job stands still; where ranks are named, they follow."""

RESOLVES: Mapping[str, str] = {
    "co_critical": "Several ranks are late together, so mending one of them alone would save little: "
    "look at all the late ranks, or at what they share (a host, a switch, a data shard).",
    "sync_ambiguous": "The time is lost inside a stage where ranks wait for each other, and there all of them tie. "
    "With DDP, monitor.watch(model) tells work from waiting there. Under FSDP it cannot, for gradients are ready only "
    "after the exchange: there, and where it is called already, capture some ranks (`sftriage capture`) and compare.",
    "roaming": "A different rank leads from step to step: look for what moves with the data or the clock "
    "(uneven batches, garbage collection, a shared filesystem), or wait until one rank stays in front.",
    "low_coverage": "Ranks or steps are missing from the window: check that every rank runs the recorder "
    "and that its ring can be read, then wait for a complete window.",
    "no_baseline": "Every rank is slower alike and there is nothing yet to compare with: "
    "let the job run through its warm-up, so that its own normal step is known.",
    "intermittent": "Too few steps of the window are slow: wait for the delay to come back more often, "
    "or lower min_persistence if short bursts are what you are after.",
    "mixed_roles": "The ranks do different work (pipeline stages, a rank that also evaluates) and cannot be compared: "
    "declare cohorts, so that each rank is compared with ranks of its own role.",
    "clock_limited": "Only the host's clock can be judged by and the device runs asynchronously, so time may show in "
    "the wrong stage: record device time (SFTRIAGE_DEVICE_TIME=1 in the job's environment). Where it is recorded, "
    "`sftriage explain` says whether too few steps have theirs or the two clocks contradict each other.",
    "self_inflicted": "A profiler was running inside this window and slowed it: wait for a window without a capture.",
    "regressed": "The job has been quicker, and nobody alone is why it no longer is: look for what changed when that "
    "began (the data and its lengths, neighbours on the machines, clocks and temperatures, a file system that fills).",
    "not_arrived": "The other ranks wait for the ranks that are named: "
    "look at their stacks (py-spy dump --pid), and at what their stage reads from or calls.",
    "died": "The process of a named rank is gone, and the others wait for it: "
    "look for its last words, and in the kernel's log whether memory ran out; then restart the job.",
    "left_early": "A named rank has stopped recording while the others wait in a step: "
    "check that every rank takes the same number of steps (uneven data, a `break` on one rank).",
    "in_sync": "All ranks are inside the same sync stage, where they look alike: compare their stacks "
    "(py-spy dump --pid) or the flight recorder of torch.distributed, to find a collective that some did not enter.",
    "no_rank_waits": "No rank is in a sync stage: look at the stacks of the ranks that have got least far, "
    "and at what the others share with them (a file system, a collective in a stage that is not declared as sync).",
    "outside_steps": "No rank is in a step: see whether the job still evaluates, saves or loads, "
    "or look at the stacks of its ranks (py-spy dump --pid).",
    "unseen_ranks": "Some ranks of the job show nothing here: see whether they run, and record.",
}
"""For each reason of a ``needs_evidence`` or ``stalled`` verdict, one plain sentence on what would resolve it."""


def who(suspect: Suspect) -> str:
    """A suspect's scope."""
    if suspect.scope == "rank":
        return f"rank {suspect.ranks[0]}"
    if suspect.scope == "host":
        return f"host {suspect.host} ({counted(len(suspect.ranks), 'rank')})"
    of_cohort = f"cohort {suspect.cohort} ({counted(len(suspect.ranks), 'rank')})"
    return of_cohort if suspect.scope == "cohort" else "every rank"


def when(suspect: Suspect) -> str:
    """Since when a suspect has been there, and whether it comes back."""
    since = "" if suspect.onset_step is None else f" since {onset(suspect)}"
    if suspect.pattern == "recurring":
        return f"recurring {every(suspect.period_steps) if suspect.period_steps else 'at no fixed period'}{since}"
    if suspect.pattern == "one-off":
        return f"one-off{since.replace('since', 'from')}, and has passed"
    return f"chronic{since}"


def onset(suspect: Suspect) -> str:
    """The step that a suspect's fault began at, and between which ones that may have been."""
    earliest, latest = suspect.onset_range or (suspect.onset_step, suspect.onset_step)
    sure = earliest == latest
    return f"step {suspect.onset_step}" if sure else f"about step {suspect.onset_step} ({earliest} to {latest})"


def descheduled(suspect: Suspect) -> str:
    """How much of a suspect's lateness was waiting for a CPU; "" where that is not known."""
    known = suspect.descheduled_fraction
    return "" if known is None else f"{known:.0%} of its lateness was waiting for a CPU"


def scheduling_sentence(verdict: Verdict) -> str:
    """What the kernel's scheduler did with the first suspect; "" where that is not known."""
    if not verdict.suspects or verdict.suspects[0].descheduled_fraction is None:
        return ""
    numbers, suspect = verdict.numbers, verdict.suspects[0]
    each = [f"it waited {milliseconds(numbers['queued_s'])} for one"] if "queued_s" in numbers else []
    each += [f"lost one {numbers['preempted']:.1f} times"] if "preempted" in numbers else []
    advice = "; see what else runs on its cores, or limits its CPU time" if suspect.mostly_descheduled else ""
    return descheduled(suspect) + (f"; in each step {' and '.join(each)}" if each else "") + advice


def every(period_steps: int) -> str:
    """How often something comes back."""
    return "every second step" if period_steps == 2 else f"every {period_steps} steps"


def where(suspect: Suspect) -> str:
    """A suspect's stage."""
    return suspect.stage or "all its local stages"


CONTROL_PART = "healthy, captured in the same steps to compare the suspect with"
"""What the capture of a control is."""

PROFILERS: Mapping[Profiler, str] = {"torch": "PyTorch Profiler", "nsys": "Nsight Systems", "stacks": "py-spy"}

ENDINGS: Mapping[CaptureState, str] = {
    "failed": "the capture failed",
    "refused": "the capture was refused",
    "expired": "the capture was given up",
}
"""How a capture that left no trace has ended."""


def capturing_sentence(requests: Sequence[CaptureRequest]) -> str:
    """What is captured, of whom, and beside whom."""
    first = requests[0]
    what = "the stacks" if first.profiler == "stacks" else counted(first.steps, "step")
    suspects = some_ranks([one.rank for one in requests if one.role == "suspect"])
    controls = some_ranks([one.rank for one in requests if one.role == "control"])
    beside = f"; {controls} too, to compare with" if controls else ""
    return f"Capturing {what} of {suspects or controls} with {PROFILERS[first.profiler]}{beside if suspects else ''}."


def ended_sentence(result: CaptureResult, stored_bytes: int) -> str:
    """What became of a capture that has ended: where its trace is, or why there is none."""
    if result.state != "stored" or result.first_step is None or result.last_step is None:
        why = f": {result.detail}" if result.detail else ""
        return f"No trace of rank {result.rank}: {ENDINGS.get(result.state, result.state)}{why}."
    steps = span(result.first_step, result.last_step)
    return f"Captured {steps} of rank {result.rank} ({size(stored_bytes)}): sftriage traces show {result.capture_id}"


def cost_sentence(
    cost_s: float | None, before_s: float | None, first_step: int, last_step: int, captures: int = 1
) -> str:
    """What so many captures in some steps cost the job together."""
    if cost_s is None or before_s is None:
        return "not known: too few steps before it to compare with"
    shared = "" if captures == 1 else f"; shared by {counted(captures, 'capture')}"
    steps = f"in {span(first_step, last_step)} and just after; a step took {milliseconds(before_s)} before{shared}"
    return f"{milliseconds(cost_s)} in all, {steps}" if cost_s > 0.0 else f"nothing that could be measured, {steps}"


def some_ranks(ranks: Sequence[int]) -> str:
    """Some ranks by number, the first of many; "" for none."""
    if not ranks:
        return ""
    *others, last = [str(rank) for rank in ranks[:_MOST_RANKS]]
    if more := len(ranks) - _MOST_RANKS:
        others, last = ([*others, last], f"{more:,} more") if more > 0 else (others, last)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


_MOST_RANKS = 8


def stage_suspected(label: str, stage: str | None) -> str:
    """The stage that led to a capture, by what triggered it; "" where a person asked, and nothing was suspected."""
    return stage or ("" if label == "asked" else "all local stages")


def verdict_sentence(verdict: Verdict) -> str:
    """The verdict in one sentence, with its clock where that is not the host's."""
    steps, clock = span(verdict.first_step, verdict.last_step), CLOCKS[verdict.clock]
    match verdict.label:
        case "healthy":
            sentence = f"Healthy: nothing stands out in {steps} ({milliseconds(verdict.exposed_s)} a step)."
        case "suspect":
            sentence = _suspect_sentence(verdict, steps)
        case "stalled":
            sentence = _stall_sentence(verdict)
        case _:
            reasons = "; ".join(_reason(reason, verdict.regression) for reason in verdict.reasons)
            sentence = f"Held: {', '.join(verdict.reasons)} in {steps}: {reasons}."
    if verdict.regression is not None and "regressed" not in verdict.reasons:
        sentence = f"{sentence[:-1]}; {regression_phrase(verdict.regression)}."
    return f"{sentence[:-1]}, {clock}." if clock else sentence


def _reason(reason: str, regression: Regression | None) -> str:
    if reason == "regressed" and regression is not None:
        return regression_phrase(regression)
    return REASONS.get(reason, reason)


def regression_phrase(regression: Regression) -> str:
    """By how much the job is slower than it has been, since about when, and where; or that this has ended."""
    subject = f"steps of kind {regression.kind} are" if regression.kind else "the job is"
    since = f"about step {regression.since_step}"
    if regression.until_step is not None:
        as_good = f"{subject} as good as {'their' if regression.kind else 'its'} best again"
        return (
            f"{as_good} since about step {regression.until_step}, "
            f"after being slower by {regression.fraction:.0%} from {since} on"
        )
    best = f"{'their' if regression.kind else 'its'} best of {milliseconds(regression.best_step_s)} a step"
    between = f"({regression.since_first_step} to {regression.since_last_step})"
    where_in = f", in {' and '.join(regression.stages)}" if regression.stages else ""
    whom = "on all ranks alike" if regression.scope == "all" else "because some ranks are late"
    return f"{subject} slower than {best} by {regression.fraction:.0%} since {since} {between}{where_in}, {whom}"


def _suspect_sentence(verdict: Verdict, steps: str) -> str:
    suspect = verdict.suspects[0]
    over = suspect.pattern == "one-off"
    slow = f"{who(suspect).capitalize()} {'was' if over else 'is'} slow in {where(suspect)}"
    cost = f"it cost{'' if over else 's'} the job {milliseconds(suspect.gain_s)}"
    queued = f"; {descheduled(suspect)}" if suspect.mostly_descheduled else ""
    if suspect.pattern == "recurring" and suspect.period_steps:
        since = f"{every(suspect.period_steps)} since {onset(suspect)}"
        return f"{slow} {since}: {cost} each time ({suspect.share:.0%} of such a step), in {steps}{queued}."
    often = f"in {suspect.persistence:.0%} of {steps}; {when(suspect)}"
    return f"{slow}: {cost} of each slow step ({suspect.share:.0%}), {often}{queued}."


def _stall_sentence(verdict: Verdict) -> str:
    still_s = verdict.numbers.get("still_s", verdict.exposed_s)
    step = "between steps" if "outside_steps" in verdict.reasons else f"in step {verdict.first_step}"
    typical_s = verdict.numbers.get("typical_step_s", 0.0)
    usual = f" (a step takes {milliseconds(typical_s)})" if typical_s else ""
    why = "; ".join(STALLS.get(reason, reason) for reason in verdict.reasons)
    who_where = ", ".join(f"{_missing(suspect)} in {where(suspect)}" for suspect in verdict.suspects)
    more = verdict.numbers.get("missing_ranks", 0.0) - sum(len(suspect.ranks) for suspect in verdict.suspects)
    if more > 0:
        who_where += f" and {more:.0f} more"
    return f"Stalled: no rank has moved for {still_s:.0f} s {step}{usual}; {why}{who_where and ': '}{who_where}."


def _missing(suspect: Suspect) -> str:
    ranks = some_ranks(suspect.ranks)
    return (
        f"host {suspect.host} ({ranks})"
        if suspect.scope == "host"
        else ranks
        if suspect.scope == "rank"
        else "every rank"
    )


SENTENCES: Mapping[ReasonCode, tuple[str, str]] = {
    "healthy": ("healthy", ""),
    "undecided": ("{reasons}", ""),
    "standstill": ("{reasons}", "{named}"),
    "no_rank_named": ("{label}, but no rank is named", ""),
    "one_off": ("one-off, and has passed", ""),
    "descheduled": (
        "waiting for a CPU",
        ": that is {descheduled_share} of its lateness, and no trace of its own would show it",
    ),
    "no_rule_matched": ("{missed}", ""),
    "observe_only": ("observe-only", ": rule {rule} matched{found}"),
    "pending": ("rule {rule} waits for it to last", ": {lasted}"),
    "waits_for_windows": ("rule {rule}: window {window} of {windows}", ""),
    "rule_matched": ("rule {rule}", ": {found}{beside}"),
    "asked": ("{who} asked for it", ": {why}"),
    "rank_hangs": ("rank {rank} hangs inside capture {capture_id}", ": its stacks are taken from outside"),
    "captures_per_run": ("captures_per_run", ": {captures_of} made"),
    "active": ("active", ": captures are {allowed}"),
    "overhead_budget": (
        "overhead_budget",
        ": captures have cost the job {spent_s} s, which is more than {budget_share} of the run so far ({budget_s} s); "
        "the next from {until_s} on",
    ),
    "captures_per_hour": (
        "captures_per_hour",
        ": {captures_of} asked for in the last hour; the next from {until_s} on",
    ),
    "captures_per_day": (
        "captures_per_day",
        ": {captures_of} asked for in the last day; the next from {until_s} on",
    ),
    "place_kept": (
        "the last place of {place_of} is kept for a suspect larger than any before",
        ": this one costs {gain_s} ms a step, and one of {largest_gain_s} ms was captured; until {until_s}",
    ),
    "already_captured": (
        "already captured",
        ": {capture_id} holds it, {captured_gain_s} ms a step then and {gain_s} ms now; it is captured again "
        "once it costs {worse_gain_s} ms, once the job has started again, or from {until_s} on",
    ),
    "cooldown": ("cooldown of rule {rule}", " until {until_s}"),
    "after_failures": ("{failed} of rule {rule} failed or {were} refused; the next attempt from {until_s} on", ""),
    "rank_busy": ("rank {rank} is being captured already", " ({capture_id})"),
    "concurrent_ranks": (
        "concurrent_ranks",
        ": {running} of at most {limit} ranks are being captured, and {wanted} more asked for",
    ),
    "no_such_rank": ("{ranks_asked} not in this job", ": {there}"),
    "captures_left": ("captures of {wanted_ranks} asked for, and {left} left", ""),
    "recorded": ("{text}", ""),
}
"""For each reason of a decision what kind it is, and its particulars. `_phrases` makes what is no parameter."""

RESOLUTIONS: Mapping[ReasonCode, str] = {
    "one_off": "There is nothing left to capture. See whether it comes back; "
    "`sftriage explain` says in which steps it was.",
    "descheduled": "See what else runs on its cores, or limits its CPU time. `sftriage capture` takes a trace all the "
    "same, and so does a rule whose profiler is nsys.",
    "pending": "See whether it lasts, or lower the rule's `for`.",
    "waits_for_windows": "See whether the next windows match too.",
    "captures_per_run": "Raise limits.captures_per_run, or start another run.",
    "active": "Wait until then, or change the policy's active.cron.",
    "overhead_budget": "Wait until the run has lasted long enough for it, or raise limits.overhead_budget.",
    "captures_per_hour": "Wait until then, or raise limits.captures_per_hour.",
    "captures_per_day": "Wait until then, or raise limits.captures_per_day.",
    "place_kept": "Wait until then, or raise limits.{place_of}.",
    "already_captured": "Look at the trace that there is, or ask for another (`sftriage capture`).",
    "cooldown": "Wait for the cooldown to end.",
    "after_failures": "See why in `sftriage decisions`, and wait for the next attempt.",
    "rank_busy": "Wait for that capture to end.",
    "concurrent_ranks": "Wait for a running capture to end, or raise limits.concurrent_ranks.",
    "no_such_rank": "Ask for ranks that it has.",
    "captures_left": "Ask for fewer, or raise the policy's limits.",
    "recorded": "{resolves}",
}
"""What would resolve a decision not to capture, where that does not follow from the verdict's reasons."""


def reason_sentence(decision: Decision) -> str:
    """Why a decision is what it is."""
    kind, particulars = SENTENCES[decision.reason]
    return _filled(kind + particulars, decision, _shown)


def reason_kind(decision: Decision) -> str:
    """The same without its particulars, numbers as N: what decisions are counted by."""
    return _filled(SENTENCES[decision.reason][0], decision, _masked)


def outcome_sentence(decision: Decision) -> str:
    """Why a suspect is not captured now; "" where it is, or nobody is suspected."""
    if decision.label != "suspect" or decision.outcome == "capture":
        return ""
    more = "further " if decision.outcome == "throttle" else ""
    return f"No {more}capture now: {reason_sentence(decision)}."


def resolution(decision: Decision) -> str:
    """What would resolve a decision not to capture, or a stall; "" where there is nothing to say."""
    own = RESOLUTIONS.get(decision.reason)
    if own is None:
        return advice(reasons_of(decision))
    if decision.reason == "active" and "until_s" not in decision.parameters:
        return "Change the policy's active.cron."
    return _filled(own, decision, _shown)


def advice(reasons: Iterable[str]) -> str:
    """What would resolve each of a verdict's reasons, in their order; a reason without advice is named as such."""
    return " ".join(RESOLVES.get(reason, f"There is no advice on {reason!r} yet.") for reason in reasons)


def reasons_of(decision: Decision) -> tuple[str, ...]:
    """The verdict's reasons, where the decision was taken for them."""
    reasons = decision.parameters.get("reasons", ())
    return tuple(map(str, reasons)) if isinstance(reasons, (tuple, list)) else (str(reasons),)


def decision_values(decision: Decision) -> dict[str, Any]:
    """A decision as JSON values: its reason as code and parameters, and beside them what people read."""
    return {**plain(decision), "words": reason_sentence(decision), "resolves": resolution(decision)}


def _filled(template: str, decision: Decision, shown: Callable[[str, Parameter], str]) -> str:
    # What was read back may lack a parameter.
    said = _Said({name: shown(name, value) for name, value in decision.parameters.items()})
    said["label"] = decision.label
    return template.format_map(_Said({**said, **_phrases(decision, said)}))


class _Said(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return "?"


def _phrases(decision: Decision, said: _Said) -> Mapping[str, str]:
    """What a sentence says in one way or another, by what parameters there are."""
    code, given = decision.reason, decision.parameters
    if code in ("undecided", "standstill"):
        return {"reasons": ", ".join(reasons_of(decision)) or "no reason given", "named": _named(given, said)}
    if code == "no_rule_matched":
        return {"missed": _missed(given, said)}
    if code == "observe_only":
        return {"found": f", {_stands(decision, said)}" if "reasons" in given else ""}
    if code == "rule_matched":
        found = _stands(decision, said) if "reasons" in given else _saves(given, said)
        return {"found": found, "beside": _beside(given)}
    if code == "pending":
        in_steps = "for_steps" in given
        lasted = "{lasted_steps} of {for_steps} steps" if in_steps else "{lasted_s} s of {for_s} s"
        return {"lasted": lasted.format_map(said)}
    if code == "active":
        return {"allowed": f"not allowed until {said['until_s']}" if "until_s" in given else "never allowed again"}
    if code == "after_failures":
        once = given.get("failures") == 1
        failed = "the last capture" if once else f"the last {said['failures']} captures"
        return {"failed": failed, "were": "was" if once else "were"}
    if code.startswith("captures_per_"):
        return {"captures_of": f"{said['captures']} of {said['limit']} capture" + "s" * (given.get("limit") != 1)}
    if code == "captures_left":
        return {"wanted_ranks": f"{said['wanted']} rank" + "s" * (given.get("wanted") != 1)}
    if code == "no_such_rank":
        ranks = given.get("ranks")
        several = isinstance(ranks, tuple) and len(ranks) > 1
        return {
            "ranks_asked": f"{'ranks' if several else 'rank'} {said['ranks']} {'are' if several else 'is'}",
            "there": f"its ranks are 0 to {said['last_rank']}" if "last_rank" in given else "it has none so far",
        }
    return {}


def _missed(given: Mapping[str, Parameter], said: _Said) -> str:
    """By which of its conditions the nearest rule was missed."""
    if "rule" not in given:
        return f"no rule is about the label {said['label']}"
    lacking = [
        f"its gain of {said[name]}{unit} is under {said[f'min_{name}']}{unit}"
        for name, unit in (("share", ""), ("gain_s", " ms"))
        if name in given
    ]
    for name in ("scope", "stage", "pattern"):
        if name in given:
            what = f"its {name} {said[name]}" if name != "stage" or given[name] else "a whole rank"
            lacking.append(f"{what} is not one of {said[f'{name}s']}")
    return f"rule {said['rule']} does not match: {', and '.join(lacking)}"


def _saves(given: Mapping[str, Parameter], said: _Said) -> str:
    return (
        f"mending {_stage(given)} of {_ranks(given, said)} would save {said['gain_s']} ms a step ({said['share']}), "
        f"in {said['persistence']} of the steps"
    )


def _stands(decision: Decision, said: _Said) -> str:
    return (", ".join(reasons_of(decision)) or "no reason given") + _named(decision.parameters, said)


def _named(given: Mapping[str, Parameter], said: _Said) -> str:
    if "rank" not in given and "rank_count" not in given:
        return ""
    more = f" and {said['more_ranks']} more" if given.get("more_ranks") else ""
    return f": {_ranks(given, said)} in {_stage(given)}{more}"


def _ranks(given: Mapping[str, Parameter], said: _Said) -> str:
    return f"rank {said['rank']}" if "rank" in given else f"{said['rank_count']} ranks"


def _stage(given: Mapping[str, Parameter]) -> str:
    return str(given.get("stage") or "all local stages")


def _beside(given: Mapping[str, Parameter]) -> str:
    controls = given.get("controls")
    if controls is None:
        return ""
    if not isinstance(controls, (tuple, list)) or not controls:
        return "; no healthy rank was found beside it"
    ranks = ", ".join(map(str, controls))
    return f"; with rank{'s' if len(controls) > 1 else ''} {ranks} to compare with"


def _shown(name: str, value: Parameter) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value))
    if name in _NUMBERS and (isinstance(value, float) or (isinstance(value, int) and abs(value) < _MOST)):
        return _NUMBERS[name](value)
    return str(value)


def _masked(name: str, value: Parameter) -> str:
    return "N" if isinstance(value, (int, float)) else _shown(name, value)


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
# There are no dates before the year 1, and none after 9999.
_FIRST_S, _LAST_S = -62_135_596_800.0, 253_402_300_799.0
_MOST = 2**63


def moment(time_s: float) -> datetime:
    """Seconds since the epoch as a date, in UTC; by addition, for the C library's conversion has a narrower range."""
    return _EPOCH + timedelta(seconds=min(max(_FIRST_S, time_s), _LAST_S))


def clock(time_s: float) -> str:
    """A time as people and programs read it."""
    return moment(time_s).strftime("%Y-%m-%dT%H:%M:%SZ")


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3g}%"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}" if abs(seconds) < 100 else f"{seconds:.0f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


_NUMBERS: Mapping[str, Callable[[float], str]] = {
    "until_s": clock,
    **dict.fromkeys(("spent_s", "budget_s", "lasted_s", "for_s"), _seconds),
    **dict.fromkeys(("gain_s", "min_gain_s", "captured_gain_s", "worse_gain_s", "largest_gain_s"), _ms),
    **dict.fromkeys(("share", "min_share", "persistence", "budget_share", "descheduled_share"), _percent),
}


def milliseconds(seconds: float) -> str:
    """A duration as people say it here."""
    return f"{seconds * 1e3:.1f} ms"


def counted(number: int, noun: str) -> str:
    """So many of something: one step, two steps."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def span(first_step: int, last_step: int) -> str:
    """Some steps that follow one another, both ends included."""
    return f"step {first_step}" if first_step == last_step else f"steps {first_step} to {last_step}"


def size(size_bytes: float) -> str:
    """A file's size, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"


def place(path: Path) -> str:
    """A path as one would type it here: relative where that is shorter."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def thinning(whole_from_step: int, first_step: int, block_steps: int, period_steps: int) -> str:
    """What is no longer there of a run's steps: those before one are thinned, and those before another have gone."""
    gone = f" Of those before {first_step:,} none are." if first_step else ""
    of = f"the first {block_steps} of every {period_steps:,}"
    return f"Of the steps before {whole_from_step:,}, {of} are kept, and those around captures.{gone}"


def disk_now(problem: str) -> str:
    """That the run directory takes nothing now."""
    return (
        f"The run directory cannot be written ({problem}). What is judged meanwhile waits in memory, and is on record "
        "once it can."
    )


def disk_failed_sentence(problem: str) -> str:
    """That the run directory takes nothing any more."""
    return f"{disk_now(problem)} Training goes on."


def disk_sentence(seen: DiskRecovered) -> str:
    """That the run directory takes what it is given again, or has not done so to the end, and what that has cost."""
    lasted = f"{max(0.0, seen.time_s - seen.since_s):.0f} s"
    begin = f"can be written again after {lasted}" if seen.over else f"could not be written in the run's last {lasted}"
    late = f" Written late: {_amounts(seen.late, None)}." if seen.late else ""
    lost = f"Lost: {_amounts(seen.lost, seen.lost_steps)}." if seen.lost else "Nothing is lost."
    return f"The run directory {begin} ({seen.problem}).{late} {lost}"


def _amounts(amounts: Mapping[str, int], steps: tuple[int, int] | None) -> str:
    """How many of each kind, whose name is its plural; ``steps`` are those of windows."""
    of = {"windows": f" (of steps {steps[0]} to {steps[1]})"} if steps is not None else {}
    named = {kind: kind if n != 1 else kind.removesuffix("s") for kind, n in amounts.items()}
    return ", ".join(f"{amounts[kind]:,} {name}{of.get(kind, '')}" for kind, name in sorted(named.items()))


def clock_time(time_s: float) -> str:
    """The date and time of day, in UTC."""
    return f"{moment(time_s):%Y-%m-%d %H:%M:%S}"


def ago(time_s: float, now_s: float) -> str:
    """How long ago something was."""
    passed = max(0.0, now_s - time_s)
    for unit, seconds in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if passed >= 2 * seconds:
            return f"{passed / seconds:.0f} {unit} ago"
    return f"{passed:.0f} s ago"


# The first glance at a run: how it stands, and what to do.

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
    "pending": "For the next run, lower the rule's `for`.",
    "waits_for_windows": "For the next run, lower the rule's `for`.",
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
    "recorded": "",
    "roaming": "A different rank led from step to step: look for what moves with the data or the clock (uneven "
    "batches, garbage collection, a shared filesystem).",
    "low_coverage": "Ranks or steps are missing: check that every rank runs the recorder.",
    "no_baseline": "Every rank was slower alike, from the start: compare with a run that was quicker.",
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
    "for_captures": "and {lost} for captures",
    "nothing": "nothing",
    "trace": "rank {rank}, steps {first:,} to {last:,}",
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
    return f"At step {step:,}, when it was watched last: {sentence}"


def decision_phrase(outcome: str, words: str) -> str:
    """What was done, and why."""
    return ": ".join(filter(None, (OUTCOMES.get(outcome, outcome), words)))


def explained(codes: Iterable[str]) -> tuple[str, ...]:
    """What a verdict's reasons mean, each with its code, for whoever meets that elsewhere."""
    meanings = {**REASONS, **STALLS}
    return tuple(f"{meanings[code]} ({code})" if code in meanings else code for code in codes)


def since_words(first_step: int, last_step: int | None) -> str:
    """Since which step something is so, or between which ones that began."""
    between = f"a step between {first_step:,} and {last_step:,}"
    return f"step {first_step:,}" if last_step in (None, first_step) else between


def look_at(who_: str, stage: str | None, hosts: Iterable[str]) -> str:
    """Where to look, of whom and what is named."""
    there = list(dict.fromkeys(filter(None, hosts)))
    on = f" on host {there[0]}" if len(there) == 1 else f" on hosts {', '.join(there)}" if there else ""
    thing, what = LOOK_AT.get(stage, (stage or "", "what only it does there"))
    return f"Look at {thing} of {who_}{'' if who_.startswith('host ') else on}: {what}."


def afterwards(reason: ReasonCode, reasons: Iterable[str], parameters: Mapping[str, Parameter]) -> str:
    """What to do about a decision not to capture, or a stall, once the run has ended and nothing is waited for."""
    codes = (reason,) if reason in RESOLUTIONS else tuple(reasons)
    said = (AFTERWARDS.get(code, RESOLVES.get(code, "")) for code in codes)
    return " ".join(filter(None, said)).format_map(_Said({name: str(value) for name, value in parameters.items()}))


def lasted(seconds: float) -> str:
    """A length of time, from milliseconds to hours."""
    for unit, of_unit_s in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * of_unit_s or (unit == "s" and seconds >= 1.0):
            return f"{seconds / of_unit_s:.1f} {unit}"
    return f"{seconds * 1e3:.0f} ms"


def rank_hours(seconds: float, ranks: int, *, on_devices: bool) -> str:
    """What time lost by all ranks comes to."""
    hours, unit = seconds * ranks / 3600.0, "GPU-hours" if on_devices else "rank-hours"
    return f"{hours:.2g} {unit} ({ranks} ranks)" if hours < 10 else f"{hours:,.0f} {unit} ({ranks:,} ranks)"
