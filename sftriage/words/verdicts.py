"""Sentences on verdicts, and the formats of times, sizes and numbers in all sentences.

A verdict holds every number that decided, so a recorded one can be explained without its window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Literal

from sftriage.model.verdicts import Against, Direction, OwnWork, Regression, SlowLink, Suspect, Verdict
from sftriage.model.windows import MOST_FRACTION, InterpreterCode, SystemCode

_MOST_RANKS = 8


def every(period_steps: int) -> str:
    """How often something recurs."""
    return "every second step" if period_steps == 2 else f"every {period_steps} steps"


def some_ranks(ranks: Sequence[int]) -> str:
    """Some ranks by number, the first of many; "" for none."""
    if not ranks:
        return ""
    *others, last = [str(rank) for rank in ranks[:_MOST_RANKS]]
    if more := len(ranks) - _MOST_RANKS:
        others, last = ([*others, last], f"{more:,} more") if more > 0 else (others, last)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
# There are no dates before the year 1, and none after 9999.
_FIRST_S, _LAST_S = -62_135_596_800.0, 253_402_300_799.0


def moment(time_s: float) -> datetime:
    """Seconds since the epoch as a date, in UTC; by addition, as the C library's conversion has a narrower range."""
    return _EPOCH + timedelta(seconds=min(max(_FIRST_S, time_s), _LAST_S))


def clock(time_s: float) -> str:
    """A time as people and programs read it."""
    return moment(time_s).strftime("%Y-%m-%dT%H:%M:%SZ")


def capitalized(text: str) -> str:
    """A phrase as the beginning of a sentence."""
    return f"{text[:1].upper()}{text[1:]}"


def milliseconds(seconds: float) -> str:
    """A duration in milliseconds."""
    return f"{seconds * 1e3:.1f} ms"


def counted(number: int, noun: str) -> str:
    """A count with its noun: one step, two steps."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def span(first_step: int, last_step: int) -> str:
    """A range of steps, both ends included."""
    return f"step {first_step}" if first_step == last_step else f"steps {first_step} to {last_step}"


def numbers(first_step: int, last_step: int) -> str:
    """The range without the word "steps", as in a column of a table."""
    return f"{first_step}" if first_step == last_step else f"{first_step} to {last_step}"


def size(size_bytes: float) -> str:
    """A file's size, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"


def place(path: Path) -> str:
    """A path as a user would type it: relative to the current directory if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


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


def lasted(seconds: float) -> str:
    """A length of time, from milliseconds to hours."""
    for unit, of_unit_s in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 2 * of_unit_s or (unit == "s" and seconds >= 1.0):
            return f"{seconds / of_unit_s:.1f} {unit}"
    return f"{seconds * 1e3:.0f} ms"


def hours_of_ranks(rank_s: float, *, on_devices: bool) -> str:
    """Seconds of ranks in hours: GPU-hours if the ranks run on GPUs."""
    hours, unit = rank_s / 3600.0, "GPU-hours" if on_devices else "rank-hours"
    return f"{hours:.2g} {unit}" if hours < 10 else f"{hours:,.0f} {unit}"


REASONS: Mapping[str, str] = {
    "co_critical": "several ranks are late together, so fixing one alone would save little",
    "sync_ambiguous": "the time is lost inside a sync stage, where ranks wait for each other and all look alike",
    "no_sync": "no exchange between the ranks is known, so waiting looks like work",
    "roaming": "the rank that is last changes from step to step",
    "low_coverage": "steps of some ranks are missing",
    "no_baseline": "all ranks became slower alike, or one of two is slower, and the normal step time is not known",
    "intermittent": "one rank causes most of the delay, but not yet often enough to rule out chance",
    "mixed_roles": "the ranks do different work, and their cohorts (ranks that do the same work) are not declared",
    "clock_limited": "the ranks run on devices, and by the host's clock a wait for a device can show in any stage",
    "self_inflicted": "a capture was running, which itself slows the job",
    "regressed": "the job is slower than its own best, and no single rank is the cause",
    "slow_link": "a link between hosts is slow, and all ranks wait for it",
}

CLOCKS: Mapping[str, str] = {"host": "", "device": "by the devices' clock"}
"""The clock that a verdict is based on, if it is not the host's."""

