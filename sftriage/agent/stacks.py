"""Captures the stacks of all threads of one rank, which may hang. The agent runs it as an executor.

``py-spy dump`` stops the process for some milliseconds and reads it, and changes nothing in it. If py-spy is missing or
not permitted, the rank dumps its own stacks (`sftriage.trainer.executor`). The capture includes the calls of PyTorch's
flight recorder, if the rank answers and has one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from sftriage.agent.answers import TrainerAccount, TrainerAnswer, TrainerRequest
from sftriage.agent.executor import Course, Executor, StatusReader, check_options, check_size
from sftriage.base.files import private
from sftriage.base.process import BoundedProgram, Finished
from sftriage.errors import CaptureError
from sftriage.model.captures import CaptureRequest, CaptureResult
from sftriage.model.windows import plain
from sftriage.traces.store import FileToStore
from sftriage.trainer.executor import HANG_TOKEN
from sftriage.trainer.layout import RingInfo

ANSWER_S, ACCOUNT_S = 5.0, 2.0
"""How long a rank may take to dump its own stacks, and its calls: its threads release the interpreter every few
milliseconds."""


def answered(rings: Path, info: RingInfo, line: str, end_s: float) -> Generator[None, None, TrainerAnswer]:
    """A rank's own answer to a request, turn by turn until ``end_s``; raises CaptureError without one."""
    request = TrainerRequest(rings, info, line)
    while time.monotonic() < end_s:
        if (answer := request.answer()) is not None:
            return answer
        yield
    raise CaptureError("the trainer does not answer: it is stopped, or native code holds its interpreter")


SCHEMA_VERSION = 1
DUMP_S = 15.0
"""How long one dump may take; with C and C++ frames py-spy reads symbols of hundreds of megabytes first."""
OPTIONS = frozenset({"native"})
PY_SPY, TRAINER = "py-spy", "the trainer"
"""The source of the stacks: py-spy, from outside, or the rank's own process."""
STACKS_NAME = "stacks.json"


class StacksCapture(Executor):
    """The stacks of one rank, as one JSON document in the spool. Ignores the request's steps and warm-up.

    Raises CaptureError for unknown options.
    """

    def __init__(self, request: CaptureRequest, info: RingInfo, rings: Path, spool: Path, status: StatusReader) -> None:
        check_options(request.options, OPTIONS)
        super().__init__(request)
        self._info, self._rings, self._status = info, rings, status
        self._stacks = spool / f"{request.capture_id}.stacks.json"
        self._notes: list[str] = []
        # (a rank may have answered an earlier agent)
        self._word = f"{request.capture_id}-{time.monotonic_ns()}"

    def poll(self) -> CaptureResult | None:
        return self.failed("cancelled") if self._cancelled else super().poll()

    def products(self) -> tuple[FileToStore, ...]:
        return (FileToStore(self._stacks, STACKS_NAME, "application/json", compress=False),)

    def close(self) -> None:
        self._turns.close()
        with contextlib.suppress(OSError):
            self._stacks.unlink()

    def _course(self) -> Course:
        began_s = time.monotonic()
        end_s = began_s + self.request.max_seconds
        now = self._status()
        self._clock = {"mono_ns": time.monotonic_ns(), "wall_ns": time.time_ns()}
        step = now.step if now is not None else 0
        taken_by, threads = yield from self._taken(end_s)
        self.needs_trainer = False
        self._timings_s["run"] = time.monotonic() - began_s
        account = TrainerAccount()
        with contextlib.suppress(CaptureError):
            line, until_s = f"{HANG_TOKEN} {self._word}", min(end_s, time.monotonic() + ACCOUNT_S)
            answer = yield from answered(self._rings, self._info, line, until_s)
            account = answer.rank_evidence or account
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
            "threads": threads,
            "calls": plain(account.calls),
            "groups": plain(account.groups),
        }
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
                until_s = min(end_s, time.monotonic() + ANSWER_S)
                answer = yield from answered(self._rings, self._info, self._word, until_s)
            except CaptureError as own:
                raise CaptureError(f"{error}; {own}") from error
            self._notes.append(f"taken by the trainer itself, Python frames only: {error}")
            return TRAINER, answer.threads

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
