"""What tests use that may not be here: one reason for each, so that a run says each once."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.integration.postgres import missing

GET_IT = "make test-deps"
CHROMIUM, GCC, NSYS, PROMETHEUS, PROMTOOL = map(shutil.which, ("chromium", "gcc", "nsys", "prometheus", "promtool"))
OPENERS = Path(sys.prefix) / "openers" / "bin" / "python"


def needs(found: object, what: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not found, reason=f"no {what} here: {GET_IT}")


bindfs = needs(shutil.which("bindfs"), "bindfs")
chromium = needs(CHROMIUM, "chromium")
gcc = needs(GCC, "gcc")
nsys = needs(NSYS, "nsys")
openers = needs(OPENERS.exists(), "HTA and TensorBoard plugin")
postgres = needs(missing() is None, f"PostgreSQL ({missing()})")
prometheus = needs(PROMETHEUS and PROMTOOL, "Prometheus")
strace = needs(shutil.which("strace"), "strace")
NO_GPU = "no NVIDIA GPU here"
gpu = pytest.mark.gpu
"""Of a test that runs on a GPU that torch can use, and is skipped without: see `tests.conftest`."""
NO_NAMESPACE = "no PID namespace can be made here"
NO_MOUNT = "no file system can be mounted here"
NO_REAL_TRACES = "no real traces here (SFTRIAGE_TEST_DATA, or shared/data beside the repository)"
