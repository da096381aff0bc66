"""Sentences on decisions and captures: what was decided and why, what would resolve it, and what it led to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from sftriage.model.captures import (
    CaptureRequest,
    CaptureResult,
    CaptureState,
    ChoiceReason,
    Decision,
    LeftOpen,
    Parameter,
    Profiler,
    ReasonCode,
)
from sftriage.model.windows import plain
from sftriage.words.verdicts import (
    AFTER_GRADIENTS,
    BY_SYSTEM,
    RESOLVES,
    clock,
    counted,
    milliseconds,
    size,
    some_ranks,
    span,
    system_advice,
)

if TYPE_CHECKING:
    from sftriage.model.events import CauseFound
    from sftriage.traces.manifest import CauseInfo

CONTROL_PART = "a healthy rank, captured in the same steps for comparison"
"""The role of a control rank's capture."""

PROFILERS: Mapping[Profiler, str] = {
    "torch": "PyTorch Profiler",
    "nsys": "Nsight Systems",
    "stacks": "the stack sampler",
}

CHOICES: Mapping[ChoiceReason, str] = {
    "host_stage": "{stage} is host work, and Python stacks name the line",
    "compute_stage": "{stage} is compute, and operators show what it computes",
    "device_clock": "the rank computes on a device, and the job runs under nsys",
    "whole_rank": "no single stage is suspected, and it records operators and stacks",
    "stands_still": "the rank takes no steps, so its stacks are taken from outside",
    "left_open": "the first capture does not show why the rank is slow",
}
"""Why ``auto`` chose a profiler."""

LEFT_OPEN: Mapping[LeftOpen, str] = {
    "": "nothing is left open",
    "operators": "its stacks do not show where the time went",
    "stacks": "its operators do not show where the time went",
    "system": "neither its operators nor its stacks show where the time went",
}
"""What the first capture does not show."""


def choice_words(chosen: ChoiceReason, profiler: Profiler, stage: str | None) -> str:
    """What ``auto`` chose, and why."""
    why = CHOICES[chosen].format(stage=stage or "all local stages")
    return f"auto chose {PROFILERS[profiler]}: {why}"


ENDINGS: Mapping[CaptureState, str] = {
    "failed": "the capture failed",
    "refused": "the capture was refused",
    "expired": "the capture expired",
}
"""How a capture without a trace ended."""


def capturing_sentence(requests: Sequence[CaptureRequest]) -> str:
    """What is captured, on which ranks, and with which controls."""
    first = requests[0]
    if first.of_whole_job:
        return "Capturing where every rank is, and in which collective."
    captured = counted(first.steps, "step") if first.takes_steps else "the stacks"
    by = f" with {PROFILERS[first.profiler]}" if first.takes_steps else ""
    suspects = some_ranks([request.rank for request in requests if request.role == "suspect"])
    controls = some_ranks([request.rank for request in requests if request.role == "control"])
    beside = f"; {controls} for comparison" if controls else ""
    return f"Capturing {captured} of {suspects or controls}{by}{beside if suspects else ''}."


def ended_sentence(result: CaptureResult, stored_bytes: int, *, whole_job: bool = False) -> str:
    """The result of a capture: where its trace is, or why there is none."""
    trace, whose = ("evidence", "the ranks") if whole_job else ("trace", f"rank {result.rank}")
    if result.state != "stored" or result.first_step is None or result.last_step is None:
        why = f": {result.detail}" if result.detail else ""
        return f"No {trace} of {whose}: {ENDINGS.get(result.state, result.state)}{why}."
    what = f"where the ranks are in {span(result.first_step, result.last_step)}"
    if not whole_job:
        what = f"{span(result.first_step, result.last_step)} of {whose}"
    return f"Captured {what} ({size(stored_bytes)}): sftriage traces show {result.capture_id}"


