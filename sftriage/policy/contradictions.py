"""What is wrong between fields of a policy that are each right, and limits under which nothing could ever happen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from sftriage.model.captures import Profiler, ProfilerChoice
from sftriage.policy.fields import Location

# Defaults that others are held against.
WINDOW_STEPS, STRIDE_STEPS = 50, 10
PROFILER: ProfilerChoice = "auto"
SAMPLE = 1
"""What is slow alike looks alike: one of the suspect's ranks shows it, and each more costs the job."""
CONTROL_RANKS = 0
CAPTURES_PER_HOUR = 4
CAPTURES_PER_DAY = 12
CONCURRENT_RANKS = 2

PROFILERS: tuple[str, ...] = get_args(Profiler)

_LIMITS: dict[str, int | None] = {
    "captures_per_hour": CAPTURES_PER_HOUR,
    "captures_per_day": None,
    "captures_per_run": None,
    "concurrent_ranks": CONCURRENT_RANKS,
}
"""Limits that count captures, with their defaults. Without one, a limit that is not said contradicts nothing."""

NO_WAIT = (None, "1 step", "1 steps", "1 window", "1 windows")
"""What `for` says of a rule that waits for nothing."""


def contradictions(document: Any) -> Iterator[tuple[Location, str]]:
    """What is wrong between fields that are each right, as (location, message).

    Works on plain data of any shape, in which only what was said is there, so that these are reported together with the
    mistakes inside the fields.
    """
    spec = _mapping(document, "spec")
    yield from _in_detection(_mapping(spec, "detection"))
    yield from _in_limits(_mapping(spec, "limits"))
    if spec.get("retention") == {}:
        yield ("spec", "retention"), "says neither age nor bytes; without retention traces are kept for ever"
    if _mapping(spec, "mitigate").get("remedies") in ([], ()):
        yield ("spec", "mitigate", "remedies"), "names no remedy; without mitigate there is advice alone"
    rules = spec.get("rules")
    if rules in ([], ()):
        yield ("spec", "rules"), "no rule; a policy that captures nothing has rules without a capture"
    seen: dict[str, int] = {}
    for index, rule in enumerate(rules if isinstance(rules, list | tuple) else ()):
        where: Location = ("spec", "rules", index)
        name = rule.get("name") if isinstance(rule, dict) else None
        if isinstance(name, str) and seen.setdefault(name, index) != index:
            yield (*where, "name"), f"a second rule named {name!r}; the first is spec.rules[{seen[name]}]"
        if isinstance(rule, dict):
            yield from _in_rule(rule, where, _mapping(spec, "limits"))


def unsaid(capture: dict[str, Any], *, stalled: bool = False) -> set[str]:
    """The fields of a capture that mean nothing beside its others, in a rule on stalls or on suspects."""
    return {*_idle(capture, stalled=stalled), "sample" if capture.get("ranks") else "ranks"}


def _idle(capture: dict[str, Any], *, stalled: bool) -> dict[str, str]:
    """The fields that mean nothing beside the profiler, each with why."""
    profiler = capture.get("profiler", PROFILER)
    if profiler not in (*PROFILERS, "auto"):
        return {}
    mine = {"stacks"} if stalled else {profiler} if profiler != "auto" else set(PROFILERS)
    idle = {other: f"options of {other} do nothing where the profiler is {profiler}" for other in PROFILERS}
    idle |= {
        other: f"options of {other} do nothing on stalled" for other in PROFILERS if stalled and profiler == "auto"
    }
    options = capture.get("stacks")
    from_outside = isinstance(options, dict) and True in (options.get("native"), options.get("flight_recorder"))
    if stalled or (profiler == "stacks" and from_outside):
        whom = "of a rank that stands still" if stalled else "with native frames, or the flight recorder's dump,"
        once = f"stacks {whom} are taken once, from outside, and of no steps"
        idle |= dict.fromkeys(("steps", "warmup_steps", "samples_per_second"), once)
    elif profiler == "stacks":
        idle["warmup_steps"] = "stacks need no warm-up: no profiler is started"
    elif profiler == "nsys":
        idle["samples_per_second"] = "no stacks are sampled in the trainer where the profiler is nsys"
    return {field: why for field, why in idle.items() if field not in mine}


def _in_detection(detection: dict[str, Any]) -> Iterator[tuple[Location, str]]:
    window = detection.get("window_steps", WINDOW_STEPS)
    stride = detection.get("stride_steps", STRIDE_STEPS)
    if isinstance(window, int) and isinstance(stride, int) and stride > window:
        at = "stride_steps" if "stride_steps" in detection else "window_steps"
        message = f"{stride} steps from window to window leave gaps between windows of {window} steps"
        yield ("spec", "detection", at), message


def _in_limits(limits: dict[str, Any]) -> Iterator[tuple[Location, str]]:
    for name, none in (*((name, 0) for name in _LIMITS), ("overhead_budget", "0%")):
        value = limits.get(name)
        if value == none and not isinstance(value, bool):
            yield ("spec", "limits", name), f"{none} would allow no capture ever; {_OBSERVE}"


_OBSERVE = "a policy that is only to observe has rules without a capture"


