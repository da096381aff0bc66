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
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class Triaged:
    """A job that triage is ready for.

    Attributes:
        command: what is to be started.
        environment: added to the job's environment.
        watch: watches the job that has been started, to its end, and does what is left to do then.
        abandon: undoes what was made ready; called where the job was not started.
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
        required: the job is not to start without triage. It is so in any case where a person has asked for something
            that cannot be, as by a bad option: that is refused.
        output: descriptor for the job's standard output and error, if they are not to go where ours do.

    Raises:
        UsageError: the job cannot be started, or what was asked for makes no sense.
        SftriageError: triage is required, and cannot watch the job.
    """
    preparing = _Work(prepare)
    if required or not preparing.start():
        preparing.run()
    preparing.wait(lambda: launcher.ended_by is not None, time.monotonic() + START_S)
    ready = preparing.result
    if preparing.error is not None and (required or is_mistake(preparing.error)):
        raise preparing.error
    if launcher.ended_by is not None:
        _abandon(preparing)
        return 128 + launcher.ended_by
    if ready is None:
        log.error("the job runs unwatched: %s", preparing.problem or f"getting ready took more than {START_S:.0f} s")
        launcher.start(command, {}, output)
        status = launcher.wait()
        if preparing.result is not None:
            _abandon(preparing)
        return status
    try:
        launcher.start(ready.command, ready.environment, output)
    except BaseException:
        _abandon(preparing)
        raise

    def watch() -> None:
        ready.watch(launcher)

    watching = _Work(watch, "the job goes on without triage: %s")
    if not watching.start():
        log.error("the job runs unwatched: %s", watching.problem)
    status = launcher.wait()
    watching.wait(lambda: launcher.hurried, time.monotonic() + END_S)
    if launcher.hurried:
        watching.wait(lambda: False, time.monotonic() + LEAVE_S)
    elif watching.alive:
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
        threading.Thread(target=leave, name="sftriage-leaves", daemon=True).start()


def is_mistake(error: Exception) -> bool:
    """Whether it is a person's, and not something that the system refuses."""
    from sftriage.traces.disk import refusal

    return isinstance(error, UsageError | InputError) and refusal(error) is None


def _abandon(preparing: _Work) -> None:
    """Undo what was made ready, or still is: no longer than it may take to end."""

    def undo() -> None:
        preparing.wait(lambda: False, time.monotonic() + START_S)
        if preparing.result is not None:
            preparing.result.abandon()

    undoing = _Work(undo)
    # (where no thread can be had, what lies in memory is swept by the next run)
    undoing.start()
    undoing.wait(lambda: False, time.monotonic() + END_S)


class _Work:
    """Something done in a thread, and what came of it; that it failed is ``said``, with the reason.

    Attributes:
        result: what it gave; None so far, or where it failed.
        error: why it failed.
    """

    def __init__(self, act: Callable[[], Triaged | None], said: str = "") -> None:
        self._act, self._said = act, said
        self._thread = threading.Thread(target=self.run, name="sftriage-beside", daemon=True)
        self.result: Triaged | None = None
        self.error: Exception | None = None

    def start(self) -> bool:
        """Begin; whether a thread could be had."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self.error = error
            return False
        return True

    def run(self) -> None:
        """Do it."""
        self.error = None
        try:
            self.result = self._act()
        except Exception as error:
            self.error = error
            if self._said:
                log.error(self._said, self.problem)
            log.debug("it failed", exc_info=True)

    @property
    def problem(self) -> str:
        """Why it failed, in words; "" where it did not."""
        if self.error is None or isinstance(self.error, SftriageError):
            return str(self.error or "")
        return f"{type(self.error).__name__}: {self.error}"

    @property
    def alive(self) -> bool:
        """Whether it goes on."""
        return self._thread.is_alive()

    def wait(self, enough: Callable[[], bool], deadline_s: float) -> None:
        """Wait until it is done, by the deadline, or until there is enough of that."""
        while self.alive and not enough() and time.monotonic() < deadline_s:
            self._thread.join(_LOOK_S)
