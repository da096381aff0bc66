"""The background threads of all packages: loops that repeat a turn, and back off after failures; log-once messages."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

log = logging.getLogger("sftriage")


def start_thread(name: str, target: Callable[..., object], *arguments: object) -> threading.Thread:
    """Start a daemon thread that is not a `Loop`; raises RuntimeError if the system allows no more threads."""
    thread = threading.Thread(target=target, args=arguments, name=f"sftriage-{name}", daemon=True)
    thread.start()
    return thread


@dataclass(slots=True)
class Backoff:
    """Pauses that double with each failure, up to a limit, less a random part; `reset` it after a success."""

    first_s: float = 0.5
    longest_s: float = 30.0
    failures: int = 0

    def next_s(self) -> float:
        """Count one more failure, and return how long to wait."""
        longest_s = min(self.longest_s, self.first_s * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return longest_s * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self.failures = 0


class Loop:
    """Calls ``turn`` in a daemon thread, every ``every_s`` (or after what it returns), and at once when woken.

    Args:
        failing: the message to log with the error of a turn, once until the error is of another kind.
        works: the message to log when a turn succeeds after that.
        expected: errors to log without a traceback.
        backoff: pauses after failures; `wake` does not shorten them.

    Attributes:
        problem: why the last turn failed, or "".
        least_s: seconds between turns even when woken.
        stopping: set from `stop` on; a turn that sets it is the last.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], float | None],
        every_s: float,
        *,
        failing: str,
        works: str = "",
        expected: tuple[type[Exception], ...] = (),
        backoff: Backoff | None = None,
    ) -> None:
        self._name, self._turn, self._every_s = name, turn, every_s
        self._failing, self._works, self._expected = failing, works, expected
        self._backoff = backoff or Backoff()
        self.problem, self.least_s = "", 0.0
        self._logged: Hashable = None
        self.stopping, self._wake = threading.Event(), threading.Event()
        self._last_turn = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = start_thread(self._name, self._run)

    def wake(self) -> None:
        self._wake.set()

    def stop(self, timeout_s: float, *, last_turn: bool = False) -> bool:
        """End after the turn in progress, or after one more that begins now; whether it ended in time."""
        self._last_turn = last_turn
        self.stopping.set()
        self._wake.set()
        if self._thread is None:
            return True
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def succeeded(self) -> None:
        """Forget earlier failures. A long turn calls this itself."""
        if self.problem and self._works:
            log.warning("%s", self._works)
        self.problem, self._logged = "", None
        self._backoff.reset()

    def _run(self) -> None:
        while not self.stopping.is_set():
            self._wake.clear()
            pause_s = self._try()
            if self.problem:
                self.stopping.wait(pause_s)
            elif not self.stopping.wait(self.least_s):
                self._wake.wait(pause_s - self.least_s)
        if self._last_turn:
            self._try()

    def _try(self) -> float:
        try:
            pause_s = self._turn()
        except Exception as error:
            expected = isinstance(error, self._expected)
            problem = getattr(error, "strerror", None) or (str(error) if expected else repr(error))
            # The same failure with another message (a server that is down, then starting) is not logged again.
            kind = (type(error), getattr(error, "errno", None))
            if kind != self._logged:
                log.warning("%s: %s; trying again", self._failing, problem, exc_info=not expected)
            self.problem, self._logged = problem, kind
            return self._backoff.next_s()
        self.succeeded()
        return self._every_s if pause_s is None else pause_s


class LogOnce:
    """Logs each message once, or one for each ``key``."""

    def __init__(self, logger: logging.Logger, level: int = logging.WARNING) -> None:
        self._logger, self._level = logger, level
        self._known: set[Hashable] = set()

    def __call__(self, message: str, *arguments: object, key: Hashable = None) -> None:
        """Log a message with its arguments, unless it was logged already."""
        if self.is_new(key or (message % arguments if arguments else message)):
            self._logger.log(self._level, message, *arguments)

    def is_new(self, key: Hashable) -> bool:
        """Whether a key is new."""
        known = key in self._known
        self._known.add(key)
        return not known
