"""A job, and triage beside it: the job starts, runs and ends as it would alone, whatever becomes of triage.

Triage gets ready before the job starts, and works in a thread of its own from then on, up to what is left to do after
the job's end. Neither start nor end waits for it beyond a deadline.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from sftriage.base.loops import start_thread
from sftriage.errors import InputError, SftriageError, UsageError
from sftriage.runtime.launcher import Launcher

log = logging.getLogger("sftriage")

START_S = 15.0
"""How long the start of a job may wait for triage to get ready."""
END_S = 14.0
"""How long after the end of its job triage may still work; 15 s with what the end of a process takes."""
LEAVE_S = 0.75
"""How long the end of this process may take after that."""
_LOOK_S = 0.05
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Triaged:
    """A job that triage is ready for: what to start, and what is added to its environment.

    ``watch`` watches the started job to its end; ``abandon`` undoes the preparation where it was not started.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    watch: Callable[[Launcher], None]
    abandon: Callable[[], None] = field(default=lambda: None)


def supervise(
    launcher: Launcher,
    command: tuple[str, ...],
    prepare: Callable[[], Triaged],
    *,
    required: bool = False,
    output: int | None = None,
) -> int:
    """Run a job to its end; its exit status.

    Args:
        launcher: starts the job.
        command: the job, as it runs without triage.
        prepare: gets triage ready.
        required: start no job without triage. A person's mistake, such as a bad option, is refused in any case.
        output: descriptor for the job's standard output and error; by default ours.

    Raises:
        UsageError: the job cannot be started, or an option makes no sense.
        SftriageError: triage is required, and cannot watch the job.
    """
    preparing: Future[Triaged] = Future()
    if required or not _in_thread(preparing, prepare):
        _fill(preparing, prepare)
    _wait(preparing, START_S, lambda: launcher.ended_by is not None)
    error = preparing.exception() if preparing.done() else None
    if isinstance(error, Exception) and (required or is_mistake(error)):
        raise error
    if launcher.ended_by is not None:
        _abandon(preparing)
        return 128 + launcher.ended_by
    if error is not None or not preparing.done():
        why = f"getting ready took more than {START_S:.0f} s" if error is None else _problem(error)
        log.error("the job runs unwatched: %s", why)
        launcher.start(command, {}, output)
        status = launcher.wait()
        if preparing.done() and preparing.exception() is None:
            _abandon(preparing)
        return status
    ready = preparing.result()
    try:
        launcher.start(ready.command, ready.environment, output)
    except BaseException:
        _abandon(preparing)
        raise

    watching: Future[None] = Future()

    def watch() -> None:
        try:
            ready.watch(launcher)
        except Exception as error:
            log.error("the job goes on without triage: %s", _problem(error))
            raise

    if not _in_thread(watching, watch):
        log.error("the job runs unwatched: no thread can be started")
    status = launcher.wait()
    _wait(watching, END_S, lambda: launcher.hurried)
    if launcher.hurried:
        _wait(watching, LEAVE_S)
    elif not watching.done():
        log.error("triage has not ended within %.0f s of the job, and is left behind", END_S)
    return status


def leave_with(status: int) -> None:
    """Once this process has begun to end, have it do so with that status, whatever of triage was left behind."""

    def leave() -> None:
        threading.main_thread().join()
        time.sleep(LEAVE_S)
        os._exit(status)

    # (where no thread can be started, none was left behind)
    with contextlib.suppress(RuntimeError):
        start_thread("leaves", leave)


def is_mistake(error: Exception) -> bool:
    """Whether it is a person's, and not something that the system refuses."""
    from sftriage.traces.disk import refusal

    return isinstance(error, UsageError | InputError) and refusal(error) is None


def _abandon(preparing: Future[Triaged]) -> None:
    """Undo what was made ready, or still is: no longer than it may take to end."""

    def undo() -> None:
        _wait(preparing, START_S)
        if preparing.done() and preparing.exception() is None:
            preparing.result().abandon()

    undoing: Future[None] = Future()
    # (where no thread can be had, what lies in memory is swept by the next run)
    if _in_thread(undoing, undo):
        _wait(undoing, END_S)


def _in_thread(future: Future[Result], act: Callable[[], Result]) -> bool:
    try:
        start_thread("beside", _fill, future, act)
    except RuntimeError:
        return False
    return True


def _fill(future: Future[Result], act: Callable[[], Result]) -> None:
    try:
        future.set_result(act())
    except BaseException as error:
        log.debug("it failed", exc_info=True)
        future.set_exception(error)
        if not isinstance(error, Exception):
            raise


def _problem(error: BaseException) -> str:
    return str(error) if isinstance(error, SftriageError) else f"{type(error).__name__}: {error}"


def _wait(future: Future[Result], for_s: float, enough: Callable[[], bool] = lambda: False) -> None:
    deadline_s = time.monotonic() + for_s
    while not future.done() and not enough() and time.monotonic() < deadline_s:
        futures.wait([future], _LOOK_S)
