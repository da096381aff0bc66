"""These run with an interpreter that has the frameworks: `make test-frameworks`."""

from importlib.util import find_spec

import pytest

from tests.integration.conftest import environment, start  # noqa: F401 (fixtures)

MISSING = [
    name
    for name in ("transformers", "lightning", "accelerate", "tensorboard", "wandb", "mlflow")
    if not find_spec(name)
]


def pytest_runtest_setup(item):
    if MISSING:
        pytest.skip(f"no {', '.join(MISSING)} here: make test-frameworks")