STALLS: Mapping[str, str] = {
    "not_arrived": "these ranks are not with the others, which are in a sync stage",
    "died": "the others are in a sync stage, and the process of these ranks has ended",
    "left_early": "the others are in a sync stage, and these ranks have stopped recording",
    "in_sync": "every rank is inside the same sync stage, where all of them look alike",
    "no_rank_waits": "no rank waits in a sync stage, and these ranks got least far",
    "outside_steps": "no rank is in a step",
    "unseen_ranks": "some ranks record nothing",
}
"""Why a job is stalled; named ranks follow."""

AFTER_GRADIENTS = (
    "Look at the network between the ranks and at ranks that wait for a CPU, or capture some ranks (`sftriage "
    "capture`) and compare: all ranks were ready before the time was lost.",
    "Look at the network between the ranks, and at waits for a CPU: all ranks were ready before the time was lost.",
)
"""The advice on ``sync_ambiguous`` if the last gradient of each step is on record."""

RESOLVES: Mapping[str, tuple[str, ...]] = {
    "co_critical": ("Look at all the late ranks, or at what they share (a host, a switch, a data shard).",),
    "sync_ambiguous": (
        "Under DDP, monitor.watch(model) separates work from waiting in that stage. Under FSDP it cannot (gradients "
        "are ready only after the exchange): capture some ranks there (`sftriage capture`) and compare.",
        "For the next run under DDP, monitor.watch(model) separates work from waiting in that stage.",
    ),
    "no_sync": ("Name the stages in which the ranks wait (`sync` of Monitor, or of a --map).",),
    "roaming": (
        "Look for causes in the data or the clock (uneven batches, garbage collection, a shared filesystem), or wait "
        "until one rank stays in front.",
        "Look for causes in the data or the clock (uneven batches, garbage collection, a shared filesystem).",
    ),
    "low_coverage": ("Check that every rank runs the recorder and that its ring can be read.",),
    "no_baseline": ("Let the job finish its warm-up, which shows its normal step time.", "Compare with a faster run."),
    "intermittent": (
        "Wait for the delay to recur more often, or lower min_persistence to catch short bursts.",
        "For the next run, lower min_persistence to catch short bursts.",
    ),
    "mixed_roles": ("Declare cohorts, so that each rank is compared with ranks of its own role.",),
    "clock_limited": (
        "Record device time (SFTRIAGE_DEVICE_TIME=1 in the job's environment). If it is recorded, `sftriage explain` "
        "shows whether too few steps have device times or the two clocks disagree.",
    ),
    "self_inflicted": ("Wait for a window without a capture.", "Look at the windows before the capture."),
    "regressed": (
        "Look for what changed when the slowdown began (the data and its lengths, neighbours on the machines, clocks "
        "and temperatures, a file system that fills).",
    ),
    "slow_link": (
        "Look at that network interface, its cable and switch port (ethtool, ip -s link), and at what else uses them.",
    ),
    "not_arrived": (
        "Look at the stacks of the named ranks (py-spy dump --pid), and at what their stage reads from or calls.",
        "Look at what the stage of the named ranks reads from or calls; captured stacks show where they hung.",
    ),
    "died": ("Check the last output of the ended process, and the kernel log for out-of-memory.",),
    "left_early": ("Check that every rank takes the same number of steps (uneven data, a `break` on one rank).",),
    "in_sync": (
        "Compare the stacks of the ranks (py-spy dump --pid) or the flight recorder of torch.distributed, to find a "
        "collective that some did not enter.",
        "Captured stacks show which collective some ranks did not enter.",
    ),
    "no_rank_waits": (
        "Look at the stacks of the ranks that got least far, and at what the others share with them (a file system, a "
        "collective in a stage that is not declared as sync).",
        "Look at what the ranks that got least far share with the others.",
    ),
    "outside_steps": (
        "Check whether the job is evaluating, saving or loading, or look at its ranks' stacks (py-spy dump --pid).",
        "Check whether the job was evaluating, saving or loading.",
    ),
    "unseen_ranks": ("Check whether all ranks run and record.", "Check whether all ranks ran and recorded."),
}
"""What would resolve a reason of a ``needs_evidence`` or ``stalled`` verdict, and what to do if the run has ended."""


