"""A decision's reason as one of a few words: what is counted must not have a thousand names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sftriage.policy.reasons import RESOLVES
from sftriage.records import Decision

MATCHED: Final = "rule_matched"
ASKED: Final = "asked"
HANGS: Final = "rank_hangs"
UNKNOWN: Final = "other"

_LIMITS = ("captures_per_run", "captures_per_hour", "concurrent_ranks", "overhead_budget", "active", "cooldown")
_STARTS = {
    **{limit: limit for limit in _LIMITS},
    "healthy": "healthy",
    "one-off": "one_off",
    "observe-only": "observe_only",
    "the last ": "after_failures",
    "no rank ": "no_such_rank",
}
_INSIDE = {
    "is being captured already": "rank_busy",
    "captures left": "captures_left",
    "but no rank is named": "no_rank_named",
    ": window ": "waits_for_windows",
}


def reason_word(decision: Decision, reasons: Sequence[str] = ()) -> str:
    """The kind of a decision's reason.

    Args:
        decision: what was decided.
        reasons: those of the verdict it is about; of several, the first is the largest part.
    """
    if decision.outcome == "capture":
        if decision.reason.startswith("rank ") and " hangs inside capture " in decision.reason:
            return HANGS
        return ASKED if decision.label == "asked" else MATCHED
    if decision.outcome == "hold" and decision.label in ("needs_evidence", "stalled") and reasons:
        return reasons[0] if reasons[0] in RESOLVES else UNKNOWN
    text = decision.reason
    for start, word in _STARTS.items():
        if text.startswith(start):
            return word
    for inside, word in _INSIDE.items():
        if inside in text:
            return word
    # What is left says by which of its conditions the nearest rule was missed.
    return "no_rule_matched" if decision.outcome == "ignore" else UNKNOWN
