"""Reading traces: Kineto's JSON in any order and shape, Nsight exports, and words for what cannot be read."""

import gzip
import io
import json
import sqlite3
import tarfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sftriage.errors import InputError
from sftriage.reduce.events import KERNEL, RUNTIME
from sftriage.reduce.inside import find
from sftriage.reduce.reading import read_traces
from sftriage.reduce.stages import reduce_trace
from sftriage.traces import jsonstream
from tests.unit.reduce.heavy import EPOCH_NS, document, event, events_of, mark, named_events, traces_of, write

STEP = mark("ProfilerStep#5", 100.0, 50.5)
OPERATOR = event("aten::linear", 110.25, 20.125)
ABOUT = {"distributedInfo": {"rank": 3, "world_size": 8}, "baseTimeNanoseconds": EPOCH_NS}
NASTY = ('},{"ph": "X"', "}]}", '\\"},\n  {', "[{", "\\", 'é"')
"""Brackets and separators, in names."""
KEYS = st.text(max_size=4) | st.just("traceEvents")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8) | st.sampled_from(NASTY),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(
    named=st.lists(st.tuples(st.text(max_size=10) | st.sampled_from(NASTY), VALUES), max_size=12),
    beside=st.dictionaries(st.text(max_size=6), VALUES, max_size=4),
    style=st.sampled_from([(None, (",", ":")), (None, (", ", ": ")), (None, (" ,\n ", " :\r\n ")), ("\t", None)]),
    piece_bytes=st.integers(8, 400),
    file=st.sampled_from(["trace.json", "trace.json.gz", "named.anything"]),
)
def test_the_events_are_those_of_a_json_parser(tmp_path, monkeypatch, named, beside, style, piece_bytes, file):
    # GIVEN any JSON beside the events and in their arguments, rank and clock before or after them
    beside = {f"_{key}": value for key, value in beside.items()}
    events = [{**event(name, n, 1), "args": args} for n, (name, args) in enumerate(named)]
    indent, separators = style
    made = {**beside, "traceEvents": events, **ABOUT} if piece_bytes % 2 else {**ABOUT, "traceEvents": events, **beside}
    whole = json.dumps(made, indent=indent, separators=separators, ensure_ascii=False)
    monkeypatch.setattr(jsonstream, "PIECE_BYTES", piece_bytes)
    (trace,) = traces_of(tmp_path / file, whole.encode())
    its = [(name, EPOCH_NS + 1000 * n, EPOCH_NS + 1000 * (n + 1), "10") for n, (name, _) in enumerate(named)]
    assert named_events(trace) == sorted(its)
    assert (trace.rank, trace.world_size, trace.absolute, trace.notes) == (3, 8, True, ())


def test_a_trace_that_is_cut_short_anywhere_is_refused_with_the_place(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonstream, "PIECE_BYTES", 64)
    whole = json.dumps(document([STEP, OPERATOR], rank=1, world_size=2)).encode()
    for length in range(1, len(whole)):
        with pytest.raises(InputError, match=r"cut short: it ends at byte") as caught:
            traces_of(tmp_path / "trace.json", whole[:length])
        assert f"byte {length}" in str(caught.value)


