"""The Dockerfile; `tests/cluster` builds and runs it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HADOLINT = shutil.which("hadolint", path=Path(sys.executable).parent)


def test_the_images_are_unprivileged_and_have_nothing_of_the_build():
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    parts = [[line for line in each.splitlines() if line] for each in text.split("\nFROM ")[1:]]
    stages = {part[0].split(" AS ")[1]: part for part in parts}
    assert stages["base"] == [
        "--platform=$TARGETPLATFORM ${BASE} AS base",
        "ENV PATH=/opt/sftriage/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1",
        "WORKDIR /",
        "USER 65532:65532",
        'ENTRYPOINT ["sftriage"]',
    ]
    # AND what builds them runs on the building machine
    assert stages["wheel"][0] == "--platform=$BUILDPLATFORM ${BASE} AS wheel"
    for name in ("agent", "operator"):
        assert stages[f"{name}-venv"][0] == f"wheel AS {name}-venv"
        assert stages[name] == [f"base AS {name}", f"COPY --from={name}-venv /opt/sftriage /opt/sftriage"]
    # AND the one that is built by default comes last, on a base that is pinned
    assert next(reversed(stages)) == "operator"
    assert re.fullmatch(r"ARG BASE=python:[\w.-]+@sha256:[0-9a-f]{64}", text.split("\n\n")[0].strip())


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint here: make .venv/.dev")
def test_hadolint_finds_nothing():
    done = subprocess.run([str(HADOLINT), "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
