"""Traces: the store of captures, the manifest beside each of them, and the catalogue that answers questions.

A trace and its manifest appear together or not at all. The manifest is the truth; the catalogue is an index of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sftriage.lazily import from_modules

if TYPE_CHECKING:
    from sftriage.traces.catalogue import Catalogue
    from sftriage.traces.manifest import (
        Artefact,
        CaptureInfo,
        CostInfo,
        Manifest,
        ReproducedInfo,
        TriggerInfo,
        contents_of,
        may_contain,
    )
    from sftriage.traces.rows import CaptureRow, Wanted
    from sftriage.traces.store import TRACE_NAME, FileToStore, LocalStore
    from sftriage.traces.stores import Listing, Store
else:
    __getattr__ = from_modules(
        __name__,
        {
            "catalogue": ("Catalogue",),
            "manifest": (
                "Artefact",
                "CaptureInfo",
                "CostInfo",
                "Manifest",
                "ReproducedInfo",
                "TriggerInfo",
                "contents_of",
                "may_contain",
            ),
            "rows": ("CaptureRow", "Wanted"),
            "store": ("TRACE_NAME", "FileToStore", "LocalStore"),
            "stores": ("Listing", "Store"),
        },
    )

__all__ = [
    "TRACE_NAME",
    "Artefact",
    "CaptureInfo",
    "CaptureRow",
    "Catalogue",
    "CostInfo",
    "FileToStore",
    "Listing",
    "LocalStore",
    "Manifest",
    "ReproducedInfo",
    "Store",
    "TriggerInfo",
    "Wanted",
    "contents_of",
    "may_contain",
]
