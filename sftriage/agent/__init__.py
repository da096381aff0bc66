"""The per-host side: reads rings, keeps every step, gathers windows, runs captures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sftriage.lazily import from_modules

if TYPE_CHECKING:
    from sftriage.agent.agent import Agent, Telemetry
    from sftriage.agent.gather import Gatherer, Shape
    from sftriage.agent.recordings import Recording, load_recording
    from sftriage.agent.times import Span, StepTimes
else:
    __getattr__ = from_modules(
        __name__,
        {
            "agent": ("Agent", "Telemetry"),
            "gather": ("Gatherer", "Shape"),
            "recordings": ("Recording", "load_recording"),
            "times": ("Span", "StepTimes"),
        },
    )

__all__ = ["Agent", "Gatherer", "Recording", "Shape", "Span", "StepTimes", "Telemetry", "load_recording"]
