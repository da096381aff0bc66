"""Traces of ranks laid side by side for the viewer, and where that opens."""

import gzip
import json
from dataclasses import replace
from urllib.parse import parse_qs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.model.captures import Reproduced
from sftriage.reduce.opening import FirstView, lay_out, marks_of, tracks_of
from sftriage.reduce.samples import Frame, StackSamples, WorkerSamples
from sftriage.traces.manifest import ReproducedInfo
from tests.unit.reduce.test_samples import thread


def marks(start_us, steps):
    """Steps of this length, whose `data` takes this much of it, one after the other: microseconds."""
    for number, (length, data) in enumerate(steps):
        about = {"ph": "X", "cat": "user_annotation", "pid": 7, "tid": 8}
        yield {**about, "name": f"ProfilerStep#{number}", "ts": start_us, "dur": length}
        yield {**about, "name": "sftriage:data", "ts": start_us + 0.25, "dur": data}
        start_us += length


@pytest.fixture
def written(tmp_path, make_manifest):
    """A manifest, and a trace of the same process number on every host."""

    def written(rank, role, steps, *, base_ns, start_us=1000.5, fault_steps=()):
        found = Reproduced("partly", len(steps), len(fault_steps), 0.0, 0.0, fault_steps)
        manifest = make_manifest(f"c-{rank}", rank=rank, role=role)
        manifest = manifest.model_copy(update={"reproduced": ReproducedInfo.of(found) if fault_steps else None})
        names = {"process_name": "python", "process_labels": "GPU 0", "thread_name": "thread 8 (python)"}
        events = [
            {"ph": "M", "name": name, "ts": 0, "pid": 7, "tid": 8, "args": {name.partition("_")[2]: value}}
            for name, value in names.items()
        ]
        events += [
            *marks(start_us, steps),
            {"ph": "s", "name": "ac2g", "id": 5, "cat": "ac2g", "pid": 7, "tid": 8, "ts": start_us},
        ]
        path = tmp_path / f"{rank}.json.gz"
        path.write_bytes(gzip.compress(json.dumps({"baseTimeNanoseconds": base_ns, "traceEvents": events}).encode()))
        return manifest, path

    return written


def events_in(path):
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_two_ranks_are_distinct_and_on_one_clock(tmp_path, written):
    # GIVEN a suspect and a control whose processes have one number, and whose clocks have bases a microsecond apart
    suspect = written(2, "suspect", [(100.0, 80.0)], base_ns=10**18)
    control = written(0, "control", [(100.0, 5.0)], base_ns=10**18 + 1000)
    target = tmp_path / "both.json.gz"
    assert lay_out([suspect, control], target) is not None
    events = events_in(target)
    # THEN each has a process, a thread and a flow of its own, which have its name
    called = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert list(called.values()) == ["rank 2 (suspect) GPU 0", "rank 0 (control) GPU 0"]
    threads = [one["args"]["name"] for one in events if one["name"] == "thread_name"]
    assert threads == ["rank 2 suspect", "rank 0 control"]
    assert len({one["id"] for one in events if one["ph"] == "s"}) == 2
    began = {called[one["pid"]]: one["ts"] for one in events if one["name"] == "ProfilerStep#0"}
    assert list(began.values()) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("steps", "fault_steps", "start_us", "length_us"),
    [
        # the step in which the stage is longest
        ([(100.0, 10.0), (200.0, 80.125), (100.0, 70.0)], (), 100.25, 80.125),
        # of those that have the fault, where they are known
        ([(100.0, 10.0), (200.0, 80.0), (100.0, 70.0)], (0, 2), 300.25, 70.0),
    ],
)
def test_it_opens_on_the_suspect_stage_where_the_fault_is(tmp_path, written, steps, fault_steps, start_us, length_us):
    trace = written(2, "suspect", steps, base_ns=0, fault_steps=fault_steps)
    spot = lay_out([trace], tmp_path / "t")
    assert (spot.selected_ns, spot.selected_length_ns) == (round(start_us * 1000), round(length_us * 1000))
    # AND exactly that slice is in what the viewer gets
    found = [one for one in events_in(tmp_path / "t") if (one.get("ts"), one.get("dur")) == (start_us, length_us)]
    assert [one["name"] for one in found] == ["sftriage:data"]
    assert 0 <= spot.first_ns < spot.selected_ns < spot.selected_ns + spot.selected_length_ns <= spot.last_ns


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"traceEvents": [1]}', '{"traceEvents": []}'),
        '{"traceEvents": [{"ph": "X", "ts": 1, "pid": [], "tid": {}}]}',
        '{"traceEvents": [{"ph": "X", "ts": 1}]}',
    ],
)
def test_what_is_no_trace_with_steps_is_not_laid_out(tmp_path, make_manifest, text):
    path = tmp_path / "trace.json"
    path.write_text(text)
    assert lay_out([(make_manifest("c-1"), path)], tmp_path / "target") is None
    assert not (tmp_path / "target").exists()


