"""Fields of a policy: quantities, read into plain numbers, and fields that contradict each other.

A number without its unit is refused rather than guessed: ``cooldown: 10`` could be seconds or minutes, and the
difference shows only in production. Every parser raises ValueError, whose message says what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from sftriage.model.captures import Profiler

# Fifteen digits are exact in a float, and no quantity of a policy needs more.
_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,15})?"
_PERCENT = re.compile(rf"({_NUMBER})\s?%")
_DURATION_PART = re.compile(rf"({_NUMBER})(ms|d|h|m|s)")
_DURATION = re.compile(rf"(?:{_DURATION_PART.pattern})+")
_BYTES = re.compile(rf"({_NUMBER})\s?([KMGT]i|[kKMGT]|)(B?)")
_COUNT = re.compile(r"([0-9]{1,7}) (steps?|windows?)")
_HOURS = re.compile(rf"({_NUMBER}) ?(?:GPU|rank)-hours?")
_AT_LEAST = re.compile(r">=\s*(\S.*)")

_ANY, _TIME = r"[0-9]+(\.[0-9]+)?", r"([0-9]+(\.[0-9]+)?(ms|d|h|m|s))+"
PERCENTAGE, DURATION, SIZE = rf"^{_ANY}\s?%$", f"^{_TIME}$", rf"^{_ANY}\s?([KMGT]i|[kKMGT])?B?$"
LASTING, GAIN = f"^([0-9]+ (steps?|windows?)|{_TIME})$", r"^\s*>=\s*[0-9].*$"
COST = rf"^>=\s*{_ANY} ?(GPU|rank)-hours?$"
"""How quantities are written, for schemas: whoever reads a message that cites them is to know at a glance what it asks.
Whatever a parser takes matches."""

MOST_STEPS, MOST_WINDOWS, MOST_S = 1_000_000, 1000, 30 * 86400.0
"""The longest that something may be asked to last."""

_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_MULTIPLES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_MULTIPLES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def shown(value: object, limit: int = 60) -> str:
    """A value from a document as one short printable piece of a message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def fraction(text: object) -> float:
    """``"5%"`` as 0.05."""
    found = _PERCENT.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f"expected a percentage such as 5%, got {shown(text)}")
    return float(found[1]) / 100


def seconds(text: object) -> float:
    """``"90s"``, ``"10m"``, ``"1h30m"`` or ``"10ms"`` in seconds; units fall from left to right."""
    if not (isinstance(text, str) and _DURATION.fullmatch(text)):
        raise ValueError(f"expected a duration with its unit (ms, s, m, h, d) such as 10m, got {shown(text)}")
    parts = _DURATION_PART.findall(text)
    sizes = [_SECONDS[unit] for _, unit in parts]
    if sizes != sorted(set(sizes), reverse=True):
        raise ValueError(f"expected each unit once, the largest first, such as 1h30m, got {shown(text)}")
    return sum(float(number) * size for (number, _), size in zip(parts, sizes, strict=True))


def size_bytes(text: object) -> int:
    """``"512Mi"``, ``"1GiB"`` (powers of 1024) or ``"500MB"`` (powers of 1000) in bytes."""
    found = _BYTES.fullmatch(text) if isinstance(text, str) else None
    if found is None or not found[2] + found[3]:
        raise ValueError(f"expected a size with its unit (Ki, Mi, Gi, KB, MB, GB) such as 512Mi, got {shown(text)}")
    return int(float(found[1]) * _MULTIPLES[found[2]])


@dataclass(frozen=True, slots=True)
class Lasting:
    """How long something is to last: in steps, in seconds or in windows; the others are 0."""

    steps: int = 0
    seconds: float = 0.0
    windows: int = 0


AT_ONCE = Lasting(steps=1)
"""Every window that shows something shows it in a step."""

CONTENTION = ""
"""How long contention for CPUs is to last is kept under this, beside the names of rules: none is empty."""


def lasting(text: object) -> Lasting:
    """``"100 steps"``, ``"30s"`` or ``"2 windows"``."""
    found = _COUNT.fullmatch(text) if isinstance(text, str) else None
    if found is not None:
        count, steps = int(found[1]), found[2].startswith("step")
        if not 1 <= count <= (MOST_STEPS if steps else MOST_WINDOWS):
            raise ValueError(f"expected 1 step to {MOST_STEPS} steps, got {shown(text)}")
        return Lasting(steps=count) if steps else Lasting(windows=count)
    if not (isinstance(text, str) and _DURATION.fullmatch(text)):
        raise ValueError(f"expected steps or a time such as 100 steps, 30s or 5m, got {shown(text)}")
    if not 1.0 <= seconds(text) <= MOST_S:
        raise ValueError(f"expected 1s to 30d, got {shown(text)}")
    return Lasting(seconds=seconds(text))


def gain(text: object) -> tuple[float, float]:
    """``">= 5%"``, ``">= 10ms"`` or both, with ``and``, as a share of the exposed step time and seconds a step."""
    wanted = "expected a condition such as >= 5%, >= 10ms or >= 5% and >= 10ms"
    if not isinstance(text, str):
        raise ValueError(f"{wanted}, got {shown(text)}")
    thresholds: dict[str, float] = {}
    for part in text.split(" and "):
        found = _AT_LEAST.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{wanted}, got {shown(text)}")
        is_share = found[1].endswith("%")
        name = "min_share" if is_share else "min_gain_s"
        if name in thresholds:
            raise ValueError(f"{wanted}; {shown(text)} says the same unit twice")
        thresholds[name] = fraction(found[1]) if is_share else seconds(found[1])
    return thresholds.get("min_share", 0.0), thresholds.get("min_gain_s", 0.0)


def cost(text: object) -> float:
    """``">= 5 GPU-hours"``, or rank-hours, in hours of a job's ranks."""
    wanted = "expected a condition with its unit (GPU-hours, or rank-hours) such as >= 5 GPU-hours"
    found = _AT_LEAST.fullmatch(text) if isinstance(text, str) else None
    hours = None if found is None else _HOURS.fullmatch(found[1])
    if hours is None or not float(hours[1]):
        raise ValueError(f"{wanted}, got {shown(text)}")
    return float(hours[1])


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
