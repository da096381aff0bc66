"""Real jobs, as the integration tests have them."""

from tests.integration.conftest import environment, start

__all__ = ["environment", "start"]