NAMES = ("startupCommands", "ts", "dur", "visStart", "visEnd")


def test_a_link_says_what_to_select_to_show_to_expand_and_to_pin():
    (commands,), *found = map(parse_qs(FirstView(5, 20, 0, 100).parameters).get, NAMES)
    assert found == [["5"], ["20"], ["0"], ["100"]]
    assert [one["id"].rpartition(".")[2] for one in json.loads(commands)] == ["ExpandTracksByRegex", "PinTracksByRegex"]


FRAMES = tuple(Frame(name, f"/job/{name}.py", 7, f"{name}()") for name in ("main", "load", "decode", "step"))
MAIN, LOAD, DECODE, STEP = range(4)


def samples(*stacks, stages=(), since=(), steps=(), workers=()):
    """Samples of one thread, one every 10 ns from 100 ns on."""
    n, times_ns = len(stacks), tuple(range(100, 100 + 10 * len(stacks), 10))
    columns = times_ns, tuple(steps) or (1,) * n, tuple(stages) or ("data",) * n, tuple(since) or (0,) * n
    return StackSamples(FRAMES, 10, *columns, thread(stacks, times_ns), (), thread((), times_ns), workers)


@pytest.fixture
def stacks():
    """Sampled stacks of two processes, the first of which loads from 100 to 110 ns."""
    steps = thread([(STEP,)], (50,), name="DataLoader worker 0 (pid 9)")
    worker = WorkerSamples(0, 9, 1e-8, (50,), (steps,), thread((), (50,)))
    found = samples((), (LOAD,), stages=("forward", "data"), since=(90, 100), steps=(4, 4), workers=(worker,))
    return replace(found, others=(thread([(), ()], found.time_ns_N, name="pins"),))


def clocked(trace, **clock):
    manifest, path = trace
    return manifest.model_copy(update={"capture": manifest.capture.model_copy(update={"clock": clock})}), path


def test_sampled_stacks_are_tracks_of_the_same_trace_on_its_clock(tmp_path, written, stacks):
    # GIVEN a trace whose stage begins at 10 s and 250 ns by the host's clock, when that of the stacks says 100 ns
    trace = clocked(written(2, "suspect", [(1.0, 0.01)], base_ns=10**10, start_us=0.0), mono_ns=0, wall_ns=10**10 + 150)
    lay_out([trace], tmp_path / "t", {"c-2": stacks})
    events = events_in(tmp_path / "t")
    # THEN what was sampled in the stage is where the stage is, in the rank's own process, on a track of its own
    (stage,) = (one for one in events if one["name"] == "sftriage:data")
    (found,) = (one for one in events if one["name"] == "load (load.py:7)")
    assert (found["ts"], found["dur"], found["pid"]) == (stage["ts"], stage["dur"], stage["pid"])
    assert found["tid"] != stage["tid"]
    called = {one["args"]["name"] for one in events if one["name"] in ("process_name", "thread_name")}
    assert called >= {"rank 2 suspect stacks", "stacks pins", "rank 2 (suspect) DataLoader worker 0 (pid 9)", "stacks"}


