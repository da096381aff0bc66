"""Nsight Systems on one rank: the agent starts and stops nsys, and the trainer marks its steps.

::

    check nsys, its session, the disk ──▶ the trainer arms ──▶ nsys start ──▶ the trainer marks K steps ──▶ nsys stop
        ──▶ .qdstrm to .nsys-rep, where nsys left one ──▶ export, examine, scrub ──▶ result

The rank runs under `nsys_rank`, in a session of its own. Nothing here blocks, and every program has a deadline. Steps
are exact if the trainer has NVTX. If it has none, or hangs inside a step, its ring gives the steps that began and ended
while nsys was collecting.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sftriage.agent.executor import Course, Executor, StatusReader, Turns, check_options, check_size, mailbox_of
from sftriage.agent.nsys_rank import NOTE, release_registry
from sftriage.agent.nsys_report import ReportContents, check, complaint_of, contents_of, unread
from sftriage.base.files import write_atomically
from sftriage.base.process import BoundedProgram, Finished
from sftriage.errors import CaptureError, RingError
from sftriage.model.captures import CaptureRequest, CaptureResult
from sftriage.model.windows import RankStatus
from sftriage.traces.store import FileToStore

QUERY_S = 20.0
"""How long nsys may take to report its version or its sessions, or to start."""
STOP_S = 60.0
CONVERT_S = 240.0
MARGIN_S = 2.0
"""After the time-box, how long the trainer has to end its marks at a step boundary."""
LEFT_S = 5.0
"""If the agent is gone, the rank's own script stops nsys this much later than the agent would have."""
FREE_BYTES = 128 * 2**20
"""Free space that a capture needs: a report passes through a file of tens of megabytes."""

IMPORTERS = (
    "/usr/lib/nsight-systems/host-linux-x64/QdstrmImporter",
    "/usr/lib/nsight-systems/host-linux-armv8/QdstrmImporter",
)
"""Where Debian's package installs it; its nsys looks elsewhere."""

REPORT_NAME, EXPORT_NAME = "trace.nsys-rep", "trace.sqlite"


@dataclass(frozen=True, slots=True)
class NsysPlace:
    """How the ranks of this host were launched under nsys.

    Attributes:
        binary: the nsys that launched them.
        prefix: their sessions are called ``<prefix>-<rank>.<attempt>``.
        traces: the ``--trace`` of their launch.
        tmp: a private directory on an executable file system, for reports in progress.
        armed: if the agent cannot reach their sessions, so that nsys waits for a range of the trainer: the reports are
            then called ``<armed>-<rank>.<attempt>.<number>``.
    """

    binary: Path
    prefix: str
    traces: tuple[str, ...]
    tmp: Path
    armed: Path | None = None


