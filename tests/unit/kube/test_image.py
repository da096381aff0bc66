"""The Dockerfile; `tests/cluster` builds and runs it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HADOLINT = shutil.which("hadolint", path=Path(sys.executable).parent)


def test_the_final_image_is_unprivileged_and_has_nothing_of_the_build():
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    build, final = text.split("\nFROM ")[1:]
    assert build.startswith("${BASE} AS build\n")
    assert final.splitlines() == [
        "${BASE}",
        "COPY --from=build /opt/sftriage /opt/sftriage",
        "ENV PATH=/opt/sftriage/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1",
        "WORKDIR /",
        "USER 65532:65532",
        'ENTRYPOINT ["sftriage"]',
    ]


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint here: make .venv/.dev")
def test_hadolint_finds_nothing():
    done = subprocess.run([str(HADOLINT), "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
