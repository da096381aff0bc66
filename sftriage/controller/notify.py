"""Telling the world outside of a decision, without the loop ever waiting for it.

`Notifier.notify` puts a notice into a bounded queue and returns. A thread of its own delivers: each destination has a
queue and a pace of its own, so that one that is down holds up no other.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sftriage.controller.notices import Notice, cloud_event, slack_message
from sftriage.controller.webhook import Address, DeliveryError, post

log = logging.getLogger("sftriage")

CAPACITY = 256
"""Notices that wait for one destination. When there are more, the oldest go: the newest says most about now."""
ATTEMPT_S = 10.0
"""What one attempt may take, from connecting to the last of the answer's headers."""

_MAX_SECRET_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Destination:
    """Who is told, and in which form. The address is a secret, and is named by where it is kept.

    It is read anew for each attempt: a secret that is renewed while the job runs takes effect.
    """

    form: Literal["cloudevents", "slack"] = "cloudevents"
    url_from_env: str | None = None
    url_from_file: str | None = None

    def address(self) -> Address:
        """Where it is now.

        Raises:
            DeliveryError: the secret is not there, or is no address.
        """
        if self.url_from_env is not None:
            text = os.environ.get(self.url_from_env, "")
            if not text.strip():
                raise DeliveryError("the variable is not set", retry=False)
        elif self.url_from_file is not None:
            try:
                with Path(self.url_from_file).open("rb") as file:
                    text = file.read(_MAX_SECRET_BYTES).decode()
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or "not text"
                raise DeliveryError(f"the secret cannot be read: {why}", retry=True) from None
        else:
            text = ""
        if not text.strip():
            raise DeliveryError("the secret is empty", retry=True)
        return Address.of(text)

    def problem(self) -> str | None:
        """Why nobody can be told here as things are, or None."""
        try:
            self.address()
        except DeliveryError as error:
            return str(error)
        return None

    def __str__(self) -> str:
        kept = f"${self.url_from_env}" if self.url_from_env is not None else str(self.url_from_file)
        return f"{'slack' if self.form == 'slack' else 'webhook'} of {kept}"


@dataclass(frozen=True, slots=True)
class Retrying:
    """How often, and how long, a message is tried: twice as long between attempts each time, with chance in it."""

    first_s: float = 1.0
    longest_s: float = 60.0
    give_up_s: float = 600.0

    def wait_s(self, failures: int, drawn: float, after_s: float | None) -> float:
        """How long to wait after so many failures; never less than the other side asked for.

        Args:
            failures: attempts that failed so far, from 1.
            drawn: a number drawn between 0 and 1, so that many jobs do not come back at the same moment.
            after_s: what the other side asked for, if it did.
        """
        longest_s = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 60))
        return max(longest_s * (0.5 + drawn / 2), after_s or 0.0)


