"""Where a run's rings live while it lasts: a private directory on tmpfs, swept when nobody needs it any more.

It is how a run that was killed is found again: with its rings goes all that it had outside its run directory, and what
nsys left of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

from sftriage.agent.reading import RankRings
from sftriage.base.files import Note, refusing, regular
from sftriage.base.process import Process, locked_file
from sftriage.errors import InputError, UsageError
from sftriage.runs.directory import RunDirectory
from sftriage.runs.liveness import launcher_of, noted_process, trainers_alive
from sftriage.runtime.nsys_launch import place_in, remove_place
from sftriage.trainer.session import SPOOL

log = logging.getLogger("sftriage")

TMPFS = Path("/dev/shm")
_OWNER, _STEPS = "owner", "steps"


def make_rings_directory(run_id: str, root: Path | None = None) -> Path:
    """A fresh private directory for rings. On tmpfs where there is one: a store must not wait for a disk."""
    root = root or (TMPFS if os.access(TMPFS, os.W_OK) else Path(tempfile.gettempdir()))
    home = root / f"sftriage-{os.getuid()}"
    with refusing(f"cannot make a directory for rings in {root}"):
        for last in (False, False, True):
            home.mkdir(mode=0o700, exist_ok=True)
            found = home.lstat()
            if home.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
                said = f"{home} exists and is not a private directory of this user; remove it"
                raise UsageError(said) from PermissionError(said)
            sweep(home)
            rings = home / run_id
            try:
                rings.mkdir(mode=0o700)
                break
            except FileNotFoundError:
                # (another run was the last one there, and has just gone)
                if last:
                    raise
        own(rings)
    return rings


def own(rings: Path) -> None:
    """Note that this process takes care of a directory of rings."""
    with refusing(f"{rings} cannot be written"):
        Note(rings / _OWNER, Process).save(Process.of(os.getpid()))


def note_steps(rings: Path, steps: Path) -> None:
    """Leave word in which directory the steps of these rings are kept, for whoever has to do so in our place."""
    with contextlib.suppress(OSError):
        (rings / _STEPS).write_bytes(os.fsencode(steps.resolve()))


def remove_rings_directory(rings: Path, *, whoever_writes: bool = False) -> None:
    """Remove a run's rings, unless a trainer still writes into one; and what they are in, where they are the last."""
    if whoever_writes or not trainers_alive(rings):
        shutil.rmtree(rings, ignore_errors=True)
        if rings.parent.name == f"sftriage-{os.getuid()}":
            with contextlib.suppress(OSError):
                rings.parent.rmdir()


def tidy_rings(rings: Path) -> None:
    """Remove what trainers that are gone have left in a directory that is not ours, and it, if that is all."""
    if not trainers_alive(rings):
        with contextlib.suppress(OSError):
            for path in (*rings.glob("rank-*.*"), rings / SPOOL):
                path.unlink()
            rings.rmdir()


def sweep(home: Path) -> None:
    """Remove what runs that were killed have left, of all whose rings are in a directory.

    Neither they, nor what started their trainers, nor any of these is there any more.
    """
    for rings in home.iterdir():
        # (several runs may begin at once; a launcher's trainers may be yet to make their rings)
        with (
            contextlib.suppress(OSError, UsageError),
            regular(rings / _OWNER, UsageError) as file,
            locked_file(file.fileno(), wait_s=0.0),
        ):
            alive = noted_process(rings / _OWNER) is not None or launcher_of(rings) is not None
            if not alive and not trainers_alive(rings):
                steps = Path(os.fsdecode((rings / _STEPS).read_bytes())) if (rings / _STEPS).is_file() else None
                if steps is not None:
                    _finish_killed(rings, steps)
                shutil.rmtree(rings, ignore_errors=True)


def _finish_killed(rings: Path, steps: Path) -> None:
    """Put the steps of a killed run that are in no log yet into one, and remove what nsys left of it."""
    try:
        if steps.is_dir():
            reading = RankRings(rings, steps)
            reading.rows()
            reading.close()
    except Exception as error:
        log.warning("the last steps in %s are lost: %s", rings, error)
    try:
        if (place := place_in(RunDirectory(steps.parent))) is not None:
            remove_place(place)
    except InputError as error:
        log.warning("what nsys left of it is not removed: %s", error)
