"""Where a run's rings live while it lasts: a private directory on tmpfs, swept when nobody needs it any more."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from sftriage.errors import UsageError
from sftriage.runs.liveness import trainers_alive

TMPFS = Path("/dev/shm")
_OWNER = "owner"


def make_rings_directory(run_id: str, root: Path | None = None) -> Path:
    """A fresh private directory for rings. On tmpfs where there is one: a store must not wait for a disk.

    Raises:
        UsageError: it cannot be made, or somebody else owns the place it belongs in.
    """
    root = root or (TMPFS if os.access(TMPFS, os.W_OK) else Path(tempfile.gettempdir()))
    home = root / f"sftriage-{os.getuid()}"
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        found = home.lstat()
        if home.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise UsageError(f"{home} exists and is not a private directory of this user; remove it")
        _sweep(home)
        rings = home / run_id
        rings.mkdir(mode=0o700)
        own(rings)
    except OSError as error:
        raise UsageError(f"cannot make a directory for rings in {root}: {error.strerror}") from error
    return rings


def own(rings: Path) -> None:
    """Say that this process takes care of a directory of rings.

    Raises:
        UsageError: it is gone, or cannot be written.
    """
    try:
        (rings / _OWNER).write_text(str(os.getpid()), encoding="ascii")
    except OSError as error:
        raise UsageError(f"{rings} cannot be written: {error.strerror}") from error


def remove_rings_directory(rings: Path) -> None:
    """Remove a run's rings, unless a trainer still writes into one."""
    if not trainers_alive(rings):
        shutil.rmtree(rings, ignore_errors=True)


def _sweep(home: Path) -> None:
    """Remove what runs that were killed have left: neither they nor any of their trainers is there any more."""
    for rings in home.iterdir():
        try:
            owner = int((rings / _OWNER).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        if not Path(f"/proc/{owner}").exists():
            remove_rings_directory(rings)
