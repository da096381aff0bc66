"""Real jobs, as the integration tests have them."""

from tests.integration.conftest import environment

__all__ = ["environment"]