def subject(suspect: Suspect) -> str:
    """A suspect's scope; a rank with its host, if the job has several."""
    if suspect.scope == "rank":
        return f"rank {suspect.ranks[0]}" + (f" on {suspect.on_host}" if suspect.on_host else "")
    if suspect.scope not in ("host", "cohort"):
        return "every rank"
    name = suspect.host if suspect.scope == "host" else suspect.cohort
    return f"{suspect.scope} {name} ({counted(len(suspect.ranks), 'rank')})"


def timing(suspect: Suspect) -> str:
    """When a suspect's fault began, and whether it recurs."""
    since = "" if suspect.onset_step is None else f" since {onset(suspect)}"
    if suspect.pattern == "recurring":
        return f"recurring {every(suspect.period_steps) if suspect.period_steps else 'at no fixed period'}{since}"
    if suspect.pattern == "one-off":
        return f"one-off{since.replace('since', 'from')}, and has passed"
    return f"chronic{since}"


def onset(suspect: Suspect) -> str:
    """The step at which a suspect's fault began, and the range that it may have begun in."""
    step = suspect.onset_step
    earliest, latest = suspect.onset_range or (step, step)
    return f"step {step}" if earliest == latest else f"about step {step} ({earliest} to {latest})"


BY_SYSTEM: Mapping[SystemCode, tuple[str, str]] = {
    "descheduled": ("waiting for a CPU", "check what else runs on its cores, or limits its CPU time"),
    "cgroup_throttled": (
        "throttling by its cgroup's CPU limit",
        "raise its cgroup's CPU limit (cpu.max; in Kubernetes resources.limits.cpu), or run fewer threads",
    ),
    "stopped": (
        "being stopped as a whole (SIGSTOP)",
        "find what sends its process SIGSTOP and SIGCONT (cpulimit, a tool that freezes processes)",
    ),
    "page_faults": (
        "waiting for pages of its memory to be read from disk",
        "check whether its host swaps (vmstat 1), and give it more memory",
    ),
    "memory_pressure": (
        "waiting for memory",
        "give its cgroup more memory (memory.high, memory.max), or run less in it",
    ),
}
"""How the system makes a rank late, worded to follow "its lateness was", and what to do about it."""

BY_INTERPRETER: Mapping[InterpreterCode, tuple[str, str]] = {
    "garbage_collection": (
        "Python's garbage collection",
        "collect in the same step on all ranks: gc.disable(), and gc.collect() every N steps",
    ),
    "recompilation": (
        "torch.compile at work",
        "find what changes from step to step: TORCH_LOGS=recompiles shows why it recompiles",
    ),
}
"""The same of Python's garbage collector and torch's compiler."""


def system_advice(code: SystemCode) -> str:
    """What to do about a rank that the system makes late, as a sentence."""
    return f"{capitalized(BY_SYSTEM[code][1])}."


def by_system(suspect: Suspect) -> str:
    """How much of a suspect's lateness the system or the interpreter caused; "" if unknown."""
    (does, _), fraction = _caused(suspect) or (BY_SYSTEM["descheduled"], suspect.descheduled_fraction)
    return "" if fraction is None else f"{fraction:.0%} of its lateness was {does}"