@dataclass(slots=True)
class _Lane:
    """One destination's queue, and how the notice that is being delivered is doing."""

    waiting: deque[Notice] = field(default_factory=deque)
    current: Notice | None = None
    due_s: float = 0.0
    failures: int = 0
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the notices so far, one for each destination: taken, given up, and dropped from a full queue."""

    delivered: int = 0
    failed: int = 0
    dropped: int = 0


class Notifier:
    """Delivers notices from a daemon thread, which starts with the first of them.

    Args:
        retrying: when to try again.
        capacity: notices that may wait for one destination.
        attempt_s: what one attempt may take.
        now: a monotonic clock, in seconds.
        draw: a number between 0 and 1.
        wait: wait on a condition for some seconds; None means until it is notified.
    """

    def __init__(
        self,
        retrying: Retrying | None = None,
        capacity: int = CAPACITY,
        attempt_s: float = ATTEMPT_S,
        *,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        wait: Callable[[threading.Condition, float | None], object] = threading.Condition.wait,
    ) -> None:
        self._retrying = retrying or Retrying()
        self._capacity, self._attempt_s = capacity, attempt_s
        self._now, self._draw, self._wait = now, draw, wait
        self._changed = threading.Condition()
        self._lanes: dict[Destination, _Lane] = {}
        self._thread: threading.Thread | None = None
        self._close_by_s: float | None = None
        self._delivered = self._failed = self._dropped = 0

    @property
    def counts(self) -> Counts:
        """What became of the notices so far."""
        with self._changed:
            return Counts(self._delivered, self._failed, self._dropped)

    def notify(self, notice: Notice, destinations: Iterable[Destination]) -> None:
        """Have ``notice`` delivered. Returns at once, and raises nothing: who is not told must not hold up a job."""
        try:
            with self._changed:
                for destination in destinations:
                    self._enqueue(notice, destination)
                if self._thread is None and self._lanes and self._close_by_s is None:
                    thread = threading.Thread(target=self._work, name="sftriage-notify", daemon=True)
                    thread.start()
                    self._thread = thread
                self._changed.notify_all()
        except Exception:
            log.exception("a notice could not be queued")

    def close(self, deadline_s: float) -> Counts:
        """Deliver what is waiting, for no longer than ``deadline_s``; what is left after that is given up."""
        with self._changed:
            self._close_by_s = self._now() + deadline_s
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(deadline_s)
        with self._changed:
            left = sum(len(lane.waiting) + (lane.current is not None) for lane in self._lanes.values())
            self._lanes.clear()
            self._failed += left
        if left:
            log.error("%d notices were not delivered before the end", left)
        return self.counts

    def _enqueue(self, notice: Notice, destination: Destination) -> None:
        if self._close_by_s is not None:
            self._dropped += 1
            return
        lane = self._lanes.setdefault(destination, _Lane())
        lane.waiting.append(notice)
        if len(lane.waiting) > self._capacity:
            lane.waiting.popleft()
            self._dropped += 1
            # Each power of two: a flood is said, and says no flood of its own.
            if self._dropped & (self._dropped - 1) == 0:
                log.error("notify %s: the queue is full; %d notices dropped so far", destination, self._dropped)

    def _work(self) -> None:
        while (turn := self._next()) is not None:
            destination, notice, timeout_s = turn
            error: DeliveryError | None = None
            try:
                self._attempt(destination, notice, timeout_s)
            except DeliveryError as caught:
                error = caught
            except Exception as caught:
                # Not its text, which may quote what must not be shown.
                error = DeliveryError(type(caught).__name__, retry=False)
            self._attempted(destination, notice, error)

    def _next(self) -> tuple[Destination, Notice, float] | None:
        """Wait for what is to be tried next, and what that may take; None once there is nothing more to do."""
        with self._changed:
            while True:
                now_s, close_by_s = self._now(), self._close_by_s
                busy = [(lane.due_s, to) for to, lane in self._lanes.items() if lane.current or lane.waiting]
                due_s, destination = min(busy, key=lambda one: one[0], default=(None, None))
                if close_by_s is not None and (due_s is None or max(due_s, now_s) >= close_by_s):
                    return None
                if due_s is None or destination is None:
                    self._wait(self._changed, None)
                elif due_s > now_s:
                    self._wait(self._changed, due_s - now_s)
                else:
                    lane = self._lanes[destination]
                    if lane.current is None:
                        lane.current, lane.failures, lane.since_s = lane.waiting.popleft(), 0, now_s
                    left_s = self._attempt_s if close_by_s is None else close_by_s - now_s
                    return destination, lane.current, min(self._attempt_s, left_s)

    def _attempt(self, destination: Destination, notice: Notice, timeout_s: float) -> None:
        address = destination.address()
        slack = destination.form == "slack"
        body = slack_message(notice) if slack else cloud_event(notice)
        content_type = "application/json" if slack else "application/cloudevents+json; charset=utf-8"
        try:
            post(address, body, content_type, timeout_s)
        except DeliveryError as error:
            raise DeliveryError(f"{address.host}: {error}", retry=error.retry, after_s=error.after_s) from None

    def _attempted(self, destination: Destination, notice: Notice, error: DeliveryError | None) -> None:
        with self._changed:
            lane = self._lanes.get(destination)
            if lane is None:
                return  # closed meanwhile
            if error is None:
                lane.current = None
                self._delivered += 1
                return
            lane.failures += 1
            now_s = self._now()
            next_s = now_s + self._retrying.wait_s(lane.failures, self._draw(), error.after_s)
            given_up = not error.retry or next_s - lane.since_s > self._retrying.give_up_s
            # What was asked of this notice holds for the next one as well.
            lane.due_s = next_s if not given_up or error.after_s is not None else now_s
            if given_up:
                lane.current = None
                self._failed += 1
            tries = lane.failures
        if given_up:
            log.error("notify %s: %s given up after %d tries: %s", destination, notice.subject, tries, error)
        elif tries == 1:
            log.warning("notify %s: %s; trying again", destination, error)
