"""Stacks sampled by a thread in the trainer: what is written, and that nothing stays behind."""

import gc
import json
import linecache
import stat
import threading
import time
from pathlib import Path

import pytest

from sftriage.reduce.samples import read_samples
from sftriage.trainer import stacks
from sftriage.trainer.sampler import StackSampler
from sftriage.trainer.stacks import MAX_SAMPLES, USED, Stacks

DEADLINE_S = 20.0


class Sampled:
    """A sampler, and the wait for so many samples: whoever waits is the line that is met."""

    def __init__(self, wanted=3):
        self.left, self.there = wanted, threading.Event()
        self.sampler = StackSampler(self.at, period_s=0.001)

    def at(self):
        self.left -= 1
        if self.left < 0:
            self.there.set()
        return 7, "data", 1

    def stand_here(self):
        assert self.there.wait(DEADLINE_S)

    def until_there(self, act):
        until_s = time.monotonic() + DEADLINE_S
        while not self.there.is_set() and time.monotonic() < until_s:
            act()

    def run(self, stand=stand_here):
        self.sampler.start()
        stand(self)
        self.sampler.stop()
        return self

    def keep(self, directory):
        """The samples that were kept, in ``s.json`` of a directory."""
        assert self.sampler.keep(directory / "s.json", 1 << 22) == ""
        return read_samples(directory / "s.json")


@pytest.fixture
def sampled():
    return Sampled().run()


def test_a_sample_has_the_training_threads_line_step_and_stage(sampled, tmp_path):
    # GIVEN a thread that stood in `stand_here` while it was sampled WHEN what was sampled is kept
    read = sampled.keep(tmp_path)
    # THEN a reader finds function, file and line, and the line of source
    assert set(read.step_N) == {7}
    assert set(read.stage_N) == {"data"}
    assert len(read.time_ns_N) >= 3
    met = {read.frames[number] for stack in read.training.stacks_N for number in stack}
    (stood,) = (function for function in met if function.function.endswith("stand_here"))
    assert (Path(stood.file), stood.source) == (Path(__file__), "assert self.there.wait(DEADLINE_S)")
    assert stood.line == Sampled.stand_here.__code__.co_firstlineno + 1
    # AND how long the thread has run grows with the samples, where the system says
    assert list(read.training.run_ns_N) == sorted(read.training.run_ns_N)


def test_garbage_that_the_thread_collects_is_counted_and_leaves_no_frame_of_ours(tmp_path):
    # GIVEN a thread that collects garbage until it was sampled a few times
    gc.collect()  # (a Monitor that another test has left removes its callback when it is collected)
    gc.freeze()  # (what all tests before have left would be gone through each time)
    callbacks, objects = list(gc.callbacks), [[number] for number in range(200_000)]
    # WHEN what was sampled is kept THEN the time is counted, and grows
    read = Sampled(30).run(lambda made: made.until_there(gc.collect)).keep(tmp_path)
    gc.unfreeze()
    collected_ns = read.training.used_N["collected_ns"]
    assert list(collected_ns) == sorted(collected_ns)
    assert 0 < collected_ns[-1] <= read.time_ns_N[-1] - read.time_ns_N[0] + 10**10
    assert set(read.training.used_N) == set(USED)
    # AND nothing of it shows, nor is left behind
    met = {read.frames[number].function for stack in read.training.stacks_N for number in stack}
    assert not {function for function in met if "Stacks." in function}
    assert (gc.callbacks, len(objects)) == (callbacks, 200_000)


def test_the_training_threads_running_time_is_known_in_a_forked_process(monkeypatch, tmp_path):
    # GIVEN a thread whose id in `threading` is the one that it had in the process that was forked
    monkeypatch.setattr(threading.current_thread(), "_native_id", 2**22)
    # THEN what the system says of it is that of the thread itself
    assert min(Sampled().run().keep(tmp_path).training.run_ns_N) > 0