def _caused(suspect: Suspect) -> tuple[tuple[str, str], float] | None:
    """What explains most of a suspect's lateness with what to do about it, and which part; None if nothing counted."""
    if suspect.by_system is not None:
        code, fraction = suspect.by_system
        return BY_SYSTEM[code], fraction
    if suspect.interpreter is not None:
        name, fraction = suspect.interpreter
        return BY_INTERPRETER[name], fraction
    return None


def system_sentence(verdict: Verdict) -> str:
    """What the system did to the first suspect; "" if unknown."""
    if not verdict.suspects or not (caused := by_system(verdict.suspects[0])):
        return ""
    numbers, suspect = verdict.numbers, verdict.suspects[0]
    each = [
        template.format(milliseconds(numbers[name]) if name.endswith("_s") else f"{numbers[name]:.1f}")
        for name, template in _EACH.items()
        if name in numbers
    ]
    each = [", ".join(each[:-1]), each[-1]] if len(each) > 1 else each
    found = _caused(suspect)
    advice = "" if found is None else f"; {found[0][1]}"
    return caused + (f"; in each step it {' and '.join(each)}" if each else "") + advice


_EACH = {
    "collected_s": "collected garbage for {}",
    "compiled_s": "compiled for {}",
    "throttled_s": "was throttled for {}",
    "stopped_s": "was stopped for {}",
    "major_faults": "read {} pages from disk",
    "disk_s": "waited {} for disks",
    "memory_s": "waited {} for memory",
    "queued_s": "waited {} for a CPU",
    "preempted": "was preempted {} times",
}
"""What the system did in each step, by the number of the verdict."""


_KEPT_BACK: Mapping[SystemCode, str] = {
    "cgroup_throttled": "throttled by its CPU limit",
    "stopped": "stopped as a whole",
    "page_faults": "waiting for pages from disk",
    "memory_pressure": "waiting for memory",
}


def named_in_short(suspect: Suspect) -> str:
    """A suspect, its stage, and what the system does to it."""
    done = "" if suspect.by_system is None else _KEPT_BACK.get(suspect.by_system[0], "")
    return ", ".join(filter(None, (f"{subject(suspect)} in {slow_stage(suspect)}", done)))


def slow_stage(suspect: Suspect) -> str:
    """A suspect's stage."""
    return suspect.stage or "all its local stages"


def verdict_sentence(verdict: Verdict) -> str:
    """The verdict in one sentence, with its clock if that is not the host's."""
    steps, clock = span(verdict.first_step, verdict.last_step), CLOCKS[verdict.clock]
    match verdict.label:
        case "healthy":
            sentence = f"Healthy: nothing stands out in {steps} ({milliseconds(verdict.step_s)} a step)."
        case "suspect":
            sentence = _suspect_sentence(verdict, steps)
        case "stalled":
            sentence = _stall_sentence(verdict)
        case _:
            known = dict(REASONS)
            if verdict.link is not None:
                known["slow_link"] = link_phrase(verdict.link)
            if verdict.regression is not None:
                known["regressed"] = regression_phrase(verdict.regression)
            reasons = "; ".join(known.get(reason, reason) for reason in verdict.reasons)
            sentence = f"Held: {', '.join(verdict.reasons)} in {steps}: {reasons}."
    if (all_s := verdict.numbers.get("all_throttled_s")) is not None:
        limits = f"CPU limits throttle every rank for {milliseconds(all_s)} of a step or more"
        sentence = f"{sentence[:-1]}; {limits}: {BY_SYSTEM['cgroup_throttled'][1]}."
    if verdict.link is not None and "slow_link" not in verdict.reasons:
        sentence = f"{sentence[:-1]}; {link_phrase(verdict.link)}."
    if verdict.regression is not None and "regressed" not in verdict.reasons:
        sentence = f"{sentence[:-1]}; {regression_phrase(verdict.regression)}."
    return f"{sentence[:-1]}, {clock}." if clock else sentence


