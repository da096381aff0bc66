"""Times, sizes, numbers of things and places as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

_MOST_RANKS = 8


def every(period_steps: int) -> str:
    """How often something comes back."""
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
    """Seconds since the epoch as a date, in UTC; by addition, for the C library's conversion has a narrower range."""
    return _EPOCH + timedelta(seconds=min(max(_FIRST_S, time_s), _LAST_S))


def clock(time_s: float) -> str:
    """A time as people and programs read it."""
    return moment(time_s).strftime("%Y-%m-%dT%H:%M:%SZ")


def milliseconds(seconds: float) -> str:
    """A duration as people say it here."""
    return f"{seconds * 1e3:.1f} ms"


def counted(number: int, noun: str) -> str:
    """So many of something: one step, two steps."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def span(first_step: int, last_step: int) -> str:
    """Some steps that follow one another, both ends included."""
    return f"step {first_step}" if first_step == last_step else f"steps {first_step} to {last_step}"


def numbers(first_step: int, last_step: int) -> str:
    """The same where steps are named already, as in a column of a table."""
    return f"{first_step}" if first_step == last_step else f"{first_step} to {last_step}"


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


def rank_hours(seconds: float, ranks: int, *, on_devices: bool) -> str:
    """What time lost by all ranks comes to."""
    return f"{hours_of_ranks(seconds * ranks, on_devices=on_devices)} ({ranks:,} ranks)"


def hours_of_ranks(rank_s: float, *, on_devices: bool) -> str:
    """Seconds of ranks in hours: of GPUs, where they run on some."""
    hours, unit = rank_s / 3600.0, "GPU-hours" if on_devices else "rank-hours"
    return f"{hours:.2g} {unit}" if hours < 10 else f"{hours:,.0f} {unit}"
