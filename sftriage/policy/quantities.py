"""The quantities of a policy, written with their unit and read into plain numbers.

A number without its unit is refused rather than guessed: ``cooldown: 10`` could be seconds or minutes, and the
difference shows only in production. Every parser raises ValueError, whose message says what was expected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
