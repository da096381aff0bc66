"""What is published reaches every sink in order, metrics go out whole, and what goes wrong with one stays with it."""

import logging
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, Gauge
from rich.console import Console

from sftriage.model import events
from sftriage.model.captures import ENDED, CaptureResult
from sftriage.model.windows import ReadCounts
from sftriage.runs.directory import RunInfo, create
from sftriage.runtime.copies import RunUploads
from sftriage.sinks import metrics
from sftriage.sinks.metering import Metering
from sftriage.sinks.metrics import Metrics, TextFile
from sftriage.sinks.spans import SpanSink
from sftriage.sinks.stream import Sink, Stream
from sftriage.sinks.terminal import Progress, Reporter
from sftriage.sinks.webhooks import Webhooks
from sftriage.web.serving import Access, metrics_server

from .test_metrics import everything, judged, request, window

DEADLINE_S = 20.0


def event(number: int) -> events.TakenOver:
    return events.TakenOver(float(number), "node-1", number)


class Kept(Sink):
    def __init__(self, name="kept"):
        self.name, self.took, self.calls = name, [], []
        self._changed = threading.Condition()

    def start(self):
        self.calls.append("start")

    def take(self, event):
        with self._changed:
            self.took.append(event.pid)
            self._changed.notify_all()

    def close(self):
        self.calls.append("close")

    def wait_for(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.took) >= count, DEADLINE_S), self.took


class Hanging(Kept):
    """Hangs in its first event until it is let go."""

    def __init__(self, name="hanging"):
        super().__init__(name)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def take(self, event):
        self.inside.set()
        assert self.go_on.wait(DEADLINE_S)
        super().take(event)


@pytest.fixture(autouse=True)
def all_of_the_log(caplog):
    caplog.set_level(logging.DEBUG, "sftriage")