def caused(cause: CauseInfo | CauseFound) -> str:
    """Why a captured rank was slow, or why a job hangs, and whether that is certain."""
    unsure = "" if cause.sure or cause.code == "unknown" else " This is likely but not certain."
    return f"{cause.sentence}{unsure}"


def cost_sentence(
    cost_s: float | None, before_s: float | None, first_step: int, last_step: int, captures: int = 1
) -> str:
    """What the captures in some steps cost the job in total."""
    if cost_s is None or before_s is None:
        return "unknown: too few steps before it to compare with"
    shared = "" if captures == 1 else f"; shared by {counted(captures, 'capture')}"
    steps = f"in {span(first_step, last_step)} and just after; a step took {milliseconds(before_s)} before{shared}"
    return f"{milliseconds(cost_s)} in total, {steps}" if cost_s > 0.0 else f"nothing measurable, {steps}"


def stage_suspected(label: str, stage: str | None) -> str:
    """The stage that led to a capture; "" if a person requested it and no stage was suspected."""
    return stage or ("" if label == "asked" else "all local stages")


DOES: dict[str, str] = {
    "sleep": "which sleeps",
    "dataloader_workers": "which waits for the workers of its DataLoader",
    "lock": "which waits for another thread or process",
    "subprocess": "which starts another program and waits for it",
    "output": "which writes its log or its output",
    "database": "which waits for a database",
    "network": "which waits for the network",
    "disk": "which reads or writes files",
    "checkpoint": "which saves a checkpoint",
    "garbage_collection": "which collects garbage",
    "recompilation": "which recompiles",
    "collective": "which waits in a collective",
    "python": "which computes",
    "operator": "",
    "kernel": "",
    "blocked": "which waits there for an unknown reason",
    "gil": "which waits for the interpreter lock (GIL), held by thread",
    "descheduled": "it was ready to run and waited for a core",
    "stopped": "the whole process was stopped",
    "cgroup_throttled": "its cgroup's CPU limit kept it from running",
    "page_faults": "which touches memory that is not resident yet (page faults)",
    "memory_pressure": "it waited for memory",
    "gpu_throttled": "its GPU was slower than the others because its clock is lower",
    "unknown": "which runs or waits there (the system does not show which)",
}

NEXT_STEP: dict[str, str] = {
    "sleep": "Find out why that line sleeps, and only on this rank.",
    "dataloader_workers": "Give the loader more workers, or see what a worker does: py-spy dump --pid WORKER.",
    "lock": "Find what holds the lock: the same file has the stacks of the other threads.",
    "subprocess": "Do that program's work in the process itself, or in a long-lived worker.",
    "output": "Check what reads the output (a full pipe, a slow terminal or disk); log less, or use a QueueHandler.",
    "database": "Check what else locks that database, and write many rows in one transaction.",
    "network": "Check the network of this rank's host, and what that line fetches.",
    "disk": "Check this host's disk (iostat -x 1), and whether the file can be kept in memory.",
    "checkpoint": "Save in the background, or let every rank save a part.",
    "garbage_collection": "Collect at the same step on all ranks: gc.disable(), then gc.collect() every N steps.",
    "recompilation": "Find what changes from step to step: TORCH_LOGS=recompiles shows why it recompiles.",
    "collective": "Look at the other ranks of this collective: compare their stacks.",
    "python": "Look at that function; a capture with option with_stack counts its calls.",
    "operator": "Compare its inputs with the other rank's: a capture with record_shapes records them.",
    "kernel": "Compare its inputs with the other rank's (record_shapes), and the GPUs' clocks (sftriage evidence).",
    "blocked": "Look at the other threads' stacks in the same file, and at what that line calls.",
    "descheduled": "See what else runs on its host (top -H), or pin the rank to its own cores.",
    "gil": "Move that thread's work to its own process, or make it release the GIL.",
    "stopped": "Find what stops it (SIGSTOP, cpulimit), and check its cgroup's CPU limit (cpu.stat: nr_throttled).",
    "page_faults": "Keep that line's allocations for the next step (preallocate, reuse), or use larger pages.",
    "gpu_throttled": "Find out why its clock is lower: nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,POWER.",
    "unknown": "Compare its trace with another rank's: sftriage capture --rank N.",
    "cgroup_throttled": system_advice("cgroup_throttled"),
    "memory_pressure": system_advice("memory_pressure"),
}


