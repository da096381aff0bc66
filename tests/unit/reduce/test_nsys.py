"""Nsight exports: tables that may not be there, names in two places, and secrets that are not read."""

import sqlite3

import pytest

from sftriage.errors import InputError
from sftriage.reduce.inside import find
from sftriage.reduce.reading import read_traces
from sftriage.reduce.stages import reduce_trace

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
    # THEN step and stages are those of the ranges, at the session's time
    lasts_ns = dict(zip(one.schema.stages, one.durations_ns_NS[0].tolist(), strict=True))
    assert lasts_ns == {"data": 2900, "forward": 4000, "other": 1100}
    assert (one.steps.number_N.tolist(), one.steps.start_N.tolist()) == ([3], [SESSION_NS + 1000])
    # (of the strings, secrets are not read)
    assert not [name for name in trace.names if "hunter2" in name]
    assert "gemm�" in trace.names
    assert (trace.absolute, trace.rank, trace.source) == (True, None, f"{tmp_path / 'x.sqlite'}!pid {PID}")
    assert "1 rows were not as they should be" in " ".join(one.notes)
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
    for path, said in ((other, "no Nsight export"), (damaged, "not a usable SQLite export")):
        with pytest.raises(InputError, match=said):
            [reduce_trace(trace) for trace in read_traces(path)]