class NsysCapture(Executor):
    """One capture, from its request to report and export in the spool.

    Raises CaptureError if the rank's mailbox cannot be used, or the request is invalid.
    """

    def __init__(
        self, request: CaptureRequest, place: NsysPlace, mailbox: Path, spool: Path, status: StatusReader
    ) -> None:
        super().__init__(request)
        self._place, self._status = place, status
        self._made = place.tmp / request.capture_id
        self._note = place.tmp / f"{NOTE}-{request.rank}"
        self._report = spool / f"{request.capture_id}.nsys-rep"
        self._export = spool / f"{request.capture_id}.sqlite"
        check_traces(request.options, place.traces)
        self._flags = start_flags(request.options)
        if place.armed is not None and request.options.get("sample", "none") != "none":
            raise CaptureError("option sample: an armed rank cannot be sampled: nsys was started without it")
        self._session: str | None = None
        self._marked: CaptureResult | None = None
        self._marking = False
        self._notes: list[str] = []
        self._began: RankStatus | None = None
        self._mailbox = mailbox_of(request, mailbox)

    def products(self) -> tuple[FileToStore, ...]:
        report = FileToStore(self._report, REPORT_NAME, "application/x-nsys-rep", compress=False)
        if not self.request.options.get("sqlite", False):
            return (report,)
        return report, FileToStore(self._export, EXPORT_NAME, "application/vnd.sqlite3", compress=False)

    def close(self) -> None:
        """End the capture and remove its files. Never raises."""
        self._turns.close()
        with contextlib.suppress(RingError, OSError):
            if self._marking:
                self._mailbox.cancel(self.request.capture_id)
        self._mailbox.close()
        if self._session is not None:
            # (it has a deadline of its own, and its report is removed with the temporary directory)
            with contextlib.suppress(CaptureError):
                stop: list[str | Path] = [self._place.binary, "stop", f"--session={self._session}"]
                self._abandoned = BoundedProgram(["timeout", "--kill-after=1", str(STOP_S), *stop], 2 * STOP_S)
            self._session = None
            self._note.unlink(missing_ok=True)
        partials = self._report.parent.glob(f".{self.request.capture_id}.*")
        made = self._place.tmp.glob(f"{self.request.capture_id}.*")
        for leftover in (self._report, self._export, *partials, *made):
            with contextlib.suppress(OSError):
                leftover.unlink()

    def _course(self) -> Course:
        armed = self._place.armed
        yield from self._check()
        if armed is None:
            yield from self._find_session()
        else:
            self._drop_reports(armed)
        yield from self._arm()
        yield from self._start() if armed is None else self._wait_until_armed(armed)
        steps = yield from self._collect()
        began_s = time.monotonic()
        if armed is None:
            yield from self._stop()
        else:
            report = yield from self._report_of(armed)
            self._raw = self._made.with_suffix(report.suffix)
            shutil.move(report, self._raw)
        self._timings_s["stop"] = time.monotonic() - began_s
        began_s = time.monotonic()
        yield from self._make(steps)
        self._timings_s["export"] = time.monotonic() - began_s
        return self._stored(self._report, *steps, self._notes)

    def _check(self) -> Turns:
        for directory in (self._place.tmp, self._report.parent):
            free_bytes = shutil.disk_usage(directory).free
            if free_bytes < FREE_BYTES:
                raise CaptureError(f"{directory}: the disk is full: {free_bytes} bytes free, {FREE_BYTES} needed")
            if not os.access(directory, os.W_OK):
                raise CaptureError(f"{directory} is not writable")
        found = yield from self._query("--version")
        version = parse_version(found.output)
        self._notes.append(f"nsys {version[0]}.{version[1]}.{version[2]}, {','.join(self._place.traces)}")

    def _find_session(self) -> Turns:
        name, state = self._session_in((yield from self._listed()))
        if state not in FREE and self._note.exists():
            yield from self._stop_left(name)
            name, state = self._session_in((yield from self._listed()))
        if state not in FREE:
            raise CaptureError(f"session {name} is busy: {state}")
        self._name = name

    def _stop_left(self, name: str) -> Turns:
        yield from self._run([self._place.binary, "stop", f"--session={name}"], STOP_S)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            left = json.loads(self._note.read_text(encoding="utf-8"))["capture_id"]
            for leftover in self._place.tmp.glob(f"{left}.*"):
                leftover.unlink()
        self._note.unlink(missing_ok=True)

    def _until(self, until_s: float) -> None:
        """Note the latest time until which nsys collects for this agent; after it, `nsys_rank` stops nsys."""
        left = {"capture_id": self.request.capture_id, "until_s": until_s + LEFT_S}
        write_atomically(self._note, json.dumps(left), mode=0o666)

    def _listed(self) -> Generator[None, None, str]:
        found = yield from self._query("sessions", "list")
        if found.status:
            raise CaptureError(f"nsys lists no sessions: {found.problem()}")
        return found.output

    def _session_in(self, listed: str) -> tuple[str, str]:
        return session_of(listed, self._place.prefix, self.request.rank)

    def _start(self) -> Turns:
        began_s = time.monotonic()
        self._until(self._end_s + MARGIN_S)
        self._session = self._name
        found = yield from self._query(
            *("start", f"--session={self._name}", f"--output={self._made}", "--force-overwrite=true", *self._flags)
        )
        if found.status:
            raise CaptureError(f"nsys start: {found.problem()}")
        self._timings_s["start"] = time.monotonic() - began_s

    def _wait_until_armed(self, armed: Path) -> Turns:
        """Without access to the session: wait until nsys waits for the trainer's range."""
        while not list(armed.parent.glob(f"{armed.name}-{self.request.rank}.*.armed")):
            self._give_way()
            if time.monotonic() >= self._end_s:
                raise CaptureError(f"rank {self.request.rank} is not armed: it was not launched armed, or nsys failed")
            yield

    def _collect(self) -> Generator[None, None, tuple[int, int]]:
        started_s = time.monotonic()
        self._clock = {"mono_ns": time.monotonic_ns(), "wall_ns": time.time_ns()}
        self._began = self._status()
        if self._marking:
            self._mailbox.allow(self.request.capture_id)
        end_s = self._end_s + (MARGIN_S if self._marking else 0.0)
        while not self._enough() and time.monotonic() < end_s:
            yield
        if self._place.armed is not None and self._marked is None:
            raise CaptureError("the rank did not end its steps within the time-box: capture its stacks")
        steps = self._covered()
        self._timings_s["run"] = time.monotonic() - started_s
        return steps

    def _arm(self) -> Turns:
        self._mailbox.post(replace(self.request, options={}))
        self._marking = True
        self._end_s = time.monotonic() + self.request.max_seconds
        while self._mailbox.progress().state != "armed":
            self._give_way()
            if time.monotonic() >= self._end_s:
                raise CaptureError("the rank began no step within the time-box: capture its stacks")
            if (answer := self._mailbox.result_of(self.request.capture_id)) is not None:
                if answer.code != "no_nvtx":
                    raise CaptureError(answer.detail or answer.state)
                self._marking = False
                if self._place.armed is not None:
                    raise CaptureError(f"an armed rank must open NVTX ranges itself: {answer.detail}")
                self._notes.append(f"steps taken from the ring: {answer.detail}")
                return
            yield

    def _enough(self) -> bool:
        self._give_way()
        if self._marking:
            self._marked = self._marked or self._mailbox.result_of(self.request.capture_id)
            if self._marked is not None and self._marked.state != "stored":
                raise CaptureError(self._marked.detail or self._marked.state)
            return self._marked is not None
        covered = self._steps_in_ring()
        return covered is not None and covered[1] - covered[0] + 1 >= self.request.steps

    def _covered(self) -> tuple[int, int]:
        steps = self._steps_in_ring()
        if self._marked is not None and self._marked.first_step is not None and self._marked.last_step is not None:
            self._notes.append(self._marked.detail)
            steps = self._marked.first_step, self._marked.last_step
        elif self._marking:
            self._notes.append("the trainer did not answer within the time-box: steps taken from the ring")
        if steps is None:
            now = self._status()
            where = "" if now is None else f"; the rank is in {now.stage or 'no stage'} of step {now.step}"
            raise CaptureError(f"no step began and ended within the time-box{where}")
        self.needs_trainer = False
        return steps

    def _steps_in_ring(self) -> tuple[int, int] | None:
        """The first and last step that began after nsys had started and have ended since, by the ring."""
        now = self._status()
        if self._began is None or now is None:
            return None
        # Leave out the step in progress at the start, and the one in progress now.
        first, last = self._began.step + 1, now.step if now.stage is None else now.step - 1
        return (first, last) if last >= first else None

    def _report_of(self, armed: Path) -> Generator[None, None, Path]:
        end_s = time.monotonic() + STOP_S
        while not (found := self._reports(armed)):
            if time.monotonic() >= end_s:
                raise CaptureError(f"no report came within {STOP_S:g} s of the last step")
            yield
        return found[-1]

    def _reports(self, armed: Path) -> list[Path]:
        return sorted(armed.parent.glob(f"{armed.name}-{self.request.rank}.*.[nq]*"))

    def _drop_reports(self, armed: Path) -> None:
        for report in self._reports(armed):
            report.unlink(missing_ok=True)

    def _stop(self) -> Turns:
        self._until(time.monotonic() + STOP_S)
        found = yield from self._run([self._place.binary, "stop", f"--session={self._name}"], STOP_S)
        if found.status:
            raise CaptureError(f"nsys stop: {found.problem()}")
        self._session = None
        self._note.unlink(missing_ok=True)
        report = report_of(found.output)
        if report is None or not Path(report).exists():
            raise CaptureError(f"nsys stop left no report: {found.problem()}")
        if Path(report).parent != self._made.parent:
            Path(report).unlink(missing_ok=True)
            lines = [line.strip() for line in found.output.splitlines() if "Failed" in line or "No space" in line]
            raise CaptureError(f"the report could not be written: {lines[0] if lines else found.problem()}")
        self._raw = Path(report)

    def _make(self, steps: tuple[int, int]) -> Turns:
        complaint = "" if self._raw.suffix != ".qdstrm" else (yield from self._convert())
        check_size(self.request, "report", self._raw.stat().st_size)
        export = self._raw.with_suffix(".sqlite")
        contents = yield from self._examine(export)
        marked = self._marked is not None and "nvtx" in self._place.traces
        check(contents, range(steps[0], steps[1] + 1) if marked else (), self._place.traces, complaint)
        if complaint:
            self._notes.append(unread(complaint))
        self._notes.append(f"the report holds {contents.environments} entries of processes' environments")
        if self.request.options.get("sqlite", False):
            check_size(self.request, "export", export.stat().st_size)
            _move(export, self._export)
        else:
            export.unlink()
        _move(self._raw, self._report)

    def _convert(self) -> Generator[None, None, str]:
        """Convert what nsys left into a report; return the importer's complaint if it could not read all of it."""
        beside = self._place.binary.resolve().parent.parent.glob("host-linux-*")
        importers = [*(directory / "QdstrmImporter" for directory in beside), *map(Path, IMPORTERS)]
        importer = next((path for path in importers if path.exists()), None)
        if importer is None:
            raise CaptureError("nsys left a .qdstrm, and there is no QdstrmImporter to convert it")
        made = self._raw.with_suffix(".nsys-rep")
        found = yield from self._run([importer, "-i", self._raw, "-o", made], CONVERT_S)
        if not made.exists():
            raise CaptureError(f"QdstrmImporter: {found.problem()}")
        self._raw.unlink()
        self._raw = made
        return complaint_of(found) if found.status else ""

    def _examine(self, export: Path) -> Generator[None, None, ReportContents]:
        options = ("--type=sqlite", "--force-overwrite=true", f"--output={export}")
        found = yield from self._run([self._place.binary, "export", *options, self._raw], CONVERT_S)
        if found.status or not export.exists():
            raise CaptureError(f"the report cannot be opened: nsys export: {found.problem()}")
        found = yield from self._run([sys.executable, "-m", "sftriage.agent.nsys_report", export], CONVERT_S)
        return contents_of(found.output)

    def _query(self, *words: str) -> Generator[None, None, Finished]:
        return (yield from self._run([self._place.binary, *words], QUERY_S))

    def _run(self, command: list[str | Path], deadline_s: float) -> Generator[None, None, Finished]:
        environment = {**os.environ, "TMPDIR": str(self._place.tmp)}
        try:
            return (yield from BoundedProgram(command, deadline_s, environment).wait())
        except CaptureError:
            release_registry()
            raise


