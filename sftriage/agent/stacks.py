"""Captures the stacks of all threads of one rank, which may hang. The agent runs it as an executor.

``py-spy dump`` stops the process for some milliseconds and reads it, and changes nothing in it. If py-spy is missing or
not permitted, the rank dumps its own stacks (`sftriage.trainer.executor`). The capture includes PyTorch's flight
recorder, if the process has one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from sftriage.agent.executor import Course, Executor, StatusReader, check_options, check_size
from sftriage.base.files import private
from sftriage.base.process import BoundedProgram, Finished
from sftriage.errors import CaptureError
from sftriage.model.captures import CaptureRequest, CaptureResult
from sftriage.traces.store import FileToStore
from sftriage.trainer.executor import STACK_ANSWER, STACK_REQUESTS
from sftriage.trainer.layout import RingInfo

SETTLED_S = 0.5
"""A dump that has not grown for this long is complete."""
PATIENCE_S = 10.0
ANSWER_S = 5.0
"""How long a rank may take to dump its own stacks: its threads release the interpreter every few milliseconds."""
_GLOO = " (Gloo's cannot be requested from outside)"


def place_of(environment: Mapping[str, str], rank: int) -> tuple[Path, Path] | str:
    """The pipe that triggers a dump of a rank's flight recorder, and the dump's file; or why it has none."""
    size = environment.get("TORCH_FR_BUFFER_SIZE") or environment.get("TORCH_NCCL_TRACE_BUFFER_SIZE")
    pipe = environment.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    if not pipe:
        return f"none: TORCH_NCCL_DEBUG_INFO_PIPE_FILE is not set{_GLOO}"
    if size == "0":
        return "none: its buffer is of size 0"
    prefix = environment.get("TORCH_FR_DUMP_TEMP_FILE") or environment.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    return Path(f"{pipe}{rank}.pipe"), Path(f"{prefix or '/tmp/nccl_trace_rank_'}{rank}")


def flight_recorder(info: RingInfo, target: Path, max_bytes: int, end_s: float) -> Generator[None, None, str]:
    """Have a rank dump its flight recorder, and copy the dump, turn by turn; the outcome in words. Never raises."""
    end_s = min(end_s, time.monotonic() + PATIENCE_S)
    try:
        place = place_of(environment_of(info.pid), info.rank)
        if isinstance(place, str):
            return place
        pipe, dump = place
        if not pipe.exists():
            return f"none: {pipe} does not exist{_GLOO}"
        if not pipe.is_fifo():
            return f"none: {pipe} is not a pipe"
        before = _version(dump)
        # Without O_NONBLOCK this would block until there is a reader.
        with os.fdopen(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC), "wb", buffering=0) as trigger:
            trigger.write(b"1\n")
        last, since_s = before, time.monotonic()
        while time.monotonic() < end_s:
            now = _version(dump)
            if now != last:
                last, since_s = now, time.monotonic()
            elif now != before and time.monotonic() - since_s >= SETTLED_S:
                break
            yield
        else:
            return f"none: {dump} was not written"
        with os.fdopen(os.open(dump, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as source:
            data = source.read(max_bytes + 1)
        if len(data) > max_bytes:
            return f"none: {dump} has more than {max_bytes} bytes"
        with private(target) as copy:
            copy.write(data)
        return f"{len(data)} bytes"
    except OSError as error:
        return f"none: {error.filename or 'its pipe'}: {error.strerror}"


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with; raises OSError if it is gone, or belongs to another user."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode("utf-8", "surrogateescape").split("=", 1) for entry in entries if b"=" in entry)


def _version(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def own_stacks(rings: Path, info: RingInfo, word: str, end_s: float) -> Generator[None, None, list[Any]]:
    """The threads of a rank by its own account, turn by turn until ``end_s``; raises CaptureError without an answer."""
    requests, answer = (rings / info.file_name(kind) for kind in (STACK_REQUESTS, STACK_ANSWER))
    try:
        with os.fdopen(os.open(requests, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC), "wb", buffering=0) as pipe:
            pipe.write(word.encode("ascii", "replace") + b"\n")
    except OSError as error:
        raise CaptureError(f"cannot send the request to the trainer: {requests.name}: {error.strerror}") from error
    until_s = min(end_s, time.monotonic() + ANSWER_S)
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(answer.read_bytes())
            if found["asked"] == word:
                threads: list[Any] = found["threads"]
                return threads
        yield
    raise CaptureError("the trainer does not answer: it is stopped, or native code holds its interpreter")


SCHEMA_VERSION = 1
DUMP_S = 15.0
"""How long one dump may take; with C and C++ frames py-spy reads symbols of hundreds of megabytes first."""
OPTIONS = frozenset({"native", "flight_recorder"})
PY_SPY, TRAINER = "py-spy", "the trainer"
"""The source of the stacks: py-spy, from outside, or the rank's own process."""
STACKS_NAME, RECORDER_NAME = "stacks.json", "flight-recorder.pickle"