def regression_phrase(regression: Regression) -> str:
    """How much slower the job is than its best, since when and where; or that this has ended."""
    subject = f"steps of kind {regression.kind} are" if regression.kind else "the job is"
    since = f"about step {regression.since_step}"
    if regression.until_step is not None:
        as_good = f"{subject} as fast as {'their' if regression.kind else 'its'} best again"
        return (
            f"{as_good} since about step {regression.until_step}, "
            f"after being slower by {regression.fraction:.0%} from {since} on"
        )
    best = f"{'their' if regression.kind else 'its'} best of {milliseconds(regression.best_step_s)} a step"
    between = f"({regression.since_first_step} to {regression.since_last_step})"
    where_in = f", in {' and '.join(regression.stages)}" if regression.stages else ""
    alike = "on all ranks alike" if regression.scope == "all" else "because some ranks are late"
    waited = regression.descheduled_fraction or 0.0
    why = f"; {waited:.0%} of that is waiting for a CPU" if waited >= MOST_FRACTION else ""
    return f"{subject} slower than {best} by {regression.fraction:.0%} since {since} {between}{where_in}, {alike}{why}"


_SIDES: Mapping[Direction, str] = {"send": "sends", "receive": "receives", "both": "carries"}
_USUAL: Mapping[Against, str] = {
    "peers": "its peers {}",
    "reverse": "the other direction {}",
    "before": "{} before",
    "interface": "of an interface of {}",
}


def link_name(link: SlowLink) -> str:
    """The link, by its host or by both."""
    if not link.peer:
        return f"the link of {link.host}"
    about = ("between", "and") if link.direction == "both" else ("from", "to")
    return f"the link {about[0]} {link.host} {about[1]} {link.peer}"


def link_phrase(link: SlowLink) -> str:
    """Which link is slow, what it carries beside others, and what that costs."""
    does = "carries" if link.peer else _SIDES[link.direction]
    again = f", with {link.again_per_s:.0f} segments a second sent again" if link.again_per_s >= 1.0 else ""
    usual = _USUAL[link.against].format(bits(link.usual_bits_per_s))
    return f"{link_name(link)} {does} {bits(link.bits_per_s)}, {usual}{again}; costs {milliseconds(link.cost_s)} a step"


def bits(per_s: float) -> str:
    """A rate in bits per second, to two or three digits."""
    unit, scale = ("Gbit/s", 1e9) if per_s >= 1e9 else ("Mbit/s", 1e6)
    return f"{per_s / scale:.0f} {unit}" if per_s >= 9.95 * scale else f"{per_s / scale:.1f} {unit}"


ALONE: Mapping[str, str] = {"compilation": "compiles", "evaluation": "evaluates", "checkpoint": "saves a checkpoint"}
"""What a rank does alone, by the kind of step that it declares."""


def alone_phrase(work: OwnWork) -> str:
    """What a rank does alone, as it declares."""
    doing = [ALONE.get(kind, "") for kind in work.kind.replace("eval+", "evaluation+").split("+")]
    return f"{' and '.join(doing) if all(doing) else f'takes steps of kind {work.kind}'} alone"


def alone_so_far(work: OwnWork) -> str:
    """What this has cost, and how often it happened."""
    return f"{work.lost_s:.1f} s in {counted(work.times, 'step')} so far"


