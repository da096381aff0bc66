"""When captures are allowed: cron windows, open in every minute that their expression names."""

from __future__ import annotations

import difflib
import re
import zoneinfo
from datetime import datetime, timedelta, timezone, tzinfo

from apscheduler.triggers.cron import CronTrigger

from sftriage.policy.quantities import shown

UTC = timezone.utc
MAX_CRON_LENGTH = 200

_STEP = re.compile(r"/[0-9]+")
_DIGIT = re.compile(r"[0-9]")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_S = 253_402_300_799.0
"""The last second of the year 9999, after which there are no dates."""
_WHEN = datetime(2024, 1, 1, tzinfo=UTC)


def zone(name: object) -> tzinfo:
    """The time zone of a name such as ``Europe/Berlin``.

    Raises:
        ValueError: there is none.
    """
    if name == "UTC":
        return UTC  # where a machine has no time zones installed, too
    wanted = f"expected a time zone such as UTC or Europe/Berlin, got {shown(name)}"
    if not isinstance(name, str):
        raise ValueError(wanted)
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        near = difflib.get_close_matches(name[:100], zoneinfo.available_timezones(), n=1)
        raise ValueError(wanted + (f'; did you mean "{near[0]}"?' if near else "")) from None


def trigger(cron: object, where: tzinfo) -> CronTrigger:
    """The minutes of a cron expression: minute, hour, day, month and weekday, all of which have to match.

    Raises:
        ValueError: it is none, could be misread, or names no minute ever.
    """
    wanted = f"expected minute, hour, day, month and weekday such as * 20-23 * * mon-fri, got {shown(cron)}"
    if not isinstance(cron, str) or len(cron) > MAX_CRON_LENGTH:
        raise ValueError(wanted)
    try:
        found = CronTrigger.from_crontab(cron, timezone=where)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{wanted}: {error}") from None
    # To cron, 1 is Monday; to the scheduler, whose other fields read as cron's, it is Tuesday.
    weekday = cron.split()[4]
    if _DIGIT.search(_STEP.sub("", weekday)):
        raise ValueError(f"expected the weekday by name, such as mon-fri, got {shown(weekday)}")
    if found.get_next_fire_time(None, _WHEN) is None:
        raise ValueError(f"expected a time that comes, but {shown(cron)} never does")
    return found


def opens_s(found: CronTrigger, now_s: float) -> float | None:
    """When the window is open, from ``now_s`` on: that itself if it is open now, and None if it never opens again."""
    # By addition, because the C library's conversion has a narrower range.
    now = _EPOCH + timedelta(seconds=min(now_s, _LAST_S))
    opens: datetime | None = found.get_next_fire_time(None, now.replace(second=0, microsecond=0))
    if opens is None:
        return None
    return max(now_s, (opens - _EPOCH).total_seconds())
