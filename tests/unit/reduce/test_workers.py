"""What a DataLoader's workers did while the training thread waited for them: the place, and what is said of it."""

import json
from dataclasses import replace

import pytest

from sftriage.errors import InputError
from sftriage.reduce.causes import cause_of
from sftriage.reduce.samples import Frame, StackSamples, ThreadSamples, WorkerSamples, read_samples
from sftriage.reduce.spots import in_workers
from tests.unit.reduce.test_causes import document, findings

MS = 1_000_000
LIB = "/venv/lib/python3.11/site-packages/torch/utils/data/"
FRAMES = (
    Frame("train", "/job/train.py", 12, "for batch in loader:"),
    Frame("_MultiProcessingDataLoaderIter._try_get_data", f"{LIB}dataloader.py", 1300, "self._data_queue.get()"),
    Frame("_worker_loop", f"{LIB}_utils/worker.py", 374, "data = fetcher.fetch(index)"),
    Frame("Queue.get", "/usr/lib/python3.11/multiprocessing/queues.py", 113, "if not self._poll(timeout):"),
    Frame("Images.__getitem__", "/job/data.py", 57, "time.sleep(0.1)"),
    Frame("decode", "/job/data.py", 80, "total += byte"),
)
TRAIN, WAITS, LOOP, GETS, SLEEPS, DECODES = range(6)
WAITING, IDLE, ASLEEP, BUSY = (TRAIN, WAITS), (LOOP, GETS), (LOOP, SLEEPS), (LOOP, DECODES)


def thread(stacks, times_ns, runs=0.0, waits=0.0):
    run_ns, waited_ns = (tuple(int(one * part) for one in times_ns) for part in (runs, waits))
    return ThreadSamples("", tuple(stacks), run_ns, waited_ns)


def worker(*stacks, runs=0.0, waits=0.0, number=0):
    """A worker that is sampled every 5 ms, 1 ms before its trainer is."""
    times_ns = tuple((5 * (one + 1) - 1) * MS for one in range(len(stacks)))
    its = thread(stacks, times_ns, runs, waits)
    return WorkerSamples(number, 70 + number, 5 * MS, times_ns, (its,), thread((), times_ns))


def rank(*workers, stacks=(WAITING,) * 40, stage="data"):
    """A rank that waits for its workers in one long step."""
    times_ns = tuple(5 * (one + 1) * MS for one in range(len(stacks)))
    n = len(stacks)
    columns = times_ns, (1,) * n, (stage,) * n, (0,) * n
    return StackSamples(FRAMES, 5 * MS, *columns, thread(stacks, times_ns), (), thread((), times_ns), workers)


WHERE = {
    # workers -> the place that is named, and what they spend there in all
    "one that sleeps": ([worker(*(ASLEEP,) * 40)], (SLEEPS, 0.2)),
    "one that sleeps, beside one that has nothing to do": (
        [worker(*(ASLEEP,) * 40), worker(*(IDLE,) * 40, number=1)],
        (SLEEPS, 0.2),
    ),
    "two that sleep": ([worker(*(ASLEEP,) * 40), worker(*(ASLEEP,) * 20, number=1)], (SLEEPS, 0.3)),
    "one that mostly sleeps": ([worker(*(ASLEEP,) * 30, *(BUSY,) * 10)], (SLEEPS, 0.15)),
    "no place in particular": ([worker(*(ASLEEP,) * 10, *(BUSY,) * 9, *((LOOP,),) * 11)], None),
    "all have nothing to do": ([worker(*(IDLE,) * 40)], None),
    "none was sampled": ([], None),
    "one that was gone before it was sampled": ([worker()], None),
}


@pytest.mark.parametrize(("workers", "place"), WHERE.values(), ids=WHERE)
def test_the_place_is_where_the_workers_are_that_do_something(workers, place):
    # GIVEN a training thread that waits for its workers WHEN it is asked where they are
    found = in_workers(rank(*workers), None, "data")
    # THEN it is the place that most of those are at that have something to do
    assert (None if found is None else (FRAMES.index(found.spot.frame), round(found.step_s, 3))) == place


