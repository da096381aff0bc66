"""From what nsys leaves to a report that can be opened: by programs of nsys and one of ours, each with a deadline."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from pathlib import Path

from sftriage.capture.bounded import Finished
from sftriage.capture.nsys_report import ReportContents, contents_of
from sftriage.errors import CaptureError

CONVERT_S = 240.0

IMPORTERS = (
    "/usr/lib/nsight-systems/host-linux-x64/QdstrmImporter",
    "/usr/lib/nsight-systems/host-linux-armv8/QdstrmImporter",
)
"""Where Debian's package has it; its nsys looks elsewhere."""

Run = Callable[[list[str | Path], float], Generator[None, None, Finished]]
"""Runs a program to its end, or its deadline, turn by turn."""


def to_report(raw: Path, nsys: Path, run: Run) -> Generator[None, None, Path]:
    """The ``.nsys-rep`` of what nsys left, which is that already where nsys has found its importer.

    Raises:
        CaptureError: there is no importer, or it fails.
    """
    if raw.suffix != ".qdstrm":
        return raw
    beside = [directory / "QdstrmImporter" for directory in nsys.resolve().parent.parent.glob("host-linux-*")]
    importer = next((path for path in (*beside, *map(Path, IMPORTERS)) if path.exists()), None)
    if importer is None:
        raise CaptureError("nsys left a .qdstrm, and there is no QdstrmImporter to make a report of it")
    made = raw.with_suffix(".nsys-rep")
    found = yield from run([importer, "-i", raw, "-o", made], CONVERT_S)
    if found.status or not made.exists():
        raise CaptureError(f"QdstrmImporter: {found.problem()}")
    raw.unlink()
    return made


def to_export(report: Path, nsys: Path, run: Run) -> Generator[None, None, tuple[Path, ReportContents]]:
    """The SQLite export of a report, scrubbed, and what is in it. So the report has been opened by nsys itself.

    Raises:
        CaptureError: it cannot be opened.
    """
    export = report.with_suffix(".sqlite")
    options = ("--type=sqlite", "--force-overwrite=true", f"--output={export}")
    found = yield from run([nsys, "export", *options, report], CONVERT_S)
    if found.status or not export.exists():
        raise CaptureError(f"the report cannot be opened: nsys export: {found.problem()}")
    # In a process of its own: its time and memory are not the agent's.
    found = yield from run([sys.executable, "-m", "sftriage.capture.nsys_report", export], CONVERT_S)
    return export, contents_of(found.output)