def _suspect_sentence(verdict: Verdict, steps: str) -> str:
    suspect = verdict.suspects[0]
    over = suspect.pattern == "one-off"
    name = capitalized(subject(suspect))
    slow = f"{name} {'was' if over else 'is'} slow in {slow_stage(suspect)}"
    cost = f"it cost{'' if over else 's'} the job {milliseconds(suspect.gain_s)}"
    # (left out if it would show as 0.0 ms)
    without_s = 0.0 if over else verdict.numbers.get("without_s", 0.0)
    without = f", which would take {milliseconds(without_s)} without it" if without_s >= 5e-5 else ""
    system = f"; {by_system(suspect)}" if _caused(suspect) is not None else ""
    wait = f"; the others wait in {' and '.join(verdict.sync)}" if verdict.sync else ""
    if suspect.alone is not None and suspect.pattern == "recurring":
        often = f"{every(suspect.period_steps)} " if suspect.period_steps else ""
        return (
            f"{name} {alone_phrase(suspect.alone)} {often}since {onset(suspect)}: "
            f"{cost} each time, in {slow_stage(suspect)} ({suspect.share:.0%} of such a step{without}), "
            f"{alone_so_far(suspect.alone)}{wait}{system}."
        )
    if suspect.alone is not None:
        system = f"; it {alone_phrase(suspect.alone)}, {alone_so_far(suspect.alone)}{wait}{system}"
    if suspect.pattern == "recurring" and suspect.period_steps:
        since = f"{every(suspect.period_steps)} since {onset(suspect)}"
        return f"{slow} {since}: {cost} each time ({suspect.share:.0%} of such a step{without}), in {steps}{system}."
    often = f"in {suspect.persistence:.0%} of {steps}; {timing(suspect)}"
    return f"{slow}: {cost} of each slow step ({suspect.share:.0%}){without}, {often}{system}."


def _stall_sentence(verdict: Verdict) -> str:
    still_s = verdict.numbers.get("still_s", verdict.exposed_s)
    step = "between steps" if "outside_steps" in verdict.reasons else f"in step {verdict.first_step}"
    typical_s = verdict.numbers.get("typical_step_s", 0.0)
    usual = f" (a step takes {milliseconds(typical_s)})" if typical_s else ""
    why = "; ".join(STALLS.get(reason, reason) for reason in verdict.reasons)
    who_where = ", ".join(f"{_missing(suspect)} in {slow_stage(suspect)}" for suspect in verdict.suspects)
    more = verdict.numbers.get("missing_ranks", 0.0) - sum(len(suspect.ranks) for suspect in verdict.suspects)
    if more > 0:
        who_where += f" and {more:.0f} more"
    return f"Stalled: no rank has moved for {still_s:.0f} s {step}{usual}; {why}{who_where and ': '}{who_where}."


def _missing(suspect: Suspect) -> str:
    if suspect.scope == "host":
        return f"host {suspect.host} ({some_ranks(suspect.ranks)})"
    return subject(suspect) if suspect.scope == "rank" else "every rank"


def explained(codes: Iterable[str]) -> tuple[str, ...]:
    """What a verdict's reasons mean, each with its code."""
    meanings = {**REASONS, **STALLS}
    return tuple(f"{meanings[code]} ({code})" if code in meanings else code for code in codes)


Unit = Literal["s", "fraction", "log odds"]


@dataclass(frozen=True, slots=True)
class Check:
    """One number against its threshold. ``met``: the number reaches it."""

    name: str
    what: str
    value: float
    threshold: float
    unit: Unit

    @property
    def met(self) -> bool:
        return self.value >= self.threshold


@dataclass(frozen=True, slots=True)
class Explanation:
    """The checks, the runner-up, and what would have changed the label."""

    checks: tuple[Check, ...]
    runner_up: Suspect | None
    changes: tuple[str, ...]