def logged(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def test_nothing_runs_before_the_start_and_earlier_events_are_delivered_after_it():
    before = threading.active_count()
    sink = Kept()
    stream = Stream([sink])
    for number in range(3):
        stream.publish(event(number))
    # (closing what never began starts nothing either)
    stream.close(DEADLINE_S)
    assert (threading.active_count(), sink.took, sink.calls) == (before, [], [])
    # WHEN it starts THEN they are delivered, between the sink's start and its close
    stream.start()
    stream.close(DEADLINE_S)
    assert (sink.took, sink.calls) == ([0, 1, 2], ["start", "close"])
    # AND events after the end are dropped
    stream.publish(event(3))
    stream.close(DEADLINE_S)
    assert (sink.took, sink.calls) == ([0, 1, 2], ["start", "close"])


def test_a_sink_added_after_the_start_is_refused():
    stream = Stream()
    stream.start()
    with pytest.raises(RuntimeError, match="kept was added after the start"):
        stream.add(Kept())


@pytest.mark.parametrize("method", ["start", "take", "close"])
def test_a_failing_sink_is_logged_once_and_continues(method, caplog, monkeypatch):
    failing, other = Kept("failing"), Kept()
    works = getattr(failing, method)

    def fail(*arguments):
        works(*arguments)
        raise OSError("full")

    monkeypatch.setattr(failing, method, fail)
    stream = Stream([failing, other])
    stream.start()
    for number in range(7):
        stream.publish(event(number))
    stream.close(DEADLINE_S)
    # THEN both sinks got every event
    assert failing.took == other.took == list(range(7))
    assert failing.calls == ["start", "close"]
    # AND one line says so; the traceback is for debugging
    assert logged(caplog) == ["failing failed, and continues: OSError: full"]
    (first, *_) = [record for record in caplog.records if record.exc_info]
    assert first.levelno == logging.DEBUG


def test_a_hanging_sink_delays_no_other_and_is_abandoned(caplog):
    hanging, other = Hanging(), Kept()
    stream = Stream([hanging, other], capacity=4)
    stream.start()
    stream.publish(event(0))
    assert hanging.inside.wait(DEADLINE_S)
    # WHEN more happens than can wait for it
    for number in range(1, 31):
        stream.publish(event(number))
        other.wait_for(number + 1)
    # THEN the other has every event, and one line says that this one has not
    assert other.took == list(range(31))
    assert logged(caplog) == ["hanging cannot keep up: dropping its oldest events"]
    # AND the end does not wait for it
    stream.close(0.05)
    assert logged(caplog)[1:] == ["hanging hangs: gave up on it, with 30 events undelivered"]
    assert other.calls == ["start", "close"]
    hanging.go_on.set()


def test_a_slow_sink_gets_the_newest_events_and_the_loss_is_logged(caplog):
    slow = Hanging("slow")
    stream = Stream([slow], capacity=3)
    stream.start()
    stream.publish(event(0))
    assert slow.inside.wait(DEADLINE_S)
    for number in range(1, 9):
        stream.publish(event(number))
    # WHEN it continues THEN it gets the queued events, and later ones
    slow.go_on.set()
    slow.wait_for(4)
    stream.close(DEADLINE_S)
    assert slow.took == [0, 6, 7, 8]
    # AND one line says that it keeps up again, and what it missed
    assert logged(caplog) == [
        "slow cannot keep up: dropping its oldest events",
        "slow keeps up again; it missed 5 events",
    ]


def test_events_from_several_threads_keep_each_threads_order():
    sinks = [Kept("a"), Kept("b")]
    stream = Stream(sinks, capacity=1000)
    stream.start()
    threads = [
        threading.Thread(target=lambda start=start: [stream.publish(event(start + n)) for n in range(100)])
        for start in (0, 1000)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    stream.close(DEADLINE_S)
    for sink in sinks:
        assert [one for one in sink.took if one < 1000] == list(range(100))
        assert [one for one in sink.took if one >= 1000] == list(range(1000, 1100))


@given(st.lists(st.integers(0, 1000), max_size=50), st.integers(0, 50), st.integers(1, 60))
def test_order_is_kept_and_only_the_oldest_events_before_the_start_are_lost(numbers, begin, capacity):
    sink = Kept()
    stream = Stream([sink], capacity=capacity)
    for number in numbers[:begin]:
        stream.publish(event(number))
    stream.start()
    waiting = numbers[:begin][-capacity:]
    sink.wait_for(len(waiting))
    for count, number in enumerate(numbers[begin:], 1):
        stream.publish(event(number))
        sink.wait_for(len(waiting) + count)
    stream.close(DEADLINE_S)
    assert sink.took == waiting + numbers[begin:]


EVERYTHING = [
    *(events.Resumed([]), events.TakenOver(1.0, "node-1", 1, 120, 1), events.WindowObserved(window(), learnt=True)),
    *everything(),
    judged("stalled", outcome="hold", reason="standstill", reasons=["in_sync"]),
    events.EvidenceGathered(1.0, 0, 9),
    events.JobPaused(1.0, 0, 9, 9, 55.0, "backward", "in_sync"),
    events.DifferencesFound(1.0, 0, "rank 2", (2,), (0, 1), (events.Difference("num_workers", 1, 4, 2),)),
    events.PolicyChanged(1.0, "changed", ()),
    events.FollowUpDecided("a", judged(requests=[request("a")]).decision),
    *(events.CaptureChanged(1.0, CaptureResult("a", 0, state)) for state in ("running", *sorted(ENDED))),
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
        sink.finish(lambda line: None)
    assert [record.getMessage() for record in caplog.records] == []


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("something", "Something.", registry=registry).set(7)
    return registry


def test_the_file_is_always_complete_and_ends_with_the_final_state(registry, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "WRITE_EVERY_S", 0.01)
    path = tmp_path / "job.prom"
    value = registry._names_to_collectors["something"]
    file = TextFile(path, registry)
    file.start()
    end = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < end
    # WHEN it is read again and again while it is written
    for number in range(200):
        value.set(number)
        lines = path.read_text().splitlines()
        assert lines[-1].startswith("something ")
        assert len(lines) == 3
    value.set(999)
    file.close()
    # THEN it has the last values, and nothing else is left in the directory
    assert path.read_text().splitlines()[-1] == "something 999.0"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_disk_is_logged_once_and_retried(registry, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(metrics, "WRITE_EVERY_S", 0.01)
    place = tmp_path / "place"
    place.mkdir()
    file = TextFile(place / "job.prom", registry)
    place.rename(tmp_path / "away")
    with caplog.at_level(logging.WARNING, "sftriage"):
        file.start()
        end = time.monotonic() + DEADLINE_S
        while not any(record.name == "sftriage" for record in caplog.records):
            assert time.monotonic() < end
        (tmp_path / "away").rename(place)
        while not (place / "job.prom").exists():
            assert time.monotonic() < end
        file.close()
    # (an exporter of an earlier test may log beside it)
    assert [record.getMessage() for record in caplog.records if record.name == "sftriage"] == [
        f"metrics: {place / 'job.prom'} cannot be written: No such file or directory; trying again"
    ]


def test_without_options_there_are_no_sinks():
    metering = Metering()
    assert (metering.sinks("job", "run-1", 1.0), metering.url) == ([], None)


def test_configured_sinks_publish_from_the_start_of_a_run_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    # (what is left of it is over before another test looks at the log)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    before = set(threading.enumerate())
    access = Access.to("127.0.0.1", None, "give one")
    metering = Metering(
        lambda registry: metrics_server(registry, "127.0.0.1", 0, access), tmp_path / "x.prom", otel=True
    )
    stream = Stream(metering.sinks("job", "run-1", 1.0))
    # GIVEN nothing but a port that is bound
    assert set(threading.enumerate()) <= before
    # WHEN the run is active THEN the server has its metrics
    stream.start()
    stream.publish(events.JobObserved(2.0, ReadCounts(25), None, 0.0, 0.0))
    end = time.monotonic() + DEADLINE_S
    while (
        'sftriage_telemetry_steps_total{job_name="job"} 25.0'
        not in urllib.request.urlopen(metering.url).read().decode()
    ):
        assert time.monotonic() < end
    # AND how it ended is in the file
    stream.close(DEADLINE_S)
    assert 'sftriage_run_active{job_name="job"} 0.0' in (tmp_path / "x.prom").read_text()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(metering.url)


def test_the_jobs_multiprocess_directory_is_left_alone(tmp_path):
    # GIVEN a training job whose own metrics are gathered from many processes
    code = (
        "from sftriage.sinks.metering import Metering\n"
        "import os, sys\n"
        "Metering(file=__import__('pathlib').Path(sys.argv[1]))\n"
        "from sftriage.sinks.metrics import Metrics\n"
        "Metrics('j', 'r', 0.0)\n"
        "print(os.environ['PROMETHEUS_MULTIPROC_DIR'])\n"
    )
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(theirs)}
    out = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "x.prom"], env=environment, capture_output=True, text=True, timeout=60
    )
    # THEN the job still has its directory, and ours are not in it
    assert out.stdout.strip() == str(theirs), out.stderr
    assert list(theirs.iterdir()) == []
