"""A loop goes on whatever its turns raise, waits longer after failures, and stops."""

import logging
import threading
import time

import pytest

from sftriage.base.loops import Backoff, LogOnce, Loop, start_thread

LONG_S = 60.0
QUICK = Backoff(0.001, 0.001)


@pytest.fixture
def looping(caplog):
    """Starts a loop of which each turn does what is next in a list, and lets the test wait for the number of turns."""
    made = []

    class Turns:
        def __init__(self, *acts, every_s=0.001, **about):
            self.acts, self.count, self.changed = list(acts), 0, threading.Condition()
            about = {"failing": "it fails", "expected": (OSError,), "backoff": QUICK} | about
            self.loop = Loop("test", self.turn, every_s, **about)
            made.append(self.loop)
            self.loop.start()

        def turn(self):
            act = self.acts.pop(0) if self.acts else lambda: None
            try:
                return self.loop.stopping.set() if act == "end" else act()
            finally:
                with self.changed:
                    self.count += 1
                    self.changed.notify_all()

        def reach(self, count):
            with self.changed:
                assert self.changed.wait_for(lambda: self.count >= count, 30)

    yield Turns
    for loop in made:
        assert loop.stop(30)


def fail(error):
    def act():
        raise error

    return act


def test_a_loop_repeats_its_turn_until_it_stops(looping):
    turns = looping()
    turns.reach(3)
    assert turns.loop.stop(30)
    count = turns.count
    time.sleep(0.05)
    assert turns.count == count


def test_a_turn_may_end_the_loop(looping):
    turns = looping("end")
    turns.reach(1)
    assert turns.loop.stop(30)
    assert turns.count == 1


@pytest.mark.parametrize("every", ["every_s", "wanted"])
def test_it_waits_until_it_is_woken(looping, every):
    turns = looping(every_s=LONG_S) if every == "every_s" else looping(lambda: LONG_S)
    turns.reach(1)
    turns.loop.wake()
    turns.reach(2)


def test_there_is_a_last_turn_that_begins_after_the_end(looping):
    turns = looping(every_s=LONG_S)
    turns.reach(1)
    assert turns.loop.stop(30, last_turn=True)
    assert turns.count == 2


def test_a_turn_that_hangs_is_left_behind(looping):
    release = threading.Event()
    turns = looping(lambda: release.wait(30) and None)
    assert not turns.loop.stop(0.01)
    release.set()


def test_failures_are_logged_once_until_they_change_or_pass(looping, caplog):
    full = OSError(28, "No space left on device")
    odds = [fail(ValueError("odd")), fail(ValueError("in other words"))]
    acts = [fail(full), fail(full), *odds, lambda: None, fail(full)]
    turns = looping(*acts, works="it works again")
    turns.reach(7)
    assert turns.loop.stop(30)
    logged = [(record.getMessage(), bool(record.exc_info)) for record in caplog.records]
    full, odd = ("it fails: No space left on device; trying again", False), ("it fails: ValueError('odd')", True)
    again = ("it works again", False)
    assert logged == [full, (f"{odd[0]}; trying again", True), again, full, again]
    assert turns.loop.problem == ""


def test_a_failing_loop_is_not_woken_before_its_time(looping):
    turns = looping(fail(OSError("away")), backoff=Backoff(LONG_S, LONG_S))
    turns.reach(1)
    turns.loop.wake()
    time.sleep(0.05)
    assert (turns.count, turns.loop.problem) == (1, "away")
    assert turns.loop.stop(30)


def test_pauses_grow_up_to_a_limit_and_differ_between_hosts():
    backoff = Backoff(1.0, 30.0)
    for longest_s in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        assert longest_s / 2 <= backoff.next_s() <= longest_s
    backoff.failures = 10_000
    assert backoff.next_s() <= 30.0
    backoff.reset()
    assert backoff.next_s() <= 1.0
    assert len({Backoff(1.0, 30.0).next_s() for _ in range(10)}) > 1


def test_a_thread_ends_with_the_process():
    thread = start_thread("test", time.sleep, 0.0)
    assert (thread.daemon, thread.name) == (True, "sftriage-test")


def test_a_message_is_logged_once(caplog):
    log_once = LogOnce(logging.getLogger("sftriage"), logging.ERROR)
    for host in ("a", "b", "a"):
        log_once("host %s", host)
        log_once("a kind: %s", host, key="kind")
        log_once("100 %")
    assert [record.getMessage() for record in caplog.records] == ["host a", "a kind: a", "100 %", "host b"]
    assert {record.levelname for record in caplog.records} == {"ERROR"}
