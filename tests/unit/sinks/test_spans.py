"""What goes out as spans: to a real receiver of OTLP over HTTP, and to one that is away."""

import logging
import socket
import threading

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from sftriage.model.captures import CaptureResult, Decision, ManualRequest
from sftriage.model.events import (
    CaptureChanged,
    CauseFound,
    ManualRequestDecided,
    Span,
    WindowJudged,
    WindowObserved,
)
from sftriage.model.verdicts import Suspect, Verdict
from sftriage.model.windows import Window
from sftriage.sinks.spans import LoggedExporter, SpanSink
from tests.otlp import Receiver

from .test_metrics import request, window

SECOND_NS = 1_000_000_000
T0_S = 1_800_000_000.0
T0_NS = 1_800_000_000 * SECOND_NS


@pytest.fixture
def receiver():
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def make(receiver, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setattr("sftriage.sinks.spans.GRACE_S", 30.0)
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    made = []

    def make() -> SpanSink:
        spans = SpanSink(processor, "resnet", "run-1", T0_S)
        spans.start()
        made.append(spans)
        return spans

    yield make
    for one in made:
        one.close()


def processor() -> BatchSpanProcessor:
    return BatchSpanProcessor(LoggedExporter(OTLPSpanExporter()))


def judged(label="suspect", first_step=0, requests=()) -> WindowJudged:
    found = Suspect("rank", (2,), "data", 0.02, 0.25, 1.0, rank=2)
    last_step = first_step + 9
    verdict = Verdict(first_step, last_step, label, (), (found,), 0.1, {"data": 0.06, "backward": 0.04}, {}, {})
    outcome = "capture" if requests else "ignore"
    steps = (T0_S + 1, first_step, last_step)
    return WindowJudged(verdict, Decision(*steps, label, outcome, "rule_matched", "any", requests=tuple(requests)))


def wall(first: int, last: int) -> Span:
    """A step takes 100 ms."""
    return Span(T0_NS + first * SECOND_NS // 10, T0_NS + (last + 1) * SECOND_NS // 10)


def observed(window: Window) -> WindowObserved:
    return WindowObserved(window, {step: wall(step, step) for step in range(window.first_step, window.last_step + 1)})


@pytest.mark.parametrize(
    ("variables", "service"),
    [
        ({}, "sftriage"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=x,a=b"}, "x"),
    ],
)
def test_the_environment_names_the_service(make, receiver, monkeypatch, variables, service):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    make().close()  # (the sink reads the environment when it is made)
    (resource,) = receiver.resources
    assert resource["service.name"] == service
    assert (resource["sftriage.job"], resource["sftriage.run"]) == ("resnet", "run-1")


def test_failed_and_unended_captures_are_errors(make, receiver):
    spans = make()
    decision = judged(requests=[request("a-1"), request("a-2")]).decision
    spans.take(ManualRequestDecided(ManualRequest("a", (2,), "me", "why"), decision))
    spans.take(CaptureChanged(T0_S + 1, CaptureResult("a-1", 2, "refused", "torch is not imported")))
    # (results of unknown captures are ignored)
    spans.take(CaptureChanged(T0_S + 1, CaptureResult("unknown", 2, "stored")))
    spans.take(CauseFound(T0_S + 4, "unknown", 2, "sleep", True, "Rank 2 sleeps."))
    spans.close()
    assert set(receiver.by_name()) == {"run", "capture"}
    status_of = {receiver.attributes(s)["sftriage.capture.id"]: s.status for s in receiver.by_name()["capture"]}
    assert {name: status.code for name, status in status_of.items()} == {"a-1": 2, "a-2": 2}
    assert status_of["a-1"].message == "torch is not imported"


def test_a_stall_is_a_span_of_its_own(make, receiver):
    spans = make()
    spans.take(observed(window(n_steps=10)))
    spans.take(judged("stalled"))
    spans.close()
    assert set(receiver.by_name()) == {"run", "stall"}
    # AND it lasts until it is decided
    (stall,) = receiver.by_name()["stall"]
    assert (stall.start_time_unix_nano, stall.end_time_unix_nano) == (T0_NS, T0_NS + SECOND_NS)


def test_a_cause_that_is_found_before_its_capture_is_stored_is_below_it(make, receiver):
    # GIVEN the evidence of a hang, which is read before it is written
    spans = make()
    spans.take(judged("stalled", requests=[request("c-1")]))
    spans.take(CauseFound(T0_S + 2, "c-1", 2, "absent", True, "Rank 2 waits for a lock."))
    spans.take(CaptureChanged(T0_S + 3, CaptureResult("c-1", 2, "stored")))
    spans.close()
    (cause,), (capture,) = receiver.by_name()["cause"], receiver.by_name()["capture"]
    assert cause.parent_span_id == capture.span_id
    assert receiver.attributes(cause)["sftriage.cause.code"] == "absent"


def test_a_silent_receiver_delays_nothing(monkeypatch):
    # GIVEN a receiver that accepts the connection and never answers
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "120")
        monkeypatch.setattr("sftriage.sinks.spans.GRACE_S", 0.2)
        spans = SpanSink(processor, "j", "r", T0_S)
        spans.start()
        spans.take(judged("healthy"))
        # THEN the end has come while the spans are still being handed over
        spans.close()
        assert "sftriage-spans-end" in {thread.name for thread in threading.enumerate()}


def test_a_recovered_receiver_is_logged(receiver, monkeypatch, caplog):
    class Switch:
        def __init__(self, exporter):
            self.exporter, self.away = exporter, True

        def export(self, spans):
            if self.away:
                raise ConnectionError("away")
            return self.exporter.export(spans)

        def shutdown(self):
            self.exporter.shutdown()

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    switch = Switch(OTLPSpanExporter())
    exporter = LoggedExporter(switch)
    with caplog.at_level(logging.WARNING, "sftriage"):
        for away in (True, True, False, False):
            switch.away = away
            exporter.export([])
    exporter.shutdown()
    # (spans of another test may still be failing in their own thread)
    own = [record for record in caplog.records if record.threadName == threading.current_thread().name]
    assert [record.getMessage().partition(";")[0] for record in own] == [
        "OpenTelemetry: cannot deliver spans, they are lost",
        "OpenTelemetry: spans are delivered again",
    ]
