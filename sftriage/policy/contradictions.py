"""What may not stand beside what in a policy.

`contradictions` finds what is wrong between fields that are each right, and limits under which nothing could ever
happen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from sftriage.model.captures import Profiler

Location = tuple[int | str, ...]
"""The way to a value of a document: field names and list indices."""

DEFAULTS = {"window_steps": 50, "stride_steps": 10, "sample": 1, "captures_per_hour": 4, "concurrent_ranks": 2}
"""Defaults that other fields are compared with."""

PROFILERS: tuple[str, ...] = get_args(Profiler)

_COUNTED = ("captures_per_hour", "captures_per_day", "captures_per_run", "concurrent_ranks")
"""Limits that count captures. One without a default contradicts nothing where it is left out."""

NO_WAIT = (None, "1 step", "1 steps", "1 window", "1 windows")
"""``for`` of a rule that waits for nothing."""

_OBSERVE = "a policy that is only to observe has rules without a capture"

Mistakes = Iterator[tuple[Location, str]]
"""Where in a document something is wrong, and what."""


def contradictions(document: Any) -> Mistakes:
    """What is wrong between fields that are each right.

    Works on plain data of any shape, without defaults filled in, so that these are reported together with the mistakes
    inside the fields.
    """
    spec = _mapping(document, "spec")
    detection = _mapping(spec, "detection")
    window, stride = (detection.get(name, DEFAULTS[name]) for name in ("window_steps", "stride_steps"))
    if isinstance(window, int) and isinstance(stride, int) and stride > window:
        at = "stride_steps" if "stride_steps" in detection else "window_steps"
        gaps = f"{stride} steps from window to window leave gaps between windows of {window} steps"
        yield ("spec", "detection", at), gaps
    limits = _mapping(spec, "limits")
    for name, none in (*((name, 0) for name in _COUNTED), ("overhead_budget", "0%")):
        if limits.get(name) == none and not isinstance(limits[name], bool):
            yield ("spec", "limits", name), f"{none} would allow no capture ever; {_OBSERVE}"
    if spec.get("retention") == {}:
        yield ("spec", "retention"), "says neither age nor bytes; without retention traces are kept for ever"
    if _mapping(spec, "mitigate").get("remedies") in ([], ()):
        yield ("spec", "mitigate", "remedies"), "names no remedy; without mitigate there is advice alone"
    if spec.get("rules") in ([], ()):
        yield ("spec", "rules"), "no rule; a policy that captures nothing has rules without a capture"
    known: dict[str, int] = {}
    for index, rule in enumerate(_list(spec, "rules")):
        if not isinstance(rule, dict):
            continue
        where: Location = ("spec", "rules", index)
        own = rule.get("name")
        if isinstance(own, str) and known.setdefault(own, index) != index:
            yield (*where, "name"), f"a second rule named {own!r}; the first is spec.rules[{known[own]}]"
        yield from _under(where, _in_rule(rule, limits))


def unsaid(capture: dict[str, Any], *, stalled: bool = False) -> set[str]:
    """The fields of a capture that mean nothing beside its others, in a rule on stalls or on suspects."""
    return {*_idle(capture, stalled=stalled), "sample" if capture.get("ranks") else "ranks"}


def in_capture(capture: dict[str, Any], *, stalled: bool) -> Mistakes:
    """What is wrong between the fields of a capture, in a rule on stalls or on suspects."""
    for field, why in _idle(capture, stalled=stalled).items():
        if field in capture:
            yield (field,), why
    if ranks := _list(capture, "ranks"):
        twice = sorted({rank for rank in ranks if isinstance(rank, int) and ranks.count(rank) > 1})
        if twice:
            yield ("ranks",), f"named twice: {', '.join(map(str, twice))}"
        if "sample" in capture:
            yield ("sample",), "of ranks that are named, all are captured; say sample or ranks"


def _under(where: Location, found: Mistakes) -> Mistakes:
    return (((*where, *at), message) for at, message in found)


def _idle(capture: dict[str, Any], *, stalled: bool) -> dict[str, str]:
    """The fields that mean nothing beside the profiler, each with why."""
    profiler = capture.get("profiler", "auto")
    if profiler not in (*PROFILERS, "auto"):
        return {}
    mine = {"stacks"} if stalled else {profiler} if profiler != "auto" else set(PROFILERS)
    beside = "on stalled" if stalled and profiler == "auto" else f"where the profiler is {profiler}"
    idle = {other: f"options of {other} do nothing {beside}" for other in PROFILERS}
    options = _mapping(capture, "stacks")
    from_outside = True in (options.get("native"), options.get("flight_recorder"))
    if stalled or (profiler == "stacks" and from_outside):
        of = "of a rank that stands still" if stalled else "with native frames, or the flight recorder's dump,"
        once = f"stacks {of} are taken once, from outside, and of no steps"
        idle |= dict.fromkeys(("steps", "warmup_steps", "samples_per_second"), once)
    elif profiler == "stacks":
        idle["warmup_steps"] = "stacks need no warm-up: no profiler is started"
    elif profiler == "nsys":
        idle["samples_per_second"] = "no stacks are sampled in the trainer where the profiler is nsys"
    return {field: why for field, why in idle.items() if field not in mine}


def _in_rule(rule: dict[str, Any], limits: dict[str, Any]) -> Mistakes:
    match, capture = _mapping(rule, "match"), _mapping(rule, "capture")
    label, pattern, captures = match.get("label"), match.get("pattern"), rule.get("capture") is not None
    if label in ("healthy", "needs_evidence"):
        yield ("match", "label"), _idle_label(label, captures, bool(rule.get("notify")))
    if match.get("reason") == "regressed":
        yield from _in_regressed(rule, match)
    elif label == "stalled":
        profiler = capture.get("profiler", "auto")
        if captures and profiler in ("torch", "nsys"):
            yield (
                ("match", "label"),
                f"no {profiler} capture on stalled, because it starts at a rank's next step, and a stalled rank takes "
                "none; a rule on stalled takes stacks (or says auto), or only observes",
            )
        if pattern:
            yield ("match", "pattern"), "no pattern on stalled: the step has not ended, and is the only one"
        if match.get("cost"):
            yield ("match", "cost"), "no cost on stalled: the step has not ended, and costs more every second"
        if rule.get("for") not in NO_WAIT:
            once = "a stall is reported once; detection.stalled_after says how long it must last"
            yield ("for",), f"no `for` on stalled: {once}"
    elif captures and pattern and set(map(str, pattern)) == {"one-off"}:
        passed = "because the fault has passed and healthy steps would be captured"
        yield ("match", "pattern"), f"no capture on one-off alone, {passed}"
    yield from _under(("capture",), in_capture(capture, stalled=label == "stalled"))
    if captures:
        yield from _under(("capture",), _under_limits(capture, limits))
    for index, one in enumerate(_list(rule, "notify")):
        webhook = one.get("webhook") if isinstance(one, dict) else None
        if not isinstance(webhook, dict):
            continue
        where = ("notify", index, "webhook")
        if "url" in webhook:
            secret = "an address is a secret and stays out of the policy; say url_from_env or url_from_file"
            yield (*where, "url"), secret
        elif len({"url_from_env", "url_from_file"} & set(webhook)) != 1:
            yield where, "say where its address is found: either url_from_env or url_from_file"


def _in_regressed(rule: dict[str, Any], match: dict[str, Any]) -> Mistakes:
    if rule.get("capture") is not None:
        yield ("capture",), "no capture on regressed, because nobody alone is why the job is slower"
    if "label" in match:
        yield ("match", "label"), "no label beside regressed, which is told whatever the label is"
    for name in ("scope", "pattern", "cost"):
        if match.get(name):
            about = "it is about the job, and not about who is suspected"
            yield ("match", name), f"no {name} on regressed: {about}"
    if rule.get("for") not in NO_WAIT:
        yield ("for",), "no windows on regressed: it is told once enough steps are slower, see docs/verdicts.md"


def _idle_label(label: str, captures: bool, notifies: bool) -> str:
    if captures:
        why = "nothing is slow" if label == "healthy" else "the signal cannot say which rank to capture"
        return f"no capture on {label}, because {why}; only suspect may capture"
    if notifies:
        return f"no message on {label}, because such windows come all the time; they are put on record without a rule"
    return f"a rule on {label} would do nothing; such windows are put on record without a rule"


def _under_limits(capture: dict[str, Any], limits: dict[str, Any]) -> Mistakes:
    """A limit under which a rule could never capture as many ranks as it says."""
    ranks, sample = capture.get("ranks", ()), capture.get("sample", DEFAULTS["sample"])
    if not (isinstance(ranks, list | tuple) and type(sample) is int):
        return
    # Controls come where there is room for them: most suspects are fewer ranks than a rule allows.
    at, wanted = ("ranks", len(ranks)) if ranks else ("sample", sample)
    for name in _COUNTED:
        most = limits.get(name, DEFAULTS.get(name))
        if type(most) is int and 0 < most < wanted:
            yield (at,), f"{wanted} captures at once ({at}: {wanted}), but limits.{name} is {most}"
            return


def _mapping(holder: Any, name: str) -> dict[str, Any]:
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, dict) else {}


def _list(holder: dict[str, Any], name: str) -> Sequence[Any]:
    value = holder.get(name)
    return value if isinstance(value, list | tuple) else ()
