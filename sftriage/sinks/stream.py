"""Delivers a job's events to sinks: metrics, spans, webhooks, the terminal, uploads.

Each sink has a bounded queue and a daemon thread, so one that fails, hangs or is slow does not delay the others or the
job. Each kind of failure is logged once per sink.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Protocol, TypeVar

from sftriage.base.loops import start_thread
from sftriage.model.events import Event, Observation, WindowObserved
from sftriage.model.verdicts import Verdict

log = logging.getLogger("sftriage")

Key = TypeVar("Key")
Value = TypeVar("Value")

CAPACITY, MAX_KEPT = 256, 256
"""Maximum events queued for a sink (a large job's window takes tens of megabytes), and entries of `keep_newest`."""


class Sink(Protocol):
    """Receives events in order, in its own thread. If it raises, the next event still follows."""

    name: str

    def start(self) -> None:
        """Begin, before the first event; threads may be started from here on."""
        return

    def take(self, event: Event | Observation) -> None:
        """Handle one event or observation."""

    def close(self) -> None:
        """End, after the last event."""
        return


class DeliveryQueue:
    """Runs calls one after the other in a daemon thread. A full queue drops its oldest call.

    The first exception is logged; the next call runs regardless.
    """

    def __init__(self, name: str, capacity: int = CAPACITY) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._waiting: deque[Callable[[], None]] = deque(maxlen=capacity)
        self._changed = threading.Condition()
        self._lost = 0
        self._ending = self._failed = False

    def start(self, *first: Callable[[], None], last: Sequence[Callable[[], None]] = ()) -> None:
        """Begin with the ``first`` calls, before those queued already; make the ``last`` calls at the end."""
        self._thread = start_thread(self._name, self._run, first, last)

    def put(self, call: Callable[[], None]) -> None:
        """Queue a call, and return at once."""
        with self._changed:
            if self._ending:
                return
            full = len(self._waiting) == self._waiting.maxlen
            self._lost += full
            first = full and self._lost == 1
            self._waiting.append(call)
            self._changed.notify()
        if first:
            log.warning("%s cannot keep up: dropping its oldest events", self._name)

    def end(self) -> None:
        """End once the queue is empty."""
        with self._changed:
            self._ending = True
            self._changed.notify()

    def join(self, deadline_s: float) -> None:
        """Wait for the end until ``deadline_s`` of the monotonic clock, then drop what is still queued."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            with self._changed:
                left = len(self._waiting) + self._lost
                self._waiting.clear()
                self._lost = 0
            log.error("%s hangs: gave up on it, with %d events undelivered", self._name, left)

    def _run(self, first: Iterable[Callable[[], None]], last: Iterable[Callable[[], None]]) -> None:
        for call in chain(first, iter(self._next, None), last):
            try:
                call()
            except Exception as error:
                if not self._failed:
                    self._failed = True
                    log.error("%s failed, and continues: %s: %s", self._name, type(error).__name__, error)
                log.debug("%s failed", self._name, exc_info=True)

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            # Only an empty queue counts as keeping up: one free place is taken by the next event.
            lost, self._lost = (0, self._lost) if self._waiting else (self._lost, 0)
        if lost:
            log.warning("%s keeps up again; it missed %d events", self._name, lost)
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending)
            return self._waiting.popleft() if self._waiting else None


class Stream:
    """Delivers events to sinks through a queue each. No thread runs before `start`; earlier events are queued."""

    def __init__(self, sinks: Iterable[Sink] = (), capacity: int = CAPACITY) -> None:
        self._capacity, self._started = capacity, False
        self._queues: list[tuple[Sink, DeliveryQueue]] = []
        for sink in sinks:
            self.add(sink)

    def add(self, sink: Sink) -> None:
        if self._started:
            raise RuntimeError(f"{sink.name} was added after the start")
        self._queues.append((sink, DeliveryQueue(sink.name, self._capacity)))

    def start(self) -> None:
        self._started = True
        for sink, queue in self._queues:
            queue.start(sink.start, last=[sink.close])

    def publish(self, event: Event | Observation) -> None:
        """Queue an event for every sink. Never waits, never raises."""
        for sink, queue in self._queues:
            queue.put(partial(sink.take, event))

    def close(self, grace_s: float) -> None:
        """Deliver queued events and close all sinks within ``grace_s``; abandon those that hang."""
        if self._started:
            close_all([queue for _, queue in self._queues], time.monotonic() + grace_s)


def close_all(queues: Collection[DeliveryQueue], deadline_s: float) -> None:
    """End started queues, all of them by ``deadline_s`` of the monotonic clock."""
    for queue in queues:
        queue.end()
    for queue in queues:
        queue.join(deadline_s)


def window_of(latest: WindowObserved | None, verdict: Verdict) -> WindowObserved | None:
    """The window that a verdict is about, if it is the latest; None for a stall."""
    if latest is None or verdict.label == "stalled":
        return None
    steps = (latest.window.attempt, latest.window.first_step, latest.window.last_step)
    return latest if steps == (verdict.attempt, verdict.first_step, verdict.last_step) else None


def keep_newest(kept: dict[Key, Value], key: Key, value: Value) -> None:
    """Set a key as the newest entry, and drop the oldest beyond `MAX_KEPT`."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > MAX_KEPT:
        del kept[next(iter(kept))]
