"""Locks that threads wait for, by their frames: real threads that wait, named without a word of their program."""

import asyncio
import queue
import sys
import threading
from collections.abc import Callable
from time import monotonic, sleep

import pytest

from sftriage.trainer.locks import Holder, holder_of, local, lock_of
from sftriage.trainer.monitor import Monitor
from sftriage.trainer.waits import threads_of_this_process

DEADLINE_S = 20.0
needs_311 = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="the bytecode of 3.10 does not say which blocks are open"
)


class Cache:
    def __init__(self):
        self._lock, self._condition, self._others = threading.Lock(), threading.Condition(), [threading.Lock()]
        self.entered, self.leave = threading.Event(), threading.Event()

    @property
    def lock(self):
        raise AssertionError("nothing of the program may run")

    def keep(self, inner):
        with self._lock:
            try:
                with inner:
                    for _ in range(1):
                        self.entered.set()
                        self.leave.wait(DEADLINE_S)
            except ValueError:
                pass

    def kept_before(self):
        with self._lock:
            pass
        self.entered.set()
        self.leave.wait(DEADLINE_S)

    def wait_for_a_condition(self):
        with self._condition:
            self.entered.set()
            self._condition.wait_for(self.leave.is_set, DEADLINE_S)

    def use(self):
        with self._lock:
            pass

    def use_in_brackets(self):
        with self._others[0]:
            pass

    def use_either(self):
        with self._lock if self._others else self._condition:
            pass

    def use_condition(self):
        with self._condition:
            pass

    def acquire(self, blocking=True):
        if self._lock.acquire(blocking, timeout=DEADLINE_S):
            self._lock.release()


@pytest.fixture
def run():
    """Starts a function in a thread, and gives its frames once it waits in one and the same place."""
    started = []

    def start(function: Callable[..., object], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=function, args=arguments, name=function.__name__, daemon=True)
        thread.start()
        started.append(thread)
        return thread

    yield start
    for thread in started:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def frames():
    found = {}
    for ident, frame in sys._current_frames().items():
        found[ident] = []
        while frame is not None:
            found[ident].append(frame)
            frame = frame.f_back
    return found


def waiting(thread, name):
    """What a thread waits for, once that has the name."""
    end_s = monotonic() + DEADLINE_S
    while (found := lock_of(frames()[thread.ident])) is None or found.name != name:
        assert monotonic() < end_s, found
        sleep(0.001)
    return found


@needs_311
@pytest.mark.parametrize("wait", ["use", "acquire"])
def test_the_holder_is_the_thread_inside_a_with_on_that_lock(run, wait):
    # GIVEN a thread inside blocks on two locks, and one that is past such a block
    cache, inner = Cache(), threading.Lock()
    keeper = run(cache.keep, inner)
    assert cache.entered.wait(DEADLINE_S)
    # WHEN another waits for one of the locks THEN it is named as in its program, and so is the holder
    found = waiting(run(getattr(cache, wait)), "self._lock")
    assert found.awaited is cache._lock
    held = holder_of(found.awaited, frames())
    assert (held.ident, held.frame.f_code.co_name) == (keeper.ident, "keep")
    assert holder_of(inner, frames()).ident == keeper.ident
    cache.leave.set()


def test_a_thread_that_has_left_the_block_is_not_the_holder(run):
    cache = Cache()
    run(cache.kept_before)
    assert cache.entered.wait(DEADLINE_S)
    with_others = cache._lock
    with_others.acquire()
    assert holder_of(cache._lock, frames()) is None
    with_others.release()
    cache.leave.set()


def test_a_thread_that_waits_for_a_condition_has_released_its_lock(run):
    # GIVEN a thread in `wait`, inside a block on the condition, whose lock another thread has taken
    cache = Cache()
    cache._condition = threading.Condition(threading.Lock())
    run(cache.wait_for_a_condition)
    assert cache.entered.wait(DEADLINE_S)
    cache._condition.acquire()
    # WHEN a third waits for it THEN the first is not named for it
    found = waiting(run(cache.use_condition), "self._condition")
    assert holder_of(found.awaited, frames()) is None
    cache.leave.set()
    cache._condition.notify_all()
    cache._condition.release()