class StacksCapture(Executor):
    """The stacks of one rank, as one JSON document in the spool. Ignores the request's steps and warm-up.

    Raises CaptureError for unknown options.
    """

    def __init__(self, request: CaptureRequest, info: RingInfo, rings: Path, spool: Path, status: StatusReader) -> None:
        check_options(request.options, OPTIONS)
        super().__init__(request)
        self._info, self._rings, self._status = info, rings, status
        self._stacks = spool / f"{request.capture_id}.stacks.json"
        self._recorder_dump = spool / f"{request.capture_id}.pickle"
        self._notes: list[str] = []

    def poll(self) -> CaptureResult | None:
        return self.failed("cancelled") if self._cancelled else super().poll()

    def products(self) -> tuple[FileToStore, ...]:
        stacks = FileToStore(self._stacks, STACKS_NAME, "application/json", compress=False)
        if not self._recorder_dump.exists():
            return (stacks,)
        return stacks, FileToStore(self._recorder_dump, RECORDER_NAME, "application/x-python-pickle", compress=False)

    def close(self) -> None:
        self._turns.close()
        for leftover in (self._stacks, self._recorder_dump):
            with contextlib.suppress(OSError):
                leftover.unlink()

    def _course(self) -> Course:
        began_s = time.monotonic()
        end_s = began_s + self.request.max_seconds
        now = self._status()
        self._clock = {"mono_ns": time.monotonic_ns(), "wall_ns": time.time_ns()}
        step = now.step if now is not None else 0
        taken_by, threads = yield from self._taken(end_s)
        self.needs_trainer = False
        self._timings_s["run"] = time.monotonic() - began_s
        recorder = "not requested"
        if self.request.options.get("flight_recorder", False):
            recorder = yield from flight_recorder(self._info, self._recorder_dump, self.request.max_bytes, end_s)
        document = {
            "schema_version": SCHEMA_VERSION,
            "rank": self._info.rank,
            "world_size": self._info.world_size,
            "host": self._info.host,
            "pid": self._info.pid,
            "time_s": self._clock["wall_ns"] / 1e9,
            "step": step,
            "stage": None if now is None else now.stage,
            "in_stage_s": None if now is None else now.stage_age_ns / 1e9,
            "native": bool(self.request.options.get("native", False)) and taken_by == PY_SPY,
            "taken_by": taken_by,
            "flight_recorder": recorder,
            "threads": threads,
        }
        self._notes.append(f"flight recorder: {recorder}")
        data = json.dumps(document, indent=1).encode("utf-8")
        check_size(self.request, "stacks", len(data))
        with private(self._stacks) as file:
            file.write(data)
        return self._stored(self._stacks, step, step, self._notes)

    def _taken(self, end_s: float) -> Generator[None, None, tuple[str, list[Any]]]:
        try:
            # (this leaves time for the rank itself, should py-spy hang)
            threads = yield from self._dump(end_s - min(ANSWER_S, (end_s - time.monotonic()) / 3))
            self._notes.append(f"taken by {PY_SPY}, from outside")
            return PY_SPY, threads
        except CaptureError as error:
            if not Path(f"/proc/{self._info.pid}").exists() and self._status() is None:
                raise
            try:
                word = f"{self.request.capture_id}-{time.monotonic_ns()}"
                threads = yield from own_stacks(self._rings, self._info, word, end_s)
            except CaptureError as own:
                raise CaptureError(f"{error}; {own}") from error
            self._notes.append(f"taken by the trainer itself, Python frames only: {error}")
            return TRAINER, threads

    def _dump(self, end_s: float) -> Generator[None, None, list[Any]]:
        command: list[str | Path] = [find_py_spy(), "dump", "--json", "--pid", str(self._info.pid)]
        # py-spy cannot stop a process that is already stopped: read it without stopping it.
        tries = [["--nonblocking"], []]
        if self.request.options.get("native", False):
            tries.append(["--native"])
        reasons: list[str] = []
        while tries and (left_s := end_s - time.monotonic()) > 0:
            extra = tries.pop()
            try:
                deadline_s = min(DUMP_S, left_s / (1 + bool(tries)))
                program = BoundedProgram([*command, *extra], deadline_s, max_output_bytes=self.request.max_bytes)
                found = yield from program.wait()
                if found.status == 0:
                    self._notes += reasons
                    return threads_of(found.output)
                reason = reason_of(found, self._info.pid)
            except CaptureError as error:
                reason = str(error)
            reasons.append(f"{reason} (native frames)" if extra == ["--native"] else reason)
        raise CaptureError(reasons[-1] if reasons else "the time-box ended before the stacks were taken")


def find_py_spy() -> Path:
    """py-spy, beside our own Python or on the path; raises CaptureError if it is missing."""
    beside = Path(sys.executable).with_name("py-spy")
    found = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if found is None:
        raise CaptureError("py-spy is not installed: pip install 'sftriage[stacks]'")
    return Path(found)


def threads_of(output: str) -> list[Any]:
    """The threads in the output of ``py-spy dump --json``, after warnings; raises CaptureError if it has none."""
    begins = output.find("[")
    try:
        threads = json.loads(output[begins:]) if begins >= 0 else None
    except ValueError as error:
        raise CaptureError(f"the output of py-spy is not complete JSON: {error}") from error
    if not isinstance(threads, list) or not threads:
        raise CaptureError("py-spy found no thread")
    return threads


def reason_of(found: Finished, pid: int) -> str:
    """Why py-spy failed, and what to do."""
    output = found.output.lower()
    if "permission denied" in output or "operation not permitted" in output or "eperm" in output:
        return (
            f"process {pid} may not be read (ptrace denied): that needs the same user and CAP_SYS_PTRACE, or "
            "kernel.yama.ptrace_scope=0"
        )
    if "no such process" in output or "no such file" in output or not Path(f"/proc/{pid}").exists():
        return f"process {pid} is gone"
    return f"py-spy: {found.problem()}"