def test_what_they_do_while_nobody_waits_for_them_is_not_why():
    # GIVEN a worker that decodes while the training thread is elsewhere, and then sleeps while it is waited for
    stacks = ((TRAIN,),) * 30 + (WAITING,) * 10
    its = worker(*(BUSY,) * 30, *(ASLEEP,) * 10)
    # WHEN it is asked where it is THEN that is where it was waited for; in another stage, nowhere
    assert in_workers(rank(its, stacks=stacks), None, "data").spot.frame == FRAMES[SLEEPS]
    assert in_workers(rank(its, stacks=stacks), None, "forward") is None
    # AND of other steps nothing is said
    assert in_workers(rank(its, stacks=stacks), None, "data", {7}) is None


SAID = {
    "which sleeps": (worker(*(ASLEEP,) * 40), SLEEPS, "Images.__getitem__ (data.py:57: time.sleep(0.1)), which sleeps"),
    "which computes": (worker(*(BUSY,) * 40, runs=1), DECODES, "decode (data.py:80: total += byte), which computes"),
    "which has no core": (worker(*(BUSY,) * 40, waits=1), DECODES, "ready to run, and wait for a core"),
}


@pytest.mark.parametrize(("its", "place", "said"), SAID.values(), ids=SAID)
def test_the_cause_names_the_line_in_the_worker_and_not_the_one_that_waits(its, place, said):
    # GIVEN a rank that waits for a worker, and a control whose own is at that place for 10 ms
    control = rank(worker(*(IDLE,) * 38, *(its.threads[0].stacks_N[0],) * 2))
    # WHEN its cause is asked for
    cause = cause_of(findings(stage_s=0.2, control_s=0.01), rank(its), control)
    # THEN it is the workers, at their line, beside those of the control
    assert (cause.code, cause.sure, cause.compared_with) == ("dataloader_workers", True, 3)
    assert cause.place.line == FRAMES[place].line
    assert "which waits for the workers of its DataLoader, which are in" in cause.sentence
    assert said in cause.sentence
    assert "(200.0 ms a step; those of rank 3: 10.0 ms)" in cause.sentence


def test_where_the_workers_were_not_sampled_the_line_that_waits_is_the_place():
    cause = cause_of(findings(stage_s=0.2, control_s=0.01), rank(), None)
    assert (cause.code, cause.place.line) == ("dataloader_workers", 12)


def whole(**changes):
    """A file with a worker that has two threads."""
    made = document()
    times = {"run_ns": [1, 2], "waited_ns": [0, -1]}
    columns = {"worker": 1, "of": 2, "pid": 70, "period_s": 0.005, "time_ns": [3, 9], "sampler": times}
    made["profiles"] += [{"name": f"w\x1b{number}", "samples": [[0], []]} for number in range(2)]
    made["sftriage"]["workers"] = [columns | {"threads": [times, times]} | changes]
    made["sftriage"]["not_sampled"] = [{"pid": 9, "problem": "it has ended"}]
    return made


def test_a_file_has_each_worker_with_its_own_times(tmp_path):
    # GIVEN a file with a worker WHEN it is read THEN its rows are its own, and the trainer's are as they were
    (tmp_path / "s.json").write_text(json.dumps(whole()))
    found = read_samples(tmp_path / "s.json")
    (its,) = found.workers
    assert (found.time_ns_N, found.others) == ((1,), ())
    assert (its.number, its.pid, its.period_ns, its.time_ns_W) == (1, 70, 5 * MS, (3, 9))
    assert [one.name for one in its.threads] == ["w?0", "w?1"]
    assert its.threads[0].stacks_N == ((0,), ())
    assert found.not_sampled == ("it has ended",)
    # AND one of before, which has none, is read as it was
    (tmp_path / "s.json").write_text(json.dumps(document()))
    assert replace(found, workers=(), not_sampled=()) == read_samples(tmp_path / "s.json")


@pytest.mark.parametrize(
    "changes", [{"time_ns": [3]}, {"threads": []}, {"pid": "x"}, {"sampler": {"run_ns": [], "waited_ns": []}}]
)
def test_a_worker_that_is_not_whole_is_refused(tmp_path, changes):
    (tmp_path / "s.json").write_text(json.dumps(whole(**changes)))
    with pytest.raises(InputError, match=r"s\.json: not sampled stacks"):
        read_samples(tmp_path / "s.json")
