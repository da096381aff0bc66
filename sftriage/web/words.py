"""How the page writes times and dates. Pure."""

from __future__ import annotations

from datetime import datetime, timezone


def milliseconds(seconds: float) -> str:
    """A duration, with three figures that count."""
    ms = seconds * 1e3
    if ms >= 1e4:
        return f"{seconds:.1f} s"
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2f} ms"


def signed(seconds: float) -> str:
    """A difference."""
    return f"{'-' if seconds < 0 else '+'}{milliseconds(abs(seconds))}"


def moment(time_s: float) -> datetime:
    """Seconds since the epoch as a date, in UTC."""
    try:
        return datetime.fromtimestamp(time_s, timezone.utc)
    except (OverflowError, OSError, ValueError):
        return datetime.fromtimestamp(0, timezone.utc)


def clock(time_s: float) -> str:
    """The date and time of day."""
    return f"{moment(time_s):%Y-%m-%d %H:%M:%S}"


def stamp(time_s: float) -> str:
    """The same, for programs."""
    return moment(time_s).isoformat(timespec="seconds")


def ago(time_s: float, now_s: float) -> str:
    """How long ago something was."""
    passed = max(0.0, now_s - time_s)
    for unit, seconds in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if passed >= 2 * seconds:
            return f"{passed / seconds:.0f} {unit} ago"
    return f"{passed:.0f} s ago"


def number(value: int) -> str:
    """A whole number with its thousands apart."""
    return f"{value:,}"


def percent(fraction: float) -> str:
    """A share."""
    return f"{fraction:.0%}" if fraction >= 0.1 or fraction == 0 else f"{fraction:.1%}"
