"""The accounting and the verdicts: pure numpy, no I/O, no clock.

`segments` cuts a window where its ranks are together, `accounting` says where the exposed time went, `whatif` what
would be saved by mending one suspect, `baseline` what the job's healthy profile is, `course` when a suspect was there,
`evidence` puts all that beside each other, `verdicts` puts a label on it, and `clocks` says which clock that stands on.
"""

from sftriage.frontier.accounting import Accounting, Walk, account, anchored, by_step, plain, walk
from sftriage.frontier.baseline import Baseline, Profile, Typical, learned, profile
from sftriage.frontier.evidence import Past
from sftriage.frontier.explaining import Check, Explanation, explain
from sftriage.frontier.judging import assess, classify, judge
from sftriage.frontier.segments import Segment, segments
from sftriage.frontier.settings import Settings
from sftriage.frontier.whatif import SegmentReplay, replay

__all__ = [
    "Accounting",
    "Baseline",
    "Check",
    "Explanation",
    "Past",
    "Profile",
    "Segment",
    "SegmentReplay",
    "Settings",
    "Typical",
    "Walk",
    "account",
    "anchored",
    "assess",
    "by_step",
    "classify",
    "explain",
    "judge",
    "learned",
    "plain",
    "profile",
    "replay",
    "segments",
    "walk",
]
