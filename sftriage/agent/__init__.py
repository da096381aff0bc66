"""The per-host side: reads rings, keeps every step, gathers windows, runs captures."""

from sftriage.agent.agent import Agent, Telemetry
from sftriage.agent.gather import Gatherer, Shape
from sftriage.agent.recordings import Recording, load_recording
from sftriage.agent.times import Span, StepTimes

__all__ = ["Agent", "Gatherer", "Recording", "Shape", "Span", "StepTimes", "Telemetry", "load_recording"]
