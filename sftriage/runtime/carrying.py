"""The folder that `sftriage run` adds to the trainers' PYTHONPATH, with the seams and the recorder.

Its code needs only the standard library: the trainers may have another Python, in another container that mounts it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import sftriage
from sftriage.base.files import refusing
from sftriage.errors import UsageError
from sftriage.trainer.moments import carried_binary
from sftriage.trainer.seams.patches import REPORT_ENV

CARRIED = ("__init__.py", "errors.py", "log.py", "base", "model", "trainer")
"""The parts of this package that run in a trainer."""

REPORTS = "reports"
"""In the directory of the rings: what the seams of each process report, until a step is recorded."""
FOLDER = "auto"
"""In the directory of a run on this host: the folder, until the job has ended."""
_BINARY = "_moments.abi3.so"

log = logging.getLogger("sftriage")


def carry(folder: Path) -> Path:
    """Copy what trainers need into a folder; return the entry for their PYTHONPATH.

    The recorder's binary carries the architecture in its name, so machines of several architectures share a folder.
    """
    package, copied = Path(sftriage.__file__).parent, folder / "sftriage"
    with refusing(f"cannot write {folder}"):
        copied.mkdir(parents=True, exist_ok=True)
        for name in CARRIED:
            if (package / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.c", "*.partial")
                shutil.copytree(package / name, copied / name, ignore=ignored, dirs_exist_ok=True)
            else:
                shutil.copy(package / name, copied / name)
        if (package / "trainer" / _BINARY).exists():
            shutil.copy(package / "trainer" / _BINARY, carried_binary(copied / "trainer"))
    return copied / "trainer" / "seams" / "site"


@contextlib.contextmanager
def under_seams(directory: Path, rings: Path) -> Iterator[dict[str, str]]:
    """Variables for a job's environment, with which seams detect its stages and report them beside its rings.

    There are none if the folder cannot be written: a script's own Monitor records without it.
    """
    with contextlib.suppress(OSError):
        (rings / REPORTS).mkdir(mode=0o700)
    folder = directory / FOLDER
    variables = {}
    try:
        with contextlib.suppress(UsageError):
            places = (str(carry(folder).absolute()), os.environ.get("PYTHONPATH"))
            variables = {"PYTHONPATH": os.pathsep.join(filter(None, places)), REPORT_ENV: str(rings / REPORTS)}
        if not variables:
            log.warning("cannot write %s: only a sftriage.Monitor in the script is recorded", folder)
        yield variables
    finally:
        shutil.rmtree(folder, ignore_errors=True)