EXCESS: tuple[tuple[str, str, str, Unit], ...] = (
    ("coverage", "steps received from all ranks", "min_coverage", "fraction"),
    ("single_gain_s", "time that one rank or host alone adds to a step", "min_gain_s", "s"),
    ("late_excess_s", "how much later than usual the last rank arrives", "min_lateness_s", "s"),
    ("shared_excess_s", "how much longer than usual the step is for all ranks alike", "min_group_s", "s"),
    ("link_cost_s", "time that a slow link between hosts adds to a step", "min_gain_s", "s"),
)
AGAINST_ITSELF: tuple[tuple[str, str, str, Unit], ...] = (
    ("over_best_fraction", "how much slower than its own best the job is now", "min_over_best_fraction", "fraction"),
    ("slower_evidence", "evidence that the job has become slower, in log odds", "min_slower_evidence", "log odds"),
)
CLOCK: tuple[tuple[str, str, str, Unit], ...] = (
    ("device_coverage", "steps whose device times are known", "min_device_coverage", "fraction"),
    ("clock_agreement", "how well the two clocks agree on the length of a step", "min_clock_agreement", "fraction"),
    ("longer_s", "how much longer the step is than a healthy step, by the hosts' clock", "min_longer_s", "s"),
)
"""For ranks on devices: what is required to judge by the devices' clock, or else to trust the hosts'."""
FIRST: tuple[tuple[str, str, str, Unit], ...] = (
    ("first_log_odds", "evidence that the likeliest suspect is not chance, in log odds", "min_log_odds", "log odds"),
    (
        "first_own_fraction",
        "steps delayed by the likeliest suspect alone, of those delayed by it or the runner-up",
        "min_own_fraction",
        "fraction",
    ),
    ("first_persistence", "steps in which the likeliest suspect was slow", "min_persistence", "fraction"),
    ("first_share", "time that the likeliest suspect adds to a step, as a share of it", "min_share", "fraction"),
    ("first_explained_s", "how much of the delay the likeliest suspect explains", "wanted_s", "s"),
)


def explain(verdict: Verdict) -> Explanation:
    """The verdict's numbers against their thresholds, the runner-up, and what would have changed the label."""
    numbers = verdict.numbers
    tables = CLOCK + EXCESS + (FIRST if "first_share" in numbers else ()) + AGAINST_ITSELF
    checks = tuple(
        Check(name, description, numbers[name], numbers[threshold], unit)
        for name, description, threshold, unit in tables
        if name in numbers and threshold in numbers
    )
    first = verdict.suspects[0] if verdict.suspects else None
    rivals = [
        suspect for suspect in verdict.suspects[1:] if first is not None and not set(suspect.ranks) & set(first.ranks)
    ]
    return Explanation(checks, rivals[0] if rivals else None, _changes(verdict, checks))


def _changes(verdict: Verdict, checks: tuple[Check, ...]) -> tuple[str, ...]:
    of_clock = [check for check in checks if check.name in {name for name, *_ in CLOCK}]
    of_excess = [check for check in checks if check.name in {name for name, *_ in EXCESS}]
    of_first = [check for check in checks if check.name.startswith("first_")]
    if verdict.label == "suspect":
        # The check with the smallest margin would fail first.
        passed = (check for check in of_first if check.threshold > 0.0)
        close = min(passed, key=lambda check: check.value / check.threshold, default=None)
        return (f"held if this fell below its threshold: {close.what}",) if close is not None else ()
    if verdict.label == "stalled":
        return ()
    if "low_coverage" in verdict.reasons:
        return ("judged once enough of its steps have arrived from all ranks",)
    if "clock_limited" in verdict.reasons:
        missed = [check.what for check in of_clock if not check.met and check.unit == "fraction"]
        return _once_all("judged by the devices' clock", missed)
    if "self_inflicted" in verdict.reasons:
        return ("judged if no capture had run in it",)
    if verdict.reasons == ("regressed",):
        return ("healthy once its steps are as fast as the job's best again",)
    if verdict.reasons == ("slow_link",):
        return ("judged by its ranks alone once that link is as fast as the others",)
    missed = [check.what for check in of_first if not check.met]
    if verdict.label == "healthy":
        found = [check.what for check in of_excess[1:] if not check.met]
        several = "any of these reached its threshold" if len(found) > 1 else "this reached its threshold"
        return (f"unhealthy if {several}: {'; '.join(found)}",) if found else ()
    if not of_first:
        return ("a suspect if fixing one rank alone would save a good part of the delay",)
    return _once_all("a suspect", missed)


def _once_all(outcome: str, missed: list[str]) -> tuple[str, ...]:
    """What a window would be if it met all the checks that it misses: one of several is not enough."""
    if len(missed) == 1:
        return (f"{outcome} if this reached its threshold: {missed[0]}",)
    return (f"{outcome} if all of these reached their thresholds: {'; '.join(missed)}",) if missed else ()