def test_a_packed_trace_that_is_cut_short_is_refused(tmp_path):
    packed = gzip.compress(json.dumps(document([STEP, OPERATOR])).encode())
    for length in (3, 20, len(packed) // 2, len(packed) - 1):
        with pytest.raises(InputError, match="cut short"):
            list(read_traces(write(tmp_path / "trace", packed[:length])))


def test_what_follows_a_trace_costs_a_note(tmp_path):
    # GIVEN a whole trace, packed, with something behind it
    text = json.dumps(document([STEP, OPERATOR] * 400)).encode()
    packed = gzip.compress(text)
    ends = f"ignored what follows its compressed data, from byte {len(packed)}"
    for behind, note in (
        (b"\x00" * 5000, ends),
        (b"garbage", ends),
        (packed[:40], ends),
        (gzip.compress(b'{"traceEvents": []}'), f"ignored what follows the trace, from byte {len(text)}"),
    ):
        (trace,) = read_traces(write(tmp_path / "trace", packed + behind))
        assert (len(named_events(trace)), trace.notes) == (800, (note,))
    # AND one that was packed in parts is read as a whole
    (trace,) = read_traces(write(tmp_path / "trace", gzip.compress(text[:900]) + gzip.compress(text[900:])))
    assert (len(named_events(trace)), trace.notes) == (800, ())


def test_a_bare_list_of_events_is_read_even_if_it_is_not_closed(tmp_path):
    # GIVEN the format's other form, whose closing bracket may be missing
    bare = json.dumps([STEP, OPERATOR]).encode()
    for text in (bare, bare[:-1], bare[:-1] + b","):
        (trace,) = traces_of(tmp_path / "trace.json", text)
        # THEN the events are read; their clock has no date
        assert [name for name, *_ in named_events(trace)] == ["ProfilerStep#5", "aten::linear"]
        assert not trace.absolute


def half(sign, ts, **more):
    return {"ph": sign, "pid": 1, "tid": 1, "ts": ts, **more}


OUTER, INNER = half("B", 10, name="outer"), half("B", 20, name="inner")
OURS = half("B", 10, name="sftriage:data", cat="user_annotation")


@pytest.mark.parametrize(
    ("halves", "found", "n_left"),
    [
        # In no order of time, one of them without its other half.
        (
            [half("E", 40), OUTER, INNER, half("E", 30, name="inner"), half("B", 5, tid=2, name="lost")],
            [("inner", 20_000, 30_000, "1"), ("outer", 10_000, 40_000, "1")],
            1,
        ),
        # Inside is one of a category that is left out, whose end says no category: it ends nothing else.
        (
            [OURS, half("B", 12, name="flush", cat="overhead"), half("E", 15), half("E", 40)],
            [("sftriage:data", 10_000, 40_000, "1")],
            0,
        ),
    ],
)
def test_begin_and_end_events_are_put_together(tmp_path, halves, found, n_left):
    (trace,) = traces_of(tmp_path / "trace.json", halves)
    assert named_events(trace) == found
    left = (f"{n_left} begin or end events without a counterpart were left out",) if n_left else ()
    assert trace.notes == (*left, "its clock has no date")


@pytest.mark.parametrize(
    ("base", "ts", "absolute", "start_ns"),
    [
        (None, 1_694_128_201_426_674, True, 1_694_128_201_426_674_000),
        (None, 1_694_128_201_426_674.25, True, 1_694_128_201_426_674_250),
        (None, 123.5, False, 123_500),
        (EPOCH_NS, 4_421_463_211_726.559, True, EPOCH_NS + 4_421_463_211_726_559),
    ],
)
def test_clocks_with_and_without_a_base(tmp_path, base, ts, absolute, start_ns):
    about = {} if base is None else {"baseTimeNanoseconds": base}
    (trace,) = traces_of(tmp_path / "trace.json", {"traceEvents": [event("aten::x", ts, 1)], **about})
    assert (trace.absolute, events_of(trace).start_E.tolist()) == (absolute, [start_ns])


def test_names_of_categories_of_all_years_and_links(tmp_path):
    # GIVEN a kernel and its launch by their names of 2021 and of today, a device's annotation, and what is no work
    events = [
        event("k", 1, 1, "Kernel", correlation=5),
        event("k", 1, 1, "kernel", correlation=2**70),
        event("l", 1, 1, "Runtime", correlation=5),
        event("l", 1, 1, "cuda_driver"),
        event("ProfilerStep#1", 1, 1, "gpu_user_annotation"),
        event("PyTorch Profiler (0)", 0, 9, "Trace"),
        event("Activity Buffer Request", 1, 1, "overhead"),
        {"ph": "i", "name": "instant", "ts": 5},
    ]
    (trace,) = traces_of(tmp_path / "trace.json", document(events))
    # THEN the first four are read, and a link that is none is none
    assert events_of(trace).kind_E.tolist() == [KERNEL, KERNEL, RUNTIME, RUNTIME]
    assert events_of(trace).link_E.tolist() == [5, -1, 5, -1]


def test_what_is_odd_in_an_event_costs_that_event_at_most(tmp_path):
    # GIVEN events with bytes that are no UTF-8, a line break or a backslash in a string, numbers as strings, and NaN
    here = '"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 10'
    odd = [
        b'{"name": "caf\xe9", "ts": 1, "dur": 1, %s}',
        b'{"name": "two\nlines", "ts": 2, "dur": 1, %s}',
        b'{"name": "strings", "ts": "3", "dur": "1", %s}',
        b'{"name": "nan", "ts": 4, "dur": NaN, %s}',
        b'{"name": "list", "ts": 5, "dur": 1, "args": [1], %s}',
        b'{"name": "C:\\Users", "ts": 6, "dur": 1, %s}',
        b'{"name": "late", "ts": 1e300, "dur": 1, %s}',
        b'{"name": "back", "ts": 7, "dur": -1, %s}',
    ]
    odd = [one % here.encode() for one in odd]
    good = [json.dumps(event(f"good{n}", n, 1)).encode() for n in range(200)]
    (trace,) = traces_of(tmp_path / "trace.json", b'{"traceEvents": [' + b",\n".join([*odd, *good]) + b"]}")
    names = {name for name, *_ in named_events(trace)}
    assert {"caf�", "two\nlines", "strings", "list", "C:\\Users"} <= names
    assert {f"good{n}" for n in range(200)} <= names
    assert not names & {"nan", "late", "back"}
    assert "4 names repaired, the first at byte 17" in trace.notes
    assert "3 events at impossible times" in " ".join(trace.notes)


def test_an_archive_holds_several_traces_and_what_is_none_of_them_is_passed_over(tmp_path):
    # GIVEN a tar of two traces, a directory and a shadow file
    path, traces = tmp_path / "all.tar.gz", {r: json.dumps(document([STEP], r, 2)).encode() for r in (1, 0)}
    with tarfile.open(path, "w:gz") as archive:
        archive.add(tmp_path, "dir", recursive=False)
        for name, data in (("._a", b"x"), *traces.items()):
            member = tarfile.TarInfo(f"dir/{name}.json")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    found = list(read_traces(path))
    assert [(trace.source, trace.rank) for trace in found] == [(f"{path}!dir/1.json", 1), (f"{path}!dir/0.json", 0)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"hello", "not JSON: it begins with"),
        (b"\x80\x81\x82", "not JSON"),
        ('{"traceEvents": []}'.encode("utf-16"), "not UTF-8"),
        (b'{"a": 1}', "no traceEvents"),
        (b'{"a": 1, 2: 3}', "object keys must be strings"),
        (b'{"a" 1}', "expected ':'"),
        (b'{"traceEvents": [}]', "cut short"),
        (b'{"traceEvents": [}]}', "1 of 1 events"),
        (b'{"traceEvents": [1, 2, 3]}', "1 of 1 events are not JSON objects"),
        (b'{"traceEvents": [{"ph": "X", "name": \\q"}]}', "1 of 1 events"),
        (b'{"traceEvents": [{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}]}", "1 of 1 events"),
        (b"PAR1xxxx", "Parquet"),
        (b"(\xb5/\xfdxxxx", "zstd"),
        (b"\x1f\x8bgarbage that is not gzip", "trace"),
    ],
)
def test_what_is_no_trace_is_refused_in_words(tmp_path, content, message):
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(InputError, match="trace") as caught:
        list(read_traces(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_and_directories_are_refused(tmp_path):
    for path, message in ((tmp_path / "no", "No such file"), (tmp_path, "a directory")):
        with pytest.raises(InputError, match=message):
            list(read_traces(path))


PID = 7
PROCESS = PID << 24
THREAD = PROCESS | 70
SECRET = "AWS_SECRET=hunter2"
SESSION_NS = 1_790_857_026_000_000_000

TABLES = {
    "NVTX_EVENTS": "start, end, eventType, rangeId, text, globalTid, textId",
    "StringIds": "id INTEGER PRIMARY KEY, value",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, eventClass, globalTid, correlationId, nameId",
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "start, end, deviceId, streamId, correlationId, globalPid, shortName, demangledName"
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start, end, deviceId, streamId, correlationId, globalPid, copyKind",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs, utcTime",
    "TARGET_INFO_SYSTEM_ENV": "globalVid, name, value",
}

RANGES = [
    (1000, 9000, 59, 1, "ProfilerStep#3", THREAD, None),
    (1100, 4000, 59, 2, None, THREAD, 11),
    (4000, 8000, 60, 3, "forward", THREAD, None),
    (4100, 5000, 59, 4, "aten::linear, op_id = 12", THREAD, None),
    (5100, 5200, 59, 5, "aten::linear, seq = 3, sizes = [[1, 2]]", THREAD, None),
    (6000, None, 39, 6, "no range", THREAD, None),
    (6000, None, 59, 7, "never ended", THREAD, None),
    ("x", 7000, 59, 8, "no number", THREAD, None),
]


def export(path, *, drop=()):
    with sqlite3.connect(path) as database:
        for table in TABLES.keys() - set(drop):
            database.execute(f"CREATE TABLE {table} ({TABLES[table]})")

        def put(table, rows):
            if table not in drop:
                database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)

        put("NVTX_EVENTS", RANGES)
        put("StringIds", [(11, "enumerate(DataLoader)#x"), (12, "cudaLaunchKernel_v7000"), (14, SECRET)])
        if "StringIds" not in drop:
            database.execute("INSERT INTO StringIds VALUES (13, CAST(X'67656D6DFF' AS TEXT))")
        put("CUPTI_ACTIVITY_KIND_RUNTIME", [(4200, 4300, 0, THREAD, 5, 12), (4400, 4450, 0, THREAD, 6, 12)])
        put("CUPTI_ACTIVITY_KIND_KERNEL", [(9500, 9900, 0, 7, 5, PROCESS, 13, 14)])
        put("CUPTI_ACTIVITY_KIND_MEMCPY", [(9900, 9950, 0, 7, 6, PROCESS, 1)])
        put("TARGET_INFO_SESSION_START_TIME", [(SESSION_NS, "now")])
        put("TARGET_INFO_SYSTEM_ENV", [(1, "env", SECRET)])
    database.close()
    return path


def test_ranges_calls_and_kernels_come_to_the_same_stages(tmp_path):
    # GIVEN an export with texts inline and in StringIds, push-pop and start-end ranges
    path = export(tmp_path / "x.sqlite")
    content = path.read_bytes()
    (trace,) = read_traces(path)
    # (nothing is written into it, or beside it)
    assert ([*tmp_path.iterdir()], path.read_bytes()) == ([path], content)
    one = reduce_trace(trace)
    lasts_ns = dict(zip(one.schema.stages, one.durations_ns_NS[0].tolist(), strict=True))
    assert lasts_ns == {"data": 2900, "forward": 4000, "other": 1100}
    assert (one.steps.number_N.tolist(), one.steps.start_N.tolist()) == ([3], [SESSION_NS + 1000])
    # (of the strings, secrets are not read)
    assert not [name for name in trace.names if "hunter2" in name]
    assert "gemm�" in trace.names
    assert (trace.absolute, trace.rank, trace.source) == (True, None, f"{tmp_path / 'x.sqlite'}!pid {PID}")
    assert "skipped 1 malformed rows" in " ".join(one.notes)
    # AND what filled a stage is known by the names without their arguments
    findings = find(one, "forward")
    assert [(share.name, share.calls) for share in findings.shares] == [("aten::linear", 2), ("cudaLaunchKernel", 2)]
    assert (findings.suspect.kernels, findings.suspect.launches) == (1, 2)
    assert findings.suspect.device_s == pytest.approx(450e-9)


@pytest.mark.parametrize(
    "drop", [[one for one in TABLES if "CUPTI" in one], ["TARGET_INFO_SESSION_START_TIME"], ["StringIds"]]
)
def test_tables_that_are_not_there(tmp_path, drop):
    (trace,) = read_traces(export(tmp_path / "x.sqlite", drop=drop))
    one = reduce_trace(trace)
    assert one.durations_ns_NS.sum() == 8000
    assert trace.absolute == ("TARGET_INFO_SESSION_START_TIME" not in drop)


def test_without_ranges_there_are_no_steps(tmp_path):
    (trace,) = read_traces(export(tmp_path / "x.sqlite", drop=("NVTX_EVENTS",)))
    with pytest.raises(InputError, match="no steps in it"):
        reduce_trace(trace)


def test_what_is_no_export_is_refused(tmp_path):
    other, damaged = tmp_path / "other.db", tmp_path / "damaged.sqlite"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE people (name)")
    database.close()
    whole = export(tmp_path / "x.sqlite").read_bytes()
    damaged.write_bytes(whole[:5000] + b"\xa5" * (len(whole) - 5000))
    for path, message in ((other, "not an Nsight export"), (damaged, "not a usable SQLite export")):
        with pytest.raises(InputError, match=message):
            [reduce_trace(trace) for trace in read_traces(path)]
