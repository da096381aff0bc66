"""The directory of a run's rings: private, on tmpfs, and swept when it is no longer needed.

A rings directory without a running owner marks a killed run. The sweep removes all that such a run had outside its run
directory, with the remains of nsys.
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
from sftriage.runtime.carrying import FOLDER
from sftriage.runtime.nsys_launch import place_in, remove_place
from sftriage.trainer.session import SPOOL

log = logging.getLogger("sftriage")

TMPFS = Path("/dev/shm")
_OWNER, _STEPS = "owner", "steps"


def make_rings_directory(run_id: str, root: Path | None = None) -> Path:
    """A new private directory for rings, on tmpfs if there is one: recording must not wait for a disk."""
    root = root or (TMPFS if os.access(TMPFS, os.W_OK) else Path(tempfile.gettempdir()))
    home = root / f"sftriage-{os.getuid()}"
    with refusing(f"cannot create a directory for rings in {root}"):
        for last in (False, False, True):
            home.mkdir(mode=0o700, exist_ok=True)
            found = home.lstat()
            if home.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
                problem = f"{home} exists and is not a private directory of this user; remove it"
                raise UsageError(problem) from PermissionError(problem)
            sweep(home)
            rings = home / run_id
            try:
                rings.mkdir(mode=0o700)
                break
            except FileNotFoundError:
                # (the last other run there has just removed it)
                if last:
                    raise
        own(rings)
    return rings


def own(rings: Path) -> None:
    """Note that this process owns a directory of rings."""
    with refusing(f"cannot write {rings}"):
        Note(rings / _OWNER, Process).save(Process.of(os.getpid()))


def note_steps(rings: Path, steps: Path) -> None:
    """Note the directory for the steps of these rings, for a process that takes over."""
    with contextlib.suppress(OSError):
        (rings / _STEPS).write_bytes(os.fsencode(steps.resolve()))


def variables_of(rings: Path, spool: Path, job: str) -> dict[str, str]:
    """Variables with which a trainer records into these rings."""
    return {"SFTRIAGE_RINGS": str(rings), "SFTRIAGE_SPOOL": str(spool), "SFTRIAGE_JOB": job}


def remove_rings_directory(rings: Path, *, even_written: bool = False) -> None:
    """Remove a run's rings, unless a trainer still writes to them (or ``even_written``), and an empty parent."""
    if even_written or not trainers_alive(rings):
        shutil.rmtree(rings, ignore_errors=True)
        if rings.parent.name == f"sftriage-{os.getuid()}":
            with contextlib.suppress(OSError):
                rings.parent.rmdir()


def tidy_rings(rings: Path) -> None:
    """Remove the files of ended trainers in a directory that is not ours, and the directory, if it is empty then."""
    if not trainers_alive(rings):
        with contextlib.suppress(OSError):
            for path in (*rings.glob("rank-*.*"), rings / SPOOL):
                path.unlink()
            rings.rmdir()


def sweep(home: Path) -> None:
    """Remove the remains of killed runs, of all whose rings are in a directory.

    A run is killed if it, its launcher and its trainers have all gone.
    """
    for rings in home.iterdir():
        # (several runs may begin at once; a launcher's trainers may not have created their rings yet)
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
    """Log the last steps of a killed run, and remove what its trainers and nsys left of it."""
    try:
        if steps.is_dir():
            reading = RankRings(rings, steps)
            reading.rows()
            reading.close()
    except Exception as error:
        log.warning("the last steps in %s are lost: %s", rings, error)
    shutil.rmtree(steps.parent / FOLDER, ignore_errors=True)
    try:
        if (place := place_in(RunDirectory(steps.parent))) is not None:
            remove_place(place)
    except InputError as error:
        log.warning("could not remove what nsys left of a killed run: %s", error)