COUNTED: dict[str, str] = {
    **{code: DOES[code] for code in ("cgroup_throttled", "stopped", "memory_pressure", "descheduled", "gpu_throttled")},
    "page_faults": "it waited for pages of its memory to be read from disk",
    "disk": "it waited for a disk",
    "garbage_collection": "it collected garbage",
    "recompilation": "torch.compile compiled",
    "network": "its host waited for TCP retransmissions",
}
"""Causes that the kernel's counters show without a line of the program."""

COUNTED_STEP: dict[str, str] = {
    "page_faults": system_advice("page_faults"),
    "network": "Check the network of this rank's host: nstat -az TcpRetransSegs, ip -s link.",
}

HOST_STEP = "Check its host: clocks and temperature (nvidia-smi -q -d CLOCK,TEMPERATURE; turbostat)."
"""If nothing shows why a whole rank is slow."""


SENTENCES: Mapping[ReasonCode, tuple[str, str]] = {
    "healthy": ("healthy", ""),
    "undecided": ("{of_verdict}", ""),
    "standstill": ("{of_verdict}", "{named}"),
    "no_rank_named": ("{label}, but no rank is named", ""),
    "one_off": ("one-off that has passed", ""),
    "contended": ("contention for CPUs, which may pass", ": {contended}, for {lasted_s} s of {for_s} s so far"),
    "descheduled": (
        "waiting for a CPU",
        ": {descheduled_share} of its lateness, which its own trace would not show",
    ),
    **{
        code: (
            BY_SYSTEM[code][0],
            ": {system_share} of the lateness of {ranks_of}, which a trace would not show",
        )
        for code in ("cgroup_throttled", "stopped", "page_faults", "memory_pressure")
    },
    "no_rule_matched": ("{missed}", ""),
    "observe_only": ("observe-only", ": rule {rule} matched{stood}"),
    "pending": ("rule {rule} waits to see whether it lasts", ": {lasted}"),
    "rule_matched": ("rule {rule}", ": {found}{beside}{choice}"),
    "follow_up": ("rule {rule} follows up", " {follows} with {by}: {open}; {found}{beside}"),
    "asked": ("requested by {who}", ": {why}"),
    "rank_hangs": ("rank {rank} hangs inside capture {capture_id}", ": its stacks are taken from outside"),
    "captures_per_run": ("captures_per_run", ": {captures_of} made"),
    "active": ("active", ": captures are {allowed}"),
    "overhead_budget": (
        "overhead_budget",
        ": captures have cost the job {spent_s} s, more than {budget_share} of the run so far ({budget_s} s); "
        "next capture after {until_s}",
    ),
    "captures_per_hour": (
        "captures_per_hour",
        ": {captures_of} requested in the last hour; next capture after {until_s}",
    ),
    "captures_per_day": ("captures_per_day", ": {captures_of} requested in the last day; next capture after {until_s}"),
    "place_kept": (
        "the last capture of {place_of} is reserved for a suspect larger than any before",
        ": this suspect costs {gain_s} ms a step, the largest captured {largest_gain_s} ms; until {until_s}",
    ),
    "already_captured": (
        "already captured",
        " in {capture_id} ({captured_gain_s} ms a step then, {gain_s} ms now); captures again at "
        "{worse_gain_s} ms, after a restart, or after {until_s}",
    ),
    "cooldown": ("cooldown of rule {rule}", " until {until_s}"),
    "after_failures": ("{failed} of rule {rule} failed or {were} refused; next attempt after {until_s}", ""),
    "rank_busy": ("rank {rank} is already being captured", " ({capture_id})"),
    "concurrent_ranks": (
        "concurrent_ranks",
        ": {running} of at most {limit} ranks are being captured, and {wanted} more are requested",
    ),
    "no_such_rank": ("{ranks_asked} not in this job", ": {there}"),
    "captures_left": ("captures of {wanted_ranks} requested, {left} left", ""),
}
"""For each reason of a decision, its kind and its details. `_PHRASES` has the fields that are no parameters."""

