"""What is published reaches every sink in order; one that fails, hangs or is slow costs the others nothing."""

import logging
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.model.events import TakenOver
from sftriage.sinks.stream import Sink, Stream

DEADLINE_S = 20.0


def event(number: int) -> TakenOver:
    return TakenOver(float(number), "node-1", number)


class Kept(Sink):
    """Keeps what it is told, and can be waited for."""

    def __init__(self, name="kept"):
        self.name, self.took, self.calls = name, [], []
        self._changed = threading.Condition()

    def start(self):
        self.calls.append("start")

    def take(self, seen):
        with self._changed:
            self.took.append(seen.pid)
            self._changed.notify_all()

    def close(self):
        self.calls.append("close")

    def wait_for(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.took) >= count, DEADLINE_S), self.took


class Failing(Kept):
    """Fails at each event whose number is even."""

    def take(self, seen):
        super().take(seen)
        if seen.pid % 2 == 0:
            raise ValueError(f"no {seen.pid}")


class Hanging(Kept):
    """Hangs in its first event until it is let go."""

    def __init__(self, name="hanging"):
        super().__init__(name)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def take(self, seen):
        self.inside.set()
        assert self.go_on.wait(DEADLINE_S)
        super().take(seen)


@pytest.fixture(autouse=True)
def all_of_the_log(caplog):
    caplog.set_level(logging.DEBUG, "sftriage")


def said(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def test_nothing_runs_before_the_start_and_what_was_published_is_told_after_it():
    before = threading.active_count()
    sink = Kept()
    stream = Stream([sink])
    for number in range(3):
        stream.publish(event(number))
    # (closing what never began starts nothing either)
    stream.close(DEADLINE_S)
    assert (threading.active_count(), sink.took, sink.calls) == (before, [], [])
    # WHEN it starts THEN that is told, between the sink's start and its close
    stream.start()
    stream.close(DEADLINE_S)
    assert (sink.took, sink.calls) == ([0, 1, 2], ["start", "close"])
    # AND what comes after the end is nobody's
    stream.publish(event(3))
    stream.close(DEADLINE_S)
    assert (sink.took, sink.calls) == ([0, 1, 2], ["start", "close"])


def test_who_comes_late_is_refused():
    stream = Stream()
    stream.start()
    with pytest.raises(RuntimeError, match="kept comes after the start"):
        stream.add(Kept())


def test_a_sink_that_fails_is_said_once_and_goes_on(caplog):
    failing, other = Failing("failing"), Kept()
    stream = Stream([failing, other])
    stream.start()
    for number in range(7):
        stream.publish(event(number))
    stream.close(DEADLINE_S)
    # THEN it was told everything all the same, and so was the other
    assert failing.took == other.took == list(range(7))
    assert failing.calls == ["start", "close"]
    # AND one line says so; where it was, is for who debugs
    assert said(caplog) == ["failing failed, and goes on: ValueError: no 0"]
    (first, *_) = [record for record in caplog.records if record.exc_info]
    assert first.levelno == logging.DEBUG


@pytest.mark.parametrize("method", ["start", "close"])
def test_a_sink_that_cannot_start_or_close_is_said_too(method, caplog, monkeypatch):
    sink = Kept()

    def fail():
        raise OSError("full")

    monkeypatch.setattr(sink, method, fail)
    stream = Stream([sink])
    stream.start()
    stream.publish(event(1))
    stream.close(DEADLINE_S)
    assert sink.took == [1]
    assert said(caplog) == ["kept failed, and goes on: OSError: full"]


def test_a_sink_that_hangs_holds_up_nobody_and_is_left_behind(caplog):
    hanging, other = Hanging(), Kept()
    stream = Stream([hanging, other], capacity=4)
    stream.start()
    stream.publish(event(0))
    assert hanging.inside.wait(DEADLINE_S)
    # WHEN more happens than can wait for it
    for number in range(1, 31):
        stream.publish(event(number))
        other.wait_for(number + 1)
    # THEN the other has been told it all, and it was said once that this one has not
    assert other.took == list(range(31))
    assert said(caplog) == ["hanging does not keep up: what happens is lost to it from now on"]
    # AND the end does not wait for it
    stream.close(0.05)
    assert said(caplog)[1:] == ["hanging hangs and is left behind; it was not told of 30 events"]
    assert other.calls == ["start", "close"]
    hanging.go_on.set()


def test_a_sink_that_was_slow_is_told_the_first_and_it_is_said_what_was_lost(caplog):
    slow = Hanging("slow")
    stream = Stream([slow], capacity=3)
    stream.start()
    stream.publish(event(0))
    assert slow.inside.wait(DEADLINE_S)
    for number in range(1, 9):
        stream.publish(event(number))
    # WHEN it goes on THEN it is told what had waited, and later what happens then
    slow.go_on.set()
    slow.wait_for(4)
    stream.close(DEADLINE_S)
    assert slow.took == [0, 1, 2, 3]
    # AND that it keeps up again is said once, with what was lost
    assert said(caplog) == [
        "slow does not keep up: what happens is lost to it from now on",
        "slow keeps up again; 5 events were lost to it",
    ]


def test_what_is_published_from_several_threads_is_told_to_all_in_one_order_of_each():
    sinks = [Kept("a"), Kept("b")]
    stream = Stream(sinks, capacity=1000)
    stream.start()
    threads = [
        threading.Thread(target=lambda start=start: [stream.publish(event(start + n)) for n in range(100)])
        for start in (0, 1000)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    stream.close(DEADLINE_S)
    for sink in sinks:
        assert [one for one in sink.took if one < 1000] == list(range(100))
        assert [one for one in sink.took if one >= 1000] == list(range(1000, 1100))


@given(st.lists(st.integers(0, 1000), max_size=50), st.integers(0, 50), st.integers(1, 60))
def test_order_is_kept_and_before_the_start_only_what_is_on_top_is_lost(numbers, begin, capacity):
    sink = Kept()
    stream = Stream([sink], capacity=capacity)
    for number in numbers[:begin]:
        stream.publish(event(number))
    stream.start()
    waiting = numbers[:begin][:capacity]
    sink.wait_for(len(waiting))
    for count, number in enumerate(numbers[begin:], 1):
        stream.publish(event(number))
        sink.wait_for(len(waiting) + count)
    stream.close(DEADLINE_S)
    assert sink.took == waiting + numbers[begin:]