def test_the_kernel_shows_that_a_thread_sleeps(tmp_path):
    # GIVEN a thread that sleeps until it was sampled WHEN what was sampled is kept
    read = Sampled().run(lambda made: made.until_there(lambda: time.sleep(0.02))).keep(tmp_path)
    waits_in = read.training.waits_in_N
    # THEN what it waits in is there, sample by sample, where the system says; and never the interpreter itself
    assert len(waits_in) >= 3
    assert any("sleep" in function for function in waits_in) or not any(waits_in)
    assert not any("futex" in function for function in waits_in)


def test_the_file_has_speedscopes_format(sampled, tmp_path):
    sampled.keep(tmp_path)
    document = json.loads((tmp_path / "s.json").read_text())
    # THEN it has that format's marks, each profile as many weights as samples, and they add up to its length
    assert document["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    for profile in document["profiles"]:
        assert profile["type"] == "sampled"
        assert profile["unit"] == "nanoseconds"
        assert len(profile["weights"]) == len(profile["samples"])
        assert sum(profile["weights"]) == profile["endValue"]
        assert all(number < len(document["shared"]["frames"]) for stack in profile["samples"] for number in stack)
    # AND nobody else may read it: it holds lines of the program
    assert stat.S_IMODE((tmp_path / "s.json").stat().st_mode) == 0o600


def test_other_threads_are_sampled_and_the_sampler_itself_is_not(tmp_path):
    # GIVEN a second thread that stands somewhere else
    ended = threading.Event()
    other = threading.Thread(target=ended.wait, args=(DEADLINE_S,), name="statistics")
    other.start()
    made = Sampled().run()
    ended.set()
    other.join()
    # WHEN what was sampled is kept THEN both have a profile, the training thread's first
    made.keep(tmp_path)
    names = [profile["name"] for profile in json.loads((tmp_path / "s.json").read_text())["profiles"]]
    assert names[0] == threading.current_thread().name
    assert "statistics" in names
    assert "sftriage-samples" not in names


def test_sampling_leaves_nothing_behind(tmp_path):
    # GIVEN the threads and the cached sources before
    before, cached = set(threading.enumerate()), set(linecache.cache)
    # WHEN it has stopped and was kept THEN there is no thread and no source more than before
    Sampled().run().keep(tmp_path)
    assert set(threading.enumerate()) == before
    assert set(linecache.cache) == cached


def test_stacks_that_do_not_fit_or_cannot_be_written_leave_nothing(sampled, tmp_path):
    # GIVEN no bytes left, or no directory WHEN it is kept THEN the reason comes back, and no file is there
    assert "no stacks: they would take" in sampled.sampler.keep(tmp_path / "s.json", 10)
    assert "no stacks: " in sampled.sampler.keep(tmp_path / "none" / "s.json", 1 << 20)
    assert list(tmp_path.iterdir()) == []


def test_samples_are_bounded(monkeypatch, tmp_path):
    # GIVEN room for two samples WHEN nobody stops it THEN it ends by itself
    monkeypatch.setattr("sftriage.trainer.stacks.MAX_SAMPLES", 2)
    made = Sampled(1)
    made.sampler.start()
    made.sampler._thread.join(DEADLINE_S)
    assert not made.sampler._thread.is_alive()
    assert MAX_SAMPLES == 50_000


def test_it_samples_less_often_if_each_sample_takes_long_and_not_for_one_that_did(monkeypatch):
    # GIVEN looks that take a millisecond of the thread's time, but for one that collects garbage, and two more
    took_ms, waits_s = (1, 90, 1, 50, 60), []
    times_ns = iter([each for took in took_ms for each in (0, took * 1_000_000)])
    monkeypatch.setattr(stacks, "thread_time_ns", lambda: next(times_ns))

    def ended(wait_s):
        waits_s.append(round(wait_s, 3))
        return len(waits_s) > len(took_ms)

    # WHEN stacks are taken THEN what is waited for is 40 times what each of the last two looks took at least
    Stacks(0.005, threading.get_ident()).run(ended)
    assert waits_s == [0.005, 0.005, 0.04, 0.04, 0.04, 2.0]