_RAISED: Mapping[ReasonCode, str] = {
    "overhead_budget": "overhead_budget",
    "captures_per_hour": "captures_per_hour",
    "captures_per_day": "captures_per_day",
    "place_kept": "{place_of}",
}
"""Limits that allow captures again after a while."""

RESOLUTIONS: Mapping[ReasonCode, tuple[str, ...]] = {
    "one_off": (
        "Nothing is left to capture. Watch whether it comes back; `sftriage explain` shows in which steps it was.",
        "`sftriage explain` shows in which steps it was.",
    ),
    "contended": ("See whether it lasts, or lower detection.contended_after.",),
    **{
        code: (
            f"{system_advice(code)} To take a trace anyway, use `sftriage capture` or a rule with profiler nsys.",
            system_advice(code),
        )
        for code in BY_SYSTEM
    },
    "pending": ("See whether it lasts, or lower the rule's `for`.", "For the next run, lower the rule's `for`."),
    "captures_per_run": (
        "Raise limits.captures_per_run, or start another run.",
        "For the next run, raise limits.captures_per_run.",
    ),
    "active": ("Wait until then, or change the policy's active.cron.", "For the next run, change active.cron."),
    **{
        code: (f"Wait until then, or raise limits.{limit}.", f"For the next run, raise limits.{limit}.")
        for code, limit in _RAISED.items()
    },
    "already_captured": (
        "Look at the existing trace, or request another (`sftriage capture`).",
        "Look at the existing trace.",
    ),
    "cooldown": ("Wait for the cooldown to end.", "For the next run, shorten the rule's cooldown."),
    "after_failures": (
        "See why in `sftriage decisions`, and wait for the next attempt.",
        "`sftriage decisions` shows why its captures failed.",
    ),
    "rank_busy": ("Wait for that capture to end.", "For the next run, make captures shorter."),
    "concurrent_ranks": (
        "Wait for a running capture to end, or raise limits.concurrent_ranks.",
        "For the next run, raise limits.concurrent_ranks.",
    ),
    "no_such_rank": ("Request ranks that the job has.", ""),
    "captures_left": ("Request fewer, or raise the policy's limits.", "For the next run, raise limits."),
}
"""What would resolve a decision not to capture, unless its verdict's reasons say it, and what to do after the run."""


def reason_sentence(decision: Decision) -> str:
    """Why a decision was made."""
    return _filled("".join(SENTENCES[decision.reason]), decision)


def reason_kind(decision: Decision) -> str:
    """The reason without details, numbers as N: decisions are counted by it."""
    return _filled(SENTENCES[decision.reason][0], decision, masked=True)


def outcome_sentence(decision: Decision) -> str:
    """Why a suspect is not captured now; "" if it is, or if there is no suspect."""
    if decision.label != "suspect" or decision.outcome == "capture":
        return ""
    more = "further " if decision.outcome == "throttle" else ""
    return f"No {more}capture now: {reason_sentence(decision)}."


def resolution(decision: Decision) -> str:
    """What would resolve a decision not to capture, or a stall; "" if nothing would."""
    own = RESOLUTIONS.get(decision.reason)
    if own is None:
        return advice(reasons_of(decision), split=bool(decision.parameters.get("split")))
    if decision.reason == "active" and "until_s" not in decision.parameters:
        return "Change the policy's active.cron."
    return _filled(own[0], decision)


