"""What `sftriage run --auto` gives the trainers: a folder for PYTHONPATH with the seams and the recorder in it.

It needs nothing of the trainers' Python but the standard library, so that they may have another one than ours, in
another container: whatever sees the folder can use it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import sftriage
from sftriage.base.files import refusing
from sftriage.trainer.moments import carried_binary
from sftriage.trainer.seams.patches import REPORT_ENV

CARRIED = ("__init__.py", "errors.py", "log.py", "base", "model", "trainer")
"""Of this package: what runs in a trainer."""

REPORTS = "told"
"""In the directory of the rings: what the seams of each process have seen, until a step is recorded."""
_BINARY = "_moments.abi3.so"


def carry(folder: Path) -> Path:
    """Copy what trainers need into a folder; return the entry for their PYTHONPATH.

    The recorder's binary carries the architecture in its name, so machines of several architectures share a folder.
    """
    package, copied = Path(sftriage.__file__).parent, folder / "sftriage"
    with refusing(f"{folder} cannot be written"):
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
    """What a job's environment gets, while it runs, for seams to find its stages and report them beside its rings."""
    with contextlib.suppress(OSError):
        (rings / REPORTS).mkdir(mode=0o700)
    folder = directory / "auto"
    try:
        places = (str(carry(folder).absolute()), os.environ.get("PYTHONPATH"))
        yield {"PYTHONPATH": os.pathsep.join(filter(None, places)), REPORT_ENV: str(rings / REPORTS)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
