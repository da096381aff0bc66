"""Events in few bytes, a part of them at a time, and sets of time: nothing depends on how they were parted."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sftriage.errors import InputError
from sftriage.reduce import events, stages
from sftriage.reduce.events import (
    KERNEL,
    ON_HOST,
    OPERATOR,
    OTHER_NAMES,
    RUNTIME,
    EventColumns,
    EventQuery,
    Events,
    IntervalCollector,
    Intervals,
    Links,
    Packed,
    Trace,
    self_time,
    union,
)
from sftriage.reduce.inside import find
from sftriage.reduce.stages import outside_ns
from tests.unit.reduce.heavy import (
    ENGINE,
    GLOO,
    MAIN,
    document,
    event,
    events_of,
    mark,
    named_events,
    reduced,
    traces_of,
)

NUMBERS = st.lists(st.integers(-(2**61), 2**61) | st.integers(-5, 5), min_size=1, max_size=20)


@given(NUMBERS)
def test_numbers_of_any_range_come_back_unchanged(numbers):
    packed = Packed.of(np.array(numbers, dtype=np.int64))
    assert packed.numbers().tolist() == numbers
    some = np.arange(0, len(numbers), 2)
    assert packed.numbers(some).tolist() == numbers[::2]


KINDS, NAMES, TRACKS = st.sampled_from([OPERATOR, RUNTIME, KERNEL]), st.integers(0, 4), st.integers(0, 2)
EVENTS = st.lists(
    st.tuples(st.integers(0, 900), st.integers(0, 300), KINDS, NAMES, TRACKS, st.integers(-1, 5)), max_size=60
)


def trace_of(rows) -> Trace:
    made = EventColumns("t")
    for name in range(5):
        assert made.name_ids[f"name{name}"] == name
    for track in range(3):
        made.track_id("1", str(track))
    for row in rows:
        assert made.add(*row)
    return made.trace()


def rows_of(part):
    columns = (part.start_E, part.end_E - part.start_E, part.kind_E, part.name_E, part.track_E, part.link_E)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def in_small_parts(patch, block_events=3):
    """Have events packed and analysed a few at a time."""
    for module, name, value in (
        (events, "BLOCK_EVENTS", block_events),
        (events, "SLAB_EVENTS", 4),
        (events, "_SAMPLED", 2),
        (events, "MOST_SLABS", 100),
        (events, "_GATHERED", 3),
    ):
        patch.setattr(module, name, value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EVENTS, st.integers(1, 9), st.sets(st.integers(0, 4)), st.sets(st.integers(0, 2)))
def test_what_is_wanted_of_the_events_is_given_in_their_order(monkeypatch, rows, block, names, tracks):
    monkeypatch.setattr(events, "BLOCK_EVENTS", block)
    trace = trace_of(rows)
    # THEN those of some kinds, names and threads are the same as of all of them at once
    wanted = [row for row in rows if row[2] in ON_HOST and row[3] in names and row[4] in tracks]
    name_N, track_N = np.isin(np.arange(5), list(names)), np.isin(np.arange(3), list(tracks))
    assert rows_of(Events.joined(list(trace.parts(EventQuery(ON_HOST, name_N, track_N))))) == wanted
    assert rows_of(events_of(trace)) == rows


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EVENTS, st.integers(1, 9))
def test_slabs_of_time_hold_each_event_once_and_in_turn(monkeypatch, rows, block):
    in_small_parts(monkeypatch, block)
    slabs = list(trace_of(rows).slabs(EventQuery((OPERATOR, KERNEL))))
    # THEN each begins where the one before ended, and the last has no end
    since_ns = -1
    for until_ns, part in slabs:
        assert all(since_ns <= start < until_ns for start in part.start_E.tolist())
        since_ns = until_ns
    assert since_ns == events.ALWAYS_NS
    assert sorted(row for _, part in slabs for row in rows_of(part)) == sorted(row for row in rows if row[2] != RUNTIME)


NAMED = (
    ("aten::linear", "cpu_op"),
    ("aten::to", "cpu_op"),
    ("autograd::engine::evaluate_function: X", "cpu_op"),
    ("gloo:all_reduce", "user_annotation"),
    ("cudaLaunchKernel", "cuda_runtime"),
    ("cudaMemcpyAsync", "cuda_runtime"),
    ("train.py(3): load <x at 0x7f01>", "python_function"),
    ("train.py(3): load <x at 0x7f02>", "python_function"),
    ("gemm", "kernel"),
    ("Memcpy HtoD", "gpu_memcpy"),
    ("Memcpy DtoH", "gpu_memcpy"),
    ("ncclDevKernel_AllReduce", "kernel"),
    ("Optimizer.step#SGD", "user_annotation"),
)
ROWS = st.lists(
    st.tuples(
        st.sampled_from(NAMED),
        st.integers(0, 990),
        st.integers(0, 120),
        st.sampled_from([MAIN, MAIN, ENGINE, GLOO]),
        st.integers(0, 6),
    ),
    max_size=40,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(ROWS, st.booleans())
def test_stages_and_findings_do_not_depend_on_how_the_events_were_parted(tmp_path, monkeypatch, rows, marked):
    # GIVEN any events, in steps with or without marks of stages
    all_events = [mark(f"ProfilerStep#{n}", n * 250, 240) for n in range(4)]
    all_events += [mark("sftriage:forward", n * 250 + 20, 200) for n in range(4) if marked]
    for (name, category), start, length, thread, link in rows:
        all_events.append(event(name, start, length, category, tid=thread, correlation=link))

    def worked_out():
        one = reduced(tmp_path / "t.json", all_events, rank=0, world_size=2)
        found = [find(one, stage).model_dump() for stage in one.schema.stages]
        return one.schema, one.durations_ns_NS.tolist(), outside_ns(one.steps, one.spans, one.schema).tolist(), found

    with monkeypatch.context() as patch:
        whole = worked_out()
        in_small_parts(patch)
        assert worked_out() == whole


@given(st.lists(st.lists(st.integers(-3, 9) | st.integers(2**33, 2**33 + 3))), st.lists(st.integers(-3, 2**34)))
def test_links_are_a_set(parts, links):
    known = {link for part in parts for link in part if link >= 0}
    links = [*links, *range(-3, 9), *range(2**33, 2**33 + 3)]
    have = Links(np.array(part, dtype=np.int64) for part in parts).have(np.array(links, dtype=np.int64))
    assert have.tolist() == [link in known for link in links]


def test_names_without_end_are_counted_together_but_never_steps_and_stages(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "MAX_NAMES", 5)
    operators = [event(f"op{n}", 10 * n, 5) for n in range(20)]
    marks = [mark("sftriage:data", 0, 200), mark("ProfilerStep#1", 0, 200), mark("sftriage:h2d", 200, 10)]
    one = reduced(tmp_path / "t.json", [*operators, *marks])
    assert (one.schema.stages, one.steps.number_N.tolist()) == (("data", "other"), [1])
    # AND events without a name of their own share one, with a note
    assert [(share.name, share.calls) for share in find(one, "data").shares][:2] == [(OTHER_NAMES, 15), ("op0", 1)]
    assert f"more than 8 different names: the others count as '{OTHER_NAMES}'" in " ".join(one.notes)


def test_names_that_are_long_are_bounded_by_their_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "MAX_NAMES_BYTES", 10_000)
    (trace,) = traces_of(tmp_path / "t.json", document([event(f"{n}{'x' * 3000}", n, 1) for n in range(10)]))
    assert len(trace.names) == 4
    assert len(events_of(trace)) == 10


@pytest.mark.parametrize(
    ("limit", "some", "message"),
    [
        ((events, "MAX_TRACKS", 3), [event("a", n, 1, tid=n) for n in range(5)], "more than 3 threads"),
        ((stages, "MAX_STEPS", 3), [mark(f"ProfilerStep#{n}", 20 * n, 9) for n in range(9)], "3 marks of steps"),
        ((events, "MAX_OPEN", 5), [mark("sftriage:data", n, 500 - n) for n in range(40)], "5 events are open at the"),
        ((events, "MOST_SLABS", 2), [mark("sftriage:data", 5, n) for n in range(1, 40)], "8 events begin at about one"),
        ((events, "MAX_HALVES_OPEN", 5), [{**event("a", n, 1), "ph": "B"} for n in range(40)], "5 events begin and do"),
    ],
    ids=["threads", "steps", "open events", "one moment", "open halves"],
)
def test_what_cannot_be_bounded_is_refused_with_the_reason(tmp_path, monkeypatch, limit, some, message):
    in_small_parts(monkeypatch)
    monkeypatch.setattr(*limit)
    with pytest.raises(InputError, match=message) as caught:
        reduced(tmp_path / "t.json", [mark("ProfilerStep#1000", 0, 900), *some])
    assert str(caught.value).startswith(str(tmp_path / "t.json"))


def test_pieces_that_stay_apart_are_bounded():
    gathering = IntervalCollector("t.json", 3)
    gathering.add(np.array([0, 10, 20, 5]), np.array([5, 12, 22, 10]))
    assert gathering.spans().start_K.tolist() == [0, 20]
    gathering.add(np.array([30, 40]), np.array([31, 41]))
    with pytest.raises(InputError, match=r"t.json: its stages are in more than 3 pieces"):
        gathering.spans()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 60), st.booleans(), st.integers(1, 2)), max_size=40))
def test_begin_and_end_events_are_paired_alike_in_slabs(tmp_path, monkeypatch, some):
    made = [
        {"ph": "E" if ends else "B", "name": f"n{number}", "pid": 1, "tid": thread, "ts": moment}
        for number, (moment, ends, thread) in enumerate(some)
    ]

    def paired():
        (trace,) = traces_of(tmp_path / "t.json", document(made))
        return named_events(trace), trace.notes

    with monkeypatch.context() as patch:
        whole = paired()
        in_small_parts(patch)
        assert paired() == whole


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=12)


def arrays(events):
    start = np.array([start for start, _ in events], dtype=np.int64)
    return start, start + np.array([length for _, length in events], dtype=np.int64)


def moments(spans: Intervals) -> set[int]:
    return {t for start, end in zip(spans.start_K, spans.end_K, strict=True) for t in range(start, end)}


def covered(events) -> set[int]:
    return {t for start, length in events for t in range(start, start + length)}


@given(SPANS)
def test_each_moment_that_is_covered_belongs_to_the_event_that_began_last(events):
    # GIVEN any events of a thread, nested, crossing, empty or apart
    start, end = arrays(events)
    pieces = self_time(start, end)
    # THEN the pieces are disjoint, and sum to what the events cover
    assert (pieces.end_P - pieces.start_P).sum() == len(covered(events))
    assert (pieces.end_P > pieces.start_P).all()
    assert (pieces.start_P[1:] >= pieces.end_P[:-1]).all()
    # AND each moment is of the one that began last of those open, the shortest of those that began together
    for owner, begin, finish in zip(pieces.owner_P, pieces.start_P, pieces.end_P, strict=True):
        for t in range(begin, finish):
            open_then = [(s, -length) for s, length in events if s <= t < s + length]
            assert (start[owner], start[owner] - end[owner]) == max(open_then)


@given(SPANS, SPANS, st.integers(0, 100), st.integers(0, 100))
def test_spans_are_sets_of_moments(some, others, begin, finish):
    a, b = union(*arrays(some)), union(*arrays(others))
    assert moments(a) == covered(some)
    assert moments(a.clipped(b)) == covered(some) & covered(others)
    assert moments(a.without(b)) == covered(some) - covered(others)
    assert a.total_ns == len(covered(some))
    assert set(np.flatnonzero(a.hold(np.arange(100))).tolist()) == covered(some)
    begin, finish = sorted((begin, finish))
    assert a.within(np.array([begin]), np.array([finish])).tolist() == [len(covered(some) & set(range(begin, finish)))]
