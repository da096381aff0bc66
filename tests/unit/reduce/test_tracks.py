"""Sampled stacks as nested slices, and the steps and the stages that they know."""

from hypothesis import given
from hypothesis import strategies as st

from sftriage.reduce.opening import tracks_of
from sftriage.reduce.samples import Frame, StackSamples, ThreadSamples, WorkerSamples

FRAMES = tuple(Frame(name, f"/job/{name}.py", 7, f"{name}()") for name in ("main", "load", "decode", "step"))
MAIN, LOAD, DECODE, STEP = range(4)


def thread(stacks, name="MainThread"):
    unknown = (-1,) * len(stacks)
    return ThreadSamples(name, tuple(stacks), unknown, unknown)


def samples(*stacks, stages=(), since=(), steps=(), workers=()):
    """Samples of one thread, one every 10 ns from 100 ns on."""
    n = len(stacks)
    return StackSamples(
        frames=FRAMES,
        period_ns=10,
        time_ns_N=tuple(range(100, 100 + 10 * n, 10)),
        step_N=tuple(steps) or (1,) * n,
        stage_N=tuple(stages) or ("data",) * n,
        since_ns_N=tuple(since) or (0,) * n,
        training=thread(stacks),
        others=(),
        sampler=thread([()] * n),
        workers=workers,
    )


def told(slices):
    return [(one.name.partition(" ")[0], one.start_ns, one.length_ns) for one in slices]


def test_equal_frames_of_consecutive_samples_are_one_slice():
    # GIVEN a thread that loads, decodes in between, is not there, and steps
    found = tracks_of(samples((MAIN, LOAD), (MAIN, LOAD, DECODE), (MAIN, LOAD), (), (MAIN, STEP)))
    # WHEN it is laid out THEN a function lasts as long as it was met, outer ones before those in them
    (track,) = found.tracks
    assert told(track.slices) == [
        ("main", 90, 30),
        ("load", 90, 30),
        ("decode", 100, 10),
        ("main", 130, 10),
        ("step", 130, 10),
    ]
    # AND its line, file and source are said
    assert track.slices[2].name == "decode (decode.py:7)"
    assert track.slices[2].args == {"file": "/job/decode.py:7", "source": "decode()"}


def test_a_stage_has_no_stack_from_before_it_began():
    # GIVEN a stage that began 3 ns before its first sample, and a step after it WHEN they are laid out
    found = tracks_of(
        samples(
            (MAIN, LOAD), (MAIN, STEP), (MAIN, LOAD), stages=("data", "forward", "data"), since=(80, 107, 115),
            steps=(4, 4, 5),
        )
    )  # fmt: skip
    # THEN its functions begin with it
    assert told(found.tracks[0].slices) == [("main", 90, 30), ("load", 90, 17), ("step", 107, 8), ("load", 115, 5)]
    # AND steps and stages are as long as until the next ones that were met
    assert [(one.name, one.start_ns, one.length_ns) for one in found.marks] == [
        ("sftriage:data", 80, 27),
        ("sftriage:forward", 107, 8),
        ("ProfilerStep#4", 80, 35),
        ("sftriage:data", 115, 5),
        ("ProfilerStep#5", 115, 5),
    ]


def test_a_worker_is_a_process_of_its_own_with_its_own_times():
    # GIVEN a worker with two threads, sampled at other times than its trainer
    called = "DataLoader worker 3 (pid 70)"
    threads = thread([(LOAD,)], called), thread([(STEP,)], f"{called}: QueueFeederThread")
    worker = WorkerSamples(3, 70, 4, (50,), threads, thread([()]))
    # WHEN they are laid out THEN its tracks come last
    training, *others = tracks_of(samples((MAIN,), workers=(worker,))).tracks
    assert (training.name, training.process) == ("MainThread", "")
    assert [(one.name, one.process) for one in others] == [("", called), ("QueueFeederThread", called)]
    assert told(others[0].slices) == [("load", 46, 4)]


def test_nothing_sampled_is_nothing_to_lay_out():
    found = tracks_of(samples())
    assert [one.slices for one in found.tracks] == [()]
    assert found.marks == ()


@given(st.lists(st.lists(st.sampled_from(range(4)), max_size=4).map(tuple), max_size=12))
def test_at_each_sample_exactly_its_stack_is_open(stacks):
    # GIVEN any stacks WHEN they are laid out THEN the slices around each sample are its frames, from the outermost on
    (track,) = tracks_of(samples(*stacks)).tracks
    for number, stack in enumerate(stacks):
        middle_ns = 95 + 10 * number
        around = [one for one in track.slices if one.start_ns <= middle_ns < one.start_ns + one.length_ns]
        assert [one.name.partition(" ")[0] for one in around] == [FRAMES[frame].function for frame in stack]
