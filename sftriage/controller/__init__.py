"""The per-job side: the one place that sees the whole flow from window to decision."""

from sftriage.controller.controller import Controller, Judged, in_force, settings_of, stall_settings_of
from sftriage.controller.costs import Cost
from sftriage.controller.journal import Entry, Journal, read_journal
from sftriage.controller.notices import Origin
from sftriage.controller.notify import Notifier
from sftriage.controller.policies import PolicyFiles
from sftriage.controller.resuming import Left, left_in

__all__ = [
    "Controller",
    "Cost",
    "Entry",
    "Journal",
    "Judged",
    "Left",
    "Notifier",
    "Origin",
    "PolicyFiles",
    "in_force",
    "left_in",
    "read_journal",
    "settings_of",
    "stall_settings_of",
]
