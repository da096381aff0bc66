"""Sampled stacks: the file that they are in, where a stage was spent by them, and the tree of functions in them."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.errors import InputError
from sftriage.reduce import flames as module
from sftriage.reduce.flames import OTHERS, Folded, flames, fold
from sftriage.reduce.samples import Frame, StackSamples, ThreadSamples, collapsed, read_samples, spots

MS = 1_000_000
LOOP = Frame("main", "/job/train.py", 12, "batch = next(batches)")
GET = Frame("Images.__getitem__", "/job/data.py", 57, "time.sleep(0.04)")
SPIN = Frame("spin", "/job/statistics.py", 4, "total += 1")
LIB = "/venv/lib/python3.11/site-packages/"


def thread(stacks, times_ns, runs=0.0, waits=0.0, name="MainThread", waits_in=""):
    run_ns, waited_ns = (tuple(int(one * part) for one in times_ns) for part in (runs, waits))
    return ThreadSamples(name, tuple(stacks), run_ns, waited_ns, (waits_in,) * len(times_ns))


def samples(*taken, stage="data", runs=0.0, waits=0.0, every_ms=5, step=1, other=None, sampler_waits=0.0, waits_in=""):
    """Samples of one stage: each stack as often as given, one ``every_ms``, the first that long after it began.

    ``other`` is what another thread ran.
    """
    frames = list(dict.fromkeys((*(frame for stack, _ in taken for frame in stack), SPIN)))
    stacks = [tuple(map(frames.index, stack)) for stack, times in taken for _ in range(times)]
    times_ns = [(number + 1) * every_ms * MS for number in range(len(stacks))]
    n, spins = len(stacks), [(frames.index(SPIN),)] * len(stacks)
    columns = tuple(times_ns), (step,) * n, (stage,) * n, (0,) * n
    others = () if other is None else (thread(spins, times_ns, other, name="statistics"),)
    training = thread(stacks, times_ns, runs, waits, waits_in=waits_in)
    sampler = thread((), times_ns, waits=sampler_waits)
    return StackSamples(tuple(frames), min(every_ms, 5) * MS, *columns, training, others, sampler)


def test_what_is_first_sampled_after_it_began_counts():
    # GIVEN steps in which one sample was taken, 40 ms after the stage had begun, and the stage before was idle
    taken = samples(((LOOP, GET), 4), every_ms=40, runs=0.9)
    since_ns = tuple(one - 38 * MS for one in taken.time_ns_N)
    # WHEN its places are searched THEN the thread is known to have run
    (spot,) = spots(replace(taken, since_ns_N=since_ns), "data")
    assert spot.fraction("run") == pytest.approx(0.9)


def test_time_is_counted_from_where_the_stage_began_and_only_in_the_steps_that_are_wanted():
    # GIVEN two samples in one stage, the first 5 ms after it began, and one of another step
    taken = samples(((LOOP, GET), 2), ((LOOP,), 1))
    # WHEN its places are searched THEN a sample stands for the time before it, and a function is named at its line
    first, second = spots(taken, "data", {1})
    assert (first.frame, first.samples, first.weight_ns) == (GET, 2, 10 * MS)
    assert (second.frame, second.weight_ns) == (LOOP, 5 * MS)
    assert spots(taken, "data", {7}) == spots(taken, "forward") == []


def document(**changes):
    columns = {name: [1] for name in ("time_ns", "step", "since_ns")}
    times = {"run_ns": [1], "waited_ns": [1]}
    columns |= {"schema_version": 1, "period_s": 0.005, "stage": ["data"], "source": ["x"]}
    return {
        "shared": {"frames": [{"name": "f\x1b[2J", "file": "/job/a.py", "line": 3}]},
        "profiles": [{"name": "MainThread", "samples": [[0]]}],
        "sftriage": {**columns, "threads": [times], "sampler": times, **changes},
    }


def read(tmp_path, stack):
    changed = document(source=[""] * len(stack))
    changed["shared"] = {"frames": [{"name": name, "file": file, "line": 3} for name, file in stack]}
    changed["profiles"] = [{"name": "MainThread", "samples": [list(range(len(stack)))]}]
    (tmp_path / "s.json").write_text(json.dumps(changed))
    return read_samples(tmp_path / "s.json").frames


RUN = ("_run_module_as_main", "<frozen runpy>")
OWNS = {
    "a script": ([("<module>", "/job/train.py"), ("fit", f"{LIB}trainer/loop.py")], [True, False]),
    "an installed program": (
        [RUN, ("<module>", f"{LIB}trainer/main.py"), ("fit", f"{LIB}trainer/loop.py"), ("mm", f"{LIB}torch/a.py")],
        [False, True, True, False],
    ),
    "an installed program by its command": (
        [("<module>", "/venv/bin/trainer"), ("main", f"{LIB}trainer/main.py"), ("mm", f"{LIB}torch/a.py")],
        [True, True, False],
    ),
}


@pytest.mark.parametrize(("stack", "own"), OWNS.values(), ids=OWNS)
def test_a_program_that_is_installed_is_the_programs_own(tmp_path, stack, own):
    # GIVEN a stack, the outermost function first WHEN it is read THEN the program's own package is no library
    assert [one.own for one in read(tmp_path, stack)] == own


def test_a_generator_in_a_line_is_of_the_function_that_has_the_line(tmp_path):
    names = ["f.<locals>.<genexpr>", "A.f.<locals>.<listcomp>", "f.<locals>.<lambda>", "f.<locals>.g"]
    read_names = [one.function for one in read(tmp_path, [(name, "/job/a.py") for name in names])]
    assert read_names == ["f", "A.f", "f.<locals>.<lambda>", "f.<locals>.g"]


def whole(**changes):
    """A file with a worker that has two threads."""
    made = document()
    times = {"run_ns": [1, 2], "waited_ns": [0, -1]}
    columns = {"worker": 1, "of": 2, "pid": 70, "period_s": 0.005, "time_ns": [3, 9], "sampler": times}
    made["profiles"] += [{"name": f"w\x1b{number}", "samples": [[0], []]} for number in range(2)]
    made["sftriage"]["workers"] = [columns | {"threads": [times, times]} | changes]
    made["sftriage"]["not_sampled"] = [{"pid": 9, "problem": "it has ended"}]
    return made


BROKEN = [
    {},
    {"shared": {"frames": []}},
    {**document(), "profiles": [{"name": "", "samples": [[0], [0]]}]},
    {**document(), "profiles": [{"name": "", "samples": [[7]]}]},
    document(threads=[{"run_ns": [1], "waited_ns": [1], "waits_in": ["do_wait", ""]}]),
    document(sampler={"run_ns": [], "waited_ns": [1]}),
    *(document(**{name: []}) for name in ("threads", "source")),
    *(document(**change) for change in ({"time_ns": [1, 2]}, {"schema_version": 2}, {"stage": [4]})),
    *(whole(**change) for change in ({"time_ns": [3]}, {"threads": []}, {"pid": "x"})),
    whole(sampler={"run_ns": [], "waited_ns": []}),
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_file_that_is_not_what_it_should_be_is_refused(tmp_path, broken):
    # GIVEN a changed file of stacks WHEN it is read THEN that is one error that names it
    (tmp_path / "s.json").write_text(json.dumps(broken))
    with pytest.raises(InputError, match=r"s\.json: not sampled stacks"):
        read_samples(tmp_path / "s.json")
    with pytest.raises(InputError, match="No such file"):
        read_samples(tmp_path / "none.json")


def test_a_file_has_each_worker_with_its_own_times(tmp_path):
    # GIVEN a file with a worker WHEN it is read THEN its rows are its own, and the trainer's are as they were
    (tmp_path / "s.json").write_text(json.dumps(whole()))
    found = read_samples(tmp_path / "s.json")
    (its,) = found.workers
    assert (found.time_ns_N, found.others, found.frames[0].function) == ((1,), (), "f?[2J")
    assert (its.number, its.pid, its.period_ns, its.time_ns_W) == (1, 70, 5 * MS, (3, 9))
    assert [one.name for one in its.threads] == ["w?0", "w?1"]
    assert its.threads[0].stacks_N == ((0,), ())
    assert found.not_sampled == ("it has ended",)
    # AND one of before, which has none, is read as it was
    (tmp_path / "s.json").write_text(json.dumps(document()))
    assert replace(found, workers=(), not_sampled=()) == read_samples(tmp_path / "s.json")


OPEN = Frame("Images.__getitem__", "/job/data.py", 60, "image = Image.open(path)")
DECODE = Frame("decode;all", "/job/data.py", 80, "total += 1")
MAIN = Frame("main", "/job/train.py", 14, "loss.backward()")
frames = st.builds(Frame, st.sampled_from("abc"), st.sampled_from(["x.py", "y.py"]), st.integers(1, 3))
folds = st.builds(
    Folded,
    st.lists(st.tuples(st.lists(frames, min_size=1, max_size=6).map(tuple), st.integers(0, 10**9)), max_size=12),
    st.just(1),
    st.integers(1, 20),
    st.none() | st.floats(0.0, 10.0),
)


def names(flame):
    return {one.path: (one.kind, one.frame.function) for one in flame.walk()}


@given(folds)
def test_what_a_function_took_is_what_it_called_and_where_it_stood(folded):
    root, took_s = flames(folded), folded.measured_s
    for one in root.walk():
        if one.kind != "line" and (one.kind == "function" or folded.weight_ns):
            assert sum(below.took_s for below in one.children) == pytest.approx(one.took_s)
    # AND all of it is the time of the stage, as it was measured where that is known
    whole_s = folded.weight_ns * 1e-9 / folded.steps if took_s is None else took_s
    assert root.took_s == pytest.approx(whole_s)


@given(folds, folds)
def test_the_difference_turns_around_with_the_sides(one, other):
    there = flames(one, other)
    back = {flame.path: flame for flame in flames(other, one).walk()}
    assert names(there) == {path: (flame.kind, flame.frame.function) for path, flame in back.items()}
    for flame in there.walk():
        assert flame.more_s == -back[flame.path].more_s
        assert [below.path for below in flame.children] == [below.path for below in back[flame.path].children]


def test_a_function_is_the_same_wherever_in_it_it_was_met_and_its_lines_are_below_it():
    # GIVEN a loop that was met 6 times asleep and twice at work on another line of the same function
    taken = samples(((LOOP, GET), 6), ((LOOP, OPEN), 2))
    root = flames(fold(taken, taken.training, "data"))
    (main,) = root.children
    (get,) = main.children
    # THEN the function is there once, with the line at which it was the most, and both lines are in it
    assert (main.frame.function, get.frame) == ("main", GET)
    assert [(one.kind, one.frame) for one in get.children] == [("line", GET), ("line", OPEN)]
    assert [one.took_s for one in get.children] == pytest.approx([0.030, 0.010])


def test_a_step_is_the_mean_over_all_steps_even_without_samples():
    taken = samples(((LOOP,), 8))
    taken = replace(taken, step_N=(1, 1, 1, 1, 4, 4, 4, 4))
    assert flames(fold(taken, taken.training, "data")).took_s == pytest.approx(0.040 / 4)
    assert flames(fold(taken, taken.training, "data", {4, 9})).took_s == pytest.approx(0.020)
    # AND a stage that no sample met took what it took, as far as that was measured
    missed = [fold(taken, taken.training, "forward", measured_s=took_s) for took_s in (None, 0.0005)]
    assert [flames(one).took_s for one in missed] == [0.0, 0.0005]


def test_of_very_many_stacks_the_least_are_put_together(monkeypatch):
    # GIVEN more different stacks than are kept
    monkeypatch.setattr(module, "MAX_STACKS", 3)
    taken = samples(*(((LOOP, replace(GET, line=line)), 6 - line) for line in range(1, 6)))
    # WHEN they are folded THEN nothing is lost
    folded = fold(taken, taken.training, "data")
    assert folded.stacks_ns[-1] == ((OTHERS,), 15_000_000)
    assert folded.weight_ns == 75_000_000
    # AND of a very deep one, its end counts for the last function that is kept
    monkeypatch.setattr(module, "MAX_DEPTH", 2)
    deep = samples(((LOOP, MAIN, GET), 1), ((LOOP, MAIN, OPEN), 1))
    (main,) = flames(fold(deep, deep.training, "data")).children[0].children
    assert (main.frame, main.took_s, [one.kind for one in main.children]) == (MAIN, 0.010, ["line"])


def test_collapsed_stacks_are_a_line_each_with_microseconds():
    taken = samples(((LOOP, GET), 6), ((LOOP, DECODE), 2), other=0.5)
    lines = list(collapsed(taken))
    assert lines == [
        "MainThread;data;main (train.py:12);Images.__getitem__ (data.py:57) 30000",
        "statistics;data;spin (statistics.py:4) 40000",
        "MainThread;data;main (train.py:12);decode:all (data.py:80) 10000",
    ]