class AbandonedNsys(NsysCapture):
    """Stop nsys where it still collects, end its programs, and cancel the request in the trainer."""

    needs_trainer = False

    def _course(self) -> Course:
        report_comes = self._report_comes()
        with contextlib.suppress(RingError, OSError):
            self._mailbox.cancel(self.request.capture_id)
        # End the programs that convert its report: the agent that started them is gone.
        report = os.fsencode(self._made) + b"."
        for pid in processes(lambda words: any(word.startswith(report) for word in words)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._place.armed is not None:
            if report_comes:
                # The trainer closes its range now. Its report must not be taken for the next capture's.
                yield from self._report_of(self._place.armed)
            self._drop_reports(self._place.armed)
        elif self._note.exists():
            listed = yield from self._listed()
            try:
                name, _ = self._session_in(listed)
            except CaptureError:
                # It ended with its trainer.
                self._note.unlink(missing_ok=True)
            else:
                yield from self._stop_left(name)
        raise CaptureError("sftriage ended during the capture: what nsys had recorded is not kept")

    def _report_comes(self) -> bool:
        """Whether the trainer has opened its range, so that a report will come that was not taken yet."""
        if any(self._place.tmp.glob(f"{self.request.capture_id}.*")) or self._report.exists():
            return False
        try:
            answer = self._mailbox.result_of(self.request.capture_id)
            return self._mailbox.progress().state == "recording" or (answer is not None and answer.state == "stored")
        except RingError:
            return False


def processes(fits: Callable[[Sequence[bytes]], bool]) -> list[int]:
    """The ids of this host's processes whose command line, in words, fits."""
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if fits(cmdline.read_bytes().split(b"\0")):
                found.append(int(cmdline.parent.name))
    return found


def _move(source: Path, target: Path) -> None:
    """Move a file, also to another file system; the target appears whole."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.move(source, partial)
        partial.chmod(0o600)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


OLDEST = (2021, 4)
"""The first version with ``.nsys-rep`` reports; older ones are refused."""
FREE = ("Launched", "Idle")
"""States of an idle session."""
TRACES = ("cuda", "nvtx", "osrt", "cublas", "cudnn", "mpi", "ucx")

_VERSION = re.compile(r"version\s+(\d{4})\.(\d+)(?:\.(\d+))?")
_SESSION = re.compile(r"^\s*\d+\s+\S+\s+(\S+)\s+\d+\s+(\S.*?)\s*$", re.MULTILINE)
_GENERATED = re.compile(r"^\s*(/\S.*\.(?:nsys-rep|qdstrm))\s*$", re.MULTILINE)


def parse_version(output: str) -> tuple[int, int, int]:
    """The version in the output of ``nsys --version``; raises CaptureError if it has none, or is too old."""
    found = _VERSION.search(output)
    if found is None:
        raise CaptureError(f"cannot parse the version of nsys: {output.strip()[:100]!r}")
    version = int(found[1]), int(found[2]), int(found[3] or 0)
    if version[:2] < OLDEST:
        raise CaptureError(f"nsys {version[0]}.{version[1]} is too old: {OLDEST[0]}.{OLDEST[1]} is needed")
    return version


def start_flags(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Flags of ``nsys start`` for sampling and, tied to it, context switches; by default off. Raises CaptureError."""
    check_options(options, {"trace", "sample", "sqlite"})
    sample = options.get("sample", "none")
    if sample not in ("none", "cpu"):
        raise CaptureError(f"option sample {sample!r}: none or cpu")
    scope = "none" if sample == "none" else "process-tree"
    return f"--sample={scope}", f"--cpuctxsw={scope}"


def check_traces(options: Mapping[str, Any], launched: Sequence[str]) -> None:
    """Raise CaptureError if a rank was launched without a requested trace: nsys sets its traces at launch."""
    requested = options.get("trace", tuple(launched))
    if not isinstance(requested, (list, tuple)) or not requested or any(name not in TRACES for name in requested):
        raise CaptureError(f"option trace {requested!r}: some of {', '.join(TRACES)}")
    missing = [name for name in requested if name not in launched]
    if missing:
        raise CaptureError(
            f"{', '.join(missing)} cannot be traced: the rank was launched under nsys with {','.join(launched)} only"
        )


def session_of(output: str, prefix: str, rank: int) -> tuple[str, str]:
    """The name and state of the session of a rank's newest attempt, from the output of ``nsys sessions list``.

    A guessed name will not do, because ``nsys start`` creates a session for an unknown name. Raises CaptureError if
    there is none.
    """
    named = re.compile(rf"{re.escape(prefix)}-{rank}\.(\d+)")
    found = [
        (int(attempt[1]), line[2], line[1])
        for line in _SESSION.finditer(output)
        if (attempt := named.fullmatch(line[2]))
    ]
    if not found:
        raise CaptureError(
            f"rank {rank} has no nsys session ({prefix}-{rank}): not launched under nsys, or the session vanished"
        )
    _, name, state = max(found)
    return name, state


def report_of(output: str) -> str | None:
    """The report in the output of ``nsys stop``, which uses a folder of its own if ours is full or gone."""
    found = _GENERATED.findall(output)
    return found[-1] if found else None
