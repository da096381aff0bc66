"""Launching with Nsight Systems: every rank of the job starts under it, in its own session."""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from sftriage.agent import nsys_rank
from sftriage.agent.nsys import TRACES, NsysPlace, parse_version, processes
from sftriage.base.files import Note
from sftriage.base.process import run_bounded
from sftriage.errors import CaptureError, UsageError
from sftriage.runs.directory import RunDirectory

RANK_VARIABLE = "SFTRIAGE_NSYS_RANK"
"""Names the script that starts one rank, for launchers that start ranks their own way."""

_QUERY_S = 20.0
_END_S = 10.0
_PROGRAMS = (b"/nsys", b"QdstrmImporter")
_PROGRAM_WORDS = 4
"""The program is within this many words of a command line, if ``timeout`` runs it."""
_TMP_PREFIX = "nsys-"
_PREFIX = re.compile(r"sft-[0-9A-Za-z][0-9A-Za-z.-]+")
ELASTIC_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_ELASTIC_PROGRAMS = ("torchrun", "accelerate")


class NsysLaunch:
    """A run whose ranks start under nsys, in sessions called ``sft-<run>-<rank>.<attempt>``.

    ``traces`` is nsys's ``--trace``; ``directory`` is private, and gets a directory for temporary files if programs may
    run there. If ``armed``, every rank waits for a range that its trainer opens. Raises UsageError if nsys is missing,
    too old or hangs, does not know a trace, or armed ranks do not trace nvtx.
    """

    def __init__(self, run_id: str, directory: Path, traces: str, *, armed: bool = False) -> None:
        names = tuple(name for name in traces.split(",") if name)
        unknown = [name for name in names if name not in TRACES]
        if unknown or not names:
            raise UsageError(f"--nsys-trace {traces}: choose from {','.join(TRACES)}")
        if armed and "nvtx" not in names:
            raise UsageError(f"--nsys-armed: nsys waits for an NVTX range; add nvtx to --nsys-trace {traces}")
        found = find_nsys()
        tmp = _executable_directory(directory)
        self.place = NsysPlace(found, f"sft-{run_id}", names, tmp, tmp / "range" if armed else None)
        script = tmp / "rank"
        words = [sys.executable, "-I", "-S", str(Path(nsys_rank.__file__).resolve())]
        script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
        script.chmod(0o700)
        self.script = str(script)
        # For a process that takes over the run.
        Note(RunDirectory(directory).nsys, NsysPlace).save(self.place)

    def environment(self, before: Mapping[str, str]) -> dict[str, str]:
        """Variables for the job's environment; see `nsys_rank`."""
        added = {
            "SFTRIAGE_NSYS": str(self.place.binary),
            "SFTRIAGE_NSYS_SESSION": self.place.prefix,
            "SFTRIAGE_NSYS_TRACE": ",".join(self.place.traces),
            "SFTRIAGE_NSYS_TMP": str(self.place.tmp),
            RANK_VARIABLE: self.script,
            "PYTHON_EXEC": self.script,
        }
        if self.place.armed is not None:
            added["SFTRIAGE_NSYS_ARMED"] = str(self.place.armed)
        if before.get("PYTHON_EXEC"):
            added["SFTRIAGE_NSYS_PYTHON"] = before["PYTHON_EXEC"]
        return added


def find_nsys() -> Path:
    """Find nsys on PATH; raises UsageError if it is missing, too old or hangs."""
    found = shutil.which("nsys")
    if found is None:
        raise UsageError("--nsys: no nsys on PATH; install NVIDIA Nsight Systems")
    try:
        parse_version(run_bounded([found, "--version"], _QUERY_S).output)
    except CaptureError as error:
        raise UsageError(f"--nsys: {error}") from error
    return Path(found)