def afterwards(reason: ReasonCode, reasons: Iterable[str], parameters: Mapping[str, Parameter]) -> str:
    """What to do about a decision not to capture, or a stall, once the run has ended."""
    known = _resolves(split=bool(parameters.get("split")))
    own = RESOLUTIONS.get(reason)
    text = own[-1] if own is not None else " ".join(known[code][-1] for code in reasons if code in known)
    return text.format_map(_Fields("", parameters))


def advice(reasons: Iterable[str], *, split: bool = False) -> str:
    """What would resolve each of a verdict's reasons, in their order; a reason without advice is named.

    ``split``: the last gradient of each step is on record.
    """
    known = _resolves(split=split)
    return " ".join(known[code][0] if code in known else f"No advice for {code!r} yet." for code in reasons)


def _resolves(*, split: bool) -> Mapping[str, tuple[str, ...]]:
    return {**RESOLVES, "sync_ambiguous": AFTER_GRADIENTS} if split else RESOLVES


def reasons_of(decision: Decision) -> tuple[str, ...]:
    """The verdict's reasons, if they led to the decision."""
    return _reasons(decision.parameters)


def _reasons(parameters: Mapping[str, Parameter]) -> tuple[str, ...]:
    reasons = parameters.get("reasons", ())
    return tuple(map(str, reasons)) if isinstance(reasons, (tuple, list)) else (str(reasons),)


def decision_values(decision: Decision) -> dict[str, Any]:
    """A decision as JSON values: its reason as code and parameters, and in words."""
    return {**plain(decision), "words": reason_sentence(decision), "resolves": resolution(decision)}


class _Fields(dict[str, str]):
    """The parameters of a decision as text, and phrases made of several. One that a record lacks shows as ``?``.

    ``raw`` has the parameters as recorded.
    """

    def __init__(self, label: str, parameters: Mapping[str, Parameter], *, masked: bool = False) -> None:
        numbers = (int, float) if masked else ()
        texts = {name: "N" if isinstance(value, numbers) else _shown(name, value) for name, value in parameters.items()}
        super().__init__(texts, label=label)
        self.raw = parameters

    def __missing__(self, name: str) -> str:
        return _PHRASES[name](self) if name in _PHRASES else "?"

    def several(self, name: str, noun: str) -> str:
        return noun + "s" * (self.raw.get(name) != 1)


def _filled(template: str, decision: Decision, *, masked: bool = False) -> str:
    return template.format_map(_Fields(decision.label, decision.parameters, masked=masked))


def _missed(fields: _Fields) -> str:
    raw = fields.raw
    if "rule" not in raw:
        return f"no rule matches the label {fields['label']}"
    lacking = [
        f"its gain of {fields[name]}{unit} is under {fields[f'min_{name}']}{unit}"
        for name, unit in (("share", ""), ("gain_s", " ms"))
        if name in raw
    ]
    if "cost_hours" in raw:
        lacking.append(f"it has cost {fields['cost_hours']} GPU-hours, under {fields['min_cost_hours']}")
    for name in ("scope", "stage", "pattern"):
        if name in raw:
            trait = f"its {name} {fields[name]}" if name != "stage" or raw[name] else "a whole rank"
            lacking.append(f"{trait} is not one of {fields[f'{name}s']}")
    return f"rule {fields['rule']} does not match: {', and '.join(lacking)}"


def _named(fields: _Fields) -> str:
    if "rank" not in fields.raw and "rank_count" not in fields.raw:
        return ""
    more = f" and {fields['more_ranks']} more" if fields.raw.get("more_ranks") else ""
    return f": {fields['ranks_of']} in {fields['in_stage']}{more}"


def _beside(fields: _Fields) -> str:
    controls = fields.raw.get("controls")
    if controls is None:
        return ""
    if not isinstance(controls, (tuple, list)) or not controls:
        return "; no healthy rank was found for comparison"
    return f"; with rank{'s' if len(controls) > 1 else ''} {', '.join(map(str, controls))} for comparison"


