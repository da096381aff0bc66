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
from sftriage.errors import UsageError
from sftriage.recorder.moments import carried_binary

CARRIED = (
    *("__init__.py", "errors.py", "log.py"),
    *("base", "model", "profiling", "recorder", "sampling", "seams"),
)
"""Of this package: what runs in a trainer."""

CARRIED_IN = "auto"
"""What the folder is called, beside a run's captures."""

_BINARY = "_moments.abi3.so"


def carry(folder: Path) -> Path:
    """Copy what trainers need into a folder; return the entry for their PYTHONPATH.

    The recorder's binary carries the architecture in its name, so machines of several architectures share a folder.

    Raises:
        UsageError: it cannot be written.
    """
    package, copied = Path(sftriage.__file__).parent, folder / "sftriage"
    try:
        copied.mkdir(parents=True, exist_ok=True)
        for name in CARRIED:
            if (package / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.c", "*.partial")
                shutil.copytree(package / name, copied / name, ignore=ignored, dirs_exist_ok=True)
            else:
                shutil.copy(package / name, copied / name)
        if (package / "recorder" / _BINARY).exists():
            shutil.copy(package / "recorder" / _BINARY, carried_binary(copied / "recorder"))
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error
    return copied / "seams" / "site"


@contextlib.contextmanager
def carried(folder: Path) -> Iterator[dict[str, str]]:
    """Such a folder, for as long as a job runs; what is added to the job's environment.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        places = (str(carry(folder).absolute()), os.environ.get("PYTHONPATH"))
        yield {"PYTHONPATH": os.pathsep.join(place for place in places if place)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