def arm_elsewhere(
    directory: Path, binary: Path, traces: tuple[str, ...], armed: Path, session: str, script: Path
) -> None:
    """Note for the agent in ``directory`` that ranks start armed in another container, and write a script for them.

    The script replaces torchrun's Python there, and needs a python3 or python on PATH.
    """
    program = script.with_name("nsys_rank.py")
    try:
        armed.parent.mkdir(parents=True, exist_ok=True)
        armed.parent.chmod(0o777)
        shutil.copy(nsys_rank.__file__, program)
        script.write_text(_ELSEWHERE.format(program=shlex.quote(str(program))), encoding="utf-8")
        script.chmod(0o755)
        place = NsysPlace(binary, session, traces, armed.parent, armed)
        Note(RunDirectory(directory).nsys, NsysPlace).save(place)
    except OSError as error:
        raise UsageError(f"cannot write {error.filename or directory}: {error.strerror}") from error


_ELSEWHERE = """#!/bin/sh
for python in "$SFTRIAGE_NSYS_PYTHON" python3 python; do
  command -v "$python" >/dev/null 2>&1 && exec "$python" -I -S {program} "$@"
done
echo "sftriage: no Python to start this rank" >&2
exit 127
"""


def place_in(directory: RunDirectory) -> NsysPlace | None:
    """How the ranks of a run were launched under nsys; None if they were not."""
    return Note(directory.nsys, NsysPlace).load()


def remove_place(place: NsysPlace) -> None:
    """Remove temporary files and processes of nsys in a finished run, and nothing else, whatever its note contains.

    Some agents of nsys outlive their ranks on a busy machine, and others may be starting: repeat until none is left.
    """
    if place.tmp.name.startswith(_TMP_PREFIX):
        # First: without this directory, nsys cannot start.
        shutil.rmtree(place.tmp, ignore_errors=True)
    end_s = time.monotonic() + _END_S
    while _PREFIX.fullmatch(place.prefix) and (found := _of_run(place)) and time.monotonic() < end_s:
        for pid in found:
            _kill(pid, end_s)
    if place.tmp.name.startswith(_TMP_PREFIX):
        # Files that they created meanwhile.
        shutil.rmtree(place.tmp, ignore_errors=True)


def _of_run(place: NsysPlace) -> list[int]:
    """The processes of nsys that work for the sessions of a run or on its reports, or start one that does."""
    session = re.compile(rf"--session(?:-name|-new)?={re.escape(place.prefix)}-\d+\.\d+".encode())
    report = os.fsencode(place.tmp / "_")[:-1]

    def fits(words: Sequence[bytes]) -> bool:
        of_nsys = b"--start-agent" in words or any(word.endswith(_PROGRAMS) for word in words[:_PROGRAM_WORDS])
        return of_nsys and any(session.fullmatch(word) or report in word for word in words)

    return processes(fits)


def _kill(pid: int, end_s: float) -> None:
    """Kill a process of nsys, and remove the shared memory that it leaves behind."""
    with suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            select.select([process], [], [], max(0.0, end_s - time.monotonic()))
        finally:
            os.close(process)
        Path(f"/dev/shm/quadd-agent-instance-{pid}").unlink(missing_ok=True)


def wrapped(command: Sequence[str], script: str) -> tuple[str, ...]:
    """A command whose ranks start by ``script``; UsageError if they would clearly start without nsys.

    torchrun starts ``$PYTHON_EXEC`` in place of Python, so its command is unchanged. A program that is itself the only
    rank is started by the script. Other launchers (mpirun, srun, a shell) must name the script to start a rank.
    """
    words = list(command)
    elastic = Path(words[0]).name in _ELASTIC_PROGRAMS or any(
        before == "-m" and word in ELASTIC_MODULES for before, word in pairwise(words)
    )
    named = any(RANK_VARIABLE in word for word in words)
    if elastic:
        if {"--no-python", "--no_python"} & set(words) and not named:
            raise UsageError(f'--nsys with --no-python: put "${RANK_VARIABLE}" -- before the program of a rank')
        return tuple(words)
    if named or not Path(words[0]).name.startswith("python"):
        return tuple(words)
    return (script, "--", *words)


def _executable_directory(directory: Path) -> Path:
    for parent in (directory, Path(tempfile.gettempdir()), Path("/var/tmp")):
        try:
            if not os.statvfs(parent).f_flag & os.ST_NOEXEC:
                return Path(tempfile.mkdtemp(prefix=_TMP_PREFIX, dir=parent))
        except OSError:
            continue
    raise UsageError("--nsys: no directory in which programs can run (TMPDIR, /tmp and /var/tmp are all noexec)")
