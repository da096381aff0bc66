"""A trace to store, as the unit tests have it."""

from tests.unit.conftest import trace

__all__ = ["trace"]