def test_stacks_alone_are_a_trace_with_steps_and_stages(tmp_path, make_manifest, stacks):
    # GIVEN a capture of stacks alone: there is no trace beside
    (tmp_path / "stacks.json").write_text("{}")
    trace = clocked((make_manifest("c-1"), tmp_path / "stacks.json"), mono_ns=0, wall_ns=10**9)
    # WHEN it is laid out THEN it opens on the suspect stage, and what was sampled is there
    spot = lay_out([trace], tmp_path / "t", {"c-1": stacks})
    assert (spot.selected_ns, spot.selected_length_ns) == (10, 10)
    names = [one["name"].partition(" ")[0] for one in events_in(tmp_path / "t") if one["ph"] == "X"]
    assert names == ["sftriage:forward", "sftriage:data", "ProfilerStep#4", "load", "step"]
    # AND where the clocks are not known, there is nothing to lay it out by
    assert lay_out([(make_manifest("c-1").model_copy(), tmp_path / "stacks.json")], tmp_path / "n") is None


def shown(slices):
    return [(one.name.partition(" ")[0], one.start_ns, one.length_ns) for one in slices]


def test_equal_frames_of_consecutive_samples_are_one_slice():
    # GIVEN a thread that loads, decodes in between, is not there, and steps
    (track,) = tracks_of(samples((MAIN, LOAD), (MAIN, LOAD, DECODE), (MAIN, LOAD), (), (MAIN, STEP)))
    # WHEN it is laid out THEN a function lasts as long as it was met, outer ones before those in them
    outer = [("main", 90, 30), ("load", 90, 30)]
    assert shown(track.slices) == [*outer, ("decode", 100, 10), ("main", 130, 10), ("step", 130, 10)]
    assert track.slices[2].name == "decode (decode.py:7)"
    assert track.slices[2].args == {"file": "/job/decode.py:7", "source": "decode()"}


def test_a_stage_has_no_stack_from_before_it_began():
    # GIVEN a stage that began 3 ns before its first sample, and a step after it WHEN they are laid out
    where = {"stages": ("data", "forward", "data"), "since": (80, 107, 115), "steps": (4, 4, 5)}
    sampled = samples((MAIN, LOAD), (MAIN, STEP), (MAIN, LOAD), **where)
    (track,) = tracks_of(sampled)
    assert shown(track.slices) == [
        ("main", 90, 30),
        ("load", 90, 17),
        ("step", 107, 8),
        ("load", 115, 5),
    ]
    # AND steps and stages are as long as until the next ones that were met
    assert [(one.name, one.start_ns, one.length_ns) for one in marks_of(sampled)] == [
        ("sftriage:data", 80, 27),
        ("sftriage:forward", 107, 8),
        ("ProfilerStep#4", 80, 35),
        ("sftriage:data", 115, 5),
        ("ProfilerStep#5", 115, 5),
    ]


def test_a_worker_is_a_process_of_its_own_with_its_own_times():
    # GIVEN a worker with two threads, sampled at other times than its trainer
    called = "DataLoader worker 3 (pid 70)"
    named = ((LOAD, called), (STEP, f"{called}: QueueFeederThread"))
    threads = tuple(thread([(frame,)], (50,), name=name) for frame, name in named)
    worker = WorkerSamples(3, 70, 4e-9, (50,), threads, thread((), (50,)))
    # WHEN they are laid out THEN its tracks come last
    training, *others = tracks_of(samples((MAIN,), workers=(worker,)))
    assert (training.name, training.process) == ("MainThread", "")
    assert [(one.name, one.process) for one in others] == [("", called), ("QueueFeederThread", called)]
    assert shown(others[0].slices) == [("load", 46, 4)]


@given(st.lists(st.lists(st.sampled_from(range(4)), max_size=4).map(tuple), max_size=12))
def test_at_each_sample_exactly_its_stack_is_open(stacks):
    (track,) = tracks_of(samples(*stacks))
    assert (not marks_of(samples(*stacks))) == (not stacks)
    for number, stack in enumerate(stacks):
        middle_ns = 95 + 10 * number
        around = [one for one in track.slices if one.start_ns <= middle_ns < one.start_ns + one.length_ns]
        assert [one.name.partition(" ")[0] for one in around] == [FRAMES[frame].function for frame in stack]
