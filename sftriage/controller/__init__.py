"""The per-job side: the one place that sees the whole flow from window to decision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sftriage.lazily import from_modules

if TYPE_CHECKING:
    from sftriage.controller.controller import Controller, Judged, in_force, settings_of, stall_settings_of
    from sftriage.controller.costs import Cost
    from sftriage.controller.journal import Entry, Journal, read_journal
    from sftriage.controller.policies import PolicyFiles
    from sftriage.controller.resuming import Left, left_in
else:
    __getattr__ = from_modules(
        __name__,
        {
            "controller": ("Controller", "Judged", "in_force", "settings_of", "stall_settings_of"),
            "costs": ("Cost",),
            "journal": ("Entry", "Journal", "read_journal"),
            "policies": ("PolicyFiles",),
            "resuming": ("Left", "left_in"),
        },
    )

__all__ = [
    "Controller",
    "Cost",
    "Entry",
    "Journal",
    "Judged",
    "Left",
    "PolicyFiles",
    "in_force",
    "left_in",
    "read_journal",
    "settings_of",
    "stall_settings_of",
]
