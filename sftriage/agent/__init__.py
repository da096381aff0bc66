"""The per-host side: reads rings, keeps every step, runs captures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sftriage.lazily import from_modules

if TYPE_CHECKING:
    from sftriage.agent.agent import Agent, Telemetry
    from sftriage.agent.recordings import Recording, load_recording
else:
    __getattr__ = from_modules(
        __name__,
        {
            "agent": ("Agent", "Telemetry"),
            "recordings": ("Recording", "load_recording"),
        },
    )

__all__ = ["Agent", "Recording", "Telemetry", "load_recording"]
