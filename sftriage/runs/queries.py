"""What a person means by steps and by a time, as the command line and the page take them."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

from sftriage.errors import UsageError

_STEP = r"[0-9]{1,19}"
_STEPS = re.compile(rf"({_STEP})(?:\.\.({_STEP}))?")
_MOMENT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([Tt ].+)?")


def steps_of(text: str) -> tuple[int, int]:
    """The first and last step of ``"1042"`` or ``"1000..1100"``.

    Raises:
        UsageError: it is neither.
    """
    found = _STEPS.fullmatch(text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not found or max(first, last) >= 2**63:
        raise UsageError(f"--step {text!r}: expected a step such as 1042, or steps such as 1000..1100")
    if last < first:
        raise UsageError(f"--step {text!r}: the last step comes before the first")
    return first, last


def since_of(text: str, now: datetime) -> datetime:
    """The moment that ``"2h"``, ``"2026-11-20"`` or ``"2026-11-20T08:30:00+01:00"`` is; in UTC where no zone is said.

    Raises:
        UsageError: it is none.
    """
    from pydantic import TypeAdapter, ValidationError

    from sftriage.policy import quantities

    try:
        if _MOMENT.fullmatch(text):
            moment = TypeAdapter(datetime).validate_python(text)
            return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
        return now - timedelta(seconds=quantities.seconds(text))
    except (ValidationError, ValueError, OverflowError):
        raise UsageError(
            f"--since {text!r}: expected how long ago, such as 2h or 3d, a day such as 2026-11-20, "
            "or a time such as 2026-11-20T08:30:00Z"
        ) from None
