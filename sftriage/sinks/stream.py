"""One stream of what happens to a job, told to many sinks: one that fails, hangs or is slow hurts nobody else.

Every sink has a bounded queue and a daemon thread. What goes wrong with one is logged once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol, TypeVar

from sftriage.base.loops import start_thread
from sftriage.model.events import Event, Sight, WindowSeen
from sftriage.model.verdicts import Verdict

log = logging.getLogger("sftriage")

Key = TypeVar("Key")
Value = TypeVar("Value")

CAPACITY = 256
"""Events that wait for one sink. The windows of a large job take tens of megabytes each."""


class Sink(Protocol):
    """Is told what happens, in a thread of its own and in order. It may raise: the next event comes all the same."""

    name: str

    def start(self) -> None:
        """Begin: called before the first event; threads may be started from here on."""
        return

    def take(self, seen: Event | Sight) -> None:
        """Something has happened, or was seen."""

    def close(self) -> None:
        """Nothing follows."""
        return


class Stream:
    """Tells sinks. No thread is started before `start`; what is published before that waits.

    Of the events that wait for one sink, those beyond ``capacity`` are lost to it.
    """

    def __init__(self, sinks: Iterable[Sink] = (), capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._lanes = [_Lane(sink, capacity) for sink in sinks]
        self._started = False

    def add(self, sink: Sink) -> None:
        if self._started:
            raise RuntimeError(f"{sink.name} comes after the start")
        self._lanes.append(_Lane(sink, self._capacity))

    def start(self) -> None:
        self._started = True
        for lane in self._lanes:
            lane.thread = start_thread(lane.sink.name, lane.run)

    def publish(self, seen: Event | Sight) -> None:
        """Have every sink told. Waits for none of them, and raises nothing."""
        for lane in self._lanes:
            lane.put(seen)

    def close(self, grace_s: float) -> None:
        """Tell what waits and close the sinks, all of them for no longer than that; who hangs is left behind."""
        deadline_s = time.monotonic() + grace_s
        lanes = [(lane, lane.thread) for lane in self._lanes if lane.thread is not None]
        for lane, _ in lanes:
            lane.end()
        for lane, thread in lanes:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                log.error("%s hangs and is left behind; it was not told of %d events", lane.sink.name, lane.give_up())


class _Lane:
    def __init__(self, sink: Sink, capacity: int) -> None:
        self.thread: threading.Thread | None = None
        self.sink = sink
        self._capacity = capacity
        self._waiting: deque[Event | Sight] = deque()
        self._changed = threading.Condition()
        self._lost = 0
        self._ending = self._failed = False

    def put(self, seen: Event | Sight) -> None:
        with self._changed:
            if self._ending:
                return
            if len(self._waiting) < self._capacity:
                self._waiting.append(seen)
                self._changed.notify()
                return
            self._lost += 1
            first = self._lost == 1
        if first:
            log.warning("%s does not keep up: what happens is lost to it from now on", self.sink.name)

    def end(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify()

    def give_up(self) -> int:
        with self._changed:
            left = len(self._waiting) + self._lost
            self._waiting.clear()
            self._lost = 0
            return left

    def run(self) -> None:
        self._try(self.sink.start)
        while (seen := self._next()) is not None:
            self._try(partial(self.sink.take, seen))
        self._try(self.sink.close)

    def _next(self) -> Event | Sight | None:
        with self._changed:
            # Only one who has caught up keeps up: a place in the queue is gone with the next event.
            lost, self._lost = (0, self._lost) if self._waiting else (self._lost, 0)
        if lost:
            log.warning("%s keeps up again; %d events were lost to it", self.sink.name, lost)
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending)
            return self._waiting.popleft() if self._waiting else None

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            if not self._failed:
                self._failed = True
                log.error("%s failed, and goes on: %s: %s", self.sink.name, type(error).__name__, error)
            log.debug("%s failed", self.sink.name, exc_info=True)


def window_of(seen: WindowSeen | None, verdict: Verdict) -> WindowSeen | None:
    """The window that a verdict is about, if it is the one that was seen last; a stall has none."""
    if seen is None or verdict.label == "stalled":
        return None
    steps = (seen.window.attempt, seen.window.first_step, seen.window.last_step)
    return seen if steps == (verdict.attempt, verdict.first_step, verdict.last_step) else None


MAX_KEPT = 256


def keep_newest(kept: dict[Key, Value], key: Key, value: Value) -> None:
    """Note something, in place of what was noted of it; of very many the one that was noted first is let go of."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > MAX_KEPT:
        del kept[next(iter(kept))]
