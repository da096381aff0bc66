"""What of sftriage works on this machine, in the Python that asks, and what is missing for the rest."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from sftriage.errors import SftriageError
from sftriage.recorder import Monitor, moments
from sftriage.runtime.rings import TMPFS
from sftriage.windows.rings import open_ring

State = Literal["ok", "limited", "missing"]

_TRIAL_STEPS = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: ``ok``, ``limited`` (works, not as well as it could) or ``missing``, and why."""

    what: str
    state: State
    detail: str


def examine(rings_root: Path = TMPFS) -> list[Finding]:
    """Everything, in the order in which somebody who starts needs it. Nothing is left behind, and no torch imported."""
    return [_python(), _recorder(), *_rings(rings_root), _torch(), *_programs()]


def _python() -> Finding:
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    version = f"{platform.python_implementation()} {platform.python_version()}"
    return Finding("python", "ok", f"{version}{', free-threaded' if free_threaded else ''} ({sys.executable})")


def _recorder() -> Finding:
    if moments.FORM.name == "C":
        return Finding("recorder", "ok", "in C")
    return Finding("recorder", "limited", f"in Python, which costs a step more: {moments.WHY_NOT_C}")


def _rings(root: Path) -> list[Finding]:
    where = root if os.access(root, os.W_OK) else Path(tempfile.gettempdir())
    found = []
    if where != root:
        found.append(Finding("rings", "limited", f"{root} cannot be written: rings are in {where}, maybe on a disk"))
    try:
        with (
            tempfile.TemporaryDirectory(prefix="sftriage-doctor-", dir=where) as directory,
            Monitor(("trial",), (), rank=0, world_size=1, rings=directory) as monitor,
        ):
            for _ in range(_TRIAL_STEPS):
                with monitor.step(), monitor.stage("trial"):
                    pass
            if monitor.info is None:
                return [*found, Finding("rings", "missing", f"nothing can be recorded in {where}: see the warning")]
            locked = monitor.info.locked
            with open_ring(Path(directory) / monitor.info.file_name("ring")) as ring:
                read = len(ring.read().steps)
    except (OSError, SftriageError) as error:
        return [*found, Finding("rings", "missing", str(error))]
    if read != _TRIAL_STEPS:
        return [*found, Finding("rings", "missing", f"{read} of {_TRIAL_STEPS} steps came back from {where}")]
    free_bytes = shutil.disk_usage(where).free
    found.append(Finding("rings", "ok", f"in {where}, {free_bytes >> 20} MiB free"))
    if not locked:
        why = "no locks there: whether a rank lives is told by its pid, which another container does not see"
        found.append(Finding("locks", "limited", why))
    return found


def _torch() -> Finding:
    try:
        return Finding("torch", "ok", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return Finding("torch", "missing", "not in this Python: the trainers' own is what counts")


def _programs() -> list[Finding]:
    nsys, spy = shutil.which("nsys"), shutil.which("py-spy", path=search_path())
    return [
        Finding("nsys", "ok", nsys) if nsys else Finding("nsys", "missing", "no captures by Nsight Systems"),
        Finding("py-spy", "ok", spy)
        if spy
        else Finding("py-spy", "missing", "no stacks: pip install 'sftriage[stacks]'"),
    ]


def search_path() -> str:
    """Where programs are looked for: beside this Python first."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
