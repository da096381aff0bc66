"""Whatever happens to a job, every sink takes it: none fails of an event that is not about it."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rich.console import Console

from sftriage.model.captures import ENDED, CaptureRequest, CaptureResult, Decision, ManualRequest
from sftriage.model.events import (
    CaptureChanged,
    CostMeasured,
    EvidenceGathered,
    FollowUpDecided,
    JobPaused,
    JobSeen,
    ManualRequestDecided,
    PolicyChanged,
    Received,
    Resumed,
    TakenOver,
    WindowJudged,
    WindowSeen,
)
from sftriage.model.verdicts import Verdict
from sftriage.model.windows import StageSchema, Window
from sftriage.runs.directory import RunInfo, create
from sftriage.runtime.copies import RunUploads
from sftriage.sinks.metrics import Metrics
from sftriage.sinks.spans import SpanSink
from sftriage.sinks.stream import Stream
from sftriage.sinks.terminal import Progress, Reporter
from sftriage.sinks.webhooks import Webhooks

DECISION = Decision(
    10.0, 0, 9, "asked", "capture", "asked", requests=(CaptureRequest("a", 0, "torch", 5, 1, 60.0, 2**29),)
)
HEALTHY = Verdict(0, 9, "healthy", (), (), 0.1, {"data": 0.1}, {"data": None}, {})
STALLED = Verdict(9, 9, "stalled", ("in_sync",), (), 60.0, {}, {}, {})
WINDOW = Window(StageSchema(("data", "backward", "other"), ("backward",)), 0, np.full((10, 2, 3), 0.01))
EVERYTHING = [
    Resumed([]),
    TakenOver(1.0, "node-1", 1, 120, 1),
    WindowSeen(WINDOW, learnt=True),
    WindowSeen(WINDOW),
    CostMeasured(1.0, 0, 1, 5, 0.1, 0.1),
    CostMeasured(1.0, 0, 1, 5, None, None),
    WindowJudged(HEALTHY, Decision(1.0, 0, 9, "healthy", "ignore", "healthy")),
    WindowJudged(STALLED, Decision(1.0, 9, 9, "stalled", "hold", "standstill", parameters={"reasons": ("in_sync",)})),
    EvidenceGathered(1.0, 0, 9),
    JobPaused(1.0, 0, 9, 9, 55.0, "backward", "in_sync"),
    PolicyChanged(1.0, "changed", ()),
    ManualRequestDecided(ManualRequest("a", (0,), "me", "why"), DECISION),
    FollowUpDecided("a", DECISION),
    *(CaptureChanged(1.0, CaptureResult("a", 0, state)) for state in ("accepted", "armed", "running", *sorted(ENDED))),
    JobSeen(1.0, Received(), None, 0.0, 0.0),
]


def sinks_of(tmp_path):
    info = RunInfo("run-1", "job", "2027-01-15T08:00:00+00:00", ("x",), "default", "cd" * 32, "/nowhere")
    info = replace(info, store=(tmp_path / "store").as_uri())
    directory = create(tmp_path / "run", info, "")
    console = Console(stderr=True)
    return {
        "metrics": lambda: Metrics("job", "run-1", 0.0, per_rank=True),
        "spans": lambda: SpanSink(lambda: SimpleSpanProcessor(InMemorySpanExporter()), "job", "run-1", 0.0),
        "reporter": lambda: Reporter(console),
        "progress": lambda: Progress(console, 10),
        "webhooks": lambda: Webhooks("job", "run-1", dict),
        "uploads": lambda: RunUploads(directory, info),
    }


@pytest.mark.parametrize("name", ["metrics", "spans", "reporter", "progress", "webhooks", "uploads"])
def test_a_sink_takes_everything(name, tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "sftriage")
    sink = sinks_of(tmp_path)[name]()
    stream = Stream([sink])
    stream.start()
    for one in EVERYTHING:
        stream.publish(one)
    stream.close(30.0)
    if name == "uploads":
        sink.finish(lambda said: None)
    assert [record.getMessage() for record in caplog.records] == []
