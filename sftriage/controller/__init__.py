"""The per-job side: the one place that sees the whole flow from window to decision."""

from sftriage.controller.controller import Controller, Judged, settings_of, stall_settings_of
from sftriage.controller.journal import Entry, Journal, read_journal

__all__ = ["Controller", "Entry", "Journal", "Judged", "read_journal", "settings_of", "stall_settings_of"]