def _chosen(fields: _Fields) -> str:
    chosen, profiler = fields.raw.get("chosen"), fields.raw.get("profiler")
    if chosen not in CHOICES or profiler not in PROFILERS:
        return ""
    stage = None if fields.raw.get("stage") is None else str(fields.raw["stage"])
    return f"; {choice_words(cast('ChoiceReason', chosen), cast('Profiler', profiler), stage)}"


def _ranks_asked(fields: _Fields) -> str:
    ranks = fields.raw.get("ranks")
    several = isinstance(ranks, tuple) and len(ranks) > 1
    return f"{'ranks' if several else 'rank'} {fields['ranks']} {'are' if several else 'is'}"


_PHRASES: Mapping[str, Callable[[_Fields], str]] = {
    "of_verdict": lambda f: ", ".join(_reasons(f.raw)) or "no reason given",
    "named": _named,
    "ranks_of": lambda f: f"rank {f['rank']}" if "rank" in f.raw else f"{f['rank_count']} ranks",
    "in_stage": lambda f: str(f.raw.get("stage") or "all local stages"),
    "missed": _missed,
    "stood": lambda f: ", {of_verdict}{named}".format_map(f) if "reasons" in f.raw else "",
    "found": lambda f: (
        "{of_verdict}{named}"
        if "reasons" in f.raw
        else "fixing {in_stage} of {ranks_of} would save {gain_s} ms a step ({share}), in {persistence} of the steps"
    ).format_map(f),
    "beside": _beside,
    "choice": _chosen,
    "open": lambda f: LEFT_OPEN.get(cast("LeftOpen", f.raw.get("left_open")), "?"),
    "by": lambda f: PROFILERS.get(cast("Profiler", f.raw.get("profiler")), "?"),
    "lasted": lambda f: (
        "{lasted_steps} of {for_steps} steps" if "for_steps" in f.raw else "{lasted_s} s of {for_s} s"
    ).format_map(f),
    "contended": lambda f: (
        "it may explain {contended_share} of the lateness of {ranks_of}"
        if "contended_share" in f.raw
        else "it was higher when {ranks_of} was named"
    ).format_map(f),
    "allowed": lambda f: f"not allowed until {f['until_s']}" if "until_s" in f.raw else "never allowed again",
    "failed": lambda f: "the last capture" if f.raw.get("failures") == 1 else f"the last {f['failures']} captures",
    "were": lambda f: "was" if f.raw.get("failures") == 1 else "were",
    "captures_of": lambda f: f"{f['captures']} of {f['limit']} {f.several('limit', 'capture')}",
    "wanted_ranks": lambda f: f"{f['wanted']} {f.several('wanted', 'rank')}",
    "ranks_asked": _ranks_asked,
    "there": lambda f: f"its ranks are 0 to {f['last_rank']}" if "last_rank" in f.raw else "it has no ranks yet",
}
"""Phrases that several parameters make."""


def _shown(name: str, value: Parameter) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value))
    # (a float cannot hold any integer)
    if name in _NUMBERS and (isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)):
        return _NUMBERS[name](value)
    return str(value)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}" if abs(seconds) < 100 else f"{seconds:.0f}"


_NUMBERS: Mapping[str, Callable[[float], str]] = {
    "until_s": clock,
    **dict.fromkeys(("spent_s", "budget_s", "lasted_s", "for_s", "cost_hours", "min_cost_hours"), _seconds),
    **dict.fromkeys(
        ("gain_s", "min_gain_s", "captured_gain_s", "worse_gain_s", "largest_gain_s"),
        lambda seconds: f"{1000 * seconds:.3g}",
    ),
    **dict.fromkeys(
        ("share", "min_share", "persistence", "budget_share", "contended_share", "descheduled_share", "system_share"),
        lambda fraction: f"{100 * fraction:.3g}%",
    ),
}
