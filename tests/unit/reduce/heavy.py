"""Heavy traces made by hand, as Kineto writes them: one process, times in microseconds."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sftriage.reduce.events import EventQuery, Events, Trace
from sftriage.reduce.reading import read_traces
from sftriage.reduce.stages import Reduction, reduce_trace

EPOCH_NS = 1_790_857_026_000_000_000
MAIN, ENGINE, GLOO = 10, 11, 12


def event(
    name: str, ts: float, dur: float, cat: str | None = "cpu_op", tid: Any = MAIN, pid: Any = 1, **args: Any
) -> dict[str, Any]:
    made = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}
    if cat is not None:
        made["cat"] = cat
    if args:
        made["args"] = args
    return made


def mark(name: str, ts: float, dur: float, **where: Any) -> dict[str, Any]:
    return event(name, ts, dur, "user_annotation", **where)


def document(events: list[dict[str, Any]], rank: int | None = None, world_size: int | None = None, **more: Any) -> dict:
    about: dict[str, Any] = {"schemaVersion": 1, "baseTimeNanoseconds": EPOCH_NS}
    if rank is not None:
        about["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": world_size}
    return {**about, **more, "traceEvents": events}


def write(path: Path, what: Any) -> Path:
    text = what if isinstance(what, bytes) else json.dumps(what).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def traces_of(path: Path, what: Any) -> list[Trace]:
    return list(read_traces(write(path, what)))


def events_of(trace: Trace) -> Events:
    return Events.joined(list(trace.parts(EventQuery())))


def named_events(trace: Trace) -> list[tuple[str, int, int, str]]:
    """What was read, in order: name, start, end and thread."""
    events = events_of(trace)
    columns = (events.name_E, events.start_E, events.end_E, events.track_E)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return sorted((trace.names[name], start, end, trace.tracks[track][1]) for name, start, end, track in rows)


def reduced(path: Path, events: list[dict[str, Any]], names: Any = None, **about: Any) -> Reduction:
    (trace,) = traces_of(path, document(events, **about))
    return reduce_trace(trace, names)


def job_events(
    rank: int, slow: int | None = None, late_us: float = 20_000, steps: int = 8, first: int = 100, stage: str = "data"
) -> list[dict[str, Any]]:
    """A rank of a calm job with our marks: one rank may be late in a stage, and the others wait for it in backward."""
    events, now = [], 1000.0
    for number in range(first, first + steps):
        late = {name: late_us if rank == slow and name == stage else 0.0 for name in ("data", "forward")}
        jitter = (7 * rank + 3 * number) % 5 * 20.0
        data, forward = 5_000 + jitter + late["data"], 10_000 + late["forward"]
        waits = 0.0 if slow is None else late_us - sum(late.values())
        backward, optimizer = 15_000 - jitter + waits, 2_000
        begin = now
        events.append(mark("sftriage:data", now, data))
        events.append(event("aten::stack", now + 100, 400))
        now += data
        events.append(mark("sftriage:forward", now, forward))
        events.append(event("aten::linear", now + 50, 9_000))
        now += forward
        events.append(mark("sftriage:backward", now, backward))
        events.append(event("autograd::engine::evaluate_function: AddmmBackward0", now + 10, 9_000))
        events.append(mark("gloo:all_reduce", now + 8_000, backward - 8_100, tid=GLOO))
        now += backward
        events.append(mark("sftriage:optimizer", now, optimizer))
        now += optimizer
        events.append(mark(f"ProfilerStep#{number}", begin, now + 50 - begin))
        now += 100
    return events


def recurring_events(first: int = 0, slow: Sequence[int] = (1, 4)) -> list[dict[str, Any]]:
    """Six steps with our marks; in the slow ones of them an operator in data takes 1000 us and not 100."""
    events = []
    for number in range(6):
        begin, late_us = 2000 * number, 900 * (number in slow)
        events.append(mark(f"ProfilerStep#{first + number}", begin, 1900))
        events.append(mark("sftriage:data", begin, 300 + late_us))
        events.append(event("aten::stack", begin, 200))
        events.append(event("aten::slow", begin + 200, 100 + late_us))
    return events
