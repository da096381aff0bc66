"""Captures are driven by a recording in these tests: what those of the recorder share."""

from tests.unit.recorder.conftest import clock, make_info, no_environment

__all__ = ["clock", "make_info", "no_environment"]