def test_a_reentrant_lock_knows_its_owner(run):
    cache = Cache()
    cache._condition.acquire()
    found = waiting(run(cache.use_condition), "self._condition")
    assert holder_of(found.awaited, frames()) == Holder(threading.get_ident())
    cache._condition.release()


@pytest.mark.parametrize("wait", ["use_in_brackets", "use_either"])
def test_what_is_not_a_plain_name_has_none(run, wait):
    # GIVEN a thread that waits for a lock by another expression than a name THEN no name is guessed
    cache = Cache()
    lock = cache._others[0] if wait == "use_in_brackets" else cache._lock
    lock.acquire()
    thread, names = run(getattr(cache, wait)), set()
    for _ in range(50):
        sleep(0.002)
        stack = frames()[thread.ident]
        names |= {found and found.name for found in [lock_of(stack)] if stack[0].f_code.co_name == wait}
    assert names == {None}
    lock.release()


def test_a_queue_an_event_and_a_thread_are_named(run):
    inbox, simple, done = queue.Queue(), queue.SimpleQueue(), threading.Event()

    def get():
        inbox.get()

    def get_simple():
        simple.get()

    def wait():
        done.wait()

    waits = run(wait)

    def join():
        waits.join()

    for function, name in ((get, "inbox"), (get_simple, "simple"), (join, "waits")):
        found = waiting(run(function), name)
        assert found.awaited is {"inbox": inbox, "simple": simple, "waits": waits}[name]
    assert holder_of(waits, frames()).ident == waits.ident
    assert waiting(waits, "done").awaited is done
    for inboxes in (inbox, simple):
        inboxes.put(1)
    done.set()


def test_the_thread_that_trains_is_the_main_one(run, tmp_path):
    done = threading.Event()

    def train():
        monitor = Monitor(("data",), (), rank=0, rings=tmp_path)
        with monitor.step():
            done.wait(DEADLINE_S)

    waiting(run(train), "done")
    assert [(thread.name, thread.main) for thread in threads_of_this_process(False)] == [("train", True)]
    done.set()


def test_an_idle_event_loop_is_in_the_coroutine_that_it_runs(run):
    # GIVEN a coroutine that waits for another one
    ready = []

    async def fetch():
        ready.append((asyncio.get_running_loop(), future := asyncio.get_running_loop().create_future()))
        await future

    async def collect():
        await fetch()

    def collecting():
        asyncio.run(collect())

    run(collecting)
    end_s, found = monotonic() + DEADLINE_S, []
    # WHEN its loop waits THEN it is in the innermost
    while found[:3] != ["fetch", "collect", "select"]:
        assert monotonic() < end_s, found
        threads = {thread.name: thread.frames for thread in threads_of_this_process(True)}
        found = [line.function for line in threads["collecting"]]
    ((loop, future),) = ready
    loop.call_soon_threadsafe(future.set_result, None)


def test_a_function_that_keeps_all_its_variables_is_left_alone(run):
    # GIVEN a function whose dictionary of variables would change, were it read from outside
    lock, entered = threading.Lock(), threading.Event()
    lock.acquire()

    def keeps():
        kept = locals()
        entered.set()
        with lock:
            return kept

    thread = run(keeps)
    assert entered.wait(DEADLINE_S)
    (frame,) = (frame for frame in frames()[thread.ident] if frame.f_code.co_name == "keeps")
    # THEN none is read, and the name is there without the lock
    assert not isinstance(local(frame, "lock"), type(lock))
    lock.release()


def test_variables_of_a_frame_are_not_kept():
    # (a test has a call of `locals` in each assertion)
    def reads():
        batch = Cache()
        before = sys.getrefcount(batch)
        found = local(sys._getframe(), "batch") is batch
        return found, sys.getrefcount(batch) - before

    assert reads() == (True, 0)