def _in_rule(rule: dict[str, Any], where: Location, limits: dict[str, Any]) -> Iterator[tuple[Location, str]]:
    match = _mapping(rule, "match")
    label, pattern = match.get("label"), match.get("pattern")
    captures = rule.get("capture") is not None
    capture = _mapping(rule, "capture")
    if label in ("healthy", "needs_evidence"):
        yield (*where, "match", "label"), _idle_label(label, captures, bool(rule.get("notify")))
    if match.get("reason") == "regressed":
        yield from _in_regressed(rule, match, where)
    elif label == "stalled":
        profiler = capture.get("profiler", PROFILER)
        if captures and profiler in ("torch", "nsys"):
            yield (*where, "match", "label"), _STALLED_CAPTURE.format(profiler)
        if pattern:
            yield (*where, "match", "pattern"), "no pattern on stalled: the step has not ended, and is the only one"
        if match.get("cost"):
            yield (*where, "match", "cost"), "no cost on stalled: the step has not ended, and costs more every second"
        if rule.get("for") not in NO_WAIT:
            yield (
                (*where, "for"),
                "no `for` on stalled: a stall is reported once; detection.stalled_after says how long it must last",
            )
    elif captures and pattern and set(map(str, pattern)) == {"one-off"}:
        yield (
            (*where, "match", "pattern"),
            "no capture on one-off alone, because the fault has passed and healthy steps would be captured",
        )
    yield from in_capture(capture, (*where, "capture"), stalled=label == "stalled")
    if captures:
        yield from _under_limits(capture, (*where, "capture"), limits)
    notify = rule.get("notify")
    for index, one in enumerate(notify if isinstance(notify, list | tuple) else ()):
        yield from _in_webhook(one, (*where, "notify", index))


def _in_regressed(rule: dict[str, Any], match: dict[str, Any], where: Location) -> Iterator[tuple[Location, str]]:
    if rule.get("capture") is not None:
        yield (*where, "capture"), "no capture on regressed, because nobody alone is why the job is slower"
    if "label" in match:
        yield (*where, "match", "label"), "no label beside regressed, which is told whatever the label is"
    for name in ("scope", "pattern", "cost"):
        if match.get(name):
            yield (
                (*where, "match", name),
                f"no {name} on regressed: it is about the job, and not about who is suspected",
            )
    if rule.get("for") not in NO_WAIT:
        yield (*where, "for"), "no windows on regressed: it is told once enough steps are slower, see docs/verdicts.md"


def in_capture(capture: dict[str, Any], where: Location, *, stalled: bool) -> Iterator[tuple[Location, str]]:
    """What is wrong between the fields of a capture, which is ``where``; in a rule on stalls or on suspects."""
    for field, why in _idle(capture, stalled=stalled).items():
        if field in capture:
            yield (*where, field), why
    ranks = capture.get("ranks")
    if isinstance(ranks, list | tuple) and ranks:
        twice = sorted({rank for rank in ranks if isinstance(rank, int) and ranks.count(rank) > 1})
        if twice:
            yield (*where, "ranks"), f"named twice: {', '.join(map(str, twice))}"
        if "sample" in capture:
            yield (*where, "sample"), "of ranks that are named, all are captured; say sample or ranks"


def _under_limits(capture: dict[str, Any], where: Location, limits: dict[str, Any]) -> Iterator[tuple[Location, str]]:
    """A limit under which a rule could never capture as many ranks as it says."""
    ranks, sample = capture.get("ranks", ()), capture.get("sample", SAMPLE)
    if not (isinstance(ranks, list | tuple) and type(sample) is int):
        return
    # Controls come where there is room for them: most suspects are fewer ranks than a rule allows.
    wanted, said = (len(ranks), f"ranks: {len(ranks)}") if ranks else (sample, f"sample: {sample}")
    for name, default in _LIMITS.items():
        most = limits.get(name, default)
        if type(most) is int and 0 < most < wanted:
            at = "ranks" if ranks else "sample"
            yield (*where, at), f"{wanted} captures at once ({said}), but limits.{name} is {most}"
            return


def _in_webhook(notification: Any, where: Location) -> Iterator[tuple[Location, str]]:
    if not (isinstance(notification, dict) and isinstance(notification.get("webhook"), dict)):
        return
    webhook = notification["webhook"]
    where = (*where, "webhook")
    if "url" in webhook:
        yield (*where, "url"), "an address is a secret and stays out of the policy; say url_from_env or url_from_file"
    elif len({"url_from_env", "url_from_file"} & set(webhook)) != 1:
        yield where, "say where its address is found: either url_from_env or url_from_file"


def _idle_label(label: str, captures: bool, notifies: bool) -> str:
    if captures:
        why = "nothing is slow" if label == "healthy" else "the signal cannot say which rank to capture"
        return f"no capture on {label}, because {why}; only suspect may capture"
    if notifies:
        return f"no message on {label}, because such windows come all the time; they are put on record without a rule"
    return f"a rule on {label} would do nothing; such windows are put on record without a rule"


_STALLED_CAPTURE = (
    "no {} capture on stalled, because it starts at a rank's next step, and a stalled rank takes none; "
    "a rule on stalled takes stacks (or says auto), or only observes"
)


def _mapping(holder: Any, name: str) -> dict[str, Any]:
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, dict) else {}
