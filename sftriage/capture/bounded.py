"""A program that is given a deadline: started, looked at again and again, and killed when its time is up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from sftriage.errors import CaptureError

MAX_OUTPUT_BYTES = 1 << 20
POLL_S = 0.02
MOMENT_S = 0.15


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended, and the start of what it said on standard output and error."""

    status: int
    output: str

    def problem(self) -> str:
        """Its last words, as a reason."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return (lines[-1] if lines else f"exit status {self.status}")[:300]


class BoundedProgram:
    """One run of a program, in a session of its own so that all it started can be killed with it.

    Its output goes to a file that has no name: a program that says much does not block, and nothing is left behind.

    Raises:
        CaptureError: it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        deadline_s: float,
        environment: Mapping[str, str] | None = None,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> None:
        self._name = os.path.basename(os.fspath(command[0]))  # noqa: PTH119  # a name, not a path
        self._deadline_s, self._max_output_bytes = deadline_s, max_output_bytes
        self._end_s = time.monotonic() + deadline_s
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed by _close
        try:
            self._process = subprocess.Popen(
                [os.fspath(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            self._output.close()
            raise CaptureError(f"{self._name} cannot be started: {error.strerror}") from error

    def poll(self) -> Finished | None:
        """How it ended, once it has.

        Raises:
            CaptureError: its time was up, and it was killed.
        """
        status = self._process.poll()
        if status is not None:
            return self._finished(status)
        if time.monotonic() >= self._end_s:
            self.kill()
            raise CaptureError(f"{self._name} hung: no answer within {self._deadline_s:g} s, and it was killed")
        return None

    def wait(self) -> Generator[None, None, Finished]:
        """For a generator: ``finished = yield from program.wait()``, turn by turn. It is killed if nobody goes on.

        A moment is waited for it at first: most programs need less, and the next turn may be long in coming.

        Raises:
            CaptureError: as `poll`.
        """
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(MOMENT_S)
            while (finished := self.poll()) is None:
                yield
        finally:
            self.kill()
        return finished

    def kill(self) -> None:
        """End it and all that it started. Does nothing once it has ended."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        self._output.close()

    def _finished(self, status: int) -> Finished:
        self._output.seek(0)
        output = self._output.read(self._max_output_bytes).decode("utf-8", "replace")
        self._output.close()
        return Finished(status, output)


def run_bounded(command: Sequence[str | os.PathLike[str]], deadline_s: float) -> Finished:
    """Run a program to its end, where nothing else has to go on meanwhile.

    Raises:
        CaptureError: it cannot be started, or its time was up.
    """
    program = BoundedProgram(command, deadline_s)
    while (finished := program.poll()) is None:
        time.sleep(POLL_S)
    return finished
