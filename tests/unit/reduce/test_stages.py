"""From events to the stages of each step: by marks, by names, by what operators give away; always the whole step."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sftriage.errors import InputError
from sftriage.reduce.stages import Names, load_names, outside_ns, reduce_trace
from tests.unit.reduce.heavy import ENGINE, GLOO, MAIN, document, event, job_events, mark, reduced, traces_of


def microseconds(one):
    """Stage by stage what each step took."""
    return {
        stage: [value / 1000 for value in its_N.tolist()]
        for stage, its_N in zip(one.schema.stages, one.durations_ns_NS.T, strict=True)
    }


def test_our_own_marks_are_the_stages_and_what_is_in_none_is_other(tmp_path):
    # GIVEN two steps with sftriage's marks, a stage inside a stage, and other names that would mark stages too
    events = [
        mark("ProfilerStep#7", 0, 100),
        mark("sftriage:data", 5, 20),
        mark("sftriage:forward", 30, 40),
        mark("sftriage:h2d", 35, 10),
        mark("enumerate(DataLoader)#x", 30, 40),
        mark("Optimizer.step#SGD.step", 80, 10),
        mark("ProfilerStep#8", 110, 50),
        mark("sftriage:forward", 120, 10),
    ]
    random.Random(5).shuffle(events)
    one = reduced(tmp_path / "t.json", events, rank=1, world_size=1)
    # THEN time is self time, stages stand in the order of the step, and each step is whole
    assert (one.origin, one.schema.stages) == ("sftriage", ("data", "h2d", "forward", "other"))
    assert microseconds(one) == {"data": [20, 0], "forward": [30, 10], "h2d": [10, 0], "other": [40, 40]}
    assert one.steps.number_N.tolist() == [7, 8]
    assert one.between_ns_N.tolist() == [0, 10_000]


SPANS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 120), st.integers(0, 5)), max_size=25)
ENGINES = "autograd::engine::evaluate_function"
NAMES = ("sftriage:a", "sftriage:b", "forward", "enumerate(DataLoader)#x", "aten::to", ENGINES)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spans=SPANS, own=st.booleans(), threads=st.lists(st.sampled_from([MAIN, ENGINE]), min_size=25, max_size=25))
def test_overlapping_stages_sum_to_the_step(tmp_path, spans, own, threads):
    # GIVEN marks and operators anywhere, in two threads, across the ends of steps
    events = [mark("ProfilerStep#1", 50, 100), mark("ProfilerStep#2", 150, 70), mark("ProfilerStep#3", 260, 90)]
    for (start, length, name), tid in zip(spans, threads, strict=False):
        name = name if own else max(name, 2)
        events.append(event(NAMES[name], start, length, "user_annotation" if name < 4 else "cpu_op", tid=tid))
    one = reduced(tmp_path / "t.json", events)
    # THEN no stage is negative, all of them are the step to the nanosecond, and outside time is part of `other`
    assert (one.durations_ns_NS >= 0).all()
    assert (one.durations_ns_NS.sum(axis=1) == one.steps.end_N - one.steps.start_N).all()
    assert (outside_ns(one.steps, one.spans, one.schema).sum(axis=1) <= one.durations_ns_NS[:, -1]).all()


def test_names_of_the_field_and_what_operators_give_away(tmp_path):
    # GIVEN a trace without marks: a data loader, a copy to the device, operators, an engine in another thread that ends
    # in a collective, an optimiser
    events = [
        mark("ProfilerStep#3", 0, 1000),
        mark("ProfilerStep#3", 5, 700, pid=0, tid=7) | {"cat": "gpu_user_annotation"},
        event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 90),
        event("aten::to", 110, 40),
        event("cudaMemcpyAsync", 115, 5, "cuda_runtime", tid=-77, correlation=9),
        event("Memcpy HtoD (Pinned -> Device)", 130, 30, "gpu_memcpy", tid=7, pid=0, correlation=9),
        event("aten::to", 160, 10),
        event("aten::linear", 200, 50),
        mark("Optimizer.zero_grad#SGD.zero_grad", 300, 20),
        event("autograd::engine::evaluate_function: A", 400, 100, tid=ENGINE),
        event("autograd::engine::evaluate_function: B", 520, 80, tid=ENGINE),
        mark("gloo:all_reduce", 590, 60, tid=GLOO),
        mark("Optimizer.step#SGD.step", 700, 200),
    ]
    one = reduced(tmp_path / "t.json", events, rank=0, world_size=2)
    # THEN a copy counts where it brings something to the device; forward is what runs up to backward, which lasts until
    # its collective is over; the device's copy of the step does not count
    lasts_us = {"data": [90], "h2d": [40], "forward": [220], "backward": [250], "optimizer": [220], "other": [180]}
    assert microseconds(one) == lasts_us
    assert (one.origin, one.schema.sync) == ("names", ("backward",))
    # AND of `other`, what lies before the sync stage's end is known
    assert outside_ns(one.steps, one.spans, one.schema).tolist() == [[30_000]]


def test_several_backward_passes_of_a_step_are_separate(tmp_path):
    # GIVEN two micro-batches in one step, the engine on the training thread
    engine = "autograd::engine::evaluate_function: X"
    events = [
        mark("ProfilerStep#1", 0, 400),
        event("aten::linear", 10, 80),
        event(engine, 100, 40),
        event("aten::mm", 110, 20),
        event(engine, 145, 40),
        event("aten::linear", 200, 80),
        event(engine, 300, 50),
    ]
    one = reduced(tmp_path / "t.json", events)
    assert microseconds(one) == {"forward": [90 + 100], "backward": [85 + 50], "other": [75]}


def test_a_map_says_what_marks_steps_and_stages(tmp_path):
    # GIVEN a trace with a user's own names, and a map
    path = tmp_path / "map.yaml"
    path.write_text('step: "iteration *"\nstages:\n  load: ["read *"]\n  train: ["fit", "grad[12]"]\nsync: [train]\n')
    events = [
        mark("iteration 41", 0, 100),
        mark("read a.bin", 0, 30),
        mark("fit", 40, 20),
        mark("grad2", 60, 10),
        mark("grad3", 70, 10),
        mark("iteration 42", 100, 50),
    ]
    one = reduced(tmp_path / "t.json", events, load_names(path))
    assert (one.origin, one.schema.sync, one.steps.number_N.tolist()) == ("map", ("train",), [41, 42])
    assert microseconds(one) == {"load": [30, 0], "train": [30, 0], "other": [40, 50]}


@pytest.mark.parametrize(
    ("events", "names", "steps"),
    [
        # Cut where something ends.
        ([mark("Optimizer.step#", n, 10) for n in (100, 200, 350)], Names(step_end="Opt*"), {0: 100_000, 1: 150_000}),
        # Of whole microseconds, that touch.
        ([mark("ProfilerStep#1", 0, 101), mark("ProfilerStep#2", 100, 50)], None, {1: 101_000, 2: 49_000}),
        # As operators, in 2021.
        ([event("ProfilerStep#5", 0, 10, "Operator", tid="25738")], None, {5: 10_000}),
    ],
)
def test_steps_are_found_by_their_marks(tmp_path, events, names, steps):
    one = reduced(tmp_path / "t.json", events, names)
    assert dict(zip(one.steps.number_N.tolist(), (one.steps.end_N - one.steps.start_N).tolist(), strict=True)) == steps


@pytest.mark.parametrize(
    ("events", "names", "message"),
    [
        ([event("aten::x", 0, 1)], Names(), "no ProfilerStep#N.*no repeated range"),
        ([mark("Optimizer.step#Adam.step", n, 1) for n in (0, 5)], Names(), r"'Optimizer.step#Adam.step' \(2 times\)"),
        ([mark("ProfilerStep#1", 0, 5)], Names(step="it*"), "it has no 'it"),
        ([mark("ProfilerStep#1", 0, 5), mark("ProfilerStep#1", 9, 5)], Names(), "occurs twice"),
        ([mark("ProfilerStep#1", 0, 0)], Names(), "no duration"),
        ([mark("end", 0, 1)], Names(step_end="end"), "does not bound a step"),
    ],
)
def test_a_trace_without_steps_is_refused_with_what_could_mark_them(tmp_path, events, names, message):
    (trace,) = traces_of(tmp_path / "t.json", document(events))
    with pytest.raises(InputError, match=message):
        reduce_trace(trace, names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages: [a]", "stages"),
        ("stage: {}", "Extra inputs"),
        ("stages: {'a b': [x]}", "stage name"),
        ("stages: {a: [x]}\nsync: [b]", "not one of the stages"),
        ("step: a\nstep_end: b", "one of them"),
        ("{", "not YAML"),
    ],
)
def test_a_map_that_is_none_is_refused(tmp_path, text, message):
    path = tmp_path / "map.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_names(path)


def test_which_stages_synchronise_shows_in_their_collectives(tmp_path):
    one = reduced(tmp_path / "t.json", job_events(0), rank=0, world_size=4)
    assert one.schema.sync == ("backward",)
    alone = reduced(tmp_path / "t.json", job_events(0), rank=0, world_size=1)
    assert alone.schema.sync == ()
