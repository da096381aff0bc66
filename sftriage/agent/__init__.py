"""The per-host side: reads rings, keeps every step, gathers windows, runs captures."""

from sftriage.agent.agent import Agent, Telemetry
from sftriage.agent.gather import Gatherer, Shape
from sftriage.agent.recordings import Recording, load_recording

__all__ = ["Agent", "Gatherer", "Recording", "Shape", "Telemetry", "load_recording"]
